// Moves the numbers of collectives and messages between the processes of the ghost machine.
#pragma once
#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

// A communicator as the processes share it: a folder that all of them have.
struct Exchange {
  std::string folder;
  int size, rank;
  const std::atomic<bool>* aborted = nullptr;  // what waits returns, without what it waited for
};

// Leave bytes for others under a name, whole or not at all.
void leave(const Exchange& at, const std::string& name, const void* from, size_t bytes);

// Wait for what another rank leaves under a name; ghost_stop after GHOST_PATIENCE seconds.
void take(const Exchange& at, const std::string& name, void* to, size_t bytes);

// to[i] = the ranks' parts[r][i] combined in the order of the ranks, fp32 inside (fp64 and integers in their own).
// type: of ncclDataType_t; operation: of ncclRedOp_t (sum, product, maximum, minimum, mean).
void combine(void* to, const std::vector<const void*>& parts, size_t count, int type, int operation);
