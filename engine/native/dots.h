// Sums of products of rows with 64 columns at a time, in registers from the first step to the last.
//
// A step takes four bytes of each row and four of each column: a float32 number, two bfloat16 ones, or four of 8 bits.
// Sums and instructions are spelled out one by one because compilers, given an array, keep it in memory: half of the speed.
//
// Legend: C rows, at most six: 24 vectors of sums, four of the columns and one of a row fit the 32 registers.

#pragma once

#include "numbers.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define HAS_DOTS 1
#include <immintrin.h>

namespace {

constexpr int kMostRows = 6;
constexpr int kColumns = 64;
constexpr int kVectors = 4;             // of sums, for the columns
constexpr int64_t kLine = 64;           // bytes of a cache line
constexpr int64_t kStepBytes = 256;     // of the columns, where those of a step lie together

using Sums = __m512i[kMostRows][kVectors];

// Unsigned columns times signed rows: exact sums in int32.
struct Bytes {
  static inline void add(__m512i& sum, __m512i column, __m512i row) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(column), "v"(row));
  }
};

// Of bfloat16 numbers: sums in float32. Not every processor that multiplies bytes does it (AVX512-BF16).
struct Pairs {
  static inline void add(__m512i& sum, __m512i column, __m512i row) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(column), "v"(row));
  }
};

inline __m512i four_bytes(const void* from) {
  int32_t bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return _mm512_set1_epi32(bytes);
}

// Of float32 numbers, one in a step.
struct Floats {
  static inline void add(__m512i& sum, __m512i column, __m512i row) {
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(column), "v"(row));
  }
};

#define BATON_EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#define BATON_LOAD(c) __m512i a##c##0 = sums[c][0], a##c##1 = sums[c][1], a##c##2 = sums[c][2], a##c##3 = sums[c][3];
#define BATON_KEEP(c) \
  if constexpr (C > c) sums[c][0] = a##c##0, sums[c][1] = a##c##1, sums[c][2] = a##c##2, sums[c][3] = a##c##3;
#define BATON_STEP(c)                              \
  if constexpr (C > c) {                           \
    const __m512i row = four_bytes(at + c * stride); \
    Dot::add(a##c##0, w0, row);                    \
    Dot::add(a##c##1, w1, row);                    \
    Dot::add(a##c##2, w2, row);                    \
    Dot::add(a##c##3, w3, row);                    \
  }

inline __m512i vector_at(const char* from) { return _mm512_loadu_si512(from); }

// sums += rows times columns. Rows are `stride` bytes apart, steps of the columns `step_bytes`. At each step, kLines
// cache lines from `ahead` on, which will be needed soon, are asked of memory.
template <typename Dot, int C, int kLines = 0>
inline void dot(const char* rows, int64_t stride, const char* columns, int64_t step_bytes, int64_t steps, Sums& sums,
                const char* ahead = nullptr) {
  BATON_EACH_ROW(BATON_LOAD)
  const char* at = rows;
  for (int64_t k = 0; k < steps; ++k, at += 4, columns += step_bytes, ahead += kLines * kLine) {
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(ahead + i * kLine);
    const __m512i w0 = vector_at(columns), w1 = vector_at(columns + 64);
    const __m512i w2 = vector_at(columns + 128), w3 = vector_at(columns + 192);
    BATON_EACH_ROW(BATON_STEP)
  }
  BATON_EACH_ROW(BATON_KEEP)
}

// Halves of bytes as the numbers that they are.
struct Integers {
  __m512i operator()(__m512i codes) const { return codes; }
};

// Halves of bytes as E2M1 numbers: a sign, two bits of exponent and one of mantissa. Twice their value, plus 12.
struct SmallFloats {
  const __m512i values = _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));

  __m512i operator()(__m512i codes) const { return _mm512_shuffle_epi8(values, codes); }
};

// The same with columns in halves of bytes: four inputs low, the next four high. `steps` counts eight inputs.
template <typename Codes, int C, int kLines>
inline void dot_halves(const char* rows, int64_t stride, const char* columns, int64_t steps, Sums& sums,
                       const char* ahead) {
  using Dot = Bytes;
  BATON_EACH_ROW(BATON_LOAD)
  const Codes numbers;
  const __m512i low_half = _mm512_set1_epi8(0x0f);
  const auto low = [&](int v) { return numbers(_mm512_and_si512(vector_at(columns + v * 64), low_half)); };
  const auto high = [&](int v) {
    return numbers(_mm512_and_si512(_mm512_srli_epi16(vector_at(columns + v * 64), 4), low_half));
  };
  const char* at = rows;
  for (int64_t k = 0; k < steps; ++k, columns += kStepBytes, ahead += kLines * kLine) {
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(ahead + i * kLine);
    {
      const __m512i w0 = low(0), w1 = low(1), w2 = low(2), w3 = low(3);
      BATON_EACH_ROW(BATON_STEP)
      at += 4;
    }
    {
      const __m512i w0 = high(0), w1 = high(1), w2 = high(2), w3 = high(3);
      BATON_EACH_ROW(BATON_STEP)
      at += 4;
    }
  }
  BATON_EACH_ROW(BATON_KEEP)
}

#undef BATON_EACH_ROW
#undef BATON_LOAD
#undef BATON_KEEP
#undef BATON_STEP

}  // namespace

#endif
