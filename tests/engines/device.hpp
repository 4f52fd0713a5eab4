// The backend that a program runs on, and memory that both it and the program see: with REPLAYSSM_TEST_BACKEND=cuda the library gets
// addresses of managed memory on device 0, and every call is waited for; without it, the host's.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <string>
#include <vector>

#include "engine.hpp"

namespace engine {

class device {
 public:
  static device &get() {
    static device &one = *new device;  // never destroyed: memory may be freed until the process ends
    return one;
  }

  replayssm_context *create_context() const {
    auto desc = REPLAYSSM_INIT(replayssm_context_desc);
    desc.backend = on_cuda_ ? REPLAYSSM_BACKEND_CUDA : REPLAYSSM_BACKEND_CPU;
    replayssm_context *context = nullptr;
    must(replayssm_context_create(&desc, &context));
    return context;
  }

  void wait() const {
    if (on_cuda_) check(synchronize_(), "cuCtxSynchronize");
  }

  // nullptr: out of memory.
  void *allocate(size_t bytes) const {
    if (!on_cuda_) return std::malloc(bytes);
    uintptr_t at = 0;
    constexpr unsigned global = 1;  // CU_MEM_ATTACH_GLOBAL
    return allocate_(&at, bytes, global) == 0 ? reinterpret_cast<void *>(at) : nullptr;
  }
  void free(void *at) const {
    if (on_cuda_) {
      check(free_(reinterpret_cast<uintptr_t>(at)), "cuMemFree");
    } else {
      std::free(at);
    }
  }
  bool on_cuda() const { return on_cuda_; }

 private:
  device() {
    const char *backend = std::getenv("REPLAYSSM_TEST_BACKEND");
    on_cuda_ = backend != nullptr && std::strcmp(backend, "cuda") == 0;
    if (!on_cuda_) return;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    require(driver != nullptr, "REPLAYSSM_TEST_BACKEND is cuda, and there is no libcuda.so.1");
    int (*init)(unsigned), (*retain)(void **, int), (*set_current)(void *);
    find(driver, "cuInit", init);
    find(driver, "cuDevicePrimaryCtxRetain", retain);
    find(driver, "cuCtxSetCurrent", set_current);
    find(driver, "cuCtxSynchronize", synchronize_);
    find(driver, "cuMemAllocManaged", allocate_);
    find(driver, "cuMemFree_v2", free_);
    check(init(0), "cuInit");
    void *context = nullptr;
    check(retain(&context, 0), "cuDevicePrimaryCtxRetain");
    check(set_current(context), "cuCtxSetCurrent");
  }

  template <class F>
  static void find(void *driver, const char *name, F *&function) {
    function = reinterpret_cast<F *>(dlsym(driver, name));
    require(function != nullptr, name);
  }
  static void check(int code, const char *call) {
    if (code != 0) require(false, (std::string(call) + " gives " + std::to_string(code)).c_str());
  }

  bool on_cuda_ = false;
  int (*synchronize_)() = nullptr;
  int (*allocate_)(uintptr_t *, size_t, unsigned) = nullptr;
  int (*free_)(uintptr_t) = nullptr;
};

template <class T>
struct shared_memory {
  using value_type = T;
  shared_memory() = default;
  template <class U>
  shared_memory(const shared_memory<U> &) {}
  T *allocate(size_t n) {
    void *at = device::get().allocate(n * sizeof(T));
    require(at != nullptr, "out of memory");
    return static_cast<T *>(at);
  }
  void deallocate(T *at, size_t) { device::get().free(at); }
  friend bool operator==(const shared_memory &, const shared_memory &) { return true; }
  friend bool operator!=(const shared_memory &, const shared_memory &) { return false; }
};

// What the library gets the address of.
template <class T>
using shared = std::vector<T, shared_memory<T>>;

}  // namespace engine
