/* The header stands alone, may be included twice, and its macros work. C11 and C++17.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "replayssm.h"
#include "replayssm.h"

uint32_t header_only(void);

uint32_t header_only(void) {
  replayssm_batch batch = REPLAYSSM_INIT(replayssm_batch);
  replayssm_stream stream = NULL;
  replayssm_status status = REPLAYSSM_OK;
  batch.flags = REPLAYSSM_BATCH_NULL_ID;
  return batch.struct_size + REPLAYSSM_VERSION + (stream == NULL) + (uint32_t)status;
}
