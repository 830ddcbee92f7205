// SPDX-License-Identifier: Apache-2.0
// How a medium batch is cut into pieces for the SMs. Plain arithmetic, for the kernels' launches
// and for their cost (costs.h).
#pragma once

#include <algorithm>
#include <cstdint>

namespace twell {

struct MediumBatchSchedule {
  static constexpr int64_t kTileTokens = 128;
  static constexpr int64_t kMostSegments = 384;  // one per thread of a CTA

  int64_t tiles = 0;        // of 128 tokens
  int64_t neurons = 0;      // gate: neurons of a CTA, which are a segment,
  int64_t segments = 0;     // segments of F,
  int64_t rounds = 0;       // and rounds of CTAs on the device
  int64_t up_split = 0;     // up: CTAs of a cluster, which divide the width,
  int64_t up_clusters = 0;  // and clusters of a tile
  int64_t columns = 0;      // down: columns of y of a CTA,
  int64_t down_split = 0;   // and CTAs of a cluster, which divide the union

  MediumBatchSchedule(int64_t tokens, int64_t width, int64_t ffn, int64_t sms) {
    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    tiles = std::max<int64_t>(ceil_div(tokens, kTileTokens), 1);
    int64_t least = 0;
    for (const int64_t of : {48, 64, 80, 96, 128, 160, 176, 192}) {
      const int64_t count = ceil_div(ffn, of), turns = ceil_div(tiles * count, sms);
      // A round has a fixed share: latencies, and x, which is read whatever the neurons.
      const int64_t cost = turns * (of + 64);
      if (count > kMostSegments || (least != 0 && cost >= least)) continue;
      least = cost;
      neurons = of;
      segments = count;
      rounds = turns;
    }
    // Clusters of four at one time: an H200 runs no more than 31, since GPCs have 16 or 18 SMs.
    up_split = tiles <= 3 ? 4 : tiles <= 12 ? 2 : 1;
    const int64_t clusters = up_split == 4 ? sms / 4 - 3 : sms / up_split;
    up_clusters = std::max<int64_t>(clusters / tiles, 1);
    columns = tiles * ceil_div(width, 64) <= sms ? 64 : 128;
    down_split = 2 * tiles * ceil_div(width, columns) <= sms ? 2 : 1;
  }
};

}  // namespace twell
