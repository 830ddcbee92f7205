// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja_render.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "twell/base/error.h"
#include "twell/chat_template/jinja_builtins.h"

namespace twell::jinja {
namespace {

constexpr size_t kMaxOutput = size_t{16} << 20;  // bytes
constexpr int64_t kMaxSteps = 1'000'000;         // expressions and statements

class Renderer {
 public:
  Renderer(const std::map<std::string, Value>& variables, const std::string& source)
      : source_(source), scopes_{variables} {}

  std::string whole(const Body& body) {
    run(body);
    return std::move(out_);
  }

 private:
  enum class Flow { kNormal, kBreak, kContinue };

  [[noreturn]] void fail(int line, const std::string& message) const {
    throw InputError(fmt::format("{}: line {}: {}", source_, line, message));
  }
  void step(int line) {
    if (++steps_ > kMaxSteps) fail(line, "the template does not come to an end");
  }
  void write(int line, const std::string& text) {
    if (out_.size() + text.size() > kMaxOutput) fail(line, "the template writes without end");
    out_ += text;
  }

  Flow run(const Body& body) {
    for (const Statement& statement : body) {
      step(statement.line);
      const Flow flow = run(statement);
      if (flow != Flow::kNormal) return flow;
    }
    return Flow::kNormal;
  }

  Flow run(const Statement& statement) {
    switch (statement.kind) {
      case StatementKind::kText:
        write(statement.line, statement.text);
        return Flow::kNormal;
      case StatementKind::kOutput:
        write(statement.line, to_text(eval(*statement.expression)));
        return Flow::kNormal;
      case StatementKind::kFor:
        run_for(statement);
        return Flow::kNormal;
      case StatementKind::kIf:
        return run(truthy(eval(*statement.expression)) ? statement.body : statement.otherwise);
      case StatementKind::kSet:
        set(statement);
        return Flow::kNormal;
      case StatementKind::kBreak:
        return Flow::kBreak;
      case StatementKind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kNormal;
  }

  void set(const Statement& statement) {
    Value value;
    if (statement.expression) {
      value = eval(*statement.expression);
    } else {
      std::string before = std::move(out_);
      out_.clear();
      run(statement.body);
      value = Value(Json(std::exchange(out_, std::move(before))));
    }
    if (statement.names.size() == 1) {
      scopes_.back()[statement.names[0]] = std::move(value);
      return;
    }
    const Value space = lookup(statement.names[0]);
    if (!space.space) fail(statement.line, statement.names[0] + " is no namespace");
    (*space.space)[statement.names[1]] = std::move(value);
  }

  std::vector<Json> iterated(const Expression& expression) {
    const Value value = eval(expression);
    std::vector<Json> items;
    if (value.data.is_object()) {
      for (const auto& [key, item] : value.data.items()) items.emplace_back(key);
    } else if (value.data.is_array()) {
      items.assign(value.data.begin(), value.data.end());
    } else if (!value.undefined) {
      fail(expression.line, to_text(value) + " cannot be looped over");
    }
    return items;
  }

  void bind(const Statement& loop, const Json& item) {
    if (loop.names.size() == 1) {
      scopes_.back()[loop.names[0]] = Value(item);
      return;
    }
    if (!item.is_array() || item.size() != loop.names.size()) {
      fail(loop.line, fmt::format("{} names for {}", loop.names.size(), to_text(Value(item))));
    }
    for (size_t i = 0; i < loop.names.size(); ++i) scopes_.back()[loop.names[i]] = Value(item[i]);
  }

  void run_for(const Statement& loop) {
    std::vector<Json> items = iterated(*loop.expression);
    if (loop.filter) {
      std::vector<Json> kept;
      for (Json& item : items) {
        scopes_.emplace_back();
        bind(loop, item);
        const bool keep = truthy(eval(*loop.filter));
        scopes_.pop_back();
        if (keep) kept.push_back(std::move(item));
      }
      items = std::move(kept);
    }
    if (items.empty()) {
      run(loop.otherwise);
      return;
    }
    for (size_t i = 0; i < items.size(); ++i) {
      step(loop.line);
      scopes_.emplace_back();
      scopes_.back()["loop"] = loop_value(items, i);
      bind(loop, items[i]);
      const Flow flow = run(loop.body);
      scopes_.pop_back();
      if (flow == Flow::kBreak) break;
    }
  }

  static Value loop_value(const std::vector<Json>& items, size_t i) {
    Json loop = {{"index", i + 1},
                 {"index0", i},
                 {"revindex", items.size() - i},
                 {"revindex0", items.size() - i - 1},
                 {"first", i == 0},
                 {"last", i + 1 == items.size()},
                 {"length", items.size()}};
    if (i > 0) loop["previtem"] = items[i - 1];
    if (i + 1 < items.size()) loop["nextitem"] = items[i + 1];
    return loop;
  }

  Value lookup(const std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const auto found = scope->find(name);
      if (found != scope->end()) return found->second;
    }
    return Value::nothing();
  }

  Value eval(const Expression& e) {
    step(e.line);
    switch (e.kind) {
      case ExpressionKind::kLiteral:
        return e.value;
      case ExpressionKind::kName:
        return lookup(e.name);
      case ExpressionKind::kList: {
        Json out = Json::array();
        for (const ExpressionPtr& part : e.parts) out.push_back(eval(*part).data);
        return out;
      }
      case ExpressionKind::kDict: {
        Json out = Json::object();
        for (size_t i = 0; i < e.parts.size(); i += 2) {
          out[to_text(eval(*e.parts[i]))] = eval(*e.parts[i + 1]).data;
        }
        return out;
      }
      case ExpressionKind::kMember:
        return member(e, eval(*e.parts[0]), Value(Json(e.name)));
      case ExpressionKind::kIndex:
        return member(e, eval(*e.parts[0]), eval(*e.parts[1]));
      case ExpressionKind::kSlice:
        return slice(e);
      case ExpressionKind::kCall:
        return call(e);
      case ExpressionKind::kFilter:
        return guarded(e, [&] { return apply_filter(e.name, eval(*e.parts[0]), arguments(e)); });
      case ExpressionKind::kTest:
        return guarded(
            e, [&] { return Value(Json(apply_test(e.name, eval(*e.parts[0]), arguments(e)))); });
      case ExpressionKind::kNot:
        return Json(!truthy(eval(*e.parts[0])));
      case ExpressionKind::kNegate:
        return guarded(e, [&] { return arithmetic("-", Value(Json(0)), eval(*e.parts[0])); });
      case ExpressionKind::kBinary:
        return binary(e);
      case ExpressionKind::kCondition:
        if (truthy(eval(*e.parts[1]))) return eval(*e.parts[0]);
        return e.parts[2] ? eval(*e.parts[2]) : Value::nothing();
    }
    return Value::nothing();
  }

  // Errors of the builtins get their position; a JSON value of the wrong kind is one of them.
  template <typename Fn>
  Value guarded(const Expression& e, const Fn& fn) const {
    try {
      return fn();
    } catch (const InputError& error) {
      const std::string text = error.what();
      if (text.starts_with(source_ + ": line")) throw;
      fail(e.line, text);
    } catch (const Json::exception&) {
      fail(e.line, fmt::format("a value is not of the kind that '{}' needs", e.name));
    }
  }

  Arguments arguments(const Expression& e) {
    Arguments out;
    for (size_t i = 1; i < e.parts.size(); ++i) out.positional.push_back(eval(*e.parts[i]));
    for (const auto& [name, part] : e.named) out.named.emplace_back(name, eval(*part));
    return out;
  }

  Value member(const Expression& e, const Value& object, const Value& key) const {
    if (object.undefined) fail(e.line, fmt::format("{} of what is undefined", to_text(key)));
    if (object.space) {
      const auto found = object.space->find(to_text(key));
      return found == object.space->end() ? Value::nothing() : found->second;
    }
    if (object.data.is_object() && key.is_string()) {
      const auto found = object.data.find(key.text());
      return found == object.data.end() ? Value::nothing() : Value(*found);
    }
    if ((object.data.is_array() || object.is_string()) && key.data.is_number_integer()) {
      const std::vector<Json> items = parts_of(object);
      const int64_t size = std::ssize(items);
      int64_t at = key.data.get<int64_t>();
      if (at < 0) at += size;
      return at < 0 || at >= size ? Value::nothing() : Value(items[static_cast<size_t>(at)]);
    }
    return Value::nothing();
  }

  // The items of a list, the characters of a text.
  static std::vector<Json> parts_of(const Value& object) {
    std::vector<Json> items;
    if (object.is_string()) {
      for (const char c : object.text()) {
        // A text that begins inside a character keeps those bytes as its first.
        if ((c & 0xc0) != 0x80 || items.empty()) items.emplace_back("");
        items.back().get_ref<std::string&>() += c;
      }
    } else {
      items.assign(object.data.begin(), object.data.end());
    }
    return items;
  }

  // Of lists and of text, as Python cuts them.
  Value slice(const Expression& e) {
    const Value object = eval(*e.parts[0]);
    const auto bound = [&](size_t i) -> std::optional<int64_t> {
      if (!e.parts[i]) return std::nullopt;
      const Value value = eval(*e.parts[i]);
      if (!value.data.is_number_integer()) fail(e.line, "a slice needs whole numbers");
      return value.data.get<int64_t>();
    };
    const int64_t stride = bound(3).value_or(1);
    if (stride == 0) fail(e.line, "a slice needs a step");
    if (!object.is_string() && !object.data.is_array()) fail(e.line, "a slice of what is no list");
    const std::vector<Json> items = parts_of(object);
    const int64_t size = std::ssize(items);
    const auto place = [&](std::optional<int64_t> at, int64_t fallback) {
      if (!at) return fallback;
      const int64_t from_start = *at < 0 ? *at + size : *at;
      return std::clamp<int64_t>(from_start, stride > 0 ? 0 : -1, stride > 0 ? size : size - 1);
    };
    const int64_t begin = place(bound(1), stride > 0 ? 0 : size - 1);
    const int64_t end = place(bound(2), stride > 0 ? size : -1);
    Json out = object.is_string() ? Json("") : Json::array();
    for (int64_t i = begin; stride > 0 ? i < end : i > end; i += stride) {
      const Json& item = items[static_cast<size_t>(i)];
      if (object.is_string()) {
        out.get_ref<std::string&>() += item.get_ref<const std::string&>();
      } else {
        out.push_back(item);
      }
    }
    return out;
  }

  Value call(const Expression& e) {
    const Expression& target = *e.parts[0];
    if (target.kind == ExpressionKind::kMember) {
      const Value object = eval(*target.parts[0]);
      return guarded(e, [&] { return call_method(target.name, object, arguments(e)); });
    }
    if (target.kind != ExpressionKind::kName) fail(e.line, "only functions and methods are called");
    return guarded(e, [&] { return call_function(target.name, arguments(e)); });
  }

  Value binary(const Expression& e) {
    Value left = eval(*e.parts[0]);
    if (e.name == "and") return truthy(left) ? eval(*e.parts[1]) : left;
    if (e.name == "or") return truthy(left) ? left : eval(*e.parts[1]);
    const Value right = eval(*e.parts[1]);
    if (e.name == "==") return Json(equal(left, right));
    if (e.name == "!=") return Json(!equal(left, right));
    if (e.name == "~") return Json(to_text(left) + to_text(right));
    if (e.name == "in" || e.name == "not in")
      return Json(contains(e, left, right) == (e.name == "in"));
    return guarded(e, [&] { return arithmetic(e.name, left, right); });
  }

  bool contains(const Expression& e, const Value& item, const Value& container) const {
    if (container.is_string() && item.is_string()) {
      return container.text().find(item.text()) != std::string::npos;
    }
    if (container.data.is_object()) return item.is_string() && container.data.contains(item.text());
    if (container.data.is_array()) {
      return std::find(container.data.begin(), container.data.end(), item.data) !=
             container.data.end();
    }
    fail(e.line, fmt::format("'in' {} makes no sense", to_text(container)));
  }

  static Value arithmetic(const std::string& sign, const Value& a, const Value& b) {
    const bool ordered = sign == "<" || sign == ">" || sign == "<=" || sign == ">=";
    if (a.is_string() && b.is_string()) {
      if (sign == "+") return Json(a.text() + b.text());
      if (ordered) return compared(sign, a.text().compare(b.text()));
    }
    if (a.data.is_array() && b.data.is_array() && sign == "+") {
      Json out = a.data;
      out.insert(out.end(), b.data.begin(), b.data.end());
      return out;
    }
    if (a.is_string() && b.data.is_number_integer() && sign == "*") {
      const int64_t count = std::max<int64_t>(b.data.get<int64_t>(), 0);
      TWELL_REQUIRE(count * std::ssize(a.text()) <= static_cast<int64_t>(kMaxOutput),
                    "a text repeated {} times is too long", count);
      std::string out;
      for (int64_t i = 0; i < count; ++i) out += a.text();
      return Json(out);
    }
    TWELL_REQUIRE(a.data.is_number() && b.data.is_number(), "{} {} {} makes no sense", to_text(a),
                  sign, to_text(b));
    if (a.data.is_number_integer() && b.data.is_number_integer()) {
      return integers(sign, a.data.get<int64_t>(), b.data.get<int64_t>());
    }
    const double x = a.data.get<double>(), y = b.data.get<double>();
    if (ordered) return compared(sign, x < y ? -1 : x > y ? 1 : 0);
    if (sign == "+") return Json(x + y);
    if (sign == "-") return Json(x - y);
    if (sign == "*") return Json(x * y);
    TWELL_REQUIRE(sign == "/" && y != 0.0, "{} {} {} makes no sense", x, sign, y);
    return Json(x / y);
  }

  static Value integers(const std::string& sign, int64_t x, int64_t y) {
    int64_t out = 0;
    bool overflow = false;
    if (sign == "<" || sign == ">" || sign == "<=" || sign == ">=") {
      return compared(sign, x < y ? -1 : x > y ? 1 : 0);
    }
    if (sign == "+") {
      overflow = __builtin_add_overflow(x, y, &out);
    } else if (sign == "-") {
      overflow = __builtin_sub_overflow(x, y, &out);
    } else if (sign == "*") {
      overflow = __builtin_mul_overflow(x, y, &out);
    } else {
      TWELL_REQUIRE(y != 0 && y != -1, "{} {} {} makes no sense", x, sign, y);
      if (sign == "/") return Json(static_cast<double>(x) / static_cast<double>(y));
      // Python rounds down and gives the remainder the sign of the divisor.
      const int64_t rest = (x % y + y) % y;
      out = sign == "%" ? rest : (x - rest) / y;
    }
    TWELL_REQUIRE(!overflow, "{} {} {} is too large", x, sign, y);
    return Json(out);
  }

  static Value compared(const std::string& sign, int order) {
    if (sign == "<") return Json(order < 0);
    if (sign == ">") return Json(order > 0);
    return Json(sign == "<=" ? order <= 0 : order >= 0);
  }

  const std::string& source_;
  std::vector<std::map<std::string, Value>> scopes_;
  std::string out_;
  int64_t steps_ = 0;
};

}  // namespace

std::string render(const Body& body, const std::map<std::string, Value>& variables,
                   const std::string& source) {
  return Renderer(variables, source).whole(body);
}

}  // namespace twell::jinja
