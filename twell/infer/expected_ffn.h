// SPDX-License-Identifier: Apache-2.0
// The executions that a device's cost model would choose for a layer's activity, and the expected
// speed-up over dense.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string_view>

#include "twell/base/context.h"
#include "twell/format/statistics.h"
#include "twell/model/config.h"
#include "twell/ops/ffn/ffn.h"
#include "twell/ops/ffn/registry.h"

namespace twell {

// The whole FFN of one layer, including its gate projection, under the cost model of ops/ffn.
struct ExpectedFfn {
  std::map<FfnExecution, int64_t> runs;  // how often each is the cheapest
  double dense_cost = 0.0;               // sum over all runs, in a device-specific unit
  double cost = 0.0;                     // the same with the cheapest execution of each run

  FfnExecution execution() const;  // the most frequent
  double speedup() const { return cost == 0.0 ? 1.0 : dense_cost / cost; }
  ExpectedFfn& operator+=(const ExpectedFfn& other);
};

class ExecutionCosts {
 public:
  virtual ~ExecutionCosts() = default;
  virtual std::string_view device() const = 0;  // "CPU", "GPU"
  // together: one run for all tokens [M] of a batch; one_by_one: one run per token.
  virtual ExpectedFfn together(const Pattern& fired) const = 0;
  virtual ExpectedFfn one_by_one(const Pattern& fired) const = 0;
};

// The context must outlive the result; the costs depend on its number of threads.
std::unique_ptr<ExecutionCosts> cpu_costs(Context& ctx, const ModelConfig& config);
// Computed on the host; needs no GPU.
std::unique_ptr<ExecutionCosts> gpu_costs(const ModelConfig& config, const GpuDevice& device);

}  // namespace twell
