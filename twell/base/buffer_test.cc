// SPDX-License-Identifier: Apache-2.0
#include "twell/base/buffer.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "twell/base/error.h"

namespace twell {
namespace {

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kAlignment == 0; }

TEST(Buffer, IsAlignedAndZero) {
  for (const int64_t size : {1, 15, 16, 1000}) {
    const Buffer<float> buffer(size);
    EXPECT_TRUE(aligned(buffer.data()));
    EXPECT_EQ(buffer.size(), size);
    for (const float value : buffer.span()) EXPECT_EQ(value, 0.0f);
  }
  const Buffer<float> none(0), unset;
  EXPECT_EQ(none.size(), 0);
  EXPECT_EQ(unset.data(), nullptr);
}

// Blocks of whole huge pages, and of a byte more or less; contents of a released block must not
// show in the next one of its size.
TEST(Buffer, LargeOnesAreAlignedToHugePagesAndZero) {
  constexpr int64_t kHuge = int64_t{1} << 21;
  for (const int64_t size : {8 * kHuge - 1, 8 * kHuge, 8 * kHuge + 1, 9 * kHuge - 4097}) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      const Buffer<unsigned char> buffer(size);
      const size_t alignment = size >= 8 * kHuge ? size_t{kHuge} : kAlignment;
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % alignment, 0u);
      EXPECT_EQ(buffer[0], 0);
      EXPECT_EQ(std::memcmp(buffer.data(), buffer.data() + 1, static_cast<size_t>(size - 1)), 0);
      std::memset(buffer.data(), 0xa5, static_cast<size_t>(size));
    }
  }
}

TEST(Buffer, LargeOnesGoBackToTheSystem) {
  const auto mapped = [](const void* data) {
    unsigned char resident = 0;
    return ::mincore(const_cast<void*>(data), 1, &resident) == 0;
  };
  const void *first = nullptr, *last = nullptr;
  constexpr int64_t kSize = (int64_t{1} << 26) + 4097;
  {
    const Buffer<char> buffer(kSize);
    const uintptr_t end = reinterpret_cast<uintptr_t>(buffer.data()) + kSize - 1;
    first = buffer.data();
    last = reinterpret_cast<const void*>(end & ~static_cast<uintptr_t>(::getpagesize() - 1));
    EXPECT_TRUE(mapped(first) && mapped(last));
  }
  EXPECT_FALSE(mapped(first) || mapped(last));
}

TEST(Buffer, Moves) {
  Buffer<int> from(4);
  from[3] = 7;
  const int* data = from.data();
  const Buffer<int> to = std::move(from);
  EXPECT_EQ(to.data(), data);
  EXPECT_EQ(to[3], 7);
}

TEST(Buffer, TooMuchMemoryIsAnErrorWithTheSize) {
  try {
    Buffer<char> buffer(-1);  // as a size, the whole address space
    FAIL() << "allocated 16 EiB";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("18446744073709551615 bytes"), std::string::npos)
        << error.what();
  }
}

TEST(Matrix, StridesAndSlices) {
  Buffer<float> values(12);
  for (int64_t i = 0; i < 12; ++i) values[i] = static_cast<float>(i);
  const MatrixF matrix(values.data(), 3, 2, 4);
  EXPECT_EQ(matrix(2, 1), 9.0f);
  const ConstMatrixF tail = matrix.slice_rows(1, 2);
  EXPECT_EQ(tail.rows, 2);
  EXPECT_EQ(tail(0, 0), 4.0f);
  EXPECT_TRUE(MatrixF().empty());
}

TEST(Arena, ScopesNestAndReuseMemory) {
  Arena arena;
  void* first = nullptr;
  {
    Arena::Scope outer(arena);
    float* a = outer.alloc<float>(100);
    first = a;
    void* inner_data = nullptr;
    {
      Arena::Scope inner(arena);
      inner_data = inner.alloc<float>(100);
      EXPECT_TRUE(aligned(inner_data));
      EXPECT_GE(static_cast<float*>(inner_data), a + 100);
    }
    EXPECT_EQ(outer.alloc<float>(100), inner_data);
  }
  Arena::Scope again(arena);
  EXPECT_EQ(again.alloc<char>(1), first);
}

TEST(Arena, GrowsWithoutMovingWhatIsInUse) {
  Arena arena;
  Arena::Scope scope(arena);
  std::vector<std::span<int64_t>> pieces;
  for (int64_t i = 1; i < 40; ++i) {
    const int64_t size = i * 10000;
    pieces.emplace_back(scope.alloc<int64_t>(size), static_cast<size_t>(size));
    std::fill(pieces.back().begin(), pieces.back().end(), i);
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    EXPECT_EQ(pieces[i].front(), static_cast<int64_t>(i) + 1);
    EXPECT_EQ(pieces[i].back(), static_cast<int64_t>(i) + 1);
  }
}

TEST(Arena, HoldsNoMoreThanThePeakBetweenUses) {
  Arena arena;
  const auto use = [&arena](int64_t first, int64_t second) {
    Arena::Scope scope(arena);
    scope.alloc<std::byte>(first);
    scope.alloc<std::byte>(second);
  };
  constexpr int64_t kMiB = int64_t{1} << 20;
  use(2 * kMiB, 3 * kMiB);  // in two blocks; the next use gets one
  EXPECT_EQ(arena.reserved_bytes(), 0u);
  use(2 * kMiB, 3 * kMiB);
  EXPECT_EQ(arena.reserved_bytes(), static_cast<size_t>(5 * kMiB));
  use(kMiB, 8 * kMiB);
  use(kMiB, kMiB);
  EXPECT_EQ(arena.reserved_bytes(), static_cast<size_t>(9 * kMiB));
}

TEST(Arena, ReservesInOneBlock) {
  Arena arena;
  arena.reserve(5 << 20);
  EXPECT_EQ(arena.reserved_bytes(), size_t{5} << 20);
  {
    Arena::Scope scope(arena);
    scope.alloc<std::byte>(2 << 20);
    scope.alloc<std::byte>(3 << 20);
    EXPECT_THROW(arena.reserve(1), Error);
  }
  arena.reserve(1 << 20);
  EXPECT_EQ(arena.reserved_bytes(), size_t{5} << 20);
}

TEST(Arena, ASteadyStateReservesNothingMore) {
  Arena arena;
  size_t reserved = 0;
  for (int step = 0; step < 5; ++step) {
    {
      Arena::Scope scope(arena);
      scope.alloc<float>(300000);
      {
        Arena::Scope inner(arena);
        inner.alloc<float>(2000000);
      }
      scope.alloc<float>(700000);
    }
    if (step == 0) continue;  // in several blocks, replaced by one afterwards
    if (step == 1) reserved = arena.reserved_bytes();
    EXPECT_EQ(arena.reserved_bytes(), reserved);
  }
  EXPECT_GE(arena.peak_bytes(), size_t{2300000} * 4);
  EXPECT_EQ(arena.peak_bytes(), arena.reserved_bytes());
}

}  // namespace
}  // namespace twell
