// SPDX-License-Identifier: Apache-2.0
#include "twell/model/training_cuda.h"

#include <algorithm>

#include "twell/model/model_cuda.h"
#include "twell/model/rotary.h"
#include "twell/model/training_buffers_cuda.h"
#include "twell/ops/attention/attention_train_cuda.h"

namespace twell {
namespace {

// Of active neurons over what is expected. Memory is made anew when that is used up, or half of it
// would do.
constexpr double kRoom = 1.25;
constexpr int64_t kFloatBytes = static_cast<int64_t>(sizeof(float));

FfnTrainShapeCuda ffn_shape(const ModelConfig& config, const TrainingPlanCuda& plan) {
  return {.max_tokens = token_count(plan.shape),
          .width = config.width,
          .ffn = config.ffn,
          .gated = config.gated};
}

// What cuBLAS keeps, and cuDNN's backward: gradients of scores, f32 gradients of queries.
int64_t library_bytes(const ModelConfig& config, MicroBatchShape shape) {
  constexpr int64_t kCublasBytes = int64_t{32} << 20;
  const int64_t padded = (shape.length + 127) / 128 * 128;
  const int64_t scores = config.heads * padded * padded * 2;
  const int64_t queries = token_count(shape) * config.q_width() * kFloatBytes;
  return kCublasBytes + queries +
         std::max(scores, std::min(scores * shape.sequences, kMaxScoreBytes));
}

void require_supported(const ModelConfig& config, MicroBatchShape shape) {
  const std::string why = cuda_training_unsupported(config, shape.length);
  TWELL_REQUIRE(why.empty(), "{}", why);
}

// Beside the workspace's own bytes, each in the place of the others.
int64_t scratch_bytes(const CudaContext& ctx, const ModelConfig& config,
                      const TrainingPlanCuda& plan, bool hybrid) {
  const int64_t others =
      std::max(attention_scratch_bytes(config, plan),
               CrossEntropyWorkspaceCuda::bytes_needed(token_count(plan.shape), config.vocab_size));
  return std::max(FfnTrainWorkspaceCuda::bytes_needed(ctx, ffn_shape(config, plan), hybrid),
                  FfnTrainWorkspaceCuda::kOwnBytes + others);
}

bool is_hybrid(const FfnExpectation& expected) {
  return expected.execution == FfnTrainExecution::kHybrid;
}

// Memory made for `room` is enough for `needed`, and not twice too much.
bool fits(double needed, double room) {
  return needed < 0.0 ? room < 0.0 : needed <= room && room <= 2.0 * kRoom * needed;
}

template <typename T>
DeviceBuffer<T> to_device(std::span<const T> values) {
  DeviceBuffer<T> buffer(std::ssize(values));
  TWELL_CUDA_CHECK(
      cudaMemcpy(buffer.data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));  // which our streams do not wait for
  return buffer;
}

}  // namespace

TrainingCuda::Buffers::Buffers(CudaContext& ctx, const ModelConfig& config,
                               const TrainingPlanCuda& plan, bool hybrid)
    : memory(plan_activations(config, plan).bytes),
      views(place_activations(config, plan, memory.data())),
      embedding(token_count(plan.shape), config.width),
      batch(2 * token_count(plan.shape)),
      slots{StagingSlot(token_count(plan.shape)), StagingSlot(token_count(plan.shape))} {
  make_scratch(ctx, config, plan, hybrid);
  const RopeTable table = rope_table(config, plan.shape.length);
  cos = to_device<float>(table.cos.span());
  sin = to_device<float>(table.sin.span());
  std::vector<int32_t> places(static_cast<size_t>(token_count(plan.shape)));
  for (size_t i = 0; i < places.size(); ++i) {
    places[i] = static_cast<int32_t>(i % static_cast<size_t>(plan.shape.length));
  }
  positions = to_device<int32_t>(places);
}

void TrainingCuda::Buffers::make_scratch(CudaContext& ctx, const ModelConfig& config,
                                         const TrainingPlanCuda& plan, bool hybrid) {
  scratch = {};  // before the other one is there
  scratch = DeviceBuffer<std::byte>(scratch_bytes(ctx, config, plan, hybrid));
  scratch_hybrid = hybrid;
  ffn_workspace.emplace(ctx, ffn_shape(config, plan), hybrid, scratch.data());
  std::byte* const others = scratch.data() + FfnTrainWorkspaceCuda::kOwnBytes;
  head.emplace(token_count(plan.shape), config.vocab_size, others);
  place_attention_scratch(config, plan, others, views);
}

TrainingCuda::TrainingCuda(CudaContext& ctx, const ModelConfig& config,
                           const TrainingPlanCuda& plan, int64_t other_bytes)
    : ctx_(ctx), config_(config), plan_(plan) {
  int64_t bytes = other_bytes;
  for (const MemoryItem& item : memory_plan(ctx, config, plan)) bytes += item.bytes;
  require_device_memory(bytes, fmt::format("training micro-batches of {} x {} tokens",
                                           plan.shape.sequences, plan.shape.length));
  const bool hybrid = std::any_of(plan.ffn.begin(), plan.ffn.end(), is_hybrid);
  buffers_ = std::make_unique<Buffers>(ctx, config_, plan, hybrid);
  for (int64_t layer = 0; layer < config.layers; ++layer) {  // one by one, so that no more is taken
    buffers_->ffn.emplace_back(ctx, ffn_shape(config, plan));
    buffers_->prepared.emplace_back();
    const auto at = static_cast<size_t>(layer);
    if (!plan.ffn.empty()) prepare_layer(at, plan.ffn[at]);
  }
}

TrainingCuda::~TrainingCuda() {
  if (buffers_ != nullptr) cudaStreamSynchronize(ctx_.stream());
}

std::vector<MemoryItem> TrainingCuda::memory_plan(const CudaContext& ctx, const ModelConfig& config,
                                                  const TrainingPlanCuda& plan) {
  TrainingState::memory_plan(config, plan.shape);  // refuses what is no micro-batch
  require_supported(config, plan.shape);
  const int64_t tokens = token_count(plan.shape);
  const FfnTrainShapeCuda ffn = ffn_shape(config, plan);
  std::vector<MemoryItem> items = plan_activations(config, plan).items;
  int64_t saved = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const FfnExpectation expected =
        plan.ffn.empty() ? FfnExpectation{} : plan.ffn[static_cast<size_t>(layer)];
    saved += ffn_saved_bytes(ffn, expected);
  }
  items.push_back({plan.ffn.empty() ? "activations: FFN (all layers dense)"
                                    : "activations: FFN (as active as expected)",
                   saved});
  const bool hybrid =
      plan.may_become_hybrid || std::any_of(plan.ffn.begin(), plan.ffn.end(), is_hybrid);
  items.push_back({"a layer at work, or logits", scratch_bytes(ctx, config, plan, hybrid)});
  items.push_back({"batch, positions, rotations, embedding",
                   EmbeddingWorkspaceCuda::bytes_needed(tokens, config.width) +
                       kFloatBytes * (3 * tokens + plan.shape.length * config.head_dim)});
  items.push_back({"cuDNN and cuBLAS (estimate)", library_bytes(config, plan.shape)});
  return items;
}

bool TrainingCuda::is_prepared(size_t layer, const FfnExpectation& expected) const {
  const FfnExpectation& made = buffers_->prepared[layer];
  if (buffers_->ffn[layer].execution() != expected.execution) return false;
  return !is_hybrid(expected) ||
         (fits(expected.nnz, made.nnz) && fits(expected.union_neurons, made.union_neurons));
}

void TrainingCuda::prepare_layer(size_t layer, const FfnExpectation& expected) {
  const FfnExpectation made{expected.execution, kRoom * expected.nnz,
                            kRoom * expected.union_neurons};
  buffers_->ffn[layer].prepare(ctx_, made.execution, made.nnz, made.union_neurons);
  buffers_->prepared[layer] = made;
}

void TrainingCuda::set_scratch(bool hybrid) {
  if (buffers_->scratch_hybrid == hybrid) return;
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
  buffers_->make_scratch(ctx_, config_, plan_, hybrid);
}

bool TrainingCuda::prepare(std::span<const FfnExpectation> expected) {
  TWELL_CHECK(std::ssize(expected) == config_.layers, "{} layers, {} expectations", config_.layers,
              expected.size());
  const bool hybrid = std::any_of(expected.begin(), expected.end(), is_hybrid);
  bool changed = buffers_->scratch_hybrid != hybrid;
  if (!hybrid) set_scratch(false);
  for (const FfnTrainExecution execution :
       {FfnTrainExecution::kHybrid, FfnTrainExecution::kDense}) {
    for (size_t layer = 0; layer < expected.size(); ++layer) {
      const FfnExpectation& now = expected[layer];
      if (now.execution != execution || is_prepared(layer, now)) continue;
      prepare_layer(layer, now);
      changed = true;
    }
  }
  if (hybrid) set_scratch(true);
  return changed;
}

FfnTrainExecution TrainingCuda::execution(int64_t layer) const {
  return buffers_->ffn[static_cast<size_t>(layer)].execution();
}

int64_t TrainingCuda::ffn_saved_bytes(const FfnTrainShapeCuda& shape,
                                      const FfnExpectation& expected) {
  return FfnSavedCuda::bytes_needed(shape, expected.execution, kRoom * expected.nnz,
                                    kRoom * expected.union_neurons);
}

void TrainingCuda::stage(std::span<const int32_t> inputs, std::span<const int32_t> targets) {
  const int64_t tokens = token_count(plan_.shape);
  TWELL_CHECK(std::ssize(inputs) == tokens && std::ssize(targets) == tokens,
              "{} inputs and {} targets for a micro-batch of {} x {} tokens", inputs.size(),
              targets.size(), plan_.shape.sequences, plan_.shape.length);
  const auto check = [&](std::span<const int32_t> ids, int32_t least) {
    for (const int32_t id : ids) {
      TWELL_CHECK(id >= least && id < config_.vocab_size,
                  "token id {} is outside the vocabulary of {}", id, config_.vocab_size);
    }
  };
  check(inputs, 0);
  check(targets, -1);
  const StagingSlot& slot = buffers_->slots[buffers_->next_slot++ % buffers_->slots.size()];
  TWELL_CUDA_CHECK(cudaEventSynchronize(slot.copied()));
  std::copy(inputs.begin(), inputs.end(), slot.data());
  std::copy(targets.begin(), targets.end(), slot.data() + tokens);
  TWELL_CUDA_CHECK(cudaMemcpyAsync(buffers_->batch.data(), slot.data(),
                                   static_cast<size_t>(buffers_->batch.bytes()),
                                   cudaMemcpyHostToDevice, ctx_.stream()));
  TWELL_CUDA_CHECK(cudaEventRecord(slot.copied(), ctx_.stream()));
}

std::string cuda_training_unsupported(const ModelConfig& config, int64_t length) {
  if (config.activation != Activation::kRelu) {
    return "the GPU trains feed-forward layers with ReLU only; use --device cpu";
  }
  if (config.qk_norm) {
    return "the GPU trains no norms over heads (QK-norm) yet; use --device cpu";
  }
  if (std::string why = cuda_model_unsupported(config); !why.empty()) return why;
  const std::string why = attention_train_unsupported(config.head_dim, length);
  return why.empty() ? why : why + "; use --device cpu";
}

}  // namespace twell
