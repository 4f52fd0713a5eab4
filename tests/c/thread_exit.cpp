// Calls that fail while a thread is being torn down, after the library's own thread-locals are gone: a status, no abort. And a
// context reads no environment variable: getenv is this program's.
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>

#include "replayssm.h"

static std::atomic<int> failed{0};
static std::atomic<int> reads{0};
static std::atomic<bool> watching{false};

// glibc's own reads come before main or go around this symbol; what the library and its dependencies read comes here.
extern "C" char *getenv(const char *name) noexcept {
  if (watching) {
    std::fprintf(stderr, "getenv(%s)\n", name);
    reads++;
  }
  return nullptr;
}

struct AtExit {
  ~AtExit() {
    replayssm_context *context = nullptr;
    if (replayssm_context_create(nullptr, nullptr) == REPLAYSSM_ERROR_INVALID_ARGUMENT) failed++;
    replayssm_context_desc desc = replayssm_init<replayssm_context_desc>();
    desc.backend = 99;
    if (replayssm_context_create(&desc, &context) == REPLAYSSM_ERROR_UNSUPPORTED && context == nullptr) failed++;
    if (replayssm_last_error_message() != nullptr) failed++;
  }
};

int main() {
  std::thread([] {
    static thread_local AtExit first;  // destroyed last: the library's thread-locals come after it
    (void)&first;
    replayssm_context *context = nullptr;
    if (replayssm_context_create(nullptr, nullptr) == REPLAYSSM_OK) failed = 100;
    (void)context;
  }).join();
  if (failed != 3) return 1;
  watching = true;
  for (int threads = 0; threads < 4; threads++) {
    replayssm_context *context = nullptr;
    replayssm_context_desc desc = replayssm_init<replayssm_context_desc>();
    desc.n_threads = threads;
    if (replayssm_context_create(&desc, &context) != REPLAYSSM_OK) return 2;
    replayssm_context_destroy(context);
  }
  watching = false;
  if (reads != 0) return 3;
  std::puts("thread exit: ok");
  return 0;
}
