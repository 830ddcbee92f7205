// SPDX-License-Identifier: Apache-2.0
// The feed-forward block of the kernel of all layers (decode_layers_sm90.cu), behind its gate, and
// the sum over CTAs. A CTA owns the same neurons in every layer: h stays in its shared memory, and
// what leaves it is its part of y, a sum over its neurons. All parts are then added in a fixed
// order.
#pragma once

#include <type_traits>

#include "twell/gpu/half_pair.cuh"
#include "twell/gpu/tagged.cuh"
#include "twell/ops/decode/decode_layers.h"
#include "twell/ops/skinny/skinny_gemm.cuh"

namespace twell::decode {
namespace {

using namespace skinny_gemm;
using gpu::bf16x2;
using gpu::scaled;
using gpu::to_floats;

// The neurons this CTA owns.
struct Neurons {
  int begin, count;
  __device__ explicit Neurons(int ffn) {
    const auto first = [&](int64_t cta) { return static_cast<int>(cta * ffn / gridDim.x); };
    begin = first(blockIdx.x);
    count = first(blockIdx.x + 1) - begin;
  }
};

// In a dense gated layer, a group is eight neurons: low rows of w_gate, high rows of w_up. In
// others it is 16 neurons' rows of w_gate, or of w_up without a gate.
__device__ __forceinline__ bool paired(const DecodeLayer& layer) {
  return layer.w_gate != nullptr && !layer.sparse;
}
__device__ __forceinline__ bool screened(const DecodeLayers& p, const DecodeLayer& layer) {
  return p.tokens == 1 && layer.sparse && layer.screen.rows != nullptr;
}
__device__ __forceinline__ int ffn_step(const DecodeLayer& layer) {
  return paired(layer) ? kPairs : kGroup;
}

// Bytes between the rows of w_down in a stage.
template <typename W>
__host__ __device__ int down_pitch(int columns) {
  return (columns * static_cast<int>(sizeof(W)) + 127) / 128 * 128 + 16;
}

// Whether weights are in e4m3, whose sums have scales.
template <typename W>
inline constexpr bool kInBytes = sizeof(W) == 1;

// The residual stream of all tokens, which other CTAs may still be writing.
struct Residual {
  gpu::Tagged* words;  // [M, D / 2]
  uint32_t tag;

  // Waits for `count` quads (four values): first, first + step, ...
  template <int kMost>
  __device__ __forceinline__ void wait_quads(uint2 (&v)[kMost], int count, int first,
                                             int step) const {
    gpu::TaggedPair seen[kMost];
    gpu::wait_tagged(
        seen, count, [&](int i) { return words + (first + i * step) * 2; }, tag);
#pragma unroll
    for (int i = 0; i < kMost; ++i) v[i] = i < count ? gpu::values(seen[i]) : uint2{};
  }
  __device__ __forceinline__ gpu::Tagged load_pair(int at) const {
    return gpu::load_tagged(words + at);
  }
  __device__ __forceinline__ uint32_t wait_pair(gpu::Tagged seen, int at) const {
    return gpu::wait_tagged(seen, words + at, tag);
  }
};

inline constexpr int kMaxNeurons = 256;  // of a CTA

// max(0, value); NaN stays NaN.
__device__ __forceinline__ float relu(float value) { return value < 0.0f ? 0.0f : value; }

// Scales of the rows of e4m3 that a CTA multiplies in a step: of its groups of rows, or of its
// neurons' rows of the FFN's first matrix and, kMaxNeurons further, of w_up beside a gate. And what
// undoes the factors of x.
template <int kTokens>
struct ScaleShared {
  static constexpr int kCount = 2 * kMaxNeurons;
  alignas(16) float of[kCount];
  uint32_t most[kWarps];
  float inverse[kTokens];
};
struct NoScales {};

// The largest magnitude, as bits of a float, over the warps of this thread's token: every warp
// stores its own, and behind a barrier all read them.
template <int kTokens>
__device__ __forceinline__ void store_most(uint32_t most, ScaleShared<kTokens>& shared) {
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) shared.most[threadIdx.x / 32] = most;
}
template <int kTokens>
__device__ __forceinline__ uint32_t load_most(const ScaleShared<kTokens>& shared) {
  constexpr int kOwn = kWarps / kTokens;  // warps of a token
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    most = max(most, shared.most[static_cast<int>(threadIdx.x) / 32 / kOwn * kOwn + i]);
  }
  return most;
}

template <int kTokens>
struct HiddenShared {
  // The gate, then gate * up, of the CTA's neurons; 0 past them. Padded against bank conflicts.
  alignas(16) __nv_bfloat16 h[kTokens][kMaxNeurons + 8];
  alignas(16) uint8_t zeros[16];  // read in place of rows that do not exist
  uint16_t list[kMaxNeurons];     // active neurons, or those that may be
  float errors[kMaxNeurons];      // bounds of the screen
  int warp_counts[kMaxNeurons / 32];
};

// Where a CTA stores its part of y: tagged words for a single token, plain numbers for more tokens,
// behind which the grid has to synchronise.
template <int kTokens>
class Part {
 public:
  __device__ __forceinline__ Part(const DecodeLayers& p, uint32_t tag)
      : words_(p.workspace.tagged_parts + int64_t{blockIdx.x} * p.width),
        plain_(p.workspace.parts + int64_t{blockIdx.x} * p.tokens * p.width),
        tokens_(p.tokens),
        width_(p.width),
        tag_(tag) {}

  __device__ __forceinline__ void store(int token, int column, float value) const {
    if (token >= tokens_ || column >= width_) return;
    if constexpr (kTokens == 1) {
      gpu::store_tagged(words_ + column, __float_as_uint(value), tag_);
    } else {
      plain_[int64_t{token} * width_ + column] = value;
    }
  }
  // Columns `column` and the next.
  __device__ __forceinline__ void store2(int token, int column, float first, float second) const {
    if (token >= tokens_) return;
    if constexpr (kTokens == 1) {
      gpu::store_tagged(words_ + column, __float_as_uint(first), __float_as_uint(second), tag_);
    } else {
      *reinterpret_cast<float2*>(plain_ + int64_t{token} * width_ + column) =
          make_float2(first, second);
    }
  }

 private:
  gpu::Tagged* words_;
  float* plain_;
  int tokens_, width_;
  uint32_t tag_;
};

// h of a CTA's neurons as f16, times a power of two for each token, which is the same in all warps.
template <int kTokens>
class HiddenHalves {
 public:
  __device__ __forceinline__ explicit HiddenHalves(const HiddenShared<kTokens>& hidden)
      : hidden_(hidden), scale_(most(hidden)) {}

  // Neurons k and k + 1 of the token that is this lane's column of the 8-column operand.
  __device__ __forceinline__ uint32_t load(int k) const {
    return scale_.halves(*reinterpret_cast<const uint32_t*>(&hidden_.h[token()][k]));
  }
  // What undoes the factor of a token; all lanes call it.
  __device__ __forceinline__ float inverse(int token) const {
    return kTokens == 1 ? scale_.inverse : __shfl_sync(~0u, scale_.inverse, token * kTeam);
  }

 private:
  static constexpr int kTeam = 32 / kTokens;  // lanes per token
  __device__ __forceinline__ static int token() {
    return static_cast<int>(threadIdx.x) % 32 / kTeam;
  }
  __device__ __forceinline__ static uint32_t most(const HiddenShared<kTokens>& hidden) {
    const auto* pieces = reinterpret_cast<const uint4*>(hidden.h[token()]);
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kMaxNeurons / 8 / kTeam; ++i) {
      const uint4 v = pieces[i * kTeam + static_cast<int>(threadIdx.x) % kTeam];
      for (const uint32_t pair : {v.x, v.y, v.z, v.w}) most = max(most, gpu::most_bits(pair));
    }
#pragma unroll
    for (int offset = 1; offset < kTeam; offset *= 2) {
      most = max(most, __shfl_xor_sync(~0u, most, offset));
    }
    return most;
  }

  const HiddenShared<kTokens>& hidden_;
  const gpu::HalfScale scale_;
};

// dense_down with rows of e4m3. ldmatrix transposes them in units of two columns, so that a lane
// gets two columns of two neurons at once: the operand's row r is column 2r of a tile, its row r +
// 8 column 2r + 1.
template <int kTokens, int kStages>
__device__ __forceinline__ void dense_down_bytes(const DecodeLayers& p, const Neurons& neurons,
                                                 RowRing<kStages>& ring,
                                                 const HiddenShared<kTokens>& hidden,
                                                 const Part<kTokens>& part) {
  constexpr int kChunk = kChunkOf<uint8_t>;
  constexpr int kTile = 16, kTiles = kChunk / kTile / kWarps;  // of a warp; two at a time
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  // The row of an 8 x 8 matrix whose address this lane gives. The four matrices are neurons 0-7 and
  // 8-15 of a tile, then of the next.
  const int row = lane % 16, at = (warp * kTiles + lane / 16) * kTile;
  const uint32_t zeros = gpu::smem_address(hidden.zeros);
  const HiddenHalves<kTokens> halves(hidden);
  float inverse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) inverse[i] = halves.inverse((lane % 4 * 2 + i) % kTokens);
#pragma unroll 1
  for (int column = 0; column < p.width; column += kChunk) {
    const int columns = min(kChunk, p.width - column);
    const uint32_t row_at = static_cast<uint32_t>(row * down_pitch<uint8_t>(columns) + at);
    float acc[kTiles][4] = {};
#pragma unroll 1
    for (int base = 0; base < neurons.count; base += kGroup) {
      const uint32_t rows = ring.take();
      const bool exists = base + row < neurons.count;
      uint32_t h[2] = {};
      if (lane / 4 < kTokens) {
        h[0] = halves.load(base + lane % 4 * 2);
        h[1] = halves.load(base + lane % 4 * 2 + 8);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; tile += 2) {
        if ((warp * kTiles + tile) * kTile >= columns) break;
        // Tiles may reach past the end of the row; those columns are not stored.
        uint32_t units[4];
        gpu::load_matrices_transposed(
            units, exists ? rows + row_at + static_cast<uint32_t>(tile * kTile) : zeros);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // A unit has columns 2r, 2r + 1 of a neuron, then those of the next: columns first.
          constexpr uint32_t kColumns = 0x3120;
          const uint2 low = gpu::e4m3_to_halves(__byte_perm(units[2 * i], 0, kColumns));
          const uint2 high = gpu::e4m3_to_halves(__byte_perm(units[2 * i + 1], 0, kColumns));
          gpu::mma_16x8x16_f16(acc[tile + i], low.x, low.y, high.x, high.y, h[0], h[1]);
        }
      }
      ring.release();
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = lane % 4 * 2 + i;
        const int of_chunk = (warp * kTiles + tile) * kTile + lane / 4 * 2;
        if (token < kTokens && of_chunk < columns) {
          part.store2(token, column + of_chunk, acc[tile][i] * inverse[i],
                      acc[tile][i + 2] * inverse[i]);
        }
      }
    }
  }
}

// The CTA's part of y = h w_down in a dense layer, with all its rows of w_down from the ring
// buffer. Warps split the columns; 16 columns are the 16-row operand, transposed by ldmatrix.
template <int kTokens, int kStages>
__device__ __forceinline__ void dense_down(const DecodeLayers& p, const Neurons& neurons,
                                           RowRing<kStages>& ring,
                                           const HiddenShared<kTokens>& hidden,
                                           const Part<kTokens>& part) {
  constexpr int kTile = 16, kTiles = kChunk / kTile / kWarps;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  // The row of an 8 x 8 matrix whose address this lane gives. The four matrices are neurons 0-7,
  // 0-7, 8-15, 8-15 by columns 0-7, 8-15, 0-7, 8-15.
  const int row = lane / 16 * 8 + lane % 8, at = (warp * kTiles * kTile + lane / 8 % 2 * 8) * 2;
  const uint32_t zeros = gpu::smem_address(hidden.zeros);
#pragma unroll 1
  for (int column = 0; column < p.width; column += kChunk) {
    const int columns = min(kChunk, p.width - column);
    const uint32_t row_at = static_cast<uint32_t>(row * down_pitch<__nv_bfloat16>(columns) + at);
    float acc[kTiles][4] = {};
#pragma unroll 1
    for (int base = 0; base < neurons.count; base += kGroup) {
      const uint32_t rows = ring.take();
      const bool exists = base + row < neurons.count;
      uint32_t h[2] = {};
      if (lane / 4 < kTokens) {
        const __nv_bfloat16* from = &hidden.h[lane / 4 % kTokens][base + lane % 4 * 2];
        h[0] = *reinterpret_cast<const uint32_t*>(from);
        h[1] = *reinterpret_cast<const uint32_t*>(from + 8);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int tile_at = tile * kTile;
        if (warp * kTiles * kTile + tile_at >= columns) break;
        // The last tile may reach past the end of the row; those columns are not stored.
        uint32_t w[4];
        gpu::load_matrices_transposed(
            w, exists ? rows + row_at + static_cast<uint32_t>(tile_at * 2) : zeros);
        gpu::mma_16x8x16(acc[tile], w[0], w[1], w[2], w[3], h[0], h[1]);
      }
      ring.release();
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = lane % 4 * 2 + i % 2;
        const int of_chunk = (warp * kTiles + tile) * kTile + lane / 4 + i / 2 * 8;
        if (token < kTokens && of_chunk < columns) {
          part.store(token, column + of_chunk, acc[tile][i]);
        }
      }
    }
  }
}

// The CTA's part of y in a sparse layer. Reads rows of w_up and w_down of active neurons only,
// directly from memory. With a screen, it reads the rows of all neurons that the screen let
// through, those of w_gate too.
template <int kTokens, typename W = __nv_bfloat16>
class FiredNeurons {
 public:
  using Scales = std::conditional_t<kInBytes<W>, ScaleShared<kTokens>, NoScales>;

  // Lists the neurons whose h is not 0, and tells all CTAs whether this one will have a part.
  __device__ __forceinline__ FiredNeurons(const DecodeLayers& p, const DecodeLayer& layer,
                                          uint32_t tag, const Neurons& neurons,
                                          HiddenShared<kTokens>& hidden, const Scales& scales)
      : p_(p), layer_(layer), neurons_(neurons), hidden_(hidden), scales_(scales) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    bool fires = false;
    if (thread < neurons.count) {
#pragma unroll
      for (int m = 0; m < kTokens; ++m) fires = fires || !(value(m, thread) == 0.0f);
    }
    const uint32_t ballot = __ballot_sync(~0u, fires);
    if (lane == 0 && warp < kMaxNeurons / 32) hidden_.warp_counts[warp] = __popc(ballot);
    sync_threads();
    int before = 0;
#pragma unroll
    for (int w = 0; w < kMaxNeurons / 32; ++w) {
      if (w < warp) before += hidden_.warp_counts[w];
      count_ += hidden_.warp_counts[w];
    }
    if (fires) {
      hidden_.list[before + __popc(ballot & ((1u << lane) - 1))] = static_cast<uint16_t>(thread);
    }
    if constexpr (kTokens == 1) {
      if (thread == 0) gpu::store_tagged(p.workspace.fired + blockIdx.x, count_ > 0, tag);
    }
    sync_threads();
  }

  // Adds the active neurons not yet counted (of those the screen let through) to nnz.
  __device__ __forceinline__ void up_down(Product<kTokens, W>& product, const Part<kTokens>& part,
                                          int& nnz) {
    if (kTokens == 1 && count_ == 0) return;  // no CTA waits for a part
    const int first_column = static_cast<int>(threadIdx.x) * kUnit;
    Columns w[kAtOnce];
    load(w, first_column, 0);  // issued before w_up's rows, to hide the latency
    if (!kInBytes<W> && kTokens == 1 && screened(p_, layer_)) {
      if constexpr (!kInBytes<W>) gate_up(product, nnz);
    } else if (count_ > 0 && layer_.w_gate != nullptr) {
      up(product);
    }
#pragma unroll 1
    for (int column = first_column; column < p_.width; column += kStep * kUnitsOwn) {
      float2 y[kTokens][kPairsOwn] = {};
#pragma unroll 1
      for (int i = 0; i < count_; i += kAtOnce) {
        if (i > 0 || column != first_column) load(w, column, i);
#pragma unroll
        for (int a = 0; a < kAtOnce; ++a) {
          if (i + a < count_) add_row(y, w[a], hidden_.list[i + a]);
        }
      }
#pragma unroll
      for (int j = 0; j < kPairsOwn; ++j) {
        if (column + place(j) >= p_.width) break;
#pragma unroll
        for (int m = 0; m < kTokens; ++m) part.store2(m, column + place(j), y[m][j].x, y[m][j].y);
      }
    }
  }

 private:
  // A thread has units of four bytes of columns kStep apart, so that a warp reads whole lines.
  static constexpr int kUnit = 4 / static_cast<int>(sizeof(W)), kPairsOfUnit = kUnit / 2;
  static constexpr int kStep = kThreads * kUnit, kPairsOwn = 4;
  static constexpr int kUnitsOwn = kPairsOwn / kPairsOfUnit;
  static constexpr int kAtOnce = 4;  // rows of w_down that a thread loads ahead
  struct Columns {
    uint32_t unit[kUnitsOwn];
  };
  // Where a thread's pair lies, from its first column on.
  __device__ __forceinline__ static int place(int pair) {
    return pair / kPairsOfUnit * kStep + pair % kPairsOfUnit * 2;
  }

  __device__ __forceinline__ float value(int token, int neuron) const {
    return __bfloat162float(hidden_.h[token][neuron]);
  }
  __device__ __forceinline__ void load(Columns (&w)[kAtOnce], int column, int first) const {
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      w[a] = Columns{};
      if (first + a >= count_) continue;
      const W* row = static_cast<const W*>(layer_.w_down) +
                     int64_t{neurons_.begin + hidden_.list[first + a]} * p_.width;
#pragma unroll
      for (int j = 0; j < kUnitsOwn; ++j) {
        const int at = column + j * kStep;
        if (at < p_.width) w[a].unit[j] = __ldcs(reinterpret_cast<const uint32_t*>(row + at));
      }
    }
  }
  __device__ __forceinline__ void add_row(float2 (&y)[kTokens][kPairsOwn], const Columns& w,
                                          int neuron) const {
#pragma unroll
    for (int j = 0; j < kPairsOwn; ++j) {
      float2 row;
      if constexpr (kInBytes<W>) {
        const uint2 pairs = gpu::e4m3_to_halves(w.unit[j / kPairsOfUnit]);
        row = gpu::halves_to_floats(j % kPairsOfUnit == 0 ? pairs.x : pairs.y);
      } else {
        row = to_floats(w.unit[j]);
      }
#pragma unroll
      for (int m = 0; m < kTokens; ++m) {
        const float h = value(m, neuron);
        y[m][j].x = fmaf(h, row.x, y[m][j].x);
        y[m][j].y = fmaf(h, row.y, y[m][j].y);
      }
    }
  }

  // The i-th listed neuron's row, or null past the list.
  __device__ __forceinline__ const W* row(const void* weight, int i) const {
    if (i >= count_) return nullptr;
    return static_cast<const W*>(weight) + int64_t{neurons_.begin + hidden_.list[i]} * p_.width;
  }

  // With a screen: h = relu(gate) * up of the listed neurons, or relu(up) without a gate. A group
  // is eight neurons' rows of w_gate and w_up, or 16 neurons' rows of w_up.
  __device__ __forceinline__ void gate_up(Product<kTokens, W>& product, int& nnz) {
    const bool gated = layer_.w_gate != nullptr;
    const int step = gated ? kPairs : kGroup;
    const auto store = [&](int i, int token, float gate, float up) {
      if (i >= count_) return;
      const __nv_bfloat16 g = __float2bfloat16(relu(gate));
      const bool fires = !(__bfloat162float(g) == 0.0f);
      nnz += fires;
      hidden_.h[token][hidden_.list[i]] =
          gated && fires ? __float2bfloat16(__bfloat162float(g) * up) : g;
    };
    product.loaded_groups((count_ + step - 1) / step, p_.width,
                          [&](int group, int pair) {
                            const int i = group * step + pair;
                            return gated ? Rows{row(layer_.w_gate, i), row(layer_.w_up, i)}
                                         : Rows{row(layer_.w_up, i), row(layer_.w_up, i + kPairs)};
                          },
                          [&](int group, int token, int pair, float low, float high) {
                            const int i = group * step + pair;
                            store(i, token, low, high);
                            if (!gated) store(i + kPairs, token, high, 0.0f);
                          });
    sync_threads();
  }

  // Without a screen, h holds the gate: h *= up.
  __device__ __forceinline__ void up(Product<kTokens, W>& product) {
    const auto multiply = [&](int i, int token, float up) {
      if (i >= count_) return;
      if constexpr (kInBytes<W>) {
        up *= scales_.of[kMaxNeurons + hidden_.list[i]] * scales_.inverse[token];
      }
      __nv_bfloat16& h = hidden_.h[token][hidden_.list[i]];
      const float gate = __bfloat162float(h);
      if (!(gate == 0.0f)) h = __float2bfloat16(gate * up);
    };
    product.loaded_groups((count_ + kGroup - 1) / kGroup, p_.width,
                          [&](int group, int pair) {
                            const int i = group * kGroup + pair;
                            return RowsOf<W>{row(layer_.w_up, i), row(layer_.w_up, i + kPairs)};
                          },
                          [&](int group, int token, int pair, float low, float high) {
                            multiply(group * kGroup + pair, token, low);
                            multiply(group * kGroup + pair + kPairs, token, high);
                          });
    sync_threads();
  }

  const DecodeLayers& p_;
  const DecodeLayer& layer_;
  const Neurons& neurons_;
  HiddenShared<kTokens>& hidden_;
  const Scales& scales_;
  int count_ = 0;
};

// Adds the active neurons that this thread counted, and the tokens, to the layer's activity.
__device__ __forceinline__ void count_fired(const DecodeLayers& p, const DecodeLayer& l, int nnz) {
  if (l.activity == nullptr) return;
  const int total = __reduce_add_sync(~0u, nnz);
  if (threadIdx.x % 32 != 0) return;
  if (total > 0) atomicAdd(&l.activity->nnz, static_cast<unsigned long long>(total));
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    atomicAdd(&l.activity->tokens, static_cast<unsigned long long>(p.tokens));
  }
}

// --- x += the CTAs' parts of y ---
// A CTA adds a share of the columns. Teams of kAddPairs lanes take the parts of CTAs round-robin;
// then a warp's four teams are added, then the warps: one order for any number of tokens.
inline constexpr int kAddPairs = 8;  // lanes, each with two columns of a token

template <int kTokens>
struct AddShared {
  static constexpr int kAtOnce = kTokens == 1 ? 1 : 4;  // tokens at a time
  float2 sums[kWarps][kAtOnce * kAddPairs];
};

// The columns this CTA adds, in pairs.
struct AddShare {
  int begin, end;
  __device__ explicit AddShare(int width) {
    const auto first = [&](int64_t cta) { return static_cast<int>(cta * (width / 2) / gridDim.x); };
    begin = first(blockIdx.x);
    end = first(blockIdx.x + 1);
  }
};

// Waits until the `count` CTAs first, first + step, ... have said whether they have a part, and
// returns which of them do.
template <int kMost>
__device__ __forceinline__ void which_have_parts(bool (&has)[kMost], const DecodeLayers& p,
                                                 uint32_t tag, bool all, int first, int step,
                                                 int count) {
  if (all) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) has[i] = i < count;
    return;
  }
  gpu::Tagged seen[kMost];
  gpu::wait_all_tagged(
      seen, [&](int i) { return i < count; },
      [&](int i) { return gpu::load_tagged(p.workspace.fired + first + i * step); }, tag);
#pragma unroll
  for (int i = 0; i < kMost; ++i) has[i] = i < count && static_cast<uint32_t>(seen[i]) != 0;
}

// before: x before the FFN. Calls done(index of the pair in x, its two values) for each pair of
// columns. all: every CTA has a part; otherwise those that say so in workspace.fired (one token).
// scales: of the columns of e4m3 weights, with kScaled.
template <int kTokens, bool kScaled, typename Done>
__device__ __forceinline__ void add_parts(const DecodeLayers& p, uint32_t tag, bool all,
                                          const AddShare& share, const Residual& before,
                                          AddShared<kTokens>& shared, const float* scales,
                                          const Done& done) {
  constexpr int kAtOnce = AddShared<kTokens>::kAtOnce, kTeams = kThreads / kAddPairs;
  constexpr int kParts = 5;  // loaded ahead
  const int thread = static_cast<int>(threadIdx.x), ctas = static_cast<int>(gridDim.x);
  const int team = thread / kAddPairs, lane = thread % kAddPairs, pairs = p.width / 2;
  for (int base = share.begin; base < share.end; base += kAddPairs) {
    const int pair = base + lane;
    const bool inside = pair < share.end;
    for (int token = 0; token < p.tokens; token += kAtOnce) {
      const int finished = token + team;  // the token whose sum this thread stores
      const bool finishes = inside && team < kAtOnce && finished < p.tokens;
      const int at = finished * pairs + pair;
      gpu::Tagged x{};
      if (finishes) x = before.load_pair(at);
      float2 scale{};
      if (kScaled && finishes) scale = __ldg(reinterpret_cast<const float2*>(scales) + pair);
      float2 sums[kAtOnce] = {};
      for (int first = team; first < ctas; first += kTeams * kParts) {
        if constexpr (kTokens == 1) {
          const gpu::Tagged* words = p.workspace.tagged_parts + pair * 2;
          gpu::TaggedPair seen[kParts];
          const int count = inside ? min((ctas - first - 1) / kTeams + 1, kParts) : 0;
          bool has[kParts];
          which_have_parts(has, p, tag, all, first, kTeams, count);
          gpu::wait_all_tagged(
              seen, [&](int i) { return has[i]; },
              [&](int i) { return gpu::load_tagged_pair(words + (first + i * kTeams) * p.width); },
              tag);
#pragma unroll
          for (int i = 0; i < kParts; ++i) {
            if (!has[i]) continue;
            const uint2 v = gpu::values(seen[i]);
            sums[0].x += __uint_as_float(v.x);
            sums[0].y += __uint_as_float(v.y);
          }
        } else {
          const auto* parts = reinterpret_cast<const float2*>(p.workspace.parts) + pair;
          float2 part[kParts][kAtOnce] = {};
#pragma unroll
          for (int i = 0; i < kParts; ++i) {
            const int cta = first + i * kTeams;
#pragma unroll
            for (int t = 0; t < kAtOnce; ++t) {
              if (cta >= ctas || !inside || token + t >= p.tokens) break;
              part[i][t] = __ldcg(parts + int64_t{cta * p.tokens + token + t} * pairs);
            }
          }
#pragma unroll
          for (int i = 0; i < kParts; ++i) {
            if (first + i * kTeams >= ctas) break;
#pragma unroll
            for (int t = 0; t < kAtOnce; ++t) {
              sums[t].x += part[i][t].x;
              sums[t].y += part[i][t].y;
            }
          }
        }
      }
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) {
#pragma unroll
        for (int offset = kAddPairs; offset < 32; offset *= 2) {
          sums[t].x += __shfl_xor_sync(~0u, sums[t].x, offset);
          sums[t].y += __shfl_xor_sync(~0u, sums[t].y, offset);
        }
        if (thread % 32 < kAddPairs) shared.sums[thread / 32][t * kAddPairs + lane] = sums[t];
      }
      sync_threads();
      if (finishes) {
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          sum.x += shared.sums[w][thread].x;
          sum.y += shared.sums[w][thread].y;
        }
        if constexpr (kScaled) sum = {sum.x * scale.x, sum.y * scale.y};
        const float2 was = to_floats(before.wait_pair(x, at));
        done(at, bf16x2(was.x + sum.x, was.y + sum.y));
      }
      sync_threads();
    }
  }
}

}  // namespace
}  // namespace twell::decode
