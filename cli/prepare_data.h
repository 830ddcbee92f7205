// SPDX-License-Identifier: Apache-2.0
// From --data to a tokenizer and a folder of shards: what `train` and `tokenize` share.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cli/command_line.h"
#include "cli/progress_line.h"
#include "twell/data/shards.h"
#include "twell/data/text_source.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell::cli {

struct DataOptions {
  std::string json_field = "text";
  std::string bad_files = "error";
  int64_t max_bytes = 0;  // of text; 0: all
  double validation_fraction = 0.01;
  std::filesystem::path tokenizer;  // empty: train one
  std::string pre_tokenizer = "gpt2";
  int64_t tokenizer_sample_mib = 32;
};
// Both under the heading "Data".
void add_source_options(Command& command, DataOptions& options);
void add_tokenizer_options(Command& command, DataOptions& options);

struct DataRequest {
  const DataOptions& options;
  std::vector<std::filesystem::path> paths;
  int64_t vocab_size = 0;  // of a tokenizer to be trained
  uint64_t seed = 0;
  int threads = 0;
  bool replace = false;  // shards made from something else, instead of refusing them

  TextSourceOptions text(const LogSink& log) const;
};

struct PreparedData {
  Tokenizer tokenizer;
  std::optional<ShardCounts> written;  // empty when an earlier result was taken as it is
  double tokenize_seconds = 0.0;
  int64_t files_skipped = 0;
};

// Leaves in `folder` the shards, their tokenizer.json, and source.json: what they were made from. A
// folder made from the same source is taken as it is.
PreparedData prepare_shards(const DataRequest& request, const std::filesystem::path& folder,
                            ProgressLine& progress);

// Shards made earlier, with the tokenizer beside them.
bool holds_shards(const std::filesystem::path& folder);
// Bytes of the shards in `folder`, or else, estimated, of those that the request would make there.
int64_t shard_bytes(const DataRequest& request, const std::filesystem::path& folder);

}  // namespace twell::cli
