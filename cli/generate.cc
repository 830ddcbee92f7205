// SPDX-License-Identifier: Apache-2.0
// twell generate: text from a prompt, streamed, or from many at once.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "cli/chat.h"
#include "cli/commands.h"
#include "cli/device.h"
#include "cli/loading.h"
#include "cli/signals.h"
#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/chat_template/chat_template.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/infer/generate.h"

namespace twell::cli {
namespace {

struct GenerateArguments {
  GenerateOptions generate;
  std::vector<std::string> prompts;
  std::filesystem::path prompt_file;
  std::filesystem::path prompts_file;
  int64_t batch = 32;
  std::string system;
  bool chat = false;
  std::string ffn = "auto";
  bool quiet = false;
  bool json = false;
};

// A prompt per line; of a .jsonl file, the "prompt" of the object on each line. Empty lines are
// left out.
std::vector<std::string> read_prompts(const std::filesystem::path& path) {
  std::vector<std::string> prompts;
  std::istringstream text(read_file(path));
  int64_t number = 0;
  for (std::string line; std::getline(text, line);) {
    ++number;
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    if (path.extension() != ".jsonl") {
      prompts.push_back(std::move(line));
      continue;
    }
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    TWELL_REQUIRE(json.is_object() && json.contains("prompt") && json["prompt"].is_string(),
                  "{} line {}: expected an object with a text \"prompt\"", path.string(), number);
    prompts.push_back(json["prompt"].get<std::string>());
  }
  TWELL_REQUIRE(!prompts.empty(), "{}: no prompt in it", path.string());
  return prompts;
}

// What the model is given: the texts themselves, or each as a chat's last message in the model's
// template.
std::vector<std::string> prompt_texts(const GenerateArguments& arguments,
                                      const std::optional<ChatTemplate>& chat) {
  std::vector<std::string> texts = arguments.prompts;
  if (!arguments.prompt_file.empty()) texts = {read_file(arguments.prompt_file)};
  if (!arguments.prompts_file.empty()) texts = read_prompts(arguments.prompts_file);
  if (texts.empty()) texts = {""};
  TWELL_REQUIRE(chat || arguments.system.empty(), "--system goes with --chat");
  if (!chat) return texts;
  for (std::string& text : texts) {
    std::vector<ChatMessage> messages;
    if (!arguments.system.empty()) messages.push_back({"system", arguments.system});
    messages.push_back({"user", std::move(text)});
    text = chat->render(messages, /*add_generation_prompt=*/true);
  }
  return texts;
}

// Room for the longest prompt and what may follow: a model's context can be far longer than either.
// InputError when a prompt leaves no room.
int64_t session_capacity(const ModelConfig& config, const Tokenizer& tokenizer,
                         const std::vector<std::string>& prompts, int64_t max_tokens) {
  const int64_t limit = config.max_sequence();
  int64_t longest = 0;
  for (const std::string& prompt : prompts) {
    longest = std::max(longest, std::ssize(prompt_ids(config, tokenizer, prompt)));
  }
  TWELL_REQUIRE(longest < limit,
                "the prompt has {} tokens; the context of {} leaves no room for a new one", longest,
                limit);
  TWELL_REQUIRE(max_tokens > 0, "the number of tokens to generate must be positive, got {}",
                max_tokens);
  return std::min(limit - longest, max_tokens) + longest;
}

// Writes generations in the order of their prompts: as they come where there is one prompt, else
// as soon as all before them are done.
class Output {
 public:
  Output(const GenerateArguments& arguments, const std::vector<std::string>& prompts)
      : prompts_(prompts),
        streams_(prompts.size() == 1 && !arguments.json),
        json_(arguments.json),
        echo_(!arguments.chat),
        done_(prompts.size()) {
    if (streams_ && echo_) write(prompts.front());
  }

  // For the request's options; may be empty.
  std::function<void(std::string_view)> on_text() const {
    if (!streams_) return {};
    return [](std::string_view text) { write(text); };
  }

  void add(int64_t request, Generation generation) {
    done_[static_cast<size_t>(request)] = std::move(generation);
    for (; next_ < done_.size() && done_[next_]; ++next_) print(next_);
  }

  const Generation& operator[](size_t request) const { return done_[request].value(); }
  size_t size() const { return done_.size(); }

 private:
  static void write(std::string_view text) {
    fmt::print("{}", text);
    std::fflush(stdout);  // before what goes to stderr, and while the rest is not there yet
  }

  void print(size_t request) const {
    const Generation& generation = *done_[request];
    if (json_) return write(json_line(generation, prompts_[request]) + "\n");
    if (streams_) return write("\n");
    write(fmt::format("{}{}{}\n", request == 0 ? "" : "\n", echo_ ? prompts_[request] : "",
                      generation.text));
  }

  static std::string json_line(const Generation& generation, const std::string& prompt) {
    const nlohmann::json line = {{"prompt", prompt},
                                 {"text", generation.text},
                                 {"prompt_tokens", generation.prompt_tokens},
                                 {"tokens", generation.ids.size()},
                                 {"stop", stop_reason_name(generation.reason)},
                                 {"prefill_s", generation.prefill_seconds},
                                 {"decode_s", generation.decode_seconds}};
    return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }

  const std::vector<std::string>& prompts_;
  bool streams_, json_, echo_;
  std::vector<std::optional<Generation>> done_;
  size_t next_ = 0;  // the first that is not printed
};

void print_summary(const Output& output, double seconds, Session& session,
                   const std::string& device) {
  const std::string active = fmt::format("{:.1f} of {} FFN neurons active per token and layer; {}",
                                         session.nnz_per_token(), session.config().ffn, device);
  if (output.size() == 1) {
    const Generation& one = output[0];
    const auto tokens = static_cast<double>(one.ids.size());
    fmt::print(stderr,
               "[{} tokens, {:.1f} tok/s; prompt {} tokens, {:.1f} tok/s; stopped at: {}; {}]\n",
               one.ids.size(), tokens / one.decode_seconds, one.prompt_tokens,
               static_cast<double>(one.prompt_tokens) / one.prefill_seconds,
               stop_reason_name(one.reason), active);
    return;
  }
  int64_t tokens = 0, prompt_tokens = 0;
  for (size_t i = 0; i < output.size(); ++i) {
    tokens += std::ssize(output[i].ids);
    prompt_tokens += output[i].prompt_tokens;
  }
  fmt::print(stderr, "[{} prompts of {} tokens; {} new tokens, {:.1f} tok/s; {}]\n", output.size(),
             prompt_tokens, tokens, static_cast<double>(tokens) / seconds, active);
}

int run_generate(const CommonOptions& common, GenerateArguments& arguments) {
  std::optional<ChatTemplate> chat;
  if (arguments.chat) chat = ChatTemplate::load(common.checkpoint);
  GenerateOptions& options = arguments.generate;
  options.sampler.seed = common.seed;
  options.sampler.validate();
  const FfnPolicy policy = parse_ffn_policy(arguments.ffn);
  const bool prompted = !arguments.prompts.empty() || !arguments.prompt_file.empty() ||
                        !arguments.prompts_file.empty();
  if (chat && !prompted) {
    TWELL_REQUIRE(!arguments.json, "--json goes with a prompt, not with a conversation");
    return run_chat(common, *chat,
                    {.system = arguments.system, .generate = options, .ffn = policy});
  }
  const std::vector<std::string> prompts = prompt_texts(arguments, chat);
  TWELL_REQUIRE(arguments.batch >= 1, "--batch must be at least 1, got {}", arguments.batch);

  // All that can be refused is, before the weights are loaded.
  const ModelConfig config = load_config(common.checkpoint);
  const Tokenizer tokenizer = load_tokenizer(common.checkpoint, config);
  const SessionOptions planned{
      .slots = std::min(arguments.batch, std::ssize(prompts)),
      .capacity = session_capacity(config, tokenizer, prompts, options.max_tokens),
      .ffn = policy};
  const std::unique_ptr<Engine> engine = load_engine(common, {.session = planned});
  const std::unique_ptr<Session> session = engine->session(planned);

  const std::atomic<bool>& stop = stop_on_signals();
  options.stop_tokens = stop_tokens(config, tokenizer, chat ? &*chat : nullptr);
  options.cancel = &stop;
  Output output(arguments, prompts);
  options.on_text = output.on_text();
  Generator generator(*session, tokenizer, [&](int64_t request, Generation generation) {
    output.add(request, std::move(generation));
  });
  for (const std::string& prompt : prompts) generator.submit(prompt, options);
  const auto start = std::chrono::steady_clock::now();
  while (generator.step()) {
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  if (!arguments.json && !arguments.quiet) {
    print_summary(output, elapsed.count(), *session, engine->device());
  }
  return stop ? kExitInterrupted : kExitOk;
}

}  // namespace

void add_generate_command(CLI::App& app, CommonOptions& common) {
  auto arguments = std::make_shared<GenerateArguments>();
  CLI::App& command =
      add_command(app, common, "generate", "Continue a prompt with a trained model",
                  [&common, arguments] { return run_generate(common, *arguments); });
  add_checkpoint_option(command, common);
  CLI::Option* prompt = command
                            .add_option("--prompt", arguments->prompts,
                                        "Text to continue; repeatable: they are continued together")
                            ->type_name("TEXT")
                            ->allow_extra_args(false);
  CLI::Option* prompt_file =
      command.add_option("--prompt-file", arguments->prompt_file, "Read the prompt from a file")
          ->type_name("PATH")
          ->excludes(prompt);
  command
      .add_option("--prompts", arguments->prompts_file,
                  "Read a prompt from each line of a file; of a .jsonl file, its \"prompt\"")
      ->type_name("PATH")
      ->excludes(prompt)
      ->excludes(prompt_file);
  command
      .add_option("--batch", arguments->batch,
                  "Prompts continued at once: bounds memory; the others wait")
      ->type_name("N")
      ->capture_default_str();
  command.add_flag("--chat", arguments->chat,
                   "Prompts are messages: render them with the chat template of the checkpoint. "
                   "Without a prompt, hold a conversation: a message per line of the input");
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
  command.add_flag("--json", arguments->json,
                   "Print a JSON object per prompt, a line each, instead of the text");
  command.add_flag("--quiet", arguments->quiet, "Leave out the line of figures at the end");
  add_compute_options(command, common, Devices::kAny);
  command.footer(
      "Example:\n  twell generate --checkpoint runs/first/checkpoint --prompt 'The ' "
      "--temperature 0.8 --top-p 0.95 --max-tokens 100\n"
      "  twell generate --checkpoint runs/first/checkpoint --prompts questions.jsonl --json");
}

}  // namespace twell::cli
