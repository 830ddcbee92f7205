// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/waker.h"

#include <utility>

namespace twell {

Waker::~Waker() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void Waker::wake(std::shared_ptr<Sleeper> sleeper) {
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    first = sleepers_.empty();
    sleepers_.push_back(std::move(sleeper));
  }
  if (first) changed_.notify_one();  // later ones are found when the thread looks again
}

void Waker::run() {
  std::unique_lock lock(mutex_);
  while (!ending_ || !sleepers_.empty()) {
    changed_.wait(lock, [&] { return ending_ || !sleepers_.empty(); });
    const auto sleepers = std::exchange(sleepers_, {});
    lock.unlock();
    for (const auto& sleeper : sleepers) sleeper->wake();
    lock.lock();
  }
}

}  // namespace twell
