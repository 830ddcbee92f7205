// SPDX-License-Identifier: Apache-2.0
#include "twell/train/chat_run.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/json.h"
#include "twell/train/metrics.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

// Adds end tokens to those that generation_config.json names.
void add_end_tokens(const std::set<int32_t>& tokens, TextFiles& files) {
  nlohmann::ordered_json config =
      parse_ordered_json(files.at(kGenerationConfig), kGenerationConfig, {.keys = JsonKeys::kLast});
  TWELL_REQUIRE(config.is_object(), "{} is no JSON object", kGenerationConfig);
  nlohmann::ordered_json ends = config.contains("eos_token_id") && !config["eos_token_id"].is_null()
                                    ? config["eos_token_id"]
                                    : nlohmann::ordered_json::array();
  if (!ends.is_array()) ends = nlohmann::ordered_json::array({ends});
  for (const int32_t token : tokens) {
    if (std::ranges::find(ends, nlohmann::ordered_json(token)) == ends.end()) ends.push_back(token);
  }
  if (ends.size() == 1) ends = nlohmann::ordered_json(ends.front());
  if (config.contains("eos_token_id") && config["eos_token_id"] == ends) return;
  config["eos_token_id"] = ends;
  files[kGenerationConfig] = config.dump(2) + "\n";
}

}  // namespace

std::string ChatRun::summary() const {
  const ChatCounts& counts = data->counts();
  const auto tokens = [&](Split split) {
    return format_count(static_cast<double>(data->tokens(split)));
  };
  std::string text = fmt::format(
      "data: {} conversations to train on and {} for validation, in sequences of {} and {} tokens",
      counts.conversations[0], counts.conversations[1], tokens(Split::kTrain),
      tokens(Split::kValidation));
  if (counts.cut > 0) text += fmt::format("; {} were cut at the end of a sequence", counts.cut);
  if (counts.too_long > 0) {
    text += fmt::format("; {} left out, whose answers begin behind it", counts.too_long);
  }
  if (counts.skipped > 0) text += fmt::format("; {} lines skipped", counts.skipped);
  return text;
}

ChatRun read_chat_data(Context& ctx, const RunSettings& settings, const ModelConfig& config,
                       const Tokenizer& tokenizer, const fs::path& checkpoint,
                       ChatDataOptions options) {
  ChatRun run{.data = nullptr, .text_files = text_files_of(checkpoint)};
  complete_text_files(run.text_files, config, tokenizer);
  // A run that goes on has the template among its checkpoint's files.
  if (!settings.chat_template.empty() && checkpoint == settings.from) {
    run.text_files["chat_template.jinja"] = read_file(settings.chat_template);
  }
  options.file = settings.chat_data;
  const ChatTemplate chat = ChatTemplate::from_files(run.text_files);
  run.data = std::make_unique<ChatData>(ctx, chat, tokenizer, options);
  add_end_tokens(run.data->end_tokens(), run.text_files);
  return run;
}

}  // namespace twell
