// SPDX-License-Identifier: Apache-2.0
// The bound holds for rows that are computed in bf16 with sums in several orders, and a neuron that
// is missing breaks it where few are active.
#include "bench/ffn_row_bound.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "twell/base/rng.h"

namespace twell {
namespace {

struct Layer {
  Layer(int64_t width_in, int64_t ffn_in, float bias, uint64_t seed)
      : width(width_in), ffn(ffn_in) {
    const auto fill = [&](std::vector<BF16>& out, int64_t size, float scale, uint64_t stream) {
      out.resize(static_cast<size_t>(size));
      for (size_t i = 0; i < out.size(); ++i) {
        out[i] = to_bf16(scale * normal(seed, stream, i));
      }
    };
    fill(x, width, 1.0f, 1);
    fill(norm, width, 1.0f, 2);
    fill(gate, width * ffn, 0.02f, 3);
    fill(up, width * ffn, 0.02f, 4);
    fill(down, width * ffn, 0.02f, 5);
    fill(residual, width, 1.0f, 6);
    // The first column decides how many neurons are active.
    x[0] = norm[0] = to_bf16(1.0f);
    for (int64_t j = 0; j < ffn; ++j) gate[static_cast<size_t>(j * width)] = to_bf16(bias);
  }
  FfnRow row(bool gated, bool normed, bool add) const {
    return {.width = width,
            .ffn = ffn,
            .x = x.data(),
            .norm = normed ? norm.data() : nullptr,
            .w_gate = gated ? gate.data() : nullptr,
            .w_up = gated ? up.data() : gate.data(),
            .w_down = down.data(),
            .residual = add ? residual.data() : nullptr};
  }
  int64_t width, ffn;
  std::vector<BF16> x, norm, gate, up, down, residual;
};

// How an execution computes: sums of `lanes` interleaved partial sums, and what it rounds.
struct Way {
  int64_t lanes = 1;
  bool rounds_n = false, rounds_u = false, rounds_product = false;
  int64_t missing = -1;  // the active neuron of this rank is left out
};

float dot(const std::vector<float>& n, const BF16* weights, int64_t lanes) {
  std::vector<float> sums(static_cast<size_t>(lanes));
  for (size_t k = 0; k < n.size(); ++k) {
    sums[k % static_cast<size_t>(lanes)] += n[k] * to_float(weights[k]);
  }
  float sum = 0.0f;
  for (const float part : sums) sum += part;
  return sum;
}

float round_to_bf16(float value) { return to_float(to_bf16(value)); }

std::vector<BF16> compute(const FfnRow& row, const Way& way) {
  float squares = 0.0f;
  for (int64_t k = 0; k < row.width; ++k) squares += to_float(row.x[k]) * to_float(row.x[k]);
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(row.width) + row.eps);
  std::vector<float> n(static_cast<size_t>(row.width));
  for (int64_t k = 0; k < row.width; ++k) {
    float& value = n[static_cast<size_t>(k)];
    value = to_float(row.x[k]);
    if (row.norm == nullptr) continue;
    value *= scale * to_float(row.norm[k]);
    if (way.rounds_n) value = round_to_bf16(value);
  }
  std::vector<float> sums(static_cast<size_t>(row.width));
  int64_t rank = 0;
  for (int64_t i = 0; i < row.ffn; ++i) {
    const int64_t j = way.lanes > 1 ? row.ffn - 1 - i : i;
    const BF16* deciding = row.w_gate != nullptr ? row.w_gate : row.w_up;
    float h = round_to_bf16(std::max(0.0f, dot(n, deciding + j * row.width, way.lanes)));
    if (h == 0.0f || rank++ == way.missing) continue;
    if (row.w_gate != nullptr) {
      const float u = dot(n, row.w_up + j * row.width, way.lanes);
      h = round_to_bf16(h * (way.rounds_u ? round_to_bf16(u) : u));
    }
    for (int64_t d = 0; d < row.width; ++d) {
      sums[static_cast<size_t>(d)] += h * to_float(row.w_down[j * row.width + d]);
    }
  }
  std::vector<BF16> y(sums.size());
  for (size_t d = 0; d < y.size(); ++d) {
    float sum = sums[d];
    if (row.residual != nullptr) {
      sum = (way.rounds_product ? round_to_bf16(sum) : sum) + to_float(row.residual[d]);
    }
    y[d] = to_bf16(sum);
  }
  return y;
}

TEST(FfnRowBound, HoldsForEveryWayToCompute) {
  double worst = 0.0, furthest = 0.0, sum = 0.0;
  int rows = 0;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    const int64_t width = 8 + static_cast<int64_t>(seed) * 7 % 200;
    const Layer layer(width, 64 + static_cast<int64_t>(seed % 3) * 100,
                      seed % 2 == 0 ? -0.3f : 0.0f, seed);
    for (int kind = 0; kind < 8; ++kind) {
      const FfnRow row = layer.row((kind & 1) != 0, (kind & 2) != 0, (kind & 4) != 0);
      const FfnRowBound bound = ffn_row_bound(row);
      EXPECT_LE(bound.least_active, bound.most_active);
      for (const Way& way : {Way{}, Way{.lanes = 16, .rounds_n = true, .rounds_u = true},
                             Way{.lanes = 5, .rounds_u = true, .rounds_product = true}}) {
        const std::vector<BF16> y = compute(row, way);
        const double ratio = bound.worst(y.data());
        EXPECT_LE(ratio, 1.0) << "seed " << seed << ", kind " << kind;
        worst = std::max(worst, ratio);
        const double distance = bound.distance(y.data());
        furthest = std::max(furthest, distance);
        sum += distance;
        ++rows;
      }
    }
  }
  EXPECT_GT(worst, 0.3) << "the bound is far from what happens";
  EXPECT_LT(furthest, 3.0);
  EXPECT_GT(sum / rows, 0.4) << "the deviation is far from what happens";
}

// All 5,000 neurons of an 8 wide layer are active, and their contributions nearly cancel: what
// roundings leave is many times bf16's precision of y, and still no more than their deviation.
TEST(FfnRowBound, ExplainsRowsThatCancel) {
  Layer layer(8, 5000, 1.0f, 7);
  const FfnRow row = layer.row(true, false, false);
  for (int64_t j = 1; j < layer.ffn; j += 2) {  // each neuron and one of the opposite sign
    for (int64_t k = 0; k < layer.width; ++k) {
      const auto at = static_cast<size_t>(j * layer.width + k);
      layer.up[at] = layer.up[at - 8];
      layer.down[at] = to_bf16(-to_float(layer.down[at - 8]));
    }
  }
  const FfnRowBound bound = ffn_row_bound(row);
  double size = 0.0;
  for (const double y : bound.y) size += y * y;
  EXPECT_GT(bound.deviation, 4 * 0x1p-8 * std::sqrt(size));
  const double distance = bound.distance(compute(row, {.lanes = 4, .rounds_u = true}).data());
  EXPECT_GT(distance, 0.1);
  EXPECT_LT(distance, 3.0);
}

TEST(FfnRowBound, AMissingNeuronBreaksIt) {
  const Layer layer(96, 256, -0.3f, 3);
  for (const bool gated : {true, false}) {
    const FfnRow row = layer.row(gated, false, false);
    const FfnRowBound bound = ffn_row_bound(row);
    ASSERT_GE(bound.least_active, 8);
    ASSERT_LE(bound.most_active, 60);
    int64_t found = 0, far = 0;
    for (int64_t missing = 0; missing < bound.least_active; ++missing) {
      const std::vector<BF16> y = compute(row, {.missing = missing});
      found += bound.worst(y.data()) > 1.0;
      far += bound.distance(y.data()) > 6.0;
    }
    EXPECT_GE(found, bound.least_active * 3 / 4) << "of " << bound.least_active;
    EXPECT_GE(far, bound.least_active * 3 / 4) << "of " << bound.least_active;
  }
  std::vector<BF16> nan(96, to_bf16(NAN));
  EXPECT_TRUE(std::isnan(ffn_row_bound(layer.row(true, false, false)).worst(nan.data())));
}

}  // namespace
}  // namespace twell
