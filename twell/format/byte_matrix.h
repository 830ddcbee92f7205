// SPDX-License-Identifier: Apache-2.0
// Matrices in 8 bits with an f32 scale per row: element (r, c) is value(r, c) * scale(r). The rows
// of a weight are output channels, those of activations are tokens. This is the specification of
// the quantiser; byte_matrix_cuda.h gives the same bits on the GPU.
//   largest = max over the row of |v|, at least kLeastLargest
//   scale   = largest / most,  most = 448 (e4m3) or 127 (int8)
//   value   = v * (most / largest), rounded to nearest even, at most `most` in size
// All steps in f32. A row of zeros keeps its zeros. NaN and infinity are refused. Weights are
// rounded to bf16 first, so that a converted file and a conversion at load give the same bits.
// In files these are the names and types of compressed-tensors (checkpoint/quantization.h).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "twell/base/host_device.h"
#include "twell/base/matrix.h"

namespace twell {

enum class ByteType { kE4M3, kInt8 };

// What of a model is in 8 bits: the projections of its layers, and the output head too.
struct ByteWeights {
  ByteType type = ByteType::kE4M3;
  bool head = false;
  bool operator==(const ByteWeights&) const = default;
};

// Safetensors spelling: "F8_E4M3", "I8".
std::string_view byte_type_name(ByteType type);

// Largest representable magnitude.
TWELL_HOST_DEVICE constexpr float most_of(ByteType type) {
  return type == ByteType::kE4M3 ? 448.0f : 127.0f;
}
// Stands in for the largest value of a smaller row, so that its scale has an inverse.
inline constexpr float kLeastLargest = 1e-30f;

// FP8 e4m3 (4 bits of exponent with bias 7, 3 of mantissa, no infinity, NaN is 0x7f and 0xff), to
// nearest even; larger values become 448, NaN stays NaN.
uint8_t to_e4m3(float value);
float e4m3_to_float(uint8_t bits);

// The value that a byte stands for, without its scale.
float byte_to_float(ByteType type, uint8_t bits);

// A view; values are packed row-major.
struct ByteMatrix {
  ByteType type = ByteType::kE4M3;
  const uint8_t* values = nullptr;  // [rows, cols]
  const float* scales = nullptr;    // [rows]
  int64_t rows = 0;
  int64_t cols = 0;

  bool empty() const { return values == nullptr; }
  float at(int64_t row, int64_t col) const {
    return byte_to_float(type, values[row * cols + col]) * scales[row];
  }
};

// One that owns its memory.
struct OwnedByteMatrix {
  OwnedByteMatrix() = default;
  OwnedByteMatrix(ByteType type_in, int64_t rows_in, int64_t cols_in);
  ByteMatrix view() const { return {type, values.data(), scales.data(), rows, cols}; }

  ByteType type = ByteType::kE4M3;
  int64_t rows = 0, cols = 0;
  std::vector<uint8_t> values;
  std::vector<float> scales;
};

// Quantises one row into `values`, as many, and returns its scale. InputError on a value that is
// not finite, with its column.
float quantise_row(ByteType type, std::span<const float> row, std::span<uint8_t> values);
OwnedByteMatrix quantise_rows(ByteType type, ConstMatrixF matrix);

// out[i] = the values of a row times its scale.
void dequantise_row(ByteType type, std::span<const uint8_t> values, float scale,
                    std::span<float> out);

}  // namespace twell
