// Who computes what a launch stands for: the kernels that were given here, or the thread that launches them.
#include "compute.h"

#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "events.h"
#include "graphs.h"

namespace {

std::mutex guard;
std::mutex emulator;  // runs one kernel at a time: it keeps a block's state in one place
struct Given {
  GhostKernel run;
  GhostArguments keep;
};

std::unordered_map<const void*, Given> kernels;
thread_local int answering = 0;
thread_local long launched = 0;

// torch's fill of contiguous floats, which the binding asks for where no Python mode sees it: count, value, address.
bool fill(const char* name, void** arguments, const void* stream) {
  if (!strstr(name, "vectorized_elementwise_kernel") || !strstr(name, "FillFunctorIfE")) return false;
  const int count = *static_cast<int*>(arguments[0]);
  const float value = *static_cast<float*>(arguments[1]);
  ghost_do(stream, [=, at = *static_cast<float**>(arguments[2])] { std::fill_n(at, count, value); });
  return true;
}

}  // namespace

bool ghost_computes() {
  static const bool on = ghost_setting("GHOST_COMPUTE", 0);
  return on;
}

void ghost_stop(const char* format, ...) {
  char text[1200];
  va_list rest;
  va_start(rest, format);
  vsnprintf(text, sizeof text, format, rest);
  va_end(rest);
  ghost_event("stop", nullptr, "%s", text);
  fprintf(stderr, "ghost machine: %s\n", text);
  fflush(stderr);
  _exit(86);
}

void ghost_run(const void* kernel, const char* name, dim3 grid, dim3 block, void** arguments, const void* stream) {
  if (!ghost_computes() || strstr(name, "spin_kernel")) return;  // which only takes time
  const Given given = [&] {
    std::lock_guard<std::mutex> hold(guard);
    const auto found = kernels.find(kernel);
    return found == kernels.end() ? Given{} : found->second;
  }();
  if (given.run) {
    const auto run = [=](void** with) {
      std::lock_guard<std::mutex> hold(emulator);
      given.run(kernel, grid.x, block.x, with);
    };
    if (ghost_captured(stream)) ghost_later(stream, [run, kept = given.keep(arguments)] { run(kept); });
    else run(arguments);
  } else if (answering) {
    launched++;
  } else if (!fill(name, arguments, stream)) {
    ghost_stop("nobody computes the kernel %s", name);
  }
}

extern "C" {

void ghost_kernel(const void* kernel, GhostKernel run, GhostArguments keep) {
  std::lock_guard<std::mutex> hold(guard);
  kernels[kernel] = {run, keep};
}

void ghost_answer_begin() {
  if (answering++ == 0) launched = 0;
}
long ghost_answer_end() {
  answering--;
  return launched;
}

}  // extern "C"

void ghost_unanswered(const char* name) {
  ghost_event("unanswered", nullptr, "%s", name);
  if (answering) launched++;
  else if (ghost_computes()) ghost_stop("nobody computes %s", name);
}
