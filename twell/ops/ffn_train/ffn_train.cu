// SPDX-License-Identifier: Apache-2.0
// The feed-forward layer in training on the GPU: the dense execution, cuBLASLt products with two
// elementwise kernels between them; then the entry points of both executions, with memory and
// checks.
#include <algorithm>

#include "twell/base/for_each.cuh"
#include "twell/base/rounding.h"
#include "twell/ops/activation/activation.cuh"
#include "twell/ops/bias/bias_cuda.h"
#include "twell/ops/ffn_train/ffn_train_parts.cuh"
#include "twell/ops/matmul/linear_cuda.h"
#include "twell/ops/matmul/matmul_cuda.h"

namespace twell::ffn_train {
namespace {

// A sum of doubles over CTAs, in a fixed order: each CTA writes its part, and the CTA that finishes
// last adds them up.
struct OrderedSum {
  double* parts;     // [CTAs]
  uint32_t* ticket;  // 0 before and after
};
constexpr int64_t kHiddenRows = 8;  // tokens per CTA of the forward kernel
int64_t hidden_ctas(int64_t tokens) { return (tokens + kHiddenRows - 1) / kHiddenRows; }
constexpr int64_t kUnionTokens = 128;
// Words of a mask of the neurons that are active in tiles of kUnionTokens tokens.
int64_t union_mask_words(int64_t tokens, int64_t ffn) {
  return (tokens + kUnionTokens - 1) / kUnionTokens * ((ffn + 31) / 32);
}

// Arrays of a token and its neurons have rows of whole pieces of 8 values; nothing reads those
// behind F, whatever they hold.
int64_t row_stride(int64_t ffn) { return round_up(ffn, int64_t{8}); }

// h = f(g) * u, or f(g) without a gate (u null), and the layer's activity. Where h is null, only
// its activity.
struct HiddenForward {
  const __nv_bfloat16* g = nullptr;      // [M, row_stride(F)] f's input, or its ReLU
  const __nv_bfloat16* u = nullptr;      // [M, row_stride(F)]
  __nv_bfloat16* h = nullptr;            // [M, row_stride(F)]
  int64_t tokens = 0;                    // M
  int64_t ffn = 0;                       // F
  FfnTrainCountsCuda* counts = nullptr;  // added to, or null
  uint8_t* active = nullptr;             // [F], or null
  uint32_t* union_mask = nullptr;        // [union_mask_words(M, F)], must be 0 before
  OrderedSum sum;                        // [hidden_ctas(M)]
  float threshold = 0.0f;                // of fatrelu
  const float* relu_share = nullptr;     // one, in device memory, or null
};

// First d_h += l1_scale * sign(h). Then g becomes d_g = d_h * u * f'(g), u (if not null) becomes
// d_u = d_h * f(g), and d_h becomes h. With `keeps_g`, g stays as it is, and d_h becomes d_g.
struct HiddenBackward {
  __nv_bfloat16* d_h = nullptr;       // [M, row_stride(F)]
  __nv_bfloat16* g = nullptr;         // [M, row_stride(F)]
  __nv_bfloat16* u = nullptr;         // [M, row_stride(F)]
  int64_t size = 0;                   // values of each
  const float* l1_scale = nullptr;    // one, in device memory
  float threshold = 0.0f;             // of fatrelu
  const float* relu_share = nullptr;  // one, in device memory, or null
  bool keeps_g = false;
};

constexpr int kHiddenThreads = 256;
constexpr int kRows = static_cast<int>(kHiddenRows);

// Sets bits of a word in global memory. Returns how many were 0 before; each bit counts for one
// thread only.
__device__ __forceinline__ int add_to_union(uint32_t* word, uint32_t bits) {
  if ((bits & ~__ldcg(word)) == 0) return 0;
  return __popc(bits & ~atomicOr(word, bits));
}

__device__ __forceinline__ float share_of(const float* relu_share) {
  return relu_share == nullptr ? 0.0f : *relu_share;
}

// A word of two neurons, of which `valid` (bits 0 and 1) exist: h, which is 0 for the others and
// where the neuron is not active. Adds |h| to l1 and sets bits of the active ones in `active`.
template <Activation kKind>
__device__ __forceinline__ uint32_t hidden_word(uint32_t g, uint32_t u, uint32_t valid,
                                                float threshold, float share, float& l1,
                                                uint32_t& active) {
  const Activated first = twell::activated<kKind>(low_half(g), threshold, share);
  const Activated second = twell::activated<kKind>(high_half(g), threshold, share);
  active =
      (static_cast<uint32_t>(first.active) | static_cast<uint32_t>(second.active) << 1) & valid;
  // Where f leaves zeros, h is 0 whatever u is.
  const uint32_t counts = kLeavesZeros<kKind> ? active : valid;
  const float h0 = (counts & 1) != 0 ? first.value * up_factor<kKind>(low_half(u)) : 0.0f;
  const float h1 = (counts & 2) != 0 ? second.value * up_factor<kKind>(high_half(u)) : 0.0f;
  l1 += fabsf(h0);
  l1 += fabsf(h1);
  return bf16x2(h0, h1);
}

// Each CTA handles kRows tokens.
template <Activation kKind>
__global__ void __launch_bounds__(kHiddenThreads) hidden_forward_kernel(HiddenForward problem) {
  __shared__ int row_nnz[kRows];
  const int pieces = static_cast<int>((problem.ffn + 7) / 8);
  const float threshold = problem.threshold, share = share_of(problem.relu_share);
  const int64_t first_row = int64_t{blockIdx.x} * kRows;
  const int rows = static_cast<int>(min(int64_t{kRows}, problem.tokens - first_row));
  const auto* g = reinterpret_cast<const uint4*>(problem.g) + first_row * pieces;
  const auto* u = reinterpret_cast<const uint4*>(problem.u) + first_row * pieces;
  auto* h = reinterpret_cast<uint4*>(problem.h) + first_row * pieces;
  const bool gated = problem.u != nullptr;
  const uint4 ones{kOnes, kOnes, kOnes, kOnes};
  if (threadIdx.x < kRows) row_nnz[threadIdx.x] = 0;
  __syncthreads();
  uint32_t* mask = problem.union_mask + first_row / kUnionTokens * ((problem.ffn + 31) / 32);
  // Two rows share a word, because a thread counts fewer than 2^16 neurons of a row: F is below
  // 2^24.
  uint32_t nnz[kRows / 2] = {};
  int union_neurons = 0;
  float l1 = 0.0f;
  for (int piece = threadIdx.x; piece < pieces; piece += kHiddenThreads) {
    uint32_t any = 0;  // bit per neuron of the piece: it fires on one of the rows
    const int64_t left = problem.ffn - int64_t{piece} * 8;
    const uint32_t valid = left >= 8 ? 0xff : (1u << left) - 1;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row >= rows) break;
      const uint4 gate = g[int64_t{row} * pieces + piece];
      const uint4 up = gated ? u[int64_t{row} * pieces + piece] : ones;
      uint32_t active[4];
      const auto word = [&](uint32_t g_word, uint32_t u_word, int i) {
        return hidden_word<kKind>(g_word, u_word, valid >> (2 * i) & 3, threshold, share, l1,
                                  active[i]);
      };
      const uint4 out{word(gate.x, up.x, 0), word(gate.y, up.y, 1), word(gate.z, up.z, 2),
                      word(gate.w, up.w, 3)};
      const uint32_t bits = active[0] | active[1] << 2 | active[2] << 4 | active[3] << 6;
      nnz[row / 2] += static_cast<uint32_t>(__popc(bits)) << (row % 2 * 16);
      any |= bits;
      if (problem.h != nullptr) h[int64_t{row} * pieces + piece] = out;
    }
    union_neurons += add_to_union(mask + piece / 4, any << (piece % 4 * 8));
    if (problem.active != nullptr) {
      uint8_t* flags = problem.active + piece * 8;
      for (; any != 0; any &= any - 1) {
        const int neuron = __ffs(static_cast<int>(any)) - 1;
        if (flags[neuron] == 0) flags[neuron] = 1;
      }
    }
  }
  if (problem.counts == nullptr) return;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const uint32_t sum = __reduce_add_sync(~0u, nnz[row / 2] >> (row % 2 * 16) & 0xffffu);
    if (threadIdx.x % 32 == 0) atomicAdd(&row_nnz[row], static_cast<int>(sum));
  }
  union_neurons = __reduce_add_sync(~0u, union_neurons);
  if (threadIdx.x % 32 == 0 && union_neurons > 0) {
    atomicAdd(&problem.counts->union_neurons, static_cast<unsigned long long>(union_neurons));
  }
  const double sum = block_sum<kHiddenThreads>(static_cast<double>(l1));
  __shared__ bool last;
  if (threadIdx.x == 0) {
    int total = 0, most = 0;
    for (int row = 0; row < rows; ++row) {
      total += row_nnz[row];
      most = max(most, row_nnz[row]);
    }
    atomicAdd(&problem.counts->nnz, static_cast<unsigned long long>(total));
    atomicAdd(&problem.counts->tokens, static_cast<unsigned long long>(rows));
    atomicMax(&problem.counts->max_row_nnz, most);
    problem.sum.parts[blockIdx.x] = sum;
    __threadfence();
    last = atomicAdd(problem.sum.ticket, 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  double all = 0.0;
  for (unsigned i = threadIdx.x; i < gridDim.x; i += kHiddenThreads)
    all += __ldcg(problem.sum.parts + i);
  all = block_sum<kHiddenThreads>(all);
  if (threadIdx.x == 0) {
    problem.counts->l1_sum += all;
    *problem.sum.ticket = 0;
  }
}

// The same word in backward, see HiddenBackward.
template <Activation kKind>
__device__ __forceinline__ void backward_word(uint32_t& d_h, uint32_t& g, uint32_t& u,
                                              const HiddenBackward& p, float l1_scale,
                                              float share) {
  float d_gate[2], d_up[2], h[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Activated f =
        twell::activated<kKind>(i == 0 ? low_half(g) : high_half(g), p.threshold, share);
    const float factor = up_factor<kKind>(i == 0 ? low_half(u) : high_half(u));
    const bool counts = !kLeavesZeros<kKind> || f.active;
    h[i] = counts ? f.value * factor : 0.0f;
    const float d = with_l1(i == 0 ? low_half(d_h) : high_half(d_h), h[i], l1_scale);
    d_gate[i] = counts ? d * (factor * f.slope) : 0.0f;
    const bool passes = counts && !(kKind == Activation::kDRelu && factor == 0.0f);
    d_up[i] = passes ? d * f.value : 0.0f;
  }
  g = bf16x2(d_gate[0], d_gate[1]);
  u = bf16x2(d_up[0], d_up[1]);
  d_h = bf16x2(h[0], h[1]);
}

// Eight values, i.e. 16 bytes of each array.
template <Activation kKind>
struct BackwardEight {
  HiddenBackward problem;
  __device__ void operator()(int64_t i) const {
    auto* d_h = reinterpret_cast<uint4*>(problem.d_h);
    auto* g = reinterpret_cast<uint4*>(problem.g);
    auto* u = reinterpret_cast<uint4*>(problem.u);
    uint4 d = d_h[i], gate = g[i];
    uint4 up = u != nullptr ? u[i] : uint4{kOnes, kOnes, kOnes, kOnes};
    const float l1_scale = *problem.l1_scale, share = share_of(problem.relu_share);
    backward_word<kKind>(d.x, gate.x, up.x, problem, l1_scale, share);
    backward_word<kKind>(d.y, gate.y, up.y, problem, l1_scale, share);
    backward_word<kKind>(d.z, gate.z, up.z, problem, l1_scale, share);
    backward_word<kKind>(d.w, gate.w, up.w, problem, l1_scale, share);
    d_h[i] = problem.keeps_g ? gate : d;
    if (!problem.keeps_g) g[i] = gate;
    if (u != nullptr) u[i] = up;
  }
};

struct SavedDense {
  __nv_bfloat16* gate;  // [max_tokens, row_stride(F)] f's input, its ReLU, or h
  __nv_bfloat16* up;    // [max_tokens, row_stride(F)] u; null without a gate

  SavedDense(const FfnTrainShapeCuda& shape, Carver& carver)
      : gate(carver.take<__nv_bfloat16>(shape.max_tokens * row_stride(shape.ffn))),
        up(carver.take<__nv_bfloat16>(shape.gated ? shape.max_tokens * row_stride(shape.ffn) : 0)) {
  }
  static SavedDense of(const FfnSavedCuda& saved) {
    Carver carver = device_carver(saved.memory);
    return {saved.shape, carver};
  }
};

struct DenseWorkspace {
  OrderedSum sum;
  uint32_t* union_mask;   // [union_mask_words]
  __nv_bfloat16* hidden;  // [max_tokens, row_stride(F)] h, then d_h
  float* partial;         // for the gradients of biases

  DenseWorkspace(const FfnTrainShapeCuda& shape, Carver& carver) {
    sum.ticket = carver.take<uint32_t>(1);
    sum.parts = carver.take<double>(hidden_ctas(shape.max_tokens));
    union_mask = carver.take<uint32_t>(union_mask_words(shape.max_tokens, shape.ffn));
    hidden = carver.take<__nv_bfloat16>(shape.max_tokens * row_stride(shape.ffn));
    partial = carver.take<float>(shape.biased ? bias_backward_partials(shape.max_tokens) *
                                                    std::max(row_stride(shape.ffn), shape.width)
                                              : 0);
  }
  static DenseWorkspace of(const FfnTrainWorkspaceCuda& workspace) {
    Carver carver = device_carver(workspace.memory);
    return {workspace.shape, carver};
  }
};

}  // namespace

namespace {

// A bias comes between the product and its ReLU, and the epilogue has no threshold.
bool relu_in_epilogue(const FfnWeightsCuda& weights) {
  return leaves_zeros(weights.activation) && weights.activation != Activation::kFatRelu &&
         !weights.biased();
}

// Whether the first product with its epilogue is h already.
bool saves_hidden(const FfnWeightsCuda& weights) {
  return weights.w_gate == nullptr && weights.activation == Activation::kRelu && !weights.biased();
}

}  // namespace

int64_t dense_saved_bytes(const FfnTrainShapeCuda& shape) {
  Carver carver = device_carver();
  SavedDense(shape, carver);
  return carver.bytes();
}

int64_t dense_workspace_bytes(const FfnTrainShapeCuda& shape) {
  Carver carver = device_carver();
  DenseWorkspace(shape, carver);
  return carver.bytes();
}

void dense_forward_cuda(CudaContext& ctx, const FfnTrainForwardCuda& problem, FfnSavedCuda& saved,
                        FfnTrainWorkspaceCuda& workspace) {
  const int64_t width = saved.shape.width, ffn = saved.shape.ffn;
  const bool gated = saved.shape.gated;
  const FfnWeightsCuda& weights = problem.weights;
  const SavedDense kept = SavedDense::of(saved);
  const DenseWorkspace work = DenseWorkspace::of(workspace);
  const auto add_bias = [&](const __nv_bfloat16* bias, int64_t cols, __nv_bfloat16* x) {
    if (!weights.biased()) return;
    TWELL_CUDA_CHECK(launch_bias_forward(
        {.tokens = problem.tokens, .width = cols, .bias = bias, .x = x}, ctx.stream()));
  };
  MatmulShapeCuda product{.rows = problem.tokens,
                          .cols = ffn,
                          .inner = width,
                          .trans_b = true,
                          .relu = relu_in_epilogue(weights),
                          .c_stride = row_stride(ffn)};
  matmul_cuda(ctx, product, problem.x, gated ? weights.w_gate : weights.w_up, kept.gate);
  add_bias(gated ? weights.b_gate : weights.b_up, ffn, kept.gate);
  if (gated) {
    product.relu = false;
    matmul_cuda(ctx, product, problem.x, weights.w_up, kept.up);
    add_bias(weights.b_up, ffn, kept.up);
  }
  const bool in_place = saves_hidden(weights);
  __nv_bfloat16* hidden = in_place ? kept.gate : work.hidden;
  const bool counts = problem.counts != nullptr || problem.active != nullptr;
  if (!in_place || counts) {
    const int64_t mask_bytes =
        union_mask_words(problem.tokens, ffn) * static_cast<int64_t>(sizeof(uint32_t));
    TWELL_CUDA_CHECK(
        cudaMemsetAsync(work.union_mask, 0, static_cast<size_t>(mask_bytes), ctx.stream()));
    const HiddenForward step{.g = kept.gate,
                             .u = gated ? kept.up : nullptr,
                             .h = in_place ? nullptr : hidden,
                             .tokens = problem.tokens,
                             .ffn = ffn,
                             .counts = problem.counts,
                             .active = problem.active,
                             .union_mask = work.union_mask,
                             .sum = work.sum,
                             .threshold = weights.threshold,
                             .relu_share = problem.relu_share};
    const auto ctas = static_cast<unsigned>(hidden_ctas(problem.tokens));
    with_activation(weights.activation, [&]<Activation kKind>() {
      hidden_forward_kernel<kKind><<<ctas, kHiddenThreads, 0, ctx.stream()>>>(step);
    });
    TWELL_CUDA_CHECK_LAUNCH("hidden_forward_kernel");
  }
  matmul_cuda(ctx,
              {.rows = problem.tokens, .cols = width, .inner = ffn, .a_stride = row_stride(ffn)},
              hidden, weights.w_down, problem.y);
  add_bias(weights.b_down, width, problem.y);
}

void dense_backward_cuda(CudaContext& ctx, const FfnTrainBackwardCuda& problem, FfnSavedCuda& saved,
                         FfnTrainWorkspaceCuda& workspace) {
  const int64_t width = saved.shape.width, ffn = saved.shape.ffn;
  const bool gated = saved.shape.gated;
  const FfnWeightsCuda& weights = problem.weights;
  const SavedDense kept = SavedDense::of(saved);
  const DenseWorkspace work = DenseWorkspace::of(workspace);
  const auto linear = [&](const __nv_bfloat16* x, const __nv_bfloat16* w, const __nv_bfloat16* d_y,
                          __nv_bfloat16* d_x, bool d_x_add, float* d_w) {
    linear_backward_cuda(ctx, {.rows = problem.tokens,
                               .cols = ffn,
                               .inner = width,
                               .x = x,
                               .w = w,
                               .d_y = d_y,
                               .d_x = d_x,
                               .d_x_add = d_x_add,
                               .d_w = d_w,
                               .d_w_add = problem.grads.add,
                               .d_y_stride = row_stride(ffn)});
  };
  const auto bias = [&](const __nv_bfloat16* d_y, int64_t cols, float* d_bias) {
    if (!weights.biased()) return;
    TWELL_CUDA_CHECK(launch_bias_backward({.tokens = problem.tokens,
                                           .width = cols,
                                           .d_y = d_y,
                                           .d_bias = d_bias,
                                           .partial = work.partial},
                                          ctx.stream()));
  };
  __nv_bfloat16* gate = kept.gate;
  __nv_bfloat16* d_hidden = work.hidden;
  const MatmulShapeCuda through_down{.rows = problem.tokens,
                                     .cols = ffn,
                                     .inner = width,
                                     .trans_b = true,
                                     .c_stride = row_stride(ffn)};
  matmul_cuda(ctx, through_down, problem.d_y, weights.w_down, d_hidden);
  const bool in_place = saves_hidden(weights);
  if (in_place) linear(problem.d_y, nullptr, gate, nullptr, false, problem.grads.w_down);
  const HiddenBackward step{.d_h = d_hidden,
                            .g = gate,
                            .u = gated ? kept.up : nullptr,
                            .size = problem.tokens * row_stride(ffn),
                            .l1_scale = problem.l1_scale,
                            .threshold = weights.threshold,
                            .relu_share = problem.relu_share,
                            .keeps_g = in_place};
  with_activation(weights.activation, [&]<Activation kKind>() {
    TWELL_CUDA_CHECK(launch_for_each(step.size / 8, BackwardEight<kKind>{step}, ctx.stream()));
  });
  if (in_place) {
    linear(problem.x, weights.w_up, d_hidden, problem.d_x, false, problem.grads.w_up);
    return;
  }
  // d_hidden holds h now, gate d_g and kept.up d_u.
  linear(problem.d_y, nullptr, d_hidden, nullptr, false, problem.grads.w_down);
  bias(problem.d_y, width, problem.grads.b_down);
  bias(gate, ffn, gated ? problem.grads.b_gate : problem.grads.b_up);
  if (!gated) {
    linear(problem.x, weights.w_up, gate, problem.d_x, false, problem.grads.w_up);
    return;
  }
  bias(kept.up, ffn, problem.grads.b_up);
  linear(problem.x, weights.w_gate, gate, problem.d_x, false, problem.grads.w_gate);
  linear(problem.x, weights.w_up, kept.up, problem.d_x, true, problem.grads.w_up);
}

}  // namespace twell::ffn_train

namespace twell {
namespace {

void check_shape(const FfnTrainShapeCuda& shape) {
  TWELL_CHECK(shape.max_tokens > 0 && shape.width > 0 && shape.ffn > 0,
              "FFN in training: {} tokens, width {}, {} neurons", shape.max_tokens, shape.width,
              shape.ffn);
  TWELL_CHECK(shape.width % 8 == 0, "width {} must be a multiple of 8", shape.width);
}

void check_call(const FfnTrainShapeCuda& saved, const FfnTrainShapeCuda& workspace, int64_t tokens,
                const FfnWeightsCuda& weights) {
  TWELL_CHECK(saved.width == workspace.width && saved.ffn == workspace.ffn &&
                  saved.gated == workspace.gated && saved.biased == workspace.biased,
              "FFN of width {} and {} neurons in a workspace for {} and {}", saved.width, saved.ffn,
              workspace.width, workspace.ffn);
  TWELL_CHECK(tokens > 0 && tokens <= saved.max_tokens && tokens <= workspace.max_tokens,
              "{} tokens, at most {} were planned for", tokens,
              std::min(saved.max_tokens, workspace.max_tokens));
  TWELL_CHECK(weights.biased() == saved.biased, "biases for a layer that has {}",
              saved.biased ? "some" : "none");
  TWELL_CHECK(weights.activation != Activation::kDRelu || saved.gated, "drelu needs a gate");
  TWELL_CHECK((weights.w_gate != nullptr) == saved.gated, "weights {} gate for a layer that has {}",
              weights.w_gate != nullptr ? "with a" : "without a", saved.gated ? "one" : "none");
}

}  // namespace

FfnSavedCuda::FfnSavedCuda(CudaContext& ctx, const FfnTrainShapeCuda& shape_in) : shape(shape_in) {
  check_shape(shape);
  shape.portable = shape.portable || ctx.compute_capability() != 90;
  prepare(ctx, FfnTrainExecution::kDense, -1.0);
}
FfnSavedCuda::FfnSavedCuda(CudaContext& ctx, const FfnTrainShapeCuda& shape_in,
                           FfnTrainExecution wanted, double nnz, double union_neurons,
                           std::byte* memory_in, int64_t saved_tokens)
    : shape(shape_in), memory(memory_in) {
  check_shape(shape);
  shape.portable = shape.portable || ctx.compute_capability() != 90;
  plan(ctx, wanted, nnz, union_neurons);
  tokens = saved_tokens;
}

void FfnSavedCuda::plan(const CudaContext& ctx, FfnTrainExecution wanted, double nnz,
                        double union_neurons) {
  execution = wanted;
  capacity = {};
  tokens = 0;
  if (execution == FfnTrainExecution::kDense) return;
  const std::string unsupported = ffn_train_hybrid_unsupported(ctx, shape);
  TWELL_CHECK(unsupported.empty(), "hybrid FFN in training: {}", unsupported);
  capacity = ffn_train::hybrid_capacity(shape, nnz, union_neurons);
}

void FfnSavedCuda::prepare(CudaContext& ctx, FfnTrainExecution wanted, double nnz,
                           double union_neurons) {
  TWELL_CHECK(memory == owned.data(),
              "saved activations in the caller's memory cannot be prepared again");
  plan(ctx, wanted, nnz, union_neurons);
  const int64_t needed = bytes_needed(shape, execution, nnz, union_neurons);
  if (owned.bytes() == needed) return;
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
  owned = {};  // freed first, so that both are never held at once
  owned = DeviceBuffer<std::byte>(needed);
  memory = owned.data();
}

int64_t FfnSavedCuda::bytes_needed(const FfnTrainShapeCuda& shape, FfnTrainExecution execution,
                                   double nnz, double union_neurons) {
  if (execution == FfnTrainExecution::kDense) return ffn_train::dense_saved_bytes(shape);
  return ffn_train::hybrid_saved_bytes(shape,
                                       ffn_train::hybrid_capacity(shape, nnz, union_neurons));
}

FfnTrainWorkspaceCuda::FfnTrainWorkspaceCuda(CudaContext& ctx, const FfnTrainShapeCuda& shape_in,
                                             bool with_hybrid, std::byte* memory_in)
    : shape((check_shape(shape_in), shape_in)),
      hybrid(with_hybrid && ffn_train_hybrid_unsupported(ctx, shape).empty()),
      bytes(bytes_needed(ctx, shape, with_hybrid)),
      owned(memory_in == nullptr ? bytes : 0),
      memory(memory_in == nullptr ? owned.data() : memory_in) {
  // The dense execution's ticket lies here, and is 0 between calls.
  TWELL_CUDA_CHECK(cudaMemsetAsync(memory, 0, kOwnBytes, ctx.stream()));
}

int64_t FfnTrainWorkspaceCuda::bytes_needed(const CudaContext& ctx, const FfnTrainShapeCuda& shape,
                                            bool hybrid) {
  const int64_t dense = ffn_train::dense_workspace_bytes(shape);
  if (!hybrid || !ffn_train_hybrid_unsupported(ctx, shape).empty()) return dense;
  return std::max(dense, ffn_train::hybrid_workspace_bytes(shape));
}

void ffn_train_forward_cuda(CudaContext& ctx, const FfnTrainForwardCuda& problem,
                            FfnSavedCuda& saved, FfnTrainWorkspaceCuda& workspace) {
  check_call(saved.shape, workspace.shape, problem.tokens, problem.weights);
  if (saved.execution == FfnTrainExecution::kDense) {
    ffn_train::dense_forward_cuda(ctx, problem, saved, workspace);
  } else {
    TWELL_CHECK(workspace.hybrid, "a hybrid call in a workspace for dense ones");
    TWELL_CHECK(leaves_zeros(problem.weights.activation), "a hybrid call with {}",
                activation_name(problem.weights.activation));
    ffn_train::hybrid_forward_cuda(ctx, problem, saved, workspace);
  }
  saved.tokens = problem.tokens;
}

void ffn_train_backward_cuda(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
                             FfnSavedCuda& saved, FfnTrainWorkspaceCuda& workspace) {
  check_call(saved.shape, workspace.shape, problem.tokens, problem.weights);
  TWELL_CHECK(problem.tokens == saved.tokens,
              "backward of {} tokens, but activations of {} are saved", problem.tokens,
              saved.tokens);
  if (saved.execution == FfnTrainExecution::kDense) {
    ffn_train::dense_backward_cuda(ctx, problem, saved, workspace);
  } else {
    ffn_train::hybrid_backward_cuda(ctx, problem, saved, workspace);
  }
  saved.tokens = 0;
}

GpuFfnLayer gpu_ffn_layer(const CudaContext& ctx, const FfnTrainShapeCuda& shape) {
  return gpu_ffn_layer(gpu_device(ctx), {.width = shape.width,
                                         .ffn = shape.ffn,
                                         .gated = shape.gated,
                                         .activation = shape.activation,
                                         .biased = shape.biased});
}

std::string ffn_train_hybrid_unsupported(const CudaContext& ctx, const FfnTrainShapeCuda& shape) {
  return gpu_ffn_train_unsupported(FfnTrainExecution::kHybrid, gpu_ffn_layer(ctx, shape),
                                   shape.portable);
}

}  // namespace twell
