// examples-cpp/adapters/onnxruntime_genai against fp64: packed rows on an interval of slots, with one bank and with two, prefixes that
// are kept, steps that are discarded, rows without tokens. What is not to be read is NaN.
//
// "break" commits a token that fp64 does not take, "break_output" changes one of its tokens.
//
// Bounds of a delta rule, by rows of a state: R is a row's 2-norm, e that of its error, u = 2^-24.
//   k, q     normalised: (K / 2 + 8) u of themselves
//   d = e^g  |g| (8 + |a + dt_bias| + |A_log| + 4) u and 4 u
//   S = d S  e = d e + u (k_d + 1) d R
//   w        beta (v - S k), whose own roundings are u R (K + K / 2 + 8) beta for the product, 2 u beta (|v| + R), and 7 u |w|
//   S + w k  the step as a whole shrinks e, since |I - beta k k^T| <= 1; beside that the roundings of w, (K / 2 + 8) u |w| of k's, and
//            2 u (R + |w|) of the sum
//   out      scale (e + (K / 2 + 8 + K + 4) u R), |q| being 1
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <numeric>

#include "../../examples-cpp/adapters/onnxruntime_genai/varlen_gated_delta_net.h"
#include "fp64.hpp"

namespace {

using namespace engine;
namespace genai = adapters::genai;

constexpr genai::Shape shape{2, 4, 128, 64};
constexpr int capacity = 6, first = 1, rows = 4, n_draft = 3, n_layers = 2, steps = 40;
constexpr size_t K = shape.K, V = shape.V;

struct token_values {
  std::vector<double> q, k, v, a, b;
};

struct layer_parameters {
  shared<float> A_log, dt_bias;
};

class delta_fp64 {
 public:
  void token(const layer_parameters &w, const token_values &t, std::vector<double> &y, std::vector<double> &bound) {
    y.clear();
    bound.clear();
    const double scale = 1 / std::sqrt(double(K)), k_norm = K / 2 + 8;
    for (size_t hv = 0; hv < size_t(shape.HV); hv++) {
      const size_t h = hv / size_t(shape.HV / shape.H);
      const std::vector<double> q = normalised(t.q, h), k = normalised(t.k, h);
      const double sum = t.a[hv] + widen(w.dt_bias[hv]), A_log = widen(w.A_log[hv]);
      const double g = -std::exp(A_log) * std::log1p(std::exp(sum)), d = std::exp(g), beta = 1 / (1 + std::exp(-t.b[hv]));
      const double k_d = std::abs(g) * (12 + std::abs(sum) + std::abs(A_log)) + 4;
      for (size_t i = 0; i < V; i++) {
        double *row = &S[(hv * V + i) * K], &e = error[hv * V + i];
        double predicted = 0, R = 0;
        for (size_t n = 0; n < K; n++) {
          row[n] *= d;
          predicted += row[n] * k[n];
          R += row[n] * row[n];
        }
        R = std::sqrt(R);
        const double v = t.v[hv * V + i], added = beta * (v - predicted);
        e = d * e + u32 * (k_d + 1) * R;
        e += u32 * (beta * (R * (double(K) + k_norm) + 2 * (std::abs(v) + R)) + (7 + k_norm) * std::abs(added) + 2 * (R + std::abs(added)));
        double o = 0, after = 0;
        for (size_t n = 0; n < K; n++) {
          row[n] += added * k[n];
          o += row[n] * q[n];
          after += row[n] * row[n];
        }
        y.push_back(scale * o);
        bound.push_back(scale * (e + (k_norm + double(K) + 4) * u32 * std::sqrt(after)) + 2 * u32 * std::abs(scale * o));
      }
    }
  }

  std::vector<double> S = std::vector<double>(size_t(shape.HV) * V * K), error = std::vector<double>(size_t(shape.HV) * V);

 private:
  static std::vector<double> normalised(const std::vector<double> &values, size_t head) {
    std::vector<double> out(values.begin() + static_cast<std::ptrdiff_t>(head * K), values.begin() + static_cast<std::ptrdiff_t>((head + 1) * K));
    double sum = 1e-6;
    for (const double x : out) sum += x * x;
    for (double &x : out) x /= std::sqrt(sum);
    return out;
  }
};

class engine_under_test {
 public:
  engine_under_test(bool two_banks, const char *argument) : two_banks_(two_banks), argument_(argument) {
    context_ = device::get().create_context();
    auto slots = genai::slots_desc(two_banks ? 2 * capacity : capacity, 1 + n_draft);
    slots.flags = REPLAYSSM_SLOTS_CHECKS;
    must(adapters::check(replayssm_slots_create(context_, &slots, &slots_)));
    auto pool = REPLAYSSM_INIT(replayssm_pool_desc);
    pool.family = REPLAYSSM_FAMILY_GDN;
    pool.n_layers = n_layers;
    pool.io = REPLAYSSM_DTYPE_BF16;
    pool.out = REPLAYSSM_DTYPE_F32;
    pool.readout = REPLAYSSM_READOUT_EXACT;
    pool.H = shape.H;
    pool.HV = shape.HV;
    pool.K = shape.K;
    pool.V = shape.V;
    must(adapters::check(replayssm_layers_create(slots_, &pool, nullptr, 0, &pool_)));
    std::iota(numbers_.begin(), numbers_.end(), 0);
    past_.slots = {numbers_.data(), capacity};
    past_.first = first;
    past_.rows = rows;
    must(genai::start(slots_, past_, nullptr));
    for (layer_parameters &w : parameters_) {
      for (int h = 0; h < shape.HV; h++) {
        w.A_log.push_back(r_.between(-2, 2));
        w.dt_bias.push_back(r_.between(-4, -1));
      }
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
    for (int i = 0; i < n; i++) step(i == n - 1);
    for (int l = 0; l < n_layers; l++) {
      const shared<float> state = states_of(past_.bank, l);
      const float *at = state.data();
      for (int row = 0; row < rows; row++) {
        const delta_fp64 &truth = truth_[size_t(row)][size_t(l)];
        for (size_t i = 0; i < truth.S.size(); i++) states_.add(widen(*at++), truth.S[i], truth.error[i / K]);
      }
    }
    require_near(outputs_, states_, false);
    auto report = REPLAYSSM_INIT(replayssm_report);
    must(adapters::check(replayssm_check(slots_, 0, &report)));
    require(report.bits == 0, "a fault bit is set");
    require(short_run || (rejected_ > 0 && discarded_ > 0), "something never happened");
    std::printf("genai_adapter: %s: %lld outputs, relative error %.1e, at most %.3f of the bound; states %.1e, %.3f\n",
                two_banks_ ? "two banks" : "one bank", static_cast<long long>(outputs_.n), outputs_.relative(), outputs_.worst,
                states_.relative(), states_.worst);
  }

 private:
  // States of all rows in a bank.
  shared<float> states_of(int bank, int layer) const {
    shared<float> state(size_t(rows) * size_t(shape.HV) * V * K);
    std::vector<int32_t> slots;
    for (int row = 0; row < rows; row++) slots.push_back(bank * capacity + first + row);
    const auto list = adapters::host_list(slots.data(), rows);
    auto dense = REPLAYSSM_INIT(replayssm_state);
    dense.dtype = REPLAYSSM_DTYPE_F32;
    dense.layer = layer;
    dense.data = state.data();
    must(adapters::check(replayssm_export(pool_, &list, nullptr, &dense, nullptr)));
    return state;
  }

  void step(bool last) {
    shared<int32_t> cu_seqlens{0}, kept;
    for (int row = 0; row < rows; row++) {
      const int length = last ? 1 + n_draft : r_.below(2 + n_draft);
      cu_seqlens.push_back(cu_seqlens.back() + length);
      kept.push_back(length == 0 ? 0 : last ? 2 : 1 + r_.below(length));
      rejected_ += length - kept.back();
    }
    const bool discard = !last && r_.one_in(6);
    discarded_ += discard;
    past_.cu_seqlens = cu_seqlens.data();
    past_.num_tokens = cu_seqlens.back();
    const shared<float> before = states_of(past_.bank, 0);
    genai::Interval present = past_;
    if (two_banks_) must(genai::present_from_past(slots_, past_, &present, nullptr));
    for (int l = 0; l < n_layers; l++) layer(l, present, cu_seqlens, discard ? shared<int32_t>() : kept, last);
    if (!discard) {
      if (last && is(argument_, "break")) kept[0]++;
      must(genai::commit(slots_, present, kept.data(), nullptr));
      require(!two_banks_ || same_bytes(before, states_of(past_.bank, 0)), "a step on present has changed past");
      past_ = present;  // what was present is past
    }
  }

  void layer(int l, const genai::Interval &interval, const shared<int32_t> &cu_seqlens, const shared<int32_t> &kept, bool last) {
    const int64_t tokens = interval.num_tokens, padded = tokens + 2, HK = shape.H * shape.K, HVV = shape.HV * shape.V;
    shared<uint16_t> q = nans<uint16_t>(padded * HK), k = q, v = nans<uint16_t>(padded * HVV);
    shared<float> a = nans<float>(padded * shape.HV), b = a, out = nans<float>(padded * HVV);
    std::vector<token_values> values(static_cast<size_t>(tokens));
    for (int64_t t = 0; t < tokens; t++) {
      token_values &x = values[size_t(t)];
      for (int64_t i = 0; i < HK; i++) x.q.push_back(store(q[size_t(t * HK + i)], r_.between(-2, 2)));
      for (int64_t i = 0; i < HK; i++) x.k.push_back(store(k[size_t(t * HK + i)], r_.between(-2, 2)));
      for (int64_t i = 0; i < HVV; i++) x.v.push_back(store(v[size_t(t * HVV + i)], r_.between(-2, 2)));
      for (int64_t i = 0; i < shape.HV; i++) x.a.push_back(store(a[size_t(t * shape.HV + i)], r_.between(-2, 2)));
      for (int64_t i = 0; i < shape.HV; i++) x.b.push_back(store(b[size_t(t * shape.HV + i)], r_.between(-3, 3)));
    }
    genai::Node node;
    node.q = q.data();
    node.k = k.data();
    node.v = v.data();
    node.decay = a.data();
    node.beta = b.data();
    node.A_log = parameters_[size_t(l)].A_log.data();
    node.dt_bias = parameters_[size_t(l)].dt_bias.data();
    node.out = out.data();
    node.out_type = REPLAYSSM_DTYPE_F32;
    must(genai::varlen_gated_delta_net({pool_, l}, shape, interval, node, nullptr));

    std::vector<double> y, bound;
    for (int row = 0; row < rows; row++) {
      delta_fp64 &truth = truth_[size_t(row)][size_t(l)];
      delta_fp64 drafts = truth;
      for (int t = cu_seqlens[size_t(row)]; t < cu_seqlens[size_t(row) + 1]; t++) {
        token_values &x = values[size_t(t)];
        if (last && is(argument_, "break_output") && row == 0) x.v[5] = -x.v[5] + 1;
        drafts.token(parameters_[size_t(l)], x, y, bound);
        for (int64_t i = 0; i < HVV; i++) outputs_.add(widen(out[size_t(t * HVV + i)]), y[size_t(i)], bound[size_t(i)]);
        if (!kept.empty() && t + 1 - cu_seqlens[size_t(row)] == kept[size_t(row)]) truth = drafts;
      }
    }
    for (size_t i = size_t(tokens * HVV); i < out.size(); i++) require(is_sentinel(out[i]), "memory beside the outputs was written");
  }

  void refuses_what_is_wrong() {
    genai::Interval wrong = past_;
    wrong.first = 3;
    const auto status = genai::start(slots_, wrong, nullptr);
    require(status.code == REPLAYSSM_ERROR_INVALID_ARGUMENT &&
                status.sentence == "slots 3 and 4 rows in bank 0; expected an interval of 6 slots in bank 0 or 1",
            status.sentence.c_str());
    require(genai::varlen_gated_delta_net({pool_, 0}, shape, past_, {}, nullptr).sentence == "cu_seqlens is null; expected [rows + 1]",
            "absent cu_seqlens are accepted");
    require(genai::commit(slots_, past_, nullptr, nullptr).sentence == "cu_seqlens is null; expected [rows + 1]", "a commit without rows is accepted");
    require(genai::present_from_past(slots_, past_, nullptr, nullptr).sentence == "present is null; expected where its interval goes",
            "an absent interval is accepted");
  }

  bool two_banks_;
  const char *argument_;
  random_numbers r_{55};
  replayssm_context *context_ = nullptr;
  replayssm_slots *slots_ = nullptr;
  replayssm_layers *pool_ = nullptr;
  shared<int32_t> numbers_ = shared<int32_t>(2 * capacity);
  genai::Interval past_;
  std::vector<layer_parameters> parameters_ = std::vector<layer_parameters>(n_layers);
  std::vector<std::vector<delta_fp64>> truth_ = std::vector<std::vector<delta_fp64>>(rows, std::vector<delta_fp64>(n_layers));
  errors outputs_, states_;
  int rejected_ = 0, discarded_ = 0;
};

}  // namespace

int main(int argc, char **argv) {
  const char *argument = argc > 1 ? argv[1] : nullptr;
  engine_under_test(false, argument).run();
  engine_under_test(true, argument).run();
  return 0;
}
