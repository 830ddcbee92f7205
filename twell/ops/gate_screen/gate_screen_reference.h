// SPDX-License-Identifier: Apache-2.0
// The scalar reference: screens, and what products with them say, on the host.
#pragma once

#include <vector>

#include "twell/base/dtype.h"
#include "twell/base/matrix.h"
#include "twell/ops/gate_screen/gate_screen.h"

namespace twell {

struct GateScreenHost {
  std::vector<uint8_t> rows;  // as in GateScreen
  std::vector<float> errors;
};

// weight [F, D], norm [D], D a width that there are screens for.
GateScreenHost make_gate_screen(Matrix<const BF16> weight, const BF16* norm);

// The product of a row with x [D], to within the row's error.
double screen_product(const uint8_t* row, const BF16* x, int64_t width);

}  // namespace twell
