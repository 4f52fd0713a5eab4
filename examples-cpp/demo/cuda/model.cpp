// SPDX-License-Identifier: MIT OR Apache-2.0
#include "model.h"

#include <algorithm>

namespace demo {
namespace cuda {
namespace {

constexpr unsigned THREADS = 128;

std::size_t size(int n) { return static_cast<std::size_t>(n); }
unsigned count(int n) { return static_cast<unsigned>(n); }

replayssm::Context make_context() {
  auto desc = replayssm::init<replayssm_context_desc>();
  desc.backend = REPLAYSSM_BACKEND_CUDA;
  desc.device = -1;  // this thread's current context: the Device's
  return replayssm::Context(desc);
}

// The widest row of each kind of activation.
struct Widths {
  int proj = 0, decay = 1, y = 0, packed = 0;
};

Widths widths_of(const DeviceWeights& weights) {
  const Config& c = weights.host.config;
  Widths w;
  for (const DeviceMamba& m : weights.mamba) w.proj = std::max(w.proj, m.in_proj.padded);
  for (const auto* deltas : {&weights.gdn, &weights.kda}) {
    for (const DeviceDelta& d : *deltas) {
      w.proj = std::max(w.proj, d.in_proj.padded);
      w.decay = std::max(w.decay, d.decay_proj.padded);
    }
  }
  for (const DeviceAttention& a : weights.attention) w.proj = std::max(w.proj, a.qkv_proj.padded);
  w.y = std::max({c.d_inner, c.gdn.width(), c.kda.width(), c.attn_width});
  w.packed = std::max({c.d_inner + c.conv_channels, c.gdn.channels(), c.kda.channels()});
  return w;
}

}  // namespace

DeviceMatrix::DeviceMatrix(const Device& device, const Matrix& matrix)
    : panels(device, matrix.panels()), in(matrix.in()), out(matrix.out()), padded(matrix.padded()) {}

DeviceWeights::DeviceWeights(const Device& device, const Weights& weights)
    : host(weights),
      embedding(device, weights.embedding),
      norm(device, weights.norm),
      draft_state_norm(device, weights.draft_state_norm),
      draft_byte_norm(device, weights.draft_byte_norm),
      draft_up_bias(device, weights.draft_up_bias),
      draft_out_norm(device, weights.draft_out_norm),
      unembedding(device, weights.unembedding),
      draft_up(device, weights.draft_up),
      draft_down(device, weights.draft_down) {
  const auto floats = [&](const std::vector<float>& values) { return Buffer<float>(device, values); };
  for (const MambaWeights& w : weights.mamba) {
    mamba.push_back({floats(w.norm), floats(w.A), floats(w.D), floats(w.dt_bias), floats(w.gate_norm), floats(w.conv_bias),
                     Buffer<std::uint16_t>(device, w.conv_weight), DeviceMatrix(device, w.in_proj),
                     DeviceMatrix(device, w.out_proj)});
  }
  for (const bool per_channel : {false, true}) {
    for (const DeltaWeights& w : per_channel ? weights.kda : weights.gdn) {
      (per_channel ? kda : gdn)
          .push_back({floats(w.norm), floats(w.A_log), floats(w.dt_bias), floats(w.gate_norm),
                      Buffer<std::uint16_t>(device, w.conv_weight), DeviceMatrix(device, w.in_proj),
                      DeviceMatrix(device, w.decay_proj), DeviceMatrix(device, w.out_proj)});
    }
  }
  for (const AttentionWeights& w : weights.attention) {
    attention.push_back({floats(w.norm), DeviceMatrix(device, w.qkv_proj), DeviceMatrix(device, w.out_proj)});
  }
}

Rows::Rows(const Device& device, int rows, int bytes, int tokens, int d_model)
    : n_rows(rows),
      capacity(bytes),
      max_tokens(tokens),
      text(device, size(rows) * size(bytes)),
      choice(device, size(tokens)),
      length(device, size(rows)),
      end(device, size(rows)),
      slots(device, size(rows)),
      counts(device, size(rows)),
      token_row(device, size(tokens)),
      token_position(device, size(tokens)),
      last(device, size(rows)),
      generation(device, size(rows)),
      seed(device, size(rows)),
      accepted_n(device, 1 + 3),
      margin(device, size(tokens)),
      margins(device, size(rows) * size(bytes)),
      kept(device, size(rows) * size(d_model)) {}

GpuModel::GpuModel(const Device& device, const DeviceWeights& weights, const Setup& setup, int n_rows, int capacity,
                   int max_tokens)
    : device_(device),
      weights_(weights),
      setup_(setup),
      ring_rows_(window_of(setup) + setup.max_step_tokens),
      context_(make_context()),
      slots_(context_, slots_desc(setup)),
      pools_{pools(MAMBA2), pools(GDN), pools(KDA)},
      exec_(replayssm::init<replayssm_exec>()),
      rows_(device, n_rows, capacity, max_tokens, weights.host.config.d_model) {
  const Config& c = weights.host.config;
  const Widths w = widths_of(weights);
  const auto floats = [&](int n, int width) { return Buffer<float>(device, size(n) * size(width)); };
  exec_.stream = device.stream();
  h_ = floats(max_tokens, c.d_model);
  hidden_ = floats(max_tokens, c.d_model);
  proj_ = floats(max_tokens, w.proj);
  decay_ = floats(max_tokens, w.decay);
  y_ = floats(max_tokens, w.y);
  logits_ = floats(max_tokens, c.vocab);
  packed_ = Buffer<std::uint16_t>(device, size(max_tokens) * size(w.packed));
  const int cached = static_cast<int>(weights.attention.size()) * n_rows * capacity;
  keys_ = floats(cached, c.attn_width);
  values_ = floats(cached, c.attn_width);
  draft_u_ = floats(n_rows, 2 * c.d_model);
  draft_up_ = floats(n_rows, weights.draft_up.padded);
  device.wait();
}

GpuModel::Pools GpuModel::pools(Family family) {
  const replayssm_pool_desc states = states_desc(weights_.host, setup_, family);
  return {{slots_, states}, {slots_, windows_desc(weights_.host, family, states)}};
}

LinearArgs GpuModel::linear(const DeviceMatrix& matrix, const float* x, int x_stride, float* y, int y_stride, int n) const {
  LinearArgs args{};
  args.x = x;
  args.panels = matrix.panels.get();
  args.y = y;
  args.x_stride = x_stride;
  args.y_stride = y_stride;
  args.n_tokens = n;
  args.in = matrix.in;
  args.out = matrix.out;
  args.eps = weights_.host.config.norm_eps;
  return args;
}

void GpuModel::launch(const LinearArgs& args) const {
  constexpr int outputs = PANEL_WIDTH * PANELS_PER_BLOCK;
  const std::pair<unsigned, unsigned> grid = {count((args.out + outputs - 1) / outputs),
                                              count((args.n_tokens + TOKENS_PER_BLOCK - 1) / TOKENS_PER_BLOCK)};
  device_.launch("linear", grid, outputs, size(args.in * TOKENS_PER_BLOCK) * sizeof(float), args);
}

void GpuModel::project(const Buffer<float>& norm, const DeviceMatrix& matrix, int n, int first, int n_rounded) {
  LinearArgs args = linear(matrix, h_.get(), weights_.host.config.d_model, proj_.get(), matrix.padded, n);
  args.norm = norm.get();
  args.rounded = packed_.get();
  args.first_rounded = first;
  args.n_rounded = n_rounded;
  launch(args);
}

void GpuModel::add_projected(const DeviceMatrix& matrix, int n, const Buffer<float>* norm) {
  const int d = weights_.host.config.d_model;
  LinearArgs args = linear(matrix, y_.get(), matrix.in, h_.get(), d, n);
  args.norm = norm == nullptr ? nullptr : norm->get();
  args.add = 1;
  launch(args);
}

void GpuModel::forward(const replayssm_batch& batch, int n_tokens, int tokens) {
  const Config& c = weights_.host.config;
  EmbedArgs embed{};
  embed.embedding = weights_.embedding.get();
  embed.text = rows_.text.get();
  embed.length = rows_.length.get();
  embed.end = rows_.end.get();
  embed.slots = rows_.slots.get();
  embed.token_row = rows_.token_row.get();
  embed.token_position = rows_.token_position.get();
  embed.h = h_.get();
  embed.tokens = tokens;
  embed.d = c.d_model;
  embed.capacity = rows_.capacity;
  device_.launch("embed", {count(n_tokens), 1}, THREADS, 0, embed);
  std::size_t m = 0, g = 0, k = 0, a = 0;
  const auto index = [](std::size_t layer) { return static_cast<std::int32_t>(layer); };
  for (const char kind : c.layers) {
    switch (kind) {
      case 'M': mamba(batch, weights_.mamba[m], index(m), n_tokens), ++m; break;
      case 'G': delta(batch, weights_.gdn[g], GDN, index(g), n_tokens), ++g; break;
      case 'K': delta(batch, weights_.kda[k], KDA, index(k), n_tokens), ++k; break;
      default: attention(weights_.attention[a], a, n_tokens), ++a;
    }
  }
  NormArgs norm{};
  norm.x = h_.get();
  norm.weight = weights_.norm.get();
  norm.y = hidden_.get();
  norm.d = c.d_model;
  norm.eps = c.norm_eps;
  device_.launch("rms_norm", {count(n_tokens), 1}, THREADS, size(c.d_model) * sizeof(float), norm);
  if (tokens > 0) launch(linear(weights_.unembedding, hidden_.get(), c.d_model, logits_.get(), c.vocab, n_tokens));
}

template <class Args>
void GpuModel::call(const replayssm::Layers& pool, std::int32_t layer, const replayssm_batch& batch, const Args& args) {
  if (!library_) return;
  if (batch.flags & REPLAYSSM_BATCH_EXTEND) {
    pool.extend(layer, batch, args, &exec_);
  } else {
    pool.step(layer, batch, args, &exec_);
  }
}

// Views with axes row, token, head: rows of equal length lie `tokens` apart, those of prompts have no stride.
namespace {

replayssm::Strides strides(const replayssm_batch& batch, int token, int head) {
  return {static_cast<std::int64_t>(batch.tokens) * token, token, head};
}

}  // namespace

void GpuModel::convolve(const replayssm_batch& batch, Family family, std::int32_t layer, const std::uint16_t* packed,
                        int channels, int stride, const Buffer<std::uint16_t>& weight, const Buffer<float>* bias) {
  auto args = replayssm::init<replayssm_conv1d_args>();
  args.x = args.out = replayssm::view(packed, REPLAYSSM_DTYPE_BF16, strides(batch, stride, channels));
  args.weight = replayssm::view(weight.get(), REPLAYSSM_DTYPE_BF16, {0, 0, weights_.host.config.conv_width});
  if (bias != nullptr) args.bias = replayssm::view(bias->get(), {0, 0, 1});
  call(pools_[family].windows, layer, batch, args);
}

void GpuModel::mamba(const replayssm_batch& batch, const DeviceMamba& w, std::int32_t layer, int n) {
  const Config& c = weights_.host.config;
  const int packed = c.d_inner + c.conv_channels, projected = w.in_proj.padded;
  project(w.norm, w.in_proj, n, 0, packed);  // z, xBC, dt; the first two rounded
  const std::uint16_t* z = packed_.get();
  const std::uint16_t* xbc = z + c.d_inner;
  convolve(batch, MAMBA2, layer, xbc, c.conv_channels, packed, w.conv_weight, &w.conv_bias);

  auto args = replayssm::init<replayssm_mamba2_args>();
  args.x = replayssm::view(xbc, REPLAYSSM_DTYPE_BF16, strides(batch, packed, c.headdim));
  args.B = replayssm::view(xbc + c.d_inner, REPLAYSSM_DTYPE_BF16, strides(batch, packed, c.dstate));
  args.C = replayssm::view(xbc + c.d_inner + c.ngroups * c.dstate, REPLAYSSM_DTYPE_BF16, strides(batch, packed, c.dstate));
  args.dt = replayssm::view(proj_.get() + packed, strides(batch, projected, 1));
  args.A = replayssm::view(w.A.get(), {0, 0, 1});
  args.dt_bias = replayssm::view(w.dt_bias.get(), {0, 0, 1});
  args.D = replayssm::view(w.D.get(), {0, 0, 1});
  args.z = replayssm::view(z, REPLAYSSM_DTYPE_BF16, strides(batch, packed, c.headdim));
  args.out = replayssm::view(y_.get(), strides(batch, c.d_inner, c.headdim));
  call(pools_[MAMBA2].states, layer, batch, args);
  add_projected(w.out_proj, n, &w.gate_norm);
}

void GpuModel::delta(const replayssm_batch& batch, const DeviceDelta& w, Family family, std::int32_t layer, int n) {
  const Config& c = weights_.host.config;
  const bool per_channel = family == KDA;
  const DeltaDims& dims = per_channel ? c.kda : c.gdn;
  const int channels = dims.channels(), width = dims.width(), projected = w.in_proj.padded;
  project(w.norm, w.in_proj, n, width, channels);  // z, qkv, b, a; qkv rounded
  const std::uint16_t* qkv = packed_.get();
  convolve(batch, family, layer, qkv, channels, channels, w.conv_weight, nullptr);
  const float* b = proj_.get() + width + channels;
  const float* a = b + dims.HV;
  int a_stride = projected;
  if (per_channel) {
    a_stride = w.decay_proj.padded;
    launch(linear(w.decay_proj, a, projected, decay_.get(), a_stride, n));
    a = decay_.get();
  }

  auto args = replayssm::init<replayssm_delta_args>();
  args.q = replayssm::view(qkv, REPLAYSSM_DTYPE_BF16, strides(batch, channels, dims.K));
  args.k = replayssm::view(qkv + dims.H * dims.K, REPLAYSSM_DTYPE_BF16, strides(batch, channels, dims.K));
  args.v = replayssm::view(qkv + 2 * dims.H * dims.K, REPLAYSSM_DTYPE_BF16, strides(batch, channels, dims.V));
  args.g = replayssm::view(a, strides(batch, a_stride, per_channel ? dims.K : 1));
  args.beta = replayssm::view(b, strides(batch, projected, 1));
  args.A_log = replayssm::view(w.A_log.get(), {0, 0, 1});
  args.dt_bias = replayssm::view(w.dt_bias.get(), {0, 0, per_channel ? dims.K : 1});
  args.l2norm_eps = c.l2norm_eps;
  args.out = replayssm::view(y_.get(), strides(batch, width, dims.V));
  call(pools_[family].states, layer, batch, args);

  GateArgs gate{};
  gate.y = y_.get();
  gate.z = proj_.get();
  gate.weight = w.gate_norm.get();
  gate.z_stride = projected;
  gate.heads = dims.HV;
  gate.dim = dims.V;
  gate.sigmoid_alone = per_channel ? 1 : 0;
  gate.eps = c.norm_eps;
  device_.launch("gate", {count(n), count(dims.HV)}, count(dims.V), size(dims.V) * sizeof(float), gate);
  add_projected(w.out_proj, n, nullptr);
}

void GpuModel::attention(const DeviceAttention& w, std::size_t layer, int n) {
  const Config& c = weights_.host.config;
  project(w.norm, w.qkv_proj, n, 0, 0);
  const std::size_t from = layer * size(rows_.n_rows) * size(rows_.capacity) * size(c.attn_width);
  AttentionArgs args{};
  args.qkv = proj_.get();
  args.keys = keys_.get() + from;
  args.values = values_.get() + from;
  args.token_row = rows_.token_row.get();
  args.token_position = rows_.token_position.get();
  args.out = y_.get();
  args.stride = w.qkv_proj.padded;
  args.width = c.attn_width;
  args.heads = c.attn_heads;
  args.dim = c.attn_headdim;
  args.window = c.attn_window;
  args.capacity = rows_.capacity;
  device_.launch("append_keys", {count(n), 1}, THREADS, 0, args);
  const std::size_t shared = size(c.attn_window + c.attn_headdim) * sizeof(float);
  device_.launch("attend", {count(n), count(c.attn_heads)}, 2 * THREADS, shared, args);
  add_projected(w.out_proj, n, nullptr);
}

void GpuModel::draft(bool disturbed) {
  const Config& c = weights_.host.config;
  const int n = rows_.n_rows, d = c.d_model;
  for (int i = 1; i < setup_.max_step_tokens; ++i) {
    DraftArgs draft{};
    draft.s = rows_.kept.get();
    draft.embedding = weights_.embedding.get();
    draft.state_norm = weights_.draft_state_norm.get();
    draft.byte_norm = weights_.draft_byte_norm.get();
    draft.text = rows_.text.get();
    draft.length = rows_.length.get();
    draft.u = draft_u_.get();
    draft.i = i;
    draft.d = d;
    draft.capacity = rows_.capacity;
    draft.eps = c.norm_eps;
    device_.launch("draft_input", {count(n), 2}, THREADS, size(d) * sizeof(float), draft);
    LinearArgs up = linear(weights_.draft_up, draft_u_.get(), 2 * d, draft_up_.get(), weights_.draft_up.padded, n);
    up.bias = weights_.draft_up_bias.get();
    launch(up);
    LinearArgs down = linear(weights_.draft_down, draft_up_.get(), weights_.draft_up.padded, rows_.kept.get(), d, n);
    down.add = 1;
    launch(down);
    LinearArgs out = linear(weights_.unembedding, rows_.kept.get(), d, logits_.get(), c.vocab, n);
    out.norm = weights_.draft_out_norm.get();
    launch(out);
    SampleArgs sample{};
    sample.logits = logits_.get();
    sample.seed = rows_.seed.get();
    sample.length = rows_.length.get();
    sample.text = rows_.text.get();
    sample.temperature = weights_.host.temperature;
    sample.tokens = 1;
    sample.capacity = rows_.capacity;
    sample.draft = i;
    sample.random = disturbed ? 1 : 0;
    device_.launch("sample", {count(n), 1}, BYTES, 0, sample);
  }
}

void GpuModel::sample(int tokens) {
  SampleArgs args{};
  args.logits = logits_.get();
  args.seed = rows_.seed.get();
  args.length = rows_.length.get();
  args.text = rows_.text.get();
  args.choice = rows_.choice.get();
  args.margin = rows_.margin.get();
  args.temperature = weights_.host.temperature;
  args.tokens = tokens;
  args.capacity = rows_.capacity;
  device_.launch("sample", {count(rows_.n_rows * tokens), 1}, BYTES, 0, args);
}

void GpuModel::verify(int tokens, bool prompts) {
  VerifyArgs args{};
  args.choice = rows_.choice.get();
  args.margin = rows_.margin.get();
  args.hidden = prompts ? rows_.kept.get() : hidden_.get();
  args.text = rows_.text.get();
  args.margins = rows_.margins.get();
  args.kept = rows_.kept.get();
  args.length = rows_.length.get();
  args.end = rows_.end.get();
  args.slots = rows_.slots.get();
  args.counts = rows_.counts.get();
  args.accepted_n = rows_.accepted_n.get();
  args.tokens = tokens;
  args.d = weights_.host.config.d_model;
  args.capacity = rows_.capacity;
  device_.launch("verify", {count(rows_.n_rows), 1}, THREADS, 0, args);
}

void GpuModel::last_logits() {
  const Config& c = weights_.host.config;
  LastArgs last{};
  last.hidden = hidden_.get();
  last.last = rows_.last.get();
  last.out = rows_.kept.get();
  last.d = c.d_model;
  device_.launch("last_tokens", {count(rows_.n_rows), 1}, THREADS, 0, last);
  launch(linear(weights_.unembedding, rows_.kept.get(), c.d_model, logits_.get(), c.vocab, rows_.n_rows));
}

void GpuModel::commit(const replayssm_batch& batch, bool counts) {
  if (!library_) return;
  auto args = replayssm::init<replayssm_commit_args>();
  if (counts) args.counts = rows_.counts.get();
  slots_.commit(batch, &args, &exec_);
}

float* GpuModel::cached(std::size_t layer, bool values, int row, std::int64_t token) const {
  const std::size_t rows = layer * size(rows_.n_rows) + size(row);
  return (values ? values_ : keys_).get() +
         (rows * size(rows_.capacity) + static_cast<std::size_t>(token)) * size(weights_.host.config.attn_width);
}

std::vector<float> GpuModel::read_cache(int row, std::int64_t first, std::int64_t end) const {
  const std::size_t n = static_cast<std::size_t>(end - first) * size(weights_.host.config.attn_width);
  std::vector<float> cache(2 * weights_.attention.size() * n);
  for (std::size_t i = 0; n > 0 && i * n < cache.size(); ++i) {
    device_.read(&cache[i * n], cached(i / 2, i % 2 == 1, row, first), n * sizeof(float));
  }
  return cache;
}

void GpuModel::write_cache(int row, std::int64_t first, std::int64_t end, const std::vector<float>& cache) const {
  const std::size_t n = static_cast<std::size_t>(end - first) * size(weights_.host.config.attn_width);
  if (cache.size() != 2 * weights_.attention.size() * n) throw std::runtime_error("the attention cache is another model's");
  for (std::size_t i = 0; n > 0 && i * n < cache.size(); ++i) {
    device_.write(cached(i / 2, i % 2 == 1, row, first), &cache[i * n], n * sizeof(float));
  }
}

void GpuModel::corrupt_newest_record(std::int32_t slot, std::int64_t position, Family family) {
  const Config& c = weights_.host.config;
  const auto kind = family == MAMBA2 ? REPLAYSSM_COMPONENT_X : REPLAYSSM_COMPONENT_V;  // [heads, rows, dim]
  const int heads = family == MAMBA2 ? c.nheads : (family == GDN ? c.gdn : c.kda).HV;
  const int dim = family == MAMBA2 ? c.headdim : (family == GDN ? c.gdn : c.kda).V;
  for (const replayssm_component& part : pools_[family].states.components()) {
    if (part.kind != kind) continue;
    auto* ring = reinterpret_cast<std::uint16_t*>(static_cast<char*>(part.base) + slot * part.slot_stride_bytes);
    const int row = static_cast<int>((position - 1) % ring_rows_);
    for (int head = 0; head < heads; ++head) {
      device_.fill16(ring + size(head * ring_rows_ + row) * size(dim), float_to_bf16(1000.0f), size(dim));
    }
  }
}

void GpuModel::check_faults() const {
  const replayssm_report report = slots_.report();
  if (report.bits != 0) {
    throw std::runtime_error("the library reports faults " + std::to_string(report.bits) + " on the GPU, the first in row " +
                             std::to_string(report.first_row));
  }
}

}  // namespace cuda
}  // namespace demo
