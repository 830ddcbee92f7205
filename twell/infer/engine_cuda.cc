// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/engine_cuda.h"

#include "twell/infer/session_cuda.h"

namespace twell {

EngineCuda::EngineCuda(const std::filesystem::path& checkpoint)
    : ctx_(stream_.get()), model_(ModelCuda::load(ctx_, checkpoint)) {}

std::unique_ptr<Session> EngineCuda::session(const SessionOptions& options) {
  return std::make_unique<SessionCuda>(ctx_, *model_, options);
}

}  // namespace twell
