// Elements of tensors and checkpoints. A dtype that is not known when the kernel is compiled is ANY, and looked up at run time.
#pragma once
#include "numerics.cuh"

enum : i32 { ANY = 0 };

DEVICE i64 size_of(i32 dtype) { return dtype == F32 || dtype == I32 ? 4 : dtype == I64 ? 8 : 2; }

// One element as fp32.
DEVICE float load_one(const char *at, i32 dtype) {
  if (dtype == F32) return *(const float *)at;
  u16 x = *(const u16 *)at;
  return dtype == BF16 ? from_bf16(x) : from_f16(x);
}

// Rounds to nearest even; NaNs become canonical.
DEVICE void store_one(char *at, i32 dtype, float x) {
  if (dtype == F32) {
    *(float *)at = canonical(x);
  } else {
    *(u16 *)at = dtype == BF16 ? to_bf16(x) : to_f16(x);
  }
}

// Element i of an index array.
DEVICE i64 id_at(const Ids &ids, i64 i) {
  if (ids.index == I32) return *(const i32 *)(ids.data + i * ids.stride * 4);
  return *(const i64 *)(ids.data + i * ids.stride * 8);
}

// Address of a head's vector.
DEVICE char *tensor_at(const Tensor &t, i64 row, i64 token, i64 head) {
  return t.data + (row * t.row + token * t.token + head * t.head) * size_of(t.dtype);
}

// Eight neighbouring elements as fp32, 16-byte aligned.
DEVICE void load8_16(const char *at, bool is_bf16, float (&v)[8]) {
  uint4 w = *(const uint4 *)at;
  u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (i32 i = 0; i < 4; i++) {
    if (is_bf16) {
      v[2 * i] = from_bits(words[i] << 16);
      v[2 * i + 1] = from_bits(words[i] & 0xFFFF0000u);
    } else {
      v[2 * i] = from_f16((u16)words[i]);
      v[2 * i + 1] = from_f16((u16)(words[i] >> 16));
    }
  }
}

DEVICE void load8_32(const char *at, float (&v)[8]) {
  float4 a = ((const float4 *)at)[0], b = ((const float4 *)at)[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// Copies elements bit by bit. All of a block's threads take part.
DEVICE void copy_elements(char *to, const char *from, i32 size, i32 n, i32 thread, i32 threads) {
  if (size == 4) {
    for (i32 i = thread; i < n; i += threads) ((u32 *)to)[i] = ((const u32 *)from)[i];
  } else {
    for (i32 i = thread; i < n; i += threads) ((u16 *)to)[i] = ((const u16 *)from)[i];
  }
}
