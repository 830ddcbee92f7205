// SPDX-License-Identifier: Apache-2.0
// Shard sets from hostile folders. The input is a manifest, a NUL, and bytes that its files repeat;
// small files get the size that the manifest claims, so that reading passes the size check. A set
// is either refused with an InputError or gives ids within its vocabulary.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/test_folder.h"
#include "twell/data/batch_sampler.h"
#include "twell/data/shards.h"

namespace twell {
namespace {

constexpr int64_t kMaxFileBytes = 4096;
constexpr size_t kMaxFiles = 4;

void make_files(const TempFolder& folder, const ShardManifest& manifest, std::string_view content) {
  size_t files = 0;
  for (const auto& shards : manifest.shards) {
    for (const ShardFile& shard : shards) {
      const int64_t bytes = shard.tokens * manifest.id_bytes();
      if (bytes > kMaxFileBytes || ++files > kMaxFiles) continue;
      TWELL_CHECK(std::filesystem::path(shard.name).filename() == shard.name, "not a plain name");
      std::string text;
      while (std::ssize(text) < bytes)
        text += content.empty() ? std::string_view("\0", 1) : content;
      folder.write(shard.name, text.substr(0, static_cast<size_t>(bytes)));
    }
  }
}

void read_all(const ShardSet& shards, int64_t vocab_size) {
  for (const Split split : {Split::kTrain, Split::kValidation}) {
    std::vector<int32_t> ids(static_cast<size_t>(shards.tokens(split)));
    shards.read(split, 0, ids);
    for (const int32_t id : ids) TWELL_CHECK(id >= 0 && id < vocab_size, "id {}", id);
    std::vector<int32_t> inputs(3), targets(3);
    BatchSampler(shards, split, 3, 0, true).sequence(5, inputs, targets);
  }
  shards.verify();
}

void run(std::string_view input) {
  const size_t end = std::min(input.find('\0'), input.size());
  const std::string_view text = input.substr(0, end);
  try {
    const ShardManifest manifest = parse_shard_manifest(text, "manifest");
    // A parsed manifest can be written and reads back identical.
    TWELL_CHECK(to_json(parse_shard_manifest(to_json(manifest), "again")) == to_json(manifest),
                "the manifest does not round-trip");
    const TempFolder folder;
    folder.write("manifest.json", text);
    make_files(folder, manifest, input.substr(std::min(end + 1, input.size())));
    read_all(ShardSet(folder.path(), manifest.tokenizer_hash, manifest.vocab_size),
             manifest.vocab_size);
  } catch (const InputError&) {
  }
}

}  // namespace
}  // namespace twell

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  twell::run({reinterpret_cast<const char*>(data), size});
  return 0;
}
