// SPDX-License-Identifier: Apache-2.0
// The elementwise step of the dense execution; Highway, dispatched at run time.
#pragma once

#include <cstdint>

namespace twell {

// For i < n, h[i] = f(gate[i]) * u[i], or f(gate[i]) where u is null. f(g) is 0 where g <= 0, else
// g or, if `squared`, g^2; a NaN stays. Returns the number of active gates, which are not <= 0. h
// may be gate or u. A gate that is not active gives 0 whatever u is, as in executions that never
// compute u.
int64_t gate_multiply(const float* gate, const float* u, float* h, int64_t n, bool squared);

}  // namespace twell
