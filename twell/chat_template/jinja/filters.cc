// SPDX-License-Identifier: Apache-2.0
// Filters of single values: texts, numbers, JSON.
#include "twell/chat_template/jinja/filters.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>

#include "twell/chat_template/jinja/access.h"
#include "twell/chat_template/jinja/methods.h"
#include "twell/chat_template/jinja/numbers.h"
#include "twell/chat_template/jinja/operators.h"
#include "twell/chat_template/jinja/printf.h"
#include "twell/chat_template/jinja/text.h"
#include "twell/chat_template/jinja/write.h"

namespace twell::jinja {
namespace {

// ---- texts. soft_text() keeps markup, so the results do.

template <std::string (*kChange)(Budget&, std::string_view)>
Value change_text(const FilterCall& call) {
  const Value text = soft_text(call.budget, call.value);
  return call.budget.text(kChange(call.budget, *text.text()), text.is_markup());
}

Value trim(const FilterCall& call) {
  const Value text = soft_text(call.budget, call.value);
  const std::string* set = call.has(0) ? &want_text(call.budget, *call.given[0], "trim") : nullptr;
  return call.budget.text(std::string(strip(call.budget, *text.text(), set, true, true)),
                          text.is_markup());
}

// Words begin behind blanks, hyphens and opening brackets.
std::string title_words(Budget& budget, std::string_view text) {
  const auto separates = [](CodePoint c) {
    return is_blank(c) || (c < 0x80 && std::string_view("-({[<").find(static_cast<char>(c)) !=
                                           std::string_view::npos);
  };
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const bool separator = separates(next_code_point(text, at));
    const size_t second = at;
    while (at < text.size()) {
      const size_t before = at;
      if (separates(next_code_point(text, at)) != separator) {
        at = before;
        break;
      }
    }
    budget.append(out, upper(budget, text.substr(begin, second - begin)));
    budget.append(out, lower(budget, text.substr(second, at - second)));
  }
  return out;
}

Value replace_filter(const FilterCall& call) {
  Budget& budget = call.budget;
  return budget.text(replace(budget, to_text(budget, call.value), to_text(budget, *call.given[0]),
                             to_text(budget, *call.given[1]),
                             call.has(2) ? want_count(budget, *call.given[2], "replace") : -1));
}

Value string_filter(const FilterCall& call) { return soft_text(call.budget, call.value); }

Value safe(const FilterCall& call) {
  if (call.value.is_markup()) return call.value;
  return call.budget.text(to_text(call.budget, call.value), /*markup=*/true);
}

Value escape(const FilterCall& call) {
  if (call.value.is_markup()) return call.value;
  const std::string text = to_text(call.budget, call.value);
  return call.budget.text(html_escaped(call.budget, text), /*markup=*/true);
}

Value force_escape(const FilterCall& call) {
  const std::string text = to_text(call.budget, call.value);
  return call.budget.text(html_escaped(call.budget, text), /*markup=*/true);
}

Value center(const FilterCall& call) {
  Arguments width;
  width.positional.push_back(call.get(0, Value::of(int64_t{80})));
  return find_text_method("center")->call(call.budget, soft_text(call.budget, call.value), width);
}

Value format_filter(const FilterCall& call) {
  const Arguments& given = call.arguments;
  TWELL_REQUIRE(given.positional.empty() || given.named.empty(),
                "format takes values by position or by name, not both");
  Value values;
  if (given.named.empty()) {
    values = call.budget.list(given.positional, ListKind::kTuple);
  } else {
    DictBuilder names;
    for (const auto& [name, value] : given.named) names.add(call.budget.text(name), value);
    values = call.budget.dict(std::move(names));
  }
  return printf_text(call.budget, soft_text(call.budget, call.value), values);
}

Value indent(const FilterCall& call) {
  Budget& budget = call.budget;
  std::string by(4, ' ');
  if (call.given[0] != nullptr) {
    if (const std::string* text = call.given[0]->text()) {
      by = *text;
    } else {
      const int64_t width = want_count(budget, *call.given[0], "indent");
      TWELL_REQUIRE(width <= static_cast<int64_t>(kMaxBytes), "an indent of {} is too long", width);
      budget.bytes(static_cast<size_t>(std::max<int64_t>(width, 0)));
      by.assign(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
    }
  }
  const bool first = call.flag(1), blank = call.flag(2);
  const std::string text = want_text(budget, call.value, "indent") + "\n";
  const Parts parts = lines(budget, text, false);
  std::string out;
  if (first) budget.append(out, by);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) budget.append(out, "\n");
    if (i > 0 && (blank || !parts[i].empty())) budget.append(out, by);
    budget.append(out, parts[i]);
  }
  return budget.text(std::move(out), call.value.is_markup());
}

Value truncate(const FilterCall& call) {
  Budget& budget = call.budget;
  const int64_t length = call.given[0] ? want_count(budget, *call.given[0], "truncate") : 255;
  const bool kill_words = call.flag(1);
  const std::string end = call.given[2] ? want_text(budget, *call.given[2], "truncate") : "...";
  const int64_t leeway = call.has(3) ? want_count(budget, *call.given[3], "truncate") : 5;
  const int64_t room = length - count_code_points(end);
  TWELL_REQUIRE(room >= 0 && leeway >= 0, "truncate cannot cut to {} with an end of {}", length,
                count_code_points(end));
  const std::string& text = want_text(budget, call.value, "truncate");
  budget.bytes(text.size());
  if (count_code_points(text) - leeway <= length) return call.value;
  size_t cut = 0;
  for (int64_t i = 0; i < room; ++i) next_code_point(text, cut);
  std::string_view kept = std::string_view(text).substr(0, cut);
  if (!kill_words) kept = kept.substr(0, std::min(kept.rfind(' '), kept.size()));
  return budget.text(std::string(kept) + end);
}

Value word_count(const FilterCall& call) {
  const Value text = soft_text(call.budget, call.value);
  call.budget.bytes(text.text()->size());
  int64_t words = 0;
  bool in_word = false;
  for (size_t at = 0; at < text.text()->size();) {
    const bool word = is_word(next_code_point(*text.text(), at));
    words += word && !in_word ? 1 : 0;
    in_word = word;
  }
  return Value::of(words);
}

std::string url_quoted(Budget& budget, std::string_view text, bool for_query) {
  constexpr std::string_view kKept = "_.-~";
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 0x80 && std::isalnum(byte) != 0) || kKept.find(c) != std::string_view::npos ||
        (c == '/' && !for_query)) {
      budget.append(out, 1, c);
    } else if (c == ' ' && for_query) {
      budget.append(out, "+");
    } else {
      budget.append(out, fmt::format("%{:02X}", byte));
    }
  }
  return out;
}

Value url_encode(const FilterCall& call) {
  Budget& budget = call.budget;
  const Value source =
      call.value.dict() != nullptr ? budget.view(call.value, ViewKind::kItems) : call.value;
  const auto items = call.value.text() != nullptr ? nullptr : try_iterate(budget, source);
  if (items == nullptr) return budget.text(url_quoted(budget, to_text(budget, call.value), false));
  std::string out;
  for (Value item; items->next(item);) {
    const std::vector<Value> pair = items_of(budget, item);
    TWELL_REQUIRE(pair.size() == 2, "urlencode needs pairs, not {}", shown(budget, item));
    if (!out.empty()) budget.append(out, "&");
    budget.append(out, url_quoted(budget, to_text(budget, pair[0]), true) + "=" +
                           url_quoted(budget, to_text(budget, pair[1]), true));
  }
  return budget.text(std::move(out));
}

// ---- numbers

std::optional<Integer> integer_of(Budget& budget, const std::string& text, int base) {
  return parse_integer(strip(budget, text, nullptr, true, true), base);
}
std::optional<double> real_of(Budget& budget, const std::string& text) {
  return parse_real(strip(budget, text, nullptr, true, true));
}

Value to_integer(const FilterCall& call) {
  Budget& budget = call.budget;
  require_defined(call.value);
  const Value fallback = call.get(0, Value::of(int64_t{0}));
  const int64_t base = call.given[1] ? want_count(budget, *call.given[1], "int") : 10;
  if (const std::string* text = call.value.text()) {
    if (base == 0 || (base >= 2 && base <= 36)) {
      const auto whole = integer_of(budget, *text, static_cast<int>(base));
      if (whole) return Value::of(*whole);
    }
    const auto real = real_of(budget, *text);
    return real && std::isfinite(*real) ? Value::of(truncated(*real)) : fallback;
  }
  if (!call.value.is_number()) return fallback;
  if (call.value.real() == nullptr) return positive(budget, call.value);
  return std::isnan(*call.value.real()) ? fallback : Value::of(truncated(*call.value.real()));
}

Value to_real(const FilterCall& call) {
  require_defined(call.value);
  if (call.value.is_number()) return Value::of(as_real(call.value));
  const auto real =
      call.value.text() != nullptr ? real_of(call.budget, *call.value.text()) : std::nullopt;
  return real ? Value::of(*real) : call.get(0, Value::of(0.0));
}

Value absolute(const FilterCall& call) {
  require_defined(call.value);
  TWELL_REQUIRE(call.value.is_number(), "abs needs a number, not {}",
                shown(call.budget, call.value));
  if (call.value.real() != nullptr) return Value::of(std::abs(*call.value.real()));
  const Value whole = positive(call.budget, call.value);
  return *whole.integer() < 0 ? negated(call.budget, whole) : whole;
}

Value round_filter(const FilterCall& call) {
  Budget& budget = call.budget;
  const int64_t digits = call.given[0] ? want_count(budget, *call.given[0], "round") : 0;
  const std::string method =
      call.given[1] ? want_text(budget, *call.given[1], "round") : std::string("common");
  TWELL_REQUIRE(method == "common" || method == "ceil" || method == "floor",
                "round rounds common, ceil or floor, not {}", method);
  require_defined(call.value);
  TWELL_REQUIRE(call.value.is_number(), "round needs a number, not {}", shown(budget, call.value));
  if (method == "common") {
    if (call.value.real() != nullptr) return Value::of(rounded(*call.value.real(), digits));
    if (digits >= 0) return positive(budget, call.value);
    return Value::of(truncated(rounded(as_real(call.value), digits)));
  }
  const double unit = std::pow(10.0, static_cast<double>(digits));
  const double scaled = as_real(call.value) * unit;
  return Value::of((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / unit);
}

Value file_size(const FilterCall& call) {
  require_defined(call.value);
  const auto number = call.value.is_number()         ? std::optional(as_real(call.value))
                      : call.value.text() != nullptr ? real_of(call.budget, *call.value.text())
                                                     : std::nullopt;
  TWELL_REQUIRE(number, "filesizeformat needs a number, not {}", shown(call.budget, call.value));
  const double bytes = *number;
  const bool binary = call.flag(0);
  const double base = binary ? 1024 : 1000;
  if (bytes == 1) return call.budget.text("1 Byte");
  if (bytes < base) return call.budget.text(fmt::format("{} Bytes", truncated(bytes)));
  constexpr std::string_view kPrefixes = "kMGTPEZY";
  double unit = base;
  size_t i = 0;
  for (; i + 1 < kPrefixes.size() && bytes >= unit * base; ++i) unit *= base;
  const char prefix = binary && i == 0 ? 'K' : kPrefixes[i];
  return call.budget.text(fmt::format("{:.1f} {}{}", bytes / unit, prefix, binary ? "iB" : "B"));
}

// ---- values of any type

Value default_filter(const FilterCall& call) {
  const bool missing = call.value.is_undefined() || (call.flag(1) && !truthy(call.value));
  return missing ? call.get(0, call.budget.text("")) : call.value;
}

Value attribute(const FilterCall& call) {
  Value found;
  require_defined(call.value);
  find_own(call.budget, call.value, want_text(call.budget, *call.given[0], "attr"), found);
  return found;
}

Value to_json_filter(const FilterCall& call) {
  Budget& budget = call.budget;
  JsonStyle style;
  style.ascii = call.flag(0);
  style.sorted = call.flag(3);
  if (call.has(1)) {
    style.indented = true;
    style.between = ",";
    if (const std::string* text = call.given[1]->text()) {
      style.indent = *text;
    } else {
      const int64_t width = std::max<int64_t>(want_count(budget, *call.given[1], "an indent"), 0);
      TWELL_REQUIRE(width <= static_cast<int64_t>(kMaxBytes), "an indent of {} is too long", width);
      budget.bytes(static_cast<size_t>(width));
      style.indent.assign(static_cast<size_t>(width), ' ');
    }
  }
  if (call.has(2)) {
    const std::vector<Value> separators = items_of(budget, *call.given[2]);
    TWELL_REQUIRE(separators.size() == 2, "separators are two texts, not {}",
                  shown(budget, *call.given[2]));
    style.between = want_text(budget, separators[0], "a separator");
    style.after_key = want_text(budget, separators[1], "a separator");
  }
  return budget.text(to_json(budget, call.value, style));
}

constexpr FilterEntry kValueFilters[] = {
    {"abs", "", absolute},
    {"attr", "name", attribute},
    {"capitalize", "", change_text<capitalized>},
    {"center", "width?", center},
    {"d", "default_value? boolean?", default_filter},
    {"default", "default_value? boolean?", default_filter},
    {"e", "", escape},
    {"escape", "", escape},
    {"filesizeformat", "binary?", file_size},
    {"float", "default?", to_real},
    {"forceescape", "", force_escape},
    {"format", "...", format_filter},
    {"indent", "width? first? blank?", indent},
    {"int", "default? base?", to_integer},
    {"lower", "", change_text<lower>},
    {"replace", "old new count?", replace_filter},
    {"round", "precision? method?", round_filter},
    {"safe", "", safe},
    {"string", "", string_filter},
    {"title", "", change_text<title_words>},
    {"tojson", "ensure_ascii? indent? separators? sort_keys?", to_json_filter},
    {"trim", "chars?", trim},
    {"truncate", "length? killwords? end? leeway?", truncate},
    {"upper", "", change_text<upper>},
    {"urlencode", "", url_encode},
    {"wordcount", "", word_count},
};

// Filters of jinja2 that no published template uses.
constexpr std::string_view kUnsupported[] = {"pprint", "random",   "striptags",
                                             "urlize", "wordwrap", "xmlattr"};

}  // namespace

bool FilterCall::flag(size_t i) const { return given[i] != nullptr && truthy(*given[i]); }

const FilterEntry* find_value_filter(std::string_view name) {
  const auto* found = std::find_if(std::begin(kValueFilters), std::end(kValueFilters),
                                   [&](const FilterEntry& e) { return e.name == name; });
  return found == std::end(kValueFilters) ? nullptr : found;
}

bool is_filter(std::string_view name) {
  return find_value_filter(name) != nullptr || find_sequence_filter(name) != nullptr ||
         std::find(std::begin(kUnsupported), std::end(kUnsupported), name) !=
             std::end(kUnsupported);
}

Value apply_filter(Budget& budget, std::string_view name, const Value& value,
                   const Arguments& arguments) {
  budget.step();
  const FilterEntry* entry = find_value_filter(name);
  if (entry == nullptr) entry = find_sequence_filter(name);
  if (entry == nullptr) {
    throw InputError(is_filter(name) ? fmt::format("the filter '{}' is not supported", name)
                                     : fmt::format("there is no filter named '{}'", name));
  }
  FilterCall call{budget, value, arguments, {}};
  if (entry->parameters != "...") {
    call.given = match(fmt::format("the filter '{}'", name), entry->parameters, arguments);
  }
  return entry->apply(call);
}

}  // namespace twell::jinja
