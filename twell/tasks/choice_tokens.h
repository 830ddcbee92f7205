// SPDX-License-Identifier: Apache-2.0
// The choices of an item as tokens.
//
// As in lm-evaluation-harness: white space at the end of the context belongs to the continuation;
// context and continuation are encoded together, and the tokens behind those of the context alone
// are the continuation's; an empty context becomes the token that texts begin with; what does not
// fit the model's context is cut off at the left.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twell/model/config.h"
#include "twell/tasks/task.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

// Choices with the same context, which goes through the model once.
struct ChoiceGroup {
  std::vector<int32_t> context;                     // at least one token
  std::vector<std::vector<int32_t>> continuations;  // at least one token each
  std::vector<int64_t> choices;                     // of the item, in the same order

  // Of the context and the longest continuation, whose last token is not fed.
  int64_t tokens() const;
};

class ChoiceEncoder {
 public:
  // begin_token: put the token that the tokenizer's template begins texts with, where it has one,
  // in front of every context. The tokenizer must outlive this.
  ChoiceEncoder(const Tokenizer& tokenizer, const ModelConfig& config, bool begin_token);

  // The item's choices in groups of equal context, in the order of their first choice. InputError,
  // naming `where`, when a continuation has no tokens or more than the model takes.
  std::vector<ChoiceGroup> encode(const TaskItem& item, const std::string& where) const;

 private:
  struct Pair {
    std::vector<int32_t> context, continuation;
  };
  Pair encode_pair(const TaskChoice& choice) const;

  const Tokenizer& tokenizer_;
  int64_t max_tokens_;
  bool begin_token_;
  int32_t prefix_;  // stands for an empty context; -1: there is none
};

}  // namespace twell
