// SPDX-License-Identifier: Apache-2.0
// Captured graphs: exceptions during a capture, and the stream afterwards. The tests' own copies.
#include <chrono>
#include <stdexcept>
#include <thread>

#include "twell/base/cuda_gtest.h"

namespace twell {
namespace {

TEST(CudaGraph, CapturesWithoutRunningAndReplays) {
  TWELL_GPU_TEST();
  DeviceBuffer<int32_t> value = upload(std::vector<int32_t>{1});
  CudaGraph graph(stream.get(), [&] {
    TWELL_CUDA_CHECK(cudaMemsetAsync(value.data(), 0, sizeof(int32_t), stream.get()));
  });
  EXPECT_TRUE(graph.captured());
  stream.synchronize();
  EXPECT_EQ(download(value), std::vector<int32_t>{1});
  graph.launch(stream.get());
  stream.synchronize();
  EXPECT_EQ(download(value), std::vector<int32_t>{0});
  graph = CudaGraph();
  EXPECT_FALSE(graph.captured());
}

TEST(CudaGraph, AnExceptionEndsTheCapture) {
  TWELL_GPU_TEST();
  DeviceBuffer<int32_t> value = upload(std::vector<int32_t>{1});
  const auto fails = [&] {
    TWELL_CUDA_CHECK(cudaMemsetAsync(value.data(), 0, sizeof(int32_t), stream.get()));
    throw std::runtime_error("in the middle");
  };
  EXPECT_THROW(CudaGraph(stream.get(), fails), std::runtime_error);
  // A call that a capture does not allow, which invalidates it.
  const auto waits = [&] { TWELL_CUDA_CHECK(cudaStreamSynchronize(stream.get())); };
  EXPECT_THROW(CudaGraph(stream.get(), waits), Error);
  TWELL_CUDA_CHECK(cudaMemsetAsync(value.data(), 0xff, sizeof(int32_t), stream.get()));
  stream.synchronize();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(download(value), std::vector<int32_t>{-1});
}

// What a test compares is what its stream's kernels wrote, however late they run.
TEST(CudaTesting, DownloadWaitsForStreams) {
  TWELL_GPU_TEST();
  const auto value = upload(std::vector<int32_t>{1});
  const auto sleep = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
  TWELL_CUDA_CHECK(cudaLaunchHostFunc(stream.get(), sleep, nullptr));
  TWELL_CUDA_CHECK(cudaMemsetAsync(value.data(), 0, sizeof(int32_t), stream.get()));
  EXPECT_EQ(download(value), std::vector<int32_t>{0});
}

}  // namespace
}  // namespace twell
