// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime as the rest of the project sees it: checked calls, owned device memory, and a
// context that carries the device and the stream. Only for sources built with a CUDA toolkit.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <typeindex>
#include <unordered_map>
#include <utility>

#include "twell/base/error.h"

namespace twell {

// Throws Error naming the call, CUDA's name and text for the failure, and the source position.
void check_cuda(cudaError_t status, const char* call, const char* file, int line);

#define TWELL_CUDA_CHECK(call) ::twell::check_cuda((call), #call, __FILE__, __LINE__)
// After every kernel launch.
#define TWELL_CUDA_CHECK_LAUNCH(kernel) \
  ::twell::check_cuda(cudaGetLastError(), "launch of " kernel, __FILE__, __LINE__)

// Owned, uninitialised device memory of n values of T, freed on destruction.
template <typename T>
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(int64_t size) : size_(size) {
    if (size == 0) return;
    TWELL_CUDA_CHECK(
        cudaMalloc(reinterpret_cast<void**>(&data_), static_cast<size_t>(size) * sizeof(T)));
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    swap(other);
    return *this;
  }

  T* data() const { return data_; }
  int64_t size() const { return size_; }
  int64_t bytes() const { return size_ * static_cast<int64_t>(sizeof(T)); }

 private:
  void swap(DeviceBuffer& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  T* data_ = nullptr;
  int64_t size_ = 0;
};

// The device and stream that ops run on, what they need to know of the device, and per-context
// library handles. Ops enqueue on stream() and never synchronise. The stream is the caller's and
// outlives the context. One context serves one caller thread at a time.
class CudaContext {
 public:
  // The device is the one current at construction.
  explicit CudaContext(cudaStream_t stream);
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  cudaStream_t stream() const { return stream_; }
  int device() const { return device_; }
  int multiprocessors() const { return multiprocessors_; }
  int compute_capability() const { return compute_capability_; }  // 90 for 9.0
  const std::string& device_name() const { return device_name_; }

  // A per-context object of type T, made on first use (a library handle).
  template <typename T>
  T& service() {
    std::shared_ptr<void>& slot = services_[std::type_index(typeid(T))];
    if (!slot) slot = std::make_shared<T>();
    return *static_cast<T*>(slot.get());
  }

 private:
  cudaStream_t stream_;
  int device_ = 0;
  int multiprocessors_ = 0;
  int compute_capability_ = 0;
  std::string device_name_;
  std::unordered_map<std::type_index, std::shared_ptr<void>> services_;
};

// Why no CUDA device can be used here; empty when one can.
std::string cuda_unavailable();

}  // namespace twell
