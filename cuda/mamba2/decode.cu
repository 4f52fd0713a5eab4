// Mamba-2: steps of one token a row, where memory is the limit: 128 columns, bfloat16 activations, everything aligned to 16 bytes.
//
// Blocks stay on their multiprocessors and take one item after the other: a few heads of one group and row. The last warp, the producer,
// brings what the items need to shared memory by bulk copies, a head per stage and B and C per item, as far ahead as there are stages.
// Four consumer warps compute: a head each; or, where records are folded, a tile of one head each, by the serial form's arithmetic.
//
// INSTANCE_FORMAT: the checkpoint's. INSTANCE_HIGH: whether the readout is HIGH rather than FULL.
#include "../common/block.cuh"

namespace mamba2 {

enum : i32 {
  COLUMNS = 128,
  BLOCKS = COLUMNS / BLOCK,
  CONSUMERS = 4,
  MAX_STAGES = 8,
  MAX_B = 2,
  MAX_HEADS = 4,       // of an item
  MAX_CHANNELS = 128,  // of a head
};

// What is to be done with a head.
enum : i32 {
  READ,     // all of its tiles stand at one position, and stay there
  FOLD,     // all of its tiles stand at one position, and take records in
  ODD,      // tiles stand at different positions
  ZERO,     // its outputs are zero
  NOTHING,  // there is no token, or outputs are left alone
};

// What the producer knows of an item.
struct Plan {
  Span span;
  i64 slot;
  i64 ring;
  i64 position;
  i64 oldest;  // records are numbered from here
  i64 flush_before;
  u64 seed;
  i32 row;
  i32 head;     // the first
  i32 records;  // from oldest on, without the token's own
  i32 flush;
  i32 kind[MAX_HEADS];
  i32 from[MAX_HEADS];   // record at which the head's checkpoint stands
  i32 folds[MAX_HEADS];  // records that it takes in
  float dt[MAX_HEADS];
  float g[MAX_HEADS];
};

// A stage's head.
struct Head {
  Span span;
  i64 slot;
  i64 ring;
  i64 position;
  i64 oldest;
  i64 flush_before;
  u64 seed;
  i32 row;
  i32 head;
  i32 records;
  i32 flush;
  i32 kind;
  i32 from;
  i32 folds;
  i32 b;  // serial number of its B and C; negative: there are none
  float dt;
  float g;
};

struct Barriers {
  u64 full[MAX_STAGES];
  u64 empty[MAX_STAGES];
  u64 b_full[MAX_B];
  u64 b_empty[MAX_B];
};

DEVICE Barriers &barriers() {
  static __shared__ Barriers b;
  return b;
}

DEVICE char *stage_at(const Mamba2DecodeParams &p, i32 stage) { return shared_memory + stage * p.stage_bytes; }
DEVICE Head &head_at(const Mamba2DecodeParams &p, i32 stage) { return *(Head *)(stage_at(p, stage) + p.at_head); }
DEVICE u16 *x_at(const Mamba2DecodeParams &p, i32 stage) { return (u16 *)(stage_at(p, stage) + p.at_x); }
DEVICE float2 *gates_at(const Mamba2DecodeParams &p, i32 stage) { return (float2 *)(stage_at(p, stage) + p.at_gates); }
// Records of B, the token's own behind them; C behind all that there can be.
DEVICE u16 *b_at(const Mamba2DecodeParams &p, i32 serial) {
  return (u16 *)(shared_memory + p.stages * p.stage_bytes + serial % MAX_B * p.b_bytes);
}
DEVICE u16 *c_at(const Mamba2DecodeParams &p, i32 serial) { return b_at(p, serial) + p.rows * COLUMNS; }

DEVICE i64 items_of(const Mamba2DecodeParams &p) {
  return p.family.batch.n_rows * (p.family.state.heads / p.heads_per_item);
}

// dt and g of a row's token.
DEVICE void token_gates(const Mamba2Params &p, const Span &span, i64 head, float &dt, float &g) {
  dt = load_one(span_at(span, p.dt, 0, head), p.dt.dtype);
  if (p.dt_bias.data) dt = __fadd_rn(dt, load_one(tensor_at(p.dt_bias, 0, 0, head), p.dt_bias.dtype));
  if (p.softplus) dt = softplus(dt);
  g = __fmul_rn(load_one(tensor_at(p.a, 0, 0, head), p.a.dtype), dt);
}

// ---- The producer ----

DEVICE void make_plan(const Mamba2DecodeParams &params, i64 item, Plan &plan) {
  const Mamba2Params &p = params.family;
  const State &s = p.state;
  i32 heads = params.heads_per_item, per_row = s.heads / heads;
  i64 row = item / per_row;
  i32 head = (i32)(item % per_row) * heads;
  Row r = resolve(p.slots, p.batch, row, p.place, head == 0);
  plan.row = (i32)row;
  plan.head = head;
  plan.span = r.span;
  plan.records = 0;
  i32 all = !r.live ? (p.batch.keep_null_outputs ? NOTHING : ZERO) : r.span.len == 0 ? NOTHING : READ;
#pragma unroll 1
  for (i32 h = 0; h < heads; h++) plan.kind[h] = all;
  if (all != READ) return;
  const Cursor &cursor = p.slots.cursors[r.ring];
  plan.slot = r.slot;
  plan.ring = r.ring;
  plan.position = cursor.position;
  plan.flush_before = cursor.flush_before;
  plan.seed = cursor.seed;
  plan.flush = p.batch.flush ? p.batch.flush[row] : 0;
  const i64 *tags = (const i64 *)part_at(s.tags, p.place.layer, r.slot) + (i64)head * s.tiles;
  i64 oldest = plan.position;
#pragma unroll 1
  for (i32 h = 0; h < heads; h++) {
    token_gates(p, r.span, head + h, plan.dt[h], plan.g[h]);
    i64 first = tags[h * s.tiles], low = first;
    bool bad = false, odd = false;
#pragma unroll 4
    for (i32 t = 0; t < s.tiles; t++) {
      i64 tag = tags[h * s.tiles + t];
      bad = bad || !tag_is_valid(p.slots, plan.position, tag);
      odd = odd || tag != first;
      low = min(low, tag);
    }
    if (bad) {
      fault(p.slots, FAULT_POSITION, r.slot, row, p.place.pool, p.place.layer);
      plan.kind[h] = ZERO;
      continue;
    }
    i64 folds = folds_of(p.slots, plan.position, first, 1, plan.flush_before, plan.flush);
    plan.kind[h] = odd ? ODD : folds > 0 ? FOLD : READ;
    plan.folds[h] = (i32)folds;
    plan.from[h] = (i32)(plan.position - first);
    oldest = min(oldest, low);
  }
  plan.oldest = oldest;
  plan.records = (i32)(plan.position - oldest);
  // Counted from the oldest.
#pragma unroll 1
  for (i32 h = 0; h < heads; h++) plan.from[h] = plan.records - plan.from[h];
}

DEVICE u32 copy(void *to, const char *from, i64 bytes, u64 *barrier) {
  if (bytes > 0) ptx_bulk_copy(to, from, (u32)bytes, barrier);
  return (u32)bytes;
}

// Copies n records of a ring, from row first on and around its end, one behind the other.
DEVICE void copy_records(void *to, const char *ring, i32 first, i32 n, i32 rows, i32 bytes, u64 *barrier) {
  i32 before = min(n, rows - first);
  if (before > 0) ptx_bulk_copy(to, ring + (i64)first * bytes, (u32)(before * bytes), barrier);
  if (n > before) ptx_bulk_copy((char *)to + before * bytes, ring, (u32)((n - before) * bytes), barrier);
}

// Brings B and C of an item.
DEVICE void bring_b(const Mamba2DecodeParams &params, const Plan &plan, i32 serial) {
  const Mamba2Params &p = params.family;
  u64 *full = &barriers().b_full[serial % MAX_B];
  ptx_barrier_wait(&barriers().b_empty[serial % MAX_B], (serial / MAX_B & 1) ^ 1);
  if (lane_index() != 0) return;
  i64 group = plan.head / p.heads_per_group;
  i32 bytes = COLUMNS * 2, first = (i32)(plan.oldest % p.ring_rows);
  ptx_barrier_arrive_expect(full, (u32)((plan.records + 2) * bytes));
  const char *ring = (const char *)part_at(p.ring_b, p.place.layer, plan.ring) + group * p.ring_rows * bytes;
  copy_records(b_at(params, serial), ring, first, plan.records, p.ring_rows, bytes, full);
  ptx_bulk_copy(b_at(params, serial) + plan.records * COLUMNS, span_at(plan.span, p.b, 0, group), (u32)bytes, full);
  ptx_bulk_copy(c_at(params, serial), span_at(plan.span, p.c, 0, group), (u32)bytes, full);
}

// Brings head h of an item.
template <i32 FORMAT, bool HIGH>
DEVICE void bring_head(const Mamba2DecodeParams &params, const Plan &plan, i32 h, i32 serial, i32 b) {
  const Mamba2Params &p = params.family;
  const State &s = p.state;
  i32 stage = serial % params.stages, lane = lane_index();
  u64 *full = &barriers().full[stage];
  ptx_barrier_wait(&barriers().empty[stage], (serial / params.stages & 1) ^ 1);
  i32 kind = plan.kind[h], n = plan.records, first = (i32)(plan.oldest % p.ring_rows);
  i64 head = plan.head + h;
  bool has_work = kind <= ODD;
  if (lane == 0) {
    Head &to = head_at(params, stage);
    to.span = plan.span;
    to.slot = plan.slot;
    to.ring = plan.ring;
    to.position = plan.position;
    to.oldest = plan.oldest;
    to.flush_before = plan.flush_before;
    to.seed = plan.seed;
    to.row = plan.row;
    to.head = (i32)head;
    to.records = n;
    to.flush = plan.flush;
    to.kind = kind;
    to.from = plan.from[h];
    to.folds = plan.folds[h];
    to.b = has_work ? b : -1;
    to.dt = plan.dt[h];
    to.g = plan.g[h];
    if (!has_work) {
      ptx_barrier_arrive(full);
    } else {
      i32 bytes = s.rows * 2;
      i64 state = (i64)s.rows * COLUMNS * (FORMAT <= FORMAT_F32 ? 4 : 2);
      const char *checkpoint = (const char *)part_at(s.checkpoint, p.place.layer, plan.slot) + head * state;
      ptx_barrier_arrive_expect(full, (u32)((n + 1) * bytes + (kind == READ ? params.plane_bytes : 0)));
      if (kind == READ) {
        ptx_bulk_copy(stage_at(params, stage), checkpoint, (u32)params.plane_bytes, full);
      } else {
        ptx_bulk_prefetch(checkpoint, (u32)state);
      }
      const char *ring = (const char *)part_at(p.ring_x, p.place.layer, plan.ring) + head * p.ring_rows * bytes;
      copy_records(x_at(params, stage), ring, first, n, p.ring_rows, bytes, full);
      ptx_bulk_copy(x_at(params, stage) + n * s.rows, span_at(plan.span, p.x, 0, head), (u32)bytes, full);
    }
  }
  if (has_work && lane < n) {
    i32 row = first + lane;
    const char *ring = (const char *)part_at(p.ring_dt, p.place.layer, plan.ring) + head * p.ring_rows * 8;
    ptx_copy8(gates_at(params, stage) + lane, ring + (row < p.ring_rows ? row : row - p.ring_rows) * 8);
  }
  ptx_copies_arrive(full);
}

template <i32 FORMAT, bool HIGH>
DEVICE void produce(const Mamba2DecodeParams &params) {
  static __shared__ Plan plans[WARP];
  i64 items = items_of(params);
  i32 serial = 0, b = 0;
#pragma unroll 1
  for (i64 first = blockIdx.x; first < items; first += (i64)WARP * gridDim.x) {
    i64 mine = first + (i64)lane_index() * gridDim.x;
    if (mine < items) make_plan(params, mine, plans[lane_index()]);
    __syncwarp();
#pragma unroll 1
    for (i32 i = 0; i < WARP && first + (i64)i * gridDim.x < items; i++) {
      const Plan &plan = plans[i];
      bool has_work = false;
#pragma unroll 1
      for (i32 h = 0; h < params.heads_per_item; h++) has_work = has_work || plan.kind[h] <= ODD;
      if (has_work) bring_b(params, plan, b);
#pragma unroll 1
      for (i32 h = 0; h < params.heads_per_item; h++) bring_head<FORMAT, HIGH>(params, plan, h, serial++, b);
      if (has_work) b++;
    }
    __syncwarp();
  }
}

// ---- Consumers ----

// What a lane knows of the record of its number: the token's own behind the others; beyond them nothing, which weighs nothing.
struct Record {
  float dt;
  float g;
  float elapsed;  // log decay of this record and of all later ones
  float weight;   // dt e^(log decay of all later ones) (B . C)
};

DEVICE float pair_low(u32 pair) { return from_bits(pair << 16); }
DEVICE float pair_high(u32 pair) { return from_bits(pair & 0xFFFF0000u); }

// The columns of C that a lane's tile has.
struct Columns {
  uint4 of[BLOCKS];
};

DEVICE Columns columns_of(const u16 *c, Lane lane) {
  Columns r;
#pragma unroll
  for (i32 j = 0; j < BLOCKS; j++) r.of[j] = *(const uint4 *)(c + BLOCK * j + 8 * lane.quad);
  return r;
}

// Products of 16 rows of 16-bit values with C, by tensor cores; of rows lane.group and lane.group + 8 in quad 0.
DEVICE void multiply(const u16 *low, const u16 *high, const Columns &c, Lane lane, float &at_low, float &at_high) {
  float even[4] = {}, odd[4] = {};
#pragma unroll
  for (i32 j = 0; j < BLOCKS; j++) {
    uint4 a = *(const uint4 *)(low + BLOCK * j + 8 * lane.quad), b = *(const uint4 *)(high + BLOCK * j + 8 * lane.quad);
    // One column of the right operand is C, the others are zero.
    bool is_c = lane.group == 0;
    u32 left[4] = {a.x, b.x, a.y, b.y}, right[2] = {is_c ? c.of[j].x : 0, is_c ? c.of[j].y : 0};
    ptx_mma_m16n8k16_bf16(even, left, right, even);
    u32 left_odd[4] = {a.z, b.z, a.w, b.w}, right_odd[2] = {is_c ? c.of[j].z : 0, is_c ? c.of[j].w : 0};
    ptx_mma_m16n8k16_bf16(odd, left_odd, right_odd, odd);
  }
  at_low = even[0] + odd[0];
  at_high = even[2] + odd[2];
}

// The records of a head, a lane each.
DEVICE Record weigh(const Mamba2DecodeParams &params, const Head &head, i32 stage, const Columns &c, Lane lane) {
  i32 n = head.records, me = lane_index();
  Record r = {};
  if (me < n) {
    float2 gates = gates_at(params, stage)[me];
    r.dt = gates.x;
    r.g = gates.y;
  } else if (me == n) {
    r.dt = head.dt;
    r.g = head.g;
  }
  const u16 *b = b_at(params, head.b);
  float product = 0.0f;
#pragma unroll 1
  for (i32 first = 0; first <= n; first += 16) {
    float low, high;
    multiply(b + (first + lane.group) * COLUMNS, b + (first + lane.group + 8) * COLUMNS, c, lane, low, high);
    float at_low = __shfl_sync(0xFFFFFFFFu, low, 4 * (me % 8)), at_high = __shfl_sync(0xFFFFFFFFu, high, 4 * (me % 8));
    if (me / 16 == first / 16) product = me % 16 < 8 ? at_low : at_high;
  }
  r.elapsed = r.g;
#pragma unroll
  for (i32 step = 1; step < WARP; step *= 2) {
    float later = __shfl_sync(0xFFFFFFFFu, r.elapsed, (me + step) % WARP);
    if (me + step < WARP) r.elapsed += later;
  }
  float later = __shfl_sync(0xFFFFFFFFu, r.elapsed, (me + 1) % WARP);
  r.weight = me <= n ? r.dt * exp(me + 1 < WARP ? later : 0.0f) * product : 0.0f;
  return r;
}

// y = fma(D, x, y), the gate, and the store, of one channel.
DEVICE void finish(const Mamba2Params &p, const Head &head, i32 channel, float x, float z, float y) {
  if (p.d_skip.data) {
    const char *d = tensor_at(p.d_skip, 0, 0, head.head) + (p.d_per_element ? channel * size_of(p.d_skip.dtype) : 0);
    y = fma(load_one(d, p.d_skip.dtype), x, y);
  }
  if (p.z.data) y = __fmul_rn(y, silu(z));
  store_one(span_at(head.span, p.out, 0, head.head) + channel * size_of(p.out.dtype), p.out.dtype, y);
}

DEVICE float gate_of(const Mamba2Params &p, const Head &head, i32 channel) {
  if (!p.z.data || channel >= p.state.rows) return 0.0f;
  return load_one(span_at(head.span, p.z, 0, head.head) + channel * size_of(p.z.dtype), p.z.dtype);
}

// A channel of the token's record of x.
DEVICE void record_x(const Mamba2Params &p, const Head &head, i32 channel, u16 x) {
  char *ring = (char *)part_at(p.ring_x, p.place.layer, head.ring) + (i64)head.head * p.ring_rows * p.state.rows * 2;
  ((u16 *)ring)[head.position % p.ring_rows * p.state.rows + channel] = x;
}

// The rest of the token's record: dt and g of the head; B, if it is the first of its group.
DEVICE void record_gates(const Mamba2Params &p, const Head &head, const u16 *own_b) {
  i64 row = head.position % p.ring_rows;
  if (lane_index() == 0) {
    char *ring = (char *)part_at(p.ring_dt, p.place.layer, head.ring) + (i64)head.head * p.ring_rows * 8;
    ((float2 *)ring)[row] = make_float2(head.dt, head.g);
  }
  if (head.head % p.heads_per_group != 0) return;
  char *ring = (char *)part_at(p.ring_b, p.place.layer, head.ring) + (i64)(head.head / p.heads_per_group) * p.ring_rows * COLUMNS * 2;
  ((uint2 *)(ring + row * COLUMNS * 2))[lane_index()] = ((const uint2 *)own_b)[lane_index()];
}

// Statistics, once for all heads of a row.
DEVICE void tally_row(const Mamba2Params &p, const Head &head, bool folded, bool high) {
  const State &s = p.state;
  if (head.head != 0 || lane_index() != 0) return;
  u64 elements = (u64)s.heads * s.rows * s.columns, size = s.format <= FORMAT_F32 ? 4 : 2;
  u64 record = (u64)s.heads * (s.rows * 2 + 8) + (u64)(s.heads / p.heads_per_group) * s.columns * 2;
  tally(p.slots, folded ? (u64)s.heads * s.tiles : 0, high && !folded && s.format == FORMAT_SPLIT32 ? elements * 2 : elements * size,
        folded ? elements * size : 0, (u64)head.records * record, record);
}

// What the checkpoint says of two rows of a tile: their products with C, summed over the quad.
template <i32 FORMAT>
DEVICE void read_full(const Mamba2DecodeParams &params, i32 stage, i32 row, const Columns &c, Lane lane, float (&out)[2]) {
  const State &s = params.family.state;
#pragma unroll
  for (i32 h = 0; h < 2; h++) {
    i64 start = (i64)(row + 8 * h) * COLUMNS + 8 * lane.quad;
    float sum[2] = {};
#pragma unroll
    for (i32 j = 0; j < BLOCKS; j++) {
      float v[8];
      if (FORMAT == FORMAT_F32) {
        load8_32(stage_at(params, stage) + (start + BLOCK * j) * 4, v);
      } else {
        const char *high = stage_at(params, stage) + (start + BLOCK * j) * 2, *low = high + (i64)s.rows * COLUMNS * 2;
        uint4 a = *(const uint4 *)high, b = *(const uint4 *)low;
        u32 wa[4] = {a.x, a.y, a.z, a.w}, wb[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
          v[2 * i] = join(wa[i] & 0xFFFFu, wb[i]);
          v[2 * i + 1] = join(wa[i] >> 16, wb[i] >> 16);
        }
      }
      u32 with[4] = {c.of[j].x, c.of[j].y, c.of[j].z, c.of[j].w};
#pragma unroll
      for (i32 i = 0; i < 4; i++) {
        sum[0] = fma(v[2 * i], pair_low(with[i]), sum[0]);
        sum[1] = fma(v[2 * i + 1], pair_high(with[i]), sum[1]);
      }
    }
    out[h] = sum[0] + sum[1];
    out[h] += __shfl_xor_sync(0xFFFFFFFFu, out[h], 1);
    out[h] += __shfl_xor_sync(0xFFFFFFFFu, out[h], 2);
  }
}

// A whole head, whose checkpoint stays as it is.
template <i32 FORMAT, bool HIGH>
DEVICE void read_head(const Mamba2DecodeParams &params, i32 stage) {
  static __shared__ float seen[CONSUMERS][MAX_CHANNELS];
  const Mamba2Params &p = params.family;
  const Head &head = head_at(params, stage);
  const u16 *x = x_at(params, stage);
  Lane lane = lane_of(threadIdx.x);
  i32 n = head.records, rows = p.state.rows;
  Columns c = columns_of(c_at(params, head.b), lane);
  Record r = weigh(params, head, stage, c, lane);
  float decay = exp(__shfl_sync(0xFFFFFFFFu, r.elapsed, head.from));
  float *mine = seen[warp_of()];
#pragma unroll 1
  for (i32 row = lane.group; row < rows; row += TILE) {
    float part[2];
    if (HIGH) {
      const u16 *low = (const u16 *)stage_at(params, stage) + row * COLUMNS;
      multiply(low, low + 8 * COLUMNS, c, lane, part[0], part[1]);
    } else {
      read_full<FORMAT>(params, stage, row, c, lane, part);
    }
    if (lane.quad == 0) {
      mine[row] = part[0];
      if (row + 8 < rows) mine[row + 8] = part[1];
    }
  }
  __syncwarp();
  // Two neighbouring channels a lane.
#pragma unroll 1
  for (i32 first = 0; first < rows; first += 2 * WARP) {
    i32 channel = first + 2 * lane_index();
    bool exists = channel < rows;
    if (!exists) channel = 0;
    float z[2] = {gate_of(p, head, channel), gate_of(p, head, channel + 1)};
    float y[2] = {mine[channel] * decay, mine[channel + 1] * decay};
    u32 pair = 0;
#pragma unroll 4
    for (i32 i = head.from; i <= n; i++) {
      float weight = __shfl_sync(0xFFFFFFFFu, r.weight, i);
      pair = *(const u32 *)(x + i * rows + channel);
      y[0] = fma(weight, pair_low(pair), y[0]);
      y[1] = fma(weight, pair_high(pair), y[1]);
    }
    if (!exists) continue;
    finish(p, head, channel, pair_low(pair), z[0], y[0]);
    finish(p, head, channel + 1, pair_high(pair), z[1], y[1]);
    record_x(p, head, channel, (u16)pair);
    record_x(p, head, channel + 1, (u16)(pair >> 16));
  }
  record_gates(p, head, b_at(params, head.b) + n * COLUMNS);
  tally_row(p, head, false, HIGH);
}

// S = fma(a, row, S) for the lane's two rows, with a row of bfloat16 values.
DEVICE void rank_one(Tile<BLOCKS, 2> &t, const u16 *row, const float (&a)[2], Lane lane) {
#pragma unroll
  for (i32 j = 0; j < BLOCKS; j++) {
    uint4 four = *(const uint4 *)(row + BLOCK * j + 8 * lane.quad);
    u32 pairs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (i32 h = 0; h < 2; h++)
#pragma unroll
      for (i32 i = 0; i < 4; i++) {
        t.v[h][j][2 * i] = fma(a[h], pair_low(pairs[i]), t.v[h][j][2 * i]);
        t.v[h][j][2 * i + 1] = fma(a[h], pair_high(pairs[i]), t.v[h][j][2 * i + 1]);
      }
  }
}

// Decays a tile by one factor: one branch for all of its elements.
DEVICE void decay_whole(Tile<BLOCKS, 2> &t, float factor, bool slow) {
  if (slow) {
#pragma unroll
    for (i32 i = 0; i < 2 * BLOCKS * 8; i++) {
      float &v = t.v[i / (BLOCKS * 8)][i / 8 % BLOCKS][i % 8];
      v = fma(v, factor, v);
    }
  } else {
#pragma unroll
    for (i32 i = 0; i < 2 * BLOCKS * 8; i++) {
      float &v = t.v[i / (BLOCKS * 8)][i / 8 % BLOCKS][i % 8];
      v = __fmul_rn(v, factor);
    }
  }
}

// One tile of a head that takes records in, or whose tiles stand at different positions.
template <i32 FORMAT, bool HIGH>
DEVICE void fold_tile(const Mamba2DecodeParams &params, const Head &head, i32 stage, i32 tile, const Record &r) {
  const Mamba2Params &p = params.family;
  const u16 *x = x_at(params, stage), *b = b_at(params, head.b);
  // What the host has looked at.
  __builtin_assume(p.state.is_vector != 0);
  __builtin_assume(p.state.columns == COLUMNS);
  Lane lane = lane_of(threadIdx.x);
  i32 n = head.records, rows = p.state.rows;
  Checkpoint at = checkpoint_of(p.state, p.place.layer, head.slot, head.head, tile, head.seed);
  i32 from = head.from, folds = head.folds;
  if (head.kind == ODD) {
    i64 tag = *at.tag;
    from = (i32)(tag - head.oldest);
    folds = (i32)folds_of(p.slots, head.position, tag, 1, head.flush_before, head.flush);
  }
  i32 first = tile * TILE + lane.group, second = min(first + 8, rows - 1);
  first = min(first, rows - 1);
  Tile<BLOCKS, 2> t;
  // One half after the other: there are not registers enough for all of it as it lies in memory and as it is worked on.
#pragma unroll
  for (i32 h = 0; h < 2; h++) {
    Tile<BLOCKS, 1> half;
    load_tile<FORMAT>(half, p.state, at, lane, h, false);
    __syncwarp();
#pragma unroll
    for (i32 j = 0; j < BLOCKS; j++)
#pragma unroll
      for (i32 e = 0; e < 8; e++) t.v[h][j][e] = half.v[0][j][e];
  }
  Decay mine = decay_of(r.g);
#pragma unroll 1
  for (i32 i = from; i < from + folds; i++) {
    float dt = __shfl_sync(0xFFFFFFFFu, r.dt, i), factor = __shfl_sync(0xFFFFFFFFu, mine.factor, i);
    bool slow = __shfl_sync(0xFFFFFFFFu, (i32)mine.slow, i);
    float xd[2] = {__fmul_rn(from_bf16(x[i * rows + first]), dt), __fmul_rn(from_bf16(x[i * rows + second]), dt)};
    decay_whole(t, factor, slow);
    rank_one(t, b + i * COLUMNS, xd, lane);
  }
  from += folds;
  if (folds > 0) store_tile<FORMAT>(t, p.state, at, lane, 0, head.oldest + from);
  float y[2] = {};
#pragma unroll
  for (i32 j = 0; j < BLOCKS; j++) {
    uint4 four = *(const uint4 *)(c_at(params, head.b) + BLOCK * j + 8 * lane.quad);
    u32 with[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (i32 h = 0; h < 2; h++)
#pragma unroll
      for (i32 e = 0; e < 8; e++) {
        float v = t.v[h][j][e];
        // The checkpoint is read as it is stored.
        if (HIGH && FORMAT == FORMAT_SPLIT32) v = from_bits(high_plane(canonical(v)) << 16);
        y[h] = fma(v, e % 2 == 0 ? pair_low(with[e / 2]) : pair_high(with[e / 2]), y[h]);
      }
  }
  float decay = exp(__shfl_sync(0xFFFFFFFFu, r.elapsed, from));
  y[0] *= decay;
  y[1] *= decay;
#pragma unroll 1
  for (i32 i = from; i <= n; i += 4) {
    i32 mine_too = min(i + lane.quad, (i32)WARP - 1);
    float weight = __shfl_sync(0xFFFFFFFFu, r.weight, mine_too);
    if (mine_too <= n) {
      y[0] = fma(weight, from_bf16(x[mine_too * rows + first]), y[0]);
      y[1] = fma(weight, from_bf16(x[mine_too * rows + second]), y[1]);
    }
  }
#pragma unroll
  for (i32 h = 0; h < 2; h++) {
    y[h] += __shfl_xor_sync(0xFFFFFFFFu, y[h], 1);
    y[h] += __shfl_xor_sync(0xFFFFFFFFu, y[h], 2);
  }
  i32 channel = tile * TILE + lane.group + 8 * lane.quad;
  if (lane.quad < 2 && channel < rows) {
    u16 own = x[n * rows + channel];
    finish(p, head, channel, from_bf16(own), gate_of(p, head, channel), lane.quad == 0 ? y[0] : y[1]);
    record_x(p, head, channel, own);
  }
  __syncwarp();
  if (folds > 0 && lane_index() == 0) *at.tag = head.oldest + from;
}

// A head that takes records in, by all consumers.
template <i32 FORMAT, bool HIGH>
DEVICE void fold_head(const Mamba2DecodeParams &params, i32 stage) {
  const Mamba2Params &p = params.family;
  const Head &head = head_at(params, stage);
  Lane lane = lane_of(threadIdx.x);
  Columns c = columns_of(c_at(params, head.b), lane);
  Record r = weigh(params, head, stage, c, lane);
#pragma unroll 1
  for (i32 tile = warp_of(); tile < p.state.tiles; tile += CONSUMERS) fold_tile<FORMAT, HIGH>(params, head, stage, tile, r);
  if (warp_of() != 0) return;
  record_gates(p, head, b_at(params, head.b) + head.records * COLUMNS);
  tally_row(p, head, head.kind == FOLD, HIGH);
}

DEVICE void zero_head(const Mamba2Params &p, const Head &head) {
#pragma unroll 1
  for (i64 t = 0; t < head.span.len; t++)
    for (i32 i = lane_index(); i < p.state.rows; i += WARP)
      store_one(span_at(head.span, p.out, t, head.head) + i * size_of(p.out.dtype), p.out.dtype, 0.0f);
}

template <i32 FORMAT, bool HIGH>
DEVICE void consume(const Mamba2DecodeParams &params) {
  i64 items = items_of(params);
  i32 serial = 0, b = -1;
#pragma unroll 1
  for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
#pragma unroll 1
    for (i32 h = 0; h < params.heads_per_item; h++, serial++) {
      i32 stage = serial % params.stages;
      bool mine = serial % CONSUMERS == warp_of();
      ptx_barrier_wait(&barriers().full[stage], serial / params.stages & 1);
      const Head &head = head_at(params, stage);
      i32 kind = head.kind, of = head.b;
      if (of >= 0 && of != b) {
        if (b >= 0 && lane_index() == 0) ptx_barrier_arrive(&barriers().b_empty[b % MAX_B]);
        b = of;
        ptx_barrier_wait(&barriers().b_full[b % MAX_B], b / MAX_B & 1);
      }
      if (kind == READ) {
        if (mine) read_head<FORMAT, HIGH>(params, stage);
      } else if (kind <= ODD) {
        fold_head<FORMAT, HIGH>(params, stage);
      } else if (kind == ZERO && mine) {
        zero_head(params.family, head);
      }
      __syncwarp();
      if (lane_index() == 0) ptx_barrier_arrive(&barriers().empty[stage]);
    }
  }
}

template <i32 FORMAT, bool HIGH>
DEVICE void decode(const Mamba2DecodeParams &params) {
  if (threadIdx.x == 0) {
    Barriers &b = barriers();
    for (i32 i = 0; i < MAX_STAGES; i++) {
      ptx_barrier_init(&b.full[i], 1 + WARP);
      ptx_barrier_init(&b.empty[i], CONSUMERS);
    }
    for (i32 i = 0; i < MAX_B; i++) {
      ptx_barrier_init(&b.b_full[i], 1);
      ptx_barrier_init(&b.b_empty[i], CONSUMERS);
    }
    ptx_barrier_init_fence();
  }
  wait_for_dependency();
  __syncthreads();
  if (warp_of() == CONSUMERS) {
    produce<FORMAT, HIGH>(params);
  } else {
    consume<FORMAT, HIGH>(params);
  }
}

}  // namespace mamba2

extern "C" __global__ void __launch_bounds__(160, 2) replayssm_kernel(const __grid_constant__ Mamba2DecodeParams p) {
  mamba2::decode<INSTANCE_FORMAT, INSTANCE_HIGH>(p);
}
