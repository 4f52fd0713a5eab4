// States of a delta rule at held positions. Instances as in serial.cu; of the arrays in shared memory it uses AT_K, AT_V, AT_GATES and,
// for KDA, AT_DECAYS and AT_SLOW.
#include "../common/export.cuh"
#include "delta.cuh"

struct DeltaFamily {
  typedef DeltaParams Params;

  // Records are staged from work().base on, which the caller has moved.
  static DEVICE void stage(const Params &p, i32 n) { delta::stage_rows<delta::RECORDS, INSTANCE_KDA, INSTANCE_COLUMNS / BLOCK>(p, n); }

  template <i32 NC, i32 H>
  static DEVICE void take_in(Tile<NC, H> &t, const Params &p, i32 i, i32 half) {
    delta::take_in<INSTANCE_KDA>(t, p, i, half);
  }

  static DEVICE void choose_layer(Params &to, const Params &p, i64 layer) {
    choose_states(to.state, p.state, layer);
    to.ring_k = layer_of(p.ring_k, layer);
    to.ring_norm = layer_of(p.ring_norm, layer);
    to.ring_v = layer_of(p.ring_v, layer);
    to.ring_g = layer_of(p.ring_g, layer);
    to.ring_beta = layer_of(p.ring_beta, layer);
  }

  static DEVICE u64 record_bytes(const Params &p) {
    const State &s = p.state;
    u64 keys = (u64)p.qk_heads * (s.columns * size_of(p.io) + 4);
    return keys + (u64)s.heads * (s.rows * size_of(p.io) + 4 + 4 * (INSTANCE_KDA ? s.columns : 1));
  }
};

extern "C" __global__ void __launch_bounds__(256, INSTANCE_BLOCKS) replayssm_kernel(const __grid_constant__ DeltaExportParams p) {
  fold_states<DeltaFamily, INSTANCE_FORMAT, INSTANCE_COLUMNS / BLOCK, INSTANCE_HALVES>(p);
}
