// SPDX-License-Identifier: Apache-2.0
// BPE tokenizer, read from and written to Hugging Face tokenizer.json: byte-level, or converted
// from SentencePiece with byte_fallback (Llama 2, Mistral, TinyLlama).
//
// decode(encode(text)) == text for any bytes, invalid UTF-8 included, when lossless(). A file is
// not lossless if it has NFC normalization (decoding gives form C), a vocabulary without a token
// for every byte (such bytes become "unk_token" or are dropped), or SentencePiece's mark for spaces
// (U+2581 in a text becomes a space).
// The ids are those of Hugging Face `tokenizers` with add_special_tokens=False. That library
// accepts valid UTF-8 only; here each stretch of invalid bytes is a separate pre-token.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace twell {

struct TokenizerSpec;

// Copies share their content.
class Tokenizer {
 public:
  explicit Tokenizer(TokenizerSpec spec);
  // InputError, naming the part, for anything unsupported in the file or those beside it.
  static Tokenizer load(const std::filesystem::path& path);
  static Tokenizer parse(std::string_view json, const std::string& source);
  std::string to_json() const;
  void save(const std::filesystem::path& path) const;  // replaces the file atomically

  // allow_special: whether added and special tokens spelled out in the text become their ids.
  std::vector<int32_t> encode(std::string_view text, bool allow_special = true) const;
  // Appends the ids to out; several threads may call it at once.
  void encode(std::string_view text, std::vector<int32_t>& out, bool allow_special = true) const;
  // Appends the ids of a sequence as transformers does: bos_token(), if the file has one and
  // begin_token is true, then those of encode().
  void encode_sequence(std::string_view text, std::vector<int32_t>& out, bool begin_token = true,
                       bool allow_special = true) const;
  std::string decode(std::span<const int32_t> ids, bool skip_special = false) const;
  std::string_view token_bytes(int32_t id) const;  // raw bytes of one token
  bool is_special(int32_t id) const;

  int64_t vocab_size() const;                  // ids are in [0, vocab_size)
  int32_t find(std::string_view token) const;  // id of an added token or raw byte string, or -1
  int32_t eos_token() const;                   // between documents (end_token.h), or -1
  int32_t bos_token() const;                   // begin token of the file's template, or -1
  bool lossless() const;
  // Hash of everything that changes how text becomes ids; hex, stable across versions.
  std::string hash() const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

struct BpeTrainingOptions {
  int64_t vocab_size = 4096;           // including special tokens and the 256 bytes
  std::string pre_tokenizer = "gpt2";  // "gpt2", "smollm2", "llama3", "qwen2"
  // The first is eos_token().
  std::vector<std::string> special_tokens = {"<|endoftext|>"};
  int threads = 0;
};
// Learns a BPE. next_text stores a piece of text and returns true, or returns false at the end.
// Ids: special tokens, the bytes in GPT-2's order, then one per merge. The result depends on the
// pieces but not on the number of threads. InputError when the text is too small.
Tokenizer train_bpe(const BpeTrainingOptions& options,
                    const std::function<bool(std::string& text)>& next_text);

}  // namespace twell
