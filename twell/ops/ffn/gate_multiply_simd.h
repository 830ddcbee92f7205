// SPDX-License-Identifier: Apache-2.0
// The elementwise step of the dense execution; Highway, dispatched at run time.
#pragma once

#include <cstdint>

namespace twell {

// h[i] = gate[i] > 0 ? gate[i] * u[i] : 0 for i < n; returns the number of positive gates. h may be
// gate or u. A gate that is not positive gives 0 whatever u is, as in executions that never compute
// u.
int64_t gate_multiply(const float* gate, const float* u, float* h, int64_t n);

// h[i] = max(h[i], 0) with NaN -> 0; returns the number of positive values.
int64_t relu_count(float* h, int64_t n);

}  // namespace twell
