// SPDX-License-Identifier: Apache-2.0
// twell inspect: what is in a checkpoint, whether it is healthy, and how sparse it is on a text.
#include <fmt/core.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/loading.h"
#include "twell/base/error.h"
#include "twell/infer/evaluate.h"
#include "twell/model/checkpoint.h"

namespace twell::cli {
namespace {

struct InspectArguments {
  TextOptions text;
  int64_t max_tokens = 65536;
  bool tensors = false;
  bool json = false;
};

struct TensorHealth {
  std::string name;
  int64_t rows = 0, cols = 0;
  int64_t not_finite = 0;
  double rms = 0.0;
  double max_abs = 0.0;
};

TensorHealth tensor_health(const Model& model, const ParamSpec& spec) {
  TensorHealth health{.name = spec.name, .rows = spec.rows, .cols = spec.cols};
  double sum = 0.0;
  for (int64_t i = 0; i < spec.size(); ++i) {
    const double value = model.flat[spec.offset + i];
    if (!std::isfinite(value)) {
      ++health.not_finite;
      continue;
    }
    sum += value * value;
    health.max_abs = std::max(health.max_abs, std::abs(value));
  }
  health.rms = std::sqrt(sum / static_cast<double>(spec.size()));
  return health;
}

struct Inspection {
  ModelConfig config;
  std::vector<TensorHealth> tensors;
  int64_t damaged_tensors = 0;
  Evaluation evaluation;  // without layers when no text was given
};

Inspection inspect(const CommonOptions& common, const InspectArguments& arguments) {
  Context ctx(common.threads);
  const LoadedCheckpoint loaded = load_checkpoint(common.checkpoint);
  Inspection result;
  result.config = loaded.model->config;
  for (const ParamSpec& spec : loaded.model->table) {
    result.tensors.push_back(tensor_health(*loaded.model, spec));
    if (result.tensors.back().not_finite > 0) ++result.damaged_tensors;
  }
  if (common.data.empty() && arguments.text.shards.empty()) return result;
  Evaluator evaluator(ctx, *loaded.model, {});
  for_each_piece(common, arguments.text, loaded.tokenizer, arguments.max_tokens,
                 [&](const TextPiece& piece) {
                   evaluator.add(piece.ids);
                   return true;
                 });
  result.evaluation = evaluator.finish();
  TWELL_REQUIRE(result.evaluation.tokens > 0, "the text is empty: nothing to measure sparsity on");
  return result;
}

nlohmann::json to_json(const Inspection& inspection) {
  nlohmann::json json = {{"config", config_to_json(inspection.config)},
                         {"parameters", inspection.config.parameter_count()},
                         {"damaged_tensors", inspection.damaged_tensors}};
  for (const TensorHealth& tensor : inspection.tensors) {
    json["tensors"].push_back({{"name", tensor.name},
                               {"shape", {tensor.rows, tensor.cols}},
                               {"rms", tensor.rms},
                               {"max_abs", tensor.max_abs},
                               {"not_finite", tensor.not_finite}});
  }
  if (inspection.evaluation.tokens > 0) {
    json["tokens"] = inspection.evaluation.tokens;
    json["cross_entropy"] = inspection.evaluation.cross_entropy();
    for (const LayerActivity& layer : inspection.evaluation.layers) {
      json["layers"].push_back({{"nnz_mean", layer.mean()},
                                {"nnz_p50", layer.quantile(0.5)},
                                {"nnz_p99", layer.quantile(0.99)},
                                {"nnz_max", layer.max()}});
    }
  }
  return json;
}

void print_config(const ModelConfig& config) {
  fmt::print("parameters   {:.2f} M\n", static_cast<double>(config.parameter_count()) * 1e-6);
  fmt::print("layers       {}\n", config.layers);
  fmt::print("width        {}\n", config.width);
  fmt::print("ffn          {} ({})\n", config.ffn, config.gated ? "gated" : "not gated");
  fmt::print("heads        {} of {}, {} for keys and values\n", config.heads, config.head_dim,
             config.kv_heads);
  fmt::print("vocabulary   {} ({} embeddings)\n", config.vocab_size,
             config.tied_embeddings ? "tied" : "untied");
  fmt::print("context      {}\n", config.context);
}

void print_tensors(const std::vector<TensorHealth>& tensors) {
  fmt::print("\n{:<48} {:>14} {:>11} {:>11} {:>10}\n", "tensor", "shape", "rms", "max |x|",
             "not finite");
  for (const TensorHealth& tensor : tensors) {
    fmt::print("{:<48} {:>14} {:>11.4e} {:>11.4e} {:>10}\n", tensor.name,
               fmt::format("{}x{}", tensor.rows, tensor.cols), tensor.rms, tensor.max_abs,
               tensor.not_finite);
  }
}

void print_layers(const Evaluation& evaluation, int64_t ffn) {
  fmt::print("\nactive FFN neurons per token, of {}, over {} tokens (CE {:.4f})\n", ffn,
             evaluation.tokens, evaluation.cross_entropy());
  fmt::print("{:>5} {:>9} {:>8} {:>7} {:>7} {:>7}\n", "layer", "mean", "density", "p50", "p99",
             "max");
  double mean = 0.0;
  for (size_t i = 0; i < evaluation.layers.size(); ++i) {
    const LayerActivity& layer = evaluation.layers[i];
    mean += layer.mean() / static_cast<double>(evaluation.layers.size());
    fmt::print("{:>5} {:>9.1f} {:>7.2f}% {:>7} {:>7} {:>7}\n", i, layer.mean(),
               100.0 * layer.mean() / static_cast<double>(ffn), layer.quantile(0.5),
               layer.quantile(0.99), layer.max());
  }
  fmt::print("{:>5} {:>9.1f} {:>7.2f}%\n", "all", mean, 100.0 * mean / static_cast<double>(ffn));
}

int run_inspect(const CommonOptions& common, const InspectArguments& arguments) {
  const Inspection inspection = inspect(common, arguments);
  if (arguments.json) {
    fmt::print("{}\n", to_json(inspection).dump());
  } else {
    print_config(inspection.config);
    fmt::print("health       {}\n",
               inspection.damaged_tensors == 0
                   ? std::string("every weight is a finite number")
                   : fmt::format("{} of {} tensors hold NaN or infinity",
                                 inspection.damaged_tensors, inspection.tensors.size()));
    if (arguments.tensors || inspection.damaged_tensors > 0) print_tensors(inspection.tensors);
    if (inspection.evaluation.tokens > 0) {
      print_layers(inspection.evaluation, inspection.config.ffn);
    }
  }
  TWELL_REQUIRE(inspection.damaged_tensors == 0,
                "{}: {} tensors hold values that are not finite numbers; use an earlier checkpoint",
                common.checkpoint.string(), inspection.damaged_tensors);
  return kExitOk;
}

}  // namespace

void add_inspect_command(CLI::App& app, CommonOptions& common) {
  auto arguments = std::make_shared<InspectArguments>();
  CLI::App& command =
      add_command(app, common, "inspect", "Configuration, health and sparsity of a checkpoint",
                  [&common, arguments] { return run_inspect(common, *arguments); });
  add_checkpoint_option(command, common);
  add_text_options(command, common, arguments->text);
  command
      .add_option("--max-tokens", arguments->max_tokens,
                  "Tokens of the text to measure sparsity on; 0: all")
      ->type_name("N")
      ->capture_default_str();
  command.add_flag("--tensors", arguments->tensors, "List every tensor");
  command.add_flag("--json", arguments->json, "Print one JSON object");
  add_compute_options(command, common);
  command.footer(
      "Sparsity is measured when a text is given (--data or --shards).\n\nExample:\n"
      "  twell inspect --checkpoint runs/first/checkpoint --data book.txt");
}

}  // namespace twell::cli
