// A C++17 program that links an installed library.
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <replayssm.h>
#if __has_include(<replayssm.hpp>)
#include <replayssm.hpp>
#endif

#include <cstdio>

int main() {
  auto desc = REPLAYSSM_INIT(replayssm_context_desc);
  auto info = REPLAYSSM_INIT(replayssm_context_info);
  replayssm_context *context = nullptr;
  desc.n_threads = 2;
  if (replayssm_version() != REPLAYSSM_VERSION) return 1;
  if (replayssm_context_create(&desc, &context) != REPLAYSSM_OK) return 2;
  if (replayssm_context_query(context, &info) != REPLAYSSM_OK || info.n_threads != 2) return 3;
  replayssm_context_destroy(context);
  std::printf("consumer: %s\n", info.name);
  return 0;
}
