// SPDX-License-Identifier: Apache-2.0
// The kernel of all layers (ops/decode) in a whole model, compared with the CPU: one new token for
// each of a few sequences.
#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/cuda_gtest.h"
#include "twell/model/cuda_test_model.h"
#include "twell/model/forward_cuda.h"

namespace twell {
namespace {

struct DecodeCase {
  const char* name;
  ModelConfig config;
};

ModelConfig model_of(int64_t width, int64_t ffn, int64_t heads, int64_t kv_heads,
                     int64_t head_dim) {
  return decode_model(width, ffn, heads, kv_heads, head_dim, 1100);
}

std::vector<DecodeCase> decode_cases() {
  std::vector<DecodeCase> cases = {
      {"few_neurons_a_cta", model_of(64, 200, 4, 2, 16)},
      {"short_last_block", model_of(136, 1000, 2, 1, 128)},
      {"not_gated", model_of(192, 2056, 3, 3, 64)},
      {"bias", model_of(256, 640, 8, 2, 32)},
      {"more_rows_than_one_round", model_of(2200, 264, 4, 4, 64)},
      {"rows_in_two_chunks", model_of(4104, 136, 1, 1, 80)},
      {"many_neurons_a_cta", model_of(64, 20000, 2, 1, 48)},
      {"screens_in_pieces", model_of(2112, 200, 1, 1, 80)},
      {"no_room_for_the_kernel_of_one", model_of(9216, 72, 1, 1, 64)},
  };
  cases[2].config.gated = false;
  cases[3].config.qkv_bias = true;
  cases[3].config.family = Family::kQwen2;
  return cases;
}

// Keys in the cache: one to several segments of 256 and more, and lengths around their edges.
const std::vector<int64_t> kLengths = {1, 7, 255, 256, 512, 1029, 64, 300};

class DecodeCudaTest : public testing::TestWithParam<DecodeCase> {
 protected:
  void SetUp() override {
    TWELL_SKIP_WITHOUT_GPU();
    const ModelConfig& config = GetParam().config;
    stream_ = std::make_unique<CudaStream>();
    ctx_ = std::make_unique<CudaContext>(stream_->get());
    model_ = rounded_model(cpu_, config);
    device_model_ = std::make_unique<ModelCuda>(*ctx_, *model_);
    const auto slots = std::ssize(kLengths);
    // Blocks scattered over the cache.
    const int64_t each = (config.context + kKvBlock - 1) / kKvBlock, blocks = slots * each + 1;
    cache_ = std::make_unique<KvCacheCuda>(config, slots, config.context, blocks);
    for (int64_t slot = 0; slot < slots; ++slot) {
      std::vector<int32_t> table;
      for (int64_t i = slot * each; i < (slot + 1) * each; ++i) {
        table.push_back(static_cast<int32_t>(i * 11 % blocks));
      }
      cache_->set_table(slot, table);
    }
    // NaN wherever nothing is stored, but for block 0 (kv_cache_cuda.h).
    const auto size = static_cast<size_t>(cache_->layer_size() - kKvBlock * config.kv_width());
    for (int64_t layer = 0; layer < config.layers; ++layer) {
      for (__nv_bfloat16* part : {cache_->keys(layer), cache_->values(layer)}) {
        TWELL_CUDA_CHECK(
            cudaMemset(part + kKvBlock * config.kv_width(), 0xff, size * sizeof(__nv_bfloat16)));
      }
    }
    for (size_t slot = 0; slot < kLengths.size(); ++slot) {
      texts_.push_back(random_ids(kLengths[slot] + kSteps, config.vocab_size, slot));
    }
  }

  std::unique_ptr<ForwardCuda> make_forward(FfnPolicy policy) {
    return std::make_unique<ForwardCuda>(*ctx_, *device_model_,
                                         ForwardPlanCuda{.max_tokens = 1100,
                                                         .max_sequences = std::ssize(kLengths),
                                                         .max_length = 1100,
                                                         .ffn = policy});
  }
  void prefill(ForwardCuda& forward) {
    for (size_t slot = 0; slot < kLengths.size(); ++slot) {
      cache_->set_length(static_cast<int64_t>(slot), 0);
      forward.run(std::span(texts_[slot]).first(static_cast<size_t>(kLengths[slot])),
                  std::vector<ForwardSequence>{{kLengths[slot], static_cast<int64_t>(slot)}},
                  cache_.get());
    }
  }
  // Computes the final hidden states of the next token of these slots, where it can in one kernel
  // if that is asked for.
  std::vector<__nv_bfloat16> step(ForwardCuda& forward, const std::vector<size_t>& slots,
                                  bool one_kernel = true) {
    std::vector<int32_t> ids;
    std::vector<ForwardSequence> sequences;
    for (const size_t slot : slots) {
      const int64_t at = cache_->length(static_cast<int64_t>(slot));
      ids.push_back(texts_[slot][static_cast<size_t>(at)]);
      sequences.push_back({1, static_cast<int64_t>(slot)});
    }
    forward.run(ids, sequences, cache_.get(), nullptr, {.one_kernel = one_kernel});
    stream_->synchronize();
    std::vector<__nv_bfloat16> hidden(slots.size() * static_cast<size_t>(model_->config.width));
    TWELL_CUDA_CHECK(cudaMemcpy(hidden.data(), forward.hidden(),
                                hidden.size() * sizeof(__nv_bfloat16), cudaMemcpyDeviceToHost));
    return hidden;
  }

  // The final hidden state of the last token of a slot's text.
  std::vector<float> cpu_hidden(size_t slot) {
    ForwardState state(model_->config, FfnPolicy::kDense);
    const std::vector<int32_t>& ids = texts_[slot];
    Buffer<float> hidden(std::ssize(ids) * model_->config.width);
    const MatrixF rows = hidden.matrix(std::ssize(ids), model_->config.width);
    forward(cpu_, *model_, state,
            {.ids = ids, .sequences = {{{std::ssize(ids), 0}}}, .hidden = rows});
    return {rows.row(rows.rows - 1), rows.row(rows.rows - 1) + rows.cols};
  }

  static constexpr int64_t kSteps = 2;
  const std::vector<size_t> all_ = {0, 1, 2, 3, 4, 5, 6, 7};
  Context cpu_{2};
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<CudaContext> ctx_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<ModelCuda> device_model_;
  std::unique_ptr<KvCacheCuda> cache_;
  std::vector<std::vector<int32_t>> texts_;
};

TEST_P(DecodeCudaTest, EqualsCpu) {
  std::vector<std::vector<float>> wanted;
  for (const size_t slot : all_) wanted.push_back(cpu_hidden(slot));
  for (const auto& [policy, one_kernel] :
       {std::pair{FfnPolicy::kDense, true}, std::pair{FfnPolicy::kSparse, true},
        std::pair{FfnPolicy::kDense, false}, std::pair{FfnPolicy::kSparse, false}}) {
    const auto forward = make_forward(policy);
    prefill(*forward);
    std::vector<__nv_bfloat16> hidden;
    for (int i = 0; i < kSteps; ++i) hidden = step(*forward, all_, one_kernel);
    const auto width = static_cast<size_t>(model_->config.width);
    for (const size_t slot : all_) {
      const std::vector<float>& want = wanted[slot];
      double error = 0.0, size = 0.0;
      for (size_t i = 0; i < width; ++i) {
        const double got = __bfloat162float(hidden[slot * width + i]);
        error += (got - want[i]) * (got - want[i]);
        size += double{want[i]} * want[i];
      }
      // Tolerance as in forward_cuda_test.cc: twice ten independent roundings of a relative 2^-9
      // per layer.
      const double layers = static_cast<double>(model_->config.layers);
      EXPECT_LE(std::sqrt(error / size), 2.0 * std::ldexp(std::sqrt(10.0 * layers + 2.0), -9))
          << "slot " << slot << ", " << ffn_policy_name(policy) << ", "
          << (one_kernel ? "one kernel" : "kernels per layer");
    }
  }
}

TEST_P(DecodeCudaTest, ATokenDoesNotDependOnItsNeighbours) {
  const ModelConfig& config = model_->config;
  if (decode_layers_max_tokens(config.width, config.q_width(), config.ffn, config.head_dim) <
      std::ssize(all_)) {
    GTEST_SKIP() << "too wide for all of them in one kernel, whose sums have another order";
  }
  for (const FfnPolicy policy : {FfnPolicy::kDense, FfnPolicy::kSparse}) {
    const auto forward = make_forward(policy);
    prefill(*forward);
    const auto rewind = [&] {
      for (const size_t slot : all_) {
        cache_->set_length(static_cast<int64_t>(slot), kLengths[slot]);
      }
    };
    const auto bits = [](std::vector<__nv_bfloat16> values) {
      std::vector<uint16_t> out;
      for (const __nv_bfloat16 v : values) out.push_back(__bfloat16_as_ushort(v));
      return out;
    };
    const auto want = bits(step(*forward, all_));
    rewind();
    EXPECT_EQ(bits(step(*forward, all_)), want) << "a second run differs";
    rewind();
    std::vector<uint16_t> alone;
    for (const size_t slot : all_) {
      const auto one = bits(step(*forward, {slot}));
      alone.insert(alone.end(), one.begin(), one.end());
    }
    EXPECT_EQ(alone, want) << ffn_policy_name(policy);
    rewind();
    auto three = bits(step(*forward, {0, 1, 2}));
    three.resize(want.size());
    const auto cut = static_cast<int64_t>(3 * model_->config.width);
    EXPECT_TRUE(std::equal(want.begin(), want.begin() + cut, three.begin()));
  }
}

TEST_P(DecodeCudaTest, AScreenChangesNothing) {
  std::vector<uint16_t> hidden[2];
  std::vector<int64_t> nnz[2];
  for (const bool screens : {false, true}) {
    const auto forward = make_forward(FfnPolicy::kSparse);
    // Up to 2,304 columns, shared memory has room for screens in addition to the ring buffer.
    const int64_t width = model_->config.width;
    if (screens) {
      const bool hopper = ctx_->compute_capability() == 90;
      EXPECT_EQ(forward->make_screens(), hopper && width % 64 == 0 && width <= 2304);
    }
    prefill(*forward);
    for (int i = 0; i < kSteps; ++i) {
      for (const size_t slot : all_) {
        for (const __nv_bfloat16 v : step(*forward, {slot})) {
          hidden[screens].push_back(__bfloat16_as_ushort(v));
        }
      }
    }
    forward->ffn_plans().update(*ctx_);
    for (int64_t l = 0; l < model_->config.layers; ++l) {
      nnz[screens].push_back(forward->ffn_plans()[l].plan.nnz);
    }
  }
  EXPECT_EQ(hidden[0], hidden[1]);
  EXPECT_EQ(nnz[0], nnz[1]);
}

TEST_P(DecodeCudaTest, CountsActiveNeurons) {
  std::vector<int64_t> counts[2];
  int64_t tokens[2];  // that the first layer counted: all, or a sample where cuBLASLt runs it dense
  for (const bool sparse : {false, true}) {
    const auto forward = make_forward(sparse ? FfnPolicy::kSparse : FfnPolicy::kDense);
    prefill(*forward);
    forward->ffn_plans().update(*ctx_);
    std::vector<int64_t> before;
    for (int64_t l = 0; l < model_->config.layers; ++l) {
      before.push_back(forward->ffn_plans()[l].plan.nnz);
    }
    const int64_t tokens_before = forward->ffn_plans()[0].plan.tokens;
    step(*forward, all_);
    forward->ffn_plans().update(*ctx_);
    tokens[sparse ? 1 : 0] = forward->ffn_plans()[0].plan.tokens - tokens_before;
    for (int64_t l = 0; l < model_->config.layers; ++l) {
      const FfnPlan& plan = forward->ffn_plans()[l].plan;
      counts[sparse ? 1 : 0].push_back(plan.nnz - before[static_cast<size_t>(l)]);
      EXPECT_GT(counts[sparse ? 1 : 0].back(), 0);
      EXPECT_LT(counts[sparse ? 1 : 0].back(), 8 * model_->config.ffn);
    }
  }
  if (tokens[0] != tokens[1]) {
    EXPECT_NEAR(static_cast<double>(counts[0][0]) / static_cast<double>(tokens[0]),
                static_cast<double>(counts[1][0]) / static_cast<double>(tokens[1]),
                0.1 * static_cast<double>(model_->config.ffn));
    return;
  }
  // Both see the same gate in the first layer; in the second, x differs by the order of sums.
  EXPECT_EQ(counts[0][0], counts[1][0]);
  EXPECT_NEAR(static_cast<double>(counts[0][1]), static_cast<double>(counts[1][1]),
              0.02 * static_cast<double>(counts[0][1]) + 2.0);
}

INSTANTIATE_TEST_SUITE_P(Models, DecodeCudaTest, testing::ValuesIn(decode_cases()),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace twell
