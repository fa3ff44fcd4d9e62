// What is recorded by stream capture, for the other sources of the ghost machine.
#pragma once
#include <cuda_runtime_api.h>

#include <functional>
#include <string>

// Keep a call on a stream that is being captured instead of logging it; false: it is to be logged and done now.
bool ghost_keep(const char* kind, const void* stream, const std::string& detail, const std::string& memory);

// Let the call that was kept last on a stream do this at each replay; false: the stream is not captured, do it now.
bool ghost_later(const void* stream, std::function<void()> action);

// Whether a stream is being captured.
bool ghost_captured(const void* stream);

// Do this in the order of a stream: now, or at each replay of what captures it.
void ghost_do(const void* stream, std::function<void()> action);

// An event was recorded on a stream.
void ghost_capture_record(const void* event, const void* stream);

// A stream waits for an event, or the host asks for an event, a stream or the device (nullptr), or makes a call that CUDA calls unsafe during a capture
// (allocations, synchronous copies, questions): what CUDA answers. All but success end the capture and are logged.
cudaError_t ghost_capture_await(const void* stream, const void* event);
cudaError_t ghost_ask_event(const void* event);
cudaError_t ghost_ask_stream(const void* stream);
cudaError_t ghost_ask_device();
cudaError_t ghost_unsafe(const char* call);
