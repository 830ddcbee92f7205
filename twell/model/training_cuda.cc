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
                               const TrainingPlanCuda& plan)
    : memory(plan_activations(config, plan).bytes),
      views(place_activations(config, plan, memory.data())),
      ffn_workspace(ctx, ffn_shape(config, plan)),
      head(token_count(plan.shape), config.vocab_size),
      embedding(token_count(plan.shape), config.width),
      batch(2 * token_count(plan.shape)),
      slots{StagingSlot(token_count(plan.shape)), StagingSlot(token_count(plan.shape))} {
  const RopeTable table = rope_table(config, plan.shape.length);
  cos = to_device<float>(table.cos.span());
  sin = to_device<float>(table.sin.span());
  std::vector<int32_t> places(static_cast<size_t>(token_count(plan.shape)));
  for (size_t i = 0; i < places.size(); ++i) {
    places[i] = static_cast<int32_t>(i % static_cast<size_t>(plan.shape.length));
  }
  positions = to_device<int32_t>(places);
}

TrainingCuda::TrainingCuda(CudaContext& ctx, const ModelConfig& config,
                           const TrainingPlanCuda& plan, int64_t other_bytes)
    : ctx_(ctx), config_(config), plan_(plan) {
  int64_t bytes = other_bytes;
  for (const MemoryItem& item : memory_plan(ctx, config, plan)) bytes += item.bytes;
  require_device_memory(bytes, fmt::format("training micro-batches of {} x {} tokens",
                                           plan.shape.sequences, plan.shape.length));
  buffers_ = std::make_unique<Buffers>(ctx, config_, plan);
  for (int64_t layer = 0; layer < config.layers; ++layer) {  // one by one, so that no more is taken
    buffers_->ffn.emplace_back(ctx, ffn_shape(config, plan));
    buffers_->ffn_nnz.push_back(-1.0);
    if (!plan.ffn.empty()) prepare(layer, plan.ffn[static_cast<size_t>(layer)]);
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
    saved += FfnSavedCuda::bytes_needed(ffn, expected.execution, kRoom * expected.nnz);
  }
  items.push_back({plan.ffn.empty() ? "activations: FFN (all layers dense)"
                                    : "activations: FFN (as active as expected)",
                   saved});
  items.push_back({"a feed-forward layer at work", FfnTrainWorkspaceCuda::bytes_needed(ctx, ffn)});
  items.push_back({"logits", CrossEntropyWorkspaceCuda::bytes_needed(tokens, config.vocab_size)});
  items.push_back({"batch, positions, rotations, embedding",
                   EmbeddingWorkspaceCuda::bytes_needed(tokens, config.width) +
                       kFloatBytes * (3 * tokens + plan.shape.length * config.head_dim)});
  items.push_back({"cuDNN and cuBLAS (estimate)", library_bytes(config, plan.shape)});
  return items;
}

bool TrainingCuda::prepare(int64_t layer, const FfnExpectation& expected) {
  const auto at = static_cast<size_t>(layer);
  FfnSavedCuda& saved = buffers_->ffn[at];
  double& prepared = buffers_->ffn_nnz[at];
  if (expected.execution == FfnTrainExecution::kDense) {
    if (saved.execution() == expected.execution) return false;
    saved.prepare(ctx_, expected.execution, -1.0);
    prepared = -1.0;
    return true;
  }
  const bool fits = expected.nnz <= prepared && prepared <= 2.0 * kRoom * expected.nnz;
  if (saved.execution() == expected.execution && fits) return false;
  prepared = kRoom * expected.nnz;
  saved.prepare(ctx_, expected.execution, prepared);
  return true;
}

FfnTrainExecution TrainingCuda::execution(int64_t layer) const {
  return buffers_->ffn[static_cast<size_t>(layer)].execution();
}

int64_t TrainingCuda::ffn_saved_bytes() const {
  int64_t bytes = 0;
  for (const FfnSavedCuda& saved : buffers_->ffn) bytes += saved.bytes();
  return bytes;
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
