// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/pattern_replay_cuda.h"

#include <algorithm>

#include "twell/base/rng.h"
#include "twell/model/captured_patterns.h"
#include "twell/ops/gate_gemm/gate_gemm_cuda.h"

namespace twell {
namespace {

constexpr int64_t kTile = 256;
constexpr int32_t kCompression = 8;

template <typename T>
void upload(const DeviceBuffer<T>& to, const std::vector<T>& from) {
  TWELL_CUDA_CHECK(
      cudaMemcpy(to.data(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));
}

}  // namespace

// TwELL of one chunk of tokens in device memory.
struct PatternReplayCuda::Packed {
  Packed(int64_t tokens, int64_t ffn, int64_t slots)
      : shape{tokens, ffn, kTile, kCompression},
        words(shape.words()),
        spill(std::max<int64_t>(slots, 1) * kTile),
        row_nnz(tokens) {}
  TwellPacked view() const {
    return {shape, words.data(), spill.data(), spill.size() / kTile, row_nnz.data()};
  }

  TwellShape shape;
  DeviceBuffer<uint32_t> words;
  DeviceBuffer<BF16> spill;
  DeviceBuffer<int32_t> row_nnz;
  double nnz_per_token = 0.0;
};

namespace {

// The pattern's rows, repeated to fill the shape, with random positive values.
struct HostPacked {
  HostPacked(const TwellShape& shape, const std::vector<uint16_t>& pattern_nnz,
             const std::vector<uint16_t>& columns)
      : words(static_cast<size_t>(shape.words()), 0) {
    std::vector<size_t> starts;
    size_t start = 0;
    for (const uint16_t n : pattern_nnz) {
      starts.push_back(start);
      start += n;
    }
    TWELL_REQUIRE(start == columns.size(), "a pattern's rows have {} columns in all, it holds {}",
                  start, columns.size());
    for (int64_t row = 0; row < shape.rows; ++row) {
      const size_t from = static_cast<size_t>(row) % pattern_nnz.size();
      row_nnz.push_back(pattern_nnz[from]);
      size_t next = starts[from];
      const size_t end = next + pattern_nnz[from];
      while (next < end) next = pack_tile(shape, row, columns, next, end);
    }
  }

  std::vector<uint32_t> words;
  std::vector<BF16> spill;
  std::vector<int32_t> row_nnz;

 private:
  // Packs the tile of columns[next]; returns where the next tile begins.
  size_t pack_tile(const TwellShape& shape, int64_t row, const std::vector<uint16_t>& columns,
                   size_t next, size_t end) {
    const int64_t tile = columns[next] / kTile;
    size_t last = next;
    while (last < end && columns[last] / kTile == tile) ++last;
    TWELL_REQUIRE(tile < shape.tiles(), "a pattern has column {}, the model {} FFN neurons",
                  columns[next], shape.cols);
    uint32_t* out = words.data() + shape.offset(row, tile);
    out[0] = static_cast<uint32_t>(last - next);
    const bool fits = static_cast<int64_t>(last - next) <= shape.capacity();
    const size_t slot = spill.size() / static_cast<size_t>(kTile);
    if (!fits) {
      out[1] = static_cast<uint32_t>(slot);
      spill.resize(spill.size() + static_cast<size_t>(kTile));
    }
    for (size_t i = next; i < last; ++i) {
      const BF16 value = to_bf16(0.05f + uniform(5, static_cast<uint64_t>(row), i));
      if (fits) {
        out[1 + i - next] = TwellWord<uint32_t>::from_bits(columns[i], value.bits);
      } else {
        spill[slot * static_cast<size_t>(kTile) + columns[i] % static_cast<size_t>(kTile)] = value;
      }
    }
    return last;
  }
};

}  // namespace

PatternReplayCuda::PatternReplayCuda(CudaContext& ctx, const std::filesystem::path& file,
                                     const ModelConfig& config, int64_t max_tokens)
    : ctx_(ctx),
      layers_(config.layers),
      width_(config.width),
      ffn_(config.ffn),
      chunk_(FfnWorkspaceCuda::chunk_tokens(ctx, max_tokens)),
      gated_(config.gated),
      workspace_(chunk_, config.ffn) {
  const SafetensorsFile patterns(file);
  for (const int64_t n : captured_layers(patterns)) {
    const auto [row_nnz, columns] = read_captured_layer(patterns, n);
    TWELL_REQUIRE(!row_nnz.empty(), "{}: layer{} has no rows", file.string(), n);
    const HostPacked host({chunk_, ffn_, kTile, kCompression}, row_nnz, columns);
    auto packed = std::make_unique<Packed>(chunk_, ffn_, std::ssize(host.spill) / kTile);
    upload(packed->words, host.words);
    upload(packed->spill, host.spill);
    upload(packed->row_nnz, host.row_nnz);
    packed->nnz_per_token =
        static_cast<double>(columns.size()) / static_cast<double>(row_nnz.size());
    patterns_.push_back(std::move(packed));
  }
  const TwellShape shape{chunk_, ffn_, kTile, kCompression};
  made_ = std::make_unique<Packed>(chunk_, ffn_, shape.max_spill_slots());
}

PatternReplayCuda::~PatternReplayCuda() = default;

const PatternReplayCuda::Packed& PatternReplayCuda::pattern_of(int64_t layer) const {
  return *patterns_[static_cast<size_t>(layer * std::ssize(patterns_) / layers_)];
}

double PatternReplayCuda::nnz_per_token(int64_t layer) const {
  return pattern_of(layer).nnz_per_token;
}

void PatternReplayCuda::forward(int64_t layer, const FfnForwardCuda& problem,
                                const std::function<void(bool gate)>& done) {
  for (int64_t begin = 0; begin < problem.tokens; begin += chunk_) {
    const int64_t tokens = std::min(chunk_, problem.tokens - begin);
    const __nv_bfloat16* x = problem.x + begin * width_;
    TwellPacked made = made_->view(), replayed = pattern_of(layer).view();
    made.shape.rows = replayed.shape.rows = tokens;
    gate_gemm_cuda(ctx_, {.tokens = tokens,
                          .width = width_,
                          .ffn = ffn_,
                          .x = x,
                          .w_gate = gated_ ? problem.weights.w_gate : problem.weights.w_up,
                          .out = made});
    done(true);
    tile_union_up_down_cuda(ctx_,
                            {.tokens = tokens,
                             .width = width_,
                             .ffn = ffn_,
                             .gate = replayed,
                             .x = x,
                             .w_up = gated_ ? problem.weights.w_up : nullptr,
                             .w_down = problem.weights.w_down,
                             .y = problem.y + begin * width_},
                            workspace_);
    done(false);
  }
}

}  // namespace twell
