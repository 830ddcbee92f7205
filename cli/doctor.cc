// SPDX-License-Identifier: Apache-2.0
// twell doctor: the machine's features, and whether this build can use them.
#include <dnnl_version.h>
#include <fmt/core.h>
#include <hwy/targets.h>
#include <sys/sysinfo.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "cli/bench.h"
#include "cli/commands.h"
#include "cli/text_layout.h"
#include "twell/base/cpu_limit.h"
#include "twell/base/error.h"
#include "twell/ops/ffn/gpu_report.h"
#include "twell/ops/ffn/registry.h"
#include "twell/ops/matmul/compute.h"
#ifdef TWELL_HAVE_CUDA
#include <cuda_runtime_api.h>

#include "twell/base/cuda.h"
#include "twell/gpu/machine_code_cuda.h"
#include "twell/gpu/measure_device_cuda.h"
#include "twell/ops/ffn/ffn_cuda.h"
#endif
#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace twell::cli {
namespace {

// The instruction sets that Highway can dispatch to on this machine, best first.
std::vector<std::string> simd_targets() {
  std::vector<std::string> names;
  for (int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    names.emplace_back(hwy::TargetName(left & -left));
  }
  return names;
}

// Instructions for products of bf16, which --compute bf16 uses, and of signed bytes.
constexpr const char* kNarrow[] = {"avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16",
                                   "amx_int8"};

// {name of kNarrow: whether the processor has it}
nlohmann::json narrow_products() {
  nlohmann::json report;
  for (const char* name : kNarrow) report[name] = false;
#ifdef __x86_64__
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) != 0) {
    report["avx512_vnni"] = (c >> 11 & 1) != 0;
    report["amx_bf16"] = (d >> 22 & 1) != 0;
    report["amx_int8"] = (d >> 25 & 1) != 0;
  }
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) {
    report["avx_vnni"] = (a >> 4 & 1) != 0;
    report["avx512_bf16"] = (a >> 5 & 1) != 0;
  }
#endif
  return report;
}

// {"status": text, "devices": [{"name", "compute_capability", "memory_gib", "machine_code",
// "executions": [those that auto weighs], "lines": [the same for people]}]}
nlohmann::json cuda_report() {
  nlohmann::json report = {{"status", ""}, {"devices", nlohmann::json::array()}};
#ifdef TWELL_HAVE_CUDA
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    report["status"] =
        fmt::format("built for CUDA {}.{}; no usable device: {}", CUDART_VERSION / 1000,
                    CUDART_VERSION % 1000 / 10, cudaGetErrorString(error));
    return report;
  }
  report["status"] = fmt::format("built for CUDA {}.{}, {} device(s)", CUDART_VERSION / 1000,
                                 CUDART_VERSION % 1000 / 10, count);
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    GpuReport gpu{.compute_capability = 10 * properties.major + properties.minor,
                  .built = built_machine_code()};
    if (cudaSetDevice(i) != cudaSuccess || machine_code_cuda(gpu.code) != cudaSuccess)
      gpu.code = {};
    report["devices"].push_back(
        {{"name", properties.name},
         {"compute_capability", gpu_capability_text(gpu.compute_capability)},
         {"memory_gib", static_cast<double>(properties.totalGlobalMem) / (1 << 30)},
         {"machine_code", gpu_machine_code(gpu)},
         {"executions", gpu_auto_executions(gpu)},
         {"lines", gpu_report_lines(gpu)}});
  }
#elif defined(TWELL_CUDA_OFF)
  report["status"] = "not part of this build (it was configured with -DTWELL_CUDA=OFF)";
#else
  report["status"] = "not part of this build (no CUDA toolkit was found when it was configured)";
#endif
  return report;
}

nlohmann::json examine() {
  struct sysinfo memory {};
  ::sysinfo(&memory);
  const double gib = static_cast<double>(memory.mem_unit) / (1 << 30);
  return {
      {"version", TWELL_VERSION},
      {"cpu", cpu_name()},
      {"cores", available_threads()},
      {"memory_gib", static_cast<double>(memory.totalram) * gib},
      {"simd", simd_targets()},
      {"narrow_products", narrow_products()},
      {"compute_bf16", has_bf16_products()},
      {"int8_weights", "few tokens in integers, more widened to f32, " + simd_targets().front()},
      {"onednn",
       fmt::format("{}.{}.{}", DNNL_VERSION_MAJOR, DNNL_VERSION_MINOR, DNNL_VERSION_PATCH)},
      {"cuda", cuda_report()}};
}

void print(const nlohmann::json& report) {
  std::string simd;
  for (const auto& target : report["simd"]) {
    simd += (simd.empty() ? "" : ", ") + target.get<std::string>();
  }
  fmt::print("twell        {}\n", report["version"].get<std::string>());
  fmt::print("processor    {}\n", report["cpu"].get<std::string>());
  fmt::print("cores        {}\n", report["cores"].get<int>());
  fmt::print("memory       {:.1f} GiB\n", report["memory_gib"].get<double>());
  fmt::print("vector sets  {}\n", simd);
  std::string narrow;
  for (const auto& [name, has] : report["narrow_products"].items()) {
    if (has.get<bool>()) narrow += (narrow.empty() ? "" : ", ") + name;
  }
  fmt::print("bf16, int8   the processor has {}; --compute bf16 {}\n",
             narrow.empty() ? "no products of them" : narrow,
             report["compute_bf16"].get<bool>() ? "works" : "is refused");
  fmt::print("int8 weights {}\n", report["int8_weights"].get<std::string>());
  fmt::print("oneDNN       {}\n", report["onednn"].get<std::string>());
  const nlohmann::json& cuda = report["cuda"];
  constexpr size_t kColumn = 13;  // where values begin
  fmt::print("CUDA         {}\n", wrapped(cuda["status"].get<std::string>(), kColumn, kColumn,
                                          terminal_columns(stdout, 80)));
  for (const auto& device : cuda["devices"]) {
    fmt::print("  {}: compute capability {}, {:.1f} GiB\n", device["name"].get<std::string>(),
               device["compute_capability"].get<std::string>(), device["memory_gib"].get<double>());
    for (const auto& line : device["lines"]) {
      fmt::print("    {}\n", wrapped(line.get<std::string>(), 4, 6, terminal_columns(stdout, 80)));
    }
  }
}

// Measures each GPU and says whether the costs of executions hold on it.
int calibrate() {
#ifdef TWELL_HAVE_CUDA
  int count = 0;
  TWELL_CUDA_CHECK(cudaGetDeviceCount(&count));
  for (int i = 0; i < count; ++i) {
    TWELL_CUDA_CHECK(cudaSetDevice(i));
    const CudaStream stream;
    const CudaContext ctx(stream.get());
    DeviceFigures figures;
    TWELL_CUDA_CHECK(measure_device_cuda(stream.get(), figures));
    fmt::print("{}\n", ctx.device_name());
    for (const std::string& line :
         gpu_calibration_lines(gpu_device(ctx), {.bandwidth = figures.bandwidth,
                                                .mma_flops = figures.mma_flops,
                                                .launch_us = figures.launch_us})) {
      fmt::print("  {}\n", wrapped(line, 2, 4, terminal_columns(stdout, 80)));
    }
  }
  return kExitOk;
#else
  throw InputError("doctor --calibrate measures GPUs, and this build has no CUDA");
#endif
}

int run_doctor(bool json, bool executions, bool calibrates) {
  if (calibrates) return calibrate();
  if (executions) {
    fmt::print("{}", gpu_ffn_registry_table());
    return kExitOk;
  }
  const nlohmann::json report = examine();
  if (json) {
    fmt::print("{}\n", report.dump());
  } else {
    print(report);
  }
  return kExitOk;
}

}  // namespace

void add_doctor_command(Command& root) {
  auto json = std::make_shared<bool>(false);
  auto executions = std::make_shared<bool>(false);
  auto calibrates = std::make_shared<bool>(false);
  Command& command = root.add("doctor", "What this machine offers and this build can use");
  command.runs(
      [json, executions, calibrates] { return run_doctor(*json, *executions, *calibrates); });
  command.flag("--json", json.get(), "Print one JSON object");
  command.flag("--executions", executions.get(),
               "Print how GPUs run feed-forward layers, and what each execution takes");
  command.flag("--calibrate", calibrates.get(),
               "Measure the GPUs, and print whether the costs that choose executions hold on them");
}

}  // namespace twell::cli
