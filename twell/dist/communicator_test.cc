// SPDX-License-Identifier: Apache-2.0
// Collectives between ranks that are threads here, and what the others learn of a failed rank.
#include "twell/dist/communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <mutex>

#include "twell/dist/test_ranks.h"

namespace twell {
namespace {

using std::chrono::milliseconds;
using testing::Each;
using testing::HasSubstr;
using testing::StrEq;

// A value that depends on the rank and is no exact sum of others.
float value_of(int rank, int64_t i) {
  return std::sin(static_cast<float>(i * 7 + rank * 131)) * static_cast<float>(rank + 1);
}

TEST(PieceOf, PiecesCoverTheArray) {
  for (const int64_t size : {0, 1, 7, 8, 9, 100, 4096}) {
    for (const int ranks : {1, 2, 3, 8}) {
      int64_t end = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const PieceRange piece = piece_of(size, ranks, rank);
        EXPECT_EQ(piece.begin, end);
        EXPECT_TRUE(piece.size() == piece_of(size, ranks, 0).size() || piece.end == size);
        end = piece.end;
      }
      EXPECT_EQ(end, size);
    }
  }
}

TEST(Communicator, AddsInTheOrderOfRanks) {
  for (const int ranks : {2, 3, 4}) {
    for (const int64_t size : {1, 15, 64, 1001, 1'200'003}) {
      std::mutex mutex;
      std::vector<float> gathered;
      const auto errors = run_ranks(ranks, [&](Communicator& all) {
        std::vector<float> values(static_cast<size_t>(size));
        for (int64_t i = 0; i < size; ++i) {
          values[static_cast<size_t>(i)] = value_of(all.rank(), i);
        }
        all.reduce_scatter_sum(values);
        const PieceRange piece = piece_of(size, ranks, all.rank());
        for (int64_t i = piece.begin; i < piece.end; i += 1 + size / 1000) {
          float sum = value_of(0, i);
          for (int rank = 1; rank < ranks; ++rank) sum += value_of(rank, i);
          ASSERT_EQ(values[static_cast<size_t>(i)], sum) << i;
        }
        all.all_gather(values);
        const std::lock_guard lock(mutex);
        if (gathered.empty()) gathered = values;
        EXPECT_EQ(values, gathered);
      });
      EXPECT_THAT(errors, Each(StrEq("")));
    }
  }
}

TEST(Communicator, SmallValues) {
  const auto errors = run_ranks(3, [](Communicator& all) {
    std::vector<double> sums = {1.0 + all.rank(), 0.1};
    all.all_reduce_sum(sums);
    EXPECT_EQ(sums, (std::vector<double>{6.0, 0.1 + 0.1 + 0.1}));
    std::vector<uint8_t> flags = {0, static_cast<uint8_t>(all.rank() == 2), 0};
    all.all_reduce_max(flags);
    EXPECT_EQ(flags, (std::vector<uint8_t>{0, 1, 0}));
    int64_t from_one = 40 + all.rank();
    all.broadcast(std::as_writable_bytes(std::span(&from_one, 1)), 1);
    EXPECT_EQ(from_one, 41);
    all.barrier();
    if (all.rank() == 0) all.rendezvous().put("key", "value");
    EXPECT_EQ(all.rendezvous().get("key"), "value");
    EXPECT_EQ(all.rendezvous().agree(""), "");
    EXPECT_EQ(all.rendezvous().agree(all.rank() > 0 ? "no" : ""), "rank 1: no");
  });
  EXPECT_THAT(errors, Each(StrEq("")));
}

TEST(Communicator, AFailureIsNamedToTheRanksThatWait) {
  const auto errors = run_ranks(3, [](Communicator& all) {
    all.rendezvous().set_step(7);
    if (all.rank() == 1) throw Error("out of memory");
    all.barrier();
    all.barrier();
  });
  EXPECT_EQ(errors[1], "out of memory");
  EXPECT_EQ(errors[0], "rank 1 failed in step 7: out of memory");
  EXPECT_EQ(errors[2], errors[0]);
}

TEST(Communicator, ARankThatTakesNoPartIsNamed) {
  const auto start = std::chrono::steady_clock::now();
  const auto errors = run_ranks(
      3,
      [](Communicator& all) {
        all.rendezvous().set_step(3);
        all.barrier();
        if (all.rank() == 2) {
          std::this_thread::sleep_for(milliseconds(5000));
        }
        all.barrier();
      },
      milliseconds(3000));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  EXPECT_THAT(errors[0], HasSubstr("rank 2 is behind the others in step 3"));
  EXPECT_THAT(errors[1], HasSubstr("rank 2 is behind the others in step 3"));
}

TEST(Rendezvous, MissingRanksAreNamed) {
  const LocalListener listener;
  RankIdentity identity;
  identity.size = 3;
  identity.host = "127.0.0.1";
  identity.port = listener.port;
  identity.listener = listener.socket;
  try {
    Rendezvous(identity, milliseconds(1500));
    FAIL() << "started alone";
  } catch (const RankFault& fault) {
    EXPECT_THAT(fault.what(), HasSubstr("did not start within 1.5 s: 1, 2"));
  }
}

TEST(Communicator, ItsInterfaceCanBeChosen) {
  const LocalListener listener;
  for (const std::string name : {"lo", "none0"}) {
    std::vector<std::thread> ranks;
    for (const int rank : {0, 1}) {
      ranks.emplace_back([&, rank] {
        RankIdentity identity = local_identity(rank, 2, listener);
        identity.interface = name;
        Rendezvous rendezvous(identity, std::chrono::seconds(60));
        try {
          gloo_communicator(rendezvous)->barrier();
          EXPECT_EQ(name, "lo");
        } catch (const InputError& error) {
          EXPECT_STREQ(error.what(),
                       "GLOO_SOCKET_IFNAME: this machine has no network interface none0");
        }
      });
    }
    for (std::thread& rank : ranks) rank.join();
  }
}

}  // namespace
}  // namespace twell
