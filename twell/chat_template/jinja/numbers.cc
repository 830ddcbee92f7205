// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja/numbers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "twell/base/error.h"

namespace twell::jinja {
namespace {

constexpr Integer kLargest = ~(Integer{1} << 126 << 1);  // 2^127 - 1

[[noreturn]] void too_large(std::string_view sign, Integer x, Integer y) {
  throw InputError(fmt::format("{} {} {} is too large", x, sign, y));
}

// Python rounds the quotient down, and the remainder has the divisor's sign.
Value divided(std::string_view sign, Integer x, Integer y) {
  TWELL_REQUIRE(y != 0, "{} {} {}: division by zero", x, sign, y);
  if (sign == "/") return Value::of(static_cast<double>(x) / static_cast<double>(y));
  if (y == -1) {  // the smallest number divided by -1 overflows
    if (sign == "//" && x == -kLargest - 1) too_large(sign, x, y);
    return Value::of(sign == "%" ? Integer{0} : -x);
  }
  const bool inexact_down = x % y != 0 && (x % y < 0) != (y < 0);
  if (sign == "%") return Value::of(x % y + (inexact_down ? y : 0));
  return Value::of(x / y - (inexact_down ? 1 : 0));
}

Value power(Integer x, Integer y) {
  if (y < 0) {
    TWELL_REQUIRE(x != 0, "0 ** {}: division by zero", y);
    return Value::of(std::pow(static_cast<double>(x), static_cast<double>(y)));
  }
  if (x == 0 || x == 1) return Value::of(y == 0 ? Integer{1} : x);
  if (x == -1) return Value::of(Integer{y % 2 == 0 ? 1 : -1});
  Integer out = 1;
  for (Integer i = 0; i < y; ++i) {
    if (__builtin_mul_overflow(out, x, &out)) too_large("**", x, y);
  }
  return Value::of(out);
}

Value of_integers(std::string_view sign, Integer x, Integer y) {
  Integer out = 0;
  bool overflow = false;
  if (sign == "+") {
    overflow = __builtin_add_overflow(x, y, &out);
  } else if (sign == "-") {
    overflow = __builtin_sub_overflow(x, y, &out);
  } else if (sign == "*") {
    overflow = __builtin_mul_overflow(x, y, &out);
  } else {
    return sign == "**" ? power(x, y) : divided(sign, x, y);
  }
  if (overflow) too_large(sign, x, y);
  return Value::of(out);
}

Value of_reals(std::string_view sign, double x, double y) {
  if (sign == "+") return Value::of(x + y);
  if (sign == "-") return Value::of(x - y);
  if (sign == "*") return Value::of(x * y);
  if (sign == "**") {
    TWELL_REQUIRE(x != 0.0 || y >= 0.0, "0 ** {}: division by zero", y);
    const double out = std::pow(x, y);
    TWELL_REQUIRE(!std::isnan(out) || std::isnan(x) || std::isnan(y), "{} ** {} is not real", x, y);
    TWELL_REQUIRE(!std::isinf(out) || std::isinf(x) || std::isinf(y), "{} ** {} is too large", x,
                  y);
    return Value::of(out);
  }
  TWELL_REQUIRE(y != 0.0, "{} {} {}: division by zero", x, sign, y);
  if (sign == "/") return Value::of(x / y);
  double rest = std::fmod(x, y);
  double quotient = (x - rest) / y;
  if (rest != 0.0) {
    if ((y < 0.0) != (rest < 0.0)) {
      rest += y;
      quotient -= 1.0;
    }
  } else {
    rest = std::copysign(0.0, y);
  }
  if (sign == "%") return Value::of(rest);
  if (quotient == 0.0) return Value::of(std::copysign(0.0, x / y));
  const double whole = std::floor(quotient);
  return Value::of(quotient - whole > 0.5 ? whole + 1.0 : whole);
}

int digit_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char lower = static_cast<char>(c | 0x20);
  return lower >= 'a' && lower <= 'z' ? lower - 'a' + 10 : 36;
}

// Removes underscores between digits; false where they stand elsewhere.
bool without_underscores(std::string_view text, std::string& out) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '_') {
      out += text[i];
      continue;
    }
    const bool between = i > 0 && i + 1 < text.size() && digit_value(text[i - 1]) < 36 &&
                         digit_value(text[i + 1]) < 36;
    if (!between) return false;
  }
  return true;
}

}  // namespace

double as_real(const Value& number) {
  if (number.real() != nullptr) return *number.real();
  return number.boolean() != nullptr ? (*number.boolean() ? 1.0 : 0.0)
                                     : static_cast<double>(*number.integer());
}

Value calculated(std::string_view sign, const Value& a, const Value& b) {
  if (a.real() != nullptr || b.real() != nullptr) return of_reals(sign, as_real(a), as_real(b));
  const auto whole = [](const Value& v) {
    return v.boolean() != nullptr ? Integer{*v.boolean()} : *v.integer();
  };
  return of_integers(sign, whole(a), whole(b));
}

std::string real_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string integer_text(Integer value) { return fmt::format("{}", value); }

std::optional<Integer> parse_integer(std::string_view text, int base) {
  bool negative = false;
  if (!text.empty() && (text[0] == '-' || text[0] == '+')) {
    negative = text[0] == '-';
    text.remove_prefix(1);
  }
  if (text.size() > 2 && text[0] == '0') {
    const char mark = static_cast<char>(text[1] | 0x20);
    const int marked = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 0;
    if (marked != 0 && (base == marked || base == 0)) {
      base = marked;
      text.remove_prefix(text[2] == '_' ? 3 : 2);
    }
  }
  std::string digits;
  if (text.empty() || !without_underscores(text, digits)) return std::nullopt;
  if (base == 0) {
    base = 10;
    const bool zeros = digits.find_first_not_of('0') == std::string::npos;
    if (digits[0] == '0' && !zeros) return std::nullopt;
  }
  Integer out = 0;
  for (const char c : digits) {
    const int digit = digit_value(c);
    if (digit >= base) return std::nullopt;
    const bool overflow = __builtin_mul_overflow(out, Integer{base}, &out) ||
                          __builtin_add_overflow(out, digit, &out);
    TWELL_REQUIRE(!overflow, "the number {} is too large", text.substr(0, 60));
  }
  return negative ? -out : out;
}

std::optional<double> parse_real(std::string_view text) {
  std::string digits;
  if (!without_underscores(text, digits)) return std::nullopt;
  std::string lower = digits;
  for (char& c : lower) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c);
  const std::string_view name = std::string_view(lower).substr(
      !lower.empty() && (lower[0] == '-' || lower[0] == '+') ? 1 : 0);
  const bool named = name == "inf" || name == "infinity" || name == "nan";
  const bool plain = digits.find_first_not_of("0123456789.eE+-") == std::string::npos;
  if (digits.empty() || (!named && !plain)) return std::nullopt;
  char* end = nullptr;
  const double out = std::strtod(digits.c_str(), &end);
  if (end != digits.c_str() + digits.size()) return std::nullopt;
  return out;
}

Integer truncated(double value) {
  TWELL_REQUIRE(std::isfinite(value), "{} is no whole number", value);
  TWELL_REQUIRE(std::abs(value) < 0x1p126, "{} is too large for a whole number", value);
  return static_cast<Integer>(value);
}

double rounded(double value, int64_t digits) {
  if (!std::isfinite(value)) return value;
  constexpr int64_t kAllDigits = 330;  // behind the point of any double that round() can change
  if (digits > kAllDigits) return value;
  if (digits < -kAllDigits) return std::copysign(0.0, value);
  if (digits >= 0) return std::strtod(fmt::format("{:.{}f}", value, digits).c_str(), nullptr);
  const double unit = std::pow(10.0, static_cast<double>(-digits));
  return std::nearbyint(value / unit) * unit;
}

}  // namespace twell::jinja
