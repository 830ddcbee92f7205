// SPDX-License-Identifier: Apache-2.0
// The parts of tokenizer.json around the model: normalizer, pre-tokenizer, post-processor, decoder.
// Each reader takes the part's JSON (nullptr for null or missing) and refuses by name what is not
// supported; each writer is the inverse.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>
#include <vector>

#include "twell/tokenizer/tokenizer_spec.h"

namespace twell {

// Whether the text is brought into form C: null, "NFC", or a "Sequence" of it.
bool read_normalizer(const nlohmann::json* part);
nlohmann::ordered_json write_normalizer(bool nfc);

// "ByteLevel", or a "Sequence" of "Split", "Digits" and, last, "ByteLevel".
std::vector<PreTokenizerStep> read_pre_tokenizer(const nlohmann::json* part);
nlohmann::ordered_json write_pre_tokenizer(const std::vector<PreTokenizerStep>& steps);

// "ByteLevel" and "TemplateProcessing", or a "Sequence" of them. Returns the id of the one token
// that the template puts before a text, -1 when there is none. Needs spec.tokens and spec.added.
// What ByteLevel says here concerns offsets in the text only, and is not kept.
int32_t read_post_processor(const nlohmann::json* part, const TokenizerSpec& spec);
nlohmann::ordered_json write_post_processor(const TokenizerSpec& spec);

// Only "ByteLevel".
void read_decoder(const nlohmann::json* part);
nlohmann::ordered_json write_decoder();

// The tokens that merges can start from or make, by their bytes: those the vocabulary lists in the
// byte alphabet. An added token listed there under its plain text is one of them only when its
// bytes read the same both ways (as ASCII without spaces does).
std::unordered_map<std::string, int32_t> mergeable_ids(const TokenizerSpec& spec);

// How the file spells a token: an added one by its content, another in the byte alphabet.
std::string token_name(const TokenizerSpec& spec, int32_t id);

}  // namespace twell
