// SPDX-License-Identifier: Apache-2.0
#include "twell/gpu/sm90/tensor_map.h"

#include "twell/base/cuda.h"

namespace twell::gpu {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Looked up in the driver at run time, so that the program also starts where there is no driver.
EncodeTiled encode_tiled() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  TWELL_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                    cudaEnableDefault, &found));
  TWELL_CHECK(found == cudaDriverEntryPointSuccess && entry != nullptr,
              "the CUDA driver has no cuTensorMapEncodeTiled");
  return reinterpret_cast<EncodeTiled>(entry);
}

constexpr int kBoxBytes = 128;  // in a row: the widest swizzle

CUtensorMap tensor_map(const void* matrix, int64_t rows, int64_t cols, int32_t box_rows,
                       CUtensorMapDataType type, int value_bytes) {
  static const EncodeTiled encode = encode_tiled();
  CUtensorMap map{};
  const cuuint64_t size[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(cols * value_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(kBoxBytes / value_bytes),
                             static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t step[2] = {1, 1};
  const CUresult result =
      encode(&map, type, 2, const_cast<void*>(matrix), size, pitch, box, step,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TWELL_CHECK(result == CUDA_SUCCESS,
              "no tensor map for [{}, {}] values of {} bytes at {} (CUresult {})", rows, cols,
              value_bytes, matrix, static_cast<int>(result));
  return map;
}

}  // namespace

CUtensorMap matrix_tensor_map(const void* matrix, int64_t rows, int64_t cols, int32_t box_rows) {
  return tensor_map(matrix, rows, cols, box_rows, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2);
}

CUtensorMap byte_matrix_tensor_map(const void* matrix, int64_t rows, int64_t cols,
                                   int32_t box_rows) {
  return tensor_map(matrix, rows, cols, box_rows, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1);
}

}  // namespace twell::gpu
