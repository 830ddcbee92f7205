// SPDX-License-Identifier: Apache-2.0
// Chat templates of tokenizer_config.json: they turn messages into the prompt format of a model.
// Supports the part of Jinja that published templates use; anything else gives an InputError that
// names it. Renders like transformers' apply_chat_template.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace twell {

struct ChatMessage {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

// Copies share their content.
class ChatTemplate {
 public:
  // Loads the folder's chat_template.jinja, or chat_template of its tokenizer_config.json (of
  // several the one named "default"), with that file's special tokens. InputError when there is
  // none or its syntax is not supported.
  static ChatTemplate load(const std::filesystem::path& folder);
  // tokenizer_config: the file's text, which must hold the template unless one is given.
  static ChatTemplate parse(std::string_view tokenizer_config, const std::string& source,
                            std::string_view given_template = {});

  // messages_json: a JSON list of objects, as for transformers. add_generation_prompt: end with the
  // start of the assistant's answer. InputError with the line of the template.
  std::string render_json(std::string_view messages_json, bool add_generation_prompt) const;
  std::string render(const std::vector<ChatMessage>& messages, bool add_generation_prompt) const;
  // Text of the token that ends an answer; empty when the file names none.
  const std::string& eos_token() const;

 private:
  struct Impl;
  explicit ChatTemplate(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

}  // namespace twell
