// SPDX-License-Identifier: Apache-2.0
#include "cli/device.h"

#include <fmt/core.h>

#include "cli/process.h"
#include "twell/base/error.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/model/kv_cache.h"
#include "twell/train/metrics.h"
#ifdef TWELL_HAVE_CUDA
#include "twell/infer/engine_cuda.h"
#endif

namespace twell::cli {
namespace {

// The reason why no GPU is usable; empty when one is.
std::string gpu_unavailable() {
#ifdef TWELL_HAVE_CUDA
  return cuda_unavailable();
#else
  return "this program was built without CUDA";
#endif
}

// Checks host memory before loading. Weights are f32 on the CPU, whatever the checkpoint's dtype.
void require_host_memory(const ModelConfig& config, const EnginePlan& plan) {
  const int64_t weights = config.parameter_count() * int64_t{sizeof(float)};
  int64_t cache = 0;
  if (plan.session) {
    const int64_t capacity =
        plan.session->capacity == 0 ? config.max_sequence() : plan.session->capacity;
    cache = KvCache::bytes(config, plan.session->slots, capacity);
  }
  const int64_t limit = memory_limit_bytes();
  TWELL_REQUIRE(weights + cache <= limit,
                "the model's weights ({}) and its keys and values ({}) do not fit the machine's "
                "memory of {}",
                format_bytes(static_cast<double>(weights)),
                format_bytes(static_cast<double>(cache)), format_bytes(static_cast<double>(limit)));
}

}  // namespace

bool use_cuda(const CommonOptions& common) {
  if (common.device == "cpu") return false;
  const std::string why = gpu_unavailable();
  TWELL_REQUIRE(why.empty() || common.device == "auto",
                "--device cuda: no GPU can be used here: {}", why);
  return why.empty();
}

std::unique_ptr<Engine> load_engine(const CommonOptions& common, const EnginePlan& plan,
                                    std::unique_ptr<Model> host_model) {
  const LoadOptions load{.allow_non_finite = common.allow_non_finite};
#ifdef TWELL_HAVE_CUDA
  if (use_cuda(common)) {
    std::string why;
    if (common.device == "auto") why = EngineCuda::cannot_run(load_config(common.checkpoint), plan);
    if (why.empty()) return std::make_unique<EngineCuda>(common.checkpoint, plan, load);
    fmt::print(stderr, "twell: running on the CPU: {}\n", why);
  }
#else
  use_cuda(common);  // throws for "cuda"
#endif
  require_host_memory(load_config(common.checkpoint), plan);
  if (host_model != nullptr) {
    return std::make_unique<EngineCpu>(std::move(host_model), common.threads);
  }
  return std::make_unique<EngineCpu>(common.checkpoint, common.threads, load);
}

}  // namespace twell::cli
