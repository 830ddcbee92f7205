// SPDX-License-Identifier: Apache-2.0
// The weights that a CTA of decode_layers reads, in the order in which it uses them, through a ring
// of shared memory that one warp keeps full with the copy engine, across the barriers between the
// steps of a layer. A stage is up to 16 rows of a weight, of up to kChunk columns:
//   products  a group of 16 rows, eight pairs of a "low" and a "high" one, chunk after chunk
//   screen    16 neurons' rows, a piece of as many bytes as a chunk and its scales after another
//   down      16 neurons' rows, for all neurons of the CTA, then the next chunk
// Rows that do not exist are not written. What multiplies walks the stages in the same order.
#pragma once

#include "twell/ops/decode/decode_layers.h"
#include "twell/sm90/barrier.cuh"
#include "twell/sm90/copy.cuh"
#include "twell/sm90/warp_mma.cuh"

namespace twell::decode {

inline constexpr int kWarps = 8;  // that multiply; one more reads the weights
inline constexpr int kThreads = 32 * kWarps;
// The warp that reads has a warpgroup of its own, so that those that multiply get its registers:
// what is spilled waits behind weights when it is read back.
inline constexpr int kAllThreads = kThreads + 128;
inline constexpr int kMultiplyRegisters = 232, kReadRegisters = 40;
inline constexpr int kPairs = 8;           // of a low and a high row, per group of a product
inline constexpr int kGroup = 2 * kPairs;  // rows
inline constexpr int kBlock = 32;          // values of a row that four lanes read at a time
inline constexpr int kChunk = 1024;        // columns
// Stages that are asked for and not there yet. More would not be faster, as two of every CTA are
// twice what memory delivers in the time of one access, and what CTAs tell each other would wait
// behind them. A sparse layer has fewer bytes to read than its steps take time, so that one is
// enough.
__device__ __forceinline__ int on_their_way(const DecodeLayer& layer) {
  return layer.sparse ? 1 : 2;
}

// Among the warps that multiply.
__device__ __forceinline__ void sync_threads() { sm90::named_barrier(1, kThreads); }

// Bytes between the rows of a stage, or of x, in shared memory, so that what neighbouring lanes
// read of neighbouring rows is in different banks: 64 more than a multiple of 128 where four lanes
// read 64 bytes of a row (products), 16 more where a lane reads 16 (down).
__host__ __device__ inline int row_pitch(int columns) {
  return (columns * 2 + 127) / 128 * 128 + 64;
}
__host__ __device__ inline int down_pitch(int columns) {
  return (columns * 2 + 127) / 128 * 128 + 16;
}
__host__ __device__ inline int stage_pitch(int width, int q_width) {
  const int most = width > q_width ? width : q_width;
  return row_pitch(most < kChunk ? most : kChunk);
}

// This CTA's neurons.
struct Neurons {
  int begin, count;
  __device__ explicit Neurons(int ffn) {
    const auto first = [&](int64_t cta) { return static_cast<int>(cta * ffn / gridDim.x); };
    begin = first(blockIdx.x);
    count = first(blockIdx.x + 1) - begin;
  }
};

// The low row of the output projection's pair; the high one is behind it.
__device__ __forceinline__ int output_column(int group, int pair) {
  return group * kGroup + pair * 2;
}

// The low row of a rotation's pair; the high one is hd / 2 after it.
__device__ __forceinline__ int qkv_column(const DecodeLayers& p, int group, int pair) {
  const int of_head = p.head_dim / kGroup;
  return group / of_head * p.head_dim + group % of_head * kPairs + pair;
}

// A dense gated layer's groups are eight neurons, low rows of w_gate, high ones of w_up; others'
// are 16 neurons of the first weight.
__device__ __forceinline__ bool paired(const DecodeLayer& layer) {
  return layer.w_gate != nullptr && !layer.sparse;
}
__device__ __forceinline__ bool screened(const DecodeLayers& p, const DecodeLayer& layer) {
  return p.tokens == 1 && layer.sparse && layer.screen.rows != nullptr;
}
__device__ __forceinline__ int ffn_step(const DecodeLayer& layer) {
  return paired(layer) ? kPairs : kGroup;
}

template <int kStages>
struct StreamShared {
  uint64_t full[kStages], empty[kStages];
};

template <int kStages>
class WeightStream {
 public:
  // By all threads, before any other use; the caller synchronises the CTA afterwards.
  __device__ __forceinline__ static void init(StreamShared<kStages>& shared) {
    if (threadIdx.x != 0) return;
    for (int i = 0; i < kStages; ++i) {
      sm90::barrier_init(sm90::smem_address(&shared.full[i]), 1);
      sm90::barrier_init(sm90::smem_address(&shared.empty[i]), kWarps);
    }
    sm90::fence_barrier_init();
  }

  __device__ __forceinline__ WeightStream(StreamShared<kStages>& shared, uint32_t ring, int pitch)
      : full_(sm90::smem_address(shared.full)),
        empty_(sm90::smem_address(shared.empty)),
        ring_(ring),
        pitch_(pitch) {}

  // The next stage's rows, pitch() apart, once they are there.
  __device__ __forceinline__ uint32_t take() {
    sm90::barrier_wait(full_ + at_.stage * 8, at_.parity);
    const uint32_t rows = ring_ + static_cast<uint32_t>(at_.stage * kGroup * pitch_);
    at_.advance();
    return rows;
  }
  // All lanes of the warp have read what they need of the first stage not yet released.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) sm90::barrier_arrive(empty_ + released_.stage * 8);
    released_.advance();
  }
  __device__ __forceinline__ int pitch() const { return pitch_; }

  // By the reading warp: everything. before(layer) is called in front of a layer's first weights.
  // kScreens: there may be some.
  template <bool kScreens, typename Before>
  __device__ __forceinline__ void read_all(const DecodeLayers& p, const Before& before) {
    const Neurons neurons(p.ffn);
#pragma unroll 1
    for (int l = 0; l < p.layers; ++l) {
      before(l);
      most_asked_ = on_their_way(p.layer[l]);
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
  // The rows of a step's product: q/k/v (0), output (1), the FFN's first weights (2).
  __device__ __forceinline__ void read_product(const DecodeLayers& p, const DecodeLayer& layer,
                                               int step, const Neurons& neurons) {
    const int lane = static_cast<int>(threadIdx.x) % 32, pair = lane % kPairs;
    const int high = lane / kPairs % 2, q_width = p.heads * p.head_dim;
    const bool both = paired(layer);
    const __nv_bfloat16* w = step == 0                                        ? layer.w_qkv
                             : step == 1                                      ? layer.w_o
                             : layer.w_gate == nullptr || (both && high == 1) ? layer.w_up
                                                                              : layer.w_gate;
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
        read(w + int64_t{row} * width + column, exists, min(kChunk, width - column) * 2, pitch_);
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
        read(from, lane < kGroup && base + lane < neurons.count, bytes, pitch_);
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
        read(layer.w_down + int64_t{neurons.begin + neuron} * p.width + column,
             lane < kGroup && neuron < neurons.count, columns * 2, down_pitch(columns));
      }
    }
  }

  // A stage: a row per lane.
  __device__ __forceinline__ void read(const void* from, bool exists, int row_bytes, int pitch) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t full = full_ + at_.stage * 8, bytes = static_cast<uint32_t>(row_bytes);
    sm90::barrier_wait(empty_ + at_.stage * 8, at_.parity ^ 1);
#pragma unroll 1
    for (; asked_ >= most_asked_; --asked_) {
      sm90::barrier_wait(full_ + landed_.stage * 8, landed_.parity);
      landed_.advance();
    }
    ++asked_;
    const uint32_t rows = __popc(__ballot_sync(~0u, exists));
    if (lane == 0) sm90::barrier_arrive_expect(full, rows * bytes);
    __syncwarp();
    if (exists) {
      sm90::bulk_load(ring_ + static_cast<uint32_t>(at_.stage * kGroup * pitch_ + lane * pitch),
                      from, bytes, full);
    }
    at_.advance();
  }

  const uint32_t full_, empty_, ring_;
  const int pitch_;
  sm90::RingCursor<kStages> at_;
  sm90::RingCursor<kStages> released_;  // of the warps that multiply
  sm90::RingCursor<kStages> landed_;    // of the reading warp: behind it by
  int asked_ = 0, most_asked_ = 0;      // so many stages
};

}  // namespace twell::decode
