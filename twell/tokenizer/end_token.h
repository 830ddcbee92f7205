// SPDX-License-Identifier: Apache-2.0
// The token between documents, eos_token() of a tokenizer. A tokenizer.json does not tell it; the
// files that stand beside it do. Only added tokens count, which no text can spell by accident.
#pragma once

#include <filesystem>
#include <string>

#include "twell/tokenizer/tokenizer.h"

namespace twell {

// Tokenizer::load() with an end token of this name. Empty: it is the first added token that is
// named by tokenizer_config.json ("eos_token"), config.json or generation_config.json
// ("eos_token_id", one or a list) beside the file, in this order, or else one with a name that is
// known, such as "<|endoftext|>". InputError when there is no added token of the given name, and
// for a file that is no JSON object.
Tokenizer load_with_end_token(const std::filesystem::path& path, const std::string& name);

// Whether the tokenizer's end token is not the one that it would have without such files.
bool has_declared_end_token(const Tokenizer& tokenizer);

// Writes tokenizer.json, and tokenizer_config.json with the end token's name.
void save_with_end_token(const Tokenizer& tokenizer, const std::filesystem::path& folder);

}  // namespace twell
