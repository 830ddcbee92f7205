// SPDX-License-Identifier: Apache-2.0
// twell generate: text from a prompt, streamed.
#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/commands.h"
#include "cli/device.h"
#include "cli/signals.h"
#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/data/chat_template.h"
#include "twell/infer/generate.h"
#include "twell/model/checkpoint.h"

namespace twell::cli {
namespace {

struct GenerateArguments {
  GenerateOptions generate;
  std::filesystem::path prompt_file;
  std::string system;
  bool chat = false;
  std::string ffn = "auto";
  bool quiet = false;
  bool json = false;
};

void print_json(const Generation& generation, const std::string& prompt) {
  const nlohmann::json line = {{"prompt", prompt},
                               {"text", generation.text},
                               {"prompt_tokens", generation.prompt_tokens},
                               {"tokens", generation.ids.size()},
                               {"stop", stop_reason_name(generation.reason)},
                               {"prefill_s", generation.prefill_seconds},
                               {"decode_s", generation.decode_seconds}};
  fmt::print("{}\n", line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

void print_summary(const Generation& generation, Session& session) {
  const double tokens = static_cast<double>(generation.ids.size());
  fmt::print(stderr,
             "[{} tokens, {:.1f} tok/s; prompt {} tokens, {:.1f} tok/s; stopped at: {}; "
             "{:.1f} of {} FFN neurons active per token and layer]\n",
             generation.ids.size(), tokens / generation.decode_seconds, generation.prompt_tokens,
             static_cast<double>(generation.prompt_tokens) / generation.prefill_seconds,
             stop_reason_name(generation.reason), session.nnz_per_token(), session.config().ffn);
}

// What the model is given: the text itself, or as a chat's last message in the model's template.
std::string prompt_text(const CommonOptions& common, const GenerateArguments& arguments,
                        const std::optional<ChatTemplate>& chat) {
  std::string text =
      arguments.prompt_file.empty() ? common.prompt : read_file(arguments.prompt_file);
  TWELL_REQUIRE(chat || arguments.system.empty(), "--system goes with --chat");
  if (!chat) return text;
  std::vector<ChatMessage> messages;
  if (!arguments.system.empty()) messages.push_back({"system", arguments.system});
  messages.push_back({"user", std::move(text)});
  return chat->render(messages, /*add_generation_prompt=*/true);
}

// Every token that config.json and the template end a text with.
std::vector<int32_t> stop_tokens(const ModelConfig& config, const Tokenizer& tokenizer,
                                 const std::optional<ChatTemplate>& chat) {
  std::vector<int32_t> tokens(config.more_eos_tokens.begin(), config.more_eos_tokens.end());
  if (config.eos_token >= 0) tokens.push_back(static_cast<int32_t>(config.eos_token));
  if (chat && !chat->eos_token().empty()) tokens.push_back(tokenizer.find(chat->eos_token()));
  return tokens;
}

// Room for the prompt and what may follow: a model's context can be far longer than either.
int64_t session_capacity(const ModelConfig& config, const Tokenizer& tokenizer,
                         const std::string& prompt, int64_t max_tokens) {
  const int64_t limit = config.max_sequence();
  const int64_t tokens = std::max<int64_t>(std::ssize(tokenizer.encode(prompt)), 1);
  return tokens >= limit || max_tokens <= 0 ? limit : std::min(limit - tokens, max_tokens) + tokens;
}

int run_generate(const CommonOptions& common, GenerateArguments& arguments) {
  std::optional<ChatTemplate> chat;
  if (arguments.chat) chat = ChatTemplate::load(common.checkpoint);
  const std::string prompt = prompt_text(common, arguments, chat);
  arguments.generate.sampler.seed = common.seed;
  arguments.generate.sampler.validate();
  const FfnPolicy policy = parse_ffn_policy(arguments.ffn);

  const LoadedEngine loaded = load_engine(common);
  const ModelConfig config = load_config(common.checkpoint);
  arguments.generate.stop_tokens = stop_tokens(config, loaded.tokenizer, chat);
  const int64_t capacity =
      session_capacity(config, loaded.tokenizer, prompt, arguments.generate.max_tokens);
  const std::unique_ptr<Session> session =
      loaded.engine->session({.capacity = capacity, .ffn = policy});
  arguments.generate.cancel = &stop_on_signals();
  if (!arguments.json) {
    if (!chat) fmt::print("{}", prompt);
    std::fflush(stdout);
    arguments.generate.on_text = [](std::string_view text) {
      fmt::print("{}", text);
      std::fflush(stdout);
    };
  }
  const Generation generation = generate(*session, loaded.tokenizer, prompt, arguments.generate);
  if (arguments.json) {
    print_json(generation, prompt);
  } else {
    fmt::print("\n");
    std::fflush(stdout);  // before what goes to stderr
    if (!arguments.quiet) print_summary(generation, *session);
  }
  return generation.reason == StopReason::kCancelled ? kExitInterrupted : kExitOk;
}

}  // namespace

void add_generate_command(CLI::App& app, CommonOptions& common) {
  auto arguments = std::make_shared<GenerateArguments>();
  CLI::App& command =
      add_command(app, common, "generate", "Continue a prompt with a trained model",
                  [&common, arguments] { return run_generate(common, *arguments); });
  add_checkpoint_option(command, common);
  CLI::Option* prompt = add_prompt_option(command, common);
  command.add_option("--prompt-file", arguments->prompt_file, "Read the prompt from a file")
      ->type_name("PATH")
      ->excludes(prompt);
  command.add_flag("--chat", arguments->chat,
                   "The prompt is a message: render it with the chat template of the checkpoint");
  command.add_option("--system", arguments->system, "System message in front of it (--chat)")
      ->type_name("TEXT");
  GenerateOptions& options = arguments->generate;
  command.add_option("--max-tokens", options.max_tokens, "New tokens at most")
      ->type_name("N")
      ->capture_default_str();
  const std::string sampling = "Sampling";
  command
      .add_option("--temperature", options.sampler.temperature,
                  "Softmax temperature; 0 takes the most likely token every time")
      ->type_name("X")
      ->capture_default_str()
      ->group(sampling);
  command
      .add_option("--top-k", options.sampler.top_k, "Keep the k most likely tokens; 0: all of them")
      ->type_name("K")
      ->capture_default_str()
      ->group(sampling);
  command
      .add_option("--top-p", options.sampler.top_p,
                  "Keep the most likely tokens that together hold this share of probability")
      ->type_name("P")
      ->capture_default_str()
      ->group(sampling);
  command
      .add_option("--min-p", options.sampler.min_p,
                  "Drop tokens less likely than this times the most likely one")
      ->type_name("P")
      ->capture_default_str()
      ->group(sampling);
  command.add_option("--stop", options.stop_strings, "Stop before this text; repeatable")
      ->type_name("TEXT")
      ->allow_extra_args(false);
  command
      .add_option("--ffn", arguments->ffn,
                  "Execution of the FFN layers: auto, dense, row-fused, tile-union")
      ->type_name("NAME")
      ->capture_default_str();
  command.add_flag("--json", arguments->json, "Print one JSON object instead of the text");
  command.add_flag("--quiet", arguments->quiet, "Leave out the line of figures at the end");
  add_compute_options(command, common, Devices::kAny);
  command.footer(
      "Example:\n  twell generate --checkpoint runs/first/checkpoint --prompt 'The ' "
      "--temperature 0.8 --top-p 0.95 --max-tokens 100");
}

}  // namespace twell::cli
