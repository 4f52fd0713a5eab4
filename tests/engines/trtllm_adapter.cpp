// examples-cpp/adapters/trtllm against fp64: packed rows with base offsets, dt in a padded stride, states in lent blocks far apart whose
// other bytes belong to somebody else, states taken over and handed back in [dstate, headdim], drafts with partial acceptance.
// What is not to be read is NaN.
//
// Twice: with softplus and a gate, and without both. "break" commits a token that fp64 does not take, "break_output" changes one of its
// tokens.
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <algorithm>

#include "../../examples-cpp/adapters/trtllm/selective_scan_update.h"
#include "fp64.hpp"

namespace {

using namespace engine;
namespace trtllm = adapters::trtllm;

// 12 heads: a row of dt has 16.
constexpr mamba2_sizes sizes{12, 64, 128, 2};
constexpr adapters::Mamba2Shape shape{sizes.heads, sizes.dim, sizes.state, sizes.groups};
constexpr int n_layers = 2, n_blocks = 6, n_draft = 2, steps = 40;
constexpr int64_t state_bytes = sizes.state_size() * 4, guard = 4096;

// Interleaved blocks in address space of which only the states and what is next to them take memory: a block is larger than 2^30 bytes,
// as where many layers and another kind of cache share one.
class block_memory {
 public:
  block_memory() : block_bytes(int64_t{1280} << 20) {
    map();
    if (memory_ == nullptr) {  // where address space is short
      block_bytes = n_layers * layer_bytes + (1 << 16);
      map();
    }
    require(memory_ != nullptr, "out of address space");
    for (int l = 0; l < n_layers; l++) bases.push_back(static_cast<unsigned char *>(memory_) + l * layer_bytes);
    for_each([](unsigned char *state) { std::memset(state - guard, 0xFF, static_cast<size_t>(state_bytes + 2 * guard)); });
  }
  ~block_memory() { device::get().free(memory_); }
  block_memory(const block_memory &) = delete;
  block_memory &operator=(const block_memory &) = delete;

  trtllm::StatePool pool() { return {bases.data(), block_bytes, guard}; }

  void require_rest_untouched() const {
    for_each([](const unsigned char *state) {
      const auto untouched = [](unsigned char b) { return b == 0xFF; };
      require(std::all_of(state - guard, state, untouched) && std::all_of(state + state_bytes, state + state_bytes + guard, untouched),
              "memory that is not the library's was written");
    });
  }

  int64_t block_bytes;
  std::vector<void *> bases;

 private:
  static constexpr int64_t layer_bytes = state_bytes + 2 * guard;  // of a layer in a block: a part of somebody else's, the state, another
  size_t size() const { return static_cast<size_t>(n_blocks * block_bytes); }
  void map() { memory_ = device::get().allocate(size()); }
  template <class F>
  void for_each(F f) const {
    for (void *base : bases) {
      for (int block = 0; block < n_blocks; block++) f(static_cast<unsigned char *>(base) + block * block_bytes + guard);
    }
  }
  void *memory_ = nullptr;
};

const std::vector<int32_t> slots_in_use{4, 0, 5, 2};

struct request {
  int32_t slot;
  std::vector<mamba2_fp64> layers;
};

class engine_under_test {
 public:
  engine_under_test(bool softplus_and_gate, const char *argument) : whole_(softplus_and_gate), argument_(argument) {
    context_ = device::get().create_context();
    auto slots = REPLAYSSM_INIT(replayssm_slots_desc);
    slots.n_slots = n_blocks;
    slots.max_step_tokens = 1 + n_draft;
    slots.flags = REPLAYSSM_SLOTS_CHECKS;
    must(adapters::check(replayssm_slots_create(context_, &slots, &slots_)));
    auto desc = adapters::mamba2_pool(shape, n_layers, REPLAYSSM_DTYPE_BF16, REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_F32);
    desc.readout = REPLAYSSM_READOUT_EXACT;
    const auto lent = trtllm::lend_states(memory_.pool());
    must(adapters::check(replayssm_layers_create(slots_, &desc, &lent, 1, &pool_)));
    for (int l = 0; l < n_layers; l++) {
      weights_.push_back(random_weights(sizes, r_, false));
      weights_.back().softplus = whole_;
      if (!whole_) weights_.back().dt_bias.clear();
    }
    start();
  }

  ~engine_under_test() {
    replayssm_layers_destroy(pool_);  // before its memory
    replayssm_slots_destroy(slots_);
    replayssm_context_destroy(context_);
  }
  engine_under_test(const engine_under_test &) = delete;
  engine_under_test &operator=(const engine_under_test &) = delete;

  void run() {
    refuses_what_is_wrong();
    const bool short_run = is(argument_, "short");
    const int n = short_run ? 6 : steps;
    for (int i = 0; i < n; i++) step(i == n - 1);
    const int64_t size = sizes.state_size(), stride = size + 16;
    for (int l = 0; l < n_layers; l++) {
      shared<float> back = nans<float>(static_cast<int64_t>(requests_.size()) * stride);
      must(trtllm::hand_back_states({pool_, l}, slots_in_use.data(), static_cast<int32_t>(requests_.size()), back.data(), REPLAYSSM_DTYPE_F32,
                                    stride, nullptr));
      for (size_t entry = 0; entry < requests_.size(); entry++) {
        const float *from = back.data() + static_cast<int64_t>(entry) * stride;
        const mamba2_fp64 &truth = requests_[entry].layers[size_t(l)];
        for (int64_t i = 0; i < size; i++) states_.add(widen(from[transposed(i)]), truth.S[size_t(i)], truth.E[size_t(i)]);
        require(std::all_of(from + size, from + stride, is_sentinel<float>), "memory beside the states was written");
      }
    }
    require_near(outputs_, states_, false);
    auto report = REPLAYSSM_INIT(replayssm_report);
    must(adapters::check(replayssm_check(slots_, 0, &report)));
    require(report.bits == 0, "a fault bit is set");
    require(short_run || (rejected_ > 0 && padded_ > 0), "something never happened");
    memory_.require_rest_untouched();
    std::printf("trtllm_adapter: %s, blocks %lld MiB apart: %lld outputs, relative error %.1e, at most %.3f of the bound; states %.1e, %.3f\n",
                whole_ ? "softplus and gate" : "neither", static_cast<long long>(memory_.block_bytes >> 20),
                static_cast<long long>(outputs_.n), outputs_.relative(), outputs_.worst, states_.relative(), states_.worst);
  }

 private:
  // Where element i of [heads, dim, state] lies in [heads, state, dim].
  static int64_t transposed(int64_t i) {
    const int64_t h = i / (sizes.dim * sizes.state), d = i / sizes.state % sizes.dim, n = i % sizes.state;
    return (h * sizes.state + n) * sizes.dim + d;
  }

  // A prompt kernel of theirs has left bf16 states of four requests, each followed by something else. Blocks 1 and 3 stay NaN.
  void start() {
    const std::vector<int64_t> positions{104, 100, 105, 102};
    const int32_t n = static_cast<int32_t>(slots_in_use.size());
    const int64_t size = sizes.state_size(), stride = size + 64;
    must(trtllm::start(slots_, slots_in_use.data(), n, positions.data(), nullptr));
    for (const int32_t slot : slots_in_use) requests_.push_back({slot, {}});
    for (int l = 0; l < n_layers; l++) {
      shared<uint16_t> left = nans<uint16_t>(n * stride);
      std::vector<float> dense(static_cast<size_t>(size));
      for (int entry = 0; entry < n; entry++) {
        for (int64_t i = 0; i < size; i++) {
          dense[size_t(i)] = static_cast<float>(store(left[size_t(entry * stride + transposed(i))], r_.between(-1, 1)));
        }
        requests_[size_t(entry)].layers.emplace_back(sizes);
        requests_[size_t(entry)].layers.back().begin(dense.data());
      }
      must(trtllm::take_over_states({pool_, l}, slots_in_use.data(), n, left.data(), REPLAYSSM_DTYPE_BF16, stride, nullptr));
    }
  }

  void step(bool last) {
    std::vector<int> rows;
    for (int i = 0; i < static_cast<int>(requests_.size()); i++) {
      if (last || !r_.one_in(4)) rows.push_back(i);
    }
    if (!last) rows.push_back(-1);
    const int T = last ? 1 + n_draft : 1 + r_.below(1 + n_draft), n_rows = static_cast<int>(rows.size());
    shared<int32_t> slot_mapping, accepted;
    for (const int i : rows) {
      slot_mapping.push_back(i < 0 ? -1 : requests_[size_t(i)].slot);
      accepted.push_back(i < 0 ? 0 : last ? 2 : 1 + r_.below(T));
      rejected_ += T - accepted.back();
      padded_ += i < 0;
    }
    trtllm::Params p;
    for (int l = 0; l < n_layers; l++) {
      const mamba2_weights &w = weights_[size_t(l)];
      const int64_t inner = sizes.inner(), bc = sizes.bc(), xBC_pitch = inner + 2 * bc, tokens = n_rows * T;
      const int64_t pitch = (whole_ ? inner : 0) + xBC_pitch + 16, dt_at = pitch - 16;
      shared<uint16_t> xBC = nans<uint16_t>(tokens * xBC_pitch), in_proj = nans<uint16_t>(tokens * pitch);
      shared<float> out = nans<float>(tokens * inner);
      std::vector<mamba2_token> values(static_cast<size_t>(tokens));
      for (int64_t t = 0; t < tokens; t++) {
        if (rows[size_t(t / T)] < 0) continue;
        mamba2_token &v = values[size_t(t)];
        uint16_t *at = xBC.data() + t * xBC_pitch, *projected = in_proj.data() + t * pitch;
        for (int64_t i = 0; i < inner; i++) v.x.push_back(store(*at++, r_.between(-2, 2)));
        for (int64_t i = 0; i < bc; i++) v.B.push_back(store(*at++, r_.between(-1, 1)));
        for (int64_t i = 0; i < bc; i++) v.C.push_back(store(*at++, r_.between(-1, 1)));
        for (int64_t i = 0; i < inner && whole_; i++) v.z.push_back(store(projected[i], r_.between(-3, 3)));
        for (int h = 0; h < sizes.heads; h++) v.dt.push_back(store(projected[dt_at + h], whole_ ? r_.between(-2, 2) : r_.between(0.01f, 0.2f)));
      }
      p.batch = n_rows;
      p.tokens = T;
      p.output_type = REPLAYSSM_DTYPE_F32;
      p.dim = sizes.inner();
      p.dstate = sizes.state;
      p.nheads = sizes.heads;
      p.ngroups = sizes.groups;
      p.delta_softplus = whole_;
      p.A_ptr = w.A.data();
      p.D_ptr = w.D.data();
      p.delta_bias_ptr = w.dt_bias.empty() ? nullptr : w.dt_bias.data();
      p.u_ptr = p.BC_ptr = xBC.data();
      p.delta_ptr = in_proj.data();
      p.z_ptr = whole_ ? in_proj.data() : nullptr;
      p.out_ptr = out.data();
      p.slot_mapping_ptr = slot_mapping.data();
      must(trtllm::selective_scan_update({pool_, l}, p, nullptr));

      std::vector<double> y, bound;
      for (int row = 0; row < n_rows; row++) {
        const float *from = out.data() + row * T * inner;
        if (rows[size_t(row)] < 0) {
          require(std::all_of(from, from + T * inner, [](float v) { return v == 0; }), "a padded row's output is not zero");
          continue;
        }
        mamba2_fp64 &truth = requests_[size_t(rows[size_t(row)])].layers[size_t(l)];
        mamba2_fp64 drafts = truth;
        for (int t = 0; t < T; t++) {
          mamba2_token &v = values[size_t(row * T + t)];
          if (last && is(argument_, "break_output") && row == 0) v.x[5] = -v.x[5] + 1;
          drafts.token(w, v, readout::exact, u32, y, bound);
          for (int64_t i = 0; i < inner; i++) outputs_.add(widen(*from++), y[size_t(i)], bound[size_t(i)]);
          if (t + 1 == accepted[size_t(row)]) truth = drafts;
        }
      }
    }
    if (last && is(argument_, "break")) accepted[0]++;
    must(trtllm::update_mamba_states(slots_, p, accepted.data(), nullptr));
  }

  void refuses_what_is_wrong() {
    trtllm::Params p;
    p.batch = 1;
    p.dim = 100;
    p.nheads = 12;
    p.ngroups = 2;
    auto status = trtllm::selective_scan_update({pool_, 0}, p, nullptr);
    require(status.code == REPLAYSSM_ERROR_INVALID_ARGUMENT &&
                status.sentence == "dim is 100 with 12 heads and 2 groups; expected a multiple of nheads, and groups",
            status.sentence.c_str());
    p.dim = sizes.inner();
    p.dstate = -1;
    status = trtllm::selective_scan_update({pool_, 0}, p, nullptr);
    require(status.code == REPLAYSSM_ERROR_INVALID_ARGUMENT &&
                status.sentence == "dim is " + std::to_string(p.dim) + " and dstate is -1; expected those of the pool",
            status.sentence.c_str());
    p.dstate = sizes.state;
    status = trtllm::selective_scan_update({pool_, 0}, p, nullptr);
    require(status.code == REPLAYSSM_ERROR_INVALID_ARGUMENT && status.sentence.rfind("slot_mapping_ptr is null", 0) == 0, status.sentence.c_str());
  }

  bool whole_;
  const char *argument_;
  random_numbers r_{33};
  block_memory memory_;
  replayssm_context *context_ = nullptr;
  replayssm_slots *slots_ = nullptr;
  replayssm_layers *pool_ = nullptr;
  std::vector<mamba2_weights> weights_;
  std::vector<request> requests_;
  errors outputs_, states_;
  int rejected_ = 0, padded_ = 0;
};

}  // namespace

int main(int argc, char **argv) {
  const char *argument = argc > 1 ? argv[1] : nullptr;
  engine_under_test(true, argument).run();
  engine_under_test(false, argument).run();
  return 0;
}
