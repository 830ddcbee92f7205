// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/matmul/matmul_cuda.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <span>
#include <vector>

#include "twell/base/gpu_code.h"
#include "twell/ops/matmul/cublas_lt.h"
#include "twell/ops/route/route.h"

namespace twell {
namespace {

// A shape is timed once it has come back, so that prompts of ever new lengths run undisturbed: a
// model of 64 layers runs its plans 64 times for each of them.
constexpr int64_t kUntimedRuns = 64;
constexpr int64_t kTimedRuns = 5;       // of each proposal
constexpr int32_t kHopperKernels = 66;  // cuBLASLt's number for them ("nvjet")
constexpr double kFaster = 0.97;  // of the time of the one chosen by rules, to be taken instead

// How cuBLASLt proposes to cut a product.
struct Proposal {
  explicit Proposal(const cublasLtMatmulHeuristicResult_t& result) : waves(result.wavesCount) {
    get(result.algo, CUBLASLT_ALGO_CONFIG_ID, kernels);
    get(result.algo, CUBLASLT_ALGO_CONFIG_TILE_ID, tile);
    get(result.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, split_k);
    get(result.algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, reduction);
    get(result.algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, cluster);
  }
  template <typename T>
  static void get(const cublasLtMatmulAlgo_t& algorithm,
                  cublasLtMatmulAlgoConfigAttributes_t attribute, T& value) {
    size_t written = 0;
    TWELL_CUBLAS_CHECK(cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value,
                                                            sizeof(value), &written));
  }
  // Whether results are the same bit for bit, where route::gemm_bits_known: these kernels add up
  // along K in order, so that only the number of parts into which K is split changes the rounding.
  bool adds_as(const Proposal& other) const {
    return kernels == kHopperKernels && other.kernels == kHopperKernels &&
           split_k == other.split_k && reduction == other.reduction;
  }
  bool has_tile(const auto& tiles) const { return std::ranges::find(tiles, tile) != tiles.end(); }
  bool has_cluster(const auto& shapes) const {
    return std::ranges::find(shapes, cluster) != shapes.end();
  }

  float waves;  // rounds of CTAs over the GPU, the last one in part
  int32_t kernels = 0, tile = 0, split_k = 1;
  uint32_t reduction = 0;
  uint16_t cluster = 0;
};

constexpr std::array kSlowFirstTiles = {CUBLASLT_MATMUL_TILE_96x64, CUBLASLT_MATMUL_TILE_96x128,
                                        CUBLASLT_MATMUL_TILE_192x192, CUBLASLT_MATMUL_TILE_320x128};
constexpr std::array kSlowMediumTiles = {CUBLASLT_MATMUL_TILE_256x128,
                                         CUBLASLT_MATMUL_TILE_192x128};
constexpr std::array kMediumTiles = {CUBLASLT_MATMUL_TILE_128x128, CUBLASLT_MATMUL_TILE_144x128,
                                     CUBLASLT_MATMUL_TILE_128x160, CUBLASLT_MATMUL_TILE_168x128,
                                     CUBLASLT_MATMUL_TILE_176x128};
constexpr std::array kLargeTiles = {CUBLASLT_MATMUL_TILE_128x256, CUBLASLT_MATMUL_TILE_256x128};
constexpr std::array kSmallClusters = {CUBLASLT_CLUSTER_SHAPE_1x1x1, CUBLASLT_CLUSTER_SHAPE_2x1x1,
                                       CUBLASLT_CLUSTER_SHAPE_1x2x1};
constexpr std::array kClustersOfEight = {CUBLASLT_CLUSTER_SHAPE_4x2x1, CUBLASLT_CLUSTER_SHAPE_2x4x1,
                                         CUBLASLT_CLUSTER_SHAPE_8x1x1,
                                         CUBLASLT_CLUSTER_SHAPE_1x8x1};

// The proposal to run (bench/results/2026-11-23-h200-sweep-auto.txt, of cuBLASLt 13.1 on an H200).
// Of products of 64 to 1,024 rows and of more, its first proposal takes 1.03 and 1.05 of the time
// of the fastest in the mean, the one chosen here 1.013 and 1.005; below 64 rows the first
// takes 1.006.
int best_proposal(const CudaContext& ctx, const MatmulShapeCuda& shape,
                  std::span<const cublasLtMatmulHeuristicResult_t> results) {
  const bool measured = ctx.compute_capability() == 90 && !shape.trans_a && !shape.f32_out;
  if (!measured) return 0;
  const std::vector<Proposal> proposals(results.begin(), results.end());
  int chosen = 0;
  const auto take_first = [&](const auto& suits) {
    const auto found = std::ranges::find_if(proposals, suits);
    if (found != proposals.end()) chosen = static_cast<int>(found - proposals.begin());
    return found != proposals.end();
  };
  const auto medium = [](const Proposal& p) { return p.has_tile(kMediumTiles); };
  const route::GemmRules rules = route::gemm_rules(shape.rows);
  if (rules.proven_tiles) {
    if (!take_first(medium)) take_first([](const Proposal& p) { return p.has_tile(kLargeTiles); });
    return chosen;
  }

  if (proposals.size() > 1 && proposals[0].has_tile(kSlowFirstTiles)) chosen = 1;
  if (!rules.follows_rules) return chosen;
  const Proposal& p = proposals[static_cast<size_t>(chosen)];
  // Many tiles of medium size leave less of the last wave idle.
  if (rules.medium_tiles && p.split_k == 1 && p.has_tile(kSlowMediumTiles)) {
    take_first([&](const Proposal& other) {
      return other.split_k == 1 && (medium(other) || other.tile == CUBLASLT_MATMUL_TILE_112x128);
    });
  }
  // Few rows are bound by reading the weights, which is fastest in one full wave of small clusters.
  const auto full_wave = [](const Proposal& other) {
    return other.split_k == 1 && other.has_cluster(kSmallClusters) && other.waves >= 0.9f &&
           other.waves <= 1.0f;
  };
  if (rules.full_wave && (p.split_k > 1 || p.has_cluster(kClustersOfEight))) take_first(full_wave);
  // Clusters of four are slow where they are many; why is not known.
  const auto four = [](const Proposal& other) {
    return other.split_k == 1 && other.cluster == CUBLASLT_CLUSTER_SHAPE_4x1x1;
  };
  if (rules.few_clusters_of_four && four(p) && p.waves > 0.72f) {
    take_first([&](const Proposal& other) {
      return full_wave(other) || (four(other) && other.waves > 0.5f && other.waves <= 0.7f);
    });
  }
  return chosen;
}

// CUTLASS's kernels on mma.sync, for compute capability 8.0, whose number of stages is stated.
constexpr int kAmpereKernels = 21;
constexpr int64_t kFewAmpereRows = 1024;  // are also cut along K
constexpr std::array<int32_t, 4> kAmpereCuts = {1, 2, 4, 8};

// Empty where the algorithm says nothing.
std::vector<uint32_t> of_algorithm(const cublasLtMatmulAlgo_t& algorithm,
                                   cublasLtMatmulAlgoCapAttributes_t attribute) {
  std::array<uint32_t, 256> values{};
  size_t bytes = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoCapGetAttribute(
      &algorithm, attribute, values.data(), sizeof(values), &bytes);
  if (status != CUBLAS_STATUS_SUCCESS) bytes = 0;
  return {values.begin(), values.begin() + bytes / sizeof(uint32_t)};
}

template <typename T>
void configure(cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute,
               T value) {
  TWELL_CUBLAS_CHECK(
      cublasLtMatmulAlgoConfigSetAttribute(&algorithm, attribute, &value, sizeof(value)));
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  TWELL_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// Never waits.
bool is_complete(const CudaEvent& event) {
  const cudaError_t status = cudaEventQuery(event.get());
  if (status == cudaErrorNotReady) {
    cudaGetLastError();  // or the check of the next launch would report it
    return false;
  }
  TWELL_CUDA_CHECK(status);
  return true;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::ranges::nth_element(values, middle);
  return *middle;
}

// A plan takes some KiB and 0.1 ms to make. Callers of ever new numbers of rows, as PyTorch's are,
// start again with none.
constexpr size_t kMostPlans = 1024;

struct MatmulPlans {
  std::map<MatmulShapeCuda, MatmulPlanCuda> plans;
  bool tuning = false;
};

}  // namespace

const int64_t MatmulPlanCuda::kRunsToSettle = kUntimedRuns + 2 * kTimedRuns * kProposals + 1;

// cuBLAS is column-major: it computes c^T [N, M] = op(b)^T op(a)^T.
MatmulPlanCuda::MatmulPlanCuda(CudaContext& ctx, const MatmulShapeCuda& shape) : shape_(shape) {
  cublasLtMatmulDesc_t operation = nullptr;
  TWELL_CUBLAS_CHECK(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  operation_.reset(operation);
  const cublasOperation_t op_b = shape.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  TWELL_CUBLAS_CHECK(
      cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &op_b, sizeof(op_b)));
  const cublasOperation_t op_a = shape.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  TWELL_CUBLAS_CHECK(
      cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSB, &op_a, sizeof(op_a)));
  const cublasLtEpilogue_t epilogue =
      shape.relu ? CUBLASLT_EPILOGUE_RELU : CUBLASLT_EPILOGUE_DEFAULT;
  TWELL_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_EPILOGUE,
                                                    &epilogue, sizeof(epilogue)));
  const cudaDataType_t type = CUDA_R_16BF;
  layout_b_ = shape.trans_b ? make_layout(type, shape.inner, shape.cols)
                            : make_layout(type, shape.cols, shape.inner);
  layout_a_ = shape.trans_a ? make_layout(type, shape.rows, shape.inner, shape.a_stride)
                            : make_layout(type, shape.inner, shape.rows, shape.a_stride);
  layout_c_ =
      make_layout(shape.f32_out ? CUDA_R_32F : type, shape.cols, shape.rows, shape.c_stride);

  cublasLtMatmulPreference_t preference = nullptr;
  TWELL_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
  const LtOwned<cublasLtMatmulPreference_t> owned(preference);
  const size_t bytes = static_cast<size_t>(kCublasWorkspaceBytes);
  cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                                       sizeof(bytes));
  int found = 0;
  proposals_.resize(kProposals);
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      ctx.service<LtHandle>().handle, operation, layout_b_.get(), layout_a_.get(), layout_c_.get(),
      layout_c_.get(), preference, kProposals, proposals_.data(), &found);
  TWELL_CHECK(status == CUBLAS_STATUS_SUCCESS && found > 0,
              "cuBLASLt has no bf16 algorithm for [{}, {}] x [{}, {}]", shape.rows, shape.inner,
              shape.inner, shape.cols);
  proposals_.resize(static_cast<size_t>(found));
  if (kPortableBuild && matmul_tuning(ctx)) {
    propose_ampere_kernels(ctx);
    return;
  }
  chosen_ = best_proposal(ctx, shape, proposals_);
  if (!route::gemm_bits_known(shape.rows, shape.cols, shape.inner, shape.trans_a)) return;
  for (int i = 0; i < found; ++i) {
    if (Proposal(proposals_[i]).adds_as(Proposal(proposals_[chosen_]))) candidates_.push_back(i);
  }
}

void MatmulPlanCuda::propose_ampere_kernels(CudaContext& ctx) {
  cublasLtHandle_t handle = ctx.service<LtHandle>().handle;
  const cudaDataType_t type = CUDA_R_16BF, out = shape_.f32_out ? CUDA_R_32F : type;
  cublasLtMatmulAlgo_t algorithm;
  TWELL_CUBLAS_CHECK(cublasLtMatmulAlgoInit(handle, CUBLAS_COMPUTE_32F, CUDA_R_32F, type, type, out,
                                            out, kAmpereKernels, &algorithm));
  proposals_.clear();
  const auto propose = [&] {
    cublasLtMatmulHeuristicResult_t result{};
    const cublasStatus_t status =
        cublasLtMatmulAlgoCheck(handle, operation_.get(), layout_b_.get(), layout_a_.get(),
                                layout_c_.get(), layout_c_.get(), &algorithm, &result);
    const auto most = static_cast<size_t>(kCublasWorkspaceBytes);
    if (status != CUBLAS_STATUS_SUCCESS || result.workspaceSize > most) return;
    result.algo = algorithm;
    proposals_.push_back(result);
  };
  const auto cuts =
      std::span(kAmpereCuts).first(shape_.rows <= kFewAmpereRows ? kAmpereCuts.size() : 1);
  for (const uint32_t tile : of_algorithm(algorithm, CUBLASLT_ALGO_CAP_TILE_IDS)) {
    configure(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, tile);
    for (const uint32_t stages : of_algorithm(algorithm, CUBLASLT_ALGO_CAP_STAGES_IDS)) {
      configure(algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID, stages);
      for (const int32_t cut : cuts) {
        configure(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, cut);
        configure(
            algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
            cut == 1 ? CUBLASLT_REDUCTION_SCHEME_NONE : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
        propose();
      }
    }
  }
  TWELL_CHECK(!proposals_.empty(),
              "cuBLASLt has no bf16 algorithm on mma.sync for [{}, {}] x [{}, {}]", shape_.rows,
              shape_.inner, shape_.inner, shape_.cols);
  tunes_first_ = true;
}

cublasStatus_t MatmulPlanCuda::try_with(CudaContext& ctx, const cublasLtMatmulAlgo_t& algorithm,
                                        const __nv_bfloat16* a, const __nv_bfloat16* b,
                                        void* c) const {
  const float one = 1.0f, beta = shape_.add ? 1.0f : 0.0f;
  const LtHandle& lt = ctx.service<LtHandle>();
  return cublasLtMatmul(lt.handle, operation_.get(), &one, b, layout_b_.get(), a, layout_a_.get(),
                        &beta, c, layout_c_.get(), c, layout_c_.get(), &algorithm,
                        lt.workspace.data(), static_cast<size_t>(lt.workspace.bytes()),
                        ctx.stream());
}

void MatmulPlanCuda::run_with(CudaContext& ctx, const cublasLtMatmulAlgo_t& algorithm,
                              const __nv_bfloat16* a, const __nv_bfloat16* b, void* c) const {
  TWELL_CUBLAS_CHECK(try_with(ctx, algorithm, a, b, c));
}

void MatmulPlanCuda::run(CudaContext& ctx, const __nv_bfloat16* a, const __nv_bfloat16* b,
                         void* c) {
  if (tunes_first_ && !is_capturing(ctx.stream())) tune(ctx, a, b, c);
  if (settled() || is_capturing(ctx.stream()) || ++runs_ <= kUntimedRuns) {
    run_with(ctx, proposals_[chosen_].algo, a, b, c);
    return;
  }
  const bool timed = std::ssize(events_) == 2 * kTimedRuns * std::ssize(candidates_);
  if (timed || runs_ == kRunsToSettle) {
    if (!timed || is_complete(events_.back())) settle(timed);
    run_with(ctx, proposals_[chosen_].algo, a, b, c);
    return;
  }
  const int proposal = candidates_[events_.size() / 2 % candidates_.size()];
  events_.emplace_back(CudaEvent::Timing::kOn).record(ctx.stream());
  run_with(ctx, proposals_[proposal].algo, a, b, c);
  if (is_complete(events_.back())) {
    events_.pop_back();  // the GPU waited for this product, so that its time would be the host's
  } else {
    events_.emplace_back(CudaEvent::Timing::kOn).record(ctx.stream());
  }
}

void MatmulPlanCuda::settle(bool timed) {
  if (timed) chosen_ = fastest_proposal();
  candidates_ = {chosen_};
  events_.clear();
}

int MatmulPlanCuda::fastest_proposal() const {
  std::map<int, std::vector<double>> times;  // of a proposal, in ms
  for (size_t run = 0; run < events_.size() / 2; ++run) {
    times[candidates_[run % candidates_.size()]].push_back(
        events_[2 * run + 1].milliseconds_since(events_[2 * run]));
  }
  const auto time = [&](int proposal) { return median(times[proposal]); };
  const int best = *std::ranges::min_element(candidates_, {}, time);
  return time(best) < kFaster * time(chosen_) ? best : chosen_;
}

void MatmulPlanCuda::tune(CudaContext& ctx, const __nv_bfloat16* a, const __nv_bfloat16* b,
                          void* c) {
  // Repeated runs would keep adding to c, so they write to a spare buffer.
  const int64_t row = std::max(shape_.cols, shape_.c_stride);
  const DeviceBuffer<float> spare(shape_.add ? shape_.rows * row : 0);
  if (shape_.add) c = spare.data();
  const CudaEvent begin(CudaEvent::Timing::kOn), end(CudaEvent::Timing::kOn);
  const int repeats = tunes_first_ ? 3 : 7;  // of many proposals fewer
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < std::ssize(proposals_); ++i) {
    const cublasLtMatmulAlgo_t& algorithm = proposals_[i].algo;
    // The first one warms up. An algorithm may decline what it was not asked about.
    if (try_with(ctx, algorithm, a, b, c) != CUBLAS_STATUS_SUCCESS) continue;
    std::vector<double> times;
    for (int repeat = 1; repeat < repeats; ++repeat) {
      begin.record(ctx.stream());
      run_with(ctx, algorithm, a, b, c);
      end.record(ctx.stream());
      end.synchronize();
      times.push_back(end.milliseconds_since(begin));
    }
    if (const double time = median(times); time < best) {
      best = time;
      chosen_ = i;
    }
  }
  candidates_ = {chosen_};
  tunes_first_ = false;
}

void matmul_cuda(CudaContext& ctx, const MatmulShapeCuda& shape, const __nv_bfloat16* a,
                 const __nv_bfloat16* b, void* c) {
  MatmulPlans& cache = ctx.service<MatmulPlans>();
  auto found = cache.plans.find(shape);
  if (found == cache.plans.end()) {
    if (cache.plans.size() >= kMostPlans) cache.plans.clear();
    found = cache.plans.try_emplace(shape, ctx, shape).first;
    if (cache.tuning) found->second.tune(ctx, a, b, c);
  }
  found->second.run(ctx, a, b, c);
}

void set_matmul_tuning(CudaContext& ctx, bool on) { ctx.service<MatmulPlans>().tuning = on; }
bool matmul_tuning(CudaContext& ctx) { return ctx.service<MatmulPlans>().tuning; }

}  // namespace twell
