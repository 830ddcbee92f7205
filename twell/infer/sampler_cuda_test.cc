// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/sampler_cuda.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "twell/base/cuda_gtest.h"
#include "twell/base/rng.h"
#include "twell/grammar/token_filter.h"
#include "twell/infer/sampler.h"

namespace twell {
namespace {

// The tokens drawn from rows of logits on the device, once the stream has computed them.
std::vector<int32_t> draw(const CudaStream& stream, const DeviceBuffer<float>& logits, int64_t rows,
                          int64_t vocab, const SamplerOptions& options, uint64_t index,
                          const SampleCuda& masks = {}) {
  std::vector<float> uniforms;
  for (int64_t row = 0; row < rows; ++row) {
    uniforms.push_back(uniform(options.seed, static_cast<uint64_t>(row), index));
  }
  const auto device_uniforms = upload(uniforms);
  const auto ids = poisoned<int32_t>(rows);
  TWELL_CUDA_CHECK(launch_sample({.rows = rows,
                                  .vocab = vocab,
                                  .stride = logits.size() / rows,
                                  .logits = logits.data(),
                                  .uniforms = device_uniforms.data(),
                                  .ids = ids.data(),
                                  .masks = masks.masks,
                                  .mask_of = masks.mask_of,
                                  .mask_words = masks.mask_words,
                                  .temperature = options.temperature,
                                  .top_k = options.top_k,
                                  .top_p = options.top_p,
                                  .min_p = options.min_p},
                                 stream.get()));
  stream.synchronize();
  return download(ids);
}

std::vector<int32_t> on_device(const std::vector<float>& logits, int64_t rows, int64_t vocab,
                               const SamplerOptions& options, uint64_t index) {
  return draw(CudaStream(), upload(logits), rows, vocab, options, index);
}

class SamplerCudaTest : public testing::TestWithParam<SamplerOptions> {};

TEST_P(SamplerCudaTest, DrawsWhatTheCpuDraws) {
  TWELL_SKIP_WITHOUT_GPU();
  SamplerOptions options = GetParam();
  options.seed = 7;
  const int64_t rows = 5, stride = 5003, vocab = 5000;
  std::vector<float> logits(static_cast<size_t>(rows * stride));
  for (size_t i = 0; i < logits.size(); ++i) {
    // Coarse values give many ties, also at the top. The last logits of a row are not used.
    logits[i] = std::round(8.0f * normal(3, 1, i)) / 4.0f;
    if (static_cast<int64_t>(i) % stride >= vocab) logits[i] = 1000.0f;
  }
  logits[17] = -std::numeric_limits<float>::infinity();
  for (uint64_t index = 0; index < 40; ++index) {
    const auto got = on_device(logits, rows, vocab, options, index);
    for (int64_t row = 0; row < rows; ++row) {
      const std::span<const float> of_row(logits.data() + row * stride, static_cast<size_t>(vocab));
      ASSERT_EQ(got[static_cast<size_t>(row)],
                sample(of_row, options, static_cast<uint64_t>(row), index))
          << "row " << row << ", index " << index;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Options, SamplerCudaTest,
    testing::Values(SamplerOptions{.temperature = 0.0f}, SamplerOptions{},
                    SamplerOptions{.temperature = 0.7f, .top_k = 40}, SamplerOptions{.top_k = 1},
                    SamplerOptions{.top_k = 100000},
                    SamplerOptions{.temperature = 1.3f, .top_p = 0.9f},
                    SamplerOptions{.top_p = 0.001f},
                    SamplerOptions{.temperature = 0.8f, .top_k = 300, .top_p = 0.95f},
                    SamplerOptions{.min_p = 0.2f}, SamplerOptions{.temperature = 1e-40f},
                    SamplerOptions{.temperature = 1e-45f, .top_k = 7},
                    SamplerOptions{.temperature = 1e-39f, .top_p = 0.5f, .min_p = 0.3f},
                    SamplerOptions{.top_k = 50, .top_p = 0.5f, .min_p = 0.01f}));

// Rows 1, 3 and 4 of five have masks, that of row 4 is empty.
TEST_P(SamplerCudaTest, MasksEqualTheCpus) {
  TWELL_SKIP_WITHOUT_GPU();
  SamplerOptions options = GetParam();
  options.seed = 3;
  constexpr int64_t kRows = 5, kVocab = 5003;
  const int64_t words = token_mask_words(kVocab) + 2;  // more than needed
  std::vector<float> logits;
  for (int64_t i = 0; i < kRows * kVocab; ++i) {
    logits.push_back(std::round(8.0f * normal(13, 1, static_cast<uint64_t>(i))) / 4.0f);
  }
  std::vector<uint32_t> masks(static_cast<size_t>(3 * words));
  for (int64_t id = 0; id < kVocab; ++id) {
    const auto word = static_cast<size_t>(id / 32);
    if (id % 3 == 0) masks[word] |= 1u << (id % 32);
    if (id % 1000 == 7) masks[static_cast<size_t>(words) + word] |= 1u << (id % 32);
  }
  logits[kVocab + 1] = std::nanf("");  // row 1, not allowed
  const std::vector<int32_t> mask_of = {-1, 0, -1, 1, 2};
  const CudaStream stream;
  const auto device_logits = upload(logits);
  const auto device_masks = upload(masks);
  const auto device_mask_of = upload(mask_of);
  for (uint64_t index = 0; index < 20; ++index) {
    const auto got =
        draw(stream, device_logits, kRows, kVocab, options, index,
             {.masks = device_masks.data(), .mask_of = device_mask_of.data(), .mask_words = words});
    for (int64_t row = 0; row < kRows; ++row) {
      const std::span<const float> own(logits.data() + row * kVocab, size_t{kVocab});
      std::span<const uint32_t> mask;
      if (const int32_t of = mask_of[static_cast<size_t>(row)]; of >= 0) {
        mask =
            std::span(masks).subspan(static_cast<size_t>(of * words), static_cast<size_t>(words));
      }
      ASSERT_EQ(got[static_cast<size_t>(row)],
                sample(own, options, static_cast<uint64_t>(row), index, {}, nullptr, mask))
          << "row " << row << ", index " << index;
    }
  }
}

struct PenaltyCase {
  std::vector<float> logits;
  std::vector<SeenToken> seen;
  std::vector<PenalizedRow> rows;
};

// Rows 3, 0 and 2 of four are penalized and biased; one seen token is outside the vocabulary.
PenaltyCase penalty_case(int64_t vocab, const SamplerOptions& options) {
  PenaltyCase out;
  for (uint64_t i = 0; i < static_cast<uint64_t>(4 * vocab); ++i) {
    out.logits.push_back(3.0f * normal(5, 1, i));
  }
  for (const int32_t row : {3, 0, 2}) {
    const int64_t begin = std::ssize(out.seen);
    for (int32_t id = row; id <= vocab; id += 3 + row) {
      const float bias = id % 7 == 0 ? static_cast<float>(id % 5) - 2.0f : 0.0f;
      out.seen.push_back({id, id % 4 - (id % 7 == 0), bias});
    }
    out.rows.push_back({row, begin, std::ssize(out.seen), options.repetition_penalty,
                        options.frequency_penalty, options.presence_penalty});
  }
  return out;
}

TEST_P(SamplerCudaTest, PenaltiesEqualTheCpus) {
  TWELL_SKIP_WITHOUT_GPU();
  SamplerOptions options = GetParam();
  options.repetition_penalty = 1.3f;
  options.frequency_penalty = 0.2f;
  options.presence_penalty = 0.7f;
  constexpr int64_t kVocab = 1000;
  const PenaltyCase given = penalty_case(kVocab, options);
  std::array<std::span<const SeenToken>, 4> seen;
  for (const PenalizedRow& row : given.rows) {
    seen[static_cast<size_t>(row.row)] =
        std::span(given.seen)
            .subspan(static_cast<size_t>(row.begin), static_cast<size_t>(row.end - row.begin));
  }
  const CudaStream stream;
  const auto logits = upload(given.logits);
  const auto device_seen = upload(given.seen);
  const auto rows = upload(given.rows);
  const auto before = poisoned<float>(device_seen.size());
  PenalizeCuda penalties{.count = rows.size(),
                         .rows = rows.data(),
                         .seen = device_seen.data(),
                         .vocab = kVocab,
                         .logits = logits.data(),
                         .before = before.data()};
  for (uint64_t index = 0; index < 10; ++index) {
    penalties.undo = false;
    TWELL_CUDA_CHECK(launch_penalize(penalties, stream.get()));
    const auto got = draw(stream, logits, 4, kVocab, options, index);
    penalties.undo = true;
    TWELL_CUDA_CHECK(launch_penalize(penalties, stream.get()));
    stream.synchronize();
    for (size_t row = 0; row < 4; ++row) {
      const std::span<const float> own(given.logits.data() + row * kVocab, size_t{kVocab});
      ASSERT_EQ(got[row], sample(own, options, row, index, seen[row])) << row << ", " << index;
    }
    ASSERT_EQ(download(logits), given.logits);
  }
}

TEST(LogProbsCudaTest, EqualTheCpus) {
  TWELL_SKIP_WITHOUT_GPU();
  const CudaStream stream;
  constexpr int64_t kRows = 4, kVocab = 5000, kEach = 1 + kMostTop;
  std::vector<float> logits;
  for (int64_t i = 0; i < kRows * kVocab; ++i) {
    const float value = 4.0f * normal(9, 1, static_cast<uint64_t>(i));
    // Row 0 has ties, at the top and at the end of the list.
    logits.push_back(i < kVocab ? std::round(value / 4.0f) : value);
  }
  logits[3 * kVocab + 5] = std::nanf("");
  const std::vector<int32_t> ids = {17, 4999, 0, 1};
  const auto device_logits = upload(logits);
  const auto device_ids = upload(ids);
  for (const auto& [top, top_vocab] :
       {std::pair{0, 5000}, std::pair{1, 4990}, std::pair{20, 4990}, std::pair{20, 7}}) {
    const auto out = poisoned<TokenLogProb>(kRows * kEach);
    TWELL_CUDA_CHECK(launch_log_probs({.rows = kRows,
                                       .vocab = kVocab,
                                       .logits = device_logits.data(),
                                       .ids = device_ids.data(),
                                       .top = top,
                                       .top_vocab = top_vocab,
                                       .out = out.data(),
                                       .out_stride = kEach},
                                      stream.get()));
    stream.synchronize();
    const auto got = download(out);
    for (int64_t row = 0; row < 3; ++row) {
      const std::span<const float> own(logits.data() + row * kVocab, size_t{kVocab});
      const TokenLogProbs want =
          token_log_probs(own, ids[static_cast<size_t>(row)], top, top_vocab);
      const TokenLogProb* const of_row = got.data() + row * kEach;
      EXPECT_EQ(of_row[0].id, want.token.id);
      EXPECT_NEAR(of_row[0].log_prob, want.token.log_prob, 1e-5);
      for (int64_t i = 0; i < top; ++i) {
        const bool exists = i < std::ssize(want.top);
        const TokenLogProb one = exists ? want.top[static_cast<size_t>(i)] : TokenLogProb{};
        EXPECT_EQ(of_row[1 + i].id, one.id) << "row " << row << ", place " << i;
        if (exists) {
          EXPECT_NEAR(of_row[1 + i].log_prob, one.log_prob, 1e-5);
        }
      }
    }
    EXPECT_TRUE(std::isnan(got[static_cast<size_t>(3 * kEach)].log_prob));
  }
}

TEST(SamplerCudaTest, MarksRowsThatCannotBeSampled) {
  TWELL_SKIP_WITHOUT_GPU();
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> logits = {0.0f,      std::nanf(""), 1.0f,                             //
                                     -infinity, -infinity,     -infinity, 1.0f, infinity, 0.0f,  //
                                     -1.0f,     -3.0f,         -infinity};
  for (const float temperature : {0.0f, 1.0f}) {
    const auto ids = on_device(logits, 4, 3, {.temperature = temperature, .top_k = 1}, 0);
    EXPECT_EQ(ids, (std::vector<int32_t>{-1, -1, -1, 0}));
  }
}

}  // namespace
}  // namespace twell
