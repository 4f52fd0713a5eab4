// The model's dense arithmetic in fp32. An output row is the same sequence of operations whatever stands beside it, so a
// request's numbers depend neither on the batch nor on how many drafts are verified at once. Speculative decoding that
// is to give the same text needs that of an engine's matrix products, and of the state updates, which are the library's part.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace demo {

inline float bf16_to_float(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}

// To nearest, ties to even. For finite values: activations have no NaN.
inline std::uint16_t float_to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A matrix [out, in] that multiplies columns from the left. Stored in panels of 32 outputs, [panel][in][32], so that a
// panel's 32 sums run side by side through contiguous memory: vector instructions without a sum across a vector.
class Matrix {
 public:
  Matrix() = default;
  Matrix(const std::vector<float>& rows, int out, int in);

  int in() const { return in_; }
  int out() const { return out_; }
  // Elements of an output row: `out` rounded up to whole panels.
  int padded() const { return padded_; }
  const std::vector<float>& panels() const { return panels_; }
  // y [n_rows][y_stride] = W x [n_rows][x_stride]. Each output is one ascending chain over `in`, from +0.
  void multiply(const float* x, std::size_t x_stride, std::size_t n_rows, float* y, std::size_t y_stride) const;

 private:
  int in_ = 0, out_ = 0, padded_ = 0;
  std::vector<float> panels_;
};

// y = x / sqrt(mean(x^2) + eps) * weight; y may be x
void rms_norm(const float* x, const std::vector<float>& weight, float eps, float* y);

// e^x within two units in the last place: the same operations on the GPU, whatever the C library does. Below -87 it is e^-87, above 88 e^88.
inline float exp_of(float x) {
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits. ln 2 comes in two parts; then Taylor's series.
  const float n = x * 1.44269504f + 12582912.0f, k = n - 12582912.0f;
  const float r = x - k * 0.693145752f - k * 1.42860677e-6f;
  float p = r * (1.0f / 5040) + 1.0f / 720;
  p = r * p + 1.0f / 120;
  p = r * p + 1.0f / 24;
  p = r * p + 1.0f / 6;
  p = r * p + 0.5f;
  std::uint32_t bits;
  std::memcpy(&bits, &n, sizeof bits);
  bits = (bits - 0x4B400000u + 127u) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return (1.0f + (r + r * r * p)) * power;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_of(-x)); }

// x *= sigmoid(x)
void silu(float* x, std::size_t n);

// One head's output of one token: softmax(q . k / sqrt(dim)) v over tokens first .. last, which lie in rows p mod n_rows.
// keys and values point to this head's part of row 0; rows are `stride` apart. dim is a multiple of 8, at most 64.
void attend(const float* q, const float* keys, const float* values, std::size_t stride, std::size_t n_rows,
            std::int64_t first, std::int64_t last, int dim, float* scores, float* out);

}  // namespace demo
