// Steps and extends of one token a row by serial arithmetic, of states with 128 columns whose vectors all begin at multiples of 16 bytes. A
// block works on the tiles of one head (or a part of them) of one row, a warp on a tile, which it asks for as soon as it knows the slot: all
// of it is under way while positions, tags, records and gates are looked at. Everything that a warp needs of those it keeps in its lanes.
//
// Lane l holds the rows 4 (l / 8) .. + 3 of a tile; of each, the columns 32 j + 4 (l % 8) .. + 3 of every block j of 32: 16 bytes of an fp32
// checkpoint, of which eight lanes ask for whole lines, and four classes of the canonical dot product.
#pragma once
#include "block.cuh"

namespace single {

enum : i32 {
  COLUMNS = 128,
  BLOCKS = COLUMNS / BLOCK,
  ROWS = 4,
  WIDE = 4,
  // Lanes that share a row.
  SHARE = WARP / (TILE / ROWS),
  // Of a block at most.
  CHANNELS = MAX_WARPS * TILE,
  // Eight elements at a time: of a row of columns.
  UNITS = COLUMNS / 8,
};

// ---- What a block is to do, the same in every thread but for the tile ----

struct Item {
  i32 head;
  i32 part;
  i32 channels;
  i64 row;
  i64 slot;
  i64 ring;
  Span span;
  bool is_long;
  bool live;
  Checkpoint tile;
};

DEVICE i32 first_channel(const State &s, const Item &item) { return item.part * s.warps * TILE; }

// Slot and ring of the block's row as they stand in the batch. Nothing waits for them: inputs of the token are asked for in between.
struct Named {
  i64 slot;
  i64 ring;
};

// Which head of which row it is.
struct Where {
  i32 part;
  i32 head;
  i32 row;
};

DEVICE Where where_of(const State &s, i64 rows) {
  Where where;
  u32 index = blockIdx.x, parts = (u32)s.parts, heads = (u32)s.heads;
  where.part = parts > 1 ? (i32)(index % parts) : 0;
  if (parts > 1) index /= parts;
  // A row alone does not wait for a division.
  where.row = rows > 1 ? (i32)(index / heads) : 0;
  where.head = (i32)(index - (u32)where.row * heads);
  return where;
}

// The block's item but for the slot, with the row's tokens.
DEVICE Item item_of(const Batch &batch, const State &s, Named &named) {
  Item item;
  Where where = where_of(s, batch.n_rows);
  item.part = where.part;
  item.head = where.head;
  item.row = where.row;
  named.slot = id_at(batch.slots, item.row);
  named.ring = id_at(batch.rings, item.row);
  item.channels = min(s.rows - item.part * s.warps * (i32)TILE, s.warps * (i32)TILE);
  item.is_long = false;
  if (batch.tokens >= 0) {
    item.span = Span{item.row, 0, batch.tokens};
  } else {
    i64 begin = batch.cu_seqlens[item.row], end = batch.cu_seqlens[item.row + 1];
    i64 first = min(max(begin, 0ll), batch.n_tokens), last = min(max(end, first), batch.n_tokens);
    item.is_long = first != begin || last != end || last - first > batch.max_tokens;
    item.span = Span{0, first, last - first};
  }
  return item;
}

// What is wrong with the row is told once.
DEVICE void resolve(const Slots &slots, const Batch &batch, const Place &place, const Named &named, Item &item) {
  bool report = item.head == 0 && item.part == 0 && threadIdx.x == 0;
  if (item.is_long && report) fault(slots, FAULT_LENGTH, item.row, item.row, place.pool, place.layer);
  bool is_null = named.slot < 0 || (batch.has_null_id && named.slot == batch.null_id);
  item.slot = named.slot;
  item.ring = named.ring;
  item.live = !is_null && pair_of(slots, named.slot, named.ring, item.row, place, report) && !item.is_long;
}

// An element as it came: what is done with it would wait for it.
DEVICE u32 ask_one(const char *at, i32 dtype) { return dtype == F32 ? *(const u32 *)at : *(const u16 *)at; }

DEVICE float from_one(u32 raw, i32 dtype) {
  return dtype == F32 ? from_bits(raw) : dtype == BF16 ? from_bits(raw << 16) : from_f16((u16)raw);
}

// Writes zeros to a row's outputs: a block's channels of all its tokens.
DEVICE void zero_outputs(const Tensor &out, const State &s, const Item &item) {
#pragma unroll 1
  for (i64 t = 0; t < item.span.len; t++)
#pragma unroll 1
    for (i32 i = threadIdx.x; i < item.channels; i += blockDim.x)
      store_one(span_at(item.span, out, t, item.head) + (first_channel(s, item) + i) * size_of(out.dtype), out.dtype, 0.0f);
}

// What is left of a tile's records. They are numbered from the next chunk on.
struct Progress {
  i32 held;
  i32 from;
  i32 stop;
  i32 oldest;  // ring row of record 0
};

// What a block needs again when registers are full of its tiles.
struct Kept {
  i64 slot;
  i64 ring;
  char *out;  // of the token, from the block's first channel on
  i32 channels;
  // Of each warp's tile: where it begins.
  char *tile_at[MAX_WARPS];
  // Of each warp's tile: where its tag is to be set, or null, and to what.
  i64 *tag_at[MAX_WARPS];
  i64 tag[MAX_WARPS];
  Progress progress[MAX_WARPS];
  i32 held;      // records that the block takes in; negative: a tag cannot be trusted
  i32 folds;     // whether some tile's tag moves
  i32 ring_row;  // the token's
};

// A thread of the second warp, if there are two: the first has the tags to look at.
DEVICE bool is_second() { return threadIdx.x == (blockDim.x > WARP ? WARP : 0); }

// The channel that a thread brings what is needed of: the first ones the second warp, if there are two.
DEVICE i32 brought_channel() { return (i32)(threadIdx.x >= WARP ? threadIdx.x - WARP : threadIdx.x + blockDim.x - WARP); }

DEVICE void keep_item(Kept &kept, const Item &item, const State &s, const Tensor &out) {
  if (lane_index() == 0) kept.tile_at[warp_of()] = item.tile.head + (i64)item.tile.first * COLUMNS * (s.format == FORMAT_F32 ? 4 : 2);
  if (!is_second()) return;
  kept.channels = item.channels;
  kept.slot = item.slot;
  kept.ring = item.ring;
  kept.out = span_at(item.span, out, 0, item.head) + first_channel(s, item) * size_of(out.dtype);
}

// Ends an item with a tag that cannot be trusted: nothing is written but zeros.
DEVICE void give_up(const Slots &slots, const Place &place, const Kept &kept, i64 row, const Tensor &out) {
  if (threadIdx.x == 0) fault(slots, FAULT_POSITION, kept.slot, row, place.pool, place.layer);
  for (i32 i = threadIdx.x; i < kept.channels; i += blockDim.x) store_one(kept.out + i * size_of(out.dtype), out.dtype, 0.0f);
}

DEVICE void set_tag(const Kept &kept) {
  i32 warp = warp_of();
  if (lane_index() == 0 && kept.tag_at[warp]) *kept.tag_at[warp] = kept.tag[warp];
}

// The largest of the first lanes, one for each warp that a block can have.
DEVICE i32 largest(i32 x) {
#pragma unroll
  for (i32 i = 1; i < MAX_WARPS; i *= 2) x = max(x, __shfl_xor_sync(0xFFFFFFFFu, x, i));
  return __shfl_sync(0xFFFFFFFFu, x, 0);
}

// A position modulo a number below 2^16, without a division of 64 bits: those are calls, which a tile in registers does not survive.
DEVICE i32 modulo(i64 position, i32 n) {
  u32 m = (u32)n, high = (u32)((u64)position >> 32), low = (u32)position % m;
  if (high == 0) return (i32)low;
  // 2^32 modulo n.
  u32 carry = (0xFFFFFFFFu % m + 1) % m;
  return (i32)((high % m * carry + low) % m);
}

// folds_of for a token, of a tag that is valid.
DEVICE i32 folds_of_token(const Slots &slots, i64 position, i64 tag, i64 flush_before, bool flush) {
  i64 limit = position - slots.keep;
  i32 foldable = (i32)(limit - tag);
  if (foldable <= 0) return 0;
  if (flush || (tag < flush_before && flush_before <= limit)) return foldable;
  if (slots.schedule == SCHEDULE_BY_POSITION) return max(foldable - modulo(limit, slots.window - slots.max_step_tokens + 1), 0);
  return foldable + 1 > slots.window ? foldable : 0;
}

// What tells where tiles stand, which the first warp asks for: of the ring and the row, and each tile's tag, in as many lanes.
struct Asked {
  i64 position;
  i64 flush_before;
  i64 tag;
  bool flush;
};

DEVICE i32 tiles_of(const State &s, const Item &item) { return min(s.tiles - item.part * s.warps, s.warps); }

DEVICE Asked ask_stand(const Slots &slots, const Batch &batch, const State &s, const Item &item) {
  const Cursor &c = slots.cursors[item.ring];
  Asked asked;
  asked.tag = item.tile.tag[lane_index() < tiles_of(s, item) ? lane_index() : 0];
  asked.position = c.position;
  asked.flush_before = c.flush_before;
  asked.flush = batch.flush ? batch.flush[item.row] : 0;
  return asked;
}

// Where tiles stand and will stand, for all warps behind a barrier. Records are numbered from the oldest tag of the block on, the token comes
// behind them.
DEVICE void keep_stand(Kept &kept, const Slots &slots, const State &s, const Item &item, bool extend, const Asked &asked, i32 ring_rows) {
  i32 lane = lane_index();
  bool exists = lane < tiles_of(s, item), bad = exists && !tag_is_valid(slots, asked.position, asked.tag);
  if (__ballot_sync(0xFFFFFFFFu, bad)) {
    if (lane == 0) kept.held = -1;
    return;
  }
  i32 own = exists ? (i32)(asked.position - asked.tag) : 0, folds = 0;
  if (exists) folds = extend ? own + 1 : folds_of_token(slots, asked.position, asked.tag, asked.flush_before, asked.flush);
  i32 held = largest(own);
  bool any = __ballot_sync(0xFFFFFFFFu, folds > 0) != 0;
  i32 ring_row = !extend || held > 0 ? modulo(asked.position, ring_rows) : 0;
  i32 oldest = ring_row - held + (ring_row < held ? ring_rows : 0);
  if (lane == 0) {
    kept.held = held;
    kept.folds = any;
    kept.ring_row = ring_row;
  }
  if (lane < warps_of()) {
    kept.tag_at[lane] = folds > 0 ? item.tile.tag + lane : nullptr;
    kept.tag[lane] = asked.tag + folds;
    kept.progress[lane] = Progress{held, held - own, folds > 0 ? held - own + folds : 0, oldest};
  }
}

// Row i of those that begin at a row.
DEVICE i32 row_behind(i32 first, i32 i, i32 rows) {
  i32 row = first + i;
  return row < rows ? row : row - rows;
}

DEVICE void next_chunk(Progress &progress, i32 rows) {
  __syncwarp();
  if (lane_index() == 0) {
    progress.held -= CHUNK;
    progress.from -= CHUNK;
    progress.stop -= CHUNK;
    progress.oldest = row_behind(progress.oldest, CHUNK, rows);
  }
  __syncwarp();
}

// A record in a ring: block (head or group) b.
DEVICE char *record_in(const Component &c, i64 ring, i64 block, i32 row, i32 rows, i32 bytes) {
  return (char *)own_part(c, ring) + (block * rows + row) * bytes;
}

// ---- A tile in registers ----

struct Lane4 {
  i32 row;     // the first of the tile's rows that this lane holds
  i32 column;  // of every block
};

DEVICE Lane4 lane4_of() { return Lane4{ROWS * (lane_index() / SHARE), WIDE * (lane_index() % SHARE)}; }

struct Cells {
  float v[ROWS][BLOCKS][WIDE];
};

DEVICE void put_words(float (&v)[WIDE], u32 a, u32 b, u32 c, u32 d) {
  v[0] = from_bits(a), v[1] = from_bits(b), v[2] = from_bits(c), v[3] = from_bits(d);
}

// Where the lane's first element lies. Lanes whose rows there are not get the head's first row, which they may read and must not write.
template <i32 FORMAT>
DEVICE char *cells_at(const Checkpoint &c) {
  Lane4 lane = lane4_of();
  return c.head + ((i64)(lane.row < c.rows ? c.first + lane.row : 0) * COLUMNS + lane.column) * (FORMAT == FORMAT_F32 ? 4 : 2);
}

// Asks for a tile, which comes as it lies in memory: of fp32 a word for an element, of SPLIT32 two words of the high plane and two of the
// low one, of bfloat16 two words.
template <i32 FORMAT>
DEVICE void ask(Cells &t, const State &s, const char *at) {
  if (FORMAT == FORMAT_F32) {
#pragma unroll
    for (i32 r = 0; r < ROWS; r++)
#pragma unroll
      for (i32 j = 0; j < BLOCKS; j++) {
        uint4 w = *(const uint4 *)(at + (r * COLUMNS + j * BLOCK) * 4);
        put_words(t.v[r][j], w.x, w.y, w.z, w.w);
      }
  } else {
    const char *low = at + (i64)s.rows * COLUMNS * 2;
#pragma unroll
    for (i32 r = 0; r < ROWS; r++)
#pragma unroll
      for (i32 j = 0; j < BLOCKS; j++) {
        uint2 high = *(const uint2 *)(at + (r * COLUMNS + j * BLOCK) * 2), rest = {};
        if (FORMAT == FORMAT_SPLIT32) rest = *(const uint2 *)(low + (r * COLUMNS + j * BLOCK) * 2);
        put_words(t.v[r][j], high.x, high.y, rest.x, rest.y);
      }
  }
}

// What has arrived becomes fp32, in its place: there are no registers for two of them.
template <i32 FORMAT>
DEVICE void arrived(Cells &t) {
#pragma unroll
  for (i32 r = 0; r < ROWS; r++)
#pragma unroll
    for (i32 j = 0; j < BLOCKS; j++) {
      float(&v)[WIDE] = t.v[r][j];
      u32 w[WIDE] = {bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3])};
#pragma unroll
      for (i32 e = 0; e < WIDE; e++) {
        if (FORMAT == FORMAT_F32)
          v[e] = from_bits(w[e]);
        else if (FORMAT == FORMAT_SPLIT32)
          v[e] = join(e % 2 ? w[e / 2] >> 16 : w[e / 2] & 0xFFFFu, e % 2 ? w[2 + e / 2] >> 16 : w[2 + e / 2]);
        else
          v[e] = from_bits(e % 2 ? w[e / 2] & 0xFFFF0000u : w[e / 2] << 16);
      }
    }
}

template <bool HAS_NANS>
DEVICE float of_state(float x) {
  return HAS_NANS ? canonical(x) : x;
}

// Stores a tile that begins at an address, which is looked up when it is needed, as the number of channels is. Of bfloat16 it becomes what was
// stored. HAS_NANS: whether there can be any, which are to become canonical.
template <i32 FORMAT, bool HAS_NANS>
DEVICE void store(Cells &t, const State &s, char *const &tile_at, const i32 &channels) {
  Lane4 lane = lane4_of();
  if (warp_of() * TILE + lane.row >= channels) return;
  char *at = tile_at + (lane.row * COLUMNS + lane.column) * (FORMAT == FORMAT_F32 ? 4 : 2);
  char *low = at + (i64)s.rows * COLUMNS * 2;
#pragma unroll
  for (i32 r = 0; r < ROWS; r++)
#pragma unroll
    for (i32 j = 0; j < BLOCKS; j++) {
      float(&v)[WIDE] = t.v[r][j];
      if constexpr (FORMAT == FORMAT_F32) {
        *(float4 *)(at + (r * COLUMNS + j * BLOCK) * 4) =
            make_float4(of_state<HAS_NANS>(v[0]), of_state<HAS_NANS>(v[1]), of_state<HAS_NANS>(v[2]), of_state<HAS_NANS>(v[3]));
      } else {
        u32 words[2], second[2];
#pragma unroll
        for (i32 i = 0; i < 2; i++) {
          if (FORMAT == FORMAT_SPLIT32) {
            float a = of_state<HAS_NANS>(v[2 * i]), b = of_state<HAS_NANS>(v[2 * i + 1]);
            u32 ha = high_plane(a), hb = high_plane(b);
            words[i] = (ha & 0xFFFFu) | hb << 16;
            second[i] = low_plane(a, ha) | low_plane(b, hb) << 16;
          } else {
            words[i] = to_bf16(v[2 * i]) | (u32)to_bf16(v[2 * i + 1]) << 16;
            v[2 * i] = from_bits(words[i] << 16);
            v[2 * i + 1] = from_bits(words[i] & 0xFFFF0000u);
          }
        }
        *(uint2 *)(at + (r * COLUMNS + j * BLOCK) * 2) = make_uint2(words[0], words[1]);
        if (FORMAT == FORMAT_SPLIT32) *(uint2 *)(low + (r * COLUMNS + j * BLOCK) * 2) = make_uint2(second[0], second[1]);
      }
    }
}

template <i32 FORMAT, bool HAS_NANS>
DEVICE void store(Cells &t, const State &s, const Kept &kept) {
  store<FORMAT, HAS_NANS>(t, s, kept.tile_at[warp_of()], kept.channels);
}

// The same, with a sum that all of the lane's elements are in: a NaN among those would have made it one. Looking at each is a third of what
// a plain update computes.
template <i32 FORMAT>
DEVICE void store(Cells &t, const State &s, const Kept &kept, float sum) {
  if (__ballot_sync(0xFFFFFFFFu, is_nan(sum)))
    store<FORMAT, true>(t, s, kept);
  else
    store<FORMAT, false>(t, s, kept);
}

// A lane's columns of a row of floats in shared memory.
struct Operand {
  float v[BLOCKS][WIDE];
};

DEVICE Operand operand(const float *row) {
  Operand o;
  const float *at = row + lane4_of().column;
#pragma unroll
  for (i32 j = 0; j < BLOCKS; j++) {
    float4 w = *(const float4 *)(at + BLOCK * j);
    o.v[j][0] = w.x, o.v[j][1] = w.y, o.v[j][2] = w.z, o.v[j][3] = w.w;
  }
  return o;
}

DEVICE void decay(Cells &t, float factor, bool slow) {
  if (slow) {
#pragma unroll
    for (i32 r = 0; r < ROWS; r++)
#pragma unroll
      for (i32 j = 0; j < BLOCKS; j++)
#pragma unroll
        for (i32 e = 0; e < WIDE; e++) t.v[r][j][e] = fma(t.v[r][j][e], factor, t.v[r][j][e]);
  } else {
#pragma unroll
    for (i32 r = 0; r < ROWS; r++)
#pragma unroll
      for (i32 j = 0; j < BLOCKS; j++)
#pragma unroll
        for (i32 e = 0; e < WIDE; e++) t.v[r][j][e] = __fmul_rn(t.v[r][j][e], factor);
  }
}

// Decays a tile by factors of its columns, with a bit for each that is slow: fma(S, f, S) where the decay is slow; where it is fast fma(S, f, -0), which is S f to the last bit and sign. Mostly all are slow.
DEVICE void decay_columns(Cells &t, const float *factors, const u32 *slow_bits) {
  uint4 slow = *(const uint4 *)slow_bits;
  Operand f = operand(factors);
  if ((slow.x & slow.y & slow.z & slow.w) == ~0u) {
#pragma unroll
    for (i32 r = 0; r < ROWS; r++)
#pragma unroll
      for (i32 j = 0; j < BLOCKS; j++)
#pragma unroll
        for (i32 e = 0; e < WIDE; e++) t.v[r][j][e] = fma(t.v[r][j][e], f.v[j][e], t.v[r][j][e]);
    return;
  }
  u32 words[BLOCKS] = {slow.x, slow.y, slow.z, slow.w};
#pragma unroll
  for (i32 j = 0; j < BLOCKS; j++) {
    u32 bits = words[j] >> lane4_of().column;
#pragma unroll
    for (i32 e = 0; e < WIDE; e++) {
      bool is_slow = bits >> e & 1;
#pragma unroll
      for (i32 r = 0; r < ROWS; r++) t.v[r][j][e] = fma(t.v[r][j][e], f.v[j][e], is_slow ? t.v[r][j][e] : -0.0f);
    }
  }
}

// S = fma(a, row, S).
DEVICE void rank_one(Cells &t, const float (&a)[ROWS], const Operand &o) {
#pragma unroll
  for (i32 r = 0; r < ROWS; r++)
#pragma unroll
    for (i32 j = 0; j < BLOCKS; j++)
#pragma unroll
      for (i32 e = 0; e < WIDE; e++) t.v[r][j][e] = fma(a[r], o.v[j][e], t.v[r][j][e]);
}

// Of the lane's rows, the one whose dot product it gets; lanes 4 .. 7 of a row get those of lanes 0 .. 3.
DEVICE i32 dot_row() { return 2 * (lane_index() & 1) + (lane_index() >> 1 & 1); }

// Canonical dot product of the lane's row dot_row(). Neighbours have the classes that xor 4 adds, lanes two apart those of xor 8, four apart
// those of xor 16; xor 2 and 1 are within the lane. A lane that adds half of the rows leaves the other half to its partner.
DEVICE float dot(const Cells &t, const Operand &o) {
  bool odd = lane_index() & 1, second = lane_index() & 2;
  float two[2];
#pragma unroll
  for (i32 r = 0; r < 2; r++) {
    // Two rows at a time: registers for all four are not there.
    float low[WIDE] = {}, high[WIDE] = {}, b[WIDE];
#pragma unroll
    for (i32 j = 0; j < BLOCKS; j++)
#pragma unroll
      for (i32 e = 0; e < WIDE; e++) {
        low[e] = fma(t.v[r][j][e], o.v[j][e], low[e]);
        high[e] = fma(t.v[r + 2][j][e], o.v[j][e], high[e]);
      }
#pragma unroll
    for (i32 e = 0; e < WIDE; e++) {
      float kept = odd ? high[e] : low[e], given = odd ? low[e] : high[e];
      b[e] = __fadd_rn(kept, __shfl_xor_sync(0xFFFFFFFFu, given, 1));
    }
    two[r] = __fadd_rn(__fadd_rn(b[0], b[2]), __fadd_rn(b[1], b[3]));
  }
  float kept = second ? two[1] : two[0], given = second ? two[0] : two[1];
  float one = __fadd_rn(kept, __shfl_xor_sync(0xFFFFFFFFu, given, 2));
  return __fadd_rn(one, __shfl_xor_sync(0xFFFFFFFFu, one, 4));
}

// Of all of a lane's rows what each lane has of its dot_row().
DEVICE void of_rows(float (&all)[ROWS], float own) {
#pragma unroll
  for (i32 r = 0; r < ROWS; r++)
    all[r] = __shfl_sync(0xFFFFFFFFu, own, (lane_index() & ~(SHARE - 1)) + (r / 2 + 2 * (r % 2)));
}

// Eight bfloat16 as they came, by a factor, to eight floats in shared memory.
DEVICE void put_bf16(float *to, const uint4 &raw, float factor) {
  u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
  float v[8];
#pragma unroll
  for (i32 i = 0; i < 4; i++) {
    v[2 * i] = __fmul_rn(from_bits(words[i] << 16), factor);
    v[2 * i + 1] = __fmul_rn(from_bits(words[i] & 0xFFFF0000u), factor);
  }
  put8(to, v);
}

DEVICE void put_bf16(float *to, const uint4 &raw) {
  u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
  float v[8];
#pragma unroll
  for (i32 i = 0; i < 4; i++) {
    v[2 * i] = from_bits(words[i] << 16);
    v[2 * i + 1] = from_bits(words[i] & 0xFFFF0000u);
  }
  put8(to, v);
}

// And back: what was bfloat16 loses nothing.
DEVICE u32 pair_of_bf16(float a, float b) { return bits_of(a) >> 16 | (bits_of(b) & 0xFFFF0000u); }
DEVICE uint4 take_bf16(const float *from) {
  float4 a = ((const float4 *)from)[0], b = ((const float4 *)from)[1];
  return make_uint4(pair_of_bf16(a.x, a.y), pair_of_bf16(a.z, a.w), pair_of_bf16(b.x, b.y), pair_of_bf16(b.z, b.w));
}

}  // namespace single
