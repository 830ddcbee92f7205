// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja_value.h"

#include "twell/base/error.h"

namespace twell::jinja {
namespace {

// Python's repr() of a text, for the usual ones.
std::string quoted(const std::string& text) {
  const char quote =
      text.find('\'') != std::string::npos && text.find('"') == std::string::npos ? '"' : '\'';
  std::string out(1, quote);
  for (const char c : text) {
    if (c == quote || c == '\\') out += '\\';
    switch (c) {
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        out += c;
    }
  }
  return out + quote;
}

std::string number_text(const Json& value) {
  return value.dump();  // integers, and floats with a point, as Python writes them
}

std::string repr(const Json& value) {
  if (value.is_string()) return quoted(value.get_ref<const std::string&>());
  if (value.is_null()) return "None";
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  if (value.is_number()) return number_text(value);
  std::string out;
  for (const auto& [key, item] : value.items()) {
    if (!out.empty()) out += ", ";
    if (value.is_object()) out += quoted(key) + ": ";
    out += repr(item);
  }
  return value.is_object() ? "{" + out + "}" : "[" + out + "]";
}

void write_json(const Json& value, int indent, int depth, std::string& out) {
  if (!value.is_structured() || value.empty()) {
    out += value.dump(-1, ' ', false, Json::error_handler_t::replace);
    return;
  }
  const auto line = [&](int level) {
    if (indent < 0) return std::string();
    return std::string(1, '\n').append(static_cast<size_t>(indent * level), ' ');
  };
  out += value.is_object() ? '{' : '[';
  bool first = true;
  for (const auto& [key, item] : value.items()) {
    if (!first) out += indent < 0 ? ", " : ",";
    first = false;
    out += line(depth + 1);
    if (value.is_object()) {
      out += Json(key).dump(-1, ' ', false, Json::error_handler_t::replace) + ": ";
    }
    write_json(item, indent, depth + 1, out);
  }
  out += line(depth);
  out += value.is_object() ? '}' : ']';
}

}  // namespace

bool truthy(const Value& value) {
  if (value.undefined) return false;
  if (value.space) return true;
  const Json& data = value.data;
  if (data.is_null()) return false;
  if (data.is_boolean()) return data.get<bool>();
  if (data.is_string()) return !value.text().empty();
  if (data.is_number()) return data.get<double>() != 0.0;
  return !data.empty();
}

bool equal(const Value& a, const Value& b) {
  if (a.undefined || b.undefined) return a.undefined && b.undefined;
  if (a.space || b.space) return a.space == b.space;
  return a.data == b.data;
}

std::string to_text(const Value& value) {
  if (value.undefined) return "";
  if (value.space) return "<Namespace>";
  return value.is_string() ? value.text() : repr(value.data);
}

std::string to_json_text(const Json& value, int indent) {
  std::string out;
  write_json(value, indent, 0, out);
  return out;
}

}  // namespace twell::jinja
