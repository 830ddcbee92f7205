// SPDX-License-Identifier: Apache-2.0
// The course of a training run as a page with plots, in one file.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace twell::cli {

// metrics: rows of metrics.jsonl, of which at least one has layers. report: as in report.json.
// Throws nlohmann::json::exception for rows of another form.
std::string report_html(const nlohmann::json& report, const std::vector<nlohmann::json>& metrics);

}  // namespace twell::cli
