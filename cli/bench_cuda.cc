// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_cuda.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "bench/forward_benchmark_cuda.h"
#include "bench/synthetic_model_cuda.h"
#include "cli/bench.h"
#include "cli/options.h"
#include "cli/text_layout.h"
#include "twell/checkpoint/load_model_cuda.h"
#include "twell/infer/engine_cuda.h"
#include "twell/infer/session_cuda.h"

namespace twell::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kMiB = 1024.0 * 1024.0;

// A model on the device; only a synthetic one can be made sparse.
struct Loaded {
  Loaded(CudaContext& context, const BenchSubject& subject) : ctx(context) {
    synthetic = subject.checkpoint.empty();
    if (!synthetic) {
      model = load_model_cuda(ctx, subject.checkpoint, 0,
                              {.allow_non_finite = subject.allow_non_finite});
      description = fmt::format("checkpoint {}", subject.checkpoint.string());
      return;
    }
    ModelConfig config = preset_config(subject.preset);
    config.context = std::max(config.context, subject.context);
    if (subject.kv_heads > 0) config.kv_heads = subject.kv_heads;
    config.validate();
    model = synthetic_model(ctx, config, subject.seed);
    description = fmt::format(
        "preset {}{}, random weights and tokens", subject.preset,
        subject.kv_heads == 0 ? "" : fmt::format(" with {} key/value heads", subject.kv_heads));
  }
  void set_sparse(bool sparse) const {
    if (synthetic) set_synthetic_sparsity(ctx, *model, sparse);
  }

  CudaContext& ctx;
  bool synthetic = false;
  std::unique_ptr<ModelCuda> model;
  std::string description;
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
  fmt::print("active neurons per token and layer: {:.1f}; layers run {}\n",
             nnz / static_cast<double>(std::max<size_t>(sparse.nnz_per_token.size(), 1)),
             sparse.executions.front());
}

struct DecodeRun {
  double step_seconds = 0.0;  // median
  std::vector<ActiveNeurons> active;
};

DecodeRun run_decode(CudaContext& ctx, const ModelCuda& model, FfnPolicy policy, int64_t batch,
                     const BenchDecode& arguments) {
  const ModelConfig& config = model.config();
  const int64_t capacity = std::min(config.context, arguments.prompt + arguments.tokens + 8);
  SessionCuda session(ctx, model, {.slots = batch, .capacity = capacity, .ffn = policy});
  std::vector<Draw> draws(static_cast<size_t>(batch));
  std::vector<int64_t> slots;
  std::vector<int32_t> next(static_cast<size_t>(batch));
  for (int64_t slot = 0; slot < batch; ++slot) {
    slots.push_back(slot);
    const auto i = static_cast<size_t>(slot);
    const auto length = static_cast<size_t>(arguments.prompt);
    std::vector<int32_t> random;
    std::span<const int32_t> ids = arguments.prompts;
    if (ids.empty()) {
      random = random_tokens(arguments.prompt, config.vocab_size, arguments.subject.seed + i);
      ids = random;
    } else {
      ids = ids.subspan(i * length, length);
    }
    draws[i].sampler.temperature = static_cast<float>(arguments.temperature);
    draws[i].stream = i;
    const Prompt of_slot{.slot = slot, .ids = ids};
    session.drawn(session.append_and_draw({&of_slot, 1}, {&draws[i], 1}), {&next[i], 1});
  }
  std::vector<double> seconds;
  for (int64_t step = 0; step < arguments.tokens; ++step) {
    for (Draw& draw : draws) ++draw.index;
    const Clock::time_point start = Clock::now();
    session.drawn(session.decode_and_draw(slots, next, draws), next);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  // The median ignores the few slow steps that capture a graph.
  return {summarize(seconds).median, session.active_neurons()};
}

// Seconds to read the weights of a decode step, and the keys and values of the mean step, at the
// bandwidth that the device states. Of up and down in sparse layers only rows of neurons that fire
// for any sequence are read; sequences are taken to fire independently of each other.
double read_seconds(const CudaContext& ctx, const ModelCuda& model, int64_t batch,
                    const BenchDecode& arguments, std::span<const ActiveNeurons> active) {
  const ModelConfig& config = model.config();
  const int64_t unread = config.tied_embeddings ? 0 : 2 * config.vocab_size * config.width;
  auto bytes = static_cast<double>(model.bytes() - unread +
                                   batch * (arguments.prompt + (arguments.tokens + 1) / 2) *
                                       KvCacheCuda::token_bytes(config));
  const auto skippable = static_cast<double>((config.gated ? 2 : 1) * 2 * config.width);
  const auto neurons = static_cast<double>(config.ffn);
  for (const ActiveNeurons& layer : active) {
    if (!layer.sparse) continue;
    const double silent = std::pow(1.0 - layer.per_token / neurons, static_cast<double>(batch));
    bytes -= skippable * neurons * silent;
  }
  return 1e-6 * bytes / gpu_device(ctx).bandwidth;
}

}  // namespace

int run_bench_forward_cuda(const BenchForwardCuda& arguments) {
  const CudaStream stream;
  CudaContext ctx(stream.get());
  const Loaded loaded(ctx, arguments.subject);
  const ModelConfig& config = loaded.model->config();
  const int64_t length = arguments.length == 0 ? config.context : arguments.length;
  const std::vector<int32_t> ids =
      arguments.ids.empty()
          ? random_tokens(arguments.sequences * length, config.vocab_size, arguments.subject.seed)
          : arguments.ids;
  const int64_t tokens = std::ssize(ids);
  ForwardBenchmarkCuda benchmark(ctx, *loaded.model, ids, length);
  std::unique_ptr<PatternReplayCuda> replay;
  if (!arguments.patterns.empty()) {
    replay = std::make_unique<PatternReplayCuda>(ctx, arguments.patterns, config, tokens);
  }
  fmt::print("{} on {}, {} x {} tokens\n", loaded.description, ctx.device_name(),
             arguments.sequences, length);
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
  loaded.set_sparse(true);
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
  row["subject"] = loaded.description;
  row["sequences"] = arguments.sequences;
  row["length"] = length;
  row["replayed_patterns"] = arguments.patterns.filename().string();
  row["dense"] = run_json(dense, tokens);
  row["sparse"] = run_json(sparse, tokens);
  row["sparse_relative_difference"] = error;
  row["memory_mib"] = used_mib();
  append_jsonl(arguments.jsonl, row);
  return kExitOk;
}

int run_bench_decode_cuda(const BenchDecode& arguments) {
  const CudaStream stream;
  CudaContext ctx(stream.get());
  BenchSubject subject = arguments.subject;
  subject.context = arguments.prompt + arguments.tokens + 8;
  const Loaded loaded(ctx, subject);
  fmt::print("{} on {}, {} tokens behind {}\n", loaded.description, ctx.device_name(),
             arguments.tokens, arguments.prompt);
  if (loaded.synthetic) fmt::print("sparse: synthetic, about one neuron in 200 fires, at random\n");
  print_paragraphs(fmt::format(
      "bound: reading weights, keys and values once at {:.2f} TB/s, as the device states; sparse "
      "layers read up and down of neurons that fire",
      1e-6 * gpu_device(ctx).bandwidth));
  const Table table({{.header = "batch"},
                     {.header = "dense tok/s"},
                     {.header = "sparse tok/s"},
                     {.header = "ratio", .width = 6},
                     {.header = "dense of bound"},
                     {.header = "sparse of bound"}});
  table.print_header();
  for (const int64_t batch : arguments.batches) {
    loaded.set_sparse(false);
    const double dense =
        run_decode(ctx, *loaded.model, FfnPolicy::kDense, batch, arguments).step_seconds;
    loaded.set_sparse(true);
    const auto [sparse, active] =
        run_decode(ctx, *loaded.model, FfnPolicy::kAuto, batch, arguments);
    const auto sequences = static_cast<double>(batch);
    const double bound = read_seconds(ctx, *loaded.model, batch, arguments, {});
    const double sparse_bound = read_seconds(ctx, *loaded.model, batch, arguments, active);
    table.print_row({fmt::format("{}", batch), fmt::format("{:.1f}", sequences / dense),
                     fmt::format("{:.1f}", sequences / sparse),
                     fmt::format("{:.2f}x", dense / sparse),
                     fmt::format("{:.1f}%", 100.0 * bound / dense),
                     fmt::format("{:.1f}%", 100.0 * sparse_bound / sparse)});
    nlohmann::json row = device_json(ctx);
    row["bench"] = "decode";
    row["subject"] = loaded.description;
    row["batch"] = batch;
    row["prompt"] = arguments.prompt;
    row["tokens"] = arguments.tokens;
    row["temperature"] = arguments.temperature;
    row["dense_tokens_per_s"] = sequences / dense;
    row["sparse_tokens_per_s"] = sequences / sparse;
    row["dense_share_of_bound"] = bound / dense;
    row["sparse_share_of_bound"] = sparse_bound / sparse;
    append_jsonl(arguments.jsonl, row);
  }
  return kExitOk;
}

}  // namespace twell::cli
