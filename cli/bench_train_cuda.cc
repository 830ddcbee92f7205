// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_train.h"

#ifdef TWELL_HAVE_CUDA
#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/bench.h"
#include "cli/options.h"
#include "twell/base/context.h"
#include "twell/infer/engine_cuda.h"
#include "twell/model/packed_patterns_cuda.h"
#include "twell/train/train_benchmark_cuda.h"

namespace twell::cli {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

nlohmann::json run_json(const TrainBenchmarkRun& run) {
  nlohmann::json json = {{"tokens_per_s", run.tokens_per_second},
                         {"median_s", run.seconds},
                         {"p10_s", run.p10},
                         {"p90_s", run.p90},
                         {"device_gib", static_cast<double>(run.device_bytes) / kGiB}};
  if (run.mfu > 0.0) json["mfu"] = run.mfu;
  for (const auto& [stage, seconds] : run.stage_seconds) json["stage_ms"][stage] = 1e3 * seconds;
  for (const LayerMetrics& layer : run.layers) {
    json["nnz_per_token"].push_back(layer.nnz);
    json["executions"].push_back(ffn_train_execution_name(layer.execution));
  }
  return json;
}

// One column, or two and their ratio.
void print_runs(const TrainBenchmarkRun& dense, const std::optional<TrainBenchmarkRun>& sparse) {
  const auto row = [&](const std::string& name, double d, double s, double ratio) {
    fmt::print("{:<22} {:>12.2f}", name, d);
    if (sparse) fmt::print(" {:>12.2f} {:>8.3f}x", s, ratio);
    fmt::print("\n");
  };
  const TrainBenchmarkRun other = sparse.value_or(TrainBenchmarkRun{});
  fmt::print("{:<22} {:>12}{}\n", "", "dense", sparse ? "       sparse     ratio" : "");
  row("tokens/s", dense.tokens_per_second, other.tokens_per_second,
      other.tokens_per_second / dense.tokens_per_second);
  row("step, ms", 1e3 * dense.seconds, 1e3 * other.seconds, dense.seconds / other.seconds);
  for (const auto& [stage, seconds] : dense.stage_seconds) {
    const auto found = other.stage_seconds.find(stage);
    const double s = found == other.stage_seconds.end() ? 0.0 : found->second;
    row(fmt::format("  {}, ms", stage), 1e3 * seconds, 1e3 * s, s == 0.0 ? 0.0 : seconds / s);
  }
  row("memory, GiB", static_cast<double>(dense.device_bytes) / kGiB,
      static_cast<double>(other.device_bytes) / kGiB,
      static_cast<double>(other.device_bytes) / static_cast<double>(dense.device_bytes));
  if (dense.mfu > 0.0) {
    row("MFU (dense FLOP), %", 100.0 * dense.mfu, 100.0 * other.mfu, other.mfu / dense.mfu);
  }
}

// Without training that would make the model sparse: patterns of one that was trained.
TrainBenchmarkRun replayed(cudaStream_t stream, Model& model, TrainBenchmarkOptions options,
                           const BenchTrain& arguments) {
  const PackedPatternsCuda patterns(arguments.patterns, model.config.layers, model.config.ffn,
                                    options.micro_batch * options.length);
  options.before_ffn = [&](int64_t layer, FfnTrainForwardCuda& problem) {
    problem.replay = patterns.of(layer);
  };
  return benchmark_training(stream, model, options);
}

// The dense options, with the activity of the patterns, and their own largest micro-batch.
TrainBenchmarkOptions sparse_options(cudaStream_t stream, const ModelConfig& config,
                                     TrainBenchmarkOptions options, const BenchTrain& arguments) {
  const PackedPatternsCuda patterns(arguments.patterns, config.layers, config.ffn, /*tokens=*/1);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    options.hints.push_back({patterns.nnz_per_token(layer), patterns.union_neurons(layer)});
  }
  options.policy = parse_ffn_train_policy(arguments.policy);
  if (arguments.micro_batch == 0) {
    options.micro_batch = largest_micro_batch(stream, config, options);
  }
  return options;
}

}  // namespace

int run_bench_train_cuda(const BenchTrain& arguments) {
  const ModelConfig config = preset_config(arguments.preset);
  const CudaStream stream;
  const std::string gpu = CudaContext(stream.get()).device_name();
  TrainBenchmarkOptions options;
  options.length = arguments.length == 0 ? config.max_sequence() : arguments.length;
  options.micro_batch = arguments.micro_batch;
  options.steps = arguments.steps;
  options.seed = arguments.seed;
  options.tune = arguments.tune;
  options.recompute = parse_recompute(arguments.recompute);
  if (arguments.micro_batch == 0) {
    options.micro_batch = largest_micro_batch(stream.get(), config, options);
  }
  Model model(config);
  Context cpu;
  init_weights(cpu, model, arguments.seed);
  fmt::print("preset {}, random weights and tokens, {} x {} tokens per step, on {}\n",
             arguments.preset, options.micro_batch, options.length, gpu);
  const TrainBenchmarkRun dense = benchmark_training(stream.get(), model, options);
  std::optional<TrainBenchmarkRun> sparse;
  int64_t sparse_micro_batch = 0;
  if (!arguments.patterns.empty()) {
    const TrainBenchmarkOptions with_patterns =
        sparse_options(stream.get(), config, options, arguments);
    sparse_micro_batch = with_patterns.micro_batch;
    fmt::print(
        "sparse: {} x {} tokens, REPLAY of captured patterns {}; the gate GEMM runs, its "
        "result is unused\n",
        sparse_micro_batch, options.length, arguments.patterns.string());
    sparse = replayed(stream.get(), model, with_patterns, arguments);
  }
  print_runs(dense, sparse);

  nlohmann::json line = machine_json(0);
  line.erase("threads");
  line["bench"] = "train";
  line["gpu"] = gpu;
  line["subject"] = fmt::format("preset {}, random weights and tokens", arguments.preset);
  line["micro_batch"] = options.micro_batch;
  line["length"] = options.length;
  line["steps"] = options.steps;
  line["recompute"] = arguments.recompute;
  line["tuned_products"] = options.tune;
  line["dense"] = run_json(dense);
  line["replayed_patterns"] = arguments.patterns.filename().string();
  if (sparse) {
    line["sparse"] = run_json(*sparse);
    line["sparse"]["micro_batch"] = sparse_micro_batch;
    line["sparse"]["ffn_policy"] = arguments.policy;
  }
  append_jsonl(arguments.jsonl, line);
  return kExitOk;
}

}  // namespace twell::cli

#else
#include "twell/base/error.h"

// Not reached: the command asks for a GPU first.
namespace twell::cli {

int run_bench_train_cuda(const BenchTrain&) {
  throw InputError("this program was built without CUDA");
}

}  // namespace twell::cli
#endif
