// SPDX-License-Identifier: Apache-2.0
// Whole models whose projections are in e4m3: against the same model in bf16, dense against sparse,
// and with a cache against without.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/format/byte_matrix.h"
#include "twell/model/cuda_test_model.h"
#include "twell/model/forward_cuda.h"

namespace twell {
namespace {

ModelConfig config_of(bool gated, int64_t head_dim) {
  ModelConfig config;
  config.vocab_size = 331;
  config.width = 128;
  config.ffn = 528;
  config.layers = 3;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = head_dim;
  config.context = 1500;
  config.gated = gated;
  config.init_std = 0.1;
  return config;
}

std::vector<float> hidden_of(CudaContext& ctx, const ModelCuda& model,
                             const std::vector<int32_t>& ids, FfnPolicy policy) {
  ForwardCuda forward(ctx, model,
                      {.max_tokens = std::ssize(ids),
                       .max_sequences = 1,
                       .max_length = std::ssize(ids),
                       .ffn = policy});
  const std::vector<ForwardSequence> sequences = {{.tokens = std::ssize(ids), .slot = 0}};
  std::vector<__nv_bfloat16> hidden(ids.size() * static_cast<size_t>(model.config().width));
  for (int pass = 0; pass < 2; ++pass) {  // the second with what the first one measured
    forward.run(ids, sequences, nullptr);
    forward.ffn_plans().update(ctx);
  }
  TWELL_CUDA_CHECK(cudaMemcpy(hidden.data(), forward.hidden(),
                              hidden.size() * sizeof(__nv_bfloat16), cudaMemcpyDeviceToHost));
  return to_floats(hidden);
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    size += double{b[i]} * b[i];
  }
  return std::sqrt(difference / size);
}

TEST(ForwardBytesCudaTest, IsNearTheModelInBf16DenseAndSparse) {
  TWELL_HOPPER_TEST();
  Context cpu(2);
  for (const bool gated : {true, false}) {
    for (const int64_t head_dim : {32, 64}) {
      const auto host = rounded_model(cpu, config_of(gated, head_dim));
      const ModelCuda wide(ctx, *host);
      const auto bytes = ModelCuda::in_bytes(ctx, wide);
      EXPECT_LT(bytes->bytes(), wide.bytes());
      for (const int64_t tokens : {1, 40, 77, 1300}) {
        const std::vector<int32_t> ids = random_ids(tokens, 331, 7);
        const auto want = hidden_of(ctx, wide, ids, FfnPolicy::kDense);
        const auto dense = hidden_of(ctx, *bytes, ids, FfnPolicy::kDense);
        // Up to 64 tokens small batches, beyond tile-union.
        const auto sparse = hidden_of(ctx, *bytes, ids, FfnPolicy::kSparse);
        const auto unions = hidden_of(ctx, *bytes, ids, FfnPolicy::kTileUnion);
        const auto chosen = hidden_of(ctx, *bytes, ids, FfnPolicy::kAuto);
        printf("gated %d hd %ld tokens %ld: dense %.3e sparse %.3e, of each other %.3e\n", gated,
               head_dim, tokens, distance(dense, want), distance(sparse, want),
               distance(sparse, dense));
        // A product of e4m3 values has a relative error of about 2^-4.5. Every layer adds seven to
        // the residual stream, as independent errors.
        const double bound = 2.0 * std::sqrt(3.0 * 7.0) * std::exp2(-4.5);
        EXPECT_LT(distance(dense, want), bound);
        EXPECT_LT(distance(sparse, want), bound);
        EXPECT_LT(distance(unions, want), bound);
        EXPECT_LT(distance(chosen, want), bound);
      }
    }
  }
}

TEST(ForwardBytesCudaTest, CachedTokensEqualThoseOfAWholePass) {
  TWELL_HOPPER_TEST();
  Context cpu(2);
  const auto host = rounded_model(cpu, config_of(true, 64));
  const ModelCuda wide(ctx, *host);
  const auto model = ModelCuda::in_bytes(ctx, wide);
  const std::vector<int32_t> ids = random_ids(40, 331, 8);
  const auto whole = hidden_of(ctx, *model, ids, FfnPolicy::kDense);
  // By name, so that single tokens are in e4m3 too: the kernel of all layers keeps them in bf16.
  constexpr FfnPolicy kByName{FfnPolicy::Kind::kNamed, "dense-few-fp8"};
  ForwardCuda forward(ctx, *model,
                      {.max_tokens = 40, .max_sequences = 1, .max_length = 40, .ffn = kByName});
  KvCacheCuda cache(model->config(), 1, 40);
  EXPECT_EQ(forward.path(), route::LayersPath::kSingleOps);
  for (size_t begin = 0, step = 33; begin < ids.size(); begin += step, step = 1) {
    const std::vector<ForwardSequence> sequences = {
        {.tokens = static_cast<int64_t>(step), .slot = 0}};
    forward.run(std::span(ids).subspan(begin, step), sequences, &cache);
  }
  std::vector<__nv_bfloat16> last(128);
  stream.synchronize();
  TWELL_CUDA_CHECK(cudaMemcpy(last.data(), forward.hidden(), last.size() * sizeof(__nv_bfloat16),
                              cudaMemcpyDeviceToHost));
  const std::vector<float> want(whole.end() - 128, whole.end());
  // Sums in another order differ by bf16's rounding, e = 2^-8, which flips the rounding of e4m3, in
  // steps of at most 2^-3, with probability e / 2^-3: a norm of sqrt(e 2^-3) for each of the seven
  // quantised operands of three layers.
  EXPECT_LT(distance(to_floats(last), want), std::sqrt(3.0 * 7.0 * 0x1p-8 * 0x1p-3));
}

// Logits of a head in e4m3 against the specification of both quantised operands, for more rows than
// its product takes at once.
TEST(ForwardBytesCudaTest, LogitsOfAHeadInBytesAreTheProductOfQuantisedOperands) {
  TWELL_HOPPER_TEST();
  Context cpu(2);
  for (const bool tied : {true, false}) {
    ModelConfig config = config_of(true, 64);
    config.vocab_size = 328;  // no multiple of 16 or 64
    config.tied_embeddings = tied;
    const auto host = rounded_model(cpu, config);
    const ModelCuda wide(ctx, *host);
    const auto model = ModelCuda::in_bytes(ctx, wide, CudaBytes::kProjectionsAndHead);
    EXPECT_EQ(model->bytes(), ModelCuda::bytes_needed(config, CudaBytes::kProjectionsAndHead));
    const int64_t vocab = config.vocab_size, width = config.width;
    std::vector<BF16> head_bits(static_cast<size_t>(vocab * width));
    TWELL_CUDA_CHECK(cudaMemcpy(head_bits.data(), wide.weights().head.data,
                                head_bits.size() * sizeof(BF16), cudaMemcpyDeviceToHost));
    std::vector<float> head_floats;
    for (const BF16 value : head_bits) head_floats.push_back(to_float(value));
    const OwnedByteMatrix head =
        quantise_rows(ByteType::kE4M3, ConstMatrixF(head_floats.data(), vocab, width));
    for (const int64_t rows : {1, 9, 64, 65, 130}) {
      std::vector<__nv_bfloat16> hidden_bits;
      for (int64_t i = 0; i < rows * width; ++i) {
        hidden_bits.push_back(__float2bfloat16(normal(5, 1, static_cast<uint64_t>(i))));
      }
      const auto hidden = upload(hidden_bits);
      const std::vector<float> hidden_floats = to_floats(hidden_bits);
      const OwnedByteMatrix x =
          quantise_rows(ByteType::kE4M3, ConstMatrixF(hidden_floats.data(), rows, width));
      ForwardCuda forward(ctx, *model,
                          {.max_tokens = rows, .max_sequences = 1, .max_length = rows});
      const auto out = poisoned<float>(rows * vocab);
      forward.logits(hidden.data(), rows, out.data());
      stream.synchronize();
      const std::vector<float> got = download(out);
      std::vector<float> want;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t word = 0; word < vocab; ++word) {
          double sum = 0.0;
          for (int64_t i = 0; i < width; ++i) {
            sum += double{x.view().at(row, i)} * double{head.view().at(word, i)};
          }
          want.push_back(static_cast<float>(sum));
        }
      }
      // The tensor cores keep 14 bits of a sum of 32 products.
      EXPECT_LT(distance(got, want), 0x1p-10) << rows << " rows, tied " << tied;
    }
  }
}

}  // namespace
}  // namespace twell
