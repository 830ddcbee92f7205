// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/load_model_cuda.h"

#include "twell/checkpoint/checkpoint.h"
#include "twell/model/tensor_upload.h"

namespace twell {
namespace {

StoredFloat stored_float(const std::string& dtype) {
  if (dtype == "F32") return StoredFloat::kF32;
  return dtype == "F16" ? StoredFloat::kF16 : StoredFloat::kBF16;
}

}  // namespace

std::unique_ptr<ModelCuda> load_model_cuda(CudaContext& ctx, const std::filesystem::path& folder,
                                           int64_t other_bytes) {
  const OpenCheckpoint opened = open_checkpoint(folder);
  auto model = std::make_unique<ModelCuda>(opened.config, other_bytes);
  TensorUploader uploader(ctx);
  for (const ParamSpec& spec : model->table()) {
    const TensorInfo& info = *opened.tensors.find(spec.name);
    const int64_t rows = spec.transposed ? spec.cols : spec.rows;
    uploader.copy(info.bytes, stored_float(info.dtype), rows, spec.size() / rows, spec.transposed,
                  model->place_of(spec));
  }
  return model;
}

}  // namespace twell
