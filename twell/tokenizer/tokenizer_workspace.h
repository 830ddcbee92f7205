// SPDX-License-Identifier: Apache-2.0
// Working memory and word caches of one encode() call, kept for later calls.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "twell/tokenizer/bpe.h"
#include "twell/tokenizer/pre_tokenizer.h"
#include "twell/tokenizer/tokenizer_cache.h"

namespace twell {

struct TokenizerWorkspace {
  WordCache words;
  LongWordCache long_words;
  Bpe::Scratch bpe;
  PreTokenizer::Scratch regex;
  std::string normalized, spaced, marked;  // after NFC, normalizer's, pre-tokenizer's marks
  std::vector<int32_t> symbols;            // of a word, for SentencePiece tokenizers
};

// Lends each caller a separate workspace, so that encode() can run on many threads at once.
class TokenizerWorkspacePool {
 public:
  class Lease {
   public:
    explicit Lease(TokenizerWorkspacePool& pool) : pool_(pool), workspace_(pool.take()) {}
    ~Lease() { pool_.give_back(std::move(workspace_)); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    TokenizerWorkspace& operator*() const { return *workspace_; }

   private:
    TokenizerWorkspacePool& pool_;
    std::unique_ptr<TokenizerWorkspace> workspace_;
  };

 private:
  std::unique_ptr<TokenizerWorkspace> take() {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        std::unique_ptr<TokenizerWorkspace> workspace = std::move(idle_.back());
        idle_.pop_back();
        return workspace;
      }
    }
    return std::make_unique<TokenizerWorkspace>();
  }
  void give_back(std::unique_ptr<TokenizerWorkspace> workspace) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(workspace));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<TokenizerWorkspace>> idle_;
};

}  // namespace twell
