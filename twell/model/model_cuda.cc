// SPDX-License-Identifier: Apache-2.0
#include "twell/model/model_cuda.h"

#include <algorithm>

#include "twell/base/content_hash.h"
#include "twell/base/rounding.h"
#include "twell/model/tensor_upload.h"
#include "twell/ops/attention/attention_cuda.h"
#include "twell/ops/rms_norm/rms_norm_cuda.h"

namespace twell {
namespace {

double gib(int64_t bytes) {
  return static_cast<double>(bytes) / static_cast<double>(int64_t{1} << 30);
}

// The reason why `bytes` do not fit into free memory; empty when they do.
std::string memory_short(int64_t bytes, const std::string& what) {
  size_t free = 0, total = 0;
  TWELL_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  const auto free_bytes = static_cast<int64_t>(free);
  if (bytes <= free_bytes) return {};
  return fmt::format(
      "{} need {:.2f} GiB of GPU memory, of which {:.2f} GiB are free ({:.2f} GiB in all)", what,
      gib(bytes), gib(free_bytes), gib(static_cast<int64_t>(total)));
}

}  // namespace

std::string cuda_model_unsupported(const ModelConfig& config) {
  if (config.width > kMaxNormWidth) {
    return fmt::format("the GPU takes a hidden_size of at most {}, got {}; use --device cpu",
                       kMaxNormWidth, config.width);
  }
  if (const char* why = attention_unsupported(config.head_dim); why != nullptr) {
    return fmt::format("{}, got {}; use --device cpu", why, config.head_dim);
  }
  return {};
}

std::string cuda_model_too_large(const ModelConfig& config, int64_t other_bytes) {
  const int64_t weights = config.parameter_count() * int64_t{sizeof(BF16)};
  return memory_short(weights + other_bytes,
                      other_bytes == 0
                          ? "the model's weights"
                          : fmt::format("the model's weights ({:.2f} GiB) and its keys, values and "
                                        "activations ({:.2f} GiB)",
                                        gib(weights), gib(other_bytes)));
}

void require_device_memory(int64_t bytes, const std::string& what) {
  const std::string why = memory_short(bytes, what);
  TWELL_REQUIRE(why.empty(), "{}", why);
}

ModelCuda::ModelCuda(const ModelConfig& config, int64_t other_bytes)
    : config_(config), padded_(config) {
  config_.validate();
  padded_.ffn = round_up(config.ffn, int64_t{8});
  std::string why = cuda_model_unsupported(config_);
  if (why.empty()) why = cuda_model_too_large(config_, other_bytes);
  TWELL_REQUIRE(why.empty(), "{}", why);
  flat_ = DeviceBuffer<BF16>(padded_.parameter_count());
  if (padded_.ffn != config_.ffn) {
    TWELL_CUDA_CHECK(cudaMemset(flat_.data(), 0, static_cast<size_t>(flat_.bytes())));
    TWELL_CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));  // our streams do not wait for it
  }
  weights_ = model_matrices<const BF16>(padded_, flat_.data());
  for (const ParamSpec& spec : parameter_table(padded_)) offsets_.emplace(spec.name, spec.offset);
}

ModelCuda::ModelCuda(CudaContext& ctx, const Model& model) : ModelCuda(model.config, 0) {
  TensorUploader uploader(ctx);
  for (const ParamSpec& spec : model.table) {
    const std::span<const float> values(model.flat.data() + spec.offset,
                                        static_cast<size_t>(spec.size()));
    uploader.copy(std::as_bytes(values), DType::kF32, spec.rows, spec.cols, false, place_of(spec));
  }
}

__nv_bfloat16* ModelCuda::place_of(const ParamSpec& spec) {
  return reinterpret_cast<__nv_bfloat16*>(flat_.data() + offsets_.at(spec.name));
}

std::string ModelCuda::weights_hash(CudaContext& ctx) const {
  constexpr int64_t kPiece = int64_t{8} << 20;
  std::vector<BF16> piece(static_cast<size_t>(std::min(kPiece, flat_.size())));
  ContentHash hash;
  for (int64_t begin = 0; begin < flat_.size(); begin += kPiece) {
    const auto count = static_cast<size_t>(std::min(kPiece, flat_.size() - begin));
    TWELL_CUDA_CHECK(cudaMemcpyAsync(piece.data(), flat_.data() + begin, count * sizeof(BF16),
                                     cudaMemcpyDeviceToHost, ctx.stream()));
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
    hash.add_bytes(std::as_bytes(std::span<const BF16>(piece.data(), count)));
  }
  return hash.digest();
}

}  // namespace twell
