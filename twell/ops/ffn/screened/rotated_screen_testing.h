// SPDX-License-Identifier: Apache-2.0
// Scalar reference of rotated screens for tests, in double: rotates, quantises, bounds and decides;
// and rows that are hard to screen.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "twell/base/dtype.h"
#include "twell/base/rng.h"
#include "twell/ops/ffn/screened/rotated_screen.h"

namespace twell::rotated_screen_testing {

// Hadamard transforms of the blocks of a row, in place.
inline void transform_blocks(std::vector<double>& values) {
  const auto block = static_cast<size_t>(hadamard_block(std::ssize(values)));
  for (size_t distance = 1; distance < block; distance *= 2) {
    for (size_t i = 0; i < values.size(); ++i) {
      if ((i & distance) != 0) continue;
      const double a = values[i], b = values[i + distance];
      values[i] = a + b;
      values[i + distance] = a - b;
    }
  }
}

// The rotated row [D], in stored order.
inline std::vector<double> rotated(const BF16* row, int64_t width) {
  std::vector<double> values(static_cast<size_t>(width));
  for (int64_t c = 0; c < width; ++c) {
    const double value = to_float(row[c]);
    values[static_cast<size_t>(c)] = rotation_negates(c) ? -value : value;
  }
  transform_blocks(values);
  std::vector<double> stored(values.size());
  for (int64_t c = 0; c < width; ++c) {
    stored[static_cast<size_t>(rotated_position(c, width))] = values[static_cast<size_t>(c)];
  }
  return stored;
}

inline double norm_of(const std::vector<double>& values) {
  double squares = 0.0;
  for (const double v : values) squares += v * v;
  return std::sqrt(squares);
}

// A rotated row in steps of its scale, and its values.
struct QuantisedRow {
  enum Kind { kZero, kTaken, kRefused } kind = kRefused;
  std::vector<double> steps;  // zeros unless taken
  std::vector<int8_t> values;

  double norm() const { return norm_of(steps); }
  double error() const {
    std::vector<double> off(steps);
    for (size_t i = 0; i < off.size(); ++i) off[i] -= values[i];
    return norm_of(off);
  }
  double size() const { return norm_of({values.begin(), values.end()}); }
};

// Rounding of steps at a stored position.
using Round = std::function<double(double steps, int64_t position)>;
inline double round_to_nearest(double steps, int64_t) { return std::nearbyint(steps); }
inline Round round_randomly(bool of_gate, int64_t first_position = 0) {
  return [=](double steps, int64_t position) {
    return std::floor(steps + screen_random(first_position + position, of_gate) * 0x1p-16);
  };
}
inline Round rounding_of(ScreenBound bound, bool of_gate) {
  return bound == ScreenBound::kStrict ? Round(round_to_nearest) : round_randomly(of_gate);
}

// Quantises a rotated row.
inline QuantisedRow quantised(std::vector<double> row, const Round& round) {
  double largest = 0.0;
  for (const double v : row) {
    if (std::isnan(v)) largest = v;
    if (!std::isnan(largest)) largest = std::max(largest, std::fabs(v));
  }
  QuantisedRow out;
  out.values.resize(row.size());
  if (largest == 0.0) {
    out.kind = QuantisedRow::kZero;
  } else if (rotation_takes(static_cast<float>(largest))) {
    out.kind = QuantisedRow::kTaken;
    for (size_t i = 0; i < row.size(); ++i) {
      row[i] = row[i] / largest * 127.0;
      out.values[i] = static_cast<int8_t>(round(row[i], static_cast<int64_t>(i)));
    }
    out.steps = std::move(row);
    return out;
  }
  out.steps.resize(row.size());
  return out;
}

// The exact bounds, before they are rounded up to integers.
struct ExactBound {
  double base, slope;
};
inline ExactBound exact_token_bound(const QuantisedRow& x, ScreenBound bound, double rounding) {
  const auto width = std::ssize(x.values);
  const double unit = std::ldexp(1.0, screen_shift(width)), norm = x.norm();
  if (bound == ScreenBound::kStrict) return {unit * norm * rounding, 2 * unit * x.error()};
  const double root = std::sqrt(static_cast<double>(width)), all = norm + root;
  const double typical = kScreenTypical * root, middle = std::hypot(all, typical);
  const double half = kScreenDeviations / 2.0, sums = screen_sum_error(width) * norm;
  return {unit * (half * (middle / 2 + all * all / (2 * middle)) + sums * typical / 2),
          unit * kScreenSquares * static_cast<double>(width) *
              (half / (2 * middle) + sums / (2 * typical))};
}
inline TokenBound token_bound(const QuantisedRow& x, ScreenBound bound, double rounding) {
  if (x.kind == QuantisedRow::kZero) return {-kScreenMostSpread - 1, 1};
  if (x.kind == QuantisedRow::kRefused) return {kScreenMostBase, 0};
  const ExactBound exact = exact_token_bound(x, bound, rounding);
  return {static_cast<int32_t>(std::ceil(exact.base)),
          static_cast<int32_t>(std::ceil(exact.slope))};
}

inline double exact_gate_error(const QuantisedRow& w) {
  return w.error() + double{screen_sum_error(std::ssize(w.values))} * w.norm();
}
inline double exact_spread(const QuantisedRow& w, ScreenBound bound) {
  return bound == ScreenBound::kStrict
             ? w.size() / 2
             : w.norm() * w.norm() / (kScreenSquares * static_cast<double>(w.values.size()));
}
inline int32_t gate_spread(const QuantisedRow& w, ScreenBound bound) {
  if (w.kind == QuantisedRow::kRefused) return kScreenAlways;
  return static_cast<int32_t>(std::ceil(exact_spread(w, bound)));
}

inline int32_t product(const int8_t* x, const int8_t* w, int64_t width) {
  int32_t sum = 0;
  for (int64_t i = 0; i < width; ++i) sum += int32_t{x[i]} * w[i];
  return sum;
}
// What a kernel computes, in 32 bits: n is a candidate if it is 0 or above.
inline int32_t screen(const int8_t* x, const TokenBound& bound, const int8_t* w, int32_t spread,
                      int64_t width) {
  return (product(x, w, width) << screen_shift(width)) + (bound.base + bound.slope * spread);
}

// A screened gate and rows of tokens, as the device has them.
struct Gate {
  std::vector<int8_t> values;
  std::vector<int32_t> spread;
  double rounding = 0.0;
};
struct Rows {
  std::vector<int8_t> values;
  std::vector<TokenBound> bounds;
};
inline Gate make_gate(const std::vector<BF16>& weights, int64_t width, ScreenBound bound) {
  Gate gate;
  for (int64_t at = 0; at < std::ssize(weights); at += width) {
    const QuantisedRow row =
        quantised(rotated(weights.data() + at, width), rounding_of(bound, true));
    gate.values.insert(gate.values.end(), row.values.begin(), row.values.end());
    gate.spread.push_back(gate_spread(row, bound));
    gate.rounding = std::max(gate.rounding, exact_gate_error(row));
  }
  return gate;
}
inline Rows make_rows(const std::vector<BF16>& x, int64_t width, ScreenBound bound,
                      double rounding) {
  Rows rows;
  for (int64_t at = 0; at < std::ssize(x); at += width) {
    const QuantisedRow row = quantised(rotated(x.data() + at, width), rounding_of(bound, false));
    rows.values.insert(rows.values.end(), row.values.begin(), row.values.end());
    rows.bounds.push_back(token_bound(row, bound, rounding));
  }
  return rows;
}
inline bool is_candidate(const Gate& gate, int64_t n, const Rows& rows, int64_t t, int64_t width) {
  return screen(rows.values.data() + t * width, rows.bounds[static_cast<size_t>(t)],
                gate.values.data() + n * width, gate.spread[static_cast<size_t>(n)], width) >= 0;
}

// Whether the gate of bf16 rows fires; a NaN does.
inline bool fires(const BF16* x, const BF16* w, int64_t width) {
  double sum = 0.0;
  for (int64_t i = 0; i < width; ++i) sum += double{to_float(x[i])} * to_float(w[i]);
  return !(sum <= 0.0);
}

// Row `kind` of rows that are hard to screen; kinds past kHardKinds repeat with other numbers.
inline constexpr int kHardKinds = 14;
inline std::vector<BF16> hard_row(int64_t kind, int64_t width, uint64_t seed) {
  const auto random = [&](int64_t i) {
    return normal(seed, static_cast<uint64_t>(kind), static_cast<uint64_t>(i));
  };
  const auto value = [&](int64_t i) -> float {
    const int64_t special = (kind * 7 + 3) % width;
    switch (kind % kHardKinds) {
      case 1:
        return i % 5 == 2 ? 300.0f * random(i / 5 * 5 % 64) : random(i);  // outlier columns
      case 2:
        return kind / kHardKinds % 2 == 0 ? 0.3f : -0.3f;  // equal columns
      case 3:
        return i % 2 == 0 ? 0.0f : -0.0f;
      case 4:
        return i == special ? -2.5f : 0.0f;  // all rotated values are +-127 steps
      case 5:
        return random(i) * 1e-39f;  // subnormal
      case 6:
        return i == special ? std::numeric_limits<float>::infinity() : random(i);
      case 7:
        return i == special ? std::numeric_limits<float>::quiet_NaN() : random(i);
      case 8:
        return i % 2 == 0 ? 3e38f : random(i);  // rotated sums overflow
      case 9:
        return random(i) * 1e-7f;
      case 10:
        return i < width / 2 ? random(i) : 0.0f;
      case 11:
        return i == special ? 1000.0f : random(i) * 1e-3f;
      case 12:
        return random(i) > 0.0f ? 1.0f : -1.0f;
      case 13:
        return i == special ? -std::numeric_limits<float>::infinity() : 0.0f;
      default:
        return random(i);
    }
  };
  std::vector<BF16> row;
  for (int64_t i = 0; i < width; ++i) row.push_back(to_bf16(value(i)));
  return row;
}
inline std::vector<BF16> hard_rows(int64_t rows, int64_t width, uint64_t seed) {
  std::vector<BF16> out;
  for (int64_t r = 0; r < rows; ++r) {
    const std::vector<BF16> row = hard_row(r, width, seed);
    out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}

// A row x whose product with w is barely above 0 and whose screen is as far off as rounding of w
// can make it: x points along the part of w that its values leave out, less what it shares with w.
inline std::vector<BF16> misleading_row(const std::vector<BF16>& w, ScreenBound bound) {
  const auto width = std::ssize(w);
  const QuantisedRow row = quantised(rotated(w.data(), width), rounding_of(bound, true));
  // The transform is its own inverse but for a factor, and signs come last.
  std::vector<double> values(row.steps.size());
  for (int64_t c = 0; c < width; ++c) {
    const auto p = static_cast<size_t>(rotated_position(c, width));
    values[static_cast<size_t>(c)] = row.steps[p] - row.values[p];
  }
  transform_blocks(values);
  double shared = 0.0, squares = 0.0;
  for (size_t i = 0; i < values.size(); ++i) {
    if (rotation_negates(static_cast<int64_t>(i))) values[i] = -values[i];
    const double weight = to_float(w[i]);
    shared += values[i] * weight;
    squares += weight * weight;
  }
  std::vector<BF16> x;
  for (size_t i = 0; i < values.size(); ++i) {
    const double aligned =
        (shared / squares - 1e-3 * norm_of(values) / std::sqrt(squares)) * double{to_float(w[i])};
    x.push_back(to_bf16(static_cast<float>((values[i] - aligned) / norm_of(values))));
  }
  return x;
}

}  // namespace twell::rotated_screen_testing
