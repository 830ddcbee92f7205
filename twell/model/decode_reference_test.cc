// SPDX-License-Identifier: Apache-2.0
// The scalar reference that the kernel of all layers is compared with on a GPU
// (ops/decode/decode_layers_reference.h): it computes what the CPU's engine computes, and its
// problems show a mistake of the smallest kind.
#include <gtest/gtest.h>

#include <utility>

#include "twell/model/forward.h"
#include "twell/model/reference_model.h"

namespace twell {
namespace {

constexpr int64_t kTextTokens = 150;  // three blocks of keys

ModelConfig decode_config(bool gated, bool bias) {
  ModelConfig config = preset_config("tiny");
  config.vocab_size = 31;
  config.width = 24;
  config.ffn = 56;
  config.layers = 3;
  config.heads = 6;
  config.kv_heads = 2;
  config.head_dim = 10;
  config.context = kTextTokens;
  config.gated = gated;
  config.qkv_bias = bias;
  config.init_std = 0.2;
  return config;
}

// The engine's next token of each sequence, and the same step as a problem of the reference, whose
// cache holds the keys and values that the engine computed for the tokens before.
class EngineStep {
 public:
  EngineStep(const Model& model, FfnPolicy policy, std::vector<int32_t> lengths)
      : config_(model.config), lengths_(std::move(lengths)), state_(config_, policy) {
    problem = {.width = config_.width,
               .ffn = config_.ffn,
               .heads = config_.heads,
               .kv_heads = config_.kv_heads,
               .head_dim = config_.head_dim,
               .eps = config_.norm_eps};
    const RopeTable rope(config_.context, config_.head_dim, config_.rope_theta);
    problem.cos.assign(rope.cos.span().begin(), rope.cos.span().end());
    problem.sin.assign(rope.sin.span().begin(), rope.sin.span().end());
    take_weights(model);
    lay_out_cache();
    KvCache cache(config_, std::ssize(lengths_), config_.context);
    for (size_t i = 0; i < lengths_.size(); ++i) {
      if (lengths_[i] > 1) run(model, cache, {{lengths_[i] - 1, static_cast<int64_t>(i)}}, false);
    }
    std::vector<ForwardSequence> next;
    for (int64_t i = 0; i < std::ssize(lengths_); ++i) next.push_back({1, i});
    run(model, cache, next, true);
  }

  DecodeReference problem;
  Buffer<float> hidden;            // [M, D] after the final norm
  std::vector<float> stored_rows;  // [L, M, 2 * H_kv * hd] the new tokens' keys and values

 private:
  void take_weights(const Model& model) {
    const auto copy = [](ConstMatrixF m) {
      return std::vector<float>(m.data, m.data + m.rows * m.cols);
    };
    for (const LayerMatrices<const float>& from : model.weights.layers) {
      DecodeReferenceLayer layer;
      layer.attention_norm.assign(from.attention_norm, from.attention_norm + config_.width);
      layer.w_qkv = copy(from.w_qkv);
      if (from.b_qkv != nullptr) layer.b_qkv.assign(from.b_qkv, from.b_qkv + from.w_qkv.rows);
      layer.w_o = copy(from.w_o);
      layer.ffn_norm.assign(from.ffn_norm, from.ffn_norm + config_.width);
      if (config_.gated) layer.w_gate = copy(from.ffn.w_gate);
      layer.w_up = copy(from.ffn.w_up);
      layer.w_down = copy(from.ffn.w_down);
      problem.layers.push_back(std::move(layer));
    }
  }
  // Blocks of the sequences in turn, so that none has successive ones.
  void lay_out_cache() {
    const auto sequences = static_cast<int32_t>(std::ssize(lengths_));
    const auto each = static_cast<int32_t>((config_.context + kKvBlock - 1) / kKvBlock);
    for (int32_t i = 0; i < sequences; ++i) {
      const int32_t length = lengths_[static_cast<size_t>(i)];
      problem.positions.push_back(length - 1);
      problem.kv_len.push_back(length);
      problem.kv_begin.push_back(i * each);
      for (int32_t block = 0; block < each; ++block) {
        problem.tables.push_back((each - 1 - block) * sequences + i);
      }
      problem.cache_rows.push_back(row_of(i, length - 1));
    }
    for (DecodeReferenceLayer& layer : problem.layers) {
      const auto size = static_cast<size_t>(sequences * each * kKvBlock * config_.kv_width());
      layer.keys.assign(size, std::numeric_limits<float>::quiet_NaN());
      layer.values = layer.keys;
    }
  }
  int64_t row_of(int64_t sequence, int key) const {
    const auto begin = problem.kv_begin[static_cast<size_t>(sequence)];
    return kv_row(problem.tables[static_cast<size_t>(begin + key / kKvBlock)], key);
  }

  void run(const Model& model, KvCache& cache, const std::vector<ForwardSequence>& sequences,
           bool last) {
    std::vector<int32_t> ids;
    for (const ForwardSequence& sequence : sequences) {
      for (int64_t i = 0; i < sequence.tokens; ++i) {
        ids.push_back(static_cast<int32_t>(
            uniform_below(7, static_cast<uint64_t>(sequence.slot),
                          static_cast<uint64_t>(cache.length(sequence.slot) + i), 31)));
      }
    }
    hidden = Buffer<float>(std::ssize(ids) * config_.width);
    const int64_t q = config_.q_width(), kv = config_.kv_width();
    const auto on_stage = [&](int64_t layer, LayerStage stage, ConstMatrixF values) {
      if (last && layer == 0 && stage == LayerStage::kInput) {
        for (int64_t m = 0; m < values.rows; ++m) {
          problem.x.insert(problem.x.end(), values.row(m), values.row(m) + values.cols);
        }
      }
      if (stage != LayerStage::kQkv) return;
      DecodeReferenceLayer& to = problem.layers[static_cast<size_t>(layer)];
      for (int64_t m = 0; m < values.rows; ++m) {
        const float* keys = values.row(m) + q;
        if (last) {
          stored_rows.insert(stored_rows.end(), keys, keys + 2 * kv);
        } else {
          const int64_t row = row_of(sequences[0].slot, static_cast<int>(m));
          std::copy_n(keys, kv, to.keys.begin() + row * kv);
          std::copy_n(keys + kv, kv, to.values.begin() + row * kv);
        }
      }
    };
    forward(ctx_, model, state_,
            {.ids = ids,
             .sequences = sequences,
             .cache = &cache,
             .hidden = hidden.matrix(std::ssize(ids), config_.width),
             .on_stage = on_stage});
  }

  const ModelConfig config_;
  const std::vector<int32_t> lengths_;
  ForwardState state_;
  Context ctx_{2};
};

TEST(DecodeReferenceTest, EqualsTheEngine) {
  for (const auto& [gated, bias] :
       {std::pair{true, false}, std::pair{true, true}, std::pair{false, false}}) {
    const ModelConfig config = decode_config(gated, bias);
    const Model model = sparse_model(config, 5, 1.0f);
    for (const FfnPolicy policy : {FfnPolicy::kDense, FfnPolicy::kRowFused}) {
      EngineStep step(model, policy, {1, 64, 65, 150});
      const std::vector<double> x = step.problem.run();
      std::vector<double> hidden, stored;
      for (int64_t m = 0; m < step.problem.tokens(); ++m) {
        const reference::Row normed =
            reference::rms_norm({x.begin() + m * config.width, x.begin() + (m + 1) * config.width},
                                model.weights.final_norm, config.norm_eps);
        hidden.insert(hidden.end(), normed.begin(), normed.end());
      }
      for (const DecodeReferenceLayer& layer : step.problem.layers) {
        for (const int64_t row : step.problem.cache_rows) {
          for (const std::vector<float>* part : {&layer.keys, &layer.values}) {
            const auto begin = part->begin() + row * config.kv_width();
            stored.insert(stored.end(), begin, begin + config.kv_width());
          }
        }
      }
      const double tolerance = float_tolerance(config);
      EXPECT_LE(relative_error(step.hidden.span(), std::span(hidden)), tolerance);
      EXPECT_LE(relative_error(std::span(step.stored_rows), std::span(stored)), tolerance);
    }
  }
}

class DecodeReferenceProblem : public testing::TestWithParam<DecodeReferenceShape> {
 protected:
  // Largest relative error of a token.
  double error_of(DecodeReference changed) const {
    const std::vector<double> got = changed.run();
    double most = 0.0;
    for (int64_t m = 0; m < changed.tokens(); ++m) {
      const auto token = [&](const std::vector<double>& of) {
        return std::span(of).subspan(static_cast<size_t>(m * changed.width),
                                     static_cast<size_t>(changed.width));
      };
      most = std::max(most, relative_error(token(got), token(want_)));
    }
    return most;
  }

  const DecodeReference problem_ = random_decode(GetParam());
  const std::vector<double> want_ = DecodeReference(problem_).run();
  const double tolerance_ = decode_tolerance(GetParam().layers);
};

// All roundings together stay within the tolerance, which is for the few that differ.
TEST_P(DecodeReferenceProblem, RoundingIsWithinTheTolerance) {
  DecodeReference rounded = problem_;
  rounded.rounds = true;
  const double error = error_of(rounded);
  EXPECT_GT(error, 0.0);
  EXPECT_LE(error, 0.75 * tolerance_);
}

// Each smallest mistake is well above it.
TEST_P(DecodeReferenceProblem, MistakesShow) {
  const auto shows = [&](DecodeReference wrong, const std::string& what) {
    EXPECT_GE(error_of(std::move(wrong)), 1.5 * tolerance_) << what;
  };
  const int64_t kv_width = problem_.kv_heads * problem_.head_dim;
  for (size_t token = 0; token < problem_.kv_len.size(); ++token) {
    // The first and last keys of blocks: left out in the last layer alone.
    for (int key = 0; key < problem_.kv_len[token] - 1; ++key) {
      if (key % kKvBlock != 0 && key % kKvBlock != kKvBlock - 1) continue;
      DecodeReference wrong = problem_;
      const auto block = static_cast<size_t>(problem_.kv_begin[token] + key / kKvBlock);
      const int64_t row = kv_row(problem_.tables[block], key);
      std::fill_n(wrong.layers.back().values.begin() + row * kv_width, kv_width, 0.0f);
      shows(std::move(wrong), fmt::format("token {}, key {}", token, key));
    }
    if (problem_.positions[token] > 0) {
      DecodeReference wrong = problem_;
      --wrong.positions[token];
      shows(std::move(wrong), fmt::format("token {}, a position too early", token));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, DecodeReferenceProblem,
                         testing::ValuesIn(decode_reference_shapes()));

}  // namespace
}  // namespace twell
