// SPDX-License-Identifier: Apache-2.0
// Feed-forward layer for 9 to 64 tokens, as two kernels that run side by side.
//
// 1. gate_up: a cluster of four CTAs computes the gate of up to 192 neurons and h of the active
// ones. Each CTA has a quarter of the width and keeps its slice of x in shared memory for both
// products; tokens are the 64-row operand of WGMMA.
//   gate: TMA loads rows of the first weight into a ring buffer; partial sums go to the CTA that
//         owns their tokens; the set of active neurons goes to all four CTAs
//   up:   slices of active rows of w_up are gathered into the same ring buffer; partial sums as
//         before; h = gate * up
// Rows of w_down of active neurons are prefetched into the L2 for the next kernel. Each launch runs
// its code once, so instruction fetches matter: loops are unrolled only where it pays.
//
// 2. split_down: y = h w_down over active neurons. A cluster of four CTAs computes 64 columns of y:
// each CTA takes a quarter of the active neurons, gathers 128 bytes of each one's row and its row
// of h into a ring buffer, and multiplies on WGMMA, tokens as the 64-row operand; then each adds up
// 16 tokens. Which neurons are active is published before h is ready, so the weights are loaded by
// the time gate_up ends.
#include <algorithm>

#include "twell/base/rounding.h"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/sm90/barrier.cuh"
#include "twell/gpu/sm90/copy.cuh"
#include "twell/gpu/sm90/tensor_map.h"
#include "twell/gpu/sm90/wgmma.cuh"
#include "twell/gpu/warp_mma.cuh"
#include "twell/ops/ffn/few_tokens/few_token_sm90.cuh"

namespace twell::few_token {

using namespace gpu;

namespace {

constexpr int kSplitTokens = 64;  // most tokens
constexpr int kMaxNeurons = 192;  // most neurons of a cluster at a time
constexpr int kWordNeurons = 32;  // neurons per word of Hidden::fired
static_assert(kMaxFewTokens == kSplitTokens);

struct GateUp {
  const __nv_bfloat16* up;    // [F, D], null without a gate
  const __nv_bfloat16* down;  // [F, D] rows of active neurons are prefetched into the L2
  Hidden hidden;              // kWordNeurons per word
  ActivityCuda* activity;     // counts, or null
  int tokens, width, ffn;
  bool early_weights;  // the first weight may be read before the predecessor has finished
  bool squared;        // f(g) = g^2
  bool up_relu;        // dReLU
  uint32_t cut;        // of FATReLU
};

// The first weight is w_gate, or w_up without a gate.
struct SplitGateUp {
  CUtensorMap map_x;      // [M, D] in boxes of 64 rows
  CUtensorMap map_first;  // [F, D] in boxes of neurons / 2 rows
  GateUp problem;
  int neurons;       // neurons of a cluster at a time: a multiple of 64, at most kMaxNeurons
  int slice_chunks;  // chunks of 64 columns per CTA of a cluster: a quarter of the width
};

// Reduction over a cluster. Each of four CTAs computes a part of the terms of a product of 64
// tokens, and then adds up the partial sums of 16 tokens, in the order of the CTAs. A warp's
// accumulators hold exactly the 16 tokens that one CTA adds up, so they are sent there as they are,
// through distributed shared memory: [from CTA][block of 8 columns][lane] float4.

constexpr int kSplit = 4;         // CTAs of a cluster
constexpr int kBlockBytes = 512;  // bytes that a warp sends for 8 columns
template <int Columns>
constexpr int kSentBytes = kSplit*(Columns / 8) * kBlockBytes;  // bytes that a CTA receives

// Tells all CTAs of the cluster that they may write their sums here, on barriers of kSplit arrivals
// at the same address in each of them. The first warp calls it once its warpgroup no longer uses
// that memory. The cluster barrier is not used, because compute-sanitizer hangs if warps work
// between arriving at it and waiting.
__device__ __forceinline__ void tell_room(const uint64_t* barrier) {
  if (threadIdx.x < kSplit) {
    gpu::barrier_arrive_cluster(gpu::smem_address(barrier), threadIdx.x);
  }
}

// Sends blocks of 8 columns of a warp, if it `sends` any, to `place` in another CTA. place and
// barrier are remote addresses.
template <int Block, int End, int Registers>
__device__ __forceinline__ void send_blocks(const float (&acc)[Registers], uint32_t place,
                                            uint32_t barrier, bool sends) {
  if constexpr (Block < End) {
    gpu::store_remote16<Block * kBlockBytes>(place, acc[4 * Block], acc[4 * Block + 1],
                                             acc[4 * Block + 2], acc[4 * Block + 3], barrier,
                                             sends);
    send_blocks<Block + 1, End>(acc, place, barrier, sends);
  }
}
// Address of this lane's part of the sums from CTA `rank`.
__device__ __forceinline__ uint32_t sums_place(uint32_t place, int rank, int blocks) {
  return place + static_cast<uint32_t>(rank * blocks) * kBlockBytes + threadIdx.x % 32 * 16;
}
// Sends a warp's `Columns` columns to `place` in CTA `to`.
template <int Columns, int Registers>
__device__ __forceinline__ void send_sums(const float (&acc)[Registers], uint32_t place,
                                          uint32_t barrier, int rank, int to, bool sends = true) {
  send_blocks<0, Columns / 8>(acc, gpu::remote_address(sums_place(place, rank, Columns / 8), to),
                              gpu::remote_address(barrier, to), sends);
}

__device__ __forceinline__ float4 load_sums(uint32_t place) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(place)
               : "memory");
  return v;
}
// Sum over the CTAs for a block of 8 columns; `stride` is kSentBytes / kSplit. Lane 4g + t gets {x,
// y}: token g, columns 2t, 2t + 1; {z, w}: the same of token g + 8.
__device__ __forceinline__ float4 add_sums(uint32_t place, int block, uint32_t stride) {
  float4 sum{};
#pragma unroll
  for (int from = 0; from < kSplit; ++from) {
    const float4 v = load_sums(place + from * stride + block * kBlockBytes + threadIdx.x % 32 * 16);
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
  }
  return sum;
}

}  // namespace

namespace gate_up {
namespace {

// Shared memory of a CTA of gate_up.

constexpr int kChunk = 64;              // values of k per stage
constexpr int kRowBytes = kChunk * 2;   // bytes of a row of a stage
constexpr int kHalf = kMaxNeurons / 2;  // neurons per stage of the gate's ring buffer
constexpr int kGateStage = kHalf * kRowBytes;
constexpr int kGateStages = 6;
constexpr int kRing = 80 * 1024;
constexpr int kXChunks = 8;                        // chunks of x that fit at once
constexpr int kFewRows = 80;                       // rows of w_up gathered at once
constexpr int kApart = 64 * kRowBytes * kXChunks;  // bytes of 64 of these rows; the sums follow
constexpr int kXChunk = kSplitTokens * kRowBytes;  // bytes
constexpr int kBarriers = 8;  // barriers per kind; stages are told apart modulo this
constexpr int kGatePitch = (kMaxNeurons + 8) * 2;  // bytes per token
constexpr int kWords = kMaxNeurons / 32;
constexpr int kGatherers = 128;
static_assert(kGateStages * kGateStage <= kRing && kGateStages <= kBarriers);
static_assert(kSentBytes<kMaxNeurons> <= kRing && 4 * kGateStage <= kRing);
static_assert(kFewRows * kRowBytes * kXChunks <= kRing && kSentBytes<kFewRows> <= kRing);
static_assert(kApart + kSentBytes<64> <= kRing);

constexpr int kThreads = 128 + kGatherers;  // one warpgroup multiplies, the other gathers
constexpr int kWarps = kThreads / 32;
constexpr int kX = kRing;                       // [chunks, 64 tokens, 64]
constexpr int kGate = kX + kXChunks * kXChunk;  // [16 tokens, neurons]
constexpr int kBytes = kGate + 16 * kGatePitch;

struct Barriers {
  uint64_t full[kBarriers], empty[kBarriers];         // of the gate's ring buffer
  uint64_t gathered[kBarriers], released[kBarriers];  // of rows of w_up
  uint64_t x[kXChunks];
  uint64_t room[2];             // room for sums of each half of the gate, in all CTAs
  uint64_t gate[2], fired, up;  // data sent by the cluster
};

// Bit 2t + i says whether column 2t + i of a block is active for any token g; the arguments are
// ballots of lanes 4g + t, for i = 0 and 1.
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

class Kernel {
 public:
  struct Shared {
    Barriers barriers;
    uint32_t own[kWords];                       // neurons active for this CTA's tokens
    uint4 fired[kWords];                        // the same for each CTA
    uint16_t list[kMaxNeurons];                 // neurons active for any token, ascending
    __align__(16) uint16_t out[kWarps][8][16];  // [neuron, token]
    int nnz;
    int released;  // whether the predecessor has ended
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
    begin();
    meet();
    if (warp_ != kProducer) wait_for_previous_kernel();
    if (warp_ == 0) {
      set_released();
      // Trigger dependents only after griddepcontrol.wait; earlier would delay our own wait.
      allow_next_kernel();
    }
    const int clusters = static_cast<int>(gridDim.x) / kSplit;
    const int passes = (p_.ffn + q_.neurons - 1) / q_.neurons;
    for (int pass = static_cast<int>(blockIdx.x) / kSplit; pass < passes; pass += clusters) {
      first_ = pass * q_.neurons;
      gate();
      list();
      if (total_ > 0) {
        hidden();
      } else {
        publish();
      }
      fence_async_shared();  // TMA writes the ring buffer next
      if (pass + clusters < passes) __syncthreads();
      first_pass_ = false;
    }
    count();
  }

 private:
  __device__ __forceinline__ void prepare() {
    const int thread = static_cast<int>(threadIdx.x);
    Barriers& b = shared_.barriers;
    if (warp_ == kProducer) {
      if (lane_ < kBarriers) {
        barrier_init(smem_address(b.full + lane_), 1);
        barrier_init(smem_address(b.empty + lane_), 1);
        barrier_init(smem_address(b.gathered + lane_), kThreads);
        barrier_init(smem_address(b.released + lane_), 1);
        barrier_init(smem_address(b.x + lane_), 1);
      } else if (lane_ == kBarriers) {
        barrier_init(smem_address(b.room), kSplit);
        barrier_init(smem_address(b.room + 1), kSplit);
        barrier_init(smem_address(b.gate), 1);
        barrier_init(smem_address(b.gate + 1), 1);
        barrier_init(smem_address(&b.fired), 1);
        barrier_init(smem_address(&b.up), 1);
        prefetch_tensor_map(&q_.map_x);
        prefetch_tensor_map(&q_.map_first);
      }
      fence_barrier_init();
      __syncwarp();
    }
    if (thread < kWords) shared_.own[thread] = 0;
    if (thread == 0) {
      shared_.nnz = 0;
      shared_.released = 0;
    }
  }
  // Waits until all barriers of the cluster are initialised.
  __device__ __forceinline__ void meet() {
    __syncthreads();
    cluster_arrive_relaxed();
    cluster_wait();
  }

  // Adds the active neurons of this CTA to the layer's counts.
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

  static constexpr int kProducer = 4;  // the warp that loads

  __device__ __forceinline__ bool multiplies() const { return warp_ < kProducer; }
  // Whether this CTA adds up any tokens.
  __device__ __forceinline__ bool adds() const { return p_.tokens > rank_ * 16; }
  __device__ __forceinline__ uint32_t x_place(int index) const {
    return ring_ + kX + index % kXChunks * kXChunk;
  }
  __device__ __forceinline__ uint32_t barrier(const uint64_t* of, int index) const {
    return smem_address(of) + index % kBarriers * 8;
  }
  // Each cluster starts at a different chunk, so that they do not all read the same part of x at
  // the same time.
  __device__ __forceinline__ int chunk_k(int c) const {
    int at = c + turn_;
    if (at >= chunks_) at -= chunks_;
    return k_begin_ + at * kChunk;
  }
  static __device__ __forceinline__ uint32_t phase(int index) { return index / kBarriers & 1; }

  __device__ __forceinline__ uint32_t gate_place(int token) const {
    return ring_ + kGate + token * kGatePitch;
  }

  // Warp 0 keeps it up to date for the warp that loads.
  __device__ __forceinline__ void set_released() {
    if (lane_ == 0) *static_cast<volatile int*>(&shared_.released) = 1;
  }
  __device__ __forceinline__ bool is_released() const {
    return *static_cast<volatile int*>(&shared_.released) != 0;
  }

  // Called by a warp. The slots of x that it fills are free: their last use is kXChunks chunks ago.
  __device__ __forceinline__ void load_x(int c) {
    if (!elect_one()) return;
    const uint32_t full = barrier(shared_.barriers.x, x_step_ + c);
    barrier_arrive_expect(full, kXChunk);
    tensor_load(x_place(x_step_ + c), &q_.map_x, chunk_k(c), 0, full);
  }

  // --- Gate products: TMA loads this CTA's slice of rows of the first weight into a ring buffer
  // whose stages are one chunk of half of the neurons each.

  // If the weights are constant, the warp that loads issues the first stages before the CTAs meet.
  __device__ __forceinline__ void begin() {
    if (warp_ != kProducer || !p_.early_weights) return;
    first_ = static_cast<int>(blockIdx.x) / kSplit * q_.neurons;
    begun_ = min(kOnTheirWay, 2 * chunks_);
#pragma unroll 1
    for (int i = 0; i < begun_; ++i) load_first(i);
  }

  // Stages in flight while the predecessor still runs; more would delay its loads.
  static constexpr int kOnTheirWay = 2;
  static constexpr int kTail = 2;

  __device__ __forceinline__ void produce() {
    const bool early = first_pass_ && p_.early_weights;
    if (first_pass_ && !early) wait_for_previous_kernel();
#pragma unroll 1
    for (int i = first_pass_ ? begun_ : 0; i < min(2 * chunks_, kGateStages); ++i) {
      if (early && i >= kOnTheirWay) {
        const uint32_t before = barrier(shared_.barriers.full, i - kOnTheirWay);
        while (!barrier_done(before, 0) && !is_released()) {
        }
      }
      load_first(i);
    }
    if (early) wait_for_previous_kernel();
    if (first_pass_ || !keep_x_) {
#pragma unroll 1
      for (int c = 0; c < min(chunks_, kXChunks); ++c) load_x(c);
    }
#pragma unroll 1
    for (int i = kGateStages; i < 2 * chunks_; ++i) {
      const int before = step_ + i - kGateStages;
      barrier_wait(barrier(shared_.barriers.empty, before), phase(before));
      load_first(i);
      if (i % 2 == 0 && i / 2 >= kXChunks) load_x(i / 2);
    }
  }

  // halves[i] += x times that half of the pass's neurons, over all chunks but the last two.
  __device__ __forceinline__ void multiply_head(float (&halves)[2][kHalf / 2]) {
    int step = step_;
#pragma unroll 1
    for (int c = 0; c < head(); ++c) {
      const int x_index = x_step_ + c;
      barrier_wait(barrier(shared_.barriers.x, x_index), phase(x_index));
      const uint64_t a = k_major_operand(x_place(x_index));
#pragma unroll
      for (int half = 0; half < 2; ++half, ++step) {
        multiply_stage(halves[half], a, step);
        wgmma_wait<1>();
        if (step > step_) release(step - 1);
      }
    }
    wgmma_wait<0>();
    if (head() > 0) release(step - 1);
  }
  // Multiplies the last two chunks, one half of the neurons after the other. Products are still in
  // flight on return.
  __device__ __forceinline__ void multiply_tail(float (&sums)[kHalf / 2], int half) {
    int step = step_ + 2 * head() + half * (chunks_ - head());
#pragma unroll 1
    for (int c = head(); c < chunks_; ++c, ++step) {
      const int x_index = x_step_ + c;
      barrier_wait(barrier(shared_.barriers.x, x_index), phase(x_index));
      multiply_stage(sums, k_major_operand(x_place(x_index)), step);
    }
  }
  __device__ __forceinline__ void release_tail() {
#pragma unroll 1
    for (int i = 2 * head(); i < 2 * chunks_; ++i) release(step_ + i);
  }

  __device__ __forceinline__ int head() const { return max(chunks_ - kTail, 0); }
  // Load i of a pass; the last six loads have slots 0 to 5 of the ring buffer.
  __device__ __forceinline__ uint32_t stage_place(int i) const {
    const int slot0 = (kGateStages - 2 * chunks_ % kGateStages) % kGateStages;
    return ring_ + (slot0 + i) % kGateStages * kGateStage;
  }
  __device__ __forceinline__ void load_first(int i) {
    if (!elect_one()) return;
    const int in_tail = i - 2 * head(), tail = chunks_ - head(), rows = q_.neurons / 2;
    int chunk = i / 2, half = i % 2;
    if (in_tail >= 0) {
      half = in_tail >= tail ? 1 : 0;
      chunk = head() + in_tail - half * tail;
    }
    const uint32_t full = barrier(shared_.barriers.full, step_ + i);
    barrier_arrive_expect(full, rows * kRowBytes);
    tensor_load(stage_place(i), &q_.map_first, chunk_k(chunk), first_ + half * rows, full);
  }
  __device__ __forceinline__ void multiply_stage(float (&sums)[kHalf / 2], uint64_t x, int step) {
    barrier_wait(barrier(shared_.barriers.full, step), phase(step));
    const uint64_t rows = k_major_operand(stage_place(step - step_));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<kHalf, false>(sums, x + k * 2, rows + k * 2, true);
    wgmma_commit();
  }
  __device__ __forceinline__ void release(int step) {
    if (threadIdx.x == 0) barrier_arrive(barrier(shared_.barriers.empty, step));
  }

  // --- Gate: sends partial sums to the CTA that owns their tokens, and lists the neurons active
  // for any of the cluster's tokens.

  // The sums of one half of the neurons are sent while the last products of the other half run,
  // into slots of the ring buffer that are free by then. Warps that do not multiply finish the
  // first half.
  __device__ __forceinline__ void gate() {
    static_assert(kHalfSent == 2 * kGateStage);
    const uint32_t sent = smem_address(shared_.barriers.gate);  // and the second half's behind it
    const int blocks = adds() ? q_.neurons / 16 : 0;  // blocks of a half that this CTA adds up
    if (threadIdx.x == 0) {
      barrier_arrive_expect(sent, adds() ? kHalfSent : 0);
      barrier_arrive_expect(sent + 8, adds() ? kHalfSent : 0);
    }
    if (multiplies()) {
      float sums[2][kHalf / 2];
#pragma unroll
      for (int i = 0; i < kHalf; ++i) sums[i % 2][i / 2] = 0.0f;
      const uint64_t* room = shared_.barriers.room;
      multiply_head(sums);
      tell_room(room);  // slots 0 and 1 are free
      multiply_tail(sums[0], 0);
      wgmma_wait<0>();
      tell_room(room + 1);  // slots 2 and 3 are free
      multiply_tail(sums[1], 1);
      barrier_wait(smem_address(room), gate_phase_);
      send_sums<kHalf>(sums[0], ring_, sent, rank_, warp_, sends_);
      wgmma_wait<0>();
      release_tail();
      barrier_wait(smem_address(room + 1), gate_phase_);
      send_sums<kHalf>(sums[1], ring_ + kHalfSent, sent + 8, rank_, warp_, sends_);
    } else if (warp_ == kProducer) {
      produce();
      __syncwarp();
    }
    count_steps();
#pragma unroll 1
    for (int half = multiplies() ? 1 : 0; half < 2; ++half) {
      barrier_wait(sent + half * 8, gate_phase_);
      const int idle = half == 0 ? kProducer : 0;  // first warp that takes part
#pragma unroll 1
      for (int b = warp_ - idle; b < blocks; b += kWarps - idle) {
        const int block = half * blocks + b;
        const uint32_t fired =
            finish_gate(block, add_sums(ring_ + half * kHalfSent, b, kHalfSent / kSplit));
        if (half == 0 && p_.up != nullptr && __popc(fired) <= 3 && (fired >> lane_ & 1) != 0) {
          ask_for_up(block * 8 + lane_);
        }
      }
    }
    gate_phase_ ^= 1;
  }

  // Publishes the active neurons to the next kernel. Called by the warps that do not multiply.
  __device__ __forceinline__ void publish() const {
    const int word = static_cast<int>(threadIdx.x) - 128;
    if (rank_ != 0 || word < 0 || word * 32 >= min(q_.neurons, p_.ffn - first_)) return;
    const uint4 by_cta = shared_.fired[word];
    store_fired(p_.hidden.fired + first_ / 32 + word, by_cta.x | by_cta.y | by_cta.z | by_cta.w);
  }

  // Sends the active neurons to the cluster, and lists those active for any of its tokens.
  __device__ __forceinline__ void list() {
    const int thread = static_cast<int>(threadIdx.x);
    const uint32_t sent = smem_address(&shared_.barriers.fired);
    if (thread == 0) barrier_arrive_expect(sent, kSplit * kWords * 4);
    __syncthreads();
    if (thread < kSplit * kWords) {
      const int to = thread / kWords, word = thread % kWords;
      store_remote4(remote_address(smem_address(&shared_.fired[word]) + rank_ * 4, to),
                    shared_.own[word], remote_address(sent, to));
    }
    if (p_.up != nullptr && warp_ < kWords && warp_ * 64 >= q_.neurons) {
      const uint32_t mine = shared_.own[warp_];
      if (__popc(mine) <= 12 && (mine >> lane_ & 1) != 0) ask_for_up(thread);
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
    __syncthreads();
  }

  static constexpr int kHalfSent = kSentBytes<kHalf>;

  __device__ __forceinline__ void count_steps() {
    step_ += 2 * chunks_;
    if (!keep_x_) x_step_ += chunks_;
  }

  // Finishes a block of 8 neurons and 16 tokens. Returns the active neurons as bits, to every lane.
  __device__ __forceinline__ uint32_t finish_gate(int block, const float4& sum) {
    const int token = rank_ * 16 + lane_ / 4;
    const bool exists = first_ + block * 8 + lane_ % 4 * 2 < p_.ffn;
    const bool low = exists && token < p_.tokens, high = exists && token + 8 < p_.tokens;
    const auto gate = [&](bool in, float value) {
      return in ? above(relu_bf16(value), p_.cut) : 0;
    };
    const uint32_t g0 = gate(low, sum.x), g1 = gate(low, sum.y);
    const uint32_t g2 = gate(high, sum.z), g3 = gate(high, sum.w);
    const uint32_t at = gate_place(lane_ / 4) + block * 16 + lane_ % 4 * 4;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(g0 | g1 << 16) : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + 8 * kGatePitch), "r"(g2 | g3 << 16)
                 : "memory");
    const uint32_t b0 = __ballot_sync(~0u, g0 != 0), b1 = __ballot_sync(~0u, g1 != 0);
    const uint32_t b2 = __ballot_sync(~0u, g2 != 0), b3 = __ballot_sync(~0u, g3 != 0);
    nnz_ += __popc(b0) + __popc(b1) + __popc(b2) + __popc(b3);
    const uint32_t fired = columns_fired(b0 | b2, b1 | b3);
    if (lane_ == 0) {
      reinterpret_cast<uint8_t*>(shared_.own)[block] = static_cast<uint8_t>(fired);
    }
    return fired;
  }

  // Prefetches the row of w_up into the L2.
  __device__ __forceinline__ void ask_for_up(int neuron) const {
    bulk_prefetch(p_.up + int64_t{first_ + neuron} * p_.width, p_.width * 2);
  }

  // --- Up: gathers rows of w_up of active neurons, sends partial sums to the CTA that owns their
  // tokens, multiplies by the gate.

  __device__ __forceinline__ void hidden() {
    if (p_.up == nullptr) {
      if (!multiplies()) ask_for_down();
      finish(0, 0);
    } else if (total_ <= kFewRows && q_.slice_chunks <= kXChunks) {
      up_few();
    } else if (total_ <= 64) {
      up<64, 8>();
    } else if (total_ <= 128) {
      up<128, 5>();
    } else {
      up<192, 3>();
    }
  }

  // Gathers all rows, then multiplies. The same code serves up to 64 rows and more, because few
  // clusters run the larger case and would have to fetch its instructions. Columns past the rows
  // hold undefined values that are not used.
  __device__ __forceinline__ void up_few() {
    const bool more = total_ > 64;
    const int blocks = more ? kFewRows / 8 : 8, chunk_bytes = blocks * 8 * kRowBytes;
    const int sent_bytes = kSplit * blocks * kBlockBytes;
    const uint32_t sent = smem_address(&shared_.barriers.up);
    if (threadIdx.x == 0) barrier_arrive_expect(sent, adds() ? sent_bytes : 0);
    gather(blocks * 8);
    float sums[kFewRows / 2];
#pragma unroll
    for (int i = 0; i < kFewRows / 2; ++i) sums[i] = 0.0f;
    barrier_wait(barrier(shared_.barriers.gathered, up_step_), phase(up_step_));
    fence_async_shared();
    if (!multiplies()) ask_for_down();  // only now, so that the rows of w_up do not queue behind
    // The two warpgroups multiply alternate chunks.
    const int groups = chunks_ >= 6 ? 2 : 1, group = multiplies() ? 0 : 1;
    if (group < groups) multiply_few(sums, chunk_bytes, group, groups);
    if (groups == 2) add_second(sums, chunk_bytes, group);
    if (threadIdx.x == 0) barrier_arrive(barrier(shared_.barriers.released, up_step_));
    ++up_step_;
    if (more) {  // otherwise the sums fit beside the rows
      __syncwarp();
      cluster_arrive_relaxed();
      cluster_wait();  // no CTA needs its rows any more
    }
    const uint32_t place = ring_ + (more ? 0 : kApart);
    if (sends_) {
      const uint32_t at = remote_address(sums_place(place, rank_, blocks), warp_);
      send_blocks<0, 8>(sums, at, remote_address(sent, warp_), true);
      send_blocks<8, kFewRows / 8>(sums, at, remote_address(sent, warp_), more);
    }
    barrier_wait(sent, up_phase_);
    up_phase_ ^= 1;
    finish(place, sent_bytes);
  }
  __device__ __forceinline__ void multiply_few(float (&sums)[kFewRows / 2], int chunk_bytes,
                                               int group, int groups) {
#pragma unroll 1
    for (int c = group; c < chunks_; c += groups) {
      const int x_index = x_step_ + c;
      barrier_wait(barrier(shared_.barriers.x, x_index), phase(x_index));
      const uint64_t x = k_major_operand(x_place(x_index));
      const uint64_t rows = k_major_operand(ring_ + c * chunk_bytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma<kFewRows, false>(sums, x + k * 2, rows + k * 2, true);
      wgmma_commit();
    }
    wgmma_wait<0>();
  }
  // Adds the second warpgroup's sums, which it passes through the memory of its rows (odd chunks):
  // four blocks of columns per chunk.
  __device__ __forceinline__ void add_second(float (&sums)[kFewRows / 2], int chunk_bytes,
                                             int group) {
    const uint32_t place = ring_ + warp_ % 4 * kBlockBytes + lane_ * 16;
    const auto block_place = [&](int block) {
      return place + (block / 4 * 2 + 1) * chunk_bytes + block % 4 * (4 * kBlockBytes);
    };
    if (group == 1) {
#pragma unroll
      for (int b = 0; b < kFewRows / 8; ++b) {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(block_place(b)),
                     "f"(sums[4 * b]), "f"(sums[4 * b + 1]), "f"(sums[4 * b + 2]),
                     "f"(sums[4 * b + 3])
                     : "memory");
      }
    }
    __syncthreads();
    if (group == 0) {
#pragma unroll
      for (int b = 0; b < kFewRows / 8; ++b) {
        const float4 other = load_sums(block_place(b));
        sums[4 * b] += other.x;
        sums[4 * b + 1] += other.y;
        sums[4 * b + 2] += other.z;
        sums[4 * b + 3] += other.w;
      }
    }
  }

  // For more rows or wider slices: chunks of the rows pass through a ring buffer.
  template <int Rows, int Stages>
  __device__ __forceinline__ void up() {
    static_assert(Stages * Rows * kRowBytes <= kRing && Stages <= kBarriers);
    float acc[Rows / 2];
#pragma unroll
    for (int i = 0; i < Rows / 2; ++i) acc[i] = 0.0f;
    if (multiplies()) {
      multiply_gathered<Rows, Stages>(acc);
    } else {
      gather_chunks<Rows, Stages>();
      // Prefetch w_down only once the rows of w_up have arrived, which would otherwise queue behind
      // it.
      const int last = up_step_ + chunks_ - 1;
      if (chunks_ > 0) barrier_wait(barrier(shared_.barriers.gathered, last), phase(last));
      ask_for_down();
    }
    up_step_ += chunks_;
    if (!keep_x_) x_step_ += chunks_;
    constexpr int kSent = kSentBytes<Rows>;
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
    const uint32_t sent = smem_address(&shared_.barriers.up);
    if (threadIdx.x == 0) barrier_arrive_expect(sent, adds() ? kSent : 0);
    if (sends_) send_sums<Rows>(acc, ring_, sent, rank_, warp_);
    barrier_wait(sent, up_phase_);
    up_phase_ ^= 1;
    finish(ring_, kSent);
  }

  // acc += x times up to Rows gathered rows.
  template <int Rows, int Stages>
  __device__ __forceinline__ void multiply_gathered(float (&acc)[Rows / 2]) {
    const uint64_t* full = shared_.barriers.gathered;
    const uint64_t* empty = shared_.barriers.released;
    const int step = up_step_, x_step = x_step_;
    int stage = 0;
#pragma unroll 1
    for (int c = 0; c < chunks_; ++c) {
      const int x_index = x_step + c;
      barrier_wait(barrier(shared_.barriers.x, x_index), phase(x_index));
      barrier_arrive(barrier(full, step + c));  // this warp gathers nothing
      barrier_wait(barrier(full, step + c), phase(step + c));
      fence_async_shared();
      wgmma_fence();
      const uint64_t a = k_major_operand(x_place(x_index));
      const uint64_t b = k_major_operand(ring_ + stage * (Rows * kRowBytes));
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma<Rows, false>(acc, a + k * 2, b + k * 2, true);
      wgmma_commit();
      wgmma_wait<1>();
      if (c > 0 && threadIdx.x == 0) barrier_arrive(barrier(empty, step + c - 1));
      stage = stage + 1 == Stages ? 0 : stage + 1;
    }
    wgmma_wait<0>();
    if (chunks_ > 0 && threadIdx.x == 0) barrier_arrive(barrier(empty, step + chunks_ - 1));
  }

  // Gathers this CTA's slices of active rows in chunks of `rows` rows, row by row, the order in
  // which memory is fastest.
  __device__ __forceinline__ void gather(int rows) {
    static_assert(kFewRows <= 32 * kWarps);
    const int at = lane_ * kWarps + warp_, mine = at < total_ ? shared_.list[at] : 0;
#pragma unroll 2
    for (int i = 0; i * kWarps + warp_ < total_; ++i) {
      const int row = i * kWarps + warp_;
      const __nv_bfloat16* from = p_.up + int64_t{first_ + __shfl_sync(~0u, mine, i)} * p_.width;
#pragma unroll 2
      for (int piece = lane_; piece < chunks_ * 8; piece += 32) {
        const int k = chunk_k(piece / 8) + piece % 8 * 8;
        gather16(ring_ + (piece / 8 * rows + row) * kRowBytes + ((piece ^ row) % 8) * 16,
                 k < p_.width ? from + k : from, k < p_.width);
      }
    }
    gather_arrive(barrier(shared_.barriers.gathered, up_step_));
  }
  // Each thread gathers a 16-byte piece of every 16th row.
  template <int Rows, int Stages>
  __device__ __forceinline__ void gather_chunks() {
    constexpr int kEvery = kGatherers / 8;
    const int me = static_cast<int>(threadIdx.x) - 128, row = me / 8, piece = me % 8;
    const uint32_t to = ring_ + row * kRowBytes + (piece ^ (row % 8)) * 16;
    // In narrow layers the last CTAs of a cluster have no columns: k_begin_ is past the width.
    if (chunks_ > 0) {
#pragma unroll 1
      for (int at = me; at < total_; at += kGatherers) {
        bulk_prefetch(p_.up + int64_t{first_ + shared_.list[at]} * p_.width + k_begin_,
                      min(p_.width - k_begin_, chunks_ * kChunk) * 2);
      }
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
        if (from[i] !=
            nullptr) {  // undefined values otherwise; they only affect that row's own sums
          gather16(to + stage * (Rows * kRowBytes) + i * kEvery * kRowBytes,
                   k < p_.width ? from[i] + k : p_.up, k < p_.width);
        }
      }
      gather_arrive(barrier(shared_.barriers.gathered, up_step_ + c));
      stage = stage + 1 == Stages ? 0 : stage + 1;
    }
  }
  // Prefetches the rows of w_down, and publishes the active neurons to the next kernel.
  __device__ __forceinline__ void ask_for_down() {
    const int at = (static_cast<int>(threadIdx.x) - 128) * kSplit + rank_;
    if (at < total_) {
      bulk_prefetch(p_.down + int64_t{first_ + shared_.list[at]} * p_.width, p_.width * 2);
    }
    publish();
  }

  // Computes h of active neurons for this CTA's tokens. sums: 0 without a gate.
  __device__ __forceinline__ void finish(uint32_t sums, int sent_bytes) {
    if (!adds()) return;
#pragma unroll 1
    for (int b = warp_; b * 8 < total_; b += kWarps) {
      float4 up{1.0f, 1.0f, 1.0f, 1.0f};
      if (sums != 0) up = add_sums(sums, b, sent_bytes / kSplit);
      finish_hidden(b * 8, up);
    }
  }
  __device__ __forceinline__ void finish_hidden(int begin, const float4& up) {
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
                     : "r"(gate_place(token + half) + shared_.list[at] * 2));
      }
      const float g = __uint_as_float(uint32_t{gate} << 16);
      const float h = (p_.squared ? g * g : g) * relu_if(p_.up_relu, values[i]);
      out[column + i % 2][token + half] = gate == 0 ? 0 : __bfloat16_as_ushort(__float2bfloat16(h));
    }
    __syncwarp();
    const int neuron = lane_ / 2, half = lane_ % 2 * 8;
    if (lane_ < 16 && begin + neuron < total_) {
      const int64_t row = first_ + shared_.list[begin + neuron];
      *reinterpret_cast<uint4*>(p_.hidden.h + row * kSplitTokens + rank_ * 16 + half) =
          *reinterpret_cast<const uint4*>(&out[neuron][half]);
    }
    __syncwarp();
  }

  const SplitGateUp& q_;
  const GateUp& p_;
  Shared& shared_;
  const uint32_t ring_;
  const int warp_, lane_, rank_, k_begin_, chunks_;
  const int turn_;
  const bool keep_x_;  // the whole slice fits at once
  const bool sends_;
  int first_ = 0;               // first neuron of this pass
  int total_ = 0;               // active neurons of this pass
  int step_ = 0, up_step_ = 0;  // ring buffer stages used before this pass
  int x_step_ = 0;              // chunks of x loaded before this product; 0 where x stays
  int nnz_ = 0;
  int begun_ = 0;  // stages of the first pass already in flight
  uint32_t gate_phase_ = 0, fired_phase_ = 0, up_phase_ = 0;
  bool first_pass_ = true;
};

__global__ void __cluster_dims__(kSplit, 1, 1) __maxnreg__(160)
    gate_up_sm90_kernel(const __grid_constant__ SplitGateUp params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ Kernel::Shared shared;
  Kernel(params, shared, memory).run();
}

// Number of clusters that fit into the device at one time.
cudaError_t count_clusters(int* clusters) {
  const cudaError_t status = allow_shared_memory(gate_up_sm90_kernel, kBytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kSplit, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kSplit);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(clusters, gate_up_sm90_kernel, &config);
}

cudaError_t launch(const SplitGateUp& params, int clusters, cudaStream_t stream) {
  return launch_dependent(gate_up_sm90_kernel, dim3(clusters * kSplit), kThreads, kBytes, stream,
                          params);
}

}  // namespace
}  // namespace gate_up

namespace split_down {
namespace {

constexpr int kColumns = 64;
constexpr int kRows = 64;              // neurons per stage
constexpr int kOperand = kRows * 128;  // bytes of 64 columns of them, or of 64 tokens
constexpr int kStages = 4;
constexpr int kGatherers = 256;
constexpr int kSent = kSentBytes<kColumns>;

constexpr int kThreads = 128 + kGatherers;  // one warpgroup multiplies
constexpr int kWarps = kThreads / 32;
constexpr int kStage = 2 * kOperand;
constexpr int kBytes = kStages * kStage;
// Neurons are listed one segment at a time, so that shared memory does not bound F.
constexpr int kSegment = kThreads * 16;
static_assert(kSent <= kBytes, "sums use the ring");

struct Shared {
  uint64_t full[kStages], empty[kStages], room, sums;
  int warp_sums[kWarps];
  uint16_t list[kSegment / kSplit + kRows];
};

class Kernel {
 public:
  __device__ __forceinline__ Kernel(const Down& problem, Shared& shared, uint8_t* memory)
      : p_(problem),
        shared_(shared),
        ring_(smem_address(memory)),
        warp_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        rank_(static_cast<int>(cluster_rank())),
        column_(static_cast<int>(blockIdx.x) / kSplit * kColumns),
        adds_(p_.tokens > rank_ * 16),
        one_segment_(p_.ffn <= kSegment) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int s = 0; s < kStages; ++s) {
        barrier_init(smem_address(shared_.full + s), kGatherers);
        barrier_init(smem_address(shared_.empty + s), 1);
      }
      barrier_init(smem_address(&shared_.room), kSplit);
      barrier_init(smem_address(&shared_.sums), 1);
      fence_barrier_init();
      barrier_arrive_expect(smem_address(&shared_.sums), adds_ ? kSent : 0);
    }
    __syncthreads();
    cluster_arrive_relaxed();
    allow_next_kernel();
    cluster_wait();
    bool read = false, last = false;  // all words are read; this CTA was the last to read them
    float acc[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) acc[i] = 0.0f;
#pragma unroll 1
    for (int segment = 0; segment * kSegment < p_.ffn; ++segment) {
      const bool known = list(segment);
      if (known && one_segment_) {
        read = true;
        if (threadIdx.x == 0) last = last_to_read(p_.hidden.arrived);
      }
      if (one_segment_) first_slot_ = (kStages - stages_ % kStages) % kStages;
      if (warp_ < 4) {
        wait_for_previous_kernel();
        multiply(acc);
      } else {
        gather(segment * kSegment);
      }
      step_ += (count_ + kRows - 1) / kRows;
    }
    if (!read && threadIdx.x == 0) last = last_to_read(p_.hidden.arrived);
    const uint32_t sums = smem_address(&shared_.sums);
    if (warp_ < 4) {
      if (!one_segment_) tell_room(&shared_.room);
      barrier_wait(smem_address(&shared_.room), 0);
      if (warp_ * 16 < p_.tokens) send_sums<kColumns>(acc, ring_, sums, rank_, warp_);
    }
    barrier_wait(sums, 0);
    if (adds_ && warp_ < kColumns / 8) store(add_sums(ring_, warp_, kSent / kSplit));
    __syncwarp();
    if (warp_ == 0) clear_if_last(last, p_.hidden.fired, ceil_div(p_.ffn, kWordNeurons));
  }

 private:
  // Lists this CTA's share of a segment's active neurons, ascending. False when they were not
  // published before gate_up ended.
  __device__ __forceinline__ bool list(int segment) {
    const int thread = static_cast<int>(threadIdx.x), index = segment * kThreads + thread;
    const bool exists = index < ceil_div(p_.ffn, kWordNeurons) * 2;  // half a word each
    const uint64_t* from = p_.hidden.fired + index / 2;
    uint64_t word = kFiredKnown;
    if (exists) word = await_fired<false>(from);
    const bool known = __syncthreads_and(is_known(word)) != 0;
    if (!known) wait_for_previous_kernel();
    if (!known && exists) word = load_fired(from);
    uint32_t bits = static_cast<uint16_t>(word >> (index % 2 * 16));
    const int mine = __popc(bits);
    int at = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, at, step);
      if (lane_ >= step) at += other;
    }
    if (lane_ == 31) shared_.warp_sums[warp_] = at;
    __syncthreads();
    int total = 0;
    at -= mine;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const int sum = shared_.warp_sums[warp];
      if (warp < warp_) at += sum;
      total += sum;
    }
    const int share = (total + kSplit * 16 - 1) / (kSplit * 16) * 16, begin = rank_ * share;
    count_ = max(min(share, total - begin), 0);
    stages_ = (share + kRows - 1) / kRows;
#pragma unroll 1
    for (; bits != 0; bits &= bits - 1, ++at) {
      if (at >= begin && at < begin + count_) {
        shared_.list[at - begin] = static_cast<uint16_t>(thread * 16 + __ffs(bits) - 1);
      }
    }
    __syncthreads();
    return known;
  }

  __device__ __forceinline__ void gather(int base) {
    const int me = static_cast<int>(threadIdx.x) - 128, row = me / 8, piece = me % 8;
    const uint32_t to = ring_ + row * 128 + (piece ^ (row % 8)) * 16;
    const bool inside = column_ + piece * 8 < p_.width;
    const __nv_bfloat16* weight = p_.weight + (inside ? column_ + piece * 8 : 0);
    const __nv_bfloat16* hidden = p_.hidden.h + piece * 8;
    const int written = ceil_div(p_.tokens, 16) * 16;  // tokens of h that are written
    const auto ask_weight = [&](uint32_t at, int64_t neuron, bool valid) {
      gather16(at, weight + neuron * p_.width, valid && inside);
    };
    const auto ask_hidden = [&](uint32_t at, int64_t neuron, bool valid) {
      gather16(at + kOperand, hidden + neuron * kSplitTokens, valid && piece * 8 < written);
    };
    const auto each_row = [&](int first, int stage, const auto& ask) {
#pragma unroll
      for (int i = 0; i < kRows; i += kGatherers / 8) {
        const bool valid = first + i + row < count_;
        const int64_t neuron = valid ? base + shared_.list[first + i + row] : 0;
        ask(to + slot(stage) * kStage + i * 128, neuron, valid);
      }
    };
    int step = step_, first = 0;
    if (step == 0) {
      // Loads weights before the predecessor has ended.
      const int early = min(ceil_div(count_, kRows), kStages);
#pragma unroll 1
      for (int i = 0; i < early; ++i) each_row(i * kRows, i, ask_weight);
      wait_for_previous_kernel();
#pragma unroll 1
      for (; step < early; ++step, first += kRows) {
        each_row(first, step, ask_hidden);
        gather_arrive(smem_address(shared_.full + step));
      }
    }
#pragma unroll 1
    for (; first < count_; first += kRows, ++step) {
      const int stage = step % kStages;
      if (step >= kStages) {
        barrier_wait(smem_address(shared_.empty + stage), (step / kStages - 1) & 1);
      }
      each_row(first, stage, [&](uint32_t at, int64_t neuron, bool valid) {
        ask_weight(at, neuron, valid);
        ask_hidden(at, neuron, valid);
      });
      gather_arrive(smem_address(shared_.full + stage));
    }
  }

  __device__ __forceinline__ int slot(int stage) const { return (stage + first_slot_) % kStages; }

  // Signals the cluster when slot 0 becomes free, if that is before the end.
  __device__ __forceinline__ void multiply(float (&acc)[32]) {
    const int last_three = max(stages_ - kStages + 1, 0) * kRows;  // which have slots 1 to 3
    int step = step_;
#pragma unroll 1
    for (int first = 0; first < count_; first += kRows, ++step) {
      if (one_segment_ && first == last_three) tell_room(&shared_.room);
      const int stage = step % kStages;
      barrier_wait(smem_address(shared_.full + stage), step / kStages & 1);
      fence_async_shared();
      const uint32_t at = ring_ + slot(stage) * kStage;
      const uint64_t hidden = n_major_operand(at + kOperand, kOperand);
      const uint64_t weight = n_major_operand(at, kOperand);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // 16 neurons, 2048 bytes; past the last one there are zeros
        wgmma<kColumns, true, true>(acc, hidden + k * 128, weight + k * 128, true);
      }
      wgmma_commit();
      wgmma_wait<0>();
      if (threadIdx.x == 0) barrier_arrive(smem_address(shared_.empty + stage));
    }
    if (one_segment_ && count_ <= last_three) tell_room(&shared_.room);
  }

  __device__ __forceinline__ void store(const float4& sum) const {
    const int column = column_ + warp_ * 8 + lane_ % 4 * 2;
    if (column >= p_.width) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = rank_ * 16 + half * 8 + lane_ / 4;
      if (token >= p_.tokens) continue;
      float2 v = half == 0 ? make_float2(sum.x, sum.y) : make_float2(sum.z, sum.w);
      const int64_t at = int64_t{token} * p_.width + column;
      if (p_.residual != nullptr) {
        const auto* from = reinterpret_cast<const __nv_bfloat162*>(p_.residual + at);
        const float2 before = __bfloat1622float2(*from);
        v.x += before.x;
        v.y += before.y;
      }
      *reinterpret_cast<__nv_bfloat162*>(p_.y + at) = __floats2bfloat162_rn(v.x, v.y);
    }
  }

  const Down& p_;
  Shared& shared_;
  const uint32_t ring_;
  const int warp_, lane_, rank_, column_;
  const bool adds_;  // this CTA adds up some tokens
  // All neurons are in one segment. Then sums may arrive in slot 0 of the ring buffer while
  // products are still computed, because the last stages use the last slots.
  const bool one_segment_;
  int step_ = 0;        // stages of earlier segments
  int count_ = 0;       // this CTA's neurons of the segment
  int stages_ = 0;      // stages of the segment in the CTA that has most
  int first_slot_ = 0;  // first slot of the ring buffer
};

// With 64 registers its CTAs fit beside those of gate_up, so that it can start early.
__global__ void __cluster_dims__(kSplit, 1, 1) __maxnreg__(64)
    split_down_sm90_kernel(const __grid_constant__ Down problem) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ Shared shared;
  Kernel(problem, shared, memory).run();
}

cudaError_t launch(const Down& problem, cudaStream_t stream) {
  return launch_dependent(split_down_sm90_kernel, dim3(ceil_div(problem.width, kColumns) * kSplit),
                          kThreads, kBytes, stream, problem);
}

}  // namespace
}  // namespace split_down

namespace {

// Both kernels. clusters: as many as fit into the device at one time.
cudaError_t launch_small_batch(const BatchFfnCuda& problem, const Hidden& hidden, int clusters,
                               cudaStream_t stream) {
  const bool gated = problem.w_gate != nullptr;
  const auto tokens = static_cast<int>(problem.tokens), width = static_cast<int>(problem.width),
             ffn = static_cast<int>(problem.ffn);
  // The fewest neurons at a time that give all clusters the same number of passes.
  const int passes = ceil_div(ffn, clusters * kMaxNeurons);
  const int neurons = ceil_div(ceil_div(ffn, clusters * passes), 64) * 64;
  const SplitGateUp params{.map_x = matrix_tensor_map(problem.x, tokens, width, kSplitTokens),
                           .map_first = matrix_tensor_map(gated ? problem.w_gate : problem.w_up,
                                                          ffn, width, neurons / 2),
                           .problem = {.up = gated ? problem.w_up : nullptr,
                                       .down = problem.w_down,
                                       .hidden = hidden,
                                       .activity = problem.activity,
                                       .tokens = tokens,
                                       .width = width,
                                       .ffn = ffn,
                                       .early_weights = problem.weights_are_constant,
                                       .squared = problem.squared,
                                       .up_relu = problem.up_relu,
                                       .cut = problem.cut},
                           .neurons = neurons,
                           .slice_chunks = ceil_div(width, 4 * 64)};
  const cudaError_t status =
      gate_up::launch(params, std::min(clusters, ceil_div(ffn, neurons)), stream);
  if (status != cudaSuccess) return status;
  return split_down::launch({.hidden = hidden,
                             .weight = problem.w_down,
                             .residual = problem.add ? problem.y : nullptr,
                             .y = problem.y,
                             .tokens = tokens,
                             .width = width,
                             .ffn = ffn,
                             .word_neurons = kWordNeurons},
                            stream);
}

}  // namespace
}  // namespace twell::few_token

namespace twell {

FewTokenWorkspace::FewTokenWorkspace(int64_t max_ffn)
    : max_ffn_(max_ffn),
      hidden_(max_ffn * kMaxFewTokens),
      fired_(max_ffn / few_token::kLeastRows + 1),
      arrived_(1) {
  TWELL_CUDA_CHECK(cudaMemset(fired_.data(), 0, static_cast<size_t>(fired_.bytes())));
  TWELL_CUDA_CHECK(cudaMemset(arrived_.data(), 0, static_cast<size_t>(arrived_.bytes())));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(nullptr));
}

void few_token_ffn_cuda(CudaContext& ctx, const BatchFfnCuda& problem,
                        FewTokenWorkspace& workspace) {
  check_ffn_call(ctx, problem.width, problem.ffn);
  TWELL_CHECK(problem.tokens <= kMaxFewTokens && problem.ffn <= workspace.max_ffn_,
              "few-token FFN: [{}, {}] in a workspace for [{}, {}]", problem.tokens, problem.ffn,
              kMaxFewTokens, workspace.max_ffn_);
  if (problem.tokens == 0) return;
  TWELL_CHECK(problem.tokens <= few_token::kRowTokens || problem.norm == nullptr,
              "few-token FFN: norm as part of {} tokens", problem.tokens);
  const few_token::Hidden hidden{workspace.hidden_.data(), workspace.fired_.data(),
                                 workspace.arrived_.data()};
  // A kernel keeps its attributes, so they are set by the first call of a workspace alone.
  if (problem.tokens <= few_token::kRowTokens) {
    if (!workspace.rows_prepared_) TWELL_CUDA_CHECK(few_token::prepare_decode_rows());
    workspace.rows_prepared_ = true;
    TWELL_CUDA_CHECK(
        few_token::launch_decode_rows(problem, hidden, ctx.multiprocessors(), ctx.stream()));
    return;
  }
  int& at_once = workspace.clusters_;
  if (at_once == 0) {
    TWELL_CUDA_CHECK(few_token::gate_up::count_clusters(&at_once));
    TWELL_CUDA_CHECK(few_token::allow_shared_memory(few_token::split_down::split_down_sm90_kernel,
                                                    few_token::split_down::kBytes));
    TWELL_CHECK(at_once > 0, "few-token FFN: {} runs no cluster of its CTAs", ctx.device_name());
  }
  TWELL_CUDA_CHECK(few_token::launch_small_batch(problem, hidden, at_once, ctx.stream()));
}

}  // namespace twell
