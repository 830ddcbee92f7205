// SPDX-License-Identifier: Apache-2.0
// twell inspect: what is in a checkpoint, whether it is healthy, and how sparse it is on a text.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/device.h"
#include "cli/inspection.h"
#include "cli/loading.h"
#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/model/checkpoint.h"

namespace twell::cli {
namespace {

constexpr int64_t kTokensShown = 12;

struct InspectArguments {
  TextOptions text;
  int64_t max_tokens = 65536;
  bool tensors = false;
  CLI::Option* json = nullptr;  // given without a file: print
  std::filesystem::path json_file;
  std::filesystem::path html_file;
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

// The token in quotes, with escapes for what would not show in one line.
std::string quoted(std::string_view bytes) {
  return nlohmann::json(bytes).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::vector<TokenRow> token_rows(const ActivityProfile& profile, const Tokenizer& tokenizer,
                                 bool most) {
  std::vector<TokenRow> rows;
  for (const int32_t id : profile.extreme_tokens(kTokensShown, most)) {
    // A text of shards may hold ids that the tokenizer has no token for.
    const bool known = id < tokenizer.vocab_size();
    rows.push_back({id, known ? quoted(tokenizer.token_bytes(id)) : fmt::format("#{}", id),
                    profile.by_token[static_cast<size_t>(id)].seen, profile.nnz_of(id)});
  }
  return rows;
}

Inspection inspect(const CommonOptions& common, const InspectArguments& arguments) {
  Inspection result;
  result.checkpoint = common.checkpoint.string();
  result.config = load_config(common.checkpoint);
  const Tokenizer tokenizer = load_tokenizer(common.checkpoint, result.config);
  Context ctx(common.threads);
  std::unique_ptr<Model> model = load_model(ctx, common.checkpoint);
  for (const ParamSpec& spec : model->table) {
    result.tensors.push_back(tensor_health(*model, spec));
    if (result.tensors.back().not_finite > 0) ++result.damaged_tensors;
  }
  if (common.data.empty() && arguments.text.shards.empty()) return result;
  const std::unique_ptr<Engine> engine =
      load_engine(common, {.scorer = Evaluator::plan(result.config, {})}, std::move(model));
  const std::unique_ptr<Scorer> scorer = engine->scorer(FfnPolicy::kAuto);
  std::optional<ActivityProfiler> profiler;
  if (result.config.activation == Activation::kRelu) {
    profiler.emplace(result.config, engine->costs());
    result.costs_of = profiler->costs().device();
  }
  Evaluator evaluator(*scorer, {.profiler = profiler ? &*profiler : nullptr});
  for_each_piece(common, arguments.text, tokenizer, arguments.max_tokens,
                 [&](const TextPiece& piece) {
                   evaluator.add(piece.ids);
                   return true;
                 });
  result.evaluation = evaluator.finish();
  TWELL_REQUIRE(result.evaluation.tokens > 0, "the text is empty: nothing to measure sparsity on");
  if (profiler) {
    result.profile = profiler->profile();
    result.most_active = token_rows(*result.profile, tokenizer, true);
    result.least_active = token_rows(*result.profile, tokenizer, false);
  }
  return result;
}

int run_inspect(const CommonOptions& common, const InspectArguments& arguments) {
  const Inspection inspection = inspect(common, arguments);
  const bool json = arguments.json->count() > 0;
  if (json && arguments.json_file.empty()) {
    fmt::print("{}\n", inspection_json(inspection).dump());
  } else {
    print_inspection(inspection, arguments.tensors);
  }
  if (!arguments.json_file.empty()) {
    write_file_atomic(arguments.json_file, inspection_json(inspection).dump(1) + "\n");
  }
  if (!arguments.html_file.empty()) {
    write_file_atomic(arguments.html_file, inspection_html(inspection));
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
  arguments->json =
      command
          .add_option("--json", arguments->json_file,
                      "Write everything as one JSON object into FILE; without FILE, print it")
          ->type_name("[FILE]")
          ->expected(0, 1);
  command.add_option("--html", arguments->html_file, "Write a page with plots")->type_name("FILE");
  add_compute_options(command, common, Devices::kAny);
  command.footer(
      "Sparsity is measured when a text is given (--data or --shards).\n\nExample:\n"
      "  twell inspect --checkpoint runs/first/checkpoint --data book.txt --html inspect.html");
}

}  // namespace twell::cli
