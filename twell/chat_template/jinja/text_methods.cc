// SPDX-License-Identifier: Apache-2.0
// Methods of texts: Python's str.
#include <algorithm>
#include <iterator>

#include "twell/chat_template/jinja/methods.h"
#include "twell/chat_template/jinja/numbers.h"
#include "twell/chat_template/jinja/operators.h"
#include "twell/chat_template/jinja/printf.h"
#include "twell/chat_template/jinja/text.h"
#include "twell/chat_template/jinja/write.h"

namespace twell::jinja {
namespace {

const std::string& bytes(const Value& self) { return *self.text(); }

// A new text of the same kind, because Markup's methods return Markup.
Value like(Budget& budget, const Value& self, std::string_view text) {
  return budget.text(std::string(text), self.is_markup());
}

Value list_of(Budget& budget, const Value& self, const Parts& parts) {
  std::vector<Value> items;
  items.reserve(parts.size());
  for (const std::string_view part : parts) items.push_back(like(budget, self, part));
  return budget.list(std::move(items));
}

// Looking a character's class up takes the time of copying several.
void charge_scan(Budget& budget, const Value& self) { budget.bytes(8 * bytes(self).size()); }

bool none(const Value* value) { return value == nullptr || value->is_none(); }

// ---- case and blanks

template <std::string (*kChange)(Budget&, std::string_view)>
Value changed_case(Budget& budget, const Value& self, const Arguments& /*arguments*/) {
  return like(budget, self, kChange(budget, bytes(self)));
}

template <bool kLeft, bool kRight>
Value stripped(Budget& budget, const Value& self, const Arguments& arguments) {
  const Matched given = match("strip", "chars? /", arguments);
  const std::string* set = none(given[0]) ? nullptr : &want_text(budget, *given[0], "strip");
  return like(budget, self, strip(budget, bytes(self), set, kLeft, kRight));
}

// ---- search. Positions are counted in code points.

struct Span {
  std::string_view text;
  int64_t begin = 0;  // in code points
  bool inside = true;
};

Span span_of(Budget& budget, const Value& self, const Value* start, const Value* stop) {
  Span out{bytes(self)};
  if (none(start) && none(stop)) return out;
  const std::vector<uint32_t> begins = offsets(budget, bytes(self));
  const int64_t size = std::ssize(begins) - 1;
  const auto place = [&](const Value* given, int64_t fallback) {
    if (none(given)) return fallback;
    const int64_t at = want_count(budget, *given, "a position");
    return at < 0 ? std::max<int64_t>(at + size, 0) : at;
  };
  out.begin = place(start, 0);
  const int64_t end = std::min(place(stop, size), size);
  out.inside = out.begin <= end;
  if (!out.inside) return out;
  const uint32_t from = begins[static_cast<size_t>(out.begin)];
  out.text = out.text.substr(from, begins[static_cast<size_t>(end)] - from);
  return out;
}

template <bool kLast, bool kRequired>
Value find(Budget& budget, const Value& self, const Arguments& arguments) {
  const Matched given = match("find", "sub start? end? /", arguments);
  const std::string& part = want_text(budget, *given[0], "find");
  const Span span = span_of(budget, self, given[1], given[2]);
  const size_t at = !span.inside ? std::string::npos
                    : kLast      ? find_last_text(budget, span.text, part)
                                 : find_text(budget, span.text, part);
  TWELL_REQUIRE(!kRequired || at != std::string::npos, "{} is not in {}", shown(budget, *given[0]),
                shown(budget, self));
  if (at == std::string::npos) return Value::of(int64_t{-1});
  budget.bytes(at);
  return Value::of(span.begin + count_code_points(span.text.substr(0, at)));
}

Value count(Budget& budget, const Value& self, const Arguments& arguments) {
  const Matched given = match("count", "sub start? end? /", arguments);
  const std::string& part = want_text(budget, *given[0], "count");
  const Span span = span_of(budget, self, given[1], given[2]);
  if (!span.inside) return Value::of(int64_t{0});
  if (part.empty()) return Value::of(count_code_points(span.text) + 1);
  int64_t found = 0;
  for (size_t at = 0; (at = find_text(budget, span.text, part, at)) != std::string::npos; ++found) {
    at += part.size();
  }
  return Value::of(found);
}

template <bool kAtEnd>
Value at_edge(Budget& budget, const Value& self, const Arguments& arguments) {
  const Matched given =
      match(kAtEnd ? "endswith" : "startswith", "prefix start? end? /", arguments);
  const Span span = span_of(budget, self, given[1], given[2]);
  const auto matches = [&](const Value& part) {
    const std::string& text = want_text(budget, part, "startswith and endswith");
    budget.bytes(std::min(text.size(), span.text.size()));
    return span.inside && (kAtEnd ? span.text.ends_with(text) : span.text.starts_with(text));
  };
  if (!given[0]->is_tuple()) return Value::of(matches(*given[0]));
  const std::vector<Value>& parts = given[0]->list()->items;
  return Value::of(std::any_of(parts.begin(), parts.end(), matches));
}

template <bool kAtEnd>
Value without(Budget& budget, const Value& self, const Arguments& arguments) {
  const Matched given = match(kAtEnd ? "removesuffix" : "removeprefix", "text /", arguments);
  const std::string& part = want_text(budget, *given[0], "removeprefix and removesuffix");
  std::string_view text = bytes(self);
  if (kAtEnd && text.ends_with(part)) text.remove_suffix(part.size());
  if (!kAtEnd && text.starts_with(part)) text.remove_prefix(part.size());
  return like(budget, self, text);
}

// ---- cutting and joining

template <bool kFromEnd>
Value split_text(Budget& budget, const Value& self, const Arguments& arguments) {
  const Matched given = match(kFromEnd ? "rsplit" : "split", "sep? maxsplit?", arguments);
  const int64_t limit = given[1] == nullptr ? -1 : want_count(budget, *given[1], "maxsplit");
  if (none(given[0])) {
    return list_of(budget, self,
                   kFromEnd ? split_at_blanks_from_end(budget, bytes(self), limit)
                            : split_at_blanks(budget, bytes(self), limit));
  }
  const std::string& separator = want_text(budget, *given[0], "split");
  return list_of(budget, self,
                 kFromEnd ? split_from_end(budget, bytes(self), separator, limit)
                          : split(budget, bytes(self), separator, limit));
}

template <bool kFromEnd>
Value partition(Budget& budget, const Value& self, const Arguments& arguments) {
  const Matched given = match(kFromEnd ? "rpartition" : "partition", "sep /", arguments);
  const std::string& separator = want_text(budget, *given[0], "partition");
  TWELL_REQUIRE(!separator.empty(), "partition needs a separator that is not empty");
  const std::string& text = bytes(self);
  const size_t at =
      kFromEnd ? find_last_text(budget, text, separator) : find_text(budget, text, separator);
  Parts parts = {text, "", ""};
  if (at != std::string::npos) {
    const std::string_view whole = text;
    parts = {whole.substr(0, at), separator, whole.substr(at + separator.size())};
  } else if (kFromEnd) {
    parts = {"", "", text};
  }
  std::vector<Value> items;
  for (const std::string_view part : parts) items.push_back(like(budget, self, part));
  return budget.list(std::move(items), ListKind::kTuple);
}

Value split_lines(Budget& budget, const Value& self, const Arguments& arguments) {
  const Matched given = match("splitlines", "keepends?", arguments);
  return list_of(budget, self,
                 lines(budget, bytes(self), given[0] != nullptr && truthy(*given[0])));
}

Value join(Budget& budget, const Value& self, const Arguments& arguments) {
  const Matched given = match("join", "iterable /", arguments);
  const auto items = iterate(budget, *given[0]);
  std::string out;
  bool first = true;
  for (Value item; items->next(item);) {
    budget.step();
    if (!std::exchange(first, false)) budget.append(out, bytes(self));
    const std::string& part = want_text(budget, item, "join");
    budget.append(out, self.is_markup() && !item.is_markup() ? html_escaped(budget, part) : part);
  }
  return like(budget, self, out);
}

Value replace_text(Budget& budget, const Value& self, const Arguments& arguments) {
  const Matched given = match("replace", "old new count? /", arguments);
  return like(budget, self,
              replace(budget, bytes(self), want_text(budget, *given[0], "replace"),
                      want_text(budget, *given[1], "replace"),
                      given[2] == nullptr ? -1 : want_count(budget, *given[2], "replace")));
}

// ---- width

std::string fill_of(Budget& budget, const Value* given) {
  if (given == nullptr) return " ";
  const std::string& fill = want_text(budget, *given, "a fill");
  TWELL_REQUIRE(count_code_points(fill) == 1, "a fill is one character, not {}",
                shown(budget, *given));
  return fill;
}

template <char kAlign>
Value aligned(Budget& budget, const Value& self, const Arguments& arguments) {
  const Matched given = match("center, ljust and rjust", "width fillchar? /", arguments);
  const int64_t width = want_count(budget, *given[0], "a width");
  const std::string fill = fill_of(budget, given[1]);
  const int64_t missing = std::max<int64_t>(width - count_code_points(bytes(self)), 0);
  TWELL_REQUIRE(missing <= static_cast<int64_t>(kMaxBytes), "a width of {} is too long", width);
  const int64_t left = kAlign == 'l'   ? 0
                       : kAlign == 'r' ? missing
                                       : missing / 2 + (missing & width & 1);  // as Python rounds
  budget.bytes(static_cast<size_t>(missing) * fill.size() + bytes(self).size());
  std::string out;
  for (int64_t i = 0; i < left; ++i) out += fill;
  out += bytes(self);
  for (int64_t i = left; i < missing; ++i) out += fill;
  return like(budget, self, out);
}

Value zero_filled(Budget& budget, const Value& self, const Arguments& arguments) {
  const Matched given = match("zfill", "width /", arguments);
  const int64_t width = want_count(budget, *given[0], "a width");
  const int64_t missing = std::max<int64_t>(width - count_code_points(bytes(self)), 0);
  TWELL_REQUIRE(missing <= static_cast<int64_t>(kMaxBytes), "a width of {} is too long", width);
  std::string out = bytes(self);
  budget.bytes(static_cast<size_t>(missing) + out.size());
  out.insert(out.starts_with('-') || out.starts_with('+') ? 1 : 0, static_cast<size_t>(missing),
             '0');
  return like(budget, self, out);
}

Value tabs_expanded(Budget& budget, const Value& self, const Arguments& arguments) {
  const Matched given = match("expandtabs", "tabsize?", arguments);
  const int64_t size = given[0] == nullptr ? 8 : want_count(budget, *given[0], "a tab's size");
  TWELL_REQUIRE(size <= static_cast<int64_t>(kMaxBytes), "a tab of {} is too long", size);
  std::string out;
  int64_t column = 0;
  for (size_t at = 0; at < bytes(self).size();) {
    const size_t begin = at;
    const CodePoint c = next_code_point(bytes(self), at);
    if (c == '\t') {
      const int64_t blanks = size > 0 ? size - column % size : 0;
      budget.append(out, static_cast<size_t>(blanks), ' ');
      column += blanks;
    } else {
      budget.append(out, std::string_view(bytes(self)).substr(begin, at - begin));
      column = c == '\n' || c == '\r' ? 0 : column + 1;
    }
  }
  return like(budget, self, out);
}

// ---- classes

bool all_of(std::string_view text, bool (*holds)(CodePoint)) {
  if (text.empty()) return false;
  for (size_t at = 0; at < text.size();) {
    if (!holds(next_code_point(text, at))) return false;
  }
  return true;
}

template <bool (*kHolds)(CodePoint)>
Value is_all(Budget& budget, const Value& self, const Arguments& /*arguments*/) {
  charge_scan(budget, self);
  return Value::of(all_of(bytes(self), kHolds));
}

bool is_letter_or_number(CodePoint c) { return is_letter(c) || is_numeric(c); }
// Superscripts and circled digits have a value but no place in a decimal number.
bool is_digit(CodePoint c) {
  return is_decimal(c) || c == 0xb2 || c == 0xb3 || c == 0xb9 || c == 0x2070 ||
         (c >= 0x2074 && c <= 0x2079) || (c >= 0x2080 && c <= 0x2089) ||
         (c >= 0x2460 && c <= 0x2468) || (c >= 0x2474 && c <= 0x247c) ||
         (c >= 0x2488 && c <= 0x2490) || c == 0x24ea;
}

Value is_ascii(Budget& budget, const Value& self, const Arguments& /*arguments*/) {
  charge_scan(budget, self);
  return Value::of(
      std::all_of(bytes(self).begin(), bytes(self).end(), [](char c) { return (c & 0x80) == 0; }));
}
Value is_printable_text(Budget& budget, const Value& self, const Arguments& /*arguments*/) {
  charge_scan(budget, self);
  return Value::of(bytes(self).empty() || all_of(bytes(self), is_printable));
}
Value is_identifier(Budget& budget, const Value& self, const Arguments& /*arguments*/) {
  charge_scan(budget, self);
  size_t at = 0;
  const bool begins = !bytes(self).empty() && [](CodePoint c) {
    return c == '_' || is_letter(c);
  }(next_code_point(bytes(self), at));
  return Value::of(begins && all_of(bytes(self), is_word));
}

// Whether all characters with a case have the same.
bool is_cased_text(std::string_view text, bool (*wrong)(CodePoint), bool (*right)(CodePoint)) {
  bool any = false;
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = next_code_point(text, at);
    if (wrong(c) || is_title(c)) return false;
    any = any || right(c);
  }
  return any;
}

Value is_lower_case(Budget& budget, const Value& self, const Arguments& /*arguments*/) {
  charge_scan(budget, self);
  return Value::of(is_lower_text(bytes(self)));
}
Value is_upper_case(Budget& budget, const Value& self, const Arguments& /*arguments*/) {
  charge_scan(budget, self);
  return Value::of(is_upper_text(bytes(self)));
}
Value is_title_case(Budget& budget, const Value& self, const Arguments& /*arguments*/) {
  charge_scan(budget, self);
  bool any = false, in_word = false;
  for (size_t at = 0; at < bytes(self).size();) {
    const CodePoint c = next_code_point(bytes(self), at);
    const bool begins = is_upper(c) || is_title(c);
    if (begins ? in_word : is_lower(c) && !in_word) return Value::of(false);
    in_word = begins || is_lower(c);
    any = any || in_word;
  }
  return Value::of(any);
}

Value format_method(Budget& budget, const Value& self, const Arguments& arguments) {
  return format_text(budget, self, arguments);
}
Value format_map(Budget& budget, const Value& self, const Arguments& arguments) {
  const Matched given = match("format_map", "mapping /", arguments);
  TWELL_REQUIRE(given[0]->dict() != nullptr, "format_map needs a dictionary");
  Arguments named;
  for (const auto& [key, value] : given[0]->dict()->items) {
    budget.bytes(sizeof(std::pair<std::string, Value>));
    if (key.text() != nullptr) named.named.emplace_back(*key.text(), value);
  }
  return format_text(budget, self, named);
}

[[noreturn]] Value no_bytes(Budget& /*budget*/, const Value& /*self*/,
                            const Arguments& /*arguments*/) {
  throw InputError("the methods encode, translate and maketrans of a text are not supported");
}

constexpr MethodEntry kTextMethods[] = {
    {"capitalize", "", changed_case<capitalized>},
    {"casefold", "", changed_case<case_folded>},
    {"center", "*", aligned<'c'>},
    {"count", "*", count},
    {"encode", "*", no_bytes},
    {"endswith", "*", at_edge<true>},
    {"expandtabs", "*", tabs_expanded},
    {"find", "*", find<false, false>},
    {"format", "*", format_method},
    {"format_map", "*", format_map},
    {"index", "*", find<false, true>},
    {"isalnum", "", is_all<is_letter_or_number>},
    {"isalpha", "", is_all<is_letter>},
    {"isascii", "", is_ascii},
    {"isdecimal", "", is_all<is_decimal>},
    {"isdigit", "", is_all<is_digit>},
    {"isidentifier", "", is_identifier},
    {"islower", "", is_lower_case},
    {"isnumeric", "", is_all<is_numeric>},
    {"isprintable", "", is_printable_text},
    {"isspace", "", is_all<is_blank>},
    {"istitle", "", is_title_case},
    {"isupper", "", is_upper_case},
    {"join", "*", join},
    {"ljust", "*", aligned<'l'>},
    {"lower", "", changed_case<lower>},
    {"lstrip", "*", stripped<true, false>},
    {"maketrans", "*", no_bytes},
    {"partition", "*", partition<false>},
    {"removeprefix", "*", without<false>},
    {"removesuffix", "*", without<true>},
    {"replace", "*", replace_text},
    {"rfind", "*", find<true, false>},
    {"rindex", "*", find<true, true>},
    {"rjust", "*", aligned<'r'>},
    {"rpartition", "*", partition<true>},
    {"rsplit", "*", split_text<true>},
    {"rstrip", "*", stripped<false, true>},
    {"split", "*", split_text<false>},
    {"splitlines", "*", split_lines},
    {"startswith", "*", at_edge<false>},
    {"strip", "*", stripped<true, true>},
    {"swapcase", "", changed_case<case_swapped>},
    {"title", "", changed_case<titled>},
    {"translate", "*", no_bytes},
    {"upper", "", changed_case<upper>},
    {"zfill", "*", zero_filled},
};

}  // namespace

const MethodEntry* find_text_method(std::string_view name) {
  const auto* found =
      std::lower_bound(std::begin(kTextMethods), std::end(kTextMethods), name,
                       [](const MethodEntry& e, std::string_view value) { return e.name < value; });
  return found != std::end(kTextMethods) && found->name == name ? found : nullptr;
}

bool is_lower_text(std::string_view text) { return is_cased_text(text, is_upper, is_lower); }
bool is_upper_text(std::string_view text) { return is_cased_text(text, is_lower, is_upper); }

}  // namespace twell::jinja
