/* Sizes and offsets of all structs as layout.inc has them. C11 and C++17.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "replayssm.h"

#ifdef __cplusplus
#define ASSERT static_assert
#else
#define ASSERT _Static_assert
#endif

#define STRUCT(name, size) ASSERT(sizeof(name) == (size), "size of " #name);
#define FIELD(name, field, offset, size)                                    \
  ASSERT(offsetof(name, field) == (offset), "offset of " #name "." #field); \
  ASSERT(sizeof(((name *)0)->field) == (size), "size of " #name "." #field);
#include "layout.inc"
