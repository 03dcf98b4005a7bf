// The experts of a layer: a token goes through those that its router likes best, and their outputs add up.
//
// Tokens are put in the order of their experts, so that each expert's weight is read once, in one product with all of
// its tokens.
//
// Legend: T tokens, E hidden_size, N experts, K experts that a token chooses, C = T K choices, W width of an expert.

#pragma once

#include <memory>
#include <vector>

#include "layers.h"
#include "products.h"

#ifdef HAS_DOTS

namespace {

template <typename T>
std::unique_ptr<T[]> room(int64_t size) {
  return std::unique_ptr<T[]>(new T[size]);
}

// As engine.native lays it out.
struct Experts {
  const Matrix* gate_up;  // of the experts that this rank has
  const Matrix* down;
  int64_t count, per_token;
  int64_t normalizes;  // whether the shares of a token's experts add up to one
  Gate gating;
  const int32_t* places;  // [N]: where the matrices of an expert are, -1 for those of other ranks
  int64_t* tokens;        // [N]: the tokens that each expert got are added to it

  int64_t hidden() const { return down->weight.outputs; }
  int64_t width() const { return down->weight.width; }
};

// What tokens choose their experts by: a router's logits [T, N]; or, if they are given, experts [T, K] and shares [T, K].
struct Choice {
  const float* logits;
  const int32_t* chosen;
  const float* shares;
};

// Memory of the experts of one step; each layer may use it again.
struct ExpertsRoom {
  // [C]: the expert of a choice; where it stands in order, -1 if another rank has its expert; whose it is
  std::unique_ptr<int32_t[]> chosen, place, token;
  int64_t placed = 0;  // choices whose experts this rank has
  std::unique_ptr<float[]> shares;                  // [C]
  std::vector<Part> gate_up_parts, down_parts;
  std::unique_ptr<bfloat16[]> gathered, gate_up, gated;  // [C, E], [C, 2 W], [C, W]
  std::unique_ptr<float[]> added;                        // [C, E]
  std::unique_ptr<int8_t[]> data;
  std::unique_ptr<int32_t[]> sums;
  std::unique_ptr<float[]> scales;

  ExpertsRoom(const Experts& e, int64_t tokens) {
    const int64_t choices = tokens * e.per_token, widest = std::max(e.hidden(), e.width()) + kSpan;
    chosen = room<int32_t>(choices), place = room<int32_t>(choices), token = room<int32_t>(choices);
    shares = room<float>(choices);
    gathered = room<bfloat16>(choices * e.hidden()), gate_up = room<bfloat16>(choices * 2 * e.width());
    gated = room<bfloat16>(choices * e.width()), added = room<float>(choices * e.hidden());
    const bool rounds = e.gate_up->weight.rounds() || e.down->weight.rounds();
    data = room<int8_t>(rounds ? choices * widest : 0), sums = room<int32_t>(rounds ? choices * widest / kGroup : 0);
    scales = room<float>(rounds ? choices * widest / kSpan : 0);
  }

  Rows rows(const bfloat16* plain) const { return {plain, data.get(), sums.get(), scales.get()}; }
};

// The K experts of the greatest logits [N], the first of equal ones, and their shares: softmax over all N.
inline void choose(const Experts& e, const float* logits, int32_t* chosen, float* shares) {
  const float most = *std::max_element(logits, logits + e.count);
  float sum = 0, sum_chosen = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t n = 0; n < e.count; ++n) sum += std::exp(logits[n] - most);
  for (int64_t k = 0; k < e.per_token; ++k) {
    int32_t best = -1;
    for (int32_t n = 0; n < e.count; ++n) {
      const bool is_taken = std::find(chosen, chosen + k, n) != chosen + k;
      if (!is_taken && (best < 0 || logits[n] > logits[best])) best = n;
    }
    chosen[k] = best;
    sum_chosen += shares[k] = std::exp(logits[best] - most);
  }
  const float scale = 1.0f / (e.normalizes ? sum_chosen : sum);
  for (int64_t k = 0; k < e.per_token; ++k) shares[k] *= scale;
}

// Puts the choices of all tokens in the order of their experts, but for those that other ranks have, by one thread.
inline void order(const Experts& e, ExpertsRoom& r, int64_t choices) {
  std::vector<int64_t> starts(e.count + 1);
  for (int64_t c = 0; c < choices; ++c) {
    ++e.tokens[r.chosen[c]];
    if (e.places[r.chosen[c]] >= 0) ++starts[r.chosen[c] + 1];
  }
  r.gate_up_parts.clear(), r.down_parts.clear();
  for (int64_t n = 0; n < e.count; ++n) {
    const int64_t count = starts[n + 1], place = e.places[n];
    starts[n + 1] += starts[n];
    if (!count) continue;
    r.gate_up_parts.push_back({&e.gate_up[place].weight, e.gate_up[place].bias, starts[n], count});
    r.down_parts.push_back({&e.down[place].weight, e.down[place].bias, starts[n], count});
  }
  r.placed = starts[e.count];
  for (int64_t c = 0; c < choices; ++c) {
    r.place[c] = e.places[r.chosen[c]] < 0 ? -1 : static_cast<int32_t>(starts[r.chosen[c]]++);
    if (r.place[c] >= 0) r.token[r.place[c]] = static_cast<int32_t>(c / e.per_token);
  }
}

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Writes to `out` [E] what the experts of token `t` made of it, by their shares, and `shared` [E], if there is one, by
// its own. `sum` [E] is room for it.
inline void mix(const Experts& e, const ExpertsRoom& r, int64_t t, const bfloat16* shared, float share_of_shared,
                float* sum, bfloat16* out) {
  const int64_t hidden = e.hidden();
  std::fill(sum, sum + hidden, 0.0f);
  for (int64_t c = t * e.per_token; c < (t + 1) * e.per_token; ++c) {
    if (r.place[c] < 0) continue;
    const float* from = &r.added[r.place[c] * hidden];
    const float share = r.shares[c];
#pragma omp simd
    for (int64_t i = 0; i < hidden; ++i) sum[i] += share * from[i];
  }
  for (int64_t i = 0; i < hidden; ++i) store(out + i, shared ? sum[i] + share_of_shared * to_float(shared[i]) : sum[i]);
}

// x [T, E] through the experts of a choice; `taken` are two counters that are zero. By all threads of the
// enclosing region. What comes out is in the room, for `mix`.
inline void run_experts(const Experts& e, ExpertsRoom& r, const bfloat16* x, const Choice& choice, int64_t tokens,
                        Taken* taken) {
  const int64_t choices = tokens * e.per_token, hidden = e.hidden(), width = e.width();
  const Weight &first = e.gate_up->weight, &second = e.down->weight;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t first = t * e.per_token;
    if (choice.chosen) {
      std::copy_n(choice.chosen + first, e.per_token, &r.chosen[first]);
      std::copy_n(choice.shares + first, e.per_token, &r.shares[first]);
    } else {
      choose(e, choice.logits + t * e.count, &r.chosen[first], &r.shares[first]);
    }
  }
#pragma omp single
  order(e, r, choices);
  const int64_t placed = r.placed;
  if (!placed) return;
#pragma omp for schedule(static)
  for (int64_t c = 0; c < placed; ++c) {
    std::memcpy(&r.gathered[c * hidden], x + r.token[c] * hidden, hidden * sizeof(bfloat16));
    if (first.rounds()) round_token(&r.gathered[c * hidden], first, c, r.rows(nullptr));
  }
  const int64_t parts = r.gate_up_parts.size();
  multiply(r.gate_up_parts.data(), parts, r.rows(r.gathered.get()), r.gate_up.get(), taken[0]);
#pragma omp for schedule(static)
  for (int64_t c = 0; c < placed; ++c) {
    bfloat16* to = &r.gated[c * width];
    gate(e.gating, &r.gate_up[2 * c * width], to, width);
    if (second.rounds()) round_token(to, second, c, r.rows(nullptr));
  }
  multiply(r.down_parts.data(), parts, r.rows(r.gated.get()), r.added.get(), taken[1]);
}

}  // namespace

#endif
