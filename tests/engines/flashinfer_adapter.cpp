// examples-cpp/adapters/flashinfer against fp64: steps of T tokens in every row and packed ones, padded rows, partial acceptance, steps
// that are run twice. What is not to be read is NaN.
//
// Beside it runs what a caller of FlashInfer keeps, the number of tokens since the checkpoint, by FlashInfer's rule: fold when that and
// the step's tokens are more than the window. The library's count of folds must be the same.
// "break" commits a token that fp64 does not take, "break_output" changes one of its tokens.
// SPDX-License-Identifier: MIT OR Apache-2.0
#include "../../examples-cpp/adapters/flashinfer/checkpointing_ssu.h"
#include "fp64.hpp"

namespace {

using namespace engine;
using adapters::Tensor;
namespace flashinfer = adapters::flashinfer;

constexpr mamba2_sizes sizes{8, 64, 128, 1};
constexpr adapters::Mamba2Shape shape{sizes.heads, sizes.dim, sizes.state, sizes.groups};
constexpr int n_layers = 2, n_states = 9, n_requests = 4, T_max = 4, ring_buffer_len = 16, max_window = ring_buffer_len - T_max, steps = 50;

struct request {
  int32_t slot;
  int since_checkpoint;  // prev_num_accepted_tokens
  std::vector<mamba2_fp64> layers;
};

class engine_under_test {
 public:
  explicit engine_under_test(const char *argument) : argument_(argument) {
    context_ = device::get().create_context();
    auto slots = flashinfer::slots_desc(n_states, ring_buffer_len, T_max);
    slots.flags = REPLAYSSM_SLOTS_CHECKS;
    must(adapters::check(replayssm_slots_create(context_, &slots, &slots_)));
    auto pool = adapters::mamba2_pool(shape, n_layers, REPLAYSSM_DTYPE_BF16, REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_F32);
    pool.readout = REPLAYSSM_READOUT_FULL;
    must(adapters::check(replayssm_layers_create(slots_, &pool, nullptr, 0, &pool_)));
    for (int l = 0; l < n_layers; l++) weights_.push_back(random_weights(sizes, r_, false));
    for (int i = 0; i < n_requests; i++) {
      requests_.push_back({static_cast<int32_t>((5 * i + 1) % n_states), 0, {}});
      for (int l = 0; l < n_layers; l++) requests_.back().layers.emplace_back(sizes);
      must(flashinfer::start(slots_, &requests_.back().slot, 1, nullptr, nullptr, nullptr));
    }
  }

  ~engine_under_test() {
    replayssm_layers_destroy(pool_);
    replayssm_slots_destroy(slots_);
    replayssm_context_destroy(context_);
  }
  engine_under_test(const engine_under_test &) = delete;
  engine_under_test &operator=(const engine_under_test &) = delete;

  void run() {
    refuses_what_is_wrong();
    const bool short_run = is(argument_, "short");
    const int n = short_run ? 6 : steps;
    for (int i = 0; i < n; i++) step(i % 3 == 1, i == n - 1);
    for (const request &q : requests_) {
      shared<float> state(static_cast<size_t>(n_layers * sizes.state_size()));
      const auto list = adapters::host_list(&q.slot, 1);
      auto dense = REPLAYSSM_INIT(replayssm_state);
      dense.dtype = REPLAYSSM_DTYPE_F32;
      dense.layer = -1;
      dense.data = state.data();
      must(adapters::check(replayssm_export(pool_, &list, nullptr, &dense, nullptr)));
      const float *at = state.data();
      for (const mamba2_fp64 &truth : q.layers) {
        for (size_t i = 0; i < truth.S.size(); i++) states_.add(widen(*at++), truth.S[i], truth.E[i]);
      }
    }
    auto report = REPLAYSSM_INIT(replayssm_report);
    must(adapters::check(replayssm_check(slots_, 0, &report)));
    require(report.bits == 0, "a fault bit is set");
    require(short_run || (rejected_ > 0 && padded_ > 0 && repeated_ > 0), "something never happened");
    require_near(outputs_, states_, false);
    // The library counts tiles of 16 rows of a head's state. A step that is run again finds them folded.
    auto stats = REPLAYSSM_INIT(replayssm_stats);
    must(adapters::check(replayssm_stats_read(slots_, &stats)));
    require((short_run || folds_ > 0) && stats.flushes == static_cast<uint64_t>(folds_ * n_layers * sizes.heads * sizes.dim / 16),
            "the library does not fold when FlashInfer does");
    std::printf("flashinfer_adapter: %lld outputs, relative error %.1e, at most %.3f of the bound; states %.1e, %.3f; %d folds as FlashInfer's\n",
                static_cast<long long>(outputs_.n), outputs_.relative(), outputs_.worst, states_.relative(), states_.worst, folds_);
  }

 private:
  void step(bool packed, bool last) {
    std::vector<int> rows;
    for (int i = 0; i < n_requests; i++) {
      if (last || !r_.one_in(4)) rows.push_back(i);
    }
    if (!last) rows.insert(rows.begin() + r_.below(static_cast<int>(rows.size()) + 1), -1);
    const int64_t n_rows = static_cast<int64_t>(rows.size());
    const int T = last ? T_max : 1 + r_.below(T_max);
    shared<int32_t> cu_seqlens{0}, slots, accepted;
    for (const int i : rows) {
      const int length = packed && !last ? r_.below(T + 1) : T;
      cu_seqlens.push_back(cu_seqlens.back() + length);
      slots.push_back(i < 0 ? -1 : requests_[size_t(i)].slot);
      accepted.push_back(i < 0 || length == 0 ? 0 : last ? 2 : 1 + r_.below(length));
      rejected_ += length - accepted.back();
      padded_ += i < 0;
    }
    flashinfer::Rows call;
    call.batch = n_rows;
    call.T = packed ? cu_seqlens.back() + 2 : T;
    call.state_batch_indices = Tensor(slots.data(), REPLAYSSM_DTYPE_I32, {n_rows}, {1});
    if (packed) call.cu_seqlens = Tensor(cu_seqlens.data(), REPLAYSSM_DTYPE_I32, {n_rows + 1}, {1});
    call.max_seqlen = packed ? T_max : 0;
    const bool twice = !last && r_.one_in(10);
    repeated_ += twice;
    for (int l = 0; l < n_layers; l++) layer(l, call, rows, cu_seqlens, accepted, twice, last);

    // What the caller of FlashInfer does on the host.
    for (size_t row = 0; row < rows.size(); row++) {
      const int length = cu_seqlens[row + 1] - cu_seqlens[row];
      if (rows[row] < 0 || length == 0) continue;
      int &since = requests_[size_t(rows[row])].since_checkpoint;
      const bool fold = since + length > max_window;
      since = (fold ? 0 : since) + accepted[row];
      folds_ += fold;
    }
    if (last && is(argument_, "break")) accepted[0]++;
    must(flashinfer::advance(slots_, call, Tensor(accepted.data(), REPLAYSSM_DTYPE_I32, {n_rows}, {1}), nullptr));
  }

  void layer(int l, const flashinfer::Rows &call, const std::vector<int> &rows, const shared<int32_t> &cu_seqlens,
             const shared<int32_t> &accepted, bool twice, bool last) {
    const mamba2_weights &w = weights_[size_t(l)];
    const bool packed = static_cast<bool>(call.cu_seqlens);
    const int64_t H = sizes.heads, P = sizes.dim, N = sizes.state, G = sizes.groups, inner = H * P;
    const int64_t first = packed ? 1 : call.batch, tokens = first * call.T;
    // Strides: tokens of a row lie together in x, with a gap; B and C are parts of one row; heads of dt lie 2 apart.
    const int64_t wide = inner + 16, bc = 2 * G * N + 8, dt_wide = 2 * H;
    shared<uint16_t> x = nans<uint16_t>(tokens * wide), z = nans<uint16_t>(tokens * inner), BC = nans<uint16_t>(tokens * bc);
    shared<uint16_t> dt = nans<uint16_t>(tokens * dt_wide);
    shared<float> out = nans<float>(tokens * wide);
    std::vector<mamba2_token> values(static_cast<size_t>(tokens));
    for (size_t row = 0; row < rows.size(); row++) {
      if (rows[row] < 0) continue;
      for (int64_t t = cu_seqlens[row]; t < cu_seqlens[row + 1]; t++) {
        mamba2_token &v = values[size_t(t)];
        for (int64_t i = 0; i < inner; i++) v.x.push_back(store(x[size_t(t * wide + i)], r_.between(-2, 2)));
        for (int64_t i = 0; i < inner; i++) v.z.push_back(store(z[size_t(t * inner + i)], r_.between(-3, 3)));
        for (int64_t i = 0; i < G * N; i++) v.B.push_back(store(BC[size_t(t * bc + i)], r_.between(-1, 1)));
        for (int64_t i = 0; i < G * N; i++) v.C.push_back(store(BC[size_t(t * bc + G * N + i)], r_.between(-1, 1)));
        for (int64_t h = 0; h < H; h++) v.dt.push_back(store(dt[size_t(t * dt_wide + 2 * h)], r_.between(-2, 2)));
      }
    }
    const auto bf16 = REPLAYSSM_DTYPE_BF16;
    const auto f32 = REPLAYSSM_DTYPE_F32;
    const auto four = [&](const void *data, replayssm_dtype dtype, int64_t heads, int64_t size, int64_t token, int64_t head, int64_t stride) {
      return Tensor(data, dtype, {first, call.T, heads, size}, {call.T * token, token, head, stride});
    };
    for (int times = twice ? 2 : 1; times > 0; times--) {
      must(flashinfer::checkpointing_ssu({pool_, l}, shape,                                                  // state and its caches
                                         four(x.data(), bf16, H, P, wide, P, 1),                             // x
                                         four(dt.data(), bf16, H, P, dt_wide, 2, 0),                         // dt
                                         Tensor(w.A.data(), f32, {H, P, N}, {1, 0, 0}),                      // A
                                         four(BC.data(), bf16, G, N, bc, N, 1),                              // B
                                         four(BC.data() + G * N, bf16, G, N, bc, N, 1),                      // C
                                         four(out.data(), f32, H, P, wide, P, 1),                            // out
                                         Tensor(w.D.data(), f32, {H, P}, {1, 0}),                            // D
                                         four(z.data(), bf16, H, P, inner, P, 1),                            // z
                                         Tensor(w.dt_bias.data(), f32, {H, P}, {1, 0}), true, call, false, nullptr));
    }

    std::vector<double> y, bound;
    for (size_t row = 0; row < rows.size(); row++) {
      const int64_t begin = cu_seqlens[row], length = cu_seqlens[row + 1] - begin;
      for (int64_t t = begin; t < begin + length && rows[row] < 0; t++) {
        for (int64_t i = 0; i < inner; i++) require(out[size_t(t * wide + i)] == 0.0f, "a padded row's output is not zero");
      }
      if (rows[row] < 0) continue;
      mamba2_fp64 &truth = requests_[size_t(rows[row])].layers[size_t(l)];
      mamba2_fp64 drafts = truth;
      for (int64_t t = 0; t < length; t++) {
        mamba2_token &v = values[size_t(begin + t)];
        if (last && is(argument_, "break_output") && row == 0) v.x[5] = -v.x[5] + 1;
        drafts.token(w, v, readout::full, u32, y, bound);
        for (int64_t i = 0; i < inner; i++) outputs_.add(widen(out[size_t((begin + t) * wide + i)]), y[size_t(i)], bound[size_t(i)]);
        if (t + 1 == accepted[row]) truth = drafts;
      }
    }
    for (int64_t t = 0; t < tokens; t++) {
      for (int64_t i = t < cu_seqlens.back() ? inner : 0; i < wide; i++) {
        require(is_sentinel(out[size_t(t * wide + i)]), "memory beside the outputs was written");
      }
    }
  }

  void refuses_what_is_wrong() {
    replayssm_slots *none = nullptr;
    const auto no_window = flashinfer::slots_desc(n_states, T_max, T_max);
    require(replayssm_slots_create(context_, &no_window, &none) == REPLAYSSM_ERROR_INVALID_ARGUMENT && none == nullptr,
            "a ring without a window is accepted");
    const int32_t slot = 1;
    float any = 0;
    flashinfer::Rows call;
    call.batch = 1;
    call.T = 2;
    const auto run = [&](const Tensor &x) {
      return flashinfer::checkpointing_ssu({pool_, 0}, shape, x, x, Tensor(&any, REPLAYSSM_DTYPE_F32, {8, 64, 128}, {1, 0, 0}), x, x, x, Tensor(),
                                           Tensor(), Tensor(), true, call, false, nullptr);
    };
    require(run(Tensor()).sentence == "state_batch_indices is absent", "absent slots are accepted");
    call.state_batch_indices = Tensor(&slot, REPLAYSSM_DTYPE_I32, {1}, {1});
    const auto status = run(Tensor(&any, REPLAYSSM_DTYPE_BF16, {1, 1, 8, 64}, {0, 0, 0, 0}));
    require(status.code == REPLAYSSM_ERROR_INVALID_ARGUMENT && status.sentence == "dt is [1, 1, 8, 64]; expected [1, 2, 8, 64]", status.sentence.c_str());
  }

  const char *argument_;
  random_numbers r_{21};
  replayssm_context *context_ = nullptr;
  replayssm_slots *slots_ = nullptr;
  replayssm_layers *pool_ = nullptr;
  std::vector<mamba2_weights> weights_;
  std::vector<request> requests_;
  errors outputs_, states_;
  int rejected_ = 0, padded_ = 0, repeated_ = 0, folds_ = 0;
};

}  // namespace

int main(int argc, char **argv) {
  engine_under_test(argc > 1 ? argv[1] : nullptr).run();
  return 0;
}
