// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/json.h"

#include <set>
#include <vector>

#include "twell/base/error.h"

namespace twell {
namespace {

// The library's own message without its "[json.exception...] " tag.
std::string_view without_tag(std::string_view message) {
  const size_t end = message.find("] ");
  return end == std::string_view::npos ? message : message.substr(end + 2);
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
  } catch (const json::exception& error) {
    throw InputError(fmt::format("{}: not valid JSON: {}", source, without_tag(error.what())));
  }
}

}  // namespace twell
