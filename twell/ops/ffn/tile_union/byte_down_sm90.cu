// SPDX-License-Identifier: Apache-2.0
// down in e4m3: y[tile tokens] = y_scales * (h[tile] w_down[union]), where up has written h in
// blocks of 128 tokens by 64 neurons, with an exponent per token and block (ByteBlock). Persistent.
//
// WGMMA takes e4m3 only with the summed index, here neurons, in memory order, or from registers.
// Rows of w_down have the columns in memory order, so y^T = w_down^T h^T is computed: consumers
// read rows of w_down from shared memory, transpose them four by four bytes, and multiply from
// registers. Which column is which row of the product is free: a thread's words of four adjacent
// columns become its two rows of two products.
//   warpgroup 0     loads blocks of h with bulk copies, gathers rows of w_down, and finds out by
//                   what the sums so far are multiplied before a block is added
//   warpgroups 1,2  128 columns each, by all 128 tokens
//
// A work item is 128 tokens by 256 columns. The sums of a token are in units of the scale of its
// newest block. Units become at most kLargestFall smaller than they have ever been: what is added
// in too large a unit then is less than 2^-kLargestFall of the largest h.
#include <cstdint>

#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/sm90/wgmma.cuh"
#include "twell/ops/ffn/tile_union/gathered_gemm_sm90.cuh"
#include "twell/ops/ffn/tile_union/tile_union_kernels.h"

namespace twell::tile_union {
namespace {

namespace byte_down {

constexpr int kStages = 8;
constexpr int kProducerWarps = kProducers / 32;
constexpr int kConsumerWarps = kConsumerWarpgroups * 4;
constexpr int kLargestFall = 40;
constexpr int kAhead = 4;
constexpr uint32_t kBytesH = ByteBlock::kValues;
constexpr uint32_t kBytesW = kBlock * kColumns;
constexpr uint32_t kBytesOfTokens = kTileTokens * sizeof(float);
// h, w_down, what the sums are multiplied by before, their scales behind.
constexpr uint32_t kStageBytes = kBytesH + kBytesW + 2 * kBytesOfTokens;
static_assert(kStageBytes % 512 == 0);  // the swizzle atom of h
constexpr uint32_t kFlagBytes = kProducerWarps * 4;
constexpr uint32_t kSharedBytes =
    kStages * (kStageBytes + kFlagBytes + 2 * 8) + ItemFeed::kBytes + 512;

struct Shared {
  uint32_t ring, flags, feed, full, empty;
  __device__ explicit Shared(void* base) {
    ring = (gpu::smem_address(base) + 511) & ~511u;
    flags = ring + kStages * kStageBytes;
    feed = flags + kStages * kFlagBytes;
    full = feed + ItemFeed::kBytes;
    empty = full + kStages * 8;
  }
  __device__ uint32_t stage(int index) const { return ring + index * kStageBytes; }
};

struct Problem {
  Tiles tiles;
  const uint8_t* weight;  // [F, D]
  const float* y_scales;  // [D]
  __nv_bfloat16* y;       // [M, D]
  int32_t* taken;
  int width;              // D
  bool add;               // y += instead of =
  const int32_t* y_rows;  // [M] or null

  // {tile, first column, neurons in the tile's union, its first block}.
  __device__ __forceinline__ int4 load(int index) const {
    const int column_blocks = (width + kColumns - 1) / kColumns;
    if (index >= tiles.counts->tiles * column_blocks) return int4{-1, 0, 0, 0};
    const int tile = tiles.order[index / column_blocks];
    return int4{tile, index % column_blocks * kColumns, tiles.union_size[tile],
                tiles.first_block[tile]};
  }
  __device__ __forceinline__ const uint8_t* image(const int4& item) const {
    return reinterpret_cast<const uint8_t*>(tiles.activations) +
           int64_t{item.w} * ByteBlock::kBytes;
  }
  __device__ __forceinline__ static int blocks(const int4& item) {
    return (item.z + kBlock - 1) / kBlock;
  }
};

// The units of one token's sums: producer thread p keeps those of token p.
struct Units {
  int now = ByteBlock::kNoExponent, largest = ByteBlock::kNoExponent;

  // Turns to a block's exponent and returns the exponent of what the sums are multiplied by.
  __device__ __forceinline__ int turn(int exponent) {
    if (exponent == ByteBlock::kNoExponent) return 0;
    const int before = now;
    now = max(exponent, largest - kLargestFall);
    largest = max(largest, now);
    return before == ByteBlock::kNoExponent ? 0 : before - now;
  }
  // A power of two; 0 below the normal ones.
  __device__ __forceinline__ static float power(int exponent) {
    return __int_as_float(max(exponent + 127, 0) << 23);
  }
};

// A warp gathers its 16 rows of a stage, whose neurons lanes 0 .. 15 have: two at a time, 256 bytes
// each.
__device__ __forceinline__ void gather(uint32_t dst, const uint8_t* w, int id, bool inside,
                                       int width) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = i * 2 + lane / 16, neuron = __shfl_sync(~0u, id, row);
    const bool valid = inside && neuron >= 0;
    gpu::gather16(dst + row * kColumns + ((lane % 16) ^ (i % 4 * 2)) * 16,
                  w + (valid ? int64_t{neuron} * width : 0), valid);
  }
}

// Ends with a barrier of the warp.
__device__ __forceinline__ void store_units(const Shared& shared, int stage, int factor,
                                            const Units& units) {
  const uint32_t of_token = shared.stage(stage) + kBytesH + kBytesW + threadIdx.x * 4;
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(of_token), "f"(Units::power(factor)) : "memory");
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(of_token + kBytesOfTokens),
               "f"(Units::power(units.now))
               : "memory");
  const int turns = __any_sync(~0u, factor != 0);
  if (threadIdx.x % 32 == 0) {
    asm volatile(
        "st.shared.b32 [%0], %1;" ::"r"(shared.flags + stage * kFlagBytes + threadIdx.x / 32 * 4),
        "r"(turns)
        : "memory");
  }
  __syncwarp();
}

__device__ __forceinline__ void produce(const Problem& problem, const Shared& shared) {
  using namespace gpu;
  GatherRing<kStages> ring{shared.full, shared.empty};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    // find_unions may still be running.
    while (load_acquire(&problem.tiles.counts->complete) == 0) __nanosleep(100);
  }
  __syncwarp();
  ItemFeed feed{shared.feed};
  ItemFeeder feeder(feed, problem.taken, [&](int index) { return problem.load(index); });
  for (;;) {
    feeder.publish();
    const int4 item = feed.take();
    // The vote tells the compiler that warps are converged below (gathered_gemm_sm90.cuh).
    if (__any_sync(~0u, item.x < 0)) break;
    const int blocks = problem.blocks(item);
    const int32_t* ids = problem.tiles.union_ids + int64_t{item.w} * kBlock;
    const uint8_t* h = problem.image(item);
    const uint8_t* w = problem.weight + item.y + lane % 16 * 16;
    const bool inside = item.y + lane % 16 * 16 < problem.width;
    const auto load_id = [&](int block) {
      const int position = block * kBlock + warp * 16 + lane % 16;
      return position < item.z ? ids[position] : -1;
    };
    const auto load_exponent = [&](int block) {
      const auto* exponents =
          reinterpret_cast<const signed char*>(h + block * ByteBlock::kBytes + kBytesH);
      return block < blocks ? int{__ldcg(exponents + threadIdx.x)} : ByteBlock::kNoExponent;
    };
    // Loaded kAhead blocks before they are used, because a block takes less time than the L2.
    int ids_ahead[kAhead], exponents_ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ids_ahead[i] = load_id(i);
    if (lane == 0 && blocks > 0) {
      while (load_acquire(problem.tiles.ready + item.x) < 2 * blocks) __nanosleep(40);
      fence_async_global();
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) exponents_ahead[i] = load_exponent(i);
    Units units;
    for (int first = 0; first < blocks; first += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int block = first + i;
        if (block >= blocks) break;
        const int id = ids_ahead[i], exponent = exponents_ahead[i];
        ids_ahead[i] = load_id(block + kAhead);
        exponents_ahead[i] = load_exponent(block + kAhead);
        const int index = ring.acquire();
        const uint32_t stage = shared.stage(index), full = shared.full + index * 8;
        if (threadIdx.x == 0) {
          barrier_expect(full, kBytesH);
          bulk_load(stage, h + block * ByteBlock::kBytes, kBytesH, full);
        }
        gather(stage + kBytesH + warp * 16 * kColumns, w, id, inside, problem.width);
        const int factor = units.turn(exponent);
        store_units(shared, index, factor, units);
        if (lane == 0) barrier_arrive(full);
        ring.commit();
      }
    }
  }
}

// The operand of a stage's products: [32 neurons][product][register].
using Fragments = uint32_t[2][2][4];

// A consumer thread: columns 4g .. 4g + 3 of its warp's 32, and neurons 2t, 2t + 1, 2t + 8, 2t + 9
// of every 16, which is the order in which up writes h.
struct Consumer {
  const Problem& problem;
  const Shared& shared;
  const int warpgroup = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32,
            g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  gpu::RingCursor<kStages> cursor{};

  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) gpu::barrier_arrive(shared.empty + stage * 8);
  }

  __device__ __forceinline__ void load(Fragments& out, uint32_t stage) const {
    const uint32_t from = stage + kBytesH + 2 * t * kColumns + g % 4 * 4 +
                          ((warpgroup * 8 + warp * 2 + g / 4) ^ (2 * t)) * 16;
#pragma unroll
    for (int group = 0; group < kBlock / 16; ++group) {
      uint32_t v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t at = from + (group * 16 + j % 2 + j / 2 * 8) * kColumns;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v[j]) : "r"(at) : "memory");
      }
      const uint32_t low = __byte_perm(v[0], v[1], 0x5140), low2 = __byte_perm(v[2], v[3], 0x5140);
      const uint32_t high = __byte_perm(v[0], v[1], 0x7362),
                     high2 = __byte_perm(v[2], v[3], 0x7362);
      auto& of = out[group / 2];
      const int second = group % 2 * 2;
      of[0][second] = __byte_perm(low, low2, 0x5410);        // column 4g
      of[0][second + 1] = __byte_perm(low, low2, 0x7632);    // 4g + 1
      of[1][second] = __byte_perm(high, high2, 0x5410);      // 4g + 2
      of[1][second + 1] = __byte_perm(high, high2, 0x7632);  // 4g + 3
      // Registers of products in flight may not change, so the compiler must not sink these.
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(of[i / 2][second + i % 2]));
    }
  }

  __device__ __forceinline__ bool turns(int stage) const {
    uint32_t a, b, c, d;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(shared.flags + stage * kFlagBytes)
                 : "memory");
    return (a | b | c | d) != 0;
  }

  // Multiplies all sums by their token's value.
  __device__ __forceinline__ void multiply_by(float (&acc)[2][64], uint32_t of_tokens) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {  // tokens 8i + 2t, 8i + 2t + 1
      float even, odd;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(even), "=f"(odd)
                   : "r"(of_tokens + (8 * i + 2 * t) * 4)
                   : "memory");
#pragma unroll
      for (int product = 0; product < 2; ++product) {
        acc[product][4 * i] *= even;
        acc[product][4 * i + 1] *= odd;
        acc[product][4 * i + 2] *= even;
        acc[product][4 * i + 3] *= odd;
      }
    }
  }

  // Waits for the next stage and loads its operand.
  __device__ __forceinline__ void take(Fragments& w) const {
    gpu::barrier_wait(shared.full + cursor.stage * 8, cursor.parity);
    load(w, shared.stage(cursor.stage));
  }

  // Waits for the products in flight, whose operand is w. Its registers are in use until then,
  // which the compiler does not know: a store that never happens keeps them.
  __device__ __forceinline__ void finish(float (&acc)[2][64], const Fragments& w) const {
    gpu::wgmma_wait<0>();
    gpu::wgmma_hold(acc[0]);
    gpu::wgmma_hold(acc[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto& of = w[i / 2][i % 2];
      asm volatile(
          "{\n.reg .pred p;\nsetp.lt.s32 p, %0, 0;\n"
          "@p st.shared.v4.b32 [%1], {%2, %3, %4, %5};\n}\n" ::"r"(problem.width),
          "r"(shared.ring), "r"(of[0]), "r"(of[1]), "r"(of[2]), "r"(of[3])
          : "memory");
    }
  }

  // Adds the products of the stage at the cursor, whose operand is w, and loads that of the next
  // one meanwhile. False behind the last of the blocks that are left, whose stage is not released.
  __device__ __forceinline__ bool step(float (&acc)[2][64], const Fragments& w, Fragments& next,
                                       bool first, int& left) {
    using namespace gpu;
    const int current = cursor.stage;
    const uint64_t h = half_k_major_operand(shared.stage(current));
    // The warpgroups take turns, so that one multiplies while the other prepares.
    named_barrier(1 + warpgroup, kConsumerWarpgroups * 128);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      wgmma_e4m3_128(acc[0], w[k][0], h + k * 2, !first || k > 0);
      wgmma_e4m3_128(acc[1], w[k][1], h + k * 2, !first || k > 0);
    }
    wgmma_commit();
    named_barrier_arrive(2 - warpgroup, kConsumerWarpgroups * 128);
    if (--left == 0) {
      finish(acc, w);
      return false;
    }
    cursor.advance();
    take(next);
    const bool turned = turns(cursor.stage);
    finish(acc, w);
    release(current);
    if (turned) multiply_by(acc, shared.stage(cursor.stage) + kBytesH + kBytesW);
    return true;
  }

  // The sums of an item, times the scales of their tokens.
  __device__ __forceinline__ void multiply(float (&acc)[2][64], int blocks) {
    Fragments w, next;
    take(w);
    for (int left = blocks; step(acc, w, next, left == blocks, left);) {
      if (!step(acc, next, w, false, left)) break;
    }
    multiply_by(acc, shared.stage(cursor.stage) + kBytesH + kBytesW + kBytesOfTokens);
    release(cursor.stage);
    cursor.advance();
  }

  // Neighbouring lanes swap halves, so that each stores eight columns of every other token.
  // tokens: rows of y, of tokens 8i + 2t + g % 2; negative: none.
  __device__ __forceinline__ void store(const float (&acc)[2][64], const int32_t (&tokens)[16],
                                        int first) const {
    const int column = first + warpgroup * 128 + warp * 32 + 4 * g;
    if (__all_sync(~0u, column >= problem.width)) return;
    float4 scales{};
    if (column < problem.width) {
      scales = __ldg(reinterpret_cast<const float4*>(problem.y_scales + column));
    }
    const bool odd = g % 2 != 0;
    const int stored = column - odd * 4;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const auto columns = [&](int token) {
        return uint2{
            gpu::bf16x2(acc[0][4 * i + token] * scales.x, acc[0][4 * i + 2 + token] * scales.y),
            gpu::bf16x2(acc[1][4 * i + token] * scales.z, acc[1][4 * i + 2 + token] * scales.w)};
      };
      const uint2 even_token = columns(0), odd_token = columns(1);
      const uint2 mine = odd ? odd_token : even_token, others = odd ? even_token : odd_token;
      const uint2 got{__shfl_xor_sync(~0u, others.x, 4), __shfl_xor_sync(~0u, others.y, 4)};
      const uint4 values =
          odd ? uint4{got.x, got.y, mine.x, mine.y} : uint4{mine.x, mine.y, got.x, got.y};
      if (tokens[i] < 0 || stored >= problem.width) continue;
      __nv_bfloat16* to = problem.y + int64_t{tokens[i]} * problem.width + stored;
      if (problem.add) {
        gpu::reduce_add16(to, values);
      } else {
        *reinterpret_cast<uint4*>(to) = values;
      }
    }
  }
};

__device__ __forceinline__ void consume(const Problem& problem, const Shared& shared) {
  Consumer consumer{problem, shared};
  if (consumer.warpgroup == 1) gpu::named_barrier_arrive(1, kConsumerWarpgroups * 128);
  ItemFeed feed{shared.feed};
  float acc[2][64];
  for (;;) {
    const int4 item = feed.take();
    if (item.x < 0) break;
    int32_t tokens[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      tokens[i] =
          problem.tiles.tokens[item.x * kTileTokens + 8 * i + 2 * consumer.t + consumer.g % 2];
      if (problem.y_rows != nullptr && tokens[i] >= 0) tokens[i] = problem.y_rows[tokens[i]];
    }
    const int blocks = problem.blocks(item);
    if (blocks > 0) {
      consumer.multiply(acc, blocks);
    } else {
      if (problem.add) continue;
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[0][i] = acc[1][i] = 0.0f;
    }
    consumer.store(acc, tokens, item.y);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    byte_down_sm90_kernel(const __grid_constant__ Problem problem) {
  extern __shared__ uint8_t memory[];
  const Shared shared(memory);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      // Every producer thread's gathers, and every producer warp's stores.
      gpu::barrier_init(shared.full + stage * 8, kProducers + kProducerWarps);
      gpu::barrier_init(shared.empty + stage * 8, kConsumerWarps);
    }
    ItemFeed{shared.feed}.init();
    gpu::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kProducers) {
    gpu::registers_decrease<kProducerRegisters>();
    produce(problem, shared);
  } else {
    gpu::registers_increase<kConsumerRegisters>();
    consume(problem, shared);
  }
  // Our successor waits only for us, so we must outlive our predecessor.
  gpu::wait_for_previous_kernel();
}

}  // namespace byte_down
}  // namespace

cudaError_t launch_byte_down_sm90(const Down& down, int ctas, cudaStream_t stream) {
  const byte_down::Problem problem{down.tiles, down.weight_bytes, down.y_scales, down.y,
                                   down.taken, down.width,        down.add,      down.y_rows};
  const auto kernel = byte_down::byte_down_sm90_kernel;
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, byte_down::kSharedBytes);
  if (status != cudaSuccess) return status;
  return gpu::launch_dependent(kernel, dim3(ctas), kThreads, byte_down::kSharedBytes, stream,
                               problem);
}

}  // namespace twell::tile_union
