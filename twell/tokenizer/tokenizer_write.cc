// SPDX-License-Identifier: Apache-2.0
// TokenizerSpec -> tokenizer.json, and the hash of what the file means.
#include <xxhash.h>

#include "twell/base/error.h"

#include "twell/tokenizer/bpe_alphabet.h"
#include "twell/tokenizer/tokenizer_pipeline.h"
#include "twell/tokenizer/tokenizer_spec.h"

namespace twell {
namespace {

using nlohmann::ordered_json;

std::string json_string(const std::string& text) { return ordered_json(text).dump(); }

ordered_json added_tokens(const TokenizerSpec& spec) {
  ordered_json list = ordered_json::array();
  for (const AddedToken& token : spec.added) {
    list.push_back({{"id", token.id},
                    {"content", token.content},
                    {"single_word", false},
                    {"lstrip", false},
                    {"rstrip", false},
                    {"normalized", token.normalized},
                    {"special", token.special}});
  }
  return list;
}

// The names of the vocabulary by id; empty for added tokens that are not part of it.
std::vector<std::string> vocabulary_names(const TokenizerSpec& spec) {
  std::vector<std::string> names;
  names.reserve(spec.tokens.size());
  for (const std::string& bytes : spec.tokens) names.push_back(bytes_to_alphabet(bytes));
  for (const AddedToken& token : spec.added) {
    names[static_cast<size_t>(token.id)] = token.in_vocab ? token.content : std::string();
  }
  return names;
}

// Feeds values into one hash, each with its length, so that no two specs give the same bytes.
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

std::string write_tokenizer_json(const TokenizerSpec& spec) {
  const std::vector<std::string> names = vocabulary_names(spec);
  const auto name_of = [&](int32_t id) -> const std::string& {
    return names[static_cast<size_t>(id)];
  };
  const auto field = [](const char* name, const ordered_json& value) {
    return fmt::format("  \"{}\": {},\n", name, value.dump());
  };
  const ordered_json unknown =
      spec.unknown_id < 0 ? ordered_json() : ordered_json(token_name(spec, spec.unknown_id));
  std::string out = "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n";
  out += field("added_tokens", added_tokens(spec));
  out += field("normalizer", write_normalizer(spec.nfc));
  out += field("pre_tokenizer", write_pre_tokenizer(spec.pre_tokenizer));
  out += field("post_processor", write_post_processor(spec));
  out += field("decoder", write_decoder());
  out += "  \"model\": {\n  \"type\": \"BPE\",\n";
  for (const char* option : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
    out += field(option, nullptr);
  }
  out += field("unk_token", unknown);
  out += field("fuse_unk", false);
  out += field("byte_fallback", false);
  out += field("ignore_merges", spec.ignore_merges);

  // Written piece by piece: an ordered_json object of 100,000 names would search them all for each.
  out += "  \"vocab\": {";
  const char* separator = "\n";
  for (size_t id = 0; id < names.size(); ++id) {
    if (names[id].empty()) continue;
    out += fmt::format("{}    {}: {}", separator, json_string(names[id]), id);
    separator = ",\n";
  }
  out += "\n  },\n  \"merges\": [";
  separator = "\n";
  for (const BpeMerge& merge : spec.merges) {
    const std::string pair = name_of(merge.left) + " " + name_of(merge.right);
    out += fmt::format("{}    {}", separator, json_string(pair));
    separator = ",\n";
  }
  out += "\n  ]\n  }\n}\n";
  return out;
}

std::string hash_tokenizer(const TokenizerSpec& spec) {
  SpecHash hash;
  hash.add(int64_t{1});  // version of this list
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
  return hash.digest();
}

}  // namespace twell
