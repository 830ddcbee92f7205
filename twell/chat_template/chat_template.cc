// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/chat_template.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/json.h"
#include "twell/chat_template/jinja/json_value.h"
#include "twell/chat_template/jinja/parser.h"
#include "twell/chat_template/jinja/renderer.h"

namespace twell {
namespace fs = std::filesystem;
using jinja::Value;
using Json = nlohmann::json;

namespace {

constexpr size_t kMaxTemplateBytes = size_t{1} << 20;
constexpr const char* kSpecialTokens[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                          "pad_token", "cls_token", "mask_token"};

// Template texts by name, with where they come from.
using Texts = std::map<std::string, std::pair<std::string, std::string>>;

// The text of a token, which is a string or an object with the text in "content".
std::string token_text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  return value.is_object() && value.contains("content") && value["content"].is_string()
             ? value["content"].get<std::string>()
             : "";
}

// chat_template of a file: a text, or a list or object of named ones.
Texts texts_of(const Json& config, const std::string& source) {
  const auto found = config.find("chat_template");
  TWELL_REQUIRE(found != config.end() && !found->is_null(),
                "{}: there is no chat_template; this model was not made for chats", source);
  Texts out;
  if (found->is_string()) out["default"] = {source, found->get<std::string>()};
  if (found->is_array()) {
    for (const Json& entry : *found) {
      if (!entry.is_object() || !entry.contains("template") || !entry["template"].is_string() ||
          !entry.contains("name") || !entry["name"].is_string()) {
        continue;
      }
      const std::string name = entry["name"].get<std::string>();
      out[name] = {fmt::format("{} ({})", source, name), entry["template"].get<std::string>()};
    }
  }
  TWELL_REQUIRE(out.contains("default") || out.contains("tool_use"),
                "{}: chat_template is neither a text nor a list with one named \"default\"",
                source);
  return out;
}

Json parse_object(std::string_view text, const std::string& source) {
  Json out = parse_json(text, source, {.keys = JsonKeys::kLast});
  TWELL_REQUIRE(out.is_object(), "{}: not a JSON object", source);
  return out;
}

// The contents of a checkpoint's files by their path in it. Messages name files without their
// folder, because a server's clients read them.
using Files = std::map<std::string, std::string>;

constexpr const char* kTemplateFile = "chat_template.jinja";
constexpr const char* kTemplateJson = "chat_template.json";
constexpr const char* kMoreTemplates = "additional_chat_templates";
constexpr const char* kTokenizerConfig = "tokenizer_config.json";
constexpr const char* kTokensMap = "special_tokens_map.json";

Files read_files(const fs::path& folder) {
  Files files;
  const auto take = [&](const fs::path& name) {
    if (fs::exists(folder / name)) files[name.string()] = read_file(folder / name);
  };
  for (const char* name : {kTemplateFile, kTemplateJson, kTokenizerConfig, kTokensMap}) take(name);
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder / kMoreTemplates, none)) {
    if (entry.path().extension() == ".jinja") take(kMoreTemplates / entry.path().filename());
  }
  return files;
}

Json object_in(const Files& files, const char* name) {
  const auto file = files.find(name);
  return file == files.end() ? Json::object() : parse_object(file->second, name);
}

Texts texts_in(const Files& files, const Json& config) {
  Texts out;
  if (const auto file = files.find(kTemplateFile); file != files.end()) {
    out["default"] = *file;
    for (const auto& [path, text] : files) {
      const fs::path name = path;
      if (name.parent_path() != kMoreTemplates) continue;
      out[name.stem().string()] = {name.filename().string(), text};
    }
    return out;
  }
  if (files.contains(kTemplateJson))
    return texts_of(object_in(files, kTemplateJson), kTemplateJson);
  TWELL_REQUIRE(files.contains(kTokenizerConfig),
                "there is no chat template; it would be in chat_template.jinja or "
                "tokenizer_config.json of the checkpoint");
  return texts_of(config, kTokenizerConfig);
}

}  // namespace

struct ChatTemplate::Impl {
  // One of a model's templates. A fault in one that is not the default is told when it is used.
  struct Named {
    std::string source;  // for messages
    std::string text;
    jinja::Template tree;
    std::string fault;
  };

  static Named prepared(const std::string& source, std::string text) {
    Named out{source, std::move(text), {}, {}};
    TWELL_REQUIRE(out.text.size() <= kMaxTemplateBytes,
                  "{}: a chat template of {} bytes is too long; at most {} are taken", source,
                  out.text.size(), kMaxTemplateBytes);
    out.tree = jinja::parse_template(out.text, source);
    return out;
  }

  std::map<std::string, Named> templates;  // by name: "default", "tool_use"
  jinja::Variables variables;              // the special tokens
  std::string eos_token;

  void add_template(const std::string& name, const std::string& source, std::string text) {
    if (name == "default") {
      templates[name] = prepared(source, std::move(text));
      return;
    }
    try {
      templates[name] = prepared(source, text);
    } catch (const InputError& error) {
      templates[name] = Named{source, std::move(text), {}, error.what()};
    }
  }

  void add_tokens(const Json& config) {
    for (const char* name : kSpecialTokens) {
      const std::string token = config.contains(name) ? token_text(config[name]) : "";
      if (!token.empty()) variables.try_emplace(name, Value::of(token));
    }
    const auto eos = variables.find("eos_token");
    if (eos != variables.end()) eos_token = *eos->second.text();
  }

  const Named& pick(bool with_tools) const {
    auto found = with_tools ? templates.find("tool_use") : templates.end();
    if (found == templates.end()) found = templates.find("default");
    TWELL_REQUIRE(found != templates.end(),
                  "{}: there is no chat template for conversations without tools",
                  templates.begin()->second.source);
    return found->second;
  }
};

ChatTemplate::ChatTemplate(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

ChatTemplate ChatTemplate::load(const fs::path& folder) { return from_files(read_files(folder)); }

ChatTemplate ChatTemplate::from_files(const Files& files) {
  const Json config = object_in(files, kTokenizerConfig);
  auto impl = std::make_shared<Impl>();
  for (auto& [name, text] : texts_in(files, config)) {
    if (name == "default" || name == "tool_use") impl->add_template(name, text.first, text.second);
  }
  impl->add_tokens(config);
  impl->add_tokens(object_in(files, kTokensMap));
  return ChatTemplate(std::move(impl));
}

ChatTemplate ChatTemplate::parse(std::string_view tokenizer_config, const std::string& source,
                                 std::string_view given_template) {
  const Json config = parse_object(tokenizer_config, source);
  auto impl = std::make_shared<Impl>();
  Texts texts;
  if (given_template.empty()) {
    texts = texts_of(config, source);
  } else {
    texts["default"] = {source, std::string(given_template)};
  }
  for (auto& [name, text] : texts) {
    if (name == "default" || name == "tool_use") impl->add_template(name, text.first, text.second);
  }
  impl->add_tokens(config);
  return ChatTemplate(std::move(impl));
}

std::string ChatTemplate::render(const ChatInput& input) const {
  jinja::Variables variables = impl_->variables;
  const auto list = [](std::string_view text, const char* what) {
    if (text.empty()) return Value::none();
    Value value = jinja::parse_json(text, what);
    TWELL_REQUIRE(value.list() != nullptr || value.is_none(), "{} must be a JSON list", what);
    return value;
  };
  if (!input.variables.empty()) {
    const Value given = jinja::parse_json(input.variables, "the template's variables");
    TWELL_REQUIRE(given.dict() != nullptr, "the template's variables must be a JSON object");
    for (const auto& [name, value] : given.dict()->items) variables[*name.text()] = value;
  }
  const Value tools = list(input.tools, "tools");
  const Impl::Named& picked = impl_->pick(!tools.is_none());
  TWELL_REQUIRE(picked.fault.empty(), "{}", picked.fault);
  const Value messages = list(input.messages, "messages");
  TWELL_REQUIRE(messages.list() != nullptr, "messages must be a JSON list");
  // transformers always passes these, even when there are none.
  variables["messages"] = messages;
  variables["tools"] = tools;
  variables["documents"] = list(input.documents, "documents");
  variables["add_generation_prompt"] = Value::of(input.add_generation_prompt);
  return jinja::render(picked.tree, variables, picked.source);
}

std::string ChatTemplate::render_json(std::string_view messages_json,
                                      bool add_generation_prompt) const {
  return render(ChatInput{.messages = messages_json.empty() ? "null" : messages_json,
                          .tools = {},
                          .documents = {},
                          .variables = {},
                          .add_generation_prompt = add_generation_prompt});
}

std::string ChatTemplate::render(const std::vector<ChatMessage>& messages,
                                 bool add_generation_prompt) const {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const ChatMessage& message : messages) {
    list.push_back({{"role", message.role}, {"content", message.content}});
  }
  return render_json(list.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace),
                     add_generation_prompt);
}

const std::string& ChatTemplate::eos_token() const { return impl_->eos_token; }

const std::string& ChatTemplate::tool_template() const { return impl_->pick(true).text; }

}  // namespace twell
