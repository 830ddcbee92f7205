// SPDX-License-Identifier: Apache-2.0
// The rotary keys of config.json. Older files have rope_theta beside rope_scaling (null when
// plain), newer ones both inside rope_parameters. Internal to model.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "twell/checkpoint/config_fields.h"
#include "twell/model/config.h"

namespace twell {

// Sets rope_theta and rope_scaling of a configuration whose context is set already.
void read_rope(const Fields& fields, ModelConfig& config);
// The value of rope_scaling; null when plain.
nlohmann::json rope_scaling_to_json(const RopeScaling& rope);

}  // namespace twell
