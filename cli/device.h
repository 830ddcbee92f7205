// SPDX-License-Identifier: Apache-2.0
// What --device means: built with or without CUDA.
#pragma once

#include <memory>

#include "cli/options.h"
#include "twell/infer/engine.h"

namespace twell::cli {

// Whether to run on the GPU: "cuda", or "auto" where there is one. InputError with the reason when
// "cuda" was asked for and cannot be had.
bool use_cuda(const CommonOptions& common);

// The checkpoint of --checkpoint on the device of --device. With "auto", a model that the GPU does
// not run or has no room for goes to the CPU, and a line on stderr says why.
// host_model: the checkpoint's, where it is in memory already; the CPU takes it.
std::unique_ptr<Engine> load_engine(const CommonOptions& common, const EnginePlan& plan,
                                    std::unique_ptr<Model> host_model = nullptr);

}  // namespace twell::cli
