// SPDX-License-Identifier: Apache-2.0
// The model in double precision, one token and one neuron at a time, as a reference for tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "twell/model/rotary.h"
#include "twell/model/weights.h"
#include "twell/ops/decode/decode_layers_reference.h"

namespace twell {

struct ReferenceResult {
  std::vector<double> logits;                 // [M, V]
  double ce_sum = 0.0;                        // over tokens with a target
  std::vector<double> l1_sum;                 // [L]
  std::vector<std::vector<int32_t>> row_nnz;  // [L][M]
  // Distance of the nearest gate to the ReLU's kink: smaller changes of gates switch no neuron.
  double min_gate = std::numeric_limits<double>::infinity();
};

class ReferenceModel {
 public:
  using Row = reference::Row;

  explicit ReferenceModel(const Model& model)
      : flat(model.flat.span().begin(), model.flat.span().end()), config_(model.config) {
    for (const ParamSpec& spec : model.table) offsets_.emplace(spec.name, spec.offset);
    rotary_ = rotary_frequencies(config_);
  }

  // Sequences of `length` tokens each; targets may be empty.
  ReferenceResult run(std::span<const int32_t> inputs, std::span<const int32_t> targets,
                      int64_t length) const {
    ReferenceResult result;
    result.l1_sum.assign(size(config_.layers), 0.0);
    result.row_nnz.resize(size(config_.layers));
    std::vector<Row> x;
    for (const int32_t id : inputs) {
      const double* row = param("model.embed_tokens.weight") + id * config_.width;
      x.emplace_back(row, row + config_.width);
      scale(x.back(), config_.embedding_scale);
    }
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      attention(layer, length, x);
      for (Row& row : x) feed_forward(layer, row, result);
    }
    const double* head =
        param(config_.tied_embeddings ? "model.embed_tokens.weight" : "lm_head.weight");
    for (size_t m = 0; m < x.size(); ++m) {
      Row logits =
          reference::linear(norm(x[m], param("model.norm.weight")), head, config_.vocab_size);
      if (config_.base_width > 0) {
        scale(logits, static_cast<double>(config_.base_width) / static_cast<double>(config_.width));
      }
      if (!targets.empty() && targets[m] >= 0) {
        result.ce_sum += reference::log_sum_exp(logits) - logits[size(targets[m])];
      }
      result.logits.insert(result.logits.end(), logits.begin(), logits.end());
    }
    return result;
  }

  std::vector<double> flat;  // laid out by parameter_table; may be changed between runs

 private:
  static size_t size(int64_t value) { return static_cast<size_t>(value); }

  const double* param(const std::string& name) const { return flat.data() + offsets_.at(name); }
  const double* layer_param(int64_t layer, const char* part) const {
    return param("model.layers." + std::to_string(layer) + "." + part + ".weight");
  }

  Row norm(const Row& x, const double* weight) const {
    return reference::rms_norm(x, weight, config_.norm_eps);
  }

  // Adds the bias if the model has one for this part.
  Row project(const Row& x, int64_t layer, const std::string& part, int64_t out) const {
    Row y = reference::linear(x, layer_param(layer, part.c_str()), out);
    add_bias(layer, part, y);
    return y;
  }
  void add_bias(int64_t layer, const std::string& part, Row& y) const {
    const auto found =
        offsets_.find("model.layers." + std::to_string(layer) + "." + part + ".bias");
    if (found == offsets_.end()) return;
    for (size_t i = 0; i < y.size(); ++i) y[i] += flat[size(found->second) + i];
  }

  static void scale(Row& x, double by) {
    for (double& value : x) value *= by;
  }

  Row head_norms(const Row& x, const double* weight) const {
    Row out;
    for (size_t head = 0; head < x.size(); head += size(config_.head_dim)) {
      const auto at = x.begin() + static_cast<ptrdiff_t>(head);
      const Row normed = norm(Row(at, at + config_.head_dim), weight);
      out.insert(out.end(), normed.begin(), normed.end());
    }
    return out;
  }

  double activate(double z) const {
    switch (config_.activation) {
      case Activation::kRelu:
        return std::max(z, 0.0);
      case Activation::kSilu:
        return z / (1.0 + std::exp(-z));
      case Activation::kGelu:
        return 0.5 * z * std::erfc(-z / std::sqrt(2.0));
      case Activation::kGeluTanh:
        return z / (1.0 + std::exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)));
      case Activation::kQuickGelu:
        return z / (1.0 + std::exp(-1.702 * z));
      case Activation::kRelu2:
        return std::max(z, 0.0) * std::max(z, 0.0);
      case Activation::kFatRelu:
        return z > config_.activation_threshold ? z : 0.0;
      case Activation::kDRelu:
        return std::max(z, 0.0);
    }
    return 0.0;
  }

  void rotate(Row& x, int64_t position) const {
    Row cos, sin;
    for (const double radians : rotary_.radians) {
      const double angle = static_cast<double>(position) * radians;
      cos.push_back(rounded_rotation(config_, rotary_.scale * std::cos(angle)));
      sin.push_back(rounded_rotation(config_, rotary_.scale * std::sin(angle)));
    }
    reference::rotate<double>(cos, sin, x);
  }

  void attention(int64_t layer, int64_t length, std::vector<Row>& x) const {
    std::vector<Row> q, k, v;
    for (size_t m = 0; m < x.size(); ++m) {
      const Row normed = norm(x[m], layer_param(layer, "input_layernorm"));
      q.push_back(project(normed, layer, "self_attn.q_proj", config_.q_width()));
      k.push_back(project(normed, layer, "self_attn.k_proj", config_.kv_width()));
      v.push_back(project(normed, layer, "self_attn.v_proj", config_.kv_width()));
      if (config_.qk_norm) {
        q.back() = head_norms(q.back(), layer_param(layer, "self_attn.q_norm"));
        k.back() = head_norms(k.back(), layer_param(layer, "self_attn.k_norm"));
      }
      rotate(q.back(), static_cast<int64_t>(m) % length);
      rotate(k.back(), static_cast<int64_t>(m) % length);
    }
    for (size_t m = 0; m < x.size(); ++m) {
      const size_t window = size(config_.window_of(layer)), before = m % size(length);
      const size_t first = m - (window == 0 ? before : std::min(before, window - 1));
      const Row attended =
          reference::attend(q[m], {&k[first], &k[m] + 1}, {&v[first], &v[m] + 1}, config_.head_dim);
      Row part = project(attended, layer, "self_attn.o_proj", config_.width);
      scale(part, config_.part_scale());
      reference::add(part, x[m]);
    }
  }

  void feed_forward(int64_t layer, Row& x, ReferenceResult& result) const {
    const Row normed = norm(x, layer_param(layer, "post_attention_layernorm"));
    const Row up = project(normed, layer, "mlp.up_proj", config_.ffn);
    const Row gate = config_.gated ? project(normed, layer, "mlp.gate_proj", config_.ffn) : up;
    const double* down = layer_param(layer, "mlp.down_proj");  // [F, D]
    Row part(x.size(), 0.0);
    int32_t nnz = 0;
    for (size_t f = 0; f < gate.size(); ++f) {
      const bool doubled = config_.activation == Activation::kDRelu;
      result.min_gate = std::min(result.min_gate, std::abs(gate[f] - config_.activation_threshold));
      if (doubled) result.min_gate = std::min(result.min_gate, std::abs(up[f]));
      const double fired = activate(gate[f]);
      if (fired == 0.0) continue;
      ++nnz;
      const double factor = doubled ? std::max(up[f], 0.0) : up[f];
      const double h = config_.gated ? fired * factor : fired;
      result.l1_sum[size(layer)] += std::abs(h);
      for (size_t d = 0; d < x.size(); ++d) part[d] += h * down[f * x.size() + d];
    }
    add_bias(layer, "mlp.down_proj", part);
    scale(part, config_.part_scale());
    reference::add(part, x);
    result.row_nnz[size(layer)].push_back(nnz);
  }

  ModelConfig config_;
  RotaryFrequencies rotary_;
  std::unordered_map<std::string, int64_t> offsets_;
};

// Bound on the relative error, in norm, of float32 on the longest path through the model and back.
// A product over K terms adds about eps * sqrt(K). A layer has four products, a softmax and two
// norms in sequence, and the same number in backward; none amplifies its input's error by much.
inline double float_tolerance(const ModelConfig& config) {
  const double eps = static_cast<double>(std::numeric_limits<float>::epsilon());
  const double longest = static_cast<double>(std::max(config.ffn, config.width));
  const double ops = 14.0 * static_cast<double>(config.layers) + 4.0;
  return eps * std::sqrt(longest) * ops;
}

// A small model whose neurons range from often to never active: all tokens share a direction, and
// the gates' weights against it grow up to `aversion`.
inline Model sparse_model(const ModelConfig& config, uint64_t seed, float aversion) {
  Model model(config);
  Context ctx(1);
  init_weights(ctx, model, seed);
  const auto mutable_weights = model_matrices<float>(config, model.flat.data());
  for (int64_t v = 0; v < config.vocab_size; ++v) mutable_weights.embedding(v, 0) = 0.5f;
  for (const LayerMatrices<float>& layer : mutable_weights.layers) {
    for (int64_t f = 0; f < config.ffn; ++f) {
      layer.ffn.firing()(f, 0) -= aversion * static_cast<float>(f) / static_cast<float>(config.ffn);
    }
    for (int64_t d = 0; d < config.width; ++d) {
      layer.attention_norm[d] = 0.75f + 0.01f * static_cast<float>(d % 50);
      layer.ffn_norm[d] = 1.25f - 0.01f * static_cast<float>(d % 50);
    }
    if (config.qkv_bias) {
      for (int64_t i = 0; i < config.q_width() + 2 * config.kv_width(); ++i) {
        layer.b_qkv[i] = 0.1f * static_cast<float>(i % 7 - 3);
      }
    }
    for (int64_t i = 0; config.o_bias && i < config.width; ++i) {
      layer.b_o[i] = 0.05f * static_cast<float>(i % 5 - 2);
    }
    for (int64_t i = 0; config.mlp_bias && i < config.ffn; ++i) {
      layer.ffn.firing_bias()[i] = 0.1f * static_cast<float>(i % 7 - 3);
      if (config.gated) layer.ffn.b_up[i] = 0.1f * static_cast<float>(i % 5 - 1);
    }
    for (int64_t i = 0; config.mlp_bias && i < config.width; ++i) {
      layer.ffn.b_down[i] = 0.05f * static_cast<float>(i % 3 - 1);
    }
    if (config.qk_norm) {
      for (int64_t i = 0; i < config.head_dim; ++i) {
        layer.q_norm[i] = 0.8f + 0.05f * static_cast<float>(i % 9);
        layer.k_norm[i] = 1.2f - 0.05f * static_cast<float>(i % 9);
      }
    }
  }
  return model;
}

}  // namespace twell
