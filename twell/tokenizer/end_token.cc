// SPDX-License-Identifier: Apache-2.0
#include "twell/tokenizer/end_token.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/json.h"
#include "twell/base/json_fields.h"
#include "twell/tokenizer/tokenizer_spec.h"

namespace twell {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* kTokenizerConfig = "tokenizer_config.json";

// A field of a file's object; null when there is no such file or field.
json field_of(const fs::path& path, const char* name) {
  if (!fs::is_regular_file(path)) return {};
  return parse_json_field(read_file(path), name, path.string(), {.keys = JsonKeys::kLast});
}

// Null when no added token is called so.
const AddedToken* find_added(const TokenizerSpec& spec, const std::string& content) {
  const auto found = std::ranges::find(spec.added, content, &AddedToken::content);
  return found == spec.added.end() ? nullptr : &*found;
}

// The id of the first added token that the files name; -1 when none does.
int32_t declared_end_token(const fs::path& folder, const TokenizerSpec& spec) {
  json name = field_of(folder / kTokenizerConfig, "eos_token");
  if (name.is_object()) name = name.value("content", json());
  if (name.is_string()) {
    if (const AddedToken* const token = find_added(spec, name.get<std::string>())) return token->id;
  }
  for (const char* const file : {"config.json", "generation_config.json"}) {
    json ids = field_of(folder / file, "eos_token_id");
    if (!ids.is_array()) ids = json::array({ids});
    for (const json& id : ids) {
      const auto is_it = [&](const AddedToken& token) { return id == token.id; };
      if (std::ranges::any_of(spec.added, is_it)) return id.get<int32_t>();
    }
  }
  return -1;
}

int32_t named_end_token(const std::string& name, const TokenizerSpec& spec,
                        const std::string& source) {
  const AddedToken* const token = find_added(spec, name);
  TWELL_REQUIRE(token != nullptr,
                "{}: there is no added token {}; the end of documents must be one of those that "
                "\"added_tokens\" lists",
                source, excerpt(name));
  return token->id;
}

}  // namespace

Tokenizer load_with_end_token(const fs::path& path, const std::string& name) {
  TokenizerSpec spec = parse_tokenizer_json(read_file(path), path.string());
  spec.eos_id = name.empty() ? declared_end_token(path.parent_path(), spec)
                             : named_end_token(name, spec, path.string());
  return Tokenizer(std::move(spec));
}

bool has_declared_end_token(const Tokenizer& tokenizer) {
  for (const std::string_view name : kEosNames) {
    const int32_t id = tokenizer.find(name);
    if (id >= 0) return id != tokenizer.eos_token();
  }
  return tokenizer.eos_token() >= 0;
}

void save_with_end_token(const Tokenizer& tokenizer, const fs::path& folder) {
  const int32_t end = tokenizer.eos_token();
  if (end >= 0) {
    const json config = {{"eos_token", tokenizer.token_bytes(end)}};
    write_file_atomic(folder / kTokenizerConfig, config.dump(2) + "\n");
  }
  tokenizer.save(folder / "tokenizer.json");
}

}  // namespace twell
