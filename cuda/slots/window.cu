// The windows of a convolution at a held position, to a dense buffer (export) or to another slot (snapshot, store): a block per CONV_TILE
// channels of every layer and entry. Mirrors copy_window in src/backend/cpu/fold.rs.
#include "../common/dense.cuh"

DEVICE void fold_window(const WindowParams &p, i64 i, i64 index, i64 layer, i32 tile) {
  const Windows &w = p.windows;
  i64 slot, ring, target = 0;
  bool report = threadIdx.x == 0;
  if (p.fold.is_batch) {
    Row row = resolve(p.slots, p.batch, i, Place{-1, -1}, false);
    slot = row.slot;
    ring = row.ring;
    if (!row.live) return;
  } else if (!entry_of(p.slots, p.list, i, Place{p.pool, -1}, report, slot, ring)) {
    return;
  }
  bool is_store = p.fold.kind == FOLD_STORE;
  if (is_store && !target_of(p.slots, p.fold, p.list, i, p.pool, report && tile == 0 && layer == 0, target)) return;
  i64 committed = p.slots.cursors[ring].position, tag = *tag_of(w, layer, ring, tile);
  i64 at = p.fold.is_batch ? p.fold.at[i] : p.list.has_position ? given_position(p.list, i) : committed;
  if (at > committed || at < tag || !conv_tag_is_valid(p.slots, committed, tag)) {
    if (threadIdx.x == 0) fault(p.slots, FAULT_POSITION, slot, p.list.first + i, p.pool, (i32)layer);
    return;
  }
  i32 channel = tile * CONV_TILE + (i32)threadIdx.x, taps = w.width - 1;
  if (is_store && threadIdx.x == 0) *stored_tag_of(w, layer, target, tile) = at;
  if (channel >= w.channels) return;
  for (i32 tap = 0; tap < taps; tap++) {
    const char *from = window_at(w, layer, ring, at - taps + tap, channel);
    if (!is_store) {
      store_one(state_at(p.dst, i, index, 0, channel, tap), p.dst.dtype, load_one(from, w.io));
    } else if (w.io == F32) {
      *(u32 *)stored_at(w, layer, target, tap, channel) = *(const u32 *)from;
    } else {
      *(u16 *)stored_at(w, layer, target, tap, channel) = *(const u16 *)from;
    }
  }
}

extern "C" __global__ void __launch_bounds__(CONV_TILE) replayssm_kernel(const __grid_constant__ WindowParams p) {
  wait_for_dependency();
  i32 tiles = conv_tiles(p.windows), layers = p.dst.n_layers;
  i64 first = 0;
#pragma unroll 1
  do {
    if (p.fold.is_batch) {
      find_due(p.slots, p.batch, p.fold.at, first);
    } else {
      find_named(p.list, first);
    }
#pragma unroll 1
    for (i64 item = blockIdx.x; item < n_due() * layers * tiles; item += gridDim.x) {
      i64 index = item / tiles % layers, i = due_row(first, (i32)(item / tiles / layers));
      fold_window(p, i, index, p.dst.layer < 0 ? index : p.dst.layer, (i32)(item % tiles));
    }
    first += DUE_ROWS;
  } while (first < (p.fold.is_batch ? p.batch.n_rows : p.list.n));
}
