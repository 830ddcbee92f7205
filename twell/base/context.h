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
  // threads = 0: available_threads() of cpu_limit.h. Results depend on this number and not on the
  // machine: with fewer cores, fewer system threads run the same parts.
  explicit Context(int threads = 0);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int threads() const { return threads_; }
  Arena& scratch() { return scratch_; }

  // Calls fn(begin, end, part) on disjoint ranges that cover [0, n), at most threads() of them,
  // each a contiguous share of at least `grain` items; part counts them from 0. The split depends
  // on n, grain and threads() alone, so that the same call gives the same result. Any thread may
  // take any part, so no part may wait for another. All parts run, then the first exception of fn
  // is rethrown here.
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
  class Helpers;
  using RangeFn = void (*)(const void* fn, int64_t begin, int64_t end, int part);
  void run_parallel(int64_t n, int64_t grain, RangeFn call, const void* fn);

  int threads_;
  Arena scratch_;
  std::unordered_map<std::type_index, std::shared_ptr<void>> services_;
  std::unique_ptr<Helpers> helpers_;  // created on first use
};

}  // namespace twell
