// SPDX-License-Identifier: Apache-2.0
#include "bench/patterns.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>

#include "twell/base/error.h"
#include "twell/base/rng.h"
#include "twell/base/rounding.h"

namespace twell {
namespace {

std::vector<uint16_t> read_u16(const SafetensorsFile& file, const std::string& name) {
  const TensorInfo& tensor = file.tensor(name);
  TWELL_REQUIRE(tensor.dtype == "U16" && tensor.shape.size() == 1,
                "{}: tensor {} must be U16 with one dimension, it is {} with {}",
                file.path().string(), name, tensor.dtype, tensor.shape.size());
  std::vector<uint16_t> values(static_cast<size_t>(tensor.shape[0]));
  if (!values.empty()) std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

// Index of each row's first column; the last element is the total.
std::vector<size_t> row_begins(const FfnPattern& pattern) {
  std::vector<size_t> begins(pattern.row_nnz.size() + 1);
  std::inclusive_scan(pattern.row_nnz.begin(), pattern.row_nnz.end(), begins.begin() + 1,
                      std::plus<>(), size_t{0});
  return begins;
}

BF16 value_of(uint64_t seed, size_t non_zero) {
  return to_bf16(0.05f + uniform(seed, 1, non_zero));
}

}  // namespace

double FfnPattern::nnz_per_token() const {
  return static_cast<double>(columns.size()) / static_cast<double>(row_nnz.size());
}

int64_t FfnPattern::max_row_nnz() const {
  return *std::max_element(row_nnz.begin(), row_nnz.end());
}

FfnPattern random_pattern(std::string name, int64_t tokens, int64_t ffn, double density,
                          uint64_t seed) {
  FfnPattern out{.name = std::move(name)};
  for (int64_t row = 0; row < tokens; ++row) {
    const size_t before = out.columns.size();
    for (int64_t n = 0; n < ffn; ++n) {
      if (uniform(seed, static_cast<uint64_t>(row), static_cast<uint64_t>(n)) >= density) continue;
      out.columns.push_back(static_cast<uint32_t>(n));
    }
    out.row_nnz.push_back(static_cast<int32_t>(out.columns.size() - before));
  }
  return out;
}

std::set<int64_t> captured_layers(const SafetensorsFile& file) {
  std::set<int64_t> layers;
  for (const auto& [name, tensor] : file.tensors()) {
    int64_t layer = -1;
    int end = 0;
    if (std::sscanf(name.c_str(), "layer%ld.row_nnz%n", &layer, &end) == 1 &&
        end == static_cast<int>(name.size())) {
      layers.insert(layer);
    }
  }
  TWELL_REQUIRE(!layers.empty(), "{} holds no activation pattern (layerN.row_nnz, layerN.col)",
                file.path().string());
  return layers;
}

FfnPattern captured_pattern(const SafetensorsFile& file, int64_t layer, int64_t ffn) {
  const std::vector<uint16_t> row_nnz = read_u16(file, fmt::format("layer{}.row_nnz", layer));
  const std::vector<uint16_t> columns = read_u16(file, fmt::format("layer{}.col", layer));
  const std::string source = fmt::format("{}: layer {}", file.path().string(), layer);
  TWELL_REQUIRE(!row_nnz.empty(), "{}: the pattern has no tokens", source);
  FfnPattern out{.name = fmt::format("layer {}", layer),
                 .row_nnz = {row_nnz.begin(), row_nnz.end()},
                 .columns = {columns.begin(), columns.end()}};
  const std::vector<size_t> begins = row_begins(out);
  TWELL_REQUIRE(begins.back() == columns.size(),
                "{}: row_nnz adds up to {}, but col has {} entries", source, begins.back(),
                columns.size());
  for (size_t row = 0; row < row_nnz.size(); ++row) {
    for (size_t i = begins[row]; i < begins[row + 1]; ++i) {
      TWELL_REQUIRE(columns[i] < ffn, "{}: neuron {} of token {} is not in a layer of {}", source,
                    columns[i], row, ffn);
      TWELL_REQUIRE(i == begins[row] || columns[i - 1] < columns[i],
                    "{}: the neurons of token {} are not in ascending order", source, row);
    }
  }
  return out;
}

std::vector<FfnPattern> read_patterns(const std::filesystem::path& path,
                                      const std::vector<int>& layers, int64_t ffn) {
  const SafetensorsFile file(path);
  const std::string stem = path.stem().string();
  std::set<int64_t> chosen(layers.begin(), layers.end());
  if (chosen.empty()) chosen = captured_layers(file);
  std::vector<FfnPattern> patterns;
  for (const int64_t layer : chosen) {
    FfnPattern& pattern = patterns.emplace_back(captured_pattern(file, layer, ffn));
    pattern.name = fmt::format("{} L{}", stem.substr(stem.rfind('_') + 1), layer);
  }
  return patterns;
}

FfnPattern repeated(const FfnPattern& pattern, int64_t begin, int64_t count) {
  TWELL_REQUIRE(begin >= 0 && begin < pattern.tokens() && count >= 1,
                "pattern {} has {} tokens; {} from token {} on were asked for", pattern.name,
                pattern.tokens(), count, begin);
  const std::vector<size_t> begins = row_begins(pattern);
  FfnPattern out{.name = pattern.name};
  for (int64_t i = 0; i < count; ++i) {
    const auto token = static_cast<size_t>((begin + i) % pattern.tokens());
    out.row_nnz.push_back(pattern.row_nnz[token]);
    out.columns.insert(out.columns.end(),
                       pattern.columns.begin() + static_cast<std::ptrdiff_t>(begins[token]),
                       pattern.columns.begin() + static_cast<std::ptrdiff_t>(begins[token + 1]));
  }
  return out;
}

FfnPattern stretch_pattern(const FfnPattern& pattern, int64_t from, int64_t to) {
  TWELL_REQUIRE(from > 0 && to > 0, "a pattern of {} neurons stretched to {}", from, to);
  FfnPattern out{.name = pattern.name};
  size_t next = 0;
  for (const int32_t nnz : pattern.row_nnz) {
    int32_t stretched = 0;
    for (int32_t i = 0; i < nnz; ++i, ++next) {
      const int64_t neuron = pattern.columns[next];
      TWELL_REQUIRE(neuron < from, "{}: neuron {} of a layer of {}", pattern.name, neuron, from);
      // The neurons j with floor(j from / to) = neuron.
      const int64_t end = ceil_div((neuron + 1) * to, from);
      for (int64_t j = ceil_div(neuron * to, from); j < end; ++j, ++stretched) {
        out.columns.push_back(static_cast<uint32_t>(j));
      }
    }
    out.row_nnz.push_back(stretched);
  }
  return out;
}

FiringColumns firing_columns(const FfnPattern& pattern, int64_t tokens, int64_t width,
                             int64_t ffn) {
  constexpr int64_t kMostPeriod = 1024;
  // Their product is 16, where the other columns' is of deviation 0.02 sqrt(D), 1.8 at D 8,192.
  constexpr float kMark = 32.0f, kFires = 0.5f;
  FiringColumns out{.period = std::min({width / 2, kMostPeriod, pattern.tokens()})};
  out.x.assign(static_cast<size_t>(tokens * out.period), to_bf16(0.0f));
  for (int64_t m = 0; m < tokens; ++m) {
    out.x[static_cast<size_t>(m * out.period + m % out.period)] = to_bf16(kMark);
  }
  out.weight.assign(static_cast<size_t>(ffn * out.period), to_bf16(-kFires));
  size_t next = 0;
  for (int64_t m = 0; m < out.period; ++m) {
    for (int32_t i = 0; i < pattern.row_nnz[static_cast<size_t>(m)]; ++i) {
      out.weight[static_cast<size_t>(pattern.columns[next++] * out.period + m)] = to_bf16(kFires);
    }
  }
  return out;
}

double mean_union(const FfnPattern& pattern) {
  constexpr size_t kTokens = 128;
  const std::vector<size_t> begins = row_begins(pattern);
  const size_t rows = pattern.row_nnz.size();
  double sum = 0.0, tiles = 0.0;
  for (size_t row = 0; row < rows; row += kTokens, ++tiles) {
    const size_t end = begins[std::min(row + kTokens, rows)];
    sum += static_cast<double>(
        std::set<uint32_t>(pattern.columns.begin() + static_cast<std::ptrdiff_t>(begins[row]),
                           pattern.columns.begin() + static_cast<std::ptrdiff_t>(end))
            .size());
  }
  return sum / tiles;
}

PackedPattern pack_pattern(const FfnPattern& pattern, int64_t ffn, uint64_t seed) {
  PackedPattern out{.shape = {pattern.tokens(), ffn, 256, 8}};
  const auto tile = static_cast<size_t>(out.shape.tile);
  out.words.assign(static_cast<size_t>(out.shape.words()), 0);
  const std::vector<size_t> begins = row_begins(pattern);
  for (int64_t row = 0; row < pattern.tokens(); ++row) {
    const size_t row_end = begins[static_cast<size_t>(row) + 1];
    for (size_t next = begins[static_cast<size_t>(row)], end; next < row_end; next = end) {
      const size_t t = pattern.columns[next] / tile;
      for (end = next; end < row_end && pattern.columns[end] / tile == t; ++end) {
      }
      uint32_t* words = out.words.data() + out.shape.offset(row, static_cast<int64_t>(t));
      words[0] = static_cast<uint32_t>(end - next);
      if (static_cast<int64_t>(end - next) <= out.shape.capacity()) {
        for (size_t i = next; i < end; ++i) {
          words[1 + i - next] =
              TwellWord<uint32_t>::from_bits(pattern.columns[i], value_of(seed, i).bits);
        }
        continue;
      }
      const size_t slot = out.spill.size();
      words[1] = static_cast<uint32_t>(slot / tile);
      out.spill.resize(slot + tile);
      for (size_t i = next; i < end; ++i) {
        out.spill[slot + pattern.columns[i] % tile] = value_of(seed, i);
      }
    }
  }
  if (out.spill.empty()) out.spill.resize(tile);
  return out;
}

std::vector<BF16> dense_pattern(const FfnPattern& pattern, int64_t ffn, uint64_t seed) {
  std::vector<BF16> out(static_cast<size_t>(pattern.tokens() * ffn));
  const std::vector<size_t> begins = row_begins(pattern);
  for (size_t row = 0; row < pattern.row_nnz.size(); ++row) {
    for (size_t i = begins[row]; i < begins[row + 1]; ++i) {
      out[row * static_cast<size_t>(ffn) + pattern.columns[i]] = value_of(seed, i);
    }
  }
  return out;
}

}  // namespace twell
