// SPDX-License-Identifier: Apache-2.0
// Collectives between GPUs, whose ranks are threads here. Needs two GPUs and NCCL.
#include "twell/dist/nccl_communicator_cuda.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "twell/base/cuda.h"
#include "twell/base/cuda_gtest.h"
#include "twell/base/dtype.h"
#include "twell/dist/test_ranks.h"

namespace twell {
namespace {

using testing::Each;
using testing::HasSubstr;
using testing::StrEq;

constexpr int kRanks = 2;

class NcclTest : public testing::Test {
 protected:
  void SetUp() override {
    TWELL_SKIP_WITHOUT_GPU();
    int devices = 0;
    TWELL_CUDA_CHECK(cudaGetDeviceCount(&devices));
    if (devices < kRanks) {
      const std::string why = fmt::format("needs {} GPUs, there are {}", kRanks, devices);
      TWELL_SKIP_OF_GPUS(kRanks, why);
    }
    if (const std::string why = nccl_unavailable(); !why.empty()) GTEST_SKIP() << why;
  }

  template <typename T>
  static DeviceBuffer<T> upload(const std::vector<T>& values) {
    DeviceBuffer<T> out(std::ssize(values));
    TWELL_CUDA_CHECK(
        cudaMemcpy(out.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return out;
  }
  template <typename T>
  static std::vector<T> download(const DeviceBuffer<T>& values) {
    std::vector<T> out(static_cast<size_t>(values.size()));
    TWELL_CUDA_CHECK(
        cudaMemcpy(out.data(), values.data(), out.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
  }
  static void wait(NcclCommunicator& nccl, cudaStream_t stream) {
    const CudaEvent done;
    done.record(stream);
    nccl.wait(done.get(), done.get());
  }
};

TEST_F(NcclTest, CollectivesOfTwoGpus) {
  const auto errors = run_ranks(kRanks, [](Communicator& all) {
    TWELL_CUDA_CHECK(cudaSetDevice(all.rank()));
    const CudaStream stream;
    NcclCommunicator nccl(all);
    constexpr int64_t kPiece = 1 << 16;
    std::vector<float> values(kRanks * kPiece);
    std::iota(values.begin(), values.end(), static_cast<float>(all.rank()));
    const auto device = upload(values);
    nccl.reduce_scatter_sum(device.data(), kPiece, stream.get());
    nccl.all_gather(device.data(), kPiece * sizeof(float), stream.get());
    wait(nccl, stream.get());
    const std::vector<float> sums = download(device);
    for (size_t i = 0; i < sums.size(); ++i) {
      ASSERT_EQ(sums[i], 2.0f * static_cast<float>(i) + 1.0f) << i;
    }

    std::vector<uint8_t> flags(1001, 0);
    flags[static_cast<size_t>(all.rank())] = 1;
    const auto device_flags = upload(flags);
    nccl.all_reduce_max(device_flags.data(), std::ssize(flags), stream.get());
    wait(nccl, stream.get());
    const std::vector<uint8_t> active = download(device_flags);
    EXPECT_EQ(std::accumulate(active.begin(), active.end(), 0), 2);

    std::vector<BF16> sent(kRanks * kPiece);
    for (size_t i = 0; i < sent.size(); ++i) {
      sent[i] = to_bf16(static_cast<float>(100 * all.rank() + static_cast<int>(i / kPiece)));
    }
    const auto device_sent = upload(sent);
    const DeviceBuffer<BF16> device_received(std::ssize(sent));
    nccl.all_to_all(reinterpret_cast<const __nv_bfloat16*>(device_sent.data()),
                    reinterpret_cast<__nv_bfloat16*>(device_received.data()), kPiece, stream.get());
    wait(nccl, stream.get());
    const std::vector<BF16> received = download(device_received);
    for (size_t i = 0; i < received.size(); ++i) {
      ASSERT_EQ(to_float(received[i]),
                100.0f * static_cast<float>(i / kPiece) + static_cast<float>(all.rank()));
    }
  });
  EXPECT_THAT(errors, Each(StrEq("")));
}

TEST_F(NcclTest, ARankThatTakesNoPartEndsTheWait) {
  const auto start = std::chrono::steady_clock::now();
  const auto errors = run_ranks(
      kRanks,
      [](Communicator& all) {
        TWELL_CUDA_CHECK(cudaSetDevice(all.rank()));
        const CudaStream stream;
        NcclCommunicator nccl(all);
        all.rendezvous().set_step(5);
        const auto values = upload(std::vector<float>(1 << 12));
        nccl.all_gather(values.data(), values.bytes() / kRanks, stream.get());
        wait(nccl, stream.get());
        if (all.rank() == 1) throw Error("out of memory");
        nccl.all_gather(values.data(), values.bytes() / kRanks, stream.get());
        wait(nccl, stream.get());
      },
      std::chrono::seconds(20));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
  EXPECT_EQ(errors[0], "rank 1 failed in step 5: out of memory");
}

}  // namespace
}  // namespace twell
