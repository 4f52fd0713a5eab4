// A TensorRT-LLM-shaped engine: one call per layer, whose parameters are pointers into the engine's own buffers.
//
// - The in-projection leaves x, B, C, dt and z side by side in one packed bf16 row; all five are strided views of it. The
//   convolution works in place on the first three.
// - States live in pages that the engine lends: a slot every two state sizes, the second half belongs to somebody else.
// - The context phase has a kernel of its own, which leaves an fp32 state in the page; it is converted in place.
// - Every operation runs in parts on the engine's thread, the last part first.
// - Acceptance counts drafts, in every second element of an array.
//
// Runs a few hundred steps, then compares every slot with one extend over its tokens: states, convolution windows and, since
// the pool is EXACT, all outputs by bytes.
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <algorithm>
#include <memory>

#include "engine.hpp"

namespace {

using namespace engine;

constexpr int n_slots = 7, scratch_slot = 6, max_draft = 3, n_parts = 3;

// What the engine hands to a layer.
struct layer_call {
  int layer;
  int rows, tokens;             // rows of the batch, tokens of each
  const int32_t *slot_mapping;  // [rows]
  uint16_t *in_proj;            // [rows * tokens][pitch]: x | B | C | dt | z | not ours
  int64_t pitch;
  uint16_t *out;                // [rows * tokens][inner]
  bool context;                 // a prompt instead of a step
};

// The engine's lent state memory: fp32-sized pages, [layers][slots], half of each ours.
class page_table {
 public:
  page_table(int layers, int64_t state_bytes)
      : state_bytes_(state_bytes), bytes_(static_cast<size_t>(2 * state_bytes * n_slots * layers)),
        memory_(static_cast<unsigned char *>(std::aligned_alloc(64, bytes_)), std::free) {
    require(memory_ != nullptr, "out of memory");
    std::memset(memory_.get(), 0xFF, bytes_);  // NaNs, in ours and in the rest
  }

  replayssm_lent lent() const {
    auto lent = REPLAYSSM_INIT(replayssm_lent);
    lent.kind = REPLAYSSM_COMPONENT_CHECKPOINT;
    lent.base = memory_.get();
    lent.slot_stride_bytes = 2 * state_bytes_;
    return lent;
  }

  void *page(int layer, int slot) const { return memory_.get() + 2 * state_bytes_ * (layer * n_slots + slot); }

  // Whether the halves that are not ours are as they were.
  bool rest_untouched() const {
    for (size_t at = static_cast<size_t>(state_bytes_); at < bytes_; at += static_cast<size_t>(2 * state_bytes_)) {
      const unsigned char *rest = memory_.get() + at;
      if (!std::all_of(rest, rest + state_bytes_, [](unsigned char b) { return b == 0xFF; })) return false;
    }
    return true;
  }

 private:
  int64_t state_bytes_;
  size_t bytes_;
  std::unique_ptr<unsigned char, decltype(&std::free)> memory_;
};

class ssm_plugin {
 public:
  explicit ssm_plugin(const model &m) : model_(m), pages_(m.shape.layers, m.shape.state_size() * 4) {
    must(replayssm_context_create(nullptr, &context_));
    auto slots = REPLAYSSM_INIT(replayssm_slots_desc);
    slots.n_slots = n_slots;
    slots.window = 12;
    slots.max_step_tokens = 1 + max_draft;
    slots.schedule = REPLAYSSM_SCHEDULE_BY_POSITION;
    must(replayssm_slots_create(context_, &slots, &slots_));
    const auto mamba = m.mamba_pool(REPLAYSSM_DTYPE_BF16, REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_EXACT);
    const auto conv = m.conv_pool(REPLAYSSM_DTYPE_BF16);
    const auto lent = pages_.lent();
    must(replayssm_layers_create(slots_, &mamba, &lent, 1, &mamba_));
    must(replayssm_layers_create(slots_, &conv, nullptr, 0, &conv_));
  }

  ~ssm_plugin() {
    replayssm_layers_destroy(mamba_);  // before the pages go
    replayssm_layers_destroy(conv_);
    replayssm_slots_destroy(slots_);
    replayssm_context_destroy(context_);
  }

  ssm_plugin(const ssm_plugin &) = delete;
  ssm_plugin &operator=(const ssm_plugin &) = delete;

  // Convolution in place, then the state update: out = y * silu(z).
  void enqueue(const layer_call &call) {
    const model_shape &s = model_.shape;
    const layer_weights &w = model_.layers[static_cast<size_t>(call.layer)];
    const auto batch = batch_of(call.rows, call.tokens, call.slot_mapping, call.context);
    const int64_t row = call.tokens * call.pitch, token = call.pitch;
    auto conv = REPLAYSSM_INIT(replayssm_conv1d_args);
    conv.x = conv.out = view(call.in_proj, row, token, 0);
    conv.weight = parameter(w.conv_weight, s.width);
    conv.bias = parameter(w.conv_bias);
    auto ssm = REPLAYSSM_INIT(replayssm_mamba2_args);
    uint16_t *at = call.in_proj;
    ssm.x = view(at, row, token, s.dim);
    ssm.B = view(at += s.inner(), row, token, s.state);
    ssm.C = view(at += s.bc(), row, token, s.state);
    ssm.dt = view(at += s.bc(), row, token, 1);
    ssm.z = view(at += s.heads, row, token, s.dim);
    ssm.A = parameter(w.A);
    ssm.dt_bias = parameter(w.dt_bias);
    ssm.D = parameter(w.D);
    ssm.out = view(call.out, call.tokens * s.inner(), s.inner(), s.dim);
    in_parts([&](const replayssm_exec &exec) {
      return (call.context ? replayssm_conv1d_extend : replayssm_conv1d_step)(conv_, call.layer, &batch, &conv, &exec);
    });
    in_parts([&](const replayssm_exec &exec) {
      return (call.context ? replayssm_mamba2_extend : replayssm_mamba2_step)(mamba_, call.layer, &batch, &ssm, &exec);
    });
  }

  // accepted_drafts: [rows][2], the count first; null for a prompt.
  void update(int rows, int tokens, const int32_t *slot_mapping, const int32_t *accepted_drafts) {
    const auto batch = batch_of(rows, tokens, slot_mapping, accepted_drafts == nullptr);
    auto args = REPLAYSSM_INIT(replayssm_commit_args);
    args.convention = REPLAYSSM_COUNTS_ACCEPTED_DRAFTS;
    args.counts = accepted_drafts;
    args.counts_stride = 2;
    in_parts([&](const replayssm_exec &exec) { return replayssm_commit(slots_, &batch, &args, &exec); });
  }

  void clear(int32_t slot) {
    const auto list = list_of(&slot);
    must(replayssm_reset(slots_, &list, nullptr, nullptr));
  }

  // States of all layers, then convolution windows of all layers.
  std::vector<float> read_state(int32_t slot) const {
    const model_shape &s = model_.shape;
    std::vector<float> state(static_cast<size_t>(s.layers * (s.state_size() + s.window_size())));
    const auto list = list_of(&slot);
    auto dense = all_layers(state.data());
    must(replayssm_export(mamba_, &list, nullptr, &dense, nullptr));
    dense.data = state.data() + s.layers * s.state_size();
    must(replayssm_export(conv_, &list, nullptr, &dense, nullptr));
    return state;
  }

  // The context phase is over: its kernel has left the fp32 states in the pages; the windows come from a buffer.
  void adopt(int32_t slot, int64_t position, const std::vector<float> &state) {
    const model_shape &s = model_.shape;
    for (int layer = 0; layer < s.layers; layer++) {
      std::memcpy(pages_.page(layer, slot), state.data() + layer * s.state_size(), static_cast<size_t>(s.state_size()) * 4);
    }
    auto args = REPLAYSSM_INIT(replayssm_reset_args);
    args.keep_checkpoint = 1;
    args.convert = 1;
    args.position = &position;
    const auto list = list_of(&slot);
    must(replayssm_reset(slots_, &list, &args, nullptr));
    auto dense = all_layers(const_cast<float *>(state.data()) + s.layers * s.state_size());
    must(replayssm_import(conv_, &list, nullptr, &dense, nullptr));
  }

  void require_no_faults() const {
    auto report = REPLAYSSM_INIT(replayssm_report);
    must(replayssm_check(slots_, 0, &report));
    require(report.bits == 0, "a fault bit is set");
    require(pages_.rest_untouched(), "memory that is not the library's was written");
  }

 private:
  template <class Call>
  static void in_parts(Call call) {
    auto exec = REPLAYSSM_INIT(replayssm_exec);
    exec.n_parts = n_parts;
    for (exec.part = n_parts - 1; exec.part >= 0; exec.part--) must(call(exec));
  }

  static replayssm_batch batch_of(int rows, int tokens, const int32_t *slot_mapping, bool context) {
    auto batch = REPLAYSSM_INIT(replayssm_batch);
    batch.flags = context ? REPLAYSSM_BATCH_EXTEND : 0;
    batch.n_rows = rows;
    batch.tokens = tokens;
    batch.slots = ids(slot_mapping);
    return batch;
  }

  static replayssm_list list_of(const int32_t *slot) {
    auto list = REPLAYSSM_INIT(replayssm_list);
    list.n = 1;
    list.place = REPLAYSSM_WHERE_HOST;
    list.slots = ids(slot);
    return list;
  }

  static replayssm_state all_layers(float *data) {
    auto state = REPLAYSSM_INIT(replayssm_state);
    state.dtype = REPLAYSSM_DTYPE_F32;
    state.layer = -1;
    state.data = data;
    return state;
  }

  const model &model_;
  page_table pages_;
  replayssm_context *context_ = nullptr;
  replayssm_slots *slots_ = nullptr;
  replayssm_layers *mamba_ = nullptr, *conv_ = nullptr;
};

// All layers of a model over rows of equal length; returns outputs [layers][rows * tokens][inner].
std::vector<uint16_t> forward(ssm_plugin &plugin, const model &m, const std::vector<int32_t> &slots,
                              const std::vector<int> &tokens, bool context) {
  const model_shape &s = m.shape;
  const int64_t pitch = s.projected() + 13, n = static_cast<int64_t>(tokens.size());
  std::vector<uint16_t> in_proj(static_cast<size_t>(n * pitch)), out(static_cast<size_t>(s.layers * n * s.inner()));
  for (int layer = 0; layer < s.layers; layer++) {
    std::fill(in_proj.begin(), in_proj.end(), static_cast<uint16_t>(0x7FC0));
    for (int64_t t = 0; t < n; t++) m.project(layer, tokens[static_cast<size_t>(t)], in_proj.data() + t * pitch);
    const int rows = static_cast<int>(slots.size());
    plugin.enqueue({layer, rows, static_cast<int>(n) / rows, slots.data(), in_proj.data(), pitch,
                    out.data() + layer * n * s.inner(), context});
    for (int64_t t = 0; t < n; t++) {
      require(in_proj[static_cast<size_t>(t * pitch + s.projected())] == 0x7FC0, "bytes behind a packed row were written");
    }
  }
  return out;
}

struct sequence {
  size_t prompt = 0;
  std::vector<int> tokens;
  std::vector<std::vector<uint16_t>> out;  // of every token behind the prompt: [layers][inner]
};

}  // namespace

int main(int argc, char **argv) {
  // Heads of 40 rows: two whole tiles and a half.
  const model m({8, 40, 48, 4, 3, 2});
  const model_shape &s = m.shape;
  ssm_plugin plugin(m);
  random_numbers r{5};
  std::vector<sequence> live(scratch_slot);
  int steps = 0, finished = 0, rejected = 0;
  int64_t compared = 0;
  // "short" is for valgrind.
  const bool short_run = argc > 1 && std::strcmp(argv[1], "short") == 0;

  const auto outputs_of = [&](const std::vector<uint16_t> &out, int64_t n, int64_t t) {
    std::vector<uint16_t> of_token;
    for (int64_t layer = 0; layer < s.layers; layer++) {
      const uint16_t *from = out.data() + (layer * n + t) * s.inner();
      of_token.insert(of_token.end(), from, from + s.inner());
    }
    return of_token;
  };
  const auto start = [&](int32_t slot) {
    sequence &seq = live[static_cast<size_t>(slot)];
    seq = sequence();
    for (int n = 1 + r.below(30); n > 0; n--) seq.tokens.push_back(r.below(256));
    seq.prompt = seq.tokens.size();
    // Stands for the engine's context kernel: it leaves a state that no ring of ours knows about.
    plugin.clear(scratch_slot);
    forward(plugin, m, {scratch_slot}, seq.tokens, true);
    const int32_t scratch = scratch_slot;
    plugin.update(1, static_cast<int>(seq.prompt), &scratch, nullptr);
    plugin.adopt(slot, static_cast<int64_t>(seq.prompt), plugin.read_state(scratch_slot));
  };
  for (int32_t slot = 0; slot < scratch_slot; slot++) start(slot);

  for (; steps < (short_run ? 25 : 300); steps++) {
    std::vector<int32_t> slots, accepted_drafts;
    for (int32_t slot = 0; slot < scratch_slot; slot++) {
      if (!r.one_in(3)) slots.insert(slots.begin() + r.below(static_cast<int>(slots.size()) + 1), slot);
    }
    if (slots.empty()) continue;
    const int T = 1 + r.below(1 + max_draft), rows = static_cast<int>(slots.size());
    std::vector<int> tokens;
    for (int t = 0; t < rows * T; t++) tokens.push_back(r.below(256));
    const std::vector<uint16_t> out = forward(plugin, m, slots, tokens, false);
    for (int row = 0; row < rows; row++) {
      const int drafts = r.below(T);
      accepted_drafts.insert(accepted_drafts.end(), {drafts, -12345});
      rejected += T - 1 - drafts;
      sequence &seq = live[static_cast<size_t>(slots[static_cast<size_t>(row)])];
      for (int t = row * T; t <= row * T + drafts; t++) {
        seq.tokens.push_back(tokens[static_cast<size_t>(t)]);
        seq.out.push_back(outputs_of(out, rows * T, t));
      }
    }
    plugin.update(rows, T, slots.data(), accepted_drafts.data());
    if (r.one_in(20)) {
      start(r.below(scratch_slot));
      finished++;
    }
  }
  plugin.require_no_faults();
  require(short_run || (finished > 0 && rejected > 0), "something never happened");

  // "break" shows that the comparison compares.
  if (argc > 1 && std::strcmp(argv[1], "break") == 0) live.back().tokens.back() ^= 1;
  for (int32_t slot = 0; slot < scratch_slot; slot++) {
    const sequence &seq = live[static_cast<size_t>(slot)];
    const int32_t scratch = scratch_slot;
    plugin.clear(scratch);
    const std::vector<uint16_t> out = forward(plugin, m, {scratch}, seq.tokens, true);
    plugin.update(1, static_cast<int>(seq.tokens.size()), &scratch, nullptr);
    require(same_bytes(plugin.read_state(slot), plugin.read_state(scratch)), "a state differs from the plain update's");
    for (size_t t = 0; t < seq.out.size(); t++, compared++) {
      const auto plain = outputs_of(out, static_cast<int64_t>(seq.tokens.size()), static_cast<int64_t>(seq.prompt + t));
      require(seq.out[t] == plain, "an output differs from the plain update's");
    }
  }
  plugin.require_no_faults();
  std::printf("trtllm_call: %d steps, %d slots, %d drafts rejected, %d requests replaced: states and %lld outputs equal by bytes\n",
              steps, scratch_slot, rejected, finished, static_cast<long long>(compared));
  return 0;
}
