// SPDX-License-Identifier: Apache-2.0
// Launch of the Hopper gate GEMM: what the host side passes to the kernel.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/ops/matmul/paired_gemm_sm90.h"

namespace twell {

// By what a kernel behind the gate GEMM can follow it. Device memory, all of which is zeroed before
// the GEMM begins; words[p] then counts the CTAs whose part of what GatePhases says of p is packed.
struct GateProgress {
  static constexpr int kPhases = 4;
  int32_t* words = nullptr;  // null: not wanted
  int64_t size = 0;          // at least kPhases; the rest is the caller's own
};
struct GatePhases {
  int ctas;
  int tokens[GateProgress::kPhases];  // once words[p] is `ctas`, all tokens below are packed; the
                                      // last one is M
};

}  // namespace twell

namespace twell::gate_gemm {

using paired_gemm::kCluster;
using paired_gemm::kTileK;
using paired_gemm::kTileM;
using paired_gemm::kTileN;  // the TwELL tile

// Where packed tiles go: a TwellPacked of T = 256 with its derived sizes, which the kernel would
// otherwise divide for.
struct PackTarget {
  uint32_t* words;   // [M, tiles, slots]
  uint32_t* spill;   // [M * tiles, 128] pairs of bf16
  int32_t* row_nnz;  // [M]
  int tokens;        // M
  int ffn;           // F
  int tiles;
  int slots;  // words per tile
};

struct Params {
  CUtensorMap map_x;       // [M, D], boxes of kTileM rows
  CUtensorMap map_x_half;  // the same, boxes of kTileM / 2 rows
  CUtensorMap map_w;       // [F, D], boxes of kTileN / kCluster rows
  PackTarget out;
  int k_steps;               // ceil(D / kTileK)
  int m_pairs;               // cluster tiles along M
  int n_tiles;               // along F
  int whole;                 // cluster tiles computed whole; the ones behind them are cut in two,
                             // and then a cluster has at most one half
  int group;                 // cluster tiles along M that share a sweep over F, for L2 reuse
  const int32_t* condition;  // null, or what must not be 0
  int32_t* packed;           // GateProgress::words
};

// Clears row_nnz and the words behind params.packed first. ctas is a multiple of kCluster.
cudaError_t launch_gate_gemm_sm90(const Params& params, int64_t progress_words, int ctas,
                                  cudaStream_t stream);

}  // namespace twell::gate_gemm
