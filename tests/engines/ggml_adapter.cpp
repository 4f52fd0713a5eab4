// The adapter of examples-cpp/adapters/ggml beside ggml's own operators, on the same inputs: prompts, steps of one token, drafts of
// which some are rejected, several sequences, ggml's threads. ggml's way to take drafts back is one whole state per token, as llama.cpp
// has it: the operators write K of them, and `ids` says which to go on from.
//
// Compares all outputs, and states in mid-run and at the end, and prints the memory of both ways. On ggml's CPU backend, or, compiled with
// GGML_ADAPTER_ON_CUDA, on its CUDA backend with ggml_cuda.patch (tests/gpu/ggml_cuda.sh).
//
//   ggml_adapter                  all shapes, each with states and readouts of several kinds
//   ggml_adapter time             times alone, with more layers and sequences
//   ggml_adapter break WHAT       shows that the comparison compares, with WHAT one of
//       ssm_scan, gated_delta_net                         B and C, q and k exchanged
//       drafts_of_ssm_scan, drafts_of_gated_delta_net     a draft stays that was rejected
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>
#ifdef GGML_ADAPTER_ON_CUDA
#include <ggml-cuda.h>
#endif

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
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
constexpr double cpu_tolerance = 1e-5;
// ggml's CUDA kernels take exponentials of --use_fast_math, off by 2 + 1.2 |x| units in the last place (2^-23): a decay of every token. If all
// err to one side, a state that forgets nothing over 120 tokens is off by 240 x 2^-23 = 2.9e-5; with the above, 3.6e-5.
constexpr double cuda_tolerance = 4e-5;
// HIGH reads a bf16 view of the checkpoint, each element off by 2^-8 of itself at most. States are as above.
constexpr double tolerance_high = 0x1p-8;

constexpr int n_rs_seq = 3, n_states = n_rs_seq + 1;  // drafts, and states of a sequence that take them back
constexpr int n_prompt = 37, n_ubatches = 28;
int n_seqs = 3, n_layers = 2;
#ifdef GGML_ADAPTER_ON_CUDA
constexpr bool on_cuda = true;
#else
constexpr bool on_cuda = false;
#endif
constexpr double tolerance = on_cuda ? cuda_tolerance : cpu_tolerance;
std::string broken;  // what is to go wrong

struct shape {
  const char *name;
  bool delta;
  replayssm_ggml::mamba2_shape mamba2;
  replayssm_ggml::delta_shape net;

  std::string op() const { return delta ? "gated_delta_net" : "ssm_scan"; }
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
  ubatch u{n_tokens, n_rows, std::vector<inputs>(static_cast<size_t>(n_layers))};
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

// A backend of ggml, on which both sides compute.
class machine {
 public:
  explicit machine(int n_threads) {
#ifdef GGML_ADAPTER_ON_CUDA
    (void)n_threads;
    backend_ = ggml_backend_cuda_init(0);
    // >>> hook
    ggml_backend_cuda_set_custom(replayssm_ggml::layers::on_stream);  // once, before a graph is given to the backend
    // <<< hook
#else
    backend_ = ggml_backend_cpu_init();
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    pool_ = ggml_threadpool_new(&params);
    require(pool_ != nullptr, "no threads");
    ggml_backend_cpu_set_n_threads(backend_, n_threads);
    ggml_backend_cpu_set_threadpool(backend_, pool_);
#endif
    require(backend_ != nullptr, "no backend");
  }
  ~machine() {
    ggml_backend_free(backend_);
    if (pool_ != nullptr) ggml_threadpool_free(pool_);
  }
  machine(const machine &) = delete;
  machine &operator=(const machine &) = delete;
  ggml_backend_t get() const { return backend_; }
#ifdef GGML_ADAPTER_ON_CUDA
  ggml_backend_t cuda() const { return backend_; }
  void *stream() const { return ggml_backend_cuda_stream(backend_); }
#else
  ggml_backend_t cuda() const { return nullptr; }
  void *stream() const { return nullptr; }
#endif

  // Computes a graph, and says how many milliseconds that took.
  double compute(ggml_cgraph *graph) const {
    const auto start = std::chrono::steady_clock::now();
    require(ggml_backend_graph_compute(backend_, graph) == GGML_STATUS_SUCCESS, "a graph was not computed");
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  }
  void fill(ggml_tensor *t, const void *from, size_t bytes) const {
    require(bytes == ggml_nbytes(t), "an input of another size");
    ggml_backend_tensor_set(t, from, 0, bytes);
  }
  void read(const ggml_tensor *t, void *to, size_t offset, size_t bytes) const {
    ggml_backend_synchronize(backend_);
    ggml_backend_tensor_get(t, to, offset, bytes);
  }

 private:
  ggml_backend_t backend_ = nullptr;
  ggml_threadpool_t pool_ = nullptr;
};

// Tensors, and a graph of them.
class tensors {
 public:
  tensors() : context_(ggml_init({1024 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true})) {
    require(context_ != nullptr, "out of memory");
  }
  ~tensors() {
    ggml_backend_buffer_free(buffer_);
    ggml_free(context_);
  }
  tensors(const tensors &) = delete;
  tensors &operator=(const tensors &) = delete;
  ggml_context *get() const { return context_; }
  void allocate(const machine &on) {
    buffer_ = ggml_backend_alloc_ctx_tensors(context_, on.get());
    require(buffer_ != nullptr, "out of memory");
  }
  void fill_bytes(uint8_t value) const { ggml_backend_buffer_clear(buffer_, value); }

 private:
  ggml_context *context_;
  ggml_backend_buffer_t buffer_ = nullptr;
};

// Tensors of a layer's inputs: views of the packed rows, with its strides, as graphs of llama.cpp have them.
struct input_tensors {
  ggml_tensor *packed, *value, *first, *second, *gate, *beta, *A;  // x, B, C, dt or v, q, k, g

  input_tensors(ggml_context *ctx, const shape &s, int64_t T, int64_t B) {
    packed = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, s.packed(), T, B);
    const auto heads = [&](int64_t dim, int64_t n, int64_t offset) {
      return ggml_view_4d(ctx, packed, dim, n, T, B, static_cast<size_t>(dim) * sizeof(float), packed->nb[1], packed->nb[2],
                          static_cast<size_t>(offset) * sizeof(float));
    };
    value = heads(s.rows(), s.heads(), 0);
    first = heads(s.columns(), s.groups(), s.inner());
    second = heads(s.columns(), s.groups(), s.inner() + s.groups() * s.columns());
    const int64_t H = s.heads();
    gate = s.delta ? ggml_new_tensor_4d(ctx, GGML_TYPE_F32, s.gates() / H, H, T, B) : ggml_new_tensor_3d(ctx, GGML_TYPE_F32, H, T, B);
    beta = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 1, H, T, B);
    A = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 1, H);
  }

  void fill(const machine &on, const inputs &in, const std::vector<float> &values_of_A) const {
    on.fill(packed, in.packed.data(), in.packed.size() * sizeof(float));
    on.fill(gate, in.gate.data(), in.gate.size() * sizeof(float));
    on.fill(beta, in.beta.data(), in.beta.size() * sizeof(float));
    on.fill(A, values_of_A.data(), values_of_A.size() * sizeof(float));
  }
};

// Outputs of a ubatch, [layers][rows][tokens][inner].
using outputs = std::vector<float>;

// The graph of all layers for ubatches of one shape, computed as often as they come. How a layer is computed, the sides say.
struct model_graph : tensors {
  template <class Build>
  model_graph(const machine &on, const shape &s, int n_tokens, int n_rows, const Build &build) {
    graph = ggml_new_graph(get());
    ids = ggml_new_tensor_1d(get(), GGML_TYPE_I32, n_rows);
    for (int layer = 0; layer < n_layers; layer++) {
      inputs_of.emplace_back(get(), s, n_tokens, n_rows);
      results.push_back(build(*this, layer, inputs_of.back()));
      ggml_build_forward_expand(graph, results.back());
    }
    allocate(on);
  }

  outputs compute(const machine &on, const shape &s, const ubatch &u, const std::vector<float> &A, const std::vector<int32_t> &rows) {
    on.fill(ids, rows.data(), rows.size() * sizeof(int32_t));
    for (int layer = 0; layer < n_layers; layer++) {
      inputs_of[static_cast<size_t>(layer)].fill(on, u.layers[static_cast<size_t>(layer)], A);
    }
    milliseconds = on.compute(graph);
    const size_t n = static_cast<size_t>(s.inner() * u.n_tokens * u.n_rows);
    outputs out(n * results.size());
    for (size_t i = 0; i < results.size(); i++) on.read(results[i], out.data() + i * n, 0, n * sizeof(float));
    return out;
  }

  ggml_cgraph *graph;
  ggml_tensor *ids;
  std::vector<input_tensors> inputs_of;
  std::vector<ggml_tensor *> results;  // outputs come first in them
  double milliseconds = 0;
};

// One side: its graphs by tokens and sequences of a ubatch.
class side {
 public:
  side(const machine &on, const shape &s, const std::vector<float> &A) : machine_(on), shape_(s), A_(A) {}
  double milliseconds = 0;  // of the last graph

 protected:
  template <class Build>
  outputs run(const ubatch &u, const std::vector<int32_t> &rows, const Build &build) {
    auto &graph = graphs_[{u.n_tokens, u.n_rows}];
    if (!graph) graph = std::make_unique<model_graph>(machine_, shape_, u.n_tokens, u.n_rows, build);
    outputs out = graph->compute(machine_, shape_, u, A_, rows);
    milliseconds = graph->milliseconds;
    return out;
  }

  const machine &machine_;
  const shape &shape_;
  const std::vector<float> &A_;
  tensors kept_;

 private:
  std::map<std::pair<int, int>, std::unique_ptr<model_graph>> graphs_;
};

// As llama.cpp has it: n_states whole states of each sequence and layer, state r of sequence i in row r n_seqs + i. Once a ubatch is
// computed, state r is that of r tokens back.
class with_ggml : public side {
 public:
  with_ggml(const machine &on, const shape &s, const std::vector<float> &A) : side(on, s, A), back_(static_cast<size_t>(n_seqs), 0) {
    for (int layer = 0; layer < n_layers; layer++) {
      states_.push_back(ggml_new_tensor_2d(kept_.get(), GGML_TYPE_F32, s.state(), n_seqs * n_states));
    }
    kept_.allocate(on);
    kept_.fill_bytes(0);
  }

  outputs run(const ubatch &u) {
    std::vector<int32_t> rows;
    for (int i = 0; i < u.n_rows; i++) rows.push_back(back_[static_cast<size_t>(i)] * n_seqs + i);
    return side::run(u, rows, [&](model_graph &graph, int layer, const input_tensors &t) { return build(graph, layer, t, u.n_tokens, u.n_rows); });
  }

  void accept(int seq, int rejected) { back_[static_cast<size_t>(seq)] = rejected; }

  std::vector<float> state(int layer, int seq) const {
    std::vector<float> out(static_cast<size_t>(shape_.state()));
    const size_t row = static_cast<size_t>(back_[static_cast<size_t>(seq)] * n_seqs + seq);
    machine_.read(states_[static_cast<size_t>(layer)], out.data(), row * out.size() * sizeof(float), out.size() * sizeof(float));
    return out;
  }

  // What the graph of a layer needs for states beside the kept ones: reused by the next layer.
  size_t scratch_bytes() const { return scratch_bytes_; }

 private:
  ggml_tensor *build(const model_graph &graph, int layer, const input_tensors &t, int64_t n_tokens, int64_t n_rows) {
    const shape &s = shape_;
    const int64_t D = s.state();
    ggml_context *ctx = graph.get();
    ggml_tensor *all = states_[static_cast<size_t>(layer)], *result;
    size_t scratch = 0;
    if (s.delta) {
      ggml_tensor *rows = ggml_get_rows(ctx, all, graph.ids);
      scratch += ggml_nbytes(rows);
      rows = ggml_reshape_4d(ctx, rows, s.columns(), s.rows(), s.heads(), n_rows);
      result = ggml_gated_delta_net(ctx, t.first, t.second, t.value, t.gate, t.beta, rows, n_states);
    } else {
      ggml_tensor *states = ggml_reshape_4d(ctx, all, s.columns(), s.rows(), s.heads(), n_seqs * n_states);
      result = ggml_ssm_scan(ctx, states, t.value, t.gate, t.A, t.first, t.second, graph.ids, n_states);
    }
    // The states go back to where they are kept.
    const int64_t n_out = s.inner() * n_tokens * n_rows, n_written = n_tokens < n_states ? n_tokens : n_states;
    const size_t row = static_cast<size_t>(D) * sizeof(float);
    ggml_tensor *from = ggml_view_3d(ctx, result, D, n_rows, n_written, row, row * static_cast<size_t>(n_rows),
                                     static_cast<size_t>(n_out) * sizeof(float));
    ggml_tensor *to = ggml_view_3d(ctx, all, D, n_rows, n_written, row, row * static_cast<size_t>(n_seqs), 0);
    scratch += ggml_nbytes(result) - static_cast<size_t>(n_out) * sizeof(float);
    scratch_bytes_ = std::max(scratch, scratch_bytes_);
    ggml_build_forward_expand(graph.graph, result);
    ggml_build_forward_expand(graph.graph, ggml_cpy(ctx, from, to));
    return result;
  }

  std::vector<int32_t> back_;
  std::vector<ggml_tensor *> states_;
  size_t scratch_bytes_ = 0;
};

// The same engine on the adapter: one state of each sequence and layer. Sequences lie in cells that are not in order, among others.
class with_library : public side {
 public:
  const int n_cells = n_seqs + 2;
  std::vector<int32_t> cells;  // of the sequences
  int spare_cells[2];

  with_library(const machine &on, const shape &s, const std::vector<float> &A, const replayssm_ggml::precision &precision)
      : side(on, s, A), spare_cells{0, n_seqs - 1} {
    for (int cell = n_cells - 1; cell >= 0; cell--) {
      if (cell != spare_cells[0] && cell != spare_cells[1]) cells.push_back(cell);
    }
    std::swap(cells[1], cells[2]);
    // >>> create
    std::vector<ggml_tensor *> states;  // the engine's own, one per layer
    for (int layer = 0; layer < n_layers; layer++) {
      states.push_back(ggml_new_tensor_4d(kept_.get(), GGML_TYPE_F32, s.columns(), s.rows(), s.heads(), n_cells));
    }
    kept_.allocate(on);
    replayssm_ggml::memory_options options;
    options.n_cells = n_cells;
    options.n_rs_seq = n_rs_seq;  // drafts that may be rejected
    options.cuda = on.cuda();  // null on the CPU, as the stream
    options.stream = on.stream();
    memory_ = std::make_unique<replayssm_ggml::memory>(options);
    if (s.delta) {
      layers_ = std::make_unique<replayssm_ggml::layers>(*memory_, s.net, states, precision);
    } else {
      layers_ = std::make_unique<replayssm_ggml::layers>(*memory_, s.mamba2, states, precision);
    }
    // <<< create
    states_ = states;
    kept_.fill_bytes(0xff);  // not numbers
    exported_ = ggml_new_tensor_2d(exports_.get(), GGML_TYPE_F32, s.state(), n_seqs);
    exports_.allocate(on);
    for (const int32_t cell : cells) memory_->clear(cell);
  }

  outputs run(const ubatch &u) { return run(u, std::vector<int32_t>(cells.begin(), cells.begin() + u.n_rows)); }

  outputs run(const ubatch &u, const std::vector<int32_t> &rows) {
    return side::run(u, rows, [&](const model_graph &graph, int layer, const input_tensors &t) {
      ggml_context *ctx = graph.get();
      ggml_tensor *ids = graph.ids, *first = t.first, *second = t.second, *y;
      if (broken == shape_.op()) std::swap(first, second);
      if (shape_.delta) {
        ggml_tensor *v = t.value, *k = second, *q = first, *g = t.gate, *beta = t.beta;
        // >>> gated_delta_net
        y = layers_->gated_delta_net(ctx, layer, q, k, v, g, beta, ids);
        // <<< gated_delta_net
      } else {
        ggml_tensor *x = t.value, *dt = t.gate, *A = t.A, *B = first, *C = second;
        // >>> ssm_scan
        y = layers_->ssm_scan(ctx, layer, x, dt, A, B, C, ids);
        // <<< ssm_scan
      }
      require(ggml_backend_supports_op(machine_.get(), y), "the backend does not take the operator");
      return y;
    });
  }

  // Rejected tokens are left out of the commit, or removed after it.
  void accept(const ubatch &u, const std::vector<int32_t> &rejected, bool by_removal) {
    if (!by_removal) {
      // >>> commit
      // Once the graph was computed: n_rows sequences of n_tokens tokens each.
      memory_->commit(cells.data(), u.n_rows, u.n_tokens, rejected.data());
      // <<< commit
    } else {
      memory_->commit(cells.data(), u.n_rows, u.n_tokens);
      for (int i = 0; i < u.n_rows; i++) {
        const int32_t n = rejected[static_cast<size_t>(i)], cell = cells[static_cast<size_t>(i)];
        // >>> remove_tail
        const bool removed = memory_->remove_tail(cell, n);  // or later, as llama_memory_seq_rm does
        // <<< remove_tail
        require(removed, "rejected drafts could not be removed");
      }
    }
  }

  // The states of a layer as they are now. Nothing changes.
  std::vector<float> exported(int layer) {
    auto exec = replayssm::init<replayssm_exec>();
    exec.stream = static_cast<replayssm_stream>(memory_->options().stream);
    layers_->pool().export_state(replayssm::host_list(cells.data(), n_seqs), nullptr,
                                 replayssm::dense_state(exported_->data, REPLAYSSM_DTYPE_F32, layer), &exec);
    std::vector<float> out(static_cast<size_t>(shape_.state() * n_seqs));
    machine_.read(exported_, out.data(), 0, out.size() * sizeof(float));
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
      const std::vector<float> values = state(layer, from);
      ggml_backend_tensor_set(states_[static_cast<size_t>(layer)], values.data(), static_cast<size_t>(cell) * values.size() * sizeof(float),
                              values.size() * sizeof(float));
    }
    const int64_t position = memory_->position(from);
    // >>> adopt
    memory_->adopt(cell, position);  // the engine has written the cell's states into its tensors: those after so many tokens
    // <<< adopt
  }
  std::vector<float> state(int layer, int32_t cell) const {
    std::vector<float> out(static_cast<size_t>(shape_.state()));
    machine_.read(states_[static_cast<size_t>(layer)], out.data(), static_cast<size_t>(cell) * out.size() * sizeof(float),
                  out.size() * sizeof(float));
    return out;
  }

  // Cells of no sequence are as they were.
  void require_untouched() const {
    for (const int32_t cell : spare_cells) {
      for (int layer = 0; layer < n_layers; layer++) {
        for (const float value : state(layer, cell)) require(std::isnan(value), "a cell of no sequence was written");
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
  int64_t position(int seq) const { return memory_->position(cells[static_cast<size_t>(seq)]); }

 private:
  tensors exports_;
  ggml_tensor *exported_;
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

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

result run(const shape &s, int n_threads, const replayssm_ggml::precision &precision, const char *precision_name, bool print_costs = false) {
  random_numbers r{11};
  std::vector<float> A;
  for (int64_t h = 0; h < s.heads(); h++) A.push_back(-r.between(0.05f, 4.0f));
  const machine on(n_threads);
  with_ggml theirs(on, s, A);
  with_library ours(on, s, A, precision);
  const bool high = precision.readout == REPLAYSSM_READOUT_HIGH;
  double worst_output = 0, worst_state = 0;
  int rejected_drafts = 0;
  std::vector<int64_t> tokens(static_cast<size_t>(n_seqs), 0);
  std::vector<double> times[2][2];  // of one token, of n_states tokens; ours, ggml's
  result last;

  const auto look_at_states = [&] {
    last.states.clear();
    for (int layer = 0; layer < n_layers; layer++) {
      const std::vector<float> all = ours.exported(layer);
      last.states.insert(last.states.end(), all.begin(), all.end());
      for (int seq = 0; seq < n_seqs; seq++) {
        const double d = difference(all.data() + seq * s.state(), theirs.state(layer, seq).data(), static_cast<size_t>(s.state()));
        require(d <= tolerance, "a state differs from ggml's");
        worst_state = std::max(d, worst_state);
      }
    }
  };
  for (int i = 0; i <= n_ubatches; i++) {
    // A prompt, steps of one token, then drafts, sometimes without the last sequence.
    const int n_tokens = i == 0 ? n_prompt : i <= 12 ? 1 : i % 5 == 0 ? 1 + r.below(n_states) : n_states;
    const ubatch u = draw(s, r, n_tokens, i > 0 && i % 7 == 0 ? n_seqs - 1 : n_seqs);
    const outputs expected = theirs.run(u);
    last.last = ours.run(u);
    if (i > 0 && u.n_rows == n_seqs && (n_tokens == 1 || n_tokens == n_states)) {
      times[n_tokens == 1 ? 0 : 1][0].push_back(ours.milliseconds);
      times[n_tokens == 1 ? 0 : 1][1].push_back(theirs.milliseconds);
    }
    if (i == 3 || i == 17) last.last = ours.run(u);  // a graph that is computed again: nothing has moved
    const double d = difference(last.last.data(), expected.data(), expected.size());
    require(last.last.size() == expected.size() && d <= (high && i > 0 ? tolerance_high : tolerance), "an output differs from ggml's");
    worst_output = std::max(d, worst_output);

    std::vector<int32_t> rejected;
    for (int row = 0; row < u.n_rows; row++) {
      rejected.push_back(r.below(n_tokens < n_states ? n_tokens : n_states));
      rejected_drafts += rejected.back();
      theirs.accept(row, rejected.back());
      tokens[static_cast<size_t>(row)] += n_tokens - rejected.back();
    }
    if (broken == "drafts_of_" + s.op() && i == 20) rejected[1] = rejected[1] > 0 ? rejected[1] - 1 : 1;
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
        const std::vector<float> state = ours.state(layer, ours.cells[static_cast<size_t>(seq)]);
        const float *exported = last.states.data() + (layer * n_seqs + seq) * s.state();
        require(std::memcmp(state.data(), exported, state.size() * sizeof(float)) == 0, "a state in the engine's tensor is not the exported one");
      }
    }
  }
  ours.require_untouched();
  require(rejected_drafts > 0, "no draft was rejected");
  if (precision.format == REPLAYSSM_FORMAT_F32) {
    // States that are read from the tensors and written back go on as the sequence does that they were read from.
    const int32_t here = ours.cells[1], there = ours.spare_cells[1];
    ours.load(there, here);
    const ubatch u = draw(s, r, n_states, 1);
    require(same_bytes(ours.run(u, {here}), ours.run(u, {there})), "a loaded state goes on in another way");
  }

  const std::string place = on_cuda ? "CUDA" : n_threads == 1 ? "1 thread" : std::to_string(n_threads) + " threads";
  std::printf("ggml_adapter: %s, %s, %s: %d ubatches, %d tokens rejected: outputs differ from ggml's by %.1e, states by %.1e\n", s.name,
              precision_name, place.c_str(), n_ubatches, rejected_drafts, worst_output, worst_state);
  if (print_costs) {
    const double mb = 1e-6, state = static_cast<double>(s.state()) * sizeof(float) * mb, ring = static_cast<double>(ours.ring_bytes()) * mb;
    std::printf("ggml_adapter: %s: MB of a sequence and layer for up to %d drafts: state %.2f + ring %.2f = %.2f; ggml %d states %.2f, "
                "and in a graph of %d sequences %.2f\n",
                s.name, n_rs_seq, state, ring, state + ring, n_states, state * n_states, n_seqs, static_cast<double>(theirs.scratch_bytes()) * mb);
    const auto us = [&](int kind, int who) { return 1e3 * median(times[kind][who]) / n_layers; };
    std::printf("ggml_adapter: %s, %s, %s: median us per layer, %d layers in a graph, %d sequences: 1 token %.1f, ggml %.1f; "
                "%d tokens %.1f, ggml %.1f\n",
                s.name, precision_name, place.c_str(), n_layers, n_seqs, us(0, 0), us(0, 1), n_states, us(1, 0), us(1, 1));
  }
  return last;
}

}  // namespace

int main(int argc, char **argv) {
  // Errors alone: backends tell more about themselves.
  ggml_log_set([](ggml_log_level level, const char *text, void *) { if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr); }, nullptr);
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "break" && argc > 2) broken = argv[2];
  const shape shapes[] = {
      {"Mamba-2 96 x 80 x 128, 8 groups (Nemotron-H)", false, {96, 80, 128, 8}, {}},
      {"Mamba-2 32 x 128 x 256, 1 group (Falcon-H1 3B)", false, {32, 128, 256, 1}, {}},
      {"GDN 32 x 128 x 128, 16 key heads (Qwen3-Next)", true, {}, {16, 32, 128, false}},
      {"KDA 32 x 128 x 128 (Kimi Linear)", true, {}, {32, 32, 128, true}},
  };
  const replayssm_ggml::precision f32{}, exact{REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_EXACT},
      high{REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_HIGH};
  if (mode == "time") {
    n_layers = 4;
    n_seqs = 8;
    for (const shape &s : shapes) {
      run(s, 1, f32, "F32 FULL", true);
      run(s, 1, high, "SPLIT32 HIGH", true);
    }
    return 0;
  }
  for (const shape &s : shapes) {
    if (!broken.empty() && broken != s.op() && broken != "drafts_of_" + s.op()) continue;
    const result one = run(s, 1, f32, "F32 FULL", true);
    if (!on_cuda) {
      const result two = run(s, 2, f32, "F32 FULL");
      require(same_bytes(one.last, two.last) && same_bytes(one.states, two.states), "two threads give other bytes than one");
    }
    run(s, 1, exact, "F32 EXACT");
    run(s, 1, high, "SPLIT32 HIGH");
  }
  return 0;
}
