// SPDX-License-Identifier: Apache-2.0
// What an op needs besides its operands: threads, scratch memory, and the libraries' handles.
// One Context serves one caller thread at a time; several can live in one process.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <typeindex>
#include <unordered_map>

#include "twell/base/buffer.h"

namespace twell {

class Context {
 public:
  // threads = 0 takes every core this process may run on.
  explicit Context(int threads = 0);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int threads() const { return threads_; }
  Arena& scratch() { return scratch_; }

  // Calls fn(begin, end, thread) on disjoint ranges that cover [0, n), at most threads() of them,
  // each a contiguous share of at least `grain` items. The split depends on n, grain and threads()
  // alone, so that the same call gives the same result. An exception of fn is rethrown here.
  template <typename Fn>
  void parallel_for(int64_t n, int64_t grain, const Fn& fn) {
    run_parallel(
        n, grain,
        [](const void* f, int64_t b, int64_t e, int t) { (*static_cast<const Fn*>(f))(b, e, t); },
        &fn);
  }

  // A per-context object of type T, made on first use (a library handle, a primitive cache).
  template <typename T>
  T& service() {
    std::shared_ptr<void>& slot = services_[std::type_index(typeid(T))];
    if (!slot) slot = std::make_shared<T>();
    return *static_cast<T*>(slot.get());
  }

 private:
  using RangeFn = void (*)(const void* fn, int64_t begin, int64_t end, int thread);
  void run_parallel(int64_t n, int64_t grain, RangeFn call, const void* fn);

  int threads_;
  Arena scratch_;
  std::unordered_map<std::type_index, std::shared_ptr<void>> services_;
};

// Cores this process may use (its affinity mask).
int available_threads();

}  // namespace twell
