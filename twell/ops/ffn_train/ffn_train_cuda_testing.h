// SPDX-License-Identifier: Apache-2.0
// For tests: one feed-forward layer in training on the GPU, beside the scalar reference.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "twell/base/cuda_testing.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/ffn_train/ffn_train_cuda.h"
#include "twell/ops/ffn_train/ffn_train_reference.h"

namespace twell::reference {

// A problem in bf16 values in which token m has exactly row_nnz(m) < 16,384 active neurons. Numbers
// in two digits of base 128 are exact in bf16: the gate of a neuron is (row_nnz - rank - 0.5) / 64.
inline Problem make_bf16_problem(int64_t tokens, int64_t width, int64_t ffn, bool gated,
                                 const std::function<int64_t(int64_t)>& row_nnz) {
  Problem p = {.tokens = tokens, .width = width, .ffn = ffn, .gated = gated};
  const auto fill = [](std::vector<double>& v, int64_t n, uint64_t stream, float scale) {
    const auto floats = to_floats(random_bf16(n, stream, scale));
    v.assign(floats.begin(), floats.end());
  };
  fill(p.x, tokens * width, 0, 1.0f);
  fill(p.d_y, tokens * width, 1, 1.0f);
  fill(p.w_up, ffn * width, 2, 0.3f);
  fill(p.w_down, ffn * width, 3, 0.3f);
  std::vector<double>& firing = gated ? p.w_gate : p.w_up;
  firing.assign(static_cast<size_t>(ffn * width), 0.0);
  for (int64_t m = 0; m < tokens; ++m) {
    const int64_t n = row_nnz(m);
    const double digits[4] = {1.0, 1.0, static_cast<double>(n / 128), static_cast<double>(n % 128)};
    for (int64_t k = 0; k < 4; ++k) p.x[at(m, width, k)] = digits[k];
  }
  // A multiplier that shares no factor with F permutes the ranks.
  int64_t step = ffn / 3 + 1;
  while (std::gcd(step, ffn) != 1) ++step;
  for (int64_t j = 0; j < ffn; ++j) {
    const int64_t rank = j * step % ffn;
    const double factors[4] = {-128.0 * static_cast<double>(rank / 128),
                               -static_cast<double>(rank % 128) - 0.5, 128.0, 1.0};
    for (int64_t k = 0; k < 4; ++k) firing[at(j, width, k)] = factors[k] / 64.0;
  }
  return p;
}

}  // namespace twell::reference

namespace twell {

inline std::vector<__nv_bfloat16> to_bf16_values(const std::vector<double>& values) {
  std::vector<__nv_bfloat16> out;
  for (const double value : values) out.push_back(__double2bfloat16(value));
  return out;
}

// What a forward and a backward pass leave.
struct LayerResult {
  std::vector<float> y, d_x, d_w_gate, d_w_up, d_w_down;
  std::vector<uint8_t> active;
  FfnTrainCountsCuda counts;
  bool operator==(const LayerResult& other) const {
    return y == other.y && d_x == other.d_x && d_w_gate == other.d_w_gate &&
           d_w_up == other.d_w_up && d_w_down == other.d_w_down && active == other.active &&
           counts.l1_sum == other.counts.l1_sum;
  }
};

// One layer on the device, outputs poisoned, gradients added to kStart or written.
struct LayerCuda {
  static constexpr float kStart = 0.25f;

  LayerCuda(CudaContext& ctx_in, const reference::Problem& problem_in)
      : ctx(ctx_in),
        problem(problem_in),
        shape{problem.tokens, problem.width, problem.ffn, problem.gated},
        x(upload(to_bf16_values(problem.x))),
        d_y(upload(to_bf16_values(problem.d_y))),
        w_gate(upload(to_bf16_values(problem.w_gate))),
        w_up(upload(to_bf16_values(problem.w_up))),
        w_down(upload(to_bf16_values(problem.w_down))),
        l1_scale(upload(std::vector<float>{static_cast<float>(problem.l1_scale)})),
        saved(ctx, shape),
        workspace(ctx, shape) {
    reset();
  }

  void reset() {
    const std::vector<float> start(problem.w_up.size(), add ? kStart : std::nanf(""));
    y = poisoned<__nv_bfloat16>(x.size());
    d_x = poisoned<__nv_bfloat16>(x.size());
    d_w_gate = upload(problem.gated ? start : std::vector<float>());
    d_w_up = upload(start);
    d_w_down = upload(start);
    active = upload(std::vector<uint8_t>(static_cast<size_t>(problem.ffn)));
    counts = upload(std::vector<FfnTrainCountsCuda>(1));
  }
  FfnTrainForwardCuda forward() const {
    return {.tokens = problem.tokens,
            .weights = {w_gate.data(), w_up.data(), w_down.data()},
            .x = x.data(),
            .y = y.data(),
            .counts = counts.data(),
            .active = active.data()};
  }
  FfnTrainBackwardCuda backward() const {
    return {.tokens = problem.tokens,
            .weights = {w_gate.data(), w_up.data(), w_down.data()},
            .x = x.data(),
            .d_y = d_y.data(),
            .l1_scale = l1_scale.data(),
            .d_x = d_x.data(),
            .grads = {d_w_gate.data(), d_w_up.data(), d_w_down.data(), add}};
  }
  void enqueue() {
    ffn_train_forward_cuda(ctx, forward(), saved, workspace);
    ffn_train_backward_cuda(ctx, backward(), saved, workspace);
  }
  LayerResult result() const {
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
    return {to_floats(download(y)), to_floats(download(d_x)), download(d_w_gate), download(d_w_up),
            download(d_w_down),     download(active),         download(counts)[0]};
  }
  LayerResult run(FfnTrainExecution execution, double nnz, double union_neurons = -1.0) {
    reset();
    saved.prepare(ctx, execution, nnz, union_neurons);
    enqueue();
    return result();
  }

  CudaContext& ctx;
  reference::Problem problem;
  FfnTrainShapeCuda shape;
  bool add = true;
  DeviceBuffer<__nv_bfloat16> x, d_y, w_gate, w_up, w_down;
  DeviceBuffer<float> l1_scale;
  FfnSavedCuda saved;
  FfnTrainWorkspaceCuda workspace;
  DeviceBuffer<__nv_bfloat16> y, d_x;
  DeviceBuffer<float> d_w_gate, d_w_up, d_w_down;
  DeviceBuffer<uint8_t> active;
  DeviceBuffer<FfnTrainCountsCuda> counts;
};

// Every value is a sum of products whose factors were rounded to bf16 a few times on the way, by
// 2^-9 of their size each; d_x of a gated layer is rounded between its two products. f32 sums of n
// terms are far below.
inline void expect_near(const std::vector<float>& actual,
                        const std::vector<reference::Tracked>& expected, double start,
                        const std::string& name) {
  ASSERT_EQ(actual.size(), expected.size()) << name;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double want = expected[i].value + start;
    const double bound = std::ldexp(6.0, -9) * expected[i].magnitude + std::ldexp(1.0, -20) * start;
    // Negated, so that NaN fails; the first failure says enough.
    if (!(std::abs(static_cast<double>(actual[i]) - want) <= bound)) {
      FAIL() << name << "[" << i << "] is " << actual[i] << ", expected " << want << " +- "
             << bound;
    }
  }
}

inline void expect_matches(const LayerResult& got, const reference::Problem& p,
                           const reference::Result& expected, double start = LayerCuda::kStart) {
  expect_near(got.y, expected.y, 0, "y");
  expect_near(got.d_x, expected.d_x, 0, "d_x");
  expect_near(got.d_w_gate, expected.d_w_gate, start, "d_w_gate");
  expect_near(got.d_w_up, expected.d_w_up, start, "d_w_up");
  expect_near(got.d_w_down, expected.d_w_down, start, "d_w_down");
  EXPECT_EQ(got.active, expected.active);
  int64_t nnz = 0, most = 0;
  for (const int64_t n : expected.row_nnz) {
    nnz += n;
    most = std::max(most, n);
  }
  EXPECT_EQ(static_cast<int64_t>(got.counts.nnz), nnz);
  EXPECT_EQ(static_cast<int64_t>(got.counts.tokens), p.tokens);
  EXPECT_EQ(got.counts.max_row_nnz, most);
  EXPECT_NEAR(got.counts.l1_sum, expected.l1_sum.value,
              std::ldexp(4.0, -9) * expected.l1_sum.magnitude);
}

// ||actual - expected|| / ||expected||
inline double relative_error(const std::vector<float>& actual,
                             const std::vector<reference::Tracked>& expected, double start) {
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double d = static_cast<double>(actual[i]) - start - expected[i].value;
    difference += d * d;
    size += expected[i].value * expected[i].value;
  }
  return size > 0.0 ? std::sqrt(difference / size) : std::sqrt(difference);
}

}  // namespace twell
