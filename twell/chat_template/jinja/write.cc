// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja/write.h"

#include <algorithm>
#include <cmath>

#include "twell/base/utf8.h"
#include "twell/chat_template/jinja/numbers.h"
#include "twell/chat_template/jinja/operators.h"
#include "twell/chat_template/jinja/text.h"

namespace twell::jinja {
namespace {

void append_plain(Budget& budget, const Value& value, std::string& out) {
  if (value.is_none()) return budget.append(out, "None");
  if (const bool* truth = value.boolean()) return budget.append(out, *truth ? "True" : "False");
  if (const Integer* integer = value.integer()) return budget.append(out, integer_text(*integer));
  if (const double* real = value.real()) return budget.append(out, real_text(*real));
  if (value.is_undefined()) return budget.append(out, "Undefined");
  if (const Range* range = value.range()) {
    const std::string step = range->step == 1 ? "" : ", " + integer_text(range->step);
    return budget.append(out, fmt::format("range({}, {}{})", range->start, range->stop, step));
  }
  if (value.object() != nullptr) return budget.append(out, value.object()->repr(budget, 0));
  budget.append(out, fmt::format("<{}>", type_name(value)));
}

void append_items(Budget& budget, const std::vector<Value>& items, std::string& out) {
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) budget.append(out, ", ");
    append_repr(budget, items[i], out);
  }
}

void append_dict(Budget& budget, const Dict& dict, std::string& out) {
  budget.append(out, "{");
  for (size_t i = 0; i < dict.items.size(); ++i) {
    if (i > 0) budget.append(out, ", ");
    append_repr(budget, dict.items[i].first, out);
    budget.append(out, ": ");
    append_repr(budget, dict.items[i].second, out);
  }
  budget.append(out, "}");
}

void append_view(Budget& budget, const Value& value, std::string& out) {
  budget.append(out, type_name(value));
  budget.append(out, "([");
  append_items(budget, items_of(budget, value), out);
  budget.append(out, "])");
}

// End of the run of bytes from `at` on that are written as they are: printable ASCII and, where
// `beyond` says so, all of other characters, but for a quote and the backslash.
size_t plain_end(std::string_view text, size_t at, char quote, bool beyond) {
  for (; at < text.size(); ++at) {
    const auto c = static_cast<unsigned char>(text[at]);
    const bool plain = c >= 0x20 && (c < 0x7f || beyond) && text[at] != quote && c != '\\';
    if (!plain) break;
  }
  return at;
}

// ---- JSON

void append_json_text(Budget& budget, std::string_view text, bool ascii, std::string& out) {
  budget.bytes(text.size() + 2);
  out += '"';
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    at = plain_end(text, at, '"', !ascii);
    out += text.substr(begin, at - begin);
    if (at == text.size()) break;
    const CodePoint c = next_code_point(text, at);
    const size_t known = c < 0x80 ? std::string_view("\"\\\n\r\t\b\f").find(static_cast<char>(c))
                                  : std::string_view::npos;
    if (known != std::string_view::npos) {
      budget.append(out, 1, '\\');
      out += "\"\\nrtbf"[known];
    } else if (c < 0x20 || (ascii && c >= 0x7f && c < 0x10000)) {
      budget.append(out, fmt::format("\\u{:04x}", c));
    } else if (ascii && c >= 0x10000) {
      const CodePoint rest = c - 0x10000;
      budget.append(
          out, fmt::format("\\u{:04x}\\u{:04x}", 0xd800 + (rest >> 10), 0xdc00 + (rest & 0x3ff)));
    } else {
      append_code_point(out, c);
    }
  }
  out += '"';
}

class JsonWriter {
 public:
  JsonWriter(Budget& budget, const JsonStyle& style) : budget_(budget), style_(style) {}

  void append(const Value& value, size_t level) {
    const Budget::Level guard(budget_);
    budget_.step();
    if (const std::string* text = value.text()) {
      append_json_text(budget_, *text, style_.ascii, out_);
    } else if (const List* list = value.list()) {
      append_list(*list, level);
    } else if (const Dict* dict = value.dict()) {
      append_dict(*dict, level);
    } else {
      budget_.append(out_, plain(value));
    }
  }
  std::string take() { return std::move(out_); }

 private:
  std::string plain(const Value& value) const {
    if (value.is_none()) return "null";
    if (const bool* truth = value.boolean()) return *truth ? "true" : "false";
    if (const Integer* integer = value.integer()) return integer_text(*integer);
    if (const double* real = value.real()) {
      if (std::isnan(*real)) return "NaN";
      if (std::isinf(*real)) return *real < 0 ? "-Infinity" : "Infinity";
      return real_text(*real);
    }
    throw InputError(
        fmt::format("{} ({}) cannot be written as JSON", shown(budget_, value), type_name(value)));
  }

  void new_line(size_t level) {
    if (!style_.indented) return;
    budget_.append(out_, "\n");
    for (size_t i = 0; i < level; ++i) budget_.append(out_, style_.indent);
  }

  void append_list(const List& list, size_t level) {
    budget_.append(out_, "[");
    for (size_t i = 0; i < list.items.size(); ++i) {
      if (i > 0) budget_.append(out_, style_.between);
      new_line(level + 1);
      append(list.items[i], level + 1);
    }
    if (!list.items.empty()) new_line(level);
    budget_.append(out_, "]");
  }

  void append_dict(const Dict& dict, size_t level) {
    std::vector<const std::pair<Value, Value>*> items;
    budget_.bytes(dict.items.size() * sizeof(void*));
    for (const auto& item : dict.items) items.push_back(&item);
    if (style_.sorted) {
      std::stable_sort(items.begin(), items.end(), [&](const auto* a, const auto* b) {
        return less(budget_, a->first, b->first);
      });
    }
    budget_.append(out_, "{");
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) budget_.append(out_, style_.between);
      new_line(level + 1);
      const Value& key = items[i]->first;
      append_json_text(budget_, key.text() != nullptr ? *key.text() : plain(key), style_.ascii,
                       out_);
      budget_.append(out_, style_.after_key);
      append(items[i]->second, level + 1);
    }
    if (!items.empty()) new_line(level);
    budget_.append(out_, "}");
  }

  Budget& budget_;
  const JsonStyle& style_;
  std::string out_;
};

}  // namespace

const char* type_name(const Value& value) {
  if (value.is_undefined()) return "Undefined";
  if (value.is_none()) return "NoneType";
  if (value.boolean() != nullptr) return "bool";
  if (value.integer() != nullptr) return "int";
  if (value.real() != nullptr) return "float";
  if (value.text() != nullptr) return "str";
  if (value.list() != nullptr) return value.is_tuple() ? "tuple" : "list";
  if (value.dict() != nullptr) return "dict";
  if (const View* view = value.view()) {
    return view->kind == ViewKind::kKeys     ? "dict_keys"
           : view->kind == ViewKind::kValues ? "dict_values"
                                             : "dict_items";
  }
  if (value.range() != nullptr) return "range";
  if (value.generator() != nullptr) return "generator";
  if (value.object() != nullptr) return value.object()->type();
  return value.method() != nullptr ? "method" : "function";
}

void append_quoted(Budget& budget, std::string_view text, std::string& out) {
  budget.bytes(text.size() + 2);
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  out += quote;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    at = plain_end(text, at, quote, false);
    out += text.substr(begin, at - begin);
    if (at == text.size()) break;
    const CodePoint c = next_code_point(text, at);
    const size_t known =
        c < 0x80 ? std::string_view("\n\r\t\\").find(static_cast<char>(c)) : std::string_view::npos;
    if (known != std::string_view::npos || c == static_cast<CodePoint>(quote)) {
      budget.append(out, 1, '\\');
      out += known != std::string_view::npos ? "nrt\\"[known] : quote;
    } else if (is_printable(c)) {
      append_code_point(out, c);
    } else if (c < 0x100) {
      budget.append(out, fmt::format("\\x{:02x}", c));
    } else {
      budget.append(out, c < 0x10000 ? fmt::format("\\u{:04x}", c) : fmt::format("\\U{:08x}", c));
    }
  }
  out += quote;
}

void append_repr(Budget& budget, const Value& value, std::string& out) {
  const Budget::Level guard(budget);
  budget.step();
  if (const std::string* text = value.text()) {
    if (!value.is_markup()) return append_quoted(budget, *text, out);
    budget.append(out, "Markup(");
    append_quoted(budget, *text, out);
    return budget.append(out, ")");
  }
  if (const List* list = value.list()) {
    const bool tuple = value.is_tuple();
    budget.append(out, tuple ? "(" : "[");
    append_items(budget, list->items, out);
    if (tuple && list->items.size() == 1) budget.append(out, ",");
    return budget.append(out, tuple ? ")" : "]");
  }
  if (const Dict* dict = value.dict()) return append_dict(budget, *dict, out);
  if (value.view() != nullptr) return append_view(budget, value, out);
  append_plain(budget, value, out);
}

void append_str(Budget& budget, const Value& value, std::string& out) {
  if (value.is_undefined()) return;
  if (const std::string* text = value.text()) return budget.append(out, *text);
  append_repr(budget, value, out);
}

std::string to_text(Budget& budget, const Value& value) {
  std::string out;
  append_str(budget, value, out);
  return out;
}

Value soft_text(Budget& budget, const Value& value) {
  return value.text() != nullptr ? value : budget.text(to_text(budget, value));
}

std::string ascii_repr(Budget& budget, const Value& value) {
  std::string text, out;
  append_repr(budget, value, text);
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = next_code_point(text, at);
    if (c < 0x80) {
      budget.append(out, 1, static_cast<char>(c));
    } else {
      budget.append(out, c < 0x100     ? fmt::format("\\x{:02x}", c)
                         : c < 0x10000 ? fmt::format("\\u{:04x}", c)
                                       : fmt::format("\\U{:08x}", c));
    }
  }
  return out;
}

std::string shown(Budget& budget, const Value& value) {
  constexpr size_t kShown = 100;
  std::string text;
  if (value.text() != nullptr) {  // of a long text only the beginning is written
    append_quoted(budget, value.text()->substr(0, utf8_prefix(*value.text(), 4 * kShown)), text);
  } else {
    append_repr(budget, value, text);
  }
  if (text.size() > kShown) text = text.substr(0, utf8_prefix(text, kShown)) + "...";
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return text;
}

std::string to_json(Budget& budget, const Value& value, const JsonStyle& style) {
  JsonWriter writer(budget, style);
  writer.append(value, 0);
  return writer.take();
}

}  // namespace twell::jinja
