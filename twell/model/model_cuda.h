// SPDX-License-Identifier: Apache-2.0
// A model's weights on the GPU: bf16, in one block laid out by parameter_table. An FFN size that is
// no multiple of 8 is padded with neurons of zero weights, which are 0 under every activation.
// checkpoint/load_model_cuda.h reads them from a checkpoint.
#pragma once

#include <cuda_bf16.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "twell/base/cuda.h"
#include "twell/format/byte_matrix_cuda.h"
#include "twell/model/weights.h"

namespace twell {

// The projections of a layer in e4m3, a scale per output, in the shapes of a checkpoint.
struct LayerBytesCuda {
  ByteRowsCuda qkv;   // [(H + 2 H_kv) * hd, D]
  ByteRowsCuda o;     // [D, H * hd]
  ByteRowsCuda gate;  // [F, D], empty when the layer is not gated
  ByteRowsCuda up;    // [F, D]
  ByteRowsCuda down;  // [D, F]
};

// What of a model is in e4m3 on the GPU: nothing, the projections of its layers, or the output head
// too.
enum class CudaBytes { kNone, kProjections, kProjectionsAndHead };

class ModelCuda {
 public:
  // Leaves the weights uninitialised, except those of padding, which are 0. InputError, before
  // anything is allocated, on a model that the GPU code does not support or that does not fit into
  // free memory together with `other_bytes`; the message gives the numbers.
  // weights() has no views of what is in e4m3 (layer_bytes, head_bytes). The head of tied
  // embeddings becomes a matrix of its own then, beside the embedding in bf16.
  ModelCuda(const ModelConfig& config, int64_t other_bytes, CudaBytes in_bytes = CudaBytes::kNone);
  // Copies the host model's weights, rounded to bf16. Waits for the stream.
  ModelCuda(CudaContext& ctx, const Model& model);
  // Quantises the projections of a model in bf16, and its head if asked to; other weights are
  // copied. Waits for the stream.
  static std::unique_ptr<ModelCuda> in_bytes(CudaContext& ctx, const ModelCuda& model,
                                             CudaBytes what = CudaBytes::kProjections);

  const ModelConfig& config() const { return config_; }
  const ModelConfig& padded_config() const { return padded_; }  // with the FFN size of weights()
  // Pointers to device memory, the bf16 values as BF16.
  const ModelMatrices<const BF16>& weights() const { return weights_; }
  bool in_bytes() const { return !layer_bytes_.empty(); }
  const LayerBytesCuda& layer_bytes(int64_t layer) const {
    return layer_bytes_[static_cast<size_t>(layer)];
  }
  // [V, D], empty where the head is in bf16.
  const ByteRowsCuda& head_bytes() const { return head_bytes_; }
  int64_t bytes() const { return flat_.bytes() + values_.bytes() + scales_.bytes(); }
  // What bytes() will be.
  static int64_t bytes_needed(const ModelConfig& config, CudaBytes in_bytes);
  // Device memory of a parameter of parameter_table(config()): its values, then the padding's.
  __nv_bfloat16* place_of(const ParamSpec& spec);
  // The same of a projection in e4m3: [outputs, inputs] values and [outputs] scales.
  struct BytePlace {
    uint8_t* values;
    float* scales;
  };
  BytePlace byte_place_of(const ParamSpec& spec);
  BytePlace head_place();  // of a head in e4m3, [V, D]
  // Content hash of the weights. Waits for the stream.
  std::string weights_hash(CudaContext& ctx) const;

 private:
  void place_bytes(bool head);

  ModelConfig config_, padded_;
  std::unordered_map<std::string, int64_t> offsets_;  // in flat_, by parameter name
  DeviceBuffer<BF16> flat_;
  DeviceBuffer<uint8_t> values_;  // of projections in e4m3
  DeviceBuffer<float> scales_;
  std::unordered_map<std::string, std::pair<int64_t, int64_t>> byte_offsets_;  // in both
  std::vector<LayerBytesCuda> layer_bytes_;                                    // [L], or none
  ByteRowsCuda head_bytes_;
  ModelMatrices<const BF16> weights_;
};

// The reason why the GPU code does not support this model; empty when it does.
std::string cuda_model_unsupported(const ModelConfig& config);
// The reason why weights and `other_bytes` do not fit into free memory; empty when they do.
std::string cuda_model_too_large(const ModelConfig& config, int64_t other_bytes,
                                 CudaBytes in_bytes = CudaBytes::kNone);
// The reason why this of a model cannot be in e4m3 on the current device; empty when it can.
std::string cuda_bytes_unsupported(const ModelConfig& config,
                                   CudaBytes in_bytes = CudaBytes::kProjections);

// InputError with the numbers when less than `bytes` of device memory is free.
void require_device_memory(int64_t bytes, const std::string& what);

inline const __nv_bfloat16* device_bf16(const BF16* values) {
  return reinterpret_cast<const __nv_bfloat16*>(values);
}

}  // namespace twell
