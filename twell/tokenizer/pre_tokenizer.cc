// SPDX-License-Identifier: Apache-2.0
#include "twell/tokenizer/pre_tokenizer.h"

#include "twell/base/utf8.h"

namespace twell {

const std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
const std::string_view kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})"
    R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
const std::string_view kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N})"
    R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

namespace {

std::string_view pattern_of(const PreTokenizerStep& step) {
  using Kind = PreTokenizerStep::Kind;
  if (step.kind == Kind::kGpt2) return kGpt2Pattern;
  if (step.kind == Kind::kDigits) return R"(\p{N})";
  return step.kind == Kind::kDigitRuns ? R"(\p{N}+)" : std::string_view(step.pattern);
}

}  // namespace

Utf8Stretch next_utf8_stretch(std::string_view text) {
  constexpr size_t kLongestCharacter = 4;
  const size_t valid = find_invalid_utf8(text);
  if (valid > 0 || text.empty()) return {valid, true};
  size_t size = 1;
  while (size < text.size() && find_invalid_utf8(text.substr(size, kLongestCharacter)) == 0) ++size;
  return {size, false};
}

PreTokenizer::PreTokenizer(const std::vector<PreTokenizerStep>& steps) {
  for (const PreTokenizerStep& step : steps) steps_.emplace_back(pattern_of(step));
}

}  // namespace twell
