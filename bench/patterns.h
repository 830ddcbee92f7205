// SPDX-License-Identifier: Apache-2.0
// Activation patterns: which neurons of a layer's FFN are active on each of M tokens. Patterns are
// random, or captured from a trained model as safetensors with layerN.row_nnz U16 [M] and
// layerN.col U16 [sum of row_nnz], ascending within a row.
#pragma once

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "twell/base/dtype.h"
#include "twell/checkpoint/safetensors.h"
#include "twell/format/twell.h"

namespace twell {

struct FfnPattern {
  std::string name;
  std::vector<int32_t> row_nnz;   // [M]
  std::vector<uint32_t> columns;  // [sum of row_nnz], ascending within a row
  int64_t tokens() const { return std::ssize(row_nnz); }
  double nnz_per_token() const;
  int64_t max_row_nnz() const;
};

// Each neuron is active with probability `density`, independently.
FfnPattern random_pattern(std::string name, int64_t tokens, int64_t ffn, double density,
                          uint64_t seed);

// Layers that the file has a pattern of. InputError when there is none.
std::set<int64_t> captured_layers(const SafetensorsFile& file);
// InputError when the layer is not there, or when its pattern is not that of a layer of `ffn`
// neurons.
FfnPattern captured_pattern(const SafetensorsFile& file, int64_t layer, int64_t ffn);
// Patterns of the given layers, or of all when none are given, named after the end of the file's
// name and the layer.
std::vector<FfnPattern> read_patterns(const std::filesystem::path& path,
                                      const std::vector<int>& layers, int64_t ffn);

// `count` tokens from token `begin` on, which starts again at token 0 after the last one.
// InputError when token `begin` is not there.
FfnPattern repeated(const FfnPattern& pattern, int64_t begin, int64_t count);

// The pattern of `from` neurons as one of `to`: neuron j is active where neuron floor(j from / to)
// was, so that the shares of active neurons, per token and over neighbouring tokens, stay the same.
FfnPattern stretch_pattern(const FfnPattern& pattern, int64_t from, int64_t to);

// Neurons active on at least one of 128 consecutive tokens, mean.
double mean_union(const FfnPattern& pattern);

// TwELL in tiles of 256 with C = 8. Non-zero i has the value 0.05 + uniform(seed, 1, i).
struct PackedPattern {
  TwellShape shape;
  std::vector<uint32_t> words;
  std::vector<BF16> spill;  // at least one slot
};
PackedPattern pack_pattern(const FfnPattern& pattern, int64_t ffn, uint64_t seed);
// The same values dense, [M, F].
std::vector<BF16> dense_pattern(const FfnPattern& pattern, int64_t ffn, uint64_t seed);

}  // namespace twell
