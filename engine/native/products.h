// Products of tokens with weights, in bfloat16 or with weights in 8 or 4 bits: a part of the work of a parallel region.
//
// A weight is packed so that four bytes of 64 outputs lie together (dots.h): memory is read in one stream, and a vector
// of sums holds 16 outputs, which need not be added up at the end. For a weight of 8 or 4 bits a token is rounded to
// 8 bits first, with a scale for each 128 of its inputs; sums of a span are exact integers.
//
// Legend: T tokens, I inputs (padded to whole spans where tokens are rounded), O outputs (padded to whole tiles),
// G groups of inputs.

#pragma once

#include <atomic>

#include "dots.h"

#ifdef HAS_DOTS

namespace {

constexpr int64_t kSpan = 128;            // inputs of a token that share a scale
constexpr int64_t kGroup = 32;            // inputs of a weight that share one at least, where not all of an output do
constexpr int64_t kTokensAtOnce = 96;     // that a block of the weight is multiplied with before the next one
constexpr int64_t kBlockBytes = 256 << 10;  // of a tile of the weight that stay in a core's cache meanwhile
constexpr int64_t kAhead = 8192;          // bytes that are asked of memory before they are needed: whole spans

enum Format { kBf16 = 0, kInt8 = 1, kInt4 = 2, kInt4Zeros = 3, kInt8Groups = 4, kMxfp4 = 5 };

// As engine.native lays it out.
struct Weight {
  const char* data;    // kBf16: [O / 64, I / 2, 64, 2]; kInt8 and kInt8Groups: [O / 64, I / 4, 64, 4], plus 128;
                       // else [O / 64, I / 8, 64, 4]: 4 inputs low, 4 high
  const void* scales;  // kInt8: float32 [O]; kInt4: bfloat16 [O / 64, G, 64]; kInt4Zeros: float16 [O / 64, G, 2, 64];
                       // kInt8Groups: float16 [O / 64, G, 64];
                       // kMxfp4: uint8 [O / 64, G, 64], exponents of half of what E2M1 numbers are times
  int64_t format, group;
  int64_t width;            // inputs of a token
  int64_t inputs, outputs;  // inputs: as many as the weight is padded to; outputs: as many as are wanted
  const int64_t* order;     // of a weight that rounds, or null: [width], the input of a token that each input is

  bool rounds() const { return format != kBf16; }
  bool has_bytes() const { return format == kInt8 || format == kInt8Groups; }
  // Bytes of a tile for as many inputs.
  int64_t tile_bytes(int64_t count) const { return count * kColumns * (format == kBf16 ? 4 : has_bytes() ? 2 : 1) / 2; }
};

struct Matrix {
  Weight weight;
  const bfloat16* bias;  // or null
};

// Tokens as a weight is multiplied with them; for kBf16 `plain` alone, else the rest.
struct Rows {
  const bfloat16* plain;  // [T, I]
  int8_t* data;           // [T, I]
  int32_t* sums;          // of each 32 inputs: [T, I / 32]
  float* scales;          // [T, I / 128]
};

// Rounds token `t`, x [width], for a product with `w`.
void round_token(const bfloat16* x, const Weight& w, int64_t t, const Rows& to) {
  int8_t* data = to.data + t * w.inputs;
  int32_t* sums = to.sums + t * (w.inputs / kGroup);
  float* scales = to.scales + t * (w.inputs / kSpan);
  for (int64_t start = 0; start < w.inputs; start += kSpan, data += kSpan) {
    const int64_t count = std::min(kSpan, w.width - start);
    float values[kSpan] = {};
    if (w.order) {
      for (int64_t i = 0; i < count; ++i) values[i] = to_float(x[w.order[start + i]]);
    } else {
      widen(x + start, values, count);
    }
    float most = 1e-30f;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < kSpan; ++i) most = std::max(most, std::fabs(values[i]));
    const float steps = 127.0f / most;
    *scales++ = most / 127.0f;
#pragma omp simd
    for (int64_t i = 0; i < kSpan; ++i) data[i] = static_cast<int8_t>(std::nearbyint(values[i] * steps));
    for (int64_t g = 0; g < kSpan; g += kGroup) {
      int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < kGroup; ++i) sum += data[g + i];
      *sums++ = sum;
    }
  }
}

using Tile = float[kColumns];

inline void add(float* sums, __m512i value, __m512 scale) {
  _mm512_storeu_ps(sums, _mm512_fmadd_ps(_mm512_cvtepi32_ps(value), scale, _mm512_loadu_ps(sums)));
}

// Adds inputs [first, last) of C tokens from `t` on: `from` is where the tile has them.
template <int C, int kLines>
void add_bf16(const Weight& w, const char* from, const char* ahead, const Rows& x, int64_t t, int64_t first,
              int64_t last, Tile* to) {
  Sums sums;
  std::memcpy(sums, to, C * sizeof(Tile));
  const auto* rows = reinterpret_cast<const char*>(x.plain + t * w.width + first);
  dot<Pairs, C, kLines>(rows, 2 * w.width, from, kStepBytes, (last - first) / 2, sums, ahead);
  std::memcpy(to, sums, C * sizeof(Tile));
}

template <int C, int kLines>
void add_int8(const Weight& w, const char* from, const char* ahead, const Rows& x, int64_t t, int64_t first,
              int64_t last, Tile* to) {
  constexpr int64_t kSteps = kSpan / 4;
  const int64_t spans = w.inputs / kSpan;
  for (int64_t s = first / kSpan; s < last / kSpan; ++s, from += kSteps * kStepBytes, ahead += kSteps * kLines * kLine) {
    Sums sums;
    for (int c = 0; c < C; ++c) {
      const int32_t* of_span = x.sums + ((t + c) * spans + s) * 4;
      const __m512i shift = _mm512_set1_epi32(-128 * (of_span[0] + of_span[1] + of_span[2] + of_span[3]));
      for (int v = 0; v < kVectors; ++v) sums[c][v] = shift;
    }
    const auto* rows = reinterpret_cast<const char*>(x.data + t * w.inputs + s * kSpan);
    dot<Bytes, C, kLines>(rows, w.inputs, from, kStepBytes, kSteps, sums, ahead);
    for (int c = 0; c < C; ++c) {
      const __m512 scale = _mm512_set1_ps(x.scales[(t + c) * spans + s]);
      for (int v = 0; v < kVectors; ++v) add(&to[c][v * 16], sums[c][v], scale);
    }
  }
}

// 16 scales, and what is to be taken off each of 16 codes.
inline void group_scales(const Weight& w, int64_t tile, int64_t group, int v, __m512& scale, __m512& zero) {
  const int64_t groups = (w.inputs + w.group - 1) / w.group;
  const auto* from = static_cast<const uint16_t*>(w.scales);
  if (w.format == kMxfp4) {
    const auto* exponents = static_cast<const uint8_t*>(w.scales) + (tile * groups + group) * kColumns + v * 16;
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents));
    scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(raw), 23));
    zero = _mm512_set1_ps(12.0f);
  } else if (w.format == kInt4) {
    from += (tile * groups + group) * kColumns + v * 16;
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
    zero = _mm512_set1_ps(8.0f);
  } else {
    from += (tile * groups + group) * 2 * kColumns + v * 16;
    scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    zero = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + kColumns)));
  }
}

template <typename Codes, int C, int kLines>
void add_halves(const Weight& w, int64_t tile, const char* from, const char* ahead, const Rows& x, int64_t t,
              int64_t first, int64_t last, Tile* to) {
  constexpr int64_t kSteps = kGroup / 8;
  const int64_t groups = w.inputs / kGroup;
  for (int64_t g = first / kGroup; g < last / kGroup; ++g, from += kSteps * kStepBytes, ahead += kSteps * kLines * kLine) {
    Sums sums;
    for (int c = 0; c < C; ++c)
      for (int v = 0; v < kVectors; ++v) sums[c][v] = _mm512_setzero_si512();
    const auto* rows = reinterpret_cast<const char*>(x.data + t * w.inputs + g * kGroup);
    dot_halves<Codes, C, kLines>(rows, w.inputs, from, kSteps, sums, ahead);
    for (int v = 0; v < kVectors; ++v) {
      __m512 scale, zero;
      group_scales(w, tile, g * kGroup / w.group, v, scale, zero);
      for (int c = 0; c < C; ++c) {
        const __m512 of_token = _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[(t + c) * (groups / 4) + g / 4]));
        const __m512 sum = _mm512_set1_ps(static_cast<float>(x.sums[(t + c) * groups + g]));
        const __m512 value = _mm512_fnmadd_ps(zero, sum, _mm512_cvtepi32_ps(sums[c][v]));
        float* at = &to[c][v * 16];
        _mm512_storeu_ps(at, _mm512_fmadd_ps(value, of_token, _mm512_loadu_ps(at)));
      }
    }
  }
}

template <int C, int kLines>
void add_int8_groups(const Weight& w, int64_t tile, const char* from, const char* ahead, const Rows& x, int64_t t,
                     int64_t first, int64_t last, Tile* to) {
  constexpr int64_t kSteps = kGroup / 4;
  const int64_t groups = w.inputs / kGroup, scale_groups = (w.inputs + w.group - 1) / w.group;
  for (int64_t g = first / kGroup; g < last / kGroup; ++g, from += kSteps * kStepBytes, ahead += kSteps * kLines * kLine) {
    Sums sums;
    for (int c = 0; c < C; ++c) {
      const __m512i shift = _mm512_set1_epi32(-128 * x.sums[(t + c) * groups + g]);
      for (int v = 0; v < kVectors; ++v) sums[c][v] = shift;
    }
    const auto* rows = reinterpret_cast<const char*>(x.data + t * w.inputs + g * kGroup);
    dot<Bytes, C, kLines>(rows, w.inputs, from, kStepBytes, kSteps, sums, ahead);
    const auto* scales = static_cast<const uint16_t*>(w.scales) + (tile * scale_groups + g * kGroup / w.group) * kColumns;
    for (int v = 0; v < kVectors; ++v) {
      const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + v * 16)));
      for (int c = 0; c < C; ++c) {
        const __m512 of_token = _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[(t + c) * (groups / 4) + g / 4]));
        add(&to[c][v * 16], sums[c][v], of_token);
      }
    }
  }
}

// A part of the inputs of a tile: of which, what of it lies where, and what will be needed next.
struct Block {
  int64_t tile, first, last;
  const char* from;
  const char* ahead;
};

template <int C, int kLines>
void add_block(const Weight& w, const Block& b, const Rows& x, int64_t t, Tile* to) {
  switch (w.format) {
    case kBf16: return add_bf16<C, kLines>(w, b.from, b.ahead, x, t, b.first, b.last, to);
    case kInt8: return add_int8<C, kLines>(w, b.from, b.ahead, x, t, b.first, b.last, to);
    case kInt8Groups: return add_int8_groups<C, kLines>(w, b.tile, b.from, b.ahead, x, t, b.first, b.last, to);
    case kMxfp4: return add_halves<SmallFloats, C, kLines>(w, b.tile, b.from, b.ahead, x, t, b.first, b.last, to);
    default: return add_halves<Integers, C, kLines>(w, b.tile, b.from, b.ahead, x, t, b.first, b.last, to);
  }
}

template <int kLines>
void add_tokens(int64_t count, const Weight& w, const Block& b, const Rows& x, int64_t t, Tile* to) {
  switch (count) {
    case 1: return add_block<1, kLines>(w, b, x, t, to);
    case 2: return add_block<2, kLines>(w, b, x, t, to);
    case 3: return add_block<3, kLines>(w, b, x, t, to);
    case 4: return add_block<4, kLines>(w, b, x, t, to);
    case 5: return add_block<5, kLines>(w, b, x, t, to);
    default: return add_block<kMostRows, kLines>(w, b, x, t, to);
  }
}

// A few tokens times one block as it comes from memory, which is asked for all of it in time; its end asks for `next`.
void multiply_streamed(const Weight& w, Block b, const Rows& x, int64_t t, int64_t count, const char* next, Tile* sums) {
  const int64_t last = b.last, tail = kAhead * kSpan / w.tile_bytes(kSpan);
  b.ahead = b.from + kAhead;
  if (next && last - b.first > tail) {
    b.last = last - tail;
    add_tokens<4>(count, w, b, x, t, sums);
    b = {b.tile, b.last, last, b.from + w.tile_bytes(b.last - b.first), next};
  }
  add_tokens<4>(count, w, b, x, t, sums);
}

// Up to kTokensAtOnce tokens times one block, six at a time. The first six read it from memory, unless it was asked for
// during the block before (`is_near`); meanwhile the others ask for `next`, each for a part of it.
void multiply_block(const Weight& w, Block b, const Rows& x, int64_t start, int64_t tokens, bool is_near,
                    const char* next, Tile* sums) {
  const int64_t turns = (tokens + kMostRows - 1) / kMostRows;
  const int64_t bytes = w.tile_bytes(b.last - b.first);
  for (int64_t turn = 0; turn < turns; ++turn) {
    const int64_t t = tokens * turn / turns, count = tokens * (turn + 1) / turns - t;
    const auto take = [&](auto lines, const char* ahead) {
      b.ahead = ahead;
      add_tokens<lines.value>(count, w, b, x, start + t, sums + t);
    };
    if (turn == 0 && !is_near)
      multiply_streamed(w, b, x, start, count, next, sums);
    else if (!next || turn >= 4)
      take(std::integral_constant<int, 0>{}, b.from);
    else if (turns == 2 || (turns == 3 && turn == 2))
      take(std::integral_constant<int, 2>{}, next + bytes * (turns == 2 ? turn : 1) / 2);
    else
      take(std::integral_constant<int, 1>{}, next + bytes * turn / 4);
  }
}

template <typename Out>
void store_tile(const Weight& w, const bfloat16* bias, int64_t tile, const Tile* sums, int64_t start, int64_t tokens,
                Out* out) {
  const int64_t column = tile * kColumns, columns = std::min<int64_t>(kColumns, w.outputs - column);
  alignas(64) float scales[kColumns], shifts[kColumns] = {};
  for (int64_t i = 0; i < kColumns; ++i)
    scales[i] = w.format == kInt8 ? static_cast<const float*>(w.scales)[column + i] : 1.0f;
  if (bias) widen(bias + column, shifts, columns);
  for (int64_t t = 0; t < tokens; ++t) {
    Out* to = out + (start + t) * w.outputs + column;
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) store(to + i, sums[t][i] * scales[i] + shifts[i]);
  }
}

// How many tiles of a product have been taken; whoever is late takes fewer.
using Taken = std::atomic<int64_t>;

// A weight, its bias [O] or null, and the tokens that are multiplied with it.
struct Part {
  const Weight* weight;
  const bfloat16* bias;
  int64_t start, tokens;
};

// out [T, O]: the tokens of each part times its weight, plus its bias; weights are of one size and format. By all threads
// of the enclosing region, which wait for each other at the end.
template <typename Out>
void multiply(const Part* parts, int64_t num_parts, const Rows& x, Out* out, Taken& taken) {
  const Weight& any = *parts->weight;
  const int64_t tiles = (any.outputs + kColumns - 1) / kColumns, tile_bytes = any.tile_bytes(any.inputs);
  const int64_t at_once = kBlockBytes * kSpan / any.tile_bytes(kSpan), all = num_parts * tiles;
  bool is_near = false;
  alignas(64) Tile sums[kTokensAtOnce];
  for (int64_t unit = taken++, following; unit < all; unit = following) {
    following = taken++;
    const Part& part = parts[unit / tiles];
    const Weight& w = *part.weight;
    const int64_t tile = unit % tiles, end = part.start + part.tokens;
    const bool is_one_turn = part.tokens <= kMostRows, is_one_pass = part.tokens <= kTokensAtOnce;
    const char* of_tile = w.data + tile * tile_bytes;
    const char* of_following =
        following < all ? parts[following / tiles].weight->data + following % tiles * tile_bytes : nullptr;
    for (int64_t start = part.start; start < end; start += kTokensAtOnce) {
      const int64_t count = std::min(kTokensAtOnce, end - start);
      std::fill(sums[0], sums[count], 0.0f);
      for (int64_t first = 0; first < w.inputs; first += at_once) {
        const int64_t last = std::min(w.inputs, first + at_once);
        const char* next = last < w.inputs ? of_tile + w.tile_bytes(last) : of_following;
        if (!is_one_pass) next = nullptr;
        const char* from = of_tile + w.tile_bytes(first);
        multiply_block(w, {tile, first, last, from, from}, x, start, count, is_near, next, sums);
        is_near = next && !is_one_turn;
      }
      store_tile(w, part.bias, tile, sums, start, count, out);
    }
  }
#pragma omp barrier
}

}  // namespace

#endif
