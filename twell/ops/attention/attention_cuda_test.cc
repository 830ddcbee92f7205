// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/attention/attention_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <span>
#include <utility>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/attention/attention.h"
#include "twell/ops/attention/kv_bytes_cuda.h"

namespace twell {
namespace {

struct Lengths {
  int64_t q_len, kv_len;
};

// Sequences over a cache: keys and values of sequence i are kv_len rows from kv_begin on, which
// overlap those of other sequences, the last sequence's first; queries are packed, in rows wider
// than H * hd.
struct Problem {
  static constexpr int64_t kShift = 37;  // rows from where a sequence begins to where the next does

  Problem(int64_t heads, int64_t kv_heads, int64_t head_dim, const std::vector<Lengths>& lengths,
          bool whole)
      : shape{heads, kv_heads, head_dim}, kv_width(kv_heads * head_dim), uniform(whole) {
    q_stride = uniform ? heads * head_dim + 2 * kv_width : heads * head_dim + 24;
    for (const Lengths& length : lengths) capacity = std::max(capacity, length.kv_len);
    const auto count = static_cast<int64_t>(lengths.size());
    for (int64_t i = 0; i < count; ++i) {
      const Lengths length = lengths[static_cast<size_t>(i)];
      q_begin.push_back(static_cast<int32_t>(tokens));
      q_len.push_back(static_cast<int32_t>(length.q_len));
      kv_len.push_back(static_cast<int32_t>(length.kv_len));
      kv_begin.push_back((count - 1 - i) * kShift);
      tokens += length.q_len;
      max_q_len = std::max(max_q_len, length.q_len);
    }
    rows = (count - 1) * kShift + capacity;
    q = random_bf16(tokens * q_stride, 1);
    k = random_bf16(rows * kv_width, 2);
    v = random_bf16(rows * kv_width, 3);
    if (uniform) {  // [q | k | v] in one row
      kv_stride = q_stride;
      for (size_t i = 0; i < kv_begin.size(); ++i) kv_begin[i] = q_begin[i];
    } else {
      kv_stride = kv_width;
    }
  }

  // What the CPU op gives for the same values.
  struct Reference {
    std::vector<float> out;  // [tokens, H * hd]: sums of w v over keys
    // sqrt(sum of w^2 v^2): what roundings of the weights change `out` by, times the rounding.
    std::vector<float> spread;
  };
  Reference reference() const {
    std::vector<float> logsumexp, twice;
    Reference result;
    result.out = computed(false, logsumexp);
    // Weights of twice the scores are the squares of the weights, over their sum.
    result.spread = computed(true, twice);
    for (size_t i = 0; i < result.spread.size(); ++i) {
      const size_t row = i / static_cast<size_t>(shape.head_dim);
      const double squares = std::exp(static_cast<double>(twice[row]) - 2.0 * logsumexp[row]);
      result.spread[i] = static_cast<float>(std::sqrt(result.spread[i] * squares));
    }
    return result;
  }

  // out of the CPU op, with q twice as large and the squares of v if `squares`.
  std::vector<float> computed(bool squares, std::vector<float>& logsumexp) const {
    std::vector<float> q_f = to_floats(q), k_f = to_floats(k), v_f = to_floats(v);
    const int64_t width = shape.heads * shape.head_dim;
    if (squares) {
      if (!k8.empty()) {
        k_f = widened(k8, k_scales);
        v_f = widened(v8, v_scales);
      }
      for (float& value : v_f) value *= value;
      for (size_t i = 0; i < q_f.size(); ++i) {
        const int64_t column = static_cast<int64_t>(i) % q_stride;
        if (column < width) q_f[i] *= 2.0f;
        if (uniform && column >= width + kv_width) q_f[i] *= q_f[i];
      }
    }
    std::vector<float> out(static_cast<size_t>(tokens * width));
    logsumexp.resize(static_cast<size_t>(tokens * shape.heads));
    std::vector<AttentionSequence> sequences;
    for (size_t i = 0; i < q_len.size(); ++i) {
      AttentionSequence s;
      s.q_begin = q_begin[i];
      s.q_len = q_len[i];
      const float* base_k = uniform ? q_f.data() + width : k_f.data();
      const float* base_v = uniform ? q_f.data() + width + kv_width : v_f.data();
      s.k = ConstMatrixF(base_k + kv_begin[i] * kv_stride, kv_len[i], kv_width, kv_stride);
      s.v = ConstMatrixF(base_v + kv_begin[i] * kv_stride, kv_len[i], kv_width, kv_stride);
      if (!k8.empty() && !squares) {
        const int64_t at = kv_begin[i] * kv_width, scale_at = kv_begin[i] * shape.kv_heads;
        s.k8 = {k8.data() + at, k_scales.data() + scale_at};
        s.v8 = {v8.data() + at, v_scales.data() + scale_at};
      }
      sequences.push_back(s);
    }
    Context ctx(1);
    attention_forward(ctx, {.shape = shape,
                            .sequences = sequences,
                            .q = ConstMatrixF(q_f.data(), tokens, width, q_stride),
                            .out = MatrixF(out.data(), tokens, width),
                            .logsumexp = logsumexp.data()});
    return out;
  }
  std::vector<float> widened(const std::vector<int8_t>& bytes,
                             const std::vector<float>& scales) const {
    std::vector<float> out;
    for (size_t i = 0; i < bytes.size(); ++i) {
      out.push_back(scales[i / static_cast<size_t>(shape.head_dim)] * static_cast<float>(bytes[i]));
    }
    return out;
  }

  // All keys weigh the same, and a key's value has a single one, in the next column of each next
  // key: a column of the result is its number of keys over that of all.
  void count_keys() {
    ASSERT_FALSE(uniform);
    std::ranges::fill(q, __float2bfloat16(0.0f));
    std::ranges::fill(v, __float2bfloat16(0.0f));
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t head = 0; head < shape.kv_heads; ++head) {
        v[static_cast<size_t>(row * kv_width + head * shape.head_dim + row % shape.head_dim)] =
            __float2bfloat16(1.0f);
      }
    }
  }
  // Only this key of every sequence that has so many is seen, others by weights of e^-40: scores
  // are 40 for it, 0 else. Values are as before.
  void look_for(int64_t key) {
    ASSERT_FALSE(uniform);
    const float each = 6.5f / std::pow(static_cast<float>(shape.head_dim), 0.25f);
    std::ranges::fill(q, __float2bfloat16(each));
    std::ranges::fill(k, __float2bfloat16(0.0f));
    for (size_t i = 0; i < kv_len.size(); ++i) {
      if (key >= kv_len[i]) continue;
      std::fill_n(k.begin() + (kv_begin[i] + key) * kv_width, kv_width, __float2bfloat16(each));
    }
  }

  // Rounds keys and values to 8 bits, with a scale per row and head.
  void round_to_bytes() {
    const auto round = [&](const std::vector<__nv_bfloat16>& from, std::vector<int8_t>& bytes,
                           std::vector<float>& scales) {
      const std::vector<float> values = to_floats(from);
      for (size_t head = 0; head < values.size(); head += static_cast<size_t>(shape.head_dim)) {
        const std::span<const float> of_head(values.data() + head,
                                             static_cast<size_t>(shape.head_dim));
        float largest = 0.0f;
        for (const float value : of_head) largest = std::max(largest, std::abs(value));
        scales.push_back(largest / 127.0f);
        for (const float value : of_head) {
          bytes.push_back(static_cast<int8_t>(std::lrintf(value * 127.0f / largest)));
        }
      }
    };
    round(k, k8, k_scales);
    round(v, v8, v_scales);
  }

  // Moves the keys and values of every sequence to blocks scattered over a cache of NaN, but for
  // the values of block 0, which is no sequence's: they are zero in bf16.
  void scatter() {
    constexpr int64_t kPrime = 10007;  // more than there are blocks
    // No block is 0: i * kPrime % all is 0 for i = 0 alone.
    const auto blocks = (capacity + kKvBlock - 1) / kKvBlock;
    const auto all = static_cast<int64_t>(q_len.size()) * blocks + 1;
    const auto paged = [&](const std::vector<__nv_bfloat16>& from) {
      std::vector<__nv_bfloat16> to(static_cast<size_t>(all * kKvBlock * kv_width),
                                    __float2bfloat16(std::numeric_limits<float>::quiet_NaN()));
      for (size_t i = 0; i < q_len.size(); ++i) {
        const int32_t* table = tables.data() + static_cast<int64_t>(i) * blocks;
        for (int32_t key = 0; key < kv_len[i]; ++key) {
          std::copy_n(from.begin() + (kv_begin[i] + key) * kv_width, kv_width,
                      to.begin() + kv_row(table[key / kKvBlock], key) * kv_width);
        }
      }
      return to;
    };
    for (int64_t i = 1; i < all; ++i) tables.push_back(static_cast<int32_t>(i * kPrime % all));
    if (!k8.empty()) {
      const auto paged_bytes = [&](std::vector<int8_t>& bytes, std::vector<float>& scales) {
        const auto rows_in_all = static_cast<size_t>(all * kKvBlock);
        std::vector<int8_t> to(rows_in_all * static_cast<size_t>(kv_width), 127);
        std::vector<float> to_scales(rows_in_all * static_cast<size_t>(shape.kv_heads),
                                     std::numeric_limits<float>::quiet_NaN());
        for (size_t i = 0; i < q_len.size(); ++i) {
          const int32_t* table = tables.data() + static_cast<int64_t>(i) * blocks;
          for (int32_t key = 0; key < kv_len[i]; ++key) {
            const int64_t from = kv_begin[i] + key, row = kv_row(table[key / kKvBlock], key);
            std::copy_n(bytes.begin() + from * kv_width, kv_width, to.begin() + row * kv_width);
            for (int64_t head = 0; head < shape.kv_heads; ++head) {
              to_scales[static_cast<size_t>(kv_scale(row, head, shape.kv_heads))] =
                  scales[static_cast<size_t>(from * shape.kv_heads + head)];
            }
          }
        }
        bytes = to;
        scales = to_scales;
      };
      paged_bytes(k8, k_scales);
      paged_bytes(v8, v_scales);
    }
    k = paged(k);
    v = paged(v);
    std::fill_n(v.begin(), kKvBlock * kv_width, __float2bfloat16(0.0f));
    for (size_t i = 0; i < q_len.size(); ++i) kv_begin[i] = static_cast<int64_t>(i) * blocks;
  }

  // Every second sequence of one query gets another length, and all change places in the batch, but
  // not their rows of q and out.
  void change_neighbours() {
    for (size_t i = 1; i < kv_len.size(); i += 2) {
      kv_len[i] = static_cast<int32_t>(capacity) + 1 - kv_len[i];
    }
    std::ranges::rotate(q_begin, q_begin.begin() + 1);
    std::ranges::rotate(kv_len, kv_len.begin() + 1);
    std::ranges::rotate(kv_begin, kv_begin.begin() + 1);
  }

  AttentionShape shape;
  int64_t kv_width;
  bool uniform;  // whole sequences of one length, q, k and v in one row
  int64_t q_stride = 0, kv_stride = 0;
  int64_t capacity = 0, tokens = 0, max_q_len = 0, rows = 0;
  std::vector<int32_t> q_begin, q_len, kv_len;
  std::vector<int64_t> kv_begin;
  std::vector<int32_t> tables;  // empty: sequences are contiguous
  std::vector<__nv_bfloat16> q, k, v;
  std::vector<int8_t> k8, v8;  // in place of k and v, unless empty
  std::vector<float> k_scales, v_scales;
};

enum class Kernel { kAny, kTiled, kCudnn };

// A problem in device memory, with a workspace for it.
class DeviceProblem {
 public:
  // slots: sequences of the workspace, 0: those of the problem.
  explicit DeviceProblem(const Problem& problem, int64_t slots = 0, int64_t max_kv_len = 0)
      : q_(upload(problem.q)),
        k_(upload(problem.k)),
        v_(upload(problem.v)),
        q_begin_(upload(problem.q_begin)),
        q_len_(upload(problem.q_len)),
        kv_len_(upload(problem.kv_len)),
        kv_begin_(upload(problem.kv_begin)),
        tables_(upload(problem.tables)),
        k8_(upload(problem.k8)),
        v8_(upload(problem.v8)),
        k_scales_(upload(problem.k_scales)),
        v_scales_(upload(problem.v_scales)),
        out_size_(problem.tokens * problem.shape.heads * problem.shape.head_dim),
        workspace_(slots == 0 ? std::ssize(problem.q_len) : slots, problem.shape.heads,
                   problem.shape.head_dim, max_kv_len == 0 ? problem.capacity : max_kv_len) {
    const int64_t width = problem.shape.heads * problem.shape.head_dim;
    p_.heads = problem.shape.heads;
    p_.kv_heads = problem.shape.kv_heads;
    p_.head_dim = problem.shape.head_dim;
    p_.sequences = {.count = std::ssize(problem.q_len),
                    .max_q_len = problem.max_q_len,
                    .max_kv_len = problem.capacity,
                    .rows = std::max(problem.tokens, problem.rows),
                    .q_begin = q_begin_.data(),
                    .q_len = q_len_.data(),
                    .kv_len = kv_len_.data(),
                    .kv_begin = kv_begin_.data(),
                    .tables = problem.tables.empty() ? nullptr : tables_.data(),
                    .blocks = std::ssize(problem.k) / (kKvBlock * problem.kv_width),
                    .uniform = problem.uniform};
    p_.q = q_.data();
    p_.q_stride = problem.q_stride;
    p_.k = problem.uniform ? q_.data() + width : k_.data();
    p_.v = problem.uniform ? q_.data() + width + problem.kv_width : v_.data();
    p_.kv_stride = problem.kv_stride;
    if (!problem.k8.empty()) {
      p_.k = p_.v = nullptr;
      p_.k8 = {k8_.data(), k_scales_.data()};
      p_.v8 = {v8_.data(), v_scales_.data()};
    }
    p_.window = problem.shape.window;
  }

  std::vector<float> run(Kernel kernel) {
    return result_of([&] {
      if (kernel == Kernel::kTiled) {
        TWELL_CUDA_CHECK(launch_attention_tiled(p_, stream_.get()));
        return;
      }
      p_.sequences.ragged = attention_ragged(ctx_, p_, workspace_);
      if (p_.sequences.ragged.count > 0) {
        TWELL_CUDA_CHECK(launch_kv_clear_behind({.sequences = p_.sequences.count,
                                                 .layers = 1,
                                                 .width = p_.kv_heads * p_.head_dim,
                                                 .kv_len = p_.sequences.kv_len,
                                                 .kv_begin = p_.sequences.kv_begin,
                                                 .tables = p_.sequences.tables,
                                                 .v = v_.data()},
                                                stream_.get()));
      }
      if (kernel == Kernel::kCudnn) {
        EXPECT_TRUE(attention_cudnn(ctx_, p_)) << cudnn_status();
        return;
      }
      attention_cuda(ctx_, p_, workspace_);
      if (p_.sequences.ragged.count > 0) {
        EXPECT_TRUE(attention_report(ctx_).starts_with("cuDNN 9")) << attention_report(ctx_);
      }
    });
  }

  std::vector<float> decode(const AttentionDivision& division) {
    return result_of([&] {
      TWELL_CUDA_CHECK(launch_attention_decode(p_, workspace_.splits(division, p_.sequences.count),
                                               stream_.get()));
    });
  }

  // Those that batches with these heads get and that this one has room for.
  std::vector<AttentionDivision> divisions() const {
    std::set<AttentionDivision> found;
    const int64_t max_kv_len = workspace_.max_kv_len();
    AttentionCuda p = p_;
    for (p.sequences.count = 1; p.sequences.count <= 1024; p.sequences.count *= 2) {
      const AttentionDivision division = attention_division(p, max_kv_len, 16);
      if (division.splits == 1 || division.splits * p_.sequences.count <=
                                      attention_partial_splits(p_.sequences.count, max_kv_len)) {
        found.insert(division);
      }
    }
    return {found.begin(), found.end()};
  }

 private:
  template <typename Enqueue>
  std::vector<float> result_of(const Enqueue& enqueue) {
    const auto out = poisoned<__nv_bfloat16>(out_size_);
    p_.out = out.data();
    enqueue();
    stream_.synchronize();
    return to_floats(download(out));
  }

  CudaStream stream_;
  CudaContext ctx_{stream_.get()};
  DeviceBuffer<__nv_bfloat16> q_, k_, v_;
  DeviceBuffer<int32_t> q_begin_, q_len_, kv_len_;
  DeviceBuffer<int64_t> kv_begin_;
  DeviceBuffer<int32_t> tables_;
  DeviceBuffer<int8_t> k8_, v8_;
  DeviceBuffer<float> k_scales_, v_scales_;
  int64_t out_size_;
  AttentionWorkspaceCuda workspace_;
  AttentionCuda p_;
};

std::vector<float> on_device(const Problem& problem, Kernel kernel = Kernel::kAny) {
  return DeviceProblem(problem).run(kernel);
}

// The largest difference, as a share of what roundings may make: the result is rounded to bf16, a
// relative 2^-9, and so is each key's weight (in 8 bits times its value's scale). Roundings of many
// weights are independent, so that they add up as the root of the sum of their squares, of which
// four times are hardly ever reached. Sums in f32 of values like these are off by less than 1e-5.
double worst(const std::vector<float>& got, const Problem::Reference& want) {
  EXPECT_EQ(got.size(), want.out.size());
  double largest = 0.0;
  for (size_t i = 0; i < want.out.size(); ++i) {
    const double tolerance = std::ldexp(std::abs(want.out[i]) + 4.0 * want.spread[i], -9) + 1e-5;
    const double share = std::abs(static_cast<double>(got[i]) - want.out[i]) / tolerance;
    if (!(share <= largest)) largest = share;
  }
  return largest;
}
// A rounding to bf16 is 2^-9 to 2^-8 of a value, and the share counts 2^-9, so 1 can be exceeded.
// All outputs of all tests on an H200 reach at most 1.15. SeesMissingKeys asks for 2 and more.
void expect_near(const std::vector<float>& got, const Problem::Reference& want) {
  EXPECT_LE(worst(got, want), 1.5);
}

// What the tolerance must tell apart: 5,000 keys, and the same without some of them.
TEST(AttentionToleranceTest, SeesMissingKeys) {
  constexpr int64_t kKeys = 5000;
  const auto without = [&](Problem problem, int64_t first, int64_t count) {
    const auto cut = [&](std::vector<__nv_bfloat16>& part) {
      part.erase(part.begin() + first * problem.kv_width,
                 part.begin() + (first + count) * problem.kv_width);
    };
    cut(problem.k);
    cut(problem.v);
    problem.kv_len[0] -= static_cast<int32_t>(count);
    return problem.reference().out;
  };
  for (const AttentionShape& shape : {AttentionShape{2, 2, 64}, AttentionShape{5, 1, 128}}) {
    Problem problem(shape.heads, shape.kv_heads, shape.head_dim, {{1, kKeys}}, false);
    Problem::Reference want = problem.reference();
    expect_near(want.out, want);
    EXPECT_GT(worst(without(problem, 640, 64), want), 2.0) << "a block";
    EXPECT_GT(worst(without(problem, 2560, 1280), want), 10.0) << "a split";
    problem.count_keys();
    want = problem.reference();
    expect_near(want.out, want);
    for (const int64_t key : {0, 63, 64, 2559, 2560, 4999}) {
      EXPECT_GT(worst(without(problem, key, 1), want), 2.0) << "key " << key;
    }
    problem.look_for(2560);
    want = problem.reference();
    EXPECT_GT(worst(without(problem, 2560, 1), want), 10.0);
  }
}

// The tiled kernel gives the same bits for keys in scattered blocks. The kernel that the problem
// gets by itself is near the reference over them and gives the same bits every time.
void expect_blocks_near(Problem problem, const Problem::Reference& want) {
  const std::vector<float> tiled = on_device(problem, Kernel::kTiled);
  problem.scatter();
  EXPECT_EQ(on_device(problem, Kernel::kTiled), tiled);
  const std::vector<float> got = on_device(problem);
  expect_near(got, want);
  EXPECT_EQ(on_device(problem), got);
}

class AttentionCudaTest : public testing::TestWithParam<AttentionShape> {};

TEST_P(AttentionCudaTest, PrefillOverCacheEqualsCpu) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [heads, kv_heads, head_dim, window] = GetParam();
  for (const bool counts : {false, true}) {
    Problem problem(heads, kv_heads, head_dim,
                    {{1, 1}, {127, 127}, {129, 300}, {0, 0}, {1, 65}, {64, 64}, {130, 130}}, false);
    if (counts) problem.count_keys();
    const auto want = problem.reference();
    expect_near(on_device(problem), want);
    expect_blocks_near(problem, want);
  }
}

TEST_P(AttentionCudaTest, DecodeEqualsCpu) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [heads, kv_heads, head_dim, window] = GetParam();
  const Problem problem(heads, kv_heads, head_dim,
                        {{1, 1}, {1, 255}, {1, 256}, {1, 257}, {0, 0}, {1, 700}, {1, 33}}, false);
  const auto want = problem.reference();
  expect_near(on_device(problem), want);
  expect_blocks_near(problem, want);
}

TEST_P(AttentionCudaTest, DecodeOfEightBitsEqualsCpu) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [heads, kv_heads, head_dim, none] = GetParam();
  for (const int64_t window : {0, 1, 31, 64, 65, 300}) {
    SCOPED_TRACE(testing::Message() << "a window of " << window);
    Problem problem(heads, kv_heads, head_dim,
                    {{1, 1}, {1, 255}, {1, 256}, {1, 257}, {0, 0}, {1, 700}, {1, 33}}, false);
    problem.shape.window = window;
    problem.round_to_bytes();
    const auto want = problem.reference();
    problem.scatter();
    const auto got = on_device(problem);
    expect_near(got, want);
    EXPECT_EQ(on_device(problem), got);
  }
}

TEST_P(AttentionCudaTest, UniformBatchEqualsCpu) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [heads, kv_heads, head_dim, window] = GetParam();
  for (const int64_t length : {int64_t{17}, int64_t{256}}) {
    const Problem problem(heads, kv_heads, head_dim, std::vector<Lengths>(3, {length, length}),
                          true);
    const auto want = problem.reference();
    expect_near(on_device(problem, Kernel::kTiled), want);
    expect_near(on_device(problem), want);
  }
}

TEST_P(AttentionCudaTest, SlidingWindowEqualsCpu) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [heads, kv_heads, head_dim, none] = GetParam();
  const std::vector<std::vector<Lengths>> batches = {
      {{1, 1}, {127, 127}, {129, 300}, {0, 0}, {1, 65}, {200, 200}},
      {{1, 1}, {1, 255}, {1, 256}, {1, 257}, {0, 0}, {1, 700}, {1, 33}}};
  for (const int64_t window : {1, 31, 64, 65, 256, 300}) {
    SCOPED_TRACE(testing::Message() << "a window of " << window);
    for (const auto& lengths : batches) {
      Problem problem(heads, kv_heads, head_dim, lengths, false);
      problem.shape.window = window;
      const auto want = problem.reference();
      expect_near(on_device(problem), want);
      expect_blocks_near(problem, want);
    }
    Problem uniform(heads, kv_heads, head_dim, std::vector<Lengths>(3, {256, 256}), true);
    uniform.shape.window = window;
    const auto want = uniform.reference();
    expect_near(on_device(uniform, Kernel::kTiled), want);
    expect_near(on_device(uniform), want);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttentionCudaTest,
                         testing::Values(AttentionShape{4, 2, 8}, AttentionShape{3, 3, 24},
                                         AttentionShape{8, 2, 64}, AttentionShape{6, 1, 80},
                                         AttentionShape{4, 4, 128}, AttentionShape{5, 1, 128},
                                         AttentionShape{2, 1, 256}));

// The divisions on H100 and H200.
AttentionDivision division_of(const AttentionShape& shape, int64_t sequences, int64_t max_kv_len) {
  AttentionCuda p;
  p.heads = shape.heads;
  p.kv_heads = shape.kv_heads;
  p.head_dim = shape.head_dim;
  p.sequences.count = sequences;
  return attention_division(p, max_kv_len, 132);
}
std::pair<int64_t, int> splits_and_warps(const AttentionShape& shape, int64_t sequences,
                                         int64_t max_kv_len) {
  const AttentionDivision division = division_of(shape, sequences, max_kv_len);
  return {division.splits, division.warps};
}

TEST(AttentionDivisionTest, FewCtasHaveMoreWarpsAndSplits) {
  const AttentionShape shape{32, 32, 64};
  EXPECT_EQ(splits_and_warps(shape, 1, 256), std::pair(int64_t{1}, 8));
  EXPECT_EQ(splits_and_warps(shape, 8, 256), std::pair(int64_t{1}, 8));
  EXPECT_EQ(splits_and_warps(shape, 16, 256), std::pair(int64_t{1}, 4));
  EXPECT_EQ(splits_and_warps(shape, 32, 256), std::pair(int64_t{1}, 2));
  EXPECT_EQ(splits_and_warps(shape, 64, 256), std::pair(int64_t{1}, 1));
  EXPECT_EQ(splits_and_warps(shape, 1, 2000), std::pair(int64_t{8}, 8));
  EXPECT_EQ(splits_and_warps(shape, 8, 2000), std::pair(int64_t{1}, 8));
  // No split has more than 2,048 keys.
  EXPECT_EQ(splits_and_warps(shape, 8, 2049), std::pair(int64_t{2}, 4));
  EXPECT_EQ(splits_and_warps(shape, 256, 1 << 20), std::pair(int64_t{512}, 1));
}

TEST(AttentionDivisionTest, EightQueriesOfAKeyHeadShareACta) {
  EXPECT_EQ(splits_and_warps({32, 8, 64}, 1, 16'000), std::pair(int64_t{33}, 8));
  EXPECT_EQ(splits_and_warps({32, 8, 64}, 64, 256), std::pair(int64_t{1}, 4));
  EXPECT_EQ(splits_and_warps({32, 4, 64}, 64, 256), std::pair(int64_t{1}, 8));
  EXPECT_EQ(splits_and_warps({32, 1, 64}, 64, 256), std::pair(int64_t{1}, 8));  // four CTAs
}

TEST(AttentionDivisionTest, WideHeadsHaveHalfAsManyCtas) {
  EXPECT_EQ(splits_and_warps({32, 8, 128}, 8, 2000), std::pair(int64_t{2}, 8));
  EXPECT_EQ(splits_and_warps({32, 8, 256}, 8, 2000), std::pair(int64_t{2}, 4));
}

TEST(AttentionDivisionTest, ManyCtasHaveFewerLoadsOnTheWayEach) {
  EXPECT_EQ(division_of({32, 32, 64}, 1, 256).loads, 8);
  EXPECT_EQ(division_of({32, 32, 64}, 66, 256).loads, 8);
  EXPECT_EQ(division_of({32, 32, 64}, 67, 256).loads, 4);
  EXPECT_EQ(division_of({32, 32, 64}, 67, 256).warps, 1);
}

// Lengths around the ends of splits, in batches of every size and in every division.
class AttentionDecodeCudaTest : public testing::TestWithParam<AttentionShape> {};

void expect_every_division_near(const AttentionShape& shape, bool eight_bits) {
  const auto [heads, kv_heads, head_dim, none] = shape;
  const std::vector<int64_t> ends = {1, 255, 256, 257, 1023, 1024, 1025, 2000, 5000};
  for (const int64_t sequences : {1, 8, 64}) {
    for (size_t longest = 0; longest < ends.size(); ++longest) {
      if (sequences == 64 && longest % 3 != 2) continue;  // references take long
      std::vector<Lengths> lengths;
      for (size_t i = 0; i < static_cast<size_t>(sequences); ++i) {
        lengths.push_back({1, ends[longest - i % (longest + 1)]});
      }
      Problem problem(heads, kv_heads, head_dim, lengths, false);
      if (eight_bits) problem.round_to_bytes();
      for (const int64_t window : {0, 600}) {
        Problem scattered = problem;
        scattered.shape.window = problem.shape.window = window;
        const Problem::Reference want = problem.reference();
        scattered.scatter();
        DeviceProblem batch(scattered);
        scattered.change_neighbours();
        DeviceProblem changed(scattered);
        for (const AttentionDivision& division : batch.divisions()) {
          SCOPED_TRACE(testing::Message()
                       << sequences << " sequences of up to " << ends[longest] << " keys, window "
                       << window << ", " << division.warps << " warps, " << division.splits
                       << " splits, " << division.loads << " loads");
          const std::vector<float> got = batch.decode(division);
          expect_near(got, want);
          EXPECT_EQ(batch.decode(division), got) << "a second run differs";
          const std::vector<float> beside_others = changed.decode(division);
          const auto width = static_cast<ptrdiff_t>(heads * head_dim);
          for (ptrdiff_t row = 0; row < sequences; row += 2) {
            EXPECT_TRUE(std::equal(got.begin() + row * width, got.begin() + (row + 1) * width,
                                   beside_others.begin() + row * width))
                << "sequence " << row << " depends on its neighbours";
          }
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(AttentionDecodeCudaTest, EveryDivisionEqualsCpuWhateverTheNeighbours) {
  TWELL_SKIP_WITHOUT_GPU();
  expect_every_division_near(GetParam(), /*eight_bits=*/false);
}

// As a server with many slots begins and ends: a few sequences in a workspace that is never divided
// when it is full.
TEST_P(AttentionDecodeCudaTest, SmallBatchesInLargeWorkspacesEqualCpu) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [heads, kv_heads, head_dim, none] = GetParam();
  for (const bool eight_bits : {false, true}) {
    for (const int64_t max_kv_len : {257, 300, 2048}) {
      for (const int64_t sequences : {1, 6, 40}) {
        std::vector<Lengths> lengths;
        for (int64_t i = 0; i < sequences; ++i) lengths.push_back({1, max_kv_len - 41 * i % 257});
        Problem problem(heads, kv_heads, head_dim, lengths, false);
        if (eight_bits) problem.round_to_bytes();
        const Problem::Reference want = problem.reference();
        problem.scatter();
        for (const int64_t slots : {512, 4096}) {
          SCOPED_TRACE(testing::Message()
                       << sequences << " sequences of " << max_kv_len << " keys in " << slots
                       << " slots, 8 bits: " << eight_bits);
          expect_near(DeviceProblem(problem, slots, max_kv_len).run(Kernel::kAny), want);
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(AttentionDecodeCudaTest, EveryDivisionOfEightBitsEqualsCpuWhateverTheNeighbours) {
  TWELL_SKIP_WITHOUT_GPU();
  expect_every_division_near(GetParam(), /*eight_bits=*/true);
}

TEST_P(AttentionDecodeCudaTest, EveryDivisionSeesEveryKeyOnce) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [heads, kv_heads, head_dim, none] = GetParam();
  std::vector<Lengths> lengths;
  for (const int64_t keys : {1, 64, 255, 257, 1024, 1025, 2000, 5000}) lengths.push_back({1, keys});
  for (const bool eight_bits : {false, true}) {
    const auto check = [&](Problem problem) {
      if (eight_bits) problem.round_to_bytes();
      const Problem::Reference want = problem.reference();
      problem.scatter();
      DeviceProblem batch(problem);
      for (const AttentionDivision& division : batch.divisions()) {
        SCOPED_TRACE(testing::Message()
                     << division.warps << " warps, " << division.splits << " splits, "
                     << division.loads << " loads, 8 bits: " << eight_bits);
        expect_near(batch.decode(division), want);
      }
    };
    Problem counted(heads, kv_heads, head_dim, lengths, false);
    counted.count_keys();
    check(counted);
    for (const int64_t key : {0, 63, 64, 254, 256, 1023, 1024, 1999, 2560, 4999}) {
      SCOPED_TRACE(testing::Message() << "key " << key);
      Problem one(heads, kv_heads, head_dim, lengths, false);
      one.look_for(key);
      check(one);
    }
    if (testing::Test::HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttentionDecodeCudaTest,
                         testing::Values(AttentionShape{2, 2, 32}, AttentionShape{3, 3, 64},
                                         AttentionShape{2, 2, 128}, AttentionShape{1, 1, 256},
                                         AttentionShape{4, 2, 64}, AttentionShape{8, 2, 128},
                                         AttentionShape{7, 1, 80}, AttentionShape{16, 2, 24},
                                         AttentionShape{32, 2, 128}, AttentionShape{5, 1, 256}));

TEST(AttentionCudnnTest, TakesPromptsBehindACache) {
  TWELL_SKIP_WITHOUT_GPU();
  if (!cudnn_found()) GTEST_SKIP() << cudnn_status();
  const CudaStream stream;
  if (CudaContext(stream.get()).compute_capability() < 90) {
    GTEST_SKIP() << "cuDNN takes packed prompts from Hopper on";
  }
  for (const auto& [window, counts] :
       {std::pair{0, false}, std::pair{300, false}, std::pair{0, true}, std::pair{300, true}}) {
    SCOPED_TRACE(testing::Message() << "a window of " << window << ", counts: " << counts);
    Problem problem(8, 2, 64, {{1, 700}, {129, 129}, {500, 1500}, {7, 64}, {2000, 2000}}, false);
    problem.shape.window = window;
    if (counts) problem.count_keys();
    const Problem::Reference want = problem.reference();
    Problem scattered = problem;
    scattered.scatter();
    expect_near(on_device(scattered, Kernel::kCudnn), want);
  }
}

TEST(AttentionCudnnTest, TakesThePresetsShape) {
  TWELL_SKIP_WITHOUT_GPU();
  if (!std::string_view(cudnn_status()).starts_with("cuDNN 9")) GTEST_SKIP() << cudnn_status();
  const Problem problem(8, 8, 64, std::vector<Lengths>(2, {512, 512}), true);
  expect_near(on_device(problem, Kernel::kCudnn), problem.reference());
}

TEST(AttentionCudaTest, RefusesHeadSizes) {
  EXPECT_NE(attention_unsupported(12), nullptr);
  EXPECT_NE(attention_unsupported(264), nullptr);
  EXPECT_EQ(attention_unsupported(64), nullptr);
}

}  // namespace
}  // namespace twell
