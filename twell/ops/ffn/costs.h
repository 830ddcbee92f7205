// SPDX-License-Identifier: Apache-2.0
// The cost model of a GPU's executions, fitted to measurements: estimated microseconds of one call
// of a layer. bench/fit_gpu_costs.py fits the constants. Plain arithmetic: the same on every host.
#pragma once

#include <cstdint>

#include "twell/ops/ffn/activity.h"
#include "twell/ops/ffn/gpu_layer.h"

namespace twell::ffn_costs {

double dense_rows(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);
double dense_batch(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);
double dense_few_bytes(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);
double dense_gemms(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);
double decode_rows(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);
double row_stream(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);
double small_batch(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);
double small_batch_bytes(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);
double medium_batch(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);
double tile_union(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);
double portable_rows(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);
double portable_batch(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);
double portable_union(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);
double screened(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);
double row_fused(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);

// Below this share of the dense cost an execution runs: estimates are off by some percent, less
// where unions are counted.
double sparse_share(int64_t tokens, const LayerActivity& activity);
double medium_batch_share(int64_t tokens, const LayerActivity& activity);
double tile_union_share(int64_t tokens, const LayerActivity& activity);

// Neurons that are active for any of so many tokens, by how unions were seen to grow.
double expected_union(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);

}  // namespace twell::ffn_costs
