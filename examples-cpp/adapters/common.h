// What the adapters share: a tensor as engines describe one, a status with its sentence, and the views that both make.
// Take this file along with an adapter. SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <replayssm.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

namespace adapters {

// The library's status and sentence, or an adapter's own for input that the library does not see, such as shapes.
struct [[nodiscard]] Status {
  replayssm_status code = REPLAYSSM_OK;
  std::string sentence;
  bool ok() const { return code == REPLAYSSM_OK; }
};

inline Status check(replayssm_status code) {
  return {code, code == REPLAYSSM_OK ? std::string() : std::string(replayssm_last_error_message())};
}

inline Status refuse(replayssm_status code, std::string sentence) { return {code, std::move(sentence)}; }

// Up to five axes; sizes and strides in elements, a stride of 0 broadcasts. data null: absent. Memory is the engine's, and lies
// where the context's does. Inputs are only read.
struct Tensor {
  void* data = nullptr;
  replayssm_dtype dtype = REPLAYSSM_DTYPE_NONE;
  int axes = 0;
  std::int64_t size[5] = {};
  std::int64_t stride[5] = {};

  Tensor() = default;
  Tensor(const void* data_, replayssm_dtype dtype_, std::initializer_list<std::int64_t> sizes,
         std::initializer_list<std::int64_t> strides)
      : data(const_cast<void*>(data_)), dtype(dtype_) {
    for (const std::int64_t n : sizes) {
      if (axes < 5) size[axes++] = n;
    }
    int axis = 0;
    for (const std::int64_t n : strides) {
      if (axis < 5) stride[axis++] = n;
    }
  }
  explicit operator bool() const { return data != nullptr; }
};

inline std::string shape_of(const std::int64_t* size, int axes) {
  std::string text = "[";
  for (int i = 0; i < axes; ++i) text += (i ? ", " : "") + std::to_string(size[i]);
  return text + "]";
}

// That a tensor is there and has this shape.
inline Status expect(const char* name, const Tensor& tensor, std::initializer_list<std::int64_t> size) {
  if (!tensor) return refuse(REPLAYSSM_ERROR_INVALID_ARGUMENT, std::string(name) + " is absent");
  bool same = tensor.axes == static_cast<int>(size.size());
  for (int i = 0; same && i < tensor.axes; ++i) same = tensor.size[i] == size.begin()[i];
  if (same) return {};
  return refuse(REPLAYSSM_ERROR_INVALID_ARGUMENT, std::string(name) + " is " + shape_of(tensor.size, tensor.axes) + "; expected " +
                                                shape_of(size.begin(), static_cast<int>(size.size())));
}

// That an axis is contiguous, as the library reads the last one.
inline Status contiguous(const char* name, const Tensor& tensor, int axis) {
  if (tensor.stride[axis] == 1 || tensor.size[axis] == 1) return {};
  return refuse(REPLAYSSM_ERROR_UNSUPPORTED, std::string(name) + " has stride " + std::to_string(tensor.stride[axis]) +
                                           " in its last axis; expected 1");
}

// That an array of ids or counts does not broadcast: to the library a stride of 0 is 1.
inline Status listed(const char* name, const Tensor& tensor) {
  if (tensor.stride[0] > 0 || tensor.size[0] < 2) return {};
  return refuse(REPLAYSSM_ERROR_UNSUPPORTED, std::string(name) + " has stride " + std::to_string(tensor.stride[0]) + "; expected 1 or more");
}

// That axes from one on are broadcast: one value per head, as Mamba-2 has it and Mamba-1 has not.
inline Status tied(const char* name, const Tensor& tensor, int first) {
  for (int axis = first; axis < tensor.axes; ++axis) {
    if (tensor.stride[axis] != 0 && tensor.size[axis] != 1) {
      return refuse(REPLAYSSM_ERROR_UNSUPPORTED, std::string(name) + " has stride " + std::to_string(tensor.stride[axis]) + " in axis " +
                                               std::to_string(axis) + "; expected 0, one value per head");
    }
  }
  return {};
}

inline replayssm_tensor view(const Tensor& tensor, std::int64_t row, std::int64_t token, std::int64_t head) {
  replayssm_tensor out{};
  out.data = tensor.data;
  out.stride_row = row;
  out.stride_token = token;
  out.stride_head = head;
  out.dtype = tensor.dtype;
  return out;
}

inline replayssm_tensor view(const void* data, replayssm_dtype dtype, std::int64_t row, std::int64_t token, std::int64_t head) {
  replayssm_tensor out{};
  out.data = const_cast<void*>(data);
  out.stride_row = row;
  out.stride_token = token;
  out.stride_head = head;
  out.dtype = dtype;
  return out;
}

inline replayssm_ids ids(const void* data, replayssm_dtype dtype, std::int64_t stride) {
  replayssm_ids out{};
  out.data = data;
  out.stride = stride;
  out.dtype = dtype;
  return out;
}

// Slots in host memory, and rings of the same numbers (or their own).
inline replayssm_list host_list(const std::int32_t* slots, std::int32_t n, const std::int32_t* rings = nullptr) {
  auto list = replayssm_init<replayssm_list>();
  list.n = n;
  list.place = REPLAYSSM_WHERE_HOST;
  list.slots = ids(slots, REPLAYSSM_DTYPE_I32, 1);
  if (rings != nullptr) list.rings = ids(rings, REPLAYSSM_DTYPE_I32, 1);
  return list;
}

// What stands where an engine has a layer's state tensor: the pool of all such layers, and which one.
struct Layer {
  const replayssm_layers* pool = nullptr;
  std::int32_t index = 0;
};

// Sizes of a Mamba-2 layer, with which tensors are compared: those that the pool was made with, which nothing here can look up.
struct Mamba2Shape {
  std::int32_t nheads = 0, dim = 0, dstate = 0, ngroups = 0;
};

// A pool of n_layers such layers. state: what the engine keeps its states in: F32 becomes SPLIT32, lossless at the same bytes; BF16 and
// F16 are taken as they are.
inline replayssm_pool_desc mamba2_pool(const Mamba2Shape& shape, std::int32_t n_layers, replayssm_dtype io, replayssm_dtype out,
                                       replayssm_dtype state) {
  auto desc = replayssm_init<replayssm_pool_desc>();
  desc.family = REPLAYSSM_FAMILY_MAMBA2;
  desc.n_layers = n_layers;
  desc.io = io;
  desc.out = out;
  desc.format = state == REPLAYSSM_DTYPE_BF16  ? REPLAYSSM_FORMAT_BF16
                : state == REPLAYSSM_DTYPE_F16 ? REPLAYSSM_FORMAT_F16
                                         : REPLAYSSM_FORMAT_DEFAULT;
  desc.nheads = shape.nheads;
  desc.headdim = shape.dim;
  desc.dstate = shape.dstate;
  desc.ngroups = shape.ngroups;
  return desc;
}

// The parameters as `selective_state_update` and its relatives take them: A [nheads, dim, dstate], dt_bias [nheads, dim], both broadcast
// from [nheads]; D [nheads, dim], broadcast or not. dt_bias and D may be absent.
inline Status mamba2_parameters(const Mamba2Shape& s, const Tensor& A, const Tensor& D, const Tensor& dt_bias, bool dt_softplus,
                                replayssm_mamba2_args* args) {
  if (auto status = expect("A", A, {s.nheads, s.dim, s.dstate}); !status.ok()) return status;
  if (auto status = tied("A", A, 1); !status.ok()) return status;
  args->A = view(A, 0, 0, A.stride[0]);
  if (D) {
    if (auto status = expect("D", D, {s.nheads, s.dim}); !status.ok()) return status;
    args->D_per_element = D.stride[1] != 0 && s.dim > 1 ? 1 : 0;
    if (args->D_per_element != 0) {
      if (auto status = contiguous("D", D, 1); !status.ok()) return status;
    }
    args->D = view(D, 0, 0, D.stride[0]);
  }
  if (dt_bias) {
    if (auto status = expect("dt_bias", dt_bias, {s.nheads, s.dim}); !status.ok()) return status;
    if (auto status = tied("dt_bias", dt_bias, 1); !status.ok()) return status;
    args->dt_bias = view(dt_bias, 0, 0, dt_bias.stride[0]);
  }
  args->no_softplus = dt_softplus ? 0 : 1;
  return {};
}

}  // namespace adapters
