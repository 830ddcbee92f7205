// SPDX-License-Identifier: Apache-2.0
// First the memory: activations in two blocks, placed by functions that the memory plan also runs
// without memory; executions of the feed-forward layers; transfer of micro-batches to the device.
// Then the pass: training.cc's functions in the same order, with bf16 ops.
#include "twell/model/training_cuda.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>

#include "twell/base/profile_range.h"
#include "twell/base/rounding.h"
#include "twell/model/model_cuda.h"
#include "twell/model/named_carver.h"
#include "twell/model/qkv.h"
#include "twell/model/rotary.h"
#include "twell/model/token_rows.h"
#include "twell/ops/attention/attention_train_cuda.h"
#include "twell/ops/bias/bias_cuda.h"
#include "twell/ops/embedding/embedding_cuda.h"
#include "twell/ops/matmul/linear_cuda.h"
#include "twell/ops/rms_norm/rms_norm_cuda.h"
#include "twell/ops/rope/rope_cuda.h"

namespace twell {

// What the forward pass keeps of one layer for the backward pass. What backward computes again
// (Recompute) lies in memory that all layers share.
struct LayerActivationsCuda {
  __nv_bfloat16* attention_in = nullptr;      // [M, D] residual stream before the attention
  __nv_bfloat16* attention_normed = nullptr;  // [M, D]
  __nv_bfloat16* qk_in = nullptr;       // [M, (H + H_kv) * hd] input of the q/k norms, or null
  __nv_bfloat16* qkv = nullptr;         // [M, (H + 2 * H_kv) * hd], queries and keys rotated
  float* logsumexp = nullptr;           // [B, H, T]
  __nv_bfloat16* attended = nullptr;    // [M, H * hd]
  __nv_bfloat16* ffn_in = nullptr;      // [M, D] residual stream before the FFN
  __nv_bfloat16* ffn_normed = nullptr;  // [M, D]
};

struct ActivationViewsCuda {
  std::vector<LayerActivationsCuda> layers;  // [L]
  __nv_bfloat16* delta = nullptr;            // [M, D] what a block adds to the residual stream
  __nv_bfloat16* final_in = nullptr;         // [M, D]
  __nv_bfloat16* normed = nullptr;           // [M, D] shared: a block's normalised input
  // [M, document_mask_row(T)] of layers without and with a sliding window; null where no layer has
  // such a mask.
  __nv_bfloat16 *mask = nullptr, *window_mask = nullptr;
  // Gradients with the forward pass's names, of one layer at a time.
  __nv_bfloat16* d_residual = nullptr;  // [M, D]
  __nv_bfloat16* d_normed = nullptr;    // [M, D]
  __nv_bfloat16* d_delta = nullptr;     // [M, D] d_residual in the order of rows_by_id
  float* losses = nullptr;              // [M]
  float* kl = nullptr;                  // [M], null without a teacher
  float* partial = nullptr;             // partial sums over tokens, for norm weights and biases
  // These lie in Buffers::scratch. None outlives the attention of a layer.
  __nv_bfloat16* qk_in = nullptr;       // [M, (H + H_kv) * hd], shared
  __nv_bfloat16* qkv = nullptr;         // [M, (H + 2 * H_kv) * hd], shared
  __nv_bfloat16* d_qkv = nullptr;       // [M, (H + 2 * H_kv) * hd]
  __nv_bfloat16* d_attended = nullptr;  // [M, H * hd]
};

// The ids of one micro-batch on their way to the device; `copied` follows the copy.
struct StagingSlot {
  explicit StagingSlot(int64_t ids) : data(ids) {}
  ~StagingSlot() { cudaEventSynchronize(copied.get()); }
  StagingSlot(const StagingSlot&) = delete;
  StagingSlot& operator=(const StagingSlot&) = delete;

  PinnedBuffer<int32_t> data;
  CudaEvent copied;
};

// Memory for micro-batches of one shape.
struct TrainingCuda::Buffers {
  Buffers(CudaContext& ctx, const ModelConfig& config, const TrainingPlanCuda& plan, bool hybrid);
  // Makes scratch for hybrid layers, or for dense ones alone. Not while a pass is in flight.
  void make_scratch(CudaContext& ctx, const ModelConfig& config, const TrainingPlanCuda& plan,
                    bool hybrid);

  DeviceBuffer<std::byte> memory;
  ActivationViewsCuda views;
  std::vector<FfnSavedCuda> ffn;         // [L]
  std::vector<FfnExpectation> prepared;  // [L] what each was prepared for
  // A feed-forward layer, the attention of a layer and the head use this memory one after the
  // other.
  DeviceBuffer<std::byte> scratch;
  bool scratch_hybrid = false;
  std::optional<FfnTrainWorkspaceCuda> ffn_workspace;
  std::optional<CrossEntropyWorkspaceCuda> head;
  EmbeddingWorkspaceCuda embedding;
  // [3, M] inputs, targets, rows_by_id; behind a mask [5, M]: and where each token's document
  // begins in its sequence, and its position in the document
  DeviceBuffer<int32_t> batch;
  DeviceBuffer<float> cos, sin;     // [T, hd / 2]
  DeviceBuffer<int32_t> positions;  // [M] within the sequence
  std::array<StagingSlot, 2> slots;
  size_t next_slot = 0;
};

namespace {

// Numbers per token that a micro-batch has in Buffers::batch.
int64_t batch_rows(const TrainingPlanCuda& plan) { return plan.document_mask ? 5 : 3; }

constexpr int64_t kCudaAlignBytes = 256;  // the alignment of cudaMalloc

// Whether backward recomputes this for some layer.
bool makes_again(const TrainingPlanCuda& plan, RecomputeLevel of) {
  return plan.recompute.of_layer(0) >= of;
}

// The sliding window of a layer; 0: it attends to the whole sequences.
int64_t window_of(const ModelConfig& config, int64_t layer, int64_t length) {
  const int64_t window = config.window_of(layer);
  return window < length ? window : 0;
}

// Whether a layer has a window, or one has none.
bool any_layer(const ModelConfig& config, int64_t length, bool with_window) {
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    if ((window_of(config, layer, length) > 0) == with_window) return true;
  }
  return false;
}

ActivationViewsCuda carve(const ModelConfig& config, const TrainingPlanCuda& plan,
                          NamedCarver& carver) {
  constexpr const char* kStream = "activations: residual stream, norms";
  constexpr const char* kAttention = "activations: attention";
  constexpr const char* kGradients = "gradients of activations";
  const int64_t tokens = plan.shape.tokens();
  const int64_t row = tokens * config.width;
  ActivationViewsCuda views;
  carver.array(kStream, row, views.delta);
  carver.array(kStream, row, views.final_in);
  carver.array(kStream, row, views.normed);
  if (plan.document_mask) {
    const int64_t values = tokens * document_mask_row(plan.shape.length);
    if (any_layer(config, plan.shape.length, false)) {
      carver.array("document mask", values, views.mask);
    }
    if (any_layer(config, plan.shape.length, true)) {
      carver.array("document mask", values, views.window_mask);
    }
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
      if (config.qk_norm) carver.array(kAttention, tokens * qk_width(config), layer.qk_in);
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
  // Backward uses delta only where it makes inputs again.
  views.d_delta = views.delta;
  if (makes_again(plan, RecomputeLevel::kInputs)) carver.array(kGradients, row, views.d_delta);
  carver.array(kGradients, tokens, views.losses);
  if (plan.distills) carver.array(kGradients, tokens, views.kl);
  int64_t partials = rms_norm_backward_partials(tokens) * config.width;
  if (config.qkv_bias) {
    const int64_t most = std::max(qkv_width(config), config.o_bias ? config.width : 0);
    partials = std::max(partials, bias_backward_partials(tokens) * most);
  }
  if (config.qk_norm) {
    partials = std::max(partials, 2 * head_norm_backward_partials(tokens) * config.head_dim);
  }
  carver.array(kGradients, partials, views.partial);
  return views;
}

void carve_attention(const ModelConfig& config, const TrainingPlanCuda& plan, NamedCarver& carver,
                     ActivationViewsCuda& views) {
  constexpr const char* kScratch = "attention at work";
  const int64_t tokens = plan.shape.tokens();
  if (makes_again(plan, RecomputeLevel::kQkv)) {
    carver.array(kScratch, tokens * qkv_width(config), views.qkv);
    if (config.qk_norm) carver.array(kScratch, tokens * qk_width(config), views.qk_in);
    for (size_t i = 0; i < views.layers.size(); ++i) {
      const RecomputeLevel level = plan.recompute.of_layer(static_cast<int64_t>(i));
      if (level < RecomputeLevel::kQkv) continue;
      views.layers[i].qkv = views.qkv;
      views.layers[i].qk_in = views.qk_in;
    }
  }
  carver.array(kScratch, tokens * qkv_width(config), views.d_qkv);
  carver.array(kScratch, tokens * config.q_width(), views.d_attended);
}

NamedCarver count_activations(const ModelConfig& config, const TrainingPlanCuda& plan) {
  NamedCarver carver(nullptr, kCudaAlignBytes);
  carve(config, plan, carver);
  return carver;
}

// Memory is allocated for this many times the expected active neurons, and allocated again when it
// is too small or more than twice too large.
constexpr double kRoom = 1.25;
constexpr int64_t kF32Bytes = static_cast<int64_t>(sizeof(float));

FfnTrainShapeCuda ffn_shape(const ModelConfig& config, const TrainingPlanCuda& plan) {
  return {.max_tokens = plan.shape.tokens(),
          .width = config.width,
          .ffn = config.ffn,
          .gated = config.gated,
          .biased = config.mlp_bias,
          .activation = config.activation};
}

// Allocations of cuBLAS and the backward pass of cuDNN's attention: a workspace; gradients of
// scores, and of queries in f32.
int64_t library_bytes(const ModelConfig& config, MicroBatchShape shape) {
  constexpr int64_t kCublasBytes = int64_t{32} << 20;
  const int64_t padded = (shape.length + 127) / 128 * 128;
  const int64_t scores = config.heads * padded * padded * 2;
  const int64_t queries = shape.tokens() * config.q_width() * kF32Bytes;
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
  NamedCarver attention(nullptr, kCudaAlignBytes);
  ActivationViewsCuda unused;
  carve_attention(config, plan, attention, unused);
  const int64_t others =
      std::max(attention.bytes(), CrossEntropyWorkspaceCuda::bytes_needed(
                                      plan.shape.tokens(), config.vocab_size, plan.distills));
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

}  // namespace

TrainingCuda::Buffers::Buffers(CudaContext& ctx, const ModelConfig& config,
                               const TrainingPlanCuda& plan, bool hybrid)
    : memory(count_activations(config, plan).bytes()),
      embedding(plan.shape.tokens(), config.width),
      batch(batch_rows(plan) * plan.shape.tokens()),
      slots{StagingSlot(batch.size()), StagingSlot(batch.size())} {
  NamedCarver carver(memory.data(), kCudaAlignBytes);
  views = carve(config, plan, carver);
  make_scratch(ctx, config, plan, hybrid);
  const RopeTable table = rope_table(config, plan.shape.length);
  cos = to_device<float>(table.cos.span());
  sin = to_device<float>(table.sin.span());
  std::vector<int32_t> places(static_cast<size_t>(plan.shape.tokens()));
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
  head.emplace(plan.shape.tokens(), config.vocab_size, others, plan.distills);
  NamedCarver carver(others, kCudaAlignBytes);
  carve_attention(config, plan, carver, views);
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
  const int64_t tokens = plan.shape.tokens();
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
           kF32Bytes * ((batch_rows(plan) + 1) * tokens + plan.shape.length * config.head_dim)});
  items.push_back({"cuDNN and cuBLAS (estimate)", library_bytes(config, plan.shape)});
  return items;
}

bool TrainingCuda::is_prepared(size_t layer, const FfnExpectation& expected) const {
  const FfnExpectation& made = buffers_->prepared[layer];
  if (buffers_->ffn[layer].execution != expected.execution) return false;
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
  return buffers_->ffn[static_cast<size_t>(layer)].execution;
}

int64_t TrainingCuda::ffn_saved_bytes(const FfnTrainShapeCuda& shape,
                                      const FfnExpectation& expected) {
  return FfnSavedCuda::bytes_needed(shape, expected.execution, kRoom * expected.nnz,
                                    kRoom * expected.union_neurons);
}

void TrainingCuda::stage(std::span<const int32_t> inputs, std::span<const int32_t> targets,
                         std::span<const int64_t> documents) {
  const int64_t tokens = plan_.shape.tokens();
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
  rows_by_id(inputs, config_.vocab_size,
             {slot.data.data() + 2 * tokens, static_cast<size_t>(tokens)});
  int32_t* begins = slot.data.data() + 3 * tokens;
  int32_t* positions = slot.data.data() + 4 * tokens;
  for (int64_t token = 0; const int64_t length : documents) {
    begins = std::fill_n(begins, length, static_cast<int32_t>(token % plan_.shape.length));
    std::iota(positions, positions + length, 0);
    positions += length;
    token += length;
  }
  TWELL_CUDA_CHECK(cudaMemcpyAsync(buffers_->batch.data(), slot.data.data(),
                                   static_cast<size_t>(buffers_->batch.bytes()),
                                   cudaMemcpyHostToDevice, ctx_.stream()));
  slot.copied.record(ctx_.stream());
}

std::string cuda_training_unsupported(const ModelConfig& config, int64_t length) {
  if (std::string why = cuda_model_unsupported(config); !why.empty()) return why;
  const std::string why = attention_train_unsupported(config.head_dim, length);
  return why.empty() ? why : why + "; use --device cpu";
}

// --- The pass ------------------------------------------------------------------------------------

namespace {

// The row of each token [M], where it is not its own.
struct NormRows {
  const int32_t* delta = nullptr;
  const int32_t* y = nullptr;
  float scale = 1.0f;  // of the norm's output
};
struct NormBackwardRows {
  const int32_t* d_y = nullptr;
  const int32_t* d_delta = nullptr;  // null: no such copy of d_residual
  float scale = 1.0f;                // of the norm's output
};

}  // namespace

// Forward and backward of one micro-batch. Each backward function mirrors the forward function of
// the same name in reverse order.
class TrainingCuda::Pass {
 public:
  Pass(TrainingCuda& training, const TrainingPassCuda& pass)
      : ctx_(training.ctx_),
        config_(training.config_),
        pass_(pass),
        buffers_(*training.buffers_),
        views_(buffers_.views),
        weights_(model_matrices<const BF16>(config_, reinterpret_cast<const BF16*>(pass.weights))),
        grads_(model_matrices<float>(config_, pass.grads)),
        shape_(training.plan_.shape),
        tokens_(shape_.tokens()),
        inputs_(buffers_.batch.data()),
        targets_(buffers_.batch.data() + tokens_),
        ffn_rows_(buffers_.scratch_hybrid ? targets_ + tokens_ : nullptr),
        positions_(training.plan_.document_mask ? targets_ + 3 * tokens_
                                                : buffers_.positions.data()),
        recompute_(training.plan_.recompute) {}

  void run() {
    if (!pass_.add) clear_added_gradients();
    forward();
    loss(/*backward=*/true);
    backward();
  }
  void evaluate() {
    forward();
    loss(/*backward=*/false);
  }

 private:
  using LayerWeights = LayerMatrices<const BF16>;
  using LayerGrads = LayerMatrices<float>;

  void forward() {
    const ProfileRange whole("forward");
    if (views_.mask != nullptr) make_mask(views_.mask, 0);
    if (views_.window_mask != nullptr) make_mask(views_.window_mask, config_.sliding_window);
    if (documents()) done(TrainingStage::kAttention);
    await_weights(-1);
    TWELL_CUDA_CHECK(launch_embedding({.tokens = tokens_,
                                       .width = config_.width,
                                       .ids = inputs_,
                                       .table = device_bf16(weights_.embedding.data),
                                       .out = views_.layers[0].attention_in,
                                       .scale = config_.stream_embedding_scale()},
                                      ctx_.stream()));
    done(TrainingStage::kEmbedding);
    for (size_t layer = 0; layer < views_.layers.size(); ++layer) {
      await_weights(static_cast<int64_t>(layer));
      const ProfileRange range("layer", static_cast<int64_t>(layer));
      const LayerWeights& w = weights_.layers[layer];
      const LayerActivationsCuda& a = views_.layers[layer];
      if (layer == 0) {
        norm(a.attention_in, w.attention_norm, a.attention_normed);
      } else {
        norm(views_.layers[layer - 1].ffn_in, w.attention_norm, a.attention_normed, a.attention_in,
             {.delta = ffn_rows_});
      }
      attention_block_forward(layer, w, a);
      norm(a.attention_in, w.ffn_norm, a.ffn_normed, a.ffn_in, {.y = ffn_rows_});
      feed_forward_forward(layer, w, a);
    }
    await_weights(config_.layers);
    norm(views_.layers.back().ffn_in, weights_.final_norm, views_.normed, views_.final_in,
         {.delta = ffn_rows_, .scale = config_.hidden_scale()});
  }

  // The loss includes the head, never stores all logits, and also computes the head's gradients.
  void loss(bool backward) {
    const ProfileRange range("head and loss");
    TeacherCuda teacher = pass_.teacher;
    teacher.kl = views_.kl;
    cross_entropy_cuda(ctx_,
                       {.tokens = tokens_,
                        .width = config_.width,
                        .vocab = config_.vocab_size,
                        .x = views_.normed,
                        .weight = device_bf16(weights_.head.data),
                        .targets = targets_,
                        .grad_scale = pass_.grad_scale,
                        .scale = pass_.ce_scale,
                        .losses = views_.losses,
                        .sum = pass_.loss,
                        .d_x = backward ? views_.d_normed : nullptr,
                        .d_weight = backward ? grads_.head.data : nullptr,
                        .add = pass_.add,
                        .teacher = teacher},
                       *buffers_.head);
    done(TrainingStage::kHead);
  }

  void backward() {
    const ProfileRange whole("backward");
    norm_backward(views_.final_in, weights_.final_norm, nullptr, grads_.final_norm,
                  {.d_delta = ffn_rows_, .scale = config_.hidden_scale()});
    backward_done(config_.layers);
    for (size_t layer = views_.layers.size(); layer-- > 0;) {
      const ProfileRange range("layer", static_cast<int64_t>(layer));
      const LayerWeights& w = weights_.layers[layer];
      const LayerGrads& d = grads_.layers[layer];
      const LayerActivationsCuda& a = views_.layers[layer];
      const RecomputeLevel level = recompute_.of_layer(static_cast<int64_t>(layer));
      ffn_input_again(level, w, a);
      feed_forward_backward(layer, w, a, d);
      norm_backward(a.ffn_in, w.ffn_norm, views_.d_residual, d.ffn_norm, {.d_y = ffn_rows_});
      attention_block_backward(layer, level, w, a, d);
      norm_backward(a.attention_in, w.attention_norm, views_.d_residual, d.attention_norm,
                    {.d_delta = layer == 0 ? nullptr : ffn_rows_});
      backward_done(static_cast<int64_t>(layer));
    }
    embedding_backward_cuda(ctx_,
                            {.tokens = tokens_,
                             .width = config_.width,
                             .vocab = config_.vocab_size,
                             .ids = inputs_,
                             .d_out = views_.d_residual,
                             .d_table = grads_.embedding.data,
                             .scale = config_.stream_embedding_scale()},
                            buffers_.embedding);
    done(TrainingStage::kEmbedding);
    backward_done(-1);
  }

  // y = norm(x), or where `sum` is given, sum = x + delta and y = norm(sum).
  void norm(const __nv_bfloat16* x, const BF16* weight, __nv_bfloat16* y, __nv_bfloat16* sum,
            const NormRows& rows) {
    const ProfileRange range("norm");
    TWELL_CUDA_CHECK(launch_rms_norm({.tokens = tokens_,
                                      .width = config_.width,
                                      .x = x,
                                      .residual = sum == nullptr ? nullptr : views_.delta,
                                      .sum = sum,
                                      .weight = device_bf16(weight),
                                      .y = y,
                                      .eps = eps(),
                                      .scale = rows.scale,
                                      .residual_rows = rows.delta,
                                      .y_rows = rows.y},
                                     ctx_.stream()));
    done(TrainingStage::kNorm);
  }
  void norm(const __nv_bfloat16* x, const BF16* weight, __nv_bfloat16* y) {
    norm(x, weight, y, nullptr, {});
  }

  // Both terms of the sum have its gradient d_residual. A feed-forward block that made one of them
  // reads d_delta, the copy in its order of rows.
  void norm_backward(const __nv_bfloat16* sum, const BF16* weight, const __nv_bfloat16* d_residual,
                     float* d_weight, const NormBackwardRows& rows) {
    const ProfileRange range("norm");
    TWELL_CUDA_CHECK(
        launch_rms_norm_backward({.tokens = tokens_,
                                  .width = config_.width,
                                  .s = sum,
                                  .weight = device_bf16(weight),
                                  .d_y = views_.d_normed,
                                  .d_residual = d_residual,
                                  .d_s = views_.d_residual,
                                  .d_weight = d_weight,
                                  .partial = views_.partial,
                                  .eps = eps(),
                                  .scale = rows.scale,
                                  .d_y_rows = rows.d_y,
                                  .copy_rows = rows.d_delta,
                                  .d_s_copy = rows.d_delta == nullptr ? nullptr : views_.d_delta},
                                 ctx_.stream()));
    done(TrainingStage::kNorm);
  }

  // Makes the mask of the micro-batch staged last.
  void make_mask(__nv_bfloat16* mask, int64_t window) {
    TWELL_CUDA_CHECK(launch_document_mask({.sequences = shape_.sequences,
                                           .length = shape_.length,
                                           .begins = targets_ + 2 * tokens_,
                                           .mask = mask,
                                           .window = window},
                                          ctx_.stream()));
  }

  void attention_block_forward(size_t layer, const LayerWeights& w, const LayerActivationsCuda& a) {
    project_qkv(w, a);
    ProfileRange range("attention");
    attention_train_forward(ctx_, {.shape = attention_shape(layer),
                                   .qkv = a.qkv,
                                   .out = a.attended,
                                   .logsumexp = a.logsumexp,
                                   .mask = mask_of(layer)});
    range.next("output");
    project_attended(w, a);
    done(TrainingStage::kAttention);
  }

  void project_qkv(const LayerWeights& w, const LayerActivationsCuda& a) {
    const ProfileRange range("qkv");
    linear_forward(a.attention_normed, w.w_qkv, a.qkv);
    if (w.q_norm != nullptr) {
      TWELL_CUDA_CHECK(launch_head_norm({.tokens = tokens_,
                                         .heads = config_.heads,
                                         .kv_heads = config_.kv_heads,
                                         .head_dim = config_.head_dim,
                                         .bias = device_bf16(w.b_qkv),
                                         .q_norm = device_bf16(w.q_norm),
                                         .k_norm = device_bf16(w.k_norm),
                                         .qkv = a.qkv,
                                         .eps = eps(),
                                         .kept = a.qk_in},
                                        ctx_.stream()));
    }
    rotate(a.qkv, w.q_norm == nullptr ? w.b_qkv : nullptr, /*inverse=*/false);
    done(TrainingStage::kProjections);
  }

  void project_attended(const LayerWeights& w, const LayerActivationsCuda& a) {
    linear_forward(a.attended, w.w_o, views_.delta);
    if (w.b_o == nullptr) return;
    TWELL_CUDA_CHECK(launch_bias_forward(
        {.tokens = tokens_, .width = config_.width, .bias = device_bf16(w.b_o), .x = views_.delta},
        ctx_.stream()));
  }

  void bias_backward(const __nv_bfloat16* d_y, int64_t width, float* d_bias) {
    TWELL_CUDA_CHECK(launch_bias_backward({.tokens = tokens_,
                                           .width = width,
                                           .d_y = d_y,
                                           .d_bias = d_bias,
                                           .partial = views_.partial},
                                          ctx_.stream()));
  }

  void attention_block_backward(size_t layer, RecomputeLevel level, const LayerWeights& w,
                                const LayerActivationsCuda& a, const LayerGrads& d) {
    ProfileRange range("output");
    if (d.b_o != nullptr) bias_backward(views_.d_residual, config_.width, d.b_o);
    linear_backward(a.attended, w.w_o, views_.d_residual, views_.d_attended, d.w_o);
    done(TrainingStage::kProjections);
    if (level >= RecomputeLevel::kNorms) {
      norm(a.attention_in, w.attention_norm, a.attention_normed);
    }
    if (level >= RecomputeLevel::kQkv) project_qkv(w, a);
    range.next("attention");
    attention_train_backward(ctx_, {.shape = attention_shape(layer),
                                    .qkv = a.qkv,
                                    .out = a.attended,
                                    .logsumexp = a.logsumexp,
                                    .d_out = views_.d_attended,
                                    .d_qkv = views_.d_qkv,
                                    .mask = mask_of(layer)});
    done(TrainingStage::kAttention);
    range.next("qkv");
    rotate(views_.d_qkv, nullptr, /*inverse=*/true);
    if (d.q_norm != nullptr) {
      TWELL_CUDA_CHECK(launch_head_norm_backward({.tokens = tokens_,
                                                  .heads = config_.heads,
                                                  .kv_heads = config_.kv_heads,
                                                  .head_dim = config_.head_dim,
                                                  .kept = a.qk_in,
                                                  .q_norm = device_bf16(w.q_norm),
                                                  .k_norm = device_bf16(w.k_norm),
                                                  .d_qkv = views_.d_qkv,
                                                  .d_q_norm = d.q_norm,
                                                  .d_k_norm = d.k_norm,
                                                  .partial = views_.partial,
                                                  .eps = eps()},
                                                 ctx_.stream()));
    }
    if (d.b_qkv != nullptr) bias_backward(views_.d_qkv, qkv_width(config_), d.b_qkv);
    linear_backward(a.attention_normed, w.w_qkv, views_.d_qkv, views_.d_normed, d.w_qkv);
    done(TrainingStage::kProjections);
  }

  void feed_forward_forward(size_t layer, const LayerWeights& w, const LayerActivationsCuda& a) {
    const ProfileRange range("ffn");
    const auto at = static_cast<int64_t>(layer);
    FfnTrainForwardCuda problem;
    problem.tokens = tokens_;
    problem.weights = ffn_weights(w);
    problem.relu_share = pass_.relu_share;
    problem.x = a.ffn_normed;
    problem.y = views_.delta;
    if (pass_.counts != nullptr) problem.counts = pass_.counts + at;
    if (pass_.active != nullptr) problem.active = pass_.active + at * config_.ffn;
    if (pass_.before_ffn) pass_.before_ffn(at, problem);
    ffn_train_forward_cuda(ctx_, problem, buffers_.ffn[layer], *buffers_.ffn_workspace);
    done(TrainingStage::kFfn);
  }

  void ffn_input_again(RecomputeLevel level, const LayerWeights& w, const LayerActivationsCuda& a) {
    if (level >= RecomputeLevel::kInputs) {
      project_attended(w, a);
      done(TrainingStage::kProjections);
      norm(a.attention_in, w.ffn_norm, a.ffn_normed, a.ffn_in, {.y = ffn_rows_});
    } else if (level == RecomputeLevel::kNorms) {
      norm(a.ffn_in, w.ffn_norm, a.ffn_normed, nullptr, {.y = ffn_rows_});
    }
  }

  void feed_forward_backward(size_t layer, const LayerWeights& w, const LayerActivationsCuda& a,
                             const LayerGrads& d) {
    const ProfileRange range("ffn");
    ffn_train_backward_cuda(ctx_,
                            {.tokens = tokens_,
                             .weights = ffn_weights(w),
                             .relu_share = pass_.relu_share,
                             .x = a.ffn_normed,
                             .d_y = ffn_rows_ == nullptr ? views_.d_residual : views_.d_delta,
                             .l1_scale = pass_.l1_scale,
                             .d_x = views_.d_normed,
                             .grads = {.w_gate = d.ffn.w_gate.data,
                                       .w_up = d.ffn.w_up.data,
                                       .w_down = d.ffn.w_down.data,
                                       .add = pass_.add,
                                       .b_gate = d.ffn.b_gate,
                                       .b_up = d.ffn.b_up,
                                       .b_down = d.ffn.b_down}},
                            buffers_.ffn[layer], *buffers_.ffn_workspace);
    done(TrainingStage::kFfn);
  }

  void rotate(__nv_bfloat16* qkv, const BF16* bias, bool inverse) {
    TWELL_CUDA_CHECK(launch_rope({.tokens = tokens_,
                                  .heads = config_.heads,
                                  .kv_heads = config_.kv_heads,
                                  .head_dim = config_.head_dim,
                                  .cos = buffers_.cos.data(),
                                  .sin = buffers_.sin.data(),
                                  .positions = positions_,
                                  .bias = device_bf16(bias),
                                  .qkv = qkv,
                                  .inverse = inverse},
                                 ctx_.stream()));
  }

  void linear_forward(const __nv_bfloat16* x, const Matrix<const BF16>& w, __nv_bfloat16* y) {
    linear_cuda(ctx_, {.rows = tokens_,
                       .cols = w.rows,
                       .inner = w.cols,
                       .x = x,
                       .w = device_bf16(w.data),
                       .y = y});
  }

  void linear_backward(const __nv_bfloat16* x, const Matrix<const BF16>& w,
                       const __nv_bfloat16* d_y, __nv_bfloat16* d_x, const MatrixF& d_w) {
    linear_backward_cuda(ctx_, {.rows = tokens_,
                                .cols = w.rows,
                                .inner = w.cols,
                                .x = x,
                                .w = device_bf16(w.data),
                                .d_y = d_y,
                                .d_x = d_x,
                                .d_w = d_w.data,
                                .d_w_add = pass_.add});
  }

  // Clears the gradients to which ops only add; matrix products can overwrite theirs. If embedding
  // and head share a matrix, the head overwrites its gradient first.
  void clear_added_gradients() {
    const auto clear = [&](float* from, int64_t count) {
      if (from == nullptr) return;
      TWELL_CUDA_CHECK(
          cudaMemsetAsync(from, 0, static_cast<size_t>(count) * sizeof(float), ctx_.stream()));
    };
    if (grads_.embedding.data != grads_.head.data) {
      clear(grads_.embedding.data, config_.vocab_size * config_.width);
    }
    for (const LayerGrads& d : grads_.layers) {
      clear(d.attention_norm, config_.width);
      clear(d.ffn_norm, config_.width);
      clear(d.b_qkv, qkv_width(config_));
      clear(d.b_o, config_.width);
      clear(d.q_norm, config_.head_dim);
      clear(d.k_norm, config_.head_dim);
      clear(d.ffn.b_gate, round_up(config_.ffn, int64_t{8}));  // with the padding
      clear(d.ffn.b_up, round_up(config_.ffn, int64_t{8}));
      clear(d.ffn.b_down, config_.width);
    }
    clear(grads_.final_norm, config_.width);
  }

  FfnWeightsCuda ffn_weights(const LayerWeights& w) const {
    return {.w_gate = device_bf16(w.ffn.w_gate.data),
            .w_up = device_bf16(w.ffn.w_up.data),
            .w_down = device_bf16(w.ffn.w_down.data),
            .activation = pass_.activation.value_or(config_.activation),
            .b_gate = device_bf16(w.ffn.b_gate),
            .b_up = device_bf16(w.ffn.b_up),
            .b_down = device_bf16(w.ffn.b_down),
            .threshold = static_cast<float>(config_.activation_threshold)};
  }
  bool documents() const { return views_.mask != nullptr || views_.window_mask != nullptr; }
  int64_t window_of(size_t layer) const {
    return twell::window_of(config_, static_cast<int64_t>(layer), shape_.length);
  }
  const __nv_bfloat16* mask_of(size_t layer) const {
    return window_of(layer) > 0 ? views_.window_mask : views_.mask;
  }
  AttentionTrainShape attention_shape(size_t layer) const {
    return {.sequences = shape_.sequences,
            .length = shape_.length,
            .heads = config_.heads,
            .kv_heads = config_.kv_heads,
            .head_dim = config_.head_dim,
            .document_mask = documents(),
            .window = documents() ? 0 : window_of(layer)};
  }
  float eps() const { return config_.stream_eps(); }
  void await_weights(int64_t layer) const {
    if (pass_.before_layer) pass_.before_layer(layer);
  }
  void backward_done(int64_t layer) const {
    if (pass_.after_backward) pass_.after_backward(layer);
  }
  void done(TrainingStage stage) const {
    if (pass_.after_stage) pass_.after_stage(stage);
  }

  CudaContext& ctx_;
  const ModelConfig& config_;
  const TrainingPassCuda& pass_;
  Buffers& buffers_;
  const ActivationViewsCuda& views_;
  const ModelMatrices<const BF16> weights_;
  const ModelMatrices<float> grads_;
  const MicroBatchShape shape_;
  const int64_t tokens_;
  const int32_t* const inputs_;   // [M]
  const int32_t* const targets_;  // [M]
  // [M] The row of each token in what the feed-forward blocks read and write (ffn_normed, delta and
  // their gradients); null: its own. The norms around these blocks write and read rows in that
  // order. Only hybrid layers gain from another order than the text's.
  const int32_t* const ffn_rows_;
  const int32_t* const positions_;  // [M] for the rotation
  const Recompute recompute_;
};

void TrainingCuda::forward_backward(const TrainingPassCuda& pass) { Pass(*this, pass).run(); }

void TrainingCuda::evaluate(const TrainingPassCuda& pass) {
  TrainingPassCuda loss_only;
  loss_only.weights = pass.weights;
  loss_only.loss = pass.loss;
  Pass(*this, loss_only).evaluate();
}

}  // namespace twell
