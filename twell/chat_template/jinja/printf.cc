// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja/printf.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "twell/chat_template/jinja/access.h"
#include "twell/chat_template/jinja/numbers.h"
#include "twell/chat_template/jinja/operators.h"
#include "twell/chat_template/jinja/text.h"
#include "twell/chat_template/jinja/write.h"

namespace twell::jinja {
namespace {

constexpr int64_t kMostDigits = 1000;  // behind the point, of a formatted number

// How a value is written, of either language.
struct Spec {
  std::string fill = " ";
  char align = 0;  // <, >, ^, or = (between sign and digits); 0: the type's
  char sign = '-';
  bool alternate = false;
  int64_t width = 0;
  char grouping = 0;
  std::optional<int64_t> precision;
  char type = 0;
};

std::string padded(Budget& budget, std::string_view sign, std::string_view body, const Spec& spec,
                   char align) {
  const int64_t size = count_code_points(sign) + count_code_points(body);
  const int64_t missing = std::max<int64_t>(spec.width - size, 0);
  TWELL_REQUIRE(missing <= static_cast<int64_t>(kMaxBytes), "a width of {} is too long",
                spec.width);
  const int64_t left = align == '<' ? 0 : align == '^' ? missing / 2 : missing;
  std::string out;
  const auto pad = [&](int64_t count) {
    budget.bytes(static_cast<size_t>(count) * spec.fill.size());
    for (int64_t i = 0; i < count; ++i) out += spec.fill;
  };
  if (align == '=') budget.append(out, sign);
  pad(left);
  if (align != '=') budget.append(out, sign);
  budget.append(out, body);
  pad(missing - left);
  return out;
}

// Groups the digits in front of the point; zeros that fill the width are grouped too.
std::string grouped(std::string digits, const Spec& spec) {
  if (spec.grouping == 0) return digits;
  const int every = spec.grouping == '_' && (spec.type == 'x' || spec.type == 'X' ||
                                             spec.type == 'o' || spec.type == 'b')
                        ? 4
                        : 3;
  size_t end = 0;
  while (end < digits.size() && (std::isalnum(static_cast<unsigned char>(digits[end])) != 0)) ++end;
  for (size_t at = end; at > static_cast<size_t>(every);) {
    at -= static_cast<size_t>(every);
    digits.insert(at, 1, spec.grouping);
  }
  return digits;
}

std::string_view sign_of(bool negative, const Spec& spec) {
  return negative ? "-" : spec.sign == '+' ? "+" : spec.sign == ' ' ? " " : "";
}

std::string integer_digits(Integer value, char type) {
  std::string out;
  const int base = type == 'x' || type == 'X' ? 16 : type == 'o' ? 8 : type == 'b' ? 2 : 10;
  const char* digits = type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef";
  do {
    const int digit = static_cast<int>(value % base);
    out += digits[digit < 0 ? -digit : digit];
    value /= base;
  } while (value != 0);
  std::reverse(out.begin(), out.end());
  return out;
}

std::string written_integer(Budget& budget, Integer value, const Spec& spec) {
  std::string sign(sign_of(value < 0, spec));
  std::string digits = integer_digits(value, spec.type);
  if (spec.precision && static_cast<int64_t>(digits.size()) < *spec.precision) {
    digits.insert(0, static_cast<size_t>(*spec.precision) - digits.size(), '0');
  }
  if (spec.alternate &&
      (spec.type == 'x' || spec.type == 'X' || spec.type == 'o' || spec.type == 'b')) {
    sign += '0';
    sign += spec.type;
  }
  return padded(budget, sign, grouped(digits, spec), spec, spec.align == 0 ? '>' : spec.align);
}

std::string written_real(Budget& budget, double value, const Spec& spec) {
  const int64_t precision = spec.precision.value_or(6);
  TWELL_REQUIRE(precision <= kMostDigits, "{} digits behind the point are too many", precision);
  const bool negative = std::signbit(value) && !std::isnan(value);
  const double size = std::abs(value);
  std::string body;
  switch (spec.type) {
    case 0:
      if (spec.precision) {
        body = fmt::format("{:.{}g}", size, std::max<int64_t>(precision, 1));
        if (body.find_first_of(".en") == std::string::npos) body += ".0";
      } else {
        body = real_text(size);
      }
      break;
    case '%':
      body = fmt::format("{:.{}f}%", size * 100.0, precision);
      break;
    case 'e':
    case 'E':
      body = spec.alternate ? fmt::format("{:#.{}e}", size, precision)
                            : fmt::format("{:.{}e}", size, precision);
      break;
    case 'g':
    case 'G':
    case 'n':
      body = spec.alternate ? fmt::format("{:#.{}g}", size, std::max<int64_t>(precision, 1))
                            : fmt::format("{:.{}g}", size, std::max<int64_t>(precision, 1));
      break;
    default:
      body = spec.alternate ? fmt::format("{:#.{}f}", size, precision)
                            : fmt::format("{:.{}f}", size, precision);
  }
  if (spec.type == 'E' || spec.type == 'G' || spec.type == 'F') {
    for (char& c : body) c = static_cast<char>(c >= 'a' && c <= 'z' ? c - 32 : c);
  }
  return padded(budget, sign_of(negative, spec), grouped(body, spec), spec,
                spec.align == 0 ? '>' : spec.align);
}

std::string written_text(Budget& budget, std::string_view text, const Spec& spec,
                         char usual_align) {
  if (spec.precision && count_code_points(text) > *spec.precision) {
    size_t end = 0;
    for (int64_t i = 0; i < *spec.precision; ++i) next_code_point(text, end);
    text = text.substr(0, end);
  }
  return padded(budget, "", text, spec, spec.align == 0 ? usual_align : spec.align);
}

std::string written_character(Budget& budget, const Value& value) {
  if (value.text() != nullptr && count_code_points(*value.text()) == 1) return *value.text();
  const Integer code = want_integer(budget, value, "%c");
  TWELL_REQUIRE(code >= 0 && code < 0x110000 && (code < 0xd800 || code > 0xdfff),
                "{} is no character", code);
  std::string out;
  append_code_point(out, static_cast<CodePoint>(code));
  return out;
}

// ---- text % values

class Printf {
 public:
  Printf(Budget& budget, std::string_view format, const Value& values)
      : budget_(budget),
        format_(format),
        values_(values),
        keyed_(values.dict() != nullptr || values.range() != nullptr ||
               (values.list() != nullptr && !values.is_tuple())) {}

  std::string run() {
    while (at_ < format_.size()) {
      const size_t mark = std::min(format_.find('%', at_), format_.size());
      budget_.append(out_, format_.substr(at_, mark - at_));
      at_ = mark;
      if (at_ < format_.size()) conversion();
    }
    const bool all = values_.is_tuple() ? used_ == values_.list()->items.size() : used_ == 1;
    TWELL_REQUIRE(all || keyed_, "% is given more values than its text {} has places",
                  shown(budget_, budget_.text(std::string(format_))));
    return std::move(out_);
  }

 private:
  char peek() const {
    TWELL_REQUIRE(at_ < format_.size(), "the format ends inside a conversion");
    return format_[at_];
  }

  const Value& next_value() {
    if (values_.is_tuple()) {
      TWELL_REQUIRE(used_ < values_.list()->items.size(), "% is given too few values");
      return values_.list()->items[used_++];
    }
    TWELL_REQUIRE(used_++ == 0, "% is given too few values");
    return values_;
  }

  int64_t number() {
    if (peek() == '*') {
      ++at_;
      return want_count(budget_, next_value(), "the * of a format");
    }
    int64_t out = 0;
    for (; peek() >= '0' && peek() <= '9'; ++at_) {
      out = out * 10 + (peek() - '0');
      TWELL_REQUIRE(out <= static_cast<int64_t>(kMaxBytes), "a width of {} is too long", out);
    }
    return out;
  }

  void flags(Spec& spec) {
    for (;; ++at_) {
      switch (peek()) {
        case '-':
          spec.align = '<';
          break;
        case '+':
          spec.sign = '+';
          break;
        case ' ':
          if (spec.sign != '+') spec.sign = ' ';
          break;
        case '#':
          spec.alternate = true;
          break;
        case '0':
          if (spec.align == 0) spec.align = '=';
          break;
        default:
          return;
      }
    }
  }

  void conversion() {
    ++at_;
    const Value* keyed_value = nullptr;
    if (peek() == '(') {
      const size_t close = format_.find(')', at_);
      TWELL_REQUIRE(close != std::string_view::npos && values_.dict() != nullptr,
                    "%( needs its end and a dictionary");
      keyed_value = values_.dict()->find(format_.substr(at_ + 1, close - at_ - 1));
      TWELL_REQUIRE(keyed_value != nullptr, "% is not given '{}'",
                    format_.substr(at_ + 1, close - at_ - 1));
      at_ = close + 1;
    }
    Spec spec;
    flags(spec);
    spec.width = number();
    if (spec.width < 0) {
      spec.width = -spec.width;
      spec.align = '<';
    }
    if (peek() == '.') {
      ++at_;
      spec.precision = std::max<int64_t>(number(), 0);
      TWELL_REQUIRE(*spec.precision <= static_cast<int64_t>(kMaxBytes), "a precision is too large");
    }
    while (peek() == 'h' || peek() == 'l' || peek() == 'L') ++at_;
    spec.type = format_[at_++];
    if (spec.type == '%') return budget_.append(out_, "%");
    write(spec, keyed_value != nullptr ? *keyed_value : next_value());
  }

  void write(Spec& spec, const Value& value) {
    const bool zeros = spec.align == '=';
    switch (spec.type) {
      case 's':
      case 'r':
      case 'a': {
        if (zeros) spec.align = 0;
        std::string text;
        if (spec.type == 's') {
          append_str(budget_, value, text);
        } else if (spec.type == 'r') {
          append_repr(budget_, value, text);
        } else {
          text = ascii_repr(budget_, value);
        }
        return budget_.append(out_, written_text(budget_, text, spec, '>'));
      }
      case 'c':
        if (zeros) spec.align = 0;
        return budget_.append(out_,
                              written_text(budget_, written_character(budget_, value), spec, '>'));
      case 'd':
      case 'i':
      case 'u':
      case 'x':
      case 'X':
      case 'o': {
        const bool decimal = spec.type == 'd' || spec.type == 'i' || spec.type == 'u';
        require_defined(value);
        if (zeros) spec.fill = "0";
        TWELL_REQUIRE(!spec.precision || *spec.precision <= kMostDigits, "too many digits");
        const Integer number = decimal && value.real() != nullptr
                                   ? truncated(*value.real())
                                   : want_integer(budget_, value, "a conversion of %");
        return budget_.append(out_, written_integer(budget_, number, spec));
      }
      case 'e':
      case 'E':
      case 'f':
      case 'F':
      case 'g':
      case 'G':
        require_defined(value);
        TWELL_REQUIRE(value.is_number(), "a conversion of % needs a number, not {}",
                      shown(budget_, value));
        if (zeros) spec.fill = "0";
        return budget_.append(out_, written_real(budget_, as_real(value), spec));
      default:
        throw InputError(fmt::format("% knows no conversion '{}'", spec.type));
    }
  }

  Budget& budget_;
  std::string_view format_;
  const Value& values_;
  bool keyed_;
  size_t at_ = 0;
  size_t used_ = 0;
  std::string out_;
};

// ---- str.format()

Spec parse_spec(std::string_view text) {
  Spec spec;
  size_t at = 0;
  const auto is_align = [&](size_t i) {
    return i < text.size() && std::string_view("<>=^").find(text[i]) != std::string_view::npos;
  };
  size_t behind = 0;
  if (!text.empty()) next_code_point(text, behind);
  if (behind > 0 && is_align(behind)) {
    spec.fill = text.substr(0, behind);
    spec.align = text[behind];
    at = behind + 1;
  } else if (is_align(0)) {
    spec.align = text[at++];
  }
  const auto take = [&](char c) { return at < text.size() && text[at] == c && (++at, true); };
  if (at < text.size() && std::string_view("+- ").find(text[at]) != std::string_view::npos) {
    spec.sign = text[at++];
  }
  spec.alternate = take('#');
  if (take('0') && spec.align == 0) {
    spec.align = '=';
    spec.fill = "0";
  }
  const auto digits = [&]() {
    int64_t out = 0;
    for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at) {
      out = out * 10 + (text[at] - '0');
      TWELL_REQUIRE(out <= static_cast<int64_t>(kMaxBytes), "a width of {} is too long", out);
    }
    return out;
  };
  spec.width = digits();
  if (at < text.size() && (text[at] == ',' || text[at] == '_')) spec.grouping = text[at++];
  if (take('.')) spec.precision = digits();
  if (at < text.size()) spec.type = text[at++];
  TWELL_REQUIRE(at == text.size(), "the format '{}' is not understood", text);
  return spec;
}

class Formatter {
 public:
  Formatter(Budget& budget, const Arguments& arguments) : budget_(budget), arguments_(arguments) {}

  std::string run(std::string_view format, int depth) {
    TWELL_REQUIRE(depth < 2, "a format inside a format inside a format");
    std::string out;
    for (size_t at = 0; at < format.size();) {
      const size_t mark = std::min(format.find_first_of("{}", at), format.size());
      budget_.append(out, format.substr(at, mark - at));
      if (mark == format.size()) break;
      if (mark + 1 < format.size() && format[mark + 1] == format[mark]) {
        budget_.append(out, 1, format[mark]);
        at = mark + 2;
        continue;
      }
      TWELL_REQUIRE(format[mark] == '{', "a '}}' without its beginning in a format");
      const size_t end = field_end(format, mark + 1);
      field(format.substr(mark + 1, end - mark - 1), depth, out);
      at = end + 1;
    }
    return out;
  }

 private:
  static size_t field_end(std::string_view format, size_t at) {
    int depth = 1;
    for (; at < format.size(); ++at) {
      depth += (format[at] == '{') - (format[at] == '}');
      if (depth == 0) return at;
    }
    throw InputError("a '{' without its end in a format");
  }

  void field(std::string_view text, int depth, std::string& out) {
    const size_t colon = std::min(text.find(':'), text.size());
    std::string_view name = text.substr(0, colon);
    char conversion = 0;
    if (name.size() >= 2 && name[name.size() - 2] == '!') {
      conversion = name.back();
      name.remove_suffix(2);
    }
    Value value = look_up(name);  // before the fields of its format, which are counted behind it
    const std::string spec =
        colon < text.size() ? run(text.substr(colon + 1), depth + 1) : std::string();
    if (conversion == 'r') {
      std::string written;
      append_repr(budget_, value, written);
      value = budget_.text(written);
    } else if (conversion == 's') {
      value = budget_.text(to_text(budget_, value));
    } else if (conversion == 'a') {
      value = budget_.text(ascii_repr(budget_, value));
    } else {
      TWELL_REQUIRE(conversion == 0, "a format knows no conversion '{}'", conversion);
    }
    budget_.append(out, format_value(budget_, value, spec));
  }

  // name, .attribute and [index], as in "0.role" or "m[content]".
  Value look_up(std::string_view name) {
    size_t at = std::min(name.find_first_of(".["), name.size());
    Value value = first(name.substr(0, at));
    while (at < name.size()) {
      if (name[at] == '.') {
        const size_t end = std::min(name.find_first_of(".[", at + 1), name.size());
        value = get_attribute(budget_, value, name.substr(at + 1, end - at - 1));
        at = end;
      } else {
        const size_t end = name.find(']', at);
        TWELL_REQUIRE(name[at] == '[' && end != std::string_view::npos,
                      "the field '{}' of a format is not understood", name);
        const std::string_view key = name.substr(at + 1, end - at - 1);
        const bool number = !key.empty() && key.size() < 10 &&
                            key.find_first_not_of("0123456789") == std::string_view::npos;
        value =
            get_item(budget_, value,
                     number ? Value::of(*parse_integer(key, 10)) : budget_.text(std::string(key)));
        at = end + 1;
      }
    }
    return value;
  }

  Value first(std::string_view name) {
    const bool number = name.find_first_not_of("0123456789") == std::string_view::npos;
    if (number) {
      TWELL_REQUIRE(name.size() < 10, "the field '{}' of a format is too large", name);
      const size_t at = name.empty() ? next_++ : static_cast<size_t>(*parse_integer(name, 10));
      TWELL_REQUIRE(at < arguments_.positional.size(), "format() is given too few values");
      return arguments_.positional[at];
    }
    for (const auto& [key, value] : arguments_.named) {
      if (key == name) return value;
    }
    throw InputError(fmt::format("format() is not given '{}'", name));
  }

  Budget& budget_;
  const Arguments& arguments_;
  size_t next_ = 0;
};

}  // namespace

std::string format_value(Budget& budget, const Value& value, std::string_view spec_text) {
  if (spec_text.empty()) return to_text(budget, value);
  Spec spec = parse_spec(spec_text);
  const auto unknown = [&] {
    throw InputError(fmt::format("the format '{}' is not for {}", spec_text, type_name(value)));
  };
  if (value.text() != nullptr) {
    if ((spec.type != 0 && spec.type != 's') || spec.align == '=' || spec.grouping != 0) unknown();
    return written_text(budget, *value.text(), spec, '<');
  }
  constexpr std::string_view kReal = "eEfFgG%";
  const bool real = value.real() != nullptr || kReal.find(spec.type) != std::string_view::npos;
  if (!value.is_number()) unknown();
  if (real && (spec.type != 0 || value.real() != nullptr)) {
    if (spec.type != 0 && spec.type != 'n' && kReal.find(spec.type) == std::string_view::npos) {
      unknown();
    }
    return written_real(budget, as_real(value), spec);
  }
  if (spec.precision) unknown();
  if (spec.type == 'c') {
    return written_text(budget, written_character(budget, value), spec, '<');
  }
  constexpr std::string_view kInteger = "bdnoxX";
  if (spec.type != 0 && kInteger.find(spec.type) == std::string_view::npos) unknown();
  return written_integer(budget, want_integer(budget, value, "a format"), spec);
}

Value printf_text(Budget& budget, const Value& format, const Value& values) {
  return budget.text(Printf(budget, *format.text(), values).run(), format.is_markup());
}

Value format_text(Budget& budget, const Value& format, const Arguments& arguments) {
  return budget.text(Formatter(budget, arguments).run(*format.text(), 0), format.is_markup());
}

}  // namespace twell::jinja
