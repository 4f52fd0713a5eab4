// Copies the windows of a convolution at a held position into a dense buffer: a block per CONV_TILE channels of every layer and entry.
// Mirrors export_window in src/backend/cpu/life.rs.
#include "../common/dense.cuh"

DEVICE void export_window(const WindowParams &p, i64 i, i64 index, i64 layer, i32 tile) {
  const Windows &w = p.windows;
  i64 slot, ring;
  if (!entry_of(p.slots, p.list, i, Place{p.pool, -1}, threadIdx.x == 0, slot, ring)) return;
  i64 committed = p.slots.cursors[ring].position, tag = *tag_of(w, layer, ring, tile);
  i64 at = p.list.has_position ? given_position(p.list, i) : committed;
  if (at > committed || at < tag || !conv_tag_is_valid(p.slots, committed, tag)) {
    if (threadIdx.x == 0) fault(p.slots, FAULT_POSITION, slot, p.list.first + i, p.pool, (i32)layer);
    return;
  }
  i32 channel = tile * CONV_TILE + (i32)threadIdx.x, taps = w.width - 1;
  if (channel >= w.channels) return;
  for (i32 tap = 0; tap < taps; tap++)
    store_one(state_at(p.dst, i, index, 0, channel, tap), p.dst.dtype,
              load_one(window_at(w, layer, ring, at - taps + tap, channel), w.io));
}

extern "C" __global__ void __launch_bounds__(CONV_TILE) replayssm_kernel(const __grid_constant__ WindowParams p) {
  wait_for_dependency();
  i32 tiles = conv_tiles(p.windows), layers = p.dst.n_layers;
#pragma unroll 1
  for (i64 item = blockIdx.x; item < p.list.n * layers * tiles; item += gridDim.x) {
    i64 index = item / tiles % layers;
    export_window(p, item / tiles / layers, index, p.dst.layer < 0 ? index : p.dst.layer, (i32)(item % tiles));
  }
}
