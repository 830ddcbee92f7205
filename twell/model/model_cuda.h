// SPDX-License-Identifier: Apache-2.0
// A model's weights on the GPU: bf16, in one block laid out by parameter_table. An FFN size that is
// no multiple of 8 is padded with neurons of zero weights, which are 0 under every activation.
// checkpoint/load_model_cuda.h reads them from a checkpoint.
#pragma once

#include <cuda_bf16.h>

#include <string>
#include <unordered_map>

#include "twell/base/cuda.h"
#include "twell/model/weights.h"

namespace twell {

class ModelCuda {
 public:
  // Leaves the weights uninitialised, except those of padding, which are 0. InputError, before
  // anything is allocated, on a model that the GPU code does not support or that does not fit into
  // free memory together with `other_bytes`; the message gives the numbers.
  ModelCuda(const ModelConfig& config, int64_t other_bytes);
  // Copies the host model's weights, rounded to bf16. Waits for the stream.
  ModelCuda(CudaContext& ctx, const Model& model);

  const ModelConfig& config() const { return config_; }
  const ModelConfig& padded_config() const { return padded_; }  // with the FFN size of weights()
  // Pointers to device memory, the bf16 values as BF16.
  const ModelMatrices<const BF16>& weights() const { return weights_; }
  int64_t bytes() const { return flat_.bytes(); }
  // Device memory of a parameter of parameter_table(config()): its values, then the padding's.
  __nv_bfloat16* place_of(const ParamSpec& spec);
  // Content hash of the weights in bf16. Waits for the stream.
  std::string weights_hash(CudaContext& ctx) const;

 private:
  ModelConfig config_, padded_;
  std::unordered_map<std::string, int64_t> offsets_;  // in flat_, by parameter name
  DeviceBuffer<BF16> flat_;
  ModelMatrices<const BF16> weights_;
};

// The reason why the GPU code does not support this model; empty when it does.
std::string cuda_model_unsupported(const ModelConfig& config);
// The reason why weights and `other_bytes` do not fit into free memory; empty when they do.
std::string cuda_model_too_large(const ModelConfig& config, int64_t other_bytes);

// InputError with the numbers when less than `bytes` of device memory is free.
void require_device_memory(int64_t bytes, const std::string& what);

inline const __nv_bfloat16* device_bf16(const BF16* values) {
  return reinterpret_cast<const __nv_bfloat16*>(values);
}

}  // namespace twell
