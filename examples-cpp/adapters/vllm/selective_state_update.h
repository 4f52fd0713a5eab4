// vLLM's and mamba_ssm's `selective_state_update` over libreplayssm: their names, shapes and order of arguments.
// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Every function returns the library's status and sentence; INVALID_ARGUMENT or UNSUPPORTED with a sentence of its own where a shape or
// stride is wrong, and nothing is done then. Tensors and index arrays lie in the context's memory (device pointers on CUDA), are the
// caller's, and stay as they are until the step's commit has run. exec carries the stream; null: the default one.
#pragma once

#include "../common.h"

namespace adapters::vllm {

// The rows of a model step: what the engine's metadata has. One object serves every layer and the commit.
struct Metadata {
  // int32 or int64 [rows] or [rows, columns]: the state block of each row; of several columns, the first.
  Tensor state_batch_indices;
  // int32 [rows + 1], contiguous: row r has tokens cu_seqlens[r] .. cu_seqlens[r + 1] - 1. Absent: one token in each row.
  Tensor cu_seqlens;
  // int32 or int64 [rows]: the request's place in the persistent batch, which becomes its ring. Absent: rings are numbered as blocks.
  Tensor request_indices;
  // With cu_seqlens: no row is longer. 0: the slots handle's max_step_tokens.
  std::int32_t max_seqlen = 0;
  // Token rows of x; without cu_seqlens these are the rows.
  std::int64_t num_tokens = 0;
  // Rows of this block are padding. vLLM: 0, its null block; mamba_ssm's pad_slot_id: -1. Negative blocks are padding in any case.
  std::int64_t null_block_id = 0;
};

// num_blocks: states, the null block included. max_num_seqs: rings, for which rows have request_indices; 0: as many as blocks.
replayssm_slots_desc slots_desc(std::int32_t num_blocks, std::int32_t max_num_seqs, std::int32_t num_speculative_tokens);

// Requests begin in blocks: empty, or, behind a prompt kernel, with positions [n] tokens in states that load_states brings next.
// blocks, requests: host int32 [n], up to 256; requests null: numbered as blocks. positions null: 0.
// Threads: any, on disjoint blocks. Capture: never.
Status start(const replayssm_slots* slots, const std::int32_t* blocks, const std::int32_t* requests, std::int32_t n,
             const std::int64_t* positions, const replayssm_exec* exec);

// Takes the final states of a prompt kernel over, in place of writing them into the cache. states: [n, nheads, dim, dstate] of one
// layer, F32, BF16 or F16, the last axis contiguous; blocks and requests as for start.
// Threads: any, on disjoint blocks. Capture: never.
Status load_states(const Layer& state, const Mamba2Shape& shape, const std::int32_t* blocks, const std::int32_t* requests,
                   std::int32_t n, const Tensor& states, const replayssm_exec* exec);

// One layer of a model step. Without cu_seqlens the first axis of x is the row, else the token.
// x, z, out: [tokens, nheads, dim], x and z of the pool's io, out of its out, the last axis contiguous. dt: [tokens, nheads, dim],
// broadcast from [tokens, nheads], any dtype. A: [nheads, dim, dstate], broadcast from [nheads]. B, C: [tokens, ngroups, dstate].
// D: [nheads, dim], dt_bias: [nheads, dim]. D, z and dt_bias may be absent. Rows of the null block get zeros; what lies behind the last
// row's tokens is neither read nor written. Nothing moves until the commit.
// Threads: any, at the same time on disjoint blocks. Capture: enqueues.
Status selective_state_update(const Layer& state, const Mamba2Shape& shape, const Tensor& x, const Tensor& dt, const Tensor& A,
                              const Tensor& B, const Tensor& C, const Tensor& D, const Tensor& z, const Tensor& dt_bias,
                              bool dt_softplus, const Metadata& metadata, const Tensor& out, const replayssm_exec* exec);

// Once a model step, after sampling. num_accepted_tokens: int32 [rows] of this step, the sampled token included, or absent: all tokens
// of every row. vLLM hands them to the next step's layers; here they end the step that they belong to.
// Threads: any, at the same time on disjoint requests. Capture: enqueues.
Status commit(const replayssm_slots* slots, const Metadata& metadata, const Tensor& num_accepted_tokens, const replayssm_exec* exec);

}  // namespace adapters::vllm
