// SPDX-License-Identifier: Apache-2.0
#include "bench/ffn_sweep_cuda.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>

#include "bench/harness_cuda.h"
#include "twell/base/cuda_testing.h"
#include "twell/base/rng.h"
#include "twell/ops/matmul/matmul_cuda.h"

namespace twell {
namespace {

constexpr int64_t kWeightBytes = int64_t{200} << 20;  // all copies together; several times the L2
constexpr int64_t kShortCalls = 8;                  // calls per measurement for up to 1,024 tokens
constexpr int64_t kCopies = 16;                     // most copies of the weights
constexpr int64_t kBlock = (int64_t{1} << 22) + 3;  // random values drawn on the host
constexpr float kScale = 0.02f;

using Values = DeviceBuffer<__nv_bfloat16>;

std::vector<__nv_bfloat16> random_block(uint64_t seed) {
  std::vector<__nv_bfloat16> values(kBlock);
  for (int64_t i = 0; i < kBlock; ++i) {
    const float u = uniform(seed, 1, static_cast<uint64_t>(i)) - 0.5f;
    values[static_cast<size_t>(i)] = __float2bfloat16(u * std::sqrt(12.0f));
  }
  return values;
}

// Fills device memory with repeats of a block, starting at a different offset for every `stream`.
// The block's length is odd, so that rows differ.
void fill(const CudaContext& ctx, const Values& block, int64_t stream, __nv_bfloat16* to,
          int64_t count) {
  int64_t from = stream * 999983 % kBlock;
  for (int64_t done = 0; done < count;) {
    const int64_t step = std::min(count - done, kBlock - from);
    TWELL_CUDA_CHECK(cudaMemcpyAsync(to + done, block.data() + from, static_cast<size_t>(step) * 2,
                                     cudaMemcpyDeviceToDevice, ctx.stream()));
    done += step;
    from = 0;
  }
}

// Copies host values, bf16 of either type, to columns [0, cols) of a device matrix [rows, width].
template <typename T>
void set_columns(const CudaContext& ctx, const std::vector<T>& host, int64_t rows, int64_t cols,
                 __nv_bfloat16* matrix, int64_t width) {
  static_assert(sizeof(T) == 2);
  const auto bytes = static_cast<size_t>(cols) * 2, stride = static_cast<size_t>(width) * 2;
  TWELL_CUDA_CHECK(cudaMemcpy2DAsync(matrix, stride, host.data(), bytes, bytes,
                                     static_cast<size_t>(rows), cudaMemcpyHostToDevice,
                                     ctx.stream()));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
}

// Random values of deviation 1, for x, and of deviation 0.02, for weights.
struct Blocks {
  Values unit, small;

  explicit Blocks(uint64_t seed) {
    std::vector<__nv_bfloat16> values = random_block(seed);
    unit = upload(values);
    for (__nv_bfloat16& value : values) value = __float2bfloat16(kScale * __bfloat162float(value));
    small = upload(values);
  }
};

// The operands of one shape. Each weight holds `copies` matrices, one after the other.
class Operands {
 public:
  Operands(CudaContext& ctx, const FfnSweep& sweep, FfnSweepShape shape, const Blocks& blocks)
      : ctx_(ctx),
        sweep_(sweep),
        shape_(shape),
        blocks_(blocks),
        tokens_(*std::max_element(sweep.tokens.begin(), sweep.tokens.end())) {
    const int64_t size = shape.width * shape.ffn, matrices = sweep.gated ? 3 : 2;
    copies_ = std::clamp<int64_t>(kWeightBytes / (2 * matrices * size), 1, kCopies);
    x_ = Values(tokens_ * shape.width);
    y_ = Values(tokens_ * shape.width);
    dense_y_ = Values(tokens_ * shape.width);
    weights_ = Values(copies_ * matrices * size);
    fill(ctx, blocks.small, 1, weights_.data(), weights_.size());
  }

  int64_t copies() const { return copies_; }
  const __nv_bfloat16* x() const { return x_.data(); }
  __nv_bfloat16* y() const { return y_.data(); }
  __nv_bfloat16* dense_y() const { return dense_y_.data(); }
  FfnWeightsCuda weights(int64_t copy) const {
    const int64_t size = shape_.width * shape_.ffn;
    const __nv_bfloat16* first = weights_.data() + copy * (sweep_.gated ? 3 : 2) * size;
    if (!sweep_.gated) return {.w_up = first, .w_down = first + size};
    return {.w_gate = first, .w_up = first + size, .w_down = first + 2 * size};
  }

  void fire_at_random(double density) {
    fill(ctx_, blocks_.unit, 7, x_.data(), x_.size());
    const float bias =
        gate_bias(density * static_cast<double>(shape_.ffn), shape_.ffn, shape_.width);
    set_columns(ctx_,
                std::vector<__nv_bfloat16>(static_cast<size_t>(tokens_), __float2bfloat16(1.0f)),
                tokens_, 1, x_.data(), shape_.width);
    set_first_columns(
        std::vector<__nv_bfloat16>(static_cast<size_t>(shape_.ffn), __float2bfloat16(bias)), 1);
  }

  void fire_as(const FfnPattern& pattern) {
    const FiringColumns columns = firing_columns(pattern, tokens_, shape_.width, shape_.ffn);
    fill(ctx_, blocks_.unit, 7, x_.data(), x_.size());
    set_columns(ctx_, columns.x, tokens_, columns.period, x_.data(), shape_.width);
    set_first_columns(columns.weight, columns.period);
  }

  // |y - dense_y| / |dense_y| over up to 256 evenly spaced rows.
  double error(int64_t tokens) const {
    const int64_t rows = std::min<int64_t>(tokens, 256), stride = tokens / rows;
    std::vector<__nv_bfloat16> got(static_cast<size_t>(rows * shape_.width)), want(got.size());
    const auto bytes = static_cast<size_t>(shape_.width) * 2;
    for (auto [host, device] : {std::pair(&got, &y_), std::pair(&want, &dense_y_)}) {
      TWELL_CUDA_CHECK(cudaMemcpy2DAsync(
          host->data(), bytes, device->data(), bytes * static_cast<size_t>(stride), bytes,
          static_cast<size_t>(rows), cudaMemcpyDeviceToHost, ctx_.stream()));
    }
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
    double difference = 0.0, size = 0.0;
    for (size_t i = 0; i < got.size(); ++i) {
      const double a = __bfloat162float(got[i]), b = __bfloat162float(want[i]);
      difference += (a - b) * (a - b);
      size += b * b;
    }
    return size == 0.0 ? difference : std::sqrt(difference / size);
  }

 private:
  // Sets columns of the first weight, whose sign decides which neurons are active, in every copy.
  // Columns that an earlier pattern set become random again.
  template <typename T>
  void set_first_columns(const std::vector<T>& host, int64_t cols) {
    const int64_t size = shape_.width * shape_.ffn;
    for (int64_t copy = 0; copy < copies_; ++copy) {
      __nv_bfloat16* first =
          const_cast<__nv_bfloat16*>(sweep_.gated ? weights(copy).w_gate : weights(copy).w_up);
      fill(ctx_, blocks_.small, 10 + copy, first, size);
      set_columns(ctx_, host, shape_.ffn, cols, first, shape_.width);
    }
  }

  CudaContext& ctx_;
  const FfnSweep& sweep_;
  FfnSweepShape shape_;
  const Blocks& blocks_;
  int64_t tokens_;
  int64_t copies_ = 1;
  Values x_, y_, dense_y_, weights_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Median microseconds of one call of each piece; each round runs every piece once.
std::vector<double> time_pieces(CudaContext& ctx, int rounds, int64_t calls,
                                const std::vector<std::function<void()>>& pieces) {
  std::vector<CudaGraph> graphs;
  for (const auto& piece : pieces) graphs.emplace_back(ctx.stream(), piece);
  const CudaEvent begin(CudaEvent::Timing::kOn), end(CudaEvent::Timing::kOn);
  std::vector<std::vector<double>> times(pieces.size());
  for (int round = -1; round < rounds; ++round) {
    for (size_t i = 0; i < pieces.size(); ++i) {
      begin.record(ctx.stream());
      graphs[i].launch(ctx.stream());
      end.record(ctx.stream());
      end.synchronize();
      if (round < 0) continue;  // warm-up round
      times[i].push_back(1e3 * end.milliseconds_since(begin) / static_cast<double>(calls));
    }
  }
  std::vector<double> medians;
  for (const auto& t : times) medians.push_back(median(t));
  return medians;
}

// Dense layers for every number of tokens, with the fastest algorithms for these operands. They
// share the memory for the activations between the products.
class DenseLayers {
 public:
  DenseLayers(CudaContext& ctx, const FfnSweep& sweep, FfnSweepShape shape,
              const Operands& operands) {
    const int64_t most = *std::max_element(sweep.tokens.begin(), sweep.tokens.end());
    gate_ = Values(sweep.gated ? most * shape.ffn : 0);
    hidden_ = Values(most * shape.ffn);
    for (const int64_t tokens : sweep.tokens) {
      layers_.push_back(std::make_unique<DenseFfnCuda>(ctx, tokens, shape.width, shape.ffn,
                                                       sweep.gated, gate_.data(), hidden_.data()));
      layers_.back()->tune(ctx, operands.weights(0), operands.x(), operands.dense_y());
    }
  }
  const DenseFfnCuda& operator[](size_t i) const { return *layers_[i]; }

 private:
  Values gate_, hidden_;
  std::vector<std::unique_ptr<DenseFfnCuda>> layers_;
};

FfnSweepRow measure(CudaContext& ctx, const FfnSweep& sweep, FfnSweepShape shape, int64_t tokens,
                    const std::string& pattern, const DenseFfnCuda& dense, const Operands& operands,
                    FfnWorkspaceCuda& workspace, std::set<int64_t>& settled) {
  FfnPlansCuda sparse(ctx, 1, shape.ffn, FfnPolicy::kSparse);
  FfnPlansCuda automatic(ctx, 1, shape.ffn, FfnPolicy::kAuto);
  const auto call = [&](FfnPlansCuda& plans, int64_t copy) {
    ffn_forward_cuda(
        ctx,
        {.tokens = tokens, .weights = operands.weights(copy), .x = operands.x(), .y = operands.y()},
        plans[0], workspace);
  };
  dense.forward(ctx, operands.weights(0), operands.x(), operands.dense_y());
  call(sparse, 0);
  sparse.update(ctx);
  FfnSweepRow row{.shape = shape,
                  .tokens = tokens,
                  .gated = sweep.gated,
                  .pattern = pattern,
                  .activity = sparse[0].activity,
                  .sparse = sparse[0].plan.execution};
  row.error = operands.error(tokens);
  TWELL_CHECK(row.error < std::ldexp(1.0, -7),
              "D {}, F {}, {} tokens, {}: the {} execution differs by {} from dense", shape.width,
              shape.ffn, tokens, pattern, row.sparse.name, row.error);
  call(automatic, 0);
  automatic.update(ctx);
  call(automatic, 0);  // makes the cuBLASLt plans, which a capture must not do
  row.chosen = automatic[0].plan.execution;
  // The plans settle as they do when the layers of a model run one after the other.
  if (!row.chosen.sparse && settled.insert(tokens).second) {
    for (int64_t run = 1; run < MatmulPlanCuda::kRunsToSettle; ++run) {
      call(automatic, run % operands.copies());
    }
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
    call(automatic, 0);
  }
  for (const GpuFfnExecution& entry : gpu_ffn_registry()) {
    const double cost = entry.cost(workspace.layer(), tokens, row.activity);
    if (entry.name == "dense-gemms") row.dense_estimate_us = cost;
    if (entry.name == row.sparse.name) row.sparse_estimate_us = cost;
  }
  // A graph holds several short calls in sequence, so that its launch time is a small share.
  const int64_t calls = std::max(operands.copies(), tokens <= 1024 ? kShortCalls : int64_t{2});
  const auto each_copy = [&](const std::function<void(int64_t)>& one) {
    return [&operands, calls, one] {
      for (int64_t i = 0; i < calls; ++i) one(i % operands.copies());
    };
  };
  const std::vector<double> times =
      time_pieces(ctx, sweep.rounds, calls,
                  {each_copy([&](int64_t copy) {
                     dense.forward(ctx, operands.weights(copy), operands.x(), operands.dense_y());
                   }),
                   each_copy([&](int64_t copy) { call(sparse, copy); }),
                   each_copy([&](int64_t copy) { call(automatic, copy); })});
  row.dense_us = times[0];
  row.sparse_us = times[1];
  row.auto_us = times[2];
  return row;
}

int64_t bytes_needed(const CudaContext& ctx, const FfnSweep& sweep, FfnSweepShape shape) {
  const int64_t tokens = *std::max_element(sweep.tokens.begin(), sweep.tokens.end());
  const int64_t size = shape.width * shape.ffn;
  return std::max(6 * size, kWeightBytes) + 6 * tokens * shape.width + 4 * tokens * shape.ffn +
         FfnWorkspaceCuda::bytes_needed(ctx, tokens, shape.ffn);
}

}  // namespace

FfnSweep default_ffn_sweep(bool quick) {
  if (quick) {
    return {.shapes = {{1024, 2816}, {2048, 5632}, {4096, 14336}},
            .tokens = {1, 8, 64, 128, 512, 2048, 16384},
            .densities = {0.002, 0.01, 0.1}};
  }
  return {.shapes = {{512, 2048},
                     {1024, 2816},
                     {2048, 5632},
                     {2048, 8192},
                     {2560, 6912},
                     {3072, 8192},
                     {4096, 11008},
                     {4096, 14336},
                     {5120, 13824},
                     {8192, 28672}},
          .tokens = {1,   4,   8,   9,   16,  32,   64,   65,   96,    128,
                     192, 256, 384, 512, 768, 1024, 2048, 4096, 16384, 65536},
          .densities = {0.0005, 0.002, 0.005, 0.01, 0.02, 0.05, 0.3, 1.0}};
}

int64_t case_count(const FfnSweep& sweep) {
  return std::ssize(sweep.shapes) * std::ssize(sweep.tokens) *
         (std::ssize(sweep.densities) + std::ssize(sweep.captured));
}

std::vector<std::string> sweep_ffn_cuda(CudaContext& ctx, const FfnSweep& sweep,
                                        const std::function<void(const FfnSweepRow&)>& on_row) {
  TWELL_REQUIRE(case_count(sweep) > 0, "a sweep of no case");
  const Blocks blocks(sweep.seed);
  const int64_t most = *std::max_element(sweep.tokens.begin(), sweep.tokens.end());
  std::vector<std::string> left_out;
  for (const FfnSweepShape& shape : sweep.shapes) {
    size_t free = 0, total = 0;
    TWELL_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    if (const int64_t bytes = bytes_needed(ctx, sweep, shape); bytes > static_cast<int64_t>(free)) {
      left_out.push_back(fmt::format("D {}, F {}: needs {:.1f} GiB of GPU memory, {:.1f} are free",
                                     shape.width, shape.ffn, static_cast<double>(bytes) / 0x1p30,
                                     static_cast<double>(free) / 0x1p30));
      continue;
    }
    Operands operands(ctx, sweep, shape, blocks);
    operands.fire_at_random(0.01);
    const DenseLayers dense(ctx, sweep, shape, operands);
    FfnWorkspaceCuda workspace(ctx, most, shape.width, shape.ffn, sweep.gated);
    std::set<int64_t> settled;  // numbers of tokens whose dense layer ran often
    const auto every_number_of_tokens = [&](const std::string& pattern) {
      for (size_t i = 0; i < sweep.tokens.size(); ++i) {
        on_row(measure(ctx, sweep, shape, sweep.tokens[i], pattern, dense[i], operands, workspace,
                       settled));
      }
    };
    for (const double density : sweep.densities) {
      operands.fire_at_random(density);
      every_number_of_tokens(fmt::format("random {:.4g}%", 100.0 * density));
    }
    for (const FfnPattern& pattern : sweep.captured) {
      operands.fire_as(stretch_pattern(pattern, sweep.captured_ffn, shape.ffn));
      every_number_of_tokens(pattern.name);
    }
  }
  return left_out;
}

}  // namespace twell
