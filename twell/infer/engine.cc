// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/engine.h"

#include "twell/base/error.h"
#include "twell/checkpoint/mapped_model.h"
#include "twell/infer/session_cpu.h"
#include "twell/model/scorer_cpu.h"

namespace twell {

EngineCpu::EngineCpu(const std::filesystem::path& checkpoint, int threads, const LoadOptions& load)
    : ctx_(threads), model_(map_model(ctx_, checkpoint, load)) {}

EngineCpu::EngineCpu(std::unique_ptr<Model> model, int threads)
    : ctx_(threads), model_(std::move(model)) {}

std::string EngineCpu::device() const { return fmt::format("CPU ({} threads)", ctx_.threads()); }

std::unique_ptr<Session> EngineCpu::session(const SessionOptions& options) {
  return std::make_unique<SessionCpu>(ctx_, *model_, options);
}

std::unique_ptr<Scorer> EngineCpu::scorer(FfnPolicy policy) {
  return std::make_unique<ScorerCpu>(ctx_, *model_, policy);
}

std::unique_ptr<ExecutionCosts> EngineCpu::costs() { return cpu_costs(ctx_, model_->config); }

}  // namespace twell
