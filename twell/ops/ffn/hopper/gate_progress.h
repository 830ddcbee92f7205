// SPDX-License-Identifier: Apache-2.0
// How a kernel on the GPU follows the gate GEMM in front of it, tokens by tokens.
#pragma once

#include <cstdint>

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
