// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_train.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/harness_cuda.h"
#include "bench/pattern_replay_cuda.h"
#include "bench/train_benchmark_cuda.h"
#include "cli/bench.h"
#include "cli/options.h"
#include "cli/ranks.h"
#include "cli/text_layout.h"
#include "twell/base/context.h"
#include "twell/base/gpu_code.h"
#include "twell/infer/engine_cuda.h"

namespace twell::cli {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

nlohmann::json run_json(const TrainBenchmarkRun& run) {
  nlohmann::json json = {{"tokens_per_s", run.tokens_per_second},
                         {"median_s", run.step.median},
                         {"p10_s", run.step.p10},
                         {"p90_s", run.step.p90},
                         {"device_gib", static_cast<double>(run.device_bytes) / kGiB}};
  if (run.mfu > 0.0) json["mfu"] = run.mfu;
  for (const auto& [stage, seconds] : run.stage_seconds) json["stage_ms"][stage] = 1e3 * seconds;
  for (const LayerMetrics& layer : run.layers) {
    json["nnz_per_token"].push_back(layer.nnz);
    json["executions"].push_back(ffn_train_execution_name(layer.execution));
  }
  return json;
}

// Prints one column, or two and their ratio.
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
  row("step, ms", 1e3 * dense.step.median, 1e3 * other.step.median,
      dense.step.median / other.step.median);
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

// Replays activation patterns of a trained model, because this model is not trained to be sparse.
TrainBenchmarkRun replayed(cudaStream_t stream, Model& model, TrainBenchmarkOptions options,
                           const BenchTrain& arguments) {
  const PatternsCuda patterns(arguments.patterns, model.config.layers, model.config.ffn,
                              options.micro_batch * options.length);
  options.before_ffn = [&](int64_t layer, FfnTrainForwardCuda& problem) {
    problem.replay = patterns.of(layer);
  };
  return benchmark_training(stream, model, options);
}

// The dense options with the layer activity of the patterns.
TrainBenchmarkOptions sparse_options(const ModelConfig& config, TrainBenchmarkOptions options,
                                     const BenchTrain& arguments) {
  const PatternsCuda patterns(arguments.patterns, config.layers, config.ffn, /*tokens=*/1);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    options.hints.push_back({patterns.nnz_per_token(layer), patterns.union_neurons(layer)});
  }
  options.policy = parse_ffn_train_policy(arguments.policy);
  return options;
}

// The runs with one level of recomputation.
struct Measured {
  TrainBenchmarkRun run;
  int64_t micro_batch = 0;
  std::string recompute;
};

class TrainBench {
 public:
  TrainBench(const BenchTrain& arguments, const RankGroup& ranks)
      : arguments_(arguments),
        ranks_(ranks),
        config_(preset_config(arguments.preset)),
        gpu_(CudaContext(stream_.get()).device_name()),
        model_(config_) {
    options_.length = arguments.length == 0 ? config_.context : arguments.length;
    options_.micro_batch = arguments.micro_batch;
    options_.steps = arguments.steps;
    options_.seed = arguments.seed;
    options_.tune = arguments.tune;
    options_.document_mask = arguments.document_mask;
    options_.gradient_dtype = arguments.gradient_dtype == "bf16" ? DType::kBF16 : DType::kF32;
    options_.ranks = ranks.communicator();
    options_.moment_dtype = arguments.moment_dtype == "bf16" ? DType::kBF16 : DType::kF32;
    Context cpu;
    init_weights(cpu, model_, arguments.seed);
    fmt::print("preset {}, random weights and tokens, sequences of {}, on {} {}\n",
               arguments.preset, options_.length, ranks.identity().size, gpu_);
    if (kPortableBuild) fmt::print("{}\n", kPortableProducts);
  }

  void run() {
    std::optional<Measured> first;
    for (const std::string& level : arguments_.recompute) {
      const Measured dense = measure(level, /*sparse=*/false);
      std::optional<Measured> sparse;
      if (!arguments_.patterns.empty()) sparse = measure(level, /*sparse=*/true);
      report(dense, sparse);
      if (!first) first = dense;
    }
    for (const std::string& level : arguments_.sparse_recompute) {
      report(*first, measure(level, /*sparse=*/true));
    }
  }

 private:
  Measured measure(const std::string& level, bool sparse) {
    ++runs_;
    TrainBenchmarkOptions options = options_;
    options.recompute = parse_recompute(level);
    if (sparse) options = sparse_options(config_, options, arguments_);
    if (arguments_.micro_batch == 0) {
      const int64_t largest = largest_micro_batch(stream_.get(), config_, options);
      options.micro_batch = std::stoll(
          ranks_.from_first(fmt::format("micro-batch {}", runs_), std::to_string(largest)));
    }
    TrainBenchmarkRun run = sparse ? replayed(stream_.get(), model_, options, arguments_)
                                   : benchmark_training(stream_.get(), model_, options);
    return {std::move(run), options.micro_batch, level};
  }

  void report(const Measured& dense, const std::optional<Measured>& sparse) {
    fmt::print("\ndense: {} sequences, recompute {}\n", dense.micro_batch, dense.recompute);
    std::optional<TrainBenchmarkRun> other;
    if (sparse) {
      print_paragraphs(fmt::format(
          "sparse: {} sequences, recompute {}, REPLAY of captured patterns {}; the gate "
          "GEMM runs, its result is unused",
          sparse->micro_batch, sparse->recompute, arguments_.patterns.string()));
      other = sparse->run;
    }
    print_runs(dense.run, other);
    nlohmann::json line = machine_json(0);
    line.erase("threads");
    line["bench"] = "train";
    line["gpu"] = gpu_;
    line["subject"] = fmt::format("preset {}, random weights and tokens", arguments_.preset);
    line["length"] = options_.length;
    line["steps"] = options_.steps;
    line["document_mask"] = options_.document_mask;
    line["moment_dtype"] = arguments_.moment_dtype;
    line["tuned_products"] = options_.tune;
    line["replayed_patterns"] = arguments_.patterns.filename().string();
    line["dense"] = measured_json(dense);
    if (sparse) {
      line["sparse"] = measured_json(*sparse);
      line["sparse"]["ffn_policy"] = arguments_.policy;
    }
    line["gpus"] = ranks_.identity().size;
    if (ranks_.identity().size > 1) line["gradient_dtype"] = arguments_.gradient_dtype;
    if (ranks_.first()) append_jsonl(arguments_.jsonl, line);
  }

  static nlohmann::json measured_json(const Measured& measured) {
    nlohmann::json json = run_json(measured.run);
    json["micro_batch"] = measured.micro_batch;
    json["recompute"] = measured.recompute;
    return json;
  }

  const BenchTrain& arguments_;
  const RankGroup& ranks_;
  int64_t runs_ = 0;
  ModelConfig config_;
  CudaStream stream_;
  std::string gpu_;
  Model model_;
  TrainBenchmarkOptions options_;
};

}  // namespace

int run_bench_train_cuda(const BenchTrain& arguments) {
  const RankIdentity identity = process_identity();
  int devices = 0;
  TWELL_CUDA_CHECK(cudaGetDeviceCount(&devices));
  TWELL_CUDA_CHECK(cudaSetDevice(device_of_rank(identity, devices)));
  const RankGroup ranks(identity, std::chrono::seconds(120));
  // One process prints.
  if (!ranks.first() && std::freopen("/dev/null", "w", stdout) == nullptr) return kExitFailure;
  try {
    TrainBench(arguments, ranks).run();
  } catch (const RankFault&) {
    throw;
  } catch (const std::exception& error) {
    ranks.fail(error.what());
    throw;
  }
  return kExitOk;
}

}  // namespace twell::cli
