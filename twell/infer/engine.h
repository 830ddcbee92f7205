// SPDX-License-Identifier: Apache-2.0
// A model that is ready to run on one device, the CPU or a GPU.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "twell/base/context.h"
#include "twell/checkpoint/tensor_load.h"
#include "twell/infer/expected_ffn.h"
#include "twell/infer/session.h"
#include "twell/model/scorer.h"
#include "twell/model/weights.h"
#include "twell/ops/matmul/compute.h"

namespace twell {

// Upper bounds of later requests, so that what does not fit a GPU is refused before the weights are
// loaded.
struct EnginePlan {
  std::optional<SessionOptions> session;
  std::optional<ScorerPlan> scorer;
};

// An engine must outlive its sessions and scorers.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual const ModelConfig& config() const = 0;
  virtual std::string device() const = 0;  // display name: "CPU (8 threads)", "NVIDIA H200"
  virtual std::unique_ptr<Session> session(const SessionOptions& options) = 0;
  virtual std::unique_ptr<Scorer> scorer(FfnPolicy policy) = 0;
  virtual std::unique_ptr<ExecutionCosts> costs() = 0;  // of this engine's device
  // The model in this process's memory; null where it is elsewhere.
  virtual const ModelView* host_model() const { return nullptr; }
  // Gives the joules that the device has used since some moment in the past, for any thread and
  // also after this engine's end. Empty where that is unknown.
  virtual std::function<double()> joules() const { return {}; }
};

class EngineCpu : public Engine {
 public:
  // threads = 0: every core. The weights stay in the checkpoint's mapped files (mapped_model.h).
  // InputError on any fault of the checkpoint.
  EngineCpu(const std::filesystem::path& checkpoint, int threads, const LoadOptions& load = {});
  EngineCpu(std::unique_ptr<Model> model, int threads);

  // For its sessions and scorers, those that exist too.
  void set_compute(MatmulCompute compute) { set_matmul_compute(ctx_, compute); }

  const ModelConfig& config() const override { return model_->config; }
  std::string device() const override;
  std::unique_ptr<Session> session(const SessionOptions& options) override;
  std::unique_ptr<Scorer> scorer(FfnPolicy policy) override;
  std::unique_ptr<ExecutionCosts> costs() override;
  const ModelView* host_model() const override { return model_.get(); }

 private:
  Context ctx_;
  std::shared_ptr<const ModelView> model_;
};

}  // namespace twell
