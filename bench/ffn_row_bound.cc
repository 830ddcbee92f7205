// SPDX-License-Identifier: Apache-2.0
#include "bench/ffn_row_bound.h"

#include <algorithm>
#include <cmath>

namespace twell {
namespace {

constexpr double kRounding = 0x1p-8;  // of bf16, relative
constexpr double kVariance = kRounding * kRounding / 3.0;
constexpr double kAddition = 0x1p-23;  // of f32, relative, truncated

double additions(int64_t count) { return static_cast<double>(count + 16) * kAddition; }

struct Value {
  double exact = 0.0, error = 0.0;
  double variance = 0.0;  // of roundings
  Value rounded() const {
    return {exact, error + kRounding * (std::abs(exact) + error),
            variance + kVariance * (exact * exact + variance)};
  }
};

// n and its errors.
std::vector<Value> normed(const FfnRow& row) {
  std::vector<Value> out(static_cast<size_t>(row.width));
  double squares = 0.0;
  for (int64_t k = 0; k < row.width; ++k) {
    const double x = to_float(row.x[k]);
    squares += x * x;
  }
  // A sum of squares, its root and two products in f32.
  const double scale =
      1.0 / std::sqrt(squares / static_cast<double>(row.width) + static_cast<double>(row.eps));
  for (int64_t k = 0; k < row.width; ++k) {
    Value& n = out[static_cast<size_t>(k)];
    n.exact = to_float(row.x[k]);
    if (row.norm == nullptr) continue;
    n.exact *= scale * static_cast<double>(to_float(row.norm[k]));
    n.error = additions(row.width) * std::abs(n.exact);
    n = n.rounded();
  }
  return out;
}

// n times a row of weights.
Value product(const std::vector<Value>& n, const BF16* weights) {
  Value sum;
  double sizes = 0.0;
  for (size_t k = 0; k < n.size(); ++k) {
    const double weight = to_float(weights[k]);
    sum.exact += n[k].exact * weight;
    sum.error += n[k].error * std::abs(weight);
    sum.variance += n[k].variance * weight * weight;
    sizes += (std::abs(n[k].exact) + n[k].error) * std::abs(weight);
  }
  sum.error += additions(static_cast<int64_t>(n.size())) * sizes;
  return sum;
}

Value relu(const Value& value) {
  if (value.exact + value.error <= 0.0) return {};
  if (value.exact >= 0.0) return value;
  return {0.0, value.exact + value.error, value.variance};
}

}  // namespace

double FfnRowBound::worst(const BF16* values) const {
  double worst = 0.0;
  for (size_t d = 0; d < y.size(); ++d) {
    const double difference = std::abs(static_cast<double>(to_float(values[d])) - y[d]);
    if (std::isnan(difference)) return difference;
    if (difference > 0.0) worst = std::max(worst, difference / error[d]);
  }
  return worst;
}

double FfnRowBound::distance(const BF16* values) const {
  double squares = 0.0;
  for (size_t d = 0; d < y.size(); ++d) {
    const double difference = static_cast<double>(to_float(values[d])) - y[d];
    squares += difference * difference;
  }
  return squares == 0.0 ? 0.0 : std::sqrt(squares) / deviation;
}

FfnRowBound ffn_row_bound(const FfnRow& row) {
  const size_t width = static_cast<size_t>(row.width);
  FfnRowBound bound{.y = std::vector<double>(width), .error = std::vector<double>(width)};
  const std::vector<Value> n = normed(row);
  std::vector<double> sizes(width), variances(width);
  const BF16* deciding = row.w_gate != nullptr ? row.w_gate : row.w_up;
  for (int64_t j = 0; j < row.ffn; ++j) {
    const Value before = product(n, deciding + j * row.width);
    bound.least_active += before.exact - before.error > 0.0;
    bound.most_active += before.exact + before.error > 0.0;
    Value h = relu(before).rounded();
    if (h.exact + h.error == 0.0) continue;
    if (row.w_gate != nullptr) {
      const Value u = product(n, row.w_up + j * row.width).rounded();
      h = Value{h.exact * u.exact,
                h.exact * u.error + std::abs(u.exact) * h.error + h.error * u.error,
                h.exact * h.exact * u.variance + u.exact * u.exact * h.variance +
                    h.variance * u.variance}
              .rounded();
    }
    for (size_t d = 0; d < width; ++d) {
      const double weight = to_float(row.w_down[j * row.width + static_cast<int64_t>(d)]);
      bound.y[d] += h.exact * weight;
      bound.error[d] += h.error * std::abs(weight);
      variances[d] += h.variance * weight * weight;
      sizes[d] += (std::abs(h.exact) + h.error) * std::abs(weight);
    }
  }
  for (size_t d = 0; d < width; ++d) {
    Value y{bound.y[d], bound.error[d] + additions(row.ffn) * sizes[d], variances[d]};
    if (row.residual != nullptr) {
      y = y.rounded();
      y.exact += to_float(row.residual[d]);
    }
    y = y.rounded();
    bound.y[d] = y.exact;
    bound.error[d] = y.error;
    bound.deviation += y.variance;
  }
  bound.deviation = std::sqrt(bound.deviation);
  return bound;
}

}  // namespace twell
