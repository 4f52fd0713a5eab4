// States of Mamba-2 at held positions. Instances as in serial.cu, with INSTANCE_BLOCKS 1: a block alone keeps enough bytes in flight, and two of
// them would spill on sm_100 and sm_120. Of the arrays in shared memory it uses AT_B, AT_X and AT_GATES.
#include "../common/export.cuh"
#include "mamba2.cuh"

struct Mamba2Family {
  typedef Mamba2Params Params;

  static DEVICE void stage(const Params &p, i32 n) {
    mamba2::stage_rows(p, {mamba2::AT_B, mamba2::AT_X, mamba2::AT_GATES, true}, 0, n, 0, 0);
  }

  template <i32 NC, i32 H>
  static DEVICE void take_in(Tile<NC, H> &t, const Params &p, i32 i, i32 half) {
    mamba2::take_in(t, p, i, half);
  }

  static DEVICE void choose_layer(Params &to, const Params &p, i64 layer) {
    choose_states(to.state, p.state, layer);
    to.ring_x = layer_of(p.ring_x, layer);
    to.ring_b = layer_of(p.ring_b, layer);
    to.ring_dt = layer_of(p.ring_dt, layer);
  }

  static DEVICE u64 record_bytes(const Params &p) {
    const State &s = p.state;
    return (u64)s.heads * (s.rows * size_of(p.io) + 8) + (u64)(s.heads / p.heads_per_group) * s.columns * size_of(p.io);
  }
};

extern "C" __global__ void __launch_bounds__(256, INSTANCE_BLOCKS) replayssm_kernel(const __grid_constant__ Mamba2ExportParams p) {
  fold_states<Mamba2Family, INSTANCE_FORMAT, INSTANCE_COLUMNS / BLOCK, INSTANCE_HALVES>(p);
}
