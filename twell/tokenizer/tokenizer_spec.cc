// SPDX-License-Identifier: Apache-2.0
#include "twell/tokenizer/tokenizer_spec.h"

#include <xxhash.h>

#include <algorithm>

#include "twell/base/error.h"
#include "twell/tokenizer/bpe_alphabet.h"

namespace twell {
namespace {

// Hashes values, each preceded by its length, so that different specs never hash the same bytes.
class SpecHash {
 public:
  void add(int64_t value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value)); }
  void add(const std::string& text) {
    add(static_cast<int64_t>(text.size()));
    bytes_ += text;
  }
  std::string digest() const {
    const XXH128_hash_t hash = XXH3_128bits(bytes_.data(), bytes_.size());
    return fmt::format("xxh3-128:{:016x}{:016x}", hash.high64, hash.low64);
  }

 private:
  std::string bytes_;
};

}  // namespace

std::unordered_map<std::string, int32_t> mergeable_ids(const TokenizerSpec& spec) {
  std::unordered_map<std::string, int32_t> ids;
  ids.reserve(spec.tokens.size());
  std::vector<bool> left_out(spec.tokens.size(), false);
  std::string bytes;
  for (const AddedToken& token : spec.added) {
    const bool reads_the_same =
        token.in_vocab && (spec.sentence_piece ||
                           (alphabet_to_bytes(token.content, bytes) && bytes == token.content));
    if (!reads_the_same) left_out[static_cast<size_t>(token.id)] = true;
  }
  for (size_t id = 0; id < spec.tokens.size(); ++id) {
    if (!left_out[id]) ids.emplace(spec.tokens[id], static_cast<int32_t>(id));
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
  SpecHash hash;
  hash.add(int64_t{1});  // version of this list of fields
  hash.add(static_cast<int64_t>(spec.tokens.size()));
  for (const std::string& bytes : spec.tokens) hash.add(bytes);
  hash.add(static_cast<int64_t>(spec.added.size()));
  for (const AddedToken& token : spec.added) {
    hash.add(token.id);
    hash.add(int64_t{token.normalized});
    hash.add(int64_t{token.in_vocab});
  }
  hash.add(static_cast<int64_t>(spec.merges.size()));
  for (const BpeMerge& merge : spec.merges) {
    hash.add(merge.left);
    hash.add(merge.right);
  }
  hash.add(int64_t{spec.ignore_merges});
  hash.add(spec.unknown_id);
  hash.add(int64_t{spec.nfc});
  for (const PreTokenizerStep& step : spec.pre_tokenizer) {
    hash.add(static_cast<int64_t>(step.kind));
    hash.add(step.pattern);
  }
  for (const AddedToken& token : spec.added) {
    if (token.lstrip || token.rstrip) {
      hash.add(token.id);
      hash.add(int64_t{token.lstrip} + 2 * int64_t{token.rstrip});
    }
  }
  if (spec.sentence_piece) {
    hash.add(std::string("SentencePiece"));
    for (const bool flag :
         {spec.sentence_piece->prepend, spec.sentence_piece->replace, spec.sentence_piece->split}) {
      hash.add(int64_t{flag});
    }
    hash.add(static_cast<int64_t>(spec.sentence_piece->metaspace));
  }
  return hash.digest();
}

}  // namespace twell
