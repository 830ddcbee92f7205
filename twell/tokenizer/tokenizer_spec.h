// SPDX-License-Identifier: Apache-2.0
// A tokenizer as plain data: the checked contents of tokenizer.json. Reading, writing, hashing and
// training work on it; Tokenizer is built from it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "twell/tokenizer/bpe.h"
#include "twell/tokenizer/pre_tokenizer.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

// A token that is searched for in the text before pre-tokenization.
struct AddedToken {
  int32_t id = -1;
  std::string content = {};
  bool special = false;
  bool normalized = false;  // searched for in the normalized text instead of the given one
  bool in_vocab = false;    // also listed in the model's vocabulary
  bool lstrip = false, rstrip = false;  // absorbs white space before it, after it
  bool single_word = false;             // not where a character of a word stands before it or after
};

// How a BPE converted from SentencePiece (Llama 2, Mistral, TinyLlama) treats a text. Its tokens
// are spelled in UTF-8 with kSpaceMark for a space. A character without a token is encoded by its
// bytes as the tokens <0x00> to <0xFF>.
struct SentencePieceSpec {
  enum class Metaspace { kNone, kNever, kFirst, kAlways };

  bool prepend = false;      // normalizer: puts a mark before each stretch between added tokens
  bool replace = false;      // normalizer: replaces every space by a mark
  bool split = false;        // pre-tokenizer: cuts before every mark
  bool strip_space = false;  // decoder: removes one space at the start of a text
  // Pre-tokenizer: replaces spaces by marks and puts a mark before a stretch that does not start
  // with one: never, at the start of the text, or always.
  Metaspace metaspace = Metaspace::kNone;
};
inline constexpr std::string_view kSpaceMark = "\u2581";  // "▁"

struct TokenizerSpec {
  // [V] by id: raw bytes; for added tokens the content; with sentence_piece the file's spelling.
  std::vector<std::string> tokens;
  std::vector<AddedToken> added;  // in the file's order
  std::vector<BpeMerge> merges;   // by rank
  bool ignore_merges = false;     // a pre-token that is a token becomes its id (Llama-3)
  int32_t unknown_id = -1;        // for bytes without a token; -1: drop them
  bool nfc = false;
  std::optional<SentencePieceSpec> sentence_piece;  // nullopt: a byte-level tokenizer
  std::vector<PreTokenizerStep> pre_tokenizer;
  int32_t bos_id = -1;  // begin token of the post-processor's template; -1: none
  int32_t eos_id = -1;  // not in the file: of the token between documents; -1: see kEosNames
};

// InputError "<source>: ..." in one line for anything malformed, inconsistent or unsupported.
TokenizerSpec parse_tokenizer_json(std::string_view json, const std::string& source);
std::string write_tokenizer_json(const TokenizerSpec& spec);
// Ids, by raw bytes (with sentence_piece by spelling), of the tokens that merges can take or make:
// those of the vocabulary. The vocabulary reads an added token's name as all others: as spelled in
// the byte alphabet when it is byte-level, and not at all when it is not spelled in it.
std::unordered_map<std::string, int32_t> mergeable_ids(const TokenizerSpec& spec);
// The token's name in the file.
std::string token_name(const TokenizerSpec& spec, int32_t id);
// XXH3-128 over everything that changes how text becomes ids.
std::string hash_tokenizer(const TokenizerSpec& spec);

// Names that models give the token between documents, in the order in which eos_token() tries them
// where nothing declares it.
inline constexpr std::array<std::string_view, 7> kEosNames = {
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>"};

}  // namespace twell
