// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "twell/base/error.h"

namespace twell {
namespace {

// The position of a byte as "line 3, column 14", counted from 1.
std::string place_of(std::string_view text, size_t byte) {
  const std::string_view before = text.substr(0, byte > 0 ? byte - 1 : 0);
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const size_t line_begin = before.rfind('\n') + 1;  // 0 when there is none
  return fmt::format("line {}, column {}", line, before.size() - line_begin + 1);
}

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& source, int max_depth) {
  using nlohmann::json;
  using Event = json::parse_event_t;
  std::vector<std::set<std::string>> keys;  // of the objects being read, outermost first
  const auto check = [&](int depth, Event event, json& parsed) {
    TWELL_REQUIRE(depth <= max_depth, "{}: JSON nested more than {} levels deep", source,
                  max_depth);
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      TWELL_REQUIRE(keys.back().insert(key).second, "{}: the key \"{}\" appears twice", source,
                    key);
    }
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const json::parse_error& error) {
    throw InputError(fmt::format("{}: not valid JSON at {}", source, place_of(text, error.byte)));
  } catch (const json::exception&) {
    throw InputError(fmt::format("{}: not valid JSON: a number is too large", source));
  }
}

}  // namespace twell
