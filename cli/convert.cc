// SPDX-License-Identifier: Apache-2.0
// twell convert: rewrites a checkpoint folder in another layout or dtype, or in 8 bits.
#include <fmt/core.h>

#include <chrono>
#include <memory>

#include "cli/commands.h"
#include "cli/process.h"
#include "twell/base/error.h"
#include "twell/checkpoint/convert.h"
#include "twell/checkpoint/quantization.h"
#include "twell/train/metrics.h"

namespace twell::cli {
namespace {

struct ConvertArguments {
  std::string layout = "keep";
  std::string dtype = "keep";
  std::string weights = "keep";
  std::string head = "keep";
};

int run_convert(const CommonOptions& common, const ConvertArguments& arguments) {
  TWELL_REQUIRE(!common.out.empty(), "no output folder given: add --out DIR");
  std::optional<DType> dtype;
  if (arguments.dtype != "keep") dtype = parse_dtype(arguments.dtype);
  std::optional<ByteType> weights;
  if (arguments.weights != "keep") weights = parse_byte_type(arguments.weights);
  stop_on_signals();
  const auto start = std::chrono::steady_clock::now();
  const ConvertResult result =
      convert_checkpoint(common.checkpoint, common.out,
                         {.layout = parse_checkpoint_layout(arguments.layout),
                          .dtype = dtype,
                          .weights = weights,
                          .head_in_bytes = arguments.head == "8bit",
                          .allow_non_finite = common.allow_non_finite,
                          .on_piece = check_interrupted});
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  for (const std::string& note : result.notes) fmt::print("note: {}\n", note);
  const double bytes = static_cast<double>(result.bytes);
  fmt::print("{}: {} files, {}, {}/s\n", common.out.string(), result.files, format_bytes(bytes),
             format_bytes(bytes / seconds.count()));
  return kExitOk;
}

}  // namespace

void add_convert_command(Command& root, CommonOptions& common) {
  auto arguments = std::make_shared<ConvertArguments>();
  Command& command = root.add("convert", "Write a checkpoint in another layout");
  command.runs([&common, arguments] { return run_convert(common, *arguments); });
  add_checkpoint_option(command, common);
  add_out_option(command, common, "New folder to write");
  command.choice("--layout", &arguments->layout, {"keep", "hf", "sparse"},
                 "keep; hf: what transformers opens without code of its own; sparse: as the sparse "
                 "ReLU models were published");
  command.choice("--dtype", &arguments->dtype, {"keep", "f32", "bf16", "f16"},
                 "Type of the weights");
  command.choice("--weights", &arguments->weights, {"keep", "fp8", "int8"},
                 "The projections of the layers in 8 bits with a scale per output, as "
                 "compressed-tensors stores them: fp8 for GPUs, int8 for CPUs");
  command.choice("--head", &arguments->head, {"keep", "8bit"},
                 "The output head in 8 bits too, for CPUs; tied embeddings are untied, and the "
                 "embedding stays as it is");
  command.footer(
      "What does not change is copied byte for byte: tensors, keys, tokenizer and templates.\n\n"
      "Example:\n  twell convert --checkpoint SparseLM0.5B --layout hf --out sparse-hf");
}

}  // namespace twell::cli
