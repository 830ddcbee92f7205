// SPDX-License-Identifier: Apache-2.0
#include "cli/config_file.h"

#include <fmt/ranges.h>
#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/json.h"
#include "twell/base/utf8.h"

namespace twell::cli {
namespace fs = std::filesystem;
namespace {

constexpr int kMaxDepth = 4;  // of nested tables, which only group options

std::string json_scalar(const nlohmann::json& value, const std::string& key) {
  if (value.is_string()) return value.get<std::string>();
  TWELL_REQUIRE(value.is_boolean() || value.is_number(), "{} must be a string, number or boolean",
                key);
  return value.dump();
}

// toml++ 3.3 has undefined behaviour at some characters that are not ASCII, so it gets ASCII alone:
// their bytes become _xHH, and so does each '_' before an 'x', so that to_utf8 finds no other _x.
std::string to_ascii(std::string_view text) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  std::string ascii;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte >= 0x80 || text.substr(i).starts_with("_x")) {
      ascii += fmt::format("_x{:02x}", byte);
    } else {
      ascii += text[i];
    }
  }
  return ascii;
}

// The inverse of to_ascii, of a part of its text.
std::string to_utf8(std::string_view ascii) {
  std::string text;
  for (size_t i = 0; i < ascii.size(); ++i) {
    unsigned byte = 0;
    if (ascii.substr(i).starts_with("_x") && i + 4 <= ascii.size() &&
        std::from_chars(&ascii[i + 2], &ascii[i] + 4, byte, 16).ptr == &ascii[i] + 4) {
      text += static_cast<char>(byte);
      i += 3;
    } else {
      text += ascii[i];
    }
  }
  return text;
}

// Converts TOML to JSON. A date has no JSON type and becomes null, which every option rejects.
nlohmann::json to_json(const toml::node& node) {
  if (const toml::table* table = node.as_table()) {
    nlohmann::json object = nlohmann::json::object();
    for (const auto& [key, value] : *table) object[to_utf8(key.str())] = to_json(value);
    return object;
  }
  if (const toml::array* array = node.as_array()) {
    nlohmann::json list = nlohmann::json::array();
    for (const toml::node& element : *array) list.push_back(to_json(element));
    return list;
  }
  if (const auto* text = node.as_string()) return to_utf8(text->get());
  if (const auto* number = node.as_integer()) return number->get();
  if (const auto* truth = node.as_boolean()) return truth->get();
  if (const auto* number = node.as_floating_point()) {
    if (std::isfinite(number->get())) return number->get();
    return fmt::format("{}", number->get());  // options reject inf and nan like flags
  }
  return nullptr;
}

nlohmann::json parse_toml(const std::string& text, const std::string& source) {
  const size_t invalid = find_invalid_utf8(text);
  TWELL_REQUIRE(invalid == text.size(), "{}:{}: not UTF-8", source,
                1 + std::count(text.begin(), text.begin() + static_cast<int64_t>(invalid), '\n'));
  try {
    return to_json(toml::parse(to_ascii(text)));
  } catch (const toml::parse_error& error) {
    throw InputError(
        fmt::format("{}:{}: {}", source, error.source().begin.line, to_utf8(error.description())));
  }
}

struct ConfigItem {
  std::string name;
  std::vector<std::string> values;
};

void collect_items(const nlohmann::json& object, std::vector<ConfigItem>& items) {
  for (const auto& [key, value] : object.items()) {
    if (value.is_object()) {
      collect_items(value, items);
      continue;
    }
    ConfigItem& item = items.emplace_back(ConfigItem{key, {}});
    if (value.is_array()) {
      for (const nlohmann::json& element : value) item.values.push_back(json_scalar(element, key));
    } else {
      item.values.push_back(json_scalar(value, key));
    }
  }
}

std::vector<ConfigItem> read_items(const fs::path& file) {
  const std::string text = read_file(file);
  const nlohmann::json json = file.extension() == ".json"
                                  ? parse_json(text, file.string(), {.depth = kMaxDepth})
                                  : parse_toml(text, file.string());
  TWELL_REQUIRE(json.is_object(), "{}: not a JSON object", file.string());
  std::vector<ConfigItem> items;
  collect_items(json, items);
  return items;
}

void apply_items(Command& command, const fs::path& file, const std::vector<ConfigItem>& items) {
  std::set<const Option*> seen;
  for (const ConfigItem& item : items) {
    std::string name = item.name;
    std::replace(name.begin(), name.end(), '_', '-');
    bool negated = false;
    Option* option = command.find(name, &negated);
    TWELL_REQUIRE(option != nullptr, "{}: unknown key '{}'", file.string(), item.name);
    TWELL_REQUIRE(option->settable_by_file(), "{}: '{}' can only be given as a flag", file.string(),
                  item.name);
    TWELL_REQUIRE(seen.insert(option).second, "{}: '{}' is set twice", file.string(), item.name);
    if (option->given() || option->excluded()) continue;
    try {
      option->set(item.values, negated);
    } catch (const InputError& error) {
      throw InputError(fmt::format("{}: {}: {}", file.string(), item.name, error.what()));
    }
  }
}

// Bytes that are not UTF-8, and the characters that stand for them, become characters of a private
// area: JSON holds nothing else.
constexpr char32_t kFirstByte = 0xF780;  // stands for 0x80

std::string text_of_bytes(std::string_view bytes) {
  std::string text;
  while (!bytes.empty()) {
    const size_t good = find_invalid_utf8(bytes);
    // U+F780 to U+F7BF are EF 9E 80 to BF, and U+F7C0 to U+F7FF are EF 9F 80 to BF.
    const size_t private_area = std::min(bytes.find("\xEF\x9E"), bytes.find("\xEF\x9F"));
    const size_t plain = std::min({good, private_area, bytes.size()});
    text.append(bytes.substr(0, plain));
    bytes.remove_prefix(plain);
    const size_t coded = std::min<size_t>(bytes.size(), plain == good ? 1 : 3);
    for (const char byte : bytes.substr(0, coded)) {
      const auto code = kFirstByte + static_cast<unsigned char>(byte) - 0x80;
      text += {'\xEF', static_cast<char>(0x80 | (code >> 6 & 0x3F)),
               static_cast<char>(0x80 | (code & 0x3F))};
    }
    bytes.remove_prefix(coded);
  }
  return text;
}

// The inverse of text_of_bytes.
std::string bytes_of(std::string_view text) {
  std::string bytes;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool coded =
        text.substr(i).starts_with("\xEF\x9E") || text.substr(i).starts_with("\xEF\x9F");
    if (!coded || i + 2 >= text.size()) {
      bytes += text[i];
      continue;
    }
    const char32_t code = 0xF000u | (static_cast<unsigned char>(text[i + 1]) & 0x3Fu) << 6 |
                          (static_cast<unsigned char>(text[i + 2]) & 0x3Fu);
    bytes += static_cast<char>(code - kFirstByte + 0x80);
    i += 2;
  }
  return bytes;
}

}  // namespace

void apply_config_file(Command& command, const fs::path& file) {
  apply_items(command, file, read_items(file));
}

void apply_saved_options(Command& command, const fs::path& file, const std::set<std::string>& fixed,
                         const std::set<std::string>& skipped) {
  std::vector<ConfigItem> items = read_items(file);
  std::erase_if(items, [&](const ConfigItem& item) { return skipped.contains(item.name); });
  for (ConfigItem& item : items) {
    for (std::string& value : item.values) value = bytes_of(value);
  }
  for (const std::string& name : fixed) {
    const Option& option = command.at(name);
    if (!option.given()) continue;
    const auto saved = std::find_if(items.begin(), items.end(),
                                    [&](const ConfigItem& item) { return item.name == name; });
    const std::vector<std::string> before =
        saved == items.end() ? option.default_values() : saved->values;
    TWELL_REQUIRE(
        option.same(before, option.values()),
        "cannot resume with another --{}: the run has {}, now {} was given; leave it out, "
        "or choose another --out for a new run",
        name, before.empty() ? "none" : fmt::format("{}", fmt::join(before, ", ")),
        fmt::join(option.values(), ", "));
  }
  apply_items(command, file, items);
}

std::string given_options_json(const Command& command, const std::set<std::string>& paths) {
  nlohmann::json json = nlohmann::json::object();
  for (const auto& option : command.options()) {
    if (!option->given() || !option->settable_by_file()) continue;
    const std::string name = option->name();
    std::vector<std::string> values = option->values();
    if (paths.contains(name)) {
      for (std::string& value : values) value = fs::absolute(value).string();
    }
    for (std::string& value : values) value = text_of_bytes(value);
    json[name] = values.size() == 1 ? nlohmann::json(values.front()) : nlohmann::json(values);
  }
  return json.dump(2) + "\n";
}

}  // namespace twell::cli
