// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/activity_profile.h"

#include <algorithm>
#include <numeric>

#include "twell/base/error.h"
#include "twell/format/statistics.h"
#include "twell/ops/ffn/ffn_cost.h"
#include "twell/ops/gate_gemm/gate_gemm.h"
#include "twell/ops/sparse_up_down/sparse_up_down.h"

namespace twell {
namespace {

double execution_cost(FfnExecution execution, const FfnWork& work) {
  switch (execution) {
    case FfnExecution::kRowFused:
      return row_fused_cost(work);
    case FfnExecution::kTileUnion:
      return tile_union_cost(work);
    default:
      return dense_cost(work);
  }
}

// The unit of the costs is a pair in up and down; the projection before them, which every execution
// runs, is one GEMM where they are two, or one where they are one.
void add_work(const FfnWork& work, bool gated, ExpectedFfn& expected) {
  const FfnExecution execution = cheapest_execution(work);
  const double dense = dense_cost(work);
  const double firing = gated ? 0.5 * dense : dense;
  ++expected.runs[static_cast<size_t>(execution)];
  expected.dense_cost += firing + dense;
  expected.cost += firing + execution_cost(execution, work);
}

void add_unions(const Pattern& pattern, int64_t tokens, int64_t& sum, int64_t& tiles) {
  for (const int64_t size : union_sizes(pattern, tokens)) {
    sum += size;
    ++tiles;
  }
}

double ratio(int64_t sum, int64_t count) {
  return count == 0 ? 0.0 : static_cast<double>(sum) / static_cast<double>(count);
}

}  // namespace

FfnExecution ExpectedFfn::execution() const {
  return static_cast<FfnExecution>(std::max_element(runs.begin(), runs.end()) - runs.begin());
}

ExpectedFfn& ExpectedFfn::operator+=(const ExpectedFfn& other) {
  for (size_t i = 0; i < runs.size(); ++i) runs[i] += other.runs[i];
  dense_cost += other.dense_cost;
  cost += other.cost;
  return *this;
}

int64_t LayerProfile::never_fired() const { return std::count(fired.begin(), fired.end(), 0); }
double LayerProfile::mean_union_64() const { return ratio(union_64, tiles_64); }
double LayerProfile::mean_union_128() const { return ratio(union_128, tiles_128); }

ExpectedFfn ActivityProfile::prompt() const {
  ExpectedFfn sum;
  for (const LayerProfile& layer : layers) sum += layer.prompt;
  return sum;
}

ExpectedFfn ActivityProfile::decode() const {
  ExpectedFfn sum;
  for (const LayerProfile& layer : layers) sum += layer.decode;
  return sum;
}

std::vector<PositionRange> ActivityProfile::positions() const {
  std::vector<PositionRange> out;
  const int64_t context = std::ssize(tokens_at);
  for (int64_t first = 0; first < context; first = first == 0 ? 1 : 2 * first) {
    PositionRange range;
    range.first = first;
    range.last = std::min(std::max<int64_t>(first, 2 * first - 1), context - 1);
    const auto sum = [&](const std::vector<int64_t>& values) {
      return std::accumulate(values.begin() + range.first, values.begin() + range.last + 1,
                             int64_t{0});
    };
    range.tokens = sum(tokens_at);
    if (range.tokens == 0) break;
    for (const LayerProfile& layer : layers) {
      range.nnz.push_back(ratio(sum(layer.nnz_at), range.tokens));
    }
    out.push_back(std::move(range));
  }
  return out;
}

double ActivityProfile::nnz_of(int32_t token) const {
  const TokenActivity& activity = by_token[static_cast<size_t>(token)];
  return ratio(activity.nnz, activity.seen * std::ssize(layers));
}

std::vector<int32_t> ActivityProfile::extreme_tokens(int64_t count, bool most) const {
  constexpr int64_t kOften = 5;
  const auto seen_at_least = [&](int64_t least) {
    std::vector<int32_t> ids;
    for (size_t id = 0; id < by_token.size(); ++id) {
      if (by_token[id].seen >= least) ids.push_back(static_cast<int32_t>(id));
    }
    return ids;
  };
  std::vector<int32_t> ids = seen_at_least(kOften);
  if (std::ssize(ids) < 2 * count) ids = seen_at_least(1);
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
    return most ? nnz_of(a) > nnz_of(b) : nnz_of(a) < nnz_of(b);
  });
  ids.resize(std::min(ids.size(), static_cast<size_t>(count)));
  return ids;
}

ActivityProfiler::ActivityProfiler(Context& ctx, const Model& model) : ctx_(ctx), model_(model) {
  const ModelConfig& config = model.config;
  TWELL_REQUIRE(config.activation == Activation::kRelu,
                "the activation is {}, which leaves no zeros: there is no sparsity to profile",
                activation_name(config.activation));
  const auto context = static_cast<size_t>(config.context);
  profile_.tokens_at.resize(context);
  profile_.by_token.resize(static_cast<size_t>(config.vocab_size));
  profile_.layers.resize(static_cast<size_t>(config.layers));
  for (LayerProfile& layer : profile_.layers) {
    layer.fired.resize(static_cast<size_t>(config.ffn));
    layer.nnz_at.resize(context);
  }
}

void ActivityProfiler::begin_batch(std::span<const int32_t> ids,
                                   std::span<const ForwardSequence> sequences,
                                   std::span<const int32_t> targets) {
  ids_.assign(ids.begin(), ids.end());
  positions_.clear();
  for (const ForwardSequence& sequence : sequences) {
    for (int64_t i = 0; i < sequence.tokens; ++i) positions_.push_back(i);
  }
  TWELL_CHECK(ids_.size() == positions_.size() && ids_.size() == targets.size(),
              "{} ids and {} targets for sequences of {} tokens", ids_.size(), targets.size(),
              positions_.size());
  for (size_t i = 0; i < ids_.size(); ++i) {
    if (targets[i] < 0) {
      positions_[i] = -1;
      continue;
    }
    ++profile_.tokens;
    ++profile_.tokens_at[static_cast<size_t>(positions_[i])];
    ++profile_.by_token[static_cast<size_t>(ids_[i])].seen;
  }
}

void ActivityProfiler::add_layer(int64_t layer, ConstMatrixF ffn_input) {
  TWELL_CHECK(ffn_input.rows == std::ssize(ids_), "{} tokens in a batch of {}", ffn_input.rows,
              ids_.size());
  // The chunks that ffn_forward makes.
  const int64_t rows = ffn_input.rows;
  const int64_t chunks = (rows + kFfnChunkTokens - 1) / kFfnChunkTokens;
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t begin = rows * c / chunks;
    add_chunk(layer, begin, ffn_input.slice_rows(begin, rows * (c + 1) / chunks - begin));
  }
}

void ActivityProfiler::add_chunk(int64_t layer, int64_t begin, ConstMatrixF ffn_input) {
  const FfnWeights& weights = model_.weights.layers[static_cast<size_t>(layer)].ffn;
  Arena::Scope scope(ctx_.scratch());
  const TwellWide gate = alloc_twell_wide(scope, {.rows = ffn_input.rows, .cols = weights.ffn()});
  const GateStats stats =
      gate_gemm(ctx_, {.x = ffn_input, .weight = weights.firing(), .out = gate});
  const Pattern pattern = pattern_from_twell(gate);

  LayerProfile& out = profile_.layers[static_cast<size_t>(layer)];
  add_unions(pattern, 64, out.union_64, out.tiles_64);
  add_unions(pattern, 128, out.union_128, out.tiles_128);
  add_work({.tokens = ffn_input.rows,
            .ffn = weights.ffn(),
            .nnz = stats.nnz,
            .union_size = tile_union_size(ctx_, gate, weights.width())},
           weights.gated(), out.prompt);
  for (int64_t row = 0; row < ffn_input.rows; ++row) {
    const int64_t nnz = gate.row_nnz[row];
    add_work({.tokens = 1, .ffn = weights.ffn(), .nnz = nnz, .union_size = nnz}, weights.gated(),
             out.decode);
    const auto token = static_cast<size_t>(begin + row);
    if (positions_[token] < 0) continue;
    for (const uint32_t column : pattern.row(row)) ++out.fired[column];
    out.nnz_at[static_cast<size_t>(positions_[token])] += nnz;
    profile_.by_token[static_cast<size_t>(ids_[token])].nnz += nnz;
  }
}

}  // namespace twell
