// SPDX-License-Identifier: Apache-2.0
// What the CPU and the CUDA kernels of the PyTorch ops share: checks of their operands, and the
// size of the tensor that forward keeps for backward.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "python/csrc/plan.h"

// The namespace of the ops: twell in the package. A kernel of the Hub has another one in every
// build, so that several can be loaded together.
#ifndef TORCH_EXTENSION_NAME
#define TORCH_EXTENSION_NAME twell
#endif
#define TWELL_TORCH_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define TWELL_TORCH_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)

namespace twell::python {

inline constexpr int64_t kCounts = 4;  // int64: tokens, nnz, union neurons, most of one token

// Shape of the layer and the call. InputError in one line where operands do not fit together:
// x [..., D], weights [F, D], all of `dtype` and on one device.
LayerShape check_layer(const torch::stable::Tensor& x,
                       const std::optional<torch::stable::Tensor>& w_gate,
                       const torch::stable::Tensor& w_up, const torch::stable::Tensor& w_down,
                       const std::string& activation, torch::headeronly::ScalarType dtype);
void check_gradients(const torch::stable::Tensor& d_y,
                     const std::optional<torch::stable::Tensor>& d_l1,
                     const torch::stable::Tensor& x);
// InputError unless `saved` has the bytes of saved_bytes() on the CPU or a GPU.
void check_saved(const torch::stable::Tensor& saved, const LayerShape& shape, bool cuda,
                 int64_t execution, int64_t nnz, int64_t union_neurons);

// A tensor that is not initialised, contiguous, on the device of `like`. Costs a fraction of
// PyTorch's new_empty, which the stable ABI finds by name and calls with a boxed stack.
torch::stable::Tensor made(const torch::stable::Tensor& like, std::span<const int64_t> sizes,
                           torch::headeronly::ScalarType dtype);
// The same, of the shape and dtype of t.
torch::stable::Tensor made_like(const torch::stable::Tensor& t);

// Bytes that forward keeps for backward. nnz, union_neurons: what the GPU's hybrid execution
// expects per token and per tile of 128 tokens (negative: unknown); the others ignore them.
int64_t saved_bytes(const LayerShape& shape, bool cuda, int64_t execution, int64_t nnz,
                    int64_t union_neurons);
int64_t saved_bytes_cpu(const LayerShape& shape);
int64_t saved_bytes_cuda(const LayerShape& shape, int64_t execution, int64_t nnz,
                         int64_t union_neurons);

}  // namespace twell::python
