// SPDX-License-Identifier: Apache-2.0
// Functions that templates can call: those of jinja2 and the two that transformers adds.
#include <algorithm>
#include <ctime>
#include <iterator>

#include "twell/chat_template/jinja/objects.h"
#include "twell/chat_template/jinja/operators.h"
#include "twell/chat_template/jinja/text.h"
#include "twell/chat_template/jinja/write.h"

namespace twell::jinja {
namespace {

constexpr Integer kMostRange = 100'000;  // items of a range, as the sandbox of jinja2 bounds it

Value range(Heap& /*heap*/, Budget& budget, const Arguments& arguments) {
  const Matched given = match("range", "start stop? step? /", arguments);
  const auto at = [&](size_t i, Integer fallback) {
    if (given[i] == nullptr) return fallback;
    const Integer value = want_integer(budget, *given[i], "range");
    TWELL_REQUIRE(value >= INT64_MIN && value <= INT64_MAX, "range to {} is too long", value);
    return value;
  };
  const bool one = given[1] == nullptr;
  const Range out{one ? 0 : at(0, 0), one ? at(0, 0) : at(1, 0), at(2, 1)};
  TWELL_REQUIRE(out.step != 0, "range needs a step other than 0");
  TWELL_REQUIRE(out.count() <= kMostRange, "a range of {} is too long; {} are allowed", out.count(),
                kMostRange);
  budget.bytes(sizeof(Range));
  return Value(Value::Data(std::make_shared<const Range>(out)));
}

// What dict(...) collects: a dictionary or pairs, then the named arguments.
DictBuilder collected(Budget& budget, const Arguments& arguments) {
  TWELL_REQUIRE(arguments.positional.size() <= 1, "dict takes one dictionary or list of pairs");
  DictBuilder out;
  if (!arguments.positional.empty()) {
    const Value& source = arguments.positional[0];
    const auto items =
        iterate(budget, source.dict() != nullptr ? budget.view(source, ViewKind::kItems) : source);
    for (Value item; items->next(item);) {
      budget.step();
      const std::vector<Value> pair = items_of(budget, item);
      TWELL_REQUIRE(pair.size() == 2 && can_be_key(pair[0]), "dict needs pairs, not {}",
                    shown(budget, item));
      budget.bytes(sizeof(pair) * 2);
      out.add(pair[0], pair[1]);
    }
  }
  for (const auto& [name, value] : arguments.named) out.add(budget.text(name), value);
  return out;
}

Value dict(Heap& /*heap*/, Budget& budget, const Arguments& arguments) {
  return budget.dict(collected(budget, arguments));
}

Value make_namespace(Heap& heap, Budget& budget, const Arguments& arguments) {
  auto* out = heap.make<Namespace>();
  const DictBuilder fields = collected(budget, arguments);
  for (const auto& [name, value] : fields.items()) {
    TWELL_REQUIRE(name.text() != nullptr, "a field of a namespace needs a name");
    out->set(budget, *name.text(), value);
  }
  return Value::of(out);
}

Value cycler(Heap& heap, Budget& /*budget*/, const Arguments& arguments) {
  TWELL_REQUIRE(arguments.named.empty() && !arguments.positional.empty(),
                "cycler needs items by position");
  return Value::of(heap.make<Cycler>(arguments.positional));
}

Value joiner(Heap& heap, Budget& budget, const Arguments& arguments) {
  const Matched given = match("joiner", "sep?", arguments);
  return Value::of(heap.make<Joiner>(given[0] != nullptr ? *given[0] : budget.text(", ")));
}

Value lorem_ipsum(Heap& /*heap*/, Budget& /*budget*/, const Arguments& /*arguments*/) {
  throw InputError("the function 'lipsum' is not supported");
}

Value raise_exception(Heap& /*heap*/, Budget& budget, const Arguments& arguments) {
  const Matched given = match("raise_exception", "message", arguments);
  constexpr size_t kShown = 1000;
  std::string text = to_text(budget, *given[0]);
  if (text.size() > kShown) {
    size_t cut = kShown;
    while ((text[cut] & 0xc0) == 0x80) --cut;
    text = text.substr(0, cut) + "...";
  }
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  throw InputError("the template says: " + text);
}

Value now_as_text(Heap& /*heap*/, Budget& budget, const Arguments& arguments) {
  const Matched given = match("strftime_now", "format", arguments);
  const std::string& format = want_text(budget, *given[0], "strftime_now");
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  // strftime() gives 0 both for an empty text and for one that does not fit.
  constexpr size_t kMostBytes = 4096;
  TWELL_REQUIRE(format.size() < kMostBytes / 16, "strftime_now takes a format of {} bytes at most",
                kMostBytes / 16);
  char text[kMostBytes];
  const std::string padded = format + ".";
  const size_t size = std::strftime(text, sizeof(text), padded.c_str(), &local);
  TWELL_REQUIRE(size > 0, "strftime_now cannot write {}", shown(budget, *given[0]));
  return budget.text(std::string(text, size - 1));
}

constexpr Function kFunctions[] = {
    {"cycler", cycler},
    {"dict", dict},
    {"joiner", joiner},
    {"lipsum", lorem_ipsum},
    {"namespace", make_namespace},
    {"raise_exception", raise_exception},
    {"range", range},
    {"strftime_now", now_as_text},
};

}  // namespace

const Function* find_function(std::string_view name) {
  const auto* found = std::find_if(std::begin(kFunctions), std::end(kFunctions),
                                   [&](const Function& f) { return f.name == name; });
  return found == std::end(kFunctions) ? nullptr : found;
}

}  // namespace twell::jinja
