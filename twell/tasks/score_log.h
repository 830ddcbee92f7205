// SPDX-License-Identifier: Apache-2.0
// The scores of an evaluation so far, as JSON lines:
//   {"task": .., "checkpoint": .., ...}                            the subject: what was scored
//   {"item": 0, "line": 1, "log_likelihoods": [..], ...}           one line per scored item
// The file is written atomically, so that a killed evaluation can be continued from it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "twell/tasks/accuracy.h"

namespace twell {

using ItemScores = std::vector<std::optional<ItemScore>>;  // nullopt: not scored yet

void write_score_log(const std::filesystem::path& path, const nlohmann::ordered_json& subject,
                     const std::vector<TaskItem>& items, const ItemScores& scores);

// Returns no scores when the file does not exist. InputError when its subject differs, naming the
// first differing field, or when it is malformed.
ItemScores read_score_log(const std::filesystem::path& path, const nlohmann::ordered_json& subject,
                          const std::vector<TaskItem>& items);

}  // namespace twell
