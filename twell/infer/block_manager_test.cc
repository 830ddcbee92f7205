// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/block_manager.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "twell/base/error.h"

namespace twell {
namespace {

using Ids = std::vector<int32_t>;

Ids counting(int32_t first, int64_t count) {
  Ids ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(first + static_cast<int32_t>(i));
  return ids;
}

void fill(BlockManager& manager, int64_t sequence, const Ids& ids) {
  const int64_t cached = manager.start(sequence, ids);
  ASSERT_TRUE(manager.reserve(sequence, std::ssize(ids) - cached));
  manager.append(sequence, std::span(ids).subspan(static_cast<size_t>(cached)));
}

TEST(BlockManager, SharesFullBlocksOfEqualBeginnings) {
  BlockManager manager(10, 4, 3);
  fill(manager, 0, counting(1, 10));
  EXPECT_EQ(manager.used(), 3);
  // The same 10 tokens and more: two full blocks are shared while the first sequence goes on.
  EXPECT_EQ(manager.start(1, counting(1, 12)), 8);
  EXPECT_EQ(manager.table(1)[0], manager.table(0)[0]);
  EXPECT_EQ(manager.table(1)[1], manager.table(0)[1]);
  ASSERT_TRUE(manager.reserve(1, 4));
  EXPECT_NE(manager.table(1)[2], manager.table(0)[2]);
  EXPECT_EQ(manager.used(), 4);
  // The last token is never taken from the cache: its logits are wanted.
  EXPECT_EQ(manager.start(2, counting(1, 8)), 4);
  manager.release(2);
  // The same tokens behind others are another text.
  Ids other = counting(100, 4);
  for (const int32_t id : counting(5, 6)) other.push_back(id);
  EXPECT_EQ(manager.start(2, other), 0);
}

TEST(BlockManager, DiscardedBlocksAreNotShared) {
  BlockManager manager(6, 4, 3);
  fill(manager, 0, counting(1, 10));
  EXPECT_EQ(manager.start(1, counting(1, 12)), 8);
  manager.discard(0);  // sequence 1 keeps the other two
  EXPECT_EQ(manager.start(2, counting(1, 12)), 0);
  EXPECT_EQ(manager.length(1), 8);
  ASSERT_TRUE(manager.reserve(1, 4));
  manager.append(1, counting(9, 4));
  manager.release(1);
  EXPECT_EQ(manager.used(), 0);
  EXPECT_EQ(manager.start(2, counting(1, 12)), 0);  // the beginning is gone
  EXPECT_EQ(manager.available(), 6);
  fill(manager, 2, counting(1, 24));
  EXPECT_EQ(manager.used(), 6);
}

TEST(BlockManager, ReleasedBlocksStayUntilTheirMemoryIsNeeded) {
  BlockManager manager(4, 4, 2);
  fill(manager, 0, counting(1, 16));
  EXPECT_FALSE(manager.reserve(0, 1));
  EXPECT_FALSE(manager.reserve(1, 1));
  manager.release(0);
  EXPECT_EQ(manager.used(), 0);
  EXPECT_EQ(manager.cached(), 4);
  // The end of the text is evicted first.
  fill(manager, 1, counting(50, 5));
  EXPECT_EQ(manager.cached(), 2);
  EXPECT_EQ(manager.start(0, counting(1, 16)), 8);
  EXPECT_FALSE(manager.reserve(0, 8));
  EXPECT_EQ(manager.table(0).size(), 2u);  // nothing was taken
  manager.release(1);
  EXPECT_TRUE(manager.reserve(0, 8));
  EXPECT_EQ(manager.available(), 0);
}

TEST(BlockManager, DuplicatesFollowTheFirst) {
  BlockManager manager(8, 2, 3);
  // Both are filled before either could find the other.
  EXPECT_EQ(manager.start(0, counting(1, 4)) + manager.start(1, counting(1, 4)), 0);
  for (const int64_t sequence : {0, 1}) ASSERT_TRUE(manager.reserve(sequence, 4));
  for (const int64_t sequence : {0, 1}) manager.append(sequence, counting(1, 3));
  manager.append(1, counting(4, 1));  // the second block of this text is found in sequence 1
  manager.append(0, counting(4, 1));
  EXPECT_EQ(manager.start(2, counting(1, 5)), 4);
  EXPECT_EQ(manager.table(2)[0], manager.table(0)[0]);
  EXPECT_EQ(manager.table(2)[1], manager.table(1)[1]);
  manager.release(0);
  manager.release(1);
  EXPECT_EQ(manager.used(), 2);
  EXPECT_EQ(manager.cached(), 0);  // duplicates are not kept
  EXPECT_THROW(manager.append(2, counting(5, 1)), Error);
  EXPECT_THROW(manager.start(2, counting(1, 5)), Error);
  EXPECT_THROW(manager.release(3), Error);
  EXPECT_THROW(BlockManager(0, 2, 1), InputError);
}

// Against a model that writes the tokens themselves into the blocks.
TEST(BlockManager, RandomUseNeverLosesOrMixesBlocks) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](int64_t n) {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
    };
    const int64_t blocks = 3 + below(30), size = 1 + below(5), sequences = 1 + below(6);
    BlockManager manager(blocks, size, sequences);
    std::vector<int32_t> memory(static_cast<size_t>(blocks * size), -1);
    std::vector<Ids> wanted(static_cast<size_t>(sequences));
    int64_t shared = 0, refused = 0;
    for (int step = 0; step < 3000; ++step) {
      const int64_t sequence = below(sequences);
      Ids& ids = wanted[static_cast<size_t>(sequence)];
      const auto write = [&](const Ids& more) {
        for (size_t i = 0; i < more.size(); ++i) {
          const int64_t position = std::ssize(ids) + static_cast<int64_t>(i);
          const int32_t block = manager.table(sequence)[static_cast<size_t>(position / size)];
          memory[static_cast<size_t>(block * size + position % size)] = more[i];
        }
        manager.append(sequence, more);
        ids.insert(ids.end(), more.begin(), more.end());
      };
      switch (below(4)) {
        case 0:
          manager.release(sequence);
          ids.clear();
          break;
        case 1: {  // start, with a small alphabet so that beginnings are often equal
          manager.release(sequence);
          ids.clear();
          Ids prompt;
          for (int64_t i = 0, n = 1 + below(4 * size); i < n; ++i) {
            prompt.push_back(static_cast<int32_t>(below(2)));
          }
          const int64_t cached = manager.start(sequence, prompt);
          ASSERT_LT(cached, std::ssize(prompt));
          ASSERT_EQ(cached % size, 0);
          shared += cached;
          ids.assign(prompt.begin(), prompt.begin() + cached);
          break;
        }
        default: {
          Ids more;
          for (int64_t i = 0, n = 1 + below(2 * size); i < n; ++i) {
            more.push_back(static_cast<int32_t>(below(2)));
          }
          const int64_t before = manager.available();
          const auto held = std::ssize(manager.table(sequence));
          const int64_t needed = (std::ssize(ids) + std::ssize(more) + size - 1) / size - held;
          if (manager.reserve(sequence, std::ssize(more))) {
            ASSERT_EQ(manager.available(), before - std::max<int64_t>(0, needed));
            write(more);
          } else {
            ASSERT_GT(needed, before);
            ASSERT_EQ(std::ssize(manager.table(sequence)), held);
            ++refused;
          }
        }
      }
      // Every sequence reads back its own tokens, and what two of them share is equal; a block that
      // is not full belongs to one.
      std::map<int32_t, int64_t> holders;
      for (int64_t s = 0; s < sequences; ++s) {
        const Ids& want = wanted[static_cast<size_t>(s)];
        const auto table = manager.table(s);
        ASSERT_EQ(manager.length(s), std::ssize(want));
        ASSERT_EQ(std::set<int32_t>(table.begin(), table.end()).size(), table.size());
        for (size_t i = 0; i < want.size(); ++i) {
          const auto at = static_cast<int64_t>(i);
          const int32_t block = table[static_cast<size_t>(at / size)];
          ASSERT_EQ(memory[static_cast<size_t>(block * size + at % size)], want[i]);
        }
        for (size_t i = 0; i < table.size(); ++i) {
          const bool full = static_cast<int64_t>(i + 1) * size <= std::ssize(want);
          ASSERT_TRUE(full || holders[table[i]] == 0);
          holders[table[i]] += full ? 1 : 1000;
          ASSERT_TRUE(full || holders[table[i]] == 1000);
        }
      }
      ASSERT_EQ(manager.used(), std::ssize(holders));
      ASSERT_LE(manager.cached(), manager.available());
    }
    EXPECT_GT(shared + refused, 0) << seed;
    for (int64_t s = 0; s < sequences; ++s) manager.release(s);
    EXPECT_EQ(manager.available(), blocks);
    EXPECT_TRUE(manager.reserve(0, blocks * size));  // every block can be had again
  }
}

}  // namespace
}  // namespace twell
