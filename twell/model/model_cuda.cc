// SPDX-License-Identifier: Apache-2.0
#include "twell/model/model_cuda.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "twell/model/checkpoint.h"
#include "twell/model/content_hash.h"
#include "twell/model/tensor_upload.h"
#include "twell/ops/attention/attention_cuda.h"
#include "twell/ops/rms_norm/rms_norm_cuda.h"

namespace twell {
namespace {

namespace fs = std::filesystem;

// Copies tensors to the device in pieces, two in flight: while one is on its way, the next is read
// from the mapped file into page-locked memory.
class Uploader {
 public:
  explicit Uploader(CudaContext& ctx) : ctx_(ctx) {
    for (Piece& piece : pieces_) {
      TWELL_CUDA_CHECK(cudaMallocHost(&piece.host, kPieceBytes));
      piece.device = DeviceBuffer<std::byte>(kPieceBytes);
      TWELL_CUDA_CHECK(cudaEventCreateWithFlags(&piece.used, cudaEventDisableTiming));
    }
  }
  ~Uploader() {
    cudaStreamSynchronize(ctx_.stream());
    for (Piece& piece : pieces_) {
      cudaFreeHost(piece.host);
      cudaEventDestroy(piece.used);
    }
  }
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;

  // `bytes` holds `rows` rows of `cols` values; to [rows, cols], or [cols, rows] when transposed.
  void copy(std::span<const std::byte> bytes, StoredFloat type, int64_t rows, int64_t cols,
            bool transposed, __nv_bfloat16* to) {
    const int64_t row_bytes = cols * (type == StoredFloat::kF32 ? 4 : 2);
    TWELL_REQUIRE(row_bytes <= kPieceBytes, "a tensor row of {} values is too long", cols);
    const int64_t step = kPieceBytes / row_bytes;
    for (int64_t row = 0; row < rows; row += step) {
      const int64_t count = std::min(step, rows - row);
      const auto size = static_cast<size_t>(count * row_bytes);
      Piece& piece = pieces_[next_++ % pieces_.size()];
      TWELL_CUDA_CHECK(cudaEventSynchronize(piece.used));
      std::memcpy(piece.host, bytes.data() + row * row_bytes, size);
      TWELL_CUDA_CHECK(cudaMemcpyAsync(piece.device.data(), piece.host, size,
                                       cudaMemcpyHostToDevice, ctx_.stream()));
      TWELL_CUDA_CHECK(transposed ? launch_convert_transposed(piece.device.data(), type, count,
                                                              cols, to + row, rows, ctx_.stream())
                                  : launch_convert(piece.device.data(), type, count * cols,
                                                   to + row * cols, ctx_.stream()));
      TWELL_CUDA_CHECK(cudaEventRecord(piece.used, ctx_.stream()));
    }
  }

 private:
  static constexpr int64_t kPieceBytes = int64_t{32} << 20;
  struct Piece {
    void* host = nullptr;
    DeviceBuffer<std::byte> device;
    cudaEvent_t used = nullptr;
  };
  CudaContext& ctx_;
  std::array<Piece, 2> pieces_;
  size_t next_ = 0;
};

StoredFloat stored_float(const std::string& dtype) {
  if (dtype == "F32") return StoredFloat::kF32;
  return dtype == "F16" ? StoredFloat::kF16 : StoredFloat::kBF16;
}

__nv_bfloat16* place_of(const DeviceBuffer<BF16>& flat, const ParamSpec& spec) {
  return reinterpret_cast<__nv_bfloat16*>(flat.data() + spec.offset);
}

double gib(int64_t bytes) {
  return static_cast<double>(bytes) / static_cast<double>(int64_t{1} << 30);
}

// Why there is too little memory free for that much; empty when there is enough.
std::string memory_short(int64_t bytes, const std::string& what) {
  size_t free = 0, total = 0;
  TWELL_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  const auto free_bytes = static_cast<int64_t>(free);
  if (bytes <= free_bytes) return {};
  return fmt::format(
      "{} need {:.2f} GiB of GPU memory, of which {:.2f} GiB are free ({:.2f} GiB in all)", what,
      gib(bytes), gib(free_bytes), gib(static_cast<int64_t>(total)));
}

// Some writers store the head of a tied model as a second tensor.
void require_tied_head_equal(const OpenCheckpoint& opened) {
  if (!opened.config.tied_embeddings) return;
  const TensorInfo* head = opened.tensors.find("lm_head.weight");
  const TensorInfo* embedding = opened.tensors.find("model.embed_tokens.weight");
  if (head == nullptr) return;
  TWELL_REQUIRE(
      head->dtype == embedding->dtype && head->bytes.size() == embedding->bytes.size() &&
          std::memcmp(head->bytes.data(), embedding->bytes.data(), head->bytes.size()) == 0,
      "{}: config.json ties the embeddings, but {} differs from {}; set "
      "tie_word_embeddings to false",
      opened.tensors.source(), head->name, embedding->name);
}

}  // namespace

std::string cuda_model_unsupported(const ModelConfig& config) {
  if (config.width % 8 != 0 || config.ffn % 8 != 0) {
    return fmt::format(
        "the GPU needs hidden_size and intermediate_size in multiples of 8, got {} and {}; use "
        "--device cpu",
        config.width, config.ffn);
  }
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
    : config_(config), table_(parameter_table(config)) {
  config_.validate();
  std::string why = cuda_model_unsupported(config_);
  if (why.empty()) why = cuda_model_too_large(config_, other_bytes);
  TWELL_REQUIRE(why.empty(), "{}", why);
  flat_ = DeviceBuffer<BF16>(config_.parameter_count());
  weights_ = model_matrices<const BF16>(config_, flat_.data());
}

ModelCuda::ModelCuda(CudaContext& ctx, const Model& model) : ModelCuda(model.config, 0) {
  Uploader uploader(ctx);
  for (const ParamSpec& spec : table_) {
    const std::span<const float> values(model.flat.data() + spec.offset,
                                        static_cast<size_t>(spec.size()));
    uploader.copy(std::as_bytes(values), StoredFloat::kF32, spec.rows, spec.cols, false,
                  place_of(flat_, spec));
  }
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

std::unique_ptr<ModelCuda> ModelCuda::load(CudaContext& ctx, const fs::path& folder,
                                           int64_t other_bytes) {
  const OpenCheckpoint opened = open_checkpoint(folder);
  require_tied_head_equal(opened);
  std::unique_ptr<ModelCuda> model(new ModelCuda(opened.config, other_bytes));
  Uploader uploader(ctx);
  for (const ParamSpec& spec : model->table_) {
    const TensorInfo& info = *opened.tensors.find(spec.name);
    const int64_t rows = spec.transposed ? spec.cols : spec.rows;
    uploader.copy(info.bytes, stored_float(info.dtype), rows, spec.size() / rows, spec.transposed,
                  place_of(model->flat_, spec));
  }
  return model;
}

}  // namespace twell
