// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/tensor_convert.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "twell/base/error.h"

namespace twell {
namespace {

constexpr int64_t kPiece = 1 << 14;  // values per piece: 64 KiB, which stays in the first caches
constexpr int64_t kStrip = 16;       // rows of a transposed piece: one cache line of f32

DType float_dtype(const std::string& name) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw_error(__FILE__, __LINE__, fmt::format("dtype {} is not a float", name));
}

// Each loads a stored value through memcpy: a file need not align its tensors.
struct LoadF32 {
  static constexpr int64_t kBytes = 4;
  static float at(const std::byte* in) {
    float value;
    std::memcpy(&value, in, sizeof(value));
    return value;
  }
};
struct LoadF16 {
  static constexpr int64_t kBytes = 2;
  static float at(const std::byte* in) {
    uint16_t bits;
    std::memcpy(&bits, in, sizeof(bits));
    return f16_to_float(bits);
  }
};
struct LoadBF16 {
  static constexpr int64_t kBytes = 2;
  static float at(const std::byte* in) {
    BF16 value;
    std::memcpy(&value, in, sizeof(value));
    return to_float(value);
  }
};

template <typename Use>
void with_load(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::kF32:
      return use(LoadF32());
    case DType::kF16:
      return use(LoadF16());
    case DType::kBF16:
      return use(LoadBF16());
  }
}

// Values [begin, begin + count) of the tensor.
void to_floats(const TensorInfo& info, DType dtype, int64_t begin, int64_t count, float* out) {
  with_load(dtype, [&](auto load) {
    const std::byte* in = info.bytes.data() + begin * load.kBytes;
    for (int64_t i = 0; i < count; ++i) out[i] = load.at(in + i * load.kBytes);
  });
}

uint16_t checked_f16(float value) {
  const uint16_t bits = float_to_f16(value);
  TWELL_REQUIRE((bits & 0x7fffu) != 0x7c00u || std::isinf(value),
                "a weight of {} is too large for F16; use BF16 or F32", value);
  return bits;
}

// Sends values in a type, through a buffer that is kept between calls.
class Encoder {
 public:
  Encoder(DType dtype, const ByteSink& sink) : dtype_(dtype), sink_(sink) {}
  void send(std::span<const float> values) {
    if (dtype_ == DType::kF32) return sink_(std::as_bytes(values));
    half_.resize(values.size());
    if (dtype_ == DType::kBF16) {
      std::transform(values.begin(), values.end(), half_.begin(),
                     [](float value) { return to_bf16(value).bits; });
    } else {
      std::transform(values.begin(), values.end(), half_.begin(), checked_f16);
    }
    sink_(std::as_bytes(std::span<const uint16_t>(half_)));
  }

 private:
  DType dtype_;
  const ByteSink& sink_;
  std::vector<uint16_t> half_;
};

}  // namespace

void require_float(const TensorInfo& info, const std::string& source) {
  TWELL_REQUIRE(info.dtype == "F32" || info.dtype == "F16" || info.dtype == "BF16",
                "{}: tensor {} is {}; weights must be F32, BF16 or F16", source, info.name,
                info.dtype);
}

void read_rows(const TensorInfo& info, MatrixF out, int64_t begin, int64_t count) {
  to_floats(info, float_dtype(info.dtype), begin * out.cols, count * out.cols, out.row(begin));
}

void read_transposed(const TensorInfo& info, MatrixF out, int64_t begin, int64_t count) {
  with_load(float_dtype(info.dtype), [&](auto load) {
    const int64_t stride = out.rows * load.kBytes, end = begin + count;
    for (int64_t strip = begin; strip < end; strip += kStrip) {
      const std::byte* in = info.bytes.data() + strip * stride;
      const int64_t width = std::min(kStrip, end - strip);
      for (int64_t row = 0; row < out.rows; ++row) {
        const std::byte* column = in + row * load.kBytes;
        float* to = out.row(row) + strip;
        for (int64_t i = 0; i < width; ++i) to[i] = load.at(column + i * stride);
      }
    }
  });
}

bool equal_values(const TensorInfo& a, const TensorInfo& b) {
  const DType type_a = float_dtype(a.dtype), type_b = float_dtype(b.dtype);
  const int64_t size = std::ssize(a.bytes) / static_cast<int64_t>(dtype_size(type_a));
  if (size != std::ssize(b.bytes) / static_cast<int64_t>(dtype_size(type_b))) return false;
  if (type_a == type_b) return std::memcmp(a.bytes.data(), b.bytes.data(), a.bytes.size()) == 0;
  std::vector<float> piece_a(kPiece), piece_b(kPiece);
  for (int64_t begin = 0; begin < size; begin += kPiece) {
    const int64_t count = std::min(kPiece, size - begin);
    to_floats(a, type_a, begin, count, piece_a.data());
    to_floats(b, type_b, begin, count, piece_b.data());
    if (std::memcmp(piece_a.data(), piece_b.data(), static_cast<size_t>(count) * sizeof(float)) !=
        0)
      return false;
  }
  return true;
}

void write_converted(const TensorInfo& info, DType dtype, const ByteSink& sink) {
  const DType stored = float_dtype(info.dtype);
  const int64_t size = std::ssize(info.bytes) / static_cast<int64_t>(dtype_size(stored));
  Encoder encoder(dtype, sink);
  std::vector<float> piece(static_cast<size_t>(std::min(size, kPiece)));
  for (int64_t begin = 0; begin < size; begin += kPiece) {
    const int64_t count = std::min(kPiece, size - begin);
    to_floats(info, stored, begin, count, piece.data());
    encoder.send({piece.data(), static_cast<size_t>(count)});
  }
}

void write_rows(ConstMatrixF values, DType dtype, const ByteSink& sink) {
  Encoder encoder(dtype, sink);
  const std::span<const float> all(values.data, static_cast<size_t>(values.rows * values.cols));
  for (size_t begin = 0; begin < all.size(); begin += kPiece) {
    encoder.send(all.subspan(begin, std::min<size_t>(kPiece, all.size() - begin)));
  }
}

void write_transposed(ConstMatrixF values, DType dtype, const ByteSink& sink) {
  Encoder encoder(dtype, sink);
  std::vector<float> strip(static_cast<size_t>(kStrip * values.rows));
  for (int64_t col = 0; col < values.cols; col += kStrip) {
    const int64_t count = std::min(kStrip, values.cols - col);
    for (int64_t row = 0; row < values.rows; ++row) {
      for (int64_t i = 0; i < count; ++i) strip[i * values.rows + row] = values(row, col + i);
    }
    encoder.send({strip.data(), static_cast<size_t>(count * values.rows)});
  }
}

}  // namespace twell
