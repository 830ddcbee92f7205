// SPDX-License-Identifier: Apache-2.0
// What a feed-forward layer in training counts on the GPU.
#pragma once

#include <cstdint>

namespace twell {

// Device memory; kernels add to it, whoever reads it clears it.
struct FfnTrainCountsCuda {
  unsigned long long nnz;     // active (token, neuron) pairs
  unsigned long long tokens;  // that were counted
  double l1_sum;              // sum over tokens and neurons of |h|
  int32_t max_row_nnz;
  int32_t recomputed;  // calls whose pattern outgrew what was kept, so that backward made it anew
};

}  // namespace twell
