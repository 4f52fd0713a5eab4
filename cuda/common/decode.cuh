// Steps of a few tokens where memory is the limit: 128 columns, bfloat16 activations, everything aligned to 16 bytes.
//
// Blocks stay on their multiprocessors and take one item after the other: a few heads of one row that share keys (B and C of a group; k and q
// of a key head). Each warp has its part, and barriers in shared memory are all that connects them:
//
//   planner    reads ids, cursors, tags and gates of the items to come, and says what is to be done with each head and where it lies
//   producer   brings keys of an item and what a head needs to shared memory by bulk copies, as far ahead as there is space
//   weigher    products of keys of history and of the step with the step's queries, once for an item
//   consumers  a head each: what its records weigh by now, checkpoint and records by tensor cores, then the step's own tokens and whatever
//              follows
//   folders    where a head folds: tiles of the new checkpoint, by the serial form's arithmetic
//
// Columns of a product are what a checkpoint is read with: C of each token, or k and q of each.
//
// Where few heads fit shared memory, what is called a head here is a part of one, of some of its rows: the parts of a head stand next to each other,
// in an item or in items one after the other. What all rows of a head have in common is left by the first part.
//
// Outputs come from the checkpoint as the step found it and all of the records since then, whether the head folds or not: nobody waits for a
// fold, which is late by up to two plans. A ring has space for a step beside all that may be folded (its rows: window, kept tokens, tokens of
// a step), so that folders find their records in the ring until the launch ends; a checkpoint is written once its bytes have come here.
#pragma once
#include "products.cuh"

namespace decode {

enum : i32 {
  COLUMNS = 128,
  BLOCKS = COLUMNS / BLOCK,
  ROW_BYTES = COLUMNS * 2,
  PLANNER = 0,
  WEIGHER = 1,
  PRODUCER = 2,               // the first of one or two
  SERVICES = 2,               // beside producers
  FOLD_RECORDS = WARP,        // that folders take at a time
  FOLD_STRIDE = 18,           // floats of a record there: values of 16 rows, what they weigh, and the decay
  MAX_STAGES = 16,
  MAX_PLANES = 8,
  MAX_KEYS = 4,
  MAX_HEADS = 4,              // of an item
  // Items that are planned at a time, a lane a head; no fewer than MAX_KEYS.
  ITEMS_OF_SINGLE = 8,
  ITEMS_OF_SEVERAL = 4,
  PLANS = 3,                  // at work, to come, and still in stages
  MAX_ORDER = 256,            // items of a block that are put in order
  MAX_TOKENS = 8,
  MAX_COLUMNS = 8,            // of a product of tensor cores
  SINGLE_TILES = 4,           // that are read at a time, next to each other in a warp
  MAX_HISTORY = 96,           // records of a head
};

enum : i32 { ITEMS = INSTANCE_SINGLE ? ITEMS_OF_SINGLE : ITEMS_OF_SEVERAL };

// Tiles that are read at a time in steps of several tokens: as many as there are registers for, which of FULL the family says.
enum : i32 { SEVERAL_TILES = !INSTANCE_HIGH ? FULL_TILES : __CUDA_ARCH__ >= 1200 ? (INSTANCE_KDA ? 1 : 2) : 4 };

// Copies of the token of a step of one.
enum : i32 { SINGLE_COPIES = 2 };

// What is to be done with a head.
enum : i32 {
  READ,     // all of its tiles stand at one position, and stay there
  FOLD,     // all of its tiles stand at one position, and take records in
  ODD,      // tiles stand at different positions
  ZERO,     // its outputs are zero
  NOTHING,  // there is no token, or outputs are left alone
};

struct Item {
  const char *key_ring;  // of the group
  char *norm_ring;
  const char *key;       // of the step's first token
  const char *query;
  i64 slot;
  i64 position;
  i64 flush_before;
  u64 seed;
  i32 head;     // the first
  i32 records;  // from the oldest on that a head needs
  i32 first;    // ring row of the oldest
  i32 at;       // ring row of the first token
  i32 len;      // tokens of the row
  i32 flush;
  i32 has_work;
  i32 folds;    // whether any of its heads does
  i32 step;     // from a head to the next
};

struct Head {
  const char *checkpoint;
  char *value_ring;
  char *raw_ring;  // values that are folded, where they are others
  char *gate_ring;
  char *beta_ring;
  const char *value;  // of the first token
  const char *z;
  char *out;
  float skip;  // D of the head
  i16 kind;
  i16 from;    // record at which the checkpoint stands
  i16 folds;   // records that it takes in
  i16 leads;   // whether records of keys are left with this head's
  i16 part;
  i16 reserved;
};

// A bulk copy of a head, of no bytes if there is none; to: within its stage.
struct __align__(16) Copy {
  const char *from;
  u32 to;
  u32 bytes;
};

// Whether planes are freed and filled in halves: those of fp32 rows.
template <i32 FORMAT>
constexpr bool HAS_HALVES = FORMAT == FORMAT_F32;

// Whether a plane here has both of SPLIT32's, the upper one in front.
template <i32 FORMAT>
constexpr bool HAS_PLANES = FORMAT == FORMAT_SPLIT32 && !INSTANCE_HIGH;

// Rows in the first half of a plane that has halves.
DEVICE i32 first_half(i32 rows) { return min((rows + 2 * TILE - 1) / (2 * TILE) * TILE, rows); }

// Rings of a head's gates.
struct Gates {
  const char *ring;
  const char *beta;
};

struct Plans {
  Item item[PLANS][ITEMS];
  Head head[PLANS][ITEMS * MAX_HEADS];
};

// Barriers by place.
//   full         a head's bytes have come
//   empty
//   plane_empty
//   keys_full
//   keys_ready   they are weighed, too
//   keys_empty
//   planned
//   begun
//   gathered     folders are all at one place
//   ordered
// taken: the last use of a stage, counted from 1, of which a checkpoint may be written. And the beginning of dynamic shared memory.
//
// A consumer has certain stages, and no other warp waits for their bytes; keys of an item are behind those of the one before it that had their
// place before any head of it is brought. So who waits for a phase has seen the one before it.
struct Places {
  enum : i32 {
    FULL = 0,
    EMPTY = FULL + MAX_STAGES,
    PLANE_EMPTY = EMPTY + MAX_STAGES,
    KEYS_FULL = PLANE_EMPTY + 2 * MAX_PLANES,
    KEYS_READY = KEYS_FULL + MAX_KEYS,
    KEYS_EMPTY = KEYS_READY + MAX_KEYS,
    IS_PLANNED = KEYS_EMPTY + MAX_KEYS,
    BEGUN = IS_PLANNED + PLANS,
    GATHERED = BEGUN + PLANS,
    ORDERED,
    TAKEN,
    ALL = TAKEN + MAX_STAGES / 2,
  };

  SharedAt barriers;
  SharedAt memory;

  DEVICE SharedAt full(i32 i) const { return barriers + 8 * (FULL + i); }
  DEVICE SharedAt empty(i32 i) const { return barriers + 8 * (EMPTY + i); }
  // Of a plane of fp32 rows each half of them has its own.
  DEVICE SharedAt plane_empty(i32 i, i32 half = 0) const { return barriers + 8 * (PLANE_EMPTY + 2 * i + half); }
  DEVICE SharedAt keys_full(i32 i) const { return barriers + 8 * (KEYS_FULL + i); }
  DEVICE SharedAt keys_ready(i32 i) const { return barriers + 8 * (KEYS_READY + i); }
  DEVICE SharedAt keys_empty(i32 i) const { return barriers + 8 * (KEYS_EMPTY + i); }
  DEVICE SharedAt planned(i32 i) const { return barriers + 8 * (IS_PLANNED + i); }
  DEVICE SharedAt begun(i32 i) const { return barriers + 8 * (BEGUN + i); }
  DEVICE SharedAt gathered() const { return barriers + 8 * GATHERED; }
  DEVICE SharedAt ordered() const { return barriers + 8 * ORDERED; }
  DEVICE SharedAt taken(i32 i) const { return barriers + 8 * TAKEN + 4 * i; }
};

DEVICE Places places() {
  static __shared__ u64 barriers[Places::ALL];
  return Places{ptx_shared(barriers), ptx_shared(shared_memory)};
}

// In what order the block takes items, from the second plan on: those that fold at equal distances, from the first one on, so that folders
// always have something to do, and are done when others are. folding: those that fold, from the front; others: the others, from the back.
struct Order {
  u16 item[MAX_ORDER];
  i32 folding;
  i32 others;
};

DEVICE Order &order() {
  static __shared__ Order o;
  return o;
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

// What is known of an item's number in the block's order.
struct Count {
  i32 item = 0;  // within its plan
  i32 plan = 0;

  DEVICE void next() {
    item++;
    if (item == ITEMS) {
      item = 0;
      plan = plan == PLANS - 1 ? 0 : plan + 1;
    }
  }
};

// Parts of a head.
DEVICE i32 parts_of(const Pipeline &s) { return INSTANCE_SINGLE ? 1 : s.parts; }

// Warps in front of consumers.
DEVICE i32 services_of(const Pipeline &s) { return SERVICES + s.producers; }

// A head's bytes come to two places: what is read of its checkpoint, which is free again as soon as it is read, and all the rest.
DEVICE char *plane_at(const Pipeline &s, i32 plane) { return shared_memory + plane * s.plane_stride; }
DEVICE char *stage_at(const Pipeline &s, i32 stage) { return shared_memory + s.at_stages + stage * s.stage_bytes; }
DEVICE char *keys_at(const Pipeline &s, i32 place) { return shared_memory + s.at_keys + place * s.key_bytes; }
// Keys of the item that folds, decoded.
DEVICE float *wide_at(const Pipeline &s) { return (float *)(shared_memory + s.at_wide); }
// Records of the part of a head that a folder is at.
DEVICE float *unit_at(const Pipeline &s, i32 folder) { return (float *)(shared_memory + s.at_units) + folder * FOLD_RECORDS * FOLD_STRIDE; }
// Gates of the step's own tokens, of a head of a plan.
DEVICE float2 *own_gates(const Pipeline &s, i32 plan, i32 head) {
  return (float2 *)(shared_memory + s.at_own_gates) + (plan * ITEMS * MAX_HEADS + head) * s.tokens;
}

// A head at work: its plan and where its bytes are.
struct Job {
  const Item *item;
  const Head *head;
  const float2 *gates;  // of the step's tokens
  char *plane;
  char *stage;
  char *keys;
  i32 number;  // of the head
};

DEVICE Job job_of(const Pipeline &s, const Count &count, i32 h, i32 plane, i32 stage, i32 keys) {
  Job j;
  i32 place = count.item * MAX_HEADS + h;
  j.item = &plans().item[count.plan][count.item];
  j.head = &plans().head[count.plan][place];
  j.gates = own_gates(s, count.plan, place);
  j.plane = plane_at(s, plane);
  j.stage = stage_at(s, stage);
  j.keys = keys_at(s, keys);
  j.number = j.item->head + h / parts_of(s) * j.item->step;
  return j;
}

// Of all of a head's tiles, the first one of a part. Not kept: registers are few.
DEVICE i32 first_tile(const Pipeline &s, const Job &j) { return parts_of(s) > 1 ? j.head->part * s.tiles : 0; }

// Within a stage: values of records from the oldest on, the step's own behind them. elapsed: of each record, e^(log decay of it and of all
// later ones in front of the step), 1 behind the last; weights: what a record weighs by then. decays: of each token, e^(log decays from the
// first on); own: what tokens bring to each column, [column][token]. One token: it is a record as any other, whose decay elapsed has, and weights
// are what records bring to each column, the columns of a record next to each other.
DEVICE const char *values_at(const Pipeline &, const Job &j) { return j.stage; }
DEVICE float2 *gates_at(const Pipeline &s, const Job &j) { return (float2 *)(j.stage + s.at_gates); }
DEVICE float *elapsed_at(const Pipeline &s, const Job &j) { return (float *)(j.stage + s.at_weights); }
DEVICE float *decays_at(const Pipeline &s, const Job &j) { return elapsed_at(s, j) + s.history + 4; }
DEVICE float *own_at(const Pipeline &s, const Job &j) { return decays_at(s, j) + MAX_TOKENS; }
DEVICE float *weights_at(const Pipeline &s, const Job &j) { return own_at(s, j) + s.columns * MAX_TOKENS; }
// With the keys: products of records and tokens [column][record].
DEVICE float *products_at(const Pipeline &s, const Job &j) { return (float *)(j.keys + s.at_products); }
// A consumer's own: sums, [column][channel].
DEVICE float *sums_at(const Pipeline &s) { return (float *)(shared_memory + s.at_sums) + (warp_of() - services_of(s)) * s.sum_columns * s.sums; }

// Items of this block: every gridDim.x-th from its own number on.
DEVICE i32 items_of_block(const Pipeline &s) { return (i32)((s.n_items - blockIdx.x + gridDim.x - 1) / gridDim.x); }

// a / b of numbers that are not negative, which mostly fit 32 bits: a division of 64 bits is a few hundred cycles.
DEVICE i64 quotient(i64 a, i32 b) { return (u64)a >> 32 == 0 ? (i64)((u32)a / (u32)b) : a / b; }

// ---- The planner ----

// Whether an item is to fold, by the first tile of its first head. It decides about its turn alone.
template <class Family>
DEVICE bool is_to_fold(const typename Family::Params &params, i64 number) {
  const Slots &slots = params.family.slots;
  const Batch &batch = params.family.batch;
  const State &state = params.family.state;
  i64 row = quotient(number, params.pipeline.items_per_row);
  Row r = resolve(slots, batch, row, params.family.place, false);
  if (!r.live || r.span.len == 0) return false;
  const Cursor &cursor = slots.cursors[r.ring];
  i32 within = (i32)(number - row * params.pipeline.items_per_row), head = Family::head_of(params, within, 0);
  i32 first_tile = within * params.pipeline.heads_per_item % parts_of(params.pipeline) * params.pipeline.tiles;
  i64 position = cursor.position, tag = ((const i64 *)own_part(state.tags, r.slot))[(i64)head * state.tiles + first_tile];
  return tag_is_valid(slots, position, tag) &&
         folds_of(slots, position, tag, r.span.len, cursor.flush_before, batch.flush && batch.flush[row]) > 0;
}

// Puts the items behind the first plan in order: folders do it, which have nothing else to do yet.
template <class Family>
DEVICE void put_in_order(const typename Family::Params &params, i32 me) {
  const Places at = places();
  i32 n = min(items_of_block(params.pipeline) - (i32)ITEMS, (i32)MAX_ORDER);
#pragma unroll 1
  for (i32 i = me * WARP + lane_index(); i < n; i += params.pipeline.folders * WARP) {
    bool folds = is_to_fold<Family>(params, blockIdx.x + (i64)(ITEMS + i) * gridDim.x);
    i32 to = folds ? atomicAdd(&order().folding, 1) : n - 1 - atomicAdd(&order().others, 1);
    order().item[to] = (u16)i;
  }
  __syncwarp();
  if (lane_index() == 0) ptx_barrier_arrive(at.ordered());
}

template <class Family, i32 FORMAT>
DEVICE void plan(const typename Family::Params &params) {
  const Places at = places();
  i32 n = items_of_block(params.pipeline), lane = lane_index();
  Turn turn, begun;
  begun.place = 2;
#pragma unroll 1
  for (i32 first = 0; first < n; first += ITEMS) {
    if (first >= 2 * ITEMS) {
      ptx_barrier_wait(at.begun(begun.place), begun.phase);
      begun.place = begun.place == PLANS - 1 ? 0 : begun.place + 1;
      if (begun.place == 2) begun.phase ^= 1;
    }
    // The other lanes have no item, and leave nothing.
    bool plans_one = lane < ITEMS * MAX_HEADS;
    i32 of = plans_one ? lane : 0, i = first + of / MAX_HEADS;
    if (first == ITEMS) ptx_barrier_wait(at.ordered(), 0);
    i32 in_order = min(n - (i32)ITEMS, (i32)MAX_ORDER), turn_of = i - ITEMS;
    if (turn_of >= 0 && turn_of < in_order) {
      // The j-th that folds has turn j in_order / folding.
      i32 folding = order().folding, before = (turn_of * folding + in_order - 1) / in_order;
      bool folds = before < folding && before * in_order / folding == turn_of;
      i = ITEMS + order().item[folds ? before : in_order - 1 - (turn_of - before)];
    }
    i64 number = plans_one && i < n ? blockIdx.x + (i64)i * gridDim.x : -1;
    Family::plan_head(params, number, lane % MAX_HEADS, plans_one, plans().item[turn.place][of / MAX_HEADS],
                      plans().head[turn.place][of], own_gates(params.pipeline, turn.place, of));
    __syncwarp();
    if (lane == 0) ptx_barrier_arrive(at.planned(turn.place));
    // Brings near what folders take, who would wait for memory otherwise.
    Count count = {of / MAX_HEADS, turn.place};
    Job job = job_of(params.pipeline, count, of % MAX_HEADS, 0, 0, 0);
    if (plans_one && (job.head->kind == FOLD || job.head->kind == ODD)) {
      i32 bytes = params.pipeline.channels * ROW_BYTES;
      ptx_bulk_prefetch(job.head->checkpoint, (u32)(FORMAT == FORMAT_F32 ? 2 * bytes : bytes));
      if (FORMAT == FORMAT_SPLIT32) ptx_bulk_prefetch(job.head->checkpoint + params.family.state.rows * ROW_BYTES, (u32)bytes);
      Family::prefetch_records(params, job);
    }
    turn.next(PLANS);
  }
}

// ---- The producer ----

// Brings a head's checkpoint, records and tokens of its values, what Family adds, and gates, once there is space for them. What is known of the head
// is loaded before.
template <class Family, i32 FORMAT>
DEVICE void bring_head(const typename Family::Params &params, const Job &job, const Places &places, const Turn &plane, const Turn &stage) {
  const Pipeline &s = params.pipeline;
  const Gates gates = {job.head->gate_ring, job.head->beta_ring};
  i32 lane = lane_index(), kind = job.head->kind, n = job.item->records, len = job.item->len, ring_rows = params.family.ring_rows,
      first = job.item->first;
  u32 bytes = (u32)(n * Family::record_bytes(params) + len * Family::token_bytes(params) + s.plane_bytes);
  SharedAt full = places.full(stage.place), at = places.memory + (s.at_stages + stage.place * s.stage_bytes);
  SharedAt to = places.memory + plane.place * s.plane_stride;
  u32 half = HAS_HALVES<FORMAT> ? (u32)(first_half(s.channels) * COLUMNS * 4) : 0;
  const char *checkpoint = job.head->checkpoint, *ring = job.head->value_ring;
  i32 row_bytes = params.family.state.rows * Family::VALUE_BYTES, before = min(n, ring_rows - first) * row_bytes, behind = n * row_bytes - before;
  Copy tokens[SINGLE_COPIES];
#pragma unroll
  for (i32 i = 0; i < SINGLE_COPIES; i++) tokens[i] = INSTANCE_SINGLE ? Family::copy_of_token(params, job, i) : Copy{};
  ptx_barrier_wait(places.plane_empty(plane.place), plane.phase ^ 1);
  ptx_barrier_wait(places.empty(stage.place), stage.phase ^ 1);
  if (kind > ODD) {
    if (lane == 0) ptx_barrier_arrive(full);
  } else {
    if (lane == 0) {
      ptx_barrier_arrive_expect(full, bytes);
      // One thread: lanes would take turns. Both planes of a part that is read with both lie apart.
      u32 upper = HAS_HALVES<FORMAT> ? half : (u32)s.plane_bytes;
      if (HAS_PLANES<FORMAT> && parts_of(s) > 1) upper /= 2;
      ptx_bulk_copy(to, checkpoint, upper, full);
      if (HAS_PLANES<FORMAT> && parts_of(s) > 1) ptx_bulk_copy(to + upper, checkpoint + params.family.state.rows * ROW_BYTES, upper, full);
      if (parts_of(s) == 1 && before > 0) ptx_bulk_copy(at, ring + first * row_bytes, (u32)before, full);
      if (parts_of(s) == 1 && behind > 0) ptx_bulk_copy(at + before, ring, (u32)behind, full);
#pragma unroll
      for (i32 i = 0; i < SINGLE_COPIES; i++)
        if (tokens[i].bytes > 0) ptx_bulk_copy(at + tokens[i].to, tokens[i].from, tokens[i].bytes, full);
    }
    if (parts_of(s) > 1) {
#pragma unroll 1
      for (i32 i = lane; i < n; i += WARP) {
        i32 row = first + i < ring_rows ? first + i : first + i - ring_rows;
        ptx_bulk_copy(at + i * s.value_stride, ring + row * row_bytes, (u32)s.value_stride, full);
      }
    }
    if (!INSTANCE_SINGLE || Family::HAS_LOGS) {
      // Of several tokens, and what Family adds.
      i32 i = lane + (INSTANCE_SINGLE ? (i32)SINGLE_COPIES : 0);
      if (i < Family::token_copies(params, len)) {
        Copy c = Family::copy_of_token(params, job, i);
        if (c.bytes > 0) ptx_bulk_copy(at + c.to, c.from, c.bytes, full);
      }
    }
#pragma unroll 1
    for (i32 i = lane; i < n; i += WARP)
      Family::bring_gates(gates, at + (s.at_gates + 8 * i), first + i < ring_rows ? first + i : first + i - ring_rows);
  }
  if (HAS_HALVES<FORMAT>) {
    ptx_barrier_wait(places.plane_empty(plane.place, 1), plane.phase ^ 1);
    u32 rest = (u32)s.plane_bytes - half;
    if (kind <= ODD && rest > 0 && lane == 0) ptx_bulk_copy(to + half, checkpoint + half, rest, full);
  }
  ptx_copies_arrive(full);
}

// Brings keys of an item: records, then keys and queries of the step.
template <class Family>
DEVICE void bring_keys(const typename Family::Params &params, const Item &item, const Head &head, SharedAt to, SharedAt full) {
  const Pipeline &s = params.pipeline;
  i32 lane = lane_index(), n = item.records, len = item.len, t = lane - 2, before = min(n, params.family.ring_rows - item.first);
  if (!item.has_work) {
    if (lane == 0) ptx_barrier_arrive(full);
  } else {
    if (lane == 0) ptx_barrier_arrive_expect(full, (u32)((n + 2 * len) * ROW_BYTES));
    __syncwarp();
    bool is_key = t < len;
    i32 i = is_key ? t : t - len, place = is_key ? (n + i) * ROW_BYTES : s.at_queries + i * ROW_BYTES;
    if (lane < 2) place = lane * before * ROW_BYTES;
    const char *from = lane == 0   ? item.key_ring + item.first * ROW_BYTES
                       : lane == 1 ? item.key_ring
                       : is_key    ? item.key + i * Family::key_bytes(params)
                                   : item.query + i * Family::query_bytes(params);
    i32 bytes = lane == 0 ? before * ROW_BYTES : lane == 1 ? (n - before) * ROW_BYTES : t < 2 * len ? (i32)ROW_BYTES : 0;
    if (bytes > 0) ptx_bulk_copy(to + place, from, (u32)bytes, full);
    Family::bring_norms(params, item, head, to);
  }
  ptx_copies_arrive(full);
}

// Of two producers each has every other item. Keys come an item of its own ahead. Planes, stages and places of keys are as many as make each of
// them one producer's alone.
template <class Family, i32 FORMAT>
DEVICE void produce(const typename Family::Params &params) {
  const Pipeline &s = params.pipeline;
  const Places at = places();
  i32 n = items_of_block(s), me = warp_of() - PRODUCER;
  Turn plane, stage, keys;
  i32 planned = -1;
  plane.place = stage.place = me * s.heads_per_item;
  keys.place = me;
#pragma unroll 1
  for (i32 i = me - s.producers; i < n; i += s.producers) {
    // Heads of item i; there is none before the first.
    Count count = {i % ITEMS, i / ITEMS % PLANS};
#pragma unroll 1
    for (i32 h = 0; h < s.heads_per_item && i >= 0; h++) {
      Job job = job_of(s, count, h, plane.place, stage.place, 0);
      bring_head<Family, FORMAT>(params, job, at, plane, stage);
      plane.next(s.planes);
      stage.next(s.stages);
    }
    // Others'.
#pragma unroll 1
    for (i32 k = i < 0 || s.producers == 1 ? 0 : s.heads_per_item; k > 0; k--) {
      plane.next(s.planes);
      stage.next(s.stages);
    }
    i32 next = i + s.producers;
    if (next >= n) break;
    if (next / ITEMS != planned) {
      planned = next / ITEMS;
      ptx_barrier_wait(at.planned(planned % PLANS), planned / PLANS & 1);
    }
    ptx_barrier_wait(at.keys_empty(keys.place), keys.phase ^ 1);
    bring_keys<Family>(params, plans().item[planned % PLANS][next % ITEMS], plans().head[planned % PLANS][next % ITEMS * MAX_HEADS],
                       at.memory + (s.at_keys + keys.place * s.key_bytes), at.keys_full(keys.place));
#pragma unroll 1
    for (i32 k = 0; k < s.producers; k++) keys.next(s.keys);
  }
}

// ---- The weigher ----

// The lane's own eight values of each block of a row of 16-bit values.
DEVICE void load_blocks(const char *row, uint4 (&c)[BLOCKS]) {
#pragma unroll
  for (i32 j = 0; j < BLOCKS; j++) c[j] = *(const uint4 *)(row + 2 * BLOCK * j);
}

// Products of two rows of 16-bit values in each lane with eight columns, by tensor cores: as the instruction distributes them, rows
// lane.group and the second, columns 2 lane.quad and the next. Pointers are at the lane's own eight values of the first block.
DEVICE void multiply(const char *low, const char *high, const uint4 (&column)[BLOCKS], float (&out)[4]) {
  float even[4] = {}, odd[4] = {};
#pragma unroll
  for (i32 j = 0; j < BLOCKS; j++) {
    uint4 a = *(const uint4 *)(low + 2 * BLOCK * j), b = *(const uint4 *)(high + 2 * BLOCK * j), c = column[j];
    u32 left[4] = {a.x, b.x, a.y, b.y}, right[2] = {c.x, c.y};
    ptx_mma_m16n8k16_bf16(even, left, right, even);
    u32 left_odd[4] = {a.z, b.z, a.w, b.w}, right_odd[2] = {c.z, c.w};
    ptx_mma_m16n8k16_bf16(odd, left_odd, right_odd, odd);
  }
#pragma unroll
  for (i32 i = 0; i < 4; i++) out[i] = even[i] + odd[i];
}

// Products of an item's records and tokens with eight columns, which begin at products. column: the lane's own eight values of that which it
// has.
DEVICE void weigh_keys(const Pipeline &s, const Job &job, const char *column, float *to, i32 n_columns) {
  Lane lane = lane_of(threadIdx.x);
  i32 n = job.item->records + job.item->len;
  float *products = to + 2 * lane.quad * s.products + lane.group, m[4];
  uint4 columns[BLOCKS];
  load_blocks(column, columns);
#pragma unroll 1
  for (i32 first = 0; first < n; first += TILE) {
    const char *row = job.keys + (first + lane.group) * ROW_BYTES + 16 * lane.quad;
    ptx_reads_count(first + lane.group + 8 < n);
    multiply(row, row + 8 * ROW_BYTES, columns, m);
    ptx_reads_count(true);
    if (2 * lane.quad >= n_columns) continue;
    products[first] = m[0];
    products[first + s.products] = m[1];
    products[first + 8] = m[2];
    products[first + 8 + s.products] = m[3];
  }
}

// What a head's records weigh, of which the step's token is the last: what each of them brings to each column. Gates are {dt, g}, or {beta, g};
// Family::IS_SCALED: dt is part of the weight.
template <class Family>
DEVICE void weigh_single(const Pipeline &s, const Job &job) {
  i32 n = job.item->records, lane = lane_index();
  const float2 *gates = gates_at(s, job);
  const float *products = products_at(s, job);
  float newer = 0.0f, own = job.gates[0].y;
#pragma unroll 1
  for (i32 i = n / WARP * WARP + lane; i >= 0; i -= WARP) {
    float2 gate = i < n ? gates[i] : make_float2(job.gates[0].x, i == n ? own : 0.0f);
    float with, without;
    sum_later(gate.y, with, without);
    float weight = fast_exp(without + newer);
    if (Family::IS_SCALED) weight = __fmul_rn(weight, gate.x);
    if (i <= n) {
      elapsed_at(s, job)[i] = fast_exp(with + newer);
#pragma unroll
      for (i32 c = 0; c < Family::SINGLE_COLUMNS; c++)
        weights_at(s, job)[i * Family::SINGLE_COLUMNS + c] = __fmul_rn(weight, products[c * s.products + i]);
    }
    newer += __shfl_sync(0xFFFFFFFFu, with, 0);
  }
}

// What a head's records weigh, and what the step's tokens bring to each of n_columns columns.
template <class Family>
DEVICE void weigh_several(const Pipeline &s, const Job &job, i32 n_columns) {
  i32 n = job.item->records, len = job.item->len, lane = lane_index();
  const float2 *gates = gates_at(s, job);
  float *elapsed = elapsed_at(s, job), *weights = weights_at(s, job), newer = 0.0f;
  const float *products = products_at(s, job);
#pragma unroll 1
  for (i32 first = (n - 1) / WARP * WARP; first >= 0 && n > 0; first -= WARP) {
    i32 i = first + lane;
    float2 gate = i < n ? gates[i] : make_float2(0.0f, 0.0f);
    float with, without;
    sum_later(gate.y, with, without);
    float weight = fast_exp(without + newer);
    if (i < n) {
      elapsed[i] = fast_exp(with + newer);
      weights[i] = Family::IS_SCALED ? __fmul_rn(weight, gate.x) : weight;
    }
    newer += __shfl_sync(0xFFFFFFFFu, with, 0);
  }
  if (lane == 0) elapsed[n] = 1.0f;
  if (lane < len) {
    float sum = 0.0f;
    for (i32 t = 0; t <= lane; t++) sum += job.gates[t].y;
    decays_at(s, job)[lane] = fast_exp(sum);
  }
#pragma unroll 1
  for (i32 i = lane; i < n_columns * MAX_TOKENS; i += WARP) {
    i32 c = i / MAX_TOKENS, of = i % MAX_TOKENS, to = Family::token_of(c, len);
    float brings = 0.0f;
    if (of <= to && to < len) {
      float sum = 0.0f;
      for (i32 t = of + 1; t <= to; t++) sum += job.gates[t].y;
      brings = __fmul_rn(fast_exp(sum), products[c * s.products + n + of]);
      if (Family::IS_SCALED) brings = __fmul_rn(brings, job.gates[of].x);
    }
    own_at(s, job)[i] = brings;
  }
}

template <class Family, bool IS_SINGLE>
DEVICE void weigh(const typename Family::Params &params) {
  const Pipeline &s = params.pipeline;
  const Places at = places();
  i32 n = items_of_block(s);
  Turn keys;
  Count count;
#pragma unroll 1
  for (i32 i = 0; i < n; i++) {
    ptx_barrier_wait(at.keys_full(keys.place), keys.phase);
    // Keys of this plan's first item have come, and of no more items than a plan has is there space for them: of consumers none needs the plan
    // before the last one.
    if (count.item == 0 && i > 0 && lane_index() == 0) ptx_barrier_arrive(at.begun(count.plan == PLANS - 1 ? 0 : count.plan + 1));
    Job job = job_of(s, count, 0, 0, 0, keys.place);
    if (job.item->has_work) Family::template weigh_item<IS_SINGLE>(params, job);
    __syncwarp();
    if (lane_index() == 0) ptx_barrier_arrive(at.keys_ready(keys.place));
    keys.next(s.keys);
    count.next();
  }
}

// ---- Consumers ----

// Frees a place once all of the warp has read what it needs of it.
DEVICE void free_place(SharedAt empty) {
  __syncwarp();
  if (lane_index() == 0) ptx_barrier_arrive(empty);
}

// The lane's eight values of a block of a checkpoint's row in shared memory.
template <i32 FORMAT>
DEVICE void row_of(i32 rows, const char *plane, i32 element, float (&v)[8]) {
  if (FORMAT == FORMAT_F32) {
    load8_32(plane + element * 4, v);
  } else {
    const char *high = plane + element * 2, *low = high + rows * ROW_BYTES;
    uint4 a = *(const uint4 *)high, b = *(const uint4 *)low;
    u32 wa[4] = {a.x, a.y, a.z, a.w}, wb[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (i32 i = 0; i < 4; i++) {
      v[2 * i] = join(wa[i] & 0xFFFFu, wb[i]);
      v[2 * i + 1] = join(wa[i] >> 16, wb[i] >> 16);
    }
  }
}

// The same as multiply with fp32 rows, eight apart: both halves of their bits, 22 in all, with columns that are exact.
template <i32 FORMAT>
DEVICE void multiply_full(i32 rows, const char *plane, i32 row, const char *column, Lane lane, float (&out)[4]) {
  float upper[2][4] = {}, lower[2][4] = {};
#pragma unroll
  for (i32 j = 0; j < BLOCKS; j++) {
    float a[8], b[8];
    row_of<FORMAT>(rows, plane, row * COLUMNS + BLOCK * j + 8 * lane.quad, a);
    row_of<FORMAT>(rows, plane, (row + 8) * COLUMNS + BLOCK * j + 8 * lane.quad, b);
    uint4 c = *(const uint4 *)(column + 2 * BLOCK * j);
    u32 pairs[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (i32 i = 0; i < 4; i++) {
      float v[4] = {a[2 * i], b[2 * i], a[2 * i + 1], b[2 * i + 1]};
      u32 high[4], low[4], right[2] = {pairs[i] << 16, pairs[i] & 0xFFFF0000u};
#pragma unroll
      for (i32 e = 0; e < 4; e++) {
        high[e] = bits_of(v[e]) & 0xFFFFE000u;
        low[e] = bits_of(v[e] - from_bits(high[e]));
      }
      ptx_mma_m16n8k8_tf32(upper[i % 2], high, right, upper[i % 2]);
      ptx_mma_m16n8k8_tf32(lower[i % 2], low, right, lower[i % 2]);
    }
  }
#pragma unroll
  for (i32 i = 0; i < 4; i++) out[i] = (upper[0][i] + upper[1][i]) + (lower[0][i] + lower[1][i]);
}

// Of records [first, first + 16), of which those in [from, n) count.
template <class Family, bool IS_F32, i32 PARTS>
DEVICE Brought<IS_F32, PARTS> brought_by_records(const Pipeline &s, const Job &job, i32 pass, i32 first, i32 from, i32 n, Lane lane) {
  Brought<IS_F32, PARTS> r;
#pragma unroll
  for (i32 half = 0; half < 2; half++) {
    i32 i = first + 8 * half + (IS_F32 ? lane.quad : 2 * lane.quad), k = i + (IS_F32 ? 4 : 1);
    float a = Family::brings(s, job, pass * MAX_COLUMNS + lane.group, i), b = Family::brings(s, job, pass * MAX_COLUMNS + lane.group, k);
    // Behind the last record is what was there before.
    set_half(r, half, i >= from && i < n ? a : 0.0f, k >= from && k < n ? b : 0.0f);
  }
  return r;
}

// Of the step's tokens, which are eight at most and have bfloat16 values.
template <i32 PARTS>
DEVICE Brought<false, PARTS> brought_by_tokens(const Pipeline &s, const Job &job, i32 pass, Lane lane) {
  float2 own = *(const float2 *)(own_at(s, job) + (pass * MAX_COLUMNS + lane.group) * MAX_TOKENS + 2 * lane.quad);
  Brought<false, PARTS> r;
  set_half(r, 0, own.x, own.y);
  set_half(r, 1, 0.0f, 0.0f);
  return r;
}

// y += what n of 16 rows of values bring, by tensor cores. What is behind the last row is what was there before, which may be no number.
template <i32 PARTS>
DEVICE void add_brought(const char *values, i32 stride, i32 tile, i32 n, const Brought<false, PARTS> &brought, Lane lane, float (&y)[4]) {
  i32 me = lane_index();
  u32 left[4];
  // Matrix m of the rows' values: rows 8 (m / 2) on, channels 8 (m % 2) on.
  ptx_reads_count(me / 16 * 8 + me % 8 < n);
  ptx_ldmatrix_x4<true>(left, values + (me / 16 * 8 + me % 8) * stride + (tile * TILE + me / 8 % 2 * 8) * 2);
  ptx_reads_count(true);
  if (n < TILE) {
#pragma unroll
    for (i32 half = 0; half < 2; half++) {
      i32 i = 8 * half + 2 * lane.quad;
      u32 mask = (i < n ? 0xFFFFu : 0) | (i + 1 < n ? 0xFFFF0000u : 0);
      left[2 * half] &= mask;
      left[2 * half + 1] &= mask;
    }
  }
#pragma unroll
  for (i32 p = 0; p < PARTS; p++) ptx_mma_m16n8k16_bf16(y, left, brought.part[p], y);
}

// The same of fp32 values, of whose bits and of the columns' 22 count.
DEVICE void add_brought(const char *values, i32 stride, i32 tile, i32 n, const Brought<true, 2> &brought, Lane lane, float (&y)[4]) {
  constexpr u32 MASK = 0xFFFFE000u;
#pragma unroll
  for (i32 half = 0; half < 2; half++) {
    u32 upper[4], lower[4];
#pragma unroll
    for (i32 e = 0; e < 4; e++) {
      i32 i = 8 * half + lane.quad + e / 2 * 4;
      float v = i < n ? ((const float *)(values + i * stride))[tile * TILE + lane.group + e % 2 * 8] : 0.0f;
      upper[e] = bits_of(v) & MASK;
      lower[e] = bits_of(v - from_bits(upper[e]));
    }
    u32 first[2] = {brought.part[0][2 * half], brought.part[0][2 * half + 1]}, second[2] = {brought.part[1][2 * half], brought.part[1][2 * half + 1]};
    ptx_mma_m16n8k8_tf32(y, lower, first, y);
    ptx_mma_m16n8k8_tf32(y, upper, second, y);
    ptx_mma_m16n8k8_tf32(y, upper, first, y);
  }
}

// Products of up to SEVERAL_TILES tiles from first on with the columns of which a lane has one.
template <i32 FORMAT, bool HIGH>
DEVICE void multiply_tiles(i32 rows, const Job &job, i32 first, i32 end, const char *column, Lane lane, float (&y)[SEVERAL_TILES][4]) {
  uint4 columns[BLOCKS];
  if (HIGH) load_blocks(column, columns);
#pragma unroll 1
  for (i32 t = 0; t < SEVERAL_TILES; t++) {
    if (first + t >= end) break;
    i32 row = (first + t) * TILE + lane.group;
    float sums[4];
    if constexpr (HIGH) {
      const char *low = job.plane + row * ROW_BYTES + 16 * lane.quad;
      multiply(low, low + 8 * ROW_BYTES, columns, sums);
    } else {
      multiply_full<FORMAT>(rows, job.plane, row, column, lane, sums);
    }
#pragma unroll
    for (i32 of = 0; of < SEVERAL_TILES; of++)
#pragma unroll
      for (i32 i = 0; i < 4; i++) y[of][i] = of == t ? sums[i] : y[of][i];
  }
}

// Of up to SEVERAL_TILES tiles from first on: y, the checkpoint's products with the columns of a pass, by factors of a lane's two columns; and what
// records [from, n) bring.
template <class Family, bool IS_F32, i32 PARTS>
DEVICE void add_records(const Pipeline &s, const Job &job, i32 pass, i32 first, i32 end, i32 from, const float (&of)[2], Lane lane,
                        float (&y)[SEVERAL_TILES][4]) {
  i32 n = job.item->records;
#pragma unroll
  for (i32 t = 0; t < SEVERAL_TILES; t++)
#pragma unroll
    for (i32 i = 0; i < 4; i++) y[t][i] = __fmul_rn(y[t][i], of[i % 2]);
#pragma unroll 1
  for (i32 i = from / TILE * TILE; i < n; i += TILE) {
    Brought<IS_F32, PARTS> brought = brought_by_records<Family, IS_F32, PARTS>(s, job, pass, i, from, n, lane);
#pragma unroll
    for (i32 t = 0; t < SEVERAL_TILES; t++)
      if (first + t < end) add_brought(values_at(s, job) + i * s.value_stride, s.value_stride, first + t, n - i, brought, lane, y[t]);
  }
}

// Where a tile's checkpoint stands among the records of an item, and how many it takes in.
struct Folds {
  i32 from;
  i32 n;
};

template <class Family>
DEVICE Folds folds_of_tile(const typename Family::Params &params, const Job &job, i32 tile) {
  if (job.head->kind != ODD) return Folds{job.head->from, job.head->folds};
  const State &state = params.family.state;
  i64 tag = ((const i64 *)own_part(state.tags, job.item->slot))[(i64)job.number * state.tiles + first_tile(params.pipeline, job) + tile];
  return Folds{(i32)(tag - job.item->position + job.item->records),
               (i32)folds_of(params.family.slots, job.item->position, tag, job.item->len, job.item->flush_before, job.item->flush)};
}

// Of four tiles' sums, each over a quad, lane.quad keeps those of its tile. N: of a tile.
template <i32 N>
DEVICE void sum_quads(const float (&of)[SINGLE_TILES][N], Lane lane, float (&to)[N]) {
#pragma unroll
  for (i32 i = 0; i < N; i++) {
    float pair[2];
#pragma unroll
    for (i32 t = 0; t < 2; t++) {
      bool upper = lane.quad & 2;
      float keeps = upper ? of[t + 2][i] : of[t][i], gives = upper ? of[t][i] : of[t + 2][i];
      pair[t] = keeps + __shfl_xor_sync(0xFFFFFFFFu, gives, 2);
    }
    bool odd = lane.quad & 1;
    float keeps = odd ? pair[1] : pair[0], gives = odd ? pair[0] : pair[1];
    to[i] = keeps + __shfl_xor_sync(0xFFFFFFFFu, gives, 1);
  }
}

// Leaves sums of one token, [column][channel]: of rows 2 lane.group and the next one of the quad's tile, [row][column].
template <i32 C>
DEVICE void put_pairs(const Pipeline &s, i32 tiles, i32 first, Lane lane, const float (&of)[2 * C]) {
  i32 tile = first + lane.quad;
  if (tile >= tiles) return;
#pragma unroll
  for (i32 c = 0; c < C; c++) *(float2 *)(sums_at(s) + c * s.sums + tile * TILE + 2 * lane.group) = make_float2(of[c], of[C + c]);
}

// Products of rows 2 lane.group and the next one of four tiles, from first on, with C columns in fp32; of lane.quad's tile: [row][column]. columns:
// the lane's own eight values of each, of the first block.
template <i32 FORMAT, i32 C>
DEVICE void read_full(const Pipeline &s, const State &state, const Job &job, i32 first, const char *const (&columns)[C], SharedAt half_empty,
                      Lane lane) {
  // Rows next to each other begin in the same bank: every other one takes halves of eight elements in another order.
  i32 swap = FORMAT == FORMAT_F32 ? (lane.group & 1) * 4 : 0;
  float sums[SINGLE_TILES][2 * C] = {};
  // Rows of the first half are freed while those of the second are read, if there are any.
  i32 half = first_half(state.rows) < state.rows ? first_half(state.rows) : 0;
  // Of several columns some blocks at a time, since registers are few.
  constexpr i32 SOME = BLOCKS / C;
#pragma unroll
  for (i32 begin = 0; begin < BLOCKS; begin += SOME) {
    float with[C][SOME * 8];
#pragma unroll
    for (i32 c = 0; c < C; c++)
#pragma unroll
      for (i32 j = 0; j < SOME; j++)
#pragma unroll
        for (i32 four = 0; four < 8; four += 4) {
          uint2 two = *(const uint2 *)(columns[c] + 2 * BLOCK * (begin + j) + 2 * (four ^ swap));
          float *to = with[c] + 8 * j + four;
          to[0] = pair_low(two.x), to[1] = pair_high(two.x), to[2] = pair_low(two.y), to[3] = pair_high(two.y);
        }
#pragma unroll
    for (i32 t = 0; t < SINGLE_TILES; t++) {
      if (first + t >= state.tiles) continue;
#pragma unroll
      for (i32 h = 0; h < 2; h++) {
        i32 element = ((first + t) * TILE + 2 * lane.group + h) * COLUMNS + 8 * lane.quad + begin * BLOCK;
        float sum[C][2] = {};
#pragma unroll
        for (i32 j = 0; j < SOME; j++) {
          float v[8];
          if (FORMAT == FORMAT_F32) {
            const float *at = (const float *)job.plane + element + BLOCK * j;
            float4 a = *(const float4 *)(at + swap), b = *(const float4 *)(at + (4 ^ swap));
            v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
          } else {
            row_of<FORMAT>(state.rows, job.plane, element + BLOCK * j, v);
          }
#pragma unroll
          for (i32 c = 0; c < C; c++)
#pragma unroll
            for (i32 e = 0; e < 8; e++) sum[c][e % 2] = fma(v[e], with[c][8 * j + e], sum[c][e % 2]);
        }
#pragma unroll
        for (i32 c = 0; c < C; c++) sums[t][h * C + c] = sums[t][h * C + c] + (sum[c][0] + sum[c][1]);
      }
      if (HAS_HALVES<FORMAT> && begin + SOME == BLOCKS && (first + t + 1) * TILE == half) free_place(half_empty);
    }
  }
  float of[2 * C];
  sum_quads(sums, lane, of);
  put_pairs<C>(s, state.tiles, first, lane, of);
}

// The same of a checkpoint of 16-bit values, by tensor cores.
//
// Rows next to each other begin in the same bank, so that a row goes through its chunks of 16 bytes in an order of its own, and a column of the
// product in the same one: each row has its product in the column of its order. With one column eight orders, with two four of both.
template <i32 C>
DEVICE void read_high(const Pipeline &s, i32 tiles, const Job &job, i32 first, const char *const (&columns)[C]) {
  constexpr i32 ORDERS = 8 / C, STEPS = COLUMNS / 16;
  i32 lane = lane_index(), row = lane % 8, matrix = lane / 8;
  float sums[SINGLE_TILES][4] = {};
  // Columns of the product, in steps of 16: matrices of the right operand.
  u32 right[STEPS / 2][4];
#pragma unroll
  for (i32 i = 0; i < STEPS / 2; i++)
    ptx_ldmatrix_x4<false>(right[i], (row < ORDERS ? columns[0] : columns[C - 1]) + ((4 * i + matrix) ^ row % ORDERS) * 16);
  const char *at = job.plane + (first * TILE + matrix % 2 * 8 + row) * ROW_BYTES;
#pragma unroll
  for (i32 step = 0; step < STEPS; step++) {
    const char *of = at + ((2 * step + matrix / 2) ^ row % ORDERS) * 16;
    u32 columns_of[2] = {right[step / 2][step % 2 * 2], right[step / 2][step % 2 * 2 + 1]};
#pragma unroll
    for (i32 t = 0; t < SINGLE_TILES; t++) {
      u32 left[4];
      ptx_ldmatrix_x4<false>(left, of + t * TILE * ROW_BYTES);
      ptx_mma_m16n8k16_bf16(sums[t], left, columns_of, sums[t]);
    }
  }
  i32 group = lane / 4, quad = lane % 4, order = group % ORDERS, column = quad / (ORDERS / 2);
  if (quad % (ORDERS / 2) != order / 2) return;
  float *to = sums_at(s) + column * s.sums + first * TILE + group;
#pragma unroll
  for (i32 t = 0; t < SINGLE_TILES; t++) {
    if (first + t >= tiles) break;
    to[t * TILE] = order % 2 != 0 ? sums[t][1] : sums[t][0];
    to[t * TILE + 8] = order % 2 != 0 ? sums[t][3] : sums[t][2];
  }
}

// A head that has a step of one token: products of its checkpoint, of up to SINGLE_TILES tiles at a time, and what becomes of them.
template <class Family, i32 FORMAT, bool HIGH>
DEVICE void consume_single(const typename Family::Params &params, const Job &job, const SharedAt (&plane_empty)[2], SharedAt empty, Lane lane) {
  if (Family::WEIGHS_FIRST) Family::template weigh_head<true>(params, job);
#pragma unroll 1
  for (i32 first = 0; first < params.family.state.tiles; first += SINGLE_TILES)
    Family::template read_plane<FORMAT, HIGH>(params, job, first, plane_empty[0], lane);
  const State &state = params.family.state;
  // read_full has freed the first half, if there are rows behind it.
  bool is_half_free = HAS_HALVES<FORMAT> && !Family::WEIGHS_FIRST && first_half(state.rows) < state.rows;
  if (!is_half_free) free_place(plane_empty[0]);
  if (HAS_HALVES<FORMAT>) free_place(plane_empty[1]);
  if (!Family::WEIGHS_FIRST) {
    Family::template weigh_head<true>(params, job);
    __syncwarp();
  }
  Family::finish_single(params, job);
  free_place(empty);
}

// The same of a step of several tokens.
template <class Family, i32 FORMAT, bool HIGH>
DEVICE void consume_several(const typename Family::Params &params, const Job &job, const SharedAt (&plane_empty)[2], SharedAt empty, Lane lane) {
  Family::template weigh_head<false>(params, job);
  __syncwarp();
  i32 tiles = params.pipeline.tiles, step = job.head->kind == ODD ? 1 : (i32)SEVERAL_TILES;
#pragma unroll 1
  for (i32 tile = 0; tile < tiles; tile += step)
    Family::template read_tiles<FORMAT, HIGH>(params, job, folds_of_tile<Family>(params, job, tile).from, tile, min(tile + step, tiles), lane);
  free_place(plane_empty[0]);
  if (HAS_HALVES<FORMAT>) free_place(plane_empty[1]);
  free_place(empty);
}

template <class Family, i32 FORMAT, bool HIGH, bool IS_SINGLE>
DEVICE void consume(const typename Family::Params &params) {
  const Pipeline &s = params.pipeline;
  const Places at = places();
  Lane lane = lane_of(threadIdx.x);
  i32 n = items_of_block(s), me = warp_of() - services_of(s);
  Turn stage, keys;
  stage.place = me;
  u32 use = 1;  // of the stage
  // Number of an item, and heads from its first one on; the plane of its first head.
  i32 item = 0, h = me, plane = 0;
#pragma unroll 1
  for (;;) {
#pragma unroll 1
    while (h >= s.heads_per_item) {
      h -= s.heads_per_item;
      item++;
      keys.next(s.keys);
      plane += s.heads_per_item;
    }
    if (item >= n) break;
    plane %= s.planes;
    ptx_barrier_wait(at.full(stage.place), stage.phase);
    Count count = {item % ITEMS, item / ITEMS % PLANS};
    i32 own_plane = (plane + h) % s.planes;
    Job job = job_of(s, count, h, own_plane, stage.place, keys.place);
    i32 kind = job.head->kind;
    SharedAt plane_empty[2] = {at.plane_empty(own_plane), at.plane_empty(own_plane, 1)}, empty = at.empty(stage.place);
    // Without work, too: the weigher is to see every phase.
    ptx_barrier_wait(at.keys_ready(keys.place), keys.phase);
    if (kind <= ODD) {
      if (kind == FOLD && lane_index() == 0) ptx_counter_set(at.taken(stage.place), use);
      if (IS_SINGLE) {
        consume_single<Family, FORMAT, HIGH>(params, job, plane_empty, empty, lane);
      } else {
        consume_several<Family, FORMAT, HIGH>(params, job, plane_empty, empty, lane);
      }
      Family::record_rest(params, job, HIGH);
      __syncwarp();
      // Its tags are not needed any more.
      if (kind == ODD && lane_index() == 0) ptx_counter_set(at.taken(stage.place), use);
    } else {
      if (kind == ZERO) Family::zero(params, job);
      if (lane_index() == 0) {
        ptx_barrier_arrive(plane_empty[0]);
        if (HAS_HALVES<FORMAT>) ptx_barrier_arrive(plane_empty[1]);
        ptx_barrier_arrive(empty);
      }
    }
    if (lane_index() == 0) ptx_barrier_arrive(at.keys_empty(keys.place));
    // Every stage from its own number on, as many further as there are consumers.
    if (stage.place + s.consumers < s.stages) {
      stage.place += s.consumers;
      h += s.consumers;
    } else {
      h += s.stages - stage.place + me;
      stage.place = me;
      stage.phase ^= 1;
      use++;
    }
  }
}

// ---- Folders ----

// How folders lay out a tile: lanes next to each other have rows next to each other, and read the same keys.
DEVICE Lane fold_lane() { return Lane{lane_index() % 8, lane_index() / 8}; }

// Adds classes as sum_classes does, over lanes as fold_lane has them.
DEVICE float sum_fold_classes(const float (&c)[8]) {
  float b0 = __fadd_rn(c[0], c[4]), b1 = __fadd_rn(c[1], c[5]);
  float b2 = __fadd_rn(c[2], c[6]), b3 = __fadd_rn(c[3], c[7]);
  float s = __fadd_rn(__fadd_rn(b0, b2), __fadd_rn(b1, b3));
  s = __fadd_rn(s, __shfl_xor_sync(0xFFFFFFFFu, s, 8));
  return __fadd_rn(s, __shfl_xor_sync(0xFFFFFFFFu, s, 16));
}

// All folders have come here, and see what the others have written.
DEVICE void gather(u32 &phase) {
  const Places at = places();
  __syncwarp();
  if (lane_index() == 0) ptx_barrier_arrive(at.gathered());
  ptx_barrier_wait(at.gathered(), phase);
  phase ^= 1;
}

// Keys of an item's records, decoded, by all folders together: eight elements a lane.
template <class Family>
DEVICE void widen(const typename Family::Params &params, const Item &item, i32 me) {
  const Pipeline &s = params.pipeline;
#pragma unroll 4
  for (i32 i = me * WARP + lane_index(); i < item.records * (COLUMNS / 8); i += s.folders * WARP) {
    i32 record = i / (COLUMNS / 8), column = i % (COLUMNS / 8) * 8, row = item.first + record;
    if (row >= params.family.ring_rows) row -= params.family.ring_rows;
    uint4 four = *(const uint4 *)(item.key_ring + row * ROW_BYTES + column * 2);
    u32 pairs[4] = {four.x, four.y, four.z, four.w};
    float k[8];
#pragma unroll
    for (i32 e = 0; e < 8; e++) k[e] = e % 2 == 0 ? pair_low(pairs[e / 2]) : pair_high(pairs[e / 2]);
    Family::scale_keys(item, row, k);
    put8(wide_at(s) + record * Family::WIDE + column, k);
  }
}

// Decays a tile by one factor: one branch for all of its elements.
template <i32 NC, i32 H>
DEVICE void decay_whole(Tile<NC, H> &t, float factor, bool slow) {
  if (slow) {
#pragma unroll
    for (i32 i = 0; i < H * NC * 8; i++) ptx_scale_and_add(t.v[i / (NC * 8)][i / 8 % NC][i % 8], factor);
  } else {
#pragma unroll
    for (i32 i = 0; i < H * NC * 8; i++) ptx_scale(t.v[i / (NC * 8)][i / 8 % NC][i % 8], factor);
  }
}

// Loads a part of a tile, all of it under way together. Rows behind the last are the last once more.
template <i32 FORMAT, i32 H>
DEVICE void load_part(Tile<BLOCKS, H> &t, const State &s, const Checkpoint &c, i32 half, Lane lane) {
  constexpr i32 SIZE = FORMAT == FORMAT_F32 ? 4 : 2;
  uint4 high[H][BLOCKS], low[H][BLOCKS];
#pragma unroll
  for (i32 h = 0; h < H; h++) {
    i32 row = min((half + h) * 8 + lane.group, c.rows - 1);
    const char *at = c.head + ((c.first + row) * COLUMNS + 8 * lane.quad) * SIZE;
#pragma unroll
    for (i32 j = 0; j < BLOCKS; j++) {
      if (FORMAT == FORMAT_F32) {
        load8_32(at + j * BLOCK * SIZE, t.v[h][j]);
      } else {
        high[h][j] = *(const uint4 *)(at + j * BLOCK * SIZE);
        if (FORMAT == FORMAT_SPLIT32) low[h][j] = *(const uint4 *)(at + j * BLOCK * SIZE + s.rows * ROW_BYTES);
      }
    }
  }
  if constexpr (FORMAT != FORMAT_F32) {
#pragma unroll
    for (i32 h = 0; h < H; h++)
#pragma unroll
      for (i32 j = 0; j < BLOCKS; j++) {
        const uint4 &a = high[h][j], &b = low[h][j];
        u32 first[4] = {a.x, a.y, a.z, a.w}, second[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
          t.v[h][j][2 * i] = FORMAT == FORMAT_SPLIT32 ? join(first[i] & 0xFFFFu, second[i]) : pair_low(first[i]);
          t.v[h][j][2 * i + 1] = FORMAT == FORMAT_SPLIT32 ? join(first[i] >> 16, second[i] >> 16) : pair_high(first[i]);
        }
      }
  }
}

// Brings records [first, end), FOLD_RECORDS at most, of the rows of a part of a tile to a folder's own memory: of each the rows' values, scaled if
// Family says so, its scale, and the factor of its decay. Bits of those whose factor is to be added.
template <class Family>
DEVICE u32 bring_unit(const typename Family::Params &params, const Job &job, i32 first, i32 end, i32 channel, i32 rows, float *to) {
  constexpr i32 H = Family::FOLD_HALVES;
  i32 ring_rows = params.family.ring_rows, lane = lane_index(), row = job.item->first + min(first + lane, end - 1);
  if (row >= ring_rows) row -= ring_rows;
  float2 gate = Family::gate_of_record(*job.head, row);
  uint4 values[H];
#pragma unroll
  for (i32 pass = 0; pass < H; pass++) {
    i32 record = first + lane / H + pass * (WARP / H), at = job.item->first + record, of = lane % H * 8;
    if (at >= ring_rows) at -= ring_rows;
    values[pass] = make_uint4(0, 0, 0, 0);
    if (record < end && of < rows) values[pass] = *(const uint4 *)(Family::values_of_record(params, *job.head, at) + (channel + of) * 2);
  }
  Decay d = decay_of(gate.y);
  *(float2 *)(to + lane * FOLD_STRIDE + 2 * 8) = make_float2(gate.x, d.factor);
#pragma unroll
  for (i32 pass = 0; pass < H; pass++) {
    i32 record = lane / H + pass * (WARP / H);
    float scale = __shfl_sync(0xFFFFFFFFu, gate.x, record), *at = to + record * FOLD_STRIDE + lane % H;
    u32 pairs[4] = {values[pass].x, values[pass].y, values[pass].z, values[pass].w};
#pragma unroll
    for (i32 e = 0; e < 8; e++) {
      float v = e % 2 == 0 ? pair_low(pairs[e / 2]) : pair_high(pairs[e / 2]);
      at[H * e] = Family::IS_SCALED ? __fmul_rn(v, scale) : v;
    }
  }
  u32 slow = __ballot_sync(0xFFFFFFFFu, d.slow && first + lane < end);
  __syncwarp();
  return slow;
}

// Takes n records in front of which a part of a tile stands.
template <class Family, i32 H>
DEVICE void take_in(Tile<BLOCKS, H> &t, const float *records, const float *keys, i32 n, u32 slow, Lane lane) {
#pragma unroll 1
  for (i32 i = 0; i < n; i++) {
    const float *record = records + i * FOLD_STRIDE;
    float2 gate = *(const float2 *)(record + 2 * 8);
    float values[H];
#pragma unroll
    for (i32 h = 0; h < H; h++) values[h] = record[H * lane.group + h];
    // Decays per column are with the keys.
    if constexpr ((i32)Family::WIDE == (i32)COLUMNS) decay_whole(t, gate.y, slow >> i & 1);
    Family::take_in(t, keys + i * Family::WIDE, gate.x, values, lane);
  }
}

// A tile that a folder has: of head h of the block's item number item. Its own registers are few: what a tile needs is worked out from these
// numbers before its records are taken in, and once more afterwards.
struct Unit {
  i32 item;
  i32 h;
  i32 tile;
};

DEVICE Job job_of_unit(const Pipeline &s, const Unit &unit) {
  Count count = {unit.item % ITEMS, unit.item / ITEMS % PLANS};
  return job_of(s, count, unit.h, 0, 0, 0);
}

// A part of the tile.
template <class Family, i32 FORMAT>
DEVICE void fold_part(const typename Family::Params &params, Unit unit, i32 half, i32 me) {
  constexpr i32 H = Family::FOLD_HALVES;
  State state = params.family.state;
  // What the host has looked at.
  state.is_vector = 1;
  state.columns = COLUMNS;
  Tile<BLOCKS, H> t;
  Folds f;
  {
    Job job = job_of_unit(params.pipeline, unit);
    load_part<FORMAT>(t, state, checkpoint_of(state, params.family.place.layer, job.item->slot, job.number, first_tile(params.pipeline, job) + unit.tile, 0), half, fold_lane());
    f = folds_of_tile<Family>(params, job, unit.tile);
  }
  i32 end = f.from + f.n;
#pragma unroll 1
  for (i32 first = f.from; first < end; first += FOLD_RECORDS) {
    unit = Unit{ptx_hide(unit.item), ptx_hide(unit.h), ptx_hide(unit.tile)};
    Job job = job_of_unit(params.pipeline, unit);
    float *records = unit_at(params.pipeline, me);
    i32 n = min(end - first, (i32)FOLD_RECORDS), channel = unit.tile * TILE + half * 8;
    u32 slow = bring_unit<Family>(params, job, first, first + n, channel, params.pipeline.channels - channel, records);
    take_in<Family>(t, records, wide_at(params.pipeline) + first * Family::WIDE, n, slow, fold_lane());
    __syncwarp();
  }
  unit = Unit{ptx_hide(unit.item), ptx_hide(unit.h), ptx_hide(unit.tile)};
  const Pipeline &s = params.pipeline;
  i32 head = unit.item * s.heads_per_item + unit.h;
  ptx_counter_wait(places().taken(head % s.stages), (u32)(head / s.stages) + 1);
  Job job = job_of_unit(s, unit);
  Checkpoint c = checkpoint_of(state, params.family.place.layer, job.item->slot, job.number, first_tile(s, job) + unit.tile, job.item->seed);
  store_tile<FORMAT>(t, state, c, fold_lane(), half, job.item->position - job.item->records + end);
}

template <class Family, i32 FORMAT>
DEVICE void fold_tile(const typename Family::Params &params, const Unit &unit, i32 me) {
  const State &state = params.family.state;
  Job job = job_of_unit(params.pipeline, unit);
  Folds f = folds_of_tile<Family>(params, job, unit.tile);
  if (f.n <= 0) return;
#pragma unroll 1
  for (i32 half = 0; half < 2 && unit.tile * TILE + half * 8 < params.pipeline.channels; half += Family::FOLD_HALVES)
    fold_part<Family, FORMAT>(params, unit, half, me);
  Job again = job_of_unit(params.pipeline, Unit{ptx_hide(unit.item), unit.h, unit.tile});
  f = folds_of_tile<Family>(params, again, unit.tile);
  i64 *tags = (i64 *)own_part(state.tags, again.item->slot) + (i64)again.number * state.tiles + first_tile(params.pipeline, again);
  __syncwarp();
  if (lane_index() == 0) tags[unit.tile] = again.item->position - again.item->records + f.from + f.n;
}

template <class Family, i32 FORMAT>
DEVICE void fold(const typename Family::Params &params) {
  const Pipeline &s = params.pipeline;
  const Places at = places();
  i32 me = warp_of() - services_of(s) - s.consumers;
  u32 phase = 0;
  // There is no plan before the first ones.
  if (lane_index() == 0) ptx_barrier_arrive(at.begun(PLANS - 1));
  put_in_order<Family>(params, me);
#pragma unroll 1
  for (i32 i = 0; i < items_of_block(s); i++) {
    i32 plan = i / ITEMS % PLANS;
    if (i % ITEMS == 0) ptx_barrier_wait(at.planned(plan), i / ITEMS / PLANS & 1);
    const Item &item = plans().item[plan][i % ITEMS];
    if (item.folds) {
      gather(phase);
      widen<Family>(params, item, me);
      Family::widen_more(params, item, plans().head[plan][i % ITEMS * MAX_HEADS], me);
      gather(phase);
      // Tiles of its heads in turn.
      Unit unit = {i, 0, me};
#pragma unroll 1
      for (; unit.h < s.heads_per_item; unit.h++) {
        i32 kind = plans().head[i / ITEMS % PLANS][i % ITEMS * MAX_HEADS + unit.h].kind;
        if (kind != FOLD && kind != ODD) continue;
#pragma unroll 1
        for (; unit.tile < s.tiles; unit.tile += s.folders) fold_tile<Family, FORMAT>(params, unit, me);
        unit.tile -= s.tiles;
      }
    }
    __syncwarp();
    if (i % ITEMS == ITEMS - 1 && lane_index() == 0) ptx_barrier_arrive(at.begun(i / ITEMS % PLANS));
  }
}

// Brings the block's first checkpoints near before what the launch depends on has ended.
template <class Family, i32 FORMAT>
DEVICE void prefetch(const typename Family::Params &params) {
  const Pipeline &s = params.pipeline;
  const State &state = params.family.state;
  const Batch &batch = params.family.batch;
  i32 i = lane_index();
  i64 number = blockIdx.x + (i64)(i / s.heads_per_item) * gridDim.x;
  if (!batch.prefetch || i >= s.planes || number >= s.n_items) return;
  i64 slot = id_at(batch.slots, number / s.items_per_row);
  if (slot < 0 || slot >= params.family.slots.n_slots) return;
  i64 head = Family::head_of(params, (i32)(number % s.items_per_row), i % s.heads_per_item);
  i64 bytes = (i64)state.rows * COLUMNS * (state.format <= FORMAT_F32 ? 4 : 2), part = (number % s.items_per_row * s.heads_per_item + i % s.heads_per_item) % parts_of(s);
  const char *from = (const char *)own_part(state.checkpoint, slot) + head * bytes;
  i32 planes = HAS_PLANES<FORMAT> && parts_of(s) > 1 ? 2 : 1, plane_bytes = s.plane_bytes / planes;
  for (i32 p = 0; p < planes; p++) ptx_bulk_prefetch(from + part * plane_bytes + p * state.rows * ROW_BYTES, (u32)plane_bytes);
}

template <class Family, i32 FORMAT, bool HIGH, bool IS_SINGLE>
DEVICE void run(const typename Family::Params &params) {
  const Pipeline &s = params.pipeline;
  if (threadIdx.x == 0) {
    const Places at = places();
    for (i32 i = 0; i < MAX_STAGES; i++) {
      ptx_barrier_init(at.full(i), 1 + WARP);
      ptx_barrier_init(at.empty(i), 1);
      ptx_counter_set(at.taken(i), 0);
    }
    for (i32 i = 0; i < 2 * MAX_PLANES; i++) ptx_barrier_init(at.plane_empty(0, i), 1);
    for (i32 i = 0; i < MAX_KEYS; i++) {
      ptx_barrier_init(at.keys_full(i), 1 + WARP);
      ptx_barrier_init(at.keys_ready(i), 1);
      ptx_barrier_init(at.keys_empty(i), (u32)s.heads_per_item);
    }
    for (i32 i = 0; i < PLANS; i++) {
      ptx_barrier_init(at.planned(i), 1);
      ptx_barrier_init(at.begun(i), 1 + (u32)s.folders);
    }
    ptx_barrier_init(at.gathered(), (u32)s.folders);
    ptx_barrier_init(at.ordered(), (u32)s.folders);
    order().folding = order().others = 0;
    ptx_barrier_init_fence();
  }
  if (warp_of() == PRODUCER) prefetch<Family, FORMAT>(params);
  wait_for_dependency();
  __syncthreads();
  if (warp_of() == PLANNER) {
    plan<Family, FORMAT>(params);
  } else if (warp_of() == WEIGHER) {
    weigh<Family, IS_SINGLE>(params);
  } else if (warp_of() < services_of(s)) {
    produce<Family, FORMAT>(params);
  } else if (warp_of() < services_of(s) + s.consumers) {
    consume<Family, FORMAT, HIGH, IS_SINGLE>(params);
  } else {
    fold<Family, FORMAT>(params);
  }
}

}  // namespace decode
