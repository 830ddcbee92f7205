// SPDX-License-Identifier: Apache-2.0
// Rotation and quantisation of rows. The Hadamard transform's steps over the lowest three bits of
// the column stay within a thread's 16-byte pieces, as do those over the highest; shared memory
// then gives each thread columns that differ in the bits between. A warp takes a row of up to 2,048
// values where rows are many, else a block does.
#include "twell/base/reduce.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/ops/ffn/screened/rotated_screen_cuda.h"
#include "twell/ops/rms_norm/norm_rows.cuh"

namespace twell {
namespace {

using namespace norm_rows;

// Bounds.

// Factors that make computed norms upper bounds of the exact ones (docs/numerics.md): kInflate is
// for f32 sums of squares, kTransform |r| bounds the error of the f32 transform of a row.
constexpr float kInflate = 1.0f + 0x1p-16f;
constexpr float kTransform = 13.0f * 0x1p-24f;
constexpr float kRandomStep = 0x1p-16f;

// What the bounds need to know of a row r, whose values are those of inverse * r rounded.
struct RowSums {
  float largest;  // max |r|, NaN if a value is NaN
  float inverse;  // 127 / largest, rounded down
  float squares;  // |r|^2
  float errors;   // |values - inverse * r|^2; strict bounds only
  int products;   // |values|^2; strict bounds of the gate only

  __device__ float norm() const { return kInflate * inverse * sqrtf(squares); }
  __device__ float error() const { return kInflate * sqrtf(errors) + kTransform * norm(); }
};

__device__ TokenBound token_bound(const RowSums& x, int64_t width, ScreenBound bound,
                                  const float* rounding) {
  if (x.largest == 0.0f) return {-kScreenMostSpread - 1, 1};
  if (!rotation_takes(x.largest)) return {kScreenMostBase, 0};
  const auto columns = static_cast<float>(width);
  const auto unit = static_cast<float>(1 << screen_shift(width));
  const float norm = x.norm();
  float base = 0.0f, slope = 0.0f;
  if (bound == ScreenBound::kStrict) {
    base = __fmul_ru(unit * norm, *rounding);
    slope = 2.0f * unit * x.error();
  } else {
    const float all = norm + kInflate * sqrtf(columns);  // |x8| at most
    const float typical = kScreenTypical * sqrtf(columns);
    const float middle = sqrtf(all * all + typical * typical);
    const float half = 0.5f * kScreenDeviations + 2.0f * kRandomStep * sqrtf(columns);
    const float sums = (screen_sum_error(width) + 28.0f * 0x1p-24f) * norm;
    base = kInflate * unit * (half * 0.5f * (middle + all * all / middle) + sums * 0.5f * typical);
    slope =
        kInflate * unit * kScreenSquares * columns * (half * 0.5f / middle + sums * 0.5f / typical);
  }
  // Both fit their ranges, whatever the row (docs/numerics.md).
  return {static_cast<int32_t>(ceilf(base)), static_cast<int32_t>(ceilf(slope))};
}

// Spread of a row of the gate. A strict bound's rounding rises to the row's error.
__device__ int32_t gate_spread(const RowSums& w, int64_t width, ScreenBound bound,
                               float* rounding) {
  if (w.largest == 0.0f) return 0;
  if (!rotation_takes(w.largest)) return kScreenAlways;
  const float norm = w.norm();
  if (bound == ScreenBound::kProbabilistic) {
    return static_cast<int32_t>(ceilf(norm * norm / (kScreenSquares * static_cast<float>(width))));
  }
  const float error = w.error() + screen_sum_error(width) * norm;
  // Errors are not negative, so that their bits order as they do. Most rows see a larger one.
  if (error > __ldcg(rounding)) {
    atomicMax(reinterpret_cast<int*>(rounding), __float_as_int(error));
  }
  return static_cast<int32_t>(ceilf(0.5f * __fsqrt_ru(__int2float_ru(w.products))));
}

// The width of rows, which the compiler knows where a warp takes a row.
template <int kRowThreads, int kPieces>
__device__ constexpr int64_t loaded_width(int64_t width) {
  return kRowThreads == 32 ? int64_t{32} * kPiece * kPieces : width;
}

// What the kernels do to a row before and after: load leaves its pieces in registers, stored_row is
// where its values go, and finish stores its bounds there.

struct PlainRows {
  int64_t count, width;
  const __nv_bfloat16* from;
  int8_t* values;
  ScreenBound bound;

  __device__ int64_t stored_row(int64_t row) const { return row; }
  template <int kRowThreads, int kPieces>
  __device__ __forceinline__ void load(int64_t row, Piece (&pieces)[kPieces]) const {
    const int64_t of_row = loaded_width<kRowThreads, kPieces>(width) / kPiece;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int64_t at = threadIdx.x % kRowThreads + int64_t{i} * kRowThreads;
      if (at >= of_row) break;
      pieces[i] = norm_rows::load<kRowThreads == 32>(reinterpret_cast<const Piece*>(from) +
                                                     row * of_row + at);
    }
  }
};

struct GateRows : PlainRows {
  static constexpr bool kGate = true;
  int64_t listed;  // rows of spread
  int32_t* spread;
  float* rounding;

  __device__ int64_t rows() const { return listed; }
  __device__ bool skips(int64_t row, bool writes) const {
    if (row < count) return false;
    if (writes) spread[row] = 0;
    return true;
  }
  __device__ void finish(int64_t row, const RowSums& sums) const {
    spread[row] = gate_spread(sums, width, bound, rounding);
  }
};

struct TokenRows : PlainRows {
  static constexpr bool kGate = false;
  TokenBound* bounds;
  const float* rounding;

  __device__ int64_t rows() const { return count; }
  __device__ bool skips(int64_t, bool) const { return false; }
  __device__ void finish(int64_t row, const RowSums& sums) const {
    bounds[row] = token_bound(sums, width, bound, rounding);
  }
};

struct NormedRows : TokenRows {
  RmsNormCuda norm;

  __device__ int64_t stored_row(int64_t row) const {
    return norm.y_rows == nullptr ? row : norm.y_rows[row];
  }
  template <int kRowThreads, int kPieces>
  __device__ __forceinline__ void load(int64_t row, Piece (&pieces)[kPieces]) const {
    RmsNormCuda p = norm;
    p.width = loaded_width<kRowThreads, kPieces>(width);
    norm_row<kRowThreads, true>(p, row, pieces);
  }
};

// Transforms.

// Steps of a Hadamard transform of values[0, kSize), over index distances from kFirst on.
template <int kSize, int kFirst = 1>
__device__ __forceinline__ void transform(float* values) {
#pragma unroll
  for (int distance = kFirst; distance < kSize; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if ((i & distance) != 0) continue;
      const float a = values[i], b = values[i + distance];
      values[i] = a + b;
      values[i + distance] = a - b;
    }
  }
}

// Signs, and the steps over the eight columns of a piece.
__device__ __forceinline__ void begin_piece(Piece piece, int at, float* values) {
  const uint32_t signs = rotation_signs(static_cast<uint32_t>(at));
#pragma unroll
  for (int k = 0; k < kPiece / 2; ++k) {
    const uint32_t pair =
        *reinterpret_cast<const uint32_t*>(&piece.pair[k]) ^ (signs << k & 0x80008000u);
    values[2 * k] = __uint_as_float(pair << 16);
    values[2 * k + 1] = __uint_as_float(pair & 0xffff0000u);
  }
  transform<kPiece>(values);
}

// A value's place in shared memory. 16-byte writes of pieces and reads of columns at a distance of
// eight both touch all banks: the halves of every second four pieces are exchanged, and every
// 2^kPadding values shift the next by eight banks.
template <int kPadding>
__device__ __forceinline__ int place(int column) {
  return (column ^ (column >> 3 & 4)) + (column >> kPadding) * 8;
}
template <int kPadding>
__device__ __forceinline__ void write_piece(float* shared, int at, const float* values) {
  auto* first = reinterpret_cast<float4*>(shared + place<kPadding>(at * kPiece));
  auto* second = reinterpret_cast<float4*>(shared + place<kPadding>(at * kPiece + 4));
  *first = make_float4(values[0], values[1], values[2], values[3]);
  *second = make_float4(values[4], values[5], values[6], values[7]);
}

// Quantisation.

constexpr int kStoredGroup = 16;  // values that are stored side by side

// The 16-bit random numbers of all positions, for rows of x and of w_gate.
struct RandomTable {
  alignas(16) uint16_t of[2][kMaxRotatedWidth];
};
constexpr RandomTable make_random_table() {
  RandomTable table{};
  for (int64_t i = 0; i < kMaxRotatedWidth; ++i) {
    for (int gate = 0; gate < 2; ++gate) {
      table.of[gate][i] = static_cast<uint16_t>(screen_random(i, gate != 0));
    }
  }
  return table;
}
__device__ constexpr RandomTable kRandom = make_random_table();

// The larger of a and |b|, NaN if either is.
__device__ __forceinline__ float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(fabsf(b)));
  return result;
}

// Largest magnitude and squares of values[0, kSize).
template <int kSize>
__device__ __forceinline__ void measure(const float* values, RowSums& sums) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    sums.largest = larger(sums.largest, values[i]);
    sums.squares = fmaf(values[i], values[i], sums.squares);
  }
}
__device__ __forceinline__ float warp_largest(float value) {
  // Magnitudes order as their bits do, with NaN last.
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(value)));
}
__device__ __forceinline__ float inverse_scale(float largest) {
  return rotation_takes(largest) ? __fdiv_rd(127.0f, largest) : 0.0f;
}

__device__ __forceinline__ uint32_t low_bytes(const float* values) {
  const uint32_t low = __byte_perm(__float_as_uint(values[0]), __float_as_uint(values[1]), 0x0040);
  const uint32_t high = __byte_perm(__float_as_uint(values[2]), __float_as_uint(values[3]), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

// Stores a group of 16 values. |inverse * value| is at most 127, before and after rounding.
template <bool kGate, ScreenBound kBound>
__device__ __forceinline__ void quantise(const float* values, int group, int8_t* row,
                                         RowSums& sums) {
  constexpr float kInteger = 12582912.0f;  // 1.5 * 2^23: adding it leaves integers in the low bits
  float integers[kStoredGroup];
  if constexpr (kBound == ScreenBound::kStrict) {
#pragma unroll
    for (int i = 0; i < kStoredGroup; ++i) {
      integers[i] = __fmaf_rn(values[i], sums.inverse, kInteger);
      const float error = __fmaf_rn(values[i], sums.inverse, kInteger - integers[i]);
      sums.errors = fmaf(error, error, sums.errors);
    }
  } else {
    uint4 random[2];
    const auto* from = reinterpret_cast<const uint4*>(kRandom.of[kGate ? 1 : 0]) + group * 2;
    random[0] = __ldg(from);
    random[1] = __ldg(from + 1);
    const auto* words = reinterpret_cast<const uint32_t*>(random);
#pragma unroll
    for (int i = 0; i < kStoredGroup; ++i) {
      // A float of 128 + bits * 2^-16.
      const float added =
          __uint_as_float(__byte_perm(words[i / 2], 0x43000000u, i % 2 == 0 ? 0x7610 : 0x7632));
      integers[i] = __fadd_rd(__fmaf_rn(values[i], sums.inverse, added), kInteger - 128.0f);
    }
  }
  uint4 packed{};
  if (sums.inverse > 0.0f) {
    packed = make_uint4(low_bytes(integers), low_bytes(integers + 4), low_bytes(integers + 8),
                        low_bytes(integers + 12));
  }
  if constexpr (kGate && kBound == ScreenBound::kStrict) {
    for (const uint32_t word : {packed.x, packed.y, packed.z, packed.w}) {
      sums.products = __dp4a(static_cast<int>(word), static_cast<int>(word), sums.products);
    }
  }
  reinterpret_cast<uint4*>(row)[group] = packed;
}

// A warp per row of 256 kPieces columns. First a lane has the pieces whose index is its own plus a
// multiple of 32, and transforms over bits 0-2 and from 8 on. Then it has 32 columns that differ in
// bits 3-7, of one piece in 256 columns, for up to four of those at a time.
// Two CTAs share an SM's registers, but for the widest rows of w_gate, which need more: they are
// rotated once.
template <typename Rows, int kPieces>
__global__ void __launch_bounds__(kThreads, Rows::kGate&& kPieces == 8 ? 1 : 2)
    rotate_warp_kernel(Rows p) {
  constexpr int kColumns = 32 * kPiece;  // of one piece per lane
  constexpr int kTurn = 4;               // pieces per lane in shared memory at a time
  constexpr int kTurns = (kPieces + kTurn - 1) / kTurn;
  __shared__ __align__(16) float exchanged[kWarps][kTurn * (kColumns + 8)];
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= p.rows() || p.skips(row, lane == 0)) return;
  float* shared = exchanged[threadIdx.x / 32];
  const int64_t to = p.stored_row(row);

  Piece pieces[kPieces];
  p.template load<32>(row, pieces);
  float values[kTurns * kTurn * kPiece];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) begin_piece(pieces[i], lane + 32 * i, values + i * kPiece);
  constexpr int kTogether = kPieces & -kPieces;  // pieces of a lane in one block
#pragma unroll
  for (int i = 0; i < kPieces; i += kTogether) {
    transform<kTogether * kPiece, kPiece>(values + i * kPiece);
  }

  const int column = lane % 8, part = lane / 8;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    float* of_turn = values + turn * kTurn * kPiece;
    if (turn > 0) __syncwarp();
#pragma unroll
    for (int i = 0; i < kTurn; ++i) {
      if (turn * kTurn + i < kPieces) write_piece<8>(shared, lane + 32 * i, of_turn + i * kPiece);
    }
    __syncwarp();
    const bool holds = turn * kTurn + part < kPieces;
#pragma unroll
    for (int k = 0; k < 32; ++k) {
      of_turn[k] = holds ? shared[place<8>(part * kColumns + k * kPiece + column)] : 0.0f;
    }
    transform<32>(of_turn);
  }

  RowSums sums{};
  measure<kTurns * 32>(values, sums);
  sums.largest = warp_largest(sums.largest);
  sums.inverse = inverse_scale(sums.largest);
  const auto store = [&]<ScreenBound kBound>() {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int at = turn * kTurn + part;
      if (at >= kPieces) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        quantise<Rows::kGate, kBound>(values + turn * 32 + half * kStoredGroup,
                                      (at * 2 + half) * 8 + column, p.values + to * p.width, sums);
      }
    }
  };
  if (p.bound == ScreenBound::kStrict) {
    store.template operator()<ScreenBound::kStrict>();
  } else {
    store.template operator()<ScreenBound::kProbabilistic>();
  }
  sums.squares = warp_sum(sums.squares);
  sums.errors = warp_sum(sums.errors);
  sums.products = warp_sum(sums.products);
  if (lane == 0) p.finish(to, sums);
}

// Steps over kSize columns at distances of 128, in place.
template <int kSize>
__device__ __forceinline__ void transform_far(float* shared, int columns) {
  for (int i = static_cast<int>(threadIdx.x); i < columns / kSize; i += kThreads) {
    float* first = shared + place<7>((i >> 7) * kSize * 128 + (i & 127));
    float values[kSize];
#pragma unroll
    for (int k = 0; k < kSize; ++k) values[k] = first[k * (128 + 8)];
    transform<kSize>(values);
#pragma unroll
    for (int k = 0; k < kSize; ++k) first[k * (128 + 8)] = values[k];
  }
}

int64_t shared_bytes(int64_t width) {
  return (width + 127) / 128 * (128 + 8) * static_cast<int64_t>(sizeof(float));
}

// Loads a row's pieces, transforms them over bits 0-2, and over bit 11 in long blocks, and places
// them in shared memory.
template <int kPieces, typename Rows>
__device__ __forceinline__ void place_pieces(const Rows& p, int64_t row, int block, float* shared) {
  const int thread = static_cast<int>(threadIdx.x), columns = static_cast<int>(p.width);
  Piece pieces[kPieces];
  p.template load<kThreads>(row, pieces);
  constexpr int kPair = kPieces < 2 ? 1 : 2;
#pragma unroll
  for (int i = 0; i < kPieces; i += kPair) {
    float values[kPair * kPiece];
#pragma unroll
    for (int k = 0; k < kPair; ++k) {
      begin_piece(pieces[i + k], thread + (i + k) * kThreads, values + k * kPiece);
    }
    if (block > kThreads * kPiece) transform<kPair * kPiece, kPiece>(values);
#pragma unroll
    for (int k = 0; k < kPair; ++k) {
      const int at = thread + (i + k) * kThreads;
      if (at < columns / kPiece) write_piece<7>(shared, at, values + k * kPiece);
    }
  }
}

// Transforms over bits 3-6, or as many as there are, of a group whose bits 0-2 are done.
__device__ __forceinline__ void transform_group(float (&values)[kStoredGroup], int distance) {
  switch (distance) {
    case 0:
      transform<kStoredGroup, 8>(values);
      break;
    case 1:
      transform<kStoredGroup, 4>(values);
      break;
    case 2:
      transform<kStoredGroup, 2>(values);
      break;
    default:
      transform<kStoredGroup>(values);
      break;
  }
}

// A block per row of up to 2,048 kPieces columns. A thread transforms over bits 0-2 of its pieces,
// and over bit 11 where blocks are that long; then over bits 7-10; at last over bits 3-6, or as
// many as there are, for groups of 16 columns.
template <typename Rows, int kPieces>
__global__ void __launch_bounds__(kThreads, kPieces < 8 ? 4 : 2) rotate_block_kernel(Rows p) {
  extern __shared__ __align__(16) float shared[];
  __shared__ float largest_of_warp[kWarps];
  __shared__ RowSums of_warp[kWarps];
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  if (p.skips(row, thread == 0)) return;

  const int64_t to = p.stored_row(row);
  const auto columns = static_cast<int>(p.width);
  const int block = hadamard_block(p.width);
  place_pieces<kPieces>(p, row, block, shared);
  __syncthreads();
  if (block > 128) {
    switch (block) {
      case 256:
        transform_far<2>(shared, columns);
        break;
      case 512:
        transform_far<4>(shared, columns);
        break;
      case 1024:
        transform_far<8>(shared, columns);
        break;
      default:
        transform_far<16>(shared, columns);
        break;
    }
    __syncthreads();
  }

  constexpr int kGroups = (kPieces + 1) / 2;  // of a thread
  const int distance = rotated_distance(p.width);
  float values[kGroups][kStoredGroup];
  RowSums sums{};
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int group = thread + i * kThreads;
    if (group >= columns / kStoredGroup) break;
    const int first = ((group >> distance) << (distance + 4)) | (group & ((1 << distance) - 1));
#pragma unroll
    for (int k = 0; k < kStoredGroup; ++k) values[i][k] = shared[place<7>(first + (k << distance))];
    transform_group(values[i], distance);
    measure<kStoredGroup>(values[i], sums);
  }
  sums.largest = warp_largest(sums.largest);
  if (lane == 0) largest_of_warp[warp] = sums.largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sums.largest = larger(sums.largest, largest_of_warp[i]);
  sums.inverse = inverse_scale(sums.largest);
  const auto store = [&]<ScreenBound kBound>() {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int group = thread + i * kThreads;
      if (group >= columns / kStoredGroup) break;
      quantise<Rows::kGate, kBound>(values[i], group, p.values + to * p.width, sums);
    }
  };
  if (p.bound == ScreenBound::kStrict) {
    store.template operator()<ScreenBound::kStrict>();
  } else {
    store.template operator()<ScreenBound::kProbabilistic>();
  }
  sums.squares = warp_sum(sums.squares);
  sums.errors = warp_sum(sums.errors);
  sums.products = warp_sum(sums.products);
  if (lane == 0) of_warp[warp] = sums;
  __syncthreads();
  if (thread != 0) return;
  for (int i = 1; i < kWarps; ++i) {
    sums.squares += of_warp[i].squares;
    sums.errors += of_warp[i].errors;
    sums.products += of_warp[i].products;
  }
  p.finish(to, sums);
}

// Whether the warp kernel has an instance for rows of this width.
bool warp_rotates(int64_t width) { return width % 512 == 0 && width <= kWarpWidth; }

// rows: as p.rows() says.
template <typename Rows>
cudaError_t launch(const Rows& p, int64_t rows, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  if (warp_takes_row(rows, p.width) && warp_rotates(p.width)) {
    const auto of_warps = [&](void (*kernel)(Rows)) {
      return gpu::launch_dependent(kernel,
                                   dim3(static_cast<unsigned>((rows + kWarps - 1) / kWarps)),
                                   kThreads, 0, stream, p);
    };
    switch (p.width) {
      case 512:
        return of_warps(rotate_warp_kernel<Rows, 2>);
      case 1024:
        return of_warps(rotate_warp_kernel<Rows, 4>);
      case 1536:
        return of_warps(rotate_warp_kernel<Rows, 6>);
      default:
        return of_warps(rotate_warp_kernel<Rows, 8>);
    }
  }
  const auto of_blocks = [&](void (*kernel)(Rows)) {
    if (const cudaError_t error = gpu::allow_most_shared_memory(kernel); error != cudaSuccess) {
      return error;
    }
    return gpu::launch_dependent(kernel, dim3(static_cast<unsigned>(rows)), kThreads,
                                 static_cast<uint32_t>(shared_bytes(p.width)), stream, p);
  };
  constexpr int64_t kCovered = int64_t{kThreads} * kPiece;
  if (p.width <= kCovered) return of_blocks(rotate_block_kernel<Rows, 1>);
  if (p.width <= 2 * kCovered) return of_blocks(rotate_block_kernel<Rows, 2>);
  if (p.width <= 4 * kCovered) return of_blocks(rotate_block_kernel<Rows, 4>);
  return of_blocks(rotate_block_kernel<Rows, 8>);
}

TokenRows token_rows(const RotateRowsCuda& p) {
  return {{p.tokens, p.width, p.x, p.rotated.values, p.bound}, p.rotated.bounds, p.rounding};
}

}  // namespace

cudaError_t launch_rotate_gate(const RotateGateCuda& p, cudaStream_t stream) {
  if (!can_rotate(p.width)) return cudaErrorInvalidValue;
  if (p.bound == ScreenBound::kStrict) {
    const cudaError_t error = cudaMemsetAsync(p.rounding, 0, sizeof(float), stream);
    if (error != cudaSuccess) return error;
  }
  const int64_t listed = (p.neurons + 255) / 256 * 256;
  return launch(
      GateRows{{p.neurons, p.width, p.w_gate, p.values, p.bound}, listed, p.spread, p.rounding},
      listed, stream);
}

cudaError_t launch_rotate_rows(const RotateRowsCuda& p, cudaStream_t stream) {
  if (!can_rotate(p.width)) return cudaErrorInvalidValue;
  return launch(token_rows(p), p.tokens, stream);
}

cudaError_t launch_rotate_norm(const RotateNormCuda& p, cudaStream_t stream) {
  const RmsNormCuda& norm = p.norm;
  if (!can_rotate(norm.width)) return cudaErrorInvalidValue;
  const RotateRowsCuda rows{norm.tokens, norm.width, norm.y, p.rotated, p.rounding, p.bound};
  // Widths at which the norm alone has a warp per row, but the rotation a block.
  if (warp_takes_row(norm.tokens, norm.width) && !warp_rotates(norm.width)) {
    const cudaError_t error = launch_rms_norm(norm, stream);
    return error != cudaSuccess ? error : launch_rotate_rows(rows, stream);
  }
  return launch(NormedRows{token_rows(rows), norm}, norm.tokens, stream);
}

}  // namespace twell
