// The model on the GPU: its weights in device memory, the dense layers as kernels of kernels.cu, the recurrent layers in the library's
// CUDA backend. Everything a step needs to know (bytes, positions, ids, counts) is device data, so that a step can be captured once.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <array>
#include <vector>

#include "../model.h"
#include "device.h"
#include "params.h"

namespace demo {
namespace cuda {

struct DeviceMatrix {
  DeviceMatrix(const Device& device, const Matrix& matrix);

  Buffer<float> panels;
  int in, out, padded;
};

struct DeviceMamba {
  Buffer<float> norm, A, D, dt_bias, gate_norm, conv_bias;
  Buffer<std::uint16_t> conv_weight;
  DeviceMatrix in_proj, out_proj;
};

struct DeviceDelta {
  Buffer<float> norm, A_log, dt_bias, gate_norm;
  Buffer<std::uint16_t> conv_weight;
  DeviceMatrix in_proj, decay_proj, out_proj;
};

struct DeviceAttention {
  Buffer<float> norm;
  DeviceMatrix qkv_proj, out_proj;
};

// weights.h on the device.
struct DeviceWeights {
  DeviceWeights(const Device& device, const Weights& weights);

  const Weights& host;
  Buffer<float> embedding, norm, draft_state_norm, draft_byte_norm, draft_up_bias, draft_out_norm;
  DeviceMatrix unembedding, draft_up, draft_down;
  std::vector<DeviceMamba> mamba;
  std::vector<DeviceDelta> gdn, kda;
  std::vector<DeviceAttention> attention;
};

// The rows of a step: texts and what is known of them. All arrays lie on the device.
struct Rows {
  Rows(const Device& device, int n_rows, int capacity, int max_tokens, int d_model);

  const int n_rows, capacity, max_tokens;  // capacity: bytes of a text; max_tokens: of a batch
  Buffer<std::uint8_t> text, choice;
  Buffer<std::int32_t> length, end, slots, counts, token_row, token_position, last;
  Buffer<std::uint32_t> generation;
  Buffer<unsigned long long> seed, accepted_n;
  Buffer<float> margin, margins, kept;  // kept: the hidden state behind the last byte that was run
};

class GpuModel {
 public:
  // max_tokens: of all rows of a batch.
  GpuModel(const Device& device, const DeviceWeights& weights, const Setup& setup, int n_rows, int capacity, int max_tokens);

  const DeviceWeights& weights() const { return weights_; }
  const Rows& rows() const { return rows_; }
  const replayssm::Slots& slots() const { return slots_; }
  replayssm::Slots& slots() { return slots_; }
  const replayssm_exec& exec() const { return exec_; }

  // Enqueues: all layers over the batch's tokens, to hidden() and logits() of each of them. `tokens` of every row, or 0: a batch of
  // prompts, whose tokens' rows and positions are given.
  void forward(const replayssm_batch& batch, int n_tokens, int tokens);
  // Enqueues: the draft head's drafts of every row, behind the known bytes.
  void draft(bool disturbed);
  // Enqueues: draws from the logits of `tokens` tokens of every row.
  void sample(int tokens);
  // Enqueues: what is accepted of the draws, and the texts that follow. `prompts`: behind last_logits.
  void verify(int tokens, bool prompts = false);
  // Enqueues: logits behind each row's last token alone (of prompts), as sample(1) wants them.
  void last_logits();

  // Enqueues: the end of a step of rows of equal length; `counts`: only what was accepted stays.
  void commit(const replayssm_batch& batch, bool counts);
  // From here on, the library's calls are left out: to time the rest.
  void leave_library_out(bool leave) { library_ = !leave; }

  // The attention cache of a row's tokens first .. end - 1, out of the device's memory and into it: [attention layer][keys, values]
  // [token][attn_width].
  std::vector<float> read_cache(int row, std::int64_t first, std::int64_t end) const;
  void write_cache(int row, std::int64_t first, std::int64_t end, const std::vector<float>& cache) const;

  // As Model's.
  void corrupt_newest_record(std::int32_t slot, std::int64_t position, Family family);
  void check_faults() const;

 private:
  struct Pools {
    replayssm::Layers states, windows;
  };

  Pools pools(Family family);
  float* cached(std::size_t layer, bool values, int row, std::int64_t token) const;
  void mamba(const replayssm_batch& batch, const DeviceMamba& w, std::int32_t layer, int n);
  void delta(const replayssm_batch& batch, const DeviceDelta& w, Family family, std::int32_t layer, int n);
  void attention(const DeviceAttention& w, std::size_t layer, int n);
  template <class Args>
  void call(const replayssm::Layers& pool, std::int32_t layer, const replayssm_batch& batch, const Args& args);
  void convolve(const replayssm_batch& batch, Family family, std::int32_t layer, const std::uint16_t* packed, int channels,
                int stride, const Buffer<std::uint16_t>& weight, const Buffer<float>* bias);
  LinearArgs linear(const DeviceMatrix& matrix, const float* x, int x_stride, float* y, int y_stride, int n) const;
  void launch(const LinearArgs& args) const;
  // proj_ = matrix rms(h_, norm), the outputs from `first` on rounded to packed_ too
  void project(const Buffer<float>& norm, const DeviceMatrix& matrix, int n, int first, int n_rounded);
  // h_ += matrix y_, or matrix rms(y_, norm)
  void add_projected(const DeviceMatrix& matrix, int n, const Buffer<float>* norm);

  const Device& device_;
  const DeviceWeights& weights_;
  const Setup setup_;
  const int ring_rows_;
  replayssm::Context context_;
  replayssm::Slots slots_;
  std::array<Pools, N_FAMILIES> pools_;
  replayssm_exec exec_;
  Rows rows_;
  bool library_ = true;

  // Activations [n_tokens, ..] and the attention's cache [layer, row, position, width].
  Buffer<float> h_, proj_, decay_, y_, hidden_, logits_, keys_, values_, draft_u_, draft_up_;
  Buffer<std::uint16_t> packed_;
};

}  // namespace cuda
}  // namespace demo
