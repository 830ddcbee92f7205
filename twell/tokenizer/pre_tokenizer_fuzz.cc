// SPDX-License-Identifier: Apache-2.0
// A regular expression of a tokenizer.json, a NUL, and a text of any bytes. The expression is
// refused with an InputError, or cuts the text into pieces that are the text again; so do the
// expressions of published tokenizers. Form C of a text is its own form C.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "twell/base/error.h"
#include "twell/base/utf8.h"
#include "twell/tokenizer/normalizer.h"
#include "twell/tokenizer/pre_tokenizer.h"

namespace twell {
namespace {

void split(const PreTokenizer& steps, std::string_view text) {
  PreTokenizer::Scratch scratch;
  std::string joined;
  try {
    steps.split(text, scratch, [&](std::string_view piece) {
      TWELL_CHECK(!piece.empty(), "an empty piece");
      joined += piece;
    });
  } catch (const InputError&) {
    return;  // the expression backtracks without end
  }
  TWELL_CHECK(joined == text, "the pieces are not the text");
}

void run(std::string_view pattern, std::string_view text) {
  using Kind = PreTokenizerStep::Kind;
  static const PreTokenizer gpt2({{Kind::kDigits}, {Kind::kGpt2}});
  static const PreTokenizer llama3({{Kind::kSplit, std::string(kLlama3Pattern)}});
  static const PreTokenizer qwen2({{Kind::kDigitRuns}, {Kind::kSplit, std::string(kQwen2Pattern)}});
  for (const PreTokenizer* published : {&gpt2, &llama3, &qwen2}) split(*published, text);
  try {
    split(PreTokenizer({{Kind::kSplit, std::string(pattern)}}), text);
  } catch (const InputError&) {
  }

  std::string first, second;
  const std::string_view normal = normalize_nfc(text, first);
  TWELL_CHECK(normalize_nfc(normal, second) == normal, "form C is not its own form C");
  const bool valid = find_invalid_utf8(text) == text.size();
  TWELL_CHECK(!valid || find_invalid_utf8(normal) == normal.size(), "form C is not UTF-8");
  for (size_t limit = 0; limit < 8; ++limit) {
    const size_t prefix = utf8_prefix(text, limit);
    TWELL_CHECK(prefix <= limit && (!valid || find_invalid_utf8(text.substr(0, prefix)) == prefix),
                "a prefix of {} bytes ends within a character", prefix);
  }
}

}  // namespace
}  // namespace twell

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = std::min(input.find('\0'), input.size());
  twell::run(input.substr(0, end), input.substr(std::min(end + 1, input.size())));
  return 0;
}
