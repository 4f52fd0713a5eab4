// Takes back committed tokens, down to the newest tag of all pools: a block per entry. Mirrors rewind in src/backend/cpu/life.rs.
#include "../common/batch.cuh"

// Slot of an entry in a pool, whose number is in slots.reserved; false if the entry is skipped there.
DEVICE bool slot_of(const RewindParams &p, const PoolTags &pool, i64 i, i64 &slot) {
  if (pool.group == 0 && p.list.which != IDS_RINGS) return true;
  slot = p.list.is_inline ? p.list.inline_slots[pool.group * p.list.n + i] : id_at(pool.slots, i);
  if (slot < 0) return false;
  if (slot < p.slots.n_slots) return true;
  if (threadIdx.x == 0) fault(p.slots, FAULT_ID, slot, p.list.first + i, pool.slots.reserved, -1);
  return false;
}

// The newest tag of an entry's slots and its ring, in thread 0.
DEVICE i64 newest_tag(const RewindParams &p, i64 i, i64 own_slot, i64 ring) {
  static __shared__ i64 of_warp[WARP];
  i64 newest = 0;
#pragma unroll 1
  for (i32 k = 0; k < p.n_pools; k++) {
    const PoolTags &pool = p.pools[k];
    i64 slot = own_slot;
    if (!slot_of(p, pool, i, slot)) continue;
    i64 index = pool.per_ring ? ring : slot;
    // Threads take neighbouring tags, of several layers if a layer has few.
    u32 count = pool.count, layer = threadIdx.x / count, tag = threadIdx.x % count;
#pragma unroll 1
    while (layer < (u32)pool.n_layers) {
      newest = max(newest, ((const i64 *)part_at(pool.tags, layer, index))[tag]);
      layer += blockDim.x / count;
      tag += blockDim.x % count;
      if (tag >= count) {
        tag -= count;
        layer++;
      }
    }
  }
#pragma unroll
  for (i32 mask = WARP / 2; mask > 0; mask /= 2) newest = max(newest, __shfl_xor_sync(0xFFFFFFFFu, newest, mask));
  if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = newest;
  __syncthreads();
  if (threadIdx.x == 0)
    for (i32 i = 1; i < (i32)(blockDim.x / WARP); i++) newest = max(newest, of_warp[i]);
  __syncthreads();
  return newest;
}

DEVICE void rewind_entry(const RewindParams &p, i64 i) {
  i64 slot, ring;
  bool done = entry_of(p.slots, p.list, i, Place{-1, -1}, threadIdx.x == 0, slot, ring);
  if (done) {
    i64 newest = newest_tag(p, i, slot, ring);
    if (threadIdx.x != 0) return;
    i64 n = p.list.is_inline ? p.list.inline_position[i] : p.n[i], position = p.slots.cursors[ring].position - n;
    done = n >= 0 && position >= newest;
    if (done) {
      p.slots.cursors[ring].position = position;
      p.slots.cursors[ring].committed = 0;
    } else {
      fault(p.slots, FAULT_REWIND, p.list.which == IDS_RINGS ? ring : slot, p.list.first + i, -1, -1);
    }
  }
  if (threadIdx.x == 0 && p.done) p.done[i] = done;
}

extern "C" __global__ void __launch_bounds__(256, 1) replayssm_kernel(const __grid_constant__ RewindParams p) {
  wait_for_dependency();
#pragma unroll 1
  for (i64 i = blockIdx.x; i < p.list.n; i += gridDim.x) rewind_entry(p, i);
}
