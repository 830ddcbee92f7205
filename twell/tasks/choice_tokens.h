// SPDX-License-Identifier: Apache-2.0
// Encodes the choices of an item as tokens.
//
// The rules are those of lm-evaluation-harness. White space at the end of the context moves to the
// continuation. Context and continuation are encoded together; of the result, the tokens beyond the
// number that the context alone gives are the continuation's. An empty context becomes the token
// that starts a text. Tokens that exceed the model's context are dropped on the left.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twell/model/config.h"
#include "twell/tasks/task.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

// Choices with the same context, which the model therefore reads only once.
struct ChoiceGroup {
  std::vector<int32_t> context;                     // at least one token
  std::vector<std::vector<int32_t>> continuations;  // at least one token each
  std::vector<int64_t> choices;                     // their indices in the item, in the same order

  // Tokens of the context and the longest continuation, less its last token, which is not fed.
  int64_t tokens() const;
};

class ChoiceEncoder {
 public:
  // begin_token: put the begin token of the tokenizer's template, if it has one, before every
  // context. The tokenizer must outlive this.
  ChoiceEncoder(const Tokenizer& tokenizer, const ModelConfig& config, bool begin_token);

  // The item's choices in groups of equal context, in the order of their first choice. InputError,
  // naming `where`, when a continuation has no tokens or more than the model accepts.
  std::vector<ChoiceGroup> encode(const TaskItem& item, const std::string& where) const;

 private:
  struct Pair {
    std::vector<int32_t> context, continuation;
  };
  Pair encode_pair(const TaskChoice& choice) const;

  const Tokenizer& tokenizer_;
  int64_t max_tokens_;
  bool begin_token_;
  int32_t prefix_;  // replaces an empty context; -1: none
};

}  // namespace twell
