// SPDX-License-Identifier: Apache-2.0
// What the engine thread of `twell serve` does besides the model, per step that adds a token to
// every sequence: with a session that only waits, as if a device took 2 ms for every call, and for
// each sequence a connection that takes its events. host_us is the thread's processor time without
// the waiting. Time is that of a step: 2 ms, and what the session does not compute ahead of.
#include <benchmark/benchmark.h>

#include <chrono>
#include <condition_variable>
#include <ctime>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "twell/infer/scheduler.h"
#include "twell/serve/answers.h"
#include "twell/tokenizer/test_tokenizer.h"

namespace twell {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kContext = 4096, kBlock = 64, kPrompt = 128, kSteps = 1000;
constexpr std::chrono::milliseconds kCall{2};

double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

class WaitingSession final : public Session {
 public:
  WaitingSession(int64_t slots, int64_t ahead)
      : Session({slots, kContext, slots * kContext / kBlock, kBlock}), ahead_(ahead) {
    config_.vocab_size = 256;
    config_.context = kContext;
  }
  std::span<const float> append(int64_t, std::span<const int32_t>) override { return {}; }
  ConstMatrixF decode(std::span<const int64_t>, std::span<const int32_t>) override { return {}; }
  int64_t append_and_draw(std::span<const NewTokens> tokens, std::span<const Draw>) override {
    appended(calls_ + 1, tokens);
    return begin();
  }
  void drawn(int64_t call, std::span<int32_t> next) override {
    const double start = thread_seconds();
    std::this_thread::sleep_until(ends_[static_cast<size_t>(call) % 2]);
    waiting_seconds += thread_seconds() - start;
    std::fill(next.begin(), next.end(), 'a');
    known(call, next);
  }
  int64_t draws_ahead() const override { return ahead_; }
  double step_cost(int64_t) const override { return 1.0; }
  void append_logits(int64_t, std::span<const int32_t>, const OnLogits&) override {}
  TokenLogProbs drawn_log_probs(int64_t) override { return {}; }
  std::vector<ActiveNeurons> active_neurons() const override {
    return std::vector<ActiveNeurons>(24);
  }
  int64_t prefill_tokens() const override { return 2048; }
  const ModelConfig& config() const override { return config_; }

  double waiting_seconds = 0.0;  // of processor time

 private:
  void show(int64_t, std::span<const int32_t>, int64_t) override {}
  int64_t begin() {
    const Clock::time_point last = ends_[static_cast<size_t>(calls_) % 2];
    ends_[static_cast<size_t>(++calls_) % 2] = std::max(Clock::now(), last) + kCall;
    return calls_;
  }

  int64_t ahead_;
  ModelConfig config_;
  int64_t calls_ = 0;
  Clock::time_point ends_[2];
};

// Takes the events of a sequence whenever it hears of some.
void take_all(Answers& answers) {
  std::mutex mutex;
  std::condition_variable heard;
  bool ready = false;
  answers.notify([&] {
    {
      const std::lock_guard lock(mutex);
      ready = true;
    }
    heard.notify_one();
  });
  while (!answers.done()) {
    {
      std::unique_lock lock(mutex);
      heard.wait(lock, [&] { return std::exchange(ready, false); });
    }
    answers.take();
  }
}

// `answered`: a thread takes each sequence's events; otherwise nobody hears of them.
void steps(benchmark::State& state, bool answered) {
  const int64_t sequences = state.range(0);
  WaitingSession session(sequences, /*ahead=*/state.range(1));
  const Tokenizer tokenizer = byte_tokenizer();
  Scheduler scheduler(session, tokenizer);
  MemoryBudget memory(int64_t{1} << 40);
  Waker waker;
  const auto request = [&](int64_t i) {
    return GenerationRequest{.prompt = std::vector<int32_t>(kPrompt, static_cast<int32_t>(i % 256)),
                             .max_tokens = kContext,
                             .stop_at_end_of_text = false};
  };
  std::vector<std::unique_ptr<Answers>> answers;
  std::vector<std::thread> connections;
  for (int64_t i = 0; i < sequences; ++i) {
    if (!answered) {
      scheduler.submit(request(i));
      continue;
    }
    answers.push_back(std::make_unique<Answers>(scheduler, waker, memory, true));
    answers.back()->add(request(i));
    answers.back()->submit();
    connections.emplace_back([&own = *answers.back()] { take_all(own); });
  }
  while (scheduler.stats().prompt_tokens < sequences * kPrompt) scheduler.step();
  session.waiting_seconds = 0.0;
  const double start = thread_seconds();
  for (auto _ : state) scheduler.step();
  const double host_seconds = thread_seconds() - start - session.waiting_seconds;
  state.counters["host_us"] = 1e6 * host_seconds / static_cast<double>(state.iterations());
  scheduler.cancel_all();
  while (scheduler.step()) {
  }
  for (std::thread& connection : connections) connection.join();
}
BENCHMARK_CAPTURE(steps, unheard, false)
    ->ArgsProduct({{1, 64, 128, 256}, {0, 1}})
    ->ArgNames({"sequences", "ahead"})
    ->Iterations(kSteps)
    ->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(steps, answered, true)
    ->ArgsProduct({{1, 64, 128, 256}, {0, 1}})
    ->ArgNames({"sequences", "ahead"})
    ->Iterations(kSteps)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace twell

BENCHMARK_MAIN();
