// SPDX-License-Identifier: Apache-2.0
// What all users of cuBLASLt share: the check of its calls, what it makes with an owner, and a
// context's handle and workspace.
#pragma once

#include <cublasLt.h>
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "twell/base/cuda.h"
#include "twell/base/error.h"

namespace twell {

inline void check_cublas(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw_error(file, line, fmt::format("{} failed: {}", call, cublasLtGetStatusString(status)));
}
// Throws Error unless the call succeeds.
#define TWELL_CUBLAS_CHECK(call) ::twell::check_cublas((call), #call, __FILE__, __LINE__)

inline constexpr int64_t kCublasWorkspaceBytes = int64_t{32} << 20;  // cuBLAS's default on Hopper

// For CudaContext::service: products of a context run on one stream, so that they can share the
// workspace.
struct LtHandle {
  LtHandle() : workspace(kCublasWorkspaceBytes) { TWELL_CUBLAS_CHECK(cublasLtCreate(&handle)); }
  ~LtHandle() { cublasLtDestroy(handle); }
  LtHandle(const LtHandle&) = delete;
  LtHandle& operator=(const LtHandle&) = delete;
  cublasLtHandle_t handle = nullptr;
  DeviceBuffer<std::byte> workspace;
};

struct LtDeleter {
  void operator()(cublasLtMatmulDesc_t description) const {
    cublasLtMatmulDescDestroy(description);
  }
  void operator()(cublasLtMatrixLayout_t layout) const { cublasLtMatrixLayoutDestroy(layout); }
  void operator()(cublasLtMatmulPreference_t preference) const {
    cublasLtMatmulPreferenceDestroy(preference);
  }
};
template <typename Pointer>
using LtOwned = std::unique_ptr<std::remove_pointer_t<Pointer>, LtDeleter>;

// Column-major, as cuBLAS sees the transpose of our rows; stride 0: packed.
inline LtOwned<cublasLtMatrixLayout_t> make_layout(cudaDataType_t type, int64_t rows, int64_t cols,
                                                   int64_t stride = 0) {
  cublasLtMatrixLayout_t layout = nullptr;
  TWELL_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, type, static_cast<uint64_t>(rows),
                                                static_cast<uint64_t>(cols),
                                                stride == 0 ? rows : stride));
  return LtOwned<cublasLtMatrixLayout_t>(layout);
}

}  // namespace twell
