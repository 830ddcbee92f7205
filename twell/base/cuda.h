// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime as the rest of the project sees it: checked calls, owned memory, streams, events
// and graphs, and a context that carries the device and the stream. Failures are Error. Only for
// sources built with a CUDA toolkit.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <typeindex>
#include <unordered_map>
#include <utility>

#include "twell/base/error.h"

namespace twell {

// Throws Error naming the call, CUDA's name and text for the failure, and the source position.
void check_cuda(cudaError_t status, const char* call, const char* file, int line);

#define TWELL_CUDA_CHECK(call) ::twell::check_cuda((call), #call, __FILE__, __LINE__)
// Call it after every kernel launch.
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

// The values in device memory, there once this returns: our streams do not wait for the legacy one.
template <typename T>
DeviceBuffer<T> to_device(std::span<const T> values) {
  DeviceBuffer<T> buffer(std::ssize(values));
  TWELL_CUDA_CHECK(
      cudaMemcpy(buffer.data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));
  return buffer;
}

// Owned, uninitialised page-locked host memory of n values of T, as asynchronous copies need it. It
// must outlive the copies enqueued on it.
template <typename T>
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  explicit PinnedBuffer(int64_t size) : size_(size) {
    if (size == 0) return;
    TWELL_CUDA_CHECK(
        cudaMallocHost(reinterpret_cast<void**>(&data_), static_cast<size_t>(size) * sizeof(T)));
  }
  ~PinnedBuffer() { cudaFreeHost(data_); }
  PinnedBuffer(PinnedBuffer&& other) noexcept { swap(other); }
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
    swap(other);
    return *this;
  }

  T* data() const { return data_; }
  T& operator[](size_t i) const { return data_[i]; }
  int64_t size() const { return size_; }

 private:
  void swap(PinnedBuffer& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  T* data_ = nullptr;
  int64_t size_ = 0;
};

// An owned stream, which does not wait for the default stream.
class CudaStream {
 public:
  CudaStream();
  ~CudaStream() { cudaStreamDestroy(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  cudaStream_t get() const { return stream_; }
  void synchronize() const { TWELL_CUDA_CHECK(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// A point in a stream's work. Waiting for an event that was never recorded returns at once.
class CudaEvent {
 public:
  enum class Timing { kOff, kOn };
  explicit CudaEvent(Timing timing = Timing::kOff);
  ~CudaEvent() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }
  CudaEvent(CudaEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  CudaEvent& operator=(CudaEvent&&) = delete;

  cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream) const { TWELL_CUDA_CHECK(cudaEventRecord(event_, stream)); }
  void synchronize() const { TWELL_CUDA_CHECK(cudaEventSynchronize(event_)); }
  // Both events must be recorded with Timing::kOn and complete.
  double milliseconds_since(const CudaEvent& begin) const;

 private:
  cudaEvent_t event_ = nullptr;
};

// Captured work that can be launched any number of times. The memory it uses must outlive it.
class CudaGraph {
 public:
  CudaGraph() = default;
  // Captures what `enqueue` puts on the stream, without running it. An exception of `enqueue` ends
  // the capture too, so that the stream is usable afterwards.
  template <typename Enqueue>
  CudaGraph(cudaStream_t stream, const Enqueue& enqueue) {
    Capture capture(stream);
    enqueue();
    executable_ = capture.instantiate();
  }
  ~CudaGraph() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
  }
  CudaGraph(CudaGraph&& other) noexcept { std::swap(executable_, other.executable_); }
  CudaGraph& operator=(CudaGraph&& other) noexcept {
    std::swap(executable_, other.executable_);
    return *this;
  }

  bool captured() const { return executable_ != nullptr; }
  void launch(cudaStream_t stream) const { TWELL_CUDA_CHECK(cudaGraphLaunch(executable_, stream)); }

 private:
  // Between begin and end of a capture.
  class Capture {
   public:
    explicit Capture(cudaStream_t stream);
    ~Capture();
    Capture(const Capture&) = delete;
    Capture& operator=(const Capture&) = delete;
    cudaGraphExec_t instantiate();

   private:
    cudaStream_t stream_;
    bool capturing_ = true;
  };
  cudaGraphExec_t executable_ = nullptr;
};

// The device and stream that ops run on, the device's properties, and per-context library handles.
// Ops enqueue on stream() and never synchronise. The stream is the caller's and outlives the
// context. One context serves one caller thread at a time.
class CudaContext {
 public:
  // Uses the device that is current at construction.
  explicit CudaContext(cudaStream_t stream);
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  cudaStream_t stream() const { return stream_; }
  int device() const { return device_; }
  int multiprocessors() const { return multiprocessors_; }
  int compute_capability() const { return compute_capability_; }  // 90 for 9.0
  const std::string& device_name() const { return device_name_; }

  // A per-context object of type T, made on first use (a library handle, or what was asked of the
  // driver once).
  template <typename T>
  T& service() const {
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
  mutable std::unordered_map<std::type_index, std::shared_ptr<void>> services_;
};

// Why no CUDA device can be used here; empty when one can.
std::string cuda_unavailable();

}  // namespace twell
