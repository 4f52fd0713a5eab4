// SPDX-License-Identifier: MIT OR Apache-2.0
#include "weights.h"

#include <algorithm>
#include <stdexcept>

namespace demo {
namespace {

Config read_config(const Safetensors& file) {
  const Json json = Json::parse(file.metadata("config"));
  const auto number = [&](const char* key) {
    const long long value = json.at(key).integer();
    if (value < 1 || value > 1 << 16) throw std::runtime_error(std::string("config: ") + key + " is out of range");
    return static_cast<int>(value);
  };
  Config c{};
  c.vocab = number("vocab");
  c.d_model = number("d_model");
  c.conv_width = number("conv_width");
  c.d_inner = number("d_inner");
  c.headdim = number("headdim");
  c.nheads = number("nheads");
  c.dstate = number("dstate");
  c.ngroups = number("ngroups");
  c.conv_channels = c.d_inner + 2 * c.ngroups * c.dstate;
  c.gdn = {number("gdn_H"), number("gdn_HV"), number("gdn_K"), number("gdn_V")};
  c.kda = {number("kda_H"), number("kda_HV"), number("kda_K"), number("kda_V")};
  c.kda_rank = number("kda_rank");
  c.attn_heads = number("attn_heads");
  c.attn_headdim = number("attn_headdim");
  c.attn_width = c.attn_heads * c.attn_headdim;
  c.attn_window = number("attn_window");
  c.draft_hidden = number("draft_hidden");
  c.draft_tokens = number("draft_tokens");
  c.norm_eps = static_cast<float>(json.at("norm_eps").number);
  c.l2norm_eps = static_cast<float>(json.at("l2norm_eps").number);
  c.layers = json.at("layers").text();
  bool layers = c.layers.find_first_not_of("MGKA") == std::string::npos;
  for (const char kind : {'M', 'G', 'K'}) layers = layers && c.layers.find(kind) != std::string::npos;
  const bool heads = c.nheads * c.headdim == c.d_inner && c.gdn.HV % c.gdn.H == 0 && c.kda.HV % c.kda.H == 0;
  if (c.vocab != 256 || !layers || !heads || c.attn_headdim % 8 != 0 || c.attn_headdim > 64) {
    throw std::runtime_error("config: this program has 256 bytes, whole heads, and layers M, G, K, all of them, and A");
  }
  return c;
}

}  // namespace

Weights::Weights(const Safetensors& file) : config(read_config(file)) {
  const Config& c = config;
  const auto matrix = [&](const std::string& name, int out, int in) { return Matrix(file.floats(name, {out, in}), out, in); };
  embedding = file.floats("embedding", {c.vocab, c.d_model});
  unembedding = Matrix(embedding, c.vocab, c.d_model);
  norm = file.floats("norm", {c.d_model});
  for (std::size_t i = 0; i < c.layers.size(); ++i) {
    const std::string name = "layers." + std::to_string(i) + ".";
    if (c.layers[i] == 'M') {
      MambaWeights w;
      w.norm = file.floats(name + "norm", {c.d_model});
      w.in_proj = matrix(name + "in_proj", c.d_inner + c.conv_channels + c.nheads, c.d_model);
      w.conv_weight = file.bf16(name + "conv_weight", {c.conv_channels, c.conv_width});
      w.conv_bias = file.floats(name + "conv_bias", {c.conv_channels});
      w.A = file.floats(name + "A", {c.nheads});
      w.D = file.floats(name + "D", {c.nheads});
      w.dt_bias = file.floats(name + "dt_bias", {c.nheads});
      w.gate_norm = file.floats(name + "gate_norm", {c.d_inner});
      w.out_proj = matrix(name + "out_proj", c.d_model, c.d_inner);
      mamba.push_back(std::move(w));
    } else if (c.layers[i] == 'G' || c.layers[i] == 'K') {
      const bool per_channel = c.layers[i] == 'K';
      const DeltaDims& dims = per_channel ? c.kda : c.gdn;
      const int decays = per_channel ? dims.HV * dims.K : dims.HV, raw = per_channel ? c.kda_rank : dims.HV;
      DeltaWeights w;
      w.norm = file.floats(name + "norm", {c.d_model});
      w.in_proj = matrix(name + "in_proj", dims.width() + dims.channels() + dims.HV + raw, c.d_model);
      if (per_channel) w.decay_proj = matrix(name + "decay_proj", decays, c.kda_rank);
      w.conv_weight = file.bf16(name + "conv_weight", {dims.channels(), c.conv_width});
      w.A_log = file.floats(name + "A_log", {dims.HV});
      w.dt_bias = file.floats(name + "dt_bias", {decays});
      w.gate_norm = file.floats(name + "gate_norm", {dims.V});
      w.out_proj = matrix(name + "out_proj", c.d_model, dims.width());
      (per_channel ? kda : gdn).push_back(std::move(w));
    } else {
      AttentionWeights w;
      w.norm = file.floats(name + "norm", {c.d_model});
      w.qkv_proj = matrix(name + "qkv_proj", 3 * c.attn_width, c.d_model);
      w.out_proj = matrix(name + "out_proj", c.d_model, c.attn_width);
      attention.push_back(std::move(w));
    }
  }
  draft_state_norm = file.floats("draft.state_norm", {c.d_model});
  draft_byte_norm = file.floats("draft.byte_norm", {c.d_model});
  draft_up = matrix("draft.up", c.draft_hidden, 2 * c.d_model);
  draft_up_bias = file.floats("draft.up_bias", {c.draft_hidden});
  draft_down = matrix("draft.down", c.d_model, c.draft_hidden);
  draft_out_norm = file.floats("draft.out_norm", {c.d_model});
  temperature = std::stof(file.metadata("temperature"));
  if (!(temperature > 0)) throw std::runtime_error("temperature: a positive number was expected");
}

void draft_step(const Weights& weights, std::size_t n_rows, float* s, const std::uint8_t* bytes, float* logits) {
  const auto d = static_cast<std::size_t>(weights.config.d_model);
  const auto hidden = static_cast<std::size_t>(weights.draft_up.padded());
  const auto out = static_cast<std::size_t>(weights.draft_down.padded());
  std::vector<float> u(n_rows * 2 * d), up(n_rows * hidden), down(n_rows * out), normed(n_rows * d);
  for (std::size_t r = 0; r < n_rows; ++r) {
    rms_norm(s + r * d, weights.draft_state_norm, weights.config.norm_eps, &u[r * 2 * d]);
    rms_norm(&weights.embedding[bytes[r] * d], weights.draft_byte_norm, weights.config.norm_eps, &u[r * 2 * d + d]);
  }
  weights.draft_up.multiply(u.data(), 2 * d, n_rows, up.data(), hidden);
  for (std::size_t r = 0; r < n_rows; ++r) {
    for (std::size_t i = 0; i < weights.draft_up_bias.size(); ++i) up[r * hidden + i] += weights.draft_up_bias[i];
    silu(&up[r * hidden], weights.draft_up_bias.size());
  }
  weights.draft_down.multiply(up.data(), hidden, n_rows, down.data(), out);
  for (std::size_t r = 0; r < n_rows; ++r) {
    for (std::size_t i = 0; i < d; ++i) s[r * d + i] += down[r * out + i];
    rms_norm(s + r * d, weights.draft_out_norm, weights.config.norm_eps, &normed[r * d]);
  }
  weights.unembedding.multiply(normed.data(), d, n_rows, logits, static_cast<std::size_t>(weights.config.vocab));
}

}  // namespace demo
