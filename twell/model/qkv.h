// SPDX-License-Identifier: Apache-2.0
// The rows of the stacked query, key and value projection, cut into their parts. Internal to model.
#pragma once

#include "twell/base/matrix.h"
#include "twell/model/config.h"

namespace twell {

struct QkvViews {
  MatrixF q;   // [M, H * hd]
  MatrixF k;   // [M, H_kv * hd]
  MatrixF v;   // [M, H_kv * hd]
  MatrixF qk;  // [M, (H + H_kv) * hd], the heads that are rotated
};

inline int64_t qkv_width(const ModelConfig& config) {
  return config.q_width() + 2 * config.kv_width();
}

// The heads that are rotated, and normalised where heads have norms.
inline int64_t qk_width(const ModelConfig& config) { return config.q_width() + config.kv_width(); }

// qkv [M, (H + 2 * H_kv) * hd]
inline QkvViews split_qkv(const ModelConfig& config, MatrixF qkv) {
  const int64_t q = config.q_width(), kv = config.kv_width();
  return {.q = {qkv.data, qkv.rows, q, qkv.stride},
          .k = {qkv.data + q, qkv.rows, kv, qkv.stride},
          .v = {qkv.data + q + kv, qkv.rows, kv, qkv.stride},
          .qk = {qkv.data, qkv.rows, q + kv, qkv.stride}};
}

}  // namespace twell
