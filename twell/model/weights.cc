// SPDX-License-Identifier: Apache-2.0
#include "twell/model/weights.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "twell/base/error.h"
#include "twell/base/rng.h"
#include "twell/base/rounding.h"

namespace twell {
namespace {

// Separates these draws from those of other users of the same seed: "init" in ASCII.
constexpr uint64_t kInitStream = uint64_t{0x696e6974} << 32;

// The three matrices as one, or an empty view if they do not lie one behind the other.
template <typename T>
Matrix<T> join(const Matrix<T>& a, const Matrix<T>& b, const Matrix<T>& c) {
  if (b.data != a.row(a.rows) || c.data != b.row(b.rows)) return {};
  return {a.data, a.rows + b.rows + c.rows, a.cols};
}
WeightMatrix join(const WeightMatrix& a, const WeightMatrix& b, const WeightMatrix& c) {
  if (a.dtype != b.dtype || b.dtype != c.dtype) return {};
  if (b.data != a.at(a.rows) || c.data != b.at(b.rows)) return {};
  WeightMatrix joined(a.data, a.dtype, a.rows + b.rows + c.rows, a.cols);
  if (a.scales != nullptr) {
    if (b.scales != a.scales + a.rows || c.scales != b.scales + b.rows) return {};
    joined.scales = a.scales;
  }
  return joined;
}

// Calls use(spec, view) for every parameter in memory order, with the place of its view in `model`:
// a View, or a pointer for a vector. Then completes the views that depend on others.
template <typename T, typename View, typename Use>
void for_each_parameter(const ModelConfig& config, ModelMatrices<T, View>& model, const Use& use) {
  int64_t offset = 0;
  const auto add = [&](ParamSpec spec, auto& view) {
    spec.offset = offset;
    offset += spec.size() + spec.padding;
    use(spec, view);
  };
  const auto matrix = [&](std::string name, View& view, int64_t rows, int64_t cols,
                          bool transposed = false) {
    add({.name = std::move(name), .rows = rows, .cols = cols, .transposed = transposed}, view);
  };
  const auto vector = [&](std::string name, T*& view, int64_t size, bool is_bias = false) {
    add({.name = std::move(name), .rows = 1, .cols = size, .is_vector = true, .is_bias = is_bias},
        view);
  };
  const int64_t width = config.width;
  matrix("model.embed_tokens.weight", model.embedding, config.vocab_size, width);
  model.layers.resize(static_cast<size_t>(config.layers));
  for (int64_t i = 0; i < config.layers; ++i) {
    LayerMatrices<T, View>& layer = model.layers[static_cast<size_t>(i)];
    const auto name = [i](const char* part) {
      return fmt::format("model.layers.{}.{}.weight", i, part);
    };
    const auto bias = [&](const char* part, T*& view, int64_t size) {
      vector(fmt::format("model.layers.{}.{}.bias", i, part), view, size, /*is_bias=*/true);
    };
    vector(name("input_layernorm"), layer.attention_norm, width);
    // These three must stay adjacent: w_qkv views them as one matrix.
    matrix(name("self_attn.q_proj"), layer.w_q, config.q_width(), width);
    matrix(name("self_attn.k_proj"), layer.w_k, config.kv_width(), width);
    matrix(name("self_attn.v_proj"), layer.w_v, config.kv_width(), width);
    layer.w_qkv = join(layer.w_q, layer.w_k, layer.w_v);
    if (config.qkv_bias) {  // adjacent for the same reason
      T* behind_q = nullptr;
      bias("self_attn.q_proj", layer.b_qkv, config.q_width());
      bias("self_attn.k_proj", behind_q, config.kv_width());
      bias("self_attn.v_proj", behind_q, config.kv_width());
    }
    if (config.qk_norm) {
      vector(name("self_attn.q_norm"), layer.q_norm, config.head_dim);
      vector(name("self_attn.k_norm"), layer.k_norm, config.head_dim);
    }
    matrix(name("self_attn.o_proj"), layer.w_o, width, config.q_width());
    if (config.o_bias) bias("self_attn.o_proj", layer.b_o, width);
    vector(name("post_attention_layernorm"), layer.ffn_norm, width);
    if (config.gated) matrix(name("mlp.gate_proj"), layer.ffn.w_gate, config.ffn, width);
    matrix(name("mlp.up_proj"), layer.ffn.w_up, config.ffn, width);
    matrix(name("mlp.down_proj"), layer.ffn.w_down, config.ffn, width, /*transposed=*/true);
    if (config.mlp_bias) {
      const auto neuron_bias = [&](const char* part, T*& view) {
        add({.name = fmt::format("model.layers.{}.{}.bias", i, part),
             .rows = 1,
             .cols = config.ffn,
             .is_vector = true,
             .is_bias = true,
             .padding = round_up(config.ffn, int64_t{8}) - config.ffn},
            view);
      };
      if (config.gated) neuron_bias("mlp.gate_proj", layer.ffn.b_gate);
      neuron_bias("mlp.up_proj", layer.ffn.b_up);
      bias("mlp.down_proj", layer.ffn.b_down, width);
    }
    layer.ffn.activation = config.blended_activation();
  }
  vector("model.norm.weight", model.final_norm, width);
  model.head = model.embedding;
  if (!config.tied_embeddings) matrix("lm_head.weight", model.head, config.vocab_size, width);
}

StoredMatrices stored_matrices(const ModelConfig& config,
                               const std::vector<WeightMatrix>& parameters) {
  const size_t count = parameter_table(config).size();
  TWELL_CHECK(parameters.size() == count, "{} parameters, but the model has {}", parameters.size(),
              count);
  StoredMatrices out;
  auto parameter = parameters.begin();
  for_each_parameter(config, out, [&]<typename View>(const ParamSpec& spec, View& view) {
    const WeightMatrix& matrix = *parameter++;
    TWELL_CHECK(matrix.rows == spec.rows && matrix.cols == spec.cols &&
                    (!spec.is_vector || matrix.dtype == DType::kF32),
                "parameter {} has the shape [{}, {}] or dtype of another", spec.name, matrix.rows,
                matrix.cols);
    if constexpr (std::is_pointer_v<View>) {
      view = matrix.f32().data;
    } else {
      view = matrix;
    }
  });
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
  std::vector<ParamSpec> table;
  ModelMatrices<float> unused;
  for_each_parameter(config, unused, [&](const ParamSpec& spec, auto&) { table.push_back(spec); });
  return table;
}

int64_t flat_size(const std::vector<ParamSpec>& table) {
  const ParamSpec& last = table.back();
  return last.offset + last.size() + last.padding;
}

template <typename T>
ModelMatrices<T> model_matrices(const ModelConfig& config, T* flat) {
  ModelMatrices<T> out;
  for_each_parameter(config, out, [&]<typename View>(const ParamSpec& spec, View& view) {
    if constexpr (std::is_pointer_v<View>) {
      view = flat + spec.offset;
    } else {
      view = {flat + spec.offset, spec.rows, spec.cols};
    }
  });
  return out;
}
template ModelMatrices<float> model_matrices(const ModelConfig&, float*);
template ModelMatrices<const float> model_matrices(const ModelConfig&, const float*);
template ModelMatrices<const BF16> model_matrices(const ModelConfig&, const BF16*);

ModelView::ModelView(const ModelConfig& config_in, std::vector<WeightMatrix> parameters_in)
    : config(config_in),
      parameters(std::move(parameters_in)),
      stored(stored_matrices(config, parameters)) {}

void ModelView::set_activation(Activation activation) {
  config.activation = activation;
  for (auto& layer : stored.layers) layer.ffn.activation = config.blended_activation();
}

Model::Model(const ModelConfig& config_in)
    : table((config_in.validate(), parameter_table(config_in))),
      flat(flat_size(table)),
      weights(model_matrices<const float>(config_in, flat.data())) {
  ModelView::operator=({config_in, flat_parameters(table, flat.data())});
}

void Model::set_activation(Activation activation) {
  ModelView::set_activation(activation);
  for (LayerMatrices<const float>& layer : weights.layers) {
    layer.ffn.activation = config.blended_activation();
  }
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
