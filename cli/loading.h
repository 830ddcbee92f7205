// SPDX-License-Identifier: Apache-2.0
// What several commands do with their input: the tokenizer of a checkpoint, and text to run on.
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

// The checkpoint's tokenizer. InputError when it is missing or gives ids the model does not have,
// which is to be found out before the weights are read.
Tokenizer load_tokenizer(const std::filesystem::path& folder, const ModelConfig& config);

// Text to run a model on: files (--data) or the held-out part of a training run's shards
// (--shards); one of them is needed.
struct TextOptions {
  std::filesystem::path shards;
  std::string json_field = "text";
  std::string bad_files = "error";
  bool begin_token = true;  // documents begin with the token of the tokenizer's template, if any
};
void add_text_options(Command& command, CommonOptions& common, TextOptions& text);

// A piece of text as ids. A document has the token that the tokenizer's template begins texts with
// in front as context, or else the end-of-text token, where there is one.
struct TextPiece {
  std::vector<int32_t> ids;
  int64_t bytes = 0;  // of text behind ids[1..]
};

// The text of the options. Made before weights are read, so that InputError comes at once when none
// is given, when it is not there, or when shards are of another tokenizer.
class TextPieces {
 public:
  // max_tokens = 0: no limit. The tokenizer outlives this.
  TextPieces(const CommonOptions& common, const TextOptions& text, const Tokenizer& tokenizer,
             int64_t max_tokens);
  // Calls use(piece), document after document (or long stretches of the shards), until the text or
  // the limit is used up or `use` returns false.
  void for_each(const std::function<bool(const TextPiece&)>& use);

 private:
  void for_each_of_shards(const std::function<bool(const TextPiece&)>& use);
  void for_each_of_files(const std::function<bool(const TextPiece&)>& use);

  const Tokenizer& tokenizer_;
  bool begin_token_;
  int64_t left_;                      // tokens still wanted
  std::unique_ptr<ShardSet> shards_;  // one of the two
  std::unique_ptr<TextSource> source_;
};

}  // namespace twell::cli
