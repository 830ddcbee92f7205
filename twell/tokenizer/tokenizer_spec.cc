// SPDX-License-Identifier: Apache-2.0
#include "twell/tokenizer/tokenizer_spec.h"

#include <xxhash.h>

#include <algorithm>

#include "twell/base/error.h"
#include "twell/tokenizer/bpe_alphabet.h"

namespace twell {
std::unordered_map<std::string, int32_t> mergeable_ids(const TokenizerSpec& spec) {
  std::unordered_map<std::string, int32_t> ids;
  ids.reserve(spec.tokens.size());
  std::vector<bool> is_added(spec.tokens.size(), false);
  std::string bytes;
  for (const AddedToken& token : spec.added) {
    is_added[static_cast<size_t>(token.id)] = true;
    if (!token.in_vocab) continue;
    if (spec.sentence_piece) {
      ids.emplace(token.content, token.id);
    } else if (alphabet_to_bytes(token.content, bytes)) {
      ids.emplace(bytes, token.id);
    }
  }
  for (size_t id = 0; id < spec.tokens.size(); ++id) {
    if (!is_added[id]) ids.emplace(spec.tokens[id], static_cast<int32_t>(id));
  }
  return ids;
}

std::string token_name(const TokenizerSpec& spec, int32_t id) {
  const std::string& bytes = spec.tokens[static_cast<size_t>(id)];
  const bool added = std::any_of(spec.added.begin(), spec.added.end(),
                                 [&](const AddedToken& token) { return token.id == id; });
  return added || spec.sentence_piece ? bytes : bytes_to_alphabet(bytes);
}

std::string hash_tokenizer(const TokenizerSpec& spec) {
  // Each text is preceded by its length, so that different specs never hash the same bytes.
  std::string bytes;
  const auto add = [&](int64_t value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  const auto add_text = [&](const std::string& text) {
    add(std::ssize(text));
    bytes += text;
  };
  add(1);  // version of this list of fields
  add(std::ssize(spec.tokens));
  for (const std::string& token : spec.tokens) add_text(token);
  std::vector<AddedToken> added = spec.added;
  std::sort(added.begin(), added.end(),
            [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; });
  add(std::ssize(added));
  for (const AddedToken& token : added) {
    add(token.id);
    add(token.normalized);
    add(token.in_vocab);
  }
  add(std::ssize(spec.merges));
  for (const BpeMerge& merge : spec.merges) {
    add(merge.left);
    add(merge.right);
  }
  add(spec.ignore_merges);
  add(spec.unknown_id);
  add(spec.nfc);
  for (const PreTokenizerStep& step : spec.pre_tokenizer) {
    add(static_cast<int64_t>(step.kind));
    add_text(step.pattern);
  }
  for (const AddedToken& token : added) {
    if (token.lstrip || token.rstrip || token.single_word) {
      add(token.id);
      add(int64_t{token.lstrip} + 2 * int64_t{token.rstrip} + 4 * int64_t{token.single_word});
    }
  }
  if (spec.sentence_piece) {
    add_text("SentencePiece");
    for (const bool flag :
         {spec.sentence_piece->prepend, spec.sentence_piece->replace, spec.sentence_piece->split}) {
      add(flag);
    }
    add(static_cast<int64_t>(spec.sentence_piece->metaspace));
  }
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return fmt::format("xxh3-128:{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace twell
