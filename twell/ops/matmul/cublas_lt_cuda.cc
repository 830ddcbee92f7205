// SPDX-License-Identifier: Apache-2.0
// cuBLASLt's functions that this project calls. The first call of one loads the library, whose
// 350,000 relocations take 0.2 s of a processor and 200 MB: programs that multiply nothing on a GPU
// start without it, and those built with CUDA run where there is none.
#include <cublasLt.h>
#include <dlfcn.h>

#include <string>

#include "twell/base/error.h"

#define TWELL_TEXT_OF(macro) TWELL_TEXT(macro)
#define TWELL_TEXT(text) #text

namespace twell {
namespace {

constexpr char kCublasLt[] = "libcublasLt.so." TWELL_TEXT_OF(CUBLAS_VER_MAJOR);

// The library is looked for by name first, which finds the one that PyTorch has loaded, then where
// the build found it.
void* cublas_lt() {
  static void* const library = [] {
    void* found = ::dlopen(kCublasLt, RTLD_LAZY | RTLD_LOCAL);
    const std::string reason = found == nullptr ? ::dlerror() : "";
    if (found == nullptr) found = ::dlopen(TWELL_CUBLASLT, RTLD_LAZY | RTLD_LOCAL);
    TWELL_REQUIRE(
        found != nullptr,
        "cuBLASLt was not found ({}): install libcublas of CUDA {}, or PyPI's nvidia-cublas, "
        "and add its folder to LD_LIBRARY_PATH",
        reason, CUBLAS_VER_MAJOR);
    return found;
  }();
  return library;
}

template <typename Function>
Function find_in_cublas_lt(const char* name) {
  const auto function = reinterpret_cast<Function>(::dlsym(cublas_lt(), name));
  TWELL_REQUIRE(function != nullptr, "{} has no {}: install a newer one", kCublasLt, name);
  return function;
}

}  // namespace
}  // namespace twell

// The library's function of this name, found once.
#define TWELL_CUBLASLT_FUNCTION(name)                                              \
  ([] {                                                                            \
    static const auto function = twell::find_in_cublas_lt<decltype(&name)>(#name); \
    return function;                                                               \
  }())
// Other libraries of a process find NVIDIA's own functions, not these.
#define TWELL_HIDDEN __attribute__((visibility("hidden")))

extern "C" {

TWELL_HIDDEN size_t cublasLtGetVersion() { return TWELL_CUBLASLT_FUNCTION(cublasLtGetVersion)(); }

TWELL_HIDDEN const char* cublasLtGetStatusString(cublasStatus_t status) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtGetStatusString)(status);
}

TWELL_HIDDEN cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtCreate)(handle);
}

TWELL_HIDDEN cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtDestroy)(handle);
}

TWELL_HIDDEN cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout,
                                                       cudaDataType type, uint64_t rows,
                                                       uint64_t cols, int64_t ld) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtMatrixLayoutCreate)(layout, type, rows, cols, ld);
}

TWELL_HIDDEN cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtMatrixLayoutDestroy)(layout);
}

TWELL_HIDDEN cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description,
                                                     cublasComputeType_t compute,
                                                     cudaDataType_t scale) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtMatmulDescCreate)(description, compute, scale);
}

TWELL_HIDDEN cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtMatmulDescDestroy)(description);
}

TWELL_HIDDEN cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                                           cublasLtMatmulDescAttributes_t attribute,
                                                           const void* value, size_t bytes) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtMatmulDescSetAttribute)(description, attribute, value,
                                                                 bytes);
}

TWELL_HIDDEN cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtMatmulPreferenceCreate)(preference);
}

TWELL_HIDDEN cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtMatmulPreferenceDestroy)(preference);
}

TWELL_HIDDEN cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
    const void* value, size_t bytes) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtMatmulPreferenceSetAttribute)(preference, attribute, value,
                                                                       bytes);
}

TWELL_HIDDEN cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
    cublasLtMatmulPreference_t preference, int wanted, cublasLtMatmulHeuristicResult_t* results,
    int* found) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtMatmulAlgoGetHeuristic)(
      handle, operation, a, b, c, d, preference, wanted, results, found);
}

TWELL_HIDDEN cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(
    const cublasLtMatmulAlgo_t* algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute,
    void* value, size_t bytes, size_t* written) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtMatmulAlgoConfigGetAttribute)(algorithm, attribute, value,
                                                                       bytes, written);
}

TWELL_HIDDEN cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(
    cublasLtMatmulAlgo_t* algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute,
    const void* value, size_t bytes) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtMatmulAlgoConfigSetAttribute)(algorithm, attribute, value,
                                                                       bytes);
}

TWELL_HIDDEN cublasStatus_t cublasLtMatmulAlgoCapGetAttribute(
    const cublasLtMatmulAlgo_t* algorithm, cublasLtMatmulAlgoCapAttributes_t attribute, void* value,
    size_t bytes, size_t* written) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtMatmulAlgoCapGetAttribute)(algorithm, attribute, value,
                                                                    bytes, written);
}

TWELL_HIDDEN cublasStatus_t cublasLtMatmulAlgoInit(
    cublasLtHandle_t handle, cublasComputeType_t compute, cudaDataType_t scale, cudaDataType_t a,
    cudaDataType_t b, cudaDataType_t c, cudaDataType_t d, int id, cublasLtMatmulAlgo_t* algorithm) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtMatmulAlgoInit)(handle, compute, scale, a, b, c, d, id,
                                                         algorithm);
}

TWELL_HIDDEN cublasStatus_t cublasLtMatmulAlgoCheck(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
    const cublasLtMatmulAlgo_t* algorithm, cublasLtMatmulHeuristicResult_t* result) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtMatmulAlgoCheck)(handle, operation, a, b, c, d, algorithm,
                                                          result);
}

TWELL_HIDDEN cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                           const void* alpha, const void* a,
                                           cublasLtMatrixLayout_t layout_a, const void* b,
                                           cublasLtMatrixLayout_t layout_b, const void* beta,
                                           const void* c, cublasLtMatrixLayout_t layout_c, void* d,
                                           cublasLtMatrixLayout_t layout_d,
                                           const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                                           size_t workspace_bytes, cudaStream_t stream) {
  return TWELL_CUBLASLT_FUNCTION(cublasLtMatmul)(handle, operation, alpha, a, layout_a, b, layout_b,
                                                 beta, c, layout_c, d, layout_d, algorithm,
                                                 workspace, workspace_bytes, stream);
}

}  // extern "C"
