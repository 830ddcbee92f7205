// SPDX-License-Identifier: Apache-2.0
// Reads TwELL (format/twell.h) of 256 columns a tile and bf16 values on the device: where the words
// of a tile lie and what they say, and where the values of a spilled tile stand. In what order and
// how far ahead words are loaded is each kernel's own.
//
// `of` is any struct with the members
//   words [M, col_tiles, slots] uint32_t,  spill [spill slots, 256] bf16, as any type of pieces,
//   col_tiles,  slots: words per (row, tile)
#pragma once

#include <cstdint>

namespace twell::twell_reader {

inline constexpr int kTile = 256;  // T

template <typename Of, typename Row>
__device__ __forceinline__ const uint32_t* tile_words(const Of& of, Row row, int tile) {
  return of.words + (int64_t{row} * of.col_tiles + tile) * of.slots;
}
// The same words, four at a time: the first load brings the count and three non-zeros.
template <typename Of, typename Row>
__device__ __forceinline__ const uint4* tile_quads(const Of& of, Row row, int tile) {
  return reinterpret_cast<const uint4*>(tile_words(of, row, tile));
}

// count: word 0. A spilled tile has its spill slot in word 1, and nothing else.
template <typename Of>
__device__ __forceinline__ bool is_spilled(const Of& of, int count) {
  return count >= of.slots;
}
// The values of a spilled tile, in the pieces of `of.spill`.
template <typename Of, typename Slot>
__device__ __forceinline__ auto spilled_values(const Of& of, Slot slot) {
  constexpr int kPieces = kTile * sizeof(uint16_t) / sizeof(*of.spill);
  return of.spill + int64_t{slot} * kPieces;
}

// What the word of a non-zero says: its column within the tile, its neuron, its value.
__device__ __forceinline__ uint32_t column(uint32_t word) { return word % kTile; }
__device__ __forceinline__ int neuron(uint32_t word, int tile) {
  return (tile * kTile & ~0xffff) | static_cast<int>(word & 0xffffu);
}
// Its column's place in a mask with a bit for each column of the tile: the mask's word, and the
// bit.
__device__ __forceinline__ uint32_t mask_word(uint32_t word) { return word / 32 % (kTile / 32); }
__device__ __forceinline__ uint32_t mask_bit(uint32_t word) { return word % 32; }
__device__ __forceinline__ uint32_t bf16_bits(uint32_t word) { return word >> 16; }

}  // namespace twell::twell_reader
