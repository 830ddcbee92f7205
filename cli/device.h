// SPDX-License-Identifier: Apache-2.0
// Chooses the device for --device; it compiles with and without CUDA.
#pragma once

#include <memory>
#include <string>

#include "cli/options.h"
#include "twell/infer/engine.h"

namespace twell::cli {

// The reason why no GPU is usable; empty when one is.
std::string gpu_unavailable();

// The GPUs that this process sees.
int gpu_count();

// Whether to run on the GPU: true for "cuda", and for "auto" where a GPU is usable. InputError with
// the reason when "cuda" was requested but no GPU is usable.
bool use_cuda(const CommonOptions& common);

// Makes a CPU's products those of --compute. InputError where it has none of bf16.
void use_compute(Context& ctx, const CommonOptions& common);

// The session with a cache of at most cache_bytes. 0: as much as its sequences need; on the CPU not
// more than the memory that the weights leave, which the sequences then share.
SessionOptions plan_cache(const CommonOptions& common, const ModelConfig& config,
                          SessionOptions options, int64_t cache_bytes = 0);

// Loads the checkpoint of --checkpoint on the device of --device. With "auto", a model that the GPU
// code does not support or that does not fit into its memory runs on the CPU, and a line on stderr
// gives the reason. host_model: the same checkpoint, if already loaded; the CPU engine uses it.
std::unique_ptr<Engine> load_engine(const CommonOptions& common, const EnginePlan& plan,
                                    std::unique_ptr<Model> host_model = nullptr);

}  // namespace twell::cli
