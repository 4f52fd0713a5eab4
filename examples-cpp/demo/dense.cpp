// SPDX-License-Identifier: MIT OR Apache-2.0
#include "dense.h"

#include <algorithm>
#include <cmath>

// The build turns contraction off (-ffp-contract=off): a fused multiply-add in one row block and not in another would be
// another sequence of operations. The AVX2 clone has no FMA either, so it computes the same bytes, only faster.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define DEMO_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define DEMO_CLONES
#endif
#define DEMO_INLINE inline __attribute__((always_inline))

namespace demo {
namespace {

constexpr int LANES = 8;
constexpr int PANEL = 32;
typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));

// One row, or two, times one panel. Named sums rather than an array of them: GCC keeps an array in memory, which costs half.
DEMO_INLINE void multiply_row(const float* w, int in, const float* x, float* y) {
  Vector a0 = {}, a1 = {}, a2 = {}, a3 = {};
  for (int i = 0; i < in; ++i, w += PANEL) {
    Vector w0, w1, w2, w3;
    std::memcpy(&w0, w, sizeof w0);
    std::memcpy(&w1, w + LANES, sizeof w1);
    std::memcpy(&w2, w + 2 * LANES, sizeof w2);
    std::memcpy(&w3, w + 3 * LANES, sizeof w3);
    a0 += x[i] * w0;
    a1 += x[i] * w1;
    a2 += x[i] * w2;
    a3 += x[i] * w3;
  }
  std::memcpy(y, &a0, sizeof a0);
  std::memcpy(y + LANES, &a1, sizeof a1);
  std::memcpy(y + 2 * LANES, &a2, sizeof a2);
  std::memcpy(y + 3 * LANES, &a3, sizeof a3);
}

DEMO_INLINE void multiply_two_rows(const float* w, int in, const float* x, const float* x2, float* y, float* y2) {
  Vector a0 = {}, a1 = {}, a2 = {}, a3 = {}, b0 = {}, b1 = {}, b2 = {}, b3 = {};
  for (int i = 0; i < in; ++i, w += PANEL) {
    Vector w0, w1, w2, w3;
    std::memcpy(&w0, w, sizeof w0);
    std::memcpy(&w1, w + LANES, sizeof w1);
    std::memcpy(&w2, w + 2 * LANES, sizeof w2);
    std::memcpy(&w3, w + 3 * LANES, sizeof w3);
    a0 += x[i] * w0;
    a1 += x[i] * w1;
    a2 += x[i] * w2;
    a3 += x[i] * w3;
    b0 += x2[i] * w0;
    b1 += x2[i] * w1;
    b2 += x2[i] * w2;
    b3 += x2[i] * w3;
  }
  std::memcpy(y, &a0, sizeof a0);
  std::memcpy(y + LANES, &a1, sizeof a1);
  std::memcpy(y + 2 * LANES, &a2, sizeof a2);
  std::memcpy(y + 3 * LANES, &a3, sizeof a3);
  std::memcpy(y2, &b0, sizeof b0);
  std::memcpy(y2 + LANES, &b1, sizeof b1);
  std::memcpy(y2 + 2 * LANES, &b2, sizeof b2);
  std::memcpy(y2 + 3 * LANES, &b3, sizeof b3);
}

DEMO_CLONES void multiply_panels(const float* panels, int n_panels, int in, const float* x, std::size_t x_stride,
                                 std::size_t n_rows, float* y, std::size_t y_stride) {
  for (int p = 0; p < n_panels; ++p, panels += static_cast<std::size_t>(in) * PANEL, y += PANEL) {
    std::size_t r = 0;
    for (; r + 2 <= n_rows; r += 2) {
      multiply_two_rows(panels, in, x + r * x_stride, x + (r + 1) * x_stride, y + r * y_stride, y + (r + 1) * y_stride);
    }
    if (r < n_rows) multiply_row(panels, in, x + r * x_stride, y + r * y_stride);
  }
}

}  // namespace

Matrix::Matrix(const std::vector<float>& rows, int out, int in)
    : in_(in), out_(out), padded_((out + PANEL - 1) / PANEL * PANEL) {
  const auto n_out = static_cast<std::size_t>(out), n_in = static_cast<std::size_t>(in);
  panels_.resize(static_cast<std::size_t>(padded_) * n_in);
  for (std::size_t o = 0; o < n_out; ++o) {
    for (std::size_t i = 0; i < n_in; ++i) panels_[(o / PANEL * n_in + i) * PANEL + o % PANEL] = rows[o * n_in + i];
  }
}

void Matrix::multiply(const float* x, std::size_t x_stride, std::size_t n_rows, float* y, std::size_t y_stride) const {
  multiply_panels(panels_.data(), padded_ / PANEL, in_, x, x_stride, n_rows, y, y_stride);
}

void rms_norm(const float* x, const std::vector<float>& weight, float eps, float* y) {
  float sum = 0;
  for (std::size_t i = 0; i < weight.size(); ++i) sum += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(weight.size()) + eps);
  for (std::size_t i = 0; i < weight.size(); ++i) y[i] = x[i] * scale * weight[i];
}

void silu(float* x, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) x[i] = x[i] / (1.0f + exp_of(-x[i]));
}

DEMO_CLONES void attend(const float* q, const float* keys, const float* values, std::size_t stride, std::size_t n_rows,
                        std::int64_t first, std::int64_t last, int dim, float* scores, float* out) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const auto n = static_cast<std::size_t>(last - first + 1);
  const auto row0 = static_cast<std::size_t>(first) % n_rows;
  float largest = -INFINITY;
  for (std::size_t j = 0, row = row0; j < n; ++j, row = row + 1 == n_rows ? 0 : row + 1) {
    Vector sum = {};
    for (int i = 0; i < dim; i += LANES) {
      Vector a, b;
      std::memcpy(&a, q + i, sizeof a);
      std::memcpy(&b, keys + row * stride + i, sizeof b);
      sum += a * b;
    }
    float lanes[LANES];
    std::memcpy(lanes, &sum, sizeof sum);
    const float dot = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
    scores[j] = dot * scale;
    largest = std::max(largest, scores[j]);
  }
  float total = 0;
  for (std::size_t j = 0; j < n; ++j) {
    scores[j] = exp_of(scores[j] - largest);
    total += scores[j];
  }
  std::fill(out, out + dim, 0.0f);
  Vector sum[8] = {};
  for (std::size_t j = 0, row = row0; j < n; ++j, row = row + 1 == n_rows ? 0 : row + 1) {
    for (int i = 0; i < dim / LANES; ++i) {
      Vector v;
      std::memcpy(&v, values + row * stride + i * LANES, sizeof v);
      sum[i] += scores[j] * v;
    }
  }
  std::memcpy(out, sum, static_cast<std::size_t>(dim) * sizeof(float));
  for (int i = 0; i < dim; ++i) out[i] /= total;
}

}  // namespace demo
