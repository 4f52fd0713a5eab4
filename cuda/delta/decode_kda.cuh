// Kimi Delta Attention in the pipeline of ../common/decode.cuh: Gated DeltaNet's family with a decay per column, so that
//
//   what a record brings to a column is (e^{G(j,t)} * k_j) . k_t, or . q_t, times the two norms: no product that heads could share
//   the checkpoint is read with e^{G_t} * k_t and e^{G_t} * q_t, which go to tensor cores in two parts
//
// An item is one head. The weigher works out the log decays of the step's tokens. A consumer goes from its head's newest record to the oldest
// with the sums of the log decays in between, four columns a lane, and never takes one sum from another. Log decays of records come to the stage
// as values do; folders make factors of those in the ring.
//
// Up to FEW tokens: k and q of all of them are columns of one product.

namespace decode {

template <i32 FORMAT_, bool HIGH_>
struct Kda : Delta<FORMAT_, HIGH_, true> {
  typedef Delta<FORMAT_, HIGH_, true> Base;
  typedef typename Base::Params Params;
  // OF_LANE: columns of a lane where a warp has all of them. A decoded record has its key, the factors of its decays, and a word for each block
  // whose bits say which of them decay slowly. PART_BYTES: a part of a column that the checkpoint is read with.
  enum : i32 {
    FEW = Base::FEW,
    FOLD_HALVES = Base::FOLD_HALVES,
    OF_LANE = COLUMNS / WARP,
    LOG_BYTES = COLUMNS * 4,
    WIDE = 2 * COLUMNS + BLOCKS,
    PART_BYTES = HIGH_ ? ROW_BYTES : COLUMNS * 4,
  };

  // Columns of a step: k and q of one token, or k of FEW and q of FEW.
  template <bool IS_SINGLE>
  static constexpr i32 columns_of() {
    return IS_SINGLE ? (i32)Base::SINGLE_COLUMNS : (i32)MAX_COLUMNS;
  }

  // Parts that a column is put down in. Where only few columns of a product are used, it has both as such; others that are fp32 are split when
  // they are used.
  template <bool IS_SINGLE>
  static constexpr i32 parts_of() {
    return HIGH_ || IS_SINGLE ? 2 : 1;
  }

  // Within a stage: log decays of records, instead of gates; what records bring to columns, [record][column], as weights; behind it, of each
  // column what the checkpoint is read with, first the upper parts of all.
  static DEVICE float *logs_at(const Pipeline &s, const Job &job, i32 i) { return (float *)(job.stage + s.at_gates) + i * COLUMNS; }
  template <bool IS_SINGLE>
  static DEVICE char *part_at(const Pipeline &s, const Job &job, i32 i) {
    return (char *)(weights_at(s, job) + columns_of<IS_SINGLE>() * s.history) + i * PART_BYTES;
  }
  // With the keys, instead of products: log decays of the step's tokens, and the head's dt_bias.
  static DEVICE float *token_logs_at(const Pipeline &s, char *keys, i32 t) { return (float *)(keys + s.at_products) + t * COLUMNS; }
  // k . q of one token, normalised.
  static DEVICE float *own_product_at(const Pipeline &s, char *keys) { return Base::norms_at(s, keys) + s.history + MAX_TOKENS; }

  static DEVICE i32 record_bytes(const Params &p) { return Base::record_bytes(p) + LOG_BYTES; }

  // Inputs of the gates come with the norms, as they are, to where log decays will be in fp32.
  static DEVICE void bring_norms(const Params &p, const Item &item, const Head &head, SharedAt to) {
    const Tensor &g = p.family.g, &bias = p.family.dt_bias;
    Base::bring_norms(p, item, head, to);
    SharedAt logs = to + p.pipeline.at_products;
#pragma unroll 1
    for (i32 t = 0; t < item.len; t++) bring_row(logs + t * LOG_BYTES, head.z + t * g.token * size_of(g.dtype), g.dtype);
    if (bias.data) bring_row(logs + p.pipeline.tokens * LOG_BYTES, tensor_at(bias, 0, 0, item.head), bias.dtype);
  }
  static DEVICE void bring_row(SharedAt to, const char *from, i32 dtype) {
#pragma unroll 1
    for (i32 i = 8 * lane_index(); i < COLUMNS * (i32)size_of(dtype); i += 8 * WARP) ptx_copy8(to + i, from + i);
  }
  static DEVICE void bring_gates(const Gates &, SharedAt, i32) {}

  // Log decays, too.
  static DEVICE void prefetch_records(const Params &p, const Job &job) {
    if (job.head->part != 0) return;
    i32 rows = p.family.ring_rows, first = job.item->first, n = job.item->records, before = min(n, rows - first);
    Base::prefetch_records(p, job);
    if (before > 0) ptx_bulk_prefetch(job.head->gate_ring + first * LOG_BYTES, (u32)(before * LOG_BYTES));
    if (n > before) ptx_bulk_prefetch(job.head->gate_ring, (u32)((n - before) * LOG_BYTES));
  }

  // Behind the step's tokens: log decays of records, up to the ring's end and on from its beginning.
  static DEVICE i32 token_copies(const Params &, i32 len) { return len + 2; }
  static DEVICE Copy copy_of_token(const Params &p, const Job &job, i32 i) {
    i32 part = i - job.item->len, n = job.item->records, first = job.item->first, before = min(n, p.family.ring_rows - first);
    if (part < 0) return Base::copy_of_token(p, job, i);
    return Copy{job.head->gate_ring + (part == 0 ? first * LOG_BYTES : 0), (u32)(p.pipeline.at_gates + (part == 0 ? 0 : before * LOG_BYTES)),
                (u32)((part == 0 ? before : n - before) * LOG_BYTES)};
  }

  // The lane's columns of the key of a record or token, and of the query of a token.
  static DEVICE void load_key(const Job &job, i32 i, float (&v)[OF_LANE]) { load_four(job.keys + i * ROW_BYTES, BF16, v); }
  static DEVICE void load_query(const Pipeline &s, const Job &job, i32 t, float (&v)[OF_LANE]) {
    load_four(job.keys + s.at_queries + t * ROW_BYTES, BF16, v);
  }

  // ---- The weigher ----

  template <bool IS_SINGLE>
  static DEVICE void weigh_item(const Params &p, const Job &job) {
    const Pipeline &s = p.pipeline;
    process_gates(p, job);
    Base::weigh_norms(p, job);
    if (!IS_SINGLE) return;
    float k[OF_LANE], q[OF_LANE], own = 0.0f;
    load_key(job, job.item->records, k);
    load_query(s, job, 0, q);
#pragma unroll
    for (i32 e = 0; e < OF_LANE; e++) own = fma(k[e], q[e], own);
#pragma unroll
    for (i32 step = 1; step < WARP; step *= 2) own = __fadd_rn(own, __shfl_xor_sync(0xFFFFFFFFu, own, step));
    __syncwarp();
    own = __fmul_rn(own, __fmul_rn(Base::template column_norm<true>(s, job, 0), Base::template column_norm<true>(s, job, 1)));
    if (lane_index() == 0) *own_product_at(s, job.keys) = own;
  }

  // Log decays of the step's tokens: the arithmetic of all forms.
  static DEVICE void process_gates(const Params &params, const Job &job) {
    const DeltaParams &p = params.family;
    const Pipeline &s = params.pipeline;
    float bias[OF_LANE] = {}, x[OF_LANE], a = job.gates[0].y;
    bool has_bias = p.dt_bias.data;
    if (has_bias) load_four(token_logs_at(s, job.keys, s.tokens), p.dt_bias.dtype, bias);
#pragma unroll 1
    for (i32 t = 0; t < job.item->len; t++) {
      float *row = token_logs_at(s, job.keys, t);
      load_four(row, p.g.dtype, x);
#pragma unroll
      for (i32 e = 0; e < OF_LANE; e++) x[e] = has_bias ? __fadd_rn(x[e], bias[e]) : x[e];
      if (p.gate == GATE_SOFTPLUS) {
#pragma unroll
        for (i32 e = 0; e < OF_LANE; e++) x[e] = -__fmul_rn(a, softplus(x[e]));
      } else if (p.gate == GATE_LOWER_BOUND) {
#pragma unroll
        for (i32 e = 0; e < OF_LANE; e++) x[e] = __fmul_rn(p.lower_bound, sigmoid(__fmul_rn(a, x[e])));
      }
      // Rows of 16 bits lie where others' fp32 goes.
      __syncwarp();
      ((float4 *)row)[lane_index()] = make_float4(x[0], x[1], x[2], x[3]);
    }
    __syncwarp();
  }

  // ---- Consumers ----

  // The lane's part of the step's columns, decayed from the committed position to their token; zeros where there is no token.
  template <i32 C>
  static DEVICE void load_columns(const Pipeline &s, const Job &job, float (&column)[C][OF_LANE]) {
    constexpr i32 N = C / 2;
    i32 n = job.item->records, len = job.item->len;
    float elapsed[OF_LANE] = {};
#pragma unroll
    for (i32 t = 0; t < N; t++) {
      bool exists = t < len;
      i32 of = exists ? t : 0;
      float g[OF_LANE], k[OF_LANE], q[OF_LANE];
      load_four(token_logs_at(s, job.keys, of), F32, g);
      load_key(job, n + of, k);
      load_query(s, job, of, q);
#pragma unroll
      for (i32 e = 0; e < OF_LANE; e++) {
        elapsed[e] = add_log(elapsed[e], g[e]);
        float decay = ptx_exp2_flush(elapsed[e]);
        column[t][e] = exists ? __fmul_rn(k[e], decay) : 0.0f;
        column[N + t][e] = exists ? __fmul_rn(q[e], decay) : 0.0f;
      }
    }
  }

  // Leaves the columns as the checkpoint is read with them, which decays by 2^elapsed up to the committed position.
  template <i32 C>
  static DEVICE void put_columns(const Pipeline &s, const Job &job, const float (&column)[C][OF_LANE], const float (&elapsed)[OF_LANE]) {
    constexpr i32 PARTS = parts_of<C == Base::SINGLE_COLUMNS>();
    constexpr u32 MASK = PARTS == 1 ? ~0u : HIGH_ ? 0xFFFF0000u : 0xFFFFE000u;
    float decay[OF_LANE];
#pragma unroll
    for (i32 e = 0; e < OF_LANE; e++) decay[e] = ptx_exp2_flush(elapsed[e]);
#pragma unroll
    for (i32 c = 0; c < C; c++) {
      u32 upper[OF_LANE], lower[OF_LANE];
#pragma unroll
      for (i32 e = 0; e < OF_LANE; e++) {
        float v = __fmul_rn(column[c][e], decay[e]);
        upper[e] = bits_of(v) & MASK;
        lower[e] = bits_of(__fsub_rn(v, from_bits(upper[e])));
      }
      put_part(part_at<C == Base::SINGLE_COLUMNS>(s, job, c), upper);
      if (PARTS > 1) put_part(part_at<C == Base::SINGLE_COLUMNS>(s, job, C + c), lower);
    }
  }
  static DEVICE void put_part(char *to, const u32 (&bits)[OF_LANE]) {
    if (HIGH_) {
      ((uint2 *)to)[lane_index()] = make_uint2(upper_halves(bits[0], bits[1]), upper_halves(bits[2], bits[3]));
    } else {
      ((uint4 *)to)[lane_index()] = make_uint4(bits[0], bits[1], bits[2], bits[3]);
    }
  }

  // Sums over the warp of N numbers that each lane has: that of its number among as many groups of lanes.
  template <i32 N>
  static DEVICE float sum_by_lane(float (&v)[N]) {
    halve<N, WARP / 2>(v);
    float sum = v[0];
#pragma unroll
    for (i32 step = WARP / N / 2; step > 0; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, step));
    return sum;
  }
  // Of the first M numbers the lane keeps those of its half.
  template <i32 M, i32 STEP, i32 N>
  static DEVICE void halve(float (&v)[N]) {
    if constexpr (M > 1) {
      bool upper = lane_index() & STEP;
#pragma unroll
      for (i32 i = 0; i < M / 2; i++) {
        float gives = upper ? v[i] : v[i + M / 2];
        v[i] = __fadd_rn(upper ? v[i + M / 2] : v[i], __shfl_xor_sync(0xFFFFFFFFu, gives, STEP));
      }
      halve<M / 2, STEP / 2>(v);
    }
  }

  // What records [first, first + N / C) bring to the columns, newest first. elapsed: from each column's newest one of them on. ALL: none of them is
  // in front of the item's first.
  template <i32 N, i32 C, bool ALL>
  static DEVICE void weigh_some(const Pipeline &s, const Job &job, i32 first, const float (&column)[C][OF_LANE], float (&elapsed)[OF_LANE],
                                float norm) {
    constexpr i32 SHARE = WARP / N;
    float with[N] = {};
#pragma unroll
    for (i32 r = N / C - 1; r >= 0; r--) {
      bool exists = ALL || first + r >= 0;
      i32 at = exists ? first + r : 0;
      float k[OF_LANE], g[OF_LANE];
      load_key(job, at, k);
      load_four(logs_at(s, job, at), F32, g);
#pragma unroll
      for (i32 e = 0; e < OF_LANE; e++) {
        float x = __fmul_rn(k[e], ptx_exp2_flush(elapsed[e]));
#pragma unroll
        for (i32 c = 0; c < C; c++) with[r * C + c] = fma(x, column[c][e], with[r * C + c]);
        elapsed[e] = exists ? add_log(elapsed[e], g[e]) : elapsed[e];
      }
    }
    float sum = sum_by_lane(with);
    i32 i = lane_index() / SHARE, record = first + i / C;
    if (lane_index() % SHARE == 0 && (ALL || record >= 0))
      weights_at(s, job)[first * C + i] = __fmul_rn(sum, __fmul_rn(Base::norms_at(s, job.keys)[record], norm));
  }

  // What the step's tokens bring to its columns.
  static DEVICE void weigh_own(const Pipeline &s, const Job &job) {
    constexpr i32 SHARE = WARP / MAX_COLUMNS;
    i32 n = job.item->records, len = job.item->len, c = lane_index() / SHARE;
    float norm = Base::template column_norm<false>(s, job, c);
#pragma unroll 1
    for (i32 i = 0; i < len; i++) {
      float with[MAX_COLUMNS] = {}, own[OF_LANE], elapsed[OF_LANE] = {};
      load_key(job, n + i, own);
#pragma unroll
      for (i32 t = 0; t < FEW; t++) {
        if (t < i || t >= len) continue;
        float g[OF_LANE], k[OF_LANE], q[OF_LANE];
        load_four(token_logs_at(s, job.keys, t), F32, g);
        load_key(job, n + t, k);
        load_query(s, job, t, q);
#pragma unroll
        for (i32 e = 0; e < OF_LANE; e++) {
          elapsed[e] = t > i ? add_log(elapsed[e], g[e]) : 0.0f;
          float x = __fmul_rn(own[e], ptx_exp2_flush(elapsed[e]));
          with[t] = fma(x, k[e], with[t]);
          with[FEW + t] = fma(x, q[e], with[FEW + t]);
        }
      }
      float sum = sum_by_lane(with);
      if (lane_index() % SHARE == 0) own_at(s, job)[c * MAX_TOKENS + i] = __fmul_rn(sum, __fmul_rn(Base::norms_at(s, job.keys)[n + i], norm));
    }
  }

  template <bool IS_SINGLE>
  static DEVICE void weigh_head(const Params &params, const Job &job) {
    // Sums of a lane at a time.
    constexpr i32 C = columns_of<IS_SINGLE>(), N = WARP / 2, RECORDS = N / C;
    const Pipeline &s = params.pipeline;
    i32 n = job.item->records;
    if (!IS_SINGLE) weigh_own(s, job);
    float column[C][OF_LANE], elapsed[OF_LANE] = {}, norm = Base::template column_norm<IS_SINGLE>(s, job, lane_index() / (WARP / N) % C);
    load_columns(s, job, column);
    if (IS_SINGLE && lane_index() == 0) weights_at(s, job)[n * C + 1] = *own_product_at(s, job.keys);
    i32 first = n - RECORDS;
#pragma unroll 1
    for (; first >= 0; first -= RECORDS) weigh_some<N, C, true>(s, job, first, column, elapsed, norm);
    if (first > -RECORDS) weigh_some<N, C, false>(s, job, first, column, elapsed, norm);
    put_columns(s, job, column, elapsed);
  }

  // What a checkpoint in front of record from is read with.
  template <bool IS_SINGLE>
  static DEVICE void put_columns_from(const Pipeline &s, const Job &job, i32 from) {
    float column[columns_of<IS_SINGLE>()][OF_LANE], elapsed[OF_LANE] = {};
    // What was read before is done with.
    __syncwarp();
    load_columns(s, job, column);
#pragma unroll 4
    for (i32 i = job.item->records - 1; i >= from; i--) {
      float g[OF_LANE];
      load_four(logs_at(s, job, i), F32, g);
#pragma unroll
      for (i32 e = 0; e < OF_LANE; e++) elapsed[e] = add_log(elapsed[e], g[e]);
    }
    put_columns(s, job, column, elapsed);
    __syncwarp();
  }

  // Products of two fp32 rows of the checkpoint, SECOND apart, with fp32 columns, as with multiply; column: the lane's eight values of the first
  // block of its own. ARE_PARTS: columns have no more bits than a product takes, else they are split.
  template <i32 FORMAT, i32 SECOND, bool ARE_PARTS>
  static DEVICE void multiply_columns(i32 rows, const char *plane, i32 row, const char *column, Lane lane, float (&out)[4]) {
    constexpr u32 MASK = 0xFFFFE000u;
    float upper[2][4] = {}, lower[2][4] = {};
#pragma unroll
    for (i32 j = 0; j < BLOCKS; j++) {
      float a[8], b[8], c[8];
      load8_32(column + j * BLOCK * 4, c);
      row_of<FORMAT>(rows, plane, row * COLUMNS + BLOCK * j + 8 * lane.quad, a);
      row_of<FORMAT>(rows, plane, (row + SECOND) * COLUMNS + BLOCK * j + 8 * lane.quad, b);
#pragma unroll
      for (i32 i = 0; i < 4; i++) {
        float v[4] = {a[2 * i], b[2 * i], a[2 * i + 1], b[2 * i + 1]};
        u32 first[4], rest[4], right[2] = {bits_of(c[2 * i]) & MASK, bits_of(c[2 * i + 1]) & MASK};
#pragma unroll
        for (i32 e = 0; e < 4; e++) {
          first[e] = bits_of(v[e]) & MASK;
          rest[e] = bits_of(__fsub_rn(v[e], from_bits(first[e])));
        }
        ptx_mma_m16n8k8_tf32(upper[i % 2], first, right, upper[i % 2]);
        ptx_mma_m16n8k8_tf32(lower[i % 2], rest, right, lower[i % 2]);
        if (!ARE_PARTS) {
          u32 low[2] = {bits_of(__fsub_rn(c[2 * i], from_bits(right[0]))), bits_of(__fsub_rn(c[2 * i + 1], from_bits(right[1])))};
          ptx_mma_m16n8k8_tf32(lower[i % 2], first, low, lower[i % 2]);
        }
      }
    }
#pragma unroll
    for (i32 i = 0; i < 4; i++) out[i] = __fadd_rn(__fadd_rn(upper[0][i], upper[1][i]), __fadd_rn(lower[0][i], lower[1][i]));
  }

  // One token: products of tiles [begin, end) of the four from first on with the part of a column that the quad's lane has: of k, of q, and the
  // lower ones of both. Rows 2 lane.group and the next one.
  template <i32 FORMAT>
  static DEVICE void multiply_single(const Params &params, const Job &job, i32 first, i32 begin, i32 end, Lane lane,
                                     float (&seen)[4][2]) {
    const Pipeline &s = params.pipeline;
    // Two columns next to each other of a product are the same part.
    const char *column = part_at<true>(s, job, lane.group / 2) + 8 * lane.quad * (PART_BYTES / COLUMNS);
    if constexpr (HIGH_) {
      // Rows next to each other begin in the same bank: every other one goes through blocks in another order, and so does every other column.
      i32 other = (lane.group & 1) * 2 * BLOCK;
#pragma unroll 1
      for (i32 tile = begin; tile < end; tile += 2) {
        const char *at[2];
        float y[2][4] = {};
#pragma unroll
        for (i32 t = 0; t < 2; t++)
          at[t] = job.plane + ((first + min(tile + t, end - 1)) * TILE + 2 * lane.group) * ROW_BYTES + 16 * lane.quad;
#pragma unroll
        for (i32 j = 0; j < BLOCKS; j++) {
          i32 block = j * 2 * BLOCK + (j % 2 == 0 ? other : -other);
          uint4 c = *(const uint4 *)(column + block);
          u32 even[2] = {c.x, c.y}, odd[2] = {c.z, c.w};
#pragma unroll
          for (i32 t = 0; t < 2; t++) {
            uint4 a = *(const uint4 *)(at[t] + block), b = *(const uint4 *)(at[t] + block + ROW_BYTES);
            u32 left[4] = {a.x, b.x, a.y, b.y}, left_odd[4] = {a.z, b.z, a.w, b.w};
            ptx_mma_m16n8k16_bf16(y[t], left, even, y[t]);
            ptx_mma_m16n8k16_bf16(y[t], left_odd, odd, y[t]);
          }
        }
#pragma unroll
        for (i32 t = 0; t < 4; t++)
#pragma unroll
          for (i32 h = 0; h < 2; h++)
#pragma unroll
            for (i32 i = 0; i < 2; i++)
              if (t == tile + i) seen[t][h] = other != 0 ? y[i][2 * h + 1] : y[i][2 * h];
      }
    } else {
#pragma unroll 1
      for (i32 tile = begin; tile < end; tile++) {
        float y[4];
        i32 row = (first + tile) * TILE + 2 * lane.group;
        // For each tile once more: there are not registers for it.
        multiply_columns<FORMAT, 1, true>(params.family.state.rows, job.plane, row, column + ptx_hide(0), lane, y);
#pragma unroll
        for (i32 t = 0; t < 4; t++)
#pragma unroll
          for (i32 h = 0; h < 2; h++) seen[t][h] = t == tile ? y[2 * h] : seen[t][h];
      }
    }
  }

  // One token: the products of up to four tiles with k and q.
  template <i32 FORMAT, bool HIGH>
  static DEVICE void read_plane(const Params &params, const Job &job, i32 first, SharedAt, Lane lane) {
    const Pipeline &s = params.pipeline;
    bool is_odd = job.head->kind == ODD, is_lower = lane.quad & 2, is_q = lane.quad & 1;
    i32 n_tiles = min(params.family.state.tiles - first, (i32)SINGLE_TILES);
    float seen[4][2] = {}, y[4];
    // What the columns are made of has been put down.
    __syncwarp();
    // Where tiles stand at different positions, one at a time.
    i32 step = is_odd ? 1 : n_tiles;
#pragma unroll 1
    for (i32 i = 0; i < n_tiles; i += step) {
      if (is_odd) put_columns_from<true>(s, job, folds_of_tile<Kda>(params, job, first + i).from);
      multiply_single<FORMAT>(params, job, first, i, i + step, lane, seen);
    }
    // Two lanes add both parts, of two tiles each; then two give each other k and q of one.
#pragma unroll
    for (i32 h = 0; h < 2; h++) {
      float sums[2];
#pragma unroll
      for (i32 t = 0; t < 2; t++) {
        float gives = is_lower ? seen[t][h] : seen[t + 2][h];
        sums[t] = __fadd_rn(is_lower ? seen[t + 2][h] : seen[t][h], __shfl_xor_sync(0xFFFFFFFFu, gives, 2));
      }
      float other = __shfl_xor_sync(0xFFFFFFFFu, is_q ? sums[0] : sums[1], 1);
      y[2 * h] = is_q ? other : sums[0];
      y[2 * h + 1] = is_q ? sums[1] : other;
    }
    put_pairs<2>(s, params.family.state.tiles, first, lane, y);
  }

  static DEVICE void finish_single(const Params &params, const Job &job) {
    const Pipeline &s = params.pipeline;
    float of_k = Base::template column_norm<true>(s, job, 0), of_q = Base::template column_norm<true>(s, job, 1);
#pragma unroll 1
    for (i32 channel = 2 * lane_index(); channel < params.family.state.rows; channel += 2 * WARP)
      Base::finish_channels(params, job, channel, folds_of_tile<Kda>(params, job, channel / TILE).from, of_k, of_q);
  }

  // Several tokens: products of rows row and row + 8 of a bfloat16 checkpoint with both parts of a column.
  static DEVICE void multiply_pairs(const Job &job, i32 row, const uint4 (&column)[2][BLOCKS], Lane lane, float (&out)[4]) {
    float y[2][2][4] = {};
#pragma unroll
    for (i32 j = 0; j < BLOCKS; j++) {
      const char *at = job.plane + row * ROW_BYTES + 16 * lane.quad + 2 * BLOCK * j;
      uint4 a = *(const uint4 *)at, b = *(const uint4 *)(at + 8 * ROW_BYTES);
      u32 even[4] = {a.x, b.x, a.y, b.y}, odd[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
      for (i32 part = 0; part < 2; part++) {
        const uint4 &c = column[part][j];
        u32 right[2][2] = {{c.x, c.y}, {c.z, c.w}};
        ptx_mma_m16n8k16_bf16(y[part][0], even, right[0], y[part][0]);
        ptx_mma_m16n8k16_bf16(y[part][1], odd, right[1], y[part][1]);
      }
    }
#pragma unroll
    for (i32 i = 0; i < 4; i++) out[i] = __fadd_rn(__fadd_rn(y[0][0][i], y[0][1][i]), __fadd_rn(y[1][0][i], y[1][1][i]));
  }

  // Outputs of the tiles [first, end) of a head, and records of v and u.
  template <i32 FORMAT, bool HIGH>
  static DEVICE void read_tiles(const Params &params, const Job &job, i32 from, i32 first, i32 end, Lane lane) {
    const Pipeline &s = params.pipeline;
    if (job.head->kind == ODD) put_columns_from<false>(s, job, from);
    __syncwarp();
    i32 c = 2 * lane.quad;
    float of[2] = {Base::template column_norm<false>(s, job, c), Base::template column_norm<false>(s, job, c + 1)}, y[SEVERAL_TILES][4] = {};
    const char *column = part_at<false>(s, job, lane.group) + 8 * lane.quad * (PART_BYTES / COLUMNS);
    if constexpr (HIGH_) {
      uint4 pairs[2][BLOCKS];
      load_blocks(column, pairs[0]);
      load_blocks(column + MAX_COLUMNS * PART_BYTES, pairs[1]);
#pragma unroll
      for (i32 t = 0; t < SEVERAL_TILES; t++)
        if (first + t < end) multiply_pairs(job, (first + t) * TILE + lane.group, pairs, lane, y[t]);
    } else {
#pragma unroll 1
      for (i32 t = 0; t < SEVERAL_TILES; t++) {
        if (first + t >= end) break;
        float sums[4];
        multiply_columns<FORMAT, 8, false>(s.channels, job.plane, (first + t) * TILE + lane.group, column, lane, sums);
#pragma unroll
        for (i32 k = 0; k < SEVERAL_TILES; k++)
#pragma unroll
          for (i32 i = 0; i < 4; i++) y[k][i] = k == t ? sums[i] : y[k][i];
      }
    }
    add_records<Kda, !HIGH_, 2>(s, job, 0, first, end, from, of, lane, y);
    Base::put_sums(params, sums_at(s) + c * s.sums, first, end, lane, y);
    Base::substitute(params, job, first, end);
  }

  // What record i brings to a column.
  static DEVICE float brings(const Pipeline &s, const Job &job, i32 column, i32 i) { return weights_at(s, job)[i * MAX_COLUMNS + column]; }

  static DEVICE void record_rest(const Params &params, const Job &job, bool high) {
    if (job.head->part != 0) return;
#pragma unroll 1
    for (i32 t = 0; t < job.item->len; t++) {
      i32 at = job.item->at + t;
      if (at >= params.family.ring_rows) at -= params.family.ring_rows;
      float g[OF_LANE];
      load_four(token_logs_at(params.pipeline, job.keys, t), F32, g);
      ((float4 *)(job.head->gate_ring + at * LOG_BYTES))[lane_index()] =
          make_float4(canonical(g[0]), canonical(g[1]), canonical(g[2]), canonical(g[3]));
    }
    Base::record_rest(params, job, high);
  }

  // ---- Folders ----

  // Log decays are in the factors.
  static DEVICE float2 gate_of_record(const Head &head, i32 row) { return make_float2(((const float *)head.beta_ring)[row], 0.0f); }

  // Factors of the decays of a head's records, by all folders together: a block of columns a warp.
  static DEVICE void widen_more(const Params &p, const Item &item, const Head &head, i32 me) {
    const Pipeline &s = p.pipeline;
#pragma unroll 2
    for (i32 i = me; i < item.records * BLOCKS; i += s.folders) {
      i32 record = i / BLOCKS, j = i % BLOCKS, row = item.first + record;
      if (row >= p.family.ring_rows) row -= p.family.ring_rows;
      Decay d = decay_of(((const float *)head.gate_ring)[row * COLUMNS + j * BLOCK + lane_index()]);
      float *factors = wide_at(s) + record * WIDE + COLUMNS;
      factors[j * BLOCK + lane_index()] = d.factor;
      u32 slow = __ballot_sync(0xFFFFFFFFu, d.slow);
      if (lane_index() == 0) ((u32 *)(factors + COLUMNS))[j] = slow;
    }
  }

  // Takes a record into a part of a tile. fma(S, f, S) where the decay is slow; where it is fast fma(S, f, -0), which is S f to the last bit
  // and sign.
  static DEVICE void take_in(Tile<BLOCKS, FOLD_HALVES> &t, const float *record, float beta, const float (&v)[FOLD_HALVES], Lane lane) {
    const float *factors = record + COLUMNS;
    uint4 four = *(const uint4 *)(factors + COLUMNS);
    u32 slow[BLOCKS] = {four.x, four.y, four.z, four.w};
    if ((four.x & four.y & four.z & four.w) == ~0u) {
#pragma unroll
      for (i32 j = 0; j < BLOCKS; j++) {
        float f[8];
        shared8(factors, j, lane, f);
#pragma unroll
        for (i32 h = 0; h < FOLD_HALVES; h++)
#pragma unroll
          for (i32 e = 0; e < 8; e++) t.v[h][j][e] = fma(t.v[h][j][e], f[e], t.v[h][j][e]);
      }
    } else {
#pragma unroll
      for (i32 j = 0; j < BLOCKS; j++) {
        float f[8];
        shared8(factors, j, lane, f);
        u32 bits = slow[j] >> 8 * lane.quad;
#pragma unroll
        for (i32 e = 0; e < 8; e++)
#pragma unroll
          for (i32 h = 0; h < FOLD_HALVES; h++) t.v[h][j][e] = fma(t.v[h][j][e], f[e], bits >> e & 1 ? t.v[h][j][e] : -0.0f);
      }
    }
    Base::take_in(t, record, beta, v, lane);
  }
};

}  // namespace decode
