// SPDX-License-Identifier: Apache-2.0
// A plan is what one feed-forward layer keeps between calls of the PyTorch ops: what it counted and
// the execution that follows from it. Plans made as siblings share threads, library handles and the
// inference workspaces, because layers run one after another.
// Python owns plans through integer handles: plan_create, plan_release. Looking one up never fails
// silently: an unknown handle is an Error.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "twell/base/context.h"
#include "twell/ops/ffn/ffn.h"
#include "twell/ops/ffn_train/ffn_train.h"

namespace twell::python {

// Device contexts and workspaces of the sibling plans. Null members where there is no CUDA build.
struct RuntimeCuda;
struct PlanCuda;
std::shared_ptr<RuntimeCuda> make_runtime_cuda();
std::shared_ptr<PlanCuda> make_plan_cuda();

struct Runtime {
  explicit Runtime(int threads) : cpu(threads) {}
  std::mutex mutex;  // held while a call computes (CPU) or enqueues (GPU)
  Context cpu;
  std::shared_ptr<RuntimeCuda> cuda = make_runtime_cuda();
};

// Sums over the training calls since the last update.
struct TrainTotals {
  int64_t tokens = 0;
  int64_t nnz = 0;
  int64_t union_neurons = 0;  // over tiles of 128 tokens; 0 on the CPU
  int64_t max_row_nnz = 0;
  int64_t recomputed = 0;  // chunks whose pattern outgrew its memory
  double l1_sum = 0.0;
};

struct LayerShape {
  int64_t tokens = 0, width = 0, ffn = 0;
  bool gated = true;
  Activation activation = Activation::kRelu;
  float threshold = 0.0f;  // of fatrelu
};

struct Plan {
  std::shared_ptr<Runtime> runtime;
  FfnPolicy policy = FfnPolicy::kAuto;
  LayerShape last;  // of the last training call
  TrainTotals train;
  std::vector<uint8_t> active;  // [F] 1: the neuron fired since the last update; CPU training
  FfnPlan inference;            // of CPU calls
  std::shared_ptr<PlanCuda> cuda = make_plan_cuda();
};

// sibling: a plan whose runtime the new one shares, or 0.
int64_t plan_create(int64_t sibling, int64_t threads);
void plan_release(int64_t handle);
std::shared_ptr<Plan> find_plan(int64_t handle);

// What an update reports, as float64 values in this order.
enum PlanField {
  kTrainTokens,
  kTrainNnz,
  kTrainUnions,
  kTrainMaxRow,
  kTrainRecomputed,
  kTrainL1,
  kLastTokens,
  kInferTokens,
  kInferNnz,
  kInferMaxRow,
  kPlanFields
};
using PlanReport = std::array<double, kPlanFields>;

// The counts of the GPU since the last update, added to the plan's; waits for the streams they came
// from. Does nothing without a CUDA build.
void fetch_cuda_counts(Plan& plan);

// The execution of training calls of a shape on the CPU: nnz active neurons per token.
FfnTrainExecution choose_train_cpu(int64_t tokens, int64_t width, int64_t ffn, double nnz);
// The execution of training calls of a shape on the GPU that the plan was last used on, by what was
// measured: nnz active neurons per token, union_share of the neurons in a tile of 128 tokens.
FfnTrainExecution choose_train_cuda(const Plan& plan, const LayerShape& shape,
                                    FfnTrainPolicy policy, double nnz, double union_share);

}  // namespace twell::python
