// SPDX-License-Identifier: Apache-2.0
// Values of the template language: Python's, as far as templates meet them. They cannot be changed
// (the sandbox of jinja2 forbids it), so copies share their content; only what the renderer owns
// (namespaces, loops, macros) and generators have a state.
//
// Texts are valid UTF-8. Nesting of lists and dictionaries is at most kMaxDepth, because code
// recurses through it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace twell::jinja {

constexpr int kMaxDepth = 500;  // of values and of syntax trees

__extension__ using Integer = __int128;  // Python's are unbounded; beyond this is an error

struct Text;
struct List;
struct Dict;
struct View;
struct Range;
struct Generator;
struct Method;
struct Function;
class Object;

// The result of looking up what does not exist. It prints as nothing and is empty and false; most
// other uses are errors.
struct Undefined {
  const std::string* name = nullptr;  // what was looked up, for messages; owned by the syntax tree
  bool forbidden = false;             // it exists, but would change a value
};
struct None {};

class Value {
 public:
  using Data = std::variant<Undefined, None, bool, Integer, double, std::shared_ptr<const Text>,
                            std::shared_ptr<const List>, std::shared_ptr<const Dict>,
                            std::shared_ptr<const View>, std::shared_ptr<const Range>,
                            std::shared_ptr<Generator>, std::shared_ptr<const Method>,
                            const Function*, Object*>;

  Value() = default;
  explicit Value(Data data) : data_(std::move(data)) {}

  static Value undefined(const std::string& name) { return Value(Data(Undefined{&name})); }
  static Value none() { return Value(Data(None{})); }
  static Value of(bool value) { return Value(Data(value)); }
  static Value of(Integer value) { return Value(Data(value)); }
  static Value of(int64_t value) { return Value(Data(Integer{value})); }
  static Value of(double value) { return Value(Data(value)); }
  static Value of(std::string text, bool markup = false);
  static Value of(Object* object) { return Value(Data(object)); }
  static Value of(const Function* function) { return Value(Data(function)); }

  bool is_undefined() const { return std::holds_alternative<Undefined>(data_); }
  bool is_none() const { return std::holds_alternative<None>(data_); }
  bool is_number() const { return boolean() || integer() || real(); }
  // Null when the value is of another type.
  const Undefined* missing() const { return std::get_if<Undefined>(&data_); }
  const bool* boolean() const { return std::get_if<bool>(&data_); }
  const Integer* integer() const { return std::get_if<Integer>(&data_); }
  const double* real() const { return std::get_if<double>(&data_); }
  const std::string* text() const;
  const List* list() const { return pointer<const List>(); }  // or a tuple
  const Dict* dict() const { return pointer<const Dict>(); }
  const View* view() const { return pointer<const View>(); }
  const Range* range() const { return pointer<const Range>(); }
  Generator* generator() const { return pointer<Generator>(); }
  const Method* method() const { return pointer<const Method>(); }
  const Function* function() const { return plain<const Function>(); }
  Object* object() const { return plain<Object>(); }

  bool is_markup() const;  // a text that Markup of markupsafe would be
  bool is_tuple() const;

  const Data& data() const { return data_; }
  // Levels of nesting: 0 without content of its own.
  int depth() const;

 private:
  template <typename T>
  T* pointer() const {
    const auto* found = std::get_if<std::shared_ptr<T>>(&data_);
    return found == nullptr ? nullptr : found->get();
  }
  template <typename T>
  T* plain() const {
    T* const* found = std::get_if<T*>(&data_);
    return found == nullptr ? nullptr : *found;
  }

  Data data_;
};

struct Text {
  std::string bytes;
  bool markup = false;
};

enum class ListKind { kList, kTuple, kGroup };  // kGroup: groupby's tuple (grouper, list)
struct List {
  std::vector<Value> items;
  ListKind kind = ListKind::kList;
  int depth = 1;
};

// Keys are unique and in order of insertion. Made by DictBuilder.
struct Dict {
  std::vector<std::pair<Value, Value>> items;
  std::vector<uint32_t> sorted;  // positions in order of keys; empty for a few items
  int depth = 1;

  const Value* find(const Value& key) const;  // null when missing
  const Value* find(std::string_view key) const;
};

enum class ViewKind { kKeys, kValues, kItems };
struct View {
  std::shared_ptr<const Dict> dict;
  ViewKind kind = ViewKind::kKeys;
};

struct Range {
  Integer start = 0, stop = 0, step = 1;
  Integer count() const;
};

// Yields the items of something, once.
class Iterator {
 public:
  virtual ~Iterator() = default;
  virtual bool next(Value& item) = 0;  // false at the end
};

struct Generator {
  std::unique_ptr<Iterator> items;
  int depth = 1;
};

class Budget;
struct Arguments;

// A method of Python's types, bound to a value.
struct MethodEntry {
  std::string_view name;
  std::string_view parameters;  // empty: it takes none; else the function looks at them itself
  Value (*call)(Budget& budget, const Value& self, const Arguments& arguments);
};
struct Method {
  Value self;
  const MethodEntry* entry = nullptr;
};

// What has an identity and a state: namespaces, loops, macros. The renderer owns them all and they
// live as long as it, so that they may refer to each other.
class Object {
 public:
  virtual ~Object() = default;
  virtual const char* type() const = 0;
  virtual bool find(Budget& budget, const std::string& name, Value& found) = 0;
  virtual bool callable() const { return false; }
  virtual std::string repr(Budget& budget, int depth) = 0;
  // Finds the length of values that have one; false for others.
  virtual bool length(Budget& /*budget*/, Integer& /*length*/) { return false; }
};

// Order of values that can be keys, which agrees with their equality: 1 == 1.0 == true.
bool can_be_key(const Value& value);
int compare_keys(const Value& a, const Value& b);
int compare_numbers(const Value& a, const Value& b);  // 2: one is not a number (nan)

// Collects a dictionary. A repeated key keeps its place and gets the new value.
class DictBuilder {
 public:
  void add(Value key, Value value);
  bool contains(const Value& key) const { return find(key) != kNowhere; }
  const std::vector<std::pair<Value, Value>>& items() const { return items_; }
  Value finish();

 private:
  static constexpr size_t kNowhere = SIZE_MAX;
  struct Less {
    bool operator()(const Value& a, const Value& b) const { return compare_keys(a, b) < 0; }
  };
  size_t find(const Value& key) const;

  std::vector<std::pair<Value, Value>> items_;
  std::map<Value, uint32_t, Less> places_;  // of the items, when they are many
};

}  // namespace twell::jinja
