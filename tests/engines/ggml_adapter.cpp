// The adapter of examples-cpp/adapters/ggml beside ggml's own operators, on the same inputs: prompts, steps of one token, drafts of
// which some are rejected, several sequences, ggml's threads. ggml's way to take drafts back is one whole state per token, as llama.cpp
// has it: the operators write K of them, and `ids` says which to go on from.
//
// Compares all outputs, and states in mid-run and at the end, and prints the memory of both ways.
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <ggml-cpu.h>
#include <ggml.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <string>

#include "engine.hpp"
#include "replayssm_ggml.hpp"

namespace {

using namespace engine;

// Both sides add up the same numbers in fp32, in orders of their own. With u = 2^-24, relative to the norm:
//  - ggml's dt is log(1 + exp(x)), off by u (1 + e^-x): 1.2e-6 for x = -3, the least drawn here. It is in a token's part of the state as
//    it is, and in the decay A dt, where it adds up over the 1 / (A dt) tokens that a state remembers, to as much again;
//  - a state takes in each token by a product, a decay and a sum, each of which rounds by u at most on either side: over n tokens, as
//    independent errors, 6 u sqrt(n), which is 3.9e-6 for the 120 of a run. Keys of length 1 at most, with a beta below 1, do not amplify
//    them;
//  - an output is a sum of up to 256 products: u sqrt(256) = 1e-6.
// Together 7.3e-6; measured: 2e-7.
constexpr double tolerance = 1e-5;
// HIGH reads a bf16 view of the checkpoint, each element off by 2^-8 of itself at most. States are as above.
constexpr double tolerance_high = 0x1p-8;

constexpr int n_rs_seq = 3, n_states = n_rs_seq + 1;  // drafts, and states of a sequence that take them back
constexpr int n_seqs = 3, n_layers = 2, n_prompt = 37, n_ubatches = 40;

struct shape {
  const char *name;
  bool delta;
  replayssm_ggml::mamba2_shape mamba2;
  replayssm_ggml::delta_shape net;

  int64_t heads() const { return delta ? net.n_head_v : mamba2.n_head; }
  int64_t rows() const { return delta ? net.head_size : mamba2.head_dim; }
  int64_t columns() const { return delta ? net.head_size : mamba2.d_state; }
  int64_t groups() const { return delta ? net.n_head_k : mamba2.n_group; }  // of q and k, or B and C
  int64_t state() const { return heads() * rows() * columns(); }
  int64_t inner() const { return heads() * rows(); }
  int64_t packed() const { return inner() + 2 * groups() * columns(); }  // x, B, C or v, q, k of a token
  int64_t gates() const { return heads() * (delta && net.kda ? columns() : 1); }
};

// Inputs of a layer for a ubatch: a packed row per token as a convolution leaves it, and gates.
struct inputs {
  std::vector<float> packed, gate, beta;
};

// The inputs of a ubatch, the same for both sides.
struct ubatch {
  int n_tokens, n_rows;  // rows are the first sequences
  std::vector<inputs> layers;
};

ubatch draw(const shape &s, random_numbers &r, int n_tokens, int n_rows) {
  ubatch u{n_tokens, n_rows, std::vector<inputs>(n_layers)};
  for (inputs &in : u.layers) {
    for (int t = 0; t < n_tokens * n_rows; t++) {
      for (int64_t i = 0; i < s.packed(); i++) in.packed.push_back(r.between(-1.0f, 1.0f));
      if (s.delta) {
        // The engine has normalised q and k. Here they are somewhat shorter, so that it shows if an operator normalises them again.
        float *key = &in.packed[in.packed.size() - static_cast<size_t>(2 * s.groups() * s.columns())];
        for (int64_t h = 0; h < 2 * s.groups(); h++, key += s.columns()) {
          float squares = 0;
          for (int64_t i = 0; i < s.columns(); i++) squares += key[i] * key[i];
          const float factor = r.between(0.6f, 1.0f) / std::sqrt(squares);
          for (int64_t i = 0; i < s.columns(); i++) key[i] *= factor;
        }
      }
      for (int64_t i = 0; i < s.gates(); i++) in.gate.push_back(s.delta ? -std::exp(r.between(-7.0f, 0.5f)) : r.between(-3.0f, 1.0f));
      for (int64_t i = 0; i < s.heads(); i++) in.beta.push_back(r.between(0.05f, 0.95f));
    }
  }
  return u;
}

// Memory for tensors and graphs.
class tensors {
 public:
  explicit tensors(size_t bytes) : context_(ggml_init({bytes, nullptr, false})) { require(context_ != nullptr, "out of memory"); }
  ~tensors() { ggml_free(context_); }
  tensors(const tensors &) = delete;
  tensors &operator=(const tensors &) = delete;
  ggml_context *get() const { return context_; }
  // For the next graph: what the last one had is free.
  ggml_context *renewed() const {
    ggml_reset(context_);
    return context_;
  }

 private:
  ggml_context *context_;
};

// ggml's threads, kept from graph to graph.
class thread_pool {
 public:
  explicit thread_pool(int n_threads) : n_threads_(n_threads) {
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    pool_ = ggml_threadpool_new(&params);
    require(pool_ != nullptr, "no threads");
  }
  ~thread_pool() { ggml_threadpool_free(pool_); }
  thread_pool(const thread_pool &) = delete;
  thread_pool &operator=(const thread_pool &) = delete;

  // Computes a graph, and adds up how long that took.
  void compute(ggml_cgraph *graph) {
    ggml_cplan plan = ggml_graph_plan(graph, n_threads_, pool_);
    work_.resize(plan.work_size > work_.size() ? plan.work_size : work_.size());
    plan.work_data = work_.data();
    const auto start = std::chrono::steady_clock::now();
    require(ggml_graph_compute(graph, &plan) == GGML_STATUS_SUCCESS, "a graph was not computed");
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  double seconds = 0;

 private:
  int n_threads_;
  ggml_threadpool_t pool_;
  std::vector<uint8_t> work_;
};

constexpr size_t small = 1 << 20;  // graphs, descriptions of tensors

// Inputs and outputs of a layer's longest ubatch, the prompt.
size_t graph_bytes(const shape &s) {
  return small + static_cast<size_t>(n_prompt * n_seqs * (s.packed() + s.gates() + 3 * s.heads() + s.inner())) * sizeof(float);
}

// Tensors of a layer's inputs: views of the packed rows, with its strides, as graphs of llama.cpp have them.
struct input_tensors {
  ggml_tensor *value, *first, *second, *gate, *beta, *A, *ids;  // x, B, C, dt or v, q, k, g
};

input_tensors tensors_of(ggml_context *ctx, const shape &s, const ubatch &u, const inputs &in, const std::vector<float> &A,
                         const std::vector<int32_t> &ids) {
  const int64_t T = u.n_tokens, B = u.n_rows;
  const auto filled = [&](const std::vector<float> &from, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3) {
    ggml_tensor *t = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, ne0, ne1, ne2, ne3);
    require(ggml_nbytes(t) == from.size() * sizeof(float), "an input of another size");
    std::memcpy(t->data, from.data(), ggml_nbytes(t));
    return t;
  };
  input_tensors t{};
  ggml_tensor *packed = filled(in.packed, s.packed(), T, B, 1);
  const auto heads = [&](int64_t dim, int64_t n, int64_t offset) {
    return ggml_view_4d(ctx, packed, dim, n, T, B, static_cast<size_t>(dim) * sizeof(float), packed->nb[1], packed->nb[2],
                        static_cast<size_t>(offset) * sizeof(float));
  };
  t.value = heads(s.rows(), s.heads(), 0);
  t.first = heads(s.columns(), s.groups(), s.inner());
  t.second = heads(s.columns(), s.groups(), s.inner() + s.groups() * s.columns());
  t.gate = s.delta ? filled(in.gate, s.gates() / s.heads(), s.heads(), T, B) : filled(in.gate, s.heads(), T, B, 1);
  t.beta = filled(in.beta, 1, s.heads(), T, B);
  t.A = filled(A, 1, s.heads(), 1, 1);
  t.ids = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, B);
  std::memcpy(t.ids->data, ids.data(), ggml_nbytes(t.ids));
  return t;
}

// Outputs of a ubatch, [layers][rows][tokens][inner].
using outputs = std::vector<float>;

void append(outputs &out, const void *data, int64_t n) {
  const float *from = static_cast<const float *>(data);
  out.insert(out.end(), from, from + n);
}

// As llama.cpp has it: n_states whole states of each sequence and layer, state r of sequence i in row r n_seqs + i. Once a ubatch is
// computed, state r is that of r tokens back.
class with_ggml {
 public:
  with_ggml(const shape &s, const std::vector<float> &A, int n_threads)
      : threads(n_threads), shape_(s), A_(A), kept_(small + n_layers * states_bytes()), graph_(graph_bytes(s) + 2 * states_bytes()),
        back_(n_seqs, 0) {
    for (int layer = 0; layer < n_layers; layer++) {
      states_.push_back(ggml_new_tensor_2d(kept_.get(), GGML_TYPE_F32, s.state(), n_seqs * n_states));
      std::memset(states_.back()->data, 0, ggml_nbytes(states_.back()));
    }
  }

  outputs run(const ubatch &u) {
    outputs out;
    for (int layer = 0; layer < n_layers; layer++) run(u, layer, out);
    return out;
  }

  void accept(int seq, int rejected) { back_[static_cast<size_t>(seq)] = rejected; }

  const float *state(int layer, int seq) const {
    const int64_t row = back_[static_cast<size_t>(seq)] * n_seqs + seq;
    return static_cast<const float *>(states_[static_cast<size_t>(layer)]->data) + row * shape_.state();
  }

  // States of a layer, and what its graph needs for states beside them at n_rows rows: reused by the next layer.
  size_t states_bytes() const { return static_cast<size_t>(shape_.state() * n_seqs * n_states) * sizeof(float); }
  size_t scratch_bytes() const { return scratch_bytes_; }
  thread_pool threads;

 private:
  void run(const ubatch &u, int layer, outputs &out) {
    const shape &s = shape_;
    const int64_t T = u.n_tokens, D = s.state();
    std::vector<int32_t> ids;
    for (int i = 0; i < u.n_rows; i++) ids.push_back(back_[static_cast<size_t>(i)] * n_seqs + i);
    const inputs &in = u.layers[static_cast<size_t>(layer)];
    ggml_context *ctx = graph_.renewed();
    const input_tensors t = tensors_of(ctx, s, u, in, A_, ids);
    ggml_tensor *all = states_[static_cast<size_t>(layer)], *result;
    size_t scratch = 0;
    if (s.delta) {
      ggml_tensor *rows = ggml_get_rows(ctx, all, t.ids);
      scratch += ggml_nbytes(rows);
      rows = ggml_reshape_4d(ctx, rows, s.columns(), s.rows(), s.heads(), u.n_rows);
      result = ggml_gated_delta_net(ctx, t.first, t.second, t.value, t.gate, t.beta, rows, n_states);
    } else {
      ggml_tensor *states = ggml_reshape_4d(ctx, all, s.columns(), s.rows(), s.heads(), n_seqs * n_states);
      result = ggml_ssm_scan(ctx, states, t.value, t.gate, t.A, t.first, t.second, t.ids, n_states);
    }
    // The states go back to where they are kept.
    const int64_t n_out = s.inner() * T * u.n_rows, n_written = T < n_states ? T : n_states;
    const size_t row = static_cast<size_t>(D) * sizeof(float);
    ggml_tensor *from = ggml_view_3d(ctx, result, D, u.n_rows, n_written, row, row * static_cast<size_t>(u.n_rows),
                                     static_cast<size_t>(n_out) * sizeof(float));
    ggml_tensor *to = ggml_view_3d(ctx, all, D, u.n_rows, n_written, row, row * n_seqs, 0);
    scratch += ggml_nbytes(result) - static_cast<size_t>(n_out) * sizeof(float);
    scratch_bytes_ = scratch > scratch_bytes_ ? scratch : scratch_bytes_;
    ggml_cgraph *graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, result);
    ggml_build_forward_expand(graph, ggml_cpy(ctx, from, to));
    threads.compute(graph);
    append(out, result->data, n_out);
  }

  const shape &shape_;
  const std::vector<float> &A_;
  tensors kept_, graph_;
  std::vector<int32_t> back_;
  std::vector<ggml_tensor *> states_;
  size_t scratch_bytes_ = 0;
};

// The same engine on the adapter: one state of each sequence and layer. Sequences lie in cells that are not in order, among others.
class with_library {
 public:
  static constexpr int n_cells = 5;
  static constexpr int32_t cells[n_seqs] = {4, 1, 3};

  with_library(const shape &s, const std::vector<float> &A, int n_threads, const replayssm_ggml::precision &precision)
      : threads(n_threads), shape_(s), A_(A), kept_(small + n_layers * static_cast<size_t>(s.state()) * n_cells * sizeof(float)),
        graph_(n_layers * graph_bytes(s)) {
    // >>> create
    std::vector<ggml_tensor *> states;  // the engine's own, one per layer
    for (int layer = 0; layer < n_layers; layer++) {
      states.push_back(ggml_new_tensor_4d(kept_.get(), GGML_TYPE_F32, s.columns(), s.rows(), s.heads(), n_cells));
    }
    replayssm_ggml::memory_options options;
    options.n_cells = n_cells;
    options.n_rs_seq = n_rs_seq;  // drafts that may be rejected
    memory_ = std::make_unique<replayssm_ggml::memory>(options);
    if (s.delta) {
      layers_ = std::make_unique<replayssm_ggml::layers>(*memory_, s.net, states, precision);
    } else {
      layers_ = std::make_unique<replayssm_ggml::layers>(*memory_, s.mamba2, states, precision);
    }
    // <<< create
    states_ = states;
    for (ggml_tensor *state : states) {
      float *all = static_cast<float *>(state->data);
      for (int64_t i = 0; i < ggml_nelements(state); i++) all[i] = std::numeric_limits<float>::quiet_NaN();
    }
    for (const int32_t cell : cells) memory_->clear(cell);
  }

  // All layers in one graph, as a model's.
  outputs run(const ubatch &u, const int32_t *rows = cells) {
    const shape &s = shape_;
    ggml_context *ctx = graph_.renewed();
    ggml_cgraph *graph = ggml_new_graph(ctx);
    std::vector<ggml_tensor *> results;
    for (int layer = 0; layer < n_layers; layer++) {
      const inputs &in = u.layers[static_cast<size_t>(layer)];
      const input_tensors t = tensors_of(ctx, s, u, in, A_, std::vector<int32_t>(rows, rows + u.n_rows));
      ggml_tensor *y;
      if (s.delta) {
        ggml_tensor *v = t.value, *k = t.second, *q = t.first, *g = t.gate, *beta = t.beta, *ids = t.ids;
        // >>> gated_delta_net
        y = layers_->gated_delta_net(ctx, layer, q, k, v, g, beta, ids);
        // <<< gated_delta_net
      } else {
        ggml_tensor *x = t.value, *dt = t.gate, *A = t.A, *B = t.first, *C = t.second, *ids = t.ids;
        // >>> ssm_scan
        y = layers_->ssm_scan(ctx, layer, x, dt, A, B, C, ids);
        // <<< ssm_scan
      }
      ggml_build_forward_expand(graph, y);
      results.push_back(y);
    }
    threads.compute(graph);
    outputs out;
    for (const ggml_tensor *y : results) append(out, y->data, ggml_nelements(y));
    return out;
  }

  // Rejected tokens are left out of the commit, or removed after it.
  void accept(const ubatch &u, const std::vector<int32_t> &rejected, bool by_removal) {
    if (!by_removal) {
      // >>> commit
      // Once the graph was computed: n_rows sequences of n_tokens tokens each.
      memory_->commit(cells, u.n_rows, u.n_tokens, rejected.data());
      // <<< commit
    } else {
      memory_->commit(cells, u.n_rows, u.n_tokens);
      for (int i = 0; i < u.n_rows; i++) {
        const int32_t n = rejected[static_cast<size_t>(i)];
        // >>> remove_tail
        const bool removed = memory_->remove_tail(cells[i], n);  // or later, as llama_memory_seq_rm does
        // <<< remove_tail
        require(removed, "rejected drafts could not be removed");
      }
    }
  }

  // The states of a layer as they are now. Nothing changes.
  std::vector<float> exported(int layer) const {
    std::vector<float> out(static_cast<size_t>(shape_.state()) * n_seqs);
    layers_->pool().export_state(replayssm::host_list(cells, n_seqs), nullptr,
                                 replayssm::dense_state(out.data(), REPLAYSSM_DTYPE_F32, layer));
    return out;
  }

  // Brings the states in the engine's tensors up to date.
  void fold() const {
    for (const int32_t cell : cells) {
      // >>> fold
      memory_->fold(cell);  // the cell's states in the engine's tensors are those of all its tokens
      // <<< fold
    }
  }
  // An engine's way to load a session: states are copied into its tensors.
  void load(int32_t cell, int32_t from) const {
    for (int layer = 0; layer < n_layers; layer++) {
      float *to = static_cast<float *>(states_[static_cast<size_t>(layer)]->data) + cell * shape_.state();
      std::memcpy(to, state(layer, from), static_cast<size_t>(shape_.state()) * sizeof(float));
    }
    const int64_t position = memory_->position(from);
    // >>> adopt
    memory_->adopt(cell, position);  // the engine has written the cell's states into its tensors: those after so many tokens
    // <<< adopt
  }
  const float *state(int layer, int32_t cell) const {
    return static_cast<const float *>(states_[static_cast<size_t>(layer)]->data) + cell * shape_.state();
  }

  // Cells of no sequence are as they were.
  void require_untouched() const {
    for (const int32_t cell : {0, 2}) {
      for (int64_t i = 0; i < n_layers * shape_.state(); i++) {
        require(std::isnan(state(static_cast<int>(i / shape_.state()), cell)[i % shape_.state()]), "a cell of no sequence was written");
      }
    }
    require(memory_->slots().report().bits == 0, "a fault bit is set");
  }

  // Per sequence and layer.
  size_t ring_bytes() const {
    size_t bytes = 0;
    for (const replayssm_component &part : layers_->pool().components()) {
      if (part.kind != REPLAYSSM_COMPONENT_CHECKPOINT) bytes += static_cast<size_t>(part.slot_stride_bytes);
    }
    return bytes;
  }
  int64_t position(int seq) const { return memory_->position(cells[seq]); }
  thread_pool threads;

 private:
  const shape &shape_;
  const std::vector<float> &A_;
  tensors kept_, graph_;
  std::unique_ptr<replayssm_ggml::memory> memory_;
  std::unique_ptr<replayssm_ggml::layers> layers_;
  std::vector<ggml_tensor *> states_;
};

// The relative difference of two vectors in the Euclidean norm. Not a number if one has none.
double difference(const float *a, const float *b, size_t n) {
  double squares = 0, norm = 0;
  for (size_t i = 0; i < n; i++) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    squares += d * d;
    norm += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return std::sqrt(squares / norm);
}

// What a run left behind, to compare runs with.
struct result {
  outputs last;
  std::vector<float> states;
};

result run(const shape &s, int n_threads, const replayssm_ggml::precision &precision, const char *precision_name, bool broken,
           bool print_costs = false) {
  random_numbers r{11};
  std::vector<float> A;
  for (int64_t h = 0; h < s.heads(); h++) A.push_back(-r.between(0.05f, 4.0f));
  with_ggml theirs(s, A, n_threads);
  with_library ours(s, A, n_threads, precision);
  const bool high = precision.readout == REPLAYSSM_READOUT_HIGH;
  double worst_output = 0, worst_state = 0, prompt_seconds[2] = {0, 0};
  int rejected_drafts = 0;
  std::vector<int64_t> tokens(n_seqs, 0);
  result last;

  const auto look_at_states = [&] {
    last.states.clear();
    for (int layer = 0; layer < n_layers; layer++) {
      const std::vector<float> all = ours.exported(layer);
      last.states.insert(last.states.end(), all.begin(), all.end());
      for (int seq = 0; seq < n_seqs; seq++) {
        const double d = difference(all.data() + seq * s.state(), theirs.state(layer, seq), static_cast<size_t>(s.state()));
        require(d <= tolerance, "a state differs from ggml's");
        worst_state = d > worst_state ? d : worst_state;
      }
    }
  };
  for (int i = 0; i <= n_ubatches; i++) {
    // A prompt, steps of one token, then drafts, sometimes without the last sequence.
    const int n_tokens = i == 0 ? n_prompt : i <= 12 ? 1 : i % 5 == 0 ? 1 + r.below(n_states) : n_states;
    const ubatch u = draw(s, r, n_tokens, i > 0 && i % 7 == 0 ? n_seqs - 1 : n_seqs);
    const outputs expected = theirs.run(u);
    last.last = ours.run(u);
    if (i == 3 || i == 17) last.last = ours.run(u);  // a graph that is computed again: nothing has moved
    const double d = difference(last.last.data(), expected.data(), expected.size());
    require(last.last.size() == expected.size() && d <= (high && i > 0 ? tolerance_high : tolerance), "an output differs from ggml's");
    worst_output = d > worst_output ? d : worst_output;
    if (i == 0) prompt_seconds[0] = theirs.threads.seconds, prompt_seconds[1] = ours.threads.seconds;

    std::vector<int32_t> rejected;
    for (int row = 0; row < u.n_rows; row++) {
      rejected.push_back(r.below(n_tokens < n_states ? n_tokens : n_states));
      rejected_drafts += rejected.back();
      theirs.accept(row, rejected.back());
      tokens[static_cast<size_t>(row)] += n_tokens - rejected.back();
    }
    // "break" shows that the comparison compares: a draft stays that was rejected.
    if (broken && i == 20) rejected[1] = rejected[1] > 0 ? rejected[1] - 1 : 1;
    ours.accept(u, rejected, i % 3 == 2);
    if (i % 8 == 0) look_at_states();
  }
  look_at_states();
  for (int seq = 0; seq < n_seqs; seq++) {
    require(ours.position(seq) == tokens[static_cast<size_t>(seq)], "a position is not the number of tokens");
  }
  if (precision.format == REPLAYSSM_FORMAT_F32) {
    ours.fold();
    for (int layer = 0; layer < n_layers; layer++) {
      for (int seq = 0; seq < n_seqs; seq++) {
        const float *state = ours.state(layer, with_library::cells[seq]);
        const float *exported = last.states.data() + (layer * n_seqs + seq) * s.state();
        const bool same = std::memcmp(state, exported, static_cast<size_t>(s.state()) * sizeof(float)) == 0;
        require(same, "a state in the engine's tensor is not the exported one");
      }
    }
  }
  ours.require_untouched();
  require(rejected_drafts > 0, "no draft was rejected");
  if (precision.format == REPLAYSSM_FORMAT_F32) {
    // States that are read from the tensors and written back go on as the sequence does that they were read from.
    const int32_t here = with_library::cells[1], there = 2;
    ours.load(there, here);
    const ubatch u = draw(s, r, n_states, 1);
    require(same_bytes(ours.run(u, &here), ours.run(u, &there)), "a loaded state goes on in another way");
  }

  std::printf("ggml_adapter: %s, %s, %d thread%s: %d ubatches, %d tokens rejected: outputs differ from ggml's by %.1e, states by %.1e\n",
              s.name, precision_name, n_threads, n_threads == 1 ? "" : "s", n_ubatches, rejected_drafts, worst_output, worst_state);
  if (print_costs) {
    const double mb = 1e-6, per_layer = 1e3 / n_ubatches / n_layers;
    const double state = static_cast<double>(s.state()) * sizeof(float) * mb, ring = static_cast<double>(ours.ring_bytes()) * mb;
    const double scratch = static_cast<double>(theirs.scratch_bytes()) * mb;
    std::printf("ggml_adapter: %s: MB of a sequence and layer for up to %d drafts: state %.2f + ring %.2f = %.2f; ggml %d states %.2f, "
                "and in a graph of %d sequences %.2f; ms per ubatch and layer %.2f, ggml %.2f\n",
                s.name, n_rs_seq, state, ring, state + ring, n_states, state * n_states, n_seqs, scratch,
                (ours.threads.seconds - prompt_seconds[1]) * per_layer, (theirs.threads.seconds - prompt_seconds[0]) * per_layer);
  }
  return last;
}

}  // namespace

int main(int argc, char **argv) {
  const bool broken = argc > 1 && std::strcmp(argv[1], "break") == 0;
  const shape shapes[] = {
      {"Mamba-2 96 x 80 x 128, 8 groups (Nemotron-H)", false, {96, 80, 128, 8}, {}},
      {"Mamba-2 32 x 128 x 256, 1 group (Falcon-H1 3B)", false, {32, 128, 256, 1}, {}},
      {"GDN 32 x 128 x 128, 16 key heads (Qwen3-Next)", true, {}, {16, 32, 128, false}},
      {"KDA 32 x 128 x 128 (Kimi Linear)", true, {}, {32, 32, 128, true}},
  };
  ggml_cpu_init();
  for (const shape &s : shapes) {
    const replayssm_ggml::precision f32{}, exact{REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_EXACT},
        high{REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_HIGH};
    const result one = run(s, 1, f32, "F32 FULL", broken, true), two = run(s, 2, f32, "F32 FULL", false);
    require(same_bytes(one.last, two.last) && same_bytes(one.states, two.states), "two threads give other bytes than one");
    run(s, 1, exact, "F32 EXACT", false);
    run(s, 1, high, "SPLIT32 HIGH", false);
  }
  return 0;
}
