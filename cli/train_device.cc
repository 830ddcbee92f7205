// SPDX-License-Identifier: Apache-2.0
#include "cli/train_device.h"

#include <fmt/core.h>

#include "cli/device.h"
#include "cli/process.h"
#include "twell/base/error.h"
#include "twell/train/engine_cpu.h"
#ifdef TWELL_HAVE_CUDA
#include "twell/infer/engine_cuda.h"
#include "twell/model/model_cuda.h"
#include "twell/train/engine_cuda.h"
#endif

namespace twell::cli {

#ifdef TWELL_HAVE_CUDA
struct TrainDevice::Gpu {
  CudaStream stream;
  CudaContext ctx{stream.get()};
};
#else
struct TrainDevice::Gpu {};
#endif

TrainDevice::TrainDevice(const CommonOptions& common, [[maybe_unused]] const ModelConfig& config,
                         [[maybe_unused]] const TrainOptions& options,
                         [[maybe_unused]] const RankIdentity& identity) {
  if (!use_cuda(common)) return;
#ifdef TWELL_HAVE_CUDA
  const std::string why = cuda_run_unsupported(config, options);
  if (!why.empty() && common.device == "auto") {
    print_error("twell: training on the CPU: {}\n", why);
    return;
  }
  TWELL_REQUIRE(why.empty(), "--device cuda: {}", why);
  int devices = 0;
  TWELL_CUDA_CHECK(cudaGetDeviceCount(&devices));
  TWELL_CUDA_CHECK(cudaSetDevice(device_of_rank(identity, devices)));
  if (options.ranks > 1) {
    const std::string no_nccl = nccl_unavailable();
    TWELL_REQUIRE(no_nccl.empty(), "{} ranks on GPUs need NCCL: {}", options.ranks, no_nccl);
  }
  gpu_ = std::make_unique<Gpu>();
#endif
}

TrainDevice::~TrainDevice() = default;

std::string TrainDevice::name() const {
#ifdef TWELL_HAVE_CUDA
  if (on_gpu()) return gpu_->ctx.device_name();
#endif
  return "CPU";
}

RunPlan TrainDevice::plan(const ModelConfig& config, const TrainOptions& options,
                          int64_t shard_bytes) const {
#ifdef TWELL_HAVE_CUDA
  if (on_gpu()) return plan_run_cuda(gpu_->ctx, config, options, shard_bytes);
#endif
  return plan_run(config, options, shard_bytes);
}

void TrainDevice::require_memory([[maybe_unused]] const RunPlan& plan) const {
#ifdef TWELL_HAVE_CUDA
  if (on_gpu()) require_device_memory(plan.device_bytes(), "this run would");
#endif
}

std::unique_ptr<TrainEngine> TrainDevice::engine(Context& ctx, Model& model, const ShardSet& shards,
                                                 const TrainOptions& options, const Model* teacher,
                                                 Communicator* ranks) const {
#ifdef TWELL_HAVE_CUDA
  if (on_gpu()) {
    return std::make_unique<TrainEngineCuda>(gpu_->ctx, model, &shards, options,
                                             std::span<const LayerHint>{}, ranks, teacher);
  }
#endif
  return std::make_unique<TrainEngineCpu>(ctx, model, shards, options, teacher, ranks);
}

}  // namespace twell::cli
