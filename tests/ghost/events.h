// The log of what a process asks of its GPU, and what is known of an address. Shared by the sources of the ghost machine.
#pragma once
#include <cstddef>

// Append "KIND<tab>STREAM<tab>DETAIL" to $GHOST_LOG.PID, in the order of the calls; nothing without GHOST_LOG.
__attribute__((format(printf, 3, 4))) void ghost_event(const char* kind, const void* stream, const char* format, ...);

enum class Place { pageable, pinned, device };

// Where an address lies.
Place ghost_place(const void* address);

// A handle that no other call returns.
void* ghost_handle();

// The value of an environment variable as a number.
long ghost_setting(const char* name, long otherwise);
