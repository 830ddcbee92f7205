// SPDX-License-Identifier: Apache-2.0
// A tokenizer as plain data: what tokenizer.json says, checked. Reading, writing, hashing and
// training work on this; Tokenizer is built from it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
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
  bool lstrip = false, rstrip = false;  // takes the white space before it, behind it
};

// What a BPE converted from SentencePiece (Llama 2, Mistral, TinyLlama) does to a text. Its tokens
// are spelled in UTF-8 with kSpaceMark for a space, and a character without a token becomes its
// bytes, which have the tokens <0x00> to <0xFF>.
struct SentencePieceSpec {
  enum class Metaspace { kNone, kNever, kFirst, kAlways };

  bool prepend = false;      // normalizer: a mark before each stretch between added tokens
  bool replace = false;      // normalizer: a mark for every space
  bool split = false;        // pre-tokenizer: cuts before every mark
  bool strip_space = false;  // decoder: takes one space off the start of a text
  // Pre-tokenizer: marks for spaces, and one in front of a stretch that has none there: never, at
  // the start of the text, or always.
  Metaspace metaspace = Metaspace::kNone;
};
inline constexpr std::string_view kSpaceMark = "\u2581";  // "▁"

struct TokenizerSpec {
  // [V] by id: raw bytes; of an added token, its content; with sentence_piece, the file's spelling.
  std::vector<std::string> tokens;
  std::vector<AddedToken> added;  // by id
  std::vector<BpeMerge> merges;   // by rank
  bool ignore_merges = false;     // a pre-token that is a token is taken whole (Llama-3)
  int32_t unknown_id = -1;        // for bytes without a token; they are dropped when it is -1
  bool nfc = false;
  std::optional<SentencePieceSpec> sentence_piece;  // without it, the tokenizer is byte-level
  std::vector<PreTokenizerStep> pre_tokenizer;
  int32_t bos_id = -1;  // what the post-processor's template puts before a text
};

// InputError "<source>: ..." in one line for anything malformed, inconsistent or not supported.
TokenizerSpec parse_tokenizer_json(std::string_view json, const std::string& source);
std::string write_tokenizer_json(const TokenizerSpec& spec);
// The tokens that merges can start from or make, by TokenizerSpec::tokens: those of the vocabulary.
// Of a byte-level one those that it lists in the byte alphabet. An added token listed there under
// its plain text is one of them only when its bytes read the same both ways (as ASCII without
// spaces does).
std::unordered_map<std::string, int32_t> mergeable_ids(const TokenizerSpec& spec);
// How the file spells a token.
std::string token_name(const TokenizerSpec& spec, int32_t id);
// XXH3-128 over everything that changes how text becomes ids.
std::string hash_tokenizer(const TokenizerSpec& spec);

// What models call the token between documents, in the order in which eos_token() looks for them.
std::span<const std::string_view> eos_names();

struct TokenizerAccess {
  static Tokenizer make(TokenizerSpec spec);
};

}  // namespace twell
