// Attention of one new token of a sequence over the pages of its keys and values.
//
// Keys are taken in chunks, whose scores are softened against the largest so far (arXiv 1805.02867). In bfloat16, where
// the processor multiplies it and heads are of a usual size, pages are read as they are, all heads of a token at once
// and ahead of need; else a chunk of one head is widened to float32 first.
//
// Legend: Hq/H query/KV heads, G query heads of a KV head, D head_dim, K block_size.

#pragma once

#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "pages.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_BF16_DOT 1
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float))));

inline Lanes& at(float* from) { return *reinterpret_cast<Lanes*>(from); }
inline const Lanes& at(const float* from) { return *reinterpret_cast<const Lanes*>(from); }

template <typename Do, int... I>
__attribute__((always_inline)) inline void each_of(std::integer_sequence<int, I...>, Do&& todo) {
  (todo(std::integral_constant<int, I>{}), ...);
}

// todo(0) to todo(N - 1), spelled out: what is indexed by them can stay in registers.
template <int N, typename Do>
__attribute__((always_inline)) inline void each(Do&& todo) {
  each_of(std::make_integer_sequence<int, N>{}, todo);
}

#define BATON_INLINE __attribute__((always_inline))
#define BATON_HALVES(A, B, ...) (__builtin_shufflevector(A, B, __VA_ARGS__))

// The sums of 16 vectors as one: halves of two are added side by side until each has one lane.
BATON_INLINE inline Lanes sums_of(Lanes (&x)[kLanes]) {
  each<8>([&](auto i) BATON_INLINE {
    const Lanes a = x[2 * i], b = x[2 * i + 1];
    x[i] = BATON_HALVES(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           BATON_HALVES(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  });
  each<4>([&](auto i) BATON_INLINE {
    const Lanes a = x[2 * i], b = x[2 * i + 1];
    x[i] = BATON_HALVES(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           BATON_HALVES(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  });
  each<2>([&](auto i) BATON_INLINE {
    const Lanes a = x[2 * i], b = x[2 * i + 1];
    x[i] = BATON_HALVES(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           BATON_HALVES(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  });
  return BATON_HALVES(x[0], x[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         BATON_HALVES(x[0], x[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// The pages of a layer, and how its heads see them.
template <typename P>
struct Pages {
  const P* keys;
  const P* values;
  int64_t q_heads, kv_heads, dim, block_size;
  float scale;
  int64_t window;      // keys before its own that a token sees; -1 for all
  float soft_cap;      // scores become soft_cap * tanh(score / soft_cap); 0: they stay
  const float* sinks;  // [Hq] or null: a score of each head whose key has no value

  int64_t group() const { return q_heads / kv_heads; }
  const float* sinks_from(int64_t kv_head) const { return sinks ? sinks + kv_head * group() : nullptr; }
};

// What a thread needs for some query heads.
struct Scratch {
  std::vector<float> query, sum, scores, keys, best, total;

  Scratch(int64_t heads, int64_t dim)
      : query(heads * dim), sum(heads * dim), scores(heads * kChunk), keys(kChunk * dim), best(heads), total(heads) {}

  // `sinks`: those of as many heads, or null.
  void clear(const float* sinks, int64_t heads) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    std::fill(best.begin(), best.end(), -1e30f);
    std::fill(total.begin(), total.end(), sinks ? 1.0f : 0.0f);
    if (sinks) std::copy(sinks, sinks + heads, best.begin());
  }

  // The scores of a head's newest `count` keys become what their values are times; its sum so far is scaled to match.
  void soften(int64_t head, int64_t count, float scale, float soft_cap, int64_t dim) {
    float* of = &scores[head * kChunk];
    if (soft_cap != 0.0f) {
      const float twice = 2.0f * scale / soft_cap;
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) of[j] = soft_cap - 2.0f * soft_cap / (std::exp(std::min(of[j] * twice, 80.0f)) + 1.0f);
      scale = 1.0f;
    }
    float most = -1e30f;
#pragma omp simd reduction(max : most)
    for (int64_t j = 0; j < count; ++j) most = std::max(most, of[j]);
    most = std::max(best[head], most * scale);
    float added = 0;
#pragma omp simd reduction(+ : added)
    for (int64_t j = 0; j < count; ++j) {
      of[j] = std::exp(of[j] * scale - most);
      added += of[j];
    }
    const float shrink = std::exp(best[head] - most);
    best[head] = most;
    total[head] = total[head] * shrink + added;
    float* so_far = &sum[head * dim];
#pragma omp simd
    for (int64_t i = 0; i < dim; ++i) so_far[i] *= shrink;
  }

  // `logs`: where the logarithm of each head's softmax's sum goes, or null. Of no keys it is -1e30, and out 0.
  template <typename T>
  void finish(int64_t heads, int64_t dim, T* out, float* logs) {
    for (int64_t h = 0; h < heads; ++h) {
      const float of_total = total[h] > 0 ? 1.0f / total[h] : 0.0f;
#pragma omp simd
      for (int64_t i = 0; i < dim; ++i) store(out + h * dim + i, sum[h * dim + i] * of_total);
      if (logs) logs[h] = total[h] > 0 ? best[h] + std::log(total[h]) : best[h];
    }
  }
};

// Scores of `count` keys [count, D] for G heads: 16 at once, so that their sums are taken together.
template <int G>
void score(const float* query, const float* keys, float* scores, int64_t count, int64_t dim) {
  constexpr int kKeys = kLanes / G;
  for (int64_t j = 0; j < count; j += kKeys) {
    Lanes acc[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes)
      each<G>([&](auto g) BATON_INLINE {
        const Lanes head = at(query + g * dim + i);
        each<kKeys>([&](auto k) BATON_INLINE { acc[g * kKeys + k] += head * at(keys + (j + k) * dim + i); });
      });
    const Lanes sums = sums_of(acc);
    for (int g = 0; g < G; ++g)
      for (int k = 0; k < kKeys; ++k) {
        float sum = sums[g * kKeys + k];
        for (int64_t d = i; d < dim; ++d) sum += query[g * dim + d] * keys[(j + k) * dim + d];
        scores[g * kChunk + j + k] = sum;
      }
  }
}

// sum[g] += scores[g] @ values, for G heads at once, four vectors of D at a time in registers. `value(j, i)` is 16
// dimensions from i on of value j.
template <int G, typename Value>
BATON_INLINE inline void mix_with(const float* scores, Value&& value, float* sum, int64_t count, int64_t dim) {
  constexpr int kWide = 4;
  for (int64_t i = 0; i + kWide * kLanes <= dim; i += kWide * kLanes) {
    Lanes acc[G * kWide];
    each<G * kWide>([&](auto x) BATON_INLINE { acc[x] = at(sum + (x / kWide) * dim + i + (x % kWide) * kLanes); });
    for (int64_t j = 0; j < count; ++j) {
      Lanes of_key[kWide];
      each<kWide>([&](auto v) BATON_INLINE { of_key[v] = value(j, i + v * kLanes); });
      each<G * kWide>([&](auto x) BATON_INLINE { acc[x] += of_key[x % kWide] * scores[(x / kWide) * kChunk + j]; });
    }
    each<G * kWide>([&](auto x) BATON_INLINE { at(sum + (x / kWide) * dim + i + (x % kWide) * kLanes) = acc[x]; });
  }
}

template <int G>
void mix(const float* scores, const float* values, float* sum, int64_t count, int64_t dim) {
  mix_with<G>(scores, [&](int64_t j, int64_t i) BATON_INLINE { return at(values + j * dim + i); }, sum, count, dim);
  for (int g = 0; g < G; ++g)
    for (int64_t j = 0; j < count; ++j)
      for (int64_t k = dim / 64 * 64; k < dim; ++k) sum[g * dim + k] += scores[g * kChunk + j] * values[j * dim + k];
}

// Query heads are taken four at a time, then one by one.
template <typename Do>
BATON_INLINE inline void by_fours(int64_t heads, Do&& todo) {
  int64_t g = 0;
  for (; g + 4 <= heads; g += 4) todo(g, std::integral_constant<int, 4>{});
  for (; g < heads; ++g) todo(g, std::integral_constant<int, 1>{});
}

// The query heads of one KV head, over keys [first, end).
template <typename T, typename P>
void attend_head(const Pages<P>& pages, const T* q, const int32_t* table, int64_t first, int64_t end, int64_t head, T* out,
                 Scratch& s, float* logs) {
  const int64_t group = pages.group(), dim = pages.dim;
  const auto load = [&](const P* from, int64_t start, int64_t count) {
    load_heads(from, table, start, count, pages.kv_heads, head, dim, pages.block_size, s.keys.data());
  };
  widen(q, s.query.data(), group * dim);
  s.clear(pages.sinks_from(head), group);
  for (int64_t start = first; start < end; start += kChunk) {
    const int64_t count = std::min(kChunk, end - start);
    load(pages.keys, start, count);
    by_fours(group, [&](int64_t g, auto heads) {
      score<heads.value>(&s.query[g * dim], s.keys.data(), &s.scores[g * kChunk], count, dim);
    });
    for (int64_t g = 0; g < group; ++g) s.soften(g, count, pages.scale, pages.soft_cap, dim);
    if (pages.values != pages.keys) load(pages.values, start, count);
    by_fours(group, [&](int64_t g, auto heads) {
      mix<heads.value>(&s.scores[g * kChunk], s.keys.data(), &s.sum[g * dim], count, dim);
    });
  }
  s.finish(group, dim, out, logs);
}

#ifdef HAS_BF16_DOT

// Scores of a whole chunk for G heads of D dimensions. `offsets` are where each key of the first KV head lies.
template <int G, int D>
void score_pairs(const bfloat16* query, const bfloat16* keys, const int64_t* offsets, float* scores) {
  constexpr int kKeys = kLanes / G, kParts = D / 32;
  const auto part = [](const bfloat16* from) BATON_INLINE { return (__m512bh)_mm512_loadu_si512(from); };
  __m512bh head[G * kParts];
  each<G * kParts>([&](auto x) BATON_INLINE { head[x] = part(query + x * 32); });
  for (int64_t j = 0; j < kChunk; j += kKeys) {
    Lanes acc[kLanes];
    each<kKeys>([&](auto k) BATON_INLINE {
      const bfloat16* key = keys + offsets[j + k];
      each<G>([&](auto g) BATON_INLINE {
        __m512 sum = _mm512_setzero_ps();
        each<kParts>([&](auto p) BATON_INLINE {
          sum = _mm512_dpbf16_ps(sum, head[g * kParts + p], part(key + p * 32));
        });
        acc[g * kKeys + k] = (Lanes)sum;
      });
    });
    const Lanes sums = sums_of(acc);
    for (int g = 0; g < G; ++g) std::memcpy(scores + g * kChunk + j, reinterpret_cast<const float*>(&sums) + g * kKeys, kKeys * 4);
  }
}

// Four query heads at a time where registers hold them, else one by one.
template <int D, typename Do>
BATON_INLINE inline void scored_together(int64_t heads, Do&& todo) {
  if constexpr (D <= 128)
    by_fours(heads, todo);
  else
    for (int64_t g = 0; g < heads; ++g) todo(g, std::integral_constant<int, 1>{});
}

inline Lanes widened(const bfloat16* from) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
}

inline void ask_for(const bfloat16* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(reinterpret_cast<const char*>(from) + i);
}

// The query heads of KV heads [head, last), over keys [first, end).
template <int D>
void attend_heads(const Pages<bfloat16>& pages, const bfloat16* q, const int32_t* table, int64_t first, int64_t end,
                  int64_t head, int64_t last, bfloat16* out, Scratch& s, float* logs) {
  const int64_t group = pages.group(), token = pages.kv_heads * D, bytes = (last - head) * D * 2;
  int64_t here[kChunk], after[kChunk];
  const auto locate = [&](int64_t start, int64_t* offsets) {  // what is past the end is the last key once more
    for (int64_t j = 0; j < kChunk; ++j) {
      const int64_t key = std::min(start + j, end - 1);
      offsets[j] = (table[key / pages.block_size] * pages.block_size + key % pages.block_size) * token + head * D;
    }
  };
  s.clear(pages.sinks_from(head), (last - head) * group);
  locate(first, here);
  for (int64_t j = 0; j < std::min(kChunk, end - first); ++j) ask_for(pages.keys + here[j], bytes);
  for (int64_t start = first; start < end; start += kChunk) {
    const int64_t count = std::min(kChunk, end - start), more = std::min(kChunk, end - start - kChunk);
    for (int64_t j = 0; j < count; ++j) ask_for(pages.values + here[j], bytes);
    for (int64_t h = 0; h < last - head; ++h)
      scored_together<D>(group, [&](int64_t g, auto heads) {
        const int64_t row = h * group + g;
        score_pairs<heads.value, D>(q + row * D, pages.keys + h * D, here, &s.scores[row * kChunk]);
        for (int64_t i = row; i < row + heads.value; ++i) s.soften(i, count, pages.scale, pages.soft_cap, D);
      });
    if (more > 0) locate(start + kChunk, after);
    for (int64_t j = 0; j < more; ++j) ask_for(pages.keys + after[j], bytes);
    for (int64_t h = 0; h < last - head; ++h)
      by_fours(group, [&](int64_t g, auto heads) {
        const int64_t row = h * group + g;
        const auto value = [&](int64_t j, int64_t i) BATON_INLINE { return widened(pages.values + here[j] + h * D + i); };
        mix_with<heads.value>(&s.scores[row * kChunk], value, &s.sum[row * D], count, D);
      });
    std::memcpy(here, after, sizeof here);
  }
  s.finish((last - head) * group, D, out, logs);
}

#endif

// What the token sees through KV heads [head, last) of keys [first, end): q and out are those heads' [.., D], `logs` as
// for `finish`.
template <typename T, typename P>
void attend(const Pages<P>& pages, const T* q, const int32_t* table, int64_t length, int64_t head, int64_t last, T* out,
            Scratch& s, float* logs = nullptr) {
  const int64_t first = pages.window < 0 ? 0 : std::max<int64_t>(0, length - 1 - pages.window);
#ifdef HAS_BF16_DOT
  if constexpr (std::is_same_v<T, bfloat16> && std::is_same_v<P, bfloat16>) {
    if (pages.dim == 64) return attend_heads<64>(pages, q, table, first, length, head, last, out, s, logs);
    if (pages.dim == 128) return attend_heads<128>(pages, q, table, first, length, head, last, out, s, logs);
    if (pages.dim == 256) return attend_heads<256>(pages, q, table, first, length, head, last, out, s, logs);
  }
#endif
  for (int64_t h = head, step = pages.group() * pages.dim; h < last; ++h, q += step, out += step)
    attend_head(pages, q, table, first, length, h, out, s, logs ? logs + (h - head) * pages.group() : nullptr);
}

// How many KV heads one thread takes at a time, where so many sequences are shared among as many threads.
inline int64_t heads_at_once(int64_t sequences, int64_t kv_heads, int64_t threads) {
  const int64_t parts = std::max<int64_t>(1, std::min(kv_heads, 2 * threads / std::max<int64_t>(1, sequences)));
  return (kv_heads + parts - 1) / parts;
}

}  // namespace
