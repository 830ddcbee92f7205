// SPDX-License-Identifier: Apache-2.0
#include "bench/packed_patterns_cuda.h"

#include <algorithm>
#include <cstddef>
#include <set>

#include "bench/captured_patterns.h"
#include "twell/base/rng.h"

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

double mean_union(const std::vector<uint16_t>& row_nnz, const std::vector<uint16_t>& columns) {
  constexpr size_t kTokens = 128;
  double sum = 0.0, tiles = 0.0;
  size_t next = 0;
  for (size_t begin = 0; begin < row_nnz.size(); begin += kTokens, ++tiles) {
    std::set<uint16_t> active;
    for (size_t row = begin; row < std::min(begin + kTokens, row_nnz.size()); ++row) {
      active.insert(columns.begin() + static_cast<std::ptrdiff_t>(next),
                    columns.begin() + static_cast<std::ptrdiff_t>(next + row_nnz[row]));
      next += row_nnz[row];
    }
    sum += static_cast<double>(active.size());
  }
  return sum / tiles;
}

}  // namespace

PackedTwellCuda::PackedTwellCuda(int64_t tokens, int64_t ffn, int64_t slots)
    : shape{tokens, ffn, kTile, kCompression},
      words(shape.words()),
      spill(std::max<int64_t>(slots, 1) * kTile),
      row_nnz(tokens) {}

TwellPacked PackedTwellCuda::view() const {
  return {shape, words.data(), spill.data(), spill.size() / kTile, row_nnz.data()};
}

PackedPatternsCuda::PackedPatternsCuda(const std::filesystem::path& file, int64_t layers,
                                       int64_t ffn, int64_t tokens)
    : layers_(layers) {
  const SafetensorsFile captured(file);
  for (const int64_t n : captured_layers(captured)) {
    const auto [row_nnz, columns] = read_captured_layer(captured, n);
    TWELL_REQUIRE(!row_nnz.empty(), "{}: layer{} has no rows", file.string(), n);
    const HostPacked host({tokens, ffn, kTile, kCompression}, row_nnz, columns);
    const PackedTwellCuda& packed =
        patterns_.emplace_back(tokens, ffn, std::ssize(host.spill) / kTile);
    upload(packed.words, host.words);
    upload(packed.spill, host.spill);
    upload(packed.row_nnz, host.row_nnz);
    nnz_per_token_.push_back(static_cast<double>(columns.size()) /
                             static_cast<double>(row_nnz.size()));
    union_neurons_.push_back(mean_union(row_nnz, columns));
  }
}

}  // namespace twell
