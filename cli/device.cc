// SPDX-License-Identifier: Apache-2.0
#include "cli/device.h"

#include <fmt/core.h>

#include "twell/base/error.h"
#include "twell/model/checkpoint.h"
#ifdef TWELL_HAVE_CUDA
#include "twell/infer/engine_cuda.h"
#endif

namespace twell::cli {
namespace {

// Why no GPU can be used; empty when one can.
std::string gpu_unavailable() {
#ifdef TWELL_HAVE_CUDA
  return cuda_unavailable();
#else
  return "this program was built without CUDA";
#endif
}

std::unique_ptr<Engine> make_engine(const CommonOptions& common) {
  if (!use_cuda(common)) return std::make_unique<EngineCpu>(common.checkpoint, common.threads);
#ifdef TWELL_HAVE_CUDA
  const std::string why = cuda_model_unsupported(load_config(common.checkpoint));
  if (common.device == "auto" && !why.empty()) {
    fmt::print(stderr, "twell: running on the CPU: {}\n", why);
    return std::make_unique<EngineCpu>(common.checkpoint, common.threads);
  }
  return std::make_unique<EngineCuda>(common.checkpoint);
#else
  return nullptr;
#endif
}

}  // namespace

bool use_cuda(const CommonOptions& common) {
  if (common.device == "cpu") return false;
  const std::string why = gpu_unavailable();
  TWELL_REQUIRE(why.empty() || common.device == "auto",
                "--device cuda: no GPU can be used here: {}", why);
  return why.empty();
}

LoadedEngine load_engine(const CommonOptions& common) {
  LoadedEngine loaded{make_engine(common), Tokenizer::load(common.checkpoint / "tokenizer.json")};
  TWELL_REQUIRE(loaded.tokenizer.vocab_size() <= loaded.engine->config().vocab_size,
                "{}: tokenizer.json has {} tokens, but the model only {} (config.json vocab_size)",
                common.checkpoint.string(), loaded.tokenizer.vocab_size(),
                loaded.engine->config().vocab_size);
  return loaded;
}

}  // namespace twell::cli
