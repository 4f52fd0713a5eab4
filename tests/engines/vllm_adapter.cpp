// examples-cpp/adapters/vllm against fp64: decode batches padded with null rows, packed batches with drafts and partial acceptance,
// strided views of packed rows, block tables with columns, states taken over from a prompt kernel. What is not to be read is NaN.
//
// Twice: as vLLM calls it (null block 0, no gate, requests as rings, the default format and readout) and as mamba_ssm does (pad slot -1,
// gate, D of every channel, F32 states). "break" commits a token that fp64 does not take, "break_output" changes one of its tokens.
// SPDX-License-Identifier: MIT OR Apache-2.0
#include "../../examples-cpp/adapters/vllm/selective_state_update.h"
#include "fp64.hpp"

namespace {

using namespace engine;
using adapters::Tensor;
namespace vllm = adapters::vllm;

constexpr mamba2_sizes sizes{8, 64, 128, 2};
constexpr adapters::Mamba2Shape shape{sizes.heads, sizes.dim, sizes.state, sizes.groups};
constexpr int n_layers = 2, n_blocks = 12, n_requests = 5, n_draft = 3, steps = 40;

struct options {
  const char *name;
  bool of_vllm;  // or of mamba_ssm
  readout how;
};

struct request {
  int32_t block, seat;
  int64_t position;
  std::vector<mamba2_fp64> layers;
};

template <class Out>
class engine_under_test {
 public:
  engine_under_test(const options &o, const char *argument) : o_(o), argument_(argument) {
    context_ = device::get().create_context();
    auto slots = vllm::slots_desc(n_blocks, o.of_vllm ? n_requests : 0, n_draft);
    slots.flags = REPLAYSSM_SLOTS_CHECKS;
    must(adapters::check(replayssm_slots_create(context_, &slots, &slots_)));
    auto pool = adapters::mamba2_pool(shape, n_layers, REPLAYSSM_DTYPE_BF16, dtype_of(static_cast<Out *>(nullptr)), REPLAYSSM_DTYPE_F32);
    if (o.how == readout::full) {
      pool.format = REPLAYSSM_FORMAT_F32;
      pool.readout = REPLAYSSM_READOUT_FULL;
    }
    must(adapters::check(replayssm_layers_create(slots_, &pool, nullptr, 0, &pool_)));
    for (int l = 0; l < n_layers; l++) weights_.push_back(random_weights(sizes, r_, !o.of_vllm));
    refuses_what_is_wrong();
    for (int i = 0; i < n_requests; i++) start(i);
  }

  ~engine_under_test() {
    replayssm_layers_destroy(pool_);
    replayssm_slots_destroy(slots_);
    replayssm_context_destroy(context_);
  }
  engine_under_test(const engine_under_test &) = delete;
  engine_under_test &operator=(const engine_under_test &) = delete;

  void run() {
    const bool short_run = is(argument_, "short");
    const int n = short_run ? 6 : steps;
    for (int i = 0; i < n; i++) step(i % 2 == 1, i == n - 1);
    compare_states();
    require_near(outputs_, states_, sizeof(Out) == 2);
    for (const request &q : requests_) {
      shared<replayssm_cursor> cursor(1);
      const auto list = adapters::host_list(&q.block, 1, &q.seat);
      must(adapters::check(replayssm_read_cursors(slots_, &list, cursor.data(), nullptr)));
      require(cursor[0].position == q.position, "a position is not the number of accepted tokens");
    }
    auto report = REPLAYSSM_INIT(replayssm_report);
    must(adapters::check(replayssm_check(slots_, 0, &report)));
    require(report.bits == 0, "a fault bit is set");
    auto stats = REPLAYSSM_INIT(replayssm_stats);
    must(adapters::check(replayssm_stats_read(slots_, &stats)));
    require(short_run || (stats.flushes > 0 && rejected_ > 0 && nulls_ > 0 && empty_ > 0), "something never happened");
    std::printf("vllm_adapter: %s: %lld outputs, relative error %.1e, at most %.3f of the bound; states %.1e, %.3f\n", o_.name,
                static_cast<long long>(outputs_.n), outputs_.relative(), outputs_.worst, states_.relative(), states_.worst);
  }

 private:
  // Even requests begin behind a prompt kernel, with states that it has left in a row of 3 dstate elements for each channel.
  void start(int i) {
    request q{static_cast<int32_t>(2 + 2 * i), static_cast<int32_t>(n_requests - 1 - i), i % 2 == 0 ? 37 + i : 0, {}};
    if (!o_.of_vllm) q.seat = q.block;
    for (int l = 0; l < n_layers; l++) q.layers.emplace_back(sizes);
    must(vllm::start(slots_, &q.block, o_.of_vllm ? &q.seat : nullptr, 1, &q.position, nullptr));
    for (int l = 0; l < n_layers && i % 2 == 0; l++) {
      std::vector<float> dense;
      const int64_t row = 3 * sizes.state, head = sizes.dim * row;
      shared<float> states = nans<float>(sizes.heads * head);
      for (int64_t n = 0; n < sizes.state_size(); n++) {
        dense.push_back(r_.between(-1, 1));
        states[static_cast<size_t>(n / sizes.state * row + n % sizes.state)] = dense.back();
      }
      const Tensor tensor(states.data(), REPLAYSSM_DTYPE_F32, {1, sizes.heads, sizes.dim, sizes.state}, {sizes.heads * head, head, row, 1});
      must(vllm::load_states({pool_, l}, shape, &q.block, o_.of_vllm ? &q.seat : nullptr, 1, tensor, nullptr));
      q.layers[static_cast<size_t>(l)].begin(dense.data());
    }
    requests_.push_back(std::move(q));
  }

  void step(bool packed, bool last) {
    // Rows: -1 is padding. At the end of the batch, as captured graphs have it, and in its middle.
    std::vector<int> rows;
    for (int i = 0; i < n_requests; i++) {
      if (last || !r_.one_in(4)) rows.push_back(i);
    }
    if (!last) rows.insert(rows.begin() + r_.below(static_cast<int>(rows.size()) + 1), -1);
    rows.push_back(-1);
    const int64_t n_rows = static_cast<int64_t>(rows.size());
    shared<int32_t> cu_seqlens{0}, accepted, seats;
    shared<int64_t> table;  // [rows][3], int64: block, and two columns of no interest
    for (const int i : rows) {
      const int length = !packed ? 1 : i < 0 ? r_.below(2) : last ? 1 + n_draft : r_.below(2 + n_draft);
      cu_seqlens.push_back(cu_seqlens.back() + length);
      accepted.push_back(length == 0 || i < 0 ? 0 : packed ? (last ? 2 : 1 + r_.below(length)) : 1);
      table.insert(table.end(), {i < 0 ? (o_.of_vllm ? 0 : -1) : requests_[size_t(i)].block, -77, 1 << 20});
      seats.push_back(i < 0 ? 0 : requests_[size_t(i)].seat);
      if (i >= 0) {
        rejected_ += length - accepted.back();
        requests_[size_t(i)].position += accepted.back();
      }
      nulls_ += i < 0;
      empty_ += length == 0;
    }
    const int64_t used = cu_seqlens.back(), tokens = packed ? used + 3 : used;  // packed tensors end in padding

    vllm::Metadata metadata;
    metadata.state_batch_indices = Tensor(table.data(), REPLAYSSM_DTYPE_I64, {n_rows, 3}, {3, 1});
    if (o_.of_vllm) metadata.request_indices = Tensor(seats.data(), REPLAYSSM_DTYPE_I32, {n_rows}, {1});
    if (packed) metadata.cu_seqlens = Tensor(cu_seqlens.data(), REPLAYSSM_DTYPE_I32, {n_rows + 1}, {1});
    metadata.num_tokens = tokens;
    metadata.max_seqlen = packed ? 1 + n_draft : 0;
    metadata.null_block_id = o_.of_vllm ? 0 : -1;

    for (int l = 0; l < n_layers; l++) layer(l, metadata, rows, cu_seqlens, accepted, tokens, last);
    const Tensor counts(accepted.data(), REPLAYSSM_DTYPE_I32, {n_rows}, {1});
    if (last && is(argument_, "break")) accepted[0]++;
    must(vllm::commit(slots_, metadata, packed ? counts : Tensor(), nullptr));
  }

  void layer(int l, const vllm::Metadata &metadata, const std::vector<int> &rows, const shared<int32_t> &cu_seqlens,
             const shared<int32_t> &accepted, int64_t tokens, bool last) {
    const mamba2_weights &w = weights_[size_t(l)];
    // The convolution's output, x | B | C, in rows that are longer; dt in the in-projection's rows; z and out in rows of their own.
    const int64_t inner = sizes.inner(), bc = sizes.bc(), pitch = inner + 2 * bc + 24, dt_pitch = sizes.heads + 5, out_pitch = inner + 8;
    shared<uint16_t> xBC = nans<uint16_t>(tokens * pitch), z = nans<uint16_t>(tokens * out_pitch);
    shared<float> dt = nans<float>(tokens * dt_pitch);
    shared<Out> out = nans<Out>(tokens * out_pitch);
    std::vector<mamba2_token> values(static_cast<size_t>(tokens));
    for (size_t row = 0; row < rows.size(); row++) {
      if (rows[row] < 0) continue;
      for (int64_t t = cu_seqlens[row]; t < cu_seqlens[row + 1]; t++) {
        mamba2_token &v = values[size_t(t)];
        uint16_t *at = xBC.data() + t * pitch;
        for (int64_t i = 0; i < inner; i++) v.x.push_back(store(*at++, r_.between(-2, 2)));
        for (int64_t i = 0; i < bc; i++) v.B.push_back(store(*at++, r_.between(-1, 1)));
        for (int64_t i = 0; i < bc; i++) v.C.push_back(store(*at++, r_.between(-1, 1)));
        for (int h = 0; h < sizes.heads; h++) v.dt.push_back(store(dt[size_t(t * dt_pitch + h)], r_.between(-2, 2)));
        for (int64_t i = 0; i < inner && !o_.of_vllm; i++) v.z.push_back(store(z[size_t(t * out_pitch + i)], r_.between(-3, 3)));
      }
    }
    const int64_t H = sizes.heads, P = sizes.dim, N = sizes.state, G = sizes.groups;
    const auto bf16 = REPLAYSSM_DTYPE_BF16;
    const auto f32 = REPLAYSSM_DTYPE_F32;
    const Tensor D(w.D.data(), f32, {H, P}, {o_.of_vllm ? 1 : P, o_.of_vllm ? 0 : 1});
    const Tensor gate(z.data(), bf16, {tokens, H, P}, {out_pitch, P, 1});
    must(vllm::selective_state_update(
        {pool_, l}, shape,                                                                      // state
        Tensor(xBC.data(), bf16, {tokens, H, P}, {pitch, P, 1}),                                // x
        Tensor(dt.data(), f32, {tokens, H, P}, {dt_pitch, 1, 0}),                               // dt
        Tensor(w.A.data(), f32, {H, P, N}, {1, 0, 0}),                                          // A
        Tensor(xBC.data() + inner, bf16, {tokens, G, N}, {pitch, N, 1}),                        // B
        Tensor(xBC.data() + inner + bc, bf16, {tokens, G, N}, {pitch, N, 1}),                   // C
        D, o_.of_vllm ? Tensor() : gate, Tensor(w.dt_bias.data(), f32, {H, P}, {1, 0}), true,   // D, z, dt_bias, dt_softplus
        metadata, Tensor(out.data(), dtype_of(out.data()), {tokens, H, P}, {out_pitch, P, 1}), nullptr));

    std::vector<double> y, bound;
    const Out zero{};
    for (size_t row = 0; row < rows.size(); row++) {
      const int64_t first = cu_seqlens[row], length = cu_seqlens[row + 1] - first;
      if (rows[row] < 0) {
        for (int64_t i = 0; i < length * inner; i++) {
          require(std::memcmp(&out[size_t((first + i / inner) * out_pitch + i % inner)], &zero, sizeof(Out)) == 0, "a null row's output is not zero");
        }
        continue;
      }
      mamba2_fp64 &truth = requests_[size_t(rows[row])].layers[size_t(l)];
      mamba2_fp64 drafts = truth;
      for (int64_t t = 0; t < length; t++) {
        mamba2_token &v = values[size_t(first + t)];
        if (last && is(argument_, "break_output") && row == 0) v.x[5] = -v.x[5] + 1;
        drafts.token(w, v, o_.how, out_unit(zero), y, bound);
        for (int64_t i = 0; i < inner; i++) outputs_.add(widen(out[size_t((first + t) * out_pitch + i)]), y[size_t(i)], bound[size_t(i)]);
        if (t + 1 == accepted[row]) truth = drafts;
      }
    }
    for (int64_t t = 0; t < tokens; t++) {
      for (int64_t i = t < cu_seqlens.back() ? inner : 0; i < out_pitch; i++) {
        require(is_sentinel(out[size_t(t * out_pitch + i)]), "memory beside the outputs was written");
      }
    }
  }

  void compare_states() {
    for (const request &q : requests_) {
      shared<float> state(static_cast<size_t>(n_layers * sizes.state_size()));
      const auto list = adapters::host_list(&q.block, 1, &q.seat);
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
  }

  // Shapes and strides that the library cannot see: a status, a sentence, and nothing done.
  void refuses_what_is_wrong() {
    shared<float> any(1 << 18);
    const int32_t block = 3;
    vllm::Metadata metadata;
    metadata.state_batch_indices = Tensor(&block, REPLAYSSM_DTYPE_I32, {1}, {1});
    metadata.num_tokens = 1;
    const int64_t H = sizes.heads, P = sizes.dim, N = sizes.state, G = sizes.groups;
    const Tensor x(any.data(), REPLAYSSM_DTYPE_BF16, {1, H, P}, {H * P, P, 1}), dt(any.data(), REPLAYSSM_DTYPE_F32, {1, H, P}, {H, 1, 0});
    const Tensor A(any.data(), REPLAYSSM_DTYPE_F32, {H, P, N}, {1, 0, 0}), B(any.data(), REPLAYSSM_DTYPE_BF16, {1, G, N}, {G * N, N, 1});
    const Tensor out(any.data(), dtype_of(static_cast<Out *>(nullptr)), {1, H, P}, {H * P, P, 1});
    const auto call = [&](const Tensor &x_, const Tensor &dt_, const Tensor &A_, const Tensor &B_, const vllm::Metadata &m) {
      return vllm::selective_state_update({pool_, 0}, shape, x_, dt_, A_, B_, B_, Tensor(), Tensor(), Tensor(), true, m, out, nullptr);
    };
    const auto refused = [](const adapters::Status &status, replayssm_status code, const char *sentence) {
      require(status.code == code && status.sentence == sentence, status.sentence.c_str());
    };
    Tensor wrong = x;
    wrong.size[1] = 7;
    refused(call(wrong, dt, A, B, metadata), REPLAYSSM_ERROR_INVALID_ARGUMENT, "x is [1, 7, 64]; expected [1, 8, 64]");
    wrong = dt;
    wrong.stride[2] = 1;
    refused(call(x, wrong, A, B, metadata), REPLAYSSM_ERROR_UNSUPPORTED, "dt has stride 1 in axis 2; expected 0, one value per head");
    wrong = A;
    wrong.stride[2] = 1;
    refused(call(x, dt, wrong, B, metadata), REPLAYSSM_ERROR_UNSUPPORTED, "A has stride 1 in axis 2; expected 0, one value per head");
    wrong = B;
    wrong.stride[2] = 2;
    refused(call(x, dt, A, wrong, metadata), REPLAYSSM_ERROR_UNSUPPORTED, "B has stride 2 in its last axis; expected 1");
    refused(call(x, dt, A, Tensor(), metadata), REPLAYSSM_ERROR_INVALID_ARGUMENT, "B is absent");
    metadata.num_tokens = 2;
    refused(call(x, dt, A, B, metadata), REPLAYSSM_ERROR_INVALID_ARGUMENT, "state_batch_indices has 1 rows; expected at least 2");
    const int32_t same[2] = {3, 3};
    metadata.state_batch_indices = Tensor(same, REPLAYSSM_DTYPE_I32, {2}, {0});
    refused(call(x, dt, A, B, metadata), REPLAYSSM_ERROR_UNSUPPORTED, "state_batch_indices has stride 0; expected 1 or more");
    metadata.state_batch_indices = Tensor(same, REPLAYSSM_DTYPE_I32, {2}, {1});
    refused(vllm::commit(slots_, metadata, Tensor(same, REPLAYSSM_DTYPE_I32, {2}, {0}), nullptr), REPLAYSSM_ERROR_UNSUPPORTED,
            "num_accepted_tokens has stride 0; expected 1 or more");
    metadata.state_batch_indices = Tensor(&block, REPLAYSSM_DTYPE_I32, {1}, {1});
    metadata.num_tokens = 1;
    const int32_t two[2] = {3, 4};
    const Tensor broadcast(any.data(), REPLAYSSM_DTYPE_F32, {2, H, P, N}, {0, P * N, N, 1});
    refused(vllm::load_states({pool_, 0}, shape, two, nullptr, 2, broadcast, nullptr), REPLAYSSM_ERROR_UNSUPPORTED,
            "states has stride 0 in axis 0; expected 1 or more");
    wrong = x;
    wrong.dtype = REPLAYSSM_DTYPE_F32;  // the library's own sentence
    const auto status = call(wrong, dt, A, B, metadata);
    require(status.code != REPLAYSSM_OK && status.sentence == replayssm_last_error_message(), "the library's sentence is lost");
  }

  options o_;
  const char *argument_;
  random_numbers r_{7};
  replayssm_context *context_ = nullptr;
  replayssm_slots *slots_ = nullptr;
  replayssm_layers *pool_ = nullptr;
  std::vector<mamba2_weights> weights_;
  std::vector<request> requests_;
  errors outputs_, states_;
  int rejected_ = 0, nulls_ = 0, empty_ = 0;
};

}  // namespace

int main(int argc, char **argv) {
  const char *argument = argc > 1 ? argv[1] : nullptr;
  engine_under_test<uint16_t>({"vLLM, SPLIT32, HIGH", true, readout::high}, argument).run();
  engine_under_test<float>({"mamba_ssm, F32, FULL", false, readout::full}, argument).run();
  return 0;
}
