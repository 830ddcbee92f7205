// SPDX-License-Identifier: Apache-2.0
// Turns text into a folder of token shards: manifest.json (shard_manifest.h), source.json (what
// they were made from), and files of token ids (little-endian u16 when the vocabulary allows, else
// u32). EOS ends every document.
//
// The text is cut into parts (TextSource::parts), each with shards of its own, so that parts are
// made in parallel and a finished part is kept when the job is interrupted (shard_work.h). Several
// threads work on a part when there are fewer parts than threads. The result depends only on the
// text, the tokenizer and the options, not on the threads or on interruptions.
//
// Train and validation: each document goes whole to one split, chosen by a hash of its text (its
// first piece, when it comes in several) and the seed. So the split does not depend on the order of
// the documents, and copies of a document are on the same side. Documents are assigned with
// probability validation_fraction, but the target is that share of the tokens. If validation gets
// fewer than half or more than twice its target (few documents, or one giant), the tail of the
// train stream moves to the end of the validation stream, or the reverse, until the share is exact.
// The target is at least 4,097 tokens (two windows of 2,048) or a tenth of all, whichever is less.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "twell/data/shard_manifest.h"
#include "twell/data/text_source.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

struct TokenizeProgress {
  int64_t bytes_read = 0, total_bytes = 0;  // on disk
  int64_t kept_bytes = 0;                   // of bytes_read: in parts finished by an earlier job
  int64_t text_bytes = 0;                   // of text read by this job
  int64_t tokens = 0;                       // kept ones included
  int64_t parts_finished = 0, parts = 0;
};

struct TokenizeOptions {
  double validation_fraction = 0.01;  // in [0, 1); 0: no validation split
  int64_t shard_tokens = int64_t{1} << 26;
  int64_t part_bytes = int64_t{64} << 20;  // on disk; an interruption loses at most one per thread
  uint64_t seed = 0;
  int threads = 0;
  bool redo_changed = false;  // make finished parts again whose files have changed; else refuse
  // Called about ten times a second, and at the end. What it throws ends the job.
  std::function<void(const TokenizeProgress&)> progress;
};

// What a ShardWriter needs from a tokenizer.
struct TokenEncoder {
  // Appends the ids of a text; called from several threads at once.
  std::function<void(std::string_view text, std::vector<int32_t>& ids)> encode;
  std::function<int64_t(int32_t id)> token_bytes;  // bytes of text that a token represents
  int32_t eos = -1;
  int64_t vocab_size = 0;
  std::string hash;

  // Special tokens spelled out in the text stay plain text, so a document cannot contain EOS.
  static TokenEncoder of(const Tokenizer& tokenizer);  // must outlive the result
};

class ShardWriter {
 public:
  // The source's files are listed already; its stream is not used. `tokenizer` stands for the
  // tokenizer or the way it will be made. InputError: options out of range; and see ShardWork.
  ShardWriter(TextSource& source, const nlohmann::json& tokenizer,
              const std::filesystem::path& folder, const TokenizeOptions& options, bool replace);
  ~ShardWriter();
  // Whether `folder` is complete and was made from the same files with the same options.
  static bool made(TextSource& source, const nlohmann::json& tokenizer,
                   const std::filesystem::path& folder, const TokenizeOptions& options);

  // Where the shards are made: `<folder>.partial`. Other files in it must be named
  // tokenizer.json or tokenizer_config.json.
  const std::filesystem::path& work_folder() const;
  int64_t parts() const;
  int64_t finished_parts() const;
  // Makes the remaining parts and puts the folder in place. After a failure finished parts are kept
  // in work_folder(), and `folder` is as before. The source's log is called from this thread only.
  // InputError: faults of the source; no tokens for one of the splits; a tokenizer without EOS; a
  // full disk.
  ShardCounts write(const TokenEncoder& encoder);
  TextSkips skipped() const;  // after write(); in kept parts too

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A ShardWriter's whole work, which goes on where an earlier call with the same arguments was
// interrupted and replaces a folder made otherwise.
ShardCounts write_shards(TextSource& source, const TokenEncoder& encoder,
                         const std::filesystem::path& folder, const TokenizeOptions& options);

}  // namespace twell
