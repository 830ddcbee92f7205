// SPDX-License-Identifier: Apache-2.0
#include "twell/base/option.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "twell/base/error.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

std::optional<bool> parse_truth(std::string_view text) {
  for (const char* yes : {"true", "1", "on", "yes"}) {
    if (text == yes) return true;
  }
  for (const char* no : {"false", "0", "off", "no"}) {
    if (text == no) return false;
  }
  return std::nullopt;
}

template <typename Number>
bool parse_exactly(std::string_view text, Number& value) {
  if (text.starts_with('+')) text.remove_prefix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

// Replaces the suffix of 20k, 1.5M, 2G or 2B, 1T by a decimal exponent; 1e6 stays as it is.
std::string spell_out_suffix(std::string_view text) {
  if (text.empty() || text.find_first_of("eE") != std::string_view::npos) return std::string(text);
  constexpr std::pair<char, const char*> kExponents[] = {{'k', "e3"}, {'K', "e3"}, {'M', "e6"},
                                                         {'G', "e9"}, {'B', "e9"}, {'T', "e12"}};
  for (const auto& [suffix, exponent] : kExponents) {
    if (text.back() == suffix) return std::string(text.substr(0, text.size() - 1)) + exponent;
  }
  return std::string(text);
}

// "a, b or c".
std::string alternatives(const std::vector<std::string>& names) {
  if (names.size() < 2) return fmt::format("{}", fmt::join(names, ""));
  return fmt::format("{} or {}", fmt::join(names.begin(), names.end() - 1, ", "), names.back());
}

template <typename T>
constexpr bool kIsList = false;
template <typename T>
constexpr bool kIsList<std::vector<T>> = true;
template <typename T>
constexpr bool kIsOptional = false;
template <typename T>
constexpr bool kIsOptional<std::optional<T>> = true;

// A value as text; empty for flags, lists of paths, empty text and empty lists.
template <typename T>
std::string default_text(const T& value) {
  if constexpr (std::is_same_v<T, fs::path>) {
    return value.string();
  } else if constexpr (std::is_same_v<T, std::string>) {
    return value;
  } else if constexpr (std::is_same_v<T, bool> || kIsOptional<T> ||
                       std::is_same_v<T, std::vector<fs::path>>) {
    return {};
  } else if constexpr (kIsList<T>) {
    return value.empty() ? std::string() : fmt::format("[{}]", fmt::join(value, ","));
  } else if constexpr (std::is_floating_point_v<T>) {
    return fmt::format("{:g}", value);
  } else {
    return fmt::format("{}", value);
  }
}

fs::path whole_path(const fs::path& path) {
  const fs::path whole = fs::absolute(path).lexically_normal();
  return whole.has_filename() ? whole : whole.parent_path();  // "text/" and "text"
}

}  // namespace

bool OptionRange::holds(double value) const {
  return std::isfinite(value) && (above ? value > lowest : value >= lowest) &&
         (below ? value < highest : value <= highest);
}

std::string OptionRange::text() const {
  const bool has_low = std::isfinite(lowest), has_high = std::isfinite(highest);
  if (has_low && has_high && !above && !below)
    return fmt::format("{:.12g} to {:.12g}", lowest, highest);
  std::string text;
  if (has_low) text = fmt::format("{} {:.12g}", above ? "above" : "at least", lowest);
  if (has_low && has_high) text += " and ";
  if (has_high) text += fmt::format("{} {:.12g}", below ? "below" : "at most", highest);
  return text.empty() ? "a finite number" : text;
}

Option::Option(std::string flag, std::string negated, OptionTarget target, std::string type,
               std::string help, std::string group)
    : flag_(std::move(flag)),
      negated_(std::move(negated)),
      target_(target),
      type_(std::move(type)),
      help_(std::move(help)),
      group_(std::move(group)),
      label_(flag_.empty() ? negated_ : flag_),
      default_(std::visit([](const auto* value) { return default_text(*value); }, target)) {}

Option& Option::required(bool value) {
  required_ = value;
  return *this;
}

Option& Option::range(OptionRange range) {
  range_ = range;
  return *this;
}

Option& Option::choices(std::vector<std::string> values) {
  choices_ = values;
  proposals_ = std::move(values);
  return *this;
}

Option& Option::suggests(std::vector<std::string> values) {
  proposals_ = std::move(values);
  return *this;
}

Option& Option::needs(Option& other) {
  needs_.push_back(&other);
  return *this;
}

Option& Option::excludes(Option& other) {
  excludes_.push_back(&other);
  other.excludes_.push_back(this);
  return *this;
}

Option& Option::not_in_files() {
  in_files_ = false;
  return *this;
}

Option& Option::hide_default() {
  shows_default_ = false;
  return *this;
}

Option& Option::several_values() {
  several_ = true;
  return *this;
}

Option& Option::value_optional() {
  optional_ = true;
  return *this;
}

Option& Option::called(std::string name) {
  label_ = std::move(name);
  return *this;
}

std::string Option::name() const {
  const std::string& flag = flag_.empty() ? negated_ : flag_;
  return flag.substr(std::min(flag.find_first_not_of('-'), flag.size()));
}

bool Option::is_flag() const {
  return std::holds_alternative<bool*>(target_) ||
         std::holds_alternative<std::optional<bool>*>(target_);
}

bool Option::collects() const {
  return std::visit([]<typename T>(const T*) { return kIsList<T>; }, target_);
}

std::string Option::help_names() const {
  std::string text = flag_;
  if (!negated_.empty()) text += (text.empty() ? "" : ",") + negated_;
  if (!type_.empty()) text += " " + type_;
  if (shows_default_ && !default_.empty()) text += (type_.empty() ? " =" : "=") + default_;
  if (collects()) text += " ...";
  if (required_ && !is_word()) text += " REQUIRED";
  return text;
}

std::string Option::help_text() const {
  std::string text = help_;
  for (const auto& [label, others] :
       {std::pair("with", &needs_), std::pair("not with", &excludes_)}) {
    if (others->empty()) continue;
    std::vector<std::string> names;
    for (const Option* other : *others) names.push_back("--" + other->name());
    text += fmt::format(" ({} {})", label, fmt::join(names, ", "));
  }
  return text;
}

void Option::check_range(double value, const std::string& text) const {
  TWELL_REQUIRE(range_.holds(value), "{} must be {}, got {}", label_, range_.text(), text);
}

template <typename Number>
Number Option::whole_number(const std::string& text) const {
  Number value = 0;
  if (!parse_exactly(text, value)) {
    double real = 0.0;
    TWELL_REQUIRE(parse_exactly(spell_out_suffix(text), real) && real == std::nearbyint(real),
                  "{} must be a whole number, got '{}'", label_, text);
    // Bounds near the type's limits are powers of two, which a double represents exactly.
    TWELL_REQUIRE(real < std::ldexp(1.0, std::numeric_limits<Number>::digits), "{} {} is too large",
                  label_, text);
    TWELL_REQUIRE(real >= static_cast<double>(std::numeric_limits<Number>::min()),
                  std::is_signed_v<Number> ? "{} {} is too small" : "{} {} is negative", label_,
                  text);
    value = static_cast<Number>(real);
  }
  check_range(static_cast<double>(value), text);
  return value;
}

double Option::real_number(const std::string& text) const {
  double value = 0.0;
  TWELL_REQUIRE(parse_exactly(text, value), "{} must be a number that can be represented, got '{}'",
                label_, text);
  check_range(value, text);
  return value;
}

template <typename T>
void Option::read(const std::string& text, T& target) const {
  if constexpr (kIsList<T>) {
    read(text, target.emplace_back());
  } else if constexpr (kIsOptional<T>) {
    read(text, target.emplace());
  } else if constexpr (std::is_same_v<T, bool>) {
    target = text == "true";
  } else if constexpr (std::is_same_v<T, std::string>) {
    target = text;
  } else if constexpr (std::is_same_v<T, fs::path>) {
    // An empty path would count as an option that was not given.
    TWELL_REQUIRE(!text.empty(), "{} must be a path, got ''", label_);
    target = text;
  } else if constexpr (std::is_floating_point_v<T>) {
    target = static_cast<T>(real_number(text));
  } else {
    target = whole_number<T>(text);
  }
}

void Option::set(std::vector<std::string> values, bool negated) {
  if (is_flag()) {
    TWELL_REQUIRE(values.size() == 1, "{} takes one value", label_);
    const std::optional<bool> truth = parse_truth(values.front());
    TWELL_REQUIRE(truth, "{} must be true or false, got '{}'", label_, values.front());
    values = {*truth != negated ? "true" : "false"};
  }
  TWELL_REQUIRE(collects() || values.size() == 1 || (optional_ && values.empty()),
                "{} takes one value, got {}", label_, values.size());
  const auto assign = [&]<typename T>(T* target) {
    // A list replaces the default that its variable held when the option was declared.
    if constexpr (kIsList<T>) target->clear();
    for (const std::string& value : values) {
      TWELL_REQUIRE(
          choices_.empty() || std::find(choices_.begin(), choices_.end(), value) != choices_.end(),
          "{} must be {}, got '{}'", label_, alternatives(choices_), value);
      read(value, *target);
    }
  };
  std::visit(assign, target_);
  values_ = std::move(values);
  given_ = true;
}

std::vector<std::string> Option::default_values() const {
  if (default_.empty()) return {};
  return {default_};
}

bool Option::same(const std::vector<std::string>& a, const std::vector<std::string>& b) const {
  if (a.size() != b.size()) return false;
  const auto meaning = [&]<typename T>(const std::string& text, const T*) {
    T value{};
    read(text, value);
    if constexpr (std::is_same_v<T, fs::path>) value = whole_path(value);
    if constexpr (std::is_same_v<T, std::vector<fs::path>>) value[0] = whole_path(value[0]);
    return value;
  };
  const auto equal = [&](const auto* target) {
    for (size_t i = 0; i < a.size(); ++i) {
      if (meaning(a[i], target) != meaning(b[i], target)) return false;
    }
    return true;
  };
  return std::visit(equal, target_);
}

void Option::check_variable() const {
  const auto check = [&]<typename T>(const T* value) {
    if constexpr (std::is_same_v<T, std::optional<int64_t>> ||
                  std::is_same_v<T, std::optional<double>>) {
      if (*value) check_range(static_cast<double>(**value), fmt::format("{}", **value));
    } else if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) {
      check_range(static_cast<double>(*value), fmt::format("{}", *value));
    }
  };
  std::visit(check, target_);
}

bool Option::excluded() const {
  return std::any_of(excludes_.begin(), excludes_.end(),
                     [](const Option* other) { return other->given(); });
}

void Option::check_others() const {
  TWELL_REQUIRE(given_ || !required_, "{} is required: {}", label_, help_);
  if (!given_) return;
  for (const Option* other : needs_) {
    TWELL_REQUIRE(other->given(), "{} needs {}", label_, other->label_);
  }
  for (const Option* other : excludes_) {
    TWELL_REQUIRE(!other->given(), "{} cannot be combined with {}", label_, other->label_);
  }
}

}  // namespace twell
