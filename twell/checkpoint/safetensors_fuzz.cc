// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include "twell/base/error.h"
#include "twell/checkpoint/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto bytes = std::as_bytes(std::span(data, size));
    for (const auto& [name, info] : twell::parse_safetensors(bytes, "fuzz").tensors) {
      // Tensors of an accepted file lie within the file.
      [[maybe_unused]] volatile std::byte last{};
      if (!info.bytes.empty()) last = info.bytes.back();
    }
  } catch (const twell::InputError&) {
  }
  return 0;
}
