// SPDX-License-Identifier: Apache-2.0
#include "bench/decode_benchmark.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "bench/harness.h"

namespace twell {

SessionOptions decode_session(const ModelConfig& config, const DecodeLoad& load, FfnPolicy policy) {
  return {.slots = load.batch,
          .capacity = std::min(config.context, load.prompt + load.tokens),
          .ffn = policy,
          .cache = {.eight_bits = load.eight_bit_cache}};
}

DecodeRun run_decode(Session& session, const DecodeLoad& load) {
  using Clock = std::chrono::steady_clock;
  const auto batch = static_cast<size_t>(load.batch), length = static_cast<size_t>(load.prompt);
  std::vector<Draw> draws(batch);
  std::vector<int32_t> next(batch);
  std::vector<NewTokens> last;  // of each sequence
  for (size_t i = 0; i < batch; ++i) {
    std::vector<int32_t> random;
    std::span<const int32_t> ids;
    if (load.prompts.empty()) {
      random = random_tokens(load.prompt, session.config().vocab_size, load.seed + i);
      ids = random;
    } else {
      ids = load.prompts.subspan(i * length, length);
    }
    draws[i].sampler.temperature = load.temperature;
    draws[i].stream = i;
    const NewTokens prompt{.slot = static_cast<int64_t>(i), .ids = ids};
    session.drawn(session.append_and_draw({&prompt, 1}, {&draws[i], 1}), {&next[i], 1});
    last.push_back({.slot = prompt.slot, .ids = {&next[i], 1}});
  }
  std::vector<double> seconds;
  for (int64_t step = 0; step < load.tokens; ++step) {
    for (Draw& draw : draws) ++draw.index;
    const Clock::time_point start = Clock::now();
    session.drawn(session.append_and_draw(last, draws), next);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  // The median ignores the few slow steps in which a GPU captures a graph.
  return {.step_seconds = summarize(seconds).median, .active = session.active_neurons()};
}

double decode_step_bytes(const ModelConfig& config, const DecodeMemory& memory,
                         const DecodeLoad& load, std::span<const ActiveNeurons> active) {
  const int64_t unread =
      config.tied_embeddings ? 0 : memory.element * config.vocab_size * config.width;
  auto bytes =
      static_cast<double>(memory.weights - unread +
                          load.batch * (load.prompt + (load.tokens + 1) / 2) * memory.kv_token);
  const auto skippable =
      static_cast<double>((config.gated ? 2 : 1) * memory.element * config.width);
  const auto neurons = static_cast<double>(config.ffn);
  for (const ActiveNeurons& layer : active) {
    if (!layer.sparse) continue;
    const double silent =
        std::pow(1.0 - layer.per_token / neurons, static_cast<double>(load.batch));
    bytes -= skippable * neurons * silent;
  }
  return bytes;
}

}  // namespace twell
