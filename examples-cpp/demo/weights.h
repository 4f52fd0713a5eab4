// The trained model's weights, as the library and the dense layers want them. train/README.md has the function in formulas.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dense.h"
#include "safetensors.h"

namespace demo {

// Heads of a delta rule: H of queries and keys, HV of values, each of which has a state [V, K].
struct DeltaDims {
  int H, HV, K, V;

  int channels() const { return 2 * H * K + HV * V; }  // of a packed row q, k, v
  int width() const { return HV * V; }
};

struct Config {
  int vocab, d_model, conv_width;
  int d_inner, headdim, nheads, dstate, ngroups, conv_channels;
  DeltaDims gdn, kda;
  int kda_rank;
  int attn_heads, attn_headdim, attn_width, attn_window;
  int draft_hidden, draft_tokens;
  float norm_eps, l2norm_eps;
  std::string layers;  // M: Mamba-2, G: Gated DeltaNet, K: Kimi Delta Attention, A: attention
};

struct MambaWeights {
  std::vector<float> norm, A, D, dt_bias, gate_norm, conv_bias;
  std::vector<std::uint16_t> conv_weight;  // bf16 [channels, width]: the library takes parameters in their own dtype
  Matrix in_proj, out_proj;                // in_proj's outputs are z, xBC, dt
};

struct DeltaWeights {
  std::vector<float> norm, A_log, dt_bias, gate_norm;  // dt_bias: GDN [HV], KDA [HV, K]
  std::vector<std::uint16_t> conv_weight;              // no bias
  Matrix in_proj, decay_proj, out_proj;                // in_proj's outputs are z, qkv, b, a; KDA: a = decay_proj of the last
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
  std::vector<DeltaWeights> gdn, kda;       // one per G, one per K
  std::vector<AttentionWeights> attention;  // one per A
  std::vector<float> draft_state_norm, draft_byte_norm, draft_up_bias, draft_out_norm;
  Matrix draft_up, draft_down;
  float temperature;
};

// The draft head: from the hidden state s at a byte and the byte after it, s moves on by one and guesses the next byte.
// s [n_rows, d_model] is updated in place; logits [n_rows, vocab].
void draft_step(const Weights& weights, std::size_t n_rows, float* s, const std::uint8_t* bytes, float* logits);

}  // namespace demo
