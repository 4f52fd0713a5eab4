// Parameters of the kernels that steps are compared with. Only the program replayssm-bench has them. They mirror src/backend/cuda/bench.rs.
#pragma once
#include "../common/types.cuh"

// Bytes that a block of a stream moves, its threads, and 16-byte words of each.
enum : i32 { STREAM_BYTES = 32768, STREAM_THREADS = 256, STREAM_WORDS = STREAM_BYTES / STREAM_THREADS / 16 };

struct StreamParams {
  // [blocks][STREAM_BYTES].
  char *data;
  // Keeps what is read from being left out; hardly ever written.
  u32 *sink;
};
static_assert(sizeof(StreamParams) == 16, "StreamParams");

struct ProductParams {
  // bfloat16 [batch, hidden], dense.
  const u16 *activations;
  // bfloat16 [n, hidden], dense.
  const u16 *weights;
  // bfloat16 [batch, n], dense.
  u16 *out;
  i32 batch;
  // Multiple of 32.
  i32 hidden;
  // Multiple of 16.
  i32 n;
  i32 reserved;
};
static_assert(sizeof(ProductParams) == 40, "ProductParams");
