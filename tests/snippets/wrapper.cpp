// Snippets of docs/INTEGRATION.md: the C++17 wrapper. SPDX-License-Identifier: MIT OR Apache-2.0
#include <replayssm.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

static void require(bool condition, const char *what) {
  if (condition) return;
  std::fprintf(stderr, "%s is not true\n", what);
  std::exit(1);
}
#define REQUIRE(condition) require(condition, #condition)

int main() {
  constexpr int H = 2, HV = 4, K = 32, V = 16, rows = 2;
  // >>> wrapper
  const replayssm::Context context;
  auto slots_desc = replayssm::init<replayssm_slots_desc>();
  slots_desc.n_slots = 8;
  replayssm::Slots slots(context, slots_desc);

  auto pool = replayssm::init<replayssm_pool_desc>();
  pool.family = REPLAYSSM_FAMILY_GDN;
  pool.n_layers = 1;
  pool.io = REPLAYSSM_DTYPE_F32;
  pool.H = H, pool.HV = HV, pool.K = K, pool.V = V;
  const replayssm::Layers layers(slots, pool);

  const std::int32_t row_slots[rows] = {6, 1};
  auto batch = replayssm::init<replayssm_batch>();
  batch.n_rows = rows, batch.tokens = 1;
  batch.slots = replayssm::ids(row_slots);
  std::vector<float> q(rows * H * K), k(q.size()), v(rows * HV * V), a(rows * HV), b(rows * HV), out(v.size());
  const std::vector<float> A_log(HV, 0.0f), dt_bias(HV, -3.0f);
  auto args = replayssm::init<replayssm_delta_args>();
  args.q = replayssm::view(q.data(), {H * K, 0, K});  // strides of rows, tokens, heads, in elements
  args.k = replayssm::view(k.data(), {H * K, 0, K});
  args.v = replayssm::view(v.data(), {HV * V, 0, V});
  args.g = replayssm::view(a.data(), {HV, 0, 1});  // raw a: the default gate is -exp(A_log) softplus(a + dt_bias)
  args.beta = replayssm::view(b.data(), {HV, 0, 1});
  args.A_log = replayssm::view(A_log.data(), {0, 0, 1});
  args.dt_bias = replayssm::view(dt_bias.data(), {0, 0, 1});
  args.out = replayssm::view(out.data(), {HV * V, 0, V});
  // <<< wrapper

  std::uint32_t seed = 3;
  const auto draw = [&] {
    seed = seed * 1664525u + 1013904223u;
    return static_cast<float>(seed >> 8) / 8388608.0f - 1.0f;
  };
  // The recurrence in fp64.
  std::vector<double> state(rows * HV * V * K);
  double error = 0, norm = 0;
  for (int step = 0; step < 50; ++step) {
    for (auto *input : {&q, &k, &v, &a, &b}) {
      for (float &x : *input) x = draw();
    }
    // >>> wrapper_step
    layers.step(0, batch, args);  // throws replayssm::Error, which has the status and the sentence
    slots.commit(batch);
    // <<< wrapper_step
    for (int r = 0; r < rows; ++r) {
      for (int h = 0; h < HV; ++h) {
        const float *kh = &k[static_cast<std::size_t>((r * H + h / (HV / H)) * K)];
        const float *qh = &q[static_cast<std::size_t>((r * H + h / (HV / H)) * K)];
        double kk = 1e-6, qq = 1e-6;
        for (int i = 0; i < K; ++i) kk += double{kh[i]} * kh[i], qq += double{qh[i]} * qh[i];
        const auto head = static_cast<std::size_t>(r * HV + h);
        const double decay = std::exp(-std::log1p(std::exp(double{a[head]} - 3.0)));
        const double beta = 1.0 / (1.0 + std::exp(-double{b[head]}));
        for (int j = 0; j < V; ++j) {
          const auto row = head * V + static_cast<std::size_t>(j);
          double *S = &state[row * K], product = 0, y = 0;
          for (int i = 0; i < K; ++i) S[i] *= decay, product += S[i] * kh[i] / std::sqrt(kk);
          const double u = beta * (double{v[row]} - product);
          for (int i = 0; i < K; ++i) S[i] += u * kh[i] / std::sqrt(kk), y += S[i] * qh[i] / std::sqrt(qq);
          y /= std::sqrt(double{K});
          error += std::pow(y - double{out[row]}, 2), norm += y * y;
        }
      }
    }
  }
  // SPLIT32 with fp32 activations reads FULL: at most twice the plain update's error + 1e-6 (docs/KERNELS.md), which is 3.4e-7
  // there after 4096 tokens: 1.7e-6.
  REQUIRE(norm > 0 && std::sqrt(error / norm) < 1.7e-6);
  REQUIRE(slots.report().bits == 0);

  bool thrown = false;
  // >>> wrapper_error
  try {
    layers.step(1, batch, args);
  } catch (const replayssm::Error &failure) {
    thrown = failure.status() == REPLAYSSM_ERROR_INVALID_ARGUMENT;  // what(): "REPLAYSSM_ERROR_INVALID_ARGUMENT: layer is 1; expected 0 to 0"
  }
  // <<< wrapper_error
  REQUIRE(thrown);
  std::puts("wrapper: ok");
  return 0;
}
