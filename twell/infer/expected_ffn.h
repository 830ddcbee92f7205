// SPDX-License-Identifier: Apache-2.0
// What a device's cost model expects of a layer's sparsity: the executions it would choose, and the
// speed-up over dense.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>

#include "twell/base/context.h"
#include "twell/format/statistics.h"
#include "twell/model/config.h"
#include "twell/ops/ffn/dispatch.h"
#include "twell/ops/ffn/ffn.h"

namespace twell {

// The whole FFN of one layer, its gate projection included, as the cost model sees it (ops/ffn).
struct ExpectedFfn {
  std::array<int64_t, kFfnExecutions> runs = {};  // how often each FfnExecution is the cheapest
  double dense_cost = 0.0;                        // of all runs, in a unit of the device
  double cost = 0.0;                              // with the cheapest execution of each

  FfnExecution execution() const;  // the most frequent
  double speedup() const { return cost == 0.0 ? 1.0 : dense_cost / cost; }
  ExpectedFfn& operator+=(const ExpectedFfn& other);
};

class ExecutionCosts {
 public:
  virtual ~ExecutionCosts() = default;
  virtual std::string_view device() const = 0;  // "CPU", "GPU"
  // Of the tokens [M] of a batch that goes through the layer, and of each of them by itself.
  virtual ExpectedFfn together(const Pattern& fired) const = 0;
  virtual ExpectedFfn one_by_one(const Pattern& fired) const = 0;
};

// The context must outlive it: its threads are part of the answer.
std::unique_ptr<ExecutionCosts> cpu_costs(Context& ctx, const ModelConfig& config);
// Plain arithmetic, needs no GPU.
std::unique_ptr<ExecutionCosts> gpu_costs(const ModelConfig& config, const GpuDevice& device);

}  // namespace twell
