// SPDX-License-Identifier: Apache-2.0
#include "twell/model/weights.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "twell/base/error.h"
#include "twell/base/rng.h"

namespace twell {
namespace {

// Separates these draws from those of other users of the same seed: "init" in ASCII.
constexpr uint64_t kInitStream = uint64_t{0x696e6974} << 32;

std::string layer_param(int64_t layer, const char* part) {
  return fmt::format("model.layers.{}.{}.weight", layer, part);
}

std::string layer_bias(int64_t layer, const char* part) {
  return fmt::format("model.layers.{}.{}.bias", layer, part);
}

class TableBuilder {
 public:
  void matrix(std::string name, int64_t rows, int64_t cols, bool transposed = false) {
    add({.name = std::move(name), .rows = rows, .cols = cols, .transposed = transposed});
  }
  void vector(std::string name, int64_t size) {
    add({.name = std::move(name), .rows = 1, .cols = size, .is_vector = true});
  }
  void bias(std::string name, int64_t size) {
    add({.name = std::move(name), .rows = 1, .cols = size, .is_vector = true, .is_bias = true});
  }
  std::vector<ParamSpec> take() { return std::move(table_); }

 private:
  void add(ParamSpec spec) {
    spec.offset = offset_;
    offset_ += spec.size();
    table_.push_back(std::move(spec));
  }
  std::vector<ParamSpec> table_;
  int64_t offset_ = 0;
};

// Finds parameters by name, in one flat buffer or among stored ones.
template <typename T>
class FlatViews {
 public:
  using View = Matrix<T>;
  using Value = T;
  FlatViews(const std::vector<ParamSpec>& table, T* flat) : flat_(flat) {
    for (const ParamSpec& spec : table) specs_.emplace(spec.name, &spec);
  }
  View matrix(const std::string& name) const {
    const ParamSpec& spec = *specs_.at(name);
    return {flat_ + spec.offset, spec.rows, spec.cols};
  }
  T* vector(const std::string& name) const { return flat_ + specs_.at(name)->offset; }

 private:
  T* flat_;
  std::unordered_map<std::string, const ParamSpec*> specs_;
};

class StoredViews {
 public:
  using View = WeightMatrix;
  using Value = const float;
  StoredViews(const std::vector<ParamSpec>& table, const std::vector<WeightMatrix>& parameters) {
    TWELL_CHECK(table.size() == parameters.size(), "{} parameters, but the model has {}",
                parameters.size(), table.size());
    for (size_t i = 0; i < table.size(); ++i) {
      const WeightMatrix& matrix = parameters[i];
      TWELL_CHECK(matrix.rows == table[i].rows && matrix.cols == table[i].cols &&
                      (!table[i].is_vector || matrix.dtype == DType::kF32),
                  "parameter {} has the shape [{}, {}] or dtype of another", table[i].name,
                  matrix.rows, matrix.cols);
      matrices_.emplace(table[i].name, matrix);
    }
  }
  View matrix(const std::string& name) const { return matrices_.at(name); }
  const float* vector(const std::string& name) const { return matrices_.at(name).f32().data; }

 private:
  std::unordered_map<std::string, WeightMatrix> matrices_;
};

// The three matrices as one, or an empty view if they do not lie one behind the other.
template <typename T>
Matrix<T> join(const Matrix<T>& a, const Matrix<T>& b, const Matrix<T>& c) {
  if (b.data != a.row(a.rows) || c.data != b.row(b.rows)) return {};
  return {a.data, a.rows + b.rows + c.rows, a.cols};
}
WeightMatrix join(const WeightMatrix& a, const WeightMatrix& b, const WeightMatrix& c) {
  if (a.dtype != b.dtype || b.dtype != c.dtype) return {};
  if (b.data != a.at(a.rows) || c.data != b.at(b.rows)) return {};
  return {a.data, a.dtype, a.rows + b.rows + c.rows, a.cols};
}

template <typename Views>
auto layer_matrices(const ModelConfig& config, const Views& views, int64_t layer) {
  const auto matrix = [&](const char* part) { return views.matrix(layer_param(layer, part)); };
  const auto bias = [&](const char* part) { return views.vector(layer_bias(layer, part)); };
  LayerMatrices<typename Views::Value, typename Views::View> out;
  out.attention_norm = views.vector(layer_param(layer, "input_layernorm"));
  out.w_q = matrix("self_attn.q_proj");
  out.w_k = matrix("self_attn.k_proj");
  out.w_v = matrix("self_attn.v_proj");
  out.w_qkv = join(out.w_q, out.w_k, out.w_v);
  if (config.qkv_bias) out.b_qkv = bias("self_attn.q_proj");
  if (config.qk_norm) {
    out.q_norm = views.vector(layer_param(layer, "self_attn.q_norm"));
    out.k_norm = views.vector(layer_param(layer, "self_attn.k_norm"));
  }
  out.w_o = matrix("self_attn.o_proj");
  if (config.o_bias) out.b_o = bias("self_attn.o_proj");
  out.ffn_norm = views.vector(layer_param(layer, "post_attention_layernorm"));
  if (config.gated) out.ffn.w_gate = matrix("mlp.gate_proj");
  out.ffn.w_up = matrix("mlp.up_proj");
  out.ffn.w_down = matrix("mlp.down_proj");
  out.ffn.activation = {config.activation};
  if (config.mlp_bias) {
    if (config.gated) out.ffn.b_gate = bias("mlp.gate_proj");
    out.ffn.b_up = bias("mlp.up_proj");
    out.ffn.b_down = bias("mlp.down_proj");
  }
  return out;
}

template <typename Views>
auto matrices(const ModelConfig& config, const Views& views) {
  ModelMatrices<typename Views::Value, typename Views::View> out;
  out.embedding = views.matrix("model.embed_tokens.weight");
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    out.layers.push_back(layer_matrices(config, views, layer));
  }
  out.final_norm = views.vector("model.norm.weight");
  out.head = config.tied_embeddings ? out.embedding : views.matrix("lm_head.weight");
  return out;
}

std::vector<WeightMatrix> flat_parameters(const std::vector<ParamSpec>& table, const float* flat) {
  std::vector<WeightMatrix> out;
  for (const ParamSpec& spec : table) {
    out.emplace_back(ConstMatrixF(flat + spec.offset, spec.rows, spec.cols));
  }
  return out;
}

}  // namespace

std::vector<int64_t> ParamSpec::stored_shape() const {
  if (is_vector) return {cols};
  if (transposed) return {cols, rows};
  return {rows, cols};
}

std::vector<ParamSpec> parameter_table(const ModelConfig& config) {
  const int64_t width = config.width;
  TableBuilder table;
  table.matrix("model.embed_tokens.weight", config.vocab_size, width);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto name = [layer](const char* part) { return layer_param(layer, part); };
    table.vector(name("input_layernorm"), width);
    // These three must stay adjacent: w_qkv views them as one matrix.
    table.matrix(name("self_attn.q_proj"), config.q_width(), width);
    table.matrix(name("self_attn.k_proj"), config.kv_width(), width);
    table.matrix(name("self_attn.v_proj"), config.kv_width(), width);
    if (config.qkv_bias) {  // adjacent for the same reason
      table.bias(layer_bias(layer, "self_attn.q_proj"), config.q_width());
      table.bias(layer_bias(layer, "self_attn.k_proj"), config.kv_width());
      table.bias(layer_bias(layer, "self_attn.v_proj"), config.kv_width());
    }
    if (config.qk_norm) {
      table.vector(name("self_attn.q_norm"), config.head_dim);
      table.vector(name("self_attn.k_norm"), config.head_dim);
    }
    table.matrix(name("self_attn.o_proj"), width, config.q_width());
    if (config.o_bias) table.bias(layer_bias(layer, "self_attn.o_proj"), width);
    table.vector(name("post_attention_layernorm"), width);
    if (config.gated) table.matrix(name("mlp.gate_proj"), config.ffn, width);
    table.matrix(name("mlp.up_proj"), config.ffn, width);
    table.matrix(name("mlp.down_proj"), config.ffn, width, /*transposed=*/true);
    if (config.mlp_bias) {
      if (config.gated) table.bias(layer_bias(layer, "mlp.gate_proj"), config.ffn);
      table.bias(layer_bias(layer, "mlp.up_proj"), config.ffn);
      table.bias(layer_bias(layer, "mlp.down_proj"), width);
    }
  }
  table.vector("model.norm.weight", width);
  if (!config.tied_embeddings) table.matrix("lm_head.weight", config.vocab_size, width);
  return table.take();
}

template <typename T>
ModelMatrices<T> model_matrices(const ModelConfig& config, T* flat) {
  const std::vector<ParamSpec> table = parameter_table(config);
  return matrices(config, FlatViews<T>(table, flat));
}
template ModelMatrices<float> model_matrices(const ModelConfig&, float*);
template ModelMatrices<const float> model_matrices(const ModelConfig&, const float*);
template ModelMatrices<const BF16> model_matrices(const ModelConfig&, const BF16*);

ModelView::ModelView(const ModelConfig& config_in, std::vector<WeightMatrix> parameters_in)
    : config(config_in),
      parameters(std::move(parameters_in)),
      stored(matrices(config, StoredViews(parameter_table(config), parameters))) {}

void ModelView::set_activation(Activation activation) {
  config.activation = activation;
  for (auto& layer : stored.layers) layer.ffn.activation = {activation};
}

Model::Model(const ModelConfig& config_in)
    : table((config_in.validate(), parameter_table(config_in))),
      flat(config_in.parameter_count()),
      weights(model_matrices<const float>(config_in, flat.data())) {
  ModelView::operator=({config_in, flat_parameters(table, flat.data())});
}

void Model::set_activation(Activation activation) {
  ModelView::set_activation(activation);
  for (LayerMatrices<const float>& layer : weights.layers) layer.ffn.activation = {activation};
}

void init_weights(Context& ctx, Model& model, uint64_t seed) {
  constexpr int64_t kGrain = 4096;  // a draw costs tens of nanoseconds
  const float std = static_cast<float>(model.config.init_std);
  for (size_t param = 0; param < model.table.size(); ++param) {
    const ParamSpec& spec = model.table[param];
    float* values = model.flat.data() + spec.offset;
    if (spec.is_vector) {
      std::fill_n(values, spec.size(), spec.is_bias ? 0.0f : 1.0f);
      continue;
    }
    ctx.parallel_for(spec.size(), kGrain, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        values[i] = std * normal(seed, kInitStream + param, static_cast<uint64_t>(i));
      }
    });
  }
}

}  // namespace twell
