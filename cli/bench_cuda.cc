// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_cuda.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "bench/forward_benchmark_cuda.h"
#include "bench/harness_cuda.h"
#include "bench/synthetic_model.h"
#include "cli/bench.h"
#include "cli/options.h"
#include "cli/text_layout.h"
#include "twell/base/error.h"
#include "twell/checkpoint/load_model_cuda.h"
#include "twell/infer/engine_cuda.h"
#include "twell/infer/session_cuda.h"

namespace twell::cli {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

// A model on the device; only a synthetic one can be made sparse.
struct Loaded {
  Loaded(CudaContext& context, const BenchSubject& subject) : ctx(context) {
    synthetic = subject.checkpoint.empty();
    if (!synthetic) {
      model = load_model_cuda(ctx, subject.checkpoint, 0,
                              {.allow_non_finite = subject.allow_non_finite,
                               .weights = subject.weights,
                               .head_in_bytes = subject.head_in_bytes});
      return;
    }
    TWELL_REQUIRE(subject.weights != ByteType::kInt8, "int8 weights run on the CPU");
    Context cpu;
    model =
        std::make_unique<ModelCuda>(ctx, *synthetic_model(cpu, preset_of(subject), subject.seed));
    if (!subject.weights) return;
    set_sparse(true);
    model = ModelCuda::in_bytes(
        ctx, *model,
        subject.head_in_bytes ? CudaBytes::kProjectionsAndHead : CudaBytes::kProjections);
  }
  void set_sparse(bool sparse) const {
    if (synthetic) set_synthetic_sparsity(ctx, *model, sparse);
  }

  CudaContext& ctx;
  bool synthetic = false;
  std::unique_ptr<ModelCuda> model;
};

double used_mib() {
  size_t free = 0, total = 0;
  TWELL_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return static_cast<double>(total - free) / kMiB;
}

nlohmann::json run_json(const ForwardRunCuda& run, int64_t tokens) {
  nlohmann::json json = {{"body", rate_json(run.body, tokens)},
                         {"full", rate_json(run.full, tokens)},
                         {"millijoules_per_token", 1e3 * run.joules_per_token},
                         {"watts", run.watts},
                         {"nnz_per_token", run.nnz_per_token},
                         {"executions", run.executions}};
  for (const auto& [stage, seconds] : run.stage_seconds) json["stage_ms"][stage] = 1e3 * seconds;
  return json;
}

void print_forward(const ForwardRunCuda& dense, const ForwardRunCuda& sparse, int64_t tokens) {
  const auto row = [&](const char* name, double d, double s, double ratio) {
    fmt::print("{:<22} {:>12.2f} {:>12.2f} {:>8.3f}x\n", name, d, s, ratio);
  };
  const auto rate = [&](const Timing& t) { return static_cast<double>(tokens) / t.median * 1e-3; };
  fmt::print("{:<22} {:>12} {:>12} {:>9}\n", "", "dense", "sparse", "ratio");
  row("body, tokens/ms", rate(dense.body), rate(sparse.body),
      dense.body.median / sparse.body.median);
  row("with head, tokens/ms", rate(dense.full), rate(sparse.full),
      dense.full.median / sparse.full.median);
  if (dense.joules_per_token > 0.0) {
    row("mJ/token", 1e3 * dense.joules_per_token, 1e3 * sparse.joules_per_token,
        sparse.joules_per_token / dense.joules_per_token);
    row("watts", dense.watts, sparse.watts, sparse.watts / dense.watts);
  }
  row("body, ms", 1e3 * dense.body.median, 1e3 * sparse.body.median,
      dense.body.median / sparse.body.median);
  std::map<std::string, std::pair<double, double>> stages;
  for (const auto& [stage, seconds] : dense.stage_seconds) stages[stage].first = seconds;
  for (const auto& [stage, seconds] : sparse.stage_seconds) stages[stage].second = seconds;
  for (const auto& [stage, seconds] : stages) {
    row(fmt::format("  {}, ms", stage).c_str(), 1e3 * seconds.first, 1e3 * seconds.second,
        seconds.second == 0.0 ? 0.0 : seconds.first / seconds.second);
  }
  double nnz = 0.0;
  for (const double of_layer : sparse.nnz_per_token) nnz += of_layer;
  std::map<std::string, int> layers;
  for (const std::string& execution : sparse.executions) ++layers[execution];
  std::string runs;
  for (const auto& [execution, count] : layers) {
    runs += fmt::format("{}{} {}", runs.empty() ? "" : ", ", count, execution);
  }
  fmt::print("active neurons per token and layer: {:.1f}; layers: {}\n",
             nnz / static_cast<double>(std::max<size_t>(sparse.nnz_per_token.size(), 1)), runs);
  if (sparse.checked_pairs > 0) {
    fmt::print("screens: {:.0f} MiB, {} of {} active pairs missed, on sampled tokens\n",
               static_cast<double>(sparse.rotated_bytes) / kMiB, sparse.missed_pairs,
               sparse.checked_pairs);
  }
}

}  // namespace

namespace {

// Dense against sparse, with weights as the subject says.
void compare_forward_cuda(CudaContext& ctx, const BenchForwardCuda& arguments) {
  const Loaded loaded(ctx, arguments.subject);
  const ModelConfig& config = loaded.model->config();
  const int64_t length = arguments.length == 0 ? config.context : arguments.length;
  const std::vector<int32_t> ids =
      arguments.ids.empty()
          ? random_tokens(arguments.sequences * length, config.vocab_size, arguments.subject.seed)
          : arguments.ids;
  const int64_t tokens = std::ssize(ids);
  loaded.set_sparse(true);
  ForwardBenchmarkCuda benchmark(ctx, *loaded.model, ids, length, arguments.policy);
  std::unique_ptr<PatternReplayCuda> replay;
  if (!arguments.patterns.empty()) {
    replay = std::make_unique<PatternReplayCuda>(ctx, arguments.patterns, config, tokens);
  }
  const char* const weights = loaded.model->in_bytes() ? "fp8" : "bf16";
  fmt::print("{} on {}, {} x {} tokens, weights in {}\n", describe(arguments.subject),
             ctx.device_name(), arguments.sequences, length, weights);
  if (replay) {
    print_paragraphs(fmt::format(
        "sparse: REPLAY of captured patterns {}; the gate GEMM runs, its result is unused",
        arguments.patterns.string()));
  } else if (loaded.synthetic) {
    fmt::print("sparse: synthetic, random neurons fire; dense: half of them do\n");
  }
  if (!benchmark.energy().unavailable().empty()) {
    fmt::print("no energy: {}\n", benchmark.energy().unavailable());
  }
  const double error = benchmark.sparse_error();
  loaded.set_sparse(false);
  const ForwardRunCuda dense = benchmark.dense(arguments.seconds);
  loaded.set_sparse(true);
  const ForwardRunCuda sparse = benchmark.sparse(arguments.seconds, replay.get());
  print_forward(dense, sparse, tokens);
  fmt::print("sparse against dense on the same weights: relative difference {:.2e}\n", error);
  fmt::print("memory in use {:.0f} MiB; attention: {}\n", used_mib(), attention_report(ctx));

  nlohmann::json row = device_json(ctx);
  row["bench"] = "forward";
  row["attention"] = attention_report(ctx);
  row["subject"] = describe(arguments.subject);
  row["weights"] = weights;
  row["sequences"] = arguments.sequences;
  row["length"] = length;
  row["ffn"] = ffn_policy_name(arguments.policy);
  row["replayed_patterns"] = arguments.patterns.filename().string();
  row["dense"] = run_json(dense, tokens);
  row["sparse"] = run_json(sparse, tokens);
  row["sparse_relative_difference"] = error;
  row["screen_checked_pairs"] = sparse.checked_pairs;
  row["screen_missed_pairs"] = sparse.missed_pairs;
  row["screen_bytes"] = sparse.rotated_bytes;
  row["memory_mib"] = used_mib();
  append_jsonl(arguments.jsonl, row);
}

}  // namespace

int run_bench_forward_cuda(const BenchForwardCuda& arguments) {
  const CudaStream stream;
  CudaContext ctx(stream.get());
  use_products_of_build(ctx);
  BenchForwardCuda wide = arguments;
  wide.subject.weights = {};
  compare_forward_cuda(ctx, wide);
  if (arguments.subject.weights) compare_forward_cuda(ctx, arguments);
  return kExitOk;
}

int run_bench_decode_cuda(const BenchDecode& arguments) {
  const CudaStream stream;
  CudaContext ctx(stream.get());
  const Loaded loaded(ctx, arguments.subject);
  const ModelCuda& model = *loaded.model;
  DecodeDevice device{.name = ctx.device_name(),
                      .config = model.config(),
                      .memory = {.weights = model.bytes(),
                                 .element = sizeof(BF16),
                                 .kv_token = KvCacheCuda::token_bytes(
                                     model.config(), arguments.load.eight_bit_cache)},
                      .bytes_per_second = 1e6 * gpu_device(ctx).bandwidth,
                      .bandwidth_source = "the device states",
                      .session =
                          [&](const SessionOptions& options) {
                            SessionOptions of_model = options;
                            of_model.weights_in_bytes = model.in_bytes();
                            return std::make_unique<SessionCuda>(ctx, model, of_model);
                          },
                      .first_fields = [&] { return device_json(ctx); }};
  if (loaded.synthetic) device.set_sparse = [&](bool sparse) { loaded.set_sparse(sparse); };
  compare_decoding(arguments, device);
  return kExitOk;
}

}  // namespace twell::cli
