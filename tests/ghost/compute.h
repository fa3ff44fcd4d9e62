// What turns the ghost machine from one that logs into one that computes: GHOST_COMPUTE=1.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

// Whether products, collectives and kernels leave their results in memory.
bool ghost_computes();

// Say what cannot be computed and end the process: a number that nobody made must not be used.
[[noreturn]] __attribute__((format(printf, 1, 2))) void ghost_stop(const char* format, ...);

// A launch happened. Runs the kernel where one like it was given to ghost_kernel, at each replay if the stream is captured;
// stops where nobody answers for it.
void ghost_run(const void* kernel, const char* name, dim3 grid, dim3 block, void** arguments, const void* stream);

// Results of receives that were started on a stream arrive late: when something waits for the stream, or follows on it.
void ghost_finish(const void* stream);

extern "C" {

// How a kernel runs on the host, by the address that its launches give.
using GhostKernel = void (*)(const void* kernel, unsigned blocks, unsigned threads, void** arguments);
// Copies of a launch's arguments, which live no longer than the launch; they stay.
using GhostArguments = void** (*)(void** arguments);
void ghost_kernel(const void* kernel, GhostKernel run, GhostArguments keep);

// Between the two the calling thread answers by itself for what it launches (answers.py). ghost_answer_end returns how
// many kernels and unanswered functions of the libraries were called between; products are computed and not among them.
void ghost_answer_begin();
long ghost_answer_end();
}
