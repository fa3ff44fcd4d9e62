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

void ghost_event(const char* kind, const void* stream, const char* format, ...) {
  const int file = log_file();
  if (file < 0) return;
  char line[1024];
  int used = snprintf(line, sizeof line - 1, "%s\t%zx\t", kind, reinterpret_cast<size_t>(stream));
  va_list rest;
  va_start(rest, format);
  used += vsnprintf(line + used, sizeof line - 1 - used, format, rest);
  va_end(rest);
  if (used > static_cast<int>(sizeof line) - 2) used = sizeof line - 2;
  line[used++] = '\n';
  if (write(file, line, used) != used) abort();
}

void* ghost_handle() {
  static std::atomic<uintptr_t> next{0x10000};
  return reinterpret_cast<void*>(next.fetch_add(16));
}

long ghost_setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value ? atol(value) : otherwise;
}
