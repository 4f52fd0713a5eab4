// Moves the positions of a batch's rows: position += accepted, and nothing else. A thread per row. Mirrors commit in
// src/backend/cpu/life.rs.
#include "../common/batch.cuh"

// Accepted tokens of a row, before they are clamped.
DEVICE i64 wanted(i32 convention, i64 count, i64 tokens) {
  return convention == COUNT_ACCEPTED ? count : convention == COUNT_ACCEPTED_DRAFTS ? count + 1 : tokens - count;
}

struct Committed {
  u64 rows;
  u64 tokens;
  u64 accepted;
};

DEVICE Committed commit_row(const CommitParams &p, i64 row) {
  // The steps of this batch have reported its ids and lengths already; here they only decide what moves.
  Row r = resolve(p.slots, p.batch, row, Place{-1, -1}, false);
  if (!r.live) return Committed{};
  Cursor &cursor = p.slots.cursors[r.ring];
  if (p.batch.generation && p.batch.generation[row] != cursor.generation) return Committed{};
  i64 len = r.span.len;
  if (len == 0) {
    cursor.committed = 0;
    return Committed{};
  }
  i64 count = len;
  if (p.counts) {
    i64 asked = wanted(p.convention, p.counts[row * p.stride], len);
    count = min(max(asked, 0ll), len);
    if (count != asked) fault(p.slots, FAULT_COUNT, r.ring, row, -1, -1);
  }
  i64 position = cursor.position + count;
  if (position > MAX_POSITION) {
    fault(p.slots, FAULT_POSITION, r.ring, row, -1, -1);
    cursor.committed = 0;
    return Committed{};
  }
  cursor.position = position;
  cursor.committed = (u32)count;
  if (p.batch.extend) cursor.flush_before = first_fold(p.slots, position, r.ring);
  return Committed{1, (u64)len, (u64)count};
}

DEVICE u64 sum_of_warp(u64 x) {
#pragma unroll
  for (i32 mask = WARP / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, mask);
  return x;
}

extern "C" __global__ void __launch_bounds__(128) replayssm_kernel(const __grid_constant__ CommitParams p) {
  wait_for_dependency();
  if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(&p.slots.stats->steps, 1ull);
  Committed c = {};
#pragma unroll 1
  for (i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x; row < p.batch.n_rows; row += (i64)gridDim.x * blockDim.x) {
    Committed r = commit_row(p, row);
    c.rows += r.rows;
    c.tokens += r.tokens;
    c.accepted += r.accepted;
  }
  __syncwarp();
  c.rows = sum_of_warp(c.rows);
  c.tokens = sum_of_warp(c.tokens);
  c.accepted = sum_of_warp(c.accepted);
  if (threadIdx.x % WARP == 0 && c.rows) {
    atomicAdd(&p.slots.stats->rows, c.rows);
    atomicAdd(&p.slots.stats->tokens, c.tokens);
    atomicAdd(&p.slots.stats->accepted, c.accepted);
  }
}
