// Attention of one new token of each sequence over the pages of its keys and values.
//
// Legend: Hq/H query/KV heads, G query heads of a KV head, D head_dim, K block_size.

#include <vector>

#include "pages.h"

namespace {

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

}  // namespace

extern "C" {

// NAME: of the type that is computed in, T, and of the pages', P.
#define BATON_PAGES(NAME, T, P)                                                                                        \
  void baton_paged_attention_##NAME(const void* q, int64_t q_stride, const void* k_pages, const void* v_pages,        \
                                    const int32_t* tables, int64_t table_width, const int32_t* lengths,               \
                                    const int64_t* rows, void* out, int64_t sequences, int64_t q_heads,               \
                                    int64_t kv_heads, int64_t dim, int64_t block_size, float scale, int64_t window) { \
    paged_attention(static_cast<const T*>(q), q_stride, static_cast<const P*>(k_pages),                               \
                    static_cast<const P*>(v_pages), tables, table_width, lengths, rows, static_cast<T*>(out),         \
                    sequences, q_heads, kv_heads, dim, block_size, scale, window);                                    \
  }

BATON_PAGES(float32, float, float)
BATON_PAGES(bfloat16, bfloat16, bfloat16)
BATON_PAGES(float32_int8, float, int8_t)
BATON_PAGES(bfloat16_int8, bfloat16, int8_t)
}
