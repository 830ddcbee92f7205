// SPDX-License-Identifier: Apache-2.0
// twell inspect: a checkpoint's tensors, whether its weights are healthy, and its sparsity on a
// text.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/device.h"
#include "cli/inspection.h"
#include "cli/loading.h"
#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/json_fields.h"
#include "twell/checkpoint/checkpoint.h"

namespace twell::cli {
namespace {

constexpr int64_t kTokensShown = 12;

struct InspectArguments {
  TextOptions text;
  int64_t max_tokens = 65536;
  bool tensors = false;
  const Option* json = nullptr;  // given without a file name: print
  std::filesystem::path json_file;
  std::filesystem::path html_file;
};

TensorHealth tensor_health(Context& ctx, const Model& model, const ParamSpec& spec) {
  constexpr int64_t kPiece = 1 << 16;  // fixed, so that threads do not change a sum
  struct Sum {
    double squares = 0.0, max_abs = 0.0;
    int64_t not_finite = 0;
  };
  const float* values = model.flat.data() + spec.offset;
  std::vector<Sum> sums(static_cast<size_t>((spec.size() + kPiece - 1) / kPiece));
  ctx.parallel_for(std::ssize(sums), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t piece = begin; piece < end; ++piece) {
      Sum sum;
      for (int64_t i = piece * kPiece; i < std::min((piece + 1) * kPiece, spec.size()); ++i) {
        const bool finite = std::isfinite(values[i]);
        const double value = finite ? static_cast<double>(values[i]) : 0.0;
        sum.squares += value * value;
        sum.max_abs = std::max(sum.max_abs, std::abs(value));
        sum.not_finite += finite ? 0 : 1;
      }
      sums[static_cast<size_t>(piece)] = sum;
    }
  });
  TensorHealth health{.name = spec.name, .rows = spec.rows, .cols = spec.cols};
  double squares = 0.0;
  for (const Sum& sum : sums) {
    squares += sum.squares;
    health.max_abs = std::max(health.max_abs, sum.max_abs);
    health.not_finite += sum.not_finite;
  }
  health.rms = std::sqrt(squares / static_cast<double>(spec.size()));
  return health;
}

// The token in quotes, with escapes for characters that would break or hide in a line.
std::string quoted(std::string_view bytes) { return json_text(bytes); }

std::vector<TokenRow> token_rows(const ActivityProfile& profile, const Tokenizer& tokenizer,
                                 bool most) {
  std::vector<TokenRow> rows;
  for (const int32_t id : profile.extreme_tokens(kTokensShown, most)) {
    // Shards may contain ids that the tokenizer does not define.
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
  result.weights = load_weight_bytes(common.checkpoint);
  const Tokenizer tokenizer = load_tokenizer(common.checkpoint, result.config);
  std::optional<TextPieces> text;
  if (!common.data.empty() || !arguments.text.shards.empty()) {
    text.emplace(common, arguments.text, tokenizer, arguments.max_tokens);
  }
  Context ctx(common.threads);
  std::unique_ptr<Model> model =
      load_model(ctx, common.checkpoint, {.allow_non_finite = common.allow_non_finite});
  for (const ParamSpec& spec : model->table) {
    result.tensors.push_back(tensor_health(ctx, *model, spec));
    if (result.tensors.back().not_finite > 0) ++result.damaged_tensors;
  }
  if (!text) return result;
  const std::unique_ptr<Engine> engine =
      load_engine(common, {.scorer = Evaluator::plan(result.config, {})}, std::move(model));
  const std::unique_ptr<Scorer> scorer = engine->scorer(FfnPolicy::kAuto);
  std::optional<ActivityProfiler> profiler;
  if (leaves_zeros(result.config.activation)) {
    profiler.emplace(result.config, engine->costs());
    result.costs_of = profiler->costs().device();
  }
  Evaluator evaluator(*scorer, {.profiler = profiler ? &*profiler : nullptr});
  text->for_each([&](const TextPiece& piece) {
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

// A text may take minutes, so that a file which cannot be written is refused before it.
void require_writable(const std::filesystem::path& file) {
  if (file.empty()) return;
  const std::filesystem::path folder = file.has_parent_path() ? file.parent_path() : ".";
  TWELL_REQUIRE(::access(folder.c_str(), W_OK) == 0, "cannot write {}: {}", file.string(),
                std::strerror(errno));
}

int run_inspect(const CommonOptions& common, const InspectArguments& arguments) {
  require_writable(arguments.json_file);
  require_writable(arguments.html_file);
  const Inspection inspection = inspect(common, arguments);
  const bool json = arguments.json->given();
  if (json && arguments.json_file.empty()) {
    fmt::print("{}\n", json_text(inspection_json(inspection)));
  } else {
    print_inspection(inspection, arguments.tensors);
  }
  if (!arguments.json_file.empty()) {
    write_file_atomic(arguments.json_file, json_text(inspection_json(inspection), 1) + "\n");
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

void add_inspect_command(Command& root, CommonOptions& common) {
  auto arguments = std::make_shared<InspectArguments>();
  Command& command = root.add("inspect", "Configuration, health and sparsity of a checkpoint");
  command.runs([&common, arguments] { return run_inspect(common, *arguments); });
  add_checkpoint_option(command, common);
  add_text_options(command, common, arguments->text);
  command.value("--max-tokens", &arguments->max_tokens, "N",
                "Tokens of the text to measure sparsity on; 0: all");
  command.flag("--tensors", &arguments->tensors, "List every tensor");
  arguments->json =
      &command
           .value("--json", &arguments->json_file, "[FILE]",
                  "Write everything as one JSON object into FILE; without FILE, print it")
           .value_optional();
  command.value("--html", &arguments->html_file, "FILE", "Write a page with plots");
  add_compute_options(command, common);
  command.footer(
      "Sparsity is measured when a text is given (--data or --shards).\n\nExample:\n"
      "  twell inspect --checkpoint runs/first/checkpoint --data book.txt --html inspect.html");
}

}  // namespace twell::cli
