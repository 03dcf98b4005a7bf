// Numbers as kernels store them, and how they become float32 and back. Raw pointers to contiguous rows.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct bfloat16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void store(float* to, float x) { *to = x; }

// To nearest, ties to even.
inline void store(bfloat16* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to->bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float rounded(float x, float) { return x; }

inline float rounded(float x, bfloat16) {
  bfloat16 stored;
  store(&stored, x);
  return to_float(stored);
}

inline void widen(const float* from, float* to, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }

inline void widen(const bfloat16* from, float* to, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}

// Work below this many elements is not worth waking other threads for.
constexpr int64_t kWorthThreads = 32768;

}  // namespace
