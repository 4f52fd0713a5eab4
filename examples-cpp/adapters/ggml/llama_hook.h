// What llama_cpp.patch asks of a program, once it has set the hook: the states of recurrent layers, in the place of llama.cpp's own.
// Included by llama.cpp and by the program.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <ggml.h>

#include <cstdint>
#include <vector>

struct llama_recurrent_hook {
  virtual ~llama_recurrent_hook() = default;

  // A memory was created: the states of each layer, null where a layer has none. The hook has them from now on, a row per sequence, and
  // one of each: whatever n_rs_seq is.
  virtual void create(const std::vector<ggml_tensor *> &states) = 0;

  // A ubatch comes next: n_seqs sequences of n_tokens tokens each, sequence by sequence. seq_ids and pos are those of tokens.
  virtual void begin(int32_t n_seqs, int32_t n_tokens, const int32_t *const *seq_ids, const int32_t *pos) = 0;

  // The last n tokens of a sequence are taken back; false: they cannot be.
  virtual bool remove_tail(int32_t seq, int32_t n) = 0;

  // A sequence goes on from where another is.
  virtual void copy(int32_t from, int32_t to) = 0;

  // While a graph is built: the outputs of a layer for n_seqs sequences, with the arguments of ggml's operators.
  virtual ggml_tensor *ssm_scan(ggml_context *ctx, int32_t layer, ggml_tensor *x, ggml_tensor *dt, ggml_tensor *A, ggml_tensor *B,
                                ggml_tensor *C) = 0;
  virtual ggml_tensor *gated_delta_net(ggml_context *ctx, int32_t layer, ggml_tensor *q, ggml_tensor *k, ggml_tensor *v, ggml_tensor *g,
                                       ggml_tensor *beta) = 0;
};

// Null: llama.cpp is as it was.
inline llama_recurrent_hook *llama_hook = nullptr;
