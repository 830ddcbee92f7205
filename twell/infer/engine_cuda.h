// SPDX-License-Identifier: Apache-2.0
// A model on the current CUDA device, with a stream of its own.
#pragma once

#include "twell/infer/engine.h"
#include "twell/model/model_cuda.h"

namespace twell {

class EngineCuda : public Engine {
 public:
  // InputError on any fault of the checkpoint and, before anything is loaded, when the device has
  // too little memory for the model and the plan; the message gives the numbers.
  EngineCuda(const std::filesystem::path& checkpoint, const EnginePlan& plan,
             const LoadOptions& load = {});
  // The reason why the current device cannot run this, with projections in e4m3 or not; empty when
  // it can.
  static std::string cannot_run(const ModelConfig& config, const EnginePlan& plan,
                                CudaBytes in_bytes = CudaBytes::kNone);

  const ModelConfig& config() const override { return model_->config(); }
  std::string device() const override { return ctx_.device_name(); }
  std::unique_ptr<Session> session(const SessionOptions& options) override;
  std::unique_ptr<Scorer> scorer(FfnPolicy policy) override;
  std::unique_ptr<ExecutionCosts> costs() override;
  std::function<double()> joules() const override;

 private:
  CudaStream stream_;
  CudaContext ctx_;
  std::unique_ptr<ModelCuda> model_;
  int64_t scorer_bytes_;  // planned
};

}  // namespace twell
