// SPDX-License-Identifier: Apache-2.0
#include "twell/train/optimizer_cuda.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "twell/base/for_each.cuh"
#include "twell/base/philox.h"
#include "twell/model/model_cuda.h"
#include "twell/train/activity.h"

namespace twell {
namespace {

constexpr int kThreads = 256;

// Equals normal() of rng.h.
__device__ float draw_normal(uint64_t seed, uint64_t stream, uint64_t index) {
  const PhiloxBits bits = philox_bits(seed, stream, index);
  const double u1 = (static_cast<double>(bits.word[0]) + 1.0) * 0x1p-32;
  const double u2 = static_cast<double>(bits.word[1]) * 0x1p-32;
  return static_cast<float>(sqrt(-2.0 * log(u1)) * cospi(2.0 * u2));
}

// Splits f32 weights into halves (split_weight.h; rest null: the upper halves alone).
struct SplitHalves {
  const float* from;
  __nv_bfloat16* upper;
  int16_t* rest;
  __device__ void operator()(int64_t i) const {
    int16_t lower;
    split(from[i], upper[i], lower);
    if (rest != nullptr) rest[i] = lower;
  }
};

// The f32 weights of halves.
struct JoinHalves {
  const __nv_bfloat16* upper;
  const int16_t* rest;
  float* to;
  __device__ void operator()(int64_t i) const { to[i] = join(upper[i], rest[i]); }
};

// For each neuron j with active[j] == 0: w[j] <- (1 - strength) w[j] + strength N(0, std_dev^2), in
// f32, on weights in halves. Element d of neuron j uses random number first_index + j * width + d
// of the stream (rng.h), up to the last bit of the device's logarithm and cosine.
struct ReinitDead {
  int64_t neurons = 0;                        // F
  int64_t width = 0;                          // D
  const uint8_t* active = nullptr;            // [F]
  const float* skip_unless_finite = nullptr;  // one value; otherwise nothing changes
  float strength = 0.0f;
  float std_dev = 0.0f;
  uint64_t seed = 0;
  uint64_t stream = 0;
  uint64_t first_index = 0;
  __nv_bfloat16* weight = nullptr;  // [F, D] upper halves
  int16_t* weight_rest = nullptr;   // lower halves of elements [begin, end) of [F, D] row-major
  int64_t begin = 0;                // only these elements change
  int64_t end = 0;
};

// One CTA per neuron.
__global__ void __launch_bounds__(kThreads) reinit_kernel(ReinitDead p) {
  const int64_t neuron = blockIdx.x;
  if (p.active[neuron] != 0 || isnan(*p.skip_unless_finite)) return;
  for (int64_t d = threadIdx.x; d < p.width; d += kThreads) {
    const int64_t at = neuron * p.width + d;
    if (at < p.begin || at >= p.end) continue;
    int16_t& rest = p.weight_rest[at - p.begin];
    const float noise = draw_normal(p.seed, p.stream, p.first_index + static_cast<uint64_t>(at));
    const float old = join(p.weight[at], rest);
    const float value = (1.0f - p.strength) * old + p.strength * p.std_dev * noise;
    split(value, p.weight[at], rest);
  }
}

cudaError_t launch_reinit_dead(const ReinitDead& p, cudaStream_t stream) {
  if (p.neurons == 0) return cudaSuccess;
  reinit_kernel<<<static_cast<unsigned>(p.neurons), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

// to[i] = from[i], rounded to nearest.
struct Round {
  const float* from;
  __nv_bfloat16* to;
  __device__ void operator()(int64_t i) const { to[i] = __float2bfloat16_rn(from[i]); }
};

// sum[i] = the sum over ranks, in order, of parts[rank][i]; own rank's part is what sum[i] held.
struct AddParts {
  const __nv_bfloat16* parts;
  int64_t ranks, own, n;
  float* sum;
  __device__ void operator()(int64_t i) const {
    float total = 0.0f;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      total += rank == own ? sum[i] : __bfloat162float(parts[rank * n + i]);
    }
    sum[i] = total;
  }
};

// *squares = sum over i of norms[i].norm^2, of the pieces of one rank, in order.
struct SumSquares {
  const GradientNorm* norms;
  int64_t count;
  double* squares;
  __device__ void operator()(int64_t) const {
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) sum += norms[i].norm * norms[i].norm;
    *squares = sum;
  }
};

// *result = the norm of the squares [ranks] of all ranks, added in order, and its clipping factor
// (adamw_cuda.h).
struct NormOfRanks {
  const double* squares;
  int64_t ranks;
  double clip_norm;
  GradientNorm* result;
  __device__ void operator()(int64_t) const {
    double sum = 0.0;
    for (int64_t i = 0; i < ranks; ++i) sum += squares[i];
    GradientNorm out;
    out.norm = sqrt(sum);
    if (!isfinite(out.norm)) {
      out.clip_factor = nanf("");
    } else if (clip_norm > 0.0 && out.norm > clip_norm) {
      out.clip_factor = static_cast<float>(clip_norm / out.norm);
    }
    *result = out;
  }
};

int64_t moment_bytes(DType dtype) { return dtype == DType::kBF16 ? 2 : 4; }

int64_t muon_workspace_bytes(const std::vector<ParamSpec>& table, OptimizerKind optimizer) {
  int64_t most = 0;
  for (const ParamSpec& param : table) {
    if (optimizer != OptimizerKind::kMuon || !takes_muon(param)) continue;
    most = std::max(most, orthogonalise_bytes(param.rows, param.cols));
  }
  return most;
}

}  // namespace

// What several ranks need: a second stream, on which they communicate while the pass runs.
struct OptimizerCuda::Exchange {
  Exchange(NcclCommunicator& communicator, const ShardLayout& layout, DType gradients,
           cudaStream_t pass)
      : ranks(communicator),
        reductions(layout.buckets().size()),
        gathers(layout.buckets().size()),
        first_pending(gathers.size()),
        squares(communicator.size()),
        norms(std::ssize(layout.buckets())) {
    TWELL_CUDA_CHECK(cudaMemsetAsync(norms.data(), 0, static_cast<size_t>(norms.bytes()), pass));
    if (gradients != DType::kBF16) return;
    int64_t most = 0;
    for (const GradientBucket& bucket : layout.buckets()) {
      most = std::max(most, layout.ranks() * piece_size(layout, bucket));
    }
    sent = DeviceBuffer<__nv_bfloat16>(most);
    received = DeviceBuffer<__nv_bfloat16>(most);
  }
  // Size of the first rank's piece of the bucket. In the last bucket later pieces may be smaller.
  static int64_t piece_size(const ShardLayout& layout, const GradientBucket& bucket) {
    return piece_of(bucket.end - bucket.begin, layout.ranks(), 0).size();
  }

  struct TimedCall {
    CudaEvent begin{CudaEvent::Timing::kOn}, end{CudaEvent::Timing::kOn};
  };

  // Communication waits for what is enqueued on the pass's stream so far, and the other way round.
  void after(cudaStream_t pass) const {
    ready.record(pass);
    TWELL_CUDA_CHECK(cudaStreamWaitEvent(stream.get(), ready.get()));
  }
  void before(cudaStream_t pass) const {
    done.record(stream.get());
    TWELL_CUDA_CHECK(cudaStreamWaitEvent(pass, done.get()));
  }

  NcclCommunicator& ranks;
  CudaStream stream;
  CudaEvent ready, done, computed, finished;
  CudaEvent updated;                           // all weights of this rank's pieces
  std::vector<TimedCall> reductions, gathers;  // of each bucket
  size_t first_pending;                        // the first bucket whose gather nobody waited for
  DeviceBuffer<double> squares;                // [ranks]
  DeviceBuffer<GradientNorm> norms;            // of the pieces; 0 for empty ones
  DeviceBuffer<__nv_bfloat16> sent, received;
};

OptimizerCuda::OptimizerCuda(CudaContext& ctx, const Model& model, const TrainOptions& options,
                             const ShardLayout& layout, NcclCommunicator* ranks)
    : ctx_(ctx),
      options_(options),
      config_(model.config),
      layout_(layout),
      weights_(layout.padded_parameters()),
      rest_(layout.size()),
      grads_(layout.padded_parameters()),
      exp_avg_(layout.size() * moment_bytes(options.moment_dtype)),
      exp_avg_sq_(exp_avg_.size()),
      norm_partials_(gradient_norm_partials(layout.size())),
      muon_workspace_(muon_workspace_bytes(model.table, options.optimizer)) {
  const bool muon = options.optimizer == OptimizerKind::kMuon;
  if (muon) matrices_ = muon_matrices(model.table, layout);
  if (ranks != nullptr) {
    exchange_ = std::make_unique<Exchange>(*ranks, layout, options.gradient_dtype, ctx.stream());
  }
  std::vector<AdamWRun> runs;
  for (const ShardPiece& piece : layout.pieces()) {
    PieceRuns& of_piece = piece_runs_.emplace_back(PieceRuns{std::ssize(runs), 0});
    for (const ParamSpec& param : model.table) {
      const int64_t begin = std::max(piece.begin, param.offset);
      if (begin >= std::min(piece.begin + piece.size, param.offset + param.size())) continue;
      const AdamWRun run{.begin = begin - piece.begin,
                         .decay = !param.is_vector,
                         .skip = muon && takes_muon(param)};
      if (of_piece.count > 0 && runs.back().decay == run.decay && runs.back().skip == run.skip) {
        continue;
      }
      runs.push_back(run);
      ++of_piece.count;
    }
  }
  runs_ = DeviceBuffer<AdamWRun>(std::ssize(runs));
  const auto stream = ctx_.stream();
  TWELL_CUDA_CHECK(cudaMemcpyAsync(runs_.data(), runs.data(), static_cast<size_t>(runs_.bytes()),
                                   cudaMemcpyHostToDevice, stream));
  for (const DeviceBuffer<std::byte>* moments : {&exp_avg_, &exp_avg_sq_}) {
    TWELL_CUDA_CHECK(
        cudaMemsetAsync(moments->data(), 0, static_cast<size_t>(moments->bytes()), stream));
  }
  upload({.exp_avg = {}, .exp_avg_sq = {}, .weights = model.flat.span()});
}

OptimizerCuda::~OptimizerCuda() = default;

int64_t OptimizerCuda::bytes_needed(const ModelConfig& config, const TrainOptions& options) {
  const int64_t parameters = config.parameter_count();
  constexpr int64_t kUpper = sizeof(__nv_bfloat16), kGradient = sizeof(float);
  const int64_t shard = parameters / options.ranks;
  return parameters * (kUpper + kGradient) +
         shard * (static_cast<int64_t>(sizeof(int16_t)) + 2 * moment_bytes(options.moment_dtype)) +
         gradient_norm_partials(parameters) * static_cast<int64_t>(sizeof(double)) +
         muon_workspace_bytes(parameter_table(config), options.optimizer);
}

void OptimizerCuda::reduce_after(int64_t layer) {
  bool any = false;
  for (size_t i = 0; i < layout_.buckets().size(); ++i) {
    if (layout_.buckets()[i].layer != layer) continue;
    if (!std::exchange(any, true)) exchange_->after(ctx_.stream());
    exchange_->reductions[i].begin.record(exchange_->stream.get());
    reduce(i);
    exchange_->reductions[i].end.record(exchange_->stream.get());
  }
}

void OptimizerCuda::reduce(size_t bucket) {
  const int64_t begin = layout_.buckets()[bucket].begin;
  const int64_t piece = Exchange::piece_size(layout_, layout_.buckets()[bucket]);
  float* const grads = grads_.data() + begin;
  NcclCommunicator& ranks = exchange_->ranks;
  const cudaStream_t stream = exchange_->stream.get();
  if (options_.gradient_dtype != DType::kBF16)
    return ranks.reduce_scatter_sum(grads, piece, stream);
  const int64_t count = ranks.size();
  TWELL_CUDA_CHECK(launch_for_each(count * piece, Round{grads, exchange_->sent.data()}, stream));
  ranks.all_to_all(exchange_->sent.data(), exchange_->received.data(), piece, stream);
  TWELL_CUDA_CHECK(launch_for_each(piece,
                                   AddParts{exchange_->received.data(), count, ranks.rank(), piece,
                                            grads + ranks.rank() * piece},
                                   stream));
}

void OptimizerCuda::merge_active(uint8_t* active, int64_t count) {
  exchange_->computed.record(ctx_.stream());
  exchange_->after(ctx_.stream());
  exchange_->ranks.all_reduce_max(active, count, exchange_->stream.get());
}

void OptimizerCuda::gradient_norm(GradientNorm* norm) {
  const auto of_piece = [&](const ShardPiece& piece, GradientNorm* result) {
    TWELL_CUDA_CHECK(launch_gradient_norm({.size = piece.size,
                                           .grad = grads_.data() + piece.begin,
                                           .clip_norm = options_.clip_norm,
                                           .partial = norm_partials_.data(),
                                           .result = result},
                                          ctx_.stream()));
  };
  if (exchange_ == nullptr) return of_piece(layout_.pieces()[0], norm);
  exchange_->before(ctx_.stream());
  GradientNorm* const norms = exchange_->norms.data();
  double* const squares = exchange_->squares.data();
  for (size_t i = 0; i < layout_.pieces().size(); ++i) {
    if (layout_.pieces()[i].size > 0) of_piece(layout_.pieces()[i], norms + i);
  }
  TWELL_CUDA_CHECK(launch_for_each(
      1, SumSquares{norms, exchange_->norms.size(), squares + layout_.rank()}, ctx_.stream()));
  exchange_->after(ctx_.stream());
  exchange_->ranks.all_gather(squares, sizeof(double), exchange_->stream.get());
  exchange_->before(ctx_.stream());
  TWELL_CUDA_CHECK(launch_for_each(
      1, NormOfRanks{squares, layout_.ranks(), options_.clip_norm, norm}, ctx_.stream()));
}

void OptimizerCuda::step(const Coefficients* coefficients, GradientNorm* norm) {
  gradient_norm(norm);
  adamw(&coefficients->adamw, norm);
  if (!matrices_.empty()) muon(&coefficients->muon, norm);
}

void OptimizerCuda::adamw(const AdamWCoefficients* coefficients, const GradientNorm* norm) {
  const MomentDType moments =
      options_.moment_dtype == DType::kBF16 ? MomentDType::kBF16 : MomentDType::kF32;
  for (size_t i = 0; i < layout_.pieces().size(); ++i) {
    const ShardPiece& piece = layout_.pieces()[i];
    if (piece.size == 0) continue;
    const int64_t moment_at = piece.local * moment_bytes(options_.moment_dtype);
    TWELL_CUDA_CHECK(launch_adamw({.size = piece.size,
                                   .first = piece.begin,
                                   .seed = options_.seed,
                                   .runs = runs_.data() + piece_runs_[i].first,
                                   .run_count = piece_runs_[i].count,
                                   .coefficients = coefficients,
                                   .clip_factor = &norm->clip_factor,
                                   .grad = grads_.data() + piece.begin,
                                   .weight = weights_.data() + piece.begin,
                                   .weight_rest = rest_.data() + piece.local,
                                   .moments = moments,
                                   .exp_avg = exp_avg_.data() + moment_at,
                                   .exp_avg_sq = exp_avg_sq_.data() + moment_at},
                                  ctx_.stream()));
  }
}

// Calls call(values, size of a rank's piece, stream) for every bucket of the gradients, between
// what is enqueued on the context's stream before and after.
template <typename Call>
void OptimizerCuda::exchange_buckets(const Call& call) {
  if (exchange_ == nullptr) return;
  exchange_->after(ctx_.stream());
  for (const GradientBucket& bucket : layout_.buckets()) {
    call(grads_.data() + bucket.begin, Exchange::piece_size(layout_, bucket),
         exchange_->stream.get());
  }
  exchange_->before(ctx_.stream());
}

void OptimizerCuda::muon(const MuonCoefficients* coefficients, const GradientNorm* norm) {
  for (const MuonMatrix& matrix : matrices_) {
    for (const ShardPiece& piece : matrix.pieces) {
      TWELL_CUDA_CHECK(
          launch_muon_momentum({.size = piece.size,
                                .coefficients = coefficients,
                                .clip_factor = &norm->clip_factor,
                                .grad = grads_.data() + piece.begin,
                                .exp_avg = reinterpret_cast<float*>(exp_avg_.data()) + piece.local},
                               ctx_.stream()));
    }
  }
  exchange_buckets([this](float* values, int64_t piece, cudaStream_t stream) {
    exchange_->ranks.all_gather(values, piece * static_cast<int64_t>(sizeof(float)), stream);
  });
  for (const MuonMatrix& matrix : matrices_) {
    float* const update = grads_.data() + matrix.offset;
    if (matrix.owned) {
      orthogonalise_cuda(ctx_, update, matrix.rows, matrix.cols, muon_workspace_.data());
    } else {
      TWELL_CUDA_CHECK(cudaMemsetAsync(
          update, 0, static_cast<size_t>(matrix.size()) * sizeof(float), ctx_.stream()));
    }
  }
  exchange_buckets([this](float* values, int64_t piece, cudaStream_t stream) {
    exchange_->ranks.reduce_scatter_sum(values, piece, stream);
  });
  for (const MuonMatrix& matrix : matrices_) {
    for (const ShardPiece& piece : matrix.pieces) {
      TWELL_CUDA_CHECK(
          launch_muon_apply({.size = piece.size,
                             .coefficients = coefficients,
                             .clip_factor = &norm->clip_factor,
                             .shape_factor = muon_shape_factor(matrix.rows, matrix.cols),
                             .orthogonal = grads_.data() + piece.begin,
                             .weight = weights_.data() + piece.begin,
                             .weight_rest = rest_.data() + piece.local},
                            ctx_.stream()));
    }
  }
}

void OptimizerCuda::gather_weights() {
  if (exchange_ == nullptr) return;
  exchange_->updated.record(ctx_.stream());
  exchange_->after(ctx_.stream());
  for (size_t i = 0; i < layout_.buckets().size(); ++i) {
    const GradientBucket& bucket = layout_.buckets()[i];
    exchange_->gathers[i].begin.record(exchange_->stream.get());
    exchange_->ranks.all_gather(
        weights_.data() + bucket.begin,
        Exchange::piece_size(layout_, bucket) * static_cast<int64_t>(sizeof(__nv_bfloat16)),
        exchange_->stream.get());
    exchange_->gathers[i].end.record(exchange_->stream.get());
  }
  exchange_->first_pending = 0;
}

void OptimizerCuda::await_weights(int64_t layer) {
  if (exchange_ == nullptr) return;
  // The first weights of a layer may lie in the bucket before.
  for (size_t& i = exchange_->first_pending; i < exchange_->gathers.size(); ++i) {
    if (layout_.buckets()[i].layer > layer) return;
    exchange_->ranks.wait(exchange_->gathers[i].end.get(), exchange_->updated.get());
  }
}

ExchangeSeconds OptimizerCuda::exchange_seconds() {
  await_weights(config_.layers);
  ExchangeSeconds seconds;
  if (exchange_ == nullptr) return seconds;
  for (size_t i = 0; i < layout_.buckets().size(); ++i) {
    const auto& reduction = exchange_->reductions[i];
    const auto& gather = exchange_->gathers[i];
    seconds.gradients += 1e-3 * reduction.end.milliseconds_since(reduction.begin);
    seconds.weights += 1e-3 * gather.end.milliseconds_since(gather.begin);
  }
  return seconds;
}

void OptimizerCuda::wait() const {
  if (exchange_ == nullptr) {
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
  } else {
    exchange_->finished.record(ctx_.stream());
    exchange_->ranks.wait(exchange_->finished.get(), exchange_->computed.get());
  }
}

void OptimizerCuda::reinit_dead(int64_t step, const uint8_t* active, const GradientNorm* norm) {
  const auto weights =
      model_matrices<const BF16>(config_, reinterpret_cast<const BF16*>(weights_.data()));
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    const Matrix<const BF16> firing = weights.layers[static_cast<size_t>(layer)].ffn.firing();
    const int64_t at = device_bf16(firing.data) - weights_.data();
    for (const ShardPiece& piece : layout_.pieces()) {
      const int64_t begin = std::max(piece.begin, at);
      const int64_t end = std::min(piece.begin + piece.size, at + firing.rows * firing.cols);
      if (begin >= end) continue;
      TWELL_CUDA_CHECK(launch_reinit_dead(
          {.neurons = firing.rows,
           .width = firing.cols,
           .active = active + layer * config_.ffn,
           .skip_unless_finite = &norm->clip_factor,
           .strength = static_cast<float>(options_.reinit_strength),
           .std_dev = static_cast<float>(options_.reinit_std),
           .seed = options_.seed,
           .stream = kReinitStream + static_cast<uint64_t>(layer),
           .first_index = static_cast<uint64_t>(step * firing.rows * firing.cols),
           .weight = weights_.data() + at,
           .weight_rest = rest_.data() + piece.local + (begin - piece.begin),
           .begin = begin - at,
           .end = end - at},
          ctx_.stream()));
    }
  }
}

void OptimizerCuda::download(const OptimizerTensors& to) {
  await_weights(config_.layers);
  const auto copy = [&](const auto& from, auto values) {
    TWELL_CUDA_CHECK(cudaMemcpyAsync(values.data(), from.data(), values.size_bytes(),
                                     cudaMemcpyDeviceToHost, ctx_.stream()));
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
  };
  const auto moments = [&](const DeviceBuffer<std::byte>& from, std::span<float> values) {
    if (options_.moment_dtype != DType::kBF16) return copy(from, values);
    std::vector<BF16> rounded(values.size());
    copy(from, std::span(rounded));
    std::transform(rounded.begin(), rounded.end(), values.begin(),
                   [](BF16 v) { return to_float(v); });
  };
  check_sizes(to);
  if (!to.weights.empty()) {
    for (const ShardPiece& piece : layout_.pieces()) {
      TWELL_CUDA_CHECK(
          launch_for_each(piece.size,
                          JoinHalves{weights_.data() + piece.begin, rest_.data() + piece.local,
                                     grads_.data() + piece.begin},
                          ctx_.stream()));
    }
    gather_joined();
    copy(grads_, to.weights);
  }
  if (!to.exp_avg.empty()) moments(exp_avg_, to.exp_avg);
  if (!to.exp_avg_sq.empty()) moments(exp_avg_sq_, to.exp_avg_sq);
}

// The f32 weights in the place of the gradients, from the ranks whose pieces they are.
void OptimizerCuda::gather_joined() const {
  if (exchange_ == nullptr) return;
  exchange_->computed.record(ctx_.stream());
  exchange_->after(ctx_.stream());
  for (const GradientBucket& bucket : layout_.buckets()) {
    exchange_->ranks.all_gather(
        grads_.data() + bucket.begin,
        Exchange::piece_size(layout_, bucket) * static_cast<int64_t>(sizeof(float)),
        exchange_->stream.get());
  }
  exchange_->before(ctx_.stream());
  wait();
}

void OptimizerCuda::upload(const OptimizerTensors& from) {
  await_weights(config_.layers);
  const auto copy = [&](auto values, const auto& to) {
    TWELL_CUDA_CHECK(cudaMemcpyAsync(to.data(), values.data(), values.size_bytes(),
                                     cudaMemcpyHostToDevice, ctx_.stream()));
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
  };
  const auto moments = [&](std::span<const float> values, const DeviceBuffer<std::byte>& to) {
    if (options_.moment_dtype != DType::kBF16) return copy(values, to);
    std::vector<BF16> rounded(values.size());
    std::transform(values.begin(), values.end(), rounded.begin(),
                   [](float v) { return to_bf16(v); });
    copy(std::span<const BF16>(rounded), to);
  };
  check_sizes(from);
  if (!from.weights.empty()) {
    copy(std::span<const float>(from.weights), grads_);
    TWELL_CUDA_CHECK(launch_for_each(
        layout_.parameters(), SplitHalves{grads_.data(), weights_.data(), nullptr}, ctx_.stream()));
    for (const ShardPiece& piece : layout_.pieces()) {
      TWELL_CUDA_CHECK(
          launch_for_each(piece.size,
                          SplitHalves{grads_.data() + piece.begin, weights_.data() + piece.begin,
                                      rest_.data() + piece.local},
                          ctx_.stream()));
    }
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
  }
  if (!from.exp_avg.empty()) moments(from.exp_avg, exp_avg_);
  if (!from.exp_avg_sq.empty()) moments(from.exp_avg_sq, exp_avg_sq_);
}

void OptimizerCuda::check_sizes(const OptimizerTensors& tensors) const {
  const auto check = [](std::span<const float> values, int64_t size) {
    TWELL_CHECK(values.empty() || std::ssize(values) == size, "{} values of {}", values.size(),
                size);
  };
  check(tensors.weights, layout_.parameters());
  check(tensors.exp_avg, layout_.size());
  check(tensors.exp_avg_sq, layout_.size());
}

}  // namespace twell
