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
    chat.render({.messages = R"([{"role": "system", "content": "s\u00a0"},
                                 {"role": "user", "content": [{"type": "text", "text": "a 1"}]},
                                 {"role": "assistant", "content": null,
                                  "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, 2.5]}}}]},
                                 {"role": "tool", "content": "b"}])",
                 .tools = R"([{"function": {"name": "f", "parameters": {"type": "object"}}}])",
                 .variables = R"({"x": "Text", "n": [3, 1, 2], "d": {"a": {"b": 1}, "c": 2}})"});
  } catch (const twell::InputError&) {
  }
  return 0;
}
