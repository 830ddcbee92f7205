// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace twell {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(Metrics, HistogramsAreCumulativeAndLayersHaveLabels) {
  ServerMetrics metrics;
  SchedulerStats& stats = metrics.scheduler;
  stats.first_token_seconds = Histogram({0.5, 1.0});
  for (const double waited : {0.25, 0.75, 2.0}) stats.first_token_seconds.add(waited);
  stats.layers = {{.per_token = 12.5, .sparse = true}, {.per_token = 100.0, .sparse = false}};
  stats.cache = {.block_tokens = 16, .blocks = 10, .used = 3, .cached = 2};
  stats.tokens = 6;
  stats.prompt_tokens = 4;
  metrics.replies[{"/v1/completions", 200}] = 7;
  EXPECT_THAT(metrics_text(metrics), Not(HasSubstr("energy")));
  metrics.joules = 5.0;
  const std::string text = metrics_text(metrics);
  for (const char* line :
       {"# TYPE twell_time_to_first_token_seconds histogram\n",
        "twell_time_to_first_token_seconds_bucket{le=\"0.5\"} 1\n",
        "twell_time_to_first_token_seconds_bucket{le=\"1\"} 2\n",
        "twell_time_to_first_token_seconds_bucket{le=\"+Inf\"} 3\n",
        "twell_time_to_first_token_seconds_sum 3\n", "twell_time_to_first_token_seconds_count 3\n",
        "twell_active_neurons{layer=\"0\"} 12.5\n", "twell_active_neurons{layer=\"1\"} 100\n",
        "twell_sparse_layers_ratio 0.5\n", "twell_cache_tokens{use=\"sequences\"} 48\n",
        "twell_cache_tokens{use=\"prefixes\"} 32\n", "twell_cache_tokens{use=\"free\"} 80\n",
        "twell_energy_joules_total 5\n", "twell_energy_joules_per_token 0.5\n",
        "twell_requests_ended_total{reason=\"stop string\"} 0\n",
        "twell_http_replies_total{path=\"/v1/completions\",status=\"200\"} 7\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

}  // namespace
}  // namespace twell
