// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/attention/attention_train_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "twell/base/cuda_testing.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/attention/attention.h"
#include "twell/ops/attention/attention_cuda.h"

namespace twell {
namespace {

std::string no_cudnn() {
  if (const std::string why = cuda_unavailable(); !why.empty()) return why;
  return std::string_view(cudnn_status()).starts_with("cuDNN 9") ? "" : cudnn_status();
}

struct Results {
  std::vector<float> out, logsumexp, d_qkv;  // logsumexp [B, H, S]
};

struct Operands {
  explicit Operands(const AttentionTrainShape& s)
      : shape(s),
        tokens(s.sequences * s.length),
        width(s.heads * s.head_dim),
        kv_width(s.kv_heads * s.head_dim),
        qkv(random_bf16(tokens * s.row(), 1)),
        d_out(random_bf16(tokens * width, 2)) {
    // Documents have one token up to the whole sequence. Some are longer than the kernels' tiles,
    // so that the mask hides whole tiles of keys.
    for (int64_t token = 0, i = 0; token < tokens; token += documents.back(), ++i) {
      const int64_t left = s.length - token % s.length;
      const int64_t wanted[] = {5, 1, 300, 64, 17, 129, 1, 1000};
      documents.push_back(s.document_mask ? std::min(left, wanted[i % 8]) : left);
      begins.insert(begins.end(), static_cast<size_t>(documents.back()),
                    static_cast<int32_t>(token % s.length));
    }
  }

  AttentionTrainShape shape;
  int64_t tokens, width, kv_width;
  std::vector<__nv_bfloat16> qkv, d_out;
  std::vector<int64_t> documents;  // lengths; those of the sequences without a mask
  std::vector<int32_t> begins;     // [tokens]
};

Results on_device(const Operands& o, bool graph = false) {
  const CudaStream stream;
  CudaContext ctx(stream.get());
  const auto qkv = upload(o.qkv), d_out = upload(o.d_out);
  const auto out = poisoned<__nv_bfloat16>(o.tokens * o.width);
  const auto d_qkv = poisoned<__nv_bfloat16>(o.tokens * o.shape.row());
  const auto logsumexp = poisoned<float>(o.tokens * o.shape.heads);
  const auto begins = upload(o.begins);
  const auto mask = poisoned<__nv_bfloat16>(
      o.shape.document_mask ? o.tokens * document_mask_row(o.shape.length) : 0);
  const auto both = [&] {
    if (o.shape.document_mask) {
      TWELL_CUDA_CHECK(launch_document_mask(
          {o.shape.sequences, o.shape.length, begins.data(), mask.data(), o.shape.window},
          stream.get()));
    }
    AttentionTrainShape shape = o.shape;
    if (shape.document_mask) shape.window = 0;  // the mask has it
    attention_train_forward(ctx, {shape, qkv.data(), out.data(), logsumexp.data(), mask.data()});
    attention_train_backward(ctx, {shape, qkv.data(), out.data(), logsumexp.data(), d_out.data(),
                                   d_qkv.data(), mask.data()});
  };
  both();
  if (graph) {
    stream.synchronize();
    TWELL_CUDA_CHECK(cudaMemset(d_qkv.data(), 0xff, static_cast<size_t>(d_qkv.bytes())));
    synchronize_default_stream();
    replay_as_graph(stream, 2, both);
  }
  stream.synchronize();
  return {to_floats(download(out)), download(logsumexp), to_floats(download(d_qkv))};
}

Results on_cpu(const Operands& o) {
  Context ctx;
  const AttentionTrainShape& s = o.shape;
  const int64_t row = s.row();
  const std::vector<float> qkv = to_floats(o.qkv), d_out = to_floats(o.d_out);
  std::vector<AttentionSequence> sequences;
  for (int64_t token = 0; const int64_t length : o.documents) {
    AttentionSequence sequence;
    sequence.q_begin = token;
    sequence.q_len = length;
    const float* const first = qkv.data() + token * row + o.width;
    sequence.k = ConstMatrixF(first, length, o.kv_width, row);
    sequence.v = ConstMatrixF(first + o.kv_width, length, o.kv_width, row);
    sequences.push_back(sequence);
    token += length;
  }
  const AttentionShape shape{s.heads, s.kv_heads, s.head_dim, s.window};
  std::vector<float> out(static_cast<size_t>(o.tokens * o.width)),
      logsumexp(static_cast<size_t>(o.tokens * s.heads)), d_qkv(qkv.size());
  const ConstMatrixF q(qkv.data(), o.tokens, o.width, row);
  attention_forward(ctx, {.shape = shape,
                          .sequences = sequences,
                          .q = q,
                          .out = MatrixF(out.data(), o.tokens, o.width),
                          .logsumexp = logsumexp.data()});
  attention_backward(
      ctx, {.shape = shape,
            .sequences = sequences,
            .q = q,
            .out = ConstMatrixF(out.data(), o.tokens, o.width),
            .logsumexp = logsumexp.data(),
            .d_out = ConstMatrixF(d_out.data(), o.tokens, o.width),
            .d_q = MatrixF(d_qkv.data(), o.tokens, o.width, row),
            .d_k = MatrixF(d_qkv.data() + o.width, o.tokens, o.kv_width, row),
            .d_v = MatrixF(d_qkv.data() + o.width + o.kv_width, o.tokens, o.kv_width, row)});
  Results results{out, {}, d_qkv};
  for (int64_t b = 0; b < s.sequences; ++b) {
    for (int64_t h = 0; h < s.heads; ++h) {
      for (int64_t i = 0; i < s.length; ++i) {
        results.logsumexp.push_back(
            logsumexp[static_cast<size_t>((b * s.length + i) * s.heads + h)]);
      }
    }
  }
  return results;
}

double norm(const std::vector<float>& values) {
  double sum = 0.0;
  for (const float value : values) sum += static_cast<double>(value) * value;
  return std::sqrt(sum);
}

double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  std::vector<float> difference(want.size());
  for (size_t i = 0; i < want.size(); ++i) difference[i] = got[i] - want[i];
  return norm(difference) / norm(want);
}

// The columns [begin, begin + count) of rows of `row` values.
std::vector<float> columns(const std::vector<float>& values, int64_t row, int64_t begin,
                           int64_t count) {
  std::vector<float> out;
  for (size_t at = static_cast<size_t>(begin); at < values.size(); at += static_cast<size_t>(row)) {
    out.insert(out.end(), values.begin() + static_cast<std::ptrdiff_t>(at),
               values.begin() + static_cast<std::ptrdiff_t>(at) + count);
  }
  return out;
}

class AttentionTrainCudaTest : public testing::TestWithParam<AttentionTrainShape> {};

TEST_P(AttentionTrainCudaTest, EqualsCpu) {
  if (const std::string why = no_cudnn(); !why.empty()) GTEST_SKIP() << why;
  const Operands o(GetParam());
  const Results got = on_device(o), want = on_cpu(o);
  for (const float value : got.d_qkv) ASSERT_TRUE(std::isfinite(value));
  for (size_t i = 0; i < want.logsumexp.size(); ++i) {
    ASSERT_NEAR(got.logsumexp[i], want.logsumexp[i], 1e-4 * (1.0 + std::abs(want.logsumexp[i])))
        << i;
  }
  // Weights, out, the gradient of the scores and the result are each rounded to bf16 by 2^-9; the
  // total relative error stays below 2^-6.
  const double near = std::ldexp(1.0, -6);
  EXPECT_LT(relative_error(got.out, want.out), std::ldexp(1.0, -7));
  const int64_t row = o.shape.row();
  const auto part_error = [&](int64_t begin, int64_t count) {
    return relative_error(columns(got.d_qkv, row, begin, count),
                          columns(want.d_qkv, row, begin, count));
  };
  EXPECT_LT(part_error(o.width + o.kv_width, o.kv_width), near);
  EXPECT_LT(part_error(0, o.width), near);
  EXPECT_LT(part_error(o.width, o.kv_width), near);
}

TEST_P(AttentionTrainCudaTest, RepeatsToTheBit) {
  if (const std::string why = no_cudnn(); !why.empty()) GTEST_SKIP() << why;
  const Operands o(GetParam());
  const Results first = on_device(o), second = on_device(o, /*graph=*/true);
  EXPECT_EQ(first.out, second.out);
  EXPECT_EQ(first.logsumexp, second.logsumexp);
  EXPECT_EQ(first.d_qkv, second.d_qkv);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, AttentionTrainCudaTest,
    testing::Values(AttentionTrainShape{3, 127, 4, 2, 64}, AttentionTrainShape{2, 129, 6, 1, 80},
                    AttentionTrainShape{1, 17, 4, 2, 8}, AttentionTrainShape{2, 64, 4, 4, 16},
                    AttentionTrainShape{1, 130, 3, 3, 24}, AttentionTrainShape{2, 640, 4, 4, 128},
                    AttentionTrainShape{1, 513, 8, 2, 64},
                    // More scores than are held at a time: in parts.
                    AttentionTrainShape{2, 2048, 36, 36, 64}));

INSTANTIATE_TEST_SUITE_P(Documents, AttentionTrainCudaTest,
                         testing::Values(AttentionTrainShape{3, 127, 4, 2, 64, true},
                                         AttentionTrainShape{2, 129, 6, 1, 80, true},
                                         AttentionTrainShape{1, 17, 4, 2, 8, true},
                                         AttentionTrainShape{2, 640, 4, 4, 128, true},
                                         AttentionTrainShape{1, 513, 8, 2, 64, true},
                                         AttentionTrainShape{2, 2048, 36, 36, 64, true}));

INSTANTIATE_TEST_SUITE_P(Windows, AttentionTrainCudaTest,
                         testing::Values(AttentionTrainShape{3, 127, 4, 2, 64, false, 16},
                                         AttentionTrainShape{2, 129, 6, 1, 80, false, 2},
                                         AttentionTrainShape{1, 17, 4, 2, 8, false, 16},
                                         AttentionTrainShape{1, 17, 4, 2, 16, false, 17},
                                         AttentionTrainShape{2, 640, 4, 4, 128, false, 129},
                                         AttentionTrainShape{1, 513, 8, 2, 64, false, 512},
                                         AttentionTrainShape{2, 2048, 36, 36, 64, false, 256},
                                         AttentionTrainShape{3, 127, 4, 2, 64, true, 16},
                                         AttentionTrainShape{2, 640, 4, 4, 128, true, 65}));

TEST(AttentionTrainRefusalTest, AMaskWithoutItsShapeOrTheReverse) {
  if (const std::string why = no_cudnn(); !why.empty()) GTEST_SKIP() << why;
  const CudaStream stream;
  CudaContext ctx(stream.get());
  const auto mask = poisoned<__nv_bfloat16>(64 * 128);
  EXPECT_THROW(attention_train_forward(ctx, {.shape = {1, 64, 2, 2, 64}, .mask = mask.data()}),
               Error);
  EXPECT_THROW(attention_train_backward(ctx, {.shape = {1, 64, 2, 2, 64, true}}), Error);
}

TEST(AttentionTrainRefusalTest, Shapes) {
  if (const std::string why = no_cudnn(); !why.empty()) GTEST_SKIP() << why;
  const CudaStream stream;
  CudaContext ctx(stream.get());
  for (const AttentionTrainShape& shape :
       {AttentionTrainShape{2, 1, 2, 2, 64}, AttentionTrainShape{2, 64, 3, 2, 64}}) {
    EXPECT_THROW(attention_train_forward(ctx, {.shape = shape}), Error);
    EXPECT_THROW(attention_train_backward(ctx, {.shape = shape}), Error);
  }
}

}  // namespace
}  // namespace twell
