// SPDX-License-Identifier: Apache-2.0
// TwELL, tile-wise ELLPACK: the sparse activation format that a GEMM epilogue can write by itself.
//
// The columns [0, F) are cut into tiles of T. Each (row, tile) owns S = T / C words, C being the
// compression factor: word 0 holds the tile's non-zero count, each of words 1 .. count one
// non-zero. Shape [M, ceil(F / T), S], row-major, tiles of a row side by side. Words past the count
// are unspecified. A reader must accept any order within a tile; a writer must write the same order
// for the same input, and those of this project write ascending columns unless they say otherwise.
//
//   word          count      non-zero
//   uint32_t      bits 0-31  bits 0-15 column mod 65536, bits 16-31 value as bf16
//   uint64_t      bits 0-31  bits 0-31 column,           bits 32-63 value as f32
//
// Up to F = 65,536 the 32-bit layout is the one other implementations use, byte for byte. Beyond
// it, T divides 65,536, so a tile never straddles a multiple of 65,536 and its position restores
// the upper bits of the column.
//
// Overflow. The capacity of a tile is S - 1 non-zeros. A tile with more is spilled: word 0 still
// holds the true count (that is how a reader sees it), word 1 the index of a spill slot, the rest
// is unspecified. Slot i is T dense values at spill[i * T], in column order, every one of them
// written (0 where there is no non-zero, and past column F). The choice of slot carries no meaning:
// a GPU may assign slots with an atomic counter and results still repeat; a producer that has the
// dense activations in memory may name their own place. rows * tiles slots always suffice.
#pragma once

#include <bit>
#include <cstdint>
#include <string>

#include "twell/base/dtype.h"
#include "twell/base/host_device.h"
#include "twell/base/matrix.h"

namespace twell {

struct TwellShape {
  int64_t rows = 0;         // M
  int64_t cols = 0;         // F
  int32_t tile = 256;       // T, a power of two up to 65,536
  int32_t compression = 8;  // C, a power of two, at most T / 2

  TWELL_HOST_DEVICE int64_t tiles() const { return (cols + tile - 1) / tile; }
  TWELL_HOST_DEVICE int32_t slots() const { return tile / compression; }  // S
  TWELL_HOST_DEVICE int32_t capacity() const { return slots() - 1; }
  TWELL_HOST_DEVICE int64_t row_words() const { return tiles() * slots(); }
  TWELL_HOST_DEVICE int64_t words() const { return rows * row_words(); }
  TWELL_HOST_DEVICE int64_t max_spill_slots() const { return rows * tiles(); }
  // Offset of word 0 of a (row, tile).
  TWELL_HOST_DEVICE int64_t offset(int64_t row, int64_t t) const {
    return row * row_words() + t * slots();
  }
};

// Why this shape cannot be stored; empty when it can.
std::string twell_unsupported(const TwellShape& shape);

// Meaning of a word. Value is the stored type; store and load convert from and to f32.
template <typename Word>
struct TwellWord;

template <>
struct TwellWord<uint32_t> {
  using Value = BF16;
  TWELL_HOST_DEVICE static uint32_t from_bits(int64_t column, uint16_t bf16_bits) {
    return (static_cast<uint32_t>(column) & 0xffffu) | (static_cast<uint32_t>(bf16_bits) << 16);
  }
  // tile_begin is the tile's first column, t * T.
  TWELL_HOST_DEVICE static int64_t column(uint32_t word, int64_t tile_begin) {
    return (tile_begin & ~int64_t{0xffff}) | static_cast<int64_t>(word & 0xffffu);
  }
  // The f32 with the same value: bf16 is its upper half.
  TWELL_HOST_DEVICE static uint32_t f32_bits(uint32_t word) { return word & 0xffff0000u; }

  static Value store(float value) { return to_bf16(value); }
  static float load(Value value) { return to_float(value); }
  static uint32_t pack(int64_t column, float value) { return from_bits(column, store(value).bits); }
  static float value(uint32_t word) { return std::bit_cast<float>(f32_bits(word)); }
};

template <>
struct TwellWord<uint64_t> {
  using Value = float;
  static int64_t column(uint64_t word, int64_t /*tile_begin*/) {
    return static_cast<int64_t>(word & 0xffffffffu);
  }
  static Value store(float value) { return value; }
  static float load(Value value) { return value; }
  static uint64_t pack(int64_t column, float value) {
    return static_cast<uint64_t>(static_cast<uint32_t>(column)) |
           (static_cast<uint64_t>(std::bit_cast<uint32_t>(value)) << 32);
  }
  static float value(uint64_t word) {
    return std::bit_cast<float>(static_cast<uint32_t>(word >> 32));
  }
};

// Non-owning view of a TwELL matrix, in host or device memory.
template <typename Word>
struct Twell {
  using Value = typename TwellWord<Word>::Value;

  TwellShape shape;
  Word* words = nullptr;       // [M, tiles, S]
  Value* spill = nullptr;      // [spill_slots, T]
  int64_t spill_slots = 0;     // slots there is room for
  int32_t* row_nnz = nullptr;  // [M] non-zeros of each row, or null

  TWELL_HOST_DEVICE Word* tile_words(int64_t row, int64_t t) const {
    return words + shape.offset(row, t);
  }
  TWELL_HOST_DEVICE int64_t count(int64_t row, int64_t t) const {
    return static_cast<int64_t>(*tile_words(row, t) & 0xffffffffu);
  }
  TWELL_HOST_DEVICE bool spilled(int64_t row, int64_t t) const {
    return count(row, t) > shape.capacity();
  }
  // The T dense values of a spilled tile.
  TWELL_HOST_DEVICE Value* spilled_values(int64_t row, int64_t t) const {
    return spill + static_cast<int64_t>(tile_words(row, t)[1] & 0xffffffffu) * shape.tile;
  }
};

using TwellPacked = Twell<uint32_t>;  // bf16 values: the GPU, files
using TwellWide = Twell<uint64_t>;    // f32 values: the CPU

// Executable specification, one element at a time. Elements that compare unequal to 0 are kept (NaN
// and negative ones too: the producer decides what is active). pack returns the number of spill
// slots it used, numbered from 0 in row and tile order; Error if they do not suffice.
template <typename Word>
int64_t twell_pack_reference(ConstMatrixF dense, const Twell<Word>& out);
template <typename Word>
void twell_unpack_reference(const Twell<Word>& in, MatrixF dense);

// Calls fn(column, value) for every non-zero of a row, tile by tile, in stored order; the non-zeros
// of spilled tiles in column order.
template <typename Word, typename Fn>
void twell_for_each(const Twell<Word>& in, int64_t row, const Fn& fn) {
  using W = TwellWord<Word>;
  const TwellShape& shape = in.shape;
  for (int64_t t = 0; t < shape.tiles(); ++t) {
    const int64_t begin = t * shape.tile;
    const int64_t count = in.count(row, t);
    if (count > shape.capacity()) {
      const typename W::Value* values = in.spilled_values(row, t);
      for (int32_t i = 0; i < shape.tile; ++i) {
        const float value = W::load(values[i]);
        if (value != 0.0f) fn(begin + i, value);
      }
    } else {
      const Word* words = in.tile_words(row, t) + 1;
      for (int64_t i = 0; i < count; ++i) fn(W::column(words[i], begin), W::value(words[i]));
    }
  }
}

}  // namespace twell
