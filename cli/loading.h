// SPDX-License-Identifier: Apache-2.0
// Input that several commands share: the tokenizer of a checkpoint, and text to run a model on.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cli/options.h"
#include "twell/data/shards.h"
#include "twell/data/text_source.h"
#include "twell/model/config.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell::cli {

// Loads the checkpoint's tokenizer. InputError when it is missing or has ids outside the model's
// vocabulary. Call it before loading the weights, which takes much longer.
Tokenizer load_tokenizer(const std::filesystem::path& folder, const ModelConfig& config);

// How files of text are read.
struct TextFileOptions {
  std::string json_field = "text";
  std::string bad_files = "error";
  void declare(Command& command);
  TextSourceOptions source(std::vector<std::filesystem::path> paths, LogSink log) const;
};

// Text to run a model on: files (--data) or the held-out part of a training run's shards
// (--shards). One of the two is required.
struct TextOptions {
  std::filesystem::path shards;
  TextFileOptions files;
  bool begin_token = true;  // documents begin with the template's begin token, if any
};
void add_text_options(Command& command, CommonOptions& common, TextOptions& text);

// A piece of text as token ids. A document starts with a context token: the begin token of the
// tokenizer's template, or else the end-of-text token, if there is one.
struct TextPiece {
  std::vector<int32_t> ids;
  int64_t bytes = 0;  // bytes of text that ids[1..] encode
};

// Reads the text of the options. Construct it before loading weights, so that InputError comes
// early when no text is given, a file is missing, or the shards belong to another tokenizer.
class TextPieces {
 public:
  // max_tokens = 0: no limit. The tokenizer must outlive this object.
  TextPieces(const CommonOptions& common, const TextOptions& text, const Tokenizer& tokenizer,
             int64_t max_tokens);
  // Calls use(piece) for each document (or long stretch of the shards) until the text or the limit
  // is exhausted or `use` returns false.
  void for_each(const std::function<bool(const TextPiece&)>& use);

 private:
  void for_each_of_shards(const std::function<bool(const TextPiece&)>& use);
  void for_each_of_files(const std::function<bool(const TextPiece&)>& use);

  const Tokenizer& tokenizer_;
  bool begin_token_;
  int64_t left_;                      // tokens left until the limit
  std::unique_ptr<ShardSet> shards_;  // either this or source_ is set
  std::unique_ptr<TextSource> source_;
};

}  // namespace twell::cli
