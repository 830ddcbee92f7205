// SPDX-License-Identifier: Apache-2.0
// What /metrics shows: the text format of Prometheus, version 0.0.4.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "twell/infer/scheduler.h"

namespace twell {

struct ServerMetrics {
  SchedulerStats scheduler;
  // Replies by path and status; paths that do not exist count as "other".
  std::map<std::pair<std::string, int>, int64_t> replies;
  std::optional<double> joules;  // that the device has used since the start, where known
};

std::string metrics_text(const ServerMetrics& metrics);

}  // namespace twell
