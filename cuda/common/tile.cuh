// A tile of state in registers: 16 rows of one head, a warp each (or, where columns are many, one half after the other). Lane l holds rows
// l / 4 and l / 4 + 8; of both, the eight columns 32 j + 8 (l % 4) .. + 7 of every block j of 32. This is the A operand of m16n8k16 with permuted columns, and the eight columns are
// eight classes of the canonical dot product, whose butterflies xor 4, 2, 1 stay in registers; xor 8 and 16 take two shuffles.
#pragma once
#include "batch.cuh"

struct Lane {
  i32 group;  // row within half a tile
  i32 quad;   // which eight columns of a block
};

DEVICE Lane lane_of(i32 thread) { return Lane{(thread % WARP) / 4, thread % 4}; }

// NC blocks of columns, H halves of eight rows.
template <i32 NC, i32 H>
struct Tile {
  float v[H][NC][8];
};

// One head's checkpoint of one slot, seen from one tile.
struct Checkpoint {
  char *head;       // first byte of the head's state
  i64 *tag;         // this tile's
  i64 element;      // number of the head's first element within the layer
  u64 seed;         // of stochastic rounding
  i32 layer;
  i32 first;        // row of the head
  i32 rows;         // of this tile; 0: there is no tile
};

DEVICE Checkpoint checkpoint_of(const State &s, i64 layer, i64 slot, i32 head, i32 tile, u64 seed) {
  Checkpoint c;
  i64 elements = (i64)s.rows * s.columns;
  i64 size = s.format <= FORMAT_F32 ? 4 : 2;
  c.element = head * elements;
  c.head = (char *)own_part(s.checkpoint, slot) + c.element * size;
  c.tag = (i64 *)own_part(s.tags, slot) + (i64)head * s.tiles + tile;
  c.seed = seed;
  c.layer = (i32)layer;
  c.first = tile * TILE;
  c.rows = tile < s.tiles ? min(s.rows - c.first, (i32)TILE) : 0;
  return c;
}

// Eight elements of a 16-bit row from column on, zeros behind its end.
DEVICE void load8_short(const char *row, i32 column, i32 columns, bool is_vector, bool is_bf16, float (&v)[8]) {
  if (is_vector) {
    if (column < columns) {
      load8_16(row + 2 * (i64)column, is_bf16, v);
      return;
    }
  }
#pragma unroll
  for (i32 e = 0; e < 8; e++) {
    v[e] = 0.0f;
    if (!is_vector && column + e < columns) {
      u16 x = ((const u16 *)row)[column + e];
      v[e] = is_bf16 ? from_bf16(x) : from_f16(x);
    }
  }
}

// Four elements rounded stochastically: those of Philox block number block.
static __device__ __noinline__ u64 round_four(float a, float b, float c, float d, bool is_bf16, u64 seed, i64 position,
                                              i32 layer, u32 block) {
  Words w = philox(seed, (u32)position, (u32)(position >> 32), (u32)layer, block);
  u32 x, y;
  if (is_bf16) {
    x = to_bf16_stochastic(a, w.word[0]) | (u32)to_bf16_stochastic(b, w.word[1]) << 16;
    y = to_bf16_stochastic(c, w.word[2]) | (u32)to_bf16_stochastic(d, w.word[3]) << 16;
  } else {
    x = to_f16_stochastic(a, w.word[0]) | (u32)to_f16_stochastic(b, w.word[1]) << 16;
    y = to_f16_stochastic(c, w.word[2]) | (u32)to_f16_stochastic(d, w.word[3]) << 16;
  }
  return (u64)y << 32 | x;
}

// One of them.
static __device__ __noinline__ u32 round_one(float a, bool is_bf16, u64 seed, i64 position, i32 layer, i64 element) {
  Words w = philox(seed, (u32)position, (u32)(position >> 32), (u32)layer, (u32)(element / 4));
  i32 k = (i32)(element % 4);
  u32 word = k == 0 ? w.word[0] : k == 1 ? w.word[1] : k == 2 ? w.word[2] : w.word[3];
  return is_bf16 ? to_bf16_stochastic(a, word) : to_f16_stochastic(a, word);
}

// Loads a tile; of SPLIT32 only the high plane if high_only. Rows and columns that there are not become zero.
template <i32 FORMAT, i32 NC, i32 H>
DEVICE void load_tile(Tile<NC, H> &t, const State &s, const Checkpoint &c, Lane lane, i32 half, bool high_only) {
  constexpr i32 format = FORMAT;
  bool is_vector = s.is_vector;
  i32 n = s.columns;
  i64 plane = (i64)s.rows * n * 2;
#pragma unroll
  for (i32 h = 0; h < H; h++) {
    i32 row = (half + h) * 8 + lane.group;
    bool exists = row < c.rows;
    i64 start = (i64)(c.first + (exists ? row : 0)) * n;
#pragma unroll
    for (i32 j = 0; j < NC; j++) {
      i32 column = BLOCK * j + 8 * lane.quad;
      i32 end = exists ? n : 0;
      if (format == FORMAT_F32) {
        const char *at = c.head + start * 4;
        if (is_vector && column < end) {
          load8_32(at + 4 * (i64)column, t.v[h][j]);
        } else {
#pragma unroll
          for (i32 e = 0; e < 8; e++)
            t.v[h][j][e] = !is_vector && column + e < end ? ((const float *)at)[column + e] : 0.0f;
        }
      } else if (format == FORMAT_SPLIT32 && !high_only) {
        const char *high = c.head + start * 2, *low = high + plane;
        if (is_vector && column < end) {
          uint4 a = *(const uint4 *)(high + 2 * (i64)column), b = *(const uint4 *)(low + 2 * (i64)column);
          u32 wa[4] = {a.x, a.y, a.z, a.w}, wb[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
          for (i32 i = 0; i < 4; i++) {
            t.v[h][j][2 * i] = join(wa[i] & 0xFFFFu, wb[i]);
            t.v[h][j][2 * i + 1] = join(wa[i] >> 16, wb[i] >> 16);
          }
        } else {
#pragma unroll
          for (i32 e = 0; e < 8; e++)
            t.v[h][j][e] = !is_vector && column + e < end
                               ? join(((const u16 *)high)[column + e], ((const u16 *)low)[column + e])
                               : 0.0f;
        }
      } else {
        load8_short(c.head + start * 2, column, end, is_vector, format != FORMAT_F16, t.v[h][j]);
      }
    }
  }
}

// Begins to bring a tile near; of SPLIT32 only the high plane if high_only.
template <i32 FORMAT>
DEVICE void prefetch_tile(const State &s, const Checkpoint &c, bool high_only) {
  enum : i32 { LINE = 128 };
  i32 size = FORMAT == FORMAT_F32 ? 4 : 2, bytes = c.rows * s.columns * size;
  const char *at = c.head + (i64)c.first * s.columns * size;
#pragma unroll 1
  for (i32 i = (i32)(threadIdx.x % WARP) * LINE; i < bytes; i += WARP * LINE) {
    ptx_prefetch(at + i);
    if (FORMAT == FORMAT_SPLIT32 && !high_only) ptx_prefetch(at + i + (i64)s.rows * s.columns * 2);
  }
}

// Stores a tile as it stands at a position. Of 16-bit formats the tile becomes what was stored. The tag is the caller's to set.
template <i32 FORMAT, i32 NC, i32 H>
DEVICE void store_tile(Tile<NC, H> &t, const State &s, const Checkpoint &c, Lane lane, i32 half, i64 position) {
  constexpr i32 format = FORMAT;
  bool is_vector = s.is_vector;
  i32 n = s.columns;
  i64 plane = (i64)s.rows * n * 2;
#pragma unroll
  for (i32 h = 0; h < H; h++) {
    i32 row = (half + h) * 8 + lane.group;
    i64 start = (i64)(c.first + row) * n;
#pragma unroll
    for (i32 j = 0; j < NC; j++) {
      i32 column = BLOCK * j + 8 * lane.quad;
      i32 count = row < c.rows ? min(n - column, 8) : 0;
      if (count <= 0) continue;
      float(&v)[8] = t.v[h][j];
      if (format == FORMAT_F32) {
        float *at = (float *)(c.head + start * 4) + column;
        if (is_vector) {
          ((float4 *)at)[0] = make_float4(canonical(v[0]), canonical(v[1]), canonical(v[2]), canonical(v[3]));
          ((float4 *)at)[1] = make_float4(canonical(v[4]), canonical(v[5]), canonical(v[6]), canonical(v[7]));
        } else {
#pragma unroll
          for (i32 e = 0; e < 8; e++)
            if (e < count) at[e] = canonical(v[e]);
        }
        continue;
      }
      u16 *at = (u16 *)(c.head + start * 2) + column;
      u32 first[4], second[4];
      if (format == FORMAT_SPLIT32) {
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
          float a = canonical(v[2 * i]), b = canonical(v[2 * i + 1]);
          u32 ha = high_plane(a), hb = high_plane(b);
          first[i] = (ha & 0xFFFFu) | hb << 16;
          second[i] = low_plane(a, ha) | low_plane(b, hb) << 16;
        }
      } else {
        if (!s.stochastic) {
#pragma unroll
          for (i32 i = 0; i < 4; i++)
            first[i] = format == FORMAT_BF16 ? to_bf16(v[2 * i]) | (u32)to_bf16(v[2 * i + 1]) << 16
                                             : to_f16(v[2 * i]) | (u32)to_f16(v[2 * i + 1]) << 16;
        } else if (is_vector) {
          i64 element = c.element + start + column;
#pragma unroll
          for (i32 i = 0; i < 2; i++) {
            u64 four = round_four(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3], format == FORMAT_BF16, c.seed,
                                  position, c.layer, (u32)(element / 4) + i);
            first[2 * i] = (u32)four;
            first[2 * i + 1] = (u32)(four >> 32);
          }
        } else {
          i64 element = c.element + start + column;
#pragma unroll
          for (i32 i = 0; i < 4; i++) {
            first[i] = round_one(v[2 * i], format == FORMAT_BF16, c.seed, position, c.layer, element + 2 * i);
            first[i] |= round_one(v[2 * i + 1], format == FORMAT_BF16, c.seed, position, c.layer, element + 2 * i + 1) << 16;
          }
        }
#pragma unroll
        for (i32 e = 0; e < 8; e++) {
          u16 kept = (u16)(first[e / 2] >> (16 * (e % 2)));
          if (e < count) v[e] = format == FORMAT_BF16 ? from_bf16(kept) : from_f16(kept);
        }
      }
      if (is_vector) {
        *(uint4 *)at = make_uint4(first[0], first[1], first[2], first[3]);
        if (format == FORMAT_SPLIT32)
          *(uint4 *)((char *)at + plane) = make_uint4(second[0], second[1], second[2], second[3]);
      } else {
#pragma unroll
        for (i32 e = 0; e < 8; e++) {
          if (e >= count) continue;
          at[e] = (u16)(first[e / 2] >> (16 * (e % 2)));
          if (format == FORMAT_SPLIT32)
            ((u16 *)((char *)at + plane))[e] = (u16)(second[e / 2] >> (16 * (e % 2)));
        }
      }
    }
  }
}

// Whatever the inputs are, columns behind the end stay zero.
template <i32 NC, i32 H>
DEVICE void clear_padding(Tile<NC, H> &t, i32 columns, Lane lane) {
  if (columns % BLOCK == 0) return;
#pragma unroll
  for (i32 h = 0; h < H; h++)
#pragma unroll
    for (i32 j = 0; j < NC; j++)
#pragma unroll
      for (i32 e = 0; e < 8; e++)
        if (BLOCK * j + 8 * lane.quad + e >= columns) t.v[h][j][e] = 0.0f;
}

// A lane's eight columns of block j of a row of floats in shared memory.
DEVICE void shared8(const float *row, i32 j, Lane lane, float (&v)[8]) {
  const float4 *at = (const float4 *)(row + BLOCK * j + 8 * lane.quad);
  float4 a = at[0], b = at[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// Adds a lane's eight classes and those of its quad: the canonical sum, in every lane of the quad.
DEVICE float sum_classes(const float (&c)[8]) {
  float b0 = __fadd_rn(c[0], c[4]), b1 = __fadd_rn(c[1], c[5]);
  float b2 = __fadd_rn(c[2], c[6]), b3 = __fadd_rn(c[3], c[7]);
  float s = __fadd_rn(__fadd_rn(b0, b2), __fadd_rn(b1, b3));
  s = __fadd_rn(s, __shfl_xor_sync(0xFFFFFFFFu, s, 1));
  return __fadd_rn(s, __shfl_xor_sync(0xFFFFFFFFu, s, 2));
}

// Canonical dot products of the lane's two rows with a row of floats in shared memory, of blocks blocks.
template <i32 NC, i32 H>
DEVICE void dot_tile(const Tile<NC, H> &t, const float *with, i32 blocks, Lane lane, float (&out)[H]) {
  float c[H][8] = {};
#pragma unroll
  for (i32 j = 0; j < NC; j++) {
    if (j >= blocks) break;
    float w[8];
    shared8(with, j, lane, w);
#pragma unroll
    for (i32 h = 0; h < H; h++)
#pragma unroll
      for (i32 e = 0; e < 8; e++) c[h][e] = fma(t.v[h][j][e], w[e], c[h][e]);
  }
#pragma unroll
  for (i32 h = 0; h < H; h++) out[h] = sum_classes(c[h]);
}

// The same of two rows of floats in shared memory.
DEVICE float dot_rows(const float *a, const float *b, i32 blocks, Lane lane) {
  float c[8] = {};
  for (i32 j = 0; j < blocks; j++) {
    float x[8], y[8];
    shared8(a, j, lane, x);
    shared8(b, j, lane, y);
#pragma unroll
    for (i32 e = 0; e < 8; e++) c[e] = fma(x[e], y[e], c[e]);
  }
  return sum_classes(c);
}

// Decays a tile by one factor.
template <i32 NC, i32 H>
DEVICE void decay_tile(Tile<NC, H> &t, i32 blocks, float factor, bool slow) {
#pragma unroll
  for (i32 h = 0; h < H; h++)
#pragma unroll
    for (i32 j = 0; j < NC; j++) {
      if (j >= blocks) break;
#pragma unroll
      for (i32 e = 0; e < 8; e++) t.v[h][j][e] = decayed(t.v[h][j][e], factor, slow);
    }
}

// S = fma(a, row, S) for the lane's two rows.
template <i32 NC, i32 H>
DEVICE void rank_one(Tile<NC, H> &t, const float *row, const float (&a)[H], i32 blocks, Lane lane) {
#pragma unroll
  for (i32 j = 0; j < NC; j++) {
    if (j >= blocks) break;
    float w[8];
    shared8(row, j, lane, w);
#pragma unroll
    for (i32 h = 0; h < H; h++)
#pragma unroll
      for (i32 e = 0; e < 8; e++) t.v[h][j][e] = fma(a[h], w[e], t.v[h][j][e]);
  }
}
