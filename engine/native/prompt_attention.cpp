// Attention of many new tokens of one sequence, in bfloat16: processors that multiply it (AVX512-BF16) only.
//
// Legend: Q new tokens, J keys, Hq/H query/KV heads, D head_dim, R rows.

#include <vector>

#include "pages.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_BF16_DOT 1
#include <immintrin.h>
#endif

#ifdef HAS_BF16_DOT

namespace {

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

}  // namespace

#endif

extern "C" {

int baton_has_bf16_dot() {
#ifdef HAS_BF16_DOT
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw");
#else
  return 0;
#endif
}

#ifdef HAS_BF16_DOT
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
#endif
}
