// FlashInfer's `checkpointing_ssu` (its form with a ring, `ring_start`) over libreplayssm: their names, shapes and order of arguments.
// SPDX-License-Identifier: MIT OR Apache-2.0
//
// There the caller keeps positions: it hands ring_start and prev_num_accepted_tokens to every call, mirrors the kernel's decision to
// fold, and advances both. Here they lie with the states and one commit moves them.
//
// Every function returns the library's status and sentence; INVALID_ARGUMENT or UNSUPPORTED with a sentence of its own where a shape or
// stride is wrong, and nothing is done then. Tensors and index arrays lie in the context's memory (device pointers on CUDA), are the
// caller's, and stay as they are until `advance` has run.
#pragma once

#include "../common.h"

namespace adapters::flashinfer {

// The rows of a model step. One object serves every layer and `advance`.
struct Rows {
  std::int64_t batch = 0;  // rows, padding included
  std::int64_t T = 0;      // tokens of every row; with cu_seqlens: token rows of the packed tensors
  // int32 or int64 [batch]: the state of each row.
  Tensor state_batch_indices;
  // Rows of this state are padding; negative ones are in any case.
  std::int32_t pad_slot_id = -1;
  // int32 [batch + 1], contiguous, or absent.
  Tensor cu_seqlens;
  // With cu_seqlens: no row is longer.
  std::int32_t max_seqlen = 0;
};

// Slots that fold when FlashInfer's kernel does: when the tokens since the checkpoint and those of the step are more than
// ring_buffer_len - T_max. state_cache_size: states. ring_buffer_len: rows of x_cache, more than T_max, the longest step.
replayssm_slots_desc slots_desc(std::int32_t state_cache_size, std::int32_t ring_buffer_len, std::int32_t T_max);

// In place of zeroing ring_start and prev_num_accepted_tokens: requests begin in slots (host int32 [n], up to 256), with positions [n]
// tokens in states that replayssm_import brings next (null: empty). seeds: uint64 [n], where a 16-bit state is rounded stochastically:
// their rand_seed, per request; null: made from the slot's number.
// Threads: any, on disjoint slots. Capture: never.
Status start(const replayssm_slots* slots, const std::int32_t* state_indices, std::int32_t n, const std::int64_t* positions,
             const std::uint64_t* seeds, const replayssm_exec* exec);

// One layer of a model step. x, z, out: [batch, T, nheads, dim], x and z of the pool's io, out of its out, the last axis contiguous.
// With cu_seqlens these and those below are packed, [1, T, ..], T being the token rows of all.
// dt: [batch, T, nheads, dim], broadcast from [batch, T, nheads]. A: [nheads, dim, dstate], broadcast from [nheads].
// B, C: [batch, T, ngroups, dstate]. D: [nheads, dim]. dt_bias: [nheads, dim], broadcast. D, z, dt_bias may be absent.
// Padded rows get zeros. Nothing moves until `advance`; a step may be run again.
// Threads: any, at the same time on disjoint states. Capture: enqueues.
Status checkpointing_ssu(const Layer& state, const Mamba2Shape& shape, const Tensor& x, const Tensor& dt, const Tensor& A,
                         const Tensor& B, const Tensor& C, const Tensor& out, const Tensor& D, const Tensor& z, const Tensor& dt_bias,
                         bool dt_softplus, const Rows& rows, bool enable_pdl, replayssm_stream stream);

// Once a model step, after sampling: what the caller did to ring_start and prev_num_accepted_tokens. num_accepted: int32 [batch], tokens
// of each row that stay, the sampled one included, or absent: all.
// Threads: any, at the same time on disjoint states. Capture: enqueues.
Status advance(const replayssm_slots* slots, const Rows& rows, const Tensor& num_accepted, const replayssm_exec* exec);

}  // namespace adapters::flashinfer
