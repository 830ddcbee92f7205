// SPDX-License-Identifier: Apache-2.0
#include "twell/train/shard_layout.h"

#include <algorithm>
#include <charconv>
#include <string_view>

namespace twell {
namespace {

// The layer of a parameter; -1 for the embedding, `layers` for the final norm and the head.
int64_t layer_of(const ParamSpec& param, int64_t layers) {
  constexpr std::string_view kLayers = "model.layers.";
  const std::string_view name = param.name;
  if (!name.starts_with(kLayers)) return param.offset == 0 ? -1 : layers;
  int64_t layer = 0;
  std::from_chars(name.data() + kLayers.size(), name.data() + name.size(), layer);
  return layer;
}

}  // namespace

ShardLayout::ShardLayout(const Model& model, int ranks, int rank)
    : ranks_(ranks), rank_(rank), parameters_(model.flat.size()) {
  // Cuts are rounded up to 64 values per rank, so that pieces of a bucket have the same size and
  // start at multiples of 256 bytes. A bucket then begins in its own layer and ends in the next,
  // whose gradients backward has earlier.
  const int64_t unit = int64_t{64} * ranks;
  const auto rounded = [&](int64_t at) {
    return std::min(parameters_, (at + unit - 1) / unit * unit);
  };
  for (const ParamSpec& param : model.table) {
    if (ranks == 1) break;
    const int64_t layer = layer_of(param, model.config.layers);
    if (buckets_.empty() || buckets_.back().layer != layer) {
      if (!buckets_.empty()) buckets_.back().end = rounded(param.offset);
      buckets_.push_back({.begin = rounded(param.offset), .end = parameters_, .layer = layer});
    }
  }
  if (ranks == 1) buckets_ = {{.begin = 0, .end = parameters_, .layer = -1}};
  std::erase_if(buckets_, [](const GradientBucket& bucket) { return bucket.begin == bucket.end; });
  for (const GradientBucket& bucket : buckets_) {
    const PieceRange piece = piece_of(bucket.end - bucket.begin, ranks, rank);
    pieces_.push_back({bucket.begin + piece.begin, piece.size(), size_});
    size_ += piece.size();
  }
}

int64_t ShardLayout::padded_parameters() const {
  const GradientBucket& last = buckets_.back();
  return last.begin + ranks_ * piece_of(last.end - last.begin, ranks_, 0).size();
}

}  // namespace twell
