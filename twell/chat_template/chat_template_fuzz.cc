// SPDX-License-Identifier: Apache-2.0
// Arbitrary bytes as template and conversation are rendered or give an InputError.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "twell/base/error.h"
#include "twell/chat_template/chat_template.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const auto chat = twell::ChatTemplate::parse(R"({"bos_token": "<s>", "eos_token": "</s>"})",
                                                 "fuzz", text.empty() ? " " : text);
    chat.render({{"system", "s"}, {"user", "a 1"}, {"assistant", "b"}}, true);
  } catch (const twell::InputError&) {
  }
  return 0;
}
