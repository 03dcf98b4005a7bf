// Attention of many new tokens of one sequence: in float32, and in bfloat16 where the processor multiplies it
// (AVX512-BF16).
//
// After FlashAttention (arXiv 2205.14135): a few rows at a time meet a chunk of keys, are softened and meet its values,
// and nothing of that leaves the nearest cache.
//
// Legend: Q new tokens, J keys, Hq/H query/KV heads, D head_dim, W head_dim filled up to whole columns, N numbers of four
// bytes, R rows: query tokens times query heads of a KV head.

#include <memory>
#include <type_traits>

#include "dots.h"
#include "pages.h"

#if defined(__AVX512BF16__) && defined(HAS_DOTS)
#define HAS_BF16_DOT 1
#endif

#ifdef HAS_DOTS

namespace {

template <typename T>
constexpr bool kIsExact = std::is_same_v<T, float>;

template <typename T>
constexpr int64_t kNumbers = 4 / sizeof(T);

template <typename T>
using DotOf = std::conditional_t<kIsExact<T>, Floats, Pairs>;

inline void store_vectors(float* to, __m512 first, __m512 second) {
  _mm512_storeu_ps(to, first);
  _mm512_storeu_ps(to + 16, second);
}

#ifdef HAS_BF16_DOT
inline void store_vectors(bfloat16* to, __m512 first, __m512 second) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}
#endif

inline int64_t filled(int64_t dim) { return (dim + kColumns - 1) / kColumns * kColumns; }

// Keys and values of one chunk and one KV head, as `dot` reads them: [D / N, kChunk, N] and [kChunk / N, W, N].
template <typename T, typename P>
void pack_chunk(const P* k_pages, const P* v_pages, const int32_t* table, int64_t start, int64_t count, int64_t kv_heads,
                int64_t head, int64_t dim, int64_t block_size, float* rows, T* keys, T* values) {
  constexpr int64_t n = kNumbers<T>;
  const int64_t width = filled(dim);
  std::fill(rows, rows + kChunk * dim, 0.0f);
  load_heads(k_pages, table, start, count, kv_heads, head, dim, block_size, rows);
  for (int64_t i = 0; i < dim; ++i)
    for (int64_t j = 0; j < kChunk; ++j) store(keys + ((i / n) * kChunk + j) * n + i % n, rows[j * dim + i]);
  load_heads(v_pages, table, start, count, kv_heads, head, dim, block_size, rows);
  for (int64_t j = 0; j < kChunk; ++j)
    for (int64_t i = 0; i < width; ++i)
      store(values + ((j / n) * width + i) * n + j % n, j < count && i < dim ? rows[j * dim + i] : 0.0f);
}

constexpr int64_t kTileRows = 48;  // whose keys are looked at together
constexpr float kLog2E = 1.44269504f;

// 2 to the power of x, to 2e-7 of it, or else to 3e-6.
template <bool kExact>
inline __m512 power_of_2(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);
  __m512 sum = _mm512_set1_ps(1.33335581e-3f);
  if constexpr (kExact) sum = _mm512_fmadd_ps(_mm512_set1_ps(1.54035304e-4f), rest, sum);
  for (float next : {9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f})
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(next));
  return _mm512_scalef_ps(sum, whole);
}

// How a product of a query and a key becomes a score, a power of 2.
struct Scores {
  float scale, soft_cap;  // as of the natural exponential function; 0: no cap

  template <bool kExact>
  __m512 of(__m512 product) const {
    if (soft_cap == 0.0f) return _mm512_mul_ps(product, _mm512_set1_ps(scale * kLog2E));
    const __m512 one = _mm512_set1_ps(1.0f), cap = _mm512_set1_ps(soft_cap * kLog2E);
    const __m512 twice = _mm512_mul_ps(product, _mm512_set1_ps(2.0f * kLog2E * scale / soft_cap));
    const __m512 most = _mm512_set1_ps(100.0f);  // a reciprocal of infinity is no number
    const __m512 grown = power_of_2<kExact>(_mm512_min_ps(twice, most));
    return _mm512_sub_ps(cap, _mm512_div_ps(_mm512_add_ps(cap, cap), _mm512_add_ps(grown, one)));
  }
};

// Rows of one KV head, and what is known of each so far.
template <typename T>
struct Tile {
  int64_t dim, width;
  std::unique_ptr<T[]> heads, weights;    // [R, D], and [6, kChunk] of the rows at hand
  std::unique_ptr<float[]> sums, totals;  // [R, W] and [R, 16]
  float best[kTileRows];                  // the largest score, times the scale, as a power of 2
  uint64_t seen[kTileRows];               // keys of the chunk

  Tile(int64_t rows, int64_t dim)
      : dim(dim),
        width(filled(dim)),
        heads(new T[rows * dim]),
        weights(new T[kMostRows * kChunk]),
        sums(new float[rows * width]),
        totals(new float[rows * 16]) {}

  // `sink_of(row)`: the score of a key without a value, or nothing seen yet.
  template <typename SinkOf>
  void clear(int64_t rows, bool has_sinks, SinkOf&& sink_of) {
    std::fill_n(sums.get(), rows * width, 0.0f);
    std::fill_n(totals.get(), rows * 16, 0.0f);
    std::fill_n(best, rows, -1e30f);
    for (int64_t row = 0; has_sinks && row < rows; ++row) best[row] = sink_of(row) * kLog2E, totals[row * 16] = 1.0f;
  }

  // Scores of a row become what the values are times; what it has so far is scaled to match.
  void soften(int64_t row, const __m512i* products, const Scores& scores, T* to) {
    const __m512 least = _mm512_set1_ps(-1e30f);
    __mmask16 mask[kVectors];
    __m512 x[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      mask[v] = static_cast<__mmask16>(seen[row] >> (16 * v));
      x[v] = _mm512_mask_mov_ps(least, mask[v], scores.of<kIsExact<T>>(_mm512_castsi512_ps(products[v])));
    }
    const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])));
    __m512 total = _mm512_loadu_ps(&totals[row * 16]);
    if (most > best[row]) {
      const __m512 shrink = power_of_2<kIsExact<T>>(_mm512_set1_ps(best[row] - most));
      best[row] = most;
      total = _mm512_mul_ps(total, shrink);
      for (float* at = &sums[row * width]; at < &sums[(row + 1) * width]; at += 16)
        _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), shrink));
    }
    for (int v = 0; v < kVectors; ++v) {
      x[v] = _mm512_maskz_mov_ps(mask[v], power_of_2<kIsExact<T>>(_mm512_sub_ps(x[v], _mm512_set1_ps(best[row]))));
      total = _mm512_add_ps(total, x[v]);
    }
    _mm512_storeu_ps(&totals[row * 16], total);
    for (int v = 0; v < kVectors; v += 2) store_vectors(to + 16 * v, x[v], x[v + 1]);
  }

  // C rows from `row` on, over one packed chunk.
  template <int C>
  void attend(int64_t row, const T* keys, const T* values, const Scores& scores) {
    using Dot = DotOf<T>;
    constexpr int64_t size = sizeof(T);
    Sums found = {};
    const auto bytes = [](const T* from) { return reinterpret_cast<const char*>(from); };
    dot<Dot, C>(bytes(&heads[row * dim]), size * dim, bytes(keys), 4 * kChunk, dim / kNumbers<T>, found);
    for (int c = 0; c < C; ++c) soften(row + c, found[c], scores, &weights[c * kChunk]);
    for (int64_t i = 0; i < width; i += kColumns) {
      for (int c = 0; c < C; ++c) std::memcpy(found[c], &sums[(row + c) * width + i], sizeof found[c]);
      const char* columns = bytes(values + kNumbers<T> * i);
      dot<Dot, C>(bytes(weights.get()), size * kChunk, columns, 4 * width, kChunk / kNumbers<T>, found);
      for (int c = 0; c < C; ++c) std::memcpy(&sums[(row + c) * width + i], found[c], sizeof found[c]);
    }
  }

  void attend_all(int64_t rows, const T* keys, const T* values, const Scores& scores) {
    const int64_t turns = (rows + kMostRows - 1) / kMostRows;
    for (int64_t turn = 0; turn < turns; ++turn) {
      const int64_t row = rows * turn / turns;
      switch (rows * (turn + 1) / turns - row) {
        case 1: attend<1>(row, keys, values, scores); break;
        case 2: attend<2>(row, keys, values, scores); break;
        case 3: attend<3>(row, keys, values, scores); break;
        case 4: attend<4>(row, keys, values, scores); break;
        case 5: attend<5>(row, keys, values, scores); break;
        default: attend<kMostRows>(row, keys, values, scores);
      }
    }
  }

  void finish(int64_t row, T* out) const {
    const float of_total = 1.0f / _mm512_reduce_add_ps(_mm512_loadu_ps(&totals[row * 16]));
#pragma omp simd
    for (int64_t i = 0; i < dim; ++i) store(out + i, sums[row * width + i] * of_total);
  }
};

// Keys of a chunk from `first` on that a token at `position` sees.
inline uint64_t seen_by(int64_t position, int64_t first, int64_t window) {
  const auto below = [](int64_t count) {  // the lowest `count` bits
    return count <= 0 ? 0 : count >= kChunk ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
  };
  return below(position + 1 - first) & ~(window < 0 ? 0 : below(position - window - first));
}

template <typename T, typename P>
void prompt_attention(const T* q, int64_t q_stride, const P* k_pages, const P* v_pages, const int32_t* table, T* out,
                      int64_t queries, int64_t keys, int64_t q_heads, int64_t kv_heads, int64_t dim,
                      int64_t block_size, const Scores& scores, int64_t window, const float* sinks) {
  const int64_t group = q_heads / kv_heads, key_cells = kChunk * dim, cells = key_cells + kChunk * filled(dim);
  const int64_t oldest_key = window < 0 ? 0 : std::max<int64_t>(0, keys - queries - window) / kChunk * kChunk;
  const int64_t chunks = (keys - oldest_key + kChunk - 1) / kChunk;
  const int64_t tile_queries = std::max<int64_t>(1, kTileRows / group), parts = (group + kTileRows - 1) / kTileRows;
  const int64_t tiles = (queries + tile_queries - 1) / tile_queries;
  const std::unique_ptr<T[]> packed(new T[kv_heads * chunks * cells]);
#pragma omp parallel
  {
    const std::unique_ptr<float[]> rows(new float[key_cells]);
    Tile<T> tile(std::min(kTileRows, tile_queries * group), dim);
#pragma omp for collapse(2) schedule(static)
    for (int64_t h = 0; h < kv_heads; ++h)
      for (int64_t c = 0; c < chunks; ++c) {
        T* to = &packed[(h * chunks + c) * cells];
        const int64_t first = oldest_key + c * kChunk, count = std::min(kChunk, keys - first);
        pack_chunk(k_pages, v_pages, table, first, count, kv_heads, h, dim, block_size, rows.get(), to, to + key_cells);
      }
#pragma omp for schedule(dynamic, 1)
    for (int64_t unit = tiles * kv_heads * parts - 1; unit >= 0; --unit) {  // the longest first
      const int64_t h = unit / parts % kv_heads, first_head = unit % parts * kTileRows;
      const int64_t first_query = unit / (parts * kv_heads) * tile_queries;
      const int64_t heads = std::min(kTileRows, group - first_head);
      const int64_t count = std::min(tile_queries, queries - first_query) * heads;
      const auto query_of = [&](int64_t r) { return first_query + r / heads; };
      const auto head_of = [&](int64_t r) { return h * group + first_head + r % heads; };
      for (int64_t r = 0; r < count; ++r)
        std::memcpy(&tile.heads[r * dim], q + query_of(r) * q_stride + head_of(r) * dim, dim * sizeof(T));
      tile.clear(count, sinks, [&](int64_t r) { return sinks[head_of(r)]; });
      const int64_t before = keys - queries, newest = before + query_of(count - 1);
      const int64_t oldest = window < 0 ? 0 : std::max<int64_t>(0, before + first_query - window);
      for (int64_t c = (oldest - oldest_key) / kChunk; oldest_key + c * kChunk <= newest; ++c) {
        for (int64_t r = 0; r < count; ++r) tile.seen[r] = seen_by(before + query_of(r), oldest_key + c * kChunk, window);
        const T* from = &packed[(h * chunks + c) * cells];
        tile.attend_all(count, from, from + key_cells, scores);
      }
      for (int64_t r = 0; r < count; ++r) tile.finish(r, out + (query_of(r) * q_heads + head_of(r)) * dim);
    }
  }
}

}  // namespace

#endif

extern "C" {

// 0 for none, 1 for float32, 2 for bfloat16 as well.
int baton_prompt_attentions() {
#ifdef HAS_DOTS
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw")) {
#ifdef HAS_BF16_DOT
    if (__builtin_cpu_supports("avx512bf16")) return 2;
#endif
    return 1;
  }
#endif
  return 0;
}

#define BATON_PROMPT_ATTENTION(T)                                                                                       \
  void baton_prompt_attention_##T(const void* q, int64_t q_stride, const void* k_pages, const void* v_pages,            \
                                  int is_int8, const int32_t* table, void* out, int64_t queries, int64_t keys,          \
                                  int64_t q_heads, int64_t kv_heads, int64_t dim, int64_t block_size, float scale,      \
                                  int64_t window, float soft_cap, const float* sinks) {                                 \
    const auto attend_pages = [&](const auto* k, const auto* v) {                                                       \
      prompt_attention(static_cast<const T*>(q), q_stride, k, v, table, static_cast<T*>(out), queries, keys, q_heads,   \
                       kv_heads, dim, block_size, {scale, soft_cap}, window, sinks);                                    \
    };                                                                                                                  \
    if (is_int8) {                                                                                                      \
      attend_pages(static_cast<const int8_t*>(k_pages), static_cast<const int8_t*>(v_pages));                           \
    } else {                                                                                                            \
      attend_pages(static_cast<const T*>(k_pages), static_cast<const T*>(v_pages));                                     \
    }                                                                                                                   \
  }

#ifdef HAS_DOTS
BATON_PROMPT_ATTENTION(float)
#endif
#ifdef HAS_BF16_DOT
BATON_PROMPT_ATTENTION(bfloat16)
#endif
}
