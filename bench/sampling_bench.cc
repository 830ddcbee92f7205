// SPDX-License-Identifier: Apache-2.0
// What drawing costs whole steps of decoding on the CPU, scheduler and text included: a random
// model, 0.5% of whose neurons are active, so that its steps are short, and a greedy sequence
// beside one of each mixture of sampling parameters, behind the same prompt. Their steps take
// turns, so that what else the machine does touches both alike. A row has the lower quartile of a
// greedy and of a drawn step, in microseconds, the median over the pairs of greedy / drawn, and the
// same of the processor time of all threads, which other programs disturb least. The last column is
// the draw alone, on the logits of a step that has just ended, where 400 words have been seen. The
// first row is greedy beside greedy.
//   sampling_bench [--words N]... [--tokens N] [--threads N]
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "bench/harness.h"
#include "bench/synthetic_model.h"
#include "bench/synthetic_tokenizer.h"
#include "twell/infer/scheduler.h"
#include "twell/infer/session_cpu.h"

namespace twell {
namespace {

struct Options {
  std::vector<int64_t> words{4096, 128'000};
  int64_t tokens = 400;
  int threads = 0;
};

struct Mixture {
  const char* name;
  SamplerOptions sampler;
};
constexpr SamplerOptions kGreedy{.temperature = 0.0f};
constexpr Mixture kMixtures[] = {
    {"greedy", kGreedy},
    {"greedy, repetition 1.2", {.temperature = 0.0f, .repetition_penalty = 1.2f}},
    {"temperature 1", {}},
    {"temperature 0.7", {.temperature = 0.7f}},
    {"top-k 40", {.top_k = 40}},
    {"top-p 0.9", {.top_p = 0.9f}},
    {"min-p 0.05", {.min_p = 0.05f}},
    {"top-p 0.9, min-p 0.05", {.top_p = 0.9f, .min_p = 0.05f}},
    {"three penalties", {1.0f, 0, 1.0f, 0.0f, 1.2f, 0.1f, 0.1f}},
    {"0.7, 0.95, 0.02, penalties", {0.7f, 0, 0.95f, 0.02f, 1.2f, 0.1f, 0.1f}},
};
constexpr int64_t kPrompt = 16;

double micros_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

double processor_micros() { return 1e6 * processor_seconds(); }

// A sequence that decodes in a session of its own.
class Sequence {
 public:
  Sequence(Context& ctx, const ModelView& model, const Tokenizer& tokenizer,
           const SamplerOptions& sampler, int64_t tokens)
      : session_(ctx, model, {.capacity = kPrompt + tokens}), scheduler_(session_, tokenizer) {
    scheduler_.submit(
        GenerationRequest{.prompt = random_tokens(kPrompt, model.config.vocab_size, 1),
                          .sampler = sampler,
                          .max_tokens = tokens,
                          .stop_at_end_of_text = false});
    scheduler_.step();
  }
  void step() {
    const auto start = std::chrono::steady_clock::now();
    const double busy = processor_micros();
    scheduler_.step();
    busy_.push_back(processor_micros() - busy);
    micros_.push_back(micros_since(start));
  }
  const std::vector<double>& micros() const { return micros_; }   // of each step
  const std::vector<double>& processor() const { return busy_; }  // microseconds of all threads

 private:
  SessionCpu session_;
  Scheduler scheduler_;
  std::vector<double> micros_, busy_;
};

double quantile(std::vector<double> values, double part) {
  const auto at =
      values.begin() + static_cast<ptrdiff_t>(part * static_cast<double>(values.size()));
  std::ranges::nth_element(values, at);
  return *at;
}

double median_ratio(const std::vector<double>& greedy, const std::vector<double>& drawn) {
  std::vector<double> ratios;
  for (size_t i = 0; i < greedy.size(); ++i) ratios.push_back(greedy[i] / drawn[i]);
  return quantile(std::move(ratios), 0.5);
}

// Lower quartile of the microseconds that a draw takes.
double draw_micros(Context& ctx, const ModelView& model, const SamplerOptions& sampler,
                   int64_t tokens) {
  SessionCpu session(ctx, model, {.capacity = tokens});
  const std::vector<int32_t> ids = random_tokens(tokens, model.config.vocab_size, 2);
  std::vector<SeenToken> seen;
  if (sampler.penalizes()) {
    for (int32_t i = 0; i < 400; ++i) seen.push_back({.id = 7 * i, .times = i % 3});
  }
  std::vector<double> times;
  for (uint64_t i = 0; i < ids.size(); ++i) {
    const std::span<const float> row = session.append(0, {&ids[i], 1});
    std::vector<float> logits(row.begin(), row.end());
    const auto start = std::chrono::steady_clock::now();
    sample_in_place(logits, sampler, 0, i, seen, &ctx);
    times.push_back(micros_since(start));
  }
  return quantile(times, 0.25);
}

void run(const Options& options, int64_t words) {
  ModelConfig config = preset_config("tiny");
  config.vocab_size = words;
  config.context = kPrompt + options.tokens;
  config.validate();
  Context ctx(options.threads);
  const std::unique_ptr<Model> model = synthetic_model(ctx, config, 1);
  set_synthetic_sparsity(*model, true);
  const Tokenizer tokenizer = synthetic_tokenizer(words);
  fmt::print("{} words, {}, {} threads, {} tokens\n{:28}{:>10}{:>10}{:>8}{:>10}{:>9}\n", words,
             cpu_name(), ctx.threads(), options.tokens, "", "greedy us", "us", "ratio", "of cores",
             "draw us");
  for (const auto& [name, sampler] : kMixtures) {
    Sequence greedy(ctx, *model, tokenizer, kGreedy, options.tokens);
    Sequence drawn(ctx, *model, tokenizer, sampler, options.tokens);
    for (int64_t token = 1; token + 1 < options.tokens; ++token) {
      greedy.step();
      drawn.step();
    }
    fmt::print("{:28}{:10.0f}{:10.0f}{:8.3f}{:10.3f}{:9.1f}\n", name,
               quantile(greedy.micros(), 0.25), quantile(drawn.micros(), 0.25),
               median_ratio(greedy.micros(), drawn.micros()),
               median_ratio(greedy.processor(), drawn.processor()),
               draw_micros(ctx, *model, sampler, options.tokens));
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace twell

int main(int argc, char** argv) {
  twell::Options options;
  CLI::App app;
  app.add_option("--words", options.words);
  app.add_option("--tokens", options.tokens);
  app.add_option("--threads", options.threads);
  CLI11_PARSE(app, argc, argv);
  for (const int64_t words : options.words) twell::run(options, words);
}
