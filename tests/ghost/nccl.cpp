// NCCL without a network. A communicator is made as NCCL makes it: the call returns when all its ranks have made it (they
// meet as files in $GHOST_MEETING). Operations move nothing; each is logged with its communicator, so that
// tests can match what the ranks asked for.
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "events.h"

namespace {

struct UniqueId {
  char bytes[128];
};

struct Communicator {
  std::string name;
  int size, rank;
};

thread_local int group_depth = 0;

int meet(void** out, int size, const UniqueId& id, int rank) {
  auto* made = new Communicator{std::string(id.bytes, 16), size, rank};
  ghost_event("communicator begins", nullptr, "%s %d %d", made->name.c_str(), size, rank);
  const std::string folder = std::string(getenv("GHOST_MEETING") ? getenv("GHOST_MEETING") : ".") + "/" + made->name;
  mkdir(folder.c_str(), 0755);
  close(open((folder + "/" + std::to_string(rank)).c_str(), O_CREAT | O_WRONLY, 0644));
  for (int come = 0; come < size; usleep(1000)) {
    come = 0;
    DIR* listing = opendir(folder.c_str());
    while (const dirent* entry = readdir(listing)) come += entry->d_name[0] != '.';
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

int rank_of(const void* comm) { return static_cast<const Communicator*>(comm)->rank; }
size_t size_of(const void* comm) { return static_cast<const Communicator*>(comm)->size; }

// from: the size of what is read; to: of what is written; nullptr: nothing.
int operation(const char* kind, void* comm, size_t count, int type, int peer, const void* stream, const void* from,
              size_t read, const void* to, size_t written) {
  const auto* c = static_cast<Communicator*>(comm);
  // name, this rank, kind, elements, dtype, root or peer (-1: none), inside a group
  const std::string memory = GhostMemory().reads(from, bytes_of(read, type)).writes(to, bytes_of(written, type)).text();
  ghost_touch("nccl", stream, memory, "%s %d %s %zu %d %d %d", c->name.c_str(), c->rank, kind, count, type, peer,
              group_depth > 0);
  return 0;
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
int ncclCommGetAsyncError(void*, int* error) {
  *error = 0;
  return 0;
}
int ncclCommCount(void* comm, int* count) {
  *count = static_cast<Communicator*>(comm)->size;
  return 0;
}
int ncclCommUserRank(void* comm, int* rank) {
  *rank = static_cast<Communicator*>(comm)->rank;
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
int ncclAllReduce(const void* from, void* to, size_t count, int type, int, void* comm, void* stream) {
  return operation("all_reduce", comm, count, type, -1, stream, from, count, to, count);
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, void* comm, void* stream) {
  const void* source = rank_of(comm) == root ? from : nullptr;
  return operation("broadcast", comm, count, type, root, stream, source, count, to, count);
}
int ncclBcast(void* at, size_t count, int type, int root, void* comm, void* stream) {
  return ncclBroadcast(at, at, count, type, root, comm, stream);
}
int ncclReduce(const void* from, void* to, size_t count, int type, int, int root, void* comm, void* stream) {
  void* target = rank_of(comm) == root ? to : nullptr;
  return operation("reduce", comm, count, type, root, stream, from, count, target, count);
}
int ncclAllGather(const void* from, void* to, size_t count, int type, void* comm, void* stream) {
  return operation("all_gather", comm, count, type, -1, stream, from, count, to, count * size_of(comm));
}
int ncclReduceScatter(const void* from, void* to, size_t count, int type, int, void* comm, void* stream) {
  return operation("reduce_scatter", comm, count, type, -1, stream, from, count * size_of(comm), to, count);
}
int ncclSend(const void* from, size_t count, int type, int peer, void* comm, void* stream) {
  return operation("send", comm, count, type, peer, stream, from, count, nullptr, 0);
}
int ncclRecv(void* to, size_t count, int type, int peer, void* comm, void* stream) {
  return operation("receive", comm, count, type, peer, stream, nullptr, 0, to, count);
}

}  // extern "C"
