// What the programs about adapters measure against: the recurrences in fp64, straight from the formulas of the header, and beside each
// value how far fp32 arithmetic may be from it.
//
// Bounds, to first order, with u = 2^-24 and one u for each rounding. A Mamba-2 step is S = d S + dt x B, d = e^(A dt):
//   dt   softplus of a rounded sum s: (8 + |s|) u of itself
//   d    |A dt| times that and one more, and 4 u for the exponential
//   S    E' = d E + u (k_d + 2) d M + u (k_dt + 4) |dt x B|, where M' = d M + |dt x B| bounds |S|
//   y    |C| E over the state's row, and by readout
//          EXACT   (dstate + 8) u of sum M |C|, a sum of that many terms
//          HIGH    2^-8 of sum M |C|, since a bf16 view is off by at most 2^-8 of itself, and 2^-14 of |D x|
//          FULL    2^-8 times as much as HIGH: fp32 in place of bf16, with 2^8 for sums over state, ring and cumulated decays
//   out  |silu(z)| of that, 8 u of itself, and its own rounding: u, or 2^-9 for bf16
// A delta rule's step contracts: |I - beta k k^T| <= 1 for |k| = 1. So errors are followed by the 2-norm of a state's row; see there.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <cmath>
#include <limits>

#include "../../examples-cpp/adapters/common.h"
#include "device.hpp"

namespace engine {

// A call succeeds, and its work is done.
inline void must(const adapters::Status &status) {
  if (!status.ok()) require(false, status.sentence.c_str());
  device::get().wait();
}

constexpr double u32 = 0x1p-24;

inline double widen(float v) { return static_cast<double>(v); }
inline double widen(uint16_t v) {
  const uint32_t bits = uint32_t{v} << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return static_cast<double>(f);
}

// Memory that is not to be read: NaNs. `sentinel` is another NaN, for memory that is not to be written.
template <class T>
T not_a_number();
template <>
inline uint16_t not_a_number<uint16_t>() { return 0x7FC0; }
template <>
inline float not_a_number<float>() { return std::numeric_limits<float>::quiet_NaN(); }
template <class T>
shared<T> nans(int64_t n) { return shared<T>(static_cast<size_t>(n), not_a_number<T>()); }
template <class T>
bool is_sentinel(T value) {
  const T nan = not_a_number<T>();
  return std::memcmp(&value, &nan, sizeof(T)) == 0;
}

// Whether a program was called with this argument: "break", "break_output", or "short", for valgrind.
inline bool is(const char *argument, const char *name) { return argument != nullptr && std::strcmp(argument, name) == 0; }

// Stores a value and gives back what is stored.
template <class T>
double store(T &to, float value) {
  put(to, value);
  return widen(to);
}

// Errors seen: the largest in units of its bound, and the relative 2-norm.
struct errors {
  double worst = 0, error = 0, norm = 0;
  int64_t n = 0;
  void add(double got, double wanted, double bound) {
    const double e = std::abs(got - wanted);
    worst = std::isfinite(got) ? std::fmax(worst, e / (bound + 1e-30)) : std::numeric_limits<double>::infinity();
    error += e * e;
    norm += wanted * wanted;
    n++;
  }
  double relative() const { return std::sqrt(error / norm); }
};

enum class readout { exact, full, high };

inline double out_unit(const float &) { return u32; }
inline double out_unit(const uint16_t &) { return 0x1p-9; }

struct mamba2_sizes {
  int heads, dim, state, groups;
  constexpr int inner() const { return heads * dim; }
  constexpr int bc() const { return groups * state; }
  constexpr int64_t state_size() const { return int64_t{inner()} * state; }
};

// Values of a token as they stand in the engine's tensors. z empty: no gate.
struct mamba2_token {
  std::vector<double> x, B, C, dt, z;
};

struct mamba2_weights {
  shared<float> A, dt_bias, D;  // D of every head, or of every channel
  bool softplus = true;
};

inline mamba2_weights random_weights(const mamba2_sizes &s, random_numbers &r, bool D_per_channel) {
  mamba2_weights w;
  for (int h = 0; h < s.heads; h++) {
    w.A.push_back(-r.between(0.5f, 8.0f));
    w.dt_bias.push_back(r.between(-4.0f, -1.0f));
  }
  for (int i = 0; i < (D_per_channel ? s.inner() : s.heads); i++) w.D.push_back(r.between(-1.0f, 1.0f));
  return w;
}

// One layer of one request.
class mamba2_fp64 {
 public:
  explicit mamba2_fp64(const mamba2_sizes &s) : s_(s), S(zeros()), M_(zeros()), E(zeros()) {}

  void begin(const float *state) {
    for (size_t i = 0; i < S.size(); i++) {
      S[i] = static_cast<double>(state[i]);
      M_[i] = std::abs(S[i]);
      E[i] = 0;
    }
  }

  // Takes a token. y and bound get [heads, dim]; unit is the rounding of the output.
  void token(const mamba2_weights &w, const mamba2_token &t, readout how, double unit, std::vector<double> &y, std::vector<double> &bound) {
    y.clear();
    bound.clear();
    const bool per_channel = w.D.size() > static_cast<size_t>(s_.heads);
    size_t at = 0;
    for (int h = 0; h < s_.heads; h++) {
      const double sum = t.dt[size_t(h)] + (w.dt_bias.empty() ? 0.0 : widen(w.dt_bias[size_t(h)]));
      const double dt = w.softplus && sum <= 20 ? std::log1p(std::exp(sum)) : sum, g = widen(w.A[size_t(h)]) * dt, d = std::exp(g);
      const double k_dt = 8 + std::abs(sum), k_d = std::abs(g) * (k_dt + 1) + 4;
      const size_t group = size_t(h / (s_.heads / s_.groups) * s_.state);
      for (int i = 0; i < s_.dim; i++) {
        const size_t channel = size_t(h * s_.dim + i);
        const double x = t.x[channel];
        double plain = 0, magnitude = 0, error = 0;
        for (size_t n = 0; n < size_t(s_.state); n++, at++) {
          const double added = dt * x * t.B[group + n], C = t.C[group + n];
          E[at] = d * E[at] + u32 * ((k_d + 2) * d * M_[at] + (k_dt + 4) * std::abs(added));
          M_[at] = d * M_[at] + std::abs(added);
          S[at] = d * S[at] + added;
          plain += S[at] * C;
          magnitude += M_[at] * std::abs(C);
          error += E[at] * std::abs(C);
        }
        const double Dx = w.D.empty() ? 0.0 : widen(w.D[per_channel ? channel : size_t(h)]) * x;
        plain += Dx;
        double allowed = error;
        switch (how) {
          case readout::exact: allowed += u32 * (s_.state + 8) * (magnitude + std::abs(Dx)); break;
          case readout::full: allowed += 0x1p-16 * magnitude + 0x1p-22 * std::abs(Dx); break;
          case readout::high: allowed += 0x1p-8 * magnitude + 0x1p-14 * std::abs(Dx); break;
        }
        const double z = t.z.empty() ? 0.0 : t.z[channel], gate = t.z.empty() ? 1.0 : z / (1 + std::exp(-z));
        y.push_back(plain * gate);
        bound.push_back(allowed * std::abs(gate) + (8 * u32 + 1.01 * unit) * std::abs(plain * gate));
      }
    }
  }

 private:
  std::vector<double> zeros() const { return std::vector<double>(static_cast<size_t>(s_.state_size())); }
  mamba2_sizes s_;

 public:
  std::vector<double> S;  // [heads, dim, state]

 private:
  std::vector<double> M_;

 public:
  std::vector<double> E;  // of each element: how far fp32 may be
};

// Whether outputs and states were near enough: each within its bound, and outputs by their relative 2-norm, as HIGH's bound is wide.
// In a 2-norm, a HIGH view of the state makes 1.7e-3 / sqrt(2) or less, rounding outputs to bf16 1.7e-3, and both together less than
// 3e-3; fp32 outputs of FULL and EXACT keep within 2e-6 (docs/KERNELS.md: twice the plain update's and 1e-6).
inline void require_near(const errors &outputs, const errors &states, bool bf16) {
  require(outputs.n > 0 && outputs.worst <= 1, "an output is further from fp64 than its bound");
  require(outputs.relative() < (bf16 ? 3e-3 : 2e-6), "outputs are further from fp64 than roundings make them");
  require(states.n > 0 && states.worst <= 1, "a state differs from the plain update's");
}

}  // namespace engine
