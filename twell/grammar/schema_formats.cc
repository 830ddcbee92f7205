// SPDX-License-Identifier: Apache-2.0
#include "twell/grammar/schema_formats.h"

#include <map>
#include <set>

namespace twell::json_schema {
namespace {

// What the library writes.
const std::set<std::string_view> kOfLibrary = {
    "email",        "duration",     "ipv6",
    "uuid",         "uri",          "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer"};

// Years from 1 on, because year 0 is none for many readers. The 29th of February has years that are
// multiples of 4, of the whole centuries those of 400.
std::string date() {
  const std::string year = "(000[1-9]|00[1-9]\\d|0[1-9]\\d{2}|[1-9]\\d{3})";
  const std::string leap =
      "(\\d{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)";
  const std::string day =
      "((0[13578]|1[02])-(0[1-9]|[12]\\d|3[01])|(0[469]|11)-(0[1-9]|[12]\\d|30)|"
      "02-(0[1-9]|1\\d|2[0-8]))";
  return "(" + year + "-" + day + "|" + leap + "-02-29)";
}

// Without leap seconds, which only some minutes have.
std::string time() {
  return "([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,9})?(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d)";
}

// Labels have at most 63 characters and the name 253; two hyphens in a row may mean another script.
// So a name has up to three labels of 63 or seven of 31, with hyphens for at most every other one.
std::string hostname() {
  const std::string one = "[a-zA-Z0-9]", more = "([a-zA-Z0-9]|-[a-zA-Z0-9])";
  const std::string label = "(" + one + "{1,63}|" + one + more + "{0,31})";
  const std::string short_label = "(" + one + "{1,31}|" + one + more + "{0,15})";
  return "(" + label + "(\\." + label + "){0,2}|" + short_label + "(\\." + short_label + "){0,6})";
}

std::string ipv4() {
  const std::string byte = "(25[0-5]|2[0-4]\\d|1\\d{2}|[1-9]\\d|\\d)";
  return "(" + byte + "\\.){3}" + byte;
}

}  // namespace

bool is_known_format(std::string_view format) {
  return kOfLibrary.contains(format) || pattern_of_format(format);
}

std::optional<std::string> pattern_of_format(std::string_view format) {
  static const std::map<std::string_view, std::string> patterns = {
      {"date", date()},
      {"time", time()},
      {"date-time", date() + "T" + time()},
      {"hostname", hostname()},
      {"ipv4", ipv4()}};
  const auto found = patterns.find(format);
  if (found == patterns.end()) return std::nullopt;
  return "^" + found->second + "$";
}

}  // namespace twell::json_schema
