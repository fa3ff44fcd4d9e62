// Streams end their work in order. All other work ends within its call, so only what pends is kept.
#include "pending.h"

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "compute.h"

namespace {

struct Started {
  uint64_t serial;
  std::function<bool(bool)> end;
};

std::recursive_mutex guard;
std::map<const void*, std::deque<Started>> streams;
std::map<const void*, std::pair<const void*, uint64_t>> events;
uint64_t serial = 0;

bool finish(const void* stream, uint64_t last, bool wait) {
  std::lock_guard<std::recursive_mutex> hold(guard);
  const auto found = streams.find(stream);
  if (found == streams.end()) return true;
  auto& queue = found->second;
  while (!queue.empty() && queue.front().serial <= last) {
    if (!queue.front().end(wait)) return false;
    queue.pop_front();
  }
  return true;
}

}  // namespace

void pend(const void* stream, std::function<bool(bool)> end) {
  std::lock_guard<std::recursive_mutex> hold(guard);
  streams[stream].push_back({++serial, std::move(end)});
}

void pending_record(const void* event, const void* stream) {
  std::lock_guard<std::recursive_mutex> hold(guard);
  events[event] = {stream, serial};
}

bool pending_event(const void* event, bool wait) {
  std::pair<const void*, uint64_t> recorded;
  {
    std::lock_guard<std::recursive_mutex> hold(guard);
    const auto found = events.find(event);
    if (found == events.end()) return true;
    recorded = found->second;
  }
  return finish(recorded.first, recorded.second, wait);
}

bool pending_stream(const void* stream, bool wait) { return finish(stream, UINT64_MAX, wait); }

void pending_device() {
  std::lock_guard<std::recursive_mutex> hold(guard);
  for (const auto& stream : streams) finish(stream.first, UINT64_MAX, true);
}

void ghost_finish(const void* stream) { pending_stream(stream, true); }
