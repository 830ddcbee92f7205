// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja_builtins.h"

#include <algorithm>
#include <cctype>
#include <ctime>

#include "twell/base/error.h"

namespace twell::jinja {
namespace {

constexpr const char* kBlanks = " \t\n\r\f\v";

const std::string& want_text(const Value& value, const std::string& what) {
  TWELL_REQUIRE(value.is_string(), "{} is for text, not for {}", what, to_text(value));
  return value.text();
}

std::string strip(const std::string& text, const std::string& characters, bool left, bool right) {
  const size_t first = left ? text.find_first_not_of(characters) : 0;
  if (first == std::string::npos) return "";
  const size_t last = right ? text.find_last_not_of(characters) : text.size() - 1;
  return last == std::string::npos ? "" : text.substr(first, last + 1 - first);
}

// ASCII letters; the names that templates change the case of are those of roles.
std::string change_case(std::string text, int (*change)(int)) {
  for (char& c : text) c = static_cast<char>(change(static_cast<unsigned char>(c)));
  return text;
}

std::string replace_all(const std::string& text, const std::string& from, const std::string& to) {
  TWELL_REQUIRE(!from.empty(), "replace needs something to replace");
  std::string out;
  size_t begin = 0;
  for (size_t at; (at = text.find(from, begin)) != std::string::npos; begin = at + from.size()) {
    out.append(text, begin, at - begin).append(to);
  }
  return out.append(text, begin, std::string::npos);
}

Value split(const std::string& text, const Value& separator, int64_t limit) {
  Json out = Json::array();
  size_t begin = 0;
  if (separator.undefined || separator.data.is_null()) {  // at blanks, of which none remain
    while ((begin = text.find_first_not_of(kBlanks, begin)) != std::string::npos) {
      const size_t end = std::min(text.find_first_of(kBlanks, begin), text.size());
      out.push_back(text.substr(begin, end - begin));
      begin = end;
    }
    return out;
  }
  const std::string& by = want_text(separator, "split");
  TWELL_REQUIRE(!by.empty(), "split needs a separator");
  for (size_t at; limit != 0 && (at = text.find(by, begin)) != std::string::npos; --limit) {
    out.push_back(text.substr(begin, at - begin));
    begin = at + by.size();
  }
  out.push_back(text.substr(begin));
  return out;
}

Value items(const Json& data) {
  TWELL_REQUIRE(data.is_object(), "items is for dictionaries");
  Json out = Json::array();
  for (const auto& [key, item] : data.items()) out.push_back(Json::array({key, item}));
  return out;
}

size_t code_points(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

Value length(const Value& value) {
  if (value.is_string()) return Json(code_points(value.text()));
  TWELL_REQUIRE(value.data.is_structured(), "{} has no length", to_text(value));
  return Json(value.data.size());
}

Value join(const Value& value, const Value& separator) {
  const std::string by = separator.undefined ? "" : to_text(separator);
  std::string out;
  bool first = true;
  for (const Json& item : value.data) {
    out += (first ? "" : by) + to_text(Value(item));
    first = false;
  }
  return Json(out);
}

Value map_attribute(const Value& value, const Arguments& arguments) {
  const Value attribute = arguments.get(0, "attribute");
  TWELL_REQUIRE(arguments.positional.empty(), "only map(attribute=...) is supported");
  const std::string& name = want_text(attribute, "map(attribute=...)");
  Json out = Json::array();
  for (const Json& item : value.data) {
    out.push_back(item.is_object() && item.contains(name) ? item[name] : Json());
  }
  return out;
}

std::string time_text(const std::string& format) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  char text[256];
  return {text, std::strftime(text, sizeof(text), format.c_str(), &local)};
}

}  // namespace

Value Arguments::get(size_t i, const std::string& name, Value fallback) const {
  if (i < positional.size()) return positional[i];
  for (const auto& [key, value] : named) {
    if (key == name) return value;
  }
  return fallback;
}

Value apply_filter(const std::string& name, const Value& value, const Arguments& arguments) {
  if (name == "trim") return Json(strip(to_text(value), kBlanks, true, true));
  if (name == "upper") return Json(change_case(to_text(value), std::toupper));
  if (name == "lower") return Json(change_case(to_text(value), std::tolower));
  if (name == "capitalize" || name == "title") {
    std::string text = change_case(to_text(value), std::tolower);
    bool start = true;
    for (char& c : text) {
      if (start) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
      start = name == "title" && std::isalnum(static_cast<unsigned char>(c)) == 0;
    }
    return Json(text);
  }
  if (name == "length" || name == "count") return length(value);
  if (name == "string") return Json(to_text(value));
  if (name == "safe" || name == "list") return value;
  if (name == "int") {
    return value.is_string() ? Json(std::strtoll(value.text().c_str(), nullptr, 10))
                             : Json(value.data.get<int64_t>());
  }
  if (name == "first" || name == "last") {
    if (value.data.empty()) return Value::nothing();
    return name == "first" ? Json(value.data.front()) : Json(value.data.back());
  }
  if (name == "join") return join(value, arguments.get(0, "d"));
  if (name == "items") return items(value.data);
  if (name == "map") return map_attribute(value, arguments);
  if (name == "replace") {
    return Json(replace_all(to_text(value), to_text(arguments.get(0, "old")),
                            to_text(arguments.get(1, "new"))));
  }
  if (name == "default" || name == "d") {
    const bool falsy_too = truthy(arguments.get(1, "boolean"));
    return value.undefined || (falsy_too && !truthy(value))
               ? arguments.get(0, "default_value", Value(Json("")))
               : value;
  }
  if (name == "tojson") {
    const Value indent = arguments.get(0, "indent");
    const bool given = !indent.undefined && !indent.data.is_null();
    return Json(to_json_text(value.data, given ? indent.data.get<int>() : -1));
  }
  throw InputError(fmt::format("the filter '{}' is not supported", name));
}

bool apply_test(const std::string& name, const Value& value, const Arguments& arguments) {
  const Json& data = value.data;
  if (name == "defined") return !value.undefined;
  if (name == "undefined") return value.undefined;
  if (name == "none") return !value.undefined && !value.space && data.is_null();
  if (name == "string") return data.is_string();
  if (name == "mapping") return data.is_object();
  if (name == "sequence") return data.is_array() || data.is_string() || data.is_object();
  if (name == "iterable") return data.is_array() || data.is_string() || data.is_object();
  if (name == "boolean") return data.is_boolean();
  if (name == "number") return data.is_number();
  if (name == "integer") return data.is_number_integer();
  if (name == "float") return data.is_number_float();
  if (name == "true") return data.is_boolean() && data.get<bool>();
  if (name == "false") return data.is_boolean() && !data.get<bool>();
  if (name == "equalto" || name == "eq") return equal(value, arguments.get(0, "other"));
  if (name == "odd" || name == "even") {
    return (data.get<int64_t>() % 2 != 0) == (name == "odd");
  }
  throw InputError(fmt::format("the test '{}' is not supported", name));
}

Value call_method(const std::string& name, const Value& object, const Arguments& arguments) {
  if (object.data.is_object()) {
    if (name == "items") return items(object.data);
    if (name == "get") {
      const std::string key = to_text(arguments.get(0, "key"));
      return object.data.contains(key) ? Value(object.data[key])
                                       : arguments.get(1, "default", Value(Json()));
    }
    if (name == "keys" || name == "values") {
      Json out = Json::array();
      for (const auto& [key, item] : object.data.items()) {
        out.push_back(name == "keys" ? Json(key) : item);
      }
      return out;
    }
  }
  if (object.is_string()) {
    const std::string& text = object.text();
    const Value first = arguments.get(0, "sep");
    const std::string given = first.undefined || first.data.is_null() ? kBlanks : to_text(first);
    if (name == "strip") return Json(strip(text, given, true, true));
    if (name == "lstrip") return Json(strip(text, given, true, false));
    if (name == "rstrip") return Json(strip(text, given, false, true));
    if (name == "startswith") return Json(text.starts_with(given));
    if (name == "endswith") return Json(text.ends_with(given));
    if (name == "upper") return Json(change_case(text, std::toupper));
    if (name == "lower") return Json(change_case(text, std::tolower));
    if (name == "capitalize" || name == "title") return apply_filter(name, object, {});
    if (name == "replace") return apply_filter(name, object, arguments);
    if (name == "split") {
      const Value limit = arguments.get(1, "maxsplit");
      return split(text, first, limit.undefined ? -1 : limit.data.get<int64_t>());
    }
    if (name == "find") {
      const size_t at = text.find(given);
      return Json(at == std::string::npos ? int64_t{-1} : static_cast<int64_t>(at));
    }
  }
  throw InputError(fmt::format("the method '{}' of {} is not supported", name, to_text(object)));
}

Value call_function(const std::string& name, const Arguments& arguments) {
  if (name == "raise_exception") {
    throw InputError(fmt::format("the template says: {}", to_text(arguments.get(0, "message"))));
  }
  if (name == "namespace") {
    Value value;
    value.space = std::make_shared<std::map<std::string, Value>>();
    for (const auto& [key, item] : arguments.named) (*value.space)[key] = item;
    return value;
  }
  if (name == "dict") {
    Json out = Json::object();
    for (const auto& [key, item] : arguments.named) out[key] = item.data;
    return out;
  }
  if (name == "range") {
    const auto at = [&](size_t i, int64_t fallback) {
      return i < arguments.positional.size() ? arguments.positional[i].data.get<int64_t>()
                                             : fallback;
    };
    const bool one = arguments.positional.size() < 2;
    const int64_t begin = one ? 0 : at(0, 0), end = one ? at(0, 0) : at(1, 0), step = at(2, 1);
    TWELL_REQUIRE(step != 0 && std::abs(end - begin) <= 100'000, "range is too long");
    Json out = Json::array();
    for (int64_t i = begin; step > 0 ? i < end : i > end; i += step) out.push_back(i);
    return out;
  }
  if (name == "strftime_now") return Json(time_text(to_text(arguments.get(0, "format"))));
  throw InputError(fmt::format("the function '{}' is not supported", name));
}

}  // namespace twell::jinja
