// SPDX-License-Identifier: Apache-2.0
#include "bench/harness_cuda.h"

#include <cublasLt.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "twell/base/gpu_code.h"
#include "twell/base/rng.h"
#include "twell/ops/matmul/matmul_cuda.h"

namespace twell {
namespace {

// Inverse of the standard normal distribution function, by bisection.
double normal_quantile(double p) {
  double low = -10.0, high = 10.0;
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (low + high);
    (0.5 * std::erfc(-middle / std::sqrt(2.0)) < p ? low : high) = middle;
  }
  return low;
}

int driver_version() {
  int driver = 0;
  TWELL_CUDA_CHECK(cudaDriverGetVersion(&driver));
  return driver;
}

template <typename T>
void copy_to(const DeviceBuffer<T>& to, const std::vector<T>& from) {
  TWELL_CUDA_CHECK(
      cudaMemcpy(to.data(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
}

}  // namespace

void use_products_of_build(CudaContext& ctx) {
  if (!kPortableBuild) return;
  set_matmul_tuning(ctx, true);
  fmt::print("{}\n", kPortableProducts);
}

std::vector<__nv_bfloat16> random_operand(int64_t n, uint64_t stream, float deviation,
                                          uint64_t seed) {
  std::vector<__nv_bfloat16> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; i += 4) {
    const auto bits = philox(seed, stream, static_cast<uint64_t>(i));
    for (int64_t j = 0; j < std::min<int64_t>(4, n - i); ++j) {
      const float u = static_cast<float>(bits[static_cast<size_t>(j)]) * 0x1p-32f - 0.5f;
      values[static_cast<size_t>(i + j)] = __float2bfloat16(u * std::sqrt(12.0f) * deviation);
    }
  }
  return values;
}

double relative_difference(const DeviceBuffer<__nv_bfloat16>& a,
                           const DeviceBuffer<__nv_bfloat16>& b) {
  const auto x = download(a), y = download(b);
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double u = __bfloat162float(x[i]), v = __bfloat162float(y[i]);
    difference += (u - v) * (u - v);
    size += v * v;
  }
  return size == 0.0 ? difference : std::sqrt(difference / size);
}

float gate_bias(double nnz, int64_t ffn, int64_t width) {
  const double share = std::clamp(nnz / static_cast<double>(ffn), 1e-6, 1.0 - 1e-6);
  // The columns other than 0 give a gate of standard deviation 0.02 sqrt(D - 1).
  return static_cast<float>(0.02 * std::sqrt(static_cast<double>(width - 1)) *
                            normal_quantile(share));
}

void fill_first_column(std::vector<__nv_bfloat16>& matrix, int64_t width, float value) {
  for (size_t row = 0; row < matrix.size(); row += static_cast<size_t>(width)) {
    matrix[row] = __float2bfloat16(value);
  }
}

TwellBuffersCuda::TwellBuffersCuda(int64_t tokens, int64_t ffn, int64_t spill_slots)
    : shape{tokens, ffn, 256, 8},
      words(shape.words()),
      spill(std::max<int64_t>(spill_slots, 1) * shape.tile),
      row_nnz(tokens) {}

TwellPacked TwellBuffersCuda::view() const {
  return {shape, words.data(), spill.data(), spill.size() / shape.tile, row_nnz.data()};
}

TwellBuffersCuda pattern_to_device(const FfnPattern& pattern, int64_t ffn, uint64_t seed,
                                   __nv_bfloat16* dense) {
  const PackedPattern packed = pack_pattern(pattern, ffn, seed);
  TwellBuffersCuda out(pattern.tokens(), ffn, std::ssize(packed.spill) / packed.shape.tile);
  copy_to(out.words, packed.words);
  copy_to(out.spill, packed.spill);
  copy_to(out.row_nnz, pattern.row_nnz);
  if (dense != nullptr) {
    const std::vector<BF16> values = dense_pattern(pattern, ffn, seed);
    TWELL_CUDA_CHECK(
        cudaMemcpy(dense, values.data(), values.size() * sizeof(BF16), cudaMemcpyHostToDevice));
  }
  synchronize_default_stream();
  return out;
}

std::vector<Timing> time_pieces(cudaStream_t stream, int rounds, const std::vector<Piece>& pieces) {
  constexpr int kWarmUps = 2;
  std::vector<CudaGraph> graphs;
  for (const Piece& piece : pieces) graphs.emplace_back(stream, piece);
  std::vector<std::vector<double>> times(pieces.size());
  for (int round = -kWarmUps; round < rounds; ++round) {
    for (size_t i = 0; i < pieces.size(); ++i) {
      const CudaEvent begin = recorded_event(stream);
      graphs[i].launch(stream);
      const CudaEvent end = recorded_event(stream);
      end.synchronize();
      if (round >= 0) times[i].push_back(end.milliseconds_since(begin));
    }
  }
  std::vector<Timing> result;
  for (auto& samples : times) result.push_back(summarize(std::move(samples)));
  return result;
}

std::map<std::string, double> StageClock::seconds() const {
  std::map<std::string, double> sums;
  if (!marks_.empty()) marks_.back().second.synchronize();
  for (size_t i = 1; i < marks_.size(); ++i) {
    sums[marks_[i].first] += 1e-3 * marks_[i].second.milliseconds_since(marks_[i - 1].second);
  }
  return sums;
}

GpuEnergyMeter energy_meter(const CudaContext& ctx) {
  char bus_id[32] = {};
  TWELL_CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), ctx.device()));
  return GpuEnergyMeter(bus_id);
}

double joules_per_run(const CudaContext& ctx, const GpuEnergyMeter& meter, const Piece& piece,
                      double seconds) {
  if (seconds <= 0.0 || !meter.unavailable().empty()) return 0.0;
  const CudaGraph graph(ctx.stream(), piece);
  using Clock = std::chrono::steady_clock;
  int64_t runs = 0;
  // Keeps the GPU busy until the counter is updated, which happens about ten times a second, and
  // returns its new value. The window begins and ends at such updates.
  const auto next_step = [&] {
    const double before = meter.joules();
    double now = before;
    while (now == before) {
      for (int i = 0; i < 8; ++i, ++runs) graph.launch(ctx.stream());
      TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
      now = meter.joules();
    }
    return now;
  };
  next_step();
  const double from = next_step();
  const auto start = Clock::now();
  runs = 0;
  double to = from;
  while (to == from || std::chrono::duration<double>(Clock::now() - start).count() < seconds) {
    to = next_step();
  }
  return (to - from) / static_cast<double>(runs);
}

nlohmann::json device_json(const CudaContext& ctx) {
  nlohmann::json row = machine_json(0);
  row.erase("threads");
  row["gpu"] = ctx.device_name();
  row["cuda_driver"] = driver_version();
  row["cuda_runtime"] = CUDART_VERSION;
  return row;
}

JsonLines::JsonLines(const CudaContext& ctx, std::string baseline, std::filesystem::path path)
    : gpu_(ctx.device_name()),
      baseline_(std::move(baseline)),
      path_(std::move(path)),
      driver_(driver_version()) {}

void JsonLines::write(nlohmann::json row) const {
  row["gpu"] = gpu_;
  row["cuda_driver"] = driver_;
  row["baseline"] = baseline_;
  row["cublaslt"] = cublasLtGetVersion();
  append_jsonl(path_, row);
}

int run_benchmark(const char* program, const std::function<void()>& run) {
  try {
    const std::string unavailable = cuda_unavailable();
    TWELL_REQUIRE(unavailable.empty(), "no GPU to measure on: {}", unavailable);
    run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", program, error.what());
    return dynamic_cast<const InputError*>(&error) != nullptr ? 2 : 1;
  }
  return 0;
}

}  // namespace twell
