// SPDX-License-Identifier: Apache-2.0
// What a feed-forward layer in training counts on the GPU.
#pragma once

#include <cstdint>

namespace twell {

// Device memory; kernels add to it, whoever reads it clears it.
struct FfnTrainCountsCuda {
  unsigned long long nnz;     // active (token, neuron) pairs
  unsigned long long tokens;  // that were counted
  // Sum over tiles of 128 tokens of the neurons that are active on any of them. What the hybrid
  // execution costs hangs on it: tokens of one text share neurons.
  unsigned long long union_neurons;
  double l1_sum;  // sum over tokens and neurons of |h|
  int32_t max_row_nnz;
  // Chunks of 16,384 tokens whose pattern outgrew what was kept, so that backward made it anew.
  int32_t recomputed;
};

}  // namespace twell
