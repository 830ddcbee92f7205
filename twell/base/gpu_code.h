// SPDX-License-Identifier: Apache-2.0
// Which of this build's machine code a GPU runs, and what the build takes a GPU for. Plain
// arithmetic without CUDA headers; a compute capability is 10 * major + minor.
//
// A GPU runs machine code made for its major number and a minor number that is not above its own
// (CUDA programming guide, "Compute capability and binary compatibility"); for all others the
// driver compiles PTX when the program starts. CMake's TWELL_CUDA_ARCHITECTURES lists the
// capabilities with machine code of portable kernels, of which there is PTX for 8.0 too. Kernels of
// Hopper
// (*_sm90.cu) have machine code for 9.0 alone, which runs on no other GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace twell {

// A build with -DTWELL_PORTABLE=ON has no kernels of Hopper and takes every GPU for one of
// capability 8.0 that gives a CTA 99 KiB of shared memory, as those of 8.6, 8.9 and 12.0 do: so a
// Hopper GPU can test what the others run.
#ifdef TWELL_PORTABLE
inline constexpr bool kPortableBuild = true;
#else
inline constexpr bool kPortableBuild = false;
#endif
inline constexpr int kPtxCapability = 80;
inline constexpr int kPortableSharedMemory = 99 * 1024;

constexpr int seen_capability(int capability, bool portable = kPortableBuild) {
  return portable ? std::min(capability, kPtxCapability) : capability;
}
constexpr int seen_shared_memory(int bytes, bool portable = kPortableBuild) {
  return portable ? std::min(bytes, kPortableSharedMemory) : bytes;
}

// The capability among `built` whose machine code a GPU runs; 0 where there is none.
constexpr int native_code(int capability, std::span<const int> built) {
  int best = 0;
  for (const int code : built) {
    if (code / 10 == capability / 10 && code <= capability) best = std::max(best, code);
  }
  return best;
}

// Whether kernels wait on the device for the one in front of them, which programmatic dependent
// launch requires of them, where they were compiled for these architectures: from 9.0 on. A GPU for
// which there is no machine code runs the PTX of 8.0, whose kernels do not wait.
// compiled: nvcc's __CUDA_ARCH_LIST__, 100 * major + 10 * minor each.
constexpr bool has_dependent_launch(int capability, std::span<const int> compiled) {
  int best = 0;
  for (const int arch : compiled) {
    if (arch / 100 == capability / 10 && arch / 10 <= capability) best = std::max(best, arch / 10);
  }
  return best >= 90;
}

// What the driver says of a kernel: cudaFuncAttributes.
struct GpuCode {
  int binary = 0;  // capability of the machine code that runs,
  int ptx = 0;     // and of the PTX that it was made of
};

// "native code for 8.6", or "PTX for 8.0, which the driver compiles for 12.0".
// built: capabilities with machine code.
std::string gpu_code_text(const GpuCode& code, std::span<const int> built);

std::string gpu_capability_text(int capability);  // "8.6"

}  // namespace twell
