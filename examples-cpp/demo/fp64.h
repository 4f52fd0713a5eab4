// The state updates in fp64, token by token, straight from train/README.md: what the library's states are measured against.
// Inputs are those of the library's calls; the convolutions' outputs and the gate z are bf16.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <cstdint>

#include "weights.h"

namespace demo {

// One token through all heads: xbc [conv_channels], dt [nheads] raw, z [d_inner]; S [nheads, headdim, dstate]; out
// [d_inner], gated.
void mamba2_fp64(const Config& config, const MambaWeights& weights, const std::uint16_t* xbc, const float* dt,
                 const std::uint16_t* z, double* S, float* out);

// One token through all heads: qkv [channels], b [HV] and a raw; S [HV, V, K]; out [HV, V]. a has an element per head (GDN)
// or, with `per_channel`, per head and column (KDA).
void delta_fp64(const DeltaDims& dims, bool per_channel, double l2norm_eps, const DeltaWeights& weights,
                const std::uint16_t* qkv, const float* b, const float* a, double* S, float* out);

}  // namespace demo
