// Attention of one new token of each sequence, as functions for engine.native.

#include <omp.h>

#include "attend.h"

namespace {

// Shares of the query heads of the only KV head, for threads that would have nothing to do: whole fours of them, each of
// which reads the keys anew.
template <typename P>
int64_t shares_of_one_head(const Pages<P>& pages, int64_t sequences, int64_t threads) {
  int64_t shares = pages.kv_heads == 1 ? threads / std::max<int64_t>(1, sequences) : 1;
  while (shares > 1 && pages.q_heads % (4 * shares)) --shares;
  return shares;
}

template <typename T, typename P>
void paged_attention(const Pages<P>& pages, const T* q, int64_t q_stride, const int32_t* tables, int64_t table_width,
                     const int32_t* lengths, const int64_t* rows, T* out, float* logs, int64_t sequences) {
  const int64_t most = omp_get_max_threads();
  const auto logs_of = [&](int64_t s, int64_t head) { return logs ? logs + rows[s] * pages.q_heads + head : nullptr; };
  if (const int64_t shares = shares_of_one_head(pages, sequences, most); shares > 1) {
    const int64_t heads = pages.q_heads / shares;
#pragma omp parallel
    {
      Scratch scratch(heads, pages.dim);
#pragma omp for schedule(dynamic, 1)
      for (int64_t unit = 0; unit < sequences * shares; ++unit) {
        const int64_t s = unit / shares, first = unit % shares * heads;
        Pages<P> some = pages;
        some.q_heads = heads;
        if (pages.sinks) some.sinks += first;
        attend(some, q + rows[s] * q_stride + first * pages.dim, tables + s * table_width, lengths[s], 0, 1,
               out + (rows[s] * pages.q_heads + first) * pages.dim, scratch, logs_of(s, first));
      }
    }
    return;
  }
  const int64_t group = pages.group(), dim = pages.dim;
  const int64_t at_once = heads_at_once(sequences, pages.kv_heads, most);
  const int64_t parts = (pages.kv_heads + at_once - 1) / at_once;
#pragma omp parallel if (sequences * parts > 1)
  {
    Scratch scratch(at_once * group, dim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t unit = 0; unit < sequences * parts; ++unit) {
      const int64_t s = unit / parts, head = unit % parts * at_once;
      const int64_t last = std::min(pages.kv_heads, head + at_once);
      attend(pages, q + rows[s] * q_stride + head * group * dim, tables + s * table_width, lengths[s], head, last,
             out + (rows[s] * pages.q_heads + head * group) * dim, scratch, logs_of(s, head * group));
    }
  }
}

}  // namespace

extern "C" {

// NAME: of the type that is computed in, T, and of the pages', P.
#define BATON_PAGES(NAME, T, P)                                                                                        \
  void baton_paged_attention_##NAME(const void* q, int64_t q_stride, const void* k_pages, const void* v_pages,        \
                                    const int32_t* tables, int64_t table_width, const int32_t* lengths,               \
                                    const int64_t* rows, void* out, float* logs, int64_t sequences, int64_t q_heads,  \
                                    int64_t kv_heads, int64_t dim, int64_t block_size, float scale, int64_t window,   \
                                    float soft_cap, const float* sinks) {                                             \
    const Pages<P> pages{static_cast<const P*>(k_pages), static_cast<const P*>(v_pages), q_heads, kv_heads, dim,     \
                         block_size, scale, window, soft_cap, sinks};                                                 \
    paged_attention(pages, static_cast<const T*>(q), q_stride, tables, table_width, lengths, rows,                    \
                    static_cast<T*>(out), logs, sequences);                                                           \
  }

BATON_PAGES(float32, float, float)
BATON_PAGES(bfloat16, bfloat16, bfloat16)
BATON_PAGES(float32_int8, float, int8_t)
BATON_PAGES(bfloat16_int8, bfloat16, int8_t)
}
