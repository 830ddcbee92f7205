// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/gpu_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "twell/ops/ffn/registry.h"

namespace twell {
namespace {

constexpr int kTestedCapability = 90;  // H100 and H200

template <typename Takes>
std::vector<std::string> names_of(const GpuReport& report, const Takes& takes) {
  const int capability = seen_capability(report.compute_capability, report.portable);
  std::vector<std::string> names;
  for (const GpuFfnExecution& execution : gpu_ffn_registry()) {
    const GpuFfnLimits& limits = execution.limits;
    if (capability >= limits.least_capability && capability <= limits.most_capability &&
        takes(execution, capability == kTestedCapability)) {
      names.emplace_back(execution.name);
    }
  }
  return names;
}

}  // namespace

std::string gpu_machine_code(const GpuReport& report) {
  std::string text = gpu_code_text(report.code, report.built);
  if (report.portable) {
    text += fmt::format("; a portable build, which takes it for {}",
                        gpu_capability_text(seen_capability(report.compute_capability, true)));
  }
  return text;
}

std::vector<std::string> gpu_executions(const GpuReport& report) {
  return names_of(report, [](const GpuFfnExecution&, bool) { return true; });
}

std::vector<std::string> gpu_auto_executions(const GpuReport& report) {
  return names_of(report, [](const GpuFfnExecution& execution, bool hopper) {
    return !(execution.only_named_on_hopper && hopper);
  });
}

std::vector<std::string> gpu_report_lines(const GpuReport& report) {
  const std::vector<std::string> all = gpu_executions(report),
                                 automatic = gpu_auto_executions(report);
  std::vector<std::string> by_name;
  std::ranges::copy_if(all, std::back_inserter(by_name), [&](const std::string& name) {
    return std::ranges::find(automatic, name) == automatic.end();
  });
  std::vector<std::string> lines = {fmt::format("kernels: {}", gpu_machine_code(report))};
  if (seen_capability(report.compute_capability, report.portable) < kPtxCapability) {
    lines = {"kernels: none; they need compute capability 8.0 or later"};
    return lines;
  }
  lines.push_back(fmt::format("feed-forward layers: {}{}{}", fmt::join(automatic, ", "),
                              by_name.empty() ? "" : "; by name alone ", fmt::join(by_name, ", ")));
  lines.push_back(
      report.compute_capability == kTestedCapability
          ? "training: dense and hybrid"
          : "training: dense and hybrid. No GPU of this kind has run TwELL's tests yet");
  return lines;
}

std::vector<std::string> gpu_calibration_lines(const GpuDevice& device,
                                               const GpuFigures& measured) {
  // Memory is read at up to 0.95 of what its clock says; kernels for which costs hold reach 0.81.
  // Tensor cores reach their rate, but for the clock, which falls under load.
  constexpr double kLeastBandwidth = 0.8, kLeastFlops = 0.75, kMost = 1.1;
  const double flops =
      device.mma_flops * static_cast<double>(device.multiprocessors) * device.clock_ghz * 1e3;
  const double bandwidth_share = measured.bandwidth / device.bandwidth;
  const double flops_share = measured.mma_flops / flops;
  const auto holds = [](double share, double least) { return share >= least && share <= kMost; };
  std::vector<std::string> lines = {
      fmt::format("device memory: {:.0f} GB/s read, costs take it for {:.0f} ({:.2f})",
                  measured.bandwidth * 1e-3, device.bandwidth * 1e-3, bandwidth_share),
      fmt::format("tensor cores by mma.sync: {:.0f} TFLOP/s in bf16, costs take them for {:.0f} "
                  "({:.2f})",
                  measured.mma_flops * 1e-6, flops * 1e-6, flops_share),
      fmt::format("launches: {:.1f} us from kernel to kernel", measured.launch_us)};
  if (holds(bandwidth_share, kLeastBandwidth) && holds(flops_share, kLeastFlops)) {
    lines.push_back("the costs of executions hold on this GPU");
  } else {
    lines.push_back(
        "this GPU is not what the costs of executions take it for: --ffn auto may pick one that is "
        "not the fastest; compare with --ffn dense, and name the faster one");
  }
  return lines;
}

}  // namespace twell
