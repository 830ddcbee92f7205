// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/tensor_convert.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "twell/base/error.h"

namespace twell {
namespace {

constexpr int64_t kPieceValues = 1 << 14;  // values per piece: 64 KiB of f32, which stay in the L2
constexpr int64_t kStrip = 16;             // rows of a transposed piece: one cache line of f32

// Loads of a stored value. They go through memcpy because a file need not align its tensors.
struct LoadF32 {
  using Magnitude = int32_t;
  static constexpr Magnitude kExponent = 0x7f800000;  // all ones: infinite or NaN
  static constexpr int64_t kBytes = 4;
  static float at(const std::byte* in) {
    float value;
    std::memcpy(&value, in, sizeof(value));
    return value;
  }
};
struct LoadF16 {
  using Magnitude = int16_t;
  static constexpr Magnitude kExponent = 0x7c00;
  static constexpr int64_t kBytes = 2;
  static float at(const std::byte* in) {
    uint16_t bits;
    std::memcpy(&bits, in, sizeof(bits));
    return f16_to_float(bits);
  }
};
struct LoadBF16 {
  using Magnitude = int16_t;
  static constexpr Magnitude kExponent = 0x7f80;
  static constexpr int64_t kBytes = 2;
  static float at(const std::byte* in) {
    BF16 value;
    std::memcpy(&value, in, sizeof(value));
    return to_float(value);
  }
};

// Calls use(load) with the loader of a dtype.
template <typename Use>
auto with_load(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::kF32:
      return use(LoadF32());
    case DType::kF16:
      return use(LoadF16());
    case DType::kBF16:
      break;
  }
  return use(LoadBF16());
}

// The bits of a value without its sign, in the order of magnitudes, infinity and NaN last.
template <typename Load>
typename Load::Magnitude magnitude(const std::byte* in) {
  typename Load::Magnitude bits;
  std::memcpy(&bits, in, sizeof(bits));
  return static_cast<typename Load::Magnitude>(
      bits & std::numeric_limits<typename Load::Magnitude>::max());
}

template <typename Load>
bool is_non_finite(const std::byte* in) {
  return magnitude<Load>(in) >= Load::kExponent;
}

// Converts values [begin, begin + count) of the tensor.
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

// Writes values in a dtype through a buffer that is reused between calls.
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

DType float_dtype(const std::string& name) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw_error(__FILE__, __LINE__, fmt::format("dtype {} is not a float", name));
}

std::string show_shape(std::span<const int64_t> shape) {
  std::string text = "[";
  for (const int64_t size : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

int64_t first_non_finite(std::span<const std::byte> values, const std::string& dtype) {
  return with_load(float_dtype(dtype), [&](auto load) -> int64_t {
    using Load = decltype(load);
    const std::byte* in = values.data();
    const int64_t size = std::ssize(values) / Load::kBytes;
    for (int64_t begin = 0; begin < size; begin += kPieceValues) {
      const int64_t end = std::min(begin + kPieceValues, size);
      // Without an early exit the compiler vectorizes this loop: of signed integers, for whose
      // maximum every instruction set has an instruction.
      typename Load::Magnitude largest = 0;
      for (int64_t i = begin; i < end; ++i) {
        largest = std::max(largest, magnitude<Load>(in + i * Load::kBytes));
      }
      const bool found = largest >= Load::kExponent;
      for (int64_t i = begin; found; ++i) {
        if (is_non_finite<Load>(in + i * Load::kBytes)) return i;
      }
    }
    return -1;
  });
}

void refuse_non_finite(const TensorInfo& info, int64_t index, const std::string& source) {
  const float value = with_load(float_dtype(info.dtype), [&](auto load) {
    return load.at(info.bytes.data() + index * load.kBytes);
  });
  std::vector<int64_t> place(info.shape.size());
  for (size_t i = place.size(); i-- > 0; index /= info.shape[i]) place[i] = index % info.shape[i];
  throw InputError(fmt::format(
      "{}: tensor {} has the value {} at {}: the weights are damaged (--allow-non-finite to go on)",
      source, info.name, value, show_shape(place)));
}

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

void copy_rows(const TensorInfo& info, std::byte* out, int64_t, int64_t cols, int64_t begin,
               int64_t count) {
  const auto row_bytes = static_cast<size_t>(cols) * dtype_size(float_dtype(info.dtype));
  const size_t offset = static_cast<size_t>(begin) * row_bytes;
  std::memcpy(out + offset, info.bytes.data() + offset, static_cast<size_t>(count) * row_bytes);
}

namespace {

// Copies squares of 32 x 32 values through memory that stays in the L1 cache: stored rows are often
// a multiple of 4 KiB apart, where few of their lines fit into the caches at once. Whole lines are
// read and written.
template <typename Bits>
void transpose_values(const std::byte* in, Bits* out, int64_t rows, int64_t cols, int64_t begin,
                      int64_t count) {
  constexpr int64_t kEdge = 32;
  Bits square[kEdge][kEdge];
  for (int64_t strip = begin; strip < begin + count; strip += kEdge) {
    const int64_t width = std::min(kEdge, begin + count - strip);
    for (int64_t first = 0; first < rows; first += kEdge) {
      const int64_t height = std::min(kEdge, rows - first);
      for (int64_t i = 0; i < width; ++i) {
        std::memcpy(square[i], in + ((strip + i) * rows + first) * int64_t{sizeof(Bits)},
                    static_cast<size_t>(height) * sizeof(Bits));
      }
      for (int64_t row = 0; row < height; ++row) {
        Bits* to = out + (first + row) * cols + strip;
        for (int64_t i = 0; i < width; ++i) to[i] = square[i][row];
      }
    }
  }
}

}  // namespace

void copy_transposed(const TensorInfo& info, std::byte* out, int64_t rows, int64_t cols,
                     int64_t begin, int64_t count) {
  if (float_dtype(info.dtype) == DType::kF32) {
    transpose_values(info.bytes.data(), reinterpret_cast<uint32_t*>(out), rows, cols, begin, count);
  } else {
    transpose_values(info.bytes.data(), reinterpret_cast<uint16_t*>(out), rows, cols, begin, count);
  }
}

bool equal_values(const TensorInfo& a, const TensorInfo& b) {
  const DType type_a = float_dtype(a.dtype), type_b = float_dtype(b.dtype);
  const int64_t size = std::ssize(a.bytes) / static_cast<int64_t>(dtype_size(type_a));
  if (size != std::ssize(b.bytes) / static_cast<int64_t>(dtype_size(type_b))) return false;
  if (type_a == type_b) return std::memcmp(a.bytes.data(), b.bytes.data(), a.bytes.size()) == 0;
  std::vector<float> piece_a(kPieceValues), piece_b(kPieceValues);
  for (int64_t begin = 0; begin < size; begin += kPieceValues) {
    const int64_t count = std::min(kPieceValues, size - begin);
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
  std::vector<float> piece(static_cast<size_t>(std::min(size, kPieceValues)));
  for (int64_t begin = 0; begin < size; begin += kPieceValues) {
    const int64_t count = std::min(kPieceValues, size - begin);
    to_floats(info, stored, begin, count, piece.data());
    encoder.send({piece.data(), static_cast<size_t>(count)});
  }
}

void write_rows(ConstMatrixF values, DType dtype, const ByteSink& sink) {
  Encoder encoder(dtype, sink);
  const std::span<const float> all(values.data, static_cast<size_t>(values.rows * values.cols));
  for (size_t begin = 0; begin < all.size(); begin += kPieceValues) {
    encoder.send(all.subspan(begin, std::min<size_t>(kPieceValues, all.size() - begin)));
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
