// SPDX-License-Identifier: Apache-2.0
// The text of config.json in another layout. Internal to model.
#pragma once

#include <string>

#include "twell/checkpoint/convert.h"

namespace twell {

// The same text where nothing changes; else with the same keys in the same order, but for those the
// layout is about. InputError when the layout cannot express the model.
std::string convert_config(const std::string& text, const std::string& source,
                           const ConvertOptions& options);

const char* torch_dtype_name(DType dtype);  // "float32", ...

}  // namespace twell
