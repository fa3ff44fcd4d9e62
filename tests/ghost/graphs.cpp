// Stream capture and graphs. While a stream is captured, its calls are kept and not logged; a launch of the graph logs
// them all, between "graph begins" and "graph ends", with the launching stream in place of the one that was captured.
// Other streams join a capture when they wait for an event of it, as in CUDA, and must have joined back at its end.
// What CUDA refuses in a capture is logged as "capture fault".
#include "graphs.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "compute.h"
#include "events.h"
#include "pending.h"

namespace {

struct Kept {
  std::string kind;
  const void* stream;
  std::string detail, memory;
  std::function<void()> action;
};

using Clock = std::map<const void*, size_t>;

struct Capture {
  unsigned long long id;
  const void* origin;
  std::thread::id thread;
  cudaStreamCaptureMode mode;
  bool invalid = false;
  std::vector<Kept> calls;
  std::map<const void*, size_t> done;   // work by stream
  std::map<const void*, Clock> clocks;  // by stream: what of each stream comes before its next call
};

// A graph, and what is made of it to be launched: nothing is compiled here, so they share the calls.
struct Graph {
  std::shared_ptr<Capture> capture;
};

std::mutex guard;
std::map<const void*, std::shared_ptr<Capture>> capturing;  // by stream
struct Recorded {
  std::shared_ptr<Capture> capture;
  Clock clock;
};
std::unordered_map<const void*, Recorded> events;
unsigned long long captures = 0;
thread_local cudaStreamCaptureMode interaction = cudaStreamCaptureModeGlobal;

void merge(Clock& into, const Clock& from) {
  for (const auto& [stream, count] : from)
    if (into[stream] < count) into[stream] = count;
}

std::shared_ptr<Capture> capture_of(const void* stream) {
  const auto found = capturing.find(stream);
  return found == capturing.end() ? nullptr : found->second;
}

void fault(const std::string& what) { ghost_event("capture fault", nullptr, "%s", what.c_str()); }

cudaError_t refuse(const std::shared_ptr<Capture>& capture, const std::string& what, cudaError_t answer) {
  {
    std::lock_guard<std::mutex> hold(guard);
    capture->invalid = true;
  }
  fault(what);
  return answer;
}

}  // namespace

bool ghost_keep(const char* kind, const void* stream, const std::string& detail, const std::string& memory) {
  std::string wrong;
  {
    std::lock_guard<std::mutex> hold(guard);
    std::shared_ptr<Capture> capture = capture_of(stream);
    // A group of NCCL's has no stream; the process captures one graph at a time.
    if (!capture && !strcmp(kind, "nccl group") && !capturing.empty()) capture = capturing.begin()->second;
    if (!capture) return false;
    if (!strcmp(kind, "copy") && detail.find("pageable") != std::string::npos) wrong = "a copy of pageable memory";
    capture->calls.push_back({kind, stream, detail, memory, nullptr});
    // Events are no work: what is recorded on a stream after its last kernel need not be waited for.
    if (strcmp(kind, "record") && strcmp(kind, "await")) capture->clocks[stream][stream] = ++capture->done[stream];
  }
  if (!wrong.empty()) fault(wrong);
  return true;
}

bool ghost_later(const void* stream, std::function<void()> action) {
  std::lock_guard<std::mutex> hold(guard);
  const std::shared_ptr<Capture> capture = capture_of(stream);
  if (!capture) return false;
  capture->calls.back().action = std::move(action);
  return true;
}

bool ghost_captured(const void* stream) {
  std::lock_guard<std::mutex> hold(guard);
  return capture_of(stream) != nullptr;
}

void ghost_do(const void* stream, std::function<void()> action) {
  if (ghost_later(stream, action)) return;
  ghost_finish(stream);
  action();
}

void ghost_capture_record(const void* event, const void* stream) {
  std::lock_guard<std::mutex> hold(guard);
  const std::shared_ptr<Capture> capture = capture_of(stream);
  if (capture) events[event] = {capture, capture->clocks[stream]};
  else events.erase(event);
}

cudaError_t ghost_capture_await(const void* stream, const void* event) {
  bool isolated = false;
  std::shared_ptr<Capture> mine;
  {
    std::lock_guard<std::mutex> hold(guard);
    const auto found = events.find(event);
    mine = capture_of(stream);
    const std::shared_ptr<Capture> its = found == events.end() ? nullptr : found->second.capture;
    isolated = mine && its != mine;
    // An event of a capture that has ended stands for nothing outside of it.
    const bool alive = its && capture_of(its->origin) == its;
    if (alive && !isolated) {
      capturing[stream] = its;
      merge(its->clocks[stream], found->second.clock);
    }
  }
  if (!isolated) return cudaSuccess;
  return refuse(mine, "a captured stream waits for an event from outside of its capture", cudaErrorStreamCaptureIsolation);
}

cudaError_t ghost_ask_event(const void* event) {
  std::shared_ptr<Capture> capture;
  {
    std::lock_guard<std::mutex> hold(guard);
    const auto found = events.find(event);
    if (found != events.end()) capture = found->second.capture;
    if (capture && capture_of(capture->origin) != capture) capture = nullptr;
  }
  if (!capture) return cudaSuccess;
  return refuse(capture, "the host asks for an event of a capture", cudaErrorCapturedEvent);
}

cudaError_t ghost_ask_stream(const void* stream) {
  std::shared_ptr<Capture> capture;
  {
    std::lock_guard<std::mutex> hold(guard);
    capture = capture_of(stream);
  }
  if (!capture) return cudaSuccess;
  return refuse(capture, "the host asks for a captured stream", cudaErrorStreamCaptureUnsupported);
}

cudaError_t ghost_ask_device() {
  std::shared_ptr<Capture> capture;
  {
    std::lock_guard<std::mutex> hold(guard);
    if (!capturing.empty()) capture = capturing.begin()->second;
  }
  if (!capture) return cudaSuccess;
  return refuse(capture, "the host waits for the device during a capture", cudaErrorStreamCaptureUnsupported);
}

cudaError_t ghost_unsafe(const char* call) {
  std::shared_ptr<Capture> forbids;
  {
    std::lock_guard<std::mutex> hold(guard);
    for (const auto& [stream, capture] : capturing) {
      const bool mine = capture->thread == std::this_thread::get_id();
      if (mine ? capture->mode != cudaStreamCaptureModeRelaxed && interaction != cudaStreamCaptureModeRelaxed
               : capture->mode == cudaStreamCaptureModeGlobal && interaction == cudaStreamCaptureModeGlobal)
        forbids = capture;
    }
  }
  if (!forbids) return cudaSuccess;
  return refuse(forbids, std::string(call) + " during a capture", cudaErrorStreamCaptureUnsupported);
}

extern "C" {

// What the calling thread has launched on a stream is answered at each replay by ``run(number)``.
void ghost_answer_later(const void* stream, void (*run)(long), long number) {
  std::lock_guard<std::mutex> hold(guard);
  const std::shared_ptr<Capture> capture = capture_of(stream);
  if (capture) capture->calls.push_back({"answer", stream, "", "", [=] { run(number); }});
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  ghost_event("capture", stream, "begins, mode %d", static_cast<int>(mode));
  std::lock_guard<std::mutex> hold(guard);
  auto made = std::make_shared<Capture>();
  made->id = ++captures;
  made->origin = stream;
  made->thread = std::this_thread::get_id();
  made->mode = mode;
  capturing[stream] = made;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  std::shared_ptr<Capture> capture;
  bool joined = true;
  {
    std::lock_guard<std::mutex> hold(guard);
    capture = capture_of(stream);
    if (!capture) return cudaErrorIllegalState;
    const Clock& last = capture->clocks[stream];
    for (const auto& [other, count] : capture->done) {
      const auto seen = last.find(other);
      joined = joined && (other == stream || other == nullptr || (seen != last.end() && seen->second >= count));
    }
    for (auto it = capturing.begin(); it != capturing.end();) it = it->second == capture ? capturing.erase(it) : ++it;
  }
  if (!joined) fault("a stream that joined the capture has work that the captured stream does not wait for");
  ghost_event("capture", stream, "ends, %zu calls", capture->calls.size());
  if (capture->invalid) {
    *graph = nullptr;
    return cudaErrorStreamCaptureInvalidated;
  }
  *graph = reinterpret_cast<cudaGraph_t>(new Graph{capture});
  return joined ? cudaSuccess : cudaErrorStreamCaptureUnjoined;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  std::lock_guard<std::mutex> hold(guard);
  *status = capture_of(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  std::lock_guard<std::mutex> hold(guard);
  const std::shared_ptr<Capture> capture = capture_of(stream);
  *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, interaction);
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->capture->calls.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  *out = reinterpret_cast<cudaGraphExec_t>(new Graph{*reinterpret_cast<Graph*>(graph)});
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  const std::shared_ptr<Capture> capture = reinterpret_cast<Graph*>(graph)->capture;
  ghost_event("graph begins", stream, "%llu", capture->id);
  ghost_finish(stream);
  for (const Kept& call : capture->calls) {
    const void* on = call.stream == capture->origin ? stream : call.stream;
    // Events of a graph are its own, whatever the handles are used for outside of it.
    const bool orders = call.kind == "record" || call.kind == "await";
    const std::string detail = orders ? "graph " + std::to_string(capture->id) + " " + call.detail : call.detail;
    if (call.kind != "answer") ghost_touch(call.kind.c_str(), on, call.memory, "%s", detail.c_str());
    if (!call.action) continue;
    if (!orders) ghost_finish(call.stream);
    call.action();
  }
  for (const auto& [joined, count] : capture->done) ghost_finish(joined);
  ghost_event("graph ends", stream, "%llu", capture->id);
  return cudaSuccess;
}

}  // extern "C"
