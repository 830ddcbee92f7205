// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/load_model_cuda.h"

#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/tensor_convert.h"
#include "twell/model/tensor_upload.h"

namespace twell {
namespace {

DType stored_dtype(const std::string& dtype) {
  if (dtype == "F32") return DType::kF32;
  return dtype == "F16" ? DType::kF16 : DType::kBF16;
}

}  // namespace

std::unique_ptr<ModelCuda> load_model_cuda(CudaContext& ctx, const std::filesystem::path& folder,
                                           int64_t other_bytes, const LoadOptions& options) {
  const OpenCheckpoint opened = open_checkpoint(folder);
  auto model = std::make_unique<ModelCuda>(opened.config, other_bytes);
  TensorUploader uploader(ctx);
  for (const ParamSpec& spec : opened.table) {
    const TensorInfo& info = *opened.tensors.find(spec.name);
    const int64_t rows = spec.transposed ? spec.cols : spec.rows;
    const auto check = [&](std::span<const std::byte> part) {
      if (options.allow_non_finite || first_non_finite(part, info.dtype) < 0) return;
      refuse_non_finite(info, first_non_finite(info.bytes, info.dtype), opened.tensors.source());
    };
    uploader.copy(info.bytes, stored_dtype(info.dtype), rows, spec.size() / rows, spec.transposed,
                  model->place_of(spec), check);
  }
  return model;
}

}  // namespace twell
