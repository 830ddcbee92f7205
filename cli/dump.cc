// SPDX-License-Identifier: Apache-2.0
// twell dump: every stage of one layer for a prompt as a .safetensors file, and where two such
// files begin to differ.
#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/device.h"
#include "cli/loading.h"
#include "twell/base/error.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/mapped_model.h"
#include "twell/checkpoint/safetensors.h"
#include "twell/infer/generate.h"
#include "twell/model/layer_dump.h"
#ifdef TWELL_HAVE_CUDA
#include "twell/checkpoint/load_model_cuda.h"
#include "twell/model/layer_dump_cuda.h"
#endif

namespace twell::cli {
namespace {

struct DumpArguments {
  int64_t layer = 0;
  std::string prompt;
  std::string ffn = "auto";
  std::filesystem::path against;
  double tolerance = 0.02;
};

struct Dumped {
  LayerDump dump;
  std::string device;
};

Dumped run_layer(const CommonOptions& common, const DumpArguments& arguments,
                 std::span<const int32_t> ids) {
  const FfnPolicy policy = parse_ffn_policy(arguments.ffn);
  const LoadOptions load = load_options(common);
#ifdef TWELL_HAVE_CUDA
  if (use_cuda(common)) {
    const CudaStream stream;
    CudaContext ctx(stream.get());
    const std::unique_ptr<ModelCuda> model = load_model_cuda(ctx, common.checkpoint, 0, load);
    return {dump_layer_cuda(ctx, *model, ids, arguments.layer, policy), ctx.device_name()};
  }
#else
  use_cuda(common);  // throws for "cuda"
#endif
  Context ctx(common.threads);
  use_compute(ctx, common);
  const std::shared_ptr<const ModelView> model = map_model(ctx, common.checkpoint, load);
  return {dump_layer(ctx, *model, ids, arguments.layer, policy),
          fmt::format("CPU ({} threads)", ctx.threads())};
}

template <typename T>
TensorToWrite tensor(std::string name, std::string dtype, std::vector<int64_t> shape,
                     std::span<const T> values) {
  return {std::move(name), std::move(dtype), std::move(shape),
          [values](const auto& sink) { sink(std::as_bytes(values)); }};
}

void write_dump(const std::filesystem::path& path, const Dumped& dumped, int64_t layer,
                std::span<const int32_t> ids) {
  const int64_t tokens = std::ssize(ids);
  std::vector<TensorToWrite> tensors = {tensor("ids", "I32", {tokens}, ids)};
  for (const DumpedStage& stage : dumped.dump.stages) {
    tensors.push_back(
        tensor(stage.name, "F32", {tokens, stage.cols}, std::span<const float>(stage.values)));
  }
  write_safetensors(path, tensors,
                    {{"layer", std::to_string(layer)},
                     {"device", dumped.device},
                     {"execution", dumped.dump.execution}});
}

// The dump to compare with: of the same layer and tokens.
std::optional<SafetensorsFile> open_other(const DumpArguments& arguments,
                                          std::span<const int32_t> ids) {
  if (arguments.against.empty()) return {};
  std::optional<SafetensorsFile> other(arguments.against);
  const std::string file = arguments.against.string();
  const auto layer = other->metadata().find("layer");
  TWELL_REQUIRE(
      layer != other->metadata().end() && layer->second == std::to_string(arguments.layer),
      "{} is no dump of layer {}", file, arguments.layer);
  TWELL_REQUIRE(std::ranges::equal(other->tensor("ids").bytes, std::as_bytes(ids)),
                "{} is a dump of other tokens than the {} of this prompt", file, ids.size());
  return other;
}

// Prints how far each stage is from the other file's, and names the first that is too far.
int compare(const DumpArguments& arguments, const LayerDump& dump, const SafetensorsFile& other) {
  std::string first;
  fmt::print("stage            relative difference\n");
  for (const DumpedStage& stage : dump.stages) {
    const TensorInfo& tensor = other.tensor(stage.name);
    TWELL_REQUIRE(
        tensor.dtype == "F32" && tensor.shape.size() == 2 && tensor.shape[1] == stage.cols &&
            tensor.bytes.size() == std::as_bytes(std::span(stage.values)).size(),
        "{}: {} is not F32 of {} columns", arguments.against.string(), stage.name, stage.cols);
    std::vector<float> values(stage.values.size());
    std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
    const double difference = relative_difference(stage.values, values);
    fmt::print("{:16} {:.3e}\n", stage.name, difference);
    if (first.empty() && !(difference <= arguments.tolerance)) first = stage.name;
  }
  if (first.empty()) {
    fmt::print("every stage is within {}\n", arguments.tolerance);
    return kExitOk;
  }
  fmt::print("the first stage that differs by more than {}: {}\n", arguments.tolerance, first);
  return kExitFailure;
}

int run_dump(const CommonOptions& common, const DumpArguments& arguments) {
  TWELL_REQUIRE(!common.out.empty(), "no output file given: add --out FILE");
  const ModelConfig config = load_config(common.checkpoint);
  const Tokenizer tokenizer = load_tokenizer(common.checkpoint, config);
  const std::vector<int32_t> ids = prompt_ids(config, tokenizer, arguments.prompt);
  check_layer_dump(config, ids, arguments.layer);
  const std::optional<SafetensorsFile> other = open_other(arguments, ids);
  const Dumped dumped = run_layer(common, arguments, ids);
  write_dump(common.out, dumped, arguments.layer, ids);
  fmt::print("{}: layer {} on {} tokens, {} as {}\n", common.out.string(), arguments.layer,
             ids.size(), dumped.device, dumped.dump.execution);
  return other ? compare(arguments, dumped.dump, *other) : kExitOk;
}

}  // namespace

void add_dump_command(Command& root, CommonOptions& common) {
  const auto arguments = std::make_shared<DumpArguments>();
  Command& command = root.add("dump", "Every stage of one layer, to compare executions");
  command.runs([&common, arguments] { return run_dump(common, *arguments); });
  add_checkpoint_option(command, common);
  add_weights_option(command, common);
  add_out_option(command, common, "The .safetensors file to write");
  command.value("--layer", &arguments->layer, "N", "The layer, from 0 on").range(0, 1 << 20);
  command.value("--prompt", &arguments->prompt, "TEXT", "The text it runs on");
  add_ffn_option(command, arguments->ffn, "Execution of the FFN layers");
  command.value("--against", &arguments->against, "FILE",
                "Compare with this dump of the same layer and prompt; exit code 1 where a stage "
                "differs");
  command
      .value("--tolerance", &arguments->tolerance, "SHARE",
             "Largest norm of a stage's difference, as a share of its norm")
      .range(0.0, 1e6);
  add_threads_option(command, common);
  add_device_option(command, common);
  command.footer(
      "The file holds the stages of twell/model/layer_dump.h as F32 [tokens, columns], from the\n"
      "layer's input over norms, q/k/v, attention, gate, up and hidden to its output, and the\n"
      "tokens' ids as I32.\n\nExamples:\n"
      "  twell dump --checkpoint DIR --layer 3 --prompt \"The\" --device cpu --out a.safetensors\n"
      "  twell dump --checkpoint DIR --layer 3 --prompt \"The\" --out b.safetensors --against "
      "a.safetensors");
}

}  // namespace twell::cli
