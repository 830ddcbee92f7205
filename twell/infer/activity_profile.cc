// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/activity_profile.h"

#include <algorithm>
#include <numeric>

#include "twell/base/error.h"

namespace twell {
namespace {

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

int64_t LayerProfile::never_fired() const { return std::count(fired.begin(), fired.end(), 0); }
double LayerProfile::mean_union_64() const { return ratio(union_64, tiles_64); }
double LayerProfile::mean_union_128() const { return ratio(union_128, tiles_128); }

ExpectedFfn ActivityProfile::sum(ExpectedFfn LayerProfile::*expected) const {
  ExpectedFfn sum;
  for (const LayerProfile& layer : layers) sum += layer.*expected;
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

ActivityProfiler::ActivityProfiler(const ModelConfig& config, std::unique_ptr<ExecutionCosts> costs)
    : costs_(std::move(costs)) {
  TWELL_REQUIRE(leaves_zeros(config.activation),
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

void ActivityProfiler::add_layer(int64_t layer, const Pattern& fired) {
  TWELL_CHECK(fired.rows() == std::ssize(ids_), "{} tokens in a batch of {}", fired.rows(),
              ids_.size());
  LayerProfile& out = profile_.layers[static_cast<size_t>(layer)];
  add_unions(fired, 64, out.union_64, out.tiles_64);
  add_unions(fired, 128, out.union_128, out.tiles_128);
  out.prompt += costs_->together(fired);
  out.decode += costs_->one_by_one(fired);
  for (int64_t row = 0; row < fired.rows(); ++row) {
    const auto token = static_cast<size_t>(row);
    if (positions_[token] < 0) continue;
    const std::span<const uint32_t> neurons = fired.row(row);
    for (const uint32_t neuron : neurons) ++out.fired[neuron];
    out.nnz_at[static_cast<size_t>(positions_[token])] += std::ssize(neurons);
    profile_.by_token[static_cast<size_t>(ids_[token])].nnz += std::ssize(neurons);
  }
}

}  // namespace twell
