// SPDX-License-Identifier: Apache-2.0
// For tests: tokens at positions across a table, whose keys and values go into a cache in a
// different order, on host and device.
#pragma once

#include <vector>

#include "twell/base/cuda_testing.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/rope/rope.h"
#include "twell/ops/rope/rope_cuda.h"

namespace twell {

struct RopeOperands {
  int64_t tokens, heads, kv_heads, head_dim;
  int64_t q_columns = heads * head_dim, kv_columns = kv_heads * head_dim;
  int64_t rotated = q_columns + kv_columns, columns = rotated + kv_columns;
  RopeTable table{300, head_dim, 10000.0};
  std::vector<int32_t> positions;
  std::vector<int64_t> cache_rows;
  DeviceBuffer<float> cos, sin;
  DeviceBuffer<int32_t> device_positions;
  DeviceBuffer<int64_t> device_cache_rows;
  DeviceBuffer<__nv_bfloat16> keys, values;  // the cache, poisoned

  RopeOperands(int64_t m, int64_t h, int64_t h_kv, int64_t hd)
      : tokens(m),
        heads(h),
        kv_heads(h_kv),
        head_dim(hd),
        cos(upload(std::vector<float>(table.cos.span().begin(), table.cos.span().end()))),
        sin(upload(std::vector<float>(table.sin.span().begin(), table.sin.span().end()))),
        keys(poisoned<__nv_bfloat16>(m * kv_columns)),
        values(poisoned<__nv_bfloat16>(m * kv_columns)) {
    for (int64_t i = 0; i < m; ++i) {
      positions.push_back(static_cast<int32_t>((i * 37 + 5) % 300));
      cache_rows.push_back(m - 1 - i);
    }
    device_positions = upload(positions);
    device_cache_rows = upload(cache_rows);
  }

  RopeCuda in_place(__nv_bfloat16* qkv) const {
    return {.tokens = tokens,
            .heads = heads,
            .kv_heads = kv_heads,
            .head_dim = head_dim,
            .cos = cos.data(),
            .sin = sin.data(),
            .positions = device_positions.data(),
            .qkv = qkv};
  }
  RopeCuda into_cache(__nv_bfloat16* qkv) const {
    RopeCuda problem = in_place(qkv);
    problem.keys = keys.data();
    problem.values = values.data();
    problem.cache_rows = device_cache_rows.data();
    return problem;
  }
  // [M, columns]: the queries of qkv [M, columns], keys and values from the cache.
  std::vector<float> gathered(std::vector<float> qkv) const {
    const auto k = to_floats(download(keys)), v = to_floats(download(values));
    for (int64_t m = 0; m < tokens; ++m) {
      const int64_t from = cache_rows[static_cast<size_t>(m)] * kv_columns;
      for (int64_t i = 0; i < kv_columns; ++i) {
        const auto to = static_cast<size_t>(m * columns + q_columns + i);
        qkv[to] = k[static_cast<size_t>(from + i)];
        qkv[to + static_cast<size_t>(kv_columns)] = v[static_cast<size_t>(from + i)];
      }
    }
    return qkv;
  }
};

}  // namespace twell
