// SPDX-License-Identifier: Apache-2.0
#include "bench/decode_benchmark.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

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
  std::vector<std::unique_ptr<TokenFilter>> filters;
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
    if (load.filter) {
      filters.push_back(load.filter());
      draws[i].filter = filters.back().get();
      draws[i].vocab = load.filter_vocab;
    }
    const NewTokens prompt{.slot = static_cast<int64_t>(i), .ids = ids};
    session.drawn(session.append_and_draw({&prompt, 1}, {&draws[i], 1}), {&next[i], 1});
    last.push_back({.slot = prompt.slot, .ids = {&next[i], 1}});
    if (load.filter) filters[i]->accept(0, next[i]);
  }
  const int64_t ahead = load.ahead ? session.draws_ahead() : 0;
  std::vector<int32_t> drawn(batch);  // stand for the tokens that the call before draws
  for (size_t i = 0; i < batch; ++i) drawn[i] = Session::the_drawn(static_cast<int64_t>(i));
  int64_t begun = 0, known = 0;  // calls
  std::vector<int64_t> calls;
  const double processor = processor_seconds();
  Clock::time_point end = Clock::now();
  std::vector<double> seconds;
  for (int64_t step = 0; step < load.tokens; ++step) {
    for (Draw& draw : draws) ++draw.index;
    if (begun > known) {
      for (size_t i = 0; i < batch; ++i) last[i].ids = {&drawn[i], 1};
    }
    calls.push_back(session.append_and_draw(last, draws));
    ++begun;
    while (begun - known > (step + 1 < load.tokens ? ahead : 0)) {
      session.drawn(calls[static_cast<size_t>(known)], next);
      ++known;
      const Clock::time_point start = std::exchange(end, Clock::now());
      seconds.push_back(std::chrono::duration<double>(end - start).count());
      for (size_t i = 0; i < filters.size(); ++i) {
        filters[i]->accept(static_cast<uint64_t>(known), next[i]);
      }
    }
    if (begun == known) {
      for (size_t i = 0; i < batch; ++i) last[i].ids = {&next[i], 1};
    }
  }
  // The median ignores the few slow steps in which a GPU captures a graph.
  return {.step_seconds = summarize(seconds).median,
          .processor_seconds = (processor_seconds() - processor) / static_cast<double>(load.tokens),
          .active = session.active_neurons()};
}

double decode_step_bytes(const ModelConfig& config, const DecodeMemory& memory,
                         const DecodeLoad& load, std::span<const ActiveNeurons> active) {
  const int64_t element = memory.embedding_element > 0 ? memory.embedding_element : memory.element;
  const int64_t unread = config.tied_embeddings ? 0 : element * config.vocab_size * config.width;
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
