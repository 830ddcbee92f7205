// SPDX-License-Identifier: Apache-2.0
// twell eval: cross-entropy, perplexity and bits per byte of a model on a text, or its accuracy on
// multiple-choice tasks.
#include <fmt/core.h>

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/commands.h"
#include "cli/device.h"
#include "cli/eval_tasks.h"
#include "cli/loading.h"
#include "cli/progress_line.h"
#include "twell/base/error.h"
#include "twell/base/json_fields.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/infer/evaluate.h"
#include "twell/train/trainer_state.h"

namespace twell::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct EvalArguments {
  EvalTasksArguments tasks;
  EvaluateOptions evaluate;
  TextOptions text;
  int64_t max_tokens = 0;
  std::optional<bool> document_mask;  // not given: as the run that saved the checkpoint
  std::string ffn = "auto";
  bool json = false;
};

int run_eval(const CommonOptions& common, EvalArguments& arguments) {
  if (!arguments.tasks.tasks.empty()) {
    arguments.tasks.json = arguments.json;
    arguments.tasks.ffn = arguments.ffn;
    arguments.tasks.run.begin_token = arguments.text.begin_token;
    return run_eval_tasks(common, arguments.tasks);
  }
  const FfnPolicy policy = parse_ffn_policy(arguments.ffn);
  const ModelConfig config = load_config(common.checkpoint);
  const Tokenizer tokenizer = load_tokenizer(common.checkpoint, config);
  TextPieces text(common, arguments.text, tokenizer, arguments.max_tokens);
  if (arguments.document_mask.value_or(saved_document_mask(common.checkpoint))) {
    TWELL_REQUIRE(tokenizer.eos_token() >= 0,
                  "{}: the tokenizer has no end-of-text token, which ends a document; use "
                  "--no-document-mask",
                  common.checkpoint.string());
    arguments.evaluate.document_end = tokenizer.eos_token();
  }
  ScorerPlan plan = Evaluator::plan(config, arguments.evaluate);
  plan.ffn = policy;
  const std::unique_ptr<Engine> engine = load_engine(common, {.scorer = plan});
  const std::unique_ptr<Scorer> scorer = engine->scorer(policy);
  Evaluator evaluator(*scorer, arguments.evaluate);
  ProgressLine progress(30.0, stderr);
  int64_t bytes = 0;
  const Clock::time_point start = Clock::now();
  text.for_each([&](const TextPiece& piece) {
    evaluator.add(piece.ids);
    bytes += piece.bytes;
    const Evaluation& so_far = evaluator.so_far();
    if (so_far.tokens > 0) {
      progress.update(fmt::format("{} tokens, CE {:.4f}", so_far.tokens, so_far.cross_entropy()));
    }
    return true;
  });
  const Evaluation& result = evaluator.finish();
  progress.clear();
  TWELL_REQUIRE(result.tokens > 0, "the text is empty: no token to score");
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  const double nnz = result.mean_active();
  if (arguments.json) {
    std::vector<double> by_layer;
    for (const LayerHistogram& layer : result.layers) by_layer.push_back(layer.mean());
    const nlohmann::json line = {{"checkpoint", common.checkpoint.string()},
                                 {"device", engine->device()},
                                 {"tokens", result.tokens},
                                 {"bytes", bytes},
                                 {"cross_entropy", result.cross_entropy()},
                                 {"perplexity", result.perplexity()},
                                 {"bits_per_byte", result.bits_per_byte(bytes)},
                                 {"nnz_per_token_and_layer", nnz},
                                 {"nnz_per_token", by_layer},
                                 {"seconds", seconds}};
    fmt::print("{}\n", json_text(line));
    return kExitOk;
  }
  fmt::print("tokens          {}\n", result.tokens);
  fmt::print("text bytes      {}\n", bytes);
  fmt::print("cross-entropy   {:.4f} nats per token\n", result.cross_entropy());
  fmt::print("perplexity      {:.3f}\n", result.perplexity());
  fmt::print("bits per byte   {:.4f}\n", result.bits_per_byte(bytes));
  fmt::print("active neurons  {:.1f} of {} per token and layer\n", nnz, config.ffn);
  fmt::print("speed           {:.0f} tok/s on {}\n", static_cast<double>(result.tokens) / seconds,
             engine->device());
  return kExitOk;
}

}  // namespace

void add_eval_command(Command& root, CommonOptions& common) {
  auto arguments = std::make_shared<EvalArguments>();
  Command& command = root.add("eval", "Cross-entropy of a model on a text, or accuracy on tasks");
  command.runs([&common, arguments] { return run_eval(common, *arguments); });
  add_checkpoint_option(command, common);
  add_weights_option(command, common);
  add_text_options(command, common, arguments->text);
  command.value("--sequence-length", &arguments->evaluate.length, "N",
                "Tokens a window sees at most; 0: the model's context");
  command.value("--stride", &arguments->evaluate.stride, "N",
                "New tokens per window; 0: windows do not overlap. Smaller is slower and gives "
                "every token more context");
  command.flag("--document-mask", "--no-document-mask", &arguments->document_mask,
               "Tokens attend only to their own document, or to all of the window (default: as the "
               "checkpoint was trained)");
  command.value("--max-tokens", &arguments->max_tokens, "N", "Stop after this many tokens; 0: all");
  add_ffn_option(command, arguments->ffn, "Execution of the FFN layers");
  command
      .flag("", "--no-bos", &arguments->text.begin_token,
            "Texts and prompts without the begin token that the tokenizer's template puts in front "
            "of them; the first token of a text is then not scored, unless there is an end-of-text "
            "token to stand in front")
      .excludes(command.at("shards"));
  command.flag("--json", &arguments->json, "Print one JSON object");
  add_eval_tasks_options(command, common, arguments->tasks);
  add_compute_options(command, common);
  command.footer(
      "Bits per byte count the text's own bytes, so that models with different tokenizers "
      "compare. Accuracies\nare made as lm-evaluation-harness makes them, without examples in the "
      "prompt.\n\nExamples:\n"
      "  twell eval --checkpoint runs/first/checkpoint --data book.txt\n"
      "  twell eval --checkpoint runs/first/checkpoint --tasks piqa,winogrande --task-data tasks "
      "--out scores");
}

}  // namespace twell::cli
