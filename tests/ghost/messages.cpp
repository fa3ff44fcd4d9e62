// Numbers travel as files of a folder: written beside and renamed, so that a reader sees all of one or none.
#include "messages.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>

#include "events.h"
#include "numbers.h"

void leave(const Exchange& at, const std::string& name, const void* from, size_t bytes) {
  const std::string path = at.folder + "/" + name, beside = path + ".part";
  const int file = open(beside.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
  for (size_t done = 0; done < bytes;) {
    const ssize_t now = write(file, static_cast<const char*>(from) + done, bytes - done);
    if (now <= 0) ghost_stop("cannot write %zu bytes to %s", bytes, beside.c_str());
    done += static_cast<size_t>(now);
  }
  close(file);
  if (rename(beside.c_str(), path.c_str())) ghost_stop("cannot write %s", path.c_str());
}

void take(const Exchange& at, const std::string& name, void* to, size_t bytes) {
  const std::string path = at.folder + "/" + name;
  int file = -1;
  useconds_t pause = 20;
  double waited = 0;
  const double patience = static_cast<double>(ghost_setting("GHOST_PATIENCE", 60));
  while ((file = open(path.c_str(), O_RDONLY | O_CLOEXEC)) < 0) {
    if (at.aborted && *at.aborted) return;
    usleep(pause);
    if ((waited += pause * 1e-6) > patience) ghost_stop("%s never came", path.c_str());
    if (pause < 1000) pause *= 2;
  }
  struct stat found;
  fstat(file, &found);
  if (static_cast<size_t>(found.st_size) != bytes)
    ghost_stop("%s has %zu bytes where %zu are expected", path.c_str(), static_cast<size_t>(found.st_size), bytes);
  for (size_t done = 0; done < bytes;) {
    const ssize_t now = read(file, static_cast<char*>(to) + done, bytes - done);
    if (now <= 0) ghost_stop("cannot read %s", path.c_str());
    done += static_cast<size_t>(now);
  }
  close(file);
}

namespace {

template <typename Sum, typename Get, typename Put>
void combine_as(const std::vector<const void*>& parts, size_t count, int operation, Get get, Put put) {
  for (size_t i = 0; i < count; i++) {
    Sum total = get(parts[0], i);
    for (size_t r = 1; r < parts.size(); r++) {
      const Sum one = get(parts[r], i);
      switch (operation) {
        case 0: case 4: total = total + one; break;
        case 1: total = total * one; break;
        case 2: total = one > total || one != one ? one : total; break;
        case 3: total = one < total || one != one ? one : total; break;
        default: ghost_stop("nobody computes the NCCL reduction %d", operation);
      }
    }
    put(i, operation == 4 ? total / static_cast<Sum>(parts.size()) : total);
  }
}

template <typename T>
void combine_plain(void* to, const std::vector<const void*>& parts, size_t count, int operation) {
  combine_as<T>(parts, count, operation, [](const void* from, size_t i) { return static_cast<const T*>(from)[i]; },
                [to](size_t i, T value) { static_cast<T*>(to)[i] = value; });
}

void combine_half(void* to, const std::vector<const void*>& parts, size_t count, int operation, Number type) {
  combine_as<float>(parts, count, operation,
                    [type](const void* from, size_t i) { return number_at<float>(from, type, i); },
                    [to, type](size_t i, float value) { put_number(to, type, i, value); });
}

}  // namespace

void combine(void* to, const std::vector<const void*>& parts, size_t count, int type, int operation) {
  switch (type) {
    case 0: return combine_plain<int8_t>(to, parts, count, operation);
    case 1: return combine_plain<uint8_t>(to, parts, count, operation);
    case 2: return combine_plain<int32_t>(to, parts, count, operation);
    case 3: return combine_plain<uint32_t>(to, parts, count, operation);
    case 4: return combine_plain<int64_t>(to, parts, count, operation);
    case 5: return combine_plain<uint64_t>(to, parts, count, operation);
    case 6: return combine_half(to, parts, count, operation, Number::f16);
    case 7: return combine_plain<float>(to, parts, count, operation);
    case 8: return combine_plain<double>(to, parts, count, operation);
    case 9: return combine_half(to, parts, count, operation, Number::bf16);
    default: ghost_stop("nobody computes a reduction of ncclDataType %d", type);
  }
}
