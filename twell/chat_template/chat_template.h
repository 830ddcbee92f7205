// SPDX-License-Identifier: Apache-2.0
// Chat templates of tokenizer_config.json: messages into the text a model was trained to answer.
// The part of Jinja that published templates use is understood; anything else is refused by name
// when it is met. Renders as transformers' apply_chat_template does.
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

class ChatTemplate {
 public:
  // chat_template.jinja of the folder, or chat_template of its tokenizer_config.json (the one named
  // "default" of several), with that file's special tokens. InputError when there is none, or when
  // its syntax is not supported.
  static ChatTemplate load(const std::filesystem::path& folder);
  // tokenizer_config: the text of the file, which must hold the template unless one is given.
  static ChatTemplate parse(std::string_view tokenizer_config, const std::string& source,
                            std::string_view given_template = {});

  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;
  ~ChatTemplate();

  // messages_json: a JSON list of objects, as transformers takes it. add_generation_prompt: ends
  // where the assistant's answer begins. InputError with the line of the template.
  std::string render_json(std::string_view messages_json, bool add_generation_prompt) const;
  std::string render(const std::vector<ChatMessage>& messages, bool add_generation_prompt) const;
  // Text of the token that ends an answer; empty when the file names none.
  const std::string& eos_token() const;

 private:
  struct Impl;
  explicit ChatTemplate(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace twell
