// SPDX-License-Identifier: Apache-2.0
// Feed-forward layer for 1 to 8 tokens, all its weights as one stream: for layers in which so many
// neurons are active that reading the rows of w_up and w_down takes as long as reading the gate.
//
// 1. row_stream: a cluster of CTAs, one per SM, owns a run of neurons from the gate to its part of
// y, so h never leaves it. Each CTA has a slice of up to 1,024 columns of every row. One warp, the
// producer, loads its slices by TMA into a ring buffer whose stages hold up to 16 rows. Sixteen
// warps split a stage's columns and multiply on mma.sync with weights as the 16-row operand.
// Another, the adder, adds up their partial sums and sends them to all CTAs of the cluster, which
// so list the same active neurons and compute the same h. Items of the stream are
//   gate  16 neurons, some items ahead of the one whose active neurons are listed
//   up    16 active neurons, whenever there are as many, and the rest at the end
//   down  the same neurons, an up item later: products are added to y [M, columns of the slice],
//         which stays in registers
// so that memory never waits for a result. Rows of w_up and w_down are read once for all tokens.
//
// 2. row_stream_sum: adds up the clusters' parts of y in their order. Its CTAs fit beside those of
// row_stream, so that the next call's first weights are on their way by then.
#include <algorithm>
#include <array>

#include "twell/base/rounding.h"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/sm90/barrier.cuh"
#include "twell/gpu/sm90/copy.cuh"
#include "twell/gpu/warp_mma.cuh"
#include "twell/ops/ffn/few_tokens/few_token_sm90.cuh"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"

namespace twell::row_stream {

using namespace gpu;

namespace {

constexpr int kTokens = few_token::kRowTokens;
constexpr int kWarps = 16;  // warps that multiply; the producer and the adder follow
constexpr int kMultipliers = 32 * kWarps;
constexpr int kThreads = kMultipliers + 64;
constexpr int kRows = 16;                  // of a stage, at most
constexpr int kPart = 64;                  // columns of a stage that a warp multiplies
constexpr int kColumns = kWarps * kPart;   // of a stage, at most
constexpr int kTiles = kPart / 16;         // of 16 columns
constexpr int kPitch = kColumns * 2 + 16;  // bytes; the eight rows of ldmatrix differ in banks
constexpr int kStage = kRows * kPitch;     // bytes
constexpr int kStages = 5;    // of the ring buffer: 16 KiB of an SM stay free for `sum`
constexpr int kSums = 3;      // items whose warps' partial sums wait for the adder
constexpr int kPending = 64;  // active neurons listed: at most 47

// Slots for the sums that CTAs exchange. A CTA loads a gate item once it has listed the one kAhead
// before, which all CTAs have loaded by then. They have listed the one 2 kAhead before, so its slot
// is free. Likewise it loads an up item once it has finished the one two before.
constexpr int kAhead = 4;
constexpr int kGateSlots = 2 * kAhead, kUpSlots = 4, kSlots = kGateSlots + kUpSlots;

struct RowStream {
  const __nv_bfloat16* x;      // [M, D]
  const __nv_bfloat16* norm;   // [D] weight of the norm of x, or null
  const __nv_bfloat16* first;  // [F, D] w_gate, or w_up without a gate
  const __nv_bfloat16* up;     // [F, D], null without a gate
  const __nv_bfloat16* down;   // [F, D]
  float* parts;                // [clusters, M, D]
  ActivityCuda* activity;      // counts, or null
  float eps;                   // of the norm
  int tokens, width, ffn;
  int slice;           // columns of a CTA, a multiple of 32; the last CTA may have fewer
  bool early_weights;  // the first weight may be read before the predecessor has finished
  bool squared;        // f(g) = g^2
  bool up_relu;        // dReLU
  uint32_t cut;        // of FATReLU
};

// Bytes of a token's x in shared memory: 16 bytes more than its columns, so that the eight rows of
// ldmatrix differ in banks.
constexpr int kXPitch = kColumns * 2 + 16;

enum Kind : uint16_t { kGate, kUp, kDown, kEnd };

// What a stage holds.
struct Header {
  Kind kind;
  uint16_t rows;
};

template <int Cluster>
struct Shared {
  uint8_t ring[kStages][kStage];
  union {
    float sums[kSums][kWarps][kRows][kTokens];  // of the warps that multiply
    uint8_t x[kTokens][kXPitch];                // before, until it is in registers
  };
  float exchange[kSlots][Cluster][kRows][kTokens];  // sums of the cluster's CTAs
  uint16_t gates[kPending][kTokens];                // bf16, of active neurons in order
  uint16_t h[kRows][kTokens];                       // bf16, of the neurons of a down item
  uint64_t full[kStages], empty[kStages];
  uint64_t summed[kSums], added[kSums];  // partial sums are complete; the adder has read them
  uint64_t exchanged[kSlots];
  uint64_t x_full, squares_full;
  uint64_t h_ready, h_read;             // h is written; every warp has multiplied by it
  int neurons[kPending];                // of `gates`
  float squares[kTokens][2];            // of x, this CTA's columns
  float all_squares[Cluster][kTokens];  // and those of the CTAs
  Header headers[kStages];
  Kind kinds[kSums];  // of the items
};

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

template <int Cluster>
constexpr int kBytes = static_cast<int>(sizeof(Shared<Cluster>));

template <int Cluster>
class Kernel {
 public:
  __device__ __forceinline__ Kernel(const RowStream& problem, Shared<Cluster>& shared)
      : p_(problem),
        shared_(shared),
        ring_(smem_address(shared.ring)),
        warp_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        rank_(Cluster == 1 ? 0 : static_cast<int>(cluster_rank())),
        first_column_(rank_ * problem.slice),
        columns_(min(problem.width - first_column_, problem.slice)) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) init_barriers();
    if constexpr (Cluster == 1) {
      __syncthreads();
    } else {
      cluster_sync();
    }
    if (warp_ == kWarps) {
      produce();
    } else if (warp_ == kWarps + 1) {
      add();
    } else {
      multiply();
    }
  }

 private:
  __device__ __forceinline__ void init_barriers() const {
#pragma unroll 1
    for (int s = 0; s < kStages; ++s) {
      barrier_init(smem_address(shared_.full + s), 1);
      barrier_init(smem_address(shared_.empty + s), kWarps);
    }
#pragma unroll 1
    for (int i = 0; i < kSums; ++i) {
      barrier_init(smem_address(shared_.summed + i), kWarps);
      barrier_init(smem_address(shared_.added + i), 1);
    }
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) barrier_init(smem_address(shared_.exchanged + i), 1);
    barrier_init(smem_address(&shared_.x_full), 1);
    barrier_init(smem_address(&shared_.squares_full), 1);
    barrier_init(smem_address(&shared_.h_ready), 1);
    barrier_init(smem_address(&shared_.h_read), kWarps);
    fence_barrier_init();
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) expect_sums(i);
    barrier_arrive_expect(smem_address(&shared_.squares_full), sizeof(shared_.all_squares));
  }
  __device__ __forceinline__ void expect_sums(int slot) const {
    barrier_arrive_expect(smem_address(shared_.exchanged + slot), sizeof(shared_.exchange[slot]));
  }
  __device__ __forceinline__ void advance() {
    if (++stage_ == kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  // --- The producer: loads items, lists active neurons, computes h, decides what comes next ---

  __device__ __forceinline__ void produce() {
    const int clusters = static_cast<int>(gridDim.x) / Cluster,
              cluster = static_cast<int>(blockIdx.x) / Cluster;
    begin_ = static_cast<int>(int64_t{p_.ffn} * cluster / clusters);
    end_ = static_cast<int>(int64_t{p_.ffn} * (cluster + 1) / clusters);
    const int gates = (end_ - begin_ + kRows - 1) / kRows;
    if (!p_.early_weights) wait_for_previous_kernel();
    int loaded = 0, listed = 0, batch = 0;  // batch: neurons whose up item is loaded
#pragma unroll 1
    while (listed < gates || pending_ > 0) {
#pragma unroll 1
      for (; loaded < min(gates, listed + kAhead); ++loaded) load_gate(loaded);
      if (listed < gates) list(listed++);
      const int waiting = pending_ - batch;
      const int next = waiting >= kRows || listed == gates ? min(waiting, kRows) : 0;
      if (p_.up != nullptr && next > 0) load_rows(kUp, batch, next, p_.up);
      if (p_.up == nullptr) batch = next;
      if (batch > 0) {
        // At the end, loads do not wait for sums.
        const bool more = loaded < gates;
        const int rows = more ? finish_up(batch, p_.up_relu) : batch;
        if (rows > 0) load_rows(kDown, 0, rows, p_.down);
        if (!more) finish_up(batch, false);
        head_ = (head_ + batch) % kPending;
        pending_ -= batch;
      }
      batch = p_.up == nullptr ? 0 : next;
    }
    barrier_wait(smem_address(shared_.empty + stage_), parity_ ^ 1);
    if (lane_ == 0) {
      shared_.headers[stage_] = {kEnd, 0};
      barrier_arrive(smem_address(shared_.full + stage_));
    }
    if (p_.activity == nullptr || rank_ != 0) return;
    wait_for_previous_kernel();
    const unsigned nnz = __reduce_add_sync(~0u, nnz_);
    if (lane_ == 0 && nnz > 0) atomicAdd(&p_.activity->nnz, static_cast<unsigned long long>(nnz));
    if (lane_ == 0 && blockIdx.x == 0) {
      atomicAdd(&p_.activity->tokens, static_cast<unsigned long long>(p_.tokens));
    }
  }

  __device__ __forceinline__ void load_gate(int item) {
    const int first = begin_ + item * kRows;
    load(kGate, min(end_ - first, kRows),
         p_.first + int64_t{min(first + lane_, end_ - 1)} * p_.width);
  }
  // Rows of pending neurons.
  __device__ __forceinline__ void load_rows(Kind kind, int first, int rows,
                                            const __nv_bfloat16* weight) {
    const int neuron = shared_.neurons[(head_ + first + min(lane_, rows - 1)) % kPending];
    load(kind, rows, weight + int64_t{neuron} * p_.width);
  }
  // Lane i < rows loads this CTA's columns of the row at its `from`.
  __device__ __forceinline__ void load(Kind kind, int rows, const __nv_bfloat16* from) {
    const int bytes = columns_ * 2;
    const uint32_t full = smem_address(shared_.full + stage_);
    barrier_wait(smem_address(shared_.empty + stage_), parity_ ^ 1);
    if (lane_ == 0) {
      shared_.headers[stage_] = {kind, static_cast<uint16_t>(rows)};
      barrier_arrive_expect(full, rows * bytes);
    }
    __syncwarp();
    if (lane_ < rows) {
      bulk_load(ring_ + stage_ * kStage + lane_ * kPitch, from + first_column_, bytes, full);
    }
    advance();
  }

  // Two lanes per row, four tokens each: the sum over the CTAs, in their order. `use` counts the
  // uses of the slot.
  __device__ __forceinline__ float4 exchanged_sum(int slot, int use) const {
    barrier_wait(smem_address(shared_.exchanged + slot), use & 1);
    float4 sum{};
#pragma unroll
    for (int rank = 0; rank < Cluster; ++rank) {
      add_to(sum, shared_.exchange[slot][rank][lane_ / 2] + lane_ % 2 * 4);
    }
    __syncwarp();
    if (lane_ == 0) expect_sums(slot);
    return sum;
  }
  static __device__ __forceinline__ void add_to(float4& sum, const float* values) {
    const float4 v = *reinterpret_cast<const float4*>(values);
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
  }
  // Appends the active neurons of a gate item to the pending ones, ascending.
  __device__ __forceinline__ void list(int item) {
    const int neuron = begin_ + item * kRows + lane_ / 2, token = lane_ % 2 * 4;
    const float4 sum = exchanged_sum(item % kGateSlots, item / kGateSlots);
    const auto gate = [&](int i, float value) {
      const bool exists = neuron < end_ && token + i < p_.tokens;
      return exists ? above(relu_bf16(value), p_.cut) : 0u;  // NaN passes through
    };
    const uint32_t g0 = gate(0, sum.x), g1 = gate(1, sum.y), g2 = gate(2, sum.z),
                   g3 = gate(3, sum.w);
    nnz_ += (g0 != 0) + (g1 != 0) + (g2 != 0) + (g3 != 0);
    const uint32_t fired = __ballot_sync(~0u, (g0 | g1 | g2 | g3) != 0);
    const uint32_t rows = (fired | fired >> 1) & 0x55555555u;
    const uint32_t mine = 1u << lane_ / 2 * 2;
    if ((rows & mine) != 0) {
      const int at = (head_ + pending_ + __popc(rows & (mine - 1))) % kPending;
      *reinterpret_cast<uint2*>(&shared_.gates[at][token]) = {g0 | g1 << 16, g2 | g3 << 16};
      if (token == 0) shared_.neurons[at] = neuron;
    }
    pending_ += __popc(rows);
    __syncwarp();
  }
  // Writes h of the first pending neurons, and returns how many there are. With `leaves_out` those
  // whose h is 0 for all tokens are left out: dReLU has some.
  __device__ __forceinline__ int finish_up(int rows, bool leaves_out) {
    float4 up{1.0f, 1.0f, 1.0f, 1.0f};
    if (p_.up != nullptr) {
      up = exchanged_sum(kGateSlots + ups_ % kUpSlots, ups_ / kUpSlots);
      ++ups_;
    }
    barrier_wait(smem_address(&shared_.h_read), (downs_ & 1) ^ 1);
    const int row = lane_ / 2, token = lane_ % 2 * 4;
    const uint2 gates =
        *reinterpret_cast<const uint2*>(&shared_.gates[(head_ + row) % kPending][token]);
    const auto h = [&](uint32_t gate, float value) {
      const float g = __uint_as_float(gate << 16);
      return gate == 0 ? 0.0f : (p_.squared ? g * g : g) * relu_if(p_.up_relu, value);
    };
    uint2 out{};
    if (row < rows) {
      out.x = bf16x2(h(gates.x & 0xffff, up.x), h(gates.x >> 16, up.y));
      out.y = bf16x2(h(gates.y & 0xffff, up.z), h(gates.y >> 16, up.w));
    }
    int to = row, left = rows;
    if (leaves_out) {
      const uint32_t fired = __ballot_sync(~0u, (out.x | out.y) != 0);
      const uint32_t kept = (fired | fired >> 1) & 0x55555555u, mine = 1u << lane_ / 2 * 2;
      const int neuron = shared_.neurons[(head_ + row) % kPending];
      left = __popc(kept);
      if (left == 0) return 0;
      to = (kept & mine) != 0 ? __popc(kept & (mine - 1)) : kRows;
      __syncwarp();
      if (to < kRows && token == 0) shared_.neurons[(head_ + to) % kPending] = neuron;
      if (row >= left) *reinterpret_cast<uint2*>(&shared_.h[row][token]) = uint2{};
    }
    if (to < kRows) *reinterpret_cast<uint2*>(&shared_.h[to][token]) = out;
    ++downs_;
    __syncwarp();
    if (lane_ == 0) barrier_arrive(smem_address(&shared_.h_ready));
    return left;
  }

  // --- The adder: adds up the warps' partial sums, in their order, for all CTAs of the cluster ---

  __device__ __forceinline__ void add() const {
    int gates = 0, ups = 0;
#pragma unroll 1
    for (int item = 0;; ++item) {
      const int buffer = item % kSums;
      barrier_wait(smem_address(shared_.summed + buffer), item / kSums & 1);
      const Kind kind = shared_.kinds[buffer];
      if (kind == kEnd) break;
      float4 sum{};
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        add_to(sum, shared_.sums[buffer][warp][lane_ / 2] + lane_ % 2 * 4);
      }
      __syncwarp();
      if (lane_ == 0) barrier_arrive(smem_address(shared_.added + buffer));
      const int slot = kind == kGate ? gates++ % kGateSlots : kGateSlots + ups++ % kUpSlots;
      const uint32_t to = smem_address(shared_.exchange[slot][rank_][lane_ / 2] + lane_ % 2 * 4);
      const uint32_t barrier = smem_address(shared_.exchanged + slot);
#pragma unroll
      for (int rank = 0; rank < Cluster; ++rank) {
        store_remote16<0>(remote_address(to, rank), sum.x, sum.y, sum.z, sum.w,
                          remote_address(barrier, rank), true);
      }
    }
  }

  // --- The warps that multiply ---

  __device__ __forceinline__ void multiply() {
    wait_for_previous_kernel();
    if (warp_ == 0) allow_next_kernel();
    uint32_t x[kTiles][2];
    load_x(x);
    float y[kTiles][4] = {}, acc[4] = {};
    uint32_t h_parity = 0;
    int summed = 0;  // items
#pragma unroll 1
    for (;;) {
      barrier_wait(smem_address(shared_.full + stage_), parity_);
      const Header header = shared_.headers[stage_];
      const uint32_t from = ring_ + stage_ * kStage + warp_ * (kPart * 2);
      if (header.kind == kDown) {
        barrier_wait(smem_address(&shared_.h_ready), h_parity);
        h_parity ^= 1;
        uint32_t h[2];
        load_matrices_transposed(h, smem_address(shared_.h[lane_ % kRows]));
        multiply_down(y, h, from, header.rows);
        __syncwarp();
        if (lane_ == 0) barrier_arrive(smem_address(&shared_.h_read));
      } else {
        if (header.kind != kEnd) multiply_rows(acc, x, from);
        leave_sums(acc, header.kind, summed++);
        if (header.kind == kEnd) break;
      }
      if (lane_ == 0) barrier_arrive(smem_address(shared_.empty + stage_));
      advance();
    }
    store(y);
  }

  // Loads this warp's columns of x, normalised if the layer begins with a norm, with zeros behind
  // the last.
  __device__ __forceinline__ void load_x(uint32_t (&x)[kTiles][2]) {
    const uint32_t full = smem_address(&shared_.x_full);
    if (threadIdx.x == 0) {
      barrier_arrive_expect(full, p_.tokens * columns_ * 2);
#pragma unroll 1
      for (int token = 0; token < p_.tokens; ++token) {
        bulk_load(smem_address(shared_.x[token]), p_.x + int64_t{token} * p_.width + first_column_,
                  columns_ * 2, full);
      }
    }
    const int zeros = (32 - columns_ % 32) % 32 / 8;  // pieces
    for (int i = static_cast<int>(threadIdx.x); i < p_.tokens * zeros; i += kMultipliers) {
      *place_of_x(i / zeros, columns_ + i % zeros * 8) = uint4{};
    }
    barrier_wait(full, 0);
    if (p_.norm != nullptr) normalise();
    named_barrier(1, kMultipliers);
    const uint32_t place = smem_address(shared_.x[min(lane_ % 8, p_.tokens - 1)]) +
                           warp_ * (kPart * 2) + lane_ / 8 * 16;
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      uint32_t b[4] = {};
      if (warp_ * kPart + pair * 32 < columns_) load_matrices(b, place + pair * 64);
      x[2 * pair][0] = b[0];
      x[2 * pair][1] = b[1];
      x[2 * pair + 1][0] = b[2];
      x[2 * pair + 1][1] = b[3];
    }
    named_barrier(1, kMultipliers);  // sums take the place of x
  }
  __device__ __forceinline__ void normalise() {
    // Two warps per token.
    const int token = warp_ / 2, begin = (warp_ % 2 * 32 + lane_) * 8;
    const int end = token < p_.tokens ? columns_ : 0;
    float sum = 0.0f;
    for (int k = begin; k < end; k += 64 * 8) sum += sum_of_squares(*place_of_x(token, k));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane_ == 0) shared_.squares[token][warp_ % 2] = sum;
    named_barrier(1, kMultipliers);
    const uint32_t full = smem_address(&shared_.squares_full);
    if (threadIdx.x < kTokens) {
      const auto& squares = shared_.squares[threadIdx.x];
      const uint32_t bits = __float_as_uint(squares[0] + squares[1]);
      const uint32_t to = smem_address(&shared_.all_squares[rank_][threadIdx.x]);
#pragma unroll
      for (int rank = 0; rank < Cluster; ++rank) {
        store_remote4(remote_address(to, rank), bits, remote_address(full, rank));
      }
    }
    barrier_wait(full, 0);
    float squares = 0.0f;
#pragma unroll
    for (int rank = 0; rank < Cluster; ++rank) squares += shared_.all_squares[rank][token];
    const float inverse = rsqrtf(squares / static_cast<float>(p_.width) + p_.eps);
    for (int k = begin; k < end; k += 64 * 8) {
      const uint4 norm = __ldg(reinterpret_cast<const uint4*>(p_.norm + first_column_ + k));
      uint4& x = *place_of_x(token, k);
      x = {scaled(x.x, norm.x, inverse), scaled(x.y, norm.y, inverse), scaled(x.z, norm.z, inverse),
           scaled(x.w, norm.w, inverse)};
    }
  }
  // Eight values in shared memory.
  __device__ __forceinline__ uint4* place_of_x(int token, int k) const {
    return reinterpret_cast<uint4*>(shared_.x[token] + k * 2);
  }

  // acc [rows, tokens] += this warp's columns of a stage times x. Rows that were not loaded hold
  // undefined values, which only affect their own sums; so do tokens past the last.
  __device__ __forceinline__ void multiply_rows(float (&acc)[4], const uint32_t (&x)[kTiles][2],
                                                uint32_t from) const {
    const uint32_t place = from + lane_ % 16 * kPitch + lane_ / 16 * 16;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int k = warp_ * kPart + tile * 16;
      if (k >= columns_) break;  // uniform over the warp
      uint32_t a[4];
      load_matrices(a, place + tile * 32);
      if (k + 8 >= columns_) a[2] = a[3] = 0;  // never loaded, while x is zero there
      mma_16x8x16(acc, a[0], a[1], a[2], a[3], x[tile][0], x[tile][1]);
    }
  }
  // Hands the sums of an item to the adder, or tells it the end.
  __device__ __forceinline__ void leave_sums(float (&acc)[4], Kind kind, int item) const {
    const int buffer = item % kSums;
    barrier_wait(smem_address(shared_.added + buffer), (item / kSums & 1) ^ 1);
    auto& sums = shared_.sums[buffer][warp_];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float2*>(&sums[lane_ / 4 + half * 8][lane_ % 4 * 2]) = {acc[half * 2],
                                                                                acc[half * 2 + 1]};
      acc[half * 2] = acc[half * 2 + 1] = 0.0f;
    }
    if (threadIdx.x == 0) shared_.kinds[buffer] = kind;
    __syncwarp();
    if (lane_ == 0) barrier_arrive(smem_address(shared_.summed + buffer));
  }
  // y [columns, tokens] += this warp's columns of a stage, transposed, times h. Neurons past the
  // last, whose h is 0, are replaced by it.
  __device__ __forceinline__ void multiply_down(float (&y)[kTiles][4], const uint32_t (&h)[2],
                                                uint32_t from, int rows) const {
    const uint32_t place =
        from + min(lane_ / 16 * 8 + lane_ % 8, rows - 1) * kPitch + lane_ / 8 % 2 * 16;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (warp_ * kPart + tile * 16 >= columns_) break;  // uniform over the warp
      uint32_t a[4];
      load_matrices_transposed(a, place + tile * 32);
      mma_16x8x16(y[tile], a[0], a[1], a[2], a[3], h[0], h[1]);
    }
  }
  __device__ __forceinline__ void store(const float (&y)[kTiles][4]) const {
    float* to = p_.parts + int64_t{static_cast<int>(blockIdx.x) / Cluster} * p_.tokens * p_.width +
                first_column_;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = lane_ % 4 * 2 + i % 2;
        const int column = warp_ * kPart + tile * 16 + lane_ / 4 + i / 2 * 8;
        if (token < p_.tokens && column < columns_) {
          to[int64_t{token} * p_.width + column] = y[tile][i];
        }
      }
    }
  }

  const RowStream& p_;
  Shared<Cluster>& shared_;
  const uint32_t ring_;  // address in shared memory
  const int warp_, lane_, rank_;
  const int first_column_, columns_;  // of this CTA
  int stage_ = 0;
  uint32_t parity_ = 0;
  // The producer alone uses the following.
  int begin_ = 0, end_ = 0;     // neurons
  int head_ = 0, pending_ = 0;  // first pending neuron, and how many there are
  int ups_ = 0, downs_ = 0;     // items whose sums are read, and whose h is written
  unsigned nnz_ = 0;            // that this lane has seen
};

// With 80 registers its CTAs fit beside two of `sum`.
template <int Cluster>
__global__ void __cluster_dims__(Cluster, 1, 1) __maxnreg__(80)
    row_stream_sm90_kernel(const __grid_constant__ RowStream problem) {
  extern __shared__ __align__(128) uint8_t memory[];
  Kernel<Cluster>(problem, *reinterpret_cast<Shared<Cluster>*>(memory)).run();
}

constexpr int kQuads = 32;  // of columns of a CTA
constexpr int kSlices = 8;  // of the parts

struct Sum {
  const float* parts;             // [count, M, D]
  const __nv_bfloat16* residual;  // [M, D], may be y; or null
  __nv_bfloat16* y;               // [M, D]
  int count, tokens, width;
};

// A CTA adds up 128 columns of a token; its warps add up a slice of the parts each.
__global__ void __launch_bounds__(kQuads* kSlices, 8)
    row_stream_sum_sm90_kernel(const __grid_constant__ Sum p) {
  __shared__ float4 sums[kSlices][kQuads];
  allow_next_kernel();
  const int slice = static_cast<int>(threadIdx.x) / kQuads,
            quad = static_cast<int>(threadIdx.x) % kQuads;
  const int column = (static_cast<int>(blockIdx.x) * kQuads + quad) * 4;
  const int64_t at = int64_t{blockIdx.y} * p.width + column, stride = int64_t{p.tokens} * p.width;
  const int begin = p.count * slice / kSlices, end = p.count * (slice + 1) / kSlices;
  const bool inside = column < p.width;
  wait_for_previous_kernel();
  float4 sum{};
  if (inside) {
#pragma unroll 4
    for (int part = begin; part < end; ++part) {
      const float4 v = __ldcs(reinterpret_cast<const float4*>(p.parts + part * stride + at));
      sum.x += v.x;
      sum.y += v.y;
      sum.z += v.z;
      sum.w += v.w;
    }
  }
  sums[slice][quad] = sum;
  __syncthreads();
  if (slice > 0 || !inside) return;
#pragma unroll
  for (int other = 1; other < kSlices; ++other) {
    const float4 v = sums[other][quad];
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
  }
  if (p.residual != nullptr) {
    const uint2 residual = *reinterpret_cast<const uint2*>(p.residual + at);
    const float2 low = to_floats(residual.x), high = to_floats(residual.y);
    sum = {sum.x + low.x, sum.y + low.y, sum.z + high.x, sum.w + high.y};
  }
  *reinterpret_cast<uint2*>(p.y + at) = {bf16x2(sum.x, sum.y), bf16x2(sum.z, sum.w)};
}

// Lets the kernels take their shared memory, and counts the clusters that fit into the device.
template <int Cluster>
cudaError_t prepare(int* clusters) {
  const auto kernel = row_stream_sm90_kernel<Cluster>;
  cudaError_t status = few_token::allow_shared_memory(kernel, kBytes<Cluster>);
  if (status == cudaSuccess) status = few_token::allow_shared_memory(row_stream_sum_sm90_kernel, 0);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(Cluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes<Cluster>;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
}

template <int Cluster>
cudaError_t launch(const RowStream& problem, int clusters, cudaStream_t stream) {
  return launch_dependent(row_stream_sm90_kernel<Cluster>,
                          dim3(static_cast<unsigned>(clusters * Cluster)), kThreads,
                          kBytes<Cluster>, stream, problem);
}

// Both for clusters of 1, 2, 3 and 4 CTAs.
constexpr auto kPrepare = std::array{prepare<1>, prepare<2>, prepare<3>, prepare<4>};
constexpr auto kLaunch = std::array{launch<1>, launch<2>, launch<3>, launch<4>};
static_assert(kMaxStreamWidth == kLaunch.size() * kColumns);

}  // namespace
}  // namespace twell::row_stream

namespace twell {

void row_stream_ffn_cuda(CudaContext& ctx, const BatchFfnCuda& problem,
                         FewTokenWorkspace& workspace) {
  check_ffn_call(ctx, problem.width, problem.ffn);
  TWELL_CHECK(problem.tokens <= row_stream::kTokens && problem.width <= kMaxStreamWidth,
              "row-stream FFN: [{}, {}, {}], at most {} tokens and {} columns", problem.tokens,
              problem.width, problem.ffn, row_stream::kTokens, kMaxStreamWidth);
  const int64_t ctas = ceil_div(problem.width, int64_t{row_stream::kColumns});  // of a cluster
  const auto kind = static_cast<size_t>(ctas - 1);
  int& at_once = workspace.streams_[kind];
  if (at_once == 0) {
    TWELL_CUDA_CHECK(row_stream::kPrepare[kind](&at_once));
    TWELL_CHECK(at_once > 0, "row-stream FFN: {} runs no cluster of its CTAs", ctx.device_name());
  }
  const int clusters = static_cast<int>(
      std::min({int64_t{at_once}, kMaxStreams / ctas, ceil_div(problem.ffn, int64_t{16})}));
  TWELL_CHECK(clusters * problem.tokens * problem.width <= workspace.parts_.size(),
              "row-stream FFN: [{}, {}] in a workspace for {} sums", problem.tokens, problem.width,
              workspace.parts_.size());
  if (problem.tokens == 0) return;
  const bool gated = problem.w_gate != nullptr;
  const auto tokens = static_cast<int>(problem.tokens), width = static_cast<int>(problem.width);
  const row_stream::RowStream stream{
      .x = problem.x,
      .norm = problem.norm,
      .first = gated ? problem.w_gate : problem.w_up,
      .up = gated ? problem.w_up : nullptr,
      .down = problem.w_down,
      .parts = workspace.parts_.data(),
      .activity = problem.activity,
      .eps = problem.eps,
      .tokens = tokens,
      .width = width,
      .ffn = static_cast<int>(problem.ffn),
      .slice = static_cast<int>(round_up(ceil_div(problem.width, ctas), int64_t{32})),
      .early_weights = problem.weights_are_constant,
      .squared = problem.squared,
      .up_relu = problem.up_relu,
      .cut = problem.cut};
  TWELL_CUDA_CHECK(row_stream::kLaunch[kind](stream, clusters, ctx.stream()));
  const row_stream::Sum sum{.parts = workspace.parts_.data(),
                            .residual = problem.add ? problem.y : nullptr,
                            .y = problem.y,
                            .count = clusters,
                            .tokens = tokens,
                            .width = width};
  const dim3 grid(static_cast<unsigned>(ceil_div(width, 4 * row_stream::kQuads)),
                  static_cast<unsigned>(tokens));
  TWELL_CUDA_CHECK(gpu::launch_dependent(row_stream::row_stream_sum_sm90_kernel, grid,
                                         row_stream::kQuads * row_stream::kSlices, 0, ctx.stream(),
                                         sum));
}

}  // namespace twell
