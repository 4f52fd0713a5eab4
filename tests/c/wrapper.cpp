// The C++ wrapper stands alone and may be included twice.
// SPDX-License-Identifier: MIT OR Apache-2.0
#include "replayssm.hpp"
#include "replayssm.hpp"
