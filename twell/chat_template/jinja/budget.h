// SPDX-License-Identifier: Apache-2.0
// The bounds of one rendering. Templates come with downloaded models and conversations from
// strangers, so all code that reads or makes content charges its steps and bytes here before it
// does the work. InputError beyond a bound.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "twell/base/error.h"
#include "twell/chat_template/jinja/value.h"

namespace twell::jinja {

constexpr size_t kMaxBytes = size_t{256} << 20;  // of one text or list, whatever the limits
constexpr int kMaxCalls = 1500;  // of expressions and statements inside each other, with macros

struct RenderLimits {
  int64_t steps = 10'000'000;          // expressions, statements, items
  int64_t bytes = int64_t{256} << 20;  // of texts and values, read and written
};

class Budget {
 public:
  explicit Budget(const RenderLimits& limits)
      : max_steps_(limits.steps), max_bytes_(static_cast<size_t>(limits.bytes)) {}

  void step() {
    TWELL_REQUIRE(++steps_ <= max_steps_, "the template does not come to an end in {} steps",
                  max_steps_);
  }
  void steps(size_t count) {
    TWELL_REQUIRE(count <= static_cast<size_t>(max_steps_) &&
                      (steps_ += static_cast<int64_t>(count)) <= max_steps_,
                  "the template does not come to an end in {} steps", max_steps_);
  }
  void bytes(size_t count) {
    TWELL_REQUIRE(count <= max_bytes_ - bytes_, "the template handles more than {} MiB of text",
                  max_bytes_ >> 20);
    bytes_ += count;
  }

  void append(std::string& out, std::string_view part) {
    bytes(part.size());
    out += part;
  }
  void append(std::string& out, size_t count, char c) {
    bytes(count);
    out.append(count, c);
  }
  void append(std::vector<Value>& out, Value item) {
    bytes(sizeof(Value));
    out.push_back(std::move(item));
  }

  // New values, charged with their memory.
  Value text(std::string bytes, bool markup = false);
  Value list(std::vector<Value> items, ListKind kind = ListKind::kList);
  Value dict(DictBuilder builder);
  Value generator(std::unique_ptr<Iterator> items, int depth);
  Value view(const Value& dict, ViewKind kind);

  // Guards recursion; one per level.
  class Level {
   public:
    explicit Level(Budget& budget) : budget_(budget) {
      TWELL_REQUIRE(budget_.levels_ < kMaxCalls, "the template nests calls more than {} deep",
                    kMaxCalls);
      ++budget_.levels_;
    }
    ~Level() { --budget_.levels_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Budget& budget_;
  };

 private:
  const int64_t max_steps_;
  const size_t max_bytes_;
  int64_t steps_ = 0;
  size_t bytes_ = 0;
  int levels_ = 0;
};

}  // namespace twell::jinja
