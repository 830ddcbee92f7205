// SPDX-License-Identifier: Apache-2.0
#include "twell/model/model_cuda.h"

#include <algorithm>

#include "twell/base/content_hash.h"
#include "twell/base/gpu_code.h"
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

constexpr int64_t kByteMultiple = 16;  // of rows in 8 bits: TMA's and cuBLASLt's alignment

bool is_layer_matrix(const ParamSpec& spec) {
  return !spec.is_vector && spec.name.starts_with("model.layers.");
}
bool is_head(const ParamSpec& spec) { return spec.name == "lm_head.weight"; }
constexpr int64_t kHeadMultiple = 8;  // of the vocabulary, for the product of up to 64 tokens
int64_t outputs_of(const ParamSpec& spec) { return spec.transposed ? spec.cols : spec.rows; }

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

std::string cuda_model_too_large(const ModelConfig& config, int64_t other_bytes,
                                 CudaBytes in_bytes) {
  const int64_t weights = ModelCuda::bytes_needed(config, in_bytes);
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

std::string cuda_bytes_unsupported(const ModelConfig& config, CudaBytes in_bytes) {
  int device = 0, major = 0, minor = 0;
  TWELL_CUDA_CHECK(cudaGetDevice(&device));
  TWELL_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  TWELL_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (const int capability = seen_capability(10 * major + minor); capability != 90) {
    return fmt::format("fp8 weights need a GPU of compute capability 9.0, this one has {}",
                       gpu_capability_text(capability));
  }
  for (const auto& [name, size] :
       {std::pair{"hidden_size", config.width}, std::pair{"intermediate_size", config.ffn},
        std::pair{"the width of all heads", config.q_width()}}) {
    if (size % kByteMultiple != 0) {
      return fmt::format("fp8 weights need sizes that are multiples of {}; {} is {}", kByteMultiple,
                         name, size);
    }
  }
  if (in_bytes == CudaBytes::kProjectionsAndHead && config.vocab_size % kHeadMultiple != 0) {
    return fmt::format(
        "an output head in fp8 needs a vocab_size that is a multiple of {}, got {}; leave the head "
        "in bf16 (without --head 8bit)",
        kHeadMultiple, config.vocab_size);
  }
  if (config.mlp_bias) return "fp8 weights do not go with biases of feed-forward layers";
  return {};
}

int64_t ModelCuda::bytes_needed(const ModelConfig& config, CudaBytes in_bytes) {
  const bool some = in_bytes != CudaBytes::kNone;
  const bool head = in_bytes == CudaBytes::kProjectionsAndHead;
  int64_t bytes = 0;
  for (const ParamSpec& spec : parameter_table(config)) {
    bytes += (some && is_layer_matrix(spec)) || (head && is_head(spec))
                 ? spec.size() + outputs_of(spec) * int64_t{sizeof(float)}
                 : spec.size() * int64_t{sizeof(BF16)};
  }
  if (head && config.tied_embeddings) {
    bytes += config.vocab_size * (config.width + int64_t{sizeof(float)});
  }
  return bytes;
}

ModelCuda::ModelCuda(const ModelConfig& config, int64_t other_bytes, CudaBytes in_bytes)
    : config_(config), padded_(config) {
  config_.validate();
  padded_.ffn = round_up(config.ffn, int64_t{8});
  std::string why = cuda_model_unsupported(config_);
  const bool some = in_bytes != CudaBytes::kNone;
  if (why.empty() && some) why = cuda_bytes_unsupported(config_, in_bytes);
  if (why.empty()) why = cuda_model_too_large(config_, other_bytes, in_bytes);
  TWELL_REQUIRE(why.empty(), "{}", why);
  if (some) {
    place_bytes(in_bytes == CudaBytes::kProjectionsAndHead);
    return;
  }
  flat_ = DeviceBuffer<BF16>(padded_.parameter_count());
  if (padded_.ffn != config_.ffn) {
    TWELL_CUDA_CHECK(cudaMemset(flat_.data(), 0, static_cast<size_t>(flat_.bytes())));
    TWELL_CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));  // our streams do not wait for it
  }
  weights_ = model_matrices<const BF16>(padded_, flat_.data());
  for (const ParamSpec& spec : parameter_table(padded_)) offsets_.emplace(spec.name, spec.offset);
}

// Floats lie one behind the other in flat_, as in parameter_table without what is in e4m3.
void ModelCuda::place_bytes(bool head) {
  int64_t floats = 0, values = 0, scales = 0;
  const std::vector<ParamSpec> table = parameter_table(padded_);
  for (const ParamSpec& spec : table) {
    if (is_layer_matrix(spec) || (head && is_head(spec))) {
      byte_offsets_.emplace(spec.name, std::pair{values, scales});
      values += spec.size();
      scales += outputs_of(spec);
    } else {
      offsets_.emplace(spec.name, floats);
      floats += spec.size();
    }
  }
  constexpr const char* kHead = "lm_head.weight";
  if (head && padded_.tied_embeddings) {
    byte_offsets_.emplace(kHead, std::pair{values, scales});
    values += padded_.vocab_size * padded_.width;
    scales += padded_.vocab_size;
  }
  flat_ = DeviceBuffer<BF16>(floats);
  values_ = DeviceBuffer<uint8_t>(values);
  scales_ = DeviceBuffer<float>(scales);
  const auto vector = [&](const std::string& name) -> const BF16* {
    const auto found = offsets_.find(name);
    return found == offsets_.end() ? nullptr : flat_.data() + found->second;
  };
  const auto bytes = [&](const std::string& name) -> ByteRowsCuda {
    const auto found = byte_offsets_.find(name);
    if (found == byte_offsets_.end()) return {};
    return {values_.data() + found->second.first, scales_.data() + found->second.second};
  };
  weights_.embedding = {vector("model.embed_tokens.weight"), padded_.vocab_size, padded_.width};
  weights_.head = weights_.embedding;
  head_bytes_ = bytes(kHead);
  if (!head_bytes_.empty()) {
    weights_.head.data = nullptr;
  } else if (!padded_.tied_embeddings) {
    weights_.head.data = vector(kHead);
  }
  weights_.final_norm = vector("model.norm.weight");
  for (int64_t i = 0; i < padded_.layers; ++i) {
    const auto name = [i](const char* part) { return fmt::format("model.layers.{}.{}", i, part); };
    LayerMatrices<const BF16>& layer = weights_.layers.emplace_back();
    layer.attention_norm = vector(name("input_layernorm.weight"));
    layer.b_qkv = vector(name("self_attn.q_proj.bias"));
    layer.q_norm = vector(name("self_attn.q_norm.weight"));
    layer.k_norm = vector(name("self_attn.k_norm.weight"));
    layer.b_o = vector(name("self_attn.o_proj.bias"));
    layer.ffn_norm = vector(name("post_attention_layernorm.weight"));
    layer.ffn.activation = {padded_.activation};
    // The projections of q, k and v are neighbours in the table.
    layer_bytes_.push_back({.qkv = bytes(name("self_attn.q_proj.weight")),
                            .o = bytes(name("self_attn.o_proj.weight")),
                            .gate = bytes(name("mlp.gate_proj.weight")),
                            .up = bytes(name("mlp.up_proj.weight")),
                            .down = bytes(name("mlp.down_proj.weight"))});
  }
}

ModelCuda::BytePlace ModelCuda::byte_place_of(const ParamSpec& spec) {
  const auto [values, scales] = byte_offsets_.at(spec.name);
  return {values_.data() + values, scales_.data() + scales};
}

ModelCuda::BytePlace ModelCuda::head_place() {
  return {const_cast<uint8_t*>(head_bytes_.values), const_cast<float*>(head_bytes_.scales)};
}

std::unique_ptr<ModelCuda> ModelCuda::in_bytes(CudaContext& ctx, const ModelCuda& model,
                                               CudaBytes what) {
  auto out = std::make_unique<ModelCuda>(model.config(), 0, what);
  if (!out->head_bytes_.empty()) {
    const BytePlace to = out->head_place();
    TWELL_CUDA_CHECK(launch_quantise_rows({.rows = model.padded_.vocab_size,
                                           .cols = model.padded_.width,
                                           .x = device_bf16(model.weights_.head.data),
                                           .values = to.values,
                                           .scales = to.scales},
                                          ctx.stream()));
  }
  DeviceBuffer<__nv_bfloat16> transposed(model.padded_.ffn * model.padded_.width);
  for (const ParamSpec& spec : parameter_table(model.padded_)) {
    const auto* from =
        reinterpret_cast<const __nv_bfloat16*>(model.flat_.data() + model.offsets_.at(spec.name));
    if (!out->head_bytes_.empty() && is_head(spec)) continue;
    if (!is_layer_matrix(spec)) {
      TWELL_CUDA_CHECK(cudaMemcpyAsync(out->place_of(spec), from,
                                       static_cast<size_t>(spec.size()) * sizeof(BF16),
                                       cudaMemcpyDeviceToDevice, ctx.stream()));
      continue;
    }
    if (spec.transposed) {
      TWELL_CUDA_CHECK(
          launch_transpose(from, spec.rows, spec.cols, transposed.data(), ctx.stream()));
      from = transposed.data();
    }
    const BytePlace to = out->byte_place_of(spec);
    TWELL_CUDA_CHECK(launch_quantise_rows({.rows = outputs_of(spec),
                                           .cols = spec.size() / outputs_of(spec),
                                           .x = from,
                                           .values = to.values,
                                           .scales = to.scales},
                                          ctx.stream()));
  }
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
  return out;
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
  constexpr int64_t kPiece = int64_t{16} << 20;
  ContentHash hash;
  std::vector<std::byte> piece;
  const auto add = [&](const void* from, int64_t bytes) {
    for (int64_t begin = 0; begin < bytes; begin += kPiece) {
      piece.resize(static_cast<size_t>(std::min(kPiece, bytes - begin)));
      TWELL_CUDA_CHECK(cudaMemcpyAsync(piece.data(), static_cast<const std::byte*>(from) + begin,
                                       piece.size(), cudaMemcpyDeviceToHost, ctx.stream()));
      TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
      hash.add_bytes(piece);
    }
  };
  add(flat_.data(), flat_.bytes());
  add(values_.data(), values_.bytes());
  add(scales_.data(), scales_.bytes());
  return hash.digest();
}

}  // namespace twell
