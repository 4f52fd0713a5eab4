// SPDX-License-Identifier: MIT OR Apache-2.0
#include "model.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace demo {
namespace {

replayssm_context_desc context_desc(const Setup& setup) {
  auto desc = replayssm::init<replayssm_context_desc>();
  desc.backend = REPLAYSSM_BACKEND_CPU;
  desc.n_threads = setup.n_threads;
  return desc;
}

int window_of(const Setup& setup) { return std::max(16, std::min(256, 8 * setup.max_step_tokens)); }

replayssm_slots_desc slots_desc(const Setup& setup) {
  auto desc = replayssm::init<replayssm_slots_desc>();
  desc.n_slots = setup.n_slots;
  desc.window = window_of(setup);
  desc.max_step_tokens = setup.max_step_tokens;
  return desc;
}

replayssm_pool_desc states_desc(const Weights& weights, const Setup& setup) {
  auto desc = replayssm::init<replayssm_pool_desc>();
  desc.family = REPLAYSSM_MAMBA2;
  desc.n_layers = static_cast<std::int32_t>(weights.mamba.size());
  desc.io = REPLAYSSM_BF16;
  desc.out = REPLAYSSM_F32;
  desc.format = setup.format;
  desc.readout = setup.readout;
  desc.nheads = weights.config.nheads;
  desc.headdim = weights.config.headdim;
  desc.dstate = weights.config.dstate;
  desc.ngroups = weights.config.ngroups;
  return desc;
}

replayssm_pool_desc windows_desc(const Weights& weights) {
  auto desc = replayssm::init<replayssm_pool_desc>();
  desc.family = REPLAYSSM_CONV1D;
  desc.n_layers = static_cast<std::int32_t>(weights.mamba.size());
  desc.io = REPLAYSSM_BF16;
  desc.channels = weights.config.conv_channels;
  desc.width = weights.config.conv_width;
  return desc;
}

std::size_t size(int n) { return static_cast<std::size_t>(n); }

}  // namespace

Model::Model(const Weights& weights, const Setup& setup)
    : weights_(weights),
      ring_rows_(window_of(setup) + setup.max_step_tokens),
      // Rejected tokens write rows ahead of the position: with as many rows to spare they hit none that is still seen.
      kv_rows_(size(weights.config.attn_window + setup.max_step_tokens)),
      context_(context_desc(setup)),
      slots_(context_, slots_desc(setup)),
      states_(slots_, states_desc(weights, setup)),
      windows_(slots_, windows_desc(weights)),
      batch_(replayssm::init<replayssm_batch>()),
      scores_(size(weights.config.attn_window)) {}

void Model::start(Sequence& sequence) {
  slots_.acquire(1, &sequence.slot, &sequence.generation);
  auto args = replayssm::init<replayssm_reset_args>();
  args.generation = &sequence.generation;
  slots_.reset(replayssm::host_list(&sequence.slot, 1), &args);
  sequence.position = 0;
  const std::size_t n = weights_.attention.size() * kv_rows_ * size(weights_.config.attn_width);
  sequence.keys.assign(n, 0.0f);
  sequence.values.assign(n, 0.0f);
}

void Model::finish(Sequence& sequence) {
  replayssm_cursor cursor{};
  slots_.read_cursors(replayssm::host_list(&sequence.slot, 1), &cursor);
  if (cursor.position != sequence.position) throw std::runtime_error("the library's position is not the program's");
  slots_.release(1, &sequence.slot);
  sequence.slot = -1;
}

Saved Model::save(const Sequence& sequence) const {
  const Config& c = weights_.config;
  Saved saved;
  saved.position = sequence.position;
  saved.states.resize(weights_.mamba.size() * size(c.nheads * c.headdim * c.dstate));
  saved.windows.resize(weights_.mamba.size() * size(c.conv_channels * (c.conv_width - 1)));
  const replayssm_list list = replayssm::host_list(&sequence.slot, 1);
  states_.export_state(list, nullptr, replayssm::dense_state(saved.states.data(), REPLAYSSM_F32));
  windows_.export_state(list, nullptr, replayssm::dense_state(saved.windows.data(), REPLAYSSM_BF16));
  return saved;
}

void Model::restore(Sequence& sequence, const Saved& saved) {
  slots_.acquire(1, &sequence.slot, &sequence.generation);
  const replayssm_list list = replayssm::host_list(&sequence.slot, 1);
  auto args = replayssm::init<replayssm_reset_args>();
  args.position = &saved.position;
  args.generation = &sequence.generation;
  slots_.reset(list, &args);
  // No position: the one that the reset has just set.
  states_.import_state(list, nullptr, replayssm::dense_state(saved.states.data(), REPLAYSSM_F32));
  windows_.import_state(list, nullptr, replayssm::dense_state(saved.windows.data(), REPLAYSSM_BF16));
  sequence.position = saved.position;
}

const std::vector<float>& Model::forward(const std::vector<Tokens>& rows, Update update) {
  const Config& c = weights_.config;
  const std::size_t d = size(c.d_model);
  sequences_.clear();
  row_slots_.clear();
  generations_.clear();
  cu_seqlens_.assign(1, 0);
  for (const Tokens& row : rows) {
    sequences_.push_back(row.sequence);
    row_slots_.push_back(row.sequence->slot);
    generations_.push_back(row.sequence->generation);
    cu_seqlens_.push_back(cu_seqlens_.back() + row.n);
  }
  const std::size_t n_tokens = size(cu_seqlens_.back());
  batch_.flags = update == Update::Plain ? REPLAYSSM_BATCH_EXTEND : 0u;
  batch_.n_rows = static_cast<std::int32_t>(rows.size());
  batch_.n_tokens = cu_seqlens_.back();
  batch_.slots = replayssm::ids(row_slots_.data());
  batch_.cu_seqlens = cu_seqlens_.data();
  batch_.generation = generations_.data();

  h_.resize(n_tokens * d);
  normed_.resize(n_tokens * d);
  hidden_.resize(n_tokens * d);
  float* h = h_.data();
  for (const Tokens& row : rows) {
    for (int t = 0; t < row.n; ++t, h += d) std::copy_n(&weights_.embedding[row.bytes[t] * d], d, h);
  }
  std::size_t m = 0, a = 0;
  for (const char kind : c.layers) {
    if (kind == 'M') {
      mamba(m++, n_tokens, update);
    } else {
      attention(a++, rows);
    }
  }
  for (std::size_t t = 0; t < n_tokens; ++t) rms_norm(&h_[t * d], weights_.norm, c.norm_eps, &hidden_[t * d]);
  return hidden_;
}

void Model::mamba(std::size_t layer, std::size_t n_tokens, Update update) {
  const Config& c = weights_.config;
  const MambaWeights& w = weights_.mamba[layer];
  const std::size_t d = size(c.d_model), inner = size(c.d_inner), channels = size(c.conv_channels);
  const std::size_t projected = size(w.in_proj.padded()), out_stride = size(w.out_proj.padded());

  for (std::size_t t = 0; t < n_tokens; ++t) rms_norm(&h_[t * d], w.norm, c.norm_eps, &normed_[t * d]);
  proj_.resize(n_tokens * projected);
  w.in_proj.multiply(normed_.data(), d, n_tokens, proj_.data(), projected);  // z, xBC, dt
  z_.resize(n_tokens * inner);
  xbc_.resize(n_tokens * channels);
  for (std::size_t t = 0; t < n_tokens; ++t) {
    std::transform(&proj_[t * projected], &proj_[t * projected] + inner, &z_[t * inner], float_to_bf16);
    std::transform(&proj_[t * projected] + inner, &proj_[t * projected] + inner + channels, &xbc_[t * channels], float_to_bf16);
  }

  // The convolution, in place on the packed rows.
  const auto row_stride = static_cast<std::int64_t>(channels);
  auto conv = replayssm::init<replayssm_conv1d_args>();
  conv.x = conv.out = replayssm::view(xbc_.data(), REPLAYSSM_BF16, {0, row_stride, row_stride});
  conv.weight = replayssm::view(w.conv_weight.data(), REPLAYSSM_BF16, {0, 0, c.conv_width});
  conv.bias = replayssm::view(w.conv_bias.data(), {0, 0, 1});

  // The state update: x, B and C are views of the packed rows, dt of the projection's, in fp32 and raw.
  auto args = replayssm::init<replayssm_mamba2_args>();
  args.x = replayssm::view(xbc_.data(), REPLAYSSM_BF16, {0, row_stride, c.headdim});
  args.B = replayssm::view(xbc_.data() + inner, REPLAYSSM_BF16, {0, row_stride, c.dstate});
  args.C = replayssm::view(xbc_.data() + inner + c.ngroups * c.dstate, REPLAYSSM_BF16, {0, row_stride, c.dstate});
  args.dt = replayssm::view(proj_.data() + inner + channels, {0, static_cast<std::int64_t>(projected), 1});
  args.A = replayssm::view(w.A.data(), {0, 0, 1});
  args.dt_bias = replayssm::view(w.dt_bias.data(), {0, 0, 1});
  args.D = replayssm::view(w.D.data(), {0, 0, 1});
  args.z = replayssm::view(z_.data(), REPLAYSSM_BF16, {0, c.d_inner, c.headdim});
  y_.resize(n_tokens * inner);
  args.out = replayssm::view(y_.data(), {0, c.d_inner, c.headdim});

  const auto index = static_cast<std::int32_t>(layer);
  if (update == Update::Plain) {
    windows_.extend(index, batch_, conv);
    states_.extend(index, batch_, args);
  } else {
    windows_.step(index, batch_, conv);
    states_.step(index, batch_, args);
  }

  for (std::size_t t = 0; t < n_tokens; ++t) rms_norm(&y_[t * inner], w.gate_norm, c.norm_eps, &y_[t * inner]);
  proj_.resize(n_tokens * out_stride);
  w.out_proj.multiply(y_.data(), inner, n_tokens, proj_.data(), out_stride);
  for (std::size_t t = 0; t < n_tokens; ++t) {
    for (std::size_t i = 0; i < d; ++i) h_[t * d + i] += proj_[t * out_stride + i];
  }
}

void Model::attention(std::size_t layer, const std::vector<Tokens>& rows) {
  const Config& c = weights_.config;
  const AttentionWeights& w = weights_.attention[layer];
  const std::size_t d = size(c.d_model), width = size(c.attn_width), n_tokens = h_.size() / d;
  const std::size_t projected = size(w.qkv_proj.padded()), out_stride = size(w.out_proj.padded());

  for (std::size_t t = 0; t < n_tokens; ++t) rms_norm(&h_[t * d], w.norm, c.norm_eps, &normed_[t * d]);
  proj_.resize(n_tokens * projected);
  w.qkv_proj.multiply(normed_.data(), d, n_tokens, proj_.data(), projected);
  y_.resize(n_tokens * width);
  std::size_t t = 0;
  for (const Tokens& row : rows) {
    float* keys = &row.sequence->keys[layer * kv_rows_ * width];
    float* values = &row.sequence->values[layer * kv_rows_ * width];
    for (std::int64_t p = row.sequence->position; p < row.sequence->position + row.n; ++p, ++t) {
      const float* q = &proj_[t * projected];
      const std::size_t at = static_cast<std::size_t>(p) % kv_rows_ * width;
      std::copy_n(q + width, width, keys + at);
      std::copy_n(q + 2 * width, width, values + at);
      const std::int64_t first = std::max<std::int64_t>(0, p - c.attn_window + 1);
      for (int head = 0; head < c.attn_heads; ++head) {
        const std::size_t from = size(head * c.attn_headdim);
        attend(q + from, keys + from, values + from, width, kv_rows_, first, p, c.attn_headdim, scores_.data(),
               &y_[t * width + from]);
      }
    }
  }
  proj_.resize(n_tokens * out_stride);
  w.out_proj.multiply(y_.data(), width, n_tokens, proj_.data(), out_stride);
  for (t = 0; t < n_tokens; ++t) {
    for (std::size_t i = 0; i < d; ++i) h_[t * d + i] += proj_[t * out_stride + i];
  }
}

void Model::commit(const std::vector<std::int32_t>* accepted) {
  auto args = replayssm::init<replayssm_commit_args>();
  if (accepted != nullptr) args.counts = accepted->data();
  slots_.commit(batch_, &args);
  for (std::size_t r = 0; r < sequences_.size(); ++r) {
    sequences_[r]->position += accepted != nullptr ? (*accepted)[r] : cu_seqlens_[r + 1] - cu_seqlens_[r];
  }
}

std::vector<float> Model::logits(const float* hidden, std::size_t n) const {
  const std::size_t vocab = size(weights_.config.vocab);
  std::vector<float> out(n * vocab);
  weights_.unembedding.multiply(hidden, size(weights_.config.d_model), n, out.data(), vocab);
  return out;
}

void Model::check_faults() const {
  const replayssm_report report = slots_.report();
  if (report.bits != 0) {
    throw std::runtime_error("the library reports faults " + std::to_string(report.bits) + ", the first in row " +
                             std::to_string(report.first_row));
  }
}

void Model::corrupt_newest_record(const Sequence& sequence) {
  const Config& c = weights_.config;
  for (const replayssm_component& part : states_.components()) {
    if (part.kind != REPLAYSSM_COMPONENT_X) continue;
    auto* ring = reinterpret_cast<std::uint16_t*>(static_cast<char*>(part.base) + sequence.slot * part.slot_stride_bytes);
    const auto row = size(static_cast<int>((sequence.position - 1) % ring_rows_));  // token p lies in row p mod rows
    for (int head = 0; head < c.nheads; ++head) {                                  // [nheads, rows, headdim]
      std::fill_n(ring + (size(head * ring_rows_) + row) * size(c.headdim), c.headdim, float_to_bf16(1000.0f));
    }
  }
}

}  // namespace demo
