// A whole decode step: one new token of each sequence, from token ids to logits, in one parallel region.
//
// Between products threads meet at a barrier and nowhere else; whoever was held up takes fewer tiles. The arithmetic and its
// order are those of the functions that engine.native has for each part.
//
// Legend: T tokens, one of each sequence, E hidden_size, W width of the MLP, N experts, Hq/H query/KV heads, D head_dim,
// V outputs of the head, P positions, G groups of layers whose KV lies in blocks of their own.

#include <omp.h>

#include "attend.h"
#include "experts.h"

#ifdef HAS_DOTS

namespace {

struct Layer {
  Matrix qkv, out;
  Matrix gate_up, down;  // of the MLP; of the expert that every token takes, if any, where `experts` are
  const bfloat16* input_norm;
  const bfloat16* mlp_norm;
  const bfloat16* output_norm;      // of attention's output, or null
  const bfloat16* mlp_output_norm;  // or null
  const bfloat16* head_norm;        // [Hq + H, D] or null
  const bfloat16* cos;              // [P, D]
  const bfloat16* sin;              // [P, D]
  const float* sinks;               // [Hq] or null
  void* keys;
  void* values;
  int64_t window;  // keys before its own that a token sees; -1 for all
  int64_t group;   // of layers, by which slots and tables are chosen
  const Experts* experts;  // or null
  Matrix router, shared_gate;
};

struct Model {
  const Layer* layers;
  const bfloat16* embedding;  // [., E]
  const bfloat16* norm;
  Matrix head;
  int64_t num_layers, hidden, q_heads, kv_heads, dim, block_size;
  int64_t num_tokens, num_positions, num_blocks, num_groups;  // that there are
  float eps, scale;
  float soft_cap;         // of attention's scores; 0: none
  float embedding_scale;  // 0: none
  Gate gating;            // of MLPs
};

struct Batch {
  const int32_t* token_ids;
  const int32_t* positions;
  const int32_t* slots;  // [G, T]
  const int32_t* lengths;
  const int32_t* tables;  // [G, T, table_width]
  float* logits;          // [T, V]
  double* spent;          // seconds, added to: of products, of attention
  int64_t tokens, table_width;
};

constexpr int64_t kProducts = 8;  // of a layer, at most

// Memory of one step.
struct Room {
  std::unique_ptr<bfloat16[]> residual, normed, qkv, attended, added, gate_up, gated, shared;
  std::unique_ptr<int8_t[]> data;
  std::unique_ptr<int32_t[]> sums;
  std::unique_ptr<float[]> scales, router, shared_gate;  // of the router and the shared expert's gate: [T, N], [T]
  std::unique_ptr<Taken[]> taken;
  std::unique_ptr<ExpertsRoom> experts;

  Room(const Model& m, int64_t tokens) {
    const int64_t qkv_width = (m.q_heads + 2 * m.kv_heads) * m.dim;
    int64_t mlp = 0;
    for (int64_t l = 0; l < m.num_layers; ++l) {
      const Layer& layer = m.layers[l];
      mlp = std::max(mlp, layer.down.weight.width);
      if (!layer.experts || experts) continue;
      experts = std::make_unique<ExpertsRoom>(*layer.experts, tokens);
      router = room<float>(tokens * layer.experts->count), shared_gate = room<float>(tokens);
      shared = room<bfloat16>(tokens * m.hidden);
    }
    const int64_t widest = std::max({m.hidden, m.q_heads * m.dim, mlp}) + kSpan;
    residual = room<bfloat16>(tokens * m.hidden), normed = room<bfloat16>(tokens * m.hidden);
    added = room<bfloat16>(tokens * m.hidden), qkv = room<bfloat16>(tokens * qkv_width);
    attended = room<bfloat16>(tokens * m.q_heads * m.dim);
    gate_up = room<bfloat16>(tokens * 2 * mlp), gated = room<bfloat16>(tokens * mlp);
    data = room<int8_t>(tokens * widest), sums = room<int32_t>(tokens * widest / kGroup);
    scales = room<float>(tokens * widest / kSpan);
    taken = std::unique_ptr<Taken[]>(new Taken[kProducts * m.num_layers + 1]());
  }

  // Tokens as `w` is multiplied with them, where they lie as `plain`.
  Rows rows(const bfloat16* plain) const { return {plain, data.get(), sums.get(), scales.get()}; }
};

// Of all tokens: what a layer adds to the residual, behind a norm of its own or null, and the norm before the next
// product with `w`.
void add_and_normalise(const Model& m, const Room& r, bfloat16* add, const bfloat16* output_norm, const bfloat16* norm,
                       const Weight& w, int64_t tokens) {
  const Rows rows = r.rows(r.normed.get());
#pragma omp for schedule(static)
  for (int64_t t = 0; t < tokens; ++t) {
    bfloat16* to = &r.normed[t * m.hidden];
    bfloat16* added = add ? add + t * m.hidden : nullptr;
    if (added && output_norm) normalise<bfloat16>(added, nullptr, output_norm, added, m.hidden, m.eps);
    normalise<bfloat16>(&r.residual[t * m.hidden], added, norm, to, m.hidden, m.eps);
    if (w.rounds()) round_token(to, w, t, rows);
  }
}

void embed(const Model& m, int32_t token, bfloat16* to) {
  const bfloat16* from = m.embedding + token * m.hidden;
  std::memcpy(to, from, m.hidden * sizeof(bfloat16));
  if (m.embedding_scale == 0.0f) return;
#pragma omp simd
  for (int64_t i = 0; i < m.hidden; ++i) store(to + i, to_float(to[i]) * m.embedding_scale);
}

// Rounds [T, I], which lie there already, for a product with `w`.
void round_all(const Room& r, const bfloat16* plain, const Weight& w, int64_t tokens) {
  if (!w.rounds()) return;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < tokens; ++t) round_token(plain + t * w.width, w, t, r.rows(nullptr));
}

template <typename P>
void attend_all(const Model& m, const Layer& layer, const Room& r, const Batch& b, Scratch& scratch, int64_t at_once) {
  auto* keys = static_cast<P*>(layer.keys);
  auto* values = static_cast<P*>(layer.values);
  const Pages<P> pages{keys, values, m.q_heads, m.kv_heads, m.dim, m.block_size, m.scale,
                       layer.window, m.soft_cap, layer.sinks};
  const int64_t group = pages.group(), parts = (m.kv_heads + at_once - 1) / at_once;
  const int64_t width = (m.q_heads + 2 * m.kv_heads) * m.dim;
#pragma omp for schedule(dynamic, 1)
  for (int64_t unit = 0; unit < b.tokens * parts; ++unit) {
    const int64_t t = unit / parts, first = unit % parts * at_once, last = std::min(m.kv_heads, first + at_once);
    bfloat16* token = &r.qkv[t * width];
    const int64_t row = b.positions[t] * m.dim;
    const Heads<bfloat16> heads{token, layer.head_norm, layer.cos + row, layer.sin + row, m.q_heads, m.kv_heads, m.dim, m.eps};
    heads.rotate(first * group, last * group);
    heads.rotate(m.q_heads + first, m.q_heads + last);
    heads.keep(first, last, b.slots[layer.group * b.tokens + t], keys, values);
    const int32_t* table = b.tables + (layer.group * b.tokens + t) * b.table_width;
    attend(pages, token + first * group * m.dim, table, b.lengths[t], first, last,
           &r.attended[(t * m.q_heads + first * group) * m.dim], scratch);
  }
  round_all(r, r.attended.get(), layer.out.weight, b.tokens);
}

void gate_all(const Gate& gating, const Weight& down, const Room& r, int64_t tokens) {
#pragma omp for schedule(static)
  for (int64_t t = 0; t < tokens; ++t) {
    bfloat16* to = &r.gated[t * down.width];
    gate(gating, &r.gate_up[2 * t * down.width], to, down.width);
    if (down.rounds()) round_token(to, down, t, r.rows(nullptr));
  }
}

void mix_all(const Model& m, const Layer& layer, const Room& r, int64_t tokens) {
  std::vector<float> sum(m.hidden);
  const bool has_shared = layer.down.weight.outputs;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < tokens; ++t) {
    const bfloat16* shared = has_shared ? &r.shared[t * m.hidden] : nullptr;
    mix(*layer.experts, *r.experts, t, shared, has_shared ? sigmoid(r.shared_gate[t]) : 0.0f, sum.data(), &r.added[t * m.hidden]);
  }
}

inline bool is_within(const int32_t* values, int64_t count, int64_t limit, int32_t from = 0) {
  int32_t least = from, most = from;
#pragma omp simd reduction(min : least) reduction(max : most)
  for (int64_t i = 0; i < count; ++i) least = std::min(least, values[i]), most = std::max(most, values[i]);
  return least >= from && most < limit;
}

// Whether all that a batch names is there, and each table reaches as far as its sequence.
bool is_sound(const Model& m, const Batch& b) {
  return is_within(b.token_ids, b.tokens, m.num_tokens) && is_within(b.positions, b.tokens, m.num_positions) &&
         is_within(b.slots, m.num_groups * b.tokens, m.num_blocks * m.block_size) &&
         is_within(b.lengths, b.tokens, b.table_width * m.block_size + 1, 1) &&
         is_within(b.tables, m.num_groups * b.tokens * b.table_width, m.num_blocks);
}

template <typename P>
int decode(const Model& m, const Batch& b) {
  if (!is_sound(m, b)) return 0;
  const Room r(m, b.tokens);
  const int64_t at_once = heads_at_once(b.tokens, m.kv_heads, omp_get_max_threads());
#pragma omp parallel
  {
    Scratch scratch(at_once * m.q_heads / m.kv_heads, m.dim);
    const bool leads = omp_get_thread_num() == 0;
    const auto timed = [&](double& spent, auto&& work) {  // until the last thread is done with it
      const double begun = omp_get_wtime();
      work();
      if (leads) spent += omp_get_wtime() - begun;
    };
    Taken* taken = r.taken.get();  // those that no product has used
    const auto take = [&](int64_t count) { return (taken += count) - count; };
    const auto times = [&](const Matrix& matrix, const bfloat16* plain, auto* out) {
      const Part part{&matrix.weight, matrix.bias, 0, b.tokens};
      timed(b.spent[0], [&] { multiply(&part, 1, r.rows(plain), out, *take(1)); });
    };
#pragma omp for schedule(static)
    for (int64_t t = 0; t < b.tokens; ++t) embed(m, b.token_ids[t], &r.residual[t * m.hidden]);
    bfloat16* add = nullptr;
    const bfloat16* output_norm = nullptr;
    for (int64_t l = 0; l < m.num_layers; ++l, add = r.added.get()) {
      const Layer& layer = m.layers[l];
      add_and_normalise(m, r, add, output_norm, layer.input_norm, layer.qkv.weight, b.tokens);
      output_norm = layer.mlp_output_norm;
      times(layer.qkv, r.normed.get(), r.qkv.get());
      timed(b.spent[1], [&] { attend_all<P>(m, layer, r, b, scratch, at_once); });
      times(layer.out, r.attended.get(), r.added.get());
      const Matrix& first = layer.experts ? layer.router : layer.gate_up;
      add_and_normalise(m, r, r.added.get(), layer.output_norm, layer.mlp_norm, first.weight, b.tokens);
      if (layer.experts) {
        times(layer.router, r.normed.get(), r.router.get());
        timed(b.spent[0], [&] {
          run_experts(*layer.experts, *r.experts, r.normed.get(), {r.router.get(), nullptr, nullptr}, b.tokens, take(2));
        });
      }
      if (layer.gate_up.weight.outputs) {
        if (layer.experts) round_all(r, r.normed.get(), layer.gate_up.weight, b.tokens);
        times(layer.gate_up, r.normed.get(), r.gate_up.get());
        gate_all(m.gating, layer.down.weight, r, b.tokens);
        times(layer.down, r.gated.get(), layer.experts ? r.shared.get() : r.added.get());
      }
      if (layer.experts) {
        if (layer.gate_up.weight.outputs) times(layer.shared_gate, r.normed.get(), r.shared_gate.get());
        mix_all(m, layer, r, b.tokens);
      }
    }
    add_and_normalise(m, r, add, output_norm, m.norm, m.head.weight, b.tokens);
    times(m.head, r.normed.get(), b.logits);
  }
  return 1;
}

}  // namespace

extern "C" {
// 0 for a batch that names what is not there; nothing is computed then.
int baton_decode_bfloat16(const Model* model, const Batch* batch) { return decode<bfloat16>(*model, *batch); }
int baton_decode_int8(const Model* model, const Batch* batch) { return decode<int8_t>(*model, *batch); }
}

#endif
