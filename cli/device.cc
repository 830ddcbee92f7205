// SPDX-License-Identifier: Apache-2.0
#include "cli/device.h"

#include <fmt/core.h>

#include <algorithm>

#include "cli/process.h"
#include "twell/base/error.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/model/kv_cache.h"
#include "twell/train/metrics.h"
#ifdef TWELL_HAVE_CUDA
#include "twell/checkpoint/load_model_cuda.h"
#include "twell/infer/engine_cuda.h"
#endif

namespace twell::cli {
namespace {

// Weights take as much memory as their files (mapped_model.h); a head in 8 bits of tied embeddings
// comes in addition.
int64_t host_weight_bytes(const CommonOptions& common) {
  int64_t bytes = 0;
  const CheckpointTensors tensors(common.checkpoint);
  for (const auto& [name, file] : tensors.files()) bytes += std::ssize(file.bytes());
  if (load_options(common).head_in_bytes) {
    const ModelConfig config = load_config(common.checkpoint);
    const int64_t head = config.vocab_size * (config.width + int64_t{sizeof(float)});
    if (config.tied_embeddings) bytes += head;
  }
  return bytes;
}

// Returns the bytes of the CPU's cache of keys and values when its size is not limited.
int64_t host_cache_bytes(const ModelConfig& config, const SessionOptions& options) {
  const int64_t capacity = options.capacity == 0 ? config.context : options.capacity;
  return KvCache::bytes(config, options.slots, capacity, options.cache);
}

// Checks host memory before loading.
void require_host_memory(const CommonOptions& common, const ModelConfig& config,
                         const EnginePlan& plan) {
  const int64_t weights = host_weight_bytes(common);
  int64_t cache = 0;
  if (plan.session) {
    cache = host_cache_bytes(config, *plan.session);
    if (plan.session->cache_bytes > 0) cache = std::min(cache, plan.session->cache_bytes);
  }
  const int64_t limit = memory_limit_bytes();
  TWELL_REQUIRE(weights + cache <= limit,
                "the model's weights ({}) and its keys and values ({}) do not fit the machine's "
                "memory of {}",
                format_bytes(static_cast<double>(weights)),
                format_bytes(static_cast<double>(cache)), format_bytes(static_cast<double>(limit)));
}

}  // namespace

std::string gpu_unavailable() {
#ifdef TWELL_HAVE_CUDA
  return cuda_unavailable();
#else
  return "this program was built without CUDA";
#endif
}

int gpu_count() {
  int count = 0;
#ifdef TWELL_HAVE_CUDA
  TWELL_CUDA_CHECK(cudaGetDeviceCount(&count));
#endif
  return count;
}

bool use_cuda(const CommonOptions& common) {
  if (common.device == "cpu") return false;
  const std::string why = gpu_unavailable();
  TWELL_REQUIRE(!why.empty() || common.compute == "f32",
                "--compute {} is for the CPU, and a GPU computes in bf16 anyway: add --device cpu, "
                "or leave --compute out",
                common.compute);
  TWELL_REQUIRE(why.empty() || common.device == "auto",
                "--device cuda: no GPU can be used here: {}; --device cpu works everywhere", why);
  return why.empty();
}

void use_compute(Context& ctx, const CommonOptions& common) {
  set_matmul_compute(ctx, parse_matmul_compute(common.compute));
}

SessionOptions plan_cache(const CommonOptions& common, const ModelConfig& config,
                          SessionOptions options, int64_t cache_bytes) {
  options.cache_bytes = cache_bytes;
  if (cache_bytes > 0 || use_cuda(common)) return options;
  // A fifth of what the weights leave stays for activations and for other programs.
  const int64_t free = (memory_limit_bytes() - host_weight_bytes(common)) / 5 * 4;
  if (free < host_cache_bytes(config, options) &&
      free >= KvCache::block_bytes(config, options.cache)) {
    options.cache_bytes = free;
  }
  return options;
}

std::unique_ptr<Engine> load_engine(const CommonOptions& common, const EnginePlan& plan,
                                    std::unique_ptr<Model> host_model) {
  const LoadOptions load = load_options(common);
#ifdef TWELL_HAVE_CUDA
  if (use_cuda(common)) {
    std::string why;
    if (common.device == "auto") {
      why = EngineCuda::cannot_run(load_config(common.checkpoint), plan,
                                   loads_in_bytes(common.checkpoint, load));
    }
    if (why.empty()) return std::make_unique<EngineCuda>(common.checkpoint, plan, load);
    print_error("twell: running on the CPU: {}\n", why);
  }
#else
  use_cuda(common);  // throws for "cuda"
#endif
  TWELL_REQUIRE(load.weights != ByteType::kE4M3, "--weights fp8 needs a GPU");
  TWELL_REQUIRE((!load.weights && !load.head_in_bytes) || host_model == nullptr,
                "--weights {} and --head {} need a checkpoint that was not loaded already",
                common.weights, common.head);
  const MatmulCompute compute = parse_matmul_compute(common.compute);
  require_host_memory(common, load_config(common.checkpoint), plan);
  auto engine = host_model != nullptr
                    ? std::make_unique<EngineCpu>(std::move(host_model), common.threads)
                    : std::make_unique<EngineCpu>(common.checkpoint, common.threads, load);
  engine->set_compute(compute);
  return engine;
}

}  // namespace twell::cli
