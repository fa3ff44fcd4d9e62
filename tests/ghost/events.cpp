// One unbuffered write per event: processes that leave by _exit or a signal lose nothing.
#include "events.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "graphs.h"

// The file of this process; a forked child opens its own.
static int log_file() {
  static std::atomic<int> file{-1};
  static std::atomic<pid_t> owner{0};
  const char* prefix = getenv("GHOST_LOG");
  if (!prefix) return -1;
  const pid_t me = getpid();
  if (owner.exchange(me) != me) {
    const std::string path = std::string(prefix) + "." + std::to_string(me);
    file = open(path.c_str(), O_CREAT | O_APPEND | O_WRONLY | O_CLOEXEC, 0644);
  }
  return file;
}

static void append(const char* kind, const void* stream, const std::string& memory, const char* format, va_list rest) {
  char detail[900];
  vsnprintf(detail, sizeof detail, format, rest);
  if (ghost_keep(kind, stream, detail, memory)) return;
  const int file = log_file();
  if (file < 0) return;
  char head[80];
  snprintf(head, sizeof head, "%s\t%zx\t", kind, reinterpret_cast<size_t>(stream));
  const std::string line = std::string(head) + detail + (memory.empty() ? "" : "\t" + memory) + "\n";
  if (write(file, line.data(), line.size()) != static_cast<ssize_t>(line.size())) abort();
}

void ghost_event(const char* kind, const void* stream, const char* format, ...) {
  va_list rest;
  va_start(rest, format);
  append(kind, stream, "", format, rest);
  va_end(rest);
}

void ghost_touch(const char* kind, const void* stream, const std::string& memory, const char* format, ...) {
  va_list rest;
  va_start(rest, format);
  append(kind, stream, memory, format, rest);
  va_end(rest);
}

GhostMemory& GhostMemory::add(char how, const void* address, size_t bytes) {
  if (!address || ghost_place(address) == Place::pageable) return *this;
  char one[64];
  snprintf(one, sizeof one, "%s%c%zx:%zu", text_.empty() ? "" : " ", how, reinterpret_cast<size_t>(address), bytes);
  text_ += one;
  return *this;
}

extern "C" void ghost_mark(const char* text) { ghost_event("mark", nullptr, "%s", text); }

void* ghost_handle() {
  static std::atomic<uintptr_t> next{0x10000};
  return reinterpret_cast<void*>(next.fetch_add(16));
}

long ghost_setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value ? atol(value) : otherwise;
}
