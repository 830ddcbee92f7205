// SPDX-License-Identifier: Apache-2.0
// The kernel of all layers against the scalar reference, and the words that CTAs exchange over many
// calls. model/decode_cuda_test.cc runs it in whole models.
#include "twell/ops/decode/decode_layers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/decode/decode_layers_reference.h"

namespace twell {
namespace {

// A step of the kernel on a problem of the reference.
class Steps {
 public:
  // sparse: of each layer.
  Steps(const DecodeReference& reference, const std::vector<bool>& sparse)
      : x_values_(to_bf16s(reference.x)), x_(upload(x_values_)) {
    shape_ = {.multiprocessors = CudaContext(stream_.get()).multiprocessors(),
              .tokens = reference.tokens(),
              .width = reference.width,
              .heads = reference.heads,
              .kv_heads = reference.kv_heads,
              .head_dim = reference.head_dim,
              .max_length = *std::max_element(reference.kv_len.begin(), reference.kv_len.end())};
    memory_ = DeviceBuffer<uint8_t>(decode_workspace_bytes(shape_));
    TWELL_CUDA_CHECK(cudaMemset(memory_.data(), 0, static_cast<size_t>(memory_.size())));
    cos_ = upload(reference.cos);
    sin_ = upload(reference.sin);
    positions_ = upload(reference.positions);
    kv_len_ = upload(reference.kv_len);
    tables_ = upload(reference.tables);
    cache_rows_ = upload(reference.cache_rows);
    kv_begin_ = upload(reference.kv_begin);
    problem_ = {.tokens = static_cast<int>(reference.tokens()),
                .layers = static_cast<int>(reference.layers.size()),
                .width = static_cast<int>(reference.width),
                .ffn = static_cast<int>(reference.ffn),
                .heads = static_cast<int>(reference.heads),
                .kv_heads = static_cast<int>(reference.kv_heads),
                .head_dim = static_cast<int>(reference.head_dim),
                .eps = static_cast<float>(reference.eps),
                .cos = cos_.data(),
                .sin = sin_.data(),
                .positions = positions_.data(),
                .cache_rows = cache_rows_.data(),
                .tables = tables_.data(),
                .kv_begin = kv_begin_.data(),
                .kv_len = kv_len_.data(),
                .x = x_.data(),
                .workspace = decode_workspace(shape_, memory_.data())};
    const auto keep = [&](const std::vector<float>& values) -> __nv_bfloat16* {
      if (values.empty()) return nullptr;
      kept_.push_back(upload(to_bf16s(values)));
      return kept_.back().data();
    };
    for (size_t i = 0; i < reference.layers.size(); ++i) {
      const DecodeReferenceLayer& layer = reference.layers[i];
      problem_.layer[i] = {.attention_norm = keep(layer.attention_norm),
                           .w_qkv = keep(layer.w_qkv),
                           .b_qkv = keep(layer.b_qkv),
                           .w_o = keep(layer.w_o),
                           .ffn_norm = keep(layer.ffn_norm),
                           .w_gate = keep(layer.w_gate),
                           .w_up = keep(layer.w_up),
                           .w_down = keep(layer.w_down),
                           .keys = keep(layer.keys),
                           .values = keep(layer.values),
                           .sparse = sparse[i]};
    }
  }

  // What an early call left in every word: a tag that comes again, with a value that must not be
  // read.
  void leave_words(uint32_t tag) {
    const DecodeWorkspace& w = problem_.workspace;
    const std::vector<uint64_t> words(static_cast<size_t>(w.words_end() - w.x),
                                      uint64_t{tag} << 32 | 0x7fc07fc0u);
    TWELL_CUDA_CHECK(
        cudaMemcpy(w.x, words.data(), words.size() * sizeof(uint64_t), cudaMemcpyHostToDevice));
  }
  void set_tags_used(uint32_t used) {
    TWELL_CUDA_CHECK(
        cudaMemcpy(problem_.workspace.state, &used, sizeof used, cudaMemcpyHostToDevice));
  }
  uint32_t tags_used() const {
    uint32_t used = 0;
    TWELL_CUDA_CHECK(
        cudaMemcpy(&used, problem_.workspace.state, sizeof used, cudaMemcpyDeviceToHost));
    return used;
  }
  void set_sparse_requests(int stages) { problem_.sparse_requests = stages; }
  std::vector<float> step() {
    TWELL_CUDA_CHECK(cudaMemcpy(x_.data(), x_values_.data(),
                                x_values_.size() * sizeof(__nv_bfloat16), cudaMemcpyHostToDevice));
    TWELL_CUDA_CHECK(launch_decode_layers_sm90(problem_, stream_.get()));
    stream_.synchronize();
    return to_floats(download(x_));
  }

  // Rows of a layer's cache, those of `rows` one behind the other.
  std::vector<float> cached(bool values, size_t layer, const std::vector<int64_t>& rows) const {
    const auto width = static_cast<size_t>(problem_.kv_heads * problem_.head_dim);
    const __nv_bfloat16* const from =
        values ? problem_.layer[layer].values : problem_.layer[layer].keys;
    std::vector<__nv_bfloat16> out(rows.size() * width);
    for (size_t i = 0; i < rows.size(); ++i) {
      TWELL_CUDA_CHECK(cudaMemcpy(out.data() + i * width,
                                  from + rows[i] * static_cast<int64_t>(width),
                                  width * sizeof(__nv_bfloat16), cudaMemcpyDeviceToHost));
    }
    return to_floats(out);
  }

 private:
  CudaStream stream_;
  DecodeWorkspaceShape shape_;
  std::vector<__nv_bfloat16> x_values_;
  DeviceBuffer<__nv_bfloat16> x_;
  DeviceBuffer<uint8_t> memory_;
  DeviceBuffer<float> cos_, sin_;
  DeviceBuffer<int32_t> positions_, kv_len_, tables_;
  DeviceBuffer<int64_t> cache_rows_, kv_begin_;
  std::vector<DeviceBuffer<__nv_bfloat16>> kept_;
  DecodeLayers problem_;
};

bool takes(const DecodeReference& problem) {
  return decode_layers_max_tokens(problem.width, problem.heads * problem.head_dim, problem.ffn,
                                  problem.head_dim) >= problem.tokens();
}

class DecodeLayersCuda : public testing::TestWithParam<DecodeReferenceShape> {};

// model/decode_reference_test.cc compares the reference with the CPU's engine, and shows that the
// tolerance finds a key left out of these problems.
TEST_P(DecodeLayersCuda, EqualsTheReference) {
  TWELL_HOPPER_TEST();
  DecodeReference reference = random_decode(GetParam());
  reference.rounds = true;
  ASSERT_TRUE(takes(reference));
  const DecodeReference before = reference;
  const std::vector<double> want = reference.run();
  const double tolerance = decode_tolerance(GetParam().layers);
  const auto width = static_cast<size_t>(reference.width);
  for (const bool sparse_first : {false, true}) {
    std::vector<bool> sparse;  // in turn
    for (size_t i = 0; i < reference.layers.size(); ++i) {
      sparse.push_back((i % 2 == 0) == sparse_first);
    }
    SCOPED_TRACE(testing::Message() << "the first layer sparse: " << sparse_first);
    Steps steps(before, sparse);
    const std::vector<float> got = steps.step();
    for (size_t token = 0; token < reference.positions.size(); ++token) {
      EXPECT_LE(relative_error(std::span(got).subspan(token * width, width),
                               std::span(want).subspan(token * width, width)),
                tolerance)
          << "token " << token;
    }
    // How far ahead weights are requested changes no bit.
    for (const int stages : {2, 3}) {
      steps.set_sparse_requests(stages);
      EXPECT_EQ(steps.step(), got) << stages << " stages";
    }
    for (size_t layer = 0; layer < reference.layers.size(); ++layer) {
      for (const bool values : {false, true}) {
        const std::vector<float>& cache =
            values ? reference.layers[layer].values : reference.layers[layer].keys;
        const int64_t kv_width = reference.kv_heads * reference.head_dim;
        std::vector<float> stored;
        for (const int64_t row : reference.cache_rows) {
          const auto begin = cache.begin() + row * kv_width;
          stored.insert(stored.end(), begin, begin + kv_width);
        }
        const std::vector<float> rows = steps.cached(values, layer, reference.cache_rows);
        EXPECT_LE(relative_error(std::span(rows), std::span(stored)), tolerance)
            << (values ? "values" : "keys") << " of layer " << layer;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, DecodeLayersCuda, testing::ValuesIn(decode_reference_shapes()));

TEST(DecodeLayersCudaTest, TagsStartAgainBeforeTheyRunOut) {
  TWELL_SKIP_WITHOUT_GPU();
  constexpr int kLayers = 3;
  constexpr uint32_t kTagsOfCall = kLayers + 1;
  for (const std::vector<int32_t>& lengths : {std::vector<int32_t>{700}, {700, 400}}) {
    const DecodeReference problem = random_decode({256, 1024, 4, 2, 64, lengths, kLayers});
    if (!takes(problem)) GTEST_SKIP() << "the kernel of all layers needs Hopper";
    for (const bool is_sparse : {false, true}) {
      SCOPED_TRACE(testing::Message() << lengths.size() << " tokens, sparse: " << is_sparse);
      const std::vector<bool> sparse(kLayers, is_sparse);
      const std::vector<float> want = Steps(problem, sparse).step();
      for (const float value : want) ASSERT_TRUE(std::isfinite(value));
      Steps steps(problem, sparse);
      EXPECT_EQ(steps.step(), want);
      EXPECT_EQ(steps.tags_used(), kTagsOfCall);
      // Every word of the calls after the last possible tag, and the tag of words never written.
      for (const uint32_t left : {0u, 1u, 2u, kTagsOfCall, kTagsOfCall + 2}) {
        SCOPED_TRACE(testing::Message() << "words with tag " << left);
        steps.leave_words(left);
        constexpr uint32_t kLast = ~0u - kMaxDecodeLayers - 1;
        uint32_t used = kLast - 2 * kTagsOfCall;
        steps.set_tags_used(used);
        for (int call = 0; call < 40; ++call) {  // without a new start the tags would wrap around
          ASSERT_EQ(steps.step(), want) << "call " << call;
          const uint32_t now = steps.tags_used();
          EXPECT_EQ(now, used == kLast ? 0 : used + kTagsOfCall);
          used = now;
        }
      }
    }
  }
}

}  // namespace
}  // namespace twell
