// The log of what a process asks of its GPU, and what is known of an address. Shared by the sources of the ghost machine.
#pragma once
#include <cstddef>
#include <string>

// Append "KIND<tab>STREAM<tab>DETAIL" to $GHOST_LOG.PID, in the order of the calls; nothing without GHOST_LOG.
__attribute__((format(printf, 3, 4))) void ghost_event(const char* kind, const void* stream, const char* format, ...);

// The same with a fourth column: the memory that the call touches, as written by GhostMemory.
__attribute__((format(printf, 4, 5))) void ghost_touch(const char* kind, const void* stream, const std::string& memory,
                                                       const char* format, ...);

// "rADDRESS:BYTES wADDRESS:BYTES …": what is read and written, in hexadecimal and decimal; 0 bytes: from this address on,
// nobody knows how far. Pageable memory is left out: the runtime is done with it when a call returns.
class GhostMemory {
 public:
  GhostMemory& reads(const void* address, size_t bytes = 0) { return add('r', address, bytes); }
  GhostMemory& writes(const void* address, size_t bytes = 0) { return add('w', address, bytes); }
  const std::string& text() const { return text_; }

 private:
  GhostMemory& add(char how, const void* address, size_t bytes);
  std::string text_;
};

enum class Place { pageable, pinned, device };

// Where an address lies.
Place ghost_place(const void* address);

// A handle that no other call returns.
void* ghost_handle();

// The value of an environment variable as a number.
long ghost_setting(const char* name, long otherwise);

// A function of cuBLAS or NCCL that has no answer here was called (compute.cpp).
void ghost_unanswered(const char* name);
