// The heads of keys and values that pages of the KV cache hold (engine.kv.pool).
//
// Legend: H KV heads, D head_dim, K block_size.

#pragma once

#include "numbers.h"

namespace {

constexpr int64_t kChunk = 64;  // keys whose scores are taken at once
constexpr int64_t kKeysAhead = 12;  // keys that are asked of memory before they are needed

// Pages hold heads as they are computed, or as int8 followed by the float32 that each value is times.

template <typename P>
inline int64_t cell(int64_t dim) {
  return dim;
}

template <>
inline int64_t cell<int8_t>(int64_t dim) {
  return dim + sizeof(float);
}

template <typename P>
inline void load_head(const P* from, float* to, int64_t dim) {
  widen(from, to, dim);
}

template <>
inline void load_head(const int8_t* from, float* to, int64_t dim) {
  float scale;
  std::memcpy(&scale, from + dim, sizeof scale);
#pragma omp simd
  for (int64_t i = 0; i < dim; ++i) to[i] = from[i] * scale;
}

template <typename T>
inline void store_head(const T* from, T* to, int64_t dim) {
  std::memcpy(to, from, dim * sizeof(T));
}

template <typename T>
inline void store_head(const T* from, int8_t* to, int64_t dim) {
  float most = 1e-30f;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < dim; ++i) most = std::max(most, std::fabs(to_float(from[i])));
  const float scale = most / 127.0f;
  const float steps = 127.0f / most;
#pragma omp simd
  for (int64_t i = 0; i < dim; ++i) to[i] = static_cast<int8_t>(std::nearbyint(to_float(from[i]) * steps));
  std::memcpy(to + dim, &scale, sizeof scale);
}

// Heads of `count` tokens from `start` on, out of the pages, as [count, D].
template <typename P>
void load_heads(const P* pages, const int32_t* table, int64_t start, int64_t count, int64_t kv_heads, int64_t head,
                int64_t dim, int64_t block_size, float* to) {
  int64_t block = start / block_size, offset = start % block_size;
  for (int64_t j = 0; j < count; ++block, offset = 0) {
    const int64_t stop = std::min(count, j + block_size - offset);
    const P* from = pages + ((table[block] * block_size + offset) * kv_heads + head) * cell<P>(dim);
    const int64_t stride = kv_heads * cell<P>(dim);
    for (; j < stop; ++j, from += stride) {
      for (int64_t i = 0; i < cell<P>(dim); i += 64 / sizeof(P)) __builtin_prefetch(from + kKeysAhead * stride + i);
      load_head(from, to + j * dim, dim);
    }
  }
}

}  // namespace
