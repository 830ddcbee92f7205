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

TEST(Metrics, EveryCountHasItsName) {
  ServerMetrics metrics;
  SchedulerStats& stats = metrics.scheduler;
  stats.running = 11;
  stats.waiting = 12;
  stats.refused = 13;
  stats.preemptions = 14;
  stats.steps = 15;
  stats.prompt_tokens = 16;
  stats.cached_tokens = 17;
  stats.tokens = 18;
  stats.drafted = 19;
  stats.accepted = 20;
  for (size_t i = 0; i < stats.ended.size(); ++i) stats.ended[i] = 21 + static_cast<int64_t>(i);
  stats.first_token_seconds = stats.between_tokens_seconds = stats.request_seconds =
      Histogram({1.0});
  stats.first_token_seconds.add(2.0);
  stats.between_tokens_seconds.add(3.0);
  stats.request_seconds.add(4.0);
  const std::string text = metrics_text(metrics);
  for (const char* line :
       {"requests_running 11", "requests_waiting 12", "requests_refused_total 13",
        "preemptions_total 14", "steps_total 15", "prompt_tokens_total 16",
        "cached_tokens_total 17", "generated_tokens_total 18", "drafted_tokens_total 19",
        "accepted_tokens_total 20", "time_to_first_token_seconds_sum 2",
        "time_between_tokens_seconds_sum 3", "request_seconds_sum 4"}) {
    EXPECT_THAT(text, HasSubstr(std::string("\ntwell_") + line + "\n"));
  }
  for (size_t i = 0; i < stats.ended.size(); ++i) {
    EXPECT_THAT(text,
                HasSubstr("{reason=\"" + std::string(stop_reason_name(static_cast<StopReason>(i))) +
                          "\"} " + std::to_string(21 + i) + "\n"));
  }
}

}  // namespace
}  // namespace twell
