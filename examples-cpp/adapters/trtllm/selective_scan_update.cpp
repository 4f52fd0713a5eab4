// SPDX-License-Identifier: MIT OR Apache-2.0
#include "selective_scan_update.h"

namespace adapters::trtllm {
namespace {

Status batch_of(const Params& p, replayssm_batch* batch) {
  if (p.slot_mapping_ptr == nullptr) {
    return refuse(REPLAYSSM_ERROR_INVALID_ARGUMENT, "slot_mapping_ptr is null; expected slot ids, 0, 1, 2 and so on where rows are slots");
  }
  *batch = replayssm_init<replayssm_batch>();
  batch->n_rows = p.batch;
  batch->tokens = p.tokens;
  batch->slots = ids(p.slot_mapping_ptr, REPLAYSSM_DTYPE_I32, 1);
  return {};
}

replayssm_exec on(replayssm_stream stream) {
  auto exec = replayssm_init<replayssm_exec>();
  exec.stream = stream;
  return exec;
}

replayssm_state transposed(const Layer& state, const void* data, replayssm_dtype dtype, std::int64_t stride) {
  auto dense = replayssm_init<replayssm_state>();
  dense.dtype = dtype;
  dense.orientation = REPLAYSSM_STATE_COL_MAJOR;
  dense.layer = state.index;
  dense.data = const_cast<void*>(data);
  dense.stride_entry = stride;
  return dense;
}

}  // namespace

replayssm_lent lend_states(const StatePool& pool) {
  auto lent = replayssm_init<replayssm_lent>();
  lent.kind = REPLAYSSM_COMPONENT_CHECKPOINT;
  lent.layer_bases = pool.layer_bases;
  lent.slot_stride_bytes = pool.block_bytes;
  lent.offset_bytes = pool.offset_bytes;
  return lent;
}

Status start(const replayssm_slots* handle, const std::int32_t* slots, std::int32_t n, const std::int64_t* positions,
             const replayssm_exec* exec) {
  const auto list = host_list(slots, n);
  auto args = replayssm_init<replayssm_reset_args>();
  args.position = positions;
  return check(replayssm_reset(handle, &list, &args, exec));
}

Status take_over_states(const Layer& state, const std::int32_t* slots, std::int32_t n, const void* data, replayssm_dtype dtype,
                        std::int64_t stride, const replayssm_exec* exec) {
  const auto list = host_list(slots, n);
  const auto source = transposed(state, data, dtype, stride);
  return check(replayssm_import(state.pool, &list, nullptr, &source, exec));
}

Status hand_back_states(const Layer& state, const std::int32_t* slots, std::int32_t n, void* data, replayssm_dtype dtype,
                        std::int64_t stride, const replayssm_exec* exec) {
  const auto list = host_list(slots, n);
  const auto target = transposed(state, data, dtype, stride);
  return check(replayssm_export(state.pool, &list, nullptr, &target, exec));
}

Status selective_scan_update(const Layer& state, const Params& p, replayssm_stream stream) {
  if (p.nheads < 1 || p.ngroups < 1 || p.dim % p.nheads != 0) {
    return refuse(REPLAYSSM_ERROR_INVALID_ARGUMENT, "dim is " + std::to_string(p.dim) + " with " + std::to_string(p.nheads) + " heads and " +
                                                  std::to_string(p.ngroups) + " groups; expected a multiple of nheads, and groups");
  }
  if (p.dim < 1 || p.dstate < 1) {
    return refuse(REPLAYSSM_ERROR_INVALID_ARGUMENT, "dim is " + std::to_string(p.dim) + " and dstate is " + std::to_string(p.dstate) +
                                                        "; expected those of the pool");
  }
  replayssm_batch batch;
  if (auto status = batch_of(p, &batch); !status.ok()) return status;

  const std::int64_t T = p.tokens, dim = p.dim, headdim = dim / p.nheads, BC = std::int64_t{p.ngroups} * p.dstate;
  const std::int64_t dt_padded = (std::int64_t{p.nheads} + 7) / 8 * 8;
  const std::int64_t xBC = dim + 2 * BC, projected = (p.z_ptr != nullptr ? dim : 0) + xBC + dt_padded;
  const std::int64_t element = p.input_type == REPLAYSSM_DTYPE_F32 ? 4 : 2;
  const auto packed = [&](const void* row, std::int64_t first, std::int64_t pitch, std::int64_t head) {
    const auto* at = row == nullptr ? nullptr : static_cast<const char*>(row) + first * element;
    return view(at, p.input_type, T * pitch, pitch, head);
  };
  const auto parameter = [](const void* data) { return view(data, REPLAYSSM_DTYPE_F32, 0, 0, 1); };
  auto args = replayssm_init<replayssm_mamba2_args>();
  args.no_softplus = p.delta_softplus ? 0 : 1;
  args.x = packed(p.u_ptr, 0, xBC, headdim);
  args.B = packed(p.BC_ptr, dim, xBC, p.dstate);
  args.C = packed(p.BC_ptr, dim + BC, xBC, p.dstate);
  args.dt = packed(p.delta_ptr, projected - dt_padded, projected, 1);
  if (p.z_ptr != nullptr) args.z = packed(p.z_ptr, 0, projected, headdim);
  args.out = view(p.out_ptr, p.output_type, T * dim, dim, headdim);
  args.A = parameter(p.A_ptr);
  if (p.D_ptr != nullptr) args.D = parameter(p.D_ptr);
  if (p.delta_bias_ptr != nullptr) args.dt_bias = parameter(p.delta_bias_ptr);
  const auto exec = on(stream);
  return check(replayssm_mamba2_step(state.pool, state.index, &batch, &args, &exec));
}

Status update_mamba_states(const replayssm_slots* handle, const Params& params, const std::int32_t* num_accepted_tokens,
                           replayssm_stream stream) {
  replayssm_batch batch;
  if (auto status = batch_of(params, &batch); !status.ok()) return status;
  auto args = replayssm_init<replayssm_commit_args>();
  args.convention = REPLAYSSM_COUNTS_ACCEPTED;
  args.counts = num_accepted_tokens;
  const auto exec = on(stream);
  return check(replayssm_commit(handle, &batch, &args, &exec));
}

}  // namespace adapters::trtllm
