// SPDX-License-Identifier: Apache-2.0
#include "twell/train/stated_peak.h"

namespace twell {

double stated_peak_flops(std::string_view device_name) {
  struct Row {
    std::string_view part;  // of the name; the first that fits counts
    double teraflops;
  };
  // Data sheets, without structured sparsity.
  static constexpr Row kRows[] = {{"H200 NVL", 835.5}, {"H100 NVL", 835.5}, {"H100 PCIe", 756.0},
                                  {"GH200", 989.4},    {"H200", 989.4},     {"H100", 989.4},
                                  {"A100", 312.0},     {"A800", 312.0},     {"H800", 989.4}};
  for (const Row& row : kRows) {
    if (device_name.find(row.part) != std::string_view::npos) return row.teraflops * 1e12;
  }
  return 0.0;
}

}  // namespace twell
