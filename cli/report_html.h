// SPDX-License-Identifier: Apache-2.0
// The course of a training run as a page with plots, in one file.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace twell::cli {

// The rows of metrics.jsonl that have this field.
std::vector<nlohmann::json> rows_with(const char* field, const std::vector<nlohmann::json>& rows);

// metrics: rows of metrics.jsonl, of which at least one has layers. report: as in report.json.
// Throws nlohmann::json::exception for rows of another form.
std::string report_html(const nlohmann::json& report, const std::vector<nlohmann::json>& metrics);

}  // namespace twell::cli
