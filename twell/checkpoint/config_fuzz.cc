// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/checkpoint/config_json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const twell::ModelConfig config = twell::parse_config_text(text, "fuzz");
    // An accepted configuration describes a valid model and survives a round trip.
    TWELL_CHECK(config.parameter_count() > 0 && config.forward_flops_per_token(1) > 0,
                "{} parameters", config.parameter_count());
    TWELL_CHECK(twell::parse_config(twell::config_to_json(config), "again") == config,
                "the configuration does not survive writing");
  } catch (const twell::InputError&) {
  }
  return 0;
}
