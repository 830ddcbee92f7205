// SPDX-License-Identifier: Apache-2.0
#include "twell/base/cuda.h"
#include "twell/base/gpu_code.h"

namespace twell {

void check_cuda(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  throw_error(file, line,
              fmt::format("{} failed: {} ({})", call, cudaGetErrorName(status),
                          cudaGetErrorString(status)));
}

CudaStream::CudaStream() {
  TWELL_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

CudaEvent::CudaEvent(Timing timing) {
  TWELL_CUDA_CHECK(cudaEventCreateWithFlags(
      &event_, timing == Timing::kOn ? cudaEventDefault : cudaEventDisableTiming));
}

double CudaEvent::milliseconds_since(const CudaEvent& begin) const {
  float milliseconds = 0.0f;
  TWELL_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin.event_, event_));
  return static_cast<double>(milliseconds);
}

CudaGraph::Capture::Capture(cudaStream_t stream) : stream_(stream) {
  // Other threads of the process may allocate during the capture.
  TWELL_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

CudaGraph::Capture::~Capture() {
  if (!capturing_) return;
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(stream_, &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  // Clears the error of an invalidated capture, which the next launch check would report.
  cudaGetLastError();
}

cudaGraphExec_t CudaGraph::Capture::instantiate() {
  cudaGraph_t graph = nullptr;
  capturing_ = false;
  TWELL_CUDA_CHECK(cudaStreamEndCapture(stream_, &graph));
  cudaGraphExec_t executable = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  TWELL_CUDA_CHECK(status);
  return executable;
}

CudaContext::CudaContext(cudaStream_t stream) : stream_(stream) {
  TWELL_CUDA_CHECK(cudaGetDevice(&device_));
  cudaDeviceProp properties{};
  TWELL_CUDA_CHECK(cudaGetDeviceProperties(&properties, device_));
  multiprocessors_ = properties.multiProcessorCount;
  // A portable build takes newer GPUs for older ones.
  compute_capability_ = seen_capability(properties.major * 10 + properties.minor);
  device_name_ = properties.name;
}

std::string cuda_unavailable() {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess) {
    return fmt::format("{} ({})", cudaGetErrorName(status), cudaGetErrorString(status));
  }
  return devices == 0 ? "the CUDA runtime sees no device" : std::string();
}

}  // namespace twell
