// SPDX-License-Identifier: Apache-2.0
// How the ranks of a run share the optimizer (ZeRO stage 1, Rajbhandari et al. 2020, section 5.1).
// The flat array of parameters is cut into buckets, about one per layer, and every bucket into one
// piece per rank (piece_of, communicator.h). A rank holds the moments of its pieces, reduces their
// gradients and updates their weights. For a single rank all is one bucket and one piece.
#pragma once

#include <cstdint>
#include <vector>

#include "twell/dist/communicator.h"
#include "twell/model/weights.h"

namespace twell {

// Parameters [begin, end) of the flat array.
struct GradientBucket {
  int64_t begin = 0;
  int64_t end = 0;
  // Backward has all of its gradients once it is done with this layer; L: before the last layer;
  // -1: only at its end, after the embedding.
  int64_t layer = 0;
};

struct ShardPiece {
  int64_t begin = 0;  // in the flat array
  int64_t size = 0;
  int64_t local = 0;  // in the rank's shard, which has its pieces one after another
};

class ShardLayout {
 public:
  explicit ShardLayout(const Model& model, int ranks = 1, int rank = 0);

  int ranks() const { return ranks_; }
  int rank() const { return rank_; }
  int64_t parameters() const { return parameters_; }  // N
  // N and what the last bucket lacks to pieces of equal size, which NCCL needs.
  int64_t padded_parameters() const;
  // Values of this rank's shard, S; N for one rank, whose shard is the flat array itself.
  int64_t size() const { return size_; }
  const std::vector<GradientBucket>& buckets() const { return buckets_; }
  const std::vector<ShardPiece>& pieces() const { return pieces_; }  // one per bucket

 private:
  int ranks_, rank_;
  int64_t parameters_;
  int64_t size_ = 0;
  std::vector<GradientBucket> buckets_;
  std::vector<ShardPiece> pieces_;
};

}  // namespace twell
