// SPDX-License-Identifier: Apache-2.0
// What templates make and use that has a state: namespaces, loops, and the like.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "twell/chat_template/jinja/arguments.h"
#include "twell/chat_template/jinja/budget.h"

namespace twell::jinja {

// Owns the objects of a rendering, which may refer to each other.
class Heap {
 public:
  explicit Heap(Budget& budget) : budget_(budget) {}
  template <typename T, typename... Arguments>
  T* make(Arguments&&... arguments) {
    budget_.bytes(sizeof(T) + 2 * sizeof(void*));
    auto object = std::make_unique<T>(std::forward<Arguments>(arguments)...);
    T* out = object.get();
    objects_.push_back(std::move(object));
    return out;
  }

 private:
  Budget& budget_;
  std::vector<std::unique_ptr<Object>> objects_;
};

// Its fields can be set, so that an assignment inside a loop is visible outside.
class Namespace : public Object {
 public:
  const char* type() const override { return "Namespace"; }
  bool find(Budget& budget, const std::string& name, Value& found) override;
  std::string repr(Budget& budget, int depth) override;
  void set(Budget& budget, const std::string& name, Value value);

 private:
  std::map<std::string, Value, std::less<>> fields_;
  std::vector<std::string> order_;
};

// The variable `loop`. It takes items from an iterator one ahead where the template asks for what
// comes next.
class Loop : public Object {
 public:
  // source: what is looped over, for its length; an undefined value when a condition filters it.
  Loop(Value source, std::unique_ptr<Iterator> items, bool filtered, int depth0)
      : source_(std::move(source)),
        items_(std::move(items)),
        filtered_(filtered),
        depth0_(depth0) {}

  bool next(Value& item);
  void finish();  // drops what is left
  int depth0() const { return depth0_; }

  const char* type() const override { return "LoopContext"; }
  bool find(Budget& budget, const std::string& name, Value& found) override;
  bool callable() const override { return recurse_ != nullptr; }
  std::string repr(Budget& budget, int depth) override;
  bool length(Budget& budget, Integer& length) override;

  Value cycle(const Arguments& arguments) const;
  bool changed(Budget& budget, const Arguments& arguments);

  // Makes it a recursive loop, with the statement and the call its body runs in (renderer.cc).
  void set_recursion(const void* statement, void* home) {
    recurse_ = statement;
    home_ = home;
  }
  const void* recursion() const { return recurse_; }
  void* home() const { return home_; }

 private:
  bool has_next();
  Integer size(Budget& budget);

  Value source_;
  std::unique_ptr<Iterator> items_;
  bool filtered_;
  int depth0_;
  int64_t index0_ = -1;
  Integer size_ = -1;
  Value before_, current_, after_;
  bool has_after_ = false;
  bool asked_ = false;  // whether changed() was called before, with these values
  std::vector<Value> last_;
  const void* recurse_ = nullptr;
  void* home_ = nullptr;
};

class Cycler : public Object {
 public:
  explicit Cycler(std::vector<Value> items) : items_(std::move(items)) {}
  const char* type() const override { return "Cycler"; }
  bool find(Budget& budget, const std::string& name, Value& found) override;
  std::string repr(Budget& /*budget*/, int /*depth*/) override { return "<Cycler>"; }
  const Value& current() const { return items_[at_]; }
  void advance() { at_ = (at_ + 1) % items_.size(); }
  void reset() { at_ = 0; }

 private:
  std::vector<Value> items_;
  size_t at_ = 0;
};

class Joiner : public Object {
 public:
  explicit Joiner(Value separator) : separator_(std::move(separator)) {}
  const char* type() const override { return "Joiner"; }
  bool find(Budget& budget, const std::string& name, Value& found) override;
  bool callable() const override { return true; }
  std::string repr(Budget& /*budget*/, int /*depth*/) override { return "<Joiner>"; }
  Value call(Budget& budget);

 private:
  Value separator_;
  bool used_ = false;
};

// Functions that templates can call; a variable of the same name hides them.
struct Function {
  std::string_view name;
  Value (*call)(Heap& heap, Budget& budget, const Arguments& arguments);
};
const Function* find_function(std::string_view name);

}  // namespace twell::jinja
