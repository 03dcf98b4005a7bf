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

struct float16 {
  uint16_t bits;
};

inline float to_float(float16 x) {
  const uint32_t exponent = x.bits & 0x7c00, rest = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  uint32_t bits = rest + (exponent == 0x7c00 ? 0x70000000u : 0x38000000u);
  if (exponent == 0) {
    const float tiny = static_cast<float>(x.bits & 0x3ff) * 0x1p-24f;
    std::memcpy(&bits, &tiny, sizeof bits);
  }
  bits |= static_cast<uint32_t>(x.bits & 0x8000) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// To nearest, ties to even.
inline void store(float16* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
  uint32_t half;
  if (size >= 0x47800000) {
    half = size > 0x7f800000 ? 0x7e00 : 0x7c00;
  } else if (size < 0x38800000) {
    float shifted;
    std::memcpy(&shifted, &size, sizeof shifted);
    shifted += 0.5f;  // whose last bit is that of the smallest float16
    std::memcpy(&half, &shifted, sizeof half);
    half -= 0x3f000000;
  } else {
    half = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | half);
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
