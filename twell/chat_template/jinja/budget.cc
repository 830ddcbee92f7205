// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja/budget.h"

#include <algorithm>

namespace twell::jinja {
namespace {

constexpr size_t kObjectBytes = 64;  // of a shared object's counts and allocation header

void require_depth(int depth) {
  TWELL_REQUIRE(depth <= kMaxDepth, "a value is nested more than {} deep", kMaxDepth);
}

}  // namespace

Value Budget::text(std::string bytes_in, bool markup) {
  bytes(kObjectBytes + bytes_in.size());
  return Value::of(std::move(bytes_in), markup);
}

Value Budget::list(std::vector<Value> items, ListKind kind) {
  bytes(kObjectBytes + sizeof(List) + items.size() * sizeof(Value));
  auto list = std::make_shared<List>(List{std::move(items), kind});
  for (const Value& item : list->items) list->depth = std::max(list->depth, item.depth() + 1);
  require_depth(list->depth);
  return Value(Value::Data(std::shared_ptr<const List>(std::move(list))));
}

Value Budget::dict(DictBuilder builder) {
  bytes(kObjectBytes + sizeof(Dict) + builder.items().size() * 2 * sizeof(Value));
  Value value = builder.finish();
  require_depth(value.depth());
  return value;
}

Value Budget::generator(std::unique_ptr<Iterator> items, int depth) {
  bytes(2 * kObjectBytes + sizeof(Generator));
  require_depth(depth);
  return Value(Value::Data(std::make_shared<Generator>(Generator{std::move(items), depth})));
}

Value Budget::view(const Value& dict, ViewKind kind) {
  bytes(kObjectBytes + sizeof(View));
  auto source = std::get<std::shared_ptr<const Dict>>(dict.data());
  require_depth(source->depth + 1);
  return Value(Value::Data(
      std::shared_ptr<const View>(std::make_shared<View>(View{std::move(source), kind}))));
}

}  // namespace twell::jinja
