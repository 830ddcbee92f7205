// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/metrics.h"

#include <fmt/core.h>

#include <algorithm>
#include <string_view>

namespace twell {
namespace {

class Text {
 public:
  void head(std::string_view name, std::string_view type, std::string_view help) {
    name_ = fmt::format("twell_{}", name);
    text_ += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name_, help, name_, type);
  }
  template <typename Number>
  void value(Number value, const std::string& labels = {}) {
    text_ += fmt::format("{}{} {}\n", name_, labels.empty() ? "" : "{" + labels + "}", value);
  }
  template <typename Number>
  void counter(std::string_view name, Number number, std::string_view help) {
    head(name, "counter", help);
    value(number);
  }
  template <typename Number>
  void gauge(std::string_view name, Number number, std::string_view help) {
    head(name, "gauge", help);
    value(number);
  }
  void histogram(std::string_view name, const Histogram& histogram, std::string_view help) {
    head(name, "histogram", help);
    int64_t below = 0;
    for (size_t i = 0; i < histogram.counts.size(); ++i) {
      below += histogram.counts[i];
      const std::string bound =
          i < histogram.bounds.size() ? fmt::format("{}", histogram.bounds[i]) : "+Inf";
      text_ += fmt::format("{}_bucket{{le=\"{}\"}} {}\n", name_, bound, below);
    }
    text_ += fmt::format("{}_sum {}\n{}_count {}\n", name_, histogram.sum, name_, below);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string name_, text_;
};

}  // namespace

std::string metrics_text(const ServerMetrics& metrics) {
  const SchedulerStats& stats = metrics.scheduler;
  Text text;
  text.gauge("requests_running", stats.running, "Sequences that have a slot.");
  text.gauge("requests_waiting", stats.waiting, "Sequences that wait for a slot.");
  text.counter("requests_refused_total", stats.refused, "Sequences refused for want of room.");
  text.head("requests_ended_total", "counter", "Sequences that ended, by reason.");
  for (size_t i = 0; i < stats.ended.size(); ++i) {
    text.value(stats.ended[i],
               fmt::format("reason=\"{}\"", stop_reason_name(static_cast<StopReason>(i))));
  }
  text.counter("preemptions_total", stats.preemptions,
               "Sequences that lost their place in the cache and were computed again.");
  text.counter("steps_total", stats.steps, "Passes through the model.");
  text.counter("prompt_tokens_total", stats.prompt_tokens, "Prompt tokens computed.");
  text.counter("cached_tokens_total", stats.cached_tokens, "Prompt tokens found in the cache.");
  text.counter("generated_tokens_total", stats.tokens, "New tokens.");
  text.counter("drafted_tokens_total", stats.drafted, "Tokens guessed from a sequence's own text.");
  text.counter("accepted_tokens_total", stats.accepted, "Guessed tokens that were right.");
  text.histogram("time_to_first_token_seconds", stats.first_token_seconds,
                 "From the arrival of a sequence to its first token.");
  text.histogram("time_between_tokens_seconds", stats.between_tokens_seconds,
                 "Between two tokens of a sequence.");
  text.histogram("request_seconds", stats.request_seconds,
                 "From the arrival of a sequence to its end.");
  text.head("cache_tokens", "gauge", "Room of the key/value cache in tokens, by use.");
  const CacheUse& cache = stats.cache;
  text.value(cache.used * cache.block_tokens, "use=\"sequences\"");
  text.value(cache.cached * cache.block_tokens, "use=\"prefixes\"");
  text.value((cache.blocks - cache.used - cache.cached) * cache.block_tokens, "use=\"free\"");
  text.head("active_neurons", "gauge", "Mean active FFN neurons per token, by layer.");
  for (size_t i = 0; i < stats.layers.size(); ++i) {
    text.value(stats.layers[i].per_token, fmt::format("layer=\"{}\"", i));
  }
  const auto sparse = std::count_if(stats.layers.begin(), stats.layers.end(),
                                    [](const ActiveNeurons& layer) { return layer.sparse; });
  text.gauge("sparse_layers_ratio",
             stats.layers.empty()
                 ? 0.0
                 : static_cast<double>(sparse) / static_cast<double>(stats.layers.size()),
             "Share of the layers whose FFN last ran sparse.");
  if (metrics.joules) {
    const auto tokens =
        static_cast<double>(std::max<int64_t>(stats.prompt_tokens + stats.tokens, 1));
    text.counter("energy_joules_total", *metrics.joules, "Energy of the device since the start.");
    text.gauge("energy_joules_per_token", *metrics.joules / tokens,
               "Energy of the device since the start per prompt or new token.");
  }
  text.head("http_replies_total", "counter", "HTTP replies by path and status.");
  for (const auto& [key, count] : metrics.replies) {
    text.value(count, fmt::format("path=\"{}\",status=\"{}\"", key.first, key.second));
  }
  return text.take();
}

}  // namespace twell
