// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja/arguments.h"

#include <algorithm>

#include "twell/base/error.h"

namespace twell::jinja {
namespace {

struct Accepted {
  std::string_view name;
  bool optional = false;
  bool by_position = true;
  bool by_name = true;
};

std::vector<Accepted> parse_parameters(std::string_view text) {
  std::vector<Accepted> out;
  bool by_position = true;
  while (!text.empty()) {
    const size_t end = std::min(text.find(' '), text.size());
    std::string_view word = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (word == "/") {
      for (Accepted& parameter : out) parameter.by_name = false;
    } else if (word == "*") {
      by_position = false;
    } else {
      const bool optional = word.ends_with('?');
      if (optional) word.remove_suffix(1);
      out.push_back({word, optional, by_position, true});
    }
  }
  return out;
}

}  // namespace

Matched match(std::string_view callee, std::string_view parameters, const Arguments& arguments) {
  const std::vector<Accepted> known = parse_parameters(parameters);
  Matched out(known.size(), nullptr);
  const auto positions = static_cast<size_t>(
      std::count_if(known.begin(), known.end(), [](const Accepted& p) { return p.by_position; }));
  TWELL_REQUIRE(arguments.positional.size() <= positions, "{} takes {} arguments, not {}", callee,
                positions, arguments.positional.size());
  for (size_t i = 0; i < arguments.positional.size(); ++i) out[i] = &arguments.positional[i];
  for (const auto& argument : arguments.named) {
    const std::string& name = argument.first;
    const auto found = std::find_if(known.begin(), known.end(),
                                    [&](const Accepted& p) { return p.by_name && p.name == name; });
    TWELL_REQUIRE(found != known.end(), "{} knows no argument '{}'", callee, name);
    const Value*& place = out[static_cast<size_t>(found - known.begin())];
    TWELL_REQUIRE(place == nullptr, "{} is given '{}' twice", callee, name);
    place = &argument.second;
  }
  for (size_t i = 0; i < known.size(); ++i) {
    TWELL_REQUIRE(out[i] != nullptr || known[i].optional, "{} lacks the argument '{}'", callee,
                  known[i].name);
  }
  return out;
}

}  // namespace twell::jinja
