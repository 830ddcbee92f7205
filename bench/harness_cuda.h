// SPDX-License-Identifier: Apache-2.0
// Shared by the GPU benchmarks: operands, patterns in device memory, event timing, energy, and
// result rows. Functions that fill device memory use the default stream and wait for it.
#pragma once

#include <cuda_bf16.h>

#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "bench/harness.h"
#include "bench/patterns.h"
#include "twell/base/cuda_testing.h"
#include "twell/base/gpu_energy.h"

namespace twell {

// bf16 from a uniform distribution of the given standard deviation: fast to draw, never all zeros.
std::vector<__nv_bfloat16> random_operand(int64_t n, uint64_t stream, float deviation,
                                          uint64_t seed = 3);

// ||a - b|| / ||b||; NaN when an element is NaN.
double relative_difference(const DeviceBuffer<__nv_bfloat16>& a,
                           const DeviceBuffer<__nv_bfloat16>& b);

// The bias for a gate with about nnz of F active neurons per token. Operands: x of deviation 1 with
// 1 in column 0, and w_gate of deviation 0.02 with the bias in column 0.
float gate_bias(double nnz, int64_t ffn, int64_t width);
void fill_first_column(std::vector<__nv_bfloat16>& matrix, int64_t width, float value);

// TwELL in tiles of 256 with C = 8, in device memory.
struct TwellBuffersCuda {
  TwellBuffersCuda() = default;
  TwellBuffersCuda(int64_t tokens, int64_t ffn, int64_t spill_slots);
  explicit TwellBuffersCuda(const TwellShape& wanted)  // with a spill slot for every tile
      : TwellBuffersCuda(wanted.rows, wanted.cols, wanted.max_spill_slots()) {}
  TwellPacked view() const;

  TwellShape shape;
  DeviceBuffer<uint32_t> words;
  DeviceBuffer<BF16> spill;
  DeviceBuffer<int32_t> row_nnz;
};
// The pattern in device memory, with the values of pack_pattern. If `dense` is not null, the same
// gate is also written to it as a dense [M, F] matrix.
TwellBuffersCuda pattern_to_device(const FfnPattern& pattern, int64_t ffn, uint64_t seed,
                                   __nv_bfloat16* dense = nullptr);

// Products of a portable build, which takes every GPU for one of compute capability 8.0, run on
// cuBLASLt's kernels for these from now on (set_matmul_tuning), and this line says XX
inline constexpr char kPortableProducts[] =
    "dense products: cuBLASLt's fastest kernels for compute capability 8.0";
void use_products_of_build(CudaContext& ctx);

// A function that enqueues work on the stream.
using Piece = std::function<void()>;

// Records an event with timing on the stream.
inline CudaEvent recorded_event(cudaStream_t stream) {
  CudaEvent event(CudaEvent::Timing::kOn);
  event.record(stream);
  return event;
}

// Milliseconds of each piece. Every round runs every piece once, as a graph, so that all run at the
// same clocks; two warm-up rounds precede the timed ones.
std::vector<Timing> time_pieces(cudaStream_t stream, int rounds, const std::vector<Piece>& pieces);

// Times the named stages of a computation: each stage runs from the previous mark to its own.
class StageClock {
 public:
  explicit StageClock(cudaStream_t stream) : stream_(stream) {}
  void mark(const std::string& name) { marks_.emplace_back(name, recorded_event(stream_)); }
  // Waits for the last mark and returns the sums by name, without the first mark's name.
  std::map<std::string, double> seconds() const;

 private:
  cudaStream_t stream_;
  std::vector<std::pair<std::string, CudaEvent>> marks_;
};

// The energy meter of the context's device.
GpuEnergyMeter energy_meter(const CudaContext& ctx);
// Joules of one run of the piece, measured over at least `seconds`; 0 without an energy counter.
double joules_per_run(const CudaContext& ctx, const GpuEnergyMeter& meter, const Piece& piece,
                      double seconds);

// The first fields of a result row: machine_json with GPU, driver and runtime instead of threads.
nlohmann::json device_json(const CudaContext& ctx);

// Appends result rows to a file, unless its name is empty, each with the device and the name of the
// baseline.
class JsonLines {
 public:
  JsonLines(const CudaContext& ctx, std::string baseline, std::filesystem::path path);
  int driver() const { return driver_; }
  void write(nlohmann::json row) const;

 private:
  std::string gpu_, baseline_;
  std::filesystem::path path_;
  int driver_ = 0;
};

// The body of a program's main: runs the benchmark, reports an error on stderr, returns the exit
// code.
int run_benchmark(const char* program, const std::function<void()>& run);

}  // namespace twell
