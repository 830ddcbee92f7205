// SPDX-License-Identifier: Apache-2.0
// For tests: the training FFN as a scalar double program, with problems whose patterns are known.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "twell/base/rng.h"

namespace twell::reference {

// A value, and the sum of the magnitudes that made it: rounding errors are a multiple of the
// latter.
struct Tracked {
  double value = 0.0;
  double magnitude = 0.0;
};
inline Tracked tracked(double value) { return {value, std::abs(value)}; }
inline Tracked operator*(Tracked a, Tracked b) {
  return {a.value * b.value, a.magnitude * b.magnitude};
}
inline Tracked& operator+=(Tracked& a, Tracked b) {
  a.value += b.value;
  a.magnitude += b.magnitude;
  return a;
}

struct Problem {
  int64_t tokens, width, ffn;
  bool gated;
  std::vector<double> x, d_y;                // [M, D]
  std::vector<double> w_gate, w_up, w_down;  // [F, D]; w_gate empty when not gated
  double l1_scale = 0.0;
  bool squared = false;  // relu2 instead of ReLU
};

struct Result {
  std::vector<Tracked> y, d_x;                      // [M, D]
  std::vector<Tracked> d_w_gate, d_w_up, d_w_down;  // [F, D]
  Tracked l1_sum;
  std::vector<int64_t> row_nnz;  // [M]
  std::vector<uint8_t> active;   // [F]
};

inline size_t at(int64_t row, int64_t cols, int64_t col) {
  return static_cast<size_t>(row * cols + col);
}

inline Tracked dot(const std::vector<double>& a, int64_t a_row, const std::vector<double>& b,
                   int64_t b_row, int64_t n) {
  Tracked sum;
  for (int64_t k = 0; k < n; ++k) sum += tracked(a[at(a_row, n, k)]) * tracked(b[at(b_row, n, k)]);
  return sum;
}

// out[row] += factor * in[in_row]
inline void add_row(std::vector<Tracked>& out, int64_t row, Tracked factor,
                    const std::vector<double>& in, int64_t in_row, int64_t n) {
  for (int64_t k = 0; k < n; ++k) out[at(row, n, k)] += factor * tracked(in[at(in_row, n, k)]);
}

inline Result run(const Problem& p) {
  Result r;
  r.y.resize(p.x.size());
  r.d_x.resize(p.x.size());
  r.d_w_gate.resize(p.w_gate.size());
  r.d_w_up.resize(p.w_up.size());
  r.d_w_down.resize(p.w_down.size());
  r.row_nnz.resize(static_cast<size_t>(p.tokens));
  r.active.resize(static_cast<size_t>(p.ffn));
  const Tracked l1 = tracked(p.l1_scale);
  for (int64_t m = 0; m < p.tokens; ++m) {
    for (int64_t j = 0; j < p.ffn; ++j) {
      const Tracked g = dot(p.x, m, p.gated ? p.w_gate : p.w_up, j, p.width);
      if (g.value <= 0.0) continue;
      ++r.row_nnz[static_cast<size_t>(m)];
      r.active[static_cast<size_t>(j)] = 1;
      const Tracked u = p.gated ? dot(p.x, m, p.w_up, j, p.width) : tracked(1.0);
      const Tracked f = p.squared ? g * g : g;
      const Tracked h = f * u;
      const double sign = h.value > 0.0 ? 1.0 : (h.value < 0.0 ? -1.0 : 0.0);
      r.l1_sum += {std::abs(h.value), h.magnitude};
      add_row(r.y, m, h, p.w_down, j, p.width);
      Tracked d_h = dot(p.d_y, m, p.w_down, j, p.width);
      d_h += tracked(sign) * l1;
      add_row(r.d_w_down, j, h, p.d_y, m, p.width);
      const Tracked slope = p.squared ? tracked(2.0) * g : tracked(1.0);
      if (p.gated) {
        add_row(r.d_x, m, d_h * u * slope, p.w_gate, j, p.width);
        add_row(r.d_w_gate, j, d_h * u * slope, p.x, m, p.width);
      }
      const Tracked d_u = d_h * (p.gated ? f : slope);
      add_row(r.d_x, m, d_u, p.w_up, j, p.width);
      add_row(r.d_w_up, j, d_u, p.x, m, p.width);
    }
  }
  return r;
}

// What the gradients are gradients of.
inline double objective(const Problem& p) {
  const Result r = run(p);
  double sum = p.l1_scale * r.l1_sum.value;
  for (size_t i = 0; i < r.y.size(); ++i) sum += r.y[i].value * p.d_y[i];
  return sum;
}

// A problem in which token m has exactly row_nnz(m) active neurons, and never a gate close enough
// to zero for float and double to disagree: the firing projection works on multiples of 1/64.
// Column 0 of x is 1, column 1 the number of neurons to fire; neuron j has the threshold rank(j).
inline Problem make_problem(int64_t tokens, int64_t width, int64_t ffn, bool gated,
                            const std::function<int64_t(int64_t)>& row_nnz) {
  Problem p = {.tokens = tokens, .width = width, .ffn = ffn, .gated = gated};
  const auto fill = [](std::vector<double>& v, int64_t n, uint64_t stream, double scale) {
    v.resize(static_cast<size_t>(n));
    for (size_t i = 0; i < v.size(); ++i) {
      v[i] = static_cast<double>(static_cast<float>(scale * normal(11, stream, i)));
    }
  };
  fill(p.x, tokens * width, 0, 1.0);
  fill(p.d_y, tokens * width, 1, 1.0);
  fill(p.w_up, ffn * width, 2, 0.3);
  fill(p.w_down, ffn * width, 3, 0.3);
  std::vector<double>& firing = gated ? p.w_gate : p.w_up;
  firing.assign(static_cast<size_t>(ffn * width), 0.0);
  constexpr double kUnit = 1.0 / 64;
  for (int64_t m = 0; m < tokens; ++m) {
    p.x[at(m, width, 0)] = 1.0;
    p.x[at(m, width, 1)] = static_cast<double>(row_nnz(m));
  }
  // An odd multiplier that shares no factor with F permutes the thresholds.
  int64_t step = ffn / 3 + 1;
  while (std::gcd(step, ffn) != 1) ++step;
  for (int64_t j = 0; j < ffn; ++j) {
    const int64_t rank = j * step % ffn;
    firing[at(j, width, 0)] = -kUnit * (static_cast<double>(rank) + 0.5);
    firing[at(j, width, 1)] = kUnit;
  }
  return p;
}

}  // namespace twell::reference
