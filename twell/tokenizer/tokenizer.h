// SPDX-License-Identifier: Apache-2.0
// BPE tokenizer, read from and written to Hugging Face tokenizer.json: byte-level, or converted
// from SentencePiece with byte_fallback (Llama 2, Mistral, TinyLlama).
//
// Round-trips any bytes: decode(encode(text)) == text, invalid UTF-8 included, but for three things
// a file can ask for, which lossless() tells: NFC normalization (a text comes back in form C), a
// vocabulary without a token for every byte (such bytes become "unk_token", or are dropped), and
// SentencePiece's mark for spaces (U+2581 in a text comes back as a space).
// The ids are those of Hugging Face `tokenizers` with add_special_tokens=False. That library takes
// valid UTF-8 only; here a stretch of invalid bytes is a pre-token of its own.
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

class Tokenizer {
 public:
  // InputError, naming the part, for anything in the file that is not supported.
  static Tokenizer load(const std::filesystem::path& path);
  static Tokenizer parse(std::string_view json, const std::string& source);
  std::string to_json() const;
  void save(const std::filesystem::path& path) const;  // atomic

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // allow_special: whether added/special tokens spelled out in the text become their ids.
  std::vector<int32_t> encode(std::string_view text, bool allow_special = true) const;
  // Appends; safe to call from several threads at once.
  void encode(std::string_view text, std::vector<int32_t>& out, bool allow_special = true) const;
  // Appends the ids that a sequence of this text begins with, as transformers gives them: those of
  // encode() behind bos_token(), where the file has one and begin_token is true.
  void encode_sequence(std::string_view text, std::vector<int32_t>& out, bool begin_token = true,
                       bool allow_special = true) const;
  std::string decode(std::span<const int32_t> ids, bool skip_special = false) const;
  std::string_view token_bytes(int32_t id) const;  // raw bytes of one token
  bool is_special(int32_t id) const;

  int64_t vocab_size() const;                  // ids are in [0, vocab_size)
  int32_t find(std::string_view token) const;  // id of an added token or raw byte string; -1
  int32_t eos_token() const;                   // "<|endoftext|>" and its kin; -1 when there is none
  int32_t bos_token() const;                   // what the file's template puts before a text; -1
  bool lossless() const;
  // Hash of everything that changes how text becomes ids; hex, stable across versions.
  std::string hash() const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  friend struct TokenizerAccess;
  std::unique_ptr<Impl> impl_;
};

struct BpeTrainingOptions {
  int64_t vocab_size = 4096;           // the special tokens and the 256 bytes included
  std::string pre_tokenizer = "gpt2";  // "gpt2", "smollm2", "llama3", "qwen2"
  // The first is EOS and has one of the names that eos_token() knows.
  std::vector<std::string> special_tokens = {"<|endoftext|>"};
  int threads = 0;
};
// Learns a BPE. next_text fills a piece of text and returns true, or returns false at the end.
// Ids: special tokens, the bytes in GPT-2's order, then one per merge. Depends on the text and its
// cut into pieces alone, not on threads. InputError when the text is too small for the vocabulary.
Tokenizer train_bpe(const BpeTrainingOptions& options,
                    const std::function<bool(std::string& text)>& next_text);

}  // namespace twell
