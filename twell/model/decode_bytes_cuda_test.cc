// SPDX-License-Identifier: Apache-2.0
// The kernel of all layers (ops/decode) with projections in e4m3 and with keys and values in 8
// bits, in a whole model, against the CPU with the same weights.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/format/byte_matrix.h"
#include "twell/model/cuda_test_model.h"
#include "twell/model/forward_cuda.h"

namespace twell {
namespace {

struct BytesCase {
  const char* name;
  ModelConfig config;
  bool large = false;  // values in front of the output and down projections, beyond f16's range
};

std::vector<BytesCase> bytes_cases() {
  std::vector<BytesCase> cases = {
      {"few_neurons_a_cta", decode_model(64, 208, 4, 2, 16, 400)},
      {"short_last_block", decode_model(144, 1008, 2, 1, 128, 400)},
      {"not_gated", decode_model(192, 2064, 3, 3, 64, 400)},
      {"bias", decode_model(256, 640, 8, 2, 32, 400)},
      {"rows_in_two_chunks", decode_model(2208, 272, 4, 4, 64, 400)},
      {"rows_in_three_chunks", decode_model(4112, 144, 1, 1, 80, 400)},
      {"many_neurons_a_cta", decode_model(64, 20000, 2, 1, 48, 400)},
      {"large_values", decode_model(256, 640, 4, 4, 64, 400), true},
  };
  cases[2].config.gated = false;
  cases[3].config.qkv_bias = true;
  cases[3].config.family = Family::kQwen2;
  return cases;
}

bool is_projection(const ParamSpec& spec) {
  return !spec.is_vector && spec.name.starts_with("model.layers.");
}

// Factors that cancel out, by powers of two, so that the model computes the same.
void make_large(Model& model) {
  const std::pair<const char*, int> factors[] = {
      {"v_proj", 14}, {"o_proj", -14}, {"gate_proj", 10}, {"up_proj", 12}, {"down_proj", -22}};
  for (const ParamSpec& spec : model.table) {
    for (const auto& [name, power] : factors) {
      if (spec.name.find(name) == std::string::npos) continue;
      for (int64_t i = 0; i < spec.size(); ++i) {
        float& value = model.flat[spec.offset + i];
        value = std::ldexp(value, power);
      }
    }
  }
}

// Replaces the projections by what e4m3 with a scale per output holds of them.
void round_projections(Model& model) {
  for (const ParamSpec& spec : model.table) {
    if (!is_projection(spec)) continue;
    float* const flat = model.flat.data() + spec.offset;
    const int64_t outputs = spec.transposed ? spec.cols : spec.rows;
    const int64_t inputs = spec.size() / outputs;
    const auto at = [&](int64_t output, int64_t input) -> float& {
      return spec.transposed ? flat[input * outputs + output] : flat[output * inputs + input];
    };
    std::vector<float> row(static_cast<size_t>(inputs));
    std::vector<uint8_t> bytes(row.size());
    for (int64_t output = 0; output < outputs; ++output) {
      for (int64_t i = 0; i < inputs; ++i) row[static_cast<size_t>(i)] = at(output, i);
      const float scale = quantise_row(ByteType::kE4M3, row, bytes);
      dequantise_row(ByteType::kE4M3, bytes, scale, row);
      for (int64_t i = 0; i < inputs; ++i) at(output, i) = row[static_cast<size_t>(i)];
    }
  }
}

const std::vector<int64_t> kTextLengths = {1, 7, 64, 65, 330, 20, 128, 100};

class DecodeBytesCudaTest : public testing::TestWithParam<BytesCase> {
 protected:
  void SetUp() override {
    if (kPortableBuild) GTEST_SKIP() << "a portable build";
    TWELL_SKIP_WITHOUT_GPU();
    stream_ = std::make_unique<CudaStream>();
    ctx_ = std::make_unique<CudaContext>(stream_->get());
    if (ctx_->compute_capability() != 90) {
      TWELL_SKIP_OF_GPUS(1, ctx_->device_name() + " is not a Hopper GPU");
    }
    model_ = rounded_model(cpu_, GetParam().config);
    if (GetParam().large) make_large(*model_);
    const ModelCuda wide(*ctx_, *model_);
    device_model_ = ModelCuda::in_bytes(*ctx_, wide);
    round_projections(*model_);
    for (size_t slot = 0; slot < kTextLengths.size(); ++slot) {
      texts_.push_back(random_ids(kTextLengths[slot], GetParam().config.vocab_size, slot));
    }
  }

  // The final hidden states of the last tokens of all texts, token by token.
  std::vector<std::vector<float>> decoded(FfnPolicy policy, bool eight_bits) {
    const int64_t slots = std::ssize(kTextLengths);
    ForwardCuda forward(*ctx_, *device_model_,
                        {.max_tokens = slots,
                         .max_sequences = slots,
                         .max_length = 400,
                         .ffn = policy,
                         .eight_bit_cache = eight_bits});
    KvCacheCuda cache(model_->config, slots, 400, 0, eight_bits);
    const auto width = static_cast<size_t>(model_->config.width);
    std::vector<std::vector<float>> last(kTextLengths.size());
    for (int64_t position = 0; position < 330; ++position) {
      std::vector<int32_t> ids;
      std::vector<ForwardSequence> sequences;
      std::vector<size_t> running;
      for (size_t slot = 0; slot < kTextLengths.size(); ++slot) {
        if (position >= kTextLengths[slot]) continue;
        ids.push_back(texts_[slot][static_cast<size_t>(position)]);
        sequences.push_back({1, static_cast<int64_t>(slot)});
        running.push_back(slot);
      }
      forward.stage(ids, sequences, &cache);
      EXPECT_EQ(forward.path(),
                ids.size() <= 4 ? route::LayersPath::kOneKernel : route::LayersPath::kSingleOps);
      forward.enqueue(nullptr, {.one_kernel = true});
      std::vector<__nv_bfloat16> hidden(ids.size() * width);
      stream_->synchronize();
      TWELL_CUDA_CHECK(cudaMemcpy(hidden.data(), forward.hidden(),
                                  hidden.size() * sizeof(__nv_bfloat16), cudaMemcpyDeviceToHost));
      for (size_t i = 0; i < running.size(); ++i) {
        if (position + 1 < kTextLengths[running[i]]) continue;
        const auto begin = hidden.begin() + static_cast<int64_t>(i * width);
        last[running[i]] = to_floats({begin, begin + static_cast<int64_t>(width)});
      }
    }
    return last;
  }

  std::vector<float> cpu_hidden(size_t slot, bool eight_bits) {
    ForwardState state(model_->config, FfnPolicy::kDense);
    const std::vector<int32_t>& ids = texts_[slot];
    Buffer<float> hidden(std::ssize(ids) * model_->config.width);
    const MatrixF rows = hidden.matrix(std::ssize(ids), model_->config.width);
    KvCache cache(model_->config, 1, 400, {.eight_bits = eight_bits});
    forward(cpu_, *model_, state,
            {.ids = ids, .sequences = {{{std::ssize(ids), 0}}}, .cache = &cache, .hidden = rows});
    return {rows.row(rows.rows - 1), rows.row(rows.rows - 1) + rows.cols};
  }

  Context cpu_{2};
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<CudaContext> ctx_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<ModelCuda> device_model_;
  std::vector<std::vector<int32_t>> texts_;
};

TEST_P(DecodeBytesCudaTest, EqualsCpu) {
  // As in decode_cuda_test.cc: twice ten independent roundings of a relative 2^-9 per layer. A key
  // or value that was rounded to bf16 may be a whole step of 8 bits from the CPU's.
  const double layers = static_cast<double>(model_->config.layers);
  const double bound = 2.0 * std::ldexp(std::sqrt(10.0 * layers + 2.0), -9);
  for (const bool eight_bits : {false, true}) {
    const double limit = eight_bits ? bound + 4.0 / 254.0 : bound;
    const auto dense = decoded(FfnPolicy::kDense, eight_bits);
    const auto sparse = decoded(FfnPolicy::kSparse, eight_bits);
    double largest = 0.0;
    for (size_t slot = 0; slot < kTextLengths.size(); ++slot) {
      const std::vector<float> want = cpu_hidden(slot, eight_bits);
      for (const auto* got : {&dense[slot], &sparse[slot]}) {
        ASSERT_EQ(got->size(), want.size());
        double error = 0.0, size = 0.0;
        for (size_t i = 0; i < want.size(); ++i) {
          error += ((*got)[i] - double{want[i]}) * ((*got)[i] - double{want[i]});
          size += double{want[i]} * want[i];
        }
        const double relative = std::sqrt(error / size);
        EXPECT_LE(relative, limit)
            << "slot " << slot << (got == &dense[slot] ? ", dense" : ", sparse")
            << (eight_bits ? ", 8-bit cache" : "");
        largest = std::max(largest, relative);
      }
    }
    printf("%s, 8-bit cache %d: largest error %.2e of %.2e\n", GetParam().name, eight_bits, largest,
           limit);
  }
}

TEST_P(DecodeBytesCudaTest, RepeatsBitForBit) {
  for (const FfnPolicy policy : {FfnPolicy::kDense, FfnPolicy::kSparse}) {
    EXPECT_EQ(decoded(policy, true), decoded(policy, true));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, DecodeBytesCudaTest, testing::ValuesIn(bytes_cases()),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace twell
