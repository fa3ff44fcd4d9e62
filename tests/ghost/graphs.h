// What is recorded by stream capture, for the other sources of the ghost machine.
#pragma once
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

// An event was recorded on a stream, a stream waits for one, the host asks for one.
void ghost_capture_record(const void* event, const void* stream);
void ghost_capture_await(const void* stream, const void* event);
void ghost_capture_ask(const void* event);
