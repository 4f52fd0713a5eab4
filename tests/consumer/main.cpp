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
#if __has_include(<replayssm.hpp>)
  const replayssm::Context wrapped(desc);
  auto sizes = replayssm::init<replayssm_slots_desc>();
  auto shape = replayssm::init<replayssm_pool_desc>();
  sizes.n_slots = 1;
  shape.family = REPLAYSSM_FAMILY_MAMBA2;
  shape.n_layers = shape.nheads = shape.ngroups = 1;
  shape.headdim = shape.dstate = 64;
  shape.io = REPLAYSSM_DTYPE_F32;
  wrapped.supports(shape);
  replayssm::Slots slots(wrapped, sizes);
  const replayssm::Layers layers(slots, shape);
  if (layers.explain(1).rfind("Pool: Mamba-2, 1 layer", 0) != 0) return 4;
  try {
    shape.headdim = 1000;
    wrapped.supports(shape);
    return 5;
  } catch (const replayssm::Error& error) {
    if (error.status() != REPLAYSSM_ERROR_UNSUPPORTED) return 6;
  }
#endif
  std::printf("consumer: %s\n", info.name);
  return 0;
}
