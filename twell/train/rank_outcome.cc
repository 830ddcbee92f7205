// SPDX-License-Identifier: Apache-2.0
#include "twell/train/rank_outcome.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace twell {
namespace {

constexpr size_t kHead = 4, kPerLayer = 6;

}  // namespace

void combine_outcomes(Communicator& ranks, RankShare share, StepOutcome& outcome) {
  std::vector<double> mine = {static_cast<double>(share.micro_batches),
                              static_cast<double>(share.targets), outcome.ce, outcome.kl};
  for (const LayerMetrics& layer : outcome.layers) {
    mine.insert(mine.end(),
                {layer.nnz, layer.l1, layer.union_neurons, static_cast<double>(layer.recomputed),
                 static_cast<double>(layer.tail_rows), static_cast<double>(layer.max_nnz)});
  }
  const std::vector<double> all = ranks.all_gather_values(mine);
  double micro_batches = 0.0, targets = 0.0;
  for (size_t at = 0; at < all.size(); at += mine.size()) {
    micro_batches += all[at];
    targets += all[at + 1];
  }
  outcome.ce = outcome.kl = 0.0;
  for (LayerMetrics& layer : outcome.layers) {
    layer.nnz = layer.l1 = layer.union_neurons = 0.0;
    layer.recomputed = layer.tail_rows = layer.max_nnz = 0;
  }
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const double* from = all.data() + static_cast<size_t>(rank) * mine.size();
    const double of_layers = from[0] / std::max(micro_batches, 1.0);
    const double of_loss = from[1] / std::max(targets, 1.0);
    if (outcome.culprit < 0 && !std::isfinite(from[2])) outcome.culprit = rank;
    outcome.ce += of_loss * from[2];
    outcome.kl += of_loss * from[3];
    from += kHead;
    for (LayerMetrics& layer : outcome.layers) {
      layer.nnz += of_layers * from[0];
      layer.l1 += of_layers * from[1];
      layer.union_neurons += of_layers * from[2];
      layer.recomputed += static_cast<int64_t>(from[3]);
      layer.tail_rows += static_cast<int64_t>(from[4]);
      layer.max_nnz = std::max(layer.max_nnz, static_cast<int64_t>(from[5]));
      from += kPerLayer;
    }
  }
}

int first_culprit(Communicator& ranks, bool finite) {
  const double mine = finite ? 1.0 : 0.0;
  const std::vector<double> all = ranks.all_gather_values(std::span(&mine, 1));
  const auto found = std::find(all.begin(), all.end(), 0.0);
  return found == all.end() ? -1 : static_cast<int>(found - all.begin());
}

bool finite_outside_pieces(std::span<const float> grads, const ShardLayout& layout) {
  int64_t begin = 0;
  const auto finite_up_to = [&](int64_t end) {
    const auto part = grads.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    return std::all_of(part.begin(), part.end(), [](float value) { return std::isfinite(value); });
  };
  for (const ShardPiece& piece : layout.pieces()) {
    if (!finite_up_to(piece.begin)) return false;
    begin = piece.begin + piece.size;
  }
  return finite_up_to(layout.parameters());
}

}  // namespace twell
