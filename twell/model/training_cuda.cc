// SPDX-License-Identifier: Apache-2.0
// The memory of GPU training: activations in two blocks, placed by functions that the memory plan
// also runs without memory; executions of the feed-forward layers; transfer of micro-batches to the
// device. The pass itself is in training_pass_cuda.cc.
#include "twell/model/training_cuda.h"

#include <algorithm>

#include "twell/model/model_cuda.h"
#include "twell/model/named_carver.h"
#include "twell/model/qkv.h"
#include "twell/model/rotary.h"
#include "twell/model/training_buffers_cuda.h"
#include "twell/ops/attention/attention_train_cuda.h"
#include "twell/ops/bias/bias_cuda.h"
#include "twell/ops/rms_norm/rms_norm_cuda.h"

namespace twell {
namespace {

constexpr int64_t kAlignBytes = 256;  // the alignment of cudaMalloc

// Whether backward recomputes this for some layer.
bool makes_again(const TrainingPlanCuda& plan, RecomputeLevel of) {
  return plan.recompute.of_layer(0) >= of;
}

ActivationViewsCuda carve(const ModelConfig& config, const TrainingPlanCuda& plan,
                          NamedCarver& carver) {
  constexpr const char* kStream = "activations: residual stream, norms";
  constexpr const char* kAttention = "activations: attention";
  constexpr const char* kGradients = "gradients of activations";
  const int64_t tokens = token_count(plan.shape);
  const int64_t row = tokens * config.width;
  ActivationViewsCuda views;
  carver.array(kStream, row, views.delta);
  carver.array(kStream, row, views.final_in);
  carver.array(kStream, row, views.normed);
  if (plan.document_mask) {
    carver.array("document mask", tokens * document_mask_row(plan.shape.length), views.mask);
  }
  views.layers.resize(static_cast<size_t>(config.layers));
  __nv_bfloat16* shared_ffn_in = nullptr;
  if (makes_again(plan, RecomputeLevel::kInputs)) carver.array(kStream, row, shared_ffn_in);
  for (int64_t i = 0; i < config.layers; ++i) {
    LayerActivationsCuda& layer = views.layers[static_cast<size_t>(i)];
    const RecomputeLevel level = plan.recompute.of_layer(i);
    carver.array(kStream, row, layer.attention_in);
    carver.array(kAttention, tokens * config.heads, layer.logsumexp);
    carver.array(kAttention, tokens * config.q_width(), layer.attended);
    if (level < RecomputeLevel::kQkv) {
      carver.array(kAttention, tokens * qkv_width(config), layer.qkv);
    }
    layer.ffn_in = shared_ffn_in;
    if (level < RecomputeLevel::kInputs) carver.array(kStream, row, layer.ffn_in);
    layer.attention_normed = layer.ffn_normed = views.normed;
    if (level >= RecomputeLevel::kNorms) continue;
    carver.array(kStream, row, layer.attention_normed);
    carver.array(kStream, row, layer.ffn_normed);
  }
  carver.array(kGradients, row, views.d_residual);
  carver.array(kGradients, row, views.d_normed);
  carver.array(kGradients, tokens, views.losses);
  int64_t partials = rms_norm_backward_partials(tokens) * config.width;
  if (config.qkv_bias) {
    partials = std::max(partials, bias_backward_partials(tokens) * qkv_width(config));
  }
  carver.array(kGradients, partials, views.partial);
  return views;
}

void carve_attention(const ModelConfig& config, const TrainingPlanCuda& plan, NamedCarver& carver,
                     ActivationViewsCuda& views) {
  constexpr const char* kScratch = "attention at work";
  const int64_t tokens = token_count(plan.shape);
  if (makes_again(plan, RecomputeLevel::kQkv)) {
    carver.array(kScratch, tokens * qkv_width(config), views.qkv);
  }
  carver.array(kScratch, tokens * qkv_width(config), views.d_qkv);
  carver.array(kScratch, tokens * config.q_width(), views.d_attended);
}

NamedCarver count_activations(const ModelConfig& config, const TrainingPlanCuda& plan) {
  NamedCarver carver(nullptr, kAlignBytes);
  carve(config, plan, carver);
  return carver;
}

// Places the activations in a block of the planned size. Those of the attention are placed below.
ActivationViewsCuda place_activations(const ModelConfig& config, const TrainingPlanCuda& plan,
                                      std::byte* block) {
  NamedCarver carver(block, kAlignBytes);
  return carve(config, plan, carver);
}

// Memory that only the attention of the current layer needs.
int64_t attention_scratch_bytes(const ModelConfig& config, const TrainingPlanCuda& plan) {
  NamedCarver carver(nullptr, kAlignBytes);
  ActivationViewsCuda views;
  carve_attention(config, plan, carver, views);
  return carver.bytes();
}

void place_attention_scratch(const ModelConfig& config, const TrainingPlanCuda& plan,
                             std::byte* block, ActivationViewsCuda& views) {
  NamedCarver carver(block, kAlignBytes);
  carve_attention(config, plan, carver, views);
  for (int64_t i = 0; i < config.layers; ++i) {
    if (plan.recompute.of_layer(i) < RecomputeLevel::kQkv) continue;
    views.layers[static_cast<size_t>(i)].qkv = views.qkv;
  }
}

// Memory is allocated for this many times the expected active neurons, and allocated again when it
// is too small or more than twice too large.
constexpr double kRoom = 1.25;
constexpr int64_t kFloatBytes = static_cast<int64_t>(sizeof(float));

FfnTrainShapeCuda ffn_shape(const ModelConfig& config, const TrainingPlanCuda& plan) {
  return {.max_tokens = token_count(plan.shape),
          .width = config.width,
          .ffn = config.ffn,
          .gated = config.gated};
}

// Allocations of cuBLAS and the backward pass of cuDNN's attention: a workspace; gradients of
// scores, and of queries in f32.
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

// All users share the scratch memory; the workspace's own bytes come on top.
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

// Whether memory for `room` neurons suffices for `needed`, and is at most twice the usual amount.
bool fits(double needed, double room) {
  return needed < 0.0 ? room < 0.0 : needed <= room && room <= 2.0 * kRoom * needed;
}

template <typename T>
DeviceBuffer<T> to_device(std::span<const T> values) {
  DeviceBuffer<T> buffer(std::ssize(values));
  TWELL_CUDA_CHECK(
      cudaMemcpy(buffer.data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice));
  // Our streams do not wait for the legacy stream.
  TWELL_CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));
  return buffer;
}

}  // namespace

TrainingCuda::Buffers::Buffers(CudaContext& ctx, const ModelConfig& config,
                               const TrainingPlanCuda& plan, bool hybrid)
    : memory(count_activations(config, plan).bytes()),
      views(place_activations(config, plan, memory.data())),
      embedding(token_count(plan.shape), config.width),
      batch(batch_rows(plan) * token_count(plan.shape)),
      slots{StagingSlot(batch.size()), StagingSlot(batch.size())} {
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
  scratch = {};  // free the old block first, so that both never coexist
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
  // Go layer by layer, so that the peak memory is that of the end.
  for (int64_t layer = 0; layer < config.layers; ++layer) {
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
  TrainingState::memory_plan(config, plan.shape);  // throws on a wrong shape
  require_supported(config, plan.shape);
  const int64_t tokens = token_count(plan.shape);
  const FfnTrainShapeCuda ffn = ffn_shape(config, plan);
  std::vector<MemoryItem> items = count_activations(config, plan).take_items();
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
  items.push_back(
      {"batch, positions, rotations, embedding",
       EmbeddingWorkspaceCuda::bytes_needed(tokens, config.width) +
           kFloatBytes * ((batch_rows(plan) + 1) * tokens + plan.shape.length * config.head_dim)});
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

void TrainingCuda::stage(std::span<const int32_t> inputs, std::span<const int32_t> targets,
                         std::span<const int64_t> documents) {
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
  TWELL_CHECK(plan_.document_mask != documents.empty(), "{} documents {} a document mask",
              documents.size(), plan_.document_mask ? "with" : "without");
  check_documents(documents, plan_.shape);
  const StagingSlot& slot = buffers_->slots[buffers_->next_slot++ % buffers_->slots.size()];
  slot.copied.synchronize();
  std::copy(inputs.begin(), inputs.end(), slot.data.data());
  std::copy(targets.begin(), targets.end(), slot.data.data() + tokens);
  int32_t* begins = slot.data.data() + 2 * tokens;
  for (int64_t token = 0; const int64_t length : documents) {
    begins = std::fill_n(begins, length, static_cast<int32_t>(token % plan_.shape.length));
    token += length;
  }
  TWELL_CUDA_CHECK(cudaMemcpyAsync(buffers_->batch.data(), slot.data.data(),
                                   static_cast<size_t>(buffers_->batch.bytes()),
                                   cudaMemcpyHostToDevice, ctx_.stream()));
  slot.copied.record(ctx_.stream());
}

std::string cuda_training_unsupported(const ModelConfig& config, int64_t length) {
  if (!leaves_zeros(config.activation)) {
    return "the GPU trains feed-forward layers with relu and relu2 only; use --device cpu";
  }
  if (config.qk_norm) {
    return "the GPU trains no norms over heads (QK-norm) yet; use --device cpu";
  }
  if (config.o_bias || config.mlp_bias) {
    return "the GPU trains biases on queries, keys and values only; use --device cpu";
  }
  if (config.ffn % 8 != 0) {
    return fmt::format(
        "the GPU trains an intermediate_size that is a multiple of 8, got {}; use --device cpu",
        config.ffn);
  }
  if (config.sliding_window > 0 && length > config.sliding_window) {
    return fmt::format(
        "the GPU trains sequences of at most the sliding_window of {}, got {}; use shorter ones or "
        "--device cpu",
        config.sliding_window, length);
  }
  if (std::string why = cuda_model_unsupported(config); !why.empty()) return why;
  const std::string why = attention_train_unsupported(config.head_dim, length);
  return why.empty() ? why : why + "; use --device cpu";
}

}  // namespace twell
