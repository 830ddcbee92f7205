// SPDX-License-Identifier: Apache-2.0
// Which keys of config.json are understood. Internal to model.
#pragma once

#include "twell/checkpoint/config_fields.h"
#include "twell/checkpoint/families.h"

namespace twell {

// InputError names the first key that is not known, or that asks for what is not computed here: an
// unknown key might change the model.
void require_known_keys(const Fields& fields, const FamilySpec& family);

}  // namespace twell
