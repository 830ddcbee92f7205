// SPDX-License-Identifier: Apache-2.0
// Any bytes as JSON: this reader takes what the parser of nlohmann takes, with the same values, but
// for texts that are nested too deeply, hold a byte of value 0, or repeat a key where keys are
// unique.
#include "twell/base/json.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "twell/base/error.h"

namespace twell {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr int kDepth = 8;

// What the rules beside the grammar ask for, from the events of nlohmann's parser.
class Shape {
 public:
  bool null() { return true; }
  bool boolean(bool) { return true; }
  bool number_integer(int64_t) { return true; }
  bool number_unsigned(uint64_t) { return true; }
  bool number_float(double, const std::string&) { return true; }
  bool string(std::string&) { return true; }
  bool binary(json::binary_t&) { return true; }
  bool start_object(size_t) { return enter(); }
  bool start_array(size_t) { return enter(); }
  bool end_object() { return leave(); }
  bool end_array() { return leave(); }
  bool key(std::string& name) {
    repeats = !keys_.back().insert(name).second || repeats;
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) { return false; }

  size_t depth = 0;
  bool repeats = false;

 private:
  bool enter() {
    keys_.emplace_back();
    depth = std::max(depth, keys_.size());
    return true;
  }
  bool leave() {
    keys_.pop_back();
    return true;
  }
  std::vector<std::set<std::string>> keys_;
};

template <typename Parse>
auto parsed(const Parse& parse) -> std::optional<decltype(parse())> {
  try {
    return parse();
  } catch (const InputError&) {
    return std::nullopt;
  }
}

void run(std::string_view text) {
  Shape shape;
  const bool is_json =
      json::sax_parse(text.begin(), text.end(), &shape) && text.find('\0') == text.npos;
  const bool is_kept = is_json && shape.depth <= kDepth;
  for (const JsonKeys keys : {JsonKeys::kUnique, JsonKeys::kLast}) {
    const JsonLimits limits{.depth = kDepth, .keys = keys};
    const bool expected = is_kept && (keys == JsonKeys::kLast || !shape.repeats);
    const auto value = parsed([&] { return parse_json(text, "text", limits); });
    const auto ordered = parsed([&] { return parse_ordered_json(text, "text", limits); });
    const auto field = parsed([&] { return parse_json_field(text, "a", "text", limits); });
    TWELL_CHECK(value.has_value() == expected, "taken: {}", value.has_value());
    TWELL_CHECK(ordered.has_value() == expected, "taken in order: {}", ordered.has_value());
    if (!expected) {
      TWELL_CHECK(!field || is_kept, "a field of what is no JSON");
      continue;
    }
    TWELL_CHECK(*value == json::parse(text), "another value");
    TWELL_CHECK(*ordered == ordered_json::parse(text), "another value in order");
    TWELL_CHECK(field.has_value() == value->is_object(), "field taken: {}", field.has_value());
    if (field) TWELL_CHECK(*field == (value->contains("a") ? value->at("a") : json()), "field");
    ordered_json kept = *ordered;
    if (!kept.is_object()) continue;
    erase_keys(kept, [](const std::string& key) { return key == "a"; });
    ordered_json expected_rest = *ordered;
    expected_rest.erase("a");
    TWELL_CHECK(kept == expected_rest, "another rest");
  }
}

}  // namespace
}  // namespace twell

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  twell::run({reinterpret_cast<const char*>(data), size});
  return 0;
}
