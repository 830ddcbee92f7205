// SPDX-License-Identifier: Apache-2.0
// What the GPU benchmarks share: operands, patterns in device memory, times from events, energy,
// and result rows. Device memory is filled on the default stream and waited for.
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

// bf16 from a uniform distribution of the given standard deviation: fast to draw, never zeros.
std::vector<__nv_bfloat16> random_operand(int64_t n, uint64_t stream, float deviation,
                                          uint64_t seed = 3);

// ||a - b|| / ||b||; NaN where anything is NaN.
double relative_difference(const DeviceBuffer<__nv_bfloat16>& a,
                           const DeviceBuffer<__nv_bfloat16>& b);

// Operands whose gate is active for about nnz of F neurons per token: x of deviation 1 with 1 in
// column 0, and w_gate of deviation 0.02 with this bias in column 0.
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
// The pattern with the values of pack_pattern. The same gate is written dense, [M, F], to `dense`,
// unless null.
TwellBuffersCuda pattern_to_device(const FfnPattern& pattern, int64_t ffn, uint64_t seed,
                                   __nv_bfloat16* dense = nullptr);

// Work that is put on the stream.
using Piece = std::function<void()>;

// An event with timing, recorded on the stream.
inline CudaEvent recorded_event(cudaStream_t stream) {
  CudaEvent event(CudaEvent::Timing::kOn);
  event.record(stream);
  return event;
}

// Milliseconds of each piece. Every round runs every piece once, as a graph, so that all see the
// same clocks; two rounds before the timed ones warm up.
std::vector<Timing> time_pieces(cudaStream_t stream, int rounds, const std::vector<Piece>& pieces);

// Times of the named stages of a computation: from the mark before to its own.
class StageClock {
 public:
  explicit StageClock(cudaStream_t stream) : stream_(stream) {}
  void mark(const std::string& name) { marks_.emplace_back(name, recorded_event(stream_)); }
  // Sums by name, without the first mark's; waits for the last mark.
  std::map<std::string, double> seconds() const;

 private:
  cudaStream_t stream_;
  std::vector<std::pair<std::string, CudaEvent>> marks_;
};

// Of the context's device.
GpuEnergyMeter energy_meter(const CudaContext& ctx);
// Joules of one run of the piece, over at least `seconds`; 0 without a counter.
double joules_per_run(const CudaContext& ctx, const GpuEnergyMeter& meter, const Piece& piece,
                      double seconds);

// The start of a result row: machine_json, with GPU, driver and runtime in place of threads.
nlohmann::json device_json(const CudaContext& ctx);

// For the programs: appends rows to a file, unless its name is empty, with the device and the
// baseline they are compared with.
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

// What main of a program returns: runs the benchmark, and reports an error on stderr.
int run_benchmark(const char* program, const std::function<void()>& run);

}  // namespace twell
