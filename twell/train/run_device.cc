// SPDX-License-Identifier: Apache-2.0
#include "twell/train/run_device.h"

#include "twell/base/error.h"
#include "twell/train/engine_cpu.h"
#include "twell/train/metrics.h"
#ifdef TWELL_HAVE_CUDA
#include "twell/base/cuda.h"
#include "twell/train/engine_cuda.h"
#include "twell/train/plan_cuda.h"
#endif

namespace twell {

#ifdef TWELL_HAVE_CUDA
struct RunDevice::Gpu {
  int number;
  CudaStream stream;
  CudaContext ctx{stream.get()};
};
#else
struct RunDevice::Gpu {};
#endif

RunDevice::RunDevice([[maybe_unused]] int gpu, [[maybe_unused]] bool automatic,
                     [[maybe_unused]] const ModelConfig& config,
                     [[maybe_unused]] const TrainOptions& options) {
#ifdef TWELL_HAVE_CUDA
  if (gpu < 0) return;
  why_not_gpu_ = cuda_run_unsupported(config, options);
  TWELL_REQUIRE(why_not_gpu_.empty() || automatic, "--device cuda: {}", why_not_gpu_);
  if (!why_not_gpu_.empty()) return;
  TWELL_CUDA_CHECK(cudaSetDevice(gpu));
  if (options.ranks > 1) {
    const std::string no_nccl = nccl_unavailable();
    TWELL_REQUIRE(no_nccl.empty(), "{} ranks on GPUs need NCCL: {}", options.ranks, no_nccl);
  }
  gpu_.reset(new Gpu{.number = gpu});
#endif
}

RunDevice::~RunDevice() = default;

std::string RunDevice::name() const {
#ifdef TWELL_HAVE_CUDA
  if (on_gpu()) return gpu_->ctx.device_name();
#endif
  return "CPU";
}

RunPlan RunDevice::plan(const ModelConfig& config, const TrainOptions& options,
                        int64_t shard_bytes) const {
#ifdef TWELL_HAVE_CUDA
  if (on_gpu()) return plan_run_cuda(gpu_->ctx, config, options, shard_bytes);
#endif
  return plan_run(config, options, shard_bytes);
}

void RunDevice::require_memory([[maybe_unused]] const RunPlan& plan) const {
#ifdef TWELL_HAVE_CUDA
  if (!on_gpu()) return;
  const int64_t needed = plan.device_bytes(), free = free_device_bytes();
  TWELL_REQUIRE(needed <= free,
                "this run would need {} of GPU memory, and {} are free: take a smaller model, or "
                "fewer or shorter sequences at a time",
                format_bytes(static_cast<double>(needed)), format_bytes(static_cast<double>(free)));
#endif
}

std::unique_ptr<TrainEngine> RunDevice::engine(Context& ctx, Model& model, const TrainingData& data,
                                               const TrainOptions& options, const Model* teacher,
                                               Communicator* ranks) const {
#ifdef TWELL_HAVE_CUDA
  if (on_gpu()) {
    return std::make_unique<TrainEngineCuda>(gpu_->ctx, model, &data, options,
                                             std::span<const LayerHint>{}, ranks, teacher);
  }
#endif
  return std::make_unique<TrainEngineCpu>(ctx, model, data, options, teacher, ranks);
}

void RunDevice::select() const {
#ifdef TWELL_HAVE_CUDA
  if (on_gpu()) TWELL_CUDA_CHECK(cudaSetDevice(gpu_->number));
#endif
}

}  // namespace twell
