// NCCL without a network. A communicator is made as NCCL makes it: the call returns when all its ranks have made it (they
// meet as files in $GHOST_MEETING). Each operation is logged with its communicator, so that tests can match what the
// ranks asked for; where the machine computes, its numbers go through files of the same folder (messages.cpp).
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "compute.h"
#include "events.h"
#include "graphs.h"
#include "messages.h"
#include "pending.h"

namespace {

struct UniqueId {
  char bytes[128];
};

struct Communicator {
  std::string name;
  Exchange exchange;
  long collectives = 0;
  std::map<int, long> sent, received;  // messages by the other rank
  std::atomic<bool> aborted = false;

  int size() const { return exchange.size; }
  int rank() const { return exchange.rank; }
};

thread_local int group_depth = 0;

int meet(void** out, int size, const UniqueId& id, int rank) {
  const std::string name(id.bytes, 16);
  const std::string folder = std::string(getenv("GHOST_MEETING") ? getenv("GHOST_MEETING") : ".") + "/" + name;
  auto* made = new Communicator{name, {folder, size, rank}, 0, {}, {}};
  made->exchange.aborted = &made->aborted;
  ghost_event("communicator begins", nullptr, "%s %d %d", name.c_str(), size, rank);
  mkdir(folder.c_str(), 0755);
  close(open((folder + "/" + std::to_string(rank)).c_str(), O_CREAT | O_WRONLY, 0644));
  for (int come = 0; come < size; usleep(1000)) {
    come = 0;
    DIR* listing = opendir(folder.c_str());
    while (const dirent* entry = readdir(listing)) come += strspn(entry->d_name, "0123456789") == strlen(entry->d_name);
    closedir(listing);
  }
  ghost_event("communicator ends", nullptr, "%s", made->name.c_str());
  *out = made;
  return 0;
}

// Bytes of ``count`` elements: int8, uint8, int32, uint32, int64, uint64, fp16, fp32, fp64, bf16, fp8 twice.
size_t bytes_of(size_t count, int type) {
  constexpr size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return count * widths[type];
}

struct Part {
  const void* from;
  size_t read;  // elements
  void* to;
  size_t written;
};

// nullptr in a part: nothing is read or written.
void log_operation(const char* kind, const Communicator& c, size_t count, int type, int peer, const void* stream,
                   const Part& part) {
  const GhostMemory memory =
      GhostMemory().reads(part.from, bytes_of(part.read, type)).writes(part.to, bytes_of(part.written, type));
  // name, this rank, kind, elements, dtype, root or peer (-1: none), inside a group
  ghost_touch("nccl", stream, memory.text(), "%s %d %s %zu %d %d %d", c.name.c_str(), c.rank(), kind, count, type, peer,
              group_depth > 0);
}

std::string name_of(long collective, int rank) { return "c" + std::to_string(collective) + "." + std::to_string(rank); }

// Every rank of ``sources`` leaves its part, and every rank of ``targets`` takes them all; -1: all ranks.
std::vector<std::vector<char>> gather(Communicator& c, const void* from, size_t bytes, int source, int target) {
  const long now = c.collectives++;
  if (source < 0 || source == c.rank()) leave(c.exchange, name_of(now, c.rank()), from, bytes);
  std::vector<std::vector<char>> parts;
  if (target >= 0 && target != c.rank()) return parts;
  for (int rank = 0; rank < c.size(); rank++) {
    parts.emplace_back(source < 0 || source == rank ? bytes : 0);
    if (source < 0 || source == rank) take(c.exchange, name_of(now, rank), parts.back().data(), bytes);
  }
  // All have come to this one, so all are done with the one before; what one root leaves stays.
  if (source < 0 && target < 0) unlink((c.exchange.folder + "/" + name_of(now - 1, c.rank())).c_str());
  return parts;
}

std::vector<const void*> addresses(const std::vector<std::vector<char>>& parts, size_t offset) {
  std::vector<const void*> out;
  for (const auto& part : parts) out.push_back(part.data() + offset);
  return out;
}

int reduce(const char* kind, void* comm, const Part& part, int type, int operation, int root, const void* stream) {
  auto& c = *static_cast<Communicator*>(comm);
  const bool scatter = part.read != part.written && part.to;
  log_operation(kind, c, scatter ? part.written : part.read, type, root, stream, part);
  if (!ghost_computes()) return 0;
  const size_t skip = scatter ? bytes_of(part.written, type) * c.rank() : 0;
  ghost_do(stream, [=, &c] {
    const auto parts = gather(c, part.from, bytes_of(part.read, type), -1, root);
    if (!parts.empty()) combine(part.to, addresses(parts, skip), part.written, type, operation);
  });
  return 0;
}

int spread(const char* kind, void* comm, const Part& part, int type, int root, const void* stream) {
  auto& c = *static_cast<Communicator*>(comm);
  const size_t count = root < 0 ? part.read : part.written, bytes = bytes_of(count, type);
  log_operation(kind, c, count, type, root, stream, part);
  if (!ghost_computes()) return 0;
  ghost_do(stream, [=, &c] {
    const auto parts = gather(c, part.from, bytes, root, -1);
    for (int rank = 0; rank < c.size(); rank++)
      if (root < 0 || root == rank)
        memcpy(static_cast<char*>(part.to) + (root < 0 ? rank * bytes : 0), parts[rank].data(), bytes);
  });
  return 0;
}

std::string message(long number, int from, int to) {
  return "m" + std::to_string(number) + "." + std::to_string(from) + "." + std::to_string(to);
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = 22907;
  return 0;
}
const char* ncclGetErrorString(int) { return "an error of the ghost machine"; }
const char* ncclGetLastError(void*) { return ""; }
int ncclGetUniqueId(UniqueId* id) {
  memset(id, 0, sizeof *id);
  unsigned char random[8] = {0};
  const int source = open("/dev/urandom", O_RDONLY);
  if (read(source, random, sizeof random) != sizeof random) abort();
  close(source);
  for (size_t i = 0; i < sizeof random; i++) snprintf(id->bytes + 2 * i, 3, "%02x", random[i]);
  return 0;
}
int ncclCommInitRank(void** comm, int size, UniqueId id, int rank) { return meet(comm, size, id, rank); }
int ncclCommInitRankConfig(void** comm, int size, UniqueId id, int rank, void*) { return meet(comm, size, id, rank); }
int ncclCommInitRankScalable(void** comm, int size, int rank, int, UniqueId* ids, void*) {
  return meet(comm, size, ids[0], rank);
}
// From any thread. An operation that waits for another rank ends, and what it would have received is left out.
int ncclCommAbort(void* comm) {
  auto& c = *static_cast<Communicator*>(comm);
  c.aborted = true;
  ghost_event("communicator aborted", nullptr, "%s", c.name.c_str());
  return 0;  // its memory stays: another thread may be in it
}
int ncclCommGetAsyncError(void*, int* error) {
  *error = 0;
  return 0;
}
int ncclCommCount(void* comm, int* count) {
  *count = static_cast<Communicator*>(comm)->size();
  return 0;
}
int ncclCommUserRank(void* comm, int* rank) {
  *rank = static_cast<Communicator*>(comm)->rank();
  return 0;
}
int ncclCommCuDevice(void*, int* device) {
  *device = 0;
  return 0;
}
int ncclGroupStart() {
  if (group_depth++ == 0) ghost_event("nccl group", nullptr, "begins");
  return 0;
}
int ncclGroupEnd() {
  if (--group_depth == 0) ghost_event("nccl group", nullptr, "ends");
  return 0;
}
int ncclAllReduce(const void* from, void* to, size_t count, int type, int how, void* comm, void* stream) {
  return reduce("all_reduce", comm, {from, count, to, count}, type, how, -1, stream);
}
int ncclReduce(const void* from, void* to, size_t count, int type, int how, int root, void* comm, void* stream) {
  const bool here = static_cast<Communicator*>(comm)->rank() == root;
  return reduce("reduce", comm, {from, count, here ? to : nullptr, count}, type, how, root, stream);
}
int ncclReduceScatter(const void* from, void* to, size_t count, int type, int how, void* comm, void* stream) {
  const size_t all = count * static_cast<Communicator*>(comm)->size();
  return reduce("reduce_scatter", comm, {from, all, to, count}, type, how, -1, stream);
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, void* comm, void* stream) {
  const bool here = static_cast<Communicator*>(comm)->rank() == root;
  return spread("broadcast", comm, {here ? from : nullptr, count, to, count}, type, root, stream);
}
int ncclBcast(void* at, size_t count, int type, int root, void* comm, void* stream) {
  return ncclBroadcast(at, at, count, type, root, comm, stream);
}
int ncclAllGather(const void* from, void* to, size_t count, int type, void* comm, void* stream) {
  const size_t all = count * static_cast<Communicator*>(comm)->size();
  return spread("all_gather", comm, {from, count, to, all}, type, -1, stream);
}
int ncclAlltoAll(const void* from, void* to, size_t count, int type, void* comm, void* stream) {
  auto& c = *static_cast<Communicator*>(comm);
  const size_t all = count * c.size(), bytes = bytes_of(count, type);
  log_operation("all_to_all", c, count, type, -1, stream, {from, all, to, all});
  if (!ghost_computes()) return 0;
  ghost_do(stream, [=, &c] {
    const auto parts = gather(c, from, bytes_of(all, type), -1, -1);
    for (int rank = 0; rank < c.size(); rank++)
      memcpy(static_cast<char*>(to) + rank * bytes, parts[rank].data() + c.rank() * bytes, bytes);
  });
  return 0;
}
int ncclSend(const void* from, size_t count, int type, int peer, void* comm, void* stream) {
  auto& c = *static_cast<Communicator*>(comm);
  log_operation("send", c, count, type, peer, stream, {from, count, nullptr, 0});
  if (!ghost_computes()) return 0;
  ghost_do(stream, [=, &c] {
    leave(c.exchange, message(c.sent[peer]++, c.rank(), peer), from, bytes_of(count, type));
  });
  return 0;
}
int ncclRecv(void* to, size_t count, int type, int peer, void* comm, void* stream) {
  auto& c = *static_cast<Communicator*>(comm);
  log_operation("receive", c, count, type, peer, stream, {nullptr, 0, to, count});
  if (!ghost_computes()) return 0;
  const auto begin = [=, &c] {
    const std::string name = message(c.received[peer]++, peer, c.rank()), path = c.exchange.folder + "/" + name;
    pend(stream, [&c, to, name, path, bytes = bytes_of(count, type)](bool wait) {
      if (!wait && access(path.c_str(), F_OK)) return false;
      take(c.exchange, name, to, bytes);
      unlink(path.c_str());
      return true;
    });
  };
  if (!ghost_later(stream, begin)) begin();
  return 0;
}

}  // extern "C"
