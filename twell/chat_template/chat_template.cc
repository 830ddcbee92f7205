// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/chat_template.h"

#include <map>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/json.h"
#include "twell/chat_template/jinja.h"

namespace twell {
namespace fs = std::filesystem;
using jinja::Value;
using Json = nlohmann::ordered_json;  // keeps the file's order of keys, which templates see

struct ChatTemplate::Impl {
  std::string source;
  jinja::Body body;
  std::map<std::string, Value> variables;  // includes the special tokens
  std::string eos_token;
};

namespace {

constexpr size_t kMaxTemplateBytes = size_t{1} << 20;
constexpr const char* kSpecialTokens[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                          "pad_token", "cls_token", "mask_token"};

Value to_value(const Json& json, int depth = 1) {
  TWELL_REQUIRE(depth <= jinja::kMaxDepth, "messages are nested more than {} deep",
                jinja::kMaxDepth);
  if (json.is_boolean()) return Value::of(json.get<bool>());
  if (json.is_number_float()) return Value::of(json.get<double>());
  if (json.is_number_unsigned() && json.get<uint64_t>() > INT64_MAX) {
    return Value::of(json.get<double>());
  }
  if (json.is_number_integer()) return Value::of(json.get<int64_t>());
  if (json.is_string()) return Value::of(json.get<std::string>());
  if (json.is_array()) {
    std::vector<Value> items;
    for (const Json& item : json) items.push_back(to_value(item, depth + 1));
    return Value::of(std::move(items));
  }
  if (json.is_object()) {
    std::vector<std::pair<std::string, Value>> items;
    for (const auto& [key, item] : json.items()) items.emplace_back(key, to_value(item, depth + 1));
    return Value::of(std::move(items));
  }
  return Value::none();
}

// The text of a token, which is a string or an object with the text in "content".
std::string token_text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  return value.is_object() && value.contains("content") && value["content"].is_string()
             ? value["content"].get<std::string>()
             : "";
}

std::string find_template(const Json& config, const std::string& source) {
  const auto found = config.find("chat_template");
  TWELL_REQUIRE(found != config.end() && !found->is_null(),
                "{}: there is no chat_template; this model was not made for chats", source);
  if (found->is_string()) return found->get<std::string>();
  if (found->is_array()) {
    for (const Json& entry : *found) {
      if (entry.is_object() && entry.value("name", "") == "default" && entry.contains("template") &&
          entry["template"].is_string()) {
        return entry["template"].get<std::string>();
      }
    }
  }
  throw InputError(
      fmt::format("{}: chat_template is neither a text nor a list with one named "
                  "\"default\"",
                  source));
}

}  // namespace

ChatTemplate::ChatTemplate(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

ChatTemplate ChatTemplate::load(const fs::path& folder) {
  const fs::path config = folder / "tokenizer_config.json";
  const fs::path file = folder / "chat_template.jinja";
  const bool own_file = fs::exists(file);
  TWELL_REQUIRE(fs::exists(config) || own_file,
                "{} has no chat template: it needs tokenizer_config.json or chat_template.jinja",
                folder.string());
  return parse(fs::exists(config) ? read_file(config) : "{}",
               own_file ? file.string() : config.string(), own_file ? read_file(file) : "");
}

ChatTemplate ChatTemplate::parse(std::string_view tokenizer_config, const std::string& source,
                                 std::string_view given_template) {
  const Json config = parse_ordered_json(tokenizer_config, source, {.keys = JsonKeys::kLast});
  TWELL_REQUIRE(config.is_object(), "{}: not a JSON object", source);
  const std::string text =
      given_template.empty() ? find_template(config, source) : std::string(given_template);
  TWELL_REQUIRE(text.size() <= kMaxTemplateBytes, "{}: a chat template of {} bytes is too long",
                source, text.size());
  auto impl = std::make_shared<Impl>();
  impl->source = source;
  impl->body = jinja::parse_template(text, source);
  for (const char* name : kSpecialTokens) {
    const std::string token = config.contains(name) ? token_text(config[name]) : "";
    if (!token.empty()) impl->variables[name] = Value::of(token);
  }
  if (impl->variables.contains("eos_token")) {
    impl->eos_token = *impl->variables["eos_token"].text();
  }
  // transformers always passes these, even when there are none.
  impl->variables["tools"] = Value::none();
  impl->variables["documents"] = Value::none();
  return ChatTemplate(std::move(impl));
}

std::string ChatTemplate::render_json(std::string_view messages_json,
                                      bool add_generation_prompt) const {
  const Json messages = parse_ordered_json(messages_json, "the messages",
                                           {.depth = jinja::kMaxDepth, .keys = JsonKeys::kLast});
  TWELL_REQUIRE(messages.is_array(), "messages must be a JSON list");
  std::map<std::string, Value> variables = impl_->variables;
  variables["messages"] = to_value(messages);
  variables["add_generation_prompt"] = Value::of(add_generation_prompt);
  return jinja::render(impl_->body, variables, impl_->source);
}

std::string ChatTemplate::render(const std::vector<ChatMessage>& messages,
                                 bool add_generation_prompt) const {
  Json list = Json::array();
  for (const ChatMessage& message : messages) {
    list.push_back({{"role", message.role}, {"content", message.content}});
  }
  return render_json(list.dump(-1, ' ', false, Json::error_handler_t::replace),
                     add_generation_prompt);
}

const std::string& ChatTemplate::eos_token() const { return impl_->eos_token; }

}  // namespace twell
