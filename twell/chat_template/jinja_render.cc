// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <nlohmann/json.hpp>
#include <optional>

#include "twell/base/error.h"
#include "twell/base/utf8.h"
#include "twell/chat_template/jinja.h"

namespace twell::jinja {
namespace {

constexpr std::string_view kBlanks = " \t\n\r\f\v";
constexpr size_t kTextOverhead = 64;    // bytes of a text's object and allocation header
constexpr size_t kSearchOverhead = 32;  // bytes that are copied in the time of an empty search

// The remaining steps and bytes of a rendering; all code that reads or makes content charges it.
class Budget {
 public:
  void step() {
    TWELL_REQUIRE(++steps_ <= kMaxSteps, "the template does not come to an end in {} steps",
                  kMaxSteps);
  }
  void bytes(size_t count) {
    TWELL_REQUIRE(count <= kMaxBytes - bytes_, "the template handles more than {} MiB of text",
                  kMaxBytes >> 20);
    bytes_ += count;
  }

  void append(std::string& out, std::string_view part) {
    bytes(part.size());
    out += part;
  }
  void append(std::string& out, size_t count, char c) {
    bytes(count);
    out.append(count, c);
  }
  void append(std::vector<Value>& out, Value item) {
    bytes(sizeof(Value));
    out.push_back(std::move(item));
  }
  void append_text(std::vector<Value>& out, std::string_view text) {
    bytes(sizeof(Value) + kTextOverhead + text.size());
    out.push_back(Value::of(std::string(text)));
  }

  Value list(std::vector<Value> items) {
    Value value = Value::of(std::move(items));
    require_depth(value.list()->depth);
    return value;
  }
  Value dict(std::vector<std::pair<std::string, Value>> items) {
    for (const auto& item : items) bytes(sizeof(item) + item.first.size());
    Value value = Value::of(std::move(items));
    require_depth(value.dict()->depth);
    return value;
  }

 private:
  static void require_depth(int depth) {
    TWELL_REQUIRE(depth <= kMaxDepth, "a value is nested more than {} deep", kMaxDepth);
  }

  int64_t steps_ = 0;
  size_t bytes_ = 0;
};

// ---- text

// Position of part in text. Linear in both sizes, unlike std::string::find.
size_t find_text(Budget& budget, std::string_view text, std::string_view part, size_t from = 0) {
  budget.bytes(kSearchOverhead + part.size());
  if (from > text.size()) return std::string::npos;
  if (part.empty()) return from;
  const char* begin = text.data() + from;
  const size_t size = text.size() - from;
  // AddressSanitizer checks all of the text in every memmem, but only what memchr reads.
  const void* found = part.size() == 1 ? std::memchr(begin, part.front(), size)
                                       : ::memmem(begin, size, part.data(), part.size());
  const size_t at = found == nullptr
                        ? std::string::npos
                        : static_cast<size_t>(static_cast<const char*>(found) - text.data());
  budget.bytes(std::min(at, text.size()) - from);
  return at;
}

bool begins_character(char c) { return (c & 0xc0) != 0x80; }

// Start of each character. Continuation bytes at the start of the text count as one character.
std::vector<uint32_t> characters(Budget& budget, const std::string& text) {
  budget.bytes(text.size() * sizeof(uint32_t));
  std::vector<uint32_t> begins;
  for (size_t i = 0; i < text.size(); ++i) {
    if (begins_character(text[i]) || begins.empty()) begins.push_back(static_cast<uint32_t>(i));
  }
  return begins;
}

std::string_view character(const std::string& text, const std::vector<uint32_t>& begins, size_t i) {
  const size_t end = i + 1 < begins.size() ? begins[i + 1] : text.size();
  return std::string_view(text).substr(begins[i], end - begins[i]);
}

// Appends Python's repr() of a text, except for rare characters.
void append_quoted(Budget& budget, std::string_view text, std::string& out) {
  budget.bytes(2 * text.size() + 2);
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  out += quote;
  for (const char c : text) {
    const size_t escape = std::string_view("\n\r\t").find(c);
    if (escape != std::string_view::npos) {
      out += '\\';
      out += "nrt"[escape];
      continue;
    }
    if (c == quote || c == '\\') out += '\\';
    out += c;
  }
  out += quote;
}

std::string number_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

// Appends a JSON string in UTF-8; what is not becomes U+FFFD.
void append_json_text(Budget& budget, std::string_view text, std::string& out) {
  budget.bytes(6 * text.size() + 2);
  using nlohmann::json;
  out += json(text).dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
}

// How values are written: as Python's repr() does, or its json.dumps(ensure_ascii=False).
struct Style {
  const char *none, *yes, *no;
  void (*append_text)(Budget& budget, std::string_view text, std::string& out);
  bool is_json;
  std::optional<int64_t> indent = {};  // spaces per level; without it all is on one line
};
constexpr Style kRepr = {"None", "True", "False", append_quoted, false};
constexpr Style kJson = {"null", "true", "false", append_json_text, true};

std::string shown(Budget& budget, const Value& value);

void append_value(Budget& budget, const Value& value, const Style& style, int64_t depth,
                  std::string& out) {
  budget.step();
  if (value.is_none()) return budget.append(out, style.none);
  if (const bool* truth = value.boolean()) return budget.append(out, *truth ? style.yes : style.no);
  if (const int64_t* integer = value.integer()) return budget.append(out, std::to_string(*integer));
  if (const double* real = value.real()) return budget.append(out, number_text(*real));
  if (const std::string* text = value.text()) return style.append_text(budget, *text, out);
  const List* list = value.list();
  const Dict* dict = value.dict();
  if (list == nullptr && dict == nullptr) {
    TWELL_REQUIRE(!style.is_json, "'{}' cannot be written as JSON",
                  value.undefined() ? "an undefined value" : shown(budget, value));
    return budget.append(out, value.undefined() ? "Undefined" : "<Namespace>");
  }
  const auto new_line = [&](int64_t level) {
    if (!style.indent) return;
    out += '\n';
    const int64_t width = std::max<int64_t>(*style.indent, 0);
    TWELL_REQUIRE(width <= static_cast<int64_t>(kMaxBytes), "an indent of {} is too long", width);
    budget.append(out, static_cast<size_t>(width * level), ' ');
  };
  const size_t size = list != nullptr ? list->items.size() : dict->items.size();
  out += list != nullptr ? '[' : '{';
  for (size_t i = 0; i < size; ++i) {
    if (i > 0) budget.append(out, style.indent ? "," : ", ");
    new_line(depth + 1);
    if (dict != nullptr) {
      style.append_text(budget, dict->items[i].first, out);
      out += ": ";
    }
    const Value& item = list != nullptr ? list->items[i] : dict->items[i].second;
    append_value(budget, item, style, depth + 1, out);
  }
  if (size > 0) new_line(depth);
  out += list != nullptr ? ']' : '}';
}

// Appends what {{ value }} prints: text unchanged, other values as Python's str().
void append_str(Budget& budget, const Value& value, std::string& out) {
  if (value.undefined()) return;
  if (const std::string* text = value.text()) return budget.append(out, *text);
  append_value(budget, value, kRepr, 0, out);
}

std::string to_text(Budget& budget, const Value& value) {
  std::string out;
  append_str(budget, value, out);
  return out;
}

// The beginning of the value's text on one line, for messages.
std::string shown(Budget& budget, const Value& value) {
  constexpr size_t kShown = 300;
  std::string text = to_text(budget, value);
  if (text.size() > kShown) text = text.substr(0, utf8_prefix(text, kShown)) + "...";
  for (char& c : text) {
    if (std::iscntrl(static_cast<unsigned char>(c)) != 0) c = ' ';
  }
  return text;
}

std::string strip(Budget& budget, const std::string& text, std::string_view set, bool left,
                  bool right) {
  budget.bytes(set.size());
  std::array<bool, 256> in_set{};
  for (const char c : set) in_set[static_cast<unsigned char>(c)] = true;
  const auto stripped = [&](char c) { return in_set[static_cast<unsigned char>(c)]; };
  size_t begin = 0, end = text.size();
  while (left && begin < end && stripped(text[begin])) ++begin;
  while (right && end > begin && stripped(text[end - 1])) --end;
  budget.bytes(text.size());
  return text.substr(begin, end - begin);
}

// Changes ASCII letters only, which suffices for role names, the usual argument in templates.
std::string change_case(std::string text, int (*change)(int)) {
  for (char& c : text) c = static_cast<char>(change(static_cast<unsigned char>(c)));
  return text;
}

std::string capitalize(std::string text, bool each_word) {
  text = change_case(std::move(text), std::tolower);
  bool start = true;
  for (char& c : text) {
    if (start) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    start = each_word && std::isalnum(static_cast<unsigned char>(c)) == 0;
  }
  return text;
}

std::string replace_all(Budget& budget, std::string_view text, std::string_view from,
                        std::string_view to) {
  TWELL_REQUIRE(!from.empty(), "replace needs something to replace");
  std::string out;
  size_t begin = 0;
  for (size_t at; (at = find_text(budget, text, from, begin)) != std::string::npos;
       begin = at + from.size()) {
    budget.append(out, text.substr(begin, at - begin));
    budget.append(out, to);
  }
  budget.append(out, text.substr(begin));
  return out;
}

Value split_at_blanks(Budget& budget, std::string_view text) {
  budget.bytes(text.size());
  std::vector<Value> out;
  size_t begin = 0;
  while ((begin = text.find_first_not_of(kBlanks, begin)) != std::string::npos) {
    const size_t end = std::min(text.find_first_of(kBlanks, begin), text.size());
    budget.append_text(out, text.substr(begin, end - begin));
    begin = end;
  }
  return budget.list(std::move(out));
}

// limit: most splits; negative: no limit.
Value split(Budget& budget, std::string_view text, std::string_view separator, int64_t limit) {
  TWELL_REQUIRE(!separator.empty(), "split needs a separator");
  std::vector<Value> out;
  size_t begin = 0;
  for (size_t at;
       limit != 0 && (at = find_text(budget, text, separator, begin)) != std::string::npos;
       --limit) {
    budget.append_text(out, text.substr(begin, at - begin));
    begin = at + separator.size();
  }
  budget.append_text(out, text.substr(begin));
  return budget.list(std::move(out));
}

std::string time_text(const std::string& format) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  char text[256];
  return {text, std::strftime(text, sizeof(text), format.c_str(), &local)};
}

// ---- values

bool truthy(const Value& value) {
  if (value.undefined() || value.is_none()) return false;
  if (const bool* boolean = value.boolean()) return *boolean;
  if (const int64_t* integer = value.integer()) return *integer != 0;
  if (const double* real = value.real()) return *real != 0.0;
  if (const std::string* text = value.text()) return !text->empty();
  if (const List* list = value.list()) return !list->items.empty();
  if (const Dict* dict = value.dict()) return !dict->items.empty();
  return true;
}

std::optional<double> number(const Value& value) {
  if (const int64_t* integer = value.integer()) return static_cast<double>(*integer);
  if (const double* real = value.real()) return *real;
  return std::nullopt;
}

int64_t want_integer(Budget& budget, const Value& value, const char* what) {
  TWELL_REQUIRE(value.integer() != nullptr, "{} needs a whole number, not '{}'", what,
                shown(budget, value));
  return *value.integer();
}

const std::string& want_text(Budget& budget, const Value& value, const char* what) {
  TWELL_REQUIRE(value.text() != nullptr, "{} is for text, not for {}", what, shown(budget, value));
  return *value.text();
}

// Returns null when the key is missing.
const Value* find_key(Budget& budget, const Dict& dict, std::string_view key) {
  budget.bytes(key.size() + dict.items.size());
  for (const auto& [name, item] : dict.items) {
    if (name == key) return &item;
  }
  return nullptr;
}

bool equal(Budget& budget, const Value& a, const Value& b) {
  budget.step();
  if (a.data.index() != b.data.index()) {
    const auto x = number(a), y = number(b);
    return x && y && *x == *y;
  }
  if (const std::string* text = a.text()) {
    budget.bytes(text->size());
    return *text == *b.text();
  }
  if (const List* list = a.list()) {
    return std::equal(list->items.begin(), list->items.end(), b.list()->items.begin(),
                      b.list()->items.end(),
                      [&](const Value& x, const Value& y) { return equal(budget, x, y); });
  }
  if (const Dict* dict = a.dict()) {
    return dict->items.size() == b.dict()->items.size() &&
           std::all_of(dict->items.begin(), dict->items.end(), [&](const auto& item) {
             const Value* other = find_key(budget, *b.dict(), item.first);
             return other != nullptr && equal(budget, item.second, *other);
           });
  }
  return a.data == b.data;
}

// What a loop iterates over: a list's items, a dictionary's keys, a text's characters.
std::vector<Value> items_of(Budget& budget, const Value& value) {
  std::vector<Value> items;
  if (const List* list = value.list()) {
    budget.bytes(list->items.size() * sizeof(Value));
    items = list->items;
  } else if (const Dict* dict = value.dict()) {
    for (const auto& item : dict->items) budget.append_text(items, item.first);
  } else if (const std::string* text = value.text()) {
    const std::vector<uint32_t> begins = characters(budget, *text);
    for (size_t i = 0; i < begins.size(); ++i) {
      budget.append_text(items, character(*text, begins, i));
    }
  } else {
    TWELL_REQUIRE(value.undefined(), "'{}' cannot be looped over", shown(budget, value));
  }
  return items;
}

Value pairs(Budget& budget, const Value& value) {
  TWELL_REQUIRE(value.dict() != nullptr, "items is for dictionaries");
  std::vector<Value> out;
  for (const auto& [key, item] : value.dict()->items) {
    std::vector<Value> pair;
    budget.append_text(pair, key);
    budget.append(pair, item);
    budget.append(out, budget.list(std::move(pair)));
  }
  return budget.list(std::move(out));
}

Value length(Budget& budget, const Value& value) {
  if (const List* list = value.list()) return Value::of(std::ssize(list->items));
  if (const Dict* dict = value.dict()) return Value::of(std::ssize(dict->items));
  TWELL_REQUIRE(value.text() != nullptr, "{} has no length", shown(budget, value));
  budget.bytes(value.text()->size());
  return Value::of(
      int64_t{std::count_if(value.text()->begin(), value.text()->end(), begins_character)});
}

Value join(Budget& budget, const Value& value, const Value& separator) {
  const std::string by = to_text(budget, separator);
  std::string out;
  bool first = true;
  for (const Value& item : items_of(budget, value)) {
    if (!std::exchange(first, false)) budget.append(out, by);
    append_str(budget, item, out);
  }
  return Value::of(std::move(out));
}

// The number of steps from begin on that stay before end. It is computed with uint64, which the
// difference of two int64 always fits.
uint64_t count_steps(int64_t begin, int64_t end, int64_t step) {
  if (step > 0 ? begin >= end : begin <= end) return 0;
  const uint64_t low = static_cast<uint64_t>(step > 0 ? begin : end);
  const uint64_t high = static_cast<uint64_t>(step > 0 ? end : begin);
  const uint64_t width = step > 0 ? static_cast<uint64_t>(step) : -static_cast<uint64_t>(step);
  return (high - low - 1) / width + 1;
}

// Slices a list or a text as Python does.
Value slice(Budget& budget, const Value& object, std::optional<int64_t> from,
            std::optional<int64_t> to, int64_t stride) {
  TWELL_REQUIRE(stride != 0, "a slice needs a step");
  const std::string* text = object.text();
  TWELL_REQUIRE(text != nullptr || object.list() != nullptr, "a slice of what is no list");
  const std::vector<uint32_t> begins =
      text != nullptr ? characters(budget, *text) : std::vector<uint32_t>();
  const int64_t size = text != nullptr ? std::ssize(begins) : std::ssize(object.list()->items);
  const auto place = [&](std::optional<int64_t> at, int64_t fallback) {
    if (!at) return fallback;
    const int64_t from_start = *at < 0 ? *at + size : *at;
    return std::clamp<int64_t>(from_start, stride > 0 ? 0 : -1, stride > 0 ? size : size - 1);
  };
  const int64_t begin = place(from, stride > 0 ? 0 : size - 1);
  const int64_t end = place(to, stride > 0 ? size : -1);
  // Counted beforehand, because begin + stride may overflow.
  const auto count = static_cast<int64_t>(count_steps(begin, end, stride));
  std::string cut;
  std::vector<Value> items;
  for (int64_t i = 0; i < count; ++i) {
    const size_t at = static_cast<size_t>(begin + i * stride);
    if (text != nullptr) {
      budget.append(cut, character(*text, begins, at));
    } else {
      budget.append(items, object.list()->items[at]);
    }
  }
  return text != nullptr ? Value::of(std::move(cut)) : budget.list(std::move(items));
}

// object.key or object[key]; undefined when it does not exist.
Value member(Budget& budget, const Value& object, const Value& key) {
  TWELL_REQUIRE(!object.undefined(), "{} of what is undefined", shown(budget, key));
  if (const Namespace* space = object.space()) {
    const auto found = space->fields.find(to_text(budget, key));
    return found == space->fields.end() ? Value{} : found->second;
  }
  if (object.dict() != nullptr && key.text() != nullptr) {
    const Value* found = find_key(budget, *object.dict(), *key.text());
    return found == nullptr ? Value{} : *found;
  }
  if (key.integer() == nullptr) return {};
  const auto place = [&](int64_t size) {  // -1: out of range
    const int64_t at = *key.integer() < 0 ? *key.integer() + size : *key.integer();
    return at < 0 || at >= size ? -1 : at;
  };
  if (const List* list = object.list()) {
    const int64_t at = place(std::ssize(list->items));
    return at < 0 ? Value{} : list->items[static_cast<size_t>(at)];
  }
  if (const std::string* text = object.text()) {
    const std::vector<uint32_t> begins = characters(budget, *text);
    const int64_t at = place(std::ssize(begins));
    if (at < 0) return {};
    return Value::of(std::string(character(*text, begins, static_cast<size_t>(at))));
  }
  return {};
}

bool contains(Budget& budget, const Value& item, const Value& container) {
  if (container.text() != nullptr && item.text() != nullptr) {
    return find_text(budget, *container.text(), *item.text()) != std::string::npos;
  }
  if (const Dict* dict = container.dict()) {
    return item.text() != nullptr && find_key(budget, *dict, *item.text()) != nullptr;
  }
  TWELL_REQUIRE(container.list() != nullptr, "'in' {} makes no sense", shown(budget, container));
  const std::vector<Value>& items = container.list()->items;
  return std::any_of(items.begin(), items.end(),
                     [&](const Value& other) { return equal(budget, item, other); });
}

// ---- operators

Value compared(const std::string& sign, int order) {
  if (sign == "<") return Value::of(order < 0);
  if (sign == ">") return Value::of(order > 0);
  return Value::of(sign == "<=" ? order <= 0 : order >= 0);
}

// Divides like Python: the quotient is rounded down, the remainder has the divisor's sign.
Value divided(const std::string& sign, int64_t x, int64_t y) {
  TWELL_REQUIRE(y != 0, "{} {} {} makes no sense", x, sign, y);
  if (sign == "/") return Value::of(static_cast<double>(x) / static_cast<double>(y));
  if (y == -1) {  // -2^63 / -1 overflows int64
    TWELL_REQUIRE(sign == "%" || x != INT64_MIN, "{} {} {} is too large", x, sign, y);
    return Value::of(sign == "%" ? int64_t{0} : -x);
  }
  const bool inexact_down = x % y != 0 && (x % y < 0) != (y < 0);
  if (sign == "%") return Value::of(x % y + (inexact_down ? y : 0));
  return Value::of(x / y - (inexact_down ? 1 : 0));
}

Value integers(const std::string& sign, int64_t x, int64_t y) {
  int64_t out = 0;
  bool overflow = false;
  if (sign == "+") {
    overflow = __builtin_add_overflow(x, y, &out);
  } else if (sign == "-") {
    overflow = __builtin_sub_overflow(x, y, &out);
  } else if (sign == "*") {
    overflow = __builtin_mul_overflow(x, y, &out);
  } else {
    return divided(sign, x, y);
  }
  TWELL_REQUIRE(!overflow, "{} {} {} is too large", x, sign, y);
  return Value::of(out);
}

Value repeated(Budget& budget, const std::string& text, int64_t count) {
  std::string out;
  if (count <= 0 || text.empty()) return Value::of(out);
  TWELL_REQUIRE(static_cast<uint64_t>(count) <= kMaxBytes / text.size(),
                "a text repeated {} times is too long", count);
  budget.bytes(text.size() * static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) out += text;
  return Value::of(std::move(out));
}

Value arithmetic(Budget& budget, const std::string& sign, const Value& a, const Value& b) {
  const bool ordered = sign == "<" || sign == ">" || sign == "<=" || sign == ">=";
  if (a.text() != nullptr && b.text() != nullptr) {
    if (sign == "+") {
      budget.bytes(a.text()->size() + b.text()->size());
      return Value::of(*a.text() + *b.text());
    }
    if (ordered) {
      budget.bytes(std::min(a.text()->size(), b.text()->size()));
      return compared(sign, a.text()->compare(*b.text()));
    }
  }
  if (a.list() != nullptr && b.list() != nullptr && sign == "+") {
    std::vector<Value> out = items_of(budget, a);
    for (const Value& item : b.list()->items) budget.append(out, item);
    return budget.list(std::move(out));
  }
  if (a.text() != nullptr && b.integer() != nullptr && sign == "*") {
    return repeated(budget, *a.text(), *b.integer());
  }
  const auto x = number(a), y = number(b);
  TWELL_REQUIRE(x && y, "{} {} {} makes no sense", shown(budget, a), sign, shown(budget, b));
  if (a.integer() != nullptr && b.integer() != nullptr) {
    const int64_t i = *a.integer(), j = *b.integer();
    return ordered ? compared(sign, i < j ? -1 : i > j ? 1 : 0) : integers(sign, i, j);
  }
  if (ordered) return compared(sign, *x < *y ? -1 : *x > *y ? 1 : 0);
  if (sign == "+") return Value::of(*x + *y);
  if (sign == "-") return Value::of(*x - *y);
  if (sign == "*") return Value::of(*x * *y);
  TWELL_REQUIRE(sign == "/" && *y != 0.0, "{} {} {} makes no sense", *x, sign, *y);
  return Value::of(*x / *y);
}

// ---- filters, tests, methods and functions

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
  // The i-th positional argument, else the one named `name`, else the fallback.
  Value get(size_t i, std::string_view name, Value fallback = {}) const {
    if (i < positional.size()) return positional[i];
    for (const auto& [key, value] : named) {
      if (key == name) return value;
    }
    return fallback;
  }
};

Value map_attribute(Budget& budget, const Value& value, const Arguments& arguments) {
  TWELL_REQUIRE(arguments.positional.empty(), "only map(attribute=...) is supported");
  const Value attribute = arguments.get(0, "attribute");
  want_text(budget, attribute, "map(attribute=...)");
  std::vector<Value> out;
  for (const Value& item : items_of(budget, value)) {
    budget.append(out, member(budget, item, attribute));
  }
  return budget.list(std::move(out));
}

Value to_integer(Budget& budget, const Value& value) {
  if (const std::string* text = value.text()) {
    return Value::of(int64_t{std::strtoll(text->c_str(), nullptr, 10)});
  }
  if (const bool* boolean = value.boolean()) return Value::of(int64_t{*boolean});
  const auto real = number(value);
  TWELL_REQUIRE(real && std::abs(*real) < 0x1p63, "'{}' is no whole number", shown(budget, value));
  return value.integer() != nullptr ? value : Value::of(static_cast<int64_t>(*real));
}

Value apply_filter(Budget& budget, const std::string& name, const Value& value,
                   const Arguments& arguments) {
  const auto text = [&] { return to_text(budget, value); };
  if (name == "trim") return Value::of(strip(budget, text(), kBlanks, true, true));
  if (name == "upper") return Value::of(change_case(text(), std::toupper));
  if (name == "lower") return Value::of(change_case(text(), std::tolower));
  if (name == "capitalize" || name == "title")
    return Value::of(capitalize(text(), name == "title"));
  if (name == "length" || name == "count") return length(budget, value);
  if (name == "string") return Value::of(text());
  if (name == "safe") return value;
  if (name == "list") return budget.list(items_of(budget, value));
  if (name == "int") return to_integer(budget, value);
  if (name == "first" || name == "last") {
    const std::vector<Value> items = items_of(budget, value);
    if (items.empty()) return {};
    return name == "first" ? items.front() : items.back();
  }
  if (name == "join") return join(budget, value, arguments.get(0, "d"));
  if (name == "items") return pairs(budget, value);
  if (name == "map") return map_attribute(budget, value, arguments);
  if (name == "replace") {
    return Value::of(replace_all(budget, text(), to_text(budget, arguments.get(0, "old")),
                                 to_text(budget, arguments.get(1, "new"))));
  }
  if (name == "default" || name == "d") {
    const bool falsy_too = truthy(arguments.get(1, "boolean"));
    return value.undefined() || (falsy_too && !truthy(value))
               ? arguments.get(0, "default_value", Value::of(std::string()))
               : value;
  }
  if (name == "tojson") {
    const Value given = arguments.get(0, "indent");
    Style style = kJson;
    if (!given.undefined() && !given.is_none()) {
      style.indent = want_integer(budget, given, "an indent");
    }
    std::string out;
    append_value(budget, value, style, 0, out);
    return Value::of(std::move(out));
  }
  throw InputError(fmt::format("the filter '{}' is not supported", name));
}

bool apply_test(Budget& budget, const std::string& name, const Value& value,
                const Arguments& arguments) {
  if (name == "defined") return !value.undefined();
  if (name == "undefined") return value.undefined();
  if (name == "none") return value.is_none();
  if (name == "string") return value.text() != nullptr;
  if (name == "mapping") return value.dict() != nullptr;
  if (name == "sequence" || name == "iterable") {
    return value.list() != nullptr || value.text() != nullptr || value.dict() != nullptr;
  }
  if (name == "boolean") return value.boolean() != nullptr;
  if (name == "number") return number(value).has_value();
  if (name == "integer") return value.integer() != nullptr;
  if (name == "float") return value.real() != nullptr;
  if (name == "true") return value.boolean() != nullptr && *value.boolean();
  if (name == "false") return value.boolean() != nullptr && !*value.boolean();
  if (name == "equalto" || name == "eq") return equal(budget, value, arguments.get(0, "other"));
  if (name == "odd" || name == "even") {
    return (want_integer(budget, value, name.c_str()) % 2 != 0) == (name == "odd");
  }
  throw InputError(fmt::format("the test '{}' is not supported", name));
}

std::optional<Value> dict_method(Budget& budget, const std::string& name, const Value& object,
                                 const Arguments& arguments) {
  if (name == "items") return pairs(budget, object);
  if (name == "get") {
    const Value* found = find_key(budget, *object.dict(), to_text(budget, arguments.get(0, "key")));
    return found != nullptr ? *found : arguments.get(1, "default", Value::none());
  }
  if (name == "keys") return budget.list(items_of(budget, object));
  if (name == "values") {
    std::vector<Value> out;
    for (const auto& item : object.dict()->items) budget.append(out, item.second);
    return budget.list(std::move(out));
  }
  return std::nullopt;
}

std::optional<Value> text_method(Budget& budget, const std::string& name, const Value& object,
                                 const Arguments& arguments) {
  const std::string& text = *object.text();
  const Value first = arguments.get(0, "sep");
  const bool none = first.undefined() || first.is_none();
  const auto given = [&] { return none ? std::string(kBlanks) : to_text(budget, first); };
  if (name == "strip") return Value::of(strip(budget, text, given(), true, true));
  if (name == "lstrip") return Value::of(strip(budget, text, given(), true, false));
  if (name == "rstrip") return Value::of(strip(budget, text, given(), false, true));
  if (name == "startswith") return Value::of(text.starts_with(given()));
  if (name == "endswith") return Value::of(text.ends_with(given()));
  if (name == "upper" || name == "lower" || name == "capitalize" || name == "title" ||
      name == "replace") {
    return apply_filter(budget, name, object, arguments);
  }
  if (name == "split") {
    if (none) return split_at_blanks(budget, text);
    const Value limit = arguments.get(1, "maxsplit");
    return split(budget, text, want_text(budget, first, "split"),
                 limit.undefined() ? -1 : want_integer(budget, limit, "split"));
  }
  if (name == "find") {
    const size_t at = find_text(budget, text, given());
    return Value::of(at == std::string::npos ? int64_t{-1} : static_cast<int64_t>(at));
  }
  return std::nullopt;
}

Value call_method(Budget& budget, const std::string& name, const Value& object,
                  const Arguments& arguments) {
  std::optional<Value> result;
  if (object.dict() != nullptr) result = dict_method(budget, name, object, arguments);
  if (object.text() != nullptr) result = text_method(budget, name, object, arguments);
  TWELL_REQUIRE(result, "the method '{}' of {} is not supported", name, shown(budget, object));
  return *result;
}

Value range(Budget& budget, const Arguments& arguments) {
  const auto at = [&](size_t i, int64_t fallback) {
    return i < arguments.positional.size() ? want_integer(budget, arguments.positional[i], "range")
                                           : fallback;
  };
  const bool one = arguments.positional.size() < 2;
  const int64_t begin = one ? 0 : at(0, 0), end = one ? at(0, 0) : at(1, 0), step = at(2, 1);
  TWELL_REQUIRE(step != 0, "range needs a step");
  const uint64_t count = count_steps(begin, end, step);
  TWELL_REQUIRE(count <= uint64_t{kMaxSteps}, "range is too long");
  std::vector<Value> out;
  for (int64_t i = 0; i < static_cast<int64_t>(count); ++i) {
    budget.append(out, Value::of(begin + i * step));
  }
  return budget.list(std::move(out));
}

// ---- the template

class Renderer {
 public:
  explicit Renderer(const std::map<std::string, Value>& variables) : scopes_{variables} {}

  std::string whole(const Body& body) {
    run(body);
    return std::move(out_);
  }
  int line() const { return line_; }

 private:
  enum class Flow { kNormal, kBreak, kContinue };

  Flow run(const Body& body) {
    for (const Statement& statement : body) {
      line_ = statement.line;
      budget_.step();
      const Flow flow = run(statement);
      if (flow != Flow::kNormal) return flow;
    }
    return Flow::kNormal;
  }

  Flow run(const Statement& statement) {
    switch (statement.kind) {
      case StatementKind::kText:
        budget_.append(out_, statement.text);
        break;
      case StatementKind::kOutput:
        append_str(budget_, eval(*statement.expression), out_);
        break;
      case StatementKind::kFor:
        run_for(statement);
        break;
      case StatementKind::kIf:
        return run(truthy(eval(*statement.expression)) ? statement.body : statement.otherwise);
      case StatementKind::kSet:
        set(statement);
        break;
      case StatementKind::kBreak:
        return Flow::kBreak;
      case StatementKind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kNormal;
  }

  void set(const Statement& statement) {
    Value value;
    if (statement.expression) {
      value = eval(*statement.expression);
    } else {
      std::string before = std::exchange(out_, {});
      run(statement.body);
      value = Value::of(std::exchange(out_, std::move(before)));
    }
    line_ = statement.line;
    const std::string& name = statement.names[0];
    budget_.bytes(name.size());
    if (statement.names.size() == 1) {
      scopes_.back()[name] = std::move(value);
      return;
    }
    Namespace* space = lookup(name).space();
    TWELL_REQUIRE(space != nullptr, "{} is no namespace", name);
    budget_.bytes(statement.names[1].size());
    space->fields[statement.names[1]] = std::move(value);
  }

  void bind(const Statement& loop, const Value& item) {
    for (const std::string& name : loop.names) budget_.bytes(name.size());
    if (loop.names.size() == 1) {
      scopes_.back()[loop.names[0]] = item;
      return;
    }
    const List* list = item.list();
    TWELL_REQUIRE(list != nullptr && list->items.size() == loop.names.size(), "{} names for {}",
                  loop.names.size(), shown(budget_, item));
    for (size_t i = 0; i < loop.names.size(); ++i) {
      scopes_.back()[loop.names[i]] = list->items[i];
    }
  }

  void run_for(const Statement& loop) {
    std::vector<Value> items = items_of(budget_, eval(*loop.expression));
    if (loop.filter) {
      std::erase_if(items, [&](const Value& item) {
        scopes_.emplace_back();
        bind(loop, item);
        const bool keep = truthy(eval(*loop.filter));
        scopes_.pop_back();
        return !keep;
      });
    }
    if (items.empty()) {
      run(loop.otherwise);
      return;
    }
    for (size_t i = 0; i < items.size(); ++i) {
      line_ = loop.line;
      budget_.step();
      scopes_.emplace_back();
      scopes_.back()["loop"] = loop_value(items, i);
      bind(loop, items[i]);
      const Flow flow = run(loop.body);
      scopes_.pop_back();
      if (flow == Flow::kBreak) break;
    }
  }

  static Value loop_value(const std::vector<Value>& items, size_t i) {
    const int64_t at = static_cast<int64_t>(i), size = std::ssize(items);
    std::vector<std::pair<std::string, Value>> loop = {
        {"index", Value::of(at + 1)},       {"index0", Value::of(at)},
        {"revindex", Value::of(size - at)}, {"revindex0", Value::of(size - at - 1)},
        {"first", Value::of(at == 0)},      {"last", Value::of(at + 1 == size)},
        {"length", Value::of(size)}};
    if (i > 0) loop.emplace_back("previtem", items[i - 1]);
    if (i + 1 < items.size()) loop.emplace_back("nextitem", items[i + 1]);
    return Value::of(std::move(loop));
  }

  Value lookup(const std::string& name) {
    budget_.bytes(name.size());
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const auto found = scope->find(name);
      if (found != scope->end()) return found->second;
    }
    return {};
  }

  // Evaluates the operands, then resets line_ to this expression's line for error messages.
  Value eval(const Expression& e) {
    line_ = e.line;
    budget_.step();
    switch (e.kind) {
      case ExpressionKind::kLiteral:
        return e.value;
      case ExpressionKind::kName:
        return lookup(e.name);
      case ExpressionKind::kList: {
        std::vector<Value> items;
        for (const ExpressionPtr& part : e.parts) budget_.append(items, eval(*part));
        return budget_.list(std::move(items));
      }
      case ExpressionKind::kDict:
        return dict(e);
      case ExpressionKind::kMember: {
        const Value object = eval(*e.parts[0]);
        line_ = e.line;
        budget_.bytes(e.name.size());
        return member(budget_, object, Value::of(e.name));
      }
      case ExpressionKind::kIndex: {
        const Value object = eval(*e.parts[0]), key = eval(*e.parts[1]);
        line_ = e.line;
        return member(budget_, object, key);
      }
      case ExpressionKind::kSlice:
        return slice_of(e);
      case ExpressionKind::kCall:
        return call(e);
      case ExpressionKind::kFilter:
      case ExpressionKind::kTest: {
        const Value value = eval(*e.parts[0]);
        const Arguments given = arguments(e);
        return e.kind == ExpressionKind::kFilter
                   ? apply_filter(budget_, e.name, value, given)
                   : Value::of(apply_test(budget_, e.name, value, given));
      }
      case ExpressionKind::kNot:
        return Value::of(!truthy(eval(*e.parts[0])));
      case ExpressionKind::kNegate:
        return arithmetic(budget_, "-", Value::of(int64_t{0}), eval(*e.parts[0]));
      case ExpressionKind::kBinary:
        return binary(e);
      case ExpressionKind::kCondition:
        if (truthy(eval(*e.parts[1]))) return eval(*e.parts[0]);
        return e.parts[2] ? eval(*e.parts[2]) : Value{};
    }
    return {};
  }

  Value dict(const Expression& e) {
    std::vector<std::pair<std::string, Value>> items;
    for (size_t i = 0; i < e.parts.size(); i += 2) {
      std::string key = to_text(budget_, eval(*e.parts[i]));
      Value value = eval(*e.parts[i + 1]);
      budget_.bytes(items.size());
      const auto found = std::find_if(items.begin(), items.end(),
                                      [&](const auto& item) { return item.first == key; });
      if (found != items.end()) {
        found->second = std::move(value);
      } else {
        items.emplace_back(std::move(key), std::move(value));
      }
    }
    return budget_.dict(std::move(items));
  }

  Value slice_of(const Expression& e) {
    const Value object = eval(*e.parts[0]);
    const auto bound = [&](size_t i) -> std::optional<int64_t> {
      if (!e.parts[i]) return std::nullopt;
      const Value value = eval(*e.parts[i]);
      if (value.is_none()) return std::nullopt;
      return want_integer(budget_, value, "a slice");
    };
    const auto from = bound(1), to = bound(2), stride = bound(3);
    line_ = e.line;
    return slice(budget_, object, from, to, stride.value_or(1));
  }

  Arguments arguments(const Expression& e) {
    Arguments out;
    for (size_t i = 1; i < e.parts.size(); ++i) out.positional.push_back(eval(*e.parts[i]));
    for (const auto& [name, part] : e.named) out.named.emplace_back(name, eval(*part));
    line_ = e.line;
    return out;
  }

  Value call(const Expression& e) {
    const Expression& target = *e.parts[0];
    if (target.kind == ExpressionKind::kMember) {
      const Value object = eval(*target.parts[0]);
      const Arguments given = arguments(e);
      return call_method(budget_, target.name, object, given);
    }
    TWELL_REQUIRE(target.kind == ExpressionKind::kName, "only functions and methods are called");
    return call_function(target.name, arguments(e));
  }

  Value call_function(const std::string& name, const Arguments& given) {
    if (name == "raise_exception") {
      throw InputError(
          fmt::format("the template says: {}", shown(budget_, given.get(0, "message"))));
    }
    if (name == "namespace") {
      Namespace& space = namespaces_.emplace_back();
      for (const auto& [key, item] : given.named) {
        budget_.bytes(sizeof(std::pair<std::string, Value>) + key.size());
        space.fields[key] = item;
      }
      return {&space};
    }
    if (name == "dict") {
      std::vector<std::pair<std::string, Value>> items;
      for (const auto& item : given.named) {
        budget_.bytes(items.size());
        const bool repeated_key = std::any_of(items.begin(), items.end(), [&](const auto& other) {
          return other.first == item.first;
        });
        TWELL_REQUIRE(!repeated_key, "dict is given '{}' twice", item.first);
        items.push_back(item);
      }
      return budget_.dict(std::move(items));
    }
    if (name == "range") return range(budget_, given);
    if (name == "strftime_now") {
      return Value::of(time_text(to_text(budget_, given.get(0, "format"))));
    }
    throw InputError(fmt::format("the function '{}' is not supported", name));
  }

  Value binary(const Expression& e) {
    const Value left = eval(*e.parts[0]);
    if (e.name == "and") return truthy(left) ? eval(*e.parts[1]) : left;
    if (e.name == "or") return truthy(left) ? left : eval(*e.parts[1]);
    const Value right = eval(*e.parts[1]);
    line_ = e.line;
    if (e.name == "==") return Value::of(equal(budget_, left, right));
    if (e.name == "!=") return Value::of(!equal(budget_, left, right));
    if (e.name == "in") return Value::of(contains(budget_, left, right));
    if (e.name == "not in") return Value::of(!contains(budget_, left, right));
    if (e.name == "~") {
      std::string out;
      append_str(budget_, left, out);
      append_str(budget_, right, out);
      return Value::of(std::move(out));
    }
    return arithmetic(budget_, e.name, left, right);
  }

  Budget budget_;
  std::deque<Namespace> namespaces_;
  std::vector<std::map<std::string, Value>> scopes_;
  std::string out_;
  int line_ = 1;
};

// 0 without lists and dictionaries.
int depth_of(const Value& value) {
  const List* list = value.list();
  const Dict* dict = value.dict();
  return list != nullptr ? list->depth : dict != nullptr ? dict->depth : 0;
}

}  // namespace

Value Value::of(std::vector<Value> items) {
  int inside = 0;
  for (const Value& item : items) inside = std::max(inside, depth_of(item));
  return {std::make_shared<const List>(List{std::move(items), inside + 1})};
}

Value Value::of(std::vector<std::pair<std::string, Value>> items) {
  int inside = 0;
  for (const auto& [key, item] : items) inside = std::max(inside, depth_of(item));
  return {std::make_shared<const Dict>(Dict{std::move(items), inside + 1})};
}

std::string render(const Body& body, const std::map<std::string, Value>& variables,
                   const std::string& source) {
  Renderer renderer(variables);
  try {
    return renderer.whole(body);
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: line {}: {}", source, renderer.line(), error.what()));
  }
}

}  // namespace twell::jinja
