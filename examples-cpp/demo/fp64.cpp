// SPDX-License-Identifier: MIT OR Apache-2.0
#include "fp64.h"

#include <cmath>
#include <vector>

namespace demo {
namespace {

double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }
double sigmoid64(double x) { return 1 / (1 + std::exp(-x)); }

// x / sqrt(x . x + eps)
std::vector<double> l2_normalised(const std::uint16_t* x, int n, double eps) {
  std::vector<double> out;
  double sum = eps;
  for (int i = 0; i < n; ++i) {
    out.push_back(static_cast<double>(bf16_to_float(x[i])));
    sum += out.back() * out.back();
  }
  for (double& value : out) value /= std::sqrt(sum);
  return out;
}

}  // namespace

void mamba2_fp64(const Config& config, const MambaWeights& weights, const std::uint16_t* xbc, const float* dt,
                 const std::uint16_t* z, double* S, float* out) {
  const int D = config.headdim, N = config.dstate, heads_per_group = config.nheads / config.ngroups;
  for (int head = 0; head < config.nheads; ++head) {
    const auto h = static_cast<std::size_t>(head);
    const std::uint16_t* B = xbc + config.d_inner + head / heads_per_group * N;
    const std::uint16_t* C = B + config.ngroups * N;
    const double step = softplus(static_cast<double>(dt[h]) + static_cast<double>(weights.dt_bias[h]));
    const double decay = std::exp(static_cast<double>(weights.A[h]) * step);
    for (int d = 0; d < D; ++d, S += N) {
      const double x = static_cast<double>(bf16_to_float(xbc[head * D + d]));
      double y = static_cast<double>(weights.D[h]) * x;
      for (int n = 0; n < N; ++n) {
        S[n] = decay * S[n] + step * x * static_cast<double>(bf16_to_float(B[n]));
        y += S[n] * static_cast<double>(bf16_to_float(C[n]));
      }
      const double gate = static_cast<double>(bf16_to_float(z[head * D + d]));
      out[head * D + d] = static_cast<float>(y * gate * sigmoid64(gate));
    }
  }
}

void delta_fp64(const DeltaDims& dims, bool per_channel, double l2norm_eps, const DeltaWeights& weights,
                const std::uint16_t* qkv, const float* b, const float* a, double* S, float* out) {
  const double scale = 1 / std::sqrt(static_cast<double>(dims.K));
  std::vector<double> decay(static_cast<std::size_t>(dims.K));
  for (int hv = 0; hv < dims.HV; ++hv) {
    const int h = hv / (dims.HV / dims.H);
    const std::vector<double> q = l2_normalised(qkv + h * dims.K, dims.K, l2norm_eps);
    const std::vector<double> k = l2_normalised(qkv + (dims.H + h) * dims.K, dims.K, l2norm_eps);
    const std::uint16_t* v = qkv + 2 * dims.H * dims.K + hv * dims.V;
    const double A = std::exp(static_cast<double>(weights.A_log[static_cast<std::size_t>(hv)]));
    for (int c = 0; c < dims.K; ++c) {
      const int at = per_channel ? hv * dims.K + c : hv;
      const double bias = static_cast<double>(weights.dt_bias[static_cast<std::size_t>(at)]);
      decay[static_cast<std::size_t>(c)] = std::exp(-A * softplus(static_cast<double>(a[at]) + bias));
    }
    const double beta = sigmoid64(static_cast<double>(b[hv]));
    for (int row = 0; row < dims.V; ++row, S += dims.K) {
      double seen = 0, o = 0;
      for (std::size_t c = 0; c < k.size(); ++c) {
        S[c] *= decay[c];
        seen += S[c] * k[c];
      }
      const double u = beta * (static_cast<double>(bf16_to_float(v[row])) - seen);
      for (std::size_t c = 0; c < k.size(); ++c) {
        S[c] += u * k[c];
        o += S[c] * q[c];
      }
      out[hv * dims.V + row] = static_cast<float>(scale * o);
    }
  }
}

}  // namespace demo
