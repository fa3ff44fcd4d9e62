// Rows written past the caches where all of them together are more than those hold.
//
// An ordinary store first reads the line that it writes: three bytes move for two. memcpy avoids that for large blocks
// only, and rows are small ones.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace mp {

constexpr int64_t kLine = 64;                      // bytes of a cache line
constexpr int64_t kStreamFrom = int64_t{8} << 20;   // bytes from which on rows are written past the caches

constexpr int64_t kPage = 4096;
constexpr int64_t kAhead = 16 * kLine;             // bytes that are asked for before they are read

inline void prefetch(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(static_cast<const char*>(from) + at);
}

// Asks for the beginning of a row that is read next and of its pages, at which the hardware would stop.
inline void prefetch_row(const void* row, int64_t bytes) {
  prefetch(row, bytes < kAhead ? bytes : kAhead);
  for (int64_t at = kPage; at < bytes; at += kPage) __builtin_prefetch(static_cast<const char*>(row) + at);
}

// Writes rows of `row_bytes` of a matrix that begins at `out`, all of them in one way.
class RowWriter {
 public:
  RowWriter(const void* out, int64_t row_bytes, int64_t rows)
      : stream_(row_bytes % kLine == 0 && reinterpret_cast<uintptr_t>(out) % kLine == 0 &&
                row_bytes * rows >= kStreamFrom) {}

  // A row, or lines of one.
  void operator()(void* to, const void* from, int64_t bytes) const {
#if defined(__SSE2__)
    if (stream_) return past_caches(static_cast<char*>(to), static_cast<const char*>(from), bytes);
#endif
    memcpy(to, from, static_cast<size_t>(bytes));
  }

  // Orders the thread's writes before what it does next.
  void finish() const {
#if defined(__SSE2__)
    if (stream_) _mm_sfence();
#endif
  }

 private:
#if defined(__SSE2__)
  static void past_caches(char* to, const char* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += kLine) {
#if defined(__AVX512F__)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
#else
      for (int64_t i = at; i < at + kLine; i += 16) {
        _mm_stream_si128(
            reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
      }
#endif
    }
  }
#endif

  bool stream_;
};

}  // namespace mp
