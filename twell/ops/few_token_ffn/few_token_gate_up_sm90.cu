// SPDX-License-Identifier: Apache-2.0
// First kernel of the layer for 9 tokens and more: a cluster of four CTAs makes the gate of up to
// 192 neurons, and h of those that fire. Each CTA has a quarter of the width, of which it keeps
// its slice of x in shared memory for both products; tokens are the 64-row operand of WGMMA.
//   gate: the rows of the first weight through the copy engine, in a ring; partial sums to the CTA
//         that has their tokens; which neurons fire to all four
//   up:   the slices of the rows of w_up that fire, gathered into the same ring; partial sums as
//         before; h = gate * up
// Rows of w_down of neurons that fire are asked into the L2 for the next kernel. A launch runs its
// code once, so that fetching it counts: loops are not unrolled where nothing is gained.
#include <algorithm>

#include "twell/ops/few_token_ffn/few_token_kernels.h"
#include "twell/ops/few_token_ffn/split_exchange_sm90.cuh"
#include "twell/sm90/copy.cuh"
#include "twell/sm90/dependent_launch.cuh"
#include "twell/sm90/warp_mma.cuh"
#include "twell/sm90/wgmma.cuh"

namespace twell::few_token {

using namespace sm90;

namespace {

constexpr int kChunk = 64;                // values of k per stage
constexpr int kRowBytes = kChunk * 2;     // of a stage
constexpr int kBlocks = kMaxNeurons / 8;  // of neurons
constexpr int kHalf = kMaxNeurons / 2;    // neurons of a stage of the gate's ring
constexpr int kGateStage = kHalf * kRowBytes;
constexpr int kGateStages = 6;
constexpr int kRing = 80 * 1024;
constexpr int kApart = 64 * kRowBytes * 8;         // ring of 64 gathered rows; sums behind it
constexpr int kXChunks = 8;                        // of a CTA's slice that are there at once
constexpr int kXChunk = kTile * kRowBytes;         // bytes, of a tile of tokens
constexpr int kBarriers = 8;                       // stages that can be told apart
constexpr int kGatePitch = (kMaxNeurons + 8) * 2;  // bytes, of a token
constexpr int kWords = kMaxNeurons / 32;
constexpr int kGatherers = 128;
static_assert(kGateStages * kGateStage <= kRing && kGateStages <= kBarriers);
static_assert(kSentBytes<kMaxNeurons> <= kRing);
static_assert(kApart + kSentBytes<64> <= kRing);

template <int Tiles>
struct Layout {
  static constexpr int kThreads = Tiles * 128 + kGatherers;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kX = kRing;                               // [chunks, Tiles, 64, 64]
  static constexpr int kGate = kX + kXChunks * Tiles * kXChunk;  // [Tiles * 16, neurons]
  static constexpr int kBytes = kGate + Tiles * 16 * kGatePitch;
};

struct Barriers {
  uint64_t full[kBarriers], empty[kBarriers];         // of the gate's ring
  uint64_t gathered[kBarriers], released[kBarriers];  // of rows of w_up
  uint64_t x[kXChunks];
  uint64_t gate, fired, up;  // sent by the cluster
};

// max(0, value) as bf16 bits. NaN stays NaN.
__device__ __forceinline__ uint32_t relu_bf16(float value) {
  uint32_t bits;
  asm("cvt.rn.relu.bf16x2.f32 %0, 0f00000000, %1;" : "=r"(bits) : "f"(value));
  return bits & 0xffffu;
}

// Bit 2t + i: some token g fires for column 2t + i of a block; ballots of lanes 4g + t, by i.
__device__ __forceinline__ uint32_t columns_fired(uint32_t even, uint32_t odd) {
  uint32_t both = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t v = i == 0 ? even : odd;
    v |= v >> 16;
    v |= v >> 8;
    v = (v | v >> 4) & 0xf;
    v = (v | v << 2) & 0x33;
    both |= ((v | v << 1) & 0x55) << i;
  }
  return both;
}

template <int Tiles>
class Kernel {
  using L = Layout<Tiles>;

 public:
  struct Shared {
    Barriers barriers;
    uint32_t own[Tiles][kWords];                   // neurons that fire for this CTA's tokens
    uint4 fired[kWords];                           // by CTA
    uint16_t list[kMaxNeurons];                    // those that fire at all, ascending
    __align__(16) uint16_t out[L::kWarps][8][16];  // [neuron, token]
    int nnz;
  };

  __device__ __forceinline__ Kernel(const SplitGateUp& params, Shared& shared, uint8_t* memory)
      : q_(params),
        p_(params.problem),
        shared_(shared),
        ring_(smem_address(memory)),
        warp_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        rank_(static_cast<int>(cluster_rank())),
        k_begin_(rank_ * params.slice_chunks * kChunk),
        chunks_(max(min((p_.width - k_begin_ + kChunk - 1) / kChunk, params.slice_chunks), 0)),
        turn_(chunks_ > 0 ? static_cast<int>(blockIdx.x) / kSplit % chunks_ : 0),
        keep_x_(chunks_ <= kXChunks),
        sends_(multiplies() && warp_ * 16 < p_.tokens) {}

  __device__ __forceinline__ void run() {
    prepare();
    if (warp_ != kProducer) wait_for_previous_kernel();
    // Not before: launching a kernel would come before the end of the one in front.
    if (warp_ == 0) allow_next_kernel();
    const int clusters = static_cast<int>(gridDim.x) / kSplit;
    const int passes = (p_.ffn + q_.neurons - 1) / q_.neurons;
    for (int pass = static_cast<int>(blockIdx.x) / kSplit; pass < passes; pass += clusters) {
      first_ = pass * q_.neurons;
      gate();
      list();
      if (total_ > 0) hidden();
      fence_async_shared();  // the ring goes back to the copy engine
      if (pass + clusters < passes) __syncthreads();
      first_pass_ = false;
    }
    count();
  }

 private:
  static constexpr int kProducer = Tiles * 4;  // warp

  __device__ __forceinline__ bool multiplies() const { return warp_ < Tiles * 4; }
  // Tiles of tokens from `first` on, at most `most`, of which this CTA adds some up.
  __device__ __forceinline__ int own_tiles(int first, int most) const {
    return max(min((p_.tokens - rank_ * 16 + kTile - 1) / kTile - first, most), 0);
  }
  __device__ __forceinline__ uint32_t x_place(int index, int tile) const {
    return ring_ + L::kX + (index % kXChunks * Tiles + tile) * kXChunk;
  }
  __device__ __forceinline__ uint32_t barrier(const uint64_t* of, int index) const {
    return smem_address(of) + index % kBarriers * 8;
  }
  // Chunks are taken from another one on in each cluster, so that not all read the same of x at
  // one time.
  __device__ __forceinline__ int chunk_k(int c) const {
    int at = c + turn_;
    if (at >= chunks_) at -= chunks_;
    return k_begin_ + at * kChunk;
  }
  static __device__ __forceinline__ uint32_t phase(int index) { return index / kBarriers & 1; }

  __device__ __forceinline__ void prepare() {
    const int thread = static_cast<int>(threadIdx.x);
    Barriers& b = shared_.barriers;
    if (warp_ == kProducer) {
      if (lane_ < kBarriers) {
        barrier_init(smem_address(b.full + lane_), 1);
        barrier_init(smem_address(b.empty + lane_), Tiles);
        barrier_init(smem_address(b.gathered + lane_), L::kThreads);
        barrier_init(smem_address(b.released + lane_), Tiles);
        barrier_init(smem_address(b.x + lane_), 1);
      } else if (lane_ == kBarriers) {
        barrier_init(smem_address(&b.gate), 1);
        barrier_init(smem_address(&b.fired), 1);
        barrier_init(smem_address(&b.up), 1);
        prefetch_tensor_map(&q_.map_x);
        prefetch_tensor_map(&q_.map_first);
      }
      fence_barrier_init();
    }
    if (thread < Tiles * kWords) shared_.own[0][thread] = 0;
    if (thread == 0) {
      shared_.nnz = 0;
    }
    __syncthreads();
    cluster_arrive_relaxed();
    cluster_wait();
  }

  // --- products --------------------------------------------------------------------------------
  // halves[i] += x times that half of the pass's neurons.
  __device__ __forceinline__ void multiply_first(float (&halves)[2][kHalf / 2]) {
    int stage = 0, step = step_;
#pragma unroll 1
    for (int c = 0; c < chunks_; ++c) {
      const int x_index = x_step_ + c;
      barrier_wait(barrier(shared_.barriers.x, x_index), phase(x_index));
      const uint64_t a = k_major_operand(x_place(x_index, warp_ / 4));
#pragma unroll
      for (int half = 0; half < 2; ++half, ++step) {
        barrier_wait(barrier(shared_.barriers.full, step), phase(step));
        const uint64_t b = k_major_operand(ring_ + stage * kGateStage);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma<kHalf, false>(halves[half], a + k * 2, b + k * 2, true);
        wgmma_commit();
        wgmma_wait<1>();
        if (step > step_) release(step - 1);
        stage = stage + 1 == kGateStages ? 0 : stage + 1;
      }
    }
    wgmma_wait<0>();
    if (chunks_ > 0) release(step - 1);
  }
  __device__ __forceinline__ void release(int step) {
    if (threadIdx.x % 128 == 0) barrier_arrive(barrier(shared_.barriers.empty, step));
  }

  // acc += x times up to Rows gathered rows.
  template <int Rows, int Pitch, int Stages, int Sets>
  __device__ __forceinline__ void multiply_gathered(float (&acc)[Sets][Rows / 2]) {
    const uint64_t* full = shared_.barriers.gathered;
    const uint64_t* empty = shared_.barriers.released;
    const int step = up_step_, x_step = x_step_;
    const bool at_once = chunks_ <= Stages;
    if (at_once) {
      barrier_wait(barrier(full, step), phase(step));
      fence_async_shared();
    }
    int stage = 0;
#pragma unroll 1
    for (int c = 0; c < chunks_; ++c) {
      const int x_index = x_step + c;
      barrier_wait(barrier(shared_.barriers.x, x_index), phase(x_index));
      if (!at_once) {
        barrier_arrive(barrier(full, step + c));  // this warp gathers nothing then
        barrier_wait(barrier(full, step + c), phase(step + c));
        fence_async_shared();
      }
      wgmma_fence();
      const uint64_t a = k_major_operand(x_place(x_index, warp_ / 4));
      const uint64_t b = k_major_operand(ring_ + stage * (Pitch * kRowBytes));
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma<Rows, false>(acc[k % Sets], a + k * 2, b + k * 2, true);
      wgmma_commit();
      wgmma_wait<1>();
      if (c > 0 && !at_once && threadIdx.x % 128 == 0) barrier_arrive(barrier(empty, step + c - 1));
      stage = stage + 1 == Stages ? 0 : stage + 1;
    }
    wgmma_wait<0>();
    if (threadIdx.x % 128 == 0) barrier_arrive(barrier(empty, at_once ? step : step + chunks_ - 1));
    if constexpr (Sets == 2) {
#pragma unroll
      for (int i = 0; i < Rows / 2; ++i) acc[0][i] += acc[1][i];
    }
  }

  // A warp. The slots of x that are filled are free: their last use lies kXChunks chunks back.
  __device__ __forceinline__ void load_x(int c) {
    if (!elect_one()) return;
    const uint32_t full = barrier(shared_.barriers.x, x_step_ + c);
    barrier_arrive_expect(full, Tiles * kXChunk);
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
      tensor_load(x_place(x_step_ + c, tile), &q_.map_x, chunk_k(c), tile * kTile, full);
    }
  }
  __device__ __forceinline__ void load_first(int i, int stage) {
    const int rows = q_.neurons / 2;
    if (!elect_one()) return;
    const uint32_t full = barrier(shared_.barriers.full, step_ + i);
    barrier_arrive_expect(full, rows * kRowBytes);
    tensor_load(ring_ + stage * kGateStage, &q_.map_first, chunk_k(i / 2), first_ + i % 2 * rows,
                full);
  }
  __device__ __forceinline__ void produce() {
    const bool early = first_pass_ && p_.early_weights;
    if (first_pass_ && !early) wait_for_previous_kernel();
#pragma unroll 1
    for (int i = 0; i < min(2 * chunks_, kGateStages); ++i) load_first(i, i);
    if (early) wait_for_previous_kernel();
    if (first_pass_ || !keep_x_) {
#pragma unroll 1
      for (int c = 0; c < min(chunks_, kXChunks); ++c) load_x(c);
    }
    int stage = 0;
#pragma unroll 1
    for (int i = kGateStages; i < 2 * chunks_; ++i) {
      const int before = step_ + i - kGateStages;
      barrier_wait(barrier(shared_.barriers.empty, before), phase(before));
      load_first(i, stage);
      if (i % 2 == 0 && i / 2 >= kXChunks) load_x(i / 2);
      stage = stage + 1 == kGateStages ? 0 : stage + 1;
    }
  }

  // --- gate ------------------------------------------------------------------------------------
  __device__ __forceinline__ void gate() {
    float acc[2][kHalf / 2];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) acc[i % 2][i / 2] = 0.0f;
    if (multiplies()) multiply_first(acc);
    if (warp_ == kProducer) produce();
    __syncwarp();
    step_ += 2 * chunks_;
    if (!keep_x_) x_step_ += chunks_;
    constexpr int kSent = kSentBytes<kMaxNeurons>, kAtOnce = Tiles * kSent <= kRing ? Tiles : 1;
#pragma unroll 1
    for (int tile = 0; tile < Tiles; tile += kAtOnce) {
      const int own = own_tiles(tile, kAtOnce);
      cluster_arrive_relaxed();
      cluster_wait();  // nobody needs its ring any more
      const uint32_t sent = smem_address(&shared_.barriers.gate);
      if (threadIdx.x == 0) barrier_arrive_expect(sent, own * kSent);
      if (sends_ && warp_ / 4 >= tile && warp_ / 4 < tile + kAtOnce) {
        const uint32_t place = ring_ + (warp_ / 4 - tile) * kSent;
        send_sums<kHalf>(acc[0], place, sent, rank_, warp_ % 4);
        send_sums<kHalf>(acc[1], place + kSent / 2, sent, rank_, warp_ % 4);
      }
      barrier_wait(sent, gate_phase_);
      gate_phase_ ^= 1;
#pragma unroll 1
      for (int i = 0; i < own; ++i) {
        constexpr int kMost = (kBlocks + L::kWarps - 1) / L::kWarps;
        const int blocks = q_.neurons / 8;
        float4 sums[kMost];
#pragma unroll
        for (int j = 0; j < kMost; ++j) {
          const int b = min(warp_ + j * L::kWarps, blocks - 1), half = b >= blocks / 2;
          sums[j] = add_sums(ring_ + i * kSent + half * (kSent / 2), b - half * (blocks / 2),
                             kSent / 2 / kSplit);
        }
#pragma unroll
        for (int j = 0; j < kMost; ++j) {
          const int b = warp_ + j * L::kWarps;
          if (b < blocks) finish_gate(tile + i, b, sums[j]);
        }
      }
    }
  }
  __device__ __forceinline__ void finish_gate(int tile, int block, const float4& sum) {
    const int token = tile * kTile + rank_ * 16 + lane_ / 4;
    const bool exists = first_ + block * 8 + lane_ % 4 * 2 < p_.ffn;
    const bool low = exists && token < p_.tokens, high = exists && token + 8 < p_.tokens;
    const uint32_t g0 = low ? relu_bf16(sum.x) : 0, g1 = low ? relu_bf16(sum.y) : 0;
    const uint32_t g2 = high ? relu_bf16(sum.z) : 0, g3 = high ? relu_bf16(sum.w) : 0;
    const uint32_t at = gate_place(tile, lane_ / 4) + block * 16 + lane_ % 4 * 4;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(g0 | g1 << 16) : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + 8 * kGatePitch), "r"(g2 | g3 << 16)
                 : "memory");
    const uint32_t b0 = __ballot_sync(~0u, g0 != 0), b1 = __ballot_sync(~0u, g1 != 0);
    const uint32_t b2 = __ballot_sync(~0u, g2 != 0), b3 = __ballot_sync(~0u, g3 != 0);
    nnz_ += __popc(b0) + __popc(b1) + __popc(b2) + __popc(b3);
    if (lane_ == 0) {
      reinterpret_cast<uint8_t*>(shared_.own[tile])[block] =
          static_cast<uint8_t>(columns_fired(b0 | b2, b1 | b3));
    }
  }
  __device__ __forceinline__ uint32_t gate_place(int tile, int token) const {
    return ring_ + L::kGate + (tile * 16 + token) * kGatePitch;
  }

  // Tells the cluster which neurons fire, and lists those that do for one of its tokens.
  __device__ __forceinline__ void list() {
    const int thread = static_cast<int>(threadIdx.x);
    const uint32_t sent = smem_address(&shared_.barriers.fired);
    if (thread == 0) barrier_arrive_expect(sent, kSplit * kWords * 4);
    __syncthreads();
    if (thread < kSplit * kWords) {
      const int to = thread / kWords, word = thread % kWords;
      uint32_t mine = shared_.own[0][word];
      if constexpr (Tiles > 1) mine |= shared_.own[1][word];
      store_remote4(remote_address(smem_address(&shared_.fired[word]) + rank_ * 4, to), mine,
                    remote_address(sent, to));
    }
    if (p_.up != nullptr && warp_ < kWords) {
      const uint32_t mine = shared_.own[0][warp_];
      if (__popc(mine) <= 12 && (mine >> lane_ & 1) != 0) {
        bulk_prefetch(p_.up + int64_t{first_ + thread} * p_.width, p_.width * 2);
      }
    }
    barrier_wait(sent, fired_phase_);
    fired_phase_ ^= 1;
    int before = 0;
    uint32_t mine = 0;
    total_ = 0;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const uint4 by_cta = shared_.fired[word];
      const uint32_t bits = by_cta.x | by_cta.y | by_cta.z | by_cta.w;
      if (word == warp_) {
        mine = bits;
        before = total_;
      }
      total_ += __popc(bits);
    }
    if (mine >> lane_ & 1) {
      shared_.list[before + __popc(mine & ((1u << lane_) - 1))] = static_cast<uint16_t>(thread);
    }
    if (rank_ == 0 && lane_ == 0 && warp_ * 32 < min(q_.neurons, p_.ffn - first_)) {
      p_.fired[first_ / 32 + warp_] = mine;
    }
    __syncthreads();
  }

  // --- up --------------------------------------------------------------------------------------
  __device__ __forceinline__ void hidden() {
    if (p_.up == nullptr) {
      if (!multiplies()) ask_for_down();
      finish_tiles(0, own_tiles(0, Tiles), 0, 0);
    } else if (total_ <= 64) {
      up<64, 64, 8>();
    } else if (total_ <= 80) {
      up<96, 80, 8>();
    } else if (total_ <= 128) {
      up<128, 128, 5>();
    } else {
      up<192, 192, 3>();
    }
  }

  template <int Rows, int Pitch, int Stages>
  __device__ __forceinline__ void up() {
    static_assert(Stages * Pitch * kRowBytes <= kRing && Stages <= kBarriers);
    constexpr int kSets = Rows <= 96 ? 2 : 1;  // that are multiplied into in turns
    float acc[kSets][Rows / 2];
#pragma unroll
    for (int i = 0; i < kSets * Rows / 2; ++i) acc[i % kSets][i / kSets] = 0.0f;
    if (chunks_ <= Stages) {
      gather<Pitch>();
    } else if (!multiplies()) {
      gather_chunks<Pitch, Stages>();
    }
    if (multiplies()) {
      multiply_gathered<Rows, Pitch, Stages>(acc);
    } else {
      // Not before the rows of w_up are there: they would wait behind.
      const int last = chunks_ <= Stages ? up_step_ : up_step_ + chunks_ - 1;
      barrier_wait(barrier(shared_.barriers.gathered, last), phase(last));
      ask_for_down();
    }
    up_step_ += chunks_ <= Stages ? 1 : chunks_;
    if (!keep_x_) x_step_ += chunks_;
    constexpr int kSent = kSentBytes<Rows>, kAtOnce = Tiles * kSent <= kRing ? Tiles : 1;
    constexpr bool kBeside = Rows == 64 && kApart + Tiles * kSent <= kRing;
    constexpr int kPlace = kBeside ? kApart : 0;
#pragma unroll 1
    for (int tile = 0; tile < Tiles; tile += kAtOnce) {
      const int own = own_tiles(tile, kAtOnce);
      if constexpr (!kBeside) {
        __syncwarp();
        cluster_arrive_relaxed();
        cluster_wait();
      }
      const uint32_t sent = smem_address(&shared_.barriers.up);
      if (threadIdx.x == 0) barrier_arrive_expect(sent, own * kSent);
      if (sends_ && warp_ / 4 >= tile && warp_ / 4 < tile + kAtOnce) {
        send_sums<Rows>(acc[0], ring_ + kPlace + (warp_ / 4 - tile) * kSent, sent, rank_,
                        warp_ % 4);
      }
      barrier_wait(sent, up_phase_);
      up_phase_ ^= 1;
      finish_tiles(tile, own, ring_ + kPlace, kSent);
    }
  }

  // This CTA's slices of the rows that fire: row by row, which memory likes best, where there is
  // room for all of them.
  template <int Rows>
  __device__ __forceinline__ void gather() {
    static_assert(Rows <= 32 * L::kWarps);
    const int at = lane_ * L::kWarps + warp_, mine = at < total_ ? shared_.list[at] : 0;
#pragma unroll 2
    for (int i = 0; i * L::kWarps + warp_ < total_; ++i) {
      const int row = i * L::kWarps + warp_;
      const __nv_bfloat16* from = p_.up + int64_t{first_ + __shfl_sync(~0u, mine, i)} * p_.width;
#pragma unroll 2
      for (int piece = lane_; piece < chunks_ * 8; piece += 32) {
        const int k = chunk_k(piece / 8) + piece % 8 * 8;
        gather16(ring_ + (piece / 8 * Rows + row) * kRowBytes + ((piece ^ row) % 8) * 16,
                 k < p_.width ? from + k : from, k < p_.width);
      }
    }
    gather_arrive(barrier(shared_.barriers.gathered, up_step_));
  }
  // A thread has a 16-byte piece of every 16th row.
  template <int Rows, int Stages>
  __device__ __forceinline__ void gather_chunks() {
    constexpr int kEvery = kGatherers / 8;
    const int me = static_cast<int>(threadIdx.x) - Tiles * 128, row = me / 8, piece = me % 8;
    const uint32_t to = ring_ + row * kRowBytes + (piece ^ (row % 8)) * 16;
#pragma unroll 1
    for (int at = me; at < total_; at += kGatherers) {
      bulk_prefetch(p_.up + int64_t{first_ + shared_.list[at]} * p_.width + k_begin_,
                    min(p_.width - k_begin_, chunks_ * kChunk) * 2);
    }
    const __nv_bfloat16* from[Rows / kEvery];
#pragma unroll
    for (int i = 0; i < Rows / kEvery; ++i) {
      const int at = i * kEvery + row;
      from[i] = nullptr;
      if (at < total_) from[i] = p_.up + int64_t{first_ + shared_.list[at]} * p_.width;
    }
    int stage = 0;
#pragma unroll 1
    for (int c = 0; c < chunks_; ++c) {
      if (c >= Stages) {
        const int before = up_step_ + c - Stages;
        barrier_wait(barrier(shared_.barriers.released, before), phase(before));
      }
      if (!keep_x_ && warp_ == kProducer) load_x(c);
      const int k = chunk_k(c) + piece * 8;
#pragma unroll
      for (int i = 0; i < Rows / kEvery; ++i) {
        if (from[i] != nullptr) {  // what stays there otherwise only reaches that row's own sums
          gather16(to + stage * (Rows * kRowBytes) + i * kEvery * kRowBytes,
                   k < p_.width ? from[i] + k : p_.up, k < p_.width);
        }
      }
      gather_arrive(barrier(shared_.barriers.gathered, up_step_ + c));
      stage = stage + 1 == Stages ? 0 : stage + 1;
    }
  }
  __device__ __forceinline__ void ask_for_down() {
    const int at = (static_cast<int>(threadIdx.x) - Tiles * 128) * kSplit + rank_;
    if (at < total_) {
      bulk_prefetch(p_.down + int64_t{first_ + shared_.list[at]} * p_.width, p_.width * 2);
    }
  }

  // h of neurons that fire and this CTA's tokens; sums: 0 without a gate.
  __device__ __forceinline__ void finish_tiles(int tile, int tiles, uint32_t sums, int sent_bytes) {
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
#pragma unroll 1
      for (int b = warp_; b * 8 < total_; b += L::kWarps) {
        float4 up{1.0f, 1.0f, 1.0f, 1.0f};
        if (sums != 0) up = add_sums(sums + i * sent_bytes, b, sent_bytes / kSplit);
        finish_hidden(tile + i, b * 8, up);
      }
    }
  }
  __device__ __forceinline__ void finish_hidden(int tile, int begin, const float4& up) {
    const int token = lane_ / 4, column = lane_ % 4 * 2;
    auto& out = shared_.out[warp_];
    const float values[4] = {up.x, up.y, up.z, up.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = begin + column + i % 2, half = i / 2 * 8;
      uint16_t gate = 0;
      if (at < total_) {
        asm volatile("ld.shared.u16 %0, [%1];"
                     : "=h"(gate)
                     : "r"(gate_place(tile, token + half) + shared_.list[at] * 2));
      }
      const float h = __uint_as_float(uint32_t{gate} << 16) * values[i];
      out[column + i % 2][token + half] = gate == 0 ? 0 : __bfloat16_as_ushort(__float2bfloat16(h));
    }
    __syncwarp();
    const int neuron = lane_ / 2, half = lane_ % 2 * 8;
    if (lane_ < 16 && begin + neuron < total_) {
      const int64_t row = first_ + shared_.list[begin + neuron];
      *reinterpret_cast<uint4*>(p_.hidden + row * (Tiles * kTile) + tile * kTile + rank_ * 16 +
                                half) = *reinterpret_cast<const uint4*>(&out[neuron][half]);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void count() {
    if (p_.activity == nullptr) return;
    if (lane_ == 0 && nnz_ > 0) atomicAdd(&shared_.nnz, nnz_);
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (shared_.nnz > 0) {
      atomicAdd(&p_.activity->nnz, static_cast<unsigned long long>(shared_.nnz));
    }
    if (blockIdx.x == 0) {
      atomicAdd(&p_.activity->tokens, static_cast<unsigned long long>(p_.tokens));
    }
  }

  const SplitGateUp& q_;
  const GateUp& p_;
  Shared& shared_;
  const uint32_t ring_;
  const int warp_, lane_, rank_, k_begin_, chunks_;
  const int turn_;
  const bool keep_x_;  // all of the slice is there at once
  const bool sends_;
  int first_ = 0;               // neuron of this pass
  int total_ = 0;               // neurons of it that fire
  int step_ = 0, up_step_ = 0;  // stages of the rings before this pass
  int x_step_ = 0;              // chunks of x before this product; 0 where they stay
  int nnz_ = 0;
  uint32_t gate_phase_ = 0, fired_phase_ = 0, up_phase_ = 0;
  bool first_pass_ = true;
};

template <int Tiles>
__global__ void __cluster_dims__(kSplit, 1, 1) __maxnreg__(Tiles == 1 ? 160 : 168)
    gate_up_sm90_kernel(const __grid_constant__ SplitGateUp params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ typename Kernel<Tiles>::Shared shared;
  Kernel<Tiles>(params, shared, memory).run();
}

// The kernel behind this one has to fit beside it: that takes all of the shared memory.
template <int Tiles>
cudaError_t allow_shared_memory() {
  const auto* kernel = reinterpret_cast<const void*>(gate_up_sm90_kernel<Tiles>);
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout<Tiles>::kBytes);
  if (status != cudaSuccess) return status;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
}

template <int Tiles>
cudaError_t count_clusters(int* clusters) {
  const cudaError_t status = allow_shared_memory<Tiles>();
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kSplit, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kSplit);
  config.blockDim = dim3(Layout<Tiles>::kThreads);
  config.dynamicSmemBytes = Layout<Tiles>::kBytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(clusters, gate_up_sm90_kernel<Tiles>, &config);
}

template <int Tiles>
cudaError_t launch(const SplitGateUp& params, int clusters, cudaStream_t stream) {
  const cudaError_t status = allow_shared_memory<Tiles>();
  if (status != cudaSuccess) return status;
  return launch_dependent(gate_up_sm90_kernel<Tiles>, dim3(clusters * kSplit),
                          Layout<Tiles>::kThreads, Layout<Tiles>::kBytes, stream, params);
}

}  // namespace

cudaError_t count_gate_up_clusters_sm90(int tiles, int* clusters) {
  return tiles == 1 ? count_clusters<1>(clusters) : count_clusters<2>(clusters);
}

cudaError_t launch_gate_up_sm90(const SplitGateUp& params, int tiles, int clusters,
                                cudaStream_t stream) {
  return tiles == 1 ? launch<1>(params, clusters, stream) : launch<2>(params, clusters, stream);
}

}  // namespace twell::few_token
