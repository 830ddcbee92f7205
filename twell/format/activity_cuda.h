// SPDX-License-Identifier: Apache-2.0
// What a feed-forward layer does on the GPU, counted by its kernels as a by-product, in device
// memory. Integers only, so that sums repeat whatever the order of the additions.
#pragma once

#include <cstdint>

namespace twell {

struct ActivityCuda {
  unsigned long long tokens;         // counted: all of them, or a sample
  unsigned long long nnz;            // their active neurons
  unsigned long long unions;         // token tiles of 128 whose union was made
  unsigned long long union_neurons;  // sum of its sizes
  unsigned long long max_row_nnz;    // of a counted token
};

}  // namespace twell
