// SPDX-License-Identifier: Apache-2.0
// What an evaluation has scored so far, as JSON lines:
//   {"task": .., "checkpoint": .., ...}                            what the scores are of
//   {"item": 0, "line": 1, "log_likelihoods": [..], ...}           an item a line, those done
// Written whole or not at all, so that a killed evaluation leaves a file it can continue from.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "twell/tasks/accuracy.h"

namespace twell {

using ItemScores = std::vector<std::optional<ItemScore>>;  // none: not scored yet

void write_score_log(const std::filesystem::path& path, const nlohmann::ordered_json& subject,
                     const std::vector<TaskItem>& items, const ItemScores& scores);

// No scores when there is no such file. InputError when it is of another subject, naming the first
// field that differs, or is not as written here.
ItemScores read_score_log(const std::filesystem::path& path, const nlohmann::ordered_json& subject,
                          const std::vector<TaskItem>& items);

}  // namespace twell
