// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/base/error.h"
#include "twell/data/batch_sampler.h"
#include "twell/data/shards.h"
#include "twell/data/split_writer.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

ShardManifest read_manifest(const fs::path& folder) {
  TWELL_REQUIRE(fs::is_directory(folder), "{} is not a folder of token shards", folder.string());
  const fs::path path = folder / "manifest.json";
  TWELL_REQUIRE(fs::exists(path), "{} is not a folder of token shards: it has no manifest.json",
                folder.string());
  const MappedFile file(path);
  constexpr size_t kMaxBytes = size_t{64} << 20;  // enough for half a million shards
  TWELL_REQUIRE(file.bytes().size() <= kMaxBytes, "{}: larger than {} MiB", path.string(),
                kMaxBytes >> 20);
  return parse_shard_manifest(
      {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()}, path.string());
}

}  // namespace

ShardSet::ShardSet(const fs::path& folder, const Tokenizer& tokenizer)
    : ShardSet(folder, tokenizer.hash(), tokenizer.vocab_size()) {
  end_token_ = tokenizer.eos_token();
}

ShardSet::ShardSet(const fs::path& folder, const std::string& tokenizer_hash, int64_t vocab_size)
    : manifest_(read_manifest(folder)) {
  TWELL_REQUIRE(manifest_.tokenizer_hash == tokenizer_hash && manifest_.vocab_size == vocab_size,
                "the shards in {} were made with tokenizer {} of {} tokens, but the tokenizer in "
                "use is {} of {} tokens: use the former, or tokenize the text again",
                folder.string(), manifest_.tokenizer_hash, manifest_.vocab_size, tokenizer_hash,
                vocab_size);
  for (const Split split : {Split::kTrain, Split::kValidation}) map(split, folder);
}

void ShardSet::map(Split split, const fs::path& folder) {
  Stream& stream = streams_[static_cast<size_t>(split)];
  int64_t begin = 0;
  for (const ShardFile& shard : manifest_.shards[static_cast<size_t>(split)]) {
    const MappedFile& file = stream.files.emplace_back(folder / shard.name);
    const int64_t expected = shard.tokens * manifest_.id_bytes();
    TWELL_REQUIRE(std::ssize(file.bytes()) == expected,
                  "{} has {} bytes, but its manifest says {}: the shards are damaged, tokenize the "
                  "text again",
                  file.path().string(), file.bytes().size(), expected);
    stream.begins.push_back(begin);
    begin += shard.tokens;
  }
}

void ShardSet::read(Split split, int64_t begin, std::span<int32_t> out) const {
  TWELL_CHECK(begin >= 0 && begin <= tokens(split) && std::ssize(out) <= tokens(split) - begin,
              "tokens {} + {} of {}", begin, out.size(), tokens(split));
  if (out.empty()) return;
  const Stream& source = stream(split);
  const auto after = std::upper_bound(source.begins.begin(), source.begins.end(), begin);
  for (auto s = static_cast<size_t>(after - source.begins.begin()) - 1; !out.empty(); ++s) {
    const MappedFile& file = source.files[s];
    const int64_t offset = begin - source.begins[s];
    const int64_t in_file = std::ssize(file.bytes()) / manifest_.id_bytes() - offset;
    const auto part = out.first(static_cast<size_t>(std::min<int64_t>(in_file, std::ssize(out))));
    const uint32_t largest =
        unpack_ids(file.bytes().data() + offset * manifest_.id_bytes(), manifest_.id_bytes(), part);
    TWELL_REQUIRE(largest < manifest_.vocab_size,
                  "{} holds token {}, outside the vocabulary of {}: the shards are damaged, "
                  "tokenize the text again",
                  file.path().string(), largest, manifest_.vocab_size);
    begin += std::ssize(part);
    out = out.subspan(part.size());
  }
}

void ShardSet::read_sequence(Split split, int64_t index, std::span<int32_t> inputs,
                             std::span<int32_t> targets) const {
  const int64_t length = std::ssize(inputs);
  read(split, index * length, inputs);
  // All targets but the last are also inputs, so the shards are read only once.
  std::copy(inputs.begin() + 1, inputs.end(), targets.begin());
  read(split, (index + 1) * length, targets.last(1));
}

void ShardSet::add_documents(Split, int64_t, std::span<const int32_t> inputs,
                             std::vector<int64_t>& lengths) const {
  const std::vector<int64_t> found = document_lengths(inputs, std::ssize(inputs), end_token_);
  lengths.insert(lengths.end(), found.begin(), found.end());
}

std::string ShardSet::identity() const {
  return fmt::format("{} train + {} validation", tokens(Split::kTrain), tokens(Split::kValidation));
}

void ShardSet::verify() const {
  for (const Split split : {Split::kTrain, Split::kValidation}) {
    const std::vector<ShardFile>& shards = manifest_.shards[static_cast<size_t>(split)];
    for (size_t s = 0; s < shards.size(); ++s) {
      const MappedFile& file = stream(split).files[s];
      TWELL_REQUIRE(crc64(file.bytes()) == shards[s].crc64,
                    "{} was altered (its checksum differs): tokenize the text again",
                    file.path().string());
    }
  }
}

}  // namespace twell
