// Mamba-2: steps of one token a row, where memory is the limit: 128 columns, bfloat16 activations, everything aligned to 16 bytes.
//
// Blocks stay on their multiprocessors and take one item after the other: a few heads of one group and row. Each warp has its part:
//
//   planner         reads ids, cursors, tags and gates of the items to come, and says what is to be done with each head and where it lies
//   producer        brings what a head needs to shared memory by bulk copies, a head per stage and B and C per item, as far ahead as there
//                   are stages
//   four consumers  compute: a head each; or, where records are folded, a tile of one head each, by the serial form's arithmetic
//
// INSTANCE_FORMAT: the checkpoint's. INSTANCE_HIGH: whether the readout is HIGH rather than FULL.
#include "../common/block.cuh"

namespace mamba2 {

enum : i32 {
  COLUMNS = 128,
  BLOCKS = COLUMNS / BLOCK,
  CONSUMERS = 4,
  PRODUCER = CONSUMERS,
  PLANNER = CONSUMERS + 1,
  MAX_STAGES = 8,
  MAX_B = 2,
  MAX_HEADS = 4,              // of an item
  ITEMS = WARP / MAX_HEADS,   // that are planned at a time
  PLANS = 3,                  // at work, to come, and still in stages
  MAX_CHANNELS = 128,         // of a head
};

// What is to be done with a head.
enum : i32 {
  READ,     // all of its tiles stand at one position, and stay there
  FOLD,     // all of its tiles stand at one position, and take records in
  ODD,      // tiles stand at different positions
  ZERO,     // its outputs are zero
  NOTHING,  // there is no token, or outputs are left alone
};

struct Item {
  const char *b_ring;  // of the group
  const char *b;
  const char *c;
  i64 slot;
  i64 position;
  i64 flush_before;
  u64 seed;
  i32 head;     // the first
  i32 records;  // from the oldest on that a head needs, without the token's own
  i32 first;    // ring row of the oldest
  i32 at;       // ring row of the token
  i32 flush;
  i32 has_work;
};

struct Head {
  const char *checkpoint;
  char *x_ring;
  char *dt_ring;
  const char *x;
  const char *z;
  char *out;
  float dt;
  float g;
  float skip;  // D of the head
  i16 kind;
  i16 from;   // record at which the checkpoint stands
  i16 folds;  // records that it takes in
  i16 reserved;
};

struct Plans {
  Item item[PLANS][ITEMS];
  Head head[PLANS][WARP];
};

// A stage's head: where its plan is, and the serial number of its B and C.
struct Header {
  i32 plan;
  i32 place;
  i32 b;
  i32 reserved;
};

struct Barriers {
  u64 full[MAX_STAGES];
  u64 empty[MAX_STAGES];
  u64 b_full[MAX_B];
  u64 b_empty[MAX_B];
  u64 planned[PLANS];
  u64 begun[PLANS];
};

DEVICE Barriers &barriers() {
  static __shared__ Barriers b;
  return b;
}

DEVICE Plans &plans() {
  static __shared__ Plans p;
  return p;
}

// One of a ring of barriers, and the parity of its phase.
struct Turn {
  i32 place = 0;
  u32 phase = 0;

  DEVICE void next(i32 n) {
    place++;
    if (place == n) {
      place = 0;
      phase ^= 1;
    }
  }
};

DEVICE char *stage_at(const Mamba2DecodeParams &p, i32 stage) { return shared_memory + stage * p.stage_bytes; }
DEVICE Header &header_at(const Mamba2DecodeParams &p, i32 stage) { return *(Header *)(stage_at(p, stage) + p.at_head); }
DEVICE u16 *x_at(const Mamba2DecodeParams &p, i32 stage) { return (u16 *)(stage_at(p, stage) + p.at_x); }
DEVICE float2 *gates_at(const Mamba2DecodeParams &p, i32 stage) { return (float2 *)(stage_at(p, stage) + p.at_gates); }
// Records of B, the token's own behind them; C behind all that there can be.
DEVICE u16 *b_at(const Mamba2DecodeParams &p, i32 place) {
  return (u16 *)(shared_memory + p.stages * p.stage_bytes + place * p.b_bytes);
}
DEVICE u16 *c_at(const Mamba2DecodeParams &p, i32 place) { return b_at(p, place) + p.rows * COLUMNS; }

// Items of this block: every gridDim.x-th from its own number on.
DEVICE i32 items_of_block(const Mamba2DecodeParams &p) {
  i64 items = p.family.batch.n_rows * (p.family.state.heads / p.heads_per_item);
  return (i32)((items - blockIdx.x + gridDim.x - 1) / gridDim.x);
}

// ---- The planner ----

// Plans one head of an item; a lane each, the heads of an item next to each other.
DEVICE void plan_head(const Mamba2DecodeParams &params, i64 number, i32 h, Item &item, Head &to) {
  const Mamba2Params &p = params.family;
  const State &s = p.state;
  i32 heads = params.heads_per_item, per_row = s.heads / heads;
  i64 row = number / per_row;
  i32 first = (i32)(number - row * per_row) * heads, head = first + h;
  bool exists = number >= 0 && h < heads;
  Row r = {};
  i32 kind = NOTHING, from = 0, folds = 0;
  i64 position = 0, oldest = 0;
  if (exists) {
    r = resolve(p.slots, p.batch, row, p.place, head == 0);
    kind = !r.live ? (p.batch.keep_null_outputs ? NOTHING : ZERO) : r.span.len == 0 ? NOTHING : READ;
    to.out = span_at(r.span, p.out, 0, head);
    // A row's only token; none where rows are empty.
    if (kind == ZERO && r.span.len == 0) kind = NOTHING;
  }
  i64 flush_before = 0;
  i32 flush = 0;
  if (kind == READ) {
    const Cursor &cursor = p.slots.cursors[r.ring];
    position = cursor.position;
    flush_before = cursor.flush_before;
    flush = p.batch.flush ? p.batch.flush[row] : 0;
    float dt = load_one(span_at(r.span, p.dt, 0, head), p.dt.dtype);
    float a = load_one(tensor_at(p.a, 0, 0, head), p.a.dtype);
    if (p.dt_bias.data) dt = __fadd_rn(dt, load_one(tensor_at(p.dt_bias, 0, 0, head), p.dt_bias.dtype));
    to.skip = p.d_skip.data && !p.d_per_element ? load_one(tensor_at(p.d_skip, 0, 0, head), p.d_skip.dtype) : 0.0f;
    const i64 *tags = (const i64 *)own_part(s.tags, r.slot) + (i64)head * s.tiles;
    i64 tag = tags[0];
    oldest = tag;
    bool bad = false, odd = false;
#pragma unroll 4
    for (i32 t = 0; t < s.tiles; t++) {
      i64 other = tags[t];
      bad = bad || !tag_is_valid(p.slots, position, other);
      odd = odd || other != tag;
      oldest = min(oldest, other);
    }
    if (p.softplus) dt = softplus(dt);
    to.dt = dt;
    to.g = __fmul_rn(a, dt);
    if (bad) {
      fault(p.slots, FAULT_POSITION, r.slot, row, p.place.pool, p.place.layer);
      kind = ZERO;
      oldest = position;
    } else {
      folds = (i32)folds_of(p.slots, position, tag, 1, flush_before, flush);
      kind = odd ? ODD : folds > 0 ? FOLD : READ;
      from = (i32)(position - tag);
    }
    i64 elements = (i64)s.rows * COLUMNS;
    to.checkpoint = (const char *)own_part(s.checkpoint, r.slot) + head * elements * (s.format <= FORMAT_F32 ? 4 : 2);
    to.x_ring = (char *)own_part(p.ring_x, r.ring) + (i64)head * p.ring_rows * s.rows * 2;
    to.dt_ring = (char *)own_part(p.ring_dt, r.ring) + (i64)head * p.ring_rows * 8;
    to.x = span_at(r.span, p.x, 0, head);
    to.z = p.z.data ? span_at(r.span, p.z, 0, head) : nullptr;
  }
  // The oldest of the item's heads.
  i32 records = (i32)(position - oldest);
  bool works = kind <= ODD;
#pragma unroll
  for (i32 other = 1; other < MAX_HEADS; other *= 2) {
    records = max(records, __shfl_xor_sync(0xFFFFFFFFu, records, other));
    works = __shfl_xor_sync(0xFFFFFFFFu, (i32)works, other) || works;
  }
  to.kind = (i16)kind;
  to.from = (i16)(records - from);
  to.folds = (i16)folds;
  if (h != 0) return;
  item.has_work = works;
  item.head = first;
  item.records = records;
  if (!works) return;
  // A head that cannot be worked on may be the first.
  const Cursor &cursor = p.slots.cursors[r.ring];
  i64 group = first / p.heads_per_group;
  item.slot = r.slot;
  item.position = cursor.position;
  item.flush_before = flush_before;
  item.seed = cursor.seed;
  item.flush = flush;
  item.at = (i32)(item.position % p.ring_rows);
  item.first = item.at - records;
  if (item.first < 0) item.first += p.ring_rows;
  item.b_ring = (const char *)own_part(p.ring_b, r.ring) + group * p.ring_rows * COLUMNS * 2;
  item.b = span_at(r.span, p.b, 0, group);
  item.c = span_at(r.span, p.c, 0, group);
}

DEVICE void plan(const Mamba2DecodeParams &params) {
  i32 n = items_of_block(params), lane = lane_index();
  Turn turn;
#pragma unroll 1
  for (i32 first = 0; first < n; first += ITEMS) {
    ptx_barrier_wait(&barriers().begun[turn.place], turn.phase ^ 1);
    i32 i = first + lane / MAX_HEADS;
    i64 number = i < n ? blockIdx.x + (i64)i * gridDim.x : -1;
    plan_head(params, number, lane % MAX_HEADS, plans().item[turn.place][lane / MAX_HEADS], plans().head[turn.place][lane]);
    __syncwarp();
    if (lane == 0) ptx_barrier_arrive(&barriers().planned[turn.place]);
    turn.next(PLANS);
  }
}

// ---- The producer ----

// Copies n records of a ring, from row first on and around its end, one behind the other.
DEVICE void copy_records(void *to, const char *ring, i32 first, i32 n, i32 rows, i32 bytes, u64 *barrier) {
  i32 before = min(n, rows - first);
  if (before > 0) ptx_bulk_copy(to, ring + first * bytes, (u32)(before * bytes), barrier);
  if (n > before) ptx_bulk_copy((char *)to + before * bytes, ring, (u32)((n - before) * bytes), barrier);
}

// Brings B and C of an item.
DEVICE void bring_b(const Mamba2DecodeParams &params, const Item &item, const Turn &b) {
  enum : i32 { BYTES = COLUMNS * 2 };
  u64 *full = &barriers().b_full[b.place];
  ptx_barrier_wait(&barriers().b_empty[b.place], b.phase ^ 1);
  u16 *to = b_at(params, b.place);
  i32 lane = lane_index(), n = item.records;
  if (lane == 0) {
    ptx_barrier_arrive_expect(full, (u32)((n + 2) * BYTES));
    copy_records(to, item.b_ring, item.first, n, params.family.ring_rows, BYTES, full);
  } else if (lane == 1) {
    ptx_bulk_copy(to + n * COLUMNS, item.b, BYTES, full);
  } else if (lane == 2) {
    ptx_bulk_copy(c_at(params, b.place), item.c, BYTES, full);
  }
}

// Brings a head.
template <i32 FORMAT>
DEVICE void bring_head(const Mamba2DecodeParams &params, const Item &item, const Head &head, const Header &header, const Turn &stage) {
  const Mamba2Params &p = params.family;
  u64 *full = &barriers().full[stage.place];
  i32 lane = lane_index(), kind = head.kind, n = item.records, first = item.first, bytes = p.state.rows * 2;
  bool works = kind <= ODD;
  ptx_barrier_wait(&barriers().empty[stage.place], stage.phase ^ 1);
  if (lane == 0) {
    header_at(params, stage.place) = header;
    if (!works) {
      ptx_barrier_arrive(full);
    } else {
      ptx_barrier_arrive_expect(full, (u32)((n + 1) * bytes + (kind == READ ? params.plane_bytes : 0)));
      if (kind == READ) {
        ptx_bulk_copy(stage_at(params, stage.place), head.checkpoint, (u32)params.plane_bytes, full);
      } else {
        ptx_bulk_prefetch(head.checkpoint, (u32)(p.state.rows * COLUMNS * (FORMAT <= FORMAT_F32 ? 4 : 2)));
      }
    }
  } else if (lane == 1 && works) {
    copy_records(x_at(params, stage.place), head.x_ring, first, n, p.ring_rows, bytes, full);
  } else if (lane == 2 && works) {
    ptx_bulk_copy((char *)x_at(params, stage.place) + n * bytes, head.x, (u32)bytes, full);
  }
  if (works && lane < n) {
    i32 row = first + lane;
    ptx_copy8(gates_at(params, stage.place) + lane, head.dt_ring + (row < p.ring_rows ? row : row - p.ring_rows) * 8);
  }
  ptx_copies_arrive(full);
}

template <i32 FORMAT>
DEVICE void produce(const Mamba2DecodeParams &params) {
  i32 n = items_of_block(params);
  Turn plan, stage, b;
#pragma unroll 1
  for (i32 first = 0; first < n; first += ITEMS) {
    ptx_barrier_wait(&barriers().planned[plan.place], plan.phase);
    // There are no more stages than items of the plans before these: those before them have left theirs.
    if (first >= 2 * ITEMS && lane_index() == 0) ptx_barrier_arrive(&barriers().begun[plan.place == PLANS - 1 ? 0 : plan.place + 1]);
#pragma unroll 1
    for (i32 i = 0; i < ITEMS && first + i < n; i++) {
      const Item &item = plans().item[plan.place][i];
      if (item.has_work) bring_b(params, item, b);
#pragma unroll 1
      for (i32 h = 0; h < params.heads_per_item; h++) {
        Header header = {plan.place, i * MAX_HEADS + h, item.has_work ? b.place : -1, 0};
        bring_head<FORMAT>(params, item, plans().head[plan.place][header.place], header, stage);
        stage.next(params.stages);
      }
      if (item.has_work) b.next(MAX_B);
    }
    plan.next(PLANS);
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

// What a consumer works on.
struct Job {
  const Item *item;
  const Head *head;
  i32 number;  // of the head
  i32 stage;
  const u16 *x;
  const u16 *b;
  const u16 *c;
};

// The records of a head, a lane each.
DEVICE Record weigh(const Mamba2DecodeParams &params, const Job &job, const Columns &c, Lane lane) {
  i32 n = job.item->records, me = lane_index();
  Record r = {};
  if (me < n) {
    float2 gates = gates_at(params, job.stage)[me];
    r.dt = gates.x;
    r.g = gates.y;
  } else if (me == n) {
    r.dt = job.head->dt;
    r.g = job.head->g;
  }
  float product = 0.0f;
#pragma unroll 1
  for (i32 first = 0; first <= n; first += 16) {
    float low, high;
    const u16 *row = job.b + (first + lane.group) * COLUMNS;
    multiply(row, row + 8 * COLUMNS, c, lane, low, high);
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

// y = fma(D, x, y) and the gate.
DEVICE float gated(const Mamba2Params &p, const Job &job, i32 channel, float x, float z, float y) {
  if (p.d_skip.data) {
    float d = job.head->skip;
    if (p.d_per_element) d = load_one(tensor_at(p.d_skip, 0, 0, job.number) + channel * size_of(p.d_skip.dtype), p.d_skip.dtype);
    y = fma(d, x, y);
  }
  return p.z.data ? __fmul_rn(y, silu(z)) : y;
}

DEVICE void store_output(const Mamba2Params &p, const Job &job, i32 channel, float y) {
  store_one(job.head->out + channel * size_of(p.out.dtype), p.out.dtype, y);
}

DEVICE float gate_of(const Mamba2Params &p, const Job &job, i32 channel) {
  return p.z.data && channel < p.state.rows ? from_bf16(((const u16 *)job.head->z)[channel]) : 0.0f;
}

// The token's record of x.
DEVICE u16 *own_x(const Mamba2Params &p, const Job &job) { return (u16 *)job.head->x_ring + job.item->at * p.state.rows; }

// The rest of the token's record: dt and g of the head; B, if it is the first of its group.
DEVICE void record_rest(const Mamba2Params &p, const Job &job) {
  i32 at = job.item->at;
  if (lane_index() == 0) ((float2 *)job.head->dt_ring)[at] = make_float2(job.head->dt, job.head->g);
  if (job.number % p.heads_per_group != 0) return;
  u64 *ring = (u64 *)(job.item->b_ring + at * COLUMNS * 2);
  ring[lane_index()] = ((const u64 *)(job.b + job.item->records * COLUMNS))[lane_index()];
}

// Statistics, once for all heads of a row.
DEVICE void tally_row(const Mamba2Params &p, const Job &job, bool folded, bool high) {
  const State &s = p.state;
  if (job.number != 0 || lane_index() != 0) return;
  u64 elements = (u64)s.heads * s.rows * s.columns, size = s.format <= FORMAT_F32 ? 4 : 2;
  u64 record = (u64)s.heads * (s.rows * 2 + 8) + (u64)(s.heads / p.heads_per_group) * s.columns * 2;
  tally(p.slots, folded ? (u64)s.heads * s.tiles : 0, high && !folded && s.format == FORMAT_SPLIT32 ? elements * 2 : elements * size,
        folded ? elements * size : 0, (u64)job.item->records * record, record);
}

// What the checkpoint says of two rows of a tile: their products with C, summed over the quad.
template <i32 FORMAT>
DEVICE void read_full(const Mamba2DecodeParams &params, i32 stage, i32 row, const Columns &c, Lane lane, float (&out)[2]) {
  const State &s = params.family.state;
#pragma unroll
  for (i32 h = 0; h < 2; h++) {
    i32 start = (row + 8 * h) * COLUMNS + 8 * lane.quad;
    float sum[2] = {};
#pragma unroll
    for (i32 j = 0; j < BLOCKS; j++) {
      float v[8];
      if (FORMAT == FORMAT_F32) {
        load8_32(stage_at(params, stage) + (start + BLOCK * j) * 4, v);
      } else {
        const char *high = stage_at(params, stage) + (start + BLOCK * j) * 2, *low = high + s.rows * COLUMNS * 2;
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
DEVICE void read_head(const Mamba2DecodeParams &params, const Job &job) {
  static __shared__ float seen[CONSUMERS][MAX_CHANNELS];
  const Mamba2Params &p = params.family;
  Lane lane = lane_of(threadIdx.x);
  i32 n = job.item->records, rows = p.state.rows, from = job.head->from;
  // Two neighbouring channels a lane; those of the first 64 are loaded ahead.
  i32 channel = 2 * lane_index();
  u32 z = p.z.data && params.has_pairs && channel < rows ? *(const u32 *)(job.head->z + 2 * channel) : 0;
  Columns c = columns_of(job.c, lane);
  Record r = weigh(params, job, c, lane);
  float decay = exp(__shfl_sync(0xFFFFFFFFu, r.elapsed, from));
  float *mine = seen[warp_of()];
#pragma unroll 1
  for (i32 row = lane.group; row < rows; row += TILE) {
    float part[2];
    if (HIGH) {
      const u16 *low = (const u16 *)stage_at(params, job.stage) + row * COLUMNS;
      multiply(low, low + 8 * COLUMNS, c, lane, part[0], part[1]);
    } else {
      read_full<FORMAT>(params, job.stage, row, c, lane, part);
    }
    if (lane.quad == 0) {
      mine[row] = part[0];
      if (row + 8 < rows) mine[row + 8] = part[1];
    }
  }
  __syncwarp();
#pragma unroll 1
  for (; channel - 2 * lane_index() < rows; channel += 2 * WARP) {
    bool exists = channel < rows;
    i32 at = exists ? channel : 0;
    float y[2] = {mine[at] * decay, mine[at + 1] * decay};
    u32 pair = 0;
#pragma unroll 4
    for (i32 i = from; i <= n; i++) {
      float weight = __shfl_sync(0xFFFFFFFFu, r.weight, i);
      pair = *(const u32 *)(job.x + i * rows + at);
      y[0] = fma(weight, pair_low(pair), y[0]);
      y[1] = fma(weight, pair_high(pair), y[1]);
    }
    if (!exists) continue;
    *(u32 *)(own_x(p, job) + channel) = pair;
    if (params.has_pairs) {
      if (channel >= 2 * WARP && p.z.data) z = *(const u32 *)(job.head->z + 2 * channel);
      y[0] = gated(p, job, channel, pair_low(pair), pair_low(z), y[0]);
      y[1] = gated(p, job, channel + 1, pair_high(pair), pair_high(z), y[1]);
      *(u32 *)(job.head->out + 2 * channel) = to_bf16(y[0]) | (u32)to_bf16(y[1]) << 16;
    } else {
      store_output(p, job, channel, gated(p, job, channel, pair_low(pair), gate_of(p, job, channel), y[0]));
      store_output(p, job, channel + 1, gated(p, job, channel + 1, pair_high(pair), gate_of(p, job, channel + 1), y[1]));
    }
  }
  record_rest(p, job);
  tally_row(p, job, false, HIGH);
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
DEVICE void fold_tile(const Mamba2DecodeParams &params, const Job &job, i32 tile, const Record &r) {
  const Mamba2Params &p = params.family;
  // What the host has looked at.
  __builtin_assume(p.state.is_vector != 0);
  __builtin_assume(p.state.columns == COLUMNS);
  Lane lane = lane_of(threadIdx.x);
  i32 n = job.item->records, rows = p.state.rows;
  i64 oldest = job.item->position - n;
  Checkpoint at = checkpoint_of(p.state, p.place.layer, job.item->slot, job.number, tile, job.item->seed);
  i32 from = job.head->from, folds = job.head->folds;
  if (job.head->kind == ODD) {
    i64 tag = *at.tag;
    from = (i32)(tag - oldest);
    folds = (i32)folds_of(p.slots, job.item->position, tag, 1, job.item->flush_before, job.item->flush);
  }
  i32 first = tile * TILE + lane.group, second = min(first + 8, rows - 1);
  first = min(first, rows - 1);
  Tile<BLOCKS, 2> t;
  load_tile<FORMAT>(t, p.state, at, lane, 0, false);
  Decay mine = decay_of(r.g);
#pragma unroll 1
  for (i32 i = from; i < from + folds; i++) {
    float dt = __shfl_sync(0xFFFFFFFFu, r.dt, i), factor = __shfl_sync(0xFFFFFFFFu, mine.factor, i);
    bool slow = __shfl_sync(0xFFFFFFFFu, (i32)mine.slow, i);
    float xd[2] = {__fmul_rn(from_bf16(job.x[i * rows + first]), dt), __fmul_rn(from_bf16(job.x[i * rows + second]), dt)};
    decay_whole(t, factor, slow);
    rank_one(t, job.b + i * COLUMNS, xd, lane);
  }
  from += folds;
  if (folds > 0) store_tile<FORMAT>(t, p.state, at, lane, 0, oldest + from);
  float y[2] = {};
#pragma unroll
  for (i32 j = 0; j < BLOCKS; j++) {
    uint4 four = *(const uint4 *)(job.c + BLOCK * j + 8 * lane.quad);
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
      y[0] = fma(weight, from_bf16(job.x[mine_too * rows + first]), y[0]);
      y[1] = fma(weight, from_bf16(job.x[mine_too * rows + second]), y[1]);
    }
  }
#pragma unroll
  for (i32 h = 0; h < 2; h++) {
    y[h] += __shfl_xor_sync(0xFFFFFFFFu, y[h], 1);
    y[h] += __shfl_xor_sync(0xFFFFFFFFu, y[h], 2);
  }
  i32 channel = tile * TILE + lane.group + 8 * lane.quad;
  if (lane.quad < 2 && channel < rows) {
    u16 own = job.x[n * rows + channel];
    store_output(p, job, channel, gated(p, job, channel, from_bf16(own), gate_of(p, job, channel), lane.quad == 0 ? y[0] : y[1]));
    own_x(p, job)[channel] = own;
  }
  __syncwarp();
  if (folds > 0 && lane_index() == 0) *at.tag = oldest + from;
}

// A head that takes records in, by all consumers.
template <i32 FORMAT, bool HIGH>
DEVICE void fold_head(const Mamba2DecodeParams &params, const Job &job) {
  const Mamba2Params &p = params.family;
  Lane lane = lane_of(threadIdx.x);
  Record r = weigh(params, job, columns_of(job.c, lane), lane);
#pragma unroll 1
  for (i32 tile = warp_of(); tile < p.state.tiles; tile += CONSUMERS) fold_tile<FORMAT, HIGH>(params, job, tile, r);
  if (warp_of() != 0) return;
  record_rest(p, job);
  tally_row(p, job, job.head->kind == FOLD, HIGH);
}

template <i32 FORMAT, bool HIGH>
DEVICE void consume(const Mamba2DecodeParams &params) {
  i32 heads = items_of_block(params) * params.heads_per_item;
  i32 b = -1, b_turns = 0;
  Turn stage;
#pragma unroll 1
  for (i32 k = 0; k < heads; k++) {
    ptx_barrier_wait(&barriers().full[stage.place], stage.phase);
    Header header = header_at(params, stage.place);
    Job job;
    job.item = &plans().item[header.plan][header.place / MAX_HEADS];
    job.head = &plans().head[header.plan][header.place];
    job.number = job.item->head + header.place % MAX_HEADS;
    job.stage = stage.place;
    job.x = x_at(params, stage.place);
    job.b = b_at(params, header.b);
    job.c = c_at(params, header.b);
    // An item's first head.
    if (header.place % MAX_HEADS == 0 && header.b >= 0) {
      if (b >= 0 && lane_index() == 0) ptx_barrier_arrive(&barriers().b_empty[b]);
      b = header.b;
      ptx_barrier_wait(&barriers().b_full[b], b_turns / MAX_B & 1);
      b_turns++;
    }
    i32 kind = job.head->kind;
    bool mine = k % CONSUMERS == warp_of();
    if (kind == READ) {
      if (mine) read_head<FORMAT, HIGH>(params, job);
    } else if (kind <= ODD) {
      fold_head<FORMAT, HIGH>(params, job);
    } else if (kind == ZERO && mine) {
      for (i32 i = lane_index(); i < params.family.state.rows; i += WARP) store_output(params.family, job, i, 0.0f);
    }
    __syncwarp();
    if (lane_index() == 0) ptx_barrier_arrive(&barriers().empty[stage.place]);
    stage.next(params.stages);
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
    for (i32 i = 0; i < PLANS; i++) {
      ptx_barrier_init(&b.planned[i], 1);
      ptx_barrier_init(&b.begun[i], 1);
    }
    ptx_barrier_init_fence();
  }
  wait_for_dependency();
  __syncthreads();
  if (warp_of() == PLANNER) {
    plan(params);
  } else if (warp_of() == PRODUCER) {
    produce<FORMAT>(params);
  } else {
    consume<FORMAT, HIGH>(params);
  }
}

}  // namespace mamba2

extern "C" __global__ void __launch_bounds__(192, 2) replayssm_kernel(const __grid_constant__ Mamba2DecodeParams p) {
  mamba2::decode<INSTANCE_FORMAT, INSTANCE_HIGH>(p);
}
