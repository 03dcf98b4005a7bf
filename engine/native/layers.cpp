// What lies between the products of a layer: norms, the MLP's middle, rotary embedding with the store of keys and values.
//
// `engine.native` says what each function computes. Raw pointers to contiguous rows unless a stride is given; sums are in
// float32; threads are OpenMP's, which torch's library shares. Loops are left to the compiler to vectorize.
//
// Legend: T tokens, D head_dim.

#include "pages.h"

namespace {

inline float dot(const float* a, const float* b, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

template <typename T>
void rms_norm(T* x, int64_t x_stride, const T* add, const T* weight, T* out, int64_t tokens, int64_t width, float eps) {
#pragma omp parallel for if (tokens * width >= kWorthThreads && tokens > 1)
  for (int64_t t = 0; t < tokens; ++t) {
    T* row = x + t * x_stride;
    float sum = 0;
    if (add) {
      const T* other = add + t * width;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < width; ++i) {
        store(row + i, to_float(row[i]) + to_float(other[i]));
        const float value = to_float(row[i]);
        sum += value * value;
      }
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < width; ++i) sum += to_float(row[i]) * to_float(row[i]);
    }
    const float scale = 1.0f / std::sqrt(sum / width + eps);
    T* to = out + t * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) store(to + i, rounded(to_float(row[i]) * scale, T{}) * to_float(weight[i]));
  }
}

template <typename T>
void silu_mul(const T* gate_up, T* out, int64_t tokens, int64_t width) {
#pragma omp parallel for if (tokens * width >= kWorthThreads)
  for (int64_t t = 0; t < tokens; ++t) {
    const T* gate = gate_up + 2 * t * width;
    const T* up = gate + width;
    T* to = out + t * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      const float x = to_float(gate[i]);
      store(to + i, rounded(x / (1.0f + std::exp(-x)), T{}) * to_float(up[i]));
    }
  }
}

// cos and sin are [T, D], the first half of sin negative: dimension i turns with i + D/2.
template <typename T, typename P>
void rotate_and_store(T* qkv, const T* head_norm, float eps, const T* cos, const T* sin, const int64_t* slots, P* k_pages,
                      P* v_pages, int64_t tokens, int64_t q_heads, int64_t kv_heads, int64_t dim) {
  const int64_t half = dim / 2;
#pragma omp parallel for if (tokens * (q_heads + kv_heads) * dim >= kWorthThreads)
  for (int64_t t = 0; t < tokens; ++t) {
    float turned[512], plain[512];
    T* token = qkv + t * (q_heads + 2 * kv_heads) * dim;
    const T* c = cos + t * dim;
    const T* s = sin + t * dim;
    for (int64_t h = 0; h < q_heads + kv_heads; ++h) {
      T* head = token + h * dim;
      widen(head, plain, dim);
      if (head_norm) {
        const T* weight = head_norm + h * dim;
        const float scale = 1.0f / std::sqrt(dot(plain, plain, dim) / dim + eps);
        for (int64_t i = 0; i < dim; ++i)
          plain[i] = rounded(rounded(plain[i] * scale, T{}) * to_float(weight[i]), T{});
      }
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        turned[i] = plain[i] * to_float(c[i]) + plain[i + half] * to_float(s[i]);
        turned[i + half] = plain[i + half] * to_float(c[i + half]) + plain[i] * to_float(s[i + half]);
      }
#pragma omp simd
      for (int64_t i = 0; i < dim; ++i) store(head + i, turned[i]);
    }
    for (int64_t h = 0; h < kv_heads; ++h) {
      const int64_t at = (slots[t] * kv_heads + h) * cell<P>(dim);
      store_head(token + (q_heads + h) * dim, k_pages + at, dim);
      store_head(token + (q_heads + kv_heads + h) * dim, v_pages + at, dim);
    }
  }
}

}  // namespace

extern "C" {

#define BATON_FLOATING(NAME, T)                                                                                        \
  void baton_rms_norm_##NAME(void* x, int64_t x_stride, const void* add, const void* weight, void* out,               \
                             int64_t tokens, int64_t width, float eps) {                                              \
    rms_norm(static_cast<T*>(x), x_stride, static_cast<const T*>(add), static_cast<const T*>(weight),                 \
             static_cast<T*>(out), tokens, width, eps);                                                               \
  }                                                                                                                    \
  void baton_silu_mul_##NAME(const void* gate_up, void* out, int64_t tokens, int64_t width) {                         \
    silu_mul(static_cast<const T*>(gate_up), static_cast<T*>(out), tokens, width);                                    \
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
