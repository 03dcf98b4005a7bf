// What a step on the CPU spends its time in, for engine.native, which says what each function computes.
//
// Plain C at the outside; raw pointers to contiguous rows unless a stride is given. Nothing is allocated but scratch of
// a thread, nothing is kept. Sums are in float32. Threads are OpenMP's, which torch's library shares.
//
// Legend: T tokens, I inputs, O outputs, Hq/H query/KV heads, G query heads of a KV head, D head_dim, K block_size.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_BF16_DOT 1
#include <immintrin.h>
#endif

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
  typedef uint32_t __attribute__((may_alias)) Bits;
  auto* bits = reinterpret_cast<Bits*>(to);
  const auto* source = reinterpret_cast<const uint16_t*>(from);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) bits[i] = static_cast<uint32_t>(source[i]) << 16;
}

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

inline float dot(const float* a, const float* b, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// Work below this many elements is not worth waking other threads for.
constexpr int64_t kWorthThreads = 32768;

// ------------------------------------------------------------------------------------------------ norms, MLP, rope

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

// ------------------------------------------------------------------------------------------------ paged attention

constexpr int64_t kChunk = 64;  // keys whose scores are taken at once
constexpr int64_t kAhead = 12;  // keys that are asked of memory before they are needed
constexpr int kLanes = 16;

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float))));

inline Lanes at(const float* from) { return *reinterpret_cast<const Lanes*>(from); }

#define BATON_HALVES(A, B, ...) (__builtin_shufflevector(A, B, __VA_ARGS__))

// The sums of 16 vectors as one: halves of two are added side by side until each has one lane.
inline Lanes sums_of(Lanes* x) {
  for (int i = 0; i < 8; ++i)
    x[i] = BATON_HALVES(x[2 * i], x[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           BATON_HALVES(x[2 * i], x[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  for (int i = 0; i < 4; ++i)
    x[i] = BATON_HALVES(x[2 * i], x[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           BATON_HALVES(x[2 * i], x[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  for (int i = 0; i < 2; ++i)
    x[i] = BATON_HALVES(x[2 * i], x[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           BATON_HALVES(x[2 * i], x[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  return BATON_HALVES(x[0], x[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         BATON_HALVES(x[0], x[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// What a thread needs for the query heads of one KV head.
struct Scratch {
  std::vector<float> query, sum, scores, keys, best, total;

  Scratch(int64_t group, int64_t dim)
      : query(group * dim), sum(group * dim), scores(group * kChunk), keys(kChunk * dim), best(group), total(group) {}
};

// Scores of `count` keys [count, D] for G heads: 16 at once, so that their sums are taken together.
template <int G>
void score(const float* query, const float* keys, float* scores, int64_t count, int64_t dim) {
  constexpr int kKeys = kLanes / G;
  for (int64_t j = 0; j < count; j += kKeys) {
    Lanes acc[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes)
      for (int g = 0; g < G; ++g) {
        const Lanes head = at(query + g * dim + i);
        for (int k = 0; k < kKeys; ++k) acc[g * kKeys + k] += head * at(keys + (j + k) * dim + i);
      }
    const Lanes sums = sums_of(acc);
    for (int g = 0; g < G; ++g)
      for (int k = 0; k < kKeys; ++k) {
        float sum = sums[g * kKeys + k];
        for (int64_t d = i; d < dim; ++d) sum += query[g * dim + d] * keys[(j + k) * dim + d];
        scores[g * kChunk + j + k] = sum;
      }
  }
}

// sum[g] += scores[g] @ values [count, D], for G heads at once, four vectors of D at a time in registers.
template <int G>
void mix(const float* scores, const float* values, float* sum, int64_t count, int64_t dim) {
  constexpr int kWide = 4;
  int64_t i = 0;
  for (; i + kWide * kLanes <= dim; i += kWide * kLanes) {
    Lanes acc[G][kWide];
    for (int g = 0; g < G; ++g)
      for (int v = 0; v < kWide; ++v) acc[g][v] = at(sum + g * dim + i + v * kLanes);
    for (int64_t j = 0; j < count; ++j) {
      Lanes value[kWide];
      for (int v = 0; v < kWide; ++v) value[v] = at(values + j * dim + i + v * kLanes);
      for (int g = 0; g < G; ++g)
        for (int v = 0; v < kWide; ++v) acc[g][v] += value[v] * scores[g * kChunk + j];
    }
    for (int g = 0; g < G; ++g)
      for (int v = 0; v < kWide; ++v) *reinterpret_cast<Lanes*>(sum + g * dim + i + v * kLanes) = acc[g][v];
  }
  for (int g = 0; g < G; ++g)
    for (int64_t j = 0; j < count; ++j)
      for (int64_t k = i; k < dim; ++k) sum[g * dim + k] += scores[g * kChunk + j] * values[j * dim + k];
}

// Query heads are taken four at a time, then one by one.

inline void score_all(Scratch& s, int64_t group, int64_t count, int64_t dim) {
  int64_t g = 0;
  for (; g + 4 <= group; g += 4) score<4>(&s.query[g * dim], s.keys.data(), &s.scores[g * kChunk], count, dim);
  for (; g < group; ++g) score<1>(&s.query[g * dim], s.keys.data(), &s.scores[g * kChunk], count, dim);
}

inline void mix_all(Scratch& s, int64_t group, int64_t count, int64_t dim) {
  int64_t g = 0;
  for (; g + 4 <= group; g += 4) mix<4>(&s.scores[g * kChunk], s.keys.data(), &s.sum[g * dim], count, dim);
  for (; g < group; ++g) mix<1>(&s.scores[g * kChunk], s.keys.data(), &s.sum[g * dim], count, dim);
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
      for (int64_t i = 0; i < cell<P>(dim); i += 64 / sizeof(P)) __builtin_prefetch(from + kAhead * stride + i);
      load_head(from, to + j * dim, dim);
    }
  }
}

// One query token of one sequence and the query heads of one KV head, over keys [first, end).
template <typename T, typename P>
void attend(const T* q, const P* k_pages, const P* v_pages, const int32_t* table, T* out, int64_t first, int64_t end,
            int64_t group, int64_t kv_heads, int64_t head, int64_t dim, int64_t block_size, float scale, Scratch& s) {
  for (int64_t i = 0; i < group * dim; ++i) s.query[i] = to_float(q[i]) * scale;
  std::fill(s.sum.begin(), s.sum.end(), 0.0f);
  std::fill(s.best.begin(), s.best.end(), -1e30f);
  std::fill(s.total.begin(), s.total.end(), 0.0f);
  for (int64_t start = first; start < end; start += kChunk) {
    const int64_t count = std::min(kChunk, end - start);
    load_heads(k_pages, table, start, count, kv_heads, head, dim, block_size, s.keys.data());
    score_all(s, group, count, dim);
    for (int64_t g = 0; g < group; ++g) {
      float* of = &s.scores[g * kChunk];
      float most = s.best[g];
#pragma omp simd reduction(max : most)
      for (int64_t j = 0; j < count; ++j) most = std::max(most, of[j]);
      float added = 0;
#pragma omp simd reduction(+ : added)
      for (int64_t j = 0; j < count; ++j) {
        of[j] = std::exp(of[j] - most);
        added += of[j];
      }
      const float shrink = std::exp(s.best[g] - most);
      s.best[g] = most;
      s.total[g] = s.total[g] * shrink + added;
      float* so_far = &s.sum[g * dim];
#pragma omp simd
      for (int64_t i = 0; i < dim; ++i) so_far[i] *= shrink;
    }
    load_heads(v_pages, table, start, count, kv_heads, head, dim, block_size, s.keys.data());
    mix_all(s, group, count, dim);
  }
  for (int64_t g = 0; g < group; ++g) {
    const float of_total = 1.0f / s.total[g];
#pragma omp simd
    for (int64_t i = 0; i < dim; ++i) store(out + g * dim + i, s.sum[g * dim + i] * of_total);
  }
}

template <typename T, typename P>
void paged_attention(const T* q, int64_t q_stride, const P* k_pages, const P* v_pages, const int32_t* tables,
                     int64_t table_width, const int32_t* lengths, const int64_t* rows, T* out, int64_t sequences,
                     int64_t q_heads, int64_t kv_heads, int64_t dim, int64_t block_size, float scale, int64_t window) {
  const int64_t group = q_heads / kv_heads;
#pragma omp parallel if (sequences * kv_heads > 1)
  {
    Scratch scratch(group, dim);
#pragma omp for collapse(2) schedule(dynamic, kv_heads)
    for (int64_t s = 0; s < sequences; ++s) {
      for (int64_t h = 0; h < kv_heads; ++h) {
        const int64_t end = lengths[s];
        const int64_t first = window < 0 ? 0 : std::max<int64_t>(0, end - 1 - window);
        attend(q + rows[s] * q_stride + h * group * dim, k_pages, v_pages, tables + s * table_width,
               out + (rows[s] * q_heads + h * group) * dim, first, end, group, kv_heads, h, dim, block_size, scale,
               scratch);
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------ products

#ifdef HAS_BF16_DOT

constexpr int kRows = 4;     // of the weight, whose bytes are read once for
constexpr int kColumns = 6;  // tokens: 24 sums, 4 weights and a token's vector fit 32 registers

inline __m512bh load(const bfloat16* from, __mmask32 mask) {
  return (__m512bh)_mm512_maskz_loadu_epi16(mask, from);
}

template <int C>
void dot_tile(const bfloat16* w, const bfloat16* x, int64_t inputs, float sums[kRows][kColumns]) {
  __m512 acc[kRows][C];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = _mm512_setzero_ps();
  const int64_t whole = inputs & ~int64_t{31};
  for (int64_t i = 0; i < whole; i += 32) {
    __m512bh weights[kRows];
    for (int r = 0; r < kRows; ++r) weights[r] = (__m512bh)_mm512_loadu_si512(w + r * inputs + i);
    for (int c = 0; c < C; ++c) {
      const __m512bh token = (__m512bh)_mm512_loadu_si512(x + c * inputs + i);
      for (int r = 0; r < kRows; ++r) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], weights[r], token);
    }
  }
  if (whole < inputs) {
    const __mmask32 mask = (uint32_t{1} << (inputs - whole)) - 1;
    for (int c = 0; c < C; ++c) {
      const __m512bh token = load(x + c * inputs + whole, mask);
      for (int r = 0; r < kRows; ++r)
        acc[r][c] = _mm512_dpbf16_ps(acc[r][c], load(w + r * inputs + whole, mask), token);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = _mm512_reduce_add_ps(acc[r][c]);
}

void dot_tiles(int columns, const bfloat16* w, const bfloat16* x, int64_t inputs, float sums[kRows][kColumns]) {
  switch (columns) {
    case 1: return dot_tile<1>(w, x, inputs, sums);
    case 2: return dot_tile<2>(w, x, inputs, sums);
    case 3: return dot_tile<3>(w, x, inputs, sums);
    case 4: return dot_tile<4>(w, x, inputs, sums);
    case 5: return dot_tile<5>(w, x, inputs, sums);
    default: return dot_tile<6>(w, x, inputs, sums);
  }
}

// ------------------------------------------------------------------------------------------------ attention of a prompt

// [R, 2 pairs] rows times packed columns, 64 of them: `packed` is [pairs, columns, 2]. Adds to `out` [R, columns].
template <int R>
void multiply(const bfloat16* rows, int64_t row_stride, const bfloat16* packed, int64_t pairs, int64_t columns, float* out,
              int64_t out_stride) {
  __m512 acc[R][4];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 4; ++v) acc[r][v] = _mm512_loadu_ps(out + r * out_stride + v * 16);
  for (int64_t p = 0; p < pairs; ++p) {
    __m512bh column[4];
    for (int v = 0; v < 4; ++v) column[v] = (__m512bh)_mm512_loadu_si512(packed + (p * columns + v * 16) * 2);
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, rows + r * row_stride + 2 * p, sizeof pair);
      const __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
      for (int v = 0; v < 4; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], row, column[v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 4; ++v) _mm512_storeu_ps(out + r * out_stride + v * 16, acc[r][v]);
}

void multiply_all(const bfloat16* rows, int64_t count, int64_t row_stride, const bfloat16* packed, int64_t pairs,
                  int64_t columns, float* out, int64_t out_stride) {
  for (int64_t c = 0; c < columns; c += 64) {
    int64_t r = 0;
    for (; r + 6 <= count; r += 6)
      multiply<6>(rows + r * row_stride, row_stride, packed + 2 * c, pairs, columns, out + r * out_stride + c, out_stride);
    for (; r < count; ++r)
      multiply<1>(rows + r * row_stride, row_stride, packed + 2 * c, pairs, columns, out + r * out_stride + c, out_stride);
  }
}

// Keys and values of one chunk and one KV head, as `multiply` reads them: [D / 2, kChunk, 2] and [kChunk / 2, D, 2].
template <typename P>
void pack_chunk(const P* k_pages, const P* v_pages, const int32_t* table, int64_t start, int64_t count, int64_t kv_heads,
                int64_t head, int64_t dim, int64_t block_size, float* rows, bfloat16* keys, bfloat16* values) {
  std::fill(rows, rows + kChunk * dim, 0.0f);
  load_heads(k_pages, table, start, count, kv_heads, head, dim, block_size, rows);
  for (int64_t i = 0; i < dim; ++i)
    for (int64_t j = 0; j < kChunk; ++j) store(keys + ((i / 2) * kChunk + j) * 2 + i % 2, rows[j * dim + i]);
  load_heads(v_pages, table, start, count, kv_heads, head, dim, block_size, rows);
  for (int64_t j = 0; j < kChunk; ++j)
    for (int64_t i = 0; i < dim; ++i)
      store(values + ((j / 2) * dim + i) * 2 + j % 2, j < count ? rows[j * dim + i] : 0.0f);
}

constexpr int64_t kTileRows = 48;  // query tokens times query heads of a KV head whose scores are taken together

// The newest Q tokens of one sequence of J, after FlashAttention (arXiv 2205.14135).
template <typename P>
void prompt_attention(const bfloat16* q, int64_t q_stride, const P* k_pages, const P* v_pages, const int32_t* table,
                      bfloat16* out, int64_t queries, int64_t keys, int64_t q_heads, int64_t kv_heads, int64_t dim,
                      int64_t block_size, float scale, int64_t window) {
  const int64_t group = q_heads / kv_heads;
  const int64_t chunks = (keys + kChunk - 1) / kChunk;
  const int64_t cells = kChunk * dim;
  const int64_t tile_queries = std::max<int64_t>(1, kTileRows / group);
  const int64_t tiles = (queries + tile_queries - 1) / tile_queries;
  const int64_t most_rows = tile_queries * group;
  std::vector<bfloat16> packed(kv_heads * chunks * 2 * cells);
#pragma omp parallel
  {
    std::vector<float> rows(cells), sums(most_rows * dim), scores(most_rows * kChunk), best(most_rows), total(most_rows);
    std::vector<bfloat16> heads(most_rows * dim), weights(most_rows * kChunk);
#pragma omp for collapse(2) schedule(static)
    for (int64_t h = 0; h < kv_heads; ++h)
      for (int64_t c = 0; c < chunks; ++c) {
        bfloat16* to = &packed[(h * chunks + c) * 2 * cells];
        const int64_t count = std::min(kChunk, keys - c * kChunk);
        pack_chunk(k_pages, v_pages, table, c * kChunk, count, kv_heads, h, dim, block_size, rows.data(), to, to + cells);
      }
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (int64_t tile = tiles - 1; tile >= 0; --tile)  // the longest first
      for (int64_t h = 0; h < kv_heads; ++h) {
        const int64_t first_query = tile * tile_queries;
        const int64_t count = std::min(tile_queries, queries - first_query) * group;
        for (int64_t r = 0; r < count; ++r)
          std::memcpy(&heads[r * dim], q + (first_query + r / group) * q_stride + (h * group + r % group) * dim, dim * 2);
        std::fill(sums.begin(), sums.end(), 0.0f);
        std::fill(best.begin(), best.end(), -1e30f);
        std::fill(total.begin(), total.end(), 0.0f);
        const int64_t newest = keys - queries + first_query + (count - 1) / group;  // position of the tile's last query
        const int64_t oldest = window < 0 ? 0 : std::max<int64_t>(0, keys - queries + first_query - window);
        for (int64_t c = oldest / kChunk; c * kChunk <= newest; ++c) {
          const bfloat16* from = &packed[(h * chunks + c) * 2 * cells];
          std::fill(scores.begin(), scores.end(), 0.0f);
          multiply_all(heads.data(), count, dim, from, dim / 2, kChunk, scores.data(), kChunk);
          for (int64_t r = 0; r < count; ++r) {
            const int64_t position = keys - queries + first_query + r / group;
            const int64_t end = std::min(kChunk, position + 1 - c * kChunk);
            const int64_t begin = window < 0 ? 0 : std::max<int64_t>(0, position - window - c * kChunk);
            float* of = &scores[r * kChunk];
            bfloat16* to = &weights[r * kChunk];
            float most = best[r];
#pragma omp simd reduction(max : most)
            for (int64_t j = 0; j < kChunk; ++j)
              most = std::max(most, j >= begin && j < end ? of[j] * scale : -1e30f);
            float added = 0;
#pragma omp simd reduction(+ : added)
            for (int64_t j = 0; j < kChunk; ++j) {
              of[j] = j >= begin && j < end ? std::exp(of[j] * scale - most) : 0.0f;
              added += of[j];
            }
#pragma omp simd
            for (int64_t j = 0; j < kChunk; ++j) store(to + j, of[j]);
            const float shrink = std::exp(best[r] - most);
            best[r] = most;
            total[r] = total[r] * shrink + added;
            if (shrink != 1.0f) {
#pragma omp simd
              for (int64_t i = 0; i < dim; ++i) sums[r * dim + i] *= shrink;
            }
          }
          multiply_all(weights.data(), count, kChunk, from + cells, kChunk / 2, dim, sums.data(), dim);
        }
        for (int64_t r = 0; r < count; ++r) {
          bfloat16* to = out + ((first_query + r / group) * q_heads + h * group + r % group) * dim;
          const float of_total = 1.0f / total[r];
#pragma omp simd
          for (int64_t i = 0; i < dim; ++i) store(to + i, sums[r * dim + i] * of_total);
        }
      }
  }
}

// ------------------------------------------------------------------------------------------------ fewer bits

// A row of integers is exact in bfloat16; its scale is applied to the sum.
void unpack_int8(const int8_t* from, bfloat16* to, int64_t n) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  for (; i < n; ++i) store(to + i, static_cast<float>(from[i]));
}

// 32 inputs: byte i holds input i in its low half and input i + 16 in its high one.
inline void unpack_span(const uint8_t* from, float zero, float scale, bfloat16* to) {
  const __m128i low_half = _mm_set1_epi8(0x0f);
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m512 zeros = _mm512_set1_ps(zero);
  const __m512 scales = _mm512_set1_ps(scale);
  const __m128i low = _mm_and_si128(bytes, low_half);
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), low_half);
  const __m512 a = _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(low)), zeros), scales);
  const __m512 b = _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(high)), zeros), scales);
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

void unpack_int4(const uint8_t* from, const bfloat16* scales, int64_t group, bfloat16* to, int64_t n) {
  for (int64_t i = 0; i < n; i += 32) unpack_span(from + i / 2, 8.0f, to_float(scales[i / group]), to + i);
}

// Each group has a scale and then a zero point, in float16.
void unpack_int4_zeros(const uint8_t* from, const uint16_t* scales, int64_t group, bfloat16* to, int64_t n) {
  for (int64_t i = 0; i < n; i += 32) {
    const uint16_t* pair = scales + i / group * 2;
    unpack_span(from + i / 2, _cvtsh_ss(pair[1]), _cvtsh_ss(pair[0]), to + i);
  }
}

enum Format { kInt8 = 1, kInt4 = 2, kInt4Zeros = 3 };

struct Weight {
  const void* data;
  const void* scales;  // int8: float32 [O]; int4: bfloat16 [O, I / group]; with zeros: float16 [O, I / group, 2]
  int format;
  int64_t group, outputs, inputs;

  int64_t row_bytes() const { return format == kInt8 ? inputs : inputs / 2; }

  void unpack(int64_t row, bfloat16* to) const {
    const uint8_t* from = static_cast<const uint8_t*>(data) + row * row_bytes();
    if (format == kInt8) {
      unpack_int8(reinterpret_cast<const int8_t*>(from), to, inputs);
    } else if (format == kInt4) {
      unpack_int4(from, static_cast<const bfloat16*>(scales) + row * (inputs / group), group, to, inputs);
    } else {
      unpack_int4_zeros(from, static_cast<const uint16_t*>(scales) + row * (inputs / group) * 2, group, to, inputs);
    }
  }

  float scale(int64_t row) const { return format == kInt8 ? static_cast<const float*>(scales)[row] : 1.0f; }
};

template <typename Out>
void linear(const bfloat16* x, const Weight& weight, const bfloat16* bias, Out* out, int64_t tokens) {
  const int64_t inputs = weight.inputs, outputs = weight.outputs;
  const int64_t tiles = (outputs + kRows - 1) / kRows;
#pragma omp parallel if (inputs * outputs >= kWorthThreads)
  {
    std::vector<bfloat16> rows(kRows * inputs);
#pragma omp for schedule(static)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = tile * kRows;
      const int64_t count = std::min<int64_t>(kRows, outputs - first);
      for (int64_t r = 0; r < count; ++r) weight.unpack(first + r, rows.data() + r * inputs);
      for (int64_t t = 0; t < tokens; t += kColumns) {
        float sums[kRows][kColumns];
        const int columns = static_cast<int>(std::min<int64_t>(kColumns, tokens - t));
        dot_tiles(columns, rows.data(), x + t * inputs, inputs, sums);
        for (int64_t r = 0; r < count; ++r) {
          const float scale = weight.scale(first + r);
          const float shift = bias ? to_float(bias[first + r]) : 0.0f;
          for (int c = 0; c < columns; ++c) store(out + (t + c) * outputs + first + r, sums[r][c] * scale + shift);
        }
      }
    }
  }
}

void unpack_weight(const Weight& weight, bfloat16* out) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < weight.outputs; ++row) {
    bfloat16* to = out + row * weight.inputs;
    weight.unpack(row, to);
    const float scale = weight.scale(row);
    if (scale != 1.0f)
      for (int64_t i = 0; i < weight.inputs; ++i) store(to + i, to_float(to[i]) * scale);
  }
}

#endif

}  // namespace

extern "C" {

int baton_has_bf16_dot() {
#ifdef HAS_BF16_DOT
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw");
#else
  return 0;
#endif
}

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
  }                                                                                                                    \
  void baton_paged_attention_##NAME(const void* q, int64_t q_stride, const void* k_pages, const void* v_pages,        \
                                    const int32_t* tables, int64_t table_width, const int32_t* lengths,               \
                                    const int64_t* rows, void* out, int64_t sequences, int64_t q_heads,               \
                                    int64_t kv_heads, int64_t dim, int64_t block_size, float scale, int64_t window) { \
    paged_attention(static_cast<const T*>(q), q_stride, static_cast<const P*>(k_pages),                               \
                    static_cast<const P*>(v_pages), tables, table_width, lengths, rows, static_cast<T*>(out),         \
                    sequences, q_heads, kv_heads, dim, block_size, scale, window);                                    \
  }

BATON_FLOATING(float32, float)
BATON_FLOATING(bfloat16, bfloat16)
BATON_PAGES(float32, float, float)
BATON_PAGES(bfloat16, bfloat16, bfloat16)
BATON_PAGES(float32_int8, float, int8_t)
BATON_PAGES(bfloat16_int8, bfloat16, int8_t)

#ifdef HAS_BF16_DOT
void baton_linear(const void* x, const void* data, const void* scales, int format, int64_t group, const void* bias,
                  void* out, int is_out_float32, int64_t tokens, int64_t inputs, int64_t outputs) {
  const Weight weight{data, scales, format, group, outputs, inputs};
  const auto* tokens_in = static_cast<const bfloat16*>(x);
  const auto* shift = static_cast<const bfloat16*>(bias);
  if (is_out_float32) {
    linear(tokens_in, weight, shift, static_cast<float*>(out), tokens);
  } else {
    linear(tokens_in, weight, shift, static_cast<bfloat16*>(out), tokens);
  }
}

void baton_prompt_attention(const void* q, int64_t q_stride, const void* k_pages, const void* v_pages, int is_int8,
                            const int32_t* table, void* out, int64_t queries, int64_t keys, int64_t q_heads,
                            int64_t kv_heads, int64_t dim, int64_t block_size, float scale, int64_t window) {
  const auto attend_pages = [&](const auto* k, const auto* v) {
    prompt_attention(static_cast<const bfloat16*>(q), q_stride, k, v, table, static_cast<bfloat16*>(out), queries, keys,
                     q_heads, kv_heads, dim, block_size, scale, window);
  };
  if (is_int8) {
    attend_pages(static_cast<const int8_t*>(k_pages), static_cast<const int8_t*>(v_pages));
  } else {
    attend_pages(static_cast<const bfloat16*>(k_pages), static_cast<const bfloat16*>(v_pages));
  }
}

void baton_unpack(const void* data, const void* scales, int format, int64_t group, void* out, int64_t inputs,
                  int64_t outputs) {
  unpack_weight(Weight{data, scales, format, group, outputs, inputs}, static_cast<bfloat16*>(out));
}
#endif
}
