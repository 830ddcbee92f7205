// SPDX-License-Identifier: Apache-2.0
// Parameters of a model: the table of their names and shapes, and views of them. In training they
// lie in one flat f32 buffer, which the optimizer uses as an array; gradients have the same layout.
// Inference only reads, in the dtype of whatever memory holds the values.
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
#include "twell/format/weight_matrix.h"
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
  // Zeros behind a bias of a feed-forward layer, which GPUs read eight values at a time: what comes
  // next begins at a multiple of 8 values where the bias does.
  int64_t padding = 0;
  int64_t size() const { return rows * cols; }
  std::vector<int64_t> stored_shape() const;  // in a checkpoint
};

// Every parameter in memory order; offsets are contiguous but for padding.
std::vector<ParamSpec> parameter_table(const ModelConfig& config);
// Values of the flat buffer: those of all parameters, and padding.
int64_t flat_size(const std::vector<ParamSpec>& table);

template <typename T, typename View = Matrix<T>>
struct LayerMatrices {
  T* attention_norm = nullptr;  // [D]
  View w_q;                     // [H * hd, D]
  View w_k;                     // [H_kv * hd, D]
  View w_v;                     // [H_kv * hd, D]
  View w_qkv;                   // [(H + 2 * H_kv) * hd, D], the three above; empty if they are not
                                // adjacent, as in a file
  T* b_qkv = nullptr;           // [(H + 2 * H_kv) * hd], the biases of q, k, v; null without
  T* q_norm = nullptr;          // [hd], null without
  T* k_norm = nullptr;          // [hd], null without
  View w_o;                     // [D, H * hd]
  T* b_o = nullptr;             // [D], null without
  T* ffn_norm = nullptr;        // [D]
  FfnMatrices<T, View> ffn;
};

template <typename T, typename View = Matrix<T>>
struct ModelMatrices {
  View embedding;  // [V, D]
  std::vector<LayerMatrices<T, View>> layers;
  T* final_norm = nullptr;  // [D]
  View head;                // [V, D]; the embedding itself when tied
};
// Views into one flat buffer laid out by parameter_table.
template <typename T>
ModelMatrices<T> model_matrices(const ModelConfig& config, T* flat);
extern template ModelMatrices<float> model_matrices(const ModelConfig&, float*);
extern template ModelMatrices<const float> model_matrices(const ModelConfig&, const float*);
extern template ModelMatrices<const BF16> model_matrices(const ModelConfig&, const BF16*);

// What inference reads: vectors are f32, matrices have the dtype of the memory that they lie in.
using StoredMatrices = ModelMatrices<const float, WeightMatrix>;
struct ModelView {
  ModelView() = default;
  // parameters: of parameter_table(config), in its order and shapes, vectors in f32 and the biases
  // of q, k and v adjacent. They must outlive the view.
  ModelView(const ModelConfig& config, std::vector<WeightMatrix> parameters);
  ModelConfig config;
  std::vector<WeightMatrix> parameters;
  StoredMatrices stored;

  // Changes the activation that the layers compute with; the weights stay.
  void set_activation(Activation activation);
};

// A model that can be trained.
struct Model : ModelView {
  explicit Model(const ModelConfig& config);  // validates; zero weights
  std::vector<ParamSpec> table;
  Buffer<float> flat;
  ModelMatrices<const float> weights;

  // The same as in ModelView.
  void set_activation(Activation activation);
};

// N(0, init_std) for matrices, 1 for norms, 0 for biases; each value a pure function of the seed,
// the parameter's place in the table and the element's in the parameter.
void init_weights(Context& ctx, Model& model, uint64_t seed);

}  // namespace twell
