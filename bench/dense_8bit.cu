// SPDX-License-Identifier: Apache-2.0
#include "bench/dense_8bit_cuda.h"

#include <cuda_fp8.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "twell/base/for_each.cuh"
#include "twell/base/reduce.cuh"
#include "twell/base/rounding.h"
#include "twell/ops/matmul/cublas_lt.h"

namespace twell {
namespace {

// --- Kernels ------------------------------------------------------------------------------------

constexpr int kThreads = 256;
constexpr int kPiece = 16;  // values that a thread takes at a time: 16 bytes of 8-bit values

template <Dense8Bit kKind>
constexpr float kLargestValue = kKind == Dense8Bit::kFp8 ? 448.0f : 127.0f;
// Stands in for the largest value of a smaller row, so that the scale has an inverse.
constexpr float kLeastLargest = 1e-30f;

// 16 consecutive values, 16 bytes at a time.
__device__ void load_piece(const __nv_bfloat16* from, float (&to)[kPiece]) {
#pragma unroll
  for (int i = 0; i < kPiece / 8; ++i) {
    const uint4 bits = reinterpret_cast<const uint4*>(from)[i];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 pair = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(&bits)[k]);
      to[8 * i + 2 * k] = pair.x;
      to[8 * i + 2 * k + 1] = pair.y;
    }
  }
}

__device__ void load_piece(const int32_t* from, float (&to)[kPiece]) {
#pragma unroll
  for (int i = 0; i < kPiece / 4; ++i) {
    const int4 four = reinterpret_cast<const int4*>(from)[i];
    to[4 * i] = static_cast<float>(four.x);
    to[4 * i + 1] = static_cast<float>(four.y);
    to[4 * i + 2] = static_cast<float>(four.z);
    to[4 * i + 3] = static_cast<float>(four.w);
  }
}

__device__ void load_piece(const float* from, float (&to)[kPiece]) {
#pragma unroll
  for (int i = 0; i < kPiece / 4; ++i) {
    const float4 four = reinterpret_cast<const float4*>(from)[i];
    to[4 * i] = four.x;
    to[4 * i + 1] = four.y;
    to[4 * i + 2] = four.z;
    to[4 * i + 3] = four.w;
  }
}

template <Dense8Bit kKind>
__device__ uint32_t quantise(float4 v) {
  if constexpr (kKind == Dense8Bit::kFp8) {
    return __nv_fp8x4_e4m3(v).__x;  // rounds to nearest even, saturates
  } else {
    const auto byte = [](float x) { return static_cast<uint32_t>(__float2int_rn(x)) & 0xffu; };
    return byte(v.x) | byte(v.y) << 8 | byte(v.z) << 16 | byte(v.w) << 24;
  }
}

// The matrices to quantise. load() gives values [16 * piece, 16 * piece + 16) of a row.

struct StoredRows {
  const __nv_bfloat16* matrix;  // [rows, cols]
  int64_t cols;

  __device__ void load(int64_t row, int piece, float (&to)[kPiece]) const {
    load_piece(matrix + row * cols + int64_t{piece} * kPiece, to);
  }
};

// Rows of the transpose. Reads a 32-byte sector per value, which only weights pay, once.
struct TransposedRows {
  const __nv_bfloat16* matrix;  // [cols, rows]
  int64_t rows;

  __device__ void load(int64_t row, int piece, float (&to)[kPiece]) const {
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      to[k] = __bfloat162float(matrix[(int64_t{piece} * kPiece + k) * rows + row]);
    }
  }
};

// h = f(g) * u, or f(g) where u is null, from the products without their scales.
template <typename Product>
struct HiddenRows {
  const Product* g;       // [M, F]
  const Product* u;       // [M, F] or null
  const float* x_scales;  // [M]
  const float* g_scales;  // [F]
  const float* u_scales;  // [F] or null
  int64_t ffn;
  bool squared;

  __device__ void load(int64_t row, int piece, float (&to)[kPiece]) const {
    const int64_t column = int64_t{piece} * kPiece, at = row * ffn + column;
    const float x_scale = x_scales[row];
    float scale[kPiece];
    load_piece(g + at, to);
    load_piece(g_scales + column, scale);
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      to[k] = fmaxf(to[k] * (x_scale * scale[k]), 0.0f);
      if (squared) to[k] *= to[k];
    }
    if (u == nullptr) return;
    float factor[kPiece];
    load_piece(u + at, factor);
    load_piece(u_scales + column, scale);
#pragma unroll
    for (int k = 0; k < kPiece; ++k) to[k] *= factor[k] * (x_scale * scale[k]);
  }
};

// A CTA per row. Threads keep their values in shared memory, of cols floats, until the scale is
// known.
template <Dense8Bit kKind, typename Rows>
__global__ void __launch_bounds__(kThreads)
    quantise_kernel(Rows rows, int pieces, uint4* values, float* scales) {
  extern __shared__ float4 held[];  // [kPiece / 4][pieces]
  __shared__ float of_warp[kThreads / 32];
  const int64_t row = blockIdx.x;
  float largest = kLeastLargest;
  for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kThreads) {
    float piece[kPiece];
    rows.load(row, i, piece);
#pragma unroll
    for (int k = 0; k < kPiece; ++k) largest = fmaxf(largest, fabsf(piece[k]));
#pragma unroll
    for (int k = 0; k < kPiece / 4; ++k) {
      held[k * pieces + i] = {piece[4 * k], piece[4 * k + 1], piece[4 * k + 2], piece[4 * k + 3]};
    }
  }
  largest = warp_max(largest);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  largest = warp_max(of_warp[threadIdx.x % (kThreads / 32)]);
  const float inverse = kLargestValue<kKind> / largest;
  const auto quantised = [&](float4 v) {
    return quantise<kKind>({v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse});
  };
  for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kThreads) {
    static_assert(kPiece == 16);
    values[row * pieces + i] = {quantised(held[i]), quantised(held[pieces + i]),
                                quantised(held[2 * pieces + i]), quantised(held[3 * pieces + i])};
  }
  if (threadIdx.x == 0) scales[row] = largest / kLargestValue<kKind>;
}

int64_t shared_bytes(int64_t cols) { return cols * int64_t{sizeof(float)}; }

template <Dense8Bit kKind, typename Rows>
void launch_quantise(const CudaContext& ctx, const Rows& source, int64_t rows, int64_t cols,
                     const Rows8BitCuda& to) {
  const auto kernel = quantise_kernel<kKind, Rows>;
  const auto bytes = static_cast<size_t>(shared_bytes(cols));
  TWELL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(bytes)));
  kernel<<<static_cast<unsigned>(rows), kThreads, bytes, ctx.stream()>>>(
      source, static_cast<int>(cols / kPiece), reinterpret_cast<uint4*>(to.values.data()),
      to.scales.data());
  TWELL_CUDA_CHECK_LAUNCH("quantise_kernel");
}

template <typename Rows>
void quantise_rows(const CudaContext& ctx, Dense8Bit kind, const Rows& source, int64_t rows,
                   int64_t cols, const Rows8BitCuda& to) {
  if (kind == Dense8Bit::kFp8) {
    launch_quantise<Dense8Bit::kFp8>(ctx, source, rows, cols, to);
  } else {
    launch_quantise<Dense8Bit::kInt8>(ctx, source, rows, cols, to);
  }
}

// y = products * row scale * column scale, 16 values per thread.
template <typename Product>
struct ScaleProducts {
  const Product* products;     // [M, D]
  const float* row_scales;     // [M]
  const float* column_scales;  // [D]
  __nv_bfloat16* y;            // [M, D]
  int64_t pieces;              // of a row

  __device__ void operator()(int64_t i) const {
    float value[kPiece], scale[kPiece];
    load_piece(products + i * kPiece, value);
    load_piece(column_scales + i % pieces * kPiece, scale);
    const float row_scale = row_scales[i / pieces];
    uint4 packed[kPiece / 8];
#pragma unroll
    for (int k = 0; k < kPiece / 2; ++k) {
      reinterpret_cast<__nv_bfloat162*>(packed)[k] =
          __floats2bfloat162_rn(value[2 * k] * (row_scale * scale[2 * k]),
                                value[2 * k + 1] * (row_scale * scale[2 * k + 1]));
    }
#pragma unroll
    for (int k = 0; k < kPiece / 8; ++k) {
      reinterpret_cast<uint4*>(y)[i * (kPiece / 8) + k] = packed[k];
    }
  }
};

// --- Products -----------------------------------------------------------------------------------

constexpr int64_t kRowStep = 32;  // tokens are also rounded up to a multiple of it

// Median milliseconds of a piece of work on the stream, after one run that warms up.
template <typename Enqueue>
double median_time(const CudaContext& ctx, const Enqueue& enqueue) {
  constexpr int kRepeats = 6;
  const CudaEvent begin(CudaEvent::Timing::kOn), end(CudaEvent::Timing::kOn);
  enqueue();
  std::vector<double> times;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    begin.record(ctx.stream());
    enqueue();
    end.record(ctx.stream());
    end.synchronize();
    times.push_back(end.milliseconds_since(begin));
  }
  std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
  return times[kRepeats / 2];
}

}  // namespace

// c [M, N] = a [M, K] b [N, K]^T without scales, in bf16 (fp8) or s32 (int8), or with the scales of
// both operands' rows, in bf16 (fp8 alone).
class Gemm8BitCuda {
 public:
  enum class Scales { kNone, kOfRows };
  // May write round_up(rows, 32) rows of c without scales, and exactly `rows` with them.
  Gemm8BitCuda(CudaContext& ctx, Dense8Bit kind, int64_t rows, int64_t cols, int64_t inner,
               Scales scales)
      : kind_(kind), scales_(scales) {
    const bool fp8 = kind == Dense8Bit::kFp8;
    const cudaDataType_t operand = fp8 ? CUDA_R_8F_E4M3 : CUDA_R_8I;
    const cudaDataType_t product = fp8 ? CUDA_R_16BF : CUDA_R_32I;
    cublasLtMatmulDesc_t operation = nullptr;
    TWELL_CUBLAS_CHECK(cublasLtMatmulDescCreate(
        &operation, fp8 ? CUBLAS_COMPUTE_32F : CUBLAS_COMPUTE_32I, fp8 ? CUDA_R_32F : CUDA_R_32I));
    operation_.reset(operation);
    // cuBLAS is column-major: it computes c^T [N, M] = b a^T from b^T [K, N] and a^T [K, M].
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    if (fp8) set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{1});
    if (scales == Scales::kOfRows && !use_row_scales()) return;
    b_layout_ = make_layout(operand, inner, cols);
    const auto operands_of = [&](int64_t count) {
      return Operands{make_layout(operand, inner, count), make_layout(product, cols, count)};
    };
    add_proposals(ctx, operands_of(rows));
    // More rows can be faster than fewer, and integer GEMMs may not take 16 and fewer at all.
    const int64_t more = round_up(rows, kRowStep);
    if (more != rows && scales == Scales::kNone) add_proposals(ctx, operands_of(more));
  }

  bool available() const { return !proposals_.empty(); }

  // Times every proposal and keeps the fastest. Synchronises.
  void tune(CudaContext& ctx, const Rows8BitCuda& a, const Rows8BitCuda& b, void* c) {
    std::vector<double> times;
    for (chosen_ = 0; chosen_ < proposals_.size(); ++chosen_) {
      times.push_back(median_time(ctx, [&] { run(ctx, a, b, c); }));
    }
    chosen_ = static_cast<size_t>(std::min_element(times.begin(), times.end()) - times.begin());
  }

  void run(CudaContext& ctx, const Rows8BitCuda& a, const Rows8BitCuda& b, void* c) const {
    const LtHandle& lt = ctx.service<LtHandle>();
    const Proposal& proposal = proposals_[chosen_];
    const Operands& layouts = operands_[proposal.operands];
    const float one = 1.0f, zero = 0.0f;
    const int32_t int_one = 1, int_zero = 0;
    const bool fp8 = kind_ == Dense8Bit::kFp8;
    if (scales_ == Scales::kOfRows) set_scales(a, b);
    TWELL_CUBLAS_CHECK(
        cublasLtMatmul(lt.handle, operation_.get(), fp8 ? static_cast<const void*>(&one) : &int_one,
                       b.values.data(), b_layout_.get(), a.values.data(), layouts.a.get(),
                       fp8 ? static_cast<const void*>(&zero) : &int_zero, c, layouts.c.get(), c,
                       layouts.c.get(), &proposal.algorithm, lt.workspace.data(),
                       static_cast<size_t>(lt.workspace.bytes()), ctx.stream()));
  }

 private:
  struct Operands {
    LtOwned<cublasLtMatrixLayout_t> a, c;
  };
  struct Proposal {
    cublasLtMatmulAlgo_t algorithm;
    size_t operands;  // index
  };

  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) const {
    TWELL_CUBLAS_CHECK(
        cublasLtMatmulDescSetAttribute(operation_.get(), attribute, &value, sizeof(value)));
  }

  void set_scales(const Rows8BitCuda& a, const Rows8BitCuda& b) const {
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(b.scales.data()));
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(a.scales.data()));
  }

  // Whether this cuBLASLt knows scales of rows, which it has since 12.9.
  bool use_row_scales() {
#if CUBLAS_VERSION >= 120900
    const auto set_mode = [&](cublasLtMatmulDescAttributes_t attribute) {
      const int32_t mode = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
      return cublasLtMatmulDescSetAttribute(operation_.get(), attribute, &mode, sizeof(mode)) ==
             CUBLAS_STATUS_SUCCESS;
    };
    // The heuristic looks at whether there are scales, not at their values.
    any_scales_ = Rows8BitCuda(kPiece, 1);
    set_scales(any_scales_, any_scales_);
    return set_mode(CUBLASLT_MATMUL_DESC_A_SCALE_MODE) &&
           set_mode(CUBLASLT_MATMUL_DESC_B_SCALE_MODE);
#else
    return false;
#endif
  }

  void add_proposals(CudaContext& ctx, Operands operands) {
    constexpr int kProposals = 8;  // as for bf16
    cublasLtMatmulPreference_t preference = nullptr;
    TWELL_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    const LtOwned<cublasLtMatmulPreference_t> owned(preference);
    const auto bytes = static_cast<size_t>(kCublasWorkspaceBytes);
    TWELL_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof(bytes)));
    cublasLtMatmulHeuristicResult_t results[kProposals];
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        ctx.service<LtHandle>().handle, operation_.get(), b_layout_.get(), operands.a.get(),
        operands.c.get(), operands.c.get(), preference, kProposals, results, &count);
    if (status != CUBLAS_STATUS_SUCCESS) return;  // no algorithm
    for (int i = 0; i < count; ++i) {
      if (results[i].state != CUBLAS_STATUS_SUCCESS) continue;
      proposals_.push_back({results[i].algo, operands_.size()});
    }
    operands_.push_back(std::move(operands));
  }

  Dense8Bit kind_;
  Scales scales_;
  LtOwned<cublasLtMatmulDesc_t> operation_;
  LtOwned<cublasLtMatrixLayout_t> b_layout_;
  std::vector<Operands> operands_;
  std::vector<Proposal> proposals_;
  size_t chosen_ = 0;
  Rows8BitCuda any_scales_;
};

// --- The layer ----------------------------------------------------------------------------------

std::string_view dense_8bit_name(Dense8Bit kind) {
  return kind == Dense8Bit::kFp8 ? "dense-fp8" : "dense-int8";
}

FfnWeights8BitCuda::FfnWeights8BitCuda(CudaContext& ctx, Dense8Bit kind,
                                       const FfnWeightsCuda& weights, int64_t width, int64_t ffn)
    : up(ffn, width), down(width, ffn) {
  TWELL_CHECK(!weights.biased(), "8-bit layers have no biases");
  if (weights.w_gate != nullptr) {
    gate = Rows8BitCuda(ffn, width);
    quantise_rows(ctx, kind, StoredRows{weights.w_gate, width}, ffn, width, gate);
  }
  quantise_rows(ctx, kind, StoredRows{weights.w_up, width}, ffn, width, up);
  quantise_rows(ctx, kind, TransposedRows{weights.w_down, width}, width, ffn, down);
}

DenseFfn8BitCuda::DenseFfn8BitCuda(CudaContext& ctx, Dense8Bit kind, int64_t tokens, int64_t width,
                                   int64_t ffn, bool gated, Activation activation)
    : kind_(kind),
      tokens_(tokens),
      width_(width),
      ffn_(ffn),
      gated_(gated),
      squared_(activation == Activation::kRelu2),
      unavailable_(find_obstacle(ctx, activation)) {
  if (!unavailable_.empty()) return;
  using Scales = Gemm8BitCuda::Scales;
  wide_gemm_ = std::make_unique<Gemm8BitCuda>(ctx, kind, tokens, ffn, width, Scales::kNone);
  down_gemm_ = std::make_unique<Gemm8BitCuda>(ctx, kind, tokens, width, ffn, Scales::kNone);
  if (!wide_gemm_->available() || !down_gemm_->available()) {
    unavailable_ =
        fmt::format("cuBLASLt has no algorithm for {} tokens, D {}, F {}", tokens, width, ffn);
    return;
  }
  if (kind == Dense8Bit::kFp8) {
    scaled_down_gemm_ =
        std::make_unique<Gemm8BitCuda>(ctx, kind, tokens, width, ffn, Scales::kOfRows);
    scales_in_gemm_ = scaled_down_gemm_->available();
  }
  const int64_t rows = round_up(tokens, kRowStep);
  const int64_t product_bytes = kind == Dense8Bit::kFp8 ? 2 : 4;
  x_ = Rows8BitCuda(rows, width);
  hidden_ = Rows8BitCuda(rows, ffn);
  gate_products_ = DeviceBuffer<uint8_t>(rows * ffn * product_bytes);
  if (gated) up_products_ = DeviceBuffer<uint8_t>(rows * ffn * product_bytes);
  down_products_ = DeviceBuffer<uint8_t>(rows * width * product_bytes);
  // GEMMs of more rows than tokens read the rest too.
  for (const Rows8BitCuda* operand : {&x_, &hidden_}) {
    TWELL_CUDA_CHECK(cudaMemsetAsync(operand->values.data(), 0,
                                     static_cast<size_t>(operand->values.bytes()), ctx.stream()));
  }
}

DenseFfn8BitCuda::~DenseFfn8BitCuda() = default;

std::string DenseFfn8BitCuda::find_obstacle(const CudaContext& ctx, Activation activation) const {
  if (!leaves_zeros(activation)) {
    return fmt::format("its activation is {}, not relu or relu2", activation_name(activation));
  }
  if (width_ % kPiece != 0 || ffn_ % kPiece != 0) {
    return fmt::format("width {} and FFN size {} are not multiples of {}", width_, ffn_, kPiece);
  }
  if (kind_ == Dense8Bit::kFp8 && ctx.compute_capability() < 89) {
    return fmt::format("{} has no FP8 arithmetic", ctx.device_name());
  }
  int shared = 0;
  TWELL_CUDA_CHECK(
      cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, ctx.device()));
  constexpr int64_t kStatic = 64;  // bytes of shared memory besides the row
  if (shared_bytes(std::max(width_, ffn_)) + kStatic > shared) {
    return fmt::format("a row of {} values exceeds the shared memory of an SM",
                       std::max(width_, ffn_));
  }
  const int64_t rows = round_up(tokens_, kRowStep), product = kind_ == Dense8Bit::kFp8 ? 2 : 4;
  const int64_t needed = rows * (width_ + ffn_) +
                         rows * product * (width_ + (gated_ ? 2 : 1) * ffn_) +
                         2 * kCublasWorkspaceBytes;
  size_t free = 0, total = 0;
  TWELL_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  if (needed > static_cast<int64_t>(free)) {
    return fmt::format("needs {:.1f} GiB of GPU memory, {:.1f} are free",
                       static_cast<double>(needed) / 0x1p30, static_cast<double>(free) / 0x1p30);
  }
  return {};
}

std::string DenseFfn8BitCuda::arithmetic() const {
  return fmt::format("{}, a scale per row, those of y applied {} its GEMM",
                     kind_ == Dense8Bit::kFp8 ? "e4m3, f32 sums" : "s8, s32 sums",
                     scales_in_gemm_ ? "by" : "after");
}

void DenseFfn8BitCuda::tune(CudaContext& ctx, const FfnWeights8BitCuda& weights,
                            const __nv_bfloat16* x, __nv_bfloat16* y) {
  quantise_rows(ctx, kind_, StoredRows{x, width_}, tokens_, width_, x_);
  wide_gemm_->tune(ctx, x_, weights.up, gated_ ? up_products_.data() : gate_products_.data());
  forward(ctx, weights, x, y);
  down_gemm_->tune(ctx, hidden_, weights.down, down_products_.data());
  if (!scales_in_gemm_) return;
  scaled_down_gemm_->tune(ctx, hidden_, weights.down, y);
  const double in_gemm = median_time(ctx, [&] { down(ctx, weights, y); });
  scales_in_gemm_ = false;
  scales_in_gemm_ = in_gemm <= median_time(ctx, [&] { down(ctx, weights, y); });
}

void DenseFfn8BitCuda::forward(CudaContext& ctx, const FfnWeights8BitCuda& weights,
                               const __nv_bfloat16* x, __nv_bfloat16* y) const {
  gate(ctx, weights, x);
  up_down(ctx, weights, y);
}

void DenseFfn8BitCuda::gate(CudaContext& ctx, const FfnWeights8BitCuda& weights,
                            const __nv_bfloat16* x) const {
  quantise_rows(ctx, kind_, StoredRows{x, width_}, tokens_, width_, x_);
  wide_gemm_->run(ctx, x_, gated_ ? weights.gate : weights.up, gate_products_.data());
}

void DenseFfn8BitCuda::up_down(CudaContext& ctx, const FfnWeights8BitCuda& weights,
                               __nv_bfloat16* y) const {
  if (gated_) wide_gemm_->run(ctx, x_, weights.up, up_products_.data());
  quantise_hidden(ctx, weights);
  down(ctx, weights, y);
}

void DenseFfn8BitCuda::quantise_hidden(CudaContext& ctx, const FfnWeights8BitCuda& weights) const {
  const auto quantise_as = [&]<typename Product>(const Product* g, const Product* u) {
    const HiddenRows<Product> rows{.g = g,
                                   .u = gated_ ? u : nullptr,
                                   .x_scales = x_.scales.data(),
                                   .g_scales = (gated_ ? weights.gate : weights.up).scales.data(),
                                   .u_scales = weights.up.scales.data(),
                                   .ffn = ffn_,
                                   .squared = squared_};
    quantise_rows(ctx, kind_, rows, tokens_, ffn_, hidden_);
  };
  if (kind_ == Dense8Bit::kFp8) {
    quantise_as(reinterpret_cast<const __nv_bfloat16*>(gate_products_.data()),
                reinterpret_cast<const __nv_bfloat16*>(up_products_.data()));
  } else {
    quantise_as(reinterpret_cast<const int32_t*>(gate_products_.data()),
                reinterpret_cast<const int32_t*>(up_products_.data()));
  }
}

void DenseFfn8BitCuda::down(CudaContext& ctx, const FfnWeights8BitCuda& weights,
                            __nv_bfloat16* y) const {
  if (scales_in_gemm_) {
    scaled_down_gemm_->run(ctx, hidden_, weights.down, y);
    return;
  }
  down_gemm_->run(ctx, hidden_, weights.down, down_products_.data());
  const auto scale_as = [&]<typename Product>(const Product* products) {
    const int64_t pieces = width_ / kPiece;
    const ScaleProducts<Product> scale{.products = products,
                                       .row_scales = hidden_.scales.data(),
                                       .column_scales = weights.down.scales.data(),
                                       .y = y,
                                       .pieces = pieces};
    TWELL_CUDA_CHECK(launch_for_each(tokens_ * pieces, scale, ctx.stream()));
  };
  if (kind_ == Dense8Bit::kFp8) {
    scale_as(reinterpret_cast<const __nv_bfloat16*>(down_products_.data()));
  } else {
    scale_as(reinterpret_cast<const int32_t*>(down_products_.data()));
  }
}

}  // namespace twell
