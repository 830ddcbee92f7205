// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/openai.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "twell/base/error.h"
#include "twell/base/json.h"
#include "twell/base/utf8.h"

namespace twell {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr int kMaxDepth = 64;  // of nested lists and objects in a body
constexpr size_t kMostTools = 128;
constexpr size_t kMostToolName = 64;
constexpr int64_t kMaxStops = 16;
constexpr size_t kMaxStopBytes = 1024;
// JSON has no infinity, so an impossible token gets this log-probability, as in OpenAI's API.
constexpr double kImpossible = -9999.0;

// Fields that change nothing about an answer of this server.
const std::set<std::string>& ignored_fields() {
  static const std::set<std::string> fields = {"user",
                                               "metadata",
                                               "store",
                                               "service_tier",
                                               "safety_identifier",
                                               "model",
                                               "prompt_cache_key",
                                               "prompt_cache_retention"};
  return fields;
}

std::string shown(const json& value) {
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  constexpr size_t kMost = 60;
  if (text.size() > kMost) text = text.substr(0, kMost) + "...";
  return text;
}

[[noreturn]] void refuse(const std::string& field, const std::string& why) {
  throw ApiError(400, fmt::format("{}: {}", field, why), field);
}

// The fields of a request's object. Each is read once; finish() refuses those that nobody read. A
// field with the value null counts as absent, one that this server does not know as well: clients
// send back whole messages of answers, with a null in every field that was not used.
class Fields {
 public:
  explicit Fields(std::string_view body) {
    try {
      object_ = parse_json(body, "the body", {.depth = kMaxDepth});
    } catch (const InputError& error) {
      throw ApiError(400, error.what());
    }
    if (!object_.is_object()) throw ApiError(400, "the body is not a JSON object");
  }
  Fields(json object, std::string name) : object_(std::move(object)), name_(std::move(name)) {
    if (!object_.is_object()) refuse(name_, "expected an object, got " + shown(object_));
  }

  const json* find(const std::string& field) {
    read_.insert(field);
    const auto found = object_.find(field);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  // A field that must be there, as a value or as a text that is not empty.
  const json& needed(const std::string& field) {
    const json* value = find(field);
    if (value == nullptr) refuse(full(field), "missing");
    return *value;
  }
  std::string needed_text(const std::string& field) {
    std::string value = text(field);
    if (value.empty()) refuse(full(field), "missing");
    return value;
  }
  std::string text(const std::string& field) {
    const json* value = find(field);
    if (value == nullptr) return {};
    if (!value->is_string()) refuse(full(field), "expected a text, got " + shown(*value));
    return value->get<std::string>();
  }
  bool flag(const std::string& field, bool absent) {
    const json* value = find(field);
    if (value == nullptr) return absent;
    if (!value->is_boolean()) refuse(full(field), "expected true or false, got " + shown(*value));
    return value->get<bool>();
  }
  std::optional<int64_t> whole(const std::string& field, int64_t lowest, int64_t highest) {
    const json* value = find(field);
    if (value == nullptr) return std::nullopt;
    const bool fits = value->is_number_integer() &&
                      !(value->is_number_unsigned() && value->get<uint64_t>() > INT64_MAX);
    if (!fits || value->get<int64_t>() < lowest || value->get<int64_t>() > highest) {
      refuse(full(field), fmt::format("expected a whole number from {} to {}, got {}", lowest,
                                      highest, shown(*value)));
    }
    return value->get<int64_t>();
  }
  float real(const std::string& field, float absent, double lowest, double highest) {
    const json* value = find(field);
    if (value == nullptr) return absent;
    if (!value->is_number() || !(value->get<double>() >= lowest) ||
        !(value->get<double>() <= highest)) {
      refuse(full(field), fmt::format("expected a number from {} to {}, got {}", lowest, highest,
                                      shown(*value)));
    }
    return static_cast<float>(value->get<double>());
  }
  // Refuses a field that is present with another value than the one that means "off".
  void unsupported(const std::string& field, const json& off, const std::string& why) {
    const json* value = find(field);
    if (value != nullptr && *value != off) refuse(full(field), why);
  }
  void finish() const {
    for (const auto& [field, value] : object_.items()) {
      const bool known =
          read_.contains(field) || (name_.empty() && ignored_fields().contains(field));
      if (!known && !value.is_null()) refuse(full(field), "this server knows no such field");
    }
  }

 private:
  std::string full(const std::string& field) const {
    return name_.empty() ? field : name_ + "." + field;
  }

  json object_;
  std::string name_;
  std::set<std::string> read_;
};

std::vector<std::string> parse_stop(Fields& fields) {
  const json* value = fields.find("stop");
  std::vector<std::string> stops;
  if (value == nullptr) return stops;
  const json list = value->is_array() ? *value : json::array({*value});
  if (std::ssize(list) > kMaxStops) refuse("stop", fmt::format("more than {} texts", kMaxStops));
  for (const json& stop : list) {
    if (!stop.is_string() || stop.get_ref<const std::string&>().empty() ||
        stop.get_ref<const std::string&>().size() > kMaxStopBytes) {
      refuse("stop", fmt::format("expected a text of 1 to {} bytes or a list of them, got {}",
                                 kMaxStopBytes, shown(stop)));
    }
    stops.push_back(stop.get<std::string>());
  }
  return stops;
}

// {ID: bias}, or [[ID, bias], ...]; in place of an id a text.
std::vector<BiasWish> parse_logit_bias(Fields& fields) {
  std::vector<BiasWish> wishes;
  const json* value = fields.find("logit_bias");
  if (value == nullptr) return wishes;
  const std::string expected = fmt::format(
      "expected an object of token ids and numbers from {} to {}", -kMostBias, kMostBias);
  const auto add = [&](std::variant<int32_t, std::string> token, const json& bias) {
    if (!bias.is_number() || !(std::abs(bias.get<double>()) <= kMostBias)) {
      refuse("logit_bias", expected + ", got " + shown(bias));
    }
    if (const auto* text = std::get_if<std::string>(&token);
        text != nullptr && (text->empty() || text->size() > kMaxStopBytes)) {
      refuse("logit_bias", fmt::format("a text in place of a token's id has 1 to {} bytes, got {}",
                                       kMaxStopBytes, shown(*text)));
    }
    wishes.push_back({std::move(token), bias.get<float>()});
  };
  if (!value->is_object() && !value->is_array()) {
    refuse("logit_bias", expected + ", got " + shown(*value));
  }
  if (std::ssize(*value) > kMostBiases) {
    refuse("logit_bias", fmt::format("more than {} entries", kMostBiases));
  }
  const auto id_of = [&](const json& id) {
    if (!id.is_number_integer() || id < 0 || id > INT32_MAX) {
      refuse("logit_bias", "expected a token's id, got " + shown(id));
    }
    return id.get<int32_t>();
  };
  if (value->is_object()) {
    for (const auto& [key, bias] : value->items()) {
      const bool number = !key.empty() && key.size() <= 10 &&
                          std::ranges::all_of(key, [](char c) { return c >= '0' && c <= '9'; });
      if (number) {
        add(id_of(json(std::stoll(key))), bias);
      } else if (key.size() > 1 && key[0] == '-' && key[1] >= '0' && key[1] <= '9') {
        id_of(key);  // is no id, and hardly meant as a text
      } else {
        add(key, bias);
      }
    }
    return wishes;
  }
  for (const json& pair : *value) {
    if (!pair.is_array() || pair.size() != 2) {
      refuse("logit_bias", "expected a list of a token's id and a number, got " + shown(pair));
    }
    if (pair[0].is_string()) {
      add(pair[0].get<std::string>(), pair[1]);
    } else {
      add(id_of(pair[0]), pair[1]);
    }
  }
  return wishes;
}

// The value of a field with the client's order of keys, in which a model writes an object.
ordered_json ordered_field(std::string_view body, const char* field) {
  return parse_ordered_json(body, "the body", {.depth = kMaxDepth})[field];
}

// A name, a schema and what is said about it.
void check_named_schema(Fields& fields) {
  fields.text("name");
  fields.text("description");
  fields.flag("strict", false);
  fields.needed("schema");
}

// A format of answers, whose object is `name` in messages. ordered: it with the client's order of
// keys, called where there is a schema. nested: the schema stands in an object "json_schema", as in
// chats, or in the format itself, as in responses.
void parse_format(const json& value, const std::string& name, bool nested,
                  const std::function<ordered_json()>& ordered, AnswerOptions& options) {
  Fields format(value, name);
  const std::string type = format.text("type");
  const auto set = [&](GrammarText::Kind kind, std::string text) {
    options.grammar = GrammarText{kind, std::move(text)};
    options.grammar_field = name;
  };
  if (type == "json_object" && format.find("schema") != nullptr) {
    set(GrammarText::Kind::kJsonSchema, ordered()["schema"].dump());
  } else if (type == "json_object") {
    set(GrammarText::Kind::kJson, "");
  } else if (type == "json_schema") {
    ordered_json schema;
    if (nested) {
      Fields inner(format.needed("json_schema"), name + ".json_schema");
      check_named_schema(inner);
      inner.finish();
      schema = ordered()["json_schema"]["schema"];
    } else {
      check_named_schema(format);
      schema = ordered()["schema"];
    }
    set(GrammarText::Kind::kJsonSchema, schema.dump());
  } else if (type != "text") {
    refuse(
        name + ".type",
        fmt::format("expected \"text\", \"json_object\" or \"json_schema\", got {}", shown(type)));
  }
  format.finish();
}

void parse_response_format(Fields& fields, std::string_view body, AnswerOptions& options) {
  const json* value = fields.find("response_format");
  if (value == nullptr) return;
  parse_format(
      *value, "response_format", /*nested=*/true,
      [&] { return ordered_field(body, "response_format"); }, options);
}

// What the answer is drawn by.
void parse_grammar(Fields& fields, std::string_view body, AnswerOptions& options) {
  parse_response_format(fields, body, options);
  if (fields.find("json_schema") != nullptr) {
    if (options.grammar) refuse("json_schema", "does not go with \"response_format\"");
    options.grammar =
        GrammarText{GrammarText::Kind::kJsonSchema, ordered_field(body, "json_schema").dump()};
    options.grammar_field = "json_schema";
  }
  const std::string grammar = fields.text("grammar");
  if (grammar.empty()) return;
  if (options.grammar) {
    refuse("grammar", fmt::format("does not go with \"{}\"", options.grammar_field));
  }
  options.grammar = GrammarText{GrammarText::Kind::kEbnf, grammar};
  options.grammar_field = "grammar";
}

void check_grammar(const AnswerOptions& options) {
  if (options.grammar && options.ignore_end_of_text) {
    refuse("ignore_eos", fmt::format("does not go with \"{}\"", options.grammar_field));
  }
}

AnswerOptions parse_options(Fields& fields) {
  AnswerOptions options;
  options.model = fields.text("model");
  SamplerOptions& sampler = options.sampler;
  sampler.temperature = fields.real("temperature", 1.0f, 0.0, 100.0);
  sampler.top_p = fields.real("top_p", 1.0f, 0.0, 1.0);
  if (sampler.top_p == 0.0f) sampler.temperature = 0.0f;  // only the most likely token is left
  if (sampler.top_p == 0.0f) sampler.top_p = 1.0f;
  // The sampler takes values below 1; the largest of them keeps the most likely token, as 1 does.
  sampler.min_p = std::min(fields.real("min_p", 0.0f, 0.0, 1.0), std::nextafter(1.0f, 0.0f));
  sampler.presence_penalty = fields.real("presence_penalty", 0.0f, -2.0, 2.0);
  sampler.frequency_penalty = fields.real("frequency_penalty", 0.0f, -2.0, 2.0);
  sampler.repetition_penalty = fields.real("repetition_penalty", 1.0f, 0.01, 100.0);
  sampler.top_k = std::max<int64_t>(fields.whole("top_k", -1, INT32_MAX).value_or(0), 0);
  const std::optional<int64_t> seed = fields.whole("seed", INT64_MIN, INT64_MAX);
  options.seeded = seed.has_value();
  sampler.seed = static_cast<uint64_t>(seed.value_or(0));
  options.stop = parse_stop(fields);
  options.choices = fields.whole("n", 1, INT32_MAX).value_or(1);
  options.ignore_end_of_text = fields.flag("ignore_eos", false);
  options.stream = fields.flag("stream", false);
  if (const json* stream_options = fields.find("stream_options"); stream_options != nullptr) {
    Fields inner(*stream_options, "stream_options");
    options.stream_usage = inner.flag("include_usage", false);
    options.stream_continuous_usage = inner.flag("continuous_usage_stats", false);
    inner.flag("include_obfuscation", false);
    inner.finish();
    if (!options.stream) refuse("stream_options", "goes with \"stream\": true only");
  }
  options.logit_bias = parse_logit_bias(fields);
  return options;
}

void check_sequences(int64_t prompts, const AnswerOptions& options, int64_t most) {
  if (options.choices > most / prompts) {
    refuse("n", fmt::format("{} prompts with {} choices each are more than the {} sequences that "
                            "this server takes at once",
                            prompts, options.choices, most));
  }
}

std::vector<int32_t> parse_ids(const json& list, const std::string& field) {
  std::vector<int32_t> ids;
  ids.reserve(list.size());
  for (const json& id : list) {
    if (!id.is_number_integer() || id < 0 || id > INT32_MAX) {
      refuse(field, "expected token ids, got " + shown(id));
    }
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

// A text, a list of texts, token ids, or a list of lists of token ids.
void parse_prompts(Fields& fields, CompletionRequest& request) {
  const json* value = fields.find("prompt");
  const std::string expected = "expected a text, token ids, or a list of one of them";
  if (value == nullptr) refuse("prompt", "missing; " + expected);
  if (value->is_string()) {
    request.prompts.emplace_back(value->get<std::string>());
    return;
  }
  if (!value->is_array() || value->empty()) refuse("prompt", expected + ", got " + shown(*value));
  if (value->front().is_number()) {
    request.prompts.emplace_back(parse_ids(*value, "prompt"));
    return;
  }
  for (const json& prompt : *value) {
    if (prompt.is_string()) {
      request.prompts.emplace_back(prompt.get<std::string>());
    } else if (prompt.is_array() && !prompt.empty()) {
      request.prompts.emplace_back(parse_ids(prompt, "prompt"));
    } else {
      refuse("prompt", expected + ", got " + shown(prompt));
    }
  }
}

// A call in a message's "tool_calls"; its arguments as an object, which templates write as JSON.
ordered_json call_of(const std::string& id, const std::string& name, const std::string& text) {
  ordered_json arguments = ordered_json::object();
  try {
    if (!text.empty()) arguments = parse_ordered_json(text, "arguments", {.depth = kMaxDepth});
  } catch (const InputError&) {
    arguments = text;  // what a model wrote
  }
  ordered_json call = ordered_json::object();
  if (!id.empty()) call["id"] = id;
  call["type"] = "function";
  call["function"] = {{"name", name}, {"arguments", std::move(arguments)}};
  return call;
}

// "tool_calls" of a message.
ordered_json normalized_calls(const json& value, const std::string& name) {
  if (!value.is_array()) refuse(name, "expected a list, got " + shown(value));
  ordered_json out = ordered_json::array();
  for (size_t i = 0; i < value.size(); ++i) {
    const std::string at = fmt::format("{}[{}]", name, i);
    Fields call(value[i], at);
    const std::string id = call.text("id");
    call.unsupported("type", "function", "only \"function\" is supported");
    Fields function(call.needed("function"), at + ".function");
    const std::string called = function.needed_text("name");
    const std::string arguments = function.text("arguments");
    function.finish();
    call.unsupported("index", static_cast<int64_t>(i), "not in order");
    call.finish();
    out.push_back(call_of(id, called, arguments));
  }
  return out;
}

bool is_tool_name(const std::string& name) {
  const auto fits = [](char one) {
    return (one >= 'a' && one <= 'z') || (one >= 'A' && one <= 'Z') || (one >= '0' && one <= '9') ||
           one == '_' || one == '-' || one == '.';
  };
  return !name.empty() && name.size() <= kMostToolName && std::ranges::all_of(name, fits);
}

// The schema of a call's arguments, which are an object.
ordered_json object_schema(const std::string& name, const ordered_json& schema) {
  if (const auto type = schema.find("type"); type != schema.end()) {
    if (*type != "object") {
      refuse(name, "expected a schema of the type \"object\", got " + shown(*type));
    }
    return schema;
  }
  // A schema with one of these says its type elsewhere, in each alternative.
  for (const char* keyword : {"$ref", "allOf", "anyOf", "oneOf", "enum", "const"}) {
    if (schema.contains(keyword)) return schema;
  }
  ordered_json out = {{"type", "object"}};
  out.update(schema);
  return out;
}

// A tool that may be called. nested: its function stands in an object "function", as in chats, or
// in the tool itself, as in responses. ordered: the tool with the client's order of keys.
Tool parse_tool(const json& value, const std::string& at, bool nested,
                const ordered_json& ordered) {
  Fields outer(value, at);
  if (outer.text("type") != "function") refuse(at + ".type", "only \"function\" is supported");
  const std::string name = nested ? at + ".function" : at;
  Fields function(nested ? outer.needed("function") : value, name);
  if (!nested) function.find("type");
  Tool tool{.name = function.text("name"), .strict = function.flag("strict", false)};
  if (!is_tool_name(tool.name)) {
    refuse(name + ".name",
           fmt::format("expected 1 to {} letters, digits, \"_\", \"-\" or \".\", got {}",
                       kMostToolName, shown(tool.name)));
  }
  function.text("description");
  if (const json* schema = function.find("parameters"); schema != nullptr) {
    const std::string parameters = name + ".parameters";
    if (!schema->is_object()) refuse(parameters, "expected a JSON schema");
    tool.parameters =
        object_schema(parameters, (nested ? ordered["function"] : ordered)["parameters"]).dump();
  }
  function.finish();
  if (nested) outer.finish();
  return tool;
}

// The name in a "tool_choice" that is an object; nested as above.
std::string parse_named_choice(const json& choice, bool nested, std::string& field) {
  Fields named(choice, "tool_choice");
  if (named.text("type") != "function") {
    refuse("tool_choice.type", "only \"function\" is supported");
  }
  std::string name;
  if (nested) {
    Fields inner(named.needed("function"), "tool_choice.function");
    name = inner.text("name");
    inner.finish();
    field = "tool_choice.function.name";
  } else {
    name = named.text("name");
    field = "tool_choice.name";
  }
  named.finish();
  return name;
}

// Tools and the choice among them; nested as above.
void parse_tools(Fields& fields, std::string_view body, bool nested, ChatRequest& request) {
  const json* value = fields.find("tools");
  const json* choice = fields.find("tool_choice");
  request.calls.parallel = fields.flag("parallel_tool_calls", true);
  const bool none = value == nullptr || (value->is_array() && value->empty());
  if (none) {
    request.calls.choice = ToolChoice::kNone;
    if (choice != nullptr && *choice != "none" && *choice != "auto") {
      refuse("tool_choice", "there are no tools");
    }
    return;
  }
  if (!value->is_array()) refuse("tools", "expected a list, got " + shown(*value));
  if (value->size() > kMostTools) refuse("tools", fmt::format("more than {} tools", kMostTools));
  const ordered_json ordered = ordered_field(body, "tools");
  ordered_json shown_tools = ordered_json::array();  // to the template
  std::set<std::string> names;
  for (size_t i = 0; i < value->size(); ++i) {
    const std::string at = fmt::format("tools[{}]", i);
    Tool tool = parse_tool((*value)[i], at, nested, ordered[i]);
    if (!names.insert(tool.name).second) {
      refuse(at + (nested ? ".function.name" : ".name"), "there are two of the name");
    }
    if (nested) {
      shown_tools.push_back(ordered[i]);
    } else {
      ordered_json function = ordered[i];
      function.erase("type");
      shown_tools.push_back({{"type", "function"}, {"function", std::move(function)}});
    }
    request.tools.push_back(std::move(tool));
  }
  if (choice != nullptr && choice->is_object()) {
    std::string field;
    const std::string name = parse_named_choice(*choice, nested, field);
    if (!names.contains(name)) refuse(field, "there is no tool " + shown(name));
    std::erase_if(request.tools, [&](const Tool& tool) { return tool.name != name; });
    request.calls.choice = ToolChoice::kRequired;
    request.calls.parallel = false;
  } else if (choice == nullptr || *choice == "auto") {
    request.calls.choice = ToolChoice::kAuto;
  } else if (*choice == "required") {
    request.calls.choice = ToolChoice::kRequired;
  } else if (*choice == "none") {
    request.calls.choice = ToolChoice::kNone;
    request.tools.clear();
    return;
  } else {
    refuse("tool_choice",
           "expected \"none\", \"auto\", \"required\" or a function, got " + shown(*choice));
  }
  // A format holds for texts, of which an answer that must be a call has none.
  const std::optional<GrammarText>& grammar = request.options.grammar;
  if (grammar && grammar->kind == GrammarText::Kind::kEbnf &&
      request.calls.choice == ToolChoice::kRequired) {
    refuse("tool_choice", fmt::format("does not go with \"{}\"", request.options.grammar_field));
  }
  request.tools_json = shown_tools.dump();
}

// Variables of the chat template.
std::string parse_variables(Fields& fields, std::string_view body) {
  const json* given = fields.find("chat_template_kwargs");
  if (given == nullptr) return {};
  if (!given->is_object()) {
    refuse("chat_template_kwargs", "expected an object, got " + shown(*given));
  }
  return ordered_field(body, "chat_template_kwargs").dump();
}

// Messages with their contents as texts. Parts of a content that are texts are joined.
std::string normalized_messages(Fields& fields) {
  const json* value = fields.find("messages");
  if (value == nullptr || !value->is_array() || value->empty()) {
    refuse("messages", "expected a list of at least one message");
  }
  ordered_json out = ordered_json::array();
  for (size_t i = 0; i < value->size(); ++i) {
    const std::string name = fmt::format("messages[{}]", i);
    Fields message((*value)[i], name);
    std::string role = message.needed_text("role");
    if (role == "developer") role = "system";  // what templates call it
    std::string content;
    const json* calls = message.find("tool_calls");
    if (calls != nullptr && calls->is_array() && calls->empty()) calls = nullptr;
    if (calls != nullptr && role != "assistant") {
      refuse(name + ".tool_calls", "only messages of the role \"assistant\" have calls");
    }
    if (const json* given = message.find("content"); given == nullptr) {
      if (calls == nullptr) refuse(name + ".content", "missing");
    } else if (given->is_string()) {
      content = given->get<std::string>();
    } else if (given->is_array()) {
      for (const json& part : *given) {
        const bool is_text = part.is_object() && part.contains("type") && part["type"] == "text" &&
                             part.contains("text") && part["text"].is_string();
        if (!is_text) refuse(name + ".content", "only parts of type \"text\" are supported");
        content += part["text"].get_ref<const std::string&>();
      }
    } else {
      refuse(name + ".content", "expected a text, got " + shown(*given));
    }
    ordered_json normalized = {{"role", role}, {"content", content}};
    if (const std::string author = message.text("name"); !author.empty()) {
      normalized["name"] = author;
    }
    if (calls != nullptr) normalized["tool_calls"] = normalized_calls(*calls, name + ".tool_calls");
    if (role == "tool") normalized["tool_call_id"] = message.needed_text("tool_call_id");
    message.unsupported("refusal", nullptr, "not supported");
    message.unsupported("annotations", json::array(), "not supported");
    message.finish();
    out.push_back(std::move(normalized));
  }
  return out.dump();
}

// A token's text as JSON shows it. Where the bytes are no UTF-8 by themselves, their values, so
// that different tokens keep different names.
std::string token_name(const Tokenizer& tokenizer, int32_t id) {
  if (id >= tokenizer.vocab_size()) return fmt::format("token:{}", id);
  const std::string_view bytes = tokenizer.token_bytes(id);
  if (find_invalid_utf8(bytes) == bytes.size()) return std::string(bytes);
  std::string name = "bytes:";
  for (const char byte : bytes) name += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
  return name;
}

double finite(float log_prob) {
  return std::isfinite(log_prob) ? static_cast<double>(log_prob) : kImpossible;
}

}  // namespace

ordered_json error_json(const ApiError& error) {
  const auto or_null = [](const std::string& text) {
    return text.empty() ? ordered_json() : ordered_json(text);
  };
  const char* type = error.status == 401   ? "authentication_error"
                     : error.status == 404 ? "not_found_error"
                     : error.status == 503 ? "overloaded_error"
                     : error.status >= 500 ? "server_error"
                                           : "invalid_request_error";
  return {{"error",
           {{"message", error.what()},
            {"type", type},
            {"param", or_null(error.param)},
            {"code", or_null(error.code)}}}};
}

CompletionRequest parse_completion(std::string_view body, int64_t most_sequences) {
  Fields fields(body);
  CompletionRequest request;
  request.options = parse_options(fields);
  AnswerOptions& options = request.options;
  parse_prompts(fields, request);
  check_sequences(std::ssize(request.prompts), options, most_sequences);
  request.echo = fields.flag("echo", false);
  request.begin_token = fields.flag("add_special_tokens", true);
  options.max_tokens = fields.whole("max_tokens", request.echo ? 0 : 1, INT32_MAX);
  options.log_probs = fields.whole("logprobs", 0, kMostLogProbs);
  request.suffix = fields.text("suffix");
  if (request.echo && !request.suffix.empty()) refuse("suffix", "does not go with \"echo\": true");
  parse_grammar(fields, body, options);
  check_grammar(options);
  fields.unsupported("best_of", options.choices, "only n choices are drawn; leave it out");
  fields.finish();
  return request;
}

ChatRequest parse_chat(std::string_view body, int64_t most_sequences) {
  Fields fields(body);
  ChatRequest request;
  request.options = parse_options(fields);
  AnswerOptions& options = request.options;
  check_sequences(1, options, most_sequences);
  request.messages_json = normalized_messages(fields);
  const std::optional<int64_t> older = fields.whole("max_tokens", 1, INT32_MAX);
  options.max_tokens = fields.whole("max_completion_tokens", 1, INT32_MAX);
  if (!options.max_tokens) options.max_tokens = older;
  const bool log_probs = fields.flag("logprobs", false);
  const std::optional<int64_t> top = fields.whole("top_logprobs", 0, kMostLogProbs);
  if (top && !log_probs) refuse("top_logprobs", "goes with \"logprobs\": true only");
  if (log_probs) options.log_probs = top.value_or(0);
  parse_grammar(fields, body, options);
  parse_tools(fields, body, /*nested=*/true, request);
  request.variables_json = parse_variables(fields, body);
  check_grammar(options);
  fields.unsupported("functions", json::array(), "not supported; use \"tools\"");
  fields.unsupported("function_call", "none", "not supported; use \"tool_choice\"");
  fields.unsupported("modalities", json::array({"text"}), "only [\"text\"] is supported");
  fields.finish();
  return request;
}

namespace {

// The text of an item of "input": a text, or parts that are texts.
std::string text_of_parts(const json& given, const std::string& name) {
  if (given.is_string()) return given.get<std::string>();
  if (!given.is_array()) refuse(name, "expected a text or a list of parts, got " + shown(given));
  std::string text;
  for (const json& part : given) {
    const bool has_type = part.is_object() && part.contains("type") && part["type"].is_string();
    const std::string type = has_type ? part["type"].get<std::string>() : "";
    const bool is_text = (type == "input_text" || type == "output_text" || type == "text") &&
                         part.contains("text") && part["text"].is_string();
    if (!is_text) {
      refuse(name,
             "only parts of the types \"input_text\" and \"output_text\" are supported, got " +
                 shown(part));
    }
    text += part["text"].get_ref<const std::string&>();
  }
  return text;
}

// Adds a call, which stands in an assistant's message with the calls and the text in front of it,
// or its result to the messages.
void add_call_item(Fields& item, const std::string& name, bool is_call, ordered_json& messages) {
  const std::string id = item.needed_text("call_id");
  if (is_call) {
    const std::string called = item.needed_text("name");
    if (messages.empty() || messages.back()["role"] != "assistant") {
      messages.push_back({{"role", "assistant"}, {"content", ""}});
    }
    messages.back()["tool_calls"].push_back(call_of(id, called, item.text("arguments")));
  } else {
    messages.push_back({{"role", "tool"},
                        {"content", text_of_parts(item.needed("output"), name + ".output")},
                        {"tool_call_id", id}});
  }
  item.finish();
}

// Instructions and input as the messages of a chat.
std::string response_messages(Fields& fields, const std::string& instructions) {
  ordered_json out = ordered_json::array();
  if (!instructions.empty()) out.push_back({{"role", "system"}, {"content", instructions}});
  const json* input = fields.find("input");
  const std::string expected = "expected a text or a list of at least one item";
  if (input == nullptr) refuse("input", "missing; " + expected);
  if (input->is_string()) {
    out.push_back({{"role", "user"}, {"content", input->get<std::string>()}});
    return out.dump();
  }
  if (!input->is_array() || input->empty()) refuse("input", expected + ", got " + shown(*input));
  for (size_t i = 0; i < input->size(); ++i) {
    const std::string name = fmt::format("input[{}]", i);
    Fields item((*input)[i], name);
    for (const char* ignored : {"id", "status"}) item.find(ignored);
    const std::string type = item.text("type");
    if (type == "function_call" || type == "function_call_output") {
      add_call_item(item, name, type == "function_call", out);
      continue;
    }
    if (!type.empty() && type != "message") {
      refuse(name + ".type",
             fmt::format("expected \"message\", \"function_call\" or \"function_call_output\", got "
                         "{}",
                         shown(type)));
    }
    std::string role = item.needed_text("role");
    if (role == "developer") role = "system";  // what templates call it
    const std::string content = text_of_parts(item.needed("content"), name + ".content");
    item.find("phase");
    item.finish();
    out.push_back({{"role", role}, {"content", content}});
  }
  return out.dump();
}

}  // namespace

ResponseRequest parse_response(std::string_view body, int64_t most_sequences) {
  Fields fields(body);
  ResponseRequest request;
  request.options = parse_options(fields);
  AnswerOptions& options = request.options;
  check_sequences(1, options, most_sequences);
  if (options.choices != 1) refuse("n", "a response has one text");
  options.max_tokens = fields.whole("max_output_tokens", 1, INT32_MAX);
  const std::string instructions = fields.text("instructions");
  request.messages_json = response_messages(fields, instructions);
  const std::string stateless =
      "this server keeps nothing for later requests; send the whole "
      "conversation as \"input\"";
  fields.unsupported("store", false, stateless);
  fields.unsupported("previous_response_id", nullptr, stateless);
  fields.unsupported("conversation", nullptr, stateless);
  fields.unsupported("prompt", nullptr, stateless);
  fields.unsupported("background", false, stateless);
  fields.unsupported("truncation", "disabled", "only \"disabled\" is supported");
  if (const json* reasoning = fields.find("reasoning"); reasoning != nullptr) {
    bool says_nothing = reasoning->is_object();
    for (const json& setting : *reasoning) says_nothing = says_nothing && setting.is_null();
    if (!says_nothing) refuse("reasoning", "not supported; leave it out");
  }
  fields.unsupported("max_tool_calls", nullptr, "bounds built-in tools, of which there are none");
  ordered_json answer_format = {{"type", "text"}};
  if (const json* text = fields.find("text"); text != nullptr) {
    Fields inner(*text, "text");
    if (const json* format = inner.find("format"); format != nullptr) {
      answer_format = ordered_field(body, "text")["format"];
      parse_format(
          *format, "text.format", /*nested=*/false, [&] { return answer_format; }, options);
    }
    inner.text("verbosity");
    inner.finish();
    check_grammar(options);
  }
  parse_tools(fields, body, /*nested=*/false, request);
  bool log_probs = false;
  if (const json* include = fields.find("include"); include != nullptr) {
    if (!include->is_array()) refuse("include", "expected a list, got " + shown(*include));
    for (const json& what : *include) {
      if (what != "message.output_text.logprobs") {
        refuse("include", "only \"message.output_text.logprobs\" is supported, got " + shown(what));
      }
      log_probs = true;
    }
  }
  const std::optional<int64_t> top = fields.whole("top_logprobs", 0, kMostLogProbs);
  if (log_probs || top.value_or(0) > 0) options.log_probs = top.value_or(0);
  const json* metadata = fields.find("metadata");
  if (metadata != nullptr && !metadata->is_object()) {
    refuse("metadata", "expected an object, got " + shown(*metadata));
  }
  const auto or_null = [](bool present, const ordered_json& value) {
    return present ? value : ordered_json();
  };
  const auto given = [&](const char* field, ordered_json absent) {
    return fields.find(field) == nullptr ? std::move(absent) : ordered_field(body, field);
  };
  request.settings_json =
      to_text({{"instructions", or_null(!instructions.empty(), instructions)},
               {"max_output_tokens",
                or_null(options.max_tokens.has_value(), options.max_tokens.value_or(0))},
               {"metadata", metadata == nullptr ? ordered_json::object() : ordered_json(*metadata)},
               {"parallel_tool_calls", fields.flag("parallel_tool_calls", true)},
               {"temperature", options.sampler.temperature},
               {"text", {{"format", std::move(answer_format)}}},
               {"tool_choice", given("tool_choice", "auto")},
               {"tools", given("tools", ordered_json::array())},
               {"top_logprobs", top.value_or(0)},
               {"top_p", options.sampler.top_p},
               {"truncation", "disabled"}});
  fields.finish();
  return request;
}

TokenizeRequest parse_tokenize(std::string_view body) {
  Fields fields(body);
  TokenizeRequest request;
  request.model = fields.text("model");
  const bool chat = fields.find("messages") != nullptr;
  if (chat == (fields.find("prompt") != nullptr)) {
    throw ApiError(400, "expected either \"prompt\" or \"messages\"", "prompt");
  }
  if (chat) {
    request.messages_json = normalized_messages(fields);
    ChatRequest beside;
    parse_tools(fields, body, /*nested=*/true, beside);
    request.tools_json = std::move(beside.tools_json);
    request.variables_json = parse_variables(fields, body);
    request.add_generation_prompt = fields.flag("add_generation_prompt", true);
  } else {
    request.prompt = fields.text("prompt");
  }
  request.begin_token = fields.flag("add_special_tokens", !chat);
  fields.finish();
  return request;
}

std::vector<int32_t> parse_detokenize(std::string_view body) {
  Fields fields(body);
  const json* tokens = fields.find("tokens");
  if (tokens == nullptr || !tokens->is_array()) refuse("tokens", "expected a list of token ids");
  std::vector<int32_t> ids = parse_ids(*tokens, "tokens");
  fields.finish();
  return ids;
}

void CompletionLogProbs::add_token(int32_t id) {
  tokens_.push_back(token_name(tokenizer_, id));
  offsets_.push_back(offset_);
  if (id >= tokenizer_.vocab_size()) return;
  for (const char byte : tokenizer_.token_bytes(id)) {
    offset_ += (static_cast<unsigned char>(byte) & 0xc0) != 0x80;  // first bytes of characters
  }
}

void CompletionLogProbs::add_first(int32_t id) {
  add_token(id);
  values_.push_back(nullptr);
  tops_.push_back(nullptr);
}

void CompletionLogProbs::add(const TokenLogProbs& token) {
  add_token(token.token.id);
  values_.push_back(finite(token.token.log_prob));
  ordered_json top = ordered_json::object();
  const auto add_top = [&](const TokenLogProb& one) {
    // Different tokens can have the same text, such as an added one and one of the vocabulary.
    std::string name = token_name(tokenizer_, one.id);
    if (top.contains(name)) name = fmt::format("token:{}", one.id);
    top[name] = finite(one.log_prob);
  };
  add_top(token.token);
  for (const TokenLogProb& other : token.top) {
    if (other.id != token.token.id) add_top(other);
  }
  tops_.push_back(std::move(top));
}

ordered_json CompletionLogProbs::take() {
  ordered_json taken = {{"tokens", std::move(tokens_)},
                        {"token_logprobs", std::move(values_)},
                        {"top_logprobs", std::move(tops_)},
                        {"text_offset", std::move(offsets_)}};
  tokens_ = values_ = tops_ = offsets_ = ordered_json::array();
  return taken;
}

ordered_json chat_log_prob(const Tokenizer& tokenizer, const TokenLogProbs& token) {
  const auto entry = [&](const TokenLogProb& one) {
    ordered_json bytes = ordered_json::array();
    if (one.id < tokenizer.vocab_size()) {
      for (const char byte : tokenizer.token_bytes(one.id)) {
        bytes.push_back(static_cast<unsigned char>(byte));
      }
    }
    return ordered_json{{"token", token_name(tokenizer, one.id)},
                        {"logprob", finite(one.log_prob)},
                        {"bytes", std::move(bytes)}};
  };
  ordered_json out = entry(token.token);
  out["top_logprobs"] = ordered_json::array();
  for (const TokenLogProb& other : token.top) out["top_logprobs"].push_back(entry(other));
  return out;
}

ordered_json finish_reason(const std::optional<StopReason>& stop, bool calls) {
  if (!stop) return nullptr;
  if (*stop != StopReason::kEndOfText && *stop != StopReason::kStopString) return "length";
  return calls ? "tool_calls" : "stop";
}

ordered_json usage_json(int64_t prompt_tokens, int64_t tokens, int64_t cached_tokens) {
  return {{"prompt_tokens", prompt_tokens},
          {"completion_tokens", tokens},
          {"total_tokens", prompt_tokens + tokens},
          {"prompt_tokens_details", {{"cached_tokens", cached_tokens}}}};
}

std::string to_text(const ordered_json& json) {
  return json.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace twell
