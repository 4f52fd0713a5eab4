/* Nothing but the header, for -Wpadded: no struct has padding that a compiler put in.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "replayssm.h"
