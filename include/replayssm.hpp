// C++17 over replayssm.h: handles that destroy themselves, failures as exceptions, nothing else.
// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Every member is one call of the C interface, whose header says what it does; descriptors are the C structs. A handle is moved,
// not copied. Destroy order does not matter: the library keeps parents alive as long as their children.

#ifndef REPLAYSSM_HPP
#define REPLAYSSM_HPP

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "replayssm.h"

namespace replayssm {

// A call failed: its status and the library's sentence, which names field, value and expectation.
class Error : public std::runtime_error {
 public:
  Error(replayssm_status status, const std::string& message)
      : std::runtime_error(std::string(replayssm_status_string(status)) + ": " + message), status_(status) {}
  replayssm_status status() const noexcept { return status_; }

 private:
  replayssm_status status_;
};

inline void check(replayssm_status status) {
  if (status != REPLAYSSM_OK) throw Error(status, replayssm_last_error_message());
}

// A descriptor with every default, of any type: auto batch = replayssm::init<replayssm_batch>();
template <class T>
T init() {
  return replayssm_init<T>();
}

// The dtype of an element type. bfloat16 and binary16 have no C++17 type: name theirs in `view`.
template <class T>
struct DtypeOf;
template <>
struct DtypeOf<float> {
  static constexpr replayssm_dtype value = REPLAYSSM_DTYPE_F32;
};
template <>
struct DtypeOf<std::int32_t> {
  static constexpr replayssm_dtype value = REPLAYSSM_DTYPE_I32;
};
template <>
struct DtypeOf<std::int64_t> {
  static constexpr replayssm_dtype value = REPLAYSSM_DTYPE_I64;
};

// Strides of a tensor, in elements.
struct Strides {
  std::int64_t row = 0, token = 0, head = 0;
};

inline replayssm_tensor view(void* data, replayssm_dtype dtype, Strides strides) {
  replayssm_tensor tensor{};
  tensor.data = data;
  tensor.stride_row = strides.row;
  tensor.stride_token = strides.token;
  tensor.stride_head = strides.head;
  tensor.dtype = dtype;
  return tensor;
}

// An input: the library reads it only, although the C struct, which serves outputs too, has no const.
inline replayssm_tensor view(const void* data, replayssm_dtype dtype, Strides strides) {
  return view(const_cast<void*>(data), dtype, strides);
}

template <class T>
replayssm_tensor view(T* data, Strides strides) {
  return view(data, DtypeOf<std::remove_const_t<T>>::value, strides);
}

// A dense state to import from or export to: of one layer, or of all of them (-1).
inline replayssm_state dense_state(void* data, replayssm_dtype dtype, std::int32_t layer = -1) {
  auto state = init<replayssm_state>();
  state.dtype = dtype;
  state.layer = layer;
  state.data = data;
  return state;
}

// To import from; as with `view`, the C struct has no const.
inline replayssm_state dense_state(const void* data, replayssm_dtype dtype, std::int32_t layer = -1) {
  return dense_state(const_cast<void*>(data), dtype, layer);
}

// An index array, int32 or int64.
template <class T>
replayssm_ids ids(const T* data, std::int64_t stride = 0) {
  static_assert(DtypeOf<T>::value == REPLAYSSM_DTYPE_I32 || DtypeOf<T>::value == REPLAYSSM_DTYPE_I64, "int32 or int64");
  replayssm_ids out{};
  out.data = data;
  out.stride = stride;
  out.dtype = DtypeOf<T>::value;
  return out;
}

// Slots (and rings of the same numbers) in host memory, read before a call returns.
template <class T>
replayssm_list host_list(const T* slots, std::int32_t n) {
  auto list = init<replayssm_list>();
  list.n = n;
  list.place = REPLAYSSM_WHERE_HOST;
  list.slots = ids(slots);
  return list;
}

// The one owner of a C handle.
template <class T, void (*destroy)(T*)>
class Handle {
 public:
  Handle() = default;
  Handle(Handle&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    Handle old(std::move(*this));
    handle_ = std::exchange(other.handle_, nullptr);
    return *this;
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() {
    if (handle_ != nullptr) destroy(handle_);
  }

  T* get() const noexcept { return handle_; }
  explicit operator bool() const noexcept { return handle_ != nullptr; }

 protected:
  T* handle_ = nullptr;
};

class Context : public Handle<replayssm_context, replayssm_context_destroy> {
 public:
  explicit Context(const replayssm_context_desc& desc = init<replayssm_context_desc>()) {
    check(replayssm_context_create(&desc, &handle_));
  }

  replayssm_context_info info() const {
    auto out = init<replayssm_context_info>();
    check(replayssm_context_query(handle_, &out));
    return out;
  }
  // Throws what creating such a pool, or slots for steps of so many tokens, would throw.
  void supports(const replayssm_pool_desc& desc, std::int32_t max_tokens = 1) const {
    check(replayssm_supports(handle_, &desc, max_tokens));
  }
};

class Slots : public Handle<replayssm_slots, replayssm_slots_destroy> {
 public:
  Slots(const Context& context, const replayssm_slots_desc& desc) {
    check(replayssm_slots_create(context.get(), &desc, &handle_));
  }

  void commit(const replayssm_batch& batch, const replayssm_commit_args* args = nullptr,
              const replayssm_exec* exec = nullptr) const {
    check(replayssm_commit(handle_, &batch, args, exec));
  }
  void reset(const replayssm_list& list, const replayssm_reset_args* args = nullptr,
             const replayssm_exec* exec = nullptr) const {
    check(replayssm_reset(handle_, &list, args, exec));
  }
  void flush(const replayssm_list& list, const replayssm_flush_args* args = nullptr,
             const replayssm_exec* exec = nullptr) const {
    check(replayssm_flush(handle_, &list, args, exec));
  }
  void snapshot(const replayssm_batch& batch, const replayssm_snapshot_args& args,
                const replayssm_exec* exec = nullptr) const {
    check(replayssm_snapshot(handle_, &batch, &args, exec));
  }
  void copy(const replayssm_list& src, const replayssm_list& dst, const replayssm_copy_args* args = nullptr,
            const replayssm_exec* exec = nullptr) const {
    check(replayssm_copy(handle_, &src, &dst, args, exec));
  }
  void rewind(const replayssm_list& list, const std::int32_t* n, std::int32_t* done = nullptr,
              const replayssm_exec* exec = nullptr) const {
    check(replayssm_rewind(handle_, &list, n, done, exec));
  }
  void read_cursors(const replayssm_list& list, replayssm_cursor* dst, const replayssm_exec* exec = nullptr) const {
    check(replayssm_read_cursors(handle_, &list, dst, exec));
  }
  // The size of every blob of a kind, a blob of a slot and ring, and the way back.
  std::size_t save_bytes(replayssm_save_kind kind) const {
    std::uint64_t bytes = 0;
    check(replayssm_save_bytes(handle_, kind, &bytes));
    return static_cast<std::size_t>(bytes);
  }
  void save(const replayssm_list& list, replayssm_save_kind kind, void* blob, std::size_t capacity,
            const replayssm_exec* exec = nullptr) const {
    check(replayssm_save(handle_, &list, kind, blob, capacity, exec));
  }
  void restore(const replayssm_list& list, const void* blob, std::size_t bytes,
               const replayssm_restore_args* args = nullptr, const replayssm_exec* exec = nullptr) const {
    check(replayssm_restore(handle_, &list, blob, bytes, args, exec));
  }
  void acquire(std::int32_t n, std::int32_t* ids, std::uint32_t* generations = nullptr) {
    check(replayssm_acquire(handle_, n, ids, generations));
  }
  void release(std::int32_t n, const std::int32_t* ids) { check(replayssm_release(handle_, n, ids)); }

  replayssm_report report(bool clear = false) const {
    auto out = init<replayssm_report>();
    check(replayssm_check(handle_, clear ? 1 : 0, &out));
    return out;
  }
  replayssm_stats stats() const {
    auto out = init<replayssm_stats>();
    check(replayssm_stats_read(handle_, &out));
    return out;
  }
};

class Layers : public Handle<replayssm_layers, replayssm_layers_destroy> {
 public:
  Layers(Slots& slots, const replayssm_pool_desc& desc, const replayssm_lent* lent = nullptr, std::int32_t n_lent = 0) {
    check(replayssm_layers_create(slots.get(), &desc, lent, n_lent, &handle_));
  }

  void rebind(const replayssm_lent* lent, std::int32_t n_lent) { check(replayssm_layers_rebind(handle_, lent, n_lent)); }

  void step(std::int32_t layer, const replayssm_batch& batch, const replayssm_mamba2_args& args,
            const replayssm_exec* exec = nullptr) const {
    check(replayssm_mamba2_step(handle_, layer, &batch, &args, exec));
  }
  void extend(std::int32_t layer, const replayssm_batch& batch, const replayssm_mamba2_args& args,
              const replayssm_exec* exec = nullptr) const {
    check(replayssm_mamba2_extend(handle_, layer, &batch, &args, exec));
  }
  void step(std::int32_t layer, const replayssm_batch& batch, const replayssm_delta_args& args,
            const replayssm_exec* exec = nullptr) const {
    check(replayssm_delta_step(handle_, layer, &batch, &args, exec));
  }
  void extend(std::int32_t layer, const replayssm_batch& batch, const replayssm_delta_args& args,
              const replayssm_exec* exec = nullptr) const {
    check(replayssm_delta_extend(handle_, layer, &batch, &args, exec));
  }
  void step(std::int32_t layer, const replayssm_batch& batch, const replayssm_conv1d_args& args,
            const replayssm_exec* exec = nullptr) const {
    check(replayssm_conv1d_step(handle_, layer, &batch, &args, exec));
  }
  void extend(std::int32_t layer, const replayssm_batch& batch, const replayssm_conv1d_args& args,
              const replayssm_exec* exec = nullptr) const {
    check(replayssm_conv1d_extend(handle_, layer, &batch, &args, exec));
  }
  // replayssm_import and replayssm_export: both plain names are keywords of some C++.
  void import_state(const replayssm_list& list, const std::int64_t* position, const replayssm_state& src,
                    const replayssm_exec* exec = nullptr) const {
    check(replayssm_import(handle_, &list, position, &src, exec));
  }
  void export_state(const replayssm_list& list, const std::int64_t* at, const replayssm_state& dst,
                    const replayssm_exec* exec = nullptr) const {
    check(replayssm_export(handle_, &list, at, &dst, exec));
  }

  std::vector<replayssm_component> components() const {
    std::int32_t n = 0;
    const replayssm_status sized = replayssm_layers_components(handle_, nullptr, 0, &n);
    if (sized != REPLAYSSM_ERROR_BUFFER_TOO_SMALL) check(sized);
    std::vector<replayssm_component> out(static_cast<std::size_t>(n), init<replayssm_component>());
    if (n > 0) check(replayssm_layers_components(handle_, out.data(), n, &n));
    return out;
  }

  // What a step of so many rows and tokens does, in sentences.
  std::string explain(std::int32_t batch, std::int32_t tokens = 1) const {
    std::string text(4096, '\0'); /* enough for every text, says the header */
    check(replayssm_explain(handle_, batch, tokens, text.data(), text.size()));
    text.resize(text.find('\0'));
    return text;
  }
};

// What pools on one slots handle would take, before any of it exists.
inline replayssm_plan_info plan(const replayssm_slots_desc& slots, const replayssm_pool_desc* pools, std::int32_t n_pools,
                                const replayssm_plan_args* args = nullptr) {
  auto out = init<replayssm_plan_info>();
  check(replayssm_plan(&slots, pools, n_pools, args, &out));
  return out;
}

// The components that a pool would have.
inline std::vector<replayssm_component> plan_components(const replayssm_slots_desc& slots, const replayssm_pool_desc& pool) {
  std::int32_t n = 0;
  const replayssm_status sized = replayssm_plan_components(&slots, &pool, nullptr, 0, &n);
  if (sized != REPLAYSSM_ERROR_BUFFER_TOO_SMALL) check(sized);
  std::vector<replayssm_component> out(static_cast<std::size_t>(n), init<replayssm_component>());
  if (n > 0) check(replayssm_plan_components(&slots, &pool, out.data(), n, &n));
  return out;
}

}  // namespace replayssm

#endif
