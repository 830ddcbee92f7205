// SPDX-License-Identifier: Apache-2.0
// The energy counter of an NVIDIA GPU, through the driver's management library (NVML). It is loaded
// at run time, so that a program also starts without it.
#pragma once

#include <memory>
#include <string>

namespace twell {

class GpuEnergyMeter {
 public:
  // pci_bus_id: as returned by cudaDeviceGetPCIBusId.
  explicit GpuEnergyMeter(const std::string& pci_bus_id);
  ~GpuEnergyMeter();
  GpuEnergyMeter(const GpuEnergyMeter&) = delete;
  GpuEnergyMeter& operator=(const GpuEnergyMeter&) = delete;

  // Why it cannot be read; empty when it can.
  const std::string& unavailable() const { return unavailable_; }
  // Joules since the driver was loaded. The counter advances every some tens of milliseconds, so
  // measure differences over a second or more. 0 when unavailable.
  double joules() const;

 private:
  struct Library;
  std::unique_ptr<Library> library_;
  std::string unavailable_;
};

}  // namespace twell
