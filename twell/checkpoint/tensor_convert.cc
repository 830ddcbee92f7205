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

// Reads a stored value, through memcpy because a file need not align its tensors. Magnitude is a
// signed integer of the value's size, kInfinity the bits of an infinite value.
template <typename Stored, typename Magnitude, Magnitude kInfinity, float (*widen)(Stored)>
struct Load {
  static constexpr int64_t kBytes = sizeof(Stored);
  static float at(const std::byte* in) { return widen(bits_as<Stored>(in)); }
  // The bits of a value without its sign, in the order of magnitudes, infinity and NaN last.
  static Magnitude magnitude(const std::byte* in) {
    return static_cast<Magnitude>(bits_as<Magnitude>(in) & std::numeric_limits<Magnitude>::max());
  }
  static bool is_non_finite(Magnitude magnitude) { return magnitude >= kInfinity; }

 private:
  template <typename T>
  static T bits_as(const std::byte* in) {
    T value;
    std::memcpy(&value, in, sizeof(value));
    return value;
  }
};
float unchanged(float value) { return value; }
using LoadF32 = Load<float, int32_t, 0x7f800000, unchanged>;
using LoadF16 = Load<uint16_t, int16_t, 0x7c00, f16_to_float>;
using LoadBF16 = Load<BF16, int16_t, 0x7f80, to_float>;
// The bits of a value of two bytes.
struct LoadBits {
  static constexpr int64_t kBytes = sizeof(uint16_t);
  static uint16_t at(const std::byte* in) {
    uint16_t bits;
    std::memcpy(&bits, in, sizeof(bits));
    return bits;
  }
};

// Calls use(load) with the loader of a dtype.
template <typename Use>
auto with_load(DType dtype, const Use& use) {
  if (dtype == DType::kF32) return use(LoadF32());
  return dtype == DType::kF16 ? use(LoadF16()) : use(LoadBF16());
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
    using Reader = decltype(load);
    const std::byte* in = values.data();
    const int64_t size = std::ssize(values) / Reader::kBytes;
    for (int64_t begin = 0; begin < size; begin += kPieceValues) {
      const int64_t end = std::min(begin + kPieceValues, size);
      // Without an early exit the compiler vectorizes this loop: of signed integers, for whose
      // maximum every instruction set has an instruction.
      auto largest = Reader::magnitude(in + begin * Reader::kBytes);
      for (int64_t i = begin; i < end; ++i) {
        largest = std::max(largest, Reader::magnitude(in + i * Reader::kBytes));
      }
      const bool found = Reader::is_non_finite(largest);
      for (int64_t i = begin; found; ++i) {
        if (Reader::is_non_finite(Reader::magnitude(in + i * Reader::kBytes))) return i;
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

namespace {

// Reads squares of 32 x 32 values through memory that stays in the L1 cache: stored rows are often
// a multiple of 4 KiB apart, where few of their lines fit into the caches at once. Whole lines are
// read and written.
template <typename Reader, typename Out>
void transpose(const std::byte* in, const TensorPlace& place, int64_t begin, int64_t count) {
  constexpr int64_t kEdge = 32;
  Out square[kEdge][kEdge];
  for (int64_t strip = begin; strip < begin + count; strip += kEdge) {
    const int64_t width = std::min(kEdge, begin + count - strip);
    for (int64_t first = 0; first < place.rows; first += kEdge) {
      const int64_t height = std::min(kEdge, place.rows - first);
      for (int64_t i = 0; i < width; ++i) {
        const std::byte* from = in + ((strip + i) * place.rows + first) * Reader::kBytes;
        for (int64_t j = 0; j < height; ++j) square[i][j] = Reader::at(from + j * Reader::kBytes);
      }
      for (int64_t row = 0; row < height; ++row) {
        Out* to = static_cast<Out*>(place.out) + (first + row) * place.cols + strip;
        for (int64_t i = 0; i < width; ++i) to[i] = square[i][row];
      }
    }
  }
}

template <typename Reader, typename Out>
void read(const std::byte* in, const TensorPlace& place, int64_t begin, int64_t count) {
  if (place.transposed) return transpose<Reader, Out>(in, place, begin, count);
  Out* out = static_cast<Out*>(place.out);
  for (int64_t i = begin * place.cols; i < (begin + count) * place.cols; ++i) {
    out[i] = Reader::at(in + i * Reader::kBytes);
  }
}

}  // namespace

void read_tensor(const TensorInfo& info, const TensorPlace& place, int64_t begin, int64_t count) {
  const DType stored = float_dtype(info.dtype);
  TWELL_CHECK(place.dtype == DType::kF32 || place.dtype == stored, "{} to {}", info.dtype,
              dtype_name(place.dtype));
  if (place.dtype != DType::kF32) {
    return read<LoadBits, uint16_t>(info.bytes.data(), place, begin, count);
  }
  with_load(stored, [&](auto load) {
    read<decltype(load), float>(info.bytes.data(), place, begin, count);
  });
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

namespace {

// Calls use(values, scale) for each row of a stored matrix.
template <typename Use>
void for_each_byte_row(const TensorInfo& info, ByteType type, const Use& use) {
  TWELL_CHECK(info.shape.size() == 2, "tensor {} is no matrix", info.name);
  const int64_t rows = info.shape[0], cols = info.shape[1];
  const DType stored = float_dtype(info.dtype);
  std::vector<float> row(static_cast<size_t>(cols));
  std::vector<uint8_t> bytes(row.size());
  for (int64_t r = 0; r < rows; ++r) {
    to_floats(info, stored, r * cols, cols, row.data());
    for (float& value : row) value = to_float(to_bf16(value));
    use(bytes, quantise_row(type, row, bytes));
  }
}

}  // namespace

void write_bytes(const TensorInfo& info, ByteType type, const ByteSink& sink) {
  for_each_byte_row(info, type, [&](const std::vector<uint8_t>& bytes, float) {
    sink(std::as_bytes(std::span(bytes)));
  });
}

void write_byte_scales(const TensorInfo& info, ByteType type, const ByteSink& sink) {
  std::vector<float> scales;
  for_each_byte_row(info, type,
                    [&](const std::vector<uint8_t>&, float scale) { scales.push_back(scale); });
  sink(std::as_bytes(std::span<const float>(scales)));
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
