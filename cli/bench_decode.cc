// SPDX-License-Identifier: Apache-2.0
// twell bench decode: generated tokens per second, dense against sparse, in one run.
#include "cli/bench_decode.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/synthetic_model.h"
#include "bench/synthetic_tokenizer.h"
#include "cli/bench.h"
#include "cli/bench_cuda.h"
#include "cli/device.h"
#include "cli/loading.h"
#include "cli/process.h"
#include "cli/text_layout.h"
#include "twell/base/error.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/grammar/grammar.h"
#include "twell/model/kv_cache.h"

namespace twell::cli {
namespace {

constexpr int64_t kMostTokens = 1 << 25;  // half of the longest context

constexpr const char* kManyValues = R"(root ::= (value "\n")*
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (pair ("," ws pair)*)? "}"
pair ::= string ":" ws value
array ::= "[" ws (value ("," ws value)*)? "]"
string ::= "\"" ([^"\\\n] | "\\" ["\\nrt])* "\""
number ::= "-"? [0-9]+ ("." [0-9]+)?
ws ::= [ ]?
)";

struct BenchDecodeArguments {
  BenchDecode bench;
  TextOptions text;
  double temperature = 0.0;
};

int64_t weight_bytes(const ModelView& model) {
  int64_t bytes = 0;
  for (const WeightMatrix& parameter : model.parameters) {
    bytes += parameter.rows * parameter.cols * static_cast<int64_t>(dtype_size(parameter.dtype));
  }
  return bytes;
}

int run_on_cpu(const CommonOptions& common, const BenchDecode& bench) {
  std::unique_ptr<Engine> engine;
  Model* synthetic = nullptr;
  DecodeLoad largest = bench.load;
  largest.batch = std::ranges::max(bench.batches);
  if (bench.subject.preset.empty()) {
    const ModelConfig config = load_config(common.checkpoint);
    engine = load_engine(common, {.session = decode_session(config, largest, FfnPolicy::kAuto)});
  } else {
    const ModelConfig config = preset_of(bench.subject);
    const SessionOptions session = decode_session(config, largest, FfnPolicy::kAuto);
    require_memory(4 * config.parameter_count() +
                   KvCache::bytes(config, session.slots, session.capacity, session.cache));
    Context ctx(common.threads);
    std::unique_ptr<Model> model = synthetic_model(ctx, config, bench.subject.seed);
    synthetic = model.get();
    auto cpu = std::make_unique<EngineCpu>(std::move(model), common.threads);
    cpu->set_compute(parse_matmul_compute(common.compute));
    engine = std::move(cpu);
  }
  const ModelView& model = *engine->host_model();
  Context ctx(common.threads);
  DecodeDevice device{
      .name = fmt::format("{}, {} threads", cpu_name(), ctx.threads()),
      .config = model.config,
      .memory = {.weights = weight_bytes(model),
                 .element = model.stored.layers.front().ffn.w_up.value_bytes(),
                 .embedding_element = model.stored.embedding.value_bytes(),
                 .kv_token = KvCache::block_bytes(model.config,
                                                  {.eight_bits = bench.load.eight_bit_cache}) /
                             KvFormat{}.block_tokens},
      .bytes_per_second = host_read_bandwidth(ctx),
      .bandwidth_source = "measured by reading 256 MiB",
      .session = [&](const SessionOptions& options) { return engine->session(options); },
      .first_fields = [&] { return machine_json(ctx.threads()); }};
  if (synthetic != nullptr) {
    device.set_sparse = [&](bool sparse) { set_synthetic_sparsity(*synthetic, sparse); };
  }
  compare_decoding(bench, device);
  return kExitOk;
}

int run_bench_decode(const CommonOptions& common, BenchDecodeArguments& arguments) {
  BenchDecode& bench = arguments.bench;
  TWELL_REQUIRE(common.checkpoint.empty() != bench.subject.preset.empty(),
                "bench decode needs either --checkpoint DIR or --preset NAME");
  TWELL_REQUIRE(bench.subject.kv_heads == 0 || common.checkpoint.empty(),
                "--kv-heads changes a preset; the heads of a checkpoint are in its config.json");
  const int64_t length = bench.load.prompt + bench.load.tokens;
  if (!common.checkpoint.empty()) {
    const int64_t context = load_config(common.checkpoint).context;
    TWELL_REQUIRE(length <= context,
                  "--prompt-tokens {} and --tokens {} exceed the model's context of {}",
                  bench.load.prompt, bench.load.tokens, context);
  }
  bench.subject.checkpoint = common.checkpoint;
  bench.subject.context = length;
  bench.subject.seed = bench.load.seed = common.seed;
  bench.subject.allow_non_finite = common.allow_non_finite;
  bench.subject.weights = load_options(common).weights;
  bench.subject.head_in_bytes = load_options(common).head_in_bytes;
  bench.load.temperature = static_cast<float>(arguments.temperature);
  if (!common.data.empty() || !arguments.text.shards.empty()) {
    TWELL_REQUIRE(bench.subject.preset.empty(),
                  "--data and --shards need --checkpoint: a preset has no tokenizer");
    bench.prompts =
        first_tokens(common, arguments.text, std::ranges::max(bench.batches) * bench.load.prompt);
    bench.load.prompts = bench.prompts;
  }
  TWELL_REQUIRE(use_cuda(common) || !bench.subject.weights ||
                    (bench.subject.weights == ByteType::kInt8 && bench.subject.preset.empty()),
                "--weights {} needs a GPU; --weights int8 runs on the CPU, with --checkpoint",
                common.weights);
  TWELL_REQUIRE(!bench.subject.head_in_bytes || bench.subject.preset.empty() ||
                    bench.subject.weights == ByteType::kE4M3,
                "--head {} needs --checkpoint or --weights fp8", common.head);
  return use_cuda(common) ? run_bench_decode_cuda(bench) : run_on_cpu(common, bench);
}

// Stands for a grammar: masks that take a given time to make.
class SlowFilter final : public TokenFilter {
 public:
  explicit SlowFilter(double micros) : time_(static_cast<int64_t>(1000.0 * micros)) {}
  void accept(uint64_t, int32_t) override {}
  void rewind(uint64_t) override {}
  void allowed(std::span<uint32_t> mask) override {
    const auto end = std::chrono::steady_clock::now() + time_;
    std::ranges::fill(mask, 0xdb6db6dbu);
    while (std::chrono::steady_clock::now() < end) {
    }
  }
  bool ended() const override { return false; }

 private:
  std::chrono::nanoseconds time_;
};

// Steps whose tokens are drawn by a grammar, texts of JSON one after the other, beside those
// without.
void compare_masks(const BenchDecode& arguments, const DecodeDevice& device) {
  const int64_t vocab = device.config.vocab_size;
  const double micros = arguments.mask_micros;
  std::optional<Grammar> grammar;
  if (micros == 0.0) {
    const Tokenizer tokenizer = synthetic_tokenizer(vocab);
    grammar = GrammarCompiler(tokenizer, {.end_tokens = {0}})
                  .compile({GrammarText::Kind::kEbnf, kManyValues});
  }
  const auto filter = [&]() -> std::unique_ptr<TokenFilter> {
    if (!grammar) return std::make_unique<SlowFilter>(micros);
    return grammar->filter(std::vector<int32_t>{0});
  };
  fmt::print("masks: {}\n", grammar
                                ? "of a grammar of JSON texts"
                                : fmt::format("all tokens but every third, {} us each", micros));
  const Table table({{.header = "batch"},
                     {.header = "dense tok/s"},
                     {.header = "with masks"},
                     {.header = "ratio", .width = 6},
                     {.header = "sparse tok/s"},
                     {.header = "with masks"},
                     {.header = "ratio", .width = 6}});
  table.print_header();
  for (const int64_t batch : arguments.batches) {
    DecodeLoad load = arguments.load;
    load.batch = batch;
    load.ahead = true;
    const auto run = [&](bool sparse, bool masks) {
      if (device.set_sparse) device.set_sparse(sparse);
      load.filter = nullptr;
      if (masks) load.filter = filter;
      load.filter_vocab = vocab;
      const FfnPolicy policy = sparse ? FfnPolicy::kAuto : FfnPolicy::kDense;
      return static_cast<double>(batch) /
             run_decode(*device.session(decode_session(device.config, load, policy)), load)
                 .step_seconds;
    };
    nlohmann::json row = device.first_fields();
    row["bench"] = "decode with masks";
    row["subject"] = describe(arguments.subject);
    row["batch"] = batch;
    row["prompt"] = load.prompt;
    row["tokens"] = load.tokens;
    row["temperature"] = load.temperature;
    row["mask_us"] = micros;
    std::vector<std::string> cells = {fmt::format("{}", batch)};
    for (const bool sparse : {false, true}) {
      const double without = run(sparse, false), with = run(sparse, true);
      const std::string name = sparse ? "sparse" : "dense";
      row[name + "_tokens_per_s"] = without;
      row[name + "_tokens_per_s_with_masks"] = with;
      cells.push_back(fmt::format("{:.1f}", without));
      cells.push_back(fmt::format("{:.1f}", with));
      cells.push_back(fmt::format("{:.3f}", with / without));
    }
    table.print_row(cells);
    append_jsonl(arguments.jsonl, row);
  }
}

}  // namespace

ModelConfig preset_of(const BenchSubject& subject) {
  ModelConfig config = preset_config(subject.preset);
  config.context = std::max(config.context, subject.context);
  if (subject.kv_heads > 0) config.kv_heads = subject.kv_heads;
  config.validate();
  return config;
}

std::string describe(const BenchSubject& subject) {
  if (!subject.checkpoint.empty()) return fmt::format("checkpoint {}", subject.checkpoint.string());
  return fmt::format(
      "preset {}{}, random weights and tokens", subject.preset,
      subject.kv_heads == 0 ? "" : fmt::format(" with {} key/value heads", subject.kv_heads));
}

void compare_decoding(const BenchDecode& arguments, const DecodeDevice& device) {
  print_paragraphs(fmt::format("{} on {}, {} tokens behind {}{}", describe(arguments.subject),
                               device.name, arguments.load.tokens, arguments.load.prompt,
                               arguments.load.eight_bit_cache ? ", 8-bit keys and values" : ""));
  if (device.set_sparse) {
    fmt::print("sparse: synthetic, about one neuron in 200 fires, at random\n");
  }
  print_paragraphs(fmt::format(
      "bound: reading weights, keys and values once at {:.3g} GB/s, as {}; sparse layers read up "
      "and down of neurons that fire",
      1e-9 * device.bytes_per_second, device.bandwidth_source));
  if (arguments.masks) return compare_masks(arguments, device);
  const Table table({{.header = "batch"},
                     {.header = "dense tok/s"},
                     {.header = "sparse tok/s"},
                     {.header = "ratio", .width = 6},
                     {.header = "dense of bound"},
                     {.header = "sparse of bound"}});
  table.print_header();
  for (const int64_t batch : arguments.batches) {
    DecodeLoad load = arguments.load;
    load.batch = batch;
    const auto run = [&](bool sparse) {
      if (device.set_sparse) device.set_sparse(sparse);
      const FfnPolicy policy = sparse ? FfnPolicy::kAuto : FfnPolicy::kDense;
      return run_decode(*device.session(decode_session(device.config, load, policy)), load);
    };
    const DecodeRun dense_run = run(false), sparse_run = run(true);
    const double dense = dense_run.step_seconds, sparse = sparse_run.step_seconds;
    const auto& active = sparse_run.active;
    const auto bound = [&](std::span<const ActiveNeurons> of) {
      return decode_step_bytes(device.config, device.memory, load, of) / device.bytes_per_second;
    };
    const double dense_share = bound({}) / dense, sparse_share = bound(active) / sparse;
    const auto sequences = static_cast<double>(batch);
    table.print_row({fmt::format("{}", batch), fmt::format("{:.1f}", sequences / dense),
                     fmt::format("{:.1f}", sequences / sparse),
                     fmt::format("{:.2f}x", dense / sparse),
                     fmt::format("{:.1f}%", 100.0 * dense_share),
                     fmt::format("{:.1f}%", 100.0 * sparse_share)});
    nlohmann::json row = device.first_fields();
    row["bench"] = "decode";
    row["subject"] = describe(arguments.subject);
    row["batch"] = batch;
    row["prompt"] = load.prompt;
    row["tokens"] = load.tokens;
    row["temperature"] = load.temperature;
    row["eight_bit_cache"] = load.eight_bit_cache;
    row["dense_tokens_per_s"] = sequences / dense;
    row["sparse_tokens_per_s"] = sequences / sparse;
    row["dense_processor_ms"] = 1e3 * dense_run.processor_seconds;
    row["sparse_processor_ms"] = 1e3 * sparse_run.processor_seconds;
    row["dense_share_of_bound"] = dense_share;
    row["sparse_share_of_bound"] = sparse_share;
    append_jsonl(arguments.jsonl, row);
  }
}

void add_bench_decode_command(Command& bench, CommonOptions& common) {
  auto arguments = std::make_shared<BenchDecodeArguments>();
  BenchDecode& bench_decode = arguments->bench;
  Command& command = bench.add("decode", "Tokens a second while generating");
  command.runs([&common, arguments] { return run_bench_decode(common, *arguments); });
  add_checkpoint_option(command, common).required(false);
  add_weights_option(command, common);
  add_preset_option(command, bench_decode.subject.preset,
                    "A preset with random weights instead of a checkpoint");
  command
      .value("--kv-heads", &bench_decode.subject.kv_heads, "N",
             "Key/value heads of the preset, a divisor of its heads (default: one for each head)")
      .at_least(1);
  add_text_options(command, common, arguments->text);
  command.value("--batch", &bench_decode.batches, "N", "Sequences decoded together; repeatable")
      .at_least(1)
      .several_values();
  command
      .value("--prompt-tokens", &bench_decode.load.prompt, "N",
             "Prompt tokens of each sequence, which are not timed")
      .range(1, kMostTokens);
  command.value("--tokens", &bench_decode.load.tokens, "N", "Tokens decoded per sequence")
      .range(1, kMostTokens);
  command
      .value("--temperature", &arguments->temperature, "X",
             "Softmax temperature; 0 takes the most likely token every time")
      .range(0, 100);
  command.flag("--cache-8bit", &bench_decode.load.eight_bit_cache,
               "Keep keys and values in 8 bits");
  command.flag("--masks", &bench_decode.masks,
               "Compare steps drawn by a grammar with those without, on a made-up vocabulary");
  command
      .value("--mask-us", &bench_decode.mask_micros, "N",
             "With --masks: masks of a stand-in for a grammar that take so many microseconds")
      .range(0, 100000);
  command.value("--jsonl", &bench_decode.jsonl, "FILE",
                "Append a JSON line per batch to this file");
  add_compute_options(command, common);
  command.footer("Example:\n  twell bench decode --preset 2b --batch 1 --batch 64");
}

}  // namespace twell::cli
