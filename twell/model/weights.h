// SPDX-License-Identifier: Apache-2.0
// All parameters of a model in one flat f32 buffer, and the table of their offsets. The optimizer
// uses the flat array, the layers use views. Gradients have the same layout.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/base/dtype.h"
#include "twell/base/matrix.h"
#include "twell/format/ffn_weights.h"
#include "twell/model/config.h"

namespace twell {

struct ParamSpec {
  std::string name;  // Hugging Face tensor name
  int64_t rows = 0;  // as held in memory; a vector has one row
  int64_t cols = 0;
  int64_t offset = 0;       // elements from the start of the flat buffer
  bool is_vector = false;   // norm weights and biases: no weight decay
  bool is_bias = false;     // starts at 0 where norm weights start at 1
  bool transposed = false;  // the checkpoint stores [cols, rows] (down_proj)
  int64_t size() const { return rows * cols; }
  std::vector<int64_t> stored_shape() const;  // in a checkpoint
};

// Every parameter in memory order; offsets are contiguous.
std::vector<ParamSpec> parameter_table(const ModelConfig& config);

template <typename T>
struct LayerMatrices {
  T* attention_norm = nullptr;  // [D]
  Matrix<T> w_q;                // [H * hd, D]
  Matrix<T> w_k;                // [H_kv * hd, D]
  Matrix<T> w_v;                // [H_kv * hd, D]
  Matrix<T> w_qkv;              // [(H + 2 * H_kv) * hd, D], the three above, which are adjacent
  T* b_qkv = nullptr;           // [(H + 2 * H_kv) * hd], the biases of q, k, v; null without
  T* q_norm = nullptr;          // [hd], null without
  T* k_norm = nullptr;          // [hd], null without
  Matrix<T> w_o;                // [D, H * hd]
  T* ffn_norm = nullptr;        // [D]
  FfnMatrices<T> ffn;
};

// Views into one flat buffer laid out by parameter_table.
template <typename T>
struct ModelMatrices {
  Matrix<T> embedding;  // [V, D]
  std::vector<LayerMatrices<T>> layers;
  T* final_norm = nullptr;  // [D]
  Matrix<T> head;           // [V, D]; the embedding itself when tied
};
template <typename T>
ModelMatrices<T> model_matrices(const ModelConfig& config, T* flat);
extern template ModelMatrices<float> model_matrices(const ModelConfig&, float*);
extern template ModelMatrices<const float> model_matrices(const ModelConfig&, const float*);
extern template ModelMatrices<const BF16> model_matrices(const ModelConfig&, const BF16*);

struct Model {
  explicit Model(const ModelConfig& config);  // validates; zero weights
  ModelConfig config;
  std::vector<ParamSpec> table;
  Buffer<float> flat;
  ModelMatrices<const float> weights;

  // Changes the activation that the layers compute with; the weights stay.
  void set_activation(Activation activation);
};

// N(0, init_std) for matrices, 1 for norms, 0 for biases; each value a pure function of the seed,
// the parameter's place in the table and the element's in the parameter.
void init_weights(Context& ctx, Model& model, uint64_t seed);

}  // namespace twell
