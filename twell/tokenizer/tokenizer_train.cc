// SPDX-License-Identifier: Apache-2.0
// train_bpe makes a complete tokenizer from text.
#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_set>

#include "twell/base/context.h"
#include "twell/base/error.h"
#include "twell/base/json_fields.h"
#include "twell/base/utf8.h"
#include "twell/tokenizer/bpe_alphabet.h"
#include "twell/tokenizer/bpe_train.h"
#include "twell/tokenizer/normalizer.h"
#include "twell/tokenizer/tokenizer_spec.h"

namespace twell {
namespace {

using Kind = PreTokenizerStep::Kind;

constexpr size_t kBatchBytes = size_t{16} << 20;  // of text in memory per batch of word counting
constexpr int64_t kBytes = 256;
constexpr int64_t kLargestVocab = int64_t{1} << 24;

void set_pre_tokenizer(const std::string& name, TokenizerSpec& spec) {
  if (name == "gpt2") {
    spec.pre_tokenizer = {{Kind::kGpt2}};
  } else if (name == "smollm2") {
    spec.pre_tokenizer = {{Kind::kDigits}, {Kind::kGpt2}};
  } else if (name == "llama3") {
    spec.pre_tokenizer = {{Kind::kSplit, std::string(kLlama3Pattern)}};
  } else if (name == "qwen2") {
    spec.pre_tokenizer = {{Kind::kSplit, std::string(kQwen2Pattern)}};
    spec.nfc = true;
  } else {
    throw InputError(fmt::format("pre-tokenizer {} is unknown; use gpt2, smollm2, llama3 or qwen2",
                                 excerpt(name)));
  }
}

void check_special_tokens(const std::vector<std::string>& names) {
  TWELL_REQUIRE(!names.empty(), "no special token is given; the first is needed as EOS");
  std::unordered_set<std::string_view> seen;
  for (const std::string& name : names) {
    TWELL_REQUIRE(!name.empty() && find_invalid_utf8(name) == name.size(),
                  "special token {} is empty or not UTF-8", excerpt(name));
    TWELL_REQUIRE(seen.insert(name).second, "special token {} is given twice", excerpt(name));
    TWELL_REQUIRE(name.size() > 1, "special token {} is a single byte, which is a token already",
                  excerpt(name));
    // The file could not distinguish this token from the token of those other bytes.
    std::string bytes;
    TWELL_REQUIRE(!alphabet_to_bytes(name, bytes) || bytes == name,
                  "special token {} stands for other bytes in the alphabet of byte-level "
                  "vocabularies; use ASCII characters",
                  excerpt(name));
  }
}

void add_special_tokens(const std::vector<std::string>& names, TokenizerSpec& spec) {
  for (const std::string& name : names) {
    const int32_t id = static_cast<int32_t>(spec.tokens.size());
    spec.added.push_back({id, name, /*special=*/true, /*normalized=*/false, /*in_vocab=*/true});
    spec.tokens.push_back(name);
  }
  spec.eos_id = spec.added.front().id;
}

// Counts the words of all texts on all threads. Longer pre-tokens are counted in pieces: they are
// seldom words (base64, genomes), and every merge in one would scan all of it.
WordCounts count_words(Context& ctx, const TokenizerSpec& spec,
                       const std::function<bool(std::string& text)>& next_text) {
  constexpr size_t kLongestWord = 1024;
  struct Worker {
    WordCounts counts;
    PreTokenizer::Scratch scratch;
    std::string normalized;
  };
  const PreTokenizer pre_tokenizer(spec.pre_tokenizer);
  std::vector<Worker> workers(static_cast<size_t>(ctx.threads()));
  const auto count = [&](std::string_view text, Worker& worker) {
    if (spec.nfc) text = normalize_nfc(text, worker.normalized);
    pre_tokenizer.split(text, worker.scratch, [&](std::string_view word) {
      for (; !word.empty(); word.remove_prefix(std::min(word.size(), kLongestWord))) {
        const std::string_view piece = word.substr(0, kLongestWord);
        const auto entry = worker.counts.find(piece);
        if (entry != worker.counts.end()) {
          ++entry->second;
        } else {
          worker.counts.emplace(piece, 1);
        }
      }
    });
  };
  bool more = true;
  while (more) {
    std::vector<std::string> batch;
    size_t bytes = 0;
    for (std::string text; bytes < kBatchBytes && (more = next_text(text)); text.clear()) {
      bytes += text.size();
      batch.push_back(std::move(text));
    }
    ctx.parallel_for(std::ssize(batch), 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t i = begin; i < end; ++i) {
        count(batch[static_cast<size_t>(i)], workers[static_cast<size_t>(thread)]);
      }
    });
  }
  WordCounts all = std::move(workers[0].counts);
  for (size_t i = 1; i < workers.size(); ++i) {
    for (const auto& [word, times] : workers[i].counts) all[word] += times;
  }
  return all;
}

}  // namespace

Tokenizer train_bpe(const BpeTrainingOptions& options,
                    const std::function<bool(std::string& text)>& next_text) {
  TokenizerSpec spec;
  set_pre_tokenizer(options.pre_tokenizer, spec);
  check_special_tokens(options.special_tokens);
  add_special_tokens(options.special_tokens, spec);
  const size_t first_byte = spec.tokens.size();
  for (const uint8_t byte : byte_alphabet_order()) {
    spec.tokens.emplace_back(1, static_cast<char>(byte));
  }
  TWELL_REQUIRE(
      options.vocab_size >= std::ssize(spec.tokens) && options.vocab_size <= kLargestVocab,
      "a vocabulary of {} tokens cannot be learned: it has {} bytes and {} special tokens "
      "to hold, and at most {} tokens",
      options.vocab_size, kBytes, first_byte, kLargestVocab);

  Context ctx(options.threads);
  const WordCounts counts = count_words(ctx, spec, next_text);
  const size_t wanted = static_cast<size_t>(options.vocab_size);
  spec.merges = learn_merges(counts, first_byte, wanted, spec.tokens);
  TWELL_REQUIRE(spec.tokens.size() == wanted,
                "the text is too small for a vocabulary of {} tokens: it allows {} merges, which "
                "with {} bytes and {} special tokens makes {}; give more text or ask for fewer",
                wanted, spec.merges.size(), kBytes, first_byte, spec.tokens.size());
  return Tokenizer(std::move(spec));
}

}  // namespace twell
