// AdamW with moments in bf16 or in 8 bits, and Lion; include/narrow_adamw.h says what they compute.
//
// A strip's moments are widened into buffers that stay in the first cache, updated there as in optimizer.cpp, and
// narrowed again.
#include "narrow_adamw.h"

#include <algorithm>

#include "adamw.h"
#include "counter.h"

namespace mp {
namespace {

constexpr int kValues = 256;

bool sizes_fit(int64_t count, const int64_t* sizes, int64_t unit) {
  return count >= 0 && std::all_of(sizes, sizes + count, [=](int64_t n) { return n >= 0 && n % unit == 0; });
}

// Calls `with(tensor, first element, elements, gradient as floats)` for each strip of each tensor, on all threads, and
// rounds its masters into the weights. A chunk is whole strips.
template <typename W, typename G, typename F>
int32_t over_strips(
    int64_t count, void* const* weights, float* const* masters, const void* const* grads, const int64_t* sizes,
    F with) {
  const std::vector<Chunk> chunks = chunks_of(count, sizes);
  const int64_t n = static_cast<int64_t>(chunks.size());
#pragma omp parallel for schedule(static) if (n > 1)
  for (int64_t i = 0; i < n; i++) {
    const auto [t, start, size] = chunks[i];
    float buffer[kStrip];
    for (int64_t at = start; at < start + size; at += kStrip) {
      const int64_t here = std::min(kStrip, start + size - at);
      with(t, at, here, row_as_floats(static_cast<const G*>(grads[t]) + at, buffer, here));
      if (weights != nullptr) narrow(masters[t] + at, static_cast<W*>(weights[t]) + at, here);
    }
  }
  return MP_OK;
}

template <typename F>
int32_t for_dtypes(int32_t weight_dtype, int32_t grad_dtype, void* const* weights, F with) {
  return for_dtype(grad_dtype, [&](auto grad) {
    return for_dtype(weights == nullptr ? static_cast<int32_t>(MP_F32) : weight_dtype, [&](auto weight) {
      return with(weight, grad);
    });
  });
}

uint64_t number_of(const mp_place& place, int64_t at) {
  const int64_t e = place.start + at;
  return static_cast<uint64_t>(e / place.run * place.stride + e % place.run + place.first);
}

inline bf16 stochastic(float x, uint32_t random) {
  const uint32_t bits = bits_of_float(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) {  // infinity and NaN stay what they are
    return bf16{static_cast<uint16_t>(bits >> 16 | ((bits & 0x7fffffu) != 0u ? 0x40u : 0u))};
  }
  return bf16{static_cast<uint16_t>((bits + (random & 0xffffu)) >> 16)};
}

// Rounds the moments of elements [at, at + n); runs of the whole tensor one after the other.
void put_bf16(
    const mp_place& place, uint64_t step, int64_t at, int64_t n, const float* first, const float* second, bf16* exp_avg,
    bf16* exp_avg_sq) {
  const uint64_t key = static_cast<uint64_t>(place.key);
  for (int64_t done = 0; done < n;) {
    const int64_t left = place.run - (place.start + at + done) % place.run, here = std::min(n - done, left);
    const uint64_t number = number_of(place, at + done);
#pragma omp simd
    for (int64_t i = 0; i < here; i++) {
      const uint64_t random = random_bits((number + static_cast<uint64_t>(i)) * kGolden, key, step);
      exp_avg[done + i] = stochastic(first[done + i], static_cast<uint32_t>(random));
      exp_avg_sq[done + i] = stochastic(second[done + i], static_cast<uint32_t>(random) >> 16);
    }
    done += here;
  }
}

// Codes of one block of elements and its scale.
void put_codes(const float* x, uint8_t* codes, float* scale, const float* values) {
  float most = 0.0f;
  bool nan = false;
  for (int i = 0; i < MP_STATE_BLOCK; i++) {
    const float size = std::fabs(x[i]);
    most = size > most ? size : most;
    nan |= size != size;
  }
  *scale = most = nan ? float_of_bits(0x7fc00000u) : most < 1e-12f ? 1e-12f : most;
  for (int i = 0; i < MP_STATE_BLOCK; i++) {
    const float y = x[i] / most;
    int code = 0;
    for (int step = kValues / 2; step > 0; step >>= 1) code += y >= values[code + step] ? step : 0;
    const int up = code < kValues - 1 ? code + 1 : code;
    const float low = values[code], high = values[up];
    codes[i] = static_cast<uint8_t>(y - low >= (high - low) * 0.5f ? up : code);
  }
}

void from_codes(const uint8_t* codes, const float* scale, const float* values, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = values[codes[i]] * scale[i / MP_STATE_BLOCK];
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_adamw_bf16(
    void* stream, int32_t weight_dtype, int32_t grad_dtype, int64_t count, void* const* weights, float* const* masters,
    const void* const* grads, uint16_t* const* exp_avg, uint16_t* const* exp_avg_sq, const int64_t* sizes,
    const mp_place* places, const void* step, int32_t step_is_int64, const float* grad_scale, const float* skip,
    const double* lr, double beta1, double beta2, double eps, double weight_decay) {
  if (!mp::sizes_fit(count, sizes, 1)) return MP_BAD_SIZE;
  for (int64_t i = 0; i < count; i++) {
    if (places[i].run <= 0 || places[i].start < 0) return MP_BAD_SIZE;
  }
  if (skip != nullptr && !(*skip == 0.0f)) return MP_OK;
  const mp::Factors f = mp::factors_of(step, step_is_int64, grad_scale, lr, beta1, beta2, eps, weight_decay);
  const uint64_t number = mp::folded_key(static_cast<int64_t>(mp::number_of_step(step, step_is_int64)));
  const auto strip = mp::strip_of(f);
  return mp::for_dtypes(weight_dtype, grad_dtype, weights, [&](auto weight, auto grad) {
    return mp::over_strips<decltype(weight), decltype(grad)>(
        count, weights, masters, grads, sizes, [&](int64_t t, int64_t at, int64_t n, const float* g) {
          float first[mp::kStrip], second[mp::kStrip];
          auto* m = reinterpret_cast<mp::bf16*>(exp_avg[t]) + at;
          auto* v = reinterpret_cast<mp::bf16*>(exp_avg_sq[t]) + at;
          mp::widen(m, first, n);
          mp::widen(v, second, n);
          strip(f, g, masters[t] + at, first, second, n);
          mp::put_bf16(places[t], number, at, n, first, second, m, v);
        });
  });
}

extern "C" int32_t mp_adamw_8bit(
    void* stream, int32_t weight_dtype, int32_t grad_dtype, int64_t count, void* const* weights, float* const* masters,
    const void* const* grads, uint8_t* const* exp_avg, float* const* exp_avg_scale, uint8_t* const* exp_avg_sq,
    float* const* exp_avg_sq_scale, const int64_t* sizes, const float* signed_values, const float* unsigned_values,
    const void* step, int32_t step_is_int64, const float* grad_scale, const float* skip, const double* lr, double beta1,
    double beta2, double eps, double weight_decay) {
  static_assert(mp::kStrip % MP_STATE_BLOCK == 0 && mp::kChunk % mp::kStrip == 0, "strips are whole blocks");
  if (!mp::sizes_fit(count, sizes, MP_STATE_BLOCK)) return MP_BAD_SIZE;
  if (skip != nullptr && !(*skip == 0.0f)) return MP_OK;
  const mp::Factors f = mp::factors_of(step, step_is_int64, grad_scale, lr, beta1, beta2, eps, weight_decay);
  const auto strip = mp::strip_of(f);
  return mp::for_dtypes(weight_dtype, grad_dtype, weights, [&](auto weight, auto grad) {
    return mp::over_strips<decltype(weight), decltype(grad)>(
        count, weights, masters, grads, sizes, [&](int64_t t, int64_t at, int64_t n, const float* g) {
          float first[mp::kStrip], second[mp::kStrip];
          const int64_t block = at / MP_STATE_BLOCK;
          mp::from_codes(exp_avg[t] + at, exp_avg_scale[t] + block, signed_values, first, n);
          mp::from_codes(exp_avg_sq[t] + at, exp_avg_sq_scale[t] + block, unsigned_values, second, n);
          strip(f, g, masters[t] + at, first, second, n);
          for (int64_t i = 0; i < n; i += MP_STATE_BLOCK) {
            const int64_t scale = block + i / MP_STATE_BLOCK;
            mp::put_codes(first + i, exp_avg[t] + at + i, exp_avg_scale[t] + scale, signed_values);
            mp::put_codes(second + i, exp_avg_sq[t] + at + i, exp_avg_sq_scale[t] + scale, unsigned_values);
          }
        });
  });
}

extern "C" int32_t mp_lion(
    void* stream, int32_t weight_dtype, int32_t grad_dtype, int64_t count, void* const* weights, float* const* masters,
    const void* const* grads, float* const* exp_avg, const int64_t* sizes, const float* grad_scale, const float* skip,
    const double* lr, double beta1, double beta2, double weight_decay) {
  if (!mp::sizes_fit(count, sizes, 1)) return MP_BAD_SIZE;
  if (skip != nullptr && !(*skip == 0.0f)) return MP_OK;
  const float scale = grad_scale != nullptr ? *grad_scale : 1.0f, rate = static_cast<float>(*lr);
  const float decay = static_cast<float>(std::fma(-*lr, weight_decay, 1.0));
  const mp::AdamRates rates = mp::adam_rates(beta1, beta2, 0.0);
  return mp::for_dtypes(weight_dtype, grad_dtype, weights, [&](auto weight, auto grad) {
    return mp::over_strips<decltype(weight), decltype(grad)>(
        count, weights, masters, grads, sizes, [&](int64_t t, int64_t at, int64_t n, const float* g) {
          float* p = masters[t] + at;
          float* m = exp_avg[t] + at;
          for (int64_t i = 0; i < n; i++) mp::lion_update(rates, scale, decay, rate, g[i], p[i], m[i]);
        });
  });
}
