// SPDX-License-Identifier: Apache-2.0
// Feed-forward layer for 1 to 8 tokens, all its weights as one stream: for layers in which so many
// neurons are active that reading the rows of w_up and w_down takes as long as reading the gate.
//
// 1. row_stream: each SM's CTA owns a run of neurons from the gate to its part of y, so h never
// leaves it. One warp, the producer, loads rows by TMA into a ring buffer whose stages hold up to
// 16 rows of 1,024 columns. Sixteen warps split a stage's columns and multiply on mma.sync with
// weights as the 16-row operand. Items of the stream are
//   gate  16 neurons: the producer adds up the warps' partial sums and lists the active neurons of
//         any token. The next gate item is already in flight
//   up    16 active neurons, whenever there are as many, and the rest at the end
//   down  the same neurons: products are added to y [M, D], which stays in registers
// so that memory never waits for a result. Rows of w_up and w_down are read once for all tokens.
//
// 2. row_stream_sum: adds up the CTAs' parts of y in their order.
#include <algorithm>

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
constexpr int kWarps = 16;  // warps that multiply; one more loads
constexpr int kMultipliers = 32 * kWarps;
constexpr int kThreads = kMultipliers + 32;
constexpr int kRows = 16;                  // of a stage, at most
constexpr int kPart = 64;                  // columns of a stage that a warp multiplies
constexpr int kColumns = kWarps * kPart;   // of a stage
constexpr int kTiles = kPart / 16;         // of 16 columns
constexpr int kPitch = kColumns * 2 + 16;  // bytes; the eight rows of ldmatrix differ in banks
constexpr int kStage = kRows * kPitch;     // bytes
constexpr int kMaxStages = 6;
constexpr int kPending = 64;  // active neurons that wait for `up`: at most 15 and a gate item's
constexpr int kUpSums = 2;    // buffer of partial sums, behind those of two gate items

struct RowStream {
  const __nv_bfloat16* x;      // [M, D]
  const __nv_bfloat16* norm;   // [D] weight of the norm of x, or null
  const __nv_bfloat16* first;  // [F, D] w_gate, or w_up without a gate
  const __nv_bfloat16* up;     // [F, D], null without a gate
  const __nv_bfloat16* down;   // [F, D]
  float* parts;                // [CTAs, M, D]
  ActivityCuda* activity;      // counts, or null
  float eps;                   // of the norm
  int tokens, width, ffn;
  int stages;          // of the ring buffer, at least as many as an item has
  bool early_weights;  // the first weight may be read before the predecessor has finished
  bool squared;        // f(g) = g^2
  bool up_relu;        // dReLU
  uint32_t cut;        // of FATReLU
};

// Bytes of a token's x in shared memory: whole runs of 32 columns, and 16 bytes more, so that the
// eight rows of ldmatrix differ in banks.
__host__ __device__ constexpr int x_pitch(int width) { return (width + 31) / 32 * 64 + 16; }

enum Kind : uint32_t { kGate, kUp, kDown, kEnd };

// Says in one word what a stage holds.
struct Header {
  uint32_t bits;
  __device__ __forceinline__ Kind kind() const { return static_cast<Kind>(bits & 0xff); }
  __device__ __forceinline__ int segment() const { return static_cast<int>(bits >> 8 & 0xff); }
  __device__ __forceinline__ int rows() const { return static_cast<int>(bits >> 16 & 0xff); }
  // The buffer that takes the partial sums of a gate or up stage.
  __device__ __forceinline__ int buffer() const { return static_cast<int>(bits >> 24); }
};

struct Shared {
  float sums[3][kWarps][kRows][kTokens];  // partial sums of gate (two) and up items
  uint16_t gates[kPending][kTokens];      // bf16, of active neurons in order
  uint16_t h[kRows][kTokens];             // bf16, of the neurons of a down item
  uint64_t full[kMaxStages], empty[kMaxStages];
  uint64_t summed[3];  // partial sums are complete
  uint64_t x_full;
  uint64_t h_ready, h_read;   // h is written; every warp has multiplied by it
  int neurons[kPending];      // of `gates`
  float squares[kTokens][2];  // of x
  Header headers[kMaxStages];
};

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Segments: of 1,024 columns that the width has at most.
template <int Segments>
class Kernel {
 public:
  __device__ __forceinline__ Kernel(const RowStream& problem, Shared& shared, uint8_t* memory)
      : p_(problem),
        shared_(shared),
        memory_(memory),
        ring_(smem_address(memory)),
        x_(ring_ + problem.stages * kStage),
        warp_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        segments_((problem.width + kColumns - 1) / kColumns),
        x_pitch_(x_pitch(problem.width)) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int s = 0; s < kMaxStages; ++s) {
        barrier_init(smem_address(shared_.full + s), 1);
        barrier_init(smem_address(shared_.empty + s), kWarps);
      }
#pragma unroll 1
      for (int i = 0; i < 3; ++i) barrier_init(smem_address(shared_.summed + i), kWarps);
      barrier_init(smem_address(&shared_.x_full), 1);
      barrier_init(smem_address(&shared_.h_ready), 1);
      barrier_init(smem_address(&shared_.h_read), kWarps);
      fence_barrier_init();
    }
    __syncthreads();
    if (warp_ == kWarps) {
      produce();
    } else {
      multiply();
    }
  }

 private:
  __device__ __forceinline__ void advance() {
    if (++stage_ == p_.stages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  // --- The producer: loads items, adds up their sums, decides what comes next ---

  __device__ __forceinline__ void produce() {
    const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    begin_ = static_cast<int>(int64_t{p_.ffn} * cta / ctas);
    end_ = static_cast<int>(int64_t{p_.ffn} * (cta + 1) / ctas);
    const int gates = (end_ - begin_ + kRows - 1) / kRows;
    if (!p_.early_weights) wait_for_previous_kernel();
    int loaded = 0, listed = 0, batch = 0;
    if (gates > 0) load_gate(loaded++);
#pragma unroll 1
    while (listed < gates || pending_ > 0 || batch > 0) {
      const bool more = loaded < gates;
      if (more) load_gate(loaded++);
      if (batch > 0) {
        // Once another item has been loaded, the sums are there; at the end, loads do not wait for
        // them.
        if (more) finish_up(batch);
        load_rows(kDown, batch, p_.down);
        if (!more) finish_up(batch);
        remove(batch);
        batch = 0;
      }
      if (listed < gates) list(listed++);
      if (pending_ >= kRows || (listed == gates && pending_ > 0)) {
        batch = min(pending_, kRows);
        if (p_.up != nullptr) {
          load_rows(kUp, batch, p_.up);
        } else {
          load_rows(kDown, batch, p_.down);
          finish_up(batch);
          remove(batch);
          batch = 0;
        }
      }
    }
    barrier_wait(smem_address(shared_.empty + stage_), parity_ ^ 1);
    if (lane_ == 0) {
      shared_.headers[stage_] = {kEnd};
      barrier_arrive(smem_address(shared_.full + stage_));
    }
    if (p_.activity == nullptr) return;
    wait_for_previous_kernel();
    const unsigned nnz = __reduce_add_sync(~0u, nnz_);
    if (lane_ == 0 && nnz > 0) atomicAdd(&p_.activity->nnz, static_cast<unsigned long long>(nnz));
    if (lane_ == 0 && blockIdx.x == 0) {
      atomicAdd(&p_.activity->tokens, static_cast<unsigned long long>(p_.tokens));
    }
  }

  __device__ __forceinline__ void load_gate(int item) {
    const int first = begin_ + item * kRows;
    load(kGate, min(end_ - first, kRows), item % 2,
         p_.first + int64_t{min(first + lane_, end_ - 1)} * p_.width);
  }
  // Rows of the first pending neurons.
  __device__ __forceinline__ void load_rows(Kind kind, int rows, const __nv_bfloat16* weight) {
    const int neuron = shared_.neurons[(head_ + min(lane_, rows - 1)) % kPending];
    load(kind, rows, kUpSums, weight + int64_t{neuron} * p_.width);
  }
  // Lane i < rows loads the row at its `from`.
  __device__ __forceinline__ void load(Kind kind, int rows, int buffer, const __nv_bfloat16* from) {
#pragma unroll 1
    for (int segment = 0; segment < segments_; ++segment) {
      const int bytes = min(p_.width - segment * kColumns, kColumns) * 2;
      const uint32_t full = smem_address(shared_.full + stage_);
      barrier_wait(smem_address(shared_.empty + stage_), parity_ ^ 1);
      if (lane_ == 0) {
        shared_.headers[stage_] = {kind | static_cast<uint32_t>(segment) << 8 |
                                   static_cast<uint32_t>(rows) << 16 |
                                   static_cast<uint32_t>(buffer) << 24};
        barrier_arrive_expect(full, rows * bytes);
      }
      __syncwarp();
      if (lane_ < rows) {
        bulk_load(ring_ + stage_ * kStage + lane_ * kPitch, from + segment * kColumns, bytes, full);
      }
      advance();
    }
  }

  // Two lanes per row, four tokens each: the sum over the warps, in their order.
  __device__ __forceinline__ float4 add_sums(int buffer) const {
    float4 sum{};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float4 v =
          *reinterpret_cast<const float4*>(&shared_.sums[buffer][warp][lane_ / 2][lane_ % 2 * 4]);
      sum.x += v.x;
      sum.y += v.y;
      sum.z += v.z;
      sum.w += v.w;
    }
    return sum;
  }
  // Appends the active neurons of a gate item to the pending ones, ascending.
  __device__ __forceinline__ void list(int item) {
    const int buffer = item % 2;
    barrier_wait(smem_address(shared_.summed + buffer), item / 2 & 1);
    const int neuron = begin_ + item * kRows + lane_ / 2, token = lane_ % 2 * 4;
    const float4 sum = add_sums(buffer);
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
  // Writes h of the first pending neurons.
  __device__ __forceinline__ void finish_up(int rows) {
    float4 up{1.0f, 1.0f, 1.0f, 1.0f};
    if (p_.up != nullptr) {
      barrier_wait(smem_address(shared_.summed + kUpSums), batches_ & 1);
      up = add_sums(kUpSums);
    }
    barrier_wait(smem_address(&shared_.h_read), (batches_ & 1) ^ 1);
    ++batches_;
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
    *reinterpret_cast<uint2*>(&shared_.h[row][token]) = out;
    __syncwarp();
    if (lane_ == 0) barrier_arrive(smem_address(&shared_.h_ready));
  }
  __device__ __forceinline__ void remove(int rows) {
    head_ = (head_ + rows) % kPending;
    pending_ -= rows;
  }

  // --- The warps that multiply ---

  __device__ __forceinline__ void multiply() {
    wait_for_previous_kernel();
    if (warp_ == 0) allow_next_kernel();
    load_x();
    float y[Segments][kTiles][4] = {}, acc[4] = {};
    uint32_t h_parity = 0;
#pragma unroll 1
    for (;;) {
      barrier_wait(smem_address(shared_.full + stage_), parity_);
      const Header header = shared_.headers[stage_];
      if (header.kind() == kEnd) break;
      const uint32_t from = ring_ + stage_ * kStage + warp_ * (kPart * 2);
      const int segment = header.segment();
      const bool last = segment + 1 == segments_;
      if (header.kind() == kDown) {
        if (segment == 0) {
          barrier_wait(smem_address(&shared_.h_ready), h_parity);
          h_parity ^= 1;
        }
        uint32_t h[2];
        load_matrices_transposed(h, smem_address(shared_.h[lane_ % kRows]));
#pragma unroll
        for (int s = 0; s < Segments; ++s) {
          if (s == segment) multiply_down(y[s], h, from, s, header.rows());
        }
        __syncwarp();
        if (last && lane_ == 0) barrier_arrive(smem_address(&shared_.h_read));
      } else {
        multiply_rows(acc, from, segment);
        if (last) leave_sums(acc, header.buffer());
        __syncwarp();
        if (last && lane_ == 0) barrier_arrive(smem_address(shared_.summed + header.buffer()));
      }
      if (lane_ == 0) barrier_arrive(smem_address(shared_.empty + stage_));
      advance();
    }
    store(y);
  }

  // Loads x, normalised if the layer begins with a norm, with zeros behind the last column.
  __device__ __forceinline__ void load_x() {
    const uint32_t full = smem_address(&shared_.x_full);
    if (threadIdx.x == 0) {
      barrier_arrive_expect(full, p_.tokens * p_.width * 2);
#pragma unroll 1
      for (int token = 0; token < p_.tokens; ++token) {
        bulk_load(x_ + token * x_pitch_, p_.x + int64_t{token} * p_.width, p_.width * 2, full);
      }
    }
    const int zeros = (32 - p_.width % 32) % 32 / 8;  // pieces
    for (int i = static_cast<int>(threadIdx.x); i < p_.tokens * zeros; i += kMultipliers) {
      *place_of_x(i / zeros, p_.width + i % zeros * 8) = uint4{};
    }
    barrier_wait(full, 0);
    if (p_.norm != nullptr) normalise();
    named_barrier(1, kMultipliers);
  }
  __device__ __forceinline__ void normalise() {
    // Two warps per token.
    const int token = warp_ / 2, begin = (warp_ % 2 * 32 + lane_) * 8;
    if (token >= p_.tokens) {
      named_barrier(1, kMultipliers);
      return;
    }
    float sum = 0.0f;
    for (int k = begin; k < p_.width; k += 64 * 8) sum += sum_of_squares(*place_of_x(token, k));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane_ == 0) shared_.squares[token][warp_ % 2] = sum;
    named_barrier(1, kMultipliers);
    const float squares = shared_.squares[token][0] + shared_.squares[token][1];
    const float inverse = rsqrtf(squares / static_cast<float>(p_.width) + p_.eps);
    for (int k = begin; k < p_.width; k += 64 * 8) {
      const uint4 norm = __ldg(reinterpret_cast<const uint4*>(p_.norm + k));
      uint4& x = *place_of_x(token, k);
      x = {scaled(x.x, norm.x, inverse), scaled(x.y, norm.y, inverse), scaled(x.z, norm.z, inverse),
           scaled(x.w, norm.w, inverse)};
    }
  }
  // Eight values in shared memory.
  __device__ __forceinline__ uint4* place_of_x(int token, int k) const {
    return reinterpret_cast<uint4*>(memory_ + p_.stages * kStage + token * x_pitch_ + k * 2);
  }

  // acc [rows, tokens] += this warp's columns of a stage times x. Rows that were not loaded hold
  // undefined values, which only affect their own sums; so do tokens past the last.
  __device__ __forceinline__ void multiply_rows(float (&acc)[4], uint32_t from, int segment) const {
    const int begin = segment * kColumns + warp_ * kPart;
    const uint32_t a_place = from + lane_ % 16 * kPitch + lane_ / 16 * 16;
    const uint32_t b_place =
        x_ + min(lane_ % 8, p_.tokens - 1) * x_pitch_ + begin * 2 + lane_ / 8 * 16;
#pragma unroll
    for (int pair = 0; pair < kPart / 32; ++pair) {
      if (begin + pair * 32 >= p_.width) break;  // uniform over the warp
      uint32_t b[4];
      load_matrices(b, b_place + pair * 64);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int k = begin + pair * 32 + i * 16;
        if (k >= p_.width) break;
        uint32_t a[4];
        load_matrices(a, a_place + pair * 64 + i * 32);
        if (k + 8 >= p_.width) a[2] = a[3] = 0;  // never loaded, while x is zero there
        mma_16x8x16(acc, a[0], a[1], a[2], a[3], b[2 * i], b[2 * i + 1]);
      }
    }
  }
  __device__ __forceinline__ void leave_sums(float (&acc)[4], int buffer) const {
    auto& sums = shared_.sums[buffer][warp_];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float2*>(&sums[lane_ / 4 + half * 8][lane_ % 4 * 2]) = {acc[half * 2],
                                                                                acc[half * 2 + 1]};
      acc[half * 2] = acc[half * 2 + 1] = 0.0f;
    }
  }
  // y [columns, tokens] += this warp's columns of a stage, transposed, times h. Neurons past the
  // last, whose h is 0, are replaced by it.
  __device__ __forceinline__ void multiply_down(float (&y)[kTiles][4], const uint32_t (&h)[2],
                                                uint32_t from, int segment, int rows) const {
    const int begin = segment * kColumns + warp_ * kPart;
    const uint32_t place =
        from + min(lane_ / 16 * 8 + lane_ % 8, rows - 1) * kPitch + lane_ / 8 % 2 * 16;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (begin + tile * 16 >= p_.width) break;  // uniform over the warp
      uint32_t a[4];
      load_matrices_transposed(a, place + tile * 32);
      mma_16x8x16(y[tile], a[0], a[1], a[2], a[3], h[0], h[1]);
    }
  }
  __device__ __forceinline__ void store(const float (&y)[Segments][kTiles][4]) const {
    float* to = p_.parts + int64_t{blockIdx.x} * p_.tokens * p_.width;
#pragma unroll
    for (int s = 0; s < Segments; ++s) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = lane_ % 4 * 2 + i % 2;
          const int column = s * kColumns + warp_ * kPart + tile * 16 + lane_ / 4 + i / 2 * 8;
          if (token < p_.tokens && column < p_.width) {
            to[int64_t{token} * p_.width + column] = y[s][tile][i];
          }
        }
      }
    }
  }

  const RowStream& p_;
  Shared& shared_;
  uint8_t* const memory_;
  const uint32_t ring_, x_;  // addresses in shared memory
  const int warp_, lane_;
  const int segments_, x_pitch_;
  int stage_ = 0;
  uint32_t parity_ = 0;
  // The producer alone uses the following.
  int begin_ = 0, end_ = 0;     // neurons
  int head_ = 0, pending_ = 0;  // first pending neuron, and how many there are
  uint32_t batches_ = 0;        // whose h is written
  unsigned nnz_ = 0;            // that this lane has seen
};

template <int Segments>
__global__ void __launch_bounds__(kThreads, 1)
    row_stream_sm90_kernel(const __grid_constant__ RowStream problem) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ __align__(16) Shared shared;
  Kernel<Segments>(problem, shared, memory).run();
}

constexpr int kQuads = 32;   // of columns of a CTA
constexpr int kSlices = 16;  // of the parts

struct Sum {
  const float* parts;             // [count, M, D]
  const __nv_bfloat16* residual;  // [M, D], may be y; or null
  __nv_bfloat16* y;               // [M, D]
  int count, tokens, width;
};

// A CTA adds up 128 columns of a token; its warps add up a slice of the parts each.
__global__ void __launch_bounds__(kQuads* kSlices)
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
#pragma unroll 9  // of 132 parts
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

template <int Segments>
cudaError_t launch(RowStream& problem, int ctas, cudaStream_t stream) {
  const auto kernel = row_stream_sm90_kernel<Segments>;
  int most = 0;
  cudaError_t status = allow_most_shared_memory(kernel);
  if (status == cudaSuccess) {
    status = device_attribute(most, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  }
  if (status != cudaSuccess) return status;
  const int x_bytes = problem.tokens * x_pitch(problem.width);
  const int free_bytes = most - static_cast<int>(sizeof(Shared)) - 1024 - x_bytes;
  problem.stages = std::min(free_bytes / kStage, kMaxStages);
  if (problem.stages < ceil_div(problem.width, kColumns)) return cudaErrorInvalidConfiguration;
  return launch_dependent(kernel, dim3(static_cast<unsigned>(ctas)), kThreads,
                          static_cast<uint32_t>(problem.stages * kStage + x_bytes), stream,
                          problem);
}

}  // namespace
}  // namespace twell::row_stream

namespace twell {

void row_stream_ffn_cuda(CudaContext& ctx, const BatchFfnCuda& problem,
                         FewTokenWorkspace& workspace) {
  check_ffn_call(ctx, problem.width, problem.ffn);
  const int ctas = static_cast<int>(
      std::min({int64_t{ctx.multiprocessors()}, kMaxStreams, ceil_div(problem.ffn, int64_t{16})}));
  TWELL_CHECK(problem.tokens <= row_stream::kTokens && problem.width <= kMaxStreamWidth &&
                  ctas * problem.tokens * problem.width <= workspace.parts_.size(),
              "row-stream FFN: [{}, {}, {}], at most {} tokens and {} columns", problem.tokens,
              problem.width, problem.ffn, row_stream::kTokens, kMaxStreamWidth);
  if (problem.tokens == 0) return;
  const bool gated = problem.w_gate != nullptr;
  const auto tokens = static_cast<int>(problem.tokens), width = static_cast<int>(problem.width);
  row_stream::RowStream stream{.x = problem.x,
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
                               .stages = 0,
                               .early_weights = problem.weights_are_constant,
                               .squared = problem.squared,
                               .up_relu = problem.up_relu,
                               .cut = problem.cut};
  TWELL_CUDA_CHECK(width <= 2 * row_stream::kColumns
                       ? row_stream::launch<2>(stream, ctas, ctx.stream())
                       : row_stream::launch<4>(stream, ctas, ctx.stream()));
  const row_stream::Sum sum{.parts = workspace.parts_.data(),
                            .residual = problem.add ? problem.y : nullptr,
                            .y = problem.y,
                            .count = ctas,
                            .tokens = tokens,
                            .width = width};
  const dim3 grid(static_cast<unsigned>(ceil_div(width, 4 * row_stream::kQuads)),
                  static_cast<unsigned>(tokens));
  TWELL_CUDA_CHECK(gpu::launch_dependent(row_stream::row_stream_sum_sm90_kernel, grid,
                                         row_stream::kQuads * row_stream::kSlices, 0, ctx.stream(),
                                         sum));
}

}  // namespace twell
