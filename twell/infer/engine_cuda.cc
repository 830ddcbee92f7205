// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/engine_cuda.h"

#include "twell/base/gpu_energy.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/load_model_cuda.h"
#include "twell/infer/session_cuda.h"
#include "twell/model/scorer_cuda.h"

namespace twell {
namespace {

int64_t planned_bytes(const CudaContext& ctx, const ModelConfig& config, const EnginePlan& plan,
                      CudaBytes in_bytes) {
  int64_t bytes = 0;
  if (plan.session) {
    SessionOptions session = *plan.session;
    session.weights_in_bytes = in_bytes != CudaBytes::kNone;
    bytes += SessionCuda::bytes_needed(ctx, config, session);
  }
  if (plan.scorer) {
    ScorerPlan scorer = *plan.scorer;
    scorer.weights_in_bytes = in_bytes != CudaBytes::kNone;
    bytes += ScorerCuda::bytes_needed(ctx, config, scorer);
  }
  return bytes;
}

}  // namespace

EngineCuda::EngineCuda(const std::filesystem::path& checkpoint, const EnginePlan& plan,
                       const LoadOptions& load)
    : ctx_(stream_.get()),
      model_(load_model_cuda(
          ctx_, checkpoint,
          planned_bytes(ctx_, load_config(checkpoint), plan, loads_in_bytes(checkpoint, load)),
          load)),
      scorer_bytes_(plan.scorer ? ScorerCuda::bytes_needed(ctx_, model_->config(), *plan.scorer)
                                : 0) {}

std::string EngineCuda::cannot_run(const ModelConfig& config, const EnginePlan& plan,
                                   CudaBytes in_bytes) {
  if (std::string why = cuda_model_unsupported(config); !why.empty()) return why;
  const CudaStream stream;
  const CudaContext ctx(stream.get());
  return cuda_model_too_large(config, planned_bytes(ctx, config, plan, in_bytes), in_bytes);
}

std::unique_ptr<Session> EngineCuda::session(const SessionOptions& options) {
  SessionOptions of_model = options;
  of_model.weights_in_bytes = model_->in_bytes();
  return std::make_unique<SessionCuda>(ctx_, *model_, of_model, scorer_bytes_);
}

std::unique_ptr<Scorer> EngineCuda::scorer(FfnPolicy policy) {
  return std::make_unique<ScorerCuda>(ctx_, *model_, policy);
}

std::unique_ptr<ExecutionCosts> EngineCuda::costs() {
  return gpu_costs(config(), gpu_device(ctx_));
}

std::function<double()> EngineCuda::joules() const {
  char bus_id[32] = {};
  TWELL_CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), ctx_.device()));
  const auto meter = std::make_shared<GpuEnergyMeter>(bus_id);
  if (!meter->unavailable().empty()) return {};
  return [meter] { return meter->joules(); };
}

}  // namespace twell
