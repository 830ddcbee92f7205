// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/engine.h"

#include "twell/base/error.h"
#include "twell/infer/session_cpu.h"
#include "twell/model/checkpoint.h"

namespace twell {

EngineCpu::EngineCpu(const std::filesystem::path& checkpoint, int threads)
    : ctx_(threads), model_(load_model(checkpoint)) {}

std::string EngineCpu::device() const { return fmt::format("CPU ({} threads)", ctx_.threads()); }

std::unique_ptr<Session> EngineCpu::session(const SessionOptions& options) {
  return std::make_unique<SessionCpu>(ctx_, *model_, options);
}

}  // namespace twell
