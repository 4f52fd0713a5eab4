// What blocks of the recurrent families have in common. A block works on the tiles of one head (or a part of them) of one row, a tile per
// warp; rows of records and tokens are decoded to fp32 in shared memory, once for all of its warps.
#pragma once
#include "tile.cuh"

// What all threads of a block know about its work. It lies in shared memory, written by thread 0 and by the first lanes of warps, and is
// read where it is needed: registers are for the state.
struct Work {
  i64 row;
  i64 slot;
  i64 ring;
  Span span;
  i64 position;
  i64 flush_before;
  u64 seed;
  i32 head;
  i32 part;
  i32 live;
  i32 flush;
  // Of each warp's tile: where its checkpoint stands, and where it will; where that is written, or null where nothing changes.
  i64 tag[MAX_WARPS];
  i64 stop[MAX_WARPS];
  i64 *tag_at[MAX_WARPS];
  // Of all tiles: the oldest tag, the oldest and the newest stop.
  i64 oldest;
  i64 first_stop;
  i64 last_stop;
  // Records and tokens are numbered from here: base + i. Its row in a ring.
  i64 base;
  i32 base_row;
  i32 reserved;
};

extern __shared__ __align__(128) char shared_memory[];

DEVICE Work &work() {
  static __shared__ Work w;
  return w;
}

DEVICE i32 warp_of() { return threadIdx.x / WARP; }
DEVICE i32 warps_of() { return blockDim.x / WARP; }
DEVICE i32 lane_index() { return threadIdx.x % WARP; }

DEVICE i32 blocks_of(const State &s) { return (s.columns + BLOCK - 1) / BLOCK; }

DEVICE i64 items_of(const Batch &batch, const State &s) { return batch.n_rows * s.heads * s.parts; }

// First row of the state that a block works on, and how many.
DEVICE i32 first_channel(const State &s) { return work().part * s.warps * TILE; }
DEVICE i32 channels_of(const State &s) { return min(s.rows - first_channel(s), s.warps * (i32)TILE); }
DEVICE i32 tile_of(const State &s) { return work().part * s.warps + warp_of(); }

DEVICE Checkpoint checkpoint_of(const State &s, i32 layer) {
  const Work &w = work();
  return checkpoint_of(s, layer, w.slot, w.head, tile_of(s), w.seed);
}

// Eight neighbouring elements of a row as fp32, of which n are there; zeros behind them.
DEVICE void load8(float (&v)[8], const char *from, i32 dtype, i32 n) {
  if (n >= 8 && (u64)from % 16 == 0) {
    if (dtype == F32)
      load8_32(from, v);
    else
      load8_16(from, dtype == BF16, v);
  } else if (dtype == F32) {
#pragma unroll
    for (i32 e = 0; e < 8; e++) v[e] = e < n ? ((const float *)from)[e] : 0.0f;
  } else {
    u16 raw[8];
#pragma unroll
    for (i32 e = 0; e < 8; e++) raw[e] = e < n ? ((const u16 *)from)[e] : 0;
#pragma unroll
    for (i32 e = 0; e < 8; e++) v[e] = dtype == BF16 ? from_bf16(raw[e]) : from_f16(raw[e]);
  }
}

DEVICE void put8(float *to, const float (&v)[8]) {
  ((float4 *)to)[0] = make_float4(v[0], v[1], v[2], v[3]);
  ((float4 *)to)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

// Writes zeros to a row's outputs: a block's channels of all its tokens.
DEVICE void zero_outputs(const Tensor &out, const State &s) {
  const Work &w = work();
  i32 n = channels_of(s), first = first_channel(s);
#pragma unroll 1
  for (i64 t = warp_of(); t < w.span.len; t += warps_of())
#pragma unroll 1
    for (i32 i = lane_index(); i < n; i += WARP)
      store_one(span_at(w.span, out, t, w.head) + (first + i) * size_of(out.dtype), out.dtype, 0.0f);
}

// Brings a block's first checkpoint near the multiprocessors: what a readout needs of it. Nothing is read that could be too old, since
// L2 is where all of them meet.
DEVICE void prefetch_checkpoint(const Slots &slots, const Batch &batch, const Place &place, const State &s, bool high) {
  i64 item = blockIdx.x;
  i64 row = item / s.parts / s.heads;
  if (!batch.prefetch || row >= batch.n_rows) return;
  i64 slot = id_at(batch.slots, row);
  if (slot < 0 || slot >= slots.n_slots) return;
  i64 part = item % s.parts, head = item / s.parts % s.heads, first = part * s.warps * TILE;
  i64 size = s.format == FORMAT_F32 ? 4 : 2, rows = min((i64)s.rows - first, (i64)s.warps * TILE);
  i64 head_bytes = (i64)s.rows * s.columns * (s.format <= FORMAT_F32 ? 4 : 2);
  const char *plane = (const char *)own_part(s.checkpoint, slot) + head * head_bytes;
  for (i32 planes = s.format == FORMAT_SPLIT32 && !high ? 2 : 1; planes > 0; planes--, plane += head_bytes / 2) {
    const char *at = plane + first * s.columns * size;
    for (i64 i = 128 * (i64)threadIdx.x; i < rows * s.columns * size; i += 128 * (i64)blockDim.x)
      ptx_prefetch(at + i);
  }
}

// Begins an item. False: there is nothing to do (and null rows are dealt with). A second launch of a call is quiet: the first has dealt with
// null rows and faults.
DEVICE bool begin(const Slots &slots, const Batch &batch, const Place &place, const State &s, const Tensor &out, i64 item,
                  bool quiet = false) {
  Work &w = work();
  __syncthreads();
  if (threadIdx.x == 0) {
    w.part = (i32)(item % s.parts);
    w.head = (i32)(item / s.parts % s.heads);
    w.row = item / s.parts / s.heads;
    Row row = resolve(slots, batch, w.row, place, !quiet && w.head == 0 && w.part == 0);
    w.slot = row.slot;
    w.ring = row.ring;
    w.span = row.span;
    w.live = row.live;
    if (row.live) {
      const Cursor &c = slots.cursors[row.ring];
      w.position = c.position;
      w.flush_before = c.flush_before;
      w.seed = c.seed;
      w.flush = batch.flush ? batch.flush[w.row] : 0;
    }
  }
  __syncthreads();
  if (!w.live && !quiet && !batch.keep_null_outputs) zero_outputs(out, s);
  return w.live && w.span.len > 0;
}

// Reads the tags of a block's tiles and says where they will stand. False: one of them cannot be trusted; the fault is recorded and
// outputs are zero.
DEVICE bool begin_tiles(const Slots &slots, const Batch &batch, const Place &place, const State &s, const Tensor &out, bool extend) {
  Work &w = work();
  bool bad = false;
  if (lane_index() == 0) {
    bool exists = tile_of(s) < s.tiles;
    i64 *tag_at = checkpoint_of(s, place.layer).tag, tag = exists ? *tag_at : w.position;
    bad = exists && !tag_is_valid(slots, w.position, tag);
    w.tag[warp_of()] = tag;
    i64 len = w.span.len;
    i64 stop = extend ? w.position + len - min(batch.keep_tail, len)
                      : tag + folds_of(slots, w.position, tag, len, w.flush_before, w.flush);
    w.stop[warp_of()] = stop;
    w.tag_at[warp_of()] = exists && (stop > tag || (extend && batch.keep_tail > 0)) ? tag_at : nullptr;
  }
  if (__syncthreads_or(bad)) {
    if (threadIdx.x == 0) fault(slots, FAULT_POSITION, w.slot, w.row, place.pool, place.layer);
    zero_outputs(out, s);
    return false;
  }
  if (threadIdx.x == 0) {
    w.oldest = w.tag[0];
    w.first_stop = w.last_stop = w.stop[0];
    // A block's last warps may have no tile: they stand at the position, and that changes nothing.
    for (i32 i = 1; i < warps_of() && w.part * s.warps + i < s.tiles; i++) {
      w.oldest = min(w.oldest, w.tag[i]);
      w.first_stop = min(w.first_stop, w.stop[i]);
      w.last_stop = max(w.last_stop, w.stop[i]);
    }
  }
  __syncthreads();
  return true;
}

// Sets the tag of this warp's tile, once all of it is stored. An extend whose tail is to be kept leaves it pending: the complement of where
// the checkpoint stands, until its second launch has written the tail.
DEVICE void set_tag(const Batch &batch) {
  const Work &w = work();
  if (lane_index() == 0 && w.tag_at[warp_of()])
    *w.tag_at[warp_of()] = batch.keep_tail > 0 ? ~w.stop[warp_of()] : w.stop[warp_of()];
}

// Whether the first launch of an extend has left a block's tiles pending.
DEVICE bool is_pending(const State &s, const Place &place, i64 stop) {
  Checkpoint c = checkpoint_of(s, place.layer);
  return !__syncthreads_or(c.rows > 0 && *c.tag != ~stop);
}

// The tail is written.
DEVICE void end_pending(const State &s, const Place &place, i64 stop) {
  Checkpoint c = checkpoint_of(s, place.layer);
  __syncthreads();
  if (c.rows > 0 && lane_index() == 0) *c.tag = stop;
}

// Where records and tokens are numbered from; thread 0's.
DEVICE void set_base(i64 base, i32 ring_rows) {
  work().base = base;
  work().base_row = (i32)(base % ring_rows);
}

// Record base + i in a ring, which holds it: block (head or group) b.
DEVICE char *held_record(const Component &c, i64 block, i64 i, i32 rows, i64 bytes) {
  i64 row = work().base_row + i;
  return (char *)own_part(c, work().ring) + (block * rows + (row < rows ? row : row - rows)) * bytes;
}

// A record in a ring: block (head or group) b of the record at a position.
DEVICE char *record_at(const Component &c, i64 block, i64 position, i32 rows, i64 bytes) {
  return (char *)own_part(c, work().ring) + (block * rows + position % rows) * bytes;
}
