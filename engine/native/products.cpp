// Products of tokens with weights, as functions for engine.native.

#include <vector>

#include "products.h"

#ifdef HAS_DOTS

namespace {

template <typename Out>
void linear(const bfloat16* x, const Weight& w, const bfloat16* bias, Out* out, int64_t tokens) {
  std::vector<int8_t> data(w.rounds() ? tokens * w.inputs : 0);
  std::vector<int32_t> sums(w.rounds() ? tokens * (w.inputs / kGroup) : 0);
  std::vector<float> scales(w.rounds() ? tokens * (w.inputs / kSpan) : 0);
  const Rows rows{x, data.data(), sums.data(), scales.data()};
  const Part part{&w, bias, 0, tokens};
  Taken taken{0};
#pragma omp parallel if (w.inputs * w.outputs >= kWorthThreads)
  {
    if (w.rounds()) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < tokens; ++t) round_token(x + t * w.width, w, t, rows);
    }
    multiply(&part, 1, rows, out, taken);
  }
}

}  // namespace

#endif

extern "C" {

// 0 for none, 1 for weights in 8 and 4 bits, 2 for those in bfloat16 as well.
int baton_products() {
#ifdef HAS_DOTS
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw"))
    return __builtin_cpu_supports("avx512bf16") ? 2 : 1;
#endif
  return 0;
}

#ifdef HAS_DOTS
void baton_linear(const void* x, const Weight* weight, const void* bias, void* out, int is_out_float32, int64_t tokens) {
  const auto* rows = static_cast<const bfloat16*>(x);
  const auto* shift = static_cast<const bfloat16*>(bias);
  if (is_out_float32) {
    linear(rows, *weight, shift, static_cast<float*>(out), tokens);
  } else {
    linear(rows, *weight, shift, static_cast<bfloat16*>(out), tokens);
  }
}
#endif
}
