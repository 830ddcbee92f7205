// SPDX-License-Identifier: Apache-2.0
#include "twell/data/batch_sampler.h"

#include <algorithm>
#include <bit>

#include "twell/base/error.h"
#include "twell/base/rng.h"

namespace twell {
namespace {

constexpr uint64_t kShuffleStream = uint64_t{0x5348} << 48;  // random-number stream; "SH"
constexpr uint64_t kRounds = 6;  // four rounds make a Feistel network pseudo-random; two spare

// A Feistel network over two halves of half_bits bits each. It is invertible for any round
// function.
uint64_t feistel(uint64_t value, int half_bits, uint64_t seed, uint64_t epoch) {
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  uint64_t left = value >> half_bits, right = value & mask;
  for (uint64_t round = 0; round < kRounds; ++round) {
    const uint64_t stream = kShuffleStream + epoch * kRounds + round;
    const uint64_t next = left ^ (philox(seed, stream, right)[0] & mask);
    left = right;
    right = next;
  }
  return left << half_bits | right;
}

}  // namespace

std::vector<int64_t> document_lengths(std::span<const int32_t> ids, int64_t length, int32_t end) {
  TWELL_CHECK(length > 0 && std::ssize(ids) % length == 0, "{} ids in sequences of {}", ids.size(),
              length);
  std::vector<int64_t> lengths;
  int64_t begin = 0;
  for (int64_t i = 0; i < std::ssize(ids); ++i) {
    if (ids[static_cast<size_t>(i)] != end && (i + 1) % length != 0) continue;
    lengths.push_back(i + 1 - begin);
    begin = i + 1;
  }
  return lengths;
}

uint64_t permute(uint64_t index, uint64_t n, uint64_t seed, uint64_t epoch) {
  TWELL_CHECK(index < n && n <= uint64_t{1} << 62, "index {} of {}", index, n);
  if (n == 1) return 0;
  const int half_bits = (static_cast<int>(std::bit_width(n - 1)) + 1) / 2;
  // The network permutes up to 4n values; following its cycle until it is below n permutes n.
  do {
    index = feistel(index, half_bits, seed, epoch);
  } while (index >= n);
  return index;
}

BatchSampler::BatchSampler(const TrainingData& data, Split split, int64_t length, uint64_t seed,
                           bool shuffle)
    : data_(data), split_(split), length_(length), seed_(seed), shuffle_(shuffle) {
  TWELL_REQUIRE(length > 0, "the sequence length must be positive, got {}", length);
  windows_ = data.sequences(split, length);
  TWELL_REQUIRE(windows_ > 0,
                "the {} split has {} tokens, too few for a sequence of length {}, which takes one "
                "more: give more text or shorten the sequences",
                split_name(split), data.tokens(split), length);
}

int64_t BatchSampler::window(int64_t index) const {
  TWELL_CHECK(index >= 0, "sequence {}", index);
  const int64_t place = index % windows_;
  if (!shuffle_) return place;
  return static_cast<int64_t>(permute(static_cast<uint64_t>(place), static_cast<uint64_t>(windows_),
                                      seed_, static_cast<uint64_t>(index / windows_)));
}

void BatchSampler::sequence(int64_t index, std::span<int32_t> inputs,
                            std::span<int32_t> targets) const {
  TWELL_CHECK(std::ssize(inputs) == length_ && std::ssize(targets) == length_,
              "inputs of {}, targets of {}, length {}", inputs.size(), targets.size(), length_);
  data_.read_sequence(split_, window(index), inputs, targets);
}

void BatchSampler::add_documents(int64_t index, std::span<const int32_t> inputs,
                                 std::vector<int64_t>& lengths) const {
  data_.add_documents(split_, window(index), inputs, lengths);
}

int64_t BatchSampler::targets(int64_t index) const {
  return data_.targets(split_, window(index), length_);
}

}  // namespace twell
