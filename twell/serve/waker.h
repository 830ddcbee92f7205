// SPDX-License-Identifier: Apache-2.0
// Wakes those that wait for a thread that has no time to: a wake-up is a system call, which costs
// the engine thread more than all else that it does for a token of a sequence.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace twell {

// Somebody who waits.
class Sleeper {
 public:
  virtual ~Sleeper() = default;
  virtual void wake() = 0;  // does not throw
};

class Waker {
 public:
  Waker() : thread_([this] { run(); }) {}
  // Wakes all that are still to be woken. wake() must have returned for the last time.
  ~Waker();
  Waker(const Waker&) = delete;
  Waker& operator=(const Waker&) = delete;

  // Soon calls the sleeper's wake().
  void wake(std::shared_ptr<Sleeper> sleeper);

 private:
  void run();

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Sleeper>> sleepers_;
  bool ending_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace twell
