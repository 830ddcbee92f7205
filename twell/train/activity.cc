// SPDX-License-Identifier: Apache-2.0
#include "twell/train/activity.h"

#include <algorithm>

#include "twell/base/rng.h"

namespace twell {
StepActivity::StepActivity(const ModelConfig& config)
    : active_(static_cast<size_t>(config.layers),
              std::vector<uint8_t>(static_cast<size_t>(config.ffn))),
      totals_(static_cast<size_t>(config.layers)) {}

void StepActivity::clear() {
  for (auto& layer : active_) std::fill(layer.begin(), layer.end(), uint8_t{0});
  std::fill(totals_.begin(), totals_.end(), FfnTrainStats{});
}

void StepActivity::add(std::span<const FfnTrainStats> layers) {
  for (size_t i = 0; i < totals_.size(); ++i) {
    FfnTrainStats& total = totals_[i];
    total.execution = layers[i].execution;
    total.tokens += layers[i].tokens;
    total.nnz += layers[i].nnz;
    total.max_row_nnz = std::max(total.max_row_nnz, layers[i].max_row_nnz);
    total.tail_rows += layers[i].tail_rows;
    total.l1_sum += layers[i].l1_sum;
  }
}

void StepActivity::merge_active(Communicator& ranks) {
  std::vector<uint8_t> flat;
  for (const auto& layer : active_) flat.insert(flat.end(), layer.begin(), layer.end());
  ranks.all_reduce_max(flat);
  auto from = flat.begin();
  for (auto& layer : active_) {
    std::copy_n(from, layer.size(), layer.begin());
    from += std::ssize(layer);
  }
}

std::vector<LayerMetrics> StepActivity::metrics() const {
  std::vector<LayerMetrics> result;
  for (size_t i = 0; i < totals_.size(); ++i) {
    const FfnTrainStats& total = totals_[i];
    const double tokens = static_cast<double>(std::max<int64_t>(total.tokens, 1));
    LayerMetrics& layer = result.emplace_back();
    layer.nnz = static_cast<double>(total.nnz) / tokens;
    layer.max_nnz = total.max_row_nnz;
    layer.tail_rows = total.tail_rows;
    layer.l1 = total.l1_sum / tokens;
    layer.dead = std::count(active_[i].begin(), active_[i].end(), uint8_t{0});
    layer.dead_share = static_cast<double>(layer.dead) / static_cast<double>(active_[i].size());
    layer.execution = total.execution;
  }
  return result;
}

void reinit_dead_neurons(Context& ctx, const TrainOptions& options, int64_t step,
                         const std::vector<std::vector<uint8_t>>& active,
                         std::span<const ShardPiece> pieces, Model& model) {
  const auto weights = model_matrices<float>(model.config, model.flat.data());
  const float strength = static_cast<float>(options.reinit_strength);
  const float std_dev = static_cast<float>(options.reinit_std);
  for (size_t layer = 0; layer < active.size(); ++layer) {
    const MatrixF firing = weights.layers[layer].ffn.firing();  // [F, D]
    const int64_t at = firing.data - model.flat.data(), size = firing.rows * firing.cols;
    for (const ShardPiece& piece : pieces) {
      // Elements of the projection that lie in the piece.
      const int64_t first = std::max<int64_t>(piece.begin - at, 0);
      const int64_t last = std::min(piece.begin + piece.size - at, size);
      if (first >= last) continue;
      const int64_t row = first / firing.cols, rows = (last - 1) / firing.cols + 1 - row;
      ctx.parallel_for(rows, 16, [&](int64_t begin, int64_t end, int) {
        for (int64_t j = row + begin; j < row + end; ++j) {
          if (active[layer][static_cast<size_t>(j)] != 0) continue;
          const int64_t up_to = std::min(last, (j + 1) * firing.cols);
          for (int64_t i = std::max(first, j * firing.cols); i < up_to; ++i) {
            const float noise =
                normal(options.seed, kReinitStream + layer, static_cast<uint64_t>(step * size + i));
            firing.data[i] = (1.0f - strength) * firing.data[i] + strength * std_dev * noise;
          }
        }
      });
    }
  }
}

}  // namespace twell
