// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/waker.h"

#include <gtest/gtest.h>

#include <thread>
#include <utility>
#include <vector>

namespace twell {
namespace {

struct Waiting final : Sleeper {
  void wake() override { changed.notify_one(); }

  std::mutex mutex;
  std::condition_variable changed;
  int events = 0;
};

// Threads that wait for events of another one hear of each, whatever the order.
TEST(Waker, WakesEverySleeper) {
  constexpr int kThreads = 8, kEvents = 500;
  std::vector<std::shared_ptr<Waiting>> sleepers;
  std::vector<std::thread> threads;
  std::vector<int> heard(kThreads);
  for (int i = 0; i < kThreads; ++i) sleepers.push_back(std::make_shared<Waiting>());
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      Waiting& sleeper = *sleepers[static_cast<size_t>(i)];
      std::unique_lock lock(sleeper.mutex);
      while (heard[static_cast<size_t>(i)] < kEvents) {
        sleeper.changed.wait(lock, [&] { return sleeper.events > 0; });
        heard[static_cast<size_t>(i)] += std::exchange(sleeper.events, 0);
      }
    });
  }
  {
    Waker waker;
    for (int event = 0; event < kEvents; ++event) {
      for (const auto& sleeper : sleepers) {
        {
          const std::lock_guard lock(sleeper->mutex);
          ++sleeper->events;
        }
        waker.wake(sleeper);
      }
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (const int events : heard) EXPECT_EQ(events, kEvents);
}

}  // namespace
}  // namespace twell
