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

// Layers for which the file has a pattern. InputError when there is none.
std::set<int64_t> captured_layers(const SafetensorsFile& file);
// InputError when the file has no pattern for the layer or the pattern does not fit `ffn` neurons.
FfnPattern captured_pattern(const SafetensorsFile& file, int64_t layer, int64_t ffn);
// Patterns of the given layers, or of all layers when none are given. A pattern's name is the
// file's name behind its last '_', and the layer.
std::vector<FfnPattern> read_patterns(const std::filesystem::path& path,
                                      const std::vector<int>& layers, int64_t ffn);

// `count` tokens starting at token `begin`; after the last token it continues at token 0.
// InputError when `begin` is not a token of the pattern.
FfnPattern repeated(const FfnPattern& pattern, int64_t begin, int64_t count);

// Converts a pattern of `from` neurons to one of `to`: neuron j is active where neuron floor(j from
// / to) was. This keeps the shares of active neurons, per token and over neighbouring tokens.
FfnPattern stretch_pattern(const FfnPattern& pattern, int64_t from, int64_t to);

// What makes a layer's own gate fire as a pattern, on random operands: the first columns of x [M,
// D], of deviation 1, and of the weight [F, D] in front of the ReLU, of deviation 0.02. Column i of
// x marks tokens i, i + period and so on, which all fire as token i of the pattern.
struct FiringColumns {
  int64_t period = 0;        // the tokens of the pattern, but at most D / 2 and 1,024
  std::vector<BF16> x;       // [M, period]
  std::vector<BF16> weight;  // [F, period]
};
FiringColumns firing_columns(const FfnPattern& pattern, int64_t tokens, int64_t width, int64_t ffn);

// Mean number of neurons active on at least one of 128 consecutive tokens.
double mean_union(const FfnPattern& pattern);

// A pattern as TwELL in tiles of 256 with C = 8. Non-zero i has the value 0.05 + uniform(seed, 1,
// i).
struct PackedPattern {
  TwellShape shape;
  std::vector<uint32_t> words;
  std::vector<BF16> spill;  // has at least one slot
};
PackedPattern pack_pattern(const FfnPattern& pattern, int64_t ffn, uint64_t seed);
// The values of pack_pattern as a dense [M, F] matrix.
std::vector<BF16> dense_pattern(const FfnPattern& pattern, int64_t ffn, uint64_t seed);

}  // namespace twell
