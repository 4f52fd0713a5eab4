// The recurrent layers of a model in llama.cpp by libreplayssm: what llama_cpp.patch calls, by way of replayssm_ggml.hpp. On the CPU.
// SPDX-License-Identifier: MIT OR Apache-2.0
//
//   replayssm_llama::recurrent layers(shape, n_rs_seq);
//   llama_hook = &layers;                               before llama_init_from_model
//
// The program decodes and calls llama_memory_seq_rm as ever. llama.cpp still has its cells, and moves the windows of convolutions among
// them; states stay where they are, sequence s in slot s. A ubatch is committed when the next call comes: until then, its tokens may all be
// in it or none. Where decoding has failed, remove the sequences of the batch.
#pragma once

#include <memory>
#include <vector>

#include "llama_hook.h"
#include "replayssm_ggml.hpp"

namespace replayssm_llama {

// Of one context, whose recurrent layers have one shape.
class recurrent : public llama_recurrent_hook {
 public:
  recurrent(const replayssm_ggml::mamba2_shape &shape, int32_t n_rs_seq) : mamba2_(shape), delta_(), is_delta_(false), n_rs_seq_(n_rs_seq) {}
  recurrent(const replayssm_ggml::delta_shape &shape, int32_t n_rs_seq) : mamba2_(), delta_(shape), is_delta_(true), n_rs_seq_(n_rs_seq) {}

  void create(const std::vector<ggml_tensor *> &states) override {
    std::vector<ggml_tensor *> own;
    for (ggml_tensor *t : states) {
      index_.push_back(t != nullptr ? static_cast<int32_t>(own.size()) : -1);
      if (t != nullptr) own.push_back(t);
    }
    GGML_ASSERT(!own.empty() && memory_ == nullptr);
    replayssm_ggml::memory_options options;
    options.n_cells = static_cast<int32_t>(own[0]->ne[1]);
    options.n_rs_seq = n_rs_seq_;
    memory_ = std::make_unique<replayssm_ggml::memory>(options);
    if (is_delta_) {
      layers_ = std::make_unique<replayssm_ggml::layers>(*memory_, delta_, own);
    } else {
      layers_ = std::make_unique<replayssm_ggml::layers>(*memory_, mamba2_, own);
    }
    // Which sequences a ubatch has, for all graphs.
    context_.reset(ggml_init({ggml_tensor_overhead() + ggml_row_size(GGML_TYPE_I32, options.n_cells) + 256, nullptr, true}));
    slots_ = ggml_new_tensor_1d(context_.get(), GGML_TYPE_I32, options.n_cells);
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), ggml_backend_cpu_buffer_type()));
    GGML_ASSERT(buffer_ != nullptr);
  }

  void begin(int32_t n_seqs, int32_t n_tokens, const int32_t *const *seq_ids, const int32_t *pos) override {
    commit();
    n_tokens_ = n_tokens;
    for (int32_t i = 0; i < n_seqs; i++) {
      batch_.push_back(seq_ids[i * n_tokens][0]);
      if (pos[i * n_tokens] == 0) memory_->clear(batch_.back());
    }
    ggml_backend_tensor_set(slots_, batch_.data(), 0, batch_.size() * sizeof(int32_t));
  }

  bool remove_tail(int32_t seq, int32_t n) override {
    commit();
    return memory_->remove_tail(seq, n);
  }

  void copy(int32_t from, int32_t to) override {
    commit();
    memory_->slots().copy(replayssm::host_list(&from, 1), replayssm::host_list(&to, 1));
  }

  ggml_tensor *ssm_scan(ggml_context *ctx, int32_t layer, ggml_tensor *x, ggml_tensor *dt, ggml_tensor *A, ggml_tensor *B,
                        ggml_tensor *C) override {
    return layers_->ssm_scan(ctx, index_[static_cast<size_t>(layer)], x, dt, A, B, C, slots(ctx, x->ne[3]));
  }

  ggml_tensor *gated_delta_net(ggml_context *ctx, int32_t layer, ggml_tensor *q, ggml_tensor *k, ggml_tensor *v, ggml_tensor *g,
                               ggml_tensor *beta) override {
    return layers_->gated_delta_net(ctx, index_[static_cast<size_t>(layer)], q, k, v, g, beta, slots(ctx, v->ne[3]));
  }

  // Bytes of states and rings of all sequences and layers.
  size_t bytes() const {
    size_t bytes = 0;
    for (const replayssm_component &part : layers_->pool().components()) {
      bytes += static_cast<size_t>(part.slot_stride_bytes) * static_cast<size_t>(memory_->options().n_cells) * layers();
    }
    return bytes;
  }
  const replayssm_ggml::memory &memory() const { return *memory_; }

 private:
  size_t layers() const {
    size_t n = 0;
    for (const int32_t index : index_) n += index >= 0 ? 1 : 0;
    return n;
  }

  // The last ubatch is a part of its sequences.
  void commit() {
    if (!batch_.empty()) memory_->commit(batch_.data(), static_cast<int32_t>(batch_.size()), n_tokens_);
    batch_.clear();
  }

  ggml_tensor *slots(ggml_context *ctx, int64_t n_seqs) const { return ggml_view_1d(ctx, slots_, n_seqs, 0); }

  template <class T, void (*destroy)(T *)>
  struct deleter {
    void operator()(T *p) const { destroy(p); }
  };

  replayssm_ggml::mamba2_shape mamba2_;
  replayssm_ggml::delta_shape delta_;
  bool is_delta_;
  int32_t n_rs_seq_;
  std::unique_ptr<ggml_context, deleter<ggml_context, ggml_free>> context_;
  std::unique_ptr<ggml_backend_buffer, deleter<ggml_backend_buffer, ggml_backend_buffer_free>> buffer_;
  ggml_tensor *slots_ = nullptr;
  std::vector<int32_t> index_;  // of a layer of the model among the recurrent ones
  std::unique_ptr<replayssm_ggml::memory> memory_;
  std::unique_ptr<replayssm_ggml::layers> layers_;
  std::vector<int32_t> batch_;  // sequences of the ubatch that is not committed
  int32_t n_tokens_ = 0;
};

}  // namespace replayssm_llama
