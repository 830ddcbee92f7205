// SPDX-License-Identifier: Apache-2.0
// Chat templates: they turn messages into the prompt format of a model. Templates are rendered as
// transformers' apply_chat_template does with jinja2; what is not supported gives an InputError
// that names it. See jinja/ for the language.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace twell {

struct ChatMessage {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

// What a template is given, as JSON; empty: none.
struct ChatInput {
  std::string_view messages;   // list of objects, as for transformers
  std::string_view tools;      // list of objects, as OpenAI's API takes them
  std::string_view documents;  // list of objects
  std::string_view variables;  // object: further variables, such as {"enable_thinking": false}
  bool add_generation_prompt = true;  // end with the start of the assistant's answer
};

// Copies share their content. Several threads may render at once.
class ChatTemplate {
 public:
  // Reads the folder's templates: chat_template.jinja (and additional_chat_templates/*.jinja), else
  // chat_template.json, else chat_template of tokenizer_config.json. Of several, "tool_use" is for
  // conversations with tools and "default" for all others. The special tokens are those of
  // tokenizer_config.json and, where it lacks them, of special_tokens_map.json. InputError when
  // there is no template or it cannot be used.
  static ChatTemplate load(const std::filesystem::path& folder);
  // The same from the contents of such files, by their path in the folder.
  static ChatTemplate from_files(const std::map<std::string, std::string>& files);
  // tokenizer_config: the file's text, which must hold the template unless one is given.
  static ChatTemplate parse(std::string_view tokenizer_config, const std::string& source,
                            std::string_view given_template = {});

  // InputError with the line of the template and the reason.
  std::string render(const ChatInput& input) const;
  std::string render_json(std::string_view messages_json, bool add_generation_prompt) const;
  std::string render(const std::vector<ChatMessage>& messages, bool add_generation_prompt) const;
  // Text of the token that ends an answer; empty when the file names none.
  const std::string& eos_token() const;
  // The text of the template that conversations with tools are rendered by.
  const std::string& tool_template() const;

 private:
  struct Impl;
  explicit ChatTemplate(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

}  // namespace twell
