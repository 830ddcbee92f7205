// SPDX-License-Identifier: Apache-2.0
// twell generate: streams text from one prompt, or generates for many prompts together.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <utility>

#include "cli/chat.h"
#include "cli/commands.h"
#include "cli/device.h"
#include "cli/loading.h"
#include "cli/process.h"
#include "cli/text_layout.h"
#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/json_fields.h"
#include "twell/chat_template/chat_template.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/grammar/grammar.h"
#include "twell/infer/generate.h"

namespace twell::cli {
namespace {

struct GenerateArguments {
  GenerateOptions generate;
  std::vector<std::string> end_tokens;
  std::vector<std::string> prompts;
  std::filesystem::path prompt_file;
  std::filesystem::path prompts_file;
  int64_t batch = 32;
  std::string system;
  bool chat = false;
  std::string ffn = "auto";
  bool quiet = false;
  bool json = false;
  bool cache_8bit = false;
  std::filesystem::path json_schema, grammar;
};

struct Prompt {
  std::string text;
  std::string source;  // how an error message names it: "the prompt", "prompts.txt line 3"
  std::string fault;   // the reason why it cannot be continued; empty if it can
};

// Reads a prompt from each line; in a .jsonl file, from the field "prompt" of each line's object.
// Empty lines are skipped.
std::vector<Prompt> read_prompts(const std::filesystem::path& path) {
  std::vector<Prompt> prompts;
  const std::string name = path == "-" ? "standard input" : path.string();
  std::istringstream text(path == "-" ? read_standard_input() : read_file(path));
  int64_t number = 0;
  for (std::string line; std::getline(text, line);) {
    const std::string source = fmt::format("{} line {}", name, ++number);
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    if (path.extension() != ".jsonl") {
      prompts.push_back({std::move(line), source, {}});
      continue;
    }
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    TWELL_REQUIRE(json.is_object() && json.contains("prompt") && json["prompt"].is_string(),
                  "{}: expected an object with a text \"prompt\"", source);
    prompts.push_back({json["prompt"].get<std::string>(), source, {}});
  }
  TWELL_REQUIRE(!prompts.empty(), "{}: no prompt in it", name);
  return prompts;
}

// The model's input: the prompts themselves, or each as the last message of a chat in the model's
// template.
std::vector<Prompt> read_prompts(const GenerateArguments& arguments,
                                 const std::optional<ChatTemplate>& chat) {
  std::vector<Prompt> prompts;
  for (const std::string& text : arguments.prompts) {
    const bool only = arguments.prompts.size() == 1;
    prompts.push_back(
        {text, only ? "the prompt" : fmt::format("prompt {}", prompts.size() + 1), {}});
  }
  if (!arguments.prompt_file.empty()) {
    prompts = {
        {arguments.prompt_file == "-" ? read_standard_input() : read_file(arguments.prompt_file),
         "the prompt",
         {}}};
  }
  if (!arguments.prompts_file.empty()) prompts = read_prompts(arguments.prompts_file);
  if (prompts.empty()) prompts = {{"", "the prompt", {}}};
  TWELL_REQUIRE(chat || arguments.system.empty(), "--system goes with --chat");
  if (!chat) return prompts;
  for (Prompt& prompt : prompts) {
    std::vector<ChatMessage> messages;
    if (!arguments.system.empty()) messages.push_back({"system", arguments.system});
    messages.push_back({"user", std::move(prompt.text)});
    prompt.text = chat->render(messages, /*add_generation_prompt=*/true);
  }
  return prompts;
}

// The session's length: the longest prompt plus its new tokens, because a model's context can need
// far more memory. Sets the fault of a prompt that leaves no room for new tokens; InputError when
// none leaves room.
int64_t session_capacity(const ModelConfig& config, const Tokenizer& tokenizer,
                         std::vector<Prompt>& prompts, const GenerateOptions& options) {
  const int64_t max_tokens = options.max_tokens;
  TWELL_REQUIRE(max_tokens > 0, "the number of tokens to generate must be positive, got {}",
                max_tokens);
  const int64_t limit = config.context;
  int64_t longest = 0;
  for (Prompt& prompt : prompts) {
    const int64_t tokens =
        std::ssize(prompt_ids(config, tokenizer, prompt.text, options.begin_token));
    if (tokens < limit) {
      longest = std::max(longest, tokens);
    } else {
      prompt.fault = fmt::format("{} has {} tokens; the context of {} leaves no room for a new one",
                                 prompt.source, tokens, limit);
    }
  }
  TWELL_REQUIRE(longest > 0, "{}", prompts.front().fault);
  return std::min(limit - longest, max_tokens) + longest;
}

// Writes generations in the order of their prompts: a single prompt's text as it is generated,
// otherwise each once all before it are done. Faulty prompts are reported on stderr.
class Output {
 public:
  Output(const GenerateArguments& arguments, const std::vector<Prompt>& prompts)
      : prompts_(prompts),
        log_probs_(arguments.generate.log_probs),
        speculates_(arguments.generate.speculate > 0),
        streams_(prompts.size() == 1 && !arguments.json),
        json_(arguments.json),
        echo_(!arguments.chat),
        done_(prompts.size()) {
    if (streams_ && echo_) write_out(prompts.front().text);
    print_finished();
  }

  // For the request's on_text; may be empty.
  std::function<void(std::string_view)> on_text() const {
    if (!streams_) return {};
    return write_out;
  }

  void add(size_t prompt, Generation generation) {
    done_[prompt] = std::move(generation);
    print_finished();
  }

  // Indexed by prompt; empty where the prompt is faulty.
  const std::vector<std::optional<Generation>>& generations() const { return done_; }

 private:
  void print_finished() {
    for (; next_ < done_.size(); ++next_) {
      if (!prompts_[next_].fault.empty()) {
        print_error("twell: error: {}\n", prompts_[next_].fault);
      } else if (done_[next_]) {
        print(next_);
      } else {
        break;
      }
    }
  }

  void print(size_t prompt) {
    const Generation& generation = *done_[prompt];
    const std::string& text = prompts_[prompt].text;
    if (json_) return write_out(json_line(generation, text) + "\n");
    if (streams_) return write_out("\n");
    write_out(fmt::format("{}{}{}\n", std::exchange(first_, false) ? "" : "\n", echo_ ? text : "",
                          generation.text));
  }

  std::string json_line(const Generation& generation, const std::string& prompt) const {
    nlohmann::json line = {{"prompt", prompt},
                           {"text", generation.text},
                           {"ids", generation.ids},
                           {"prompt_tokens", generation.prompt_tokens},
                           {"tokens", generation.ids.size()},
                           {"stop", stop_reason_name(generation.reason)},
                           {"prefill_s", generation.prefill_seconds},
                           {"decode_s", generation.decode_seconds}};
    if (speculates_) line["drafted"] = generation.drafted;
    if (speculates_) line["accepted"] = generation.accepted;
    if (log_probs_) line["log_probs"] = generation.log_probs;
    return json_text(line);
  }

  const std::vector<Prompt>& prompts_;
  bool log_probs_, speculates_, streams_, json_, echo_;
  bool first_ = true;
  std::vector<std::optional<Generation>> done_;
  size_t next_ = 0;  // first generation not printed yet
};

// Prints to standard error, wrapped where that is a terminal.
void print_summary_line(const std::string& line) {
  print_error("{}\n", wrapped(line, 0, 1, terminal_columns(stderr, line.size())));
}

void print_summary(const Output& output, double seconds, Session& session,
                   const std::string& device, bool speculates) {
  const std::string active = fmt::format("{:.1f} of {} FFN neurons active per token and layer; {}",
                                         session.nnz_per_token(), session.config().ffn, device);
  std::string guessed;
  if (speculates) {
    int64_t drafted = 0, accepted = 0;
    for (const std::optional<Generation>& generation : output.generations()) {
      if (!generation) continue;
      drafted += generation->drafted;
      accepted += generation->accepted;
    }
    guessed = fmt::format("guessed {} tokens, {} right; ", drafted, accepted);
  }
  if (output.generations().size() == 1) {
    const Generation& one = output.generations().front().value();
    const auto tokens = static_cast<double>(one.ids.size());
    print_summary_line(fmt::format(
        "[{} tokens, {:.1f} tok/s; prompt {} tokens, {:.1f} tok/s; stopped at: {}; {}{}]",
        one.ids.size(), tokens / one.decode_seconds, one.prompt_tokens,
        static_cast<double>(one.prompt_tokens) / one.prefill_seconds, stop_reason_name(one.reason),
        guessed, active));
    return;
  }
  int64_t answered = 0, tokens = 0, prompt_tokens = 0;
  for (const std::optional<Generation>& generation : output.generations()) {
    if (!generation) continue;
    ++answered;
    tokens += std::ssize(generation->ids);
    prompt_tokens += generation->prompt_tokens;
  }
  print_summary_line(fmt::format("[{} prompts of {} tokens; {} new tokens, {:.1f} tok/s; {}{}]",
                                 answered, prompt_tokens, tokens,
                                 static_cast<double>(tokens) / seconds, guessed, active));
}

// The grammar that texts are drawn by, if one is asked for.
std::optional<Grammar> read_grammar(const GenerateArguments& arguments,
                                    const Tokenizer& tokenizer) {
  const bool schema = !arguments.json_schema.empty();
  const std::filesystem::path& path = schema ? arguments.json_schema : arguments.grammar;
  if (path.empty()) return std::nullopt;
  std::vector<int32_t> ends = arguments.generate.stop_tokens;
  if (tokenizer.eos_token() >= 0) ends.push_back(tokenizer.eos_token());
  GrammarCompiler compiler(tokenizer, {.end_tokens = ends});
  try {
    return compiler.compile(
        {schema ? GrammarText::Kind::kJsonSchema : GrammarText::Kind::kEbnf, read_file(path)});
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", path.string(), error.what()));
  }
}

int run_generate(const CommonOptions& common, GenerateArguments& arguments) {
  std::optional<ChatTemplate> chat;
  if (arguments.chat) chat = ChatTemplate::load(common.checkpoint);
  GenerateOptions& options = arguments.generate;
  options.sampler.seed = common.seed;
  options.sampler.validate();
  if (chat) options.begin_token = false;  // a chat template writes the begin token itself
  const FfnPolicy policy = parse_ffn_policy(arguments.ffn);
  const bool prompted = !arguments.prompts.empty() || !arguments.prompt_file.empty() ||
                        !arguments.prompts_file.empty();
  const bool talks = chat && !prompted;
  TWELL_REQUIRE(!talks || !arguments.json, "--json goes with a prompt, not with a conversation");
  std::vector<Prompt> prompts;
  if (!talks) prompts = read_prompts(arguments, chat);
  TWELL_REQUIRE(arguments.batch >= 1, "--batch must be at least 1, got {}", arguments.batch);

  // Validate all input before loading the weights.
  const ModelConfig config = load_config(common.checkpoint);
  const Tokenizer tokenizer = load_tokenizer(common.checkpoint, config);
  options.stop_tokens = stop_tokens(common.checkpoint, config, tokenizer, arguments.end_tokens);
  options.grammar = read_grammar(arguments, tokenizer);
  const SessionOptions planned = plan_cache(
      common, config,
      {.slots = talks ? 1 : std::min(arguments.batch, std::ssize(prompts)),
       .capacity = talks ? std::min(config.context, kConversationTokens)
                         : session_capacity(config, tokenizer, prompts, options),
       .ffn = policy,
       .draft_tokens = draft_tokens_of(options.speculate,
                                       talks ? 1 : std::min(arguments.batch, std::ssize(prompts))),
       .cache = {.eight_bits = arguments.cache_8bit}});
  const std::unique_ptr<Engine> engine = load_engine(common, {.session = planned});
  const std::unique_ptr<Session> session = engine->session(planned);

  const std::atomic<bool>& stop = stop_on_signals();
  options.cancel = &stop;
  if (talks) return run_chat(*session, tokenizer, *chat, arguments.system, options);
  Output output(arguments, prompts);
  options.on_text = output.on_text();
  std::vector<size_t> asked;  // prompt index of each request
  const auto on_done = [&](int64_t request, Generation generation) {
    Prompt& prompt = prompts[asked[static_cast<size_t>(request)]];
    if (generation.reason == StopReason::kNotFinite) {
      prompt.fault = fmt::format("{}: {}", prompt.source, kNoTokenReason);
    } else if (generation.reason == StopReason::kNoneFits) {
      prompt.fault = fmt::format("{}: {}", prompt.source, kNoneFitsReason);
    }
    output.add(asked[static_cast<size_t>(request)], std::move(generation));
  };
  Scheduler scheduler(*session, tokenizer, {.speculate = options.speculate});
  for (size_t i = 0; i < prompts.size(); ++i) {
    if (!prompts[i].fault.empty()) continue;
    scheduler.submit(text_request(config, tokenizer, prompts[i].text, options, on_done));
    asked.push_back(i);
  }
  const auto start = std::chrono::steady_clock::now();
  while (scheduler.step()) {
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  if (!arguments.json && !arguments.quiet) {
    print_summary(output, elapsed.count(), *session, engine->device(), options.speculate > 0);
  }
  if (stop) return interrupted_exit_code();
  const auto faulty = [](const Prompt& prompt) { return !prompt.fault.empty(); };
  return std::ranges::any_of(prompts, faulty) ? kExitInput : kExitOk;
}

}  // namespace

void add_generate_command(Command& root, CommonOptions& common) {
  auto arguments = std::make_shared<GenerateArguments>();
  Command& command = root.add("generate", "Continue a prompt with a trained model");
  command.runs([&common, arguments] { return run_generate(common, *arguments); });
  add_checkpoint_option(command, common);
  add_weights_option(command, common);
  Option& prompt = command.value("--prompt", &arguments->prompts, "TEXT",
                                 "Text to continue; repeatable: they are continued together");
  Option& prompt_file = command
                            .value("--prompt-file", &arguments->prompt_file, "PATH",
                                   "Read the prompt from a file; -: from standard input")
                            .excludes(prompt);
  command
      .value("--prompts", &arguments->prompts_file, "PATH",
             "Read a prompt from each line of a file (-: of standard input); of a .jsonl file, its "
             "\"prompt\". Exit code 2 when one does not fit the context; the others are answered")
      .excludes(prompt)
      .excludes(prompt_file);
  command.value("--batch", &arguments->batch, "N",
                "Prompts continued at once: bounds memory; the others wait");
  command.flag(
      "--chat", &arguments->chat,
      "Prompts are messages: render them with the chat template of the checkpoint. "
      "Without a prompt, hold a conversation: a message per line of the input. On a terminal "
      "Ctrl-C stops an answer, Ctrl-D ends the conversation, and pasted lines are one message");
  command.value("--system", &arguments->system, "TEXT", "System message in front of it (--chat)");
  GenerateOptions& options = arguments->generate;
  command.value("--max-tokens", &options.max_tokens, "N", "New tokens at most");
  command.value("--stop", &options.stop_strings, "TEXT", "Stop before this text; repeatable");
  command.value("--end-token", &arguments->end_tokens, "TEXT",
                "A text ends at this token too, beside those that the checkpoint names; "
                "repeatable");
  Option& schema = command.value("--json-schema", &arguments->json_schema, "PATH",
                                 "Texts are JSON that validates by the schema in this file");
  command
      .value("--grammar", &arguments->grammar, "PATH",
             "Texts are drawn by the grammar in this file: rules \"name ::= ...\", of which "
             "\"root\" is the text")
      .excludes(schema);
  add_ffn_option(command, arguments->ffn, "Execution of the FFN layers");
  add_speculate_option(command, options.speculate);
  command.flag(
      "--cache-8bit", &arguments->cache_8bit,
      "Keep keys and values in 8 bits, less exact: about half of a GPU's memory for them, a "
      "quarter of the CPU's");
  Option& json = command.flag("--json", &arguments->json,
                              "Print a JSON object per prompt, a line each, instead of the text");
  command
      .flag("--log-probs", &options.log_probs,
            "Also the natural logarithm of each new token's probability, at temperature 1")
      .needs(json);
  command.flag(
      "", "--no-bos", &options.begin_token,
      "Prompts without the begin token that the tokenizer's template puts in front of texts");
  command.flag("--quiet", &arguments->quiet, "Leave out the line of figures at the end");
  command.group("Sampling");
  command.value("--temperature", &options.sampler.temperature, "X",
                "Softmax temperature; 0 takes the most likely token every time");
  command.value("--top-k", &options.sampler.top_k, "K",
                "Keep the k most likely tokens; 0: all of them");
  command.value("--top-p", &options.sampler.top_p, "P",
                "Keep the most likely tokens that together hold this share of probability");
  command.value("--min-p", &options.sampler.min_p, "P",
                "Drop tokens less likely than this times the most likely one");
  command.value("--presence-penalty", &options.sampler.presence_penalty, "X",
                "Taken once from the logits of tokens that the new text has");
  command.value("--frequency-penalty", &options.sampler.frequency_penalty, "X",
                "Taken from a token's logit for each time that the new text has it");
  command.value("--repetition-penalty", &options.sampler.repetition_penalty, "X",
                "Divides positive logits of tokens that the prompt or the new text has, and "
                "multiplies negative ones; 1: none");
  add_compute_options(command, common);
  command.footer(
      "Example:\n  twell generate --checkpoint runs/first/checkpoint --prompt 'The ' "
      "--temperature 0.8 --top-p 0.95 --max-tokens 100\n"
      "  twell generate --checkpoint runs/first/checkpoint --prompts questions.jsonl --json");
}

}  // namespace twell::cli
