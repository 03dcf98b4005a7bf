// What lies between the products of a layer, for one token: norms, the MLP's middle, rotary embedding with the store of
// keys and values. `engine.native` says what each computes. Sums are in float32; loops are left to the compiler.
//
// Legend: E hidden_size, W width of the MLP, Hq/H query/KV heads, D head_dim.

#pragma once

#include "pages.h"

namespace {

inline float dot_of(const float* a, const float* b, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// `add` or null is added to the row first, in place.
template <typename T>
void normalise(T* row, const T* add, const T* weight, T* out, int64_t width, float eps) {
  float sum = 0;
  if (add) {
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) {
      store(row + i, to_float(row[i]) + to_float(add[i]));
      const float value = to_float(row[i]);
      sum += value * value;
    }
  } else {
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) sum += to_float(row[i]) * to_float(row[i]);
  }
  const float scale = 1.0f / std::sqrt(sum / width + eps);
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) store(out + i, rounded(to_float(row[i]) * scale, T{}) * to_float(weight[i]));
}

enum Activation { kSilu = 0, kGeluTanh = 1, kClamped = 2 };

// What a gate makes of its input; limit and alpha are those of kClamped.
struct Gate {
  int64_t activation;
  float limit, alpha;
};

// Up to what exponents are taken: the compiler divides by reciprocals, and one of infinity is no number.
constexpr float kMostExponent = 80.0f;

inline float one_and_exp(float x) { return 1.0f + std::exp(std::min(x, kMostExponent)); }

// gate(x) * up of [2 W]; rounded at each step, as torch does.
template <typename T>
void gate(const Gate& of, const T* gate_up, T* out, int64_t width) {
  const T* up = gate_up + width;
  if (of.activation == kSilu) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      const float x = to_float(gate_up[i]);
      store(out + i, rounded(x / one_and_exp(-x), T{}) * to_float(up[i]));
    }
  } else if (of.activation == kGeluTanh) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      const float x = to_float(gate_up[i]);
      const float twice = 1.5957691216f * (x + 0.044715f * x * x * x);  // x (1 + tanh(y)) / 2 = x / (1 + exp(-2 y))
      store(out + i, rounded(x / one_and_exp(-twice), T{}) * to_float(up[i]));
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      const float x = std::min(to_float(gate_up[i]), of.limit);
      const float y = std::max(std::min(to_float(up[i]), of.limit), -of.limit);
      const float share = rounded(1.0f / one_and_exp(-rounded(x * of.alpha, T{})), T{});
      store(out + i, rounded(x * share, T{}) * rounded(y + 1.0f, T{}));
    }
  }
}

// A token's heads, in the middle of a layer.
template <typename T>
struct Heads {
  T* token;             // [Hq + 2 H, D]
  const T* norm;        // [Hq + H, D] or null
  const T* cos;         // [D]
  const T* sin;         // [D], the first half negative: dimension i turns with i + D/2
  int64_t q_heads, kv_heads, dim;
  float eps;

  // Query and key heads [first, last), in place.
  void rotate(int64_t first, int64_t last) const {
    const int64_t half = dim / 2;
    float turned[512], plain[512];
    for (int64_t h = first; h < last; ++h) {
      T* head = token + h * dim;
      widen(head, plain, dim);
      if (norm) {
        const T* weight = norm + h * dim;
        const float scale = 1.0f / std::sqrt(dot_of(plain, plain, dim) / dim + eps);
        for (int64_t i = 0; i < dim; ++i)
          plain[i] = rounded(rounded(plain[i] * scale, T{}) * to_float(weight[i]), T{});
      }
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        turned[i] = plain[i] * to_float(cos[i]) + plain[i + half] * to_float(sin[i]);
        turned[i + half] = plain[i + half] * to_float(cos[i + half]) + plain[i] * to_float(sin[i + half]);
      }
#pragma omp simd
      for (int64_t i = 0; i < dim; ++i) store(head + i, turned[i]);
    }
  }

  // KV heads [first, last), rotated before.
  template <typename P>
  void keep(int64_t first, int64_t last, int64_t slot, P* k_pages, P* v_pages) const {
    for (int64_t h = first; h < last; ++h) {
      const int64_t at = (slot * kv_heads + h) * cell<P>(dim);
      store_head(token + (q_heads + h) * dim, k_pages + at, dim);
      store_head(token + (q_heads + kv_heads + h) * dim, v_pages + at, dim);
    }
  }
};

}  // namespace
