// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/load_model_cuda.h"

#include <algorithm>

#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/quantization.h"
#include "twell/checkpoint/tensor_convert.h"
#include "twell/model/tensor_upload.h"

namespace twell {
namespace {

DType stored_dtype(const std::string& dtype) {
  if (dtype == "F32") return DType::kF32;
  return dtype == "F16" ? DType::kF16 : DType::kBF16;
}

// Values of the largest matrix that may be in 8 bits.
int64_t largest_matrix(const std::vector<ParamSpec>& table) {
  int64_t largest = 0;
  for (const ParamSpec& spec : table) {
    if (is_projection(spec) || is_head(spec)) largest = std::max(largest, spec.size());
  }
  return largest;
}

int64_t largest_outputs(const std::vector<ParamSpec>& table) {
  int64_t largest = 0;
  for (const ParamSpec& spec : table) largest = std::max({largest, spec.rows, spec.cols});
  return largest;
}

void copy_async(CudaContext& ctx, const void* from, size_t bytes, void* to) {
  TWELL_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, ctx.stream()));
}

}  // namespace

CudaBytes loads_in_bytes(const std::filesystem::path& folder, const LoadOptions& options) {
  TWELL_REQUIRE(options.weights != ByteType::kInt8,
                "int8 weights run on the CPU; use --weights fp8 on a GPU");
  const std::optional<ByteWeights> stored = load_weight_bytes(folder);
  const bool stored_fp8 = stored && stored->type == ByteType::kE4M3;
  if (options.weights) {
    TWELL_REQUIRE(!stored || stored_fp8, "{}: the weights are in int8; convert the original",
                  folder.string());
  }
  TWELL_REQUIRE(!stored || !stored->head || stored_fp8,
                "{}: the output head is in int8, which runs on the CPU alone (--device cpu); for a "
                "GPU convert the original without --head 8bit, or with --weights fp8",
                folder.string());
  TWELL_REQUIRE(!options.head_in_bytes || options.weights || stored_fp8,
                "{}: an output head in 8 bits needs projections in fp8 on a GPU: --weights fp8, or "
                "a checkpoint in fp8",
                folder.string());
  const bool head = options.head_in_bytes || (stored_fp8 && stored->head);
  const CudaBytes wanted = head ? CudaBytes::kProjectionsAndHead : CudaBytes::kProjections;
  if (!options.weights && !stored_fp8) return CudaBytes::kNone;
  const std::string why = cuda_bytes_unsupported(load_config(folder), wanted);
  // Projections that a file has in 8 bits are widened; a head is not, nor what was asked for.
  TWELL_REQUIRE(why.empty() || (!options.weights && !head), "{}", why);
  return why.empty() ? wanted : CudaBytes::kNone;
}

std::unique_ptr<ModelCuda> load_model_cuda(CudaContext& ctx, const std::filesystem::path& folder,
                                           int64_t other_bytes, const LoadOptions& options) {
  const CudaBytes wanted = loads_in_bytes(folder, options);
  const bool in_bytes = wanted != CudaBytes::kNone;
  const bool head = wanted == CudaBytes::kProjectionsAndHead;
  const OpenCheckpoint opened = open_checkpoint(folder);
  auto model = std::make_unique<ModelCuda>(opened.config, other_bytes, wanted);
  TensorUploader uploader(ctx);
  const bool through_wide = in_bytes != opened.bytes.has_value() || (head && !opened.bytes->head);
  const DeviceBuffer<__nv_bfloat16> wide(through_wide ? largest_matrix(opened.table) : 0);
  const DeviceBuffer<uint8_t> bytes(through_wide && !in_bytes ? wide.size() : 0);
  const DeviceBuffer<float> scales(through_wide && !in_bytes ? largest_outputs(opened.table) : 0);
  for (const ParamSpec& spec : opened.table) {
    const TensorInfo& info = *opened.tensors.find(spec.name);
    const int64_t rows = spec.transposed ? spec.cols : spec.rows, cols = spec.size() / rows;
    if (opened.in_bytes(spec)) {
      const StoredBytes stored = stored_bytes(opened, spec);
      require_no_nan(opened, stored, spec.name);
      const ModelCuda::BytePlace to =
          in_bytes ? model->byte_place_of(spec) : ModelCuda::BytePlace{bytes.data(), scales.data()};
      copy_async(ctx, stored.values, info.bytes.size(), to.values);
      copy_async(ctx, stored.scales.data(), stored.scales.size() * sizeof(float), to.scales);
      if (!in_bytes) {
        TWELL_CUDA_CHECK(launch_widen_rows({.type = stored.type,
                                            .rows = rows,
                                            .cols = cols,
                                            .x = {to.values, to.scales},
                                            .transposed = spec.transposed,
                                            .out = model->place_of(spec)},
                                           ctx.stream()));
      }
      TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));  // `stored` ends here
      continue;
    }
    const auto check = [&](std::span<const std::byte> part) {
      if (options.allow_non_finite || first_non_finite(part, info.dtype) < 0) return;
      refuse_non_finite(info, first_non_finite(info.bytes, info.dtype), opened.tensors.source());
    };
    if ((in_bytes && is_projection(spec)) || (head && is_head(spec))) {
      uploader.copy(info.bytes, stored_dtype(info.dtype), rows, cols, false, wide.data(), check);
      const ModelCuda::BytePlace to = model->byte_place_of(spec);
      TWELL_CUDA_CHECK(launch_quantise_rows(
          {.rows = rows, .cols = cols, .x = wide.data(), .values = to.values, .scales = to.scales},
          ctx.stream()));
      continue;
    }
    uploader.copy(info.bytes, stored_dtype(info.dtype), rows, cols, spec.transposed,
                  model->place_of(spec), check);
  }
  if (head && opened.config.tied_embeddings) {
    const Matrix<const BF16>& embedding = model->weights().embedding;
    const ModelCuda::BytePlace to = model->head_place();
    TWELL_CUDA_CHECK(launch_quantise_rows({.rows = embedding.rows,
                                           .cols = embedding.cols,
                                           .x = device_bf16(embedding.data),
                                           .values = to.values,
                                           .scales = to.scales},
                                          ctx.stream()));
  }
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));  // the buffers end here
  return model;
}

}  // namespace twell
