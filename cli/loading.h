// SPDX-License-Identifier: Apache-2.0
// What several commands do with their input: the tokenizer of a checkpoint, and text to run on.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "cli/options.h"
#include "twell/data/tokenizer.h"
#include "twell/model/config.h"

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
};
void add_text_options(CLI::App& command, CommonOptions& common, TextOptions& text);

// A piece of text as ids, the end-of-text token (where there is one) in front as context.
struct TextPiece {
  std::vector<int32_t> ids;
  int64_t bytes = 0;  // of text behind ids[1..]
};
// Calls use(piece), document after document (or long stretches of the shards), until the text or
// max_tokens (0: no limit) is used up or `use` returns false.
void for_each_piece(const CommonOptions& common, const TextOptions& text,
                    const Tokenizer& tokenizer, int64_t max_tokens,
                    const std::function<bool(const TextPiece&)>& use);

}  // namespace twell::cli
