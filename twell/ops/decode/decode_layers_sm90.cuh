// SPDX-License-Identifier: Apache-2.0
// The kernel of all layers: a persistent CTA per SM, launched cooperatively. A layer's steps, each
// of which takes what all CTAs made in the one before:
//   norm, q/k/v, rotation, cache | attention | merge of segments | output projection, residual |
//   norm, gate, up, down of the neurons a CTA owns | sum over CTAs, residual
//
// One warp of a CTA reads the weights in the order of use through a ring buffer (skinny_gemm.cuh),
// ahead of the eight warps that multiply and across the waits between steps.
//
// CTAs hand each other words that hold a value and a tag (gpu/tagged.cuh): the number of the
// layer, counted over this call and all before it. Every place in memory exists once, so a layer
// may only write to it after all CTAs have read what the layer before put there. That holds because
//   - the last step of a layer waits for every CTA's part of y, or for its word that it has none,
//     which a CTA writes after all its other reads of the layer, except those of the sum over CTAs;
//   - every step of the next layer waits for that sum, directly or through the steps before it.
//
// Template parameters: kTokens, at least the tokens of a call; kColumns, at least head_dim; W, the
// type of the weights, bf16 or e4m3 (uint8_t); Kv, that of keys and values, bf16 or int8_t.
#pragma once

#include <algorithm>
#include <type_traits>

#include "twell/gpu/launch.cuh"
#include "twell/gpu/tagged.cuh"
#include "twell/ops/decode/decode_attention_sm90.cuh"
#include "twell/ops/decode/decode_ffn_sm90.cuh"
#include "twell/ops/decode/decode_layers.h"
#include "twell/ops/skinny/skinny_gemm.cuh"

namespace twell::decode {
namespace {

using namespace skinny_gemm;
using gpu::bf16x2;
using gpu::scaled;
using gpu::to_floats;

// The warp that reads is in a warpgroup of its own, whose registers go to the warps that multiply:
// a spilled register that is read back would wait behind the weights.
constexpr int kAllThreads = kThreads + 128;
constexpr int kMultiplyRegisters = 232, kReadRegisters = 40;

constexpr int kMaxWidth = 16384;
constexpr int kMaxQkvGroups = 32;  // of a CTA
// A stage has 32 KiB in layers of 1,024 columns and more.
template <int kTokens>
constexpr int kStagesFor = kTokens == 1 ? 6 : 4;

// Bytes between the rows of a stage.
template <typename W>
__host__ __device__ int stage_pitch(int width, int q_width) {
  const int most = width > q_width ? width : q_width;
  return row_pitch(most < kChunkOf<W> ? most : kChunkOf<W>, static_cast<int>(sizeof(W)));
}

// The low row of a pair of the output projection; the high one is the next.
__device__ __forceinline__ int output_column(int group, int pair) {
  return group * kGroup + pair * 2;
}

// The low row of a pair of q/k/v rows, which are rotated together; the high one is hd / 2 further.
__device__ __forceinline__ int qkv_column(const DecodeLayers& p, int group, int pair) {
  const int of_head = p.head_dim / kGroup;
  return group / of_head * p.head_dim + group % of_head * kPairs + pair;
}

// --- The order in which a CTA reads its weights ---
// Ring buffer stages, as the warps that multiply take them:
//   products  groups of 16 rows, kChunk columns after kChunk columns
//   screen    rows of 16 neurons, a piece of kScreenPiece columns and its scales after another
//   down      rows of 16 neurons: all neurons of the CTA for kChunk columns, then for the next
template <int kStages, typename W>
class WeightReader {
 public:
  __device__ __forceinline__ explicit WeightReader(RowRing<kStages>& ring) : ring_(ring) {}

  // Reads all layers; run by one warp. before(layer) is called before a layer's first weights.
  // kScreens: layers may have screens.
  template <bool kScreens, typename Before>
  __device__ __forceinline__ void read_all(const DecodeLayers& p, const Before& before) {
    const Neurons neurons(p.ffn);
#pragma unroll 1
    for (int l = 0; l < p.layers; ++l) {
      before(l);
      ring_.limit_requests(most_requests(p, p.layer[l]));
#pragma unroll 1
      for (int step = 0; step < 3; ++step) {
        if (kScreens && step == 2 && screened(p, p.layer[l])) {
          read_screen(p, p.layer[l].screen, neurons);
        } else {
          read_product(p, p.layer[l], step, neurons);
        }
      }
      if (!p.layer[l].sparse) read_down(p, p.layer[l], neurons);
    }
  }

 private:
  static constexpr int kChunk = kChunkOf<W>, kValueBytes = static_cast<int>(sizeof(W));

  // Stages requested and not yet there, at most. Two of every CTA are already twice what memory
  // delivers during one access; with more, the words that CTAs exchange would wait behind weights.
  // A sparse layer that reads fewer bytes than its steps take time has enough with one.
  __device__ __forceinline__ static int most_requests(const DecodeLayers& p,
                                                      const DecodeLayer& layer) {
    return layer.sparse ? p.sparse_requests : 2;
  }

  // The rows of q/k/v (step 0), of the output projection (1), of the FFN's first weights (2).
  __device__ __forceinline__ void read_product(const DecodeLayers& p, const DecodeLayer& layer,
                                               int step, const Neurons& neurons) {
    const int lane = static_cast<int>(threadIdx.x) % 32, pair = lane % kPairs;
    const int high = lane / kPairs % 2, q_width = p.heads * p.head_dim;
    const bool both = paired(layer);
    const W* w =
        static_cast<const W*>(step == 0                                        ? layer.w_qkv
                              : step == 1                                      ? layer.w_o
                              : layer.w_gate == nullptr || (both && high == 1) ? layer.w_up
                                                                               : layer.w_gate);
    const int width = step == 1 ? q_width : p.width;
    const int rows = step == 0 ? q_width + 2 * p.kv_heads * p.head_dim : p.width;
    const int groups = step == 2 ? (neurons.count + ffn_step(layer) - 1) / ffn_step(layer)
                                 : (rows + kGroup - 1) / kGroup;
    const int first = step == 2 ? 0 : static_cast<int>(blockIdx.x);
    const int stride = step == 2 ? 1 : static_cast<int>(gridDim.x);
#pragma unroll 1
    for (int group = first; group < groups; group += stride) {
      int row;
      bool exists = lane < kGroup;
      if (step == 0) {
        row = qkv_column(p, group, pair) + high * (p.head_dim / 2);
      } else if (step == 1) {
        row = output_column(group, pair) + high;
        exists = exists && row < p.width;
      } else {
        const int neuron = group * ffn_step(layer) + (both ? pair : lane);
        row = neurons.begin + neuron;
        exists = exists && neuron < neurons.count;
      }
#pragma unroll 1
      for (int column = 0; column < width; column += kChunk) {
        ring_.fill(w + int64_t{row} * width + column, exists,
                   min(kChunk, width - column) * kValueBytes, ring_.pitch());
      }
    }
  }

  __device__ __forceinline__ void read_screen(const DecodeLayers& p, const GateScreen& screen,
                                              const Neurons& neurons) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t row_bytes = screen_row_bytes(p.width);
#pragma unroll 1
    for (int base = 0; base < neurons.count; base += kGroup) {
      const uint8_t* from = screen.rows + (neurons.begin + base + lane) * row_bytes;
#pragma unroll 1
      for (int column = 0; column < p.width; column += kScreenPiece) {
        const auto bytes =
            static_cast<int>(screen_piece_bytes(min(kScreenPiece, p.width - column)));
        ring_.fill(from, lane < kGroup && base + lane < neurons.count, bytes, ring_.pitch());
        from += bytes;
      }
    }
  }

  __device__ __forceinline__ void read_down(const DecodeLayers& p, const DecodeLayer& layer,
                                            const Neurons& neurons) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int column = 0; column < p.width; column += kChunk) {
      const int columns = min(kChunk, p.width - column);
#pragma unroll 1
      for (int base = 0; base < neurons.count; base += kGroup) {
        const int neuron = base + lane;
        ring_.fill(static_cast<const W*>(layer.w_down) + int64_t{neurons.begin + neuron} * p.width +
                       column,
                   lane < kGroup && neuron < neurons.count, columns * kValueBytes,
                   down_pitch<W>(columns));
      }
    }
  }

  RowRing<kStages>& ring_;
};

// --- Inputs of products ---
// Zeroed at the start.
template <int kTokens>
struct NormShared {
  alignas(16) float squares[kTokens][kMaxWidth / 128];  // sums of 32 quads each
};

__device__ __forceinline__ float sum_of_squares(const uint2& x) {
  const float2 a = to_floats(x.x), b = to_floats(x.y);
  return fmaf(a.x, a.x, a.y * a.y) + fmaf(b.x, b.x, b.y * b.y);
}

// The larger magnitude of the products of two pairs, as bits of an f32.
__device__ __forceinline__ uint32_t most_product(uint32_t a, uint32_t b) {
  const float2 x = to_floats(a), y = to_floats(b);
  return max(__float_as_uint(x.x * y.x) & 0x7fffffffu, __float_as_uint(x.y * y.y) & 0x7fffffffu);
}

// Stores rms_norm(x), rounded to bf16 and padded with zeros to a whole block, in x_shared and, with
// for_screen, in `screen`. Squares are added in one order for any number of tokens: a warp's 32
// quads (four values), then these sums. All threads that multiply call it.
//
// Beside weights in e4m3 (kHalves) the values become f16, times a power of two for each token that
// is known from x times the norm's weights. between() is called behind a barrier that follows
// whatever the step before did.
template <int kTokens, int kBlock, bool kHalves, typename Scales, typename Between>
__device__ __forceinline__ void stage_normed(const DecodeLayers& p, const Residual& x,
                                             const __nv_bfloat16* weight,
                                             NormShared<kTokens>& shared, uint8_t* x_shared,
                                             int pitch, const ScreenX& screen, bool for_screen,
                                             Scales& scales, const Between& between) {
  constexpr int kTeam = kThreads / kTokens;      // threads per token
  constexpr int kAtOnce = kTokens == 1 ? 2 : 8;  // quads that a thread loads ahead
  const int thread = static_cast<int>(threadIdx.x), token = thread / kTeam;
  constexpr int kQuads = kBlock / 4;
  const int quads = p.width / 4, padded = (quads + kQuads - 1) / kQuads * kQuads;
  const auto* norm = reinterpret_cast<const uint2*>(weight);
  auto* row = reinterpret_cast<uint2*>(x_shared + token * pitch);
  const bool mine = token < p.tokens;
  uint2 scale[kAtOnce];  // norm weights of the first quads
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int at = thread % kTeam + i * kTeam;
    scale[i] = mine && at < quads ? __ldg(norm + at) : uint2{};
  }
  uint32_t most = 0;  // of x times the norm's weights, bits of an f32
  if (mine) {
    for (int first = thread % kTeam; first - first % 32 < quads; first += kAtOnce * kTeam) {
      const int count = first < quads ? min((quads - first - 1) / kTeam + 1, kAtOnce) : 0;
      uint2 v[kAtOnce];
      x.wait_quads(v, count, token * quads + first, kTeam);
      float sums[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (i < count) row[first + i * kTeam] = v[i];
        sums[i] = sum_of_squares(v[i]);
        if constexpr (kHalves) {
          const int at = first + i * kTeam;
          const uint2 by = first < kAtOnce * kTeam ? scale[i]
                           : i < count             ? __ldg(norm + at)
                                                   : uint2{};
          most = max(most, max(most_product(v[i].x, by.x), most_product(v[i].y, by.y)));
        }
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
#pragma unroll
        for (float& sum : sums) sum += __shfl_xor_sync(~0u, sum, step);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * kTeam;
        if (at % 32 == 0 && at < quads) shared.squares[token][at / 32] = sums[i];
      }
    }
  }
  if constexpr (kHalves) store_most<kTokens>(most, scales);
  sync_threads();
  between();
  if (mine) {
    float total = 0.0f;
#pragma unroll 2
    for (int i = 0; i < (quads + 127) / 128; ++i) {
      const float4 four = reinterpret_cast<const float4*>(shared.squares[token])[i];
      total = (((total + four.x) + four.y) + four.z) + four.w;
    }
    const float inverse = rsqrtf(__fdividef(total, static_cast<float>(p.width)) + p.eps);
    uint32_t bits =
        0;  // of the largest value in bf16, but for its rounding, which f16 has room for
    if constexpr (kHalves) {
      bits = bf16x2(__uint_as_float(load_most<kTokens>(scales)) * inverse, 0.0f) & 0x7fffu;
    }
    const gpu::HalfScale half(bits);
    if constexpr (kHalves) {
      if (thread % kTeam == 0) scales.inverse[token] = half.inverse;
    }
    for (int first = thread % kTeam; first < padded; first += kAtOnce * kTeam) {
      if (first >= kAtOnce * kTeam) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int at = first + i * kTeam;
          if (at < quads) scale[i] = __ldg(norm + at);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * kTeam;
        if (at >= padded) break;
        uint2 v{};
        if (at < quads) {
          v = row[at];
          v = {scaled(v.x, scale[i].x, inverse), scaled(v.y, scale[i].y, inverse)};
          if constexpr (kHalves) v = {half.halves(v.x), half.halves(v.y)};
        }
        row[at] = v;
        if constexpr (kTokens == 1) {
          if (for_screen) screen.store(at, v);
        }
      }
    }
  }
  sync_threads();
}

// --- A barrier of all CTAs ---
// What any thread wrote to global memory before wait() can be read by every thread after it, with
// loads that bypass the L1. The threads that multiply call wait() equally often in all CTAs, and
// leave() at the end. counters: two in device memory, 0 between kernels.
class GridBarrier {
 public:
  __device__ explicit GridBarrier(uint32_t* counters) : arrived_(counters), left_(counters + 1) {}

  __device__ __forceinline__ void wait() {
    sync_threads();
    if (threadIdx.x == 0) {
      expected_ += gridDim.x;
      gpu::add_release(arrived_, 1u);
      while (gpu::load_acquire(arrived_) < expected_) {
      }
    }
    sync_threads();
  }

  // The last CTA resets the counters for the next kernel; returns true in one thread of it.
  __device__ __forceinline__ bool leave() const {
    if (threadIdx.x != 0 || atomicAdd(left_, 1u) != gridDim.x - 1) return false;
    *arrived_ = 0;
    *left_ = 0;
    return true;
  }

 private:
  uint32_t *arrived_, *left_;
  uint32_t expected_ = 0;
};

// --- The layers ---
// After so many tags the next call might need more than there are.
constexpr uint32_t kLastTags = ~0u - (kMaxDecodeLayers + 1);

// A group of q/k/v rows.
struct QkvGroup {
  int head;   // of all H + 2 H_kv
  int first;  // low row of its first pair, within the head
};

// Adds the bias, rotates queries and keys, writes the pair to qkv, and keys and values to a cache
// in bf16.
template <typename Kv>
__device__ __forceinline__ void finish_qkv(const DecodeLayers& p, const DecodeLayer& l,
                                           uint32_t tag, const BatchShared& batch,
                                           const QkvGroup& group, int token, int pair, float low,
                                           float high) {
  const int half = p.head_dim / 2, heads = p.heads + 2 * p.kv_heads;
  const int head = group.head, i = group.first + pair;
  if (l.b_qkv != nullptr) {
    low += __bfloat162float(l.b_qkv[head * p.head_dim + i]);
    high += __bfloat162float(l.b_qkv[head * p.head_dim + i + half]);
  }
  if (head < p.heads + p.kv_heads) {
    const float c = batch.cos[token][i], s = batch.sin[token][i];
    const float turned = low * c - high * s;
    high = high * c + low * s;
    low = turned;
  }
  const uint32_t bits = bf16x2(low, high);
  gpu::store_tagged(p.workspace.qkv + (token * heads + head) * half + i, bits, tag);
  if (sizeof(Kv) == 1 || head < p.heads) return;
  const bool key = head < p.heads + p.kv_heads;
  const int kv_head = head - p.heads - (key ? 0 : p.kv_heads);
  auto* row = reinterpret_cast<unsigned short*>(
      (key ? l.keys : l.values) + (batch.cache_rows[token] * p.kv_heads + kv_head) * p.head_dim);
  row[i] = static_cast<unsigned short>(bits & 0xffff);
  row[i + half] = static_cast<unsigned short>(bits >> 16);
}

template <int kTokens, int kColumns, typename W, typename Kv>
class Layers {
 public:
  static constexpr int kStages = kStagesFor<kTokens>;
  static constexpr bool kBytes = kInBytes<W>;
  static constexpr int kBlock = kBlockOf<W>;
  using Scales = typename FiredNeurons<kTokens, W>::Scales;
  using NewBytes = typename Attention<kColumns, Kv>::NewBytes;
  // Empty bases where there is nothing in 8 bits, which take no room.
  struct Shared : Scales, NewBytes {
    typename RowRing<kStages>::Shared ring;
    BatchShared batch;
    QkvGroup qkv[kMaxQkvGroups];
    HiddenShared<kTokens> hidden;
    NormShared<kTokens> norm;
    union {
      typename Product<kTokens, W>::Shared product;
      AttendShared<kColumns> attend;
      AddShared<kTokens> add;
    };
  };
  __host__ __device__ static int pitch(int width, int q_width) {
    return input_pitch<W>(width > q_width ? width : q_width);
  }
  __host__ __device__ static int ring_bytes(int width, int q_width) {
    return kStages * kGroup * stage_pitch<W>(width, q_width);
  }
  static int64_t shared_bytes(int width, int q_width, int tokens, bool screens) {
    const int screen = screens ? ScreenX::bytes(width) : 0;
    return ring_bytes(width, q_width) + int64_t{tokens} * pitch(width, q_width) + screen;
  }

  __device__ __forceinline__ Layers(const DecodeLayers& p, Shared& shared, uint8_t* memory)
      : p_(p),
        s_(shared),
        x_(memory + ring_bytes(p.width, p.heads * p.head_dim)),
        pitch_(pitch(p.width, p.heads * p.head_dim)),
        neurons_(p.ffn),
        add_share_(p.width),
        qkv_groups_(own_groups((p.heads + 2 * p.kv_heads) * p.head_dim / kGroup)),
        output_groups_(own_groups((p.width + kGroup - 1) / kGroup)),
        ring_(shared.ring, gpu::smem_address(memory),
              stage_pitch<W>(p.width, p.heads * p.head_dim)),
        product_(p.tokens, shared.product, gpu::smem_address(x_), pitch_),
        screen_(x_ + p.tokens * pitch_, p.width),
        barrier_(p.workspace.state + 1) {}

  // All threads of the CTA call this.
  __device__ __forceinline__ void run(uint8_t* memory) {
    RowRing<kStages>::init(s_.ring);
    // The last block of a row may be short. What lies behind it is multiplied by zeros, so that it
    // must not be NaN or infinity.
    const int pieces = ring_bytes(p_.width, p_.heads * p_.head_dim) / 16;
    if (p_.width % kBlock != 0 || p_.heads * p_.head_dim % kBlock != 0) {
      for (int i = static_cast<int>(threadIdx.x); i < pieces; i += static_cast<int>(blockDim.x)) {
        reinterpret_cast<uint4*>(memory)[i] = uint4{};
      }
      gpu::fence_async_shared();
    }
    load_batch();
    __syncthreads();
    s_.batch.find_items(p_);
    __syncthreads();
    if (threadIdx.x < kThreads) {
      gpu::registers_increase<kMultiplyRegisters>();
      multiply();
    } else {
      gpu::registers_decrease<kReadRegisters>();
      if (threadIdx.x < kThreads + 32) {
        WeightReader<kStages, W>(ring_).template read_all<kTokens == 1 && !kBytes>(
            p_, [&](int layer) { prefetch_for(layer); });
      }
    }
  }

 private:
  __device__ __forceinline__ void multiply() {
    const uint32_t done = *p_.workspace.state;  // tags used by all calls before
    publish(done + 1);
#pragma unroll 1
    for (int layer = 0; layer < p_.layers; ++layer) {
      const DecodeLayer& l = p_.layer[layer];
      tag_ = done + 2 + static_cast<uint32_t>(layer);
      int nnz = 0;
#pragma unroll 1
      for (int step = 0; step < 3; ++step) product(layer, step, nnz);
      const Part<kTokens> part(p_, tag_);
      if (l.sparse) {
        FiredNeurons<kTokens, W>(p_, l, tag_, neurons_, s_.hidden, s_).up_down(product_, part, nnz);
      } else if constexpr (kBytes) {
        dense_down_bytes<kTokens>(p_, neurons_, ring_, s_.hidden, part);
      } else {
        dense_down<kTokens>(p_, neurons_, ring_, s_.hidden, part);
      }
      count_fired(p_, l, nnz);
      if constexpr (kTokens > 1) barrier_.wait();
      add_parts<kTokens, kBytes>(p_, tag_, !l.sparse, add_share_, residual(0, tag_), s_.add,
                                 kBytes ? p_.bytes[layer].down_scales : nullptr,
                                 [&](int at, uint32_t bits) {
                                   if (layer + 1 < p_.layers) {
                                     gpu::store_tagged(residual(1, tag_).words + at, bits, tag_);
                                   } else {
                                     reinterpret_cast<uint32_t*>(p_.x)[at] = bits;
                                   }
                                 });
    }
    finish(done + 1 + static_cast<uint32_t>(p_.layers));
  }

  // Notes the tags used so far. Before they run out, which takes a day of steps, all words are
  // cleared and the tags start again: words that are left from then would otherwise look ready.
  __device__ __forceinline__ void finish(uint32_t used) const {
    const bool restarts = used > kLastTags;
    if (restarts) {  // once no thread of any CTA waits for a word, and all words are written
      __threadfence();
      sync_threads();
    }
    if (!barrier_.leave()) return;
    if (restarts) {
      __threadfence();
      for (uint64_t* word = p_.workspace.x; word < p_.workspace.words_end(); ++word) *word = 0;
      used = 0;
    }
    *p_.workspace.state = used;
  }

  // Writes the kernel's input as tagged words, for which the first layer waits as any other does.
  __device__ __forceinline__ void publish(uint32_t tag) const {
    const int pairs = p_.width / 2, share = add_share_.end - add_share_.begin;
    for (int i = static_cast<int>(threadIdx.x); i < p_.tokens * share; i += kThreads) {
      const int at = i / share * pairs + add_share_.begin + i % share;
      gpu::store_tagged(residual(1, tag).words + at, reinterpret_cast<const uint32_t*>(p_.x)[at],
                        tag);
    }
  }

  // A step: brings its input into shared memory, multiplies this CTA's groups of rows and uses the
  // sums. Step 0 is q/k/v and then this CTA's share of the attention, 1 the output projection, 2
  // the gate. The three share one piece of code, because code that runs once a layer also waits for
  // its instructions to be fetched.
  __device__ __forceinline__ void product(int layer, int step, int& nnz) {
    const DecodeLayer& l = p_.layer[layer];
    const int groups = step == 0   ? qkv_groups_
                       : step == 1 ? output_groups_
                                   : (neurons_.count + ffn_step(l) - 1) / ffn_step(l);
    const bool screens = !kBytes && kTokens == 1 && step == 2 && screened(p_, l);
    RowScales row_scales;
    if constexpr (kBytes) row_scales.load(*this, layer, step, groups);
    const int own_neuron = static_cast<int>(threadIdx.x);
    float error = 0.0f;
    if (screens && own_neuron < neurons_.count) {
      error = __ldg(l.screen.errors + neurons_.begin + own_neuron);
    }
    const int width = step == 1 ? p_.heads * p_.head_dim : p_.width;
    const Residual x = step == 2 ? residual(0, tag_) : residual(1, tag_ - 1);
    // It is called behind a barrier of the staging, when no thread uses the scales before any more.
    const auto store_scales = [&] {
      if constexpr (kBytes) row_scales.store(s_);
    };
    if (step == 1) {
      if (groups > 0) {
        stage_attended<kTokens, kBlock, kBytes>(p_, tag_, x_, pitch_, s_, store_scales);
      }
    } else if (groups > 0 || step == 2) {
      stage_normed<kTokens, kBlock, kBytes>(p_, x, step == 0 ? l.attention_norm : l.ffn_norm,
                                            s_.norm, x_, pitch_, screen_, screens, s_,
                                            store_scales);
    }
    if constexpr (kTokens == 1 && !kBytes) {
      if (screens) {
        // kMaxNeurons threads store; the product synchronises before it reads.
        s_.hidden.errors[own_neuron] = error;
        product_.screen_groups(groups, ring_, width, screen_,
                               [&](int group, int, int pair, float low, float high) {
                                 finish_screen(group, pair, low, high);
                               });
        sync_threads();
        return;
      }
    }
    // The residual of the first batch of groups, issued early to hide the load's latency.
    const auto own = product_.finisher();
    gpu::Tagged before{};
    if (step == 1 && own.finishes && own.group < groups &&
        output_column(group_of(own.group), own.pair) < p_.width) {
      before = x.load_pair(output_place(own.group, own.token, own.pair));
    }
    product_.groups(
        groups, ring_, width, [&](int group, int token, int pair, float low, float high) {
          if constexpr (kBytes) {
            const bool both = step == 2 && paired(l);
            const int at = group * (both ? kPairs : kGroup) + pair;
            const float inverse = s_.inverse[token];
            low *= s_.of[at] * inverse;
            high *= s_.of[at + (both ? kMaxNeurons : kPairs)] * inverse;
          }
          if (step == 0) {
            finish_qkv<Kv>(p_, l, tag_, s_.batch, s_.qkv[group], token, pair, low, high);
          } else if (step == 1) {
            finish_output(x, before, group, token, pair, low, high);
          } else {
            finish_gate(l, group, token, pair, low, high, nnz);
          }
        });
    if (step == 0) {
      Attention<kColumns, Kv>(p_, layer, tag_, s_.batch, s_.attend, s_).run();
    } else if (step == 2) {
      sync_threads();
    }
  }

  // The scales of a step's rows that a thread loads, as ScaleShared orders them, early to hide the
  // latency.
  struct RowScales {
    static constexpr int kOwn = kBytes ? ScaleShared<kTokens>::kCount / kThreads : 1;
    float of[kOwn];

    __device__ __forceinline__ void load(const Layers& of_layers, int layer, int step, int groups) {
      const DecodeLayerBytes& bytes = of_layers.p_.bytes[layer];
      const bool gated = bytes.gate_scales != nullptr;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int at = static_cast<int>(threadIdx.x) + i * kThreads;
        const int group = at / kGroup, pair = at % kPairs, high = at / kPairs % 2;
        const float* scales;
        int row;
        bool exists = group < groups;
        if (step == 0) {
          scales = bytes.qkv_scales;
          const QkvGroup& rows = of_layers.s_.qkv[group];
          row = rows.head * of_layers.p_.head_dim + rows.first + pair +
                high * (of_layers.p_.head_dim / 2);
        } else if (step == 1) {
          scales = bytes.o_scales;
          row = output_column(group_of(group), pair) + high;
          exists = exists && row < of_layers.p_.width;
        } else {
          scales = gated && i == 0 ? bytes.gate_scales : bytes.up_scales;
          row = of_layers.neurons_.begin + at % kMaxNeurons;
          exists = at % kMaxNeurons < of_layers.neurons_.count;
        }
        of[i] = exists ? __ldg(scales + row) : 0.0f;
      }
    }
    __device__ __forceinline__ void store(ScaleShared<kTokens>& shared) const {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) shared.of[threadIdx.x + i * kThreads] = of[i];
    }
  };

  // Groups this CTA owns, assigned round-robin.
  __device__ __forceinline__ static int own_groups(int groups) {
    const int cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
    return groups > cta ? (groups - cta - 1) / ctas + 1 : 0;
  }
  __device__ __forceinline__ static int group_of(int own) {
    return static_cast<int>(blockIdx.x) + own * static_cast<int>(gridDim.x);
  }
  // x after a layer's attention (0), after its FFN (1).
  __device__ __forceinline__ Residual residual(int which, uint32_t tag) const {
    return {p_.workspace.x + which * p_.tokens * (p_.width / 2), tag};
  }

  // Prefetches what the layer reads beside its matrices into the L2 cache; by the reading warp.
  __device__ __forceinline__ void prefetch_for(int layer) const {
    const DecodeLayer& l = p_.layer[layer];
    const auto norm = [&](const __nv_bfloat16* weight) {
      gpu::bulk_prefetch(weight, static_cast<uint32_t>(p_.width) * 2);
    };
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == kThreads) {
      norm(l.attention_norm);
      norm(l.ffn_norm);
    }
    if (!kBytes && kTokens == 1 && screened(p_, l)) {
      constexpr int kSector = 8;
      const int neuron = static_cast<int>(threadIdx.x) % 32 * kSector;
      if (neuron < neurons_.count) {
        gpu::prefetch_around(l.screen.errors + neurons_.begin + neuron);
      }
    }
    prefetch<Kv>(p_, layer, s_.batch);
  }

  __device__ __forceinline__ void load_batch() {
    s_.batch.load(p_);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < qkv_groups_) {
      const int column = qkv_column(p_, group_of(thread), 0);
      s_.qkv[thread] = {column / p_.head_dim, column % p_.head_dim};
    }
    clear(s_.hidden);
    clear(s_.norm);
  }
  template <typename T>
  __device__ __forceinline__ static void clear(T& shared) {
    static_assert(sizeof(T) % 16 == 0);
    for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(sizeof(T) / 16);
         i += static_cast<int>(blockDim.x)) {
      reinterpret_cast<uint4*>(&shared)[i] = uint4{};
    }
  }

  __device__ __forceinline__ int output_place(int group, int token, int pair) const {
    return token * (p_.width / 2) + output_column(group_of(group), pair) / 2;
  }
  // before: the residual as loaded early, for the first batch of groups.
  __device__ __forceinline__ void finish_output(const Residual& x, gpu::Tagged before, int group,
                                                int token, int pair, float low, float high) const {
    if (output_column(group_of(group), pair) >= p_.width) return;
    const int at = output_place(group, token, pair);
    const bool first = group < Product<kTokens, W>::kBatch;
    const float2 was = to_floats(x.wait_pair(first ? before : x.load_pair(at), at));
    gpu::store_tagged(residual(0, tag_).words + at, bf16x2(was.x + low, was.y + high), tag_);
  }

  __device__ __forceinline__ void finish_gate(const DecodeLayer& l, int group, int token, int pair,
                                              float low, float high, int& nnz) {
    const bool both = paired(l);
    const auto store = [&](int neuron, float gate, float up) {
      if (neuron >= neurons_.count) return;
      const __nv_bfloat16 g = __float2bfloat16(relu(gate));
      const bool fires = !(__bfloat162float(g) == 0.0f);
      s_.hidden.h[token][neuron] = both && fires ? __float2bfloat16(__bfloat162float(g) * up) : g;
      nnz += fires;
    };
    store(group * ffn_step(l) + pair, low, high);
    if (!both) store(group * ffn_step(l) + pair + kPairs, high, 0.0f);
  }

  // Stores 1 in h for neurons that may fire, 0 for those that do not.
  __device__ __forceinline__ void finish_screen(int group, int pair, float low, float high) {
    const auto store = [&](int neuron, float product) {
      if (neuron >= neurons_.count) return;
      const bool may_fire = !(product < -s_.hidden.errors[neuron]);
      s_.hidden.h[0][neuron] = __float2bfloat16(may_fire ? 1.0f : 0.0f);
    };
    store(group * kGroup + pair, low);
    store(group * kGroup + pair + kPairs, high);
  }

  const DecodeLayers& p_;
  Shared& s_;
  uint8_t* x_;
  const int pitch_;
  const Neurons neurons_;
  const AddShare add_share_;
  const int qkv_groups_, output_groups_;  // of this CTA
  RowRing<kStages> ring_;
  Product<kTokens, W> product_;
  ScreenX screen_;
  GridBarrier barrier_;
  uint32_t tag_ = 0;
};

template <int kTokens, int kColumns, typename W, typename Kv>
__global__ void __launch_bounds__(kAllThreads, 1)
    decode_layers_sm90_kernel(const __grid_constant__ DecodeLayers problem) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ typename Layers<kTokens, kColumns, W, Kv>::Shared shared;
  Layers<kTokens, kColumns, W, Kv>(problem, shared, memory).run(memory);
}

template <int kTokens, typename W>
int64_t shared_bytes(int64_t width, int64_t q_width, int64_t tokens, bool screens) {
  using Most = Layers<kTokens, 128, W, int8_t>;
  return Most::shared_bytes(static_cast<int>(width), static_cast<int>(q_width),
                            static_cast<int>(tokens), screens) +
         static_cast<int64_t>(sizeof(typename Most::Shared));
}

template <int kTokens, int kColumns, typename W, typename Kv>
cudaError_t launch(const DecodeLayers& problem, int multiprocessors, bool screens,
                   cudaStream_t stream) {
  const auto kernel = decode_layers_sm90_kernel<kTokens, kColumns, W, Kv>;
  const auto shared = static_cast<int>(Layers<kTokens, kColumns, W, Kv>::shared_bytes(
      problem.width, problem.heads * problem.head_dim, problem.tokens, screens));
  const cudaError_t status = gpu::allow_most_shared_memory(kernel);
  if (status != cudaSuccess) return status;
  void* arguments[] = {const_cast<DecodeLayers*>(&problem)};
  return cudaLaunchCooperativeKernel(kernel, dim3(static_cast<unsigned>(multiprocessors)),
                                     dim3(kAllThreads), arguments, static_cast<size_t>(shared),
                                     stream);
}

// one: the kernel for one token.
template <typename W, typename Kv>
cudaError_t launch_as(const DecodeLayers& problem, int multiprocessors, bool one, bool screens,
                      cudaStream_t stream) {
  const bool narrow = problem.head_dim <= 64;
  const auto run = one ? (narrow ? launch<1, 64, W, Kv> : launch<1, 128, W, Kv>)
                       : (narrow ? launch<8, 64, W, Kv> : launch<8, 128, W, Kv>);
  return run(problem, multiprocessors, screens, stream);
}

}  // namespace
}  // namespace twell::decode
