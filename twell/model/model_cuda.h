// SPDX-License-Identifier: Apache-2.0
// A model's weights on the GPU: bf16, in one block laid out by parameter_table, read straight from
// a checkpoint's mapped files (converted, and down_proj transposed, on the way) or from a host
// model.
#pragma once

#include <cuda_bf16.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "twell/base/cuda.h"
#include "twell/model/weights.h"

namespace twell {

class ModelCuda {
 public:
  // Rounds the host model's weights. InputError as below. Waits for the stream.
  ModelCuda(CudaContext& ctx, const Model& model);
  // InputError on any fault of the folder, on a model that the GPU code does not run, and, with the
  // numbers, on one that does not fit with `other_bytes` beside it; nothing is read by then.
  static std::unique_ptr<ModelCuda> load(CudaContext& ctx, const std::filesystem::path& folder,
                                         int64_t other_bytes = 0);

  const ModelConfig& config() const { return config_; }
  // Pointers to device memory, the bf16 values as BF16.
  const ModelMatrices<const BF16>& weights() const { return weights_; }
  int64_t bytes() const { return flat_.bytes(); }
  // Content hash of the weights as they are here. Waits for the stream.
  std::string weights_hash(CudaContext& ctx) const;

 private:
  ModelCuda(const ModelConfig& config, int64_t other_bytes);

  ModelConfig config_;
  std::vector<ParamSpec> table_;
  DeviceBuffer<BF16> flat_;
  ModelMatrices<const BF16> weights_;
};

// Why the GPU code does not run this model; empty when it does.
std::string cuda_model_unsupported(const ModelConfig& config);
// What of the weights and `other_bytes` beside them there is no room for now; empty when there is.
std::string cuda_model_too_large(const ModelConfig& config, int64_t other_bytes);

// InputError with the numbers when the device has less memory free than `bytes`.
void require_device_memory(int64_t bytes, const std::string& what);

inline const __nv_bfloat16* device_bf16(const BF16* values) {
  return reinterpret_cast<const __nv_bfloat16*>(values);
}

}  // namespace twell
