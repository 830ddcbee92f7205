// SPDX-License-Identifier: Apache-2.0
// Activity of a feed-forward layer, counted by its kernels as a by-product, in device memory.
// Integers only, so that sums do not depend on the order of additions.
#pragma once

#include <cstdint>

namespace twell {

struct ActivityCuda {
  unsigned long long tokens;         // counted tokens: all of them, or a sample
  unsigned long long nnz;            // their active neurons
  unsigned long long unions;         // token tiles of 128 whose union was computed
  unsigned long long union_neurons;  // sum of their sizes
  unsigned long long union_calls;    // calls that computed unions
  unsigned long long largest_union;  // sum over these calls of the size of a call's largest union
  unsigned long long max_row_nnz;    // most active neurons of a counted token
  // The unions of candidates behind a screen, which the fields above leave out.
  unsigned long long candidate_unions;
  unsigned long long candidate_union_neurons;
  // Some tokens' screens are checked against the whole gate. These count the pairs that fire there,
  // and those of them that are no candidates.
  unsigned long long checked_pairs;
  unsigned long long missed_pairs;
};

}  // namespace twell
