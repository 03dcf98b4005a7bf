// The experts of a layer, as a function for engine.native.

#include "experts.h"

#ifdef HAS_DOTS

extern "C" {

// out [T, E]: x [T, E] through the experts that the router's logits [T, N] choose, or those of `chosen` [T, K] by
// `shares` [T, K], if they are given; and `shared` [T, E], or null, by the sigmoid of `gate` [T], or all of it.
void baton_experts(const Experts* experts, const void* x, const float* logits, const int32_t* chosen,
                   const float* shares, const void* shared, const float* gate, void* out, int64_t tokens) {
  const Experts& e = *experts;
  ExpertsRoom r(e, tokens);
  const int64_t hidden = e.hidden();
  const auto* of_all = static_cast<const bfloat16*>(shared);
  auto* to = static_cast<bfloat16*>(out);
  Taken taken[2] = {};
#pragma omp parallel
  {
    std::vector<float> sum(hidden);
    run_experts(e, r, static_cast<const bfloat16*>(x), {logits, chosen, shares}, tokens, taken);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t)
      mix(e, r, t, of_all ? of_all + t * hidden : nullptr, gate ? sigmoid(gate[t]) : 1.0f, sum.data(), to + t * hidden);
  }
}
}

#endif
