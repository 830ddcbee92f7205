// SPDX-License-Identifier: Apache-2.0
// What the choice of a GPU's execution depends on: the device, the layer, the call, and what the
// layer measured so far. Plain numbers without CUDA headers.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "twell/format/activation.h"
#include "twell/ops/ffn/ffn.h"
#include "twell/ops/ffn/screened/rotated_screen.h"

namespace twell {

// The defaults are those of an H200.
struct GpuDevice {
  int compute_capability = 90;  // 10 * major + minor
  int64_t multiprocessors = 132;
  double clock_ghz = 1.98;         // highest clock of the SMs
  double bandwidth = 4.917e6;      // bytes per microsecond of device memory, by its clock and width
  int64_t shared_memory = 232448;  // bytes that a CTA may have
  // Multiplications and additions in bf16 per SM and clock, with f32 sums: of mma.sync, and of the
  // instructions that dense GEMMs of the GPU use.
  double mma_flops = 2560.0, gemm_flops = 4096.0;
  bool operator==(const GpuDevice&) const = default;
};

// How weights are stored. A bit each, so that an execution can state a set of them.
enum class GpuWeights : uint8_t {
  kBf16 = 1,
  kFp8 = 2,  // e4m3 with a scale per output; so is x, with a scale per token
};
inline constexpr GpuWeights kGpuWeights[] = {GpuWeights::kBf16, GpuWeights::kFp8};
std::string_view gpu_weights_name(GpuWeights weights);  // "bf16", "fp8"

// One feed-forward layer on one device. Made by gpu_ffn_layer alone, so that no caller leaves a
// property out; what only some calls have, such as a screen, is set afterwards.
struct GpuFfnLayer {
  int64_t width = 0;  // D, a multiple of 8
  int64_t ffn = 0;    // F, a multiple of 8
  bool gated = true;
  Activation activation = Activation::kRelu;
  bool biased = false;                     // the projections have biases
  GpuWeights weights = GpuWeights::kBf16;  // of w_gate, w_up and w_down
  std::optional<ScreenBound> screen;       // of its gate's 8-bit copy, if it has one
  int64_t row_tokens = 8;  // tokens whose rows of D values fit into an SM's shared memory
  GpuDevice device;
  bool operator==(const GpuFfnLayer&) const = default;
};

// A layer's properties that do not depend on a device.
struct GpuFfnShape {
  int64_t width = 0, ffn = 0;
  bool gated = true;
  Activation activation = Activation::kRelu;
  bool biased = false;
  GpuWeights weights = GpuWeights::kBf16;
};

// What the driver says of a GPU. Drivers of virtual machines may report 0 for clocks.
struct GpuProperties {
  std::string_view name;
  int compute_capability = 0;
  int64_t multiprocessors = 0;
  int64_t clock_khz = 0;
  int64_t memory_clock_khz = 0;  // of two transfers each
  int64_t memory_bus_bits = 0;
  int64_t shared_memory = 0;  // bytes that a CTA may have
};
// Clocks that are not known are those of the generation's best-known card. The rates of tensor
// cores follow from the capability, as data sheets state them, or are estimates where there are
// none; GeForce cards of 8.6, 8.9 and 12.0 have half the rate of professional ones.
GpuDevice gpu_device_of(const GpuProperties& properties);

// Tokens whose rows of this many bf16 values fit into an SM beside a skinny GEMM's ring buffers of
// weights, at most 8: layer_ops::max_tokens computes the same on the device.
int64_t gpu_row_tokens(const GpuDevice& device, int64_t width);

GpuFfnLayer gpu_ffn_layer(const GpuDevice& device, const GpuFfnShape& shape);

struct GpuFfnCall {
  int64_t tokens = 0;  // M
  FfnPolicy policy = FfnPolicy::kAuto;
  bool norm = false;         // the RMS norm of x belongs to the call, and x may be y
  bool counts_rows = false;  // active neurons are counted per token
  bool operator==(const GpuFfnCall&) const = default;
};

}  // namespace twell
