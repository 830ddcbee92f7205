// SPDX-License-Identifier: Apache-2.0
// For tests: the training FFN as a scalar double program, with problems whose patterns are known.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "twell/base/rng.h"
#include "twell/format/activation.h"

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
  BlendedActivation f = {};
  std::vector<double> b_gate = {}, b_up = {}, b_down = {};  // [F], [F], [D], or all empty
};

struct Result {
  std::vector<Tracked> y, d_x;                      // [M, D]
  std::vector<Tracked> d_w_gate, d_w_up, d_w_down;  // [F, D]
  std::vector<Tracked> d_b_gate, d_b_up, d_b_down;  // as the biases
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

// The smooth part of a blend, and its slope.
inline void smooth(Activation kind, double x, double& value, double& slope) {
  const double kA = 1.5957691216057308, kB = 0.044715 * kA;  // 2 sqrt(2 / pi)
  if (kind == Activation::kGelu) {
    const double s = 0.5 * std::erfc(-x / std::sqrt(2.0));
    value = x * s;
    slope = s + x * std::exp(-0.5 * x * x) / std::sqrt(2.0 * std::acos(-1.0));
    return;
  }
  const bool tanh = kind == Activation::kGeluTanh;
  const double scale = kind == Activation::kQuickGelu ? 1.702 : 1.0;
  const double z = tanh ? x * (kA + kB * x * x) : scale * x;
  const double s = 1.0 / (1.0 + std::exp(-z));
  value = x * s;
  slope = s + x * s * (1.0 - s) * (tanh ? kA + 3.0 * kB * x * x : scale);
}

// f(g) and f'(g). The second derivatives of the smooth ones stay below 1, and the first below 1.2.
inline void activate(const BlendedActivation& f, Tracked g, Tracked& value, Tracked& slope,
                     bool& active) {
  if (f.leaves_zeros()) {
    active = !(g.value <= static_cast<double>(f.zero_up_to()));
    if (!active) g = {};
    value = f.is_relu2() ? g * g : g;
    slope = f.is_relu2() ? tracked(2.0) * g : tracked(active ? 1.0 : 0.0);
    return;
  }
  const double share = static_cast<double>(f.relu_share);
  double v = 0.0, s = 0.0;
  smooth(f.kind, g.value, v, s);
  const bool fires = g.value > 0.0;
  active = share > 0.0 ? fires : v != 0.0;
  v = (1.0 - share) * v + (fires ? share * g.value : 0.0);
  s = (1.0 - share) * s + (fires ? share : 0.0);
  value = {v, 1.2 * g.magnitude};
  slope = {s, std::abs(s) + g.magnitude};
}

inline Result run(const Problem& p) {
  Result r;
  r.d_b_gate.resize(p.b_gate.size());
  r.d_b_up.resize(p.b_up.size());
  r.d_b_down.resize(p.b_down.size());
  r.y.resize(p.x.size());
  r.d_x.resize(p.x.size());
  r.d_w_gate.resize(p.w_gate.size());
  r.d_w_up.resize(p.w_up.size());
  r.d_w_down.resize(p.w_down.size());
  r.row_nnz.resize(static_cast<size_t>(p.tokens));
  r.active.resize(static_cast<size_t>(p.ffn));
  const Tracked l1 = tracked(p.l1_scale);
  const auto biased = [](Tracked value, const std::vector<double>& bias, int64_t j) {
    if (!bias.empty()) value += tracked(bias[static_cast<size_t>(j)]);
    return value;
  };
  for (int64_t m = 0; m < p.tokens; ++m) {
    for (int64_t d = 0; d < p.width && !p.b_down.empty(); ++d) {
      r.y[at(m, p.width, d)] += tracked(p.b_down[static_cast<size_t>(d)]);
      r.d_b_down[static_cast<size_t>(d)] += tracked(p.d_y[at(m, p.width, d)]);
    }
    for (int64_t j = 0; j < p.ffn; ++j) {
      const Tracked g = biased(dot(p.x, m, p.gated ? p.w_gate : p.w_up, j, p.width),
                               p.gated ? p.b_gate : p.b_up, j);
      Tracked f, slope;
      bool active = false;
      activate(p.f, g, f, slope, active);
      if (active) {
        ++r.row_nnz[static_cast<size_t>(m)];
        r.active[static_cast<size_t>(j)] = 1;
      } else if (p.f.leaves_zeros()) {
        continue;
      }
      Tracked u = p.gated ? biased(dot(p.x, m, p.w_up, j, p.width), p.b_up, j) : tracked(1.0);
      const bool passes = !p.f.is_drelu() || u.value > 0.0;  // through the ReLU of u
      if (!passes) u.value = 0.0;
      const Tracked h = f * u;
      const double sign = h.value > 0.0 ? 1.0 : (h.value < 0.0 ? -1.0 : 0.0);
      r.l1_sum += {std::abs(h.value), h.magnitude};
      add_row(r.y, m, h, p.w_down, j, p.width);
      Tracked d_h = dot(p.d_y, m, p.w_down, j, p.width);
      d_h += tracked(sign) * l1;
      add_row(r.d_w_down, j, h, p.d_y, m, p.width);
      if (p.gated) {
        add_row(r.d_x, m, d_h * u * slope, p.w_gate, j, p.width);
        add_row(r.d_w_gate, j, d_h * u * slope, p.x, m, p.width);
        if (!p.b_gate.empty()) r.d_b_gate[static_cast<size_t>(j)] += d_h * u * slope;
      }
      if (!passes) continue;
      const Tracked d_u = d_h * (p.gated ? f : slope);
      if (!p.b_up.empty()) r.d_b_up[static_cast<size_t>(j)] += d_u;
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
