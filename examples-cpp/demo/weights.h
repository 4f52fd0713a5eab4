// The trained model's weights, as the library and the dense layers want them. train/README.md has the function in formulas.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dense.h"
#include "safetensors.h"

namespace demo {

struct Config {
  int vocab, d_model, d_inner, headdim, nheads, dstate, ngroups, conv_width, conv_channels;
  int attn_heads, attn_headdim, attn_width, attn_window;
  int draft_hidden, draft_tokens;
  float norm_eps;
  std::string layers;  // M: Mamba-2, A: attention
};

struct MambaWeights {
  std::vector<float> norm, A, D, dt_bias, gate_norm, conv_bias;
  std::vector<std::uint16_t> conv_weight;  // bf16 [channels, width]: the library takes parameters in their own dtype
  Matrix in_proj, out_proj;                // in_proj's outputs are z, xBC, dt
};

struct AttentionWeights {
  std::vector<float> norm;
  Matrix qkv_proj, out_proj;
};

struct Weights {
  explicit Weights(const Safetensors& file);

  Config config;
  std::vector<float> embedding;  // [vocab, d_model]
  Matrix unembedding;            // the same, multiplying
  std::vector<float> norm;
  std::vector<MambaWeights> mamba;          // one per M of config.layers
  std::vector<AttentionWeights> attention;  // one per A
  std::vector<float> draft_state_norm, draft_byte_norm, draft_up_bias, draft_out_norm;
  Matrix draft_up, draft_down;
  float temperature;
};

// The draft head: from the hidden state s at a byte and the byte after it, s moves on by one and guesses the next byte.
// s [n_rows, d_model] is updated in place; logits [n_rows, vocab].
void draft_step(const Weights& weights, std::size_t n_rows, float* s, const std::uint8_t* bytes, float* logits);

}  // namespace demo
