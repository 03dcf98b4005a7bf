// Products of tokens with weights in 8 or 4 bits, after the instruction that multiplies bytes (AVX512-VNNI).
//
// A token is rounded to 8 bits first, with a scale for each 128 of its inputs; sums of a span are exact integers.
// Weights are packed so that four inputs of 64 outputs lie together: memory is read in one stream, and a vector of sums
// holds 16 outputs, which need not be added up at the end.
//
// Legend: T tokens, I inputs (padded to whole spans), O outputs (padded to whole tiles), G groups of inputs.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define HAS_PRODUCTS 1
#include <immintrin.h>
#endif

#ifdef HAS_PRODUCTS

namespace {

constexpr int64_t kSpan = 128;     // inputs of a token that share a scale
constexpr int64_t kGroup = 32;     // inputs of a 4-bit weight that share one at least
constexpr int kVectors = 4;        // of sums, for the outputs of a tile
constexpr int kTile = 64;          // outputs
constexpr int kMostTokens = 6;     // 24 vectors of sums, four of the weight and one of a token fit 32 registers
constexpr int64_t kAhead = 4096;   // bytes that are asked of memory before they are needed

enum Format { kInt8 = 1, kInt4 = 2, kInt4Zeros = 3 };

struct Weight {
  const uint8_t* data;  // kInt8: [O / 64, I / 4, 64, 4], plus 128; else [O / 64, I / 8, 64, 4]: 4 inputs low, 4 high
  const void* scales;   // kInt8: float32 [O]; kInt4: bfloat16 [O / 64, G, 64]; kInt4Zeros: float16 [O / 64, G, 2, 64]
  int format;
  int64_t group, inputs, outputs;
};

// What is known of some tokens.
struct Tokens {
  const int8_t* data;    // [T, I]
  const int32_t* sums;   // of each 32 inputs: [T, I / 32]
  const float* scales;   // [T, I / 128]
};

void round_token(const bfloat16* x, int64_t inputs, int8_t* data, int32_t* sums, float* scales) {
  for (int64_t start = 0; start < inputs; start += kSpan) {
    const int64_t count = std::min(kSpan, inputs - start);
    float values[kSpan] = {};
    widen(x + start, values, count);
    float most = 1e-30f;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < kSpan; ++i) most = std::max(most, std::fabs(values[i]));
    const float steps = 127.0f / most;
    *scales++ = most / 127.0f;
    int8_t* to = data + start;
#pragma omp simd
    for (int64_t i = 0; i < kSpan; ++i) to[i] = static_cast<int8_t>(std::nearbyint(values[i] * steps));
    for (int64_t g = 0; g < kSpan; g += kGroup) {
      int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < kGroup; ++i) sum += to[g + i];
      *sums++ = sum;
    }
  }
}

inline __m512i four_inputs(const int8_t* from) {
  int32_t bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return _mm512_set1_epi32(bytes);
}

// sums += value * scale
inline void add(float* sums, __m512i value, __m512 scale) {
  _mm512_storeu_ps(sums, _mm512_fmadd_ps(_mm512_cvtepi32_ps(value), scale, _mm512_loadu_ps(sums)));
}

template <int C>
void add_int8(const Weight& weight, int64_t tile, const Tokens& x, float (*sums)[kTile]) {
  const int64_t spans = weight.inputs / kSpan;
  const uint8_t* from = weight.data + tile * kTile * weight.inputs;
  for (int64_t s = 0; s < spans; ++s) {
    __m512i acc[C][kVectors];
    for (int c = 0; c < C; ++c) {
      const int32_t* of_span = x.sums + (c * spans + s) * 4;
      const __m512i shift = _mm512_set1_epi32(-128 * (of_span[0] + of_span[1] + of_span[2] + of_span[3]));
      for (int v = 0; v < kVectors; ++v) acc[c][v] = shift;
    }
#pragma GCC unroll 2
    for (int64_t k = 0; k < kSpan; k += 4, from += 4 * kTile) {
      __m512i w[kVectors];
      for (int v = 0; v < kVectors; ++v) w[v] = _mm512_loadu_si512(from + v * 64);
      if (C == 1)
        for (int v = 0; v < kVectors; ++v) __builtin_prefetch(from + v * 64 + kAhead);
      for (int c = 0; c < C; ++c) {
        const __m512i token = four_inputs(x.data + c * weight.inputs + s * kSpan + k);
        for (int v = 0; v < kVectors; ++v) acc[c][v] = _mm512_dpbusd_epi32(acc[c][v], w[v], token);
      }
    }
    for (int c = 0; c < C; ++c)
      for (int v = 0; v < kVectors; ++v) add(&sums[c][v * 16], acc[c][v], _mm512_set1_ps(x.scales[c * spans + s]));
  }
  const float* scales = static_cast<const float*>(weight.scales) + tile * kTile;
  for (int c = 0; c < C; ++c)
    for (int i = 0; i < kTile; ++i) sums[c][i] *= scales[i];
}

// 16 scales, and what is to be taken off each of 16 codes.
inline void group_scales(const Weight& weight, int64_t tile, int64_t group, int v, __m512& scale, __m512& zero) {
  const int64_t groups = (weight.inputs + weight.group - 1) / weight.group;
  const auto* from = static_cast<const uint16_t*>(weight.scales);
  if (weight.format == kInt4) {
    from += (tile * groups + group) * kTile + v * 16;
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
    zero = _mm512_set1_ps(8.0f);
  } else {
    from += (tile * groups + group) * 2 * kTile + v * 16;
    scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    zero = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + kTile)));
  }
}

template <int C>
void add_int4(const Weight& weight, int64_t tile, const Tokens& x, float (*sums)[kTile]) {
  const int64_t groups = weight.inputs / kGroup;
  const uint8_t* from = weight.data + tile * kTile * weight.inputs / 2;
  const __m512i low_half = _mm512_set1_epi8(0x0f);
  for (int64_t g = 0; g < groups; ++g) {
    __m512i acc[C][kVectors];
    for (int c = 0; c < C; ++c)
      for (int v = 0; v < kVectors; ++v) acc[c][v] = _mm512_setzero_si512();
    for (int64_t k = 0; k < kGroup; k += 8, from += 4 * kTile) {
      __m512i low[kVectors], high[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const __m512i both = _mm512_loadu_si512(from + v * 64);
        low[v] = _mm512_and_si512(both, low_half);
        high[v] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
        if (C == 1) __builtin_prefetch(from + v * 64 + kAhead);
      }
      for (int c = 0; c < C; ++c) {
        const int8_t* token = x.data + c * weight.inputs + g * kGroup + k;
        for (int v = 0; v < kVectors; ++v) acc[c][v] = _mm512_dpbusd_epi32(acc[c][v], low[v], four_inputs(token));
        for (int v = 0; v < kVectors; ++v) acc[c][v] = _mm512_dpbusd_epi32(acc[c][v], high[v], four_inputs(token + 4));
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      __m512 scale, zero;
      group_scales(weight, tile, g * kGroup / weight.group, v, scale, zero);
      for (int c = 0; c < C; ++c) {
        const __m512 of_token = _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[c * (groups / 4) + g / 4]));
        const __m512 sum = _mm512_set1_ps(static_cast<float>(x.sums[c * groups + g]));
        const __m512 value = _mm512_fnmadd_ps(zero, sum, _mm512_cvtepi32_ps(acc[c][v]));
        float* to = &sums[c][v * 16];
        _mm512_storeu_ps(to, _mm512_fmadd_ps(value, of_token, _mm512_loadu_ps(to)));
      }
    }
  }
}

template <int C>
void multiply_tile(const Weight& weight, int64_t tile, const Tokens& x, float (*sums)[kTile]) {
  std::fill(sums[0], sums[C], 0.0f);
  weight.format == kInt8 ? add_int8<C>(weight, tile, x, sums) : add_int4<C>(weight, tile, x, sums);
}

void multiply_tokens(int64_t count, const Weight& weight, int64_t tile, const Tokens& x, float (*sums)[kTile]) {
  switch (count) {
    case 1: return multiply_tile<1>(weight, tile, x, sums);
    case 2: return multiply_tile<2>(weight, tile, x, sums);
    case 3: return multiply_tile<3>(weight, tile, x, sums);
    case 4: return multiply_tile<4>(weight, tile, x, sums);
    case 5: return multiply_tile<5>(weight, tile, x, sums);
    default: return multiply_tile<kMostTokens>(weight, tile, x, sums);
  }
}

template <typename Out>
void linear(const bfloat16* x, int64_t x_width, const Weight& weight, const bfloat16* bias, Out* out, int64_t tokens) {
  const int64_t inputs = weight.inputs, spans = inputs / kSpan, groups = inputs / kGroup;
  const int64_t tiles = (weight.outputs + kTile - 1) / kTile;
  const int64_t turns = (tokens + kMostTokens - 1) / kMostTokens;
  std::vector<int8_t> data(tokens * inputs);
  std::vector<int32_t> sums(tokens * groups);
  std::vector<float> scales(tokens * spans);
#pragma omp parallel if (inputs * weight.outputs >= kWorthThreads)
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t)
      round_token(x + t * x_width, x_width, &data[t * inputs], &sums[t * groups], &scales[t * spans]);
#pragma omp for schedule(static)
    for (int64_t tile = 0; tile < tiles; ++tile)
      for (int64_t turn = 0; turn < turns; ++turn) {
        const int64_t t = tokens * turn / turns;
        const int64_t count = tokens * (turn + 1) / turns - t;
        const int64_t first = tile * kTile, columns = std::min<int64_t>(kTile, weight.outputs - first);
        float of_tile[kMostTokens][kTile];
        multiply_tokens(count, weight, tile, {&data[t * inputs], &sums[t * groups], &scales[t * spans]}, of_tile);
        for (int64_t c = 0; c < count; ++c) {
          Out* to = out + (t + c) * weight.outputs + first;
          for (int64_t i = 0; i < columns; ++i) store(to + i, of_tile[c][i] + (bias ? to_float(bias[first + i]) : 0.0f));
        }
      }
  }
}

}  // namespace

#endif

extern "C" {

int baton_has_products() {
#ifdef HAS_PRODUCTS
  return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw");
#else
  return 0;
#endif
}

#ifdef HAS_PRODUCTS
void baton_linear(const void* x, const void* data, const void* scales, int format, int64_t group, const void* bias,
                  void* out, int is_out_float32, int64_t tokens, int64_t x_width, int64_t inputs, int64_t outputs) {
  const Weight weight{static_cast<const uint8_t*>(data), scales, format, group, inputs, outputs};
  const auto* rows = static_cast<const bfloat16*>(x);
  const auto* shift = static_cast<const bfloat16*>(bias);
  if (is_out_float32) {
    linear(rows, x_width, weight, shift, static_cast<float*>(out), tokens);
  } else {
    linear(rows, x_width, weight, shift, static_cast<bfloat16*>(out), tokens);
  }
}
#endif
}
