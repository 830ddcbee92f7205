// SPDX-License-Identifier: Apache-2.0
#include "twell/data/shard_manifest.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "twell/base/error.h"
#include "twell/base/json.h"
#include "twell/base/json_fields.h"

namespace twell {
namespace {

using nlohmann::json;

constexpr std::string_view kFormat = "twell-shards";
constexpr int64_t kVersion = 1;
constexpr int kDepth = 4;  // {"train": {"shards": [{...}]}}
// Far above any corpus, yet small enough that sums and sizes in bytes cannot overflow.
constexpr int64_t kMaxCount = int64_t{1} << 56;

std::string_view dtype_of(const ShardManifest& manifest) {
  return manifest.id_bytes() == 2 ? "u16" : "u32";
}

int64_t integer(const JsonFields& fields, std::string_view name, int64_t lowest, int64_t highest) {
  const int64_t value = fields.integer(name);
  TWELL_REQUIRE(value >= lowest && value <= highest,
                "{}: \"{}\" must be an integer from {} to {}, got {}", fields.where(), name, lowest,
                highest, value);
  return value;
}

int64_t count(const JsonFields& fields, std::string_view name) {
  return integer(fields, name, 0, kMaxCount);
}

bool is_plain_name(std::string_view name) {
  const auto plain = [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  return !name.empty() && name.size() <= 255 && name[0] != '.' &&
         std::all_of(name.begin(), name.end(), plain);
}

uint64_t parse_crc64(const JsonFields& shard) {
  const std::string digits = shard.text("crc64");
  const bool valid =
      digits.size() == 16 && digits.find_first_not_of("0123456789abcdef") == std::string::npos;
  TWELL_REQUIRE(valid, "{}: \"crc64\" must be 16 hex digits", shard.where());
  return std::stoull(digits, nullptr, 16);
}

std::vector<ShardFile> parse_shards(const JsonFields& split, int64_t total,
                                    std::set<std::string>& names) {
  std::vector<ShardFile> shards;
  int64_t left = total;
  for (const json& entry : split.array("shards")) {
    const JsonFields fields(entry, fmt::format("{}, shard {}", split.where(), shards.size()));
    const std::string name = fields.text("file");
    TWELL_REQUIRE(is_plain_name(name), "{}: \"file\" must be the plain name of a file beside it",
                  fields.where());
    TWELL_REQUIRE(names.insert(name).second, "{}: {} is listed twice", fields.where(), name);
    shards.push_back({name, integer(fields, "tokens", 1, kMaxCount), parse_crc64(fields)});
    left -= shards.back().tokens;
    TWELL_REQUIRE(left >= 0, "{}: more tokens than the {} of the split", fields.where(), total);
  }
  TWELL_REQUIRE(left == 0, "{}: the shards hold {} of {} tokens", split.where(), total - left,
                total);
  return shards;
}

}  // namespace

std::string_view split_name(Split split) { return split == Split::kTrain ? "train" : "validation"; }

std::string to_json(const ShardManifest& manifest) {
  nlohmann::ordered_json root;
  root["format"] = kFormat;
  root["version"] = kVersion;
  root["tokenizer_hash"] = manifest.tokenizer_hash;
  root["vocab_size"] = manifest.vocab_size;
  root["dtype"] = dtype_of(manifest);
  root["seed"] = manifest.seed;
  root["validation_fraction"] = manifest.validation_fraction;
  root["documents"] = manifest.counts.documents;
  root["text_bytes"] = manifest.counts.text_bytes;
  root["validation_text_bytes"] = manifest.counts.validation_text_bytes;
  for (const Split split : {Split::kTrain, Split::kValidation}) {
    nlohmann::ordered_json& entry = root[std::string(split_name(split))];
    entry["tokens"] = manifest.tokens(split);
    entry["shards"] = nlohmann::ordered_json::array();
    for (const ShardFile& shard : manifest.shards[static_cast<size_t>(split)]) {
      entry["shards"].push_back({{"file", shard.name},
                                 {"tokens", shard.tokens},
                                 {"crc64", fmt::format("{:016x}", shard.crc64)}});
    }
  }
  return root.dump(1) + "\n";
}

ShardManifest parse_shard_manifest(std::string_view text, const std::string& source) {
  const json root = parse_json(text, source, {.depth = kDepth});
  const JsonFields fields(root, source);
  TWELL_REQUIRE(fields.text("format") == kFormat, "{}: not the manifest of token shards", source);
  const int64_t version = integer(fields, "version", 1, kMaxCount);
  TWELL_REQUIRE(version == kVersion, "{}: version {} of the format, this program reads version {}",
                source, version, kVersion);

  ShardManifest manifest;
  manifest.tokenizer_hash = fields.text("tokenizer_hash");
  manifest.vocab_size = integer(fields, "vocab_size", 1, INT32_MAX);
  TWELL_REQUIRE(fields.text("dtype") == dtype_of(manifest),
                "{}: \"dtype\" must be {} for a vocabulary of {}", source, dtype_of(manifest),
                manifest.vocab_size);
  manifest.seed = fields.unsigned_integer("seed");
  manifest.validation_fraction = fields.number("validation_fraction");
  manifest.counts.documents = count(fields, "documents");
  manifest.counts.text_bytes = count(fields, "text_bytes");
  manifest.counts.validation_text_bytes = count(fields, "validation_text_bytes");
  std::set<std::string> names;
  for (const Split split : {Split::kTrain, Split::kValidation}) {
    const std::string name(split_name(split));
    const JsonFields entry(fields.object(name), fmt::format("{}, {}", source, name));
    const int64_t tokens = count(entry, "tokens");
    (split == Split::kTrain ? manifest.counts.train_tokens : manifest.counts.validation_tokens) =
        tokens;
    manifest.shards[static_cast<size_t>(split)] = parse_shards(entry, tokens, names);
  }
  return manifest;
}

}  // namespace twell
