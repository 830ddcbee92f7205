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

constexpr int64_t kMaxSteps = 10'000'000;        // expressions, statements, items
constexpr size_t kMaxBytes = size_t{256} << 20;  // of texts and values, read and written
constexpr int kMaxCalls = 1500;  // of expressions and statements inside each other, with macros

class Budget {
 public:
  void step() {
    TWELL_REQUIRE(++steps_ <= kMaxSteps, "the template does not come to an end in {} steps",
                  kMaxSteps);
  }
  void steps(size_t count) {
    TWELL_REQUIRE(
        count <= size_t{kMaxSteps} && (steps_ += static_cast<int64_t>(count)) <= kMaxSteps,
        "the template does not come to an end in {} steps", kMaxSteps);
  }
  void bytes(size_t count) {
    TWELL_REQUIRE(count <= kMaxBytes - bytes_, "the template handles more than {} MiB of text",
                  kMaxBytes >> 20);
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
  int64_t steps_ = 0;
  size_t bytes_ = 0;
  int levels_ = 0;
};

}  // namespace twell::jinja
