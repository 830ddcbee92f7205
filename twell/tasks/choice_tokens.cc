// SPDX-License-Identifier: Apache-2.0
#include "twell/tasks/choice_tokens.h"

#include <algorithm>

#include "twell/base/error.h"
#include "twell/tasks/text_ops.h"

namespace twell {
namespace {

int32_t prefix_token(const Tokenizer& tokenizer, const ModelConfig& config) {
  if (config.bos_token >= 0) return static_cast<int32_t>(config.bos_token);
  return tokenizer.bos_token() >= 0 ? tokenizer.bos_token() : tokenizer.eos_token();
}

}  // namespace

int64_t ChoiceGroup::tokens() const {
  size_t longest = 0;
  for (const std::vector<int32_t>& continuation : continuations) {
    longest = std::max(longest, continuation.size());
  }
  return std::ssize(context) + static_cast<int64_t>(longest) - 1;
}

ChoiceEncoder::ChoiceEncoder(const Tokenizer& tokenizer, const ModelConfig& config,
                             bool begin_token)
    : tokenizer_(tokenizer),
      max_tokens_(config.context),
      begin_token_(begin_token),
      prefix_(prefix_token(tokenizer, config)) {}

ChoiceEncoder::Pair ChoiceEncoder::encode_pair(const TaskChoice& choice) const {
  Pair out;
  if (choice.context.empty()) {
    if (prefix_ >= 0) out.context.push_back(prefix_);
    tokenizer_.encode(choice.continuation, out.continuation);
    return out;
  }
  std::vector<int32_t> whole;
  tokenizer_.encode_sequence(choice.context + choice.continuation, whole, begin_token_);
  tokenizer_.encode_sequence(strip_end(choice.context), out.context, begin_token_);
  const size_t boundary = std::min(out.context.size(), whole.size());
  out.continuation.assign(whole.begin() + static_cast<int64_t>(boundary), whole.end());
  return out;
}

std::vector<ChoiceGroup> ChoiceEncoder::encode(const TaskItem& item,
                                               const std::string& where) const {
  std::vector<ChoiceGroup> groups;
  for (size_t i = 0; i < item.choices.size(); ++i) {
    Pair pair = encode_pair(item.choices[i]);
    const int64_t scored = std::ssize(pair.continuation);
    TWELL_REQUIRE(!pair.context.empty(),
                  "{}: the context of choice {} is empty, and the tokenizer has no token that "
                  "texts begin or end with",
                  where, i);
    TWELL_REQUIRE(scored > 0, "{}: choice {} adds no token to its context", where, i);
    TWELL_REQUIRE(scored <= max_tokens_,
                  "{}: choice {} has {} tokens, more than the model's context of {}", where, i,
                  scored, max_tokens_);
    const int64_t excess = std::ssize(pair.context) + scored - 1 - max_tokens_;
    if (excess > 0) pair.context.erase(pair.context.begin(), pair.context.begin() + excess);
    auto group = std::find_if(groups.begin(), groups.end(), [&](const ChoiceGroup& other) {
      return other.context == pair.context;
    });
    if (group == groups.end()) {
      group = groups.insert(
          group,
          ChoiceGroup{.context = std::move(pair.context), .continuations = {}, .choices = {}});
    }
    group->continuations.push_back(std::move(pair.continuation));
    group->choices.push_back(static_cast<int64_t>(i));
  }
  return groups;
}

}  // namespace twell
