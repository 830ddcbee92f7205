// SPDX-License-Identifier: Apache-2.0
// Gate and up of small batches (small_batch_sm90.cu). A cluster of four CTAs computes the gate of
// up to 192 neurons and h of the active ones. Each CTA has a quarter of the width and keeps its
// slice of x in shared memory for both products; tokens are the 64-row operand of WGMMA.
//   gate: TMA loads rows of the first weight into a ring buffer; partial sums go to the CTA that
//         owns their tokens; the set of active neurons goes to all four CTAs
//   up:   slices of active rows of w_up are gathered into the same ring buffer; partial sums as
//         before; h = gate * up
// Rows of w_down of active neurons are prefetched into the L2 for the next kernel. Each launch runs
// its code once, so instruction fetches matter: loops are unrolled only where it pays.
//
// x and the weights are in bf16 or in e4m3, whose products are multiplied by the scales of their
// token and neuron. A row of a stage is 128 bytes of either.
#include "twell/ops/ffn/few_tokens/small_batch_sm90.cuh"

namespace twell::few_token {
namespace {

// Shared memory of a CTA.

constexpr int kRowBytes = 128;          // of a stage
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

// acc += 64 tokens by 32 bytes of K, times N rows.
template <typename W, int N, int Registers>
__device__ __forceinline__ void multiply_bytes(float (&acc)[Registers], uint64_t x, uint64_t rows) {
  if constexpr (sizeof(W) == 1) {
    wgmma_e4m3<N>(acc, x, rows, true);
  } else {
    wgmma<N, false>(acc, x, rows, true);
  }
}

template <typename W>
class Kernel {
 public:
  static constexpr bool kE4m3 = sizeof(W) == 1;
  static constexpr int kPiece = 16 / static_cast<int>(sizeof(W));  // values of 16 bytes
  static constexpr int kChunk = 8 * kPiece;                        // values of k per stage

  struct Shared {
    Barriers barriers;
    uint32_t own[kWords];                       // neurons active for this CTA's tokens
    uint4 fired[kWords];                        // the same for each CTA
    uint16_t list[kMaxNeurons];                 // neurons active for any token, ascending
    __align__(16) uint16_t out[kWarps][8][16];  // [neuron, token]
    int nnz;
    int released;  // whether the predecessor has ended
  };

  __device__ __forceinline__ Kernel(const SplitGateUp<W>& params, Shared& shared, uint8_t* memory)
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
      prefetch_scales();
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

  __device__ __forceinline__ uint32_t row_bytes() const {
    return static_cast<uint32_t>(p_.width) * sizeof(W);
  }
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
    for (int k = 0; k < 4; ++k) multiply_bytes<W, kHalf>(sums, x + k * 2, rows + k * 2);
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

  // Scales are needed where sums are complete, when nothing hides their latency.
  __device__ __forceinline__ void prefetch_scales() const {
    if constexpr (kE4m3) {
      constexpr int kLine = 32, kLines = kMaxNeurons / kLine;  // floats of 128 bytes
      const auto prefetch = [](const float* from) {
        asm volatile("prefetch.global.L1 [%0];" ::"l"(from));
      };
      const int neuron = first_ + lane_ % kLines * kLine;
      if (warp_ == kProducer + 1 && lane_ < 2 * kLines && neuron < p_.ffn) {
        const float* const of = lane_ < kLines ? p_.first_scales : p_.up_scales;
        if (of != nullptr) prefetch(of + neuron);
      }
      if (warp_ == kProducer + 2 && lane_ < p_.tokens && lane_ % kLine == 0) {
        prefetch(p_.x_scales + lane_);
      }
    }
  }
  // Multiplies the sums of a block of 8 columns (add_sums) by the scales of their tokens and of
  // this lane's two neurons. Tokens and neurons that do not exist have 0.
  __device__ __forceinline__ float4 scaled(float4 sum, float first, float second) const {
    if constexpr (kE4m3) {
      const int token = rank_ * 16 + lane_ / 4;
      const float low = token < p_.tokens ? p_.x_scales[token] : 0.0f;
      const float high = token + 8 < p_.tokens ? p_.x_scales[token + 8] : 0.0f;
      sum = {sum.x * (low * first), sum.y * (low * second), sum.z * (high * first),
             sum.w * (high * second)};
    }
    return sum;
  }
  __device__ __forceinline__ float scale_of(const float* scales, int neuron) const {
    return kE4m3 && neuron < p_.ffn ? __ldg(scales + neuron) : 0.0f;
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
  __device__ __forceinline__ uint32_t finish_gate(int block, const float4& unscaled) {
    const int token = rank_ * 16 + lane_ / 4, neuron = first_ + block * 8 + lane_ % 4 * 2;
    const float4 sum =
        scaled(unscaled, scale_of(p_.first_scales, neuron), scale_of(p_.first_scales, neuron + 1));
    const bool exists = neuron < p_.ffn;
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
    bulk_prefetch(p_.up + int64_t{first_ + neuron} * p_.width, row_bytes());
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
      for (int k = 0; k < 4; ++k) multiply_bytes<W, kFewRows>(sums, x + k * 2, rows + k * 2);
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
      for (int k = 0; k < 4; ++k) multiply_bytes<W, Rows>(acc, a + k * 2, b + k * 2);
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
      const W* from = p_.up + int64_t{first_ + __shfl_sync(~0u, mine, i)} * p_.width;
#pragma unroll 2
      for (int piece = lane_; piece < chunks_ * 8; piece += 32) {
        const int k = chunk_k(piece / 8) + piece % 8 * kPiece;
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
                      min(p_.width - k_begin_, chunks_ * kChunk) * static_cast<int>(sizeof(W)));
      }
    }
    const W* from[Rows / kEvery];
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
      const int k = chunk_k(c) + piece * kPiece;
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
      bulk_prefetch(p_.down + int64_t{first_ + shared_.list[at]} * p_.width, row_bytes());
    }
    publish();
  }

  // Computes h of active neurons for this CTA's tokens. sums: 0 without a gate.
  __device__ __forceinline__ void finish(uint32_t sums, int sent_bytes) {
    if (!adds()) return;
#pragma unroll 1
    for (int b = warp_; b * 8 < total_; b += kWarps) {
      float4 up{1.0f, 1.0f, 1.0f, 1.0f};
      if (sums != 0) {
        const int column = b * 8 + lane_ % 4 * 2;
        const auto scale = [&](int at) {
          return at < total_ ? scale_of(p_.up_scales, first_ + shared_.list[at]) : 0.0f;
        };
        up = add_sums(sums, b, sent_bytes / kSplit);
        if constexpr (kE4m3) up = scaled(up, scale(column), scale(column + 1));
      }
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

  const SplitGateUp<W>& q_;
  const GateUp<W>& p_;
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

template <typename W>
__global__ void __cluster_dims__(kSplit, 1, 1) __maxnreg__(160)
    gate_up_sm90_kernel(const __grid_constant__ SplitGateUp<W> params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ typename Kernel<W>::Shared shared;
  Kernel<W>(params, shared, memory).run();
}

}  // namespace

template <typename W>
cudaError_t prepare_gate_up(int* clusters) {
  const cudaError_t status = allow_shared_memory(gate_up_sm90_kernel<W>, kBytes);
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
  return cudaOccupancyMaxActiveClusters(clusters, gate_up_sm90_kernel<W>, &config);
}

template <typename W>
cudaError_t launch_gate_up(const SplitGateUp<W>& params, int clusters, cudaStream_t stream) {
  return launch_dependent(gate_up_sm90_kernel<W>, dim3(clusters * kSplit), kThreads, kBytes, stream,
                          params);
}

template cudaError_t prepare_gate_up<__nv_bfloat16>(int*);
template cudaError_t prepare_gate_up<uint8_t>(int*);
template cudaError_t launch_gate_up(const SplitGateUp<__nv_bfloat16>&, int, cudaStream_t);
template cudaError_t launch_gate_up(const SplitGateUp<uint8_t>&, int, cudaStream_t);

}  // namespace twell::few_token
