// What the host and the device agree on: integers, enumerations and the parameters of launches.
// The structs mirror src/backend/cuda/params.rs; layout.inc, generated from there, checks every number, size and offset.
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

// Element types: Dtype and IndexType of src/dtype.rs.
enum : i32 { F32 = 1, BF16 = 2, F16 = 3, I32 = 16, I64 = 17 };

// Checkpoint formats: Format of src/replay/config.rs.
enum : i32 { FORMAT_SPLIT32 = 1, FORMAT_F32 = 2, FORMAT_BF16 = 3, FORMAT_F16 = 4 };

// Readouts: Readout of src/replay/config.rs.
enum : i32 { READOUT_HIGH = 1, READOUT_FULL = 2, READOUT_EXACT = 3 };

// Fault bits: src/replay/launch.rs.
enum : u32 {
  FAULT_ID = 1,
  FAULT_COUNT = 2,
  FAULT_LENGTH = 4,
  FAULT_POSITION = 8,
  FAULT_DUPLICATE = 16,
  FAULT_CANARY = 32,
  FAULT_NOT_FINITE = 64,
  FAULT_REWIND = 128,
};

// Of the first fault's place: there is none, somebody is writing it, it is complete. src/backend/report.rs.
enum : u32 { PLACE_NONE = 0, PLACE_CLAIMED = 1, PLACE_WRITTEN = 2 };

// When folds happen before they must: Schedule of src/replay/config.rs.
enum : i32 { SCHEDULE_STAGGERED = 0, SCHEDULE_BY_POSITION = 1 };

// Rows or columns of a state at most, and 32-column blocks of its rows. Widest convolution.
enum : i32 { MAX_DIM = 256, MAX_BLOCKS = MAX_DIM / 32, MAX_WIDTH = 4 };

// Rows of a checkpoint tile, columns of a block of state, lanes of a warp.
enum : i32 { TILE = 16, BLOCK = 32, WARP = 32 };

enum : i32 {
  // Records that are in shared memory at a time.
  CHUNK = 16,
  // Tokens whose readouts are computed at a time.
  TOKENS = 8,
  // Tokens of the longest step that is not serial.
  MAX_PARALLEL = 16,
  // Warps of a block at most.
  MAX_WARPS = 8,
  // Bytes of a token's gates in shared memory.
  GATES_BYTES = 16,
};

// Channels of a convolution that share a tag.
enum : i32 { CONV_TILE = 128 };

// Positions above this are faults.
constexpr i64 MAX_POSITION = 1ll << 60;

// A ring's state.
struct Cursor {
  i64 position;
  i64 flush_before;
  u64 seed;
  u32 generation;
  u32 committed;
};

// Sticky faults, in host memory that the device writes.
struct Report {
  u32 bits;
  u32 place;
  u64 count;
  i64 first_slot;
  i64 first_row;
  i32 first_pool;
  i32 first_layer;
  u32 clears;
  u32 reserved;
};

// Counters, in device memory.
struct Stats {
  u64 steps;
  u64 rows;
  u64 tokens;
  u64 accepted;
  u64 flushes;
  u64 checkpoint_read;
  u64 checkpoint_written;
  u64 ring_read;
  u64 ring_written;
};

// An index array.
struct Ids {
  const char *data;
  i64 stride;
  i32 index;
  i32 reserved;
};

// A strided tensor with the axes row, token and head; data is null where the tensor is absent.
struct Tensor {
  char *data;
  i64 row;
  i64 token;
  i64 head;
  i32 dtype;
  i32 reserved;
};

// In place of a layer stride: base is a table with the address of each layer. LAYER_TABLE of src/backend/cuda/params.rs.
constexpr i64 LAYER_TABLE = -0x7FFFFFFFFFFFFFFFll - 1;

// A component of a pool: layer l of slot (ring) s is at base + l layer_stride + s stride. Kernels of one layer get that layer's base, with
// a layer_stride of 0.
struct Component {
  char *base;
  i64 layer_stride;
  i64 stride;
};

// A slots handle.
struct Slots {
  Cursor *cursors;
  Report *report;
  Stats *stats;
  i32 n_slots;
  i32 n_rings;
  i32 window;
  i32 keep;
  i32 max_step_tokens;
  i32 schedule;
};

// A batch. tokens is the length of every row, or negative: rows of cu_seqlens.
struct Batch {
  i64 n_rows;
  i64 tokens;
  i64 max_tokens;
  i64 n_tokens;
  const i32 *cu_seqlens;
  Ids slots;
  Ids rings;
  const u8 *flush;
  const u32 *generation;
  i64 null_id;
  i64 keep_tail;
  i32 has_null_id;
  i32 keep_null_outputs;
  i32 extend;
  // May checkpoints be brought near before the dependency is waited for?
  i32 prefetch;
};

// Where a launch works: which pool and layer (for reports and components).
struct Place {
  i32 pool;
  i32 layer;
};

// A pool's states.
struct State {
  Component checkpoint;
  Component tags;
  i32 heads;
  i32 rows;
  i32 columns;
  i32 tiles;
  i32 format;
  i32 readout;
  i32 stochastic;
  // Tiles that one block works on: its warps. Blocks of a head.
  i32 warps;
  i32 parts;
  // Whether rows of the checkpoint can be read 16 bytes at a time.
  i32 is_vector;
};

// What a call of a family is to do.
enum : i32 { MODE_STEP = 0, MODE_EXTEND = 1 };

// Offsets of a block's arrays in shared memory, in bytes, and lengths of their rows in floats. What each one holds stands with the
// kernels that use it.
struct Shared {
  i32 columns;
  i32 channels;
  i32 at[14];
};

struct Mamba2Params {
  Slots slots;
  Batch batch;
  Place place;
  State state;
  Component ring_x;
  Component ring_b;
  Component ring_dt;
  Tensor x;
  Tensor b;
  Tensor c;
  Tensor dt;
  Tensor a;
  Tensor dt_bias;
  Tensor d_skip;
  Tensor z;
  Tensor out;
  Shared shared;
  i32 io;
  i32 ring_rows;
  i32 heads_per_group;
  i32 d_per_element;
  i32 softplus;
  i32 mode;
};

// How steps of a few tokens share out shared memory and warps (decode.cuh). Offsets and sizes in bytes.
struct Pipeline {
  i64 n_items;
  i32 items_per_row;
  i32 heads_per_item;
  // Checkpoints of heads, what else they have, and items' keys, that there is space for at a time.
  i32 planes;
  i32 stages;
  i32 keys;
  // Warps that bring, that compute outputs, and that fold.
  i32 producers;
  i32 consumers;
  i32 folders;
  // Tokens of a row at most; records and tokens, a multiple of 16.
  i32 tokens;
  i32 history;
  // Columns of products at most, and floats of one.
  i32 columns;
  i32 products;
  i32 value_stride;
  i32 plane_bytes;
  i32 plane_stride;
  i32 stage_bytes;
  // Of the first stage, and within a stage.
  i32 at_stages;
  i32 at_z;
  i32 at_gates;
  i32 at_weights;
  // Of the first item's keys, and within an item's.
  i32 at_keys;
  i32 key_bytes;
  i32 at_queries;
  i32 at_norms;
  i32 at_products;
  i32 at_own_gates;
  // Sums of a consumer: columns of them, and floats of one.
  i32 at_sums;
  i32 sum_columns;
  i32 sums;
  // Keys of the item that folds, decoded; records of a folder's part of a head.
  i32 at_wide;
  i32 at_units;
  // Parts that heads are worked on in, each of which is a head here: how many, and the rows and tiles of one.
  i32 parts;
  i32 channels;
  i32 tiles;
};

// What lies where in a block's shared memory in steps of a few tokens where each head has a block of its own (direct.cuh). Offsets, sizes and strides
// in bytes.
struct Direct {
  // Rows of keys: of a ring, and the step's tokens behind them; a multiple of 16 but where decays are per column.
  i32 rows;
  // Columns of products, and floats of one.
  i32 columns;
  i32 product_stride;
  // Whether all rows of a ring are brought, before it is known which hold history.
  i32 brings_all;
  i32 value_stride;
  i32 other_stride;
  i32 at_values;
  i32 at_queries;
  i32 at_others;
  i32 at_gates;
  i32 at_weights;
  i32 at_factors;
  i32 at_products;
  i32 at_brought;
  i32 at_sums;
  // Of delta rules.
  i32 at_norms;
  i32 at_own;
  // With decays per column.
  i32 at_logs;
  i32 at_columns;
  i32 at_reached;
  i32 at_elapsed;
};

struct Mamba2DirectParams {
  Mamba2Params family;
  Direct direct;
};

struct Mamba2DecodeParams {
  Mamba2Params family;
  Pipeline pipeline;
};

// Gates of a delta rule.
enum : i32 { GATE_SOFTPLUS = 0, GATE_LOWER_BOUND = 1, GATE_LOG_DECAY = 2 };

struct DeltaParams {
  Slots slots;
  Batch batch;
  Place place;
  State state;
  Component ring_k;
  Component ring_norm;
  Component ring_v;
  Component ring_g;
  Component ring_beta;
  Component ring_u;
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor g;
  Tensor beta;
  Tensor a_log;
  Tensor dt_bias;
  Tensor out;
  Shared shared;
  i32 io;
  i32 u_dtype;
  i32 ring_rows;
  i32 qk_heads;
  i32 is_tiled;
  i32 gate;
  i32 has_norm;
  i32 beta_sigmoid;
  i32 mode;
  float scale;
  float eps;
  float lower_bound;
};

struct DeltaDirectParams {
  DeltaParams family;
  Direct direct;
};

struct DeltaDecodeParams {
  DeltaParams family;
  Pipeline pipeline;
};

// Dense states outside the library. head counts layers' heads; strides in elements. layer is that of the pool, or negative: all.
struct StateTensor {
  char *data;
  i64 entry;
  i64 layer_stride;
  i64 head;
  i64 row;
  i32 dtype;
  i32 is_transposed;
  i32 layer;
  i32 n_layers;
};

// The most entries of a list that travel in a launch.
enum : i32 { MAX_INLINE = 64 };

// Which ids of a list count; others are 0: Which of src/replay/launch.rs.
enum : i32 { IDS_BOTH = 0, IDS_SLOTS = 1, IDS_RINGS = 2 };

// A list of slots and rings in device memory, or (inline) in the parameters themselves. first: number of entry 0 in the caller's list,
// of which a launch may be a part. Positions are int64 per entry; has_position tells whether there are any.
struct List {
  i64 n;
  i64 first;
  Ids slots;
  Ids rings;
  const i64 *position;
  i32 is_inline;
  i32 has_position;
  i32 which;
  i32 reserved;
  i32 inline_slots[MAX_INLINE];
  i32 inline_rings[MAX_INLINE];
  i64 inline_position[MAX_INLINE];
};

// What becomes of the states at held positions: they go to a dense buffer, to the slot that they are of, or to other slots.
enum : i32 { FOLD_EXPORT = 0, FOLD_FLUSH = 1, FOLD_STORE = 2 };

// Whose states, and where they go. Of a list's entries, or (is_batch) of the rows of a batch whose last commit reached at[row]; with
// FOLD_STORE to these slots, inline where the list is.
struct Fold {
  const i64 *at;
  Ids slots;
  i32 kind;
  i32 is_batch;
  i32 inline_slots[MAX_INLINE];
};

// The windows of a convolution: io [rows][channels] per ring, and a tag for every CONV_TILE channels; of a slot without a ring io
// [width - 1][channels], and as many tags.
struct Windows {
  Component ring;
  Component tags;
  Component stored;
  Component stored_tags;
  i32 channels;
  i32 width;
  i32 rows;
  i32 io;
};

// The most sections of a convolution's input.
enum : i32 { MAX_SECTIONS = 16 };

struct ConvParams {
  Slots slots;
  Batch batch;
  Place place;
  Windows windows;
  Tensor x;
  Tensor out;
  Tensor weight;
  Tensor bias;
  i32 section_starts[MAX_SECTIONS];
  i32 n_sections;
  i32 silu;
  i32 mode;
  i32 reserved;
};

// How a commit's counts are meant: Convention of src/replay/position.rs.
enum : i32 { COUNT_ACCEPTED = 0, COUNT_ACCEPTED_DRAFTS = 1, COUNT_REJECTED = 2 };

// counts is null where all tokens of each row are taken.
struct CommitParams {
  Slots slots;
  Batch batch;
  const i32 *counts;
  i64 stride;
  i32 convention;
  i32 reserved;
};

// Checkpoints (windows) and tags of one pool: every layer of every entry. Positions that are not given are 0.
struct ResetParams {
  Slots slots;
  List list;
  State state;
  Windows windows;
  i32 pool;
  i32 n_layers;
  i32 is_window;
  i32 keep_checkpoint;
  i32 convert;
  // Dynamic shared memory of a block; with convert at least a row of the state in fp32.
  i32 shared_bytes;
};

// How slots are copied: CopyKind of src/replay/launch.rs.
enum : i32 { COPY_FORK = 0, COPY_MOVE = 1, COPY_SWAP = 2, COPY_STORE = 3, COPY_LOAD = 4, COPY_STORED = 5 };

// What sets cursors. Copies are numbered from CURSORS_COPY on.
enum : i32 { CURSORS_RESET = 0, CURSORS_IMPORT = 1, CURSORS_FLUSH_LATER = 2, CURSORS_COPY = 16 };

// Cursors of a reset, an import, a flush that is to come, or a copy, which has sources. An import leaves seed and generation alone, and
// positions that are not given are the rings' own. Arrays per entry, or inline where the list is.
struct CursorParams {
  Slots slots;
  List list;
  List from;
  const u64 *seed;
  const u32 *generation;
  i32 kind;
  i32 has_from;
  i32 has_seed;
  i32 has_generation;
  u64 inline_seed[MAX_INLINE];
  u32 inline_generation[MAX_INLINE];
};

// Positions that are not given are the rings' own.
struct ImportParams {
  Slots slots;
  List list;
  StateTensor src;
  State state;
  Windows windows;
  i32 pool;
  i32 is_window;
};

// Positions that are not given are the committed ones, here and below. batch: of a fold that has one.
struct WindowParams {
  Slots slots;
  Batch batch;
  List list;
  StateTensor dst;
  Fold fold;
  Windows windows;
  i32 pool;
  i32 reserved;
};

// Of the family's parameters a fold uses slots, place.pool, state, rings and shared, and the batch if it has one. dst: of an export, and
// in all of them the layers.
struct Mamba2FoldParams {
  Mamba2Params family;
  List list;
  StateTensor dst;
  Fold fold;
};

struct DeltaFoldParams {
  DeltaParams family;
  List list;
  StateTensor dst;
  Fold fold;
};

// The most components of a pool, and the bytes of a chunk of one that a block copies.
enum : i32 { MAX_COMPONENTS = 12, COPY_BYTES = 16384 };

// What a component is, as far as copies ask: Component of src/replay/layout.rs.
enum : i32 { COMPONENT_TAGS = 2, COMPONENT_WINDOW_TAGS = 14 };

// A part of a pool's memory that is copied: bytes of every layer and slot (ring). Chunks are numbered over all components.
struct CopiedComponent {
  Component at;
  i64 bytes;
  i64 first_chunk;
  i32 kind;
  i32 per_ring;
};

// Memory of a copy, of one pool.
struct CopyParams {
  Slots slots;
  List from;
  List to;
  Windows windows;
  CopiedComponent components[MAX_COMPONENTS];
  i64 n_chunks;
  i32 n_components;
  i32 n_layers;
  i32 kind;
  i32 pool;
  i32 is_window;
  i32 reserved;
};

// The most pools whose tags travel in a launch.
enum : i32 { MAX_POOLS = 40 };

// The tags of a pool: count of them for a layer and a slot (or a ring). slots: ids of its own, if group is not 0; inline they are in
// the list's inline_slots, groups of as many ids as the list has entries, of which group 0 is the list's own.
struct PoolTags {
  Component tags;
  Ids slots;
  i32 n_layers;
  i32 count;
  i32 per_ring;
  i32 group;
};

// n: tokens to take back, per entry; where the list is inline they are its positions. done may be null.
struct RewindParams {
  Slots slots;
  List list;
  const i32 *n;
  i32 *done;
  PoolTags pools[MAX_POOLS];
  i32 n_pools;
  i32 reserved;
};

// An input that checks look at.
struct Input {
  Tensor tensor;
  i64 heads;
  i64 inner;
  i32 per_token;
  i32 reserved;
};

// A component of owned memory: what a stride has behind a part's bytes is its guard.
struct Guard {
  Component component;
  i64 bytes;
  i32 per_ring;
  i32 reserved;
};

// The most inputs of a call.
enum : i32 { MAX_INPUTS = 18 };

// What a guard holds: GUARD of src/replay/layout.rs.
enum : u8 { GUARD_BYTE = 0xC5 };

struct InspectParams {
  Slots slots;
  Batch batch;
  Place place;
  Input inputs[MAX_INPUTS];
  Guard guards[MAX_COMPONENTS];
  i32 n_inputs;
  i32 n_guards;
  i32 n_layers;
  i32 writes_guards;
};

struct ReadParams {
  Slots slots;
  List list;
  Cursor *dst;
};

// As offsetof, which needs a header.
#ifndef OFFSET_OF
#define OFFSET_OF(type, field) __INTADDR__(&((type *)0)->field)
#endif
#include "layout.inc"
