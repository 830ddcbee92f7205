// SPDX-License-Identifier: Apache-2.0
// Runs the GPU's feed-forward layer on random shapes, densities and policies and compares every row
// with the dense layer. A row that is further from it than a quick estimate of roundings is
// compared with its value without roundings (bench/ffn_row_bound.h): a row with an element beyond
// what they can do at most, of either side, is wrong, and one that is over 6 of their deviations
// away is unlikely. Exit code 1 when a row is wrong or unlikely.
//   ffn_random_cuda_bench [--seed S] [--count N] [--first K] [--verbose]
// A case is a function of the seed and its number alone: --first K --count 1 repeats one. Each case
// runs under all policies, auto also with the activity that it has measured. Mostly small shapes,
// up to 300 tokens; F any multiple of 8; densities from 0 to 100%, some rows dense or without any
// active neuron; with and without a gate, a preceding norm, counts per token, and adding to y.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "bench/ffn_row_bound.h"
#include "bench/harness_cuda.h"
#include "twell/base/cuda_testing.h"
#include "twell/base/error.h"
#include "twell/base/rng.h"
#include "twell/ops/ffn/ffn_cuda.h"
#include "twell/ops/rms_norm/rms_norm_cuda.h"

namespace twell {
namespace {

constexpr int64_t kPool = (int64_t{1} << 23) + 8;  // random values, in device memory
constexpr int64_t kMostTokens = 6000;
constexpr int64_t kMostWidth = 4096;
constexpr int64_t kMostFfn = 20480;
constexpr int64_t kMostWeights = int64_t{1} << 24;  // D F
constexpr int64_t kMostHidden = int64_t{1} << 26;   // M F
constexpr int64_t kGuard = 4096;                    // values behind y that must stay as they are
constexpr float kScale = 0.02f;                     // deviation of weights; that of x is 1
// Rows of a call that are compared with their value without roundings; more are taken as wrong.
constexpr int64_t kMostExamined = 64;
constexpr double kLikely = 6.0;  // deviations

using Values = DeviceBuffer<__nv_bfloat16>;

// Draws of one case.
class Draws {
 public:
  Draws(uint64_t seed, int64_t number) : seed_(seed), stream_(static_cast<uint64_t>(number)) {}
  double real() { return static_cast<double>(uniform(seed_, stream_, next_++)); }  // [0, 1)
  int64_t integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(real() * static_cast<double>(high - low + 1));
  }
  // Between the two, each order of magnitude equally often.
  double spread(double low, double high) { return low * std::pow(high / low, real()); }
  bool chance(double share) { return real() < share; }
  template <size_t N>
  int64_t one_of(const std::array<int64_t, N>& values) {
    return values[static_cast<size_t>(integer(0, N - 1))];
  }

 private:
  uint64_t seed_, stream_;
  uint64_t next_ = 0;
};

struct Case {
  int64_t tokens, width, ffn;
  double density;
  double heavy, silent;  // shares of rows that fire densely, or not at all
  bool gated, add, counts, norm, in_place;
};

Case draw(Draws& draws) {
  Case c{};
  const double kind = draws.real();
  if (kind < 0.25) {
    c.tokens = draws.one_of(
        std::array<int64_t, 16>{1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257});
  } else if (kind < 0.9) {
    c.tokens = draws.integer(1, draws.chance(0.5) ? 64 : 300);
  } else {
    c.tokens = draws.integer(301, draws.chance(0.8) ? 2000 : kMostTokens);
  }
  c.width = 8 * static_cast<int64_t>(draws.spread(1, draws.chance(0.8) ? 128 : kMostWidth / 8.0));
  const int64_t most = std::min({kMostFfn, kMostWeights / c.width, kMostHidden / c.tokens}) / 8;
  c.ffn = 8 * static_cast<int64_t>(draws.spread(
                  1, static_cast<double>(draws.chance(0.8) ? std::min<int64_t>(most, 256) : most)));
  const double density = draws.real();
  c.density = density < 0.05 ? 0.0 : density < 0.1 ? 1.0 : draws.spread(5e-4, 1.0);
  c.heavy = draws.chance(0.3) ? draws.real() * 0.2 : 0.0;
  c.silent = draws.chance(0.3) ? draws.real() : 0.0;
  c.gated = draws.chance(0.75);
  c.add = draws.chance(0.4);
  c.counts = draws.chance(0.3);
  c.norm = draws.chance(0.4);
  c.in_place = draws.chance(0.5);
  return c;
}

std::string text(const Case& c) {
  return fmt::format("M {} D {} F {} density {:.4f} heavy {:.2f} silent {:.2f}{}{}{}{}{}", c.tokens,
                     c.width, c.ffn, c.density, c.heavy, c.silent, c.gated ? " gated" : "",
                     c.add ? " add" : "", c.counts ? " counts" : "", c.norm ? " norm" : "",
                     c.in_place && c.norm && c.add ? " x=y" : "");
}

struct Summary {
  int64_t cases = 0, calls = 0, refused = 0, rows = 0;
  int64_t wrong_rows = 0, wrong_calls = 0;
  int64_t unlikely_rows = 0;
  int64_t examined_rows = 0;  // beyond the tolerance
  double furthest = 0.0;      // of them: deviations
  double worst = 0.0;         // of the others: error over the tolerance
  std::string worst_case;
  std::map<FfnExecution, int64_t> executions;
};

class Comparison {
 public:
  Comparison(CudaContext& ctx, uint64_t seed) : ctx_(ctx), seed_(seed) {
    std::vector<__nv_bfloat16> values(kPool);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = __float2bfloat16((uniform(seed, ~uint64_t{0}, i) - 0.5f) * std::sqrt(12.0f));
    }
    unit_ = upload(values);
    for (__nv_bfloat16& value : values) {
      value = __float2bfloat16(kScale * __bfloat162float(value));
    }
    small_ = upload(values);
    x_ = Values(kMostTokens * kMostWidth);
    normed_ = Values(kMostTokens * kMostWidth);
    y_ = Values(kMostTokens * kMostWidth + kGuard);
    want_ = Values(kMostTokens * kMostWidth);
    firing_ = Values(kMostWeights);
    other_ = Values(kMostWeights);
    down_ = Values(kMostWeights);
    gate_ = Values(kMostHidden);
    hidden_ = Values(kMostHidden);
    row_nnz_ = DeviceBuffer<int32_t>(kMostTokens);
  }

  void run(int64_t number, bool verbose, Summary& summary) {
    Draws draws(seed_, number);
    Case c = draw(draws);
    fill_operands(c, draws);
    FfnWorkspaceCuda workspace(ctx_, c.tokens, c.width, c.ffn, c.gated);
    c.norm = c.norm && !c.counts && gpu_ffn_takes_norm(workspace.layer(), c.tokens);
    c.in_place = c.in_place && c.norm && c.add;
    const Expected expected = dense(c);
    ++summary.cases;
    if (verbose) fmt::print("{}: {}\n", number, text(c));
    for (const FfnPolicy policy : {FfnPolicy::kAuto, FfnPolicy::kDense, FfnPolicy::kSparse,
                                   FfnPolicy::kRowFused, FfnPolicy::kTileUnion}) {
      FfnPlansCuda plans(ctx_, 1, c.ffn, policy);
      for (int repeat = 0; repeat < (policy == FfnPolicy::kAuto ? 2 : 1); ++repeat) {
        if (!takes(c, policy, workspace.layer())) {
          ++summary.refused;
          break;
        }
        call(c, plans[0], workspace);
        plans.update(ctx_);
        const std::string name = fmt::format("case {}: {}, {} as {}", number, text(c),
                                             ffn_policy_name(policy), plans[0].plan.execution.name);
        ++summary.executions[plans[0].plan.execution];
        compare(c, number, expected, name, summary);
      }
    }
  }

 private:
  struct Expected {
    std::vector<__nv_bfloat16> y;  // [M, D]
    std::vector<int32_t> row_nnz;  // [M]
  };

  // Whether the table has a launch for the call under this policy.
  static bool takes(const Case& c, FfnPolicy policy, const GpuFfnLayer& layer) {
    try {
      choose_gpu_ffn(
          layer, {.tokens = c.tokens, .policy = policy, .norm = c.norm, .counts_rows = c.counts},
          {});
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  // Copies `count` values of a pool from a drawn place on, again and again.
  void fill(const Values& pool, int64_t first, __nv_bfloat16* to, int64_t count) {
    for (int64_t done = 0; done < count;) {
      const int64_t step = std::min(count - done, kPool - first);
      TWELL_CUDA_CHECK(cudaMemcpyAsync(to + done, pool.data() + first,
                                       static_cast<size_t>(step) * 2, cudaMemcpyDeviceToDevice,
                                       ctx_.stream()));
      done += step;
      first = 1;  // so that rows further on differ
    }
  }

  void set_first_column(const std::vector<__nv_bfloat16>& values, __nv_bfloat16* matrix,
                        int64_t width) {
    TWELL_CUDA_CHECK(cudaMemcpy2DAsync(matrix, static_cast<size_t>(width) * 2, values.data(), 2, 2,
                                       values.size(), cudaMemcpyHostToDevice, ctx_.stream()));
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
  }

  // The first column of x times that of the weight which decides is a bias: 1 in x gives the case's
  // density, -1 a row that fires densely, and a large value one that does not fire.
  void fill_operands(const Case& c, Draws& draws) {
    const int64_t weights = c.width * c.ffn;
    fill(unit_, draws.integer(0, kPool - 1), x_.data(), c.tokens * c.width);
    fill(small_, draws.integer(0, kPool - 1), firing_.data(), weights);
    fill(small_, draws.integer(0, kPool - 1), other_.data(), weights);
    fill(small_, draws.integer(0, kPool - 1), down_.data(), weights);
    const float spread = kScale * std::sqrt(static_cast<float>(c.width));
    float bias = 0.0f;
    if (c.density <= 0.0) {
      bias = -20.0f * spread;
    } else if (c.density >= 1.0) {
      bias = 20.0f * spread;
    } else {
      bias = gate_bias(c.density * static_cast<double>(c.ffn), c.ffn, c.width);
    }
    std::vector<__nv_bfloat16> column(static_cast<size_t>(c.tokens));
    for (__nv_bfloat16& value : column) {
      const double kind = draws.real();
      float factor = 1.0f;
      if (kind < c.heavy) {
        factor = -1.0f;
      } else if (kind < c.heavy + c.silent) {
        factor = bias == 0.0f ? 1.0f : -20.0f * spread / bias;
      }
      value = __float2bfloat16(factor);
    }
    set_first_column(column, x_.data(), c.width);
    column.assign(static_cast<size_t>(c.ffn), __float2bfloat16(bias));
    set_first_column(column, firing_.data(), c.width);
  }

  FfnWeightsCuda weights(const Case& c) const {
    if (!c.gated) return {nullptr, firing_.data(), down_.data()};
    return {firing_.data(), other_.data(), down_.data()};
  }

  // What y holds before the call: values to add to, or NaN; NaN behind it.
  void prepare(const Case& c, Values& y, bool guard) {
    const int64_t size = c.tokens * c.width;
    if (c.in_place) {
      copy(x_, y, size);
    } else if (c.add) {
      fill(unit_, 5, y.data(), size);
    } else {
      TWELL_CUDA_CHECK(
          cudaMemsetAsync(y.data(), 0xff, static_cast<size_t>(size) * 2, ctx_.stream()));
    }
    if (!guard) return;
    TWELL_CUDA_CHECK(cudaMemsetAsync(y.data() + size, 0xff, kGuard * 2, ctx_.stream()));
  }

  void copy(const Values& from, Values& to, int64_t count) {
    TWELL_CUDA_CHECK(cudaMemcpyAsync(to.data(), from.data(), static_cast<size_t>(count) * 2,
                                     cudaMemcpyDeviceToDevice, ctx_.stream()));
  }

  template <typename T>
  std::vector<T> fetch(const DeviceBuffer<T>& from, int64_t count) {
    std::vector<T> out(static_cast<size_t>(count));
    TWELL_CUDA_CHECK(cudaMemcpyAsync(out.data(), from.data(), out.size() * sizeof(T),
                                     cudaMemcpyDeviceToHost, ctx_.stream()));
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
    return out;
  }

  // The norm by its own kernel, then cuBLASLt.
  Expected dense(const Case& c) {
    prepare(c, want_, false);
    const __nv_bfloat16* x = x_.data();
    if (c.norm) {
      TWELL_CUDA_CHECK(launch_rms_norm({.tokens = c.tokens,
                                        .width = c.width,
                                        .x = x,
                                        .weight = unit_.data(),
                                        .y = normed_.data()},
                                       ctx_.stream()));
      x = normed_.data();
    }
    const DenseFfnCuda layer(ctx_, c.tokens, c.width, c.ffn, c.gated, gate_.data(), hidden_.data(),
                             Activation::kRelu, c.add);
    layer.forward(ctx_, weights(c), x, want_.data(), {.row_nnz = row_nnz_.data()});
    return {fetch(want_, c.tokens * c.width), fetch(row_nnz_, c.tokens)};
  }

  void call(const Case& c, FfnPlanCuda& plan, FfnWorkspaceCuda& workspace) {
    prepare(c, y_, true);
    ffn_forward_cuda(ctx_,
                     {.tokens = c.tokens,
                      .weights = weights(c),
                      .x = c.in_place ? y_.data() : x_.data(),
                      .y = y_.data(),
                      .row_nnz = c.counts ? row_nnz_.data() : nullptr,
                      .norm = c.norm ? unit_.data() : nullptr,
                      .add = c.add},
                     plan, workspace);
  }

  // Weights of a case, once a row of it is compared with its bound.
  struct HostWeights {
    int64_t number = -1;
    std::vector<__nv_bfloat16> firing, other, down, norm;
  };

  static const BF16* bits(const std::vector<__nv_bfloat16>& values, int64_t from = 0) {
    return reinterpret_cast<const BF16*>(values.data() + from);
  }

  FfnRowBound bound_of(const Case& c, int64_t number, int64_t row) {
    if (host_.number != number) {
      host_ = {number, fetch(firing_, c.width * c.ffn), fetch(other_, c.width * c.ffn),
               fetch(down_, c.width * c.ffn), fetch(unit_, c.width)};
    }
    // What y holds before the call; the case's own results are on the host already.
    prepare(c, want_, false);
    const auto fetch_row = [&](const Values& from) {
      std::vector<__nv_bfloat16> out(static_cast<size_t>(c.width));
      TWELL_CUDA_CHECK(cudaMemcpyAsync(out.data(), from.data() + row * c.width, out.size() * 2,
                                       cudaMemcpyDeviceToHost, ctx_.stream()));
      TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
      return out;
    };
    const std::vector<__nv_bfloat16> x = fetch_row(x_), residual = fetch_row(want_);
    return ffn_row_bound({.width = c.width,
                          .ffn = c.ffn,
                          .x = bits(x),
                          .norm = c.norm ? bits(host_.norm) : nullptr,
                          .w_gate = c.gated ? bits(host_.firing) : nullptr,
                          .w_up = bits(c.gated ? host_.other : host_.firing),
                          .w_down = bits(host_.down),
                          .residual = c.add ? bits(residual) : nullptr});
  }

  // The tolerance is a quick estimate of what roundings do: those of g, u, h and y to bf16, by 2^-9
  // of the value on average, on both sides. Errors of a row's elements are independent but for
  // those of g, u and h of a row with few active neurons. Where signs of g near zero differ, a
  // fraction of one neuron's contribution is added: of the size of f32 rounding, or, behind a norm
  // that is rounded in one place and not in the other, of bf16's. Rows whose contributions nearly
  // cancel exceed it, and so do a few of ten million with one active neuron.
  void compare(const Case& c, int64_t number, const Expected& expected, const std::string& name,
               Summary& summary) {
    const std::vector<__nv_bfloat16> got = fetch(y_, c.tokens * c.width + kGuard);
    std::vector<int32_t> counts;
    if (c.counts) counts = fetch(row_nnz_, c.tokens);
    const double d = static_cast<double>(c.width), f = static_cast<double>(c.ffn);
    const double product = static_cast<double>(kScale) * std::sqrt(d);
    const double neuron = product * (c.gated ? product : 1.0) * product;
    const double floor = std::ldexp(neuron, -9) * (c.norm ? 2.0 * std::sqrt(1.0 + f / 256.0) : 1.0);
    int64_t wrong = 0, beyond = 0;
    for (int64_t row = 0; row < c.tokens; ++row) {
      double difference = 0.0, size = 0.0;
      for (int64_t i = row * c.width; i < (row + 1) * c.width; ++i) {
        const double want = __bfloat162float(expected.y[static_cast<size_t>(i)]);
        const double delta = __bfloat162float(got[static_cast<size_t>(i)]) - want;
        difference += delta * delta;
        size += want * want;
      }
      const int32_t dense_count = expected.row_nnz[static_cast<size_t>(row)];
      const int32_t count = c.counts ? counts[static_cast<size_t>(row)] : dense_count;
      const double active = std::max<double>(1.0, dense_count);
      const double share = std::ldexp(1.0 + 1.0 / std::sqrt(active) + std::sqrt(8.0 / d), -7);
      const double error = std::sqrt(difference) / (share * std::sqrt(size) + floor);
      const bool likely = error <= 1.0 && std::abs(count - dense_count) <= 2 + c.ffn / 256;
      if (likely) {  // false for NaN
        if (error > summary.worst) {
          summary.worst = error;
          summary.worst_case = name;
        }
        continue;
      }
      if (++beyond > kMostExamined) {
        ++wrong;
        continue;
      }
      const FfnRowBound bound = bound_of(c, number, row);
      const double of_got = bound.worst(bits(got, row * c.width));
      const double of_dense = bound.worst(bits(expected.y, row * c.width));
      const double furthest = std::max(bound.distance(bits(got, row * c.width)),
                                       bound.distance(bits(expected.y, row * c.width)));
      const bool right = of_got <= 1.0 && of_dense <= 1.0 && count >= bound.least_active &&
                         count <= bound.most_active;
      ++summary.examined_rows;
      summary.furthest = std::max(summary.furthest, furthest);  // the bound finds NaN
      wrong += !right;
      if (right && furthest <= kLikely) continue;
      summary.unlikely_rows += right;
      fmt::print(
          "{} {}: row {}, {:.3g} deviations; of the bound {:.3g}, dense {:.3g}; {} neurons active, "
          "dense {}, possible {} to {}; |y| {:.4g}, difference {:.4g}\n",
          right ? "unlikely" : "WRONG", name, row, furthest, of_got, of_dense, count, dense_count,
          bound.least_active, bound.most_active, std::sqrt(size), std::sqrt(difference));
    }
    int64_t outside = 0;
    for (size_t i = static_cast<size_t>(c.tokens * c.width); i < got.size(); ++i) {
      uint16_t value;
      std::memcpy(&value, &got[i], sizeof(value));
      outside += value != 0xffff;
    }
    ++summary.calls;
    summary.rows += c.tokens;
    summary.wrong_rows += wrong;
    if (wrong == 0 && outside == 0) return;
    ++summary.wrong_calls;
    fmt::print("WRONG {}: {} of {} rows, {} values behind y written\n", name, wrong, c.tokens,
               outside);
    std::fflush(stdout);
  }

  CudaContext& ctx_;
  uint64_t seed_;
  Values unit_, small_, x_, normed_, y_, want_, firing_, other_, down_, gate_, hidden_;
  DeviceBuffer<int32_t> row_nnz_;
  HostWeights host_;
};

struct Options {
  uint64_t seed = 1;
  int64_t count = 10000;
  int64_t first = 0;
  bool verbose = false;
};

int64_t run(const Options& options) {
  const CudaStream stream;
  CudaContext ctx(stream.get());
  Comparison comparison(ctx, options.seed);
  Summary summary;
  for (int64_t i = 0; i < options.count; ++i) {
    comparison.run(options.first + i, options.verbose, summary);
  }
  fmt::print("{}: seed {}, cases {} to {}: {} calls, {} refused, {} rows\n", ctx.device_name(),
             options.seed, options.first, options.first + options.count - 1, summary.calls,
             summary.refused, summary.rows);
  for (const auto& [execution, calls] : summary.executions) {
    fmt::print("  {}: {} calls\n", execution.name, calls);
  }
  fmt::print(
      "wrong rows: {} in {} calls\nunlikely rows: {}\nrows beyond the quick estimate: {}, {:.2f} "
      "deviations at most\nworst other row: {:.3f} of the estimate ({})\n",
      summary.wrong_rows, summary.wrong_calls, summary.unlikely_rows, summary.examined_rows,
      summary.furthest, summary.worst, summary.worst_case);
  return summary.wrong_calls + summary.unlikely_rows;
}

}  // namespace
}  // namespace twell

int main(int argc, char** argv) {
  twell::Options options;
  CLI::App app("The GPU's feed-forward layer on random shapes against the dense layer.");
  app.add_option("--seed", options.seed, "of all draws")->capture_default_str();
  app.add_option("--count", options.count, "cases")->capture_default_str();
  app.add_option("--first", options.first, "number of the first case")->capture_default_str();
  app.add_flag("--verbose", options.verbose, "print every case");
  CLI11_PARSE(app, argc, argv);
  int64_t wrong = 0;
  const int code =
      twell::run_benchmark("ffn_random_cuda_bench", [&] { wrong = twell::run(options); });
  return code != 0 ? code : wrong != 0;
}
