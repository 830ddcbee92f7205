// SPDX-License-Identifier: Apache-2.0
#include "twell/base/json.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/json_fields.h"
#include "twell/base/utf8.h"

namespace twell {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// Reads the text and tells how far: nlohmann's parser tells its position only with its own errors.
class JsonCursor {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  JsonCursor(const char* at, const char** furthest) : at_(at), furthest_(furthest) {}
  reference operator*() const { return *at_; }
  JsonCursor& operator++() {
    *furthest_ = ++at_;
    return *this;
  }
  JsonCursor operator++(int) {
    JsonCursor before = *this;
    ++*this;
    return before;
  }
  bool operator==(const JsonCursor& other) const { return at_ == other.at_; }
  bool operator!=(const JsonCursor& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  const char** furthest_;
};

// The keys of the objects being read. A std::map finds an equal key by itself; an ordered object is
// a list, so a table finds the place of a key in it.
class JsonObjectKeys {
 public:
  void begin() { places_.emplace_back(); }
  void end() { places_.pop_back(); }

  // Puts null under the key and returns its place; null when the key is there and must not be.
  json* put(json::object_t& object, std::string& key, JsonKeys policy) {
    const auto [place, is_new] = object.try_emplace(std::move(key));
    if (!is_new && policy == JsonKeys::kUnique) return nullptr;
    return &place->second;
  }
  ordered_json* put(ordered_json::object_t& object, std::string& key, JsonKeys policy) {
    // The object's own functions search all its keys.
    auto& list = static_cast<ordered_json::object_t::Container&>(object);
    const auto [place, is_new] = places_.back().try_emplace(key, list.size());
    if (is_new) return &list.emplace_back(std::move(key), nullptr).second;
    return policy == JsonKeys::kUnique ? nullptr : &list[place->second].second;
  }

 private:
  std::vector<std::unordered_map<std::string, size_t>> places_;  // of ordered objects
};

// Builds a value from the events of nlohmann's SAX parser. (The parser with a callback walks
// through the parent at the end of every object and array, which makes it quadratic.)
template <typename Json>
class JsonBuilder {
 public:
  // only: the key of the outermost object whose value is kept; null: all is.
  JsonBuilder(std::string_view text, const std::string& source, const JsonLimits& limits,
              const std::string* only)
      : text_(text), source_(source), limits_(limits), only_(only) {}

  Json build() {
    const auto cursor = [this](const char* at) { return JsonCursor(at, &furthest_); };
    furthest_ = text_.data();
    const char* const end = text_.data() + text_.size();
    json::sax_parse(cursor(text_.data()), cursor(end), this);
    // To the parser a NUL byte is an end.
    if (furthest_ != end || furthest_[-1] == '\0') fail(position(), "a byte of value 0");
    return std::move(root_);
  }

  bool null() { return add(nullptr); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(int64_t value) { return add(value); }
  bool number_unsigned(uint64_t value) { return add(value); }
  bool number_float(double value, const std::string&) { return add(value); }
  bool string(std::string& value) { return add(std::move(value)); }
  bool binary(json::binary_t&) { return false; }  // not in a text

  bool start_object(size_t) {
    keys_.begin();
    return enter(Json::value_t::object);
  }
  bool end_object() {
    keys_.end();
    return leave();
  }
  bool start_array(size_t) {
    if (depth_ == 0 && only_ != nullptr) not_an_object();
    return enter(Json::value_t::array);
  }
  bool end_array() { return leave(); }

  bool key(std::string& name) {
    if (skips_inside()) return true;
    if (only_ != nullptr && depth_ == 1 && name != *only_) {
      if (limits_.keys == JsonKeys::kUnique && !others_.insert(name).second) repeated(name);
      place_ = nullptr;
      return true;
    }
    std::string shown;
    if (limits_.keys == JsonKeys::kUnique) shown = name;
    place_ =
        keys_.put(*open_.back()->template get_ptr<typename Json::object_t*>(), name, limits_.keys);
    if (place_ == nullptr) repeated(shown);
    return true;
  }

  bool parse_error(size_t byte, const std::string&, const nlohmann::detail::exception& error) {
    const size_t bad = find_invalid_utf8(text_);
    if (bad < std::min(byte, text_.size())) fail(bad + 1, "bytes that are not UTF-8");
    if (error.id == 406) fail(byte, "a number too large for a double");
    if (byte > text_.size()) fail(byte, text_.empty() ? "it is empty" : "it ends early");
    fail(byte, "a syntax error");
    return false;
  }

 private:
  // Whether the parser is inside a value that is not kept.
  bool skips_inside() const { return skipped_ > 0; }

  // The place of the next value; null: it is not kept.
  Json* place() {
    if (skips_inside()) return nullptr;
    if (open_.empty()) return &root_;
    Json& parent = *open_.back();
    if (parent.is_object()) return place_;
    auto& list = *parent.template get_ptr<typename Json::array_t*>();
    return &list.emplace_back();
  }

  template <typename Value>
  bool add(Value&& value) {
    if (depth_ == 0 && only_ != nullptr) not_an_object();
    if (Json* const to = place()) *to = Json(std::forward<Value>(value));
    return true;
  }

  bool enter(typename Json::value_t kind) {
    TWELL_REQUIRE(depth_ < limits_.depth, "{}: JSON nested more than {} levels deep at {}", source_,
                  limits_.depth, place_of(position()));
    ++depth_;
    if (Json* const to = place()) {
      *to = kind;
      open_.push_back(to);
    } else {
      ++skipped_;
    }
    return true;
  }

  bool leave() {
    --depth_;
    skips_inside() ? void(--skipped_) : open_.pop_back();
    return true;
  }

  [[noreturn]] void repeated(const std::string& name) const {
    throw InputError(fmt::format("{}: the key {} appears twice, the second time at {}", source_,
                                 excerpt(name), place_of(position())));
  }
  [[noreturn]] void not_an_object() const {
    throw InputError(fmt::format("{} is not a JSON object", source_));
  }
  [[noreturn]] void fail(size_t byte, std::string_view why) const {
    TWELL_REQUIRE(!is_lfs_pointer(text_), "{}: {}", source_, kLfsAdvice);
    throw InputError(fmt::format("{}: not valid JSON at {}: {}", source_, place_of(byte), why));
  }

  // The position of the last byte that was read, from 1.
  size_t position() const { return static_cast<size_t>(furthest_ - text_.data()); }
  std::string place_of(size_t byte) const {
    byte = std::max<size_t>(byte, 1);
    if (text_.find('\n') == text_.npos) return fmt::format("byte {}", byte);
    const std::string_view before = text_.substr(0, byte - 1);
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const size_t line_begin = before.rfind('\n') + 1;  // 0 when there is none
    return fmt::format("byte {} (line {}, column {})", byte, line, before.size() - line_begin + 1);
  }

  std::string_view text_;
  const std::string& source_;
  const JsonLimits& limits_;
  const std::string* only_;
  const char* furthest_ = nullptr;
  Json root_;
  int depth_ = 0, skipped_ = 0;  // open arrays and objects; those of them that are not kept
  std::vector<Json*> open_;      // those that are, outermost first
  Json* place_ = nullptr;        // of the value of the last key
  JsonObjectKeys keys_;
  std::set<std::string> others_;  // keys that are not kept
};

}  // namespace

json parse_json(std::string_view text, const std::string& source, const JsonLimits& limits) {
  return JsonBuilder<json>(text, source, limits, nullptr).build();
}

ordered_json parse_ordered_json(std::string_view text, const std::string& source,
                                const JsonLimits& limits) {
  return JsonBuilder<ordered_json>(text, source, limits, nullptr).build();
}

void erase_keys(ordered_json& object, const std::function<bool(const std::string& key)>& gone) {
  ordered_json::object_t kept;
  auto& list = static_cast<ordered_json::object_t::Container&>(kept);
  for (auto& [key, value] : object.get_ref<ordered_json::object_t&>()) {
    if (!gone(key)) list.emplace_back(key, std::move(value));
  }
  object.get_ref<ordered_json::object_t&>() = std::move(kept);
}

json parse_json_field(std::string_view text, const std::string& field, const std::string& source,
                      const JsonLimits& limits) {
  json object = JsonBuilder<json>(text, source, limits, &field).build();
  const auto found = object.find(field);
  return found == object.end() ? json() : std::move(*found);
}

}  // namespace twell
