// SPDX-License-Identifier: Apache-2.0
// The activity of a feed-forward layer in training on the GPU.
#pragma once

#include <cstdint>

namespace twell {

// In device memory. Kernels add to it; its reader clears it.
struct FfnTrainCountsCuda {
  unsigned long long nnz;  // active (token, neuron) pairs
  unsigned long long tokens;
  // Sum over tiles of 128 tokens of the neurons that are active on any of the tile's tokens. The
  // cost of the hybrid execution follows it rather than nnz, because tokens of one text share
  // neurons.
  unsigned long long union_neurons;
  double l1_sum;  // sum over tokens and neurons of |h|
  int32_t max_row_nnz;
  // Chunks of 16,384 tokens whose pattern outgrew the memory kept for it, so that backward computed
  // it again.
  int32_t recomputed;
};

}  // namespace twell
