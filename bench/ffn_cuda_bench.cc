// SPDX-License-Identifier: Apache-2.0
// One feed-forward layer on the GPU, gate GEMM -> TwELL -> tile-union, against the dense layer
// through tuned cuBLASLt in the same run. Correctness first, then time.
//   ffn_cuda_bench --patterns FILE [--layer N]... [--nnz K]... [--tokens M] [--jsonl FILE]
// The part after the gate runs on the given activation pattern with random values. The gate cannot
// be made to produce a captured pattern on more tokens than the layer is wide, so the gate GEMM is
// timed on random operands with a bias that gives the pattern's mean non-zeros per row, writing to
// a buffer of its own; "ffn" times both, one after the other, in one CUDA graph.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "twell/base/cuda_testing.h"
#include "twell/base/rng.h"
#include "twell/model/safetensors.h"
#include "twell/ops/ffn/dense_ffn_cuda.h"
#include "twell/ops/gate_gemm/gate_gemm_cuda.h"
#include "twell/ops/sparse_up_down/sparse_up_down_cuda.h"

namespace twell {
namespace {

struct Options {
  std::string patterns;
  std::vector<int> layers;
  std::vector<double> nnz;
  int64_t tokens = 16384;
  int64_t width = 2048;
  int64_t ffn = 5632;
  int rounds = 21;
  std::string jsonl;
};

struct Pattern {
  std::string name;
  std::vector<uint16_t> row_nnz;  // [M]
  std::vector<uint16_t> columns;  // ascending within a row
  double mean() const {
    return static_cast<double>(columns.size()) / static_cast<double>(row_nnz.size());
  }
};

std::vector<uint16_t> read_u16(const TensorInfo& tensor) {
  TWELL_REQUIRE(tensor.dtype == "U16", "{} is {}, expected U16", tensor.name, tensor.dtype);
  std::vector<uint16_t> values(tensor.bytes.size() / 2);
  std::memcpy(values.data(), tensor.bytes.data(), values.size() * 2);
  return values;
}

Pattern random_pattern(int64_t tokens, int64_t ffn, double nnz) {
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

// bf16 from a uniform distribution of the given standard deviation: fast to draw, never zeros.
DeviceBuffer<__nv_bfloat16> random_operand(int64_t n, uint64_t stream, float scale) {
  std::vector<__nv_bfloat16> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; i += 4) {
    const auto bits = philox(3, stream, static_cast<uint64_t>(i));
    for (int64_t j = 0; j < std::min<int64_t>(4, n - i); ++j) {
      const float u = static_cast<float>(bits[static_cast<size_t>(j)]) * 0x1p-32f - 0.5f;
      values[static_cast<size_t>(i + j)] = __float2bfloat16(u * std::sqrt(12.0f) * scale);
    }
  }
  return upload(values);
}

// TwELL of the pattern with random positive values, and the same gate dense.
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
    std::vector<uint16_t> all(static_cast<size_t>(shape.rows * ffn));
    for (int64_t row = 0; row < shape.rows; ++row) {
      for (auto& tile : entries) tile.clear();
      for (int i = 0; i < row_nnz[static_cast<size_t>(row)]; ++i, ++next) {
        const int64_t column = pattern.columns[next];
        const uint16_t bits = to_bf16(0.05f + uniform(5, 1, next)).bits;
        entries[static_cast<size_t>(column / 256)].push_back(
            TwellWord<uint32_t>::from_bits(column, bits));
        all[static_cast<size_t>(row * ffn + column)] = bits;
      }
      for (size_t t = 0; t < tiles; ++t) pack(row, static_cast<int64_t>(t), entries[t]);
    }
    if (spill.empty()) spill.resize(256);
    device_words = upload(words);
    device_spill = upload(spill);
    device_nnz = upload(row_nnz);
    packed = {shape, device_words.data(), device_spill.data(),
              static_cast<int64_t>(spill.size() / 256), device_nnz.data()};
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

double relative_difference(const DeviceBuffer<__nv_bfloat16>& a,
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

struct Timing {
  double median = 0.0, p10 = 0.0, p90 = 0.0;  // ms
};

class Stopwatch {
 public:
  explicit Stopwatch(const TestStream& stream) : stream_(stream) {
    TWELL_CUDA_CHECK(cudaEventCreate(&begin_));
    TWELL_CUDA_CHECK(cudaEventCreate(&end_));
  }
  ~Stopwatch() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  // Rounds run every piece once, so that all see the same clocks; each is replayed as a graph.
  std::vector<Timing> run(int rounds, const std::vector<std::function<void()>>& pieces) const {
    std::vector<cudaGraphExec_t> graphs;
    for (const auto& piece : pieces) graphs.push_back(capture(piece));
    std::vector<std::vector<double>> times(pieces.size());
    for (int round = -2; round < rounds; ++round) {
      for (size_t i = 0; i < pieces.size(); ++i) {
        TWELL_CUDA_CHECK(cudaEventRecord(begin_, stream_.get()));
        TWELL_CUDA_CHECK(cudaGraphLaunch(graphs[i], stream_.get()));
        TWELL_CUDA_CHECK(cudaEventRecord(end_, stream_.get()));
        TWELL_CUDA_CHECK(cudaEventSynchronize(end_));
        float milliseconds = 0.0f;
        TWELL_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin_, end_));
        if (round >= 0) times[i].push_back(static_cast<double>(milliseconds));
      }
    }
    std::vector<Timing> result;
    for (auto& t : times) {
      std::sort(t.begin(), t.end());
      result.push_back({t[t.size() / 2], t[t.size() / 10], t[t.size() * 9 / 10]});
    }
    for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
    return result;
  }

 private:
  cudaGraphExec_t capture(const std::function<void()>& piece) const {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    TWELL_CUDA_CHECK(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal));
    piece();
    TWELL_CUDA_CHECK(cudaStreamEndCapture(stream_.get(), &graph));
    TWELL_CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    cudaGraphDestroy(graph);
    return executable;
  }
  const TestStream& stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// Quantile of the standard normal by bisection: the bias that makes a share p of the gate positive.
double normal_quantile(double p) {
  double low = -10.0, high = 10.0;
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (low + high);
    (0.5 * std::erfc(-middle / std::sqrt(2.0)) < p ? low : high) = middle;
  }
  return low;
}

nlohmann::json measure(CudaContext& ctx, const TestStream& stream, const Options& options,
                       const Pattern& pattern) {
  const auto tokens = static_cast<int64_t>(pattern.row_nnz.size());
  const int64_t width = options.width, ffn = options.ffn;
  const auto x = random_operand(tokens * width, 1, 1.0f);
  const auto w_up = random_operand(ffn * width, 2, 0.02f);
  const auto w_down = random_operand(ffn * width, 3, 0.02f);
  // x[:, 0] is 1 and w_gate[:, 0] the bias; the rest has deviation 0.02 sqrt(D - 1).
  const auto w_gate = random_operand(ffn * width, 4, 0.02f);
  const double share = pattern.mean() / static_cast<double>(ffn);
  const auto bias = static_cast<float>(0.02 * std::sqrt(static_cast<double>(width - 1)) *
                                       normal_quantile(std::clamp(share, 1e-6, 1.0 - 1e-6)));
  const __nv_bfloat16 one = __float2bfloat16(1.0f), offset = __float2bfloat16(bias);
  const std::vector<__nv_bfloat16> ones(static_cast<size_t>(tokens), one);
  const std::vector<__nv_bfloat16> offsets(static_cast<size_t>(ffn), offset);
  const auto pitch = static_cast<size_t>(width) * 2;
  TWELL_CUDA_CHECK(
      cudaMemcpy2D(x.data(), pitch, ones.data(), 2, 2, ones.size(), cudaMemcpyHostToDevice));
  TWELL_CUDA_CHECK(cudaMemcpy2D(w_gate.data(), pitch, offsets.data(), 2, 2, offsets.size(),
                                cudaMemcpyHostToDevice));
  synchronize_default_stream();
  const FfnWeightsCuda weights{w_gate.data(), w_up.data(), w_down.data()};

  DenseFfnCuda dense(ctx, tokens, width, ffn, true);
  const auto dense_y = poisoned<__nv_bfloat16>(tokens * width);
  const auto y = poisoned<__nv_bfloat16>(tokens * width);
  dense.tune(ctx, weights, x.data(), dense_y.data());

  const GateOnDevice gate(pattern, ffn, dense.gate_values());
  const SparseUpDownCuda up_down{tokens,   width,       ffn,           gate.packed,
                                 x.data(), w_up.data(), w_down.data(), y.data()};
  TileUnionWorkspace workspace(tokens, ffn);
  tile_union_up_down_cuda(ctx, up_down, workspace);
  dense.up_down(ctx, weights, x.data(), dense_y.data());
  stream.synchronize();
  const double difference = relative_difference(y, dense_y);
  // Each side is within a few bf16 roundings of exact.
  TWELL_CHECK(difference < std::ldexp(1.0, -7), "{}: the sparse result differs by {} from dense",
              pattern.name, difference);

  const TwellShape shape{tokens, ffn, 256, 8};
  const DeviceBuffer<uint32_t> words(shape.words());
  const DeviceBuffer<BF16> spill(shape.max_spill_slots() * shape.tile);
  const DeviceBuffer<int32_t> row_nnz(tokens);
  const GateGemmCuda gate_gemm{
      tokens,        width,
      ffn,           x.data(),
      w_gate.data(), {shape, words.data(), spill.data(), shape.max_spill_slots(), row_nnz.data()}};
  const auto sparse_ffn = [&] {
    gate_gemm_cuda(ctx, gate_gemm);
    tile_union_up_down_cuda(ctx, up_down, workspace);
  };
  const Stopwatch stopwatch(stream);
  const auto times = stopwatch.run(
      options.rounds,
      {[&] { dense.gate(ctx, weights, x.data()); }, [&] { gate_gemm_cuda(ctx, gate_gemm); },
       [&] { dense.up_down(ctx, weights, x.data(), dense_y.data()); },
       [&] { tile_union_up_down_cuda(ctx, up_down, workspace); },
       [&] { dense.forward(ctx, weights, x.data(), dense_y.data()); }, sparse_ffn});

  const char* names[] = {"dense_gate", "gate",      "dense_up_down",
                         "tile_union", "dense_ffn", "sparse_ffn"};
  nlohmann::json row;
  row["pattern"] = pattern.name;
  row["tokens"] = tokens;
  row["width"] = width;
  row["ffn"] = ffn;
  row["nnz_per_token"] = pattern.mean();
  row["difference_to_dense"] = difference;
  for (size_t i = 0; i < times.size(); ++i) {
    row[std::string(names[i]) + "_ms"] = {
        {"median", times[i].median}, {"p10", times[i].p10}, {"p90", times[i].p90}};
  }
  row["gate_ratio"] = times[1].median / times[0].median;
  row["speedup"] = times[4].median / times[5].median;
  const double operations = 6.0 * static_cast<double>(tokens * width) * static_cast<double>(ffn);
  row["dense_tflops"] = operations / times[4].median * 1e-9;
  row["dense_equivalent_tflops"] = operations / times[5].median * 1e-9;
  fmt::print(
      "{:24} {:6} {:7.1f}  gate {:.4f} / {:.4f} = {:.3f}  up+down {:.4f} / {:.4f}  ffn "
      "{:.4f} / {:.4f} = {:.2f}x  diff {:.1e}\n",
      pattern.name, tokens, pattern.mean(), times[1].median, times[0].median,
      times[1].median / times[0].median, times[3].median, times[2].median, times[5].median,
      times[4].median, times[4].median / times[5].median, difference);
  std::fflush(stdout);
  return row;
}

void run(const Options& options) {
  const std::string unavailable = cuda_unavailable();
  TWELL_REQUIRE(unavailable.empty(), "no GPU to measure on: {}", unavailable);
  const TestStream stream;
  CudaContext ctx(stream.get());
  int driver = 0;
  TWELL_CUDA_CHECK(cudaDriverGetVersion(&driver));
  std::vector<Pattern> patterns;
  if (!options.patterns.empty()) {
    const SafetensorsFile file(options.patterns);
    const std::string stem = std::filesystem::path(options.patterns).stem().string();
    for (const int layer : options.layers) {
      const std::string prefix = fmt::format("layer{}.", layer);
      patterns.push_back({fmt::format("{} L{}", stem.substr(stem.rfind('_') + 1), layer),
                          read_u16(file.tensor(prefix + "row_nnz")),
                          read_u16(file.tensor(prefix + "col"))});
    }
  }
  for (const double nnz : options.nnz) {
    patterns.push_back(random_pattern(options.tokens, options.ffn, nnz));
  }
  fmt::print("{}, CUDA driver {}, D {}, F {}; times in ms, sparse / dense\n", ctx.device_name(),
             driver, options.width, options.ffn);
  std::ofstream out;
  if (!options.jsonl.empty()) out.open(options.jsonl, std::ios::app);
  for (const Pattern& pattern : patterns) {
    nlohmann::json row = measure(ctx, stream, options, pattern);
    row["gpu"] = ctx.device_name();
    row["cuda_driver"] = driver;
    row["baseline"] = "cuBLASLt, fastest proposal";
    row["cublaslt"] = cublasLtGetVersion();
    if (out.is_open()) out << row.dump() << '\n';
  }
}

}  // namespace
}  // namespace twell

int main(int argc, char** argv) {
  twell::Options options;
  CLI::App app("One feed-forward layer on the GPU: sparse against dense.");
  app.add_option("--patterns", options.patterns, "safetensors file of captured patterns");
  app.add_option("--layer", options.layers, "layers of the file")->needs("--patterns");
  app.add_option("--nnz", options.nnz, "non-zeros per token of random patterns");
  app.add_option("--tokens", options.tokens, "tokens of random patterns")->capture_default_str();
  app.add_option("--rounds", options.rounds, "timed rounds")->capture_default_str();
  app.add_option("--jsonl", options.jsonl, "file to append JSON lines to");
  CLI11_PARSE(app, argc, argv);
  try {
    twell::run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ffn_cuda_bench: %s\n", error.what());
    return dynamic_cast<const twell::InputError*>(&error) != nullptr ? 2 : 1;
  }
  return 0;
}
