// SPDX-License-Identifier: Apache-2.0
// Shared by all benchmarks: percentiles of times, random tokens, and result rows as JSON lines.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "twell/base/context.h"

namespace twell {

// Percentiles in the unit of the samples.
struct Timing {
  double median = 0.0, p10 = 0.0, p90 = 0.0;
};
// Percentiles by linear interpolation; InputError when there is no sample.
Timing summarize(std::vector<double> samples);

// Token ids in [0, vocab), from random streams that the weights do not use.
std::vector<int32_t> random_tokens(int64_t count, int64_t vocab, uint64_t seed,
                                   uint64_t stream = 0);

std::string cpu_name();
// Processor time of all threads of this process so far, which other programs disturb less than the
// clock.
double processor_seconds();
// Bytes per second that all threads together read from memory: the fastest of several passes over
// 256 MiB.
double host_read_bandwidth(Context& ctx);
// The first fields of a result row: version, processor, threads, date.
nlohmann::json machine_json(int threads);
// {"median": ..., "p10": ..., "p90": ...}
nlohmann::json timing_json(const Timing& timing);
// {"tokens_per_s": ..., "median_s": ..., "p10_s": ..., "p90_s": ...} of a timing in seconds.
nlohmann::json rate_json(const Timing& timing, int64_t tokens);
// Appends one JSON line; does nothing when the path is empty. InputError when the write fails.
void append_jsonl(const std::filesystem::path& path, const nlohmann::json& row);

}  // namespace twell
