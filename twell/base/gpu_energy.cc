// SPDX-License-Identifier: Apache-2.0
#include "twell/base/gpu_energy.h"

#include <dlfcn.h>

namespace twell {

// The four functions used, with the signatures of NVML's C interface, which is stable.
struct GpuEnergyMeter::Library {
  using Device = void*;
  void* handle = nullptr;
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*device_by_bus_id)(const char*, Device*) = nullptr;
  int (*total_energy)(Device, unsigned long long*) = nullptr;  // millijoules
  Device device = nullptr;
  bool ready = false;

  template <typename Function>
  bool find(Function& function, const char* name) const {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    return function != nullptr;
  }
  ~Library() {
    if (ready) shutdown();
    if (handle != nullptr) dlclose(handle);
  }
};

GpuEnergyMeter::GpuEnergyMeter(const std::string& pci_bus_id)
    : library_(std::make_unique<Library>()) {
  Library& nvml = *library_;
  nvml.handle = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (nvml.handle == nullptr) {
    unavailable_ = "libnvidia-ml.so.1 (NVML) was not found";
    return;
  }
  if (!nvml.find(nvml.init, "nvmlInit_v2") || !nvml.find(nvml.shutdown, "nvmlShutdown") ||
      !nvml.find(nvml.device_by_bus_id, "nvmlDeviceGetHandleByPciBusId_v2") ||
      !nvml.find(nvml.total_energy, "nvmlDeviceGetTotalEnergyConsumption") || nvml.init() != 0) {
    unavailable_ = "NVML could not be initialised";
    return;
  }
  nvml.ready = true;
  unsigned long long ignored = 0;
  if (nvml.device_by_bus_id(pci_bus_id.c_str(), &nvml.device) != 0 ||
      nvml.total_energy(nvml.device, &ignored) != 0) {
    unavailable_ = "the GPU at " + pci_bus_id + " has no energy counter that NVML can read";
  }
}

GpuEnergyMeter::~GpuEnergyMeter() = default;

double GpuEnergyMeter::joules() const {
  unsigned long long millijoules = 0;
  if (unavailable_.empty()) library_->total_energy(library_->device, &millijoules);
  return static_cast<double>(millijoules) * 1e-3;
}

}  // namespace twell
