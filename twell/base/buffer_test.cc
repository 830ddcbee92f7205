// SPDX-License-Identifier: Apache-2.0
#include "twell/base/buffer.h"

#include <gtest/gtest.h>

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
    Buffer<char> buffer(-1);  // as a size: all of the address space
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
  use(2 * kMiB, 3 * kMiB);  // in two blocks, of which one remains to be made
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
    if (step == 0) continue;  // in pieces; one block is made of them
    if (step == 1) reserved = arena.reserved_bytes();
    EXPECT_EQ(arena.reserved_bytes(), reserved);
  }
  EXPECT_GE(arena.peak_bytes(), size_t{2300000} * 4);
  EXPECT_EQ(arena.peak_bytes(), arena.reserved_bytes());
}

}  // namespace
}  // namespace twell
