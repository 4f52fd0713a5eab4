// SPDX-License-Identifier: MIT OR Apache-2.0
#include "model.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "fp64.h"

namespace demo {
namespace {

replayssm_context_desc context_desc(const Setup& setup) {
  auto desc = replayssm::init<replayssm_context_desc>();
  desc.backend = REPLAYSSM_BACKEND_CPU;
  desc.n_threads = setup.n_threads;
  return desc;
}

std::size_t size(int n) { return static_cast<std::size_t>(n); }

std::size_t state_elements(const Config& c, Family family) {
  if (family == MAMBA2) return size(c.nheads * c.headdim * c.dstate);
  const DeltaDims& dims = family == GDN ? c.gdn : c.kda;
  return size(dims.HV * dims.V * dims.K);
}

}  // namespace

int window_of(const Setup& setup) {
  return setup.window > 0 ? setup.window : std::max(16, std::min(256, 8 * setup.max_step_tokens));
}

std::int64_t cached_tokens(const Config& config, std::int64_t position) {
  return std::min<std::int64_t>(position, config.attn_window - 1);
}

replayssm_slots_desc slots_desc(const Setup& setup) {
  auto desc = replayssm::init<replayssm_slots_desc>();
  desc.n_slots = setup.n_slots;
  desc.window = window_of(setup);
  desc.max_step_tokens = setup.max_step_tokens;
  return desc;
}

replayssm_pool_desc states_desc(const Weights& weights, const Setup& setup, Family family) {
  const Config& c = weights.config;
  auto desc = replayssm::init<replayssm_pool_desc>();
  desc.io = REPLAYSSM_DTYPE_BF16;
  desc.out = REPLAYSSM_DTYPE_F32;
  desc.format = setup.format;
  desc.readout = setup.readout;
  if (family == MAMBA2) {
    desc.family = REPLAYSSM_FAMILY_MAMBA2;
    desc.n_layers = static_cast<std::int32_t>(weights.mamba.size());
    desc.nheads = c.nheads;
    desc.headdim = c.headdim;
    desc.dstate = c.dstate;
    desc.ngroups = c.ngroups;
  } else {
    const DeltaDims& dims = family == GDN ? c.gdn : c.kda;
    desc.family = family == GDN ? REPLAYSSM_FAMILY_GDN : REPLAYSSM_FAMILY_KDA;
    desc.n_layers = static_cast<std::int32_t>((family == GDN ? weights.gdn : weights.kda).size());
    desc.H = dims.H;
    desc.HV = dims.HV;
    desc.K = dims.K;
    desc.V = dims.V;
  }
  return desc;
}

replayssm_pool_desc windows_desc(const Weights& weights, Family family, const replayssm_pool_desc& states) {
  const Config& c = weights.config;
  auto desc = replayssm::init<replayssm_pool_desc>();
  desc.family = REPLAYSSM_FAMILY_CONV1D;
  desc.n_layers = states.n_layers;
  desc.io = REPLAYSSM_DTYPE_BF16;
  desc.channels = family == MAMBA2 ? c.conv_channels : (family == GDN ? c.gdn : c.kda).channels();
  desc.width = c.conv_width;
  return desc;
}

Model::Model(const Weights& weights, const Setup& setup)
    : weights_(weights),
      setup_(setup),
      ring_rows_(window_of(setup) + setup.max_step_tokens),
      // Rejected tokens write rows ahead of the position: with as many rows to spare they hit none that is still seen.
      kv_rows_(size(weights.config.attn_window + setup.max_step_tokens)),
      context_(context_desc(setup)),
      slots_(context_, slots_desc(setup)),
      pools_{pools(MAMBA2), pools(GDN), pools(KDA)},
      batch_(replayssm::init<replayssm_batch>()),
      scores_(size(weights.config.attn_window)) {}

Model::Pools Model::pools(Family family) {
  const replayssm_pool_desc states = states_desc(weights_, setup_, family);
  const replayssm_pool_desc windows = windows_desc(weights_, family, states);
  const std::size_t n_layers = size(states.n_layers);
  return {{slots_, states},
          {slots_, windows},
          n_layers * state_elements(weights_.config, family),
          n_layers * size(windows.channels * (windows.width - 1))};
}

void Model::start(Sequence& sequence) {
  slots_.acquire(1, &sequence.slot, &sequence.generation);
  auto args = replayssm::init<replayssm_reset_args>();
  args.generation = &sequence.generation;
  slots_.reset(replayssm::host_list(&sequence.slot, 1), &args);
  sequence.position = 0;
  clear_cache(sequence);
  if (setup_.fp64_states) {
    std::size_t elements = 0;
    for (const Pools& pools : pools_) elements += pools.state_elements;
    sequence.fp64.assign(elements, 0.0);
  }
}

void Model::clear_cache(Sequence& sequence) const {
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
  Saved saved;
  saved.position = sequence.position;
  const replayssm_list list = replayssm::host_list(&sequence.slot, 1);
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    saved.states[i].resize(pools_[i].state_elements);
    saved.windows[i].resize(pools_[i].window_elements);
    pools_[i].states.export_state(list, nullptr, replayssm::dense_state(saved.states[i].data(), REPLAYSSM_DTYPE_F32));
    pools_[i].windows.export_state(list, nullptr, replayssm::dense_state(saved.windows[i].data(), REPLAYSSM_DTYPE_BF16));
  }
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
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    pools_[i].states.import_state(list, nullptr, replayssm::dense_state(saved.states[i].data(), REPLAYSSM_DTYPE_F32));
    pools_[i].windows.import_state(list, nullptr, replayssm::dense_state(saved.windows[i].data(), REPLAYSSM_DTYPE_BF16));
  }
  sequence.position = saved.position;
}

void Model::fork(const Sequence& source, const std::vector<Sequence*>& targets) {
  const auto n = static_cast<std::int32_t>(targets.size());
  const std::vector<std::int32_t> from(targets.size(), source.slot);  // one source for all
  std::vector<std::int32_t> to(targets.size());
  std::vector<std::uint32_t> generations(targets.size());
  slots_.acquire(n, to.data(), generations.data());
  auto args = replayssm::init<replayssm_copy_args>();
  args.kind = REPLAYSSM_COPY_FORK;
  args.generation = generations.data();
  slots_.copy(replayssm::host_list(from.data(), n), replayssm::host_list(to.data(), n), &args);
  for (std::size_t i = 0; i < targets.size(); ++i) {
    *targets[i] = source;  // the attention cache with it
    targets[i]->slot = to[i];
    targets[i]->generation = generations[i];
  }
}

template <class Row>
void Model::each_cached(const Sequence& sequence, Row row) const {
  const std::int64_t end = sequence.position, first = end - cached_tokens(weights_.config, end);
  const std::size_t width = size(weights_.config.attn_width);
  std::size_t n = 0;
  for (std::size_t layer = 0; layer < weights_.attention.size(); ++layer) {
    for (const bool values : {false, true}) {
      for (std::int64_t p = first; p < end; ++p) {
        row(values, (layer * kv_rows_ + static_cast<std::size_t>(p) % kv_rows_) * width, n++ * width);
      }
    }
  }
}

Blob Model::save_blob(const Sequence& sequence, replayssm_save_kind kind) const {
  const std::size_t width = size(weights_.config.attn_width);
  Blob blob;
  blob.position = sequence.position;
  blob.bytes.resize(slots_.save_bytes(kind));
  slots_.save(replayssm::host_list(&sequence.slot, 1), kind, blob.bytes.data(), blob.bytes.size());
  each_cached(sequence, [&](bool values, std::size_t at, std::size_t) {
    const float* from = &(values ? sequence.values : sequence.keys)[at];
    blob.cache.insert(blob.cache.end(), from, from + width);
  });
  return blob;
}

void Model::restore_blob(Sequence& sequence, const Blob& blob) {
  slots_.acquire(1, &sequence.slot, &sequence.generation);
  auto args = replayssm::init<replayssm_restore_args>();
  args.generation = &sequence.generation;
  slots_.restore(replayssm::host_list(&sequence.slot, 1), blob.bytes.data(), blob.bytes.size(), &args);
  sequence.position = blob.position;
  clear_cache(sequence);
  const std::size_t width = size(weights_.config.attn_width);
  const std::size_t n = 2 * weights_.attention.size() * static_cast<std::size_t>(cached_tokens(weights_.config, blob.position));
  if (blob.cache.size() != n * width) throw std::runtime_error("the attention cache is another model's");
  each_cached(sequence, [&](bool values, std::size_t at, std::size_t from) {
    std::copy_n(&blob.cache[from], width, &(values ? sequence.values : sequence.keys)[at]);
  });
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
  std::size_t m = 0, g = 0, k = 0, a = 0;
  fp64_at_ = 0;
  for (const char kind : c.layers) {
    switch (kind) {
      case 'M': mamba(m++, n_tokens); break;
      case 'G': delta(GDN, g++, n_tokens); break;
      case 'K': delta(KDA, k++, n_tokens); break;
      default: attention(a++, rows);
    }
  }
  for (std::size_t t = 0; t < n_tokens; ++t) rms_norm(&h_[t * d], weights_.norm, c.norm_eps, &hidden_[t * d]);
  return hidden_;
}

void Model::project(const std::vector<float>& norm, const Matrix& matrix, std::size_t n_tokens) {
  const std::size_t d = size(weights_.config.d_model), stride = size(matrix.padded());
  for (std::size_t t = 0; t < n_tokens; ++t) rms_norm(&h_[t * d], norm, weights_.config.norm_eps, &normed_[t * d]);
  proj_.resize(n_tokens * stride);
  matrix.multiply(normed_.data(), d, n_tokens, proj_.data(), stride);
}

void Model::add_projected(const Matrix& matrix, std::size_t n_tokens) {
  const std::size_t d = size(weights_.config.d_model), stride = size(matrix.padded());
  proj_.resize(n_tokens * stride);
  matrix.multiply(y_.data(), size(matrix.in()), n_tokens, proj_.data(), stride);
  for (std::size_t t = 0; t < n_tokens; ++t) {
    for (std::size_t i = 0; i < d; ++i) h_[t * d + i] += proj_[t * stride + i];
  }
}

template <class Args>
void Model::call(const replayssm::Layers& pool, std::size_t layer, const Args& args) {
  const auto index = static_cast<std::int32_t>(layer);
  if (batch_.flags & REPLAYSSM_BATCH_EXTEND) {
    pool.extend(index, batch_, args);
  } else {
    pool.step(index, batch_, args);
  }
}

void Model::convolve(Family family, std::size_t layer, std::size_t n_tokens, int first, int channels,
                     const std::vector<std::uint16_t>& weight, const std::vector<float>* bias) {
  const std::size_t n = size(channels), stride = proj_.size() / n_tokens;
  packed_.resize(n_tokens * n);
  for (std::size_t t = 0; t < n_tokens; ++t) {
    const float* row = &proj_[t * stride + size(first)];
    std::transform(row, row + n, &packed_[t * n], float_to_bf16);
  }
  // In place on the packed rows.
  auto conv = replayssm::init<replayssm_conv1d_args>();
  conv.x = conv.out = replayssm::view(packed_.data(), REPLAYSSM_DTYPE_BF16, {0, channels, channels});
  conv.weight = replayssm::view(weight.data(), REPLAYSSM_DTYPE_BF16, {0, 0, weights_.config.conv_width});
  if (bias != nullptr) conv.bias = replayssm::view(bias->data(), {0, 0, 1});
  call(pools_[family].windows, layer, conv);
}

template <class Step>
void Model::in_fp64(std::size_t elements, Step update) {
  std::size_t t = 0;
  for (std::size_t r = 0; r < sequences_.size(); ++r) {
    for (std::int32_t i = cu_seqlens_[r]; i < cu_seqlens_[r + 1]; ++i) update(t++, &sequences_[r]->fp64[fp64_at_]);
  }
  fp64_at_ += elements;
}

void Model::mamba(std::size_t layer, std::size_t n_tokens) {
  const Config& c = weights_.config;
  const MambaWeights& w = weights_.mamba[layer];
  const std::size_t inner = size(c.d_inner), channels = size(c.conv_channels), projected = size(w.in_proj.padded());

  project(w.norm, w.in_proj, n_tokens);  // z, xBC, dt
  z_.resize(n_tokens * inner);
  for (std::size_t t = 0; t < n_tokens; ++t) {
    std::transform(&proj_[t * projected], &proj_[t * projected] + inner, &z_[t * inner], float_to_bf16);
  }
  convolve(MAMBA2, layer, n_tokens, c.d_inner, c.conv_channels, w.conv_weight, &w.conv_bias);
  y_.resize(n_tokens * inner);
  const float* dt = proj_.data() + inner + channels;

  if (setup_.fp64_states) {
    in_fp64(state_elements(c, MAMBA2), [&](std::size_t t, double* S) {
      mamba2_fp64(c, w, &packed_[t * channels], dt + t * projected, &z_[t * inner], S, &y_[t * inner]);
    });
  } else {
    // x, B and C are views of the packed rows, dt of the projection's, in fp32 and raw.
    const auto row_stride = static_cast<std::int64_t>(channels);
    auto args = replayssm::init<replayssm_mamba2_args>();
    args.x = replayssm::view(packed_.data(), REPLAYSSM_DTYPE_BF16, {0, row_stride, c.headdim});
    args.B = replayssm::view(packed_.data() + inner, REPLAYSSM_DTYPE_BF16, {0, row_stride, c.dstate});
    args.C = replayssm::view(packed_.data() + inner + c.ngroups * c.dstate, REPLAYSSM_DTYPE_BF16, {0, row_stride, c.dstate});
    args.dt = replayssm::view(dt, {0, static_cast<std::int64_t>(projected), 1});
    args.A = replayssm::view(w.A.data(), {0, 0, 1});
    args.dt_bias = replayssm::view(w.dt_bias.data(), {0, 0, 1});
    args.D = replayssm::view(w.D.data(), {0, 0, 1});
    args.z = replayssm::view(z_.data(), REPLAYSSM_DTYPE_BF16, {0, c.d_inner, c.headdim});
    args.out = replayssm::view(y_.data(), {0, c.d_inner, c.headdim});
    call(pools_[MAMBA2].states, layer, args);
  }
  for (std::size_t t = 0; t < n_tokens; ++t) rms_norm(&y_[t * inner], w.gate_norm, c.norm_eps, &y_[t * inner]);
  add_projected(w.out_proj, n_tokens);
}

void Model::delta(Family family, std::size_t layer, std::size_t n_tokens) {
  const Config& c = weights_.config;
  const bool per_channel = family == KDA;
  const DeltaDims& dims = per_channel ? c.kda : c.gdn;
  const DeltaWeights& w = (per_channel ? weights_.kda : weights_.gdn)[layer];
  const std::size_t width = size(dims.width()), channels = size(dims.channels()), projected = size(w.in_proj.padded());

  project(w.norm, w.in_proj, n_tokens);  // z, qkv, b, a
  convolve(family, layer, n_tokens, dims.width(), dims.channels(), w.conv_weight, nullptr);
  const float* b = proj_.data() + width + channels;
  const float* a = b + dims.HV;
  std::size_t a_stride = projected;
  if (per_channel) {
    a_stride = size(w.decay_proj.padded());
    decay_.resize(n_tokens * a_stride);
    w.decay_proj.multiply(a, projected, n_tokens, decay_.data(), a_stride);
    a = decay_.data();
  }
  y_.resize(n_tokens * width);

  if (setup_.fp64_states) {
    in_fp64(state_elements(c, family), [&](std::size_t t, double* S) {
      delta_fp64(dims, per_channel, static_cast<double>(c.l2norm_eps), w, &packed_[t * channels], b + t * projected,
                 a + t * a_stride, S, &y_[t * width]);
    });
  } else {
    // q, k and v are views of the packed rows; a and b are raw and in fp32.
    const auto row_stride = static_cast<std::int64_t>(channels);
    auto args = replayssm::init<replayssm_delta_args>();
    args.q = replayssm::view(packed_.data(), REPLAYSSM_DTYPE_BF16, {0, row_stride, dims.K});
    args.k = replayssm::view(packed_.data() + dims.H * dims.K, REPLAYSSM_DTYPE_BF16, {0, row_stride, dims.K});
    args.v = replayssm::view(packed_.data() + 2 * dims.H * dims.K, REPLAYSSM_DTYPE_BF16, {0, row_stride, dims.V});
    args.g = replayssm::view(a, {0, static_cast<std::int64_t>(a_stride), per_channel ? dims.K : 1});
    args.beta = replayssm::view(b, {0, static_cast<std::int64_t>(projected), 1});
    args.A_log = replayssm::view(w.A_log.data(), {0, 0, 1});
    args.dt_bias = replayssm::view(w.dt_bias.data(), {0, 0, per_channel ? dims.K : 1});
    args.l2norm_eps = c.l2norm_eps;
    args.out = replayssm::view(y_.data(), {0, dims.width(), dims.V});
    call(pools_[family].states, layer, args);
  }

  // The norm of each head, then the gate.
  for (std::size_t t = 0; t < n_tokens; ++t) {
    const float* z = &proj_[t * projected];
    float* y = &y_[t * width];
    for (int head = 0; head < dims.HV; ++head) rms_norm(y + head * dims.V, w.gate_norm, c.norm_eps, y + head * dims.V);
    for (std::size_t i = 0; i < width; ++i) y[i] *= per_channel ? sigmoid(z[i]) : z[i] * sigmoid(z[i]);
  }
  add_projected(w.out_proj, n_tokens);
}

void Model::attention(std::size_t layer, const std::vector<Tokens>& rows) {
  const Config& c = weights_.config;
  const AttentionWeights& w = weights_.attention[layer];
  const std::size_t width = size(c.attn_width), n_tokens = h_.size() / size(c.d_model);
  const std::size_t projected = size(w.qkv_proj.padded());

  project(w.norm, w.qkv_proj, n_tokens);
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
  add_projected(w.out_proj, n_tokens);
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

void Model::corrupt_newest_record(const Sequence& sequence, Family family) {
  const Config& c = weights_.config;
  const auto kind = family == MAMBA2 ? REPLAYSSM_COMPONENT_X : REPLAYSSM_COMPONENT_V;  // [heads, rows, dim]
  const int heads = family == MAMBA2 ? c.nheads : (family == GDN ? c.gdn : c.kda).HV;
  const int dim = family == MAMBA2 ? c.headdim : (family == GDN ? c.gdn : c.kda).V;
  for (const replayssm_component& part : pools_[family].states.components()) {
    if (part.kind != kind) continue;
    auto* ring = reinterpret_cast<std::uint16_t*>(static_cast<char*>(part.base) + sequence.slot * part.slot_stride_bytes);
    const auto row = size(static_cast<int>((sequence.position - 1) % ring_rows_));  // token p lies in row p mod rows
    for (int head = 0; head < heads; ++head) {
      std::fill_n(ring + (size(head * ring_rows_) + row) * size(dim), dim, float_to_bf16(1000.0f));
    }
  }
}

}  // namespace demo
