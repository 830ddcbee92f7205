// SPDX-License-Identifier: Apache-2.0
#include "twell/base/context.h"

#include <pthread.h>
#include <sched.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "twell/base/cpu_limit.h"
#include "twell/base/error.h"

namespace twell {
namespace {

// True while this thread works on a part; parallel_for then runs its own parts one by one.
thread_local bool inside_part = false;

// Parts of one job: `call` works on items [n * part / parts, n * (part + 1) / parts).
struct Job {
  void (*call)(const void* fn, int64_t begin, int64_t end, int thread) = nullptr;
  const void* fn = nullptr;
  int64_t n = 0;
  int64_t parts = 0;

  void run(int64_t part) const {
    call(fn, n * part / parts, n * (part + 1) / parts, static_cast<int>(part));
  }
};

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits briefly until `ready` holds; returns false if it still does not. The parts of a job end
// within microseconds of each other and the next job follows soon, so blocking at once would cost
// more than it saves. After kAlone the core is offered to other threads.
template <typename Ready>
bool spin(const Ready& ready) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds kAlone{20}, kYielding{100};
  const auto start = Clock::now();
  for (;;) {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      relax();
    }
    const auto waited = Clock::now() - start;
    if (waited > kYielding) return ready();
    if (waited > kAlone) sched_yield();
  }
}

}  // namespace

// The threads that help the caller of parallel_for. Any free thread claims the next part: on a busy
// machine, where a helper may not be running, the caller runs its parts instead of waiting for it.
// Helpers spin for some microseconds between jobs and then sleep.
class Context::Helpers {
 public:
  explicit Helpers(int count) {
    // Helpers block all signals, which are for the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int i = 0; i < count; ++i) threads_.emplace_back([this] { help(); });
    } catch (const std::system_error&) {
      // The system's thread limit is reached; fewer threads do the work.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  ~Helpers() {
    stop_ = true;
    announce(std::ssize(threads_));
    for (std::thread& thread : threads_) thread.join();
  }
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;

  // Returns when all parts are done; rethrows the exception of the first part that threw.
  void run(const Job& job) {
    job_ = job;
    error_ = nullptr;
    done_.store(0, std::memory_order_relaxed);
    const auto parts = static_cast<uint32_t>(job.parts);
    claims_.store({.parts = parts, .next = 0}, std::memory_order_release);
    announce(job.parts - 1);
    work();
    const auto finished = [&] { return done_.load(std::memory_order_acquire) == parts; };
    if (!spin(finished)) {
      for (uint32_t done = done_.load(std::memory_order_acquire); done != parts;
           done = done_.load(std::memory_order_acquire)) {
        done_.wait(done, std::memory_order_acquire);
      }
    }
    if (error_) std::rethrow_exception(error_);
  }

 private:
  // Both in one word, so that claiming a part of the current job proves that the job is not over.
  // clang accesses it without a lock only if it is aligned as one.
  struct alignas(8) Claims {
    uint32_t parts = 0;
    uint32_t next = 0;
  };

  void announce(int64_t wanted) {
    jobs_.fetch_add(1, std::memory_order_release);
    if (wanted >= std::ssize(threads_)) return jobs_.notify_all();
    for (int64_t i = 0; i < wanted; ++i) jobs_.notify_one();
  }

  // Claims parts until none is left.
  void work() {
    Claims claims = claims_.load(std::memory_order_acquire);
    while (claims.next < claims.parts) {
      const Claims rest{.parts = claims.parts, .next = claims.next + 1};
      if (!claims_.compare_exchange_weak(claims, rest, std::memory_order_acq_rel)) continue;
      run_part(claims.next);
      const uint32_t done = done_.fetch_add(1, std::memory_order_acq_rel) + 1;
      if (done == rest.parts) done_.notify_one();
      claims = claims_.load(std::memory_order_acquire);
    }
  }

  void run_part(uint32_t part) {
    inside_part = true;
    try {
      job_.run(part);
    } catch (...) {
      const std::lock_guard lock(error_mutex_);
      if (!error_ || part < error_part_) {
        error_ = std::current_exception();
        error_part_ = part;
      }
    }
    inside_part = false;
  }

  void help() {
    uint32_t seen = 0;
    for (;;) {
      const auto announced = [&] { return jobs_.load(std::memory_order_acquire) != seen; };
      if (!spin(announced)) jobs_.wait(seen, std::memory_order_acquire);
      seen = jobs_.load(std::memory_order_acquire);
      if (stop_) return;
      work();
    }
  }

  std::vector<std::thread> threads_;
  Job job_;  // written while no part is claimed
  std::mutex error_mutex_;
  std::exception_ptr error_;
  uint32_t error_part_ = 0;
  std::atomic<bool> stop_ = false;
  alignas(kAlignment) std::atomic<Claims> claims_;
  alignas(kAlignment) std::atomic<uint32_t> done_ = 0;  // parts of the job that are over
  alignas(kAlignment) std::atomic<uint32_t> jobs_ = 0;  // counts jobs; helpers sleep on it
};

Context::Context(int threads) : threads_(threads == 0 ? available_threads() : threads) {
  TWELL_REQUIRE(threads >= 0 && threads_ <= 4096, "threads must be between 1 and 4096, got {}",
                threads);
}

Context::~Context() = default;

void Context::run_parallel(int64_t n, int64_t grain, RangeFn call, const void* fn) {
  if (n <= 0) return;
  const Job job{.call = call,
                .fn = fn,
                .n = n,
                .parts = std::clamp<int64_t>(n / std::max<int64_t>(grain, 1), 1, threads_)};
  if (job.parts == 1) return job.run(0);
  if (!inside_part) {
    // More threads than cores would only take turns; the split into parts stays the same.
    if (!helpers_) {
      helpers_ = std::make_unique<Helpers>(std::min(threads_, available_threads()) - 1);
    }
    return helpers_->run(job);
  }
  std::exception_ptr error;
  for (int64_t part = 0; part < job.parts; ++part) {
    try {
      job.run(part);
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace twell
