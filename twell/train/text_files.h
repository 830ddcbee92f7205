// SPDX-License-Identifier: Apache-2.0
// The files of a checkpoint beside its weights: tokenizer.json, and those by which transformers and
// lm-eval know the special tokens, the end of a text and the longest sequence.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "twell/model/config.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

inline constexpr const char* kGenerationConfig = "generation_config.json";

// The contents of files by their path in a checkpoint.
using TextFiles = std::map<std::string, std::string>;

// The files of a checkpoint that say what its tokenizer and its texts are, where it has them:
// tokenizer_config.json, generation_config.json, chat templates. A model trained from this
// checkpoint keeps them.
TextFiles text_files_of(const std::filesystem::path& checkpoint);

// Adds tokenizer_config.json and generation_config.json where they are missing: end, begin and
// padding token, and the longest sequence. Padding is the tokenizer's own token for it, or else its
// end token.
void complete_text_files(TextFiles& files, const ModelConfig& config, const Tokenizer& tokenizer);

// Writes tokenizer.json, and `kept` completed.
void save_text_files(const std::filesystem::path& folder, const ModelConfig& config,
                     const Tokenizer& tokenizer, TextFiles kept = {});

}  // namespace twell
