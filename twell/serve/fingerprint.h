// SPDX-License-Identifier: Apache-2.0
// What answers come from besides their requests, as one short text: clients compare it to see
// whether equal seeds can give equal answers.
#pragma once

#include <filesystem>
#include <span>
#include <string>

namespace twell {

// "fp_" and 12 hexadecimal digits. settings: version, device and the options that change results.
// Of the checkpoint count its JSON files and chat template, and of its tensors each file's size and
// 256 pages spread over it, so that large files are not read as a whole. InputError when one cannot
// be read.
std::string system_fingerprint(const std::filesystem::path& checkpoint,
                               std::span<const std::string> settings);

}  // namespace twell
