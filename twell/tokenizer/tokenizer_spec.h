// SPDX-License-Identifier: Apache-2.0
// A tokenizer as plain data: what tokenizer.json says, checked. Reading, writing, hashing and
// training work on this; Tokenizer is built from it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "twell/tokenizer/bpe.h"
#include "twell/tokenizer/pre_tokenizer.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

// A token found in the text before anything else is done to it.
struct AddedToken {
  int32_t id = -1;
  std::string content = {};
  bool special = false;
  bool normalized = false;  // looked for in the normalized text instead of the text as given
  bool in_vocab = false;    // also listed in the model's vocabulary
};

struct TokenizerSpec {
  std::vector<std::string> tokens;  // [V] raw bytes by id; of an added token, its content
  std::vector<AddedToken> added;    // by id
  std::vector<BpeMerge> merges;     // by rank
  bool ignore_merges = false;       // a pre-token that is a token is taken whole (Llama-3)
  int32_t unknown_id = -1;          // for bytes without a token; they are dropped when it is -1
  bool nfc = false;
  std::vector<PreTokenizerStep> pre_tokenizer;
  int32_t bos_id = -1;  // what the post-processor's template puts before a text
};

// InputError "<source>: ..." in one line for anything malformed, inconsistent or not supported.
TokenizerSpec parse_tokenizer_json(std::string_view json, const std::string& source);
std::string write_tokenizer_json(const TokenizerSpec& spec);
// XXH3-128 over everything that changes how text becomes ids.
std::string hash_tokenizer(const TokenizerSpec& spec);

// What models call the token between documents, in the order in which eos_token() looks for them.
std::span<const std::string_view> eos_names();

struct TokenizerAccess {
  static Tokenizer make(TokenizerSpec spec);
};

}  // namespace twell
