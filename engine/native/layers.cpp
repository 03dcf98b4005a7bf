// What lies between the products of a layer, as functions for engine.native.
//
// Raw pointers to contiguous rows unless a stride is given; threads are OpenMP's, which torch's library shares.
//
// Legend: T tokens.

#include "layers.h"

namespace {

template <typename T>
void rms_norm(T* x, int64_t x_stride, const T* add, const T* weight, T* out, int64_t tokens, int64_t width, float eps) {
#pragma omp parallel for if (tokens * width >= kWorthThreads && tokens > 1)
  for (int64_t t = 0; t < tokens; ++t)
    normalise(x + t * x_stride, add ? add + t * width : nullptr, weight, out + t * width, width, eps);
}

template <typename T>
void gate_mul(const Gate& gating, const T* gate_up, T* out, int64_t tokens, int64_t width) {
#pragma omp parallel for if (tokens * width >= kWorthThreads)
  for (int64_t t = 0; t < tokens; ++t) gate(gating, gate_up + 2 * t * width, out + t * width, width);
}

// cos and sin are [T, D].
template <typename T, typename P>
void rotate_and_store(T* qkv, const T* head_norm, float eps, const T* cos, const T* sin, const int64_t* slots, P* k_pages,
                      P* v_pages, int64_t tokens, int64_t q_heads, int64_t kv_heads, int64_t dim) {
#pragma omp parallel for if (tokens * (q_heads + kv_heads) * dim >= kWorthThreads)
  for (int64_t t = 0; t < tokens; ++t) {
    T* token = qkv + t * (q_heads + 2 * kv_heads) * dim;
    const Heads<T> heads{token, head_norm, cos + t * dim, sin + t * dim, q_heads, kv_heads, dim, eps};
    heads.rotate(0, q_heads + kv_heads);
    heads.keep(0, kv_heads, slots[t], k_pages, v_pages);
  }
}

// Words have a bit for each output, the lowest first; those whose bit is not set become `nothing`, row by row.
void mask_row(float* row, const uint32_t* words, int64_t width, float nothing) {
  for (int64_t at = 0; at < width; at += 32) {
    const uint32_t word = words[at / 32];  // whether all are set is as likely as not: no branch
    const int64_t end = at + 32 < width ? 32 : width - at;
    for (int64_t i = 0; i < end; ++i) row[at + i] = (word >> i) & 1 ? row[at + i] : nothing;
  }
}

// The first of the largest numbers in a row among those that its words, as above, have a bit for; of all, without words
// or where they have none. Which are kept is asked where a block has a number larger than the best so far, or few bits.
int64_t largest_kept(const float* row, const uint32_t* words, int64_t width, float nothing) {
  constexpr int64_t kBlock = 64, kFew = 4;
  float best = nothing;
  int64_t best_at = -1, first = -1;
  for (int64_t block = 0; block < width; block += kBlock) {
    const int64_t count = std::min(kBlock, width - block);
    const float* values = row + block;
    uint64_t kept = ~uint64_t{0} >> (kBlock - count);
    if (words) kept &= words[block / 32] | (count > 32 ? uint64_t{words[block / 32 + 1]} << 32 : 0);
    if (!kept) continue;
    if (first < 0) first = block + __builtin_ctzll(kept);
    if (count == kBlock && __builtin_popcountll(kept) > kFew) {
      float largest = nothing;
#pragma omp simd reduction(max : largest)
      for (int64_t i = 0; i < kBlock; ++i) largest = values[i] > largest ? values[i] : largest;
      if (!(largest > best)) continue;
    }
    for (; kept; kept &= kept - 1) {
      const int64_t i = __builtin_ctzll(kept);
      if (values[i] > best) best = values[i], best_at = block + i;
    }
  }
  return std::max(best_at < 0 ? first : best_at, int64_t{0});
}

}  // namespace

extern "C" {

// rows and words have `count` entries: of logits [., width] these rows, and what each of them keeps.
void baton_mask_rows(float* logits, int64_t stride, int64_t width, const int64_t* rows, const uint32_t* const* words,
                     int64_t count, float nothing) {
#pragma omp parallel for if (count * width >= kWorthThreads && count > 1)
  for (int64_t i = 0; i < count; ++i) mask_row(logits + rows[i] * stride, words[i], width, nothing);
}

// Of logits [rows, width] the largest in each row among what it keeps, as its words say; null: all of them.
void baton_largest_kept(const float* logits, int64_t stride, int64_t width, const uint32_t* const* words, int64_t rows,
                        float nothing, int64_t* at) {
#pragma omp parallel for if (rows * width >= kWorthThreads && rows > 1)
  for (int64_t i = 0; i < rows; ++i) at[i] = largest_kept(logits + i * stride, words[i], width, nothing);
}

#define BATON_FLOATING(NAME, T)                                                                                        \
  void baton_rms_norm_##NAME(void* x, int64_t x_stride, const void* add, const void* weight, void* out,               \
                             int64_t tokens, int64_t width, float eps) {                                              \
    rms_norm(static_cast<T*>(x), x_stride, static_cast<const T*>(add), static_cast<const T*>(weight),                 \
             static_cast<T*>(out), tokens, width, eps);                                                               \
  }                                                                                                                    \
  void baton_silu_mul_##NAME(const void* gate_up, void* out, int64_t tokens, int64_t width) {                         \
    gate_mul({kSilu, 0.0f, 0.0f}, static_cast<const T*>(gate_up), static_cast<T*>(out), tokens, width);               \
  }                                                                                                                    \
  void baton_gelu_mul_##NAME(const void* gate_up, void* out, int64_t tokens, int64_t width) {                         \
    gate_mul({kGeluTanh, 0.0f, 0.0f}, static_cast<const T*>(gate_up), static_cast<T*>(out), tokens, width);           \
  }

// NAME: of the type that is computed in, T, and of the pages', P.
#define BATON_PAGES(NAME, T, P)                                                                                        \
  void baton_rotate_and_store_##NAME(void* qkv, const void* head_norm, float eps, const void* cos, const void* sin,   \
                                     const int64_t* slots, void* k_pages, void* v_pages, int64_t tokens,              \
                                     int64_t q_heads, int64_t kv_heads, int64_t dim) {                                \
    rotate_and_store(static_cast<T*>(qkv), static_cast<const T*>(head_norm), eps, static_cast<const T*>(cos),         \
                     static_cast<const T*>(sin), slots, static_cast<P*>(k_pages), static_cast<P*>(v_pages), tokens,   \
                     q_heads, kv_heads, dim);                                                                         \
  }

BATON_FLOATING(float32, float)
BATON_FLOATING(bfloat16, bfloat16)
BATON_PAGES(float32, float, float)
BATON_PAGES(bfloat16, bfloat16, bfloat16)
BATON_PAGES(float32_int8, float, int8_t)
BATON_PAGES(bfloat16_int8, bfloat16, int8_t)
}
