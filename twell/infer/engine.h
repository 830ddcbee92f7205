// SPDX-License-Identifier: Apache-2.0
// A model ready to run on one device: what commands see of the difference between CPU and GPU.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "twell/base/context.h"
#include "twell/infer/session.h"
#include "twell/model/weights.h"

namespace twell {

class Engine {
 public:
  virtual ~Engine() = default;
  virtual const ModelConfig& config() const = 0;
  virtual std::string device() const = 0;  // for people: "CPU (8 threads)", "NVIDIA H200"
  // The engine outlives its sessions.
  virtual std::unique_ptr<Session> session(const SessionOptions& options) = 0;
};

class EngineCpu : public Engine {
 public:
  // threads = 0: every core. InputError on any fault of the checkpoint.
  EngineCpu(const std::filesystem::path& checkpoint, int threads);

  const ModelConfig& config() const override { return model_->config; }
  std::string device() const override;
  std::unique_ptr<Session> session(const SessionOptions& options) override;

 private:
  Context ctx_;
  std::unique_ptr<Model> model_;
};

}  // namespace twell
