// SPDX-License-Identifier: Apache-2.0
// What the GPU benchmarks share: operands, activation patterns on the device, a stopwatch, JSON
// lines, and how a program ends.
#pragma once

#include <cublasLt.h>
#include <cuda_bf16.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "bench/captured_patterns.h"
#include "twell/base/cuda_testing.h"
#include "twell/base/rng.h"
#include "twell/format/twell.h"

namespace twell {

// bf16 from a uniform distribution of the given standard deviation: fast to draw, never zeros.
inline std::vector<__nv_bfloat16> random_operand(int64_t n, uint64_t stream, float scale) {
  std::vector<__nv_bfloat16> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; i += 4) {
    const auto bits = philox(3, stream, static_cast<uint64_t>(i));
    for (int64_t j = 0; j < std::min<int64_t>(4, n - i); ++j) {
      const float u = static_cast<float>(bits[static_cast<size_t>(j)]) * 0x1p-32f - 0.5f;
      values[static_cast<size_t>(i + j)] = __float2bfloat16(u * std::sqrt(12.0f) * scale);
    }
  }
  return values;
}

// ||a - b|| / ||b||; NaN where anything is NaN.
inline double relative_difference(const DeviceBuffer<__nv_bfloat16>& a,
                                  const DeviceBuffer<__nv_bfloat16>& b) {
  const auto x = download(a), y = download(b);
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double u = __bfloat162float(x[i]), v = __bfloat162float(y[i]);
    difference += (u - v) * (u - v);
    size += v * v;
  }
  return std::sqrt(difference / size);
}

// Quantile of the standard normal by bisection: the bias that makes a share p of the gate positive.
inline double normal_quantile(double p) {
  double low = -10.0, high = 10.0;
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (low + high);
    (0.5 * std::erfc(-middle / std::sqrt(2.0)) < p ? low : high) = middle;
  }
  return low;
}

// Operands whose gate fires for about nnz of F neurons per token: x of deviation 1, whose column 0
// is 1, and w_gate of deviation 0.02, whose column 0 is this bias.
inline float gate_bias(double nnz, int64_t ffn, int64_t width) {
  const double share = std::clamp(nnz / static_cast<double>(ffn), 1e-6, 1.0 - 1e-6);
  // The rest of a row has deviation 0.02 sqrt(D - 1).
  return static_cast<float>(0.02 * std::sqrt(static_cast<double>(width - 1)) *
                            normal_quantile(share));
}
inline void fill_first_column(std::vector<__nv_bfloat16>& matrix, int64_t width, float value) {
  for (size_t row = 0; row < matrix.size(); row += static_cast<size_t>(width)) {
    matrix[row] = __float2bfloat16(value);
  }
}

struct Pattern {
  std::string name;
  std::vector<uint16_t> row_nnz;  // [M]
  std::vector<uint16_t> columns;  // ascending within a row
  double mean() const {
    return static_cast<double>(columns.size()) / static_cast<double>(row_nnz.size());
  }
};

// Layers of a safetensors file of captured patterns, all that it has where none are named; called
// after the end of its name.
inline std::vector<Pattern> read_patterns(const std::string& path, const std::vector<int>& layers) {
  std::vector<Pattern> patterns;
  const SafetensorsFile file(path);
  const std::string stem = std::filesystem::path(path).stem().string();
  std::set<int64_t> chosen(layers.begin(), layers.end());
  if (chosen.empty()) chosen = captured_layers(file);
  for (const int64_t layer : chosen) {
    CapturedLayer captured = read_captured_layer(file, layer);
    patterns.push_back({fmt::format("{} L{}", stem.substr(stem.rfind('_') + 1), layer),
                        std::move(captured.row_nnz), std::move(captured.columns)});
  }
  return patterns;
}

inline Pattern random_pattern(int64_t tokens, int64_t ffn, double nnz) {
  Pattern pattern{fmt::format("random {:g}", nnz), {}, {}};
  const auto density = static_cast<float>(nnz / static_cast<double>(ffn));
  for (int64_t row = 0; row < tokens; ++row) {
    const size_t before = pattern.columns.size();
    for (int64_t column = 0; column < ffn; ++column) {
      if (uniform(5, 0, static_cast<uint64_t>(row * ffn + column)) < density) {
        pattern.columns.push_back(static_cast<uint16_t>(column));
      }
    }
    pattern.row_nnz.push_back(static_cast<uint16_t>(pattern.columns.size() - before));
  }
  return pattern;
}

// TwELL of the pattern with random positive values, and the same gate dense [M, F], unless null.
struct GateOnDevice {
  TwellShape shape;
  std::vector<uint32_t> words;
  std::vector<BF16> spill;
  DeviceBuffer<uint32_t> device_words;
  DeviceBuffer<BF16> device_spill;
  DeviceBuffer<int32_t> device_nnz;
  TwellPacked packed;

  GateOnDevice(const Pattern& pattern, int64_t ffn, __nv_bfloat16* dense)
      : shape{static_cast<int64_t>(pattern.row_nnz.size()), ffn, 256, 8},
        words(static_cast<size_t>(shape.words()), 0xffffffffu) {
    const auto tiles = static_cast<size_t>(shape.tiles());
    std::vector<int32_t> row_nnz(pattern.row_nnz.begin(), pattern.row_nnz.end());
    std::vector<std::vector<uint32_t>> entries(tiles);
    size_t next = 0;
    std::vector<uint16_t> all(dense != nullptr ? static_cast<size_t>(shape.rows * ffn) : 0);
    for (int64_t row = 0; row < shape.rows; ++row) {
      for (auto& tile : entries) tile.clear();
      for (int i = 0; i < row_nnz[static_cast<size_t>(row)]; ++i, ++next) {
        const int64_t column = pattern.columns[next];
        const uint16_t bits = to_bf16(0.05f + uniform(5, 1, next)).bits;
        entries[static_cast<size_t>(column / 256)].push_back(
            TwellWord<uint32_t>::from_bits(column, bits));
        if (dense != nullptr) all[static_cast<size_t>(row * ffn + column)] = bits;
      }
      for (size_t t = 0; t < tiles; ++t) pack(row, static_cast<int64_t>(t), entries[t]);
    }
    if (spill.empty()) spill.resize(256);
    device_words = upload(words);
    device_spill = upload(spill);
    device_nnz = upload(row_nnz);
    packed = {shape, device_words.data(), device_spill.data(),
              static_cast<int64_t>(spill.size() / 256), device_nnz.data()};
    if (dense == nullptr) return;
    TWELL_CUDA_CHECK(cudaMemcpy(dense, all.data(), all.size() * 2, cudaMemcpyHostToDevice));
    synchronize_default_stream();
  }

 private:
  void pack(int64_t row, int64_t tile, const std::vector<uint32_t>& entries) {
    uint32_t* out = words.data() + shape.offset(row, tile);
    out[0] = static_cast<uint32_t>(entries.size());
    if (static_cast<int64_t>(entries.size()) <= shape.capacity()) {
      std::copy(entries.begin(), entries.end(), out + 1);
      return;
    }
    const size_t slot = spill.size() / 256;
    out[1] = static_cast<uint32_t>(slot);
    spill.resize(spill.size() + 256);
    for (const uint32_t entry : entries) {
      spill[slot * 256 + entry % 256] = BF16{static_cast<uint16_t>(entry >> 16)};
    }
  }
};

struct Timing {
  double median = 0.0, p10 = 0.0, p90 = 0.0;  // ms
  nlohmann::json json() const { return {{"median", median}, {"p10", p10}, {"p90", p90}}; }
};

class Stopwatch {
 public:
  explicit Stopwatch(const TestStream& stream) : stream_(stream) {}
  // Rounds run every piece once, so that all see the same clocks; each is replayed as a graph.
  std::vector<Timing> run(int rounds, const std::vector<std::function<void()>>& pieces) const {
    std::vector<CudaGraph> graphs;
    for (const auto& piece : pieces) graphs.emplace_back(stream_.get(), piece);
    std::vector<std::vector<double>> times(pieces.size());
    for (int round = -2; round < rounds; ++round) {
      for (size_t i = 0; i < pieces.size(); ++i) {
        begin_.record(stream_.get());
        graphs[i].launch(stream_.get());
        end_.record(stream_.get());
        end_.synchronize();
        if (round >= 0) times[i].push_back(end_.milliseconds_since(begin_));
      }
    }
    std::vector<Timing> result;
    for (auto& t : times) {
      std::sort(t.begin(), t.end());
      result.push_back({t[t.size() / 2], t[t.size() / 10], t[t.size() * 9 / 10]});
    }
    return result;
  }

 private:
  const TestStream& stream_;
  CudaEvent begin_{CudaEvent::Timing::kOn}, end_{CudaEvent::Timing::kOn};
};

// Appends rows to a file, unless its name is empty, with what was measured on and against.
class JsonLines {
 public:
  JsonLines(const CudaContext& ctx, std::string baseline, const std::string& path)
      : gpu_(ctx.device_name()), baseline_(std::move(baseline)) {
    TWELL_CUDA_CHECK(cudaDriverGetVersion(&driver_));
    if (!path.empty()) out_.open(path, std::ios::app);
  }
  int driver() const { return driver_; }
  void write(nlohmann::json row) {
    row["gpu"] = gpu_;
    row["cuda_driver"] = driver_;
    row["baseline"] = baseline_;
    row["cublaslt"] = cublasLtGetVersion();
    if (out_.is_open()) out_ << row.dump() << '\n';
  }

 private:
  std::string gpu_, baseline_;
  int driver_ = 0;
  std::ofstream out_;
};

// What main returns: runs the benchmark, and says on stderr what was wrong.
inline int run_benchmark(const char* program, const std::function<void()>& run) {
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
