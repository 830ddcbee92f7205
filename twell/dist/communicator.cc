// SPDX-License-Identifier: Apache-2.0
#include "twell/dist/communicator.h"

#include <algorithm>

namespace twell {

PieceRange piece_of(int64_t size, int ranks, int rank) {
  constexpr int64_t kUnit = 8;
  const int64_t units = (size + kUnit - 1) / kUnit;
  const int64_t piece = (units + ranks - 1) / ranks * kUnit;
  return {std::min(size, piece * rank), std::min(size, piece * (rank + 1))};
}

std::vector<double> Communicator::all_gather_values(std::span<const double> mine) {
  std::vector<double> all(mine.size() * static_cast<size_t>(size()));
  all_gather_bytes(std::as_bytes(mine), std::as_writable_bytes(std::span(all)));
  return all;
}

}  // namespace twell
