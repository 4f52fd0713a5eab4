// ggml's state updates by libreplayssm: what stands in a graph in the place of ggml_ssm_scan (Mamba-2) and ggml_gated_delta_net (scalar
// gate, and a gate per key channel: Kimi Delta Attention). On the CPU with ggml as it is, on CUDA with ggml_cuda.patch. README.md beside
// it says how an engine changes. Needs replayssm.hpp, ggml.h and ggml-backend.h, and nothing else of either project.
// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A `memory` is what the recurrent layers of a model share: the positions of its cells. A cell is one state per layer, by the number with
// which ggml's `ids` name it; it is a slot of the library, with a ring of the same number. `layers` are those of one kind, their states
// in the engine's own tensors.
//
//   memory, layers            once, when the engine has its state tensors
//   clear                     a sequence begins in a cell
//   ssm_scan, gated_delta_net while a graph is built, which may serve for many ubatches of its shape
//   commit                    after the graph: how many tokens of each sequence do not stay
//
// A ubatch of up to 1 + n_rs_seq tokens per sequence is a step: tokens are recorded, and states are rewritten once per window. A longer
// one, as of a prompt, goes into the states token by token. Graph and commit both decide it by the number of tokens. A step may be computed
// again before its commit, or abandoned; the other may not: clear the cell then.
//
// On CUDA everything is enqueued on ggml's stream. remove_tail and position wait for it, and so may a commit: it copies ids and counts from
// pageable memory.
//
// Creating, and calls between graphs, throw replayssm::Error. In a graph, where nobody could catch it, what is wrong aborts as ggml's own
// operators do. What is wrong with ids shows in slots().report().
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <cstdint>
#include <memory>
#include <replayssm.hpp>
#include <string>
#include <utility>
#include <vector>

namespace replayssm_ggml {

struct memory_options {
  int32_t n_cells = 1;
  // Tokens at the end of a ubatch that can be taken back, as llama.cpp's n_rs_seq: the longest draft.
  int32_t n_rs_seq = 0;
  // Tokens between two rewrites of a state; 0: the library's choice. A longer one takes more memory and rewrites less often.
  int32_t window = 0;
  // ggml's CUDA backend, its device and its stream (ggml_backend_cuda_stream of the patch). Null: the CPU.
  ggml_backend_t cuda = nullptr;
  int32_t device = 0;
  void *stream = nullptr;
};

class memory {
 public:
  explicit memory(const memory_options &options)
      : options_(options), exec_(exec_desc(options)), context_(context_desc(options)), slots_(context_, slots_desc(options)) {
    if (on_cuda() && options.stream == nullptr) {  // the default stream would not wait for ggml's
      throw replayssm::Error(REPLAYSSM_ERROR_INVALID_ARGUMENT, "memory_options.stream is null; expected the stream of memory_options.cuda");
    }
    if (on_cuda()) staged_ = std::make_unique<staging>(options.cuda, options.n_cells);
  }

  memory(const memory &) = delete;
  memory &operator=(const memory &) = delete;

  // A sequence begins: the cell's states become zero.
  void clear(int32_t cell) const { slots_.reset(replayssm::host_list(&cell, 1), nullptr, &exec_); }

  // The engine has written a cell's states into its tensors: those after `position` tokens.
  void adopt(int32_t cell, int64_t position) const {
    auto args = replayssm::init<replayssm_reset_args>();
    args.position = &position;
    args.keep_checkpoint = 1;
    args.convert = 1;
    slots_.reset(replayssm::host_list(&cell, 1), &args, &exec_);
  }

  // Brings a cell's states up to its position, to be read from the engine's tensors: as before a session is saved.
  void fold(int32_t cell) const { slots_.flush(replayssm::host_list(&cell, 1), nullptr, &exec_); }

  // Ends a ubatch of n_seqs sequences with n_tokens tokens each, once its graph was computed. ids: the cells, as in the graph, but in host
  // memory. rejected: how many tokens at the end of each sequence do not stay, up to n_rs_seq; none without it.
  void commit(const int32_t *ids, int32_t n_seqs, int32_t n_tokens, const int32_t *rejected = nullptr) const {
    for (int32_t i = 0; i < n_seqs && rejected != nullptr; i++) {
      if (rejected[i] >= 0 && rejected[i] <= (is_step(n_tokens) ? n_tokens : options_.n_rs_seq)) continue;
      throw replayssm::Error(REPLAYSSM_ERROR_INVALID_ARGUMENT, "rejected[" + std::to_string(i) + "] is " + std::to_string(rejected[i]) +
                                                                   "; expected 0 to n_rs_seq, and to the tokens of the ubatch");
    }
    const auto b = batch(staged(&staging::ids, ids, n_seqs), n_seqs, n_tokens);
    auto args = replayssm::init<replayssm_commit_args>();
    args.convention = REPLAYSSM_COUNTS_REJECTED;
    if (is_step(n_tokens) && rejected != nullptr) args.counts = staged(&staging::counts, rejected, n_seqs);
    slots_.commit(b, &args, &exec_);
    // A prompt is taken in whole. Its last tokens are kept beside the states, and can be taken back.
    if (!is_step(n_tokens) && rejected != nullptr) {
      for (int32_t i = 0; i < n_seqs; i++) slots_.rewind(replayssm::host_list(ids + i, 1), rejected + i, nullptr, &exec_);
    }
  }

  // Takes back the last n tokens of a cell, as llama_memory_seq_rm does. They can be taken back if the last ubatch has brought them and n
  // is n_rs_seq at most, else it depends on when the states were rewritten: false, and nothing happens (on CUDA, FAULT_REWIND is set).
  bool remove_tail(int32_t cell, int32_t n) const {
    const auto list = replayssm::host_list(&cell, 1);
    if (on_cuda()) {
      slots_.rewind(list, &n, static_cast<int32_t *>(staged_->out->data), &exec_);
      int32_t done = 0;
      staged_->read(&done, sizeof done);
      return done == 1;
    }
    const replayssm_status status = replayssm_rewind(slots_.get(), &list, &n, nullptr, nullptr);
    if (status == REPLAYSSM_ERROR_OUT_OF_RANGE) return false;
    replayssm::check(status);
    return true;
  }

  // Committed tokens of a cell.
  int64_t position(int32_t cell) const {
    replayssm_cursor cursor{};
    slots_.read_cursors(replayssm::host_list(&cell, 1), on_cuda() ? static_cast<replayssm_cursor *>(staged_->out->data) : &cursor, &exec_);
    if (on_cuda()) staged_->read(&cursor, sizeof cursor);
    return cursor.position;
  }

  // For all else: copies of cells, blobs, statistics, faults.
  const replayssm::Slots &slots() const { return slots_; }
  replayssm::Slots &slots() { return slots_; }
  const memory_options &options() const { return options_; }
  bool on_cuda() const { return options_.cuda != nullptr; }

  bool is_step(int64_t n_tokens) const { return n_tokens <= 1 + options_.n_rs_seq; }

  replayssm_batch batch(const int32_t *ids, int32_t n_seqs, int32_t n_tokens) const {
    auto b = replayssm::init<replayssm_batch>();
    b.n_rows = n_seqs;
    b.tokens = n_tokens;
    b.slots = replayssm::ids(ids);
    if (!is_step(n_tokens)) {
      b.flags = REPLAYSSM_BATCH_EXTEND;
      b.keep_tail = options_.n_rs_seq;
    }
    return b;
  }

 private:
  // What calls between graphs take and give lies in the device's memory on CUDA. Copies are in the order of ggml's stream.
  struct staging {
    staging(ggml_backend_t on, int32_t n_cells)
        : backend(on), context(ggml_init({4 * ggml_tensor_overhead(), nullptr, true}), ggml_free),
          ids(ggml_new_tensor_1d(context.get(), GGML_TYPE_I32, n_cells)),
          counts(ggml_new_tensor_1d(context.get(), GGML_TYPE_I32, n_cells)),
          out(ggml_new_tensor_1d(context.get(), GGML_TYPE_I8, sizeof(replayssm_cursor))),
          buffer(ggml_backend_alloc_ctx_tensors(context.get(), on), ggml_backend_buffer_free) {
      GGML_ASSERT(buffer != nullptr);
    }
    void read(void *to, size_t bytes) const {
      ggml_backend_tensor_get_async(backend, out, to, 0, bytes);
      ggml_backend_synchronize(backend);
    }
    ggml_backend_t backend;
    std::unique_ptr<ggml_context, decltype(&ggml_free)> context;
    ggml_tensor *ids, *counts, *out;
    std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)> buffer;
  };

  // An array of a call, where the backend reads it.
  const int32_t *staged(ggml_tensor *staging::*place, const int32_t *from, int32_t n) const {
    if (!on_cuda()) return from;
    GGML_ASSERT(n <= options_.n_cells);
    ggml_tensor *to = (*staged_).*place;
    ggml_backend_tensor_set_async(options_.cuda, to, from, 0, static_cast<size_t>(n) * sizeof *from);
    return static_cast<const int32_t *>(to->data);
  }

  static replayssm_exec exec_desc(const memory_options &options) {
    auto exec = replayssm::init<replayssm_exec>();
    exec.stream = static_cast<replayssm_stream>(options.stream);
    return exec;
  }
  static replayssm_context_desc context_desc(const memory_options &options) {
    auto desc = replayssm::init<replayssm_context_desc>();
    desc.backend = options.cuda != nullptr ? REPLAYSSM_BACKEND_CUDA : REPLAYSSM_BACKEND_CPU;
    desc.device = options.device;
    desc.n_threads = options.cuda != nullptr ? 0 : 1;  // ggml brings its own
    return desc;
  }
  static replayssm_slots_desc slots_desc(const memory_options &options) {
    auto desc = replayssm::init<replayssm_slots_desc>();
    desc.n_slots = options.n_cells;
    desc.max_step_tokens = 1 + options.n_rs_seq;
    desc.window = options.window;
    return desc;
  }

  memory_options options_;
  replayssm_exec exec_;
  replayssm::Context context_;
  replayssm::Slots slots_;
  std::unique_ptr<staging> staged_;
};

struct mamba2_shape {
  int32_t n_head, head_dim, d_state, n_group;
};

struct delta_shape {
  int32_t n_head_k, n_head_v, head_size;
  bool kda;  // the gate has an element per key channel
};

// How states are stored and outputs computed. F32: the states in the engine's tensors are ggml's own floats.
struct precision {
  replayssm_format format = REPLAYSSM_FORMAT_F32;
  replayssm_readout readout = REPLAYSSM_READOUT_DEFAULT;
};

class layers {
 public:
  // states: of each layer a contiguous tensor with all cells, [d_state, head_dim, n_head, n_cells] or of any shape with these elements.
  // They stay the engine's, and must outlive this object, as the memory must. Clear each cell before its first ubatch.
  layers(memory &m, const mamba2_shape &shape, const std::vector<ggml_tensor *> &states, const precision &p = {})
      : layers(m, mamba2_desc(shape, static_cast<int32_t>(states.size()), p),
               int64_t{shape.n_head} * shape.head_dim * shape.d_state, states) {}

  // The same with [head_size (key), head_size (value), n_head_v, n_cells].
  layers(memory &m, const delta_shape &shape, const std::vector<ggml_tensor *> &states, const precision &p = {})
      : layers(m, delta_desc(shape, static_cast<int32_t>(states.size()), p),
               int64_t{shape.n_head_v} * shape.head_size * shape.head_size, states) {}

  layers(const layers &) = delete;
  layers &operator=(const layers &) = delete;

  // In the place of ggml_ssm_scan, with its arguments but for the states and K. dt with its bias, before softplus. The result is the
  // output alone: [head_dim, n_head, n_seq_tokens, n_seqs], without D x and gate, as ggml's. This object must outlive the graph.
  ggml_tensor *ssm_scan(ggml_context *ctx, int32_t layer, ggml_tensor *x, ggml_tensor *dt, ggml_tensor *A, ggml_tensor *B,
                        ggml_tensor *C, ggml_tensor *ids) {
    GGML_ASSERT(desc_.family == REPLAYSSM_FAMILY_MAMBA2);
    GGML_ASSERT(x->ne[0] == desc_.headdim && x->ne[1] == desc_.nheads);
    GGML_ASSERT(B->ne[0] == desc_.dstate && B->ne[1] == desc_.ngroups && ggml_are_same_shape(B, C));
    GGML_ASSERT(B->ne[2] == x->ne[2] && B->ne[3] == x->ne[3]);
    GGML_ASSERT(dt->ne[0] == desc_.nheads && dt->ne[1] == x->ne[2] && dt->ne[2] == x->ne[3]);
    GGML_ASSERT(A->ne[0] == 1 && A->ne[1] == desc_.nheads);
    return custom(ctx, layer, x, {x, dt, A, B, C, ids}, on_threads<&layers::ssm_scan_of>);
  }

  // In the place of ggml_gated_delta_net, with its arguments but for the states and K, and the cells as ggml_ssm_scan has them. q and k
  // are normalised already, g is the log decay (at most 0), beta has been through its sigmoid. The result is the output alone:
  // [head_size, n_head_v, n_seq_tokens, n_seqs].
  ggml_tensor *gated_delta_net(ggml_context *ctx, int32_t layer, ggml_tensor *q, ggml_tensor *k, ggml_tensor *v, ggml_tensor *g,
                               ggml_tensor *beta, ggml_tensor *ids) {
    GGML_ASSERT(desc_.family == REPLAYSSM_FAMILY_GDN || desc_.family == REPLAYSSM_FAMILY_KDA);
    GGML_ASSERT(q->ne[0] == desc_.K && q->ne[1] == desc_.H && ggml_are_same_shape(q, k));
    GGML_ASSERT(v->ne[0] == desc_.V && v->ne[1] == desc_.HV);
    GGML_ASSERT(g->ne[0] == (desc_.family == REPLAYSSM_FAMILY_KDA ? desc_.K : 1) && beta->ne[0] == 1);
    for (const ggml_tensor *t : {q, g, beta}) GGML_ASSERT(t->ne[2] == v->ne[2] && t->ne[3] == v->ne[3]);
    for (const ggml_tensor *t : {g, beta}) GGML_ASSERT(t->ne[1] == desc_.HV);
    return custom(ctx, layer, v, {q, k, v, g, beta, ids}, on_threads<&layers::gated_delta_net_of>);
  }

  // For ggml_backend_cuda_set_custom of the patch: whether an operator is one of these, on CUDA. With a stream, it is enqueued there.
  static bool on_stream(ggml_tensor *dst, ggml_custom_op_t fun, void *userdata, void *stream) {
    const bool scan = fun == on_threads<&layers::ssm_scan_of>;
    if (!scan && fun != on_threads<&layers::gated_delta_net_of>) return false;
    const operation &op = *static_cast<const operation *>(userdata);
    if (!op.of->memory_.on_cuda()) return false;
    if (stream == nullptr) return true;
    auto exec = replayssm::init<replayssm_exec>();
    exec.stream = static_cast<replayssm_stream>(stream);
    (op.of->*(scan ? &layers::ssm_scan_of : &layers::gated_delta_net_of))(dst, op.layer, exec);
    return true;
  }

  const replayssm::Layers &pool() const { return pool_; }

 private:
  // What a custom operator finds again when it is computed.
  struct operation {
    const layers *of;
    int32_t layer;
  };

  layers(memory &m, const replayssm_pool_desc &desc, int64_t elements, const std::vector<ggml_tensor *> &states)
      : memory_(m), desc_(desc), pool_(create(m, desc, elements, states)) {
    for (int32_t layer = 0; layer < desc.n_layers; layer++) operations_.push_back({this, layer});
  }

  static replayssm_pool_desc mamba2_desc(const mamba2_shape &shape, int32_t n_layers, const precision &p) {
    auto desc = desc_of(n_layers, p);
    desc.family = REPLAYSSM_FAMILY_MAMBA2;
    desc.nheads = shape.n_head;
    desc.headdim = shape.head_dim;
    desc.dstate = shape.d_state;
    desc.ngroups = shape.n_group;
    return desc;
  }
  static replayssm_pool_desc delta_desc(const delta_shape &shape, int32_t n_layers, const precision &p) {
    auto desc = desc_of(n_layers, p);
    desc.family = shape.kda ? REPLAYSSM_FAMILY_KDA : REPLAYSSM_FAMILY_GDN;
    desc.H = shape.n_head_k;
    desc.HV = shape.n_head_v;
    desc.K = desc.V = shape.head_size;
    desc.head_map = REPLAYSSM_HEAD_MAP_TILED;
    return desc;
  }
  static replayssm_pool_desc desc_of(int32_t n_layers, const precision &p) {
    auto desc = replayssm::init<replayssm_pool_desc>();
    desc.n_layers = n_layers;
    desc.io = REPLAYSSM_DTYPE_F32;
    desc.format = p.format;
    desc.readout = p.readout;
    return desc;
  }

  // The states are the engine's tensors, whose layout is the library's: the library allocates rings only.
  static replayssm::Layers create(memory &m, const replayssm_pool_desc &desc, int64_t elements,
                                  const std::vector<ggml_tensor *> &states) {
    GGML_ASSERT(desc.format == REPLAYSSM_FORMAT_F32 || desc.format == REPLAYSSM_FORMAT_SPLIT32);
    std::vector<void *> bases;
    for (const ggml_tensor *state : states) {
      GGML_ASSERT(state->type == GGML_TYPE_F32 && ggml_is_contiguous(state));
      GGML_ASSERT(ggml_nelements(state) == elements * m.options().n_cells);
      bases.push_back(state->data);
    }
    auto lent = replayssm::init<replayssm_lent>();
    lent.kind = REPLAYSSM_COMPONENT_CHECKPOINT;
    lent.layer_bases = bases.data();
    lent.slot_stride_bytes = elements * static_cast<int64_t>(sizeof(float));
    return replayssm::Layers(m.slots(), desc, &lent, 1);
  }

  // An operator with an output of the shape of `like`.
  ggml_tensor *custom(ggml_context *ctx, int32_t layer, const ggml_tensor *like, std::vector<ggml_tensor *> inputs,
                      ggml_custom_op_t compute) {
    GGML_ASSERT(layer >= 0 && layer < desc_.n_layers);
    for (const ggml_tensor *t : inputs) {
      GGML_ASSERT(t->type == (t == inputs.back() ? GGML_TYPE_I32 : GGML_TYPE_F32));
      GGML_ASSERT(t->nb[0] == ggml_type_size(t->type));
    }
    GGML_ASSERT(inputs.back()->ne[0] == like->ne[3]);
    return ggml_custom_4d(ctx, GGML_TYPE_F32, like->ne[0], like->ne[1], like->ne[2], like->ne[3], inputs.data(),
                          static_cast<int>(inputs.size()), compute, GGML_N_TASKS_MAX, &operations_[static_cast<size_t>(layer)]);
  }

  // ggml's strides are in bytes; which of its axes are row, token and head, the caller says.
  static replayssm_tensor view(const ggml_tensor *t, int row, int token, int head) {
    const auto stride = [t](int axis) { return static_cast<int64_t>(t->nb[axis] / sizeof(float)); };
    return replayssm::view(t->data, REPLAYSSM_DTYPE_F32, {stride(row), stride(token), stride(head)});
  }
  static replayssm_tensor view(const ggml_tensor *t) { return view(t, 3, 2, 1); }

  static void require(replayssm_status status) {
    if (status != REPLAYSSM_OK) GGML_ABORT("replayssm: %s", replayssm_last_error_message());
  }

  // The ubatch of an operator: its sequences and tokens are the output's, its cells the last input.
  replayssm_batch batch_of(const ggml_tensor *dst) const {
    return memory_.batch(static_cast<const int32_t *>(dst->src[5]->data), static_cast<int32_t>(dst->ne[3]),
                         static_cast<int32_t>(dst->ne[2]));
  }

  // Each of ggml's threads does its part of a layer. ggml waits for all of them before the next operator.
  template <void (layers::*compute)(ggml_tensor *, int32_t, const replayssm_exec &) const>
  static void on_threads(ggml_tensor *dst, int ith, int nth, void *userdata) {
    const operation &op = *static_cast<const operation *>(userdata);
    if (op.of->memory_.on_cuda()) GGML_ABORT("replayssm: a layer on CUDA was given to the CPU: ggml_backend_cuda_set_custom comes first");
    auto exec = replayssm::init<replayssm_exec>();
    exec.part = ith;
    exec.n_parts = nth;
    (op.of->*compute)(dst, op.layer, exec);
  }

  void ssm_scan_of(ggml_tensor *dst, int32_t layer, const replayssm_exec &exec) const {
    const auto batch = batch_of(dst);
    auto args = replayssm::init<replayssm_mamba2_args>();
    args.x = view(dst->src[0]);
    args.dt = view(dst->src[1], 2, 1, 0);
    args.A = view(dst->src[2]);
    args.B = view(dst->src[3]);
    args.C = view(dst->src[4]);
    args.out = view(dst);
    const bool step = (batch.flags & REPLAYSSM_BATCH_EXTEND) == 0;
    require((step ? replayssm_mamba2_step : replayssm_mamba2_extend)(pool_.get(), layer, &batch, &args, &exec));
  }

  void gated_delta_net_of(ggml_tensor *dst, int32_t layer, const replayssm_exec &exec) const {
    const auto batch = batch_of(dst);
    auto args = replayssm::init<replayssm_delta_args>();
    args.gate = REPLAYSSM_GATE_LOG_DECAY;
    args.no_l2norm = 1;
    args.beta_processed = 1;
    args.q = view(dst->src[0]);
    args.k = view(dst->src[1]);
    args.v = view(dst->src[2]);
    args.g = view(dst->src[3]);
    args.beta = view(dst->src[4]);
    args.out = view(dst);
    const bool step = (batch.flags & REPLAYSSM_BATCH_EXTEND) == 0;
    require((step ? replayssm_delta_step : replayssm_delta_extend)(pool_.get(), layer, &batch, &args, &exec));
  }

  const memory &memory_;
  replayssm_pool_desc desc_;
  replayssm::Layers pool_;
  std::vector<operation> operations_;
};

}  // namespace replayssm_ggml
