// SPDX-License-Identifier: Apache-2.0
// libFuzzer target: any bytes as tokenizer.json give an InputError or a tokenizer that encodes,
// decodes, and can be saved and loaded. Seeds: tests/fuzz/tokenizer_json.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "twell/base/error.h"
#include "twell/tokenizer/tokenizer.h"

namespace {

constexpr std::string_view kText = "The caf\u00e9's 12 x\u0301 <|end|>\r\n  \xff\t(a)aaaa";

std::optional<twell::Tokenizer> parse(std::string_view json) {
  try {
    return twell::Tokenizer::parse(json, "fuzz");
  } catch (const twell::InputError&) {
    return std::nullopt;  // most inputs are refused
  }
}

void encode_with_both(const twell::Tokenizer& tokenizer, const twell::Tokenizer& saved,
                      const std::string& text) {
  for (const bool allow_special : {true, false}) {
    std::vector<int32_t> ids;
    try {
      ids = tokenizer.encode(text, allow_special);
    } catch (const twell::InputError&) {
      return;  // the regular expression hit its match limit
    }
    const std::string decoded = tokenizer.decode(ids);
    TWELL_CHECK(decoded == text || !tokenizer.lossless(), "the round trip changed the text");
    TWELL_CHECK(saved.encode(text, allow_special) == ids, "saving changed the ids");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view json(reinterpret_cast<const char*>(data), size);
  const std::optional<twell::Tokenizer> tokenizer = parse(json);
  if (!tokenizer) return 0;
  const auto saved = twell::Tokenizer::parse(tokenizer->to_json(), "saved");
  TWELL_CHECK(saved.hash() == tokenizer->hash(), "saving changed the hash");
  TWELL_CHECK(saved.to_json() == tokenizer->to_json(), "saving changed the file");
  encode_with_both(*tokenizer, saved, std::string(kText) + std::string(json.substr(0, 100)));
  return 0;
}
