// What the programs of this folder share: a toy hybrid model, random numbers, and checks. Everything an engine would
// have of its own; nothing here wraps the library.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <replayssm.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace engine {

inline void require(bool condition, const char *what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

// An engine's way to deal with a status: print the library's sentence and stop.
inline void must(replayssm_status status) {
  if (status != REPLAYSSM_OK) require(false, replayssm_last_error_message());
}

struct random_numbers {
  uint64_t state;
  uint64_t next() {  // splitmix64
    uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
  int below(int n) { return static_cast<int>(next() % static_cast<uint64_t>(n)); }
  bool one_in(int n) { return below(n) == 0; }
  float between(float low, float high) { return low + (high - low) * static_cast<float>(next() >> 40) * 0x1p-24f; }
};

inline uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline void put(float &to, float value) { to = value; }
inline void put(uint16_t &to, float value) { to = to_bf16(value); }

constexpr replayssm_dtype dtype_of(const float *) { return REPLAYSSM_DTYPE_F32; }
constexpr replayssm_dtype dtype_of(const uint16_t *) { return REPLAYSSM_DTYPE_BF16; }

// Strides in elements: from row to row of the batch, from token to token, from head (or group) to head.
template <class T>
replayssm_tensor view(T *data, int64_t row, int64_t token, int64_t head) {
  return {data, row, token, head, dtype_of(data), 0};
}

// A parameter of one element per head, or one row per channel.
inline replayssm_tensor parameter(const std::vector<float> &values, int64_t stride = 1) {
  return {const_cast<float *>(values.data()), 0, 0, stride, REPLAYSSM_DTYPE_F32, 0};
}

inline replayssm_ids ids(const int32_t *data, int64_t stride = 0) { return {data, stride, REPLAYSSM_DTYPE_I32, 0}; }
inline replayssm_ids ids(const int64_t *data, int64_t stride = 0) { return {data, stride, REPLAYSSM_DTYPE_I64, 0}; }

// One Mamba-2 layer and the convolution in front of it.
struct layer_weights {
  std::vector<float> A, dt_bias, D, conv_weight, conv_bias;
};

struct model_shape {
  int heads, dim, state, groups, width, layers;
  int inner() const { return heads * dim; }
  int bc() const { return groups * state; }
  int channels() const { return inner() + 2 * bc(); }
  int projected() const { return channels() + heads + inner(); }  // x, B, C, dt, z of a token
  int64_t state_size() const { return static_cast<int64_t>(inner()) * state; }
  int64_t window_size() const { return static_cast<int64_t>(channels()) * (width - 1); }
};

// A "model" whose in-projection is a hash: the inputs of a layer depend on the token alone, so that a rejected draft and the
// token that replaces it differ, and any run over the same tokens sees the same inputs.
struct model {
  model_shape shape;
  std::vector<layer_weights> layers;

  explicit model(model_shape s) : shape(s), layers(static_cast<size_t>(s.layers)) {
    random_numbers r{42};
    for (layer_weights &w : layers) {
      for (int h = 0; h < s.heads; h++) {
        w.A.push_back(-r.between(0.5f, 8.0f));
        w.dt_bias.push_back(r.between(-4.0f, -1.0f));
        w.D.push_back(r.between(-1.0f, 1.0f));
      }
      for (int c = 0; c < s.channels(); c++) {
        for (int i = 0; i < s.width; i++) w.conv_weight.push_back(r.between(-0.7f, 0.7f));
        w.conv_bias.push_back(r.between(-0.1f, 0.1f));
      }
    }
  }

  // The projected row of a token: shape.projected() values.
  template <class T>
  void project(int layer, int token, T *row) const {
    random_numbers r{static_cast<uint64_t>(token) * 1000003 + static_cast<uint64_t>(layer)};
    for (int i = 0; i < shape.projected(); i++) put(row[i], r.between(-2.0f, 2.0f));
  }

  replayssm_pool_desc mamba_pool(replayssm_dtype io, replayssm_format format, replayssm_readout readout) const {
    auto d = REPLAYSSM_INIT(replayssm_pool_desc);
    d.family = REPLAYSSM_FAMILY_MAMBA2;
    d.n_layers = shape.layers;
    d.io = io;
    d.format = format;
    d.readout = readout;
    d.nheads = shape.heads;
    d.headdim = shape.dim;
    d.dstate = shape.state;
    d.ngroups = shape.groups;
    return d;
  }

  replayssm_pool_desc conv_pool(replayssm_dtype io) const {
    auto d = REPLAYSSM_INIT(replayssm_pool_desc);
    d.family = REPLAYSSM_FAMILY_CONV1D;
    d.n_layers = shape.layers;
    d.io = io;
    d.channels = shape.channels();
    d.width = shape.width;
    return d;
  }
};

template <class Floats>
bool same_bytes(const Floats &a, const Floats &b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace engine
