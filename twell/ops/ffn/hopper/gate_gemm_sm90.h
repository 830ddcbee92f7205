// SPDX-License-Identifier: Apache-2.0
// Launch of the Hopper gate GEMM.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/ops/matmul/paired_gemm_sm90.h"

namespace twell {

// Progress of the gate GEMM, so that the next kernel can start on packed tiles. Device memory,
// zeroed before the GEMM starts; words[p] counts CTAs that have packed all of phase p (GatePhases).
struct GateProgress {
  static constexpr int kPhases = 4;
  int32_t* words = nullptr;  // null: not published
  int64_t size = 0;          // at least kPhases; the rest belongs to the caller
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

// Output: a TwellPacked with T = 256, with derived sizes that save divisions in the kernel.
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
  int whole;                 // cluster tiles computed whole; later ones are cut in two, and
                             // and then a cluster has at most one half
  int group;                 // cluster tiles along M that share a sweep over F, for L2 reuse
  const int32_t* condition;  // the kernel runs unless this holds 0; null: it runs
  int32_t* packed;           // GateProgress::words
};

// Clears row_nnz and the words of params.packed first. ctas is a multiple of kCluster.
cudaError_t launch_gate_gemm_sm90(const Params& params, int64_t progress_words, int ctas,
                                  cudaStream_t stream);

}  // namespace twell::gate_gemm
