// A GPU through the CUDA driver, and the demo's kernels on it. libcuda and NVRTC are looked for when the program runs: building it
// takes no CUDA header and no toolkit, and where one of them is missing, it says which.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <replayssm.hpp>

namespace demo {
namespace cuda {

// There is no GPU to use: no driver, no device, no compiler for its kernels. The message says what is missing.
class Unavailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Driver;  // device.cpp

// Device 0 with its primary context, made current on this thread, and one stream.
class Device {
 public:
  // `nvrtc`: the compiler's file; empty: it is looked for.
  explicit Device(const std::string& nvrtc);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const std::string& name() const { return name_; }
  // "sm_90, NVRTC 12.9"
  const std::string& built() const { return built_; }
  replayssm_stream stream() const { return stream_; }
  void wait() const;

  // Enqueues a kernel of kernels.cu. Args is the struct of params.h that it takes.
  template <class Args>
  void launch(const char* kernel, std::pair<unsigned, unsigned> grid, unsigned threads, std::size_t shared_bytes,
              Args args) const {
    launch(kernel, grid, threads, shared_bytes, static_cast<void*>(&args));
  }

  void* allocate(std::size_t bytes) const;  // zeroed
  void free(void* memory) const noexcept;
  // In stream order; a read has ended when it returns.
  void write(void* to, const void* from, std::size_t bytes) const;
  void read(void* to, const void* from, std::size_t bytes) const;
  void fill16(void* to, std::uint16_t value, std::size_t n) const;

 private:
  friend class Graph;
  friend class Stopwatch;
  void launch(const char* kernel, std::pair<unsigned, unsigned> grid, unsigned threads, std::size_t shared_bytes,
              void* args) const;
  void close() noexcept;

  const Driver& driver_;
  int device_ = 0;
  std::string name_, built_;
  replayssm_stream stream_ = nullptr;
  void* module_ = nullptr;
  std::vector<std::pair<std::string, void*>> kernels_;
};

// Device memory of n elements.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Device& device, std::size_t n)
      : device_(&device), n_(n), data_(static_cast<T*>(device.allocate((n > 0 ? n : 1) * sizeof(T)))) {}
  Buffer(const Device& device, const std::vector<T>& values) : Buffer(device, values.size()) { write(values); }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer old(std::move(other));
    swap(old);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (data_ != nullptr) device_->free(data_);
  }

  T* get() const { return data_; }  // an address on the device
  std::size_t size() const { return n_; }
  void write(const std::vector<T>& values) const {
    if (values.size() > n_) throw std::runtime_error("a buffer on the device is too small");
    if (!values.empty()) device_->write(data_, values.data(), values.size() * sizeof(T));
  }
  std::vector<T> read() const {
    std::vector<T> out(n_);
    if (n_ > 0) device_->read(out.data(), data_, n_ * sizeof(T));
    return out;
  }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(n_, other.n_);
    std::swap(data_, other.data_);
  }

  const Device* device_ = nullptr;
  std::size_t n_ = 0;
  T* data_ = nullptr;
};

// Work captured once, to be enqueued again and again.
class Graph {
 public:
  // Captures what `work` puts on the device's stream.
  Graph(const Device& device, const std::function<void()>& work);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch() const;
  std::size_t nodes() const { return nodes_; }

 private:
  const Device& device_;
  void* executable_ = nullptr;
  std::size_t nodes_ = 0;
};

// Time on the device's stream, by events.
class Stopwatch {
 public:
  explicit Stopwatch(const Device& device);
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  void start() const;
  double stop() const;  // seconds since start; waits for the stream

 private:
  const Device& device_;
  void* events_[2] = {nullptr, nullptr};
};

}  // namespace cuda
}  // namespace demo
