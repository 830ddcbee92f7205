// SPDX-License-Identifier: Apache-2.0
#include "bench/synthetic_tokenizer.h"

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "twell/base/error.h"

namespace twell {

Tokenizer synthetic_tokenizer(int64_t vocab) {
  TWELL_REQUIRE(vocab >= 400 && vocab <= 300'000, "a synthetic tokenizer of {} tokens", vocab);
  bool given = false;
  const Tokenizer bytes = train_bpe({.vocab_size = 257, .threads = 1}, [&](std::string& text) {
    text.clear();
    for (int byte = 0; byte < 256; ++byte) text += static_cast<char>(byte);
    return !std::exchange(given, true);
  });
  nlohmann::ordered_json json = nlohmann::ordered_json::parse(bytes.to_json());
  nlohmann::ordered_json& tokens = json["model"]["vocab"];
  nlohmann::ordered_json& merges = json["model"]["merges"];
  int64_t size = 257;
  std::vector<std::pair<std::string, int64_t>> added;
  const auto add = [&](const std::string& left, const std::string& right) {
    if (size == vocab) return;
    added.emplace_back(left + right, size++);
    merges.push_back(left + " " + right);
  };
  const std::string blank = "\u0120";  // as byte-level vocabularies write it
  for (const char* pair : {"\":", "\",", "\"}", "{\"", "[\"", "\"]", "},", "}]", ":\"", ",\""}) {
    add(std::string(1, pair[0]), std::string(1, pair[1]));
  }
  for (const char* mark : {"\"", "{", "[", "}", "]"}) add(blank, mark);
  std::vector<std::string> words;
  for (char one = 'a'; one <= 'z'; ++one) words.emplace_back(1, one);
  for (char one = 'a'; one <= 'z'; ++one) {
    add(blank, std::string(1, one));
    words.push_back(blank + one);
  }
  while (size < vocab) {
    std::vector<std::string> longer;
    for (const std::string& word : words) {
      for (char one = 'a'; one <= 'z' && size < vocab; ++one) {
        add(word, std::string(1, one));
        longer.push_back(word + one);
      }
    }
    words = std::move(longer);
  }
  auto& list = static_cast<nlohmann::ordered_json::object_t::Container&>(
      *tokens.get_ptr<nlohmann::ordered_json::object_t*>());
  for (auto& [text, id] : added) list.emplace_back(text, id);
  return Tokenizer::parse(json.dump(), "a synthetic tokenizer");
}

}  // namespace twell
