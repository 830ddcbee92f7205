// SPDX-License-Identifier: Apache-2.0
#include "twell/base/context.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "twell/base/cpu_limit.h"
#include "twell/base/error.h"

namespace twell {
namespace {

TEST(Context, ThreadCount) {
  EXPECT_EQ(Context(3).threads(), 3);
  EXPECT_EQ(Context().threads(), available_threads());
  EXPECT_GE(available_threads(), 1);
  EXPECT_THROW(Context(-1), InputError);
  EXPECT_THROW(Context(5000), InputError);
}

TEST(ParallelFor, CoversEveryIndexOnce) {
  for (const int threads : {1, 2, 3, 7}) {
    Context ctx(threads);
    for (const int64_t n : {0, 1, 2, 6, 7, 8, 1000}) {
      for (const int64_t grain : {0, 1, 3, 5000}) {
        std::vector<int> visits(static_cast<size_t>(n));
        std::atomic<int> ranges = 0;
        ctx.parallel_for(n, grain, [&](int64_t begin, int64_t end, int thread) {
          ++ranges;
          EXPECT_LT(thread, threads);
          EXPECT_TRUE(end - begin >= grain || (begin == 0 && end == n));
          for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
        });
        EXPECT_EQ(visits, std::vector<int>(static_cast<size_t>(n), 1));
        EXPECT_LE(ranges, threads);
      }
    }
  }
}

TEST(ParallelFor, TheSplitIsAlwaysTheSame) {
  Context ctx(3);
  std::vector<std::pair<int64_t, int64_t>> first(3), second(3);
  for (auto* ranges : {&first, &second}) {
    ctx.parallel_for(1001, 1, [&](int64_t begin, int64_t end, int thread) {
      (*ranges)[static_cast<size_t>(thread)] = {begin, end};
    });
  }
  EXPECT_EQ(first, second);
}

TEST(ParallelFor, ExceptionsArriveAtTheCaller) {
  for (const int threads : {1, 2, 3}) {
    Context ctx(threads);
    std::atomic<int64_t> done = 0;
    const auto work = [&](int64_t begin, int64_t end, int) {
      if (end == 100) throw std::runtime_error("the last range failed");
      done += end - begin;
    };
    EXPECT_THROW(ctx.parallel_for(100, 1, work), std::runtime_error);
    EXPECT_EQ(done, 100 * (threads - 1) / threads) << "the other ranges are finished";
    int64_t sum = 0;
    ctx.parallel_for(10, 10, [&](int64_t begin, int64_t end, int) { sum += end - begin; });
    EXPECT_EQ(sum, 10) << "the context is still of use";
  }
}

// Whichever thread is faster: all parts throw, and the first one's exception arrives, from threads
// and from the loop of parts within a part.
TEST(ParallelFor, OfSeveralExceptionsTheFirstPartsArrives) {
  const auto fault = [](int64_t begin, int64_t, int) {
    throw std::runtime_error("from " + std::to_string(begin));
  };
  const auto message = [&](Context& ctx) -> std::string {
    try {
      ctx.parallel_for(30, 1, fault);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "none";
  };
  for (int repeat = 0; repeat < 20; ++repeat) {
    Context outer(2), inner(3);
    EXPECT_EQ(message(inner), "from 0");
    std::vector<std::string> nested(2);
    outer.parallel_for(2, 1, [&](int64_t begin, int64_t, int) {
      Context own(3);
      nested[static_cast<size_t>(begin)] = message(own);
    });
    EXPECT_EQ(nested, std::vector<std::string>(2, "from 0"));
  }
}

TEST(ParallelFor, Nests) {
  Context ctx(2);
  std::atomic<int> visits = 0;
  ctx.parallel_for(4, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      Context inner(2);
      inner.parallel_for(10, 1,
                         [&](int64_t b, int64_t e, int) { visits += static_cast<int>(e - b); });
    }
  });
  EXPECT_EQ(visits, 40);
}

struct Counter {
  int value = 0;
};
struct OtherCounter {
  int value = 5;
};

TEST(Context, ServicesAreMadeOncePerContext) {
  Context first(1), second(1);
  first.service<Counter>().value = 3;
  EXPECT_EQ(first.service<Counter>().value, 3);
  EXPECT_EQ(first.service<OtherCounter>().value, 5);
  EXPECT_EQ(second.service<Counter>().value, 0);
}

}  // namespace
}  // namespace twell
