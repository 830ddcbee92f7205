// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja/json_value.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/chat_template/jinja/numbers.h"

namespace twell::jinja {
namespace {

// Takes the events of the parser and builds the value without recursion.
class Builder {
 public:
  explicit Builder(std::string_view what) : what_(what) {}

  bool null() { return add(Value::none()); }
  bool boolean(bool value) { return add(Value::of(value)); }
  bool number_integer(int64_t value) { return add(Value::of(value)); }
  bool number_unsigned(uint64_t value) { return add(Value::of(static_cast<Integer>(value))); }
  bool number_float(double value, const std::string& text) {
    if (text.find_first_of(".eE") != std::string::npos) return add(Value::of(value));
    return add(Value::of(*parse_integer(text, 10)));  // beyond 64 bits
  }
  bool string(std::string& text) { return add(Value::of(std::move(text))); }
  bool binary(std::vector<std::uint8_t>& /*bytes*/) { return false; }
  bool start_object(size_t /*size*/) { return open(true); }
  bool start_array(size_t /*size*/) { return open(false); }
  bool key(std::string& text) {
    open_.back().key = std::move(text);
    return true;
  }
  bool end_object() {
    Value value = open_.back().fields.finish();
    open_.pop_back();
    return add(std::move(value));
  }
  bool end_array() {
    auto list = std::make_shared<List>(List{std::move(open_.back().items)});
    for (const Value& item : list->items) list->depth = std::max(list->depth, item.depth() + 1);
    open_.pop_back();
    return add(Value(Value::Data(std::shared_ptr<const List>(std::move(list)))));
  }
  bool parse_error(size_t position, const std::string& /*token*/,
                   const nlohmann::json::exception& /*error*/) {
    throw InputError(fmt::format("{} is not JSON; the fault is at byte {}", what_, position));
  }

  Value take() { return std::move(done_); }

 private:
  struct Open {
    bool is_object = false;
    std::string key;
    DictBuilder fields;
    std::vector<Value> items;
  };

  bool open(bool is_object) {
    TWELL_REQUIRE(open_.size() < size_t{kMaxDepth}, "{} is nested more than {} deep", what_,
                  kMaxDepth);
    open_.emplace_back().is_object = is_object;
    return true;
  }
  bool add(Value value) {
    if (open_.empty()) {
      done_ = std::move(value);
    } else if (open_.back().is_object) {
      open_.back().fields.add(Value::of(std::move(open_.back().key)), std::move(value));
    } else {
      open_.back().items.push_back(std::move(value));
    }
    return true;
  }

  std::string_view what_;
  std::vector<Open> open_;
  Value done_;
};

}  // namespace

Value parse_json(std::string_view text, std::string_view what) {
  Builder builder(what);
  nlohmann::json::sax_parse(text, &builder);
  return builder.take();
}

}  // namespace twell::jinja
