// SPDX-License-Identifier: Apache-2.0
// Turns --data into a tokenizer and a folder of shards, for `train` and `tokenize`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cli/loading.h"
#include "cli/progress_line.h"
#include "twell/data/shard_writer.h"
#include "twell/data/shards.h"
#include "twell/data/text_source.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell::cli {

struct DataOptions {
  TextFileOptions files;
  int64_t max_bytes = 0;  // of text to read; 0: all
  double validation_fraction = 0.01;
  std::filesystem::path tokenizer;  // empty: train one
  std::string end_token;            // of documents; empty: see load_with_end_token()
  std::string pre_tokenizer = "gpt2";
  int64_t tokenizer_sample_mib = 32;
  int64_t part_mib = 64;                 // of input in a part (TokenizeOptions::part_bytes)
  std::string changed_files = "refuse";  // or "redo"
};
// Both functions declare options under the heading "Data".
void add_source_options(Command& command, DataOptions& options);
void add_tokenizer_options(Command& command, DataOptions& options);

struct DataRequest {
  const DataOptions& options;
  std::vector<std::filesystem::path> paths;
  int64_t vocab_size = 0;  // of a newly trained tokenizer
  uint64_t seed = 0;
  int threads = 0;
  bool replace = false;  // replace shards made from another source instead of refusing them

  TextSourceOptions text(const LogSink& log) const;
};

struct PreparedData {
  Tokenizer tokenizer;
  std::optional<ShardCounts> written;  // empty when existing shards were reused
  double tokenize_seconds = 0.0;
  int64_t text_bytes = 0;  // read in this time; less than all when an interrupted job went on
  TextSkips skipped;
};

// Writes to `folder` the shards, their tokenizer.json, and source.json, which identifies their
// source. A folder made from the same source is reused, and an interrupted job goes on. When it is
// interrupted or fails, a line says what is kept.
PreparedData prepare_shards(const DataRequest& request, const std::filesystem::path& folder,
                            ProgressLine& progress);

// Whether the folder holds shards with their tokenizer.
bool holds_shards(const std::filesystem::path& folder);
// Size in bytes of the shards in `folder`; if there are none, an estimate of those that the request
// would make.
int64_t shard_bytes(const DataRequest& request, const std::filesystem::path& folder);

}  // namespace twell::cli
