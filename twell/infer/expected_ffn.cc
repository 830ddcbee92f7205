// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/expected_ffn.h"

#include <algorithm>

#include "twell/model/ffn_shape.h"
#include "twell/ops/ffn/cpu/ffn_cost.h"
#include "twell/ops/ffn/cpu/sparse_up_down.h"

namespace twell {
namespace {

class CpuCosts : public ExecutionCosts {
 public:
  CpuCosts(Context& ctx, const ModelConfig& config)
      : ctx_(ctx), width_(config.width), gated_(config.gated) {}

  std::string_view device() const override { return "CPU"; }

  ExpectedFfn together(const Pattern& fired) const override {
    ExpectedFfn out;
    // The same chunks as in ffn_forward.
    const int64_t rows = fired.rows();
    const int64_t chunks = (rows + kFfnChunkTokens - 1) / kFfnChunkTokens;
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t begin = rows * c / chunks, end = rows * (c + 1) / chunks;
      const Pattern chunk = slice_rows(fired, begin, end - begin);
      const int64_t tile = tile_union_tokens(ctx_, chunk.rows(), width_);
      const int64_t tiles = (chunk.rows() + tile - 1) / tile;
      add({.tokens = chunk.rows(),
           .ffn = fired.cols,
           .nnz = std::ssize(chunk.column),
           .union_size =
               static_cast<int64_t>(mean_union(chunk, tile) * static_cast<double>(tiles) + 0.5)},
          out);
    }
    return out;
  }

  ExpectedFfn one_by_one(const Pattern& fired) const override {
    ExpectedFfn out;
    for (int64_t row = 0; row < fired.rows(); ++row) {
      const int64_t nnz = std::ssize(fired.row(row));
      add({.tokens = 1, .ffn = fired.cols, .nnz = nnz, .union_size = nnz}, out);
    }
    return out;
  }

 private:
  static double cost_of(FfnExecution execution, const FfnWork& work) {
    if (execution == FfnExecution::kRowFused) return row_fused_cost(work);
    return execution == FfnExecution::kTileUnion ? tile_union_cost(work) : dense_cost(work);
  }

  // Costs are in units of one (token, neuron) pair of the up and down products. Every execution
  // also runs the gate projection: one GEMM in addition to two (gated), or to one.
  void add(const FfnWork& work, ExpectedFfn& expected) const {
    const FfnExecution execution = cheapest_execution(work);
    const double dense = dense_cost(work);
    const double firing = gated_ ? 0.5 * dense : dense;
    ++expected.runs[execution];
    expected.dense_cost += firing + dense;
    expected.cost += firing + cost_of(execution, work);
  }

  Context& ctx_;
  int64_t width_;
  bool gated_;
};

class GpuCosts : public ExecutionCosts {
 public:
  explicit GpuCosts(const GpuFfnLayer& layer) : layer_(layer) {}

  std::string_view device() const override { return "GPU"; }

  ExpectedFfn together(const Pattern& fired) const override {
    LayerActivity activity = activity_of(fired);
    activity.union_share = mean_union(fired, 128) / static_cast<double>(fired.cols);
    return expected(activity, fired.rows(), 1);
  }

  // A GPU chooses from averages, not for each token.
  ExpectedFfn one_by_one(const Pattern& fired) const override {
    return expected(activity_of(fired), 1, fired.rows());
  }

 private:
  static LayerActivity activity_of(const Pattern& fired) {
    return {.nnz_per_token =
                static_cast<double>(fired.column.size()) / static_cast<double>(fired.rows())};
  }

  ExpectedFfn expected(const LayerActivity& activity, int64_t tokens, int64_t runs) const {
    const GpuFfnChoice choice = choose_gpu_ffn(layer_, {.tokens = tokens}, activity);
    ExpectedFfn out;
    out.runs[*choice.execution] = runs;
    out.dense_cost = choice.dense_cost * static_cast<double>(runs);
    out.cost = choice.cost * static_cast<double>(runs);
    return out;
  }

  GpuFfnLayer layer_;
};

}  // namespace

FfnExecution ExpectedFfn::execution() const {
  const auto most = std::max_element(
      runs.begin(), runs.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == runs.end() ? FfnExecution::kDense : most->first;
}

ExpectedFfn& ExpectedFfn::operator+=(const ExpectedFfn& other) {
  for (const auto& [execution, count] : other.runs) runs[execution] += count;
  dense_cost += other.dense_cost;
  cost += other.cost;
  return *this;
}

std::unique_ptr<ExecutionCosts> cpu_costs(Context& ctx, const ModelConfig& config) {
  return std::make_unique<CpuCosts>(ctx, config);
}

std::unique_ptr<ExecutionCosts> gpu_costs(const ModelConfig& config, const GpuDevice& device) {
  return std::make_unique<GpuCosts>(gpu_ffn_layer(device, ffn_shape(config)));
}

}  // namespace twell
