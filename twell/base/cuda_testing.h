// SPDX-License-Identifier: Apache-2.0
// Shared by GPU tests and benchmarks: copies between host and device, and graphs.
#pragma once

#include <vector>

#include "twell/base/cuda.h"

namespace twell {

// Copies and fills run on the default stream and may return before they are done; a CudaStream does
// not wait for them.
inline void synchronize_default_stream() {
  TWELL_CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));
}

template <typename T>
DeviceBuffer<T> upload(const std::vector<T>& values) {
  DeviceBuffer<T> buffer(static_cast<int64_t>(values.size()));
  TWELL_CUDA_CHECK(
      cudaMemcpy(buffer.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  synchronize_default_stream();
  return buffer;
}

// Waits for the work of every stream of the device first: the copy alone waits for none of a
// CudaStream's, so that it could read what a kernel has yet to write.
template <typename T>
std::vector<T> download(const DeviceBuffer<T>& buffer) {
  std::vector<T> values(static_cast<size_t>(buffer.size()));
  TWELL_CUDA_CHECK(cudaDeviceSynchronize());
  TWELL_CUDA_CHECK(
      cudaMemcpy(values.data(), buffer.data(), values.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

// Device memory of n values with every byte set to 0xff: NaN as bf16 or f32, -1 as an integer.
template <typename T>
DeviceBuffer<T> poisoned(int64_t n) {
  DeviceBuffer<T> buffer(n);
  TWELL_CUDA_CHECK(cudaMemset(buffer.data(), 0xff, static_cast<size_t>(buffer.bytes())));
  synchronize_default_stream();
  return buffer;
}

// Captures what `enqueue` puts on the stream into a graph and replays it `times` times.
template <typename Enqueue>
void replay_as_graph(const CudaStream& stream, int times, const Enqueue& enqueue) {
  const CudaGraph graph(stream.get(), enqueue);
  for (int i = 0; i < times; ++i) graph.launch(stream.get());
  stream.synchronize();
}

}  // namespace twell
