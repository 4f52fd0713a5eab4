// TensorRT-LLM's `invokeSelectiveScanUpdate` for Mamba-2 over libreplayssm: their fields, packed rows and state pools.
// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Every function returns the library's status and sentence; INVALID_ARGUMENT with a sentence of its own where a field is wrong, and
// nothing is done then. All pointers are the caller's and lie in the context's memory (device pointers on CUDA), unless it says host;
// they stay as they are until the step's update_mamba_states has run.
#pragma once

#include "../common.h"

namespace adapters::trtllm {

// The fields of their SSMParamsBase that a Mamba-2 update reads, under their names. dim is nheads * headdim.
//
// Rows are packed, [batch * tokens] of each:
//   u_ptr, BC_ptr   the convolution's output, the same pointer: x [dim] | B [ngroups, dstate] | C [ngroups, dstate]
//   z_ptr, delta_ptr   the in-projection, the same pointer: z [dim] | raw x, B, C | dt [nheads], padded to a multiple of 8.
//                      Without z_ptr the row has no z.
//   out_ptr         [dim]
// Inputs are of input_type, their input_t and the pool's io; out_ptr's rows of output_type, the pool's out.
struct Params {
  std::int32_t batch = 0, dim = 0, dstate = 0, nheads = 0, ngroups = 0;
  std::int32_t tokens = 1;  // of every row: 1 + drafts
  replayssm_dtype input_type = REPLAYSSM_DTYPE_BF16, output_type = REPLAYSSM_DTYPE_BF16;
  bool delta_softplus = true;
  const void* A_ptr = nullptr;           // fp32 [nheads]
  const void* BC_ptr = nullptr;
  const void* D_ptr = nullptr;           // fp32 [nheads], or null
  const void* u_ptr = nullptr;
  const void* delta_ptr = nullptr;
  const void* delta_bias_ptr = nullptr;  // fp32 [nheads], or null
  void* out_ptr = nullptr;
  const void* z_ptr = nullptr;           // or null: no gate
  const std::int32_t* slot_mapping_ptr = nullptr;  // [batch]; negative: padding
};

// A pool of theirs: blocks of one layer lie block_bytes apart, whatever else is in them, and each layer has a base pointer of its own.
struct StatePool {
  void* const* layer_bases = nullptr;  // host [n_layers]: block 0 of each layer
  std::int64_t block_bytes = 0;        // multiple of 16; may be as large as the other layers' and the convolution's parts make it
  std::int64_t offset_bytes = 0;       // where the state begins in a block; multiple of 16
};

// The pool's states as memory lent to replayssm_layers_create. The blocks are touched by nothing until they are reset or taken over;
// what lies between the states is not touched at all. pool.layer_bases is read by replayssm_layers_create, not later.
replayssm_lent lend_states(const StatePool& pool);

// Requests begin in slots (host int32 [n], up to 256): empty, or with positions (host int64 [n]) tokens in states that take_over_states
// brings next. positions null: 0.
// Threads: any, on disjoint slots. Capture: never.
Status start(const replayssm_slots* handle, const std::int32_t* slots, std::int32_t n, const std::int64_t* positions,
             const replayssm_exec* exec);

// Takes states of one layer over that their kernels have left: [nheads, dstate, headdim] each, of type dtype, the transpose of ours.
// Entry i begins at data + i * stride elements, in the context's memory, but not in the lent memory itself. slots: as for start.
// Threads: any, on disjoint slots. Capture: never.
Status take_over_states(const Layer& state, const std::int32_t* slots, std::int32_t n, const void* data, replayssm_dtype dtype,
                        std::int64_t stride, const replayssm_exec* exec);

// The other way: the states at the committed position, in their orientation.
// Threads: any, on disjoint slots. Capture: never.
Status hand_back_states(const Layer& state, const std::int32_t* slots, std::int32_t n, void* data, replayssm_dtype dtype,
                        std::int64_t stride, const replayssm_exec* exec);

// One layer of a model step. Rows of a negative slot get zeros. Nothing moves until update_mamba_states.
// Threads: any, at the same time on disjoint slots. Capture: enqueues.
Status selective_scan_update(const Layer& state, const Params& params, replayssm_stream stream);

// Once a model step, with the parameters of any of its layers: what their cache manager does with accepted tokens.
// num_accepted_tokens: int32 [batch], the sampled token included; null: all tokens of each row.
// Threads: any, at the same time on disjoint slots. Capture: enqueues.
Status update_mamba_states(const replayssm_slots* handle, const Params& params, const std::int32_t* num_accepted_tokens,
                           replayssm_stream stream);

}  // namespace adapters::trtllm
