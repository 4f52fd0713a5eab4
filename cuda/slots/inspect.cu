// Checks for finding defects: looks at what a call of one layer is about to work with. A block per row, and one for the parameters. The same
// kernel writes the guards of a new pool. Mirrors src/backend/cpu/inspect.rs.
#include "../common/batch.cuh"

DEVICE char *guard_of(const Guard &g, i64 layer, i64 index) { return (char *)part_at(g.component, layer, index) + g.bytes; }

DEVICE void report(const InspectParams &p, bool any, u32 bit, i64 id, i64 row) {
  if (__syncthreads_or(any) && threadIdx.x == 0) fault(p.slots, bit, id, row, p.place.pool, p.place.layer);
}

// Whether one of this thread's elements of a vector is infinite or a NaN.
DEVICE bool has_wild(const Input &input, const char *at) {
  i64 size = size_of(input.tensor.dtype);
  bool any = false;
  for (i64 i = threadIdx.x; i < input.inner; i += blockDim.x)
    any = any || (bits_of(load_one(at + i * size, input.tensor.dtype)) & 0x7F800000u) == 0x7F800000u;
  return any;
}

DEVICE bool has_broken(const Guard &g, const char *at) {
  bool any = false;
  for (i64 i = threadIdx.x; i < g.component.stride - g.bytes; i += blockDim.x) any = any || (u8)at[i] != GUARD_BYTE;
  return any;
}

DEVICE void inspect_row(const InspectParams &p, i64 row) {
  Row r = resolve(p.slots, p.batch, row, p.place, false);
  // What threads read may be moving if the caller's order is wrong; a block stays together all the same.
  if (!__syncthreads_and(r.live)) return;
  bool same_slot = false, same_ring = false;
  for (i64 i = threadIdx.x; i < row; i += blockDim.x) {
    Row other = resolve(p.slots, p.batch, i, p.place, false);
    same_slot = same_slot || (other.live && other.slot == r.slot);
    same_ring = same_ring || (other.live && other.ring == r.ring);
  }
  same_slot = __syncthreads_or(same_slot);
  report(p, same_slot || same_ring, FAULT_DUPLICATE, same_slot ? r.slot : r.ring, row);
#pragma unroll 1
  for (i32 i = 0; i < p.n_guards; i++) {
    const Guard &g = p.guards[i];
    i64 id = g.per_ring ? r.ring : r.slot;
    char *behind = guard_of(g, p.place.layer, id);
    bool broken = has_broken(g, behind);
    // There is none before the first part of all.
    if (p.place.layer != 0 || id != 0) broken = broken || has_broken(g, behind - g.component.stride);
    report(p, broken, FAULT_CANARY, id, row);
  }
#pragma unroll 1
  for (i32 i = 0; i < p.n_inputs; i++) {
    const Input &input = p.inputs[i];
    if (!input.per_token) continue;
    bool wild = false;
#pragma unroll 1
    for (i64 t = 0; t < r.span.len; t++)
#pragma unroll 1
      for (i64 head = 0; head < input.heads; head++) wild = wild || has_wild(input, span_at(r.span, input.tensor, t, head));
    report(p, wild, FAULT_NOT_FINITE, r.slot, row);
  }
}

DEVICE void inspect_parameters(const InspectParams &p) {
#pragma unroll 1
  for (i32 i = 0; i < p.n_inputs; i++) {
    const Input &input = p.inputs[i];
    if (input.per_token) continue;
    bool wild = false;
#pragma unroll 1
    for (i64 head = 0; head < input.heads; head++) wild = wild || has_wild(input, tensor_at(input.tensor, 0, 0, head));
    report(p, wild, FAULT_NOT_FINITE, -1, -1);
  }
}

// Writes the guards of all layers.
DEVICE void write_guards(const InspectParams &p) {
#pragma unroll 1
  for (i32 k = 0; k < p.n_guards; k++) {
    const Guard &g = p.guards[k];
    i64 n = g.per_ring ? p.slots.n_rings : p.slots.n_slots;
#pragma unroll 1
    for (i64 item = blockIdx.x; item < n * p.n_layers; item += gridDim.x) {
      char *at = guard_of(g, item / n, item % n);
      for (i64 i = threadIdx.x; i < g.component.stride - g.bytes; i += blockDim.x) at[i] = (char)GUARD_BYTE;
    }
  }
}

extern "C" __global__ void __launch_bounds__(128) replayssm_kernel(const __grid_constant__ InspectParams p) {
  wait_for_dependency();
  if (p.writes_guards) {
    write_guards(p);
    return;
  }
#pragma unroll 1
  for (i64 row = blockIdx.x; row <= p.batch.n_rows; row += gridDim.x) {
    if (row == p.batch.n_rows) {
      inspect_parameters(p);
    } else {
      inspect_row(p, row);
    }
  }
}
