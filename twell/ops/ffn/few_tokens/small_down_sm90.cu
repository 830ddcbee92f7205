// SPDX-License-Identifier: Apache-2.0
// The down projection of small batches (small_batch_sm90.cu): y = h w_down over active neurons. A
// cluster of four CTAs computes 64 columns of y: each CTA takes a quarter of the active neurons,
// gathers 128 bytes of each one's row and its row of h into a ring buffer, and multiplies on WGMMA,
// tokens as the 64-row operand; then each adds up 16 tokens.
//
// Weights in e4m3 are widened to bf16 on their way to shared memory, because WGMMA takes no bytes
// whose rows are neurons, and multiply h in bf16; sums are multiplied by the scales of their
// columns.
#include "twell/format/byte_rows.cuh"
#include "twell/ops/ffn/few_tokens/small_batch_sm90.cuh"

namespace twell::few_token {
namespace {

constexpr int kColumns = 64;
constexpr int kRows = 64;              // neurons per stage
constexpr int kOperand = kRows * 128;  // bytes of 64 columns of them, or of 64 tokens
constexpr int kStages = 4;
constexpr int kDownGatherers = 256;
constexpr int kSent = kSentBytes<kColumns>;

constexpr int kDownThreads = 128 + kDownGatherers;  // one warpgroup multiplies
constexpr int kDownWarps = kDownThreads / 32;
constexpr int kStage = 2 * kOperand;
constexpr int kDownBytes = kStages * kStage;
// Neurons are listed one segment at a time, so that shared memory does not bound F.
constexpr int kSegment = kDownThreads * 16;
static_assert(kSent <= kDownBytes, "sums use the ring");

struct Shared {
  uint64_t full[kStages], empty[kStages], room, sums;
  int warp_sums[kDownWarps];
  uint16_t list[kSegment / kSplit + kRows];
};

// Eight bytes as eight bf16.
__device__ __forceinline__ uint4 widened(const uint2& bytes) {
  const auto pair = [](uint32_t word, int half) {
    return byte_rows::e4m3x2_to_bf16x2(static_cast<uint16_t>(word >> (16 * half)));
  };
  return {pair(bytes.x, 0), pair(bytes.x, 1), pair(bytes.y, 0), pair(bytes.y, 1)};
}

template <typename W>
class DownKernel {
 public:
  static constexpr bool kE4m3 = sizeof(W) == 1;

  __device__ __forceinline__ DownKernel(const DownOf<W>& problem, Shared& shared, uint8_t* memory)
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
        // Widened weights are stored by the threads themselves, which arrive for them apart.
        barrier_init(smem_address(shared_.full + s), kDownGatherers * (kE4m3 ? 2 : 1));
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
      } else if constexpr (kE4m3) {
        gather_widened(segment * kSegment);
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
    const int thread = static_cast<int>(threadIdx.x), index = segment * kDownThreads + thread;
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
    for (int warp = 0; warp < kDownWarps; ++warp) {
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

  // What a gathering thread loads of every 32nd neuron of a stage: a piece of eight columns of its
  // row, and of eight tokens of its h.
  struct Piece {
    int row;         // the first of these neurons in a stage
    uint32_t to;     // in the ring buffer; that of h is kOperand further
    bool in_weight;  // the columns exist
    const W* weight;
    bool in_hidden;  // the tokens are written
    const __nv_bfloat16* hidden;
  };
  __device__ __forceinline__ Piece piece_of_thread() const {
    const int me = static_cast<int>(threadIdx.x) - 128, row = me / 8, piece = me % 8;
    const bool inside = column_ + piece * 8 < p_.width;
    return {row,
            ring_ + row * 128 + (piece ^ (row % 8)) * 16,
            inside,
            p_.weight + (inside ? column_ + piece * 8 : 0),
            piece * 8 < ceil_div(p_.tokens, 16) * 16,
            p_.hidden.h + piece * 8};
  }

  __device__ __forceinline__ void gather(int base) {
    const auto [row, to, in_weight, weight, in_hidden, hidden] = piece_of_thread();
    const auto ask_weight = [&](uint32_t at, int64_t neuron, bool valid) {
      gather16(at, weight + neuron * p_.width, valid && in_weight);
    };
    const auto ask_hidden = [&](uint32_t at, int64_t neuron, bool valid) {
      gather16(at + kOperand, hidden + neuron * kSplitTokens, valid && in_hidden);
    };
    const auto each_row = [&](int first, int stage, const auto& ask) {
#pragma unroll
      for (int i = 0; i < kRows; i += kDownGatherers / 8) {
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

  // The same for weights in e4m3: loaded into registers, a stage ahead, widened, and stored.
  __device__ __forceinline__ void gather_widened(int base) {
    constexpr int kOwn = kRows / (kDownGatherers / 8);  // rows of a stage that a thread loads
    const auto [row, to, in_weight, weight, in_hidden, hidden] = piece_of_thread();
    const auto load = [&](int first, uint2(&values)[kOwn]) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int at = first + i * (kDownGatherers / 8) + row;
        values[i] = uint2{};
        if (at < count_ && in_weight) {
          values[i] = __ldg(reinterpret_cast<const uint2*>(
              weight + (int64_t{base} + shared_.list[at]) * p_.width));
        }
      }
    };
    const auto store = [&](int stage, const uint2(&values)[kOwn]) {
      const uint32_t place = to + slot(stage) * kStage;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const uint4 v = widened(values[i]);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(
                         place + i * (kDownGatherers / 8) * 128),
                     "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                     : "memory");
      }
      barrier_arrive(smem_address(shared_.full + stage));
    };
    const auto gather_hidden = [&](int first, int stage) {
      const uint32_t place = to + slot(stage) * kStage + kOperand;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int at = first + i * (kDownGatherers / 8) + row;
        const bool valid = at < count_;
        const int64_t neuron = valid ? base + shared_.list[at] : 0;
        gather16(place + i * (kDownGatherers / 8) * 128, hidden + neuron * kSplitTokens,
                 valid && in_hidden);
      }
      gather_arrive(smem_address(shared_.full + stage));
    };
    int step = step_, first = 0;
    uint2 next[kOwn];
    if (step == 0) {
      // Loads weights before the predecessor has ended.
      const int early = min(ceil_div(count_, kRows), kStages);
#pragma unroll 1
      for (int i = 0; i < early; i += 2) {
        uint2 second[kOwn];
        load(i * kRows, next);
        load((i + 1) * kRows, second);
        store(i, next);
        if (i + 1 < early) store(i + 1, second);
      }
      load(early * kRows, next);
      wait_for_previous_kernel();
#pragma unroll 1
      for (; step < early; ++step, first += kRows) gather_hidden(first, step);
    } else {
      load(0, next);
    }
#pragma unroll 1
    for (; first < count_; first += kRows, ++step) {
      const int stage = step % kStages;
      if (step >= kStages) {
        barrier_wait(smem_address(shared_.empty + stage), (step / kStages - 1) & 1);
      }
      store(stage, next);
      gather_hidden(first, stage);
      load(first + kRows, next);
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
    float2 scale{1.0f, 1.0f};
    if constexpr (kE4m3) scale = __ldg(reinterpret_cast<const float2*>(p_.scales + column));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = rank_ * 16 + half * 8 + lane_ / 4;
      if (token >= p_.tokens) continue;
      float2 v = half == 0 ? make_float2(sum.x, sum.y) : make_float2(sum.z, sum.w);
      v = {v.x * scale.x, v.y * scale.y};
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

  const DownOf<W>& p_;
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
template <typename W>
__global__ void __cluster_dims__(kSplit, 1, 1) __maxnreg__(64)
    split_down_sm90_kernel(const __grid_constant__ DownOf<W> problem) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ Shared shared;
  DownKernel<W>(problem, shared, memory).run();
}

}  // namespace

template <typename W>
cudaError_t prepare_split_down() {
  return allow_shared_memory(split_down_sm90_kernel<W>, kDownBytes);
}

template <typename W>
cudaError_t launch_split_down(const DownOf<W>& problem, cudaStream_t stream) {
  return launch_dependent(split_down_sm90_kernel<W>,
                          dim3(ceil_div(problem.width, kColumns) * kSplit), kDownThreads,
                          kDownBytes, stream, problem);
}

template cudaError_t prepare_split_down<__nv_bfloat16>();
template cudaError_t prepare_split_down<uint8_t>();
template cudaError_t launch_split_down(const DownOf<__nv_bfloat16>&, cudaStream_t);
template cudaError_t launch_split_down(const DownOf<uint8_t>&, cudaStream_t);

}  // namespace twell::few_token
