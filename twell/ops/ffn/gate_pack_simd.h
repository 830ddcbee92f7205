// SPDX-License-Identifier: Apache-2.0
// relu and TwELL packing of rows of x weight^T; Highway, dispatched at run time.
#pragma once

#include <cstdint>

#include "twell/format/twell.h"

namespace twell {

// Packs rows [begin, end) of gate_dense(out) into out.words, out.row_nnz and, in place, out.spill.
void pack_gate_rows(const TwellWide& out, int64_t begin, int64_t end);

}  // namespace twell
