// SPDX-License-Identifier: Apache-2.0
#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <compare>
#include <csignal>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <utility>
#include <vector>

#include "twell/base/error.h"
#include "twell/ops/matmul/bf16_rounding.h"
#include "twell/ops/matmul/byte_products.h"
#include "twell/ops/matmul/compute.h"
#include "twell/ops/matmul/matmul.h"
#include "twell/ops/matmul/row_products.h"

namespace twell {
namespace {

// Up to this many rows, reading the weights bounds the product, and row_products takes 0.55 (1 row)
// to 0.9 (16 rows) of oneDNN's time (decode rows of matmul_bench). Beyond it oneDNN wins.
constexpr int64_t kFewRows = 16;

// Bytes of a block of B that is widened or rounded for oneDNN: large enough for efficient products,
// small enough for the last-level cache and to add next to nothing to a model's memory.
constexpr int64_t kBlockBytes = int64_t{4} << 20;

struct Shape {
  int64_t m, n, k;
  int64_t a_stride, b_stride, c_stride;
  bool trans_a, trans_b;
  float beta;
  bool bf16;     // A and B; C is f32
  int64_t part;  // parts that run at the same time need separate primitives

  auto operator<=>(const Shape&) const = default;
};

// Row-major [rows, cols], or its transpose stored as [cols, rows].
dnnl::memory::desc describe(int64_t rows, int64_t cols, int64_t stride, bool transposed,
                            bool bf16) {
  const dnnl::memory::dims strides =
      transposed ? dnnl::memory::dims{1, stride} : dnnl::memory::dims{stride, 1};
  using Type = dnnl::memory::data_type;
  return {{rows, cols}, bf16 ? Type::bf16 : Type::f32, strides};
}

struct Primitive {
  Primitive(const dnnl::engine& engine, const Shape& shape)
      : Primitive(engine, make_desc(engine, shape)) {}

  dnnl::matmul matmul;
  dnnl::memory a, b, c, scratchpad;  // without data: the pointers are set for each call
  size_t scratchpad_bytes;
  dnnl::stream stream;

 private:
  Primitive(const dnnl::engine& engine, const dnnl::matmul::primitive_desc& desc)
      : matmul(desc),
        a(desc.src_desc(), engine, nullptr),
        b(desc.weights_desc(), engine, nullptr),
        c(desc.dst_desc(), engine, nullptr),
        scratchpad(desc.scratchpad_desc(), engine, nullptr),
        scratchpad_bytes(desc.scratchpad_desc().get_size()),
        stream(engine) {}

  static dnnl::matmul::primitive_desc make_desc(const dnnl::engine& engine, const Shape& s) {
    dnnl::primitive_attr attr;
    attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (s.beta != 0.0f) {
      dnnl::post_ops post;
      post.append_sum(s.beta);
      attr.set_post_ops(post);
    }
    const dnnl::memory::desc a_desc = describe(s.m, s.k, s.a_stride, s.trans_a, s.bf16);
    const dnnl::memory::desc b_desc = describe(s.k, s.n, s.b_stride, s.trans_b, s.bf16);
    const dnnl::memory::desc c_desc = describe(s.m, s.n, s.c_stride, false, false);
#if DNNL_VERSION_MAJOR >= 3
    return {engine, a_desc, b_desc, c_desc, attr};
#else
    return {dnnl::matmul::desc(a_desc, b_desc, c_desc), attr, engine};
#endif
  }
};

// The primitives of one Context, kept because making one generates code (about a millisecond).
class PrimitiveCache {
 public:
  Primitive& get(const Shape& shape) {
    const auto found = primitives_.find(shape);
    if (found != primitives_.end()) return found->second;
    return primitives_.try_emplace(shape, engine_, shape).first->second;
  }
  // Call before looking up a product's primitives: none of them may be evicted while it runs.
  void make_room() {
    if (primitives_.size() >= kMaxPrimitives) primitives_.clear();
  }

 private:
  // A model has a few dozen shapes; only prompts of ever new lengths reach the bound.
  static constexpr size_t kMaxPrimitives = 512;
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  std::map<Shape, Primitive> primitives_;
};

// oneDNN splits its work over the OpenMP team of the calling thread, whose threads spin for
// milliseconds after each product and starve other programs on the same cores. So it gets teams of
// one thread, and Context::parallel_for runs a part of C on each of ours.
class OneThread {
 public:
  OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

// Kernels that oneDNN generates keep their stack pointer in the heap for a while, where the frame
// of a signal handler would overwrite what lies below it. So a thread blocks signals while it runs
// them, as Context's own threads always do, but for signals of faults, which cannot wait.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t signals;
    sigfillset(&signals);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) {
      sigdelset(&signals, fault);
    }
    pthread_sigmask(SIG_BLOCK, &signals, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

// C [M, N] in a grid of blocks, one for each thread.
struct Grid {
  int64_t rows = 1, cols = 1;
};

// The most blocks that the threads allow, of at least 64 rows each if M is large enough. Rows are
// split first: a split of columns leaves gaps in B and C, which slow oneDNN down.
Grid split(int64_t m, int64_t n, int64_t k, int threads) {
  constexpr int64_t kMinRows = 64, kMinCols = 16;
  constexpr int64_t kMinWork = int64_t{1} << 18;  // multiply-adds: some 10 us, worth a wake-up
  const int64_t most = std::clamp<int64_t>(m * n / 16 * k / (kMinWork / 16), 1, threads);
  Grid best;
  for (int64_t rows = std::clamp<int64_t>(m / kMinRows, 1, most); rows >= 1; --rows) {
    const Grid grid{rows, std::clamp<int64_t>(n / kMinCols, 1, most / rows)};
    if (grid.rows * grid.cols > best.rows * best.cols) best = grid;
  }
  return best;
}

// First row or column of block `index` of `count` on an edge of `size`: a multiple of 16.
int64_t block_begin(int64_t size, int64_t index, int64_t count) {
  return index == count ? size : size * index / count / 16 * 16;
}

void scale(MatrixF c, float beta) {
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t col = 0; col < c.cols; ++col) c(row, col) = beta == 0 ? 0 : beta * c(row, col);
  }
}

struct Part {
  Primitive* primitive;
  const std::byte* a;
  const std::byte* b;
  MatrixF c;
  MatrixF block;  // c itself, or memory without gaps for it
  std::byte* scratchpad;
};

void run(const Part& part, float beta) {
  const OneThread team;
  Primitive& p = *part.primitive;
  p.a.set_data_handle(const_cast<std::byte*>(part.a));
  p.b.set_data_handle(const_cast<std::byte*>(part.b));
  p.c.set_data_handle(part.block.data);
  p.scratchpad.set_data_handle(part.scratchpad);
  p.matmul.execute(p.stream, {{DNNL_ARG_SRC, p.a},
                              {DNNL_ARG_WEIGHTS, p.b},
                              {DNNL_ARG_DST, p.c},
                              {DNNL_ARG_SCRATCHPAD, p.scratchpad}});
  p.stream.wait();
  if (part.block.data == part.c.data) return;
  for (int64_t row = 0; row < part.c.rows; ++row) {
    const float* from = part.block.row(row);
    float* to = part.c.row(row);
    for (int64_t i = 0; i < part.c.cols; ++i)
      to[i] = beta == 0.0f ? from[i] : beta * to[i] + from[i];
  }
}

// A product that oneDNN computes: A and B are both f32 or both bf16.
struct Gemm {
  WeightMatrix a, b;
  MatrixF c;
  bool trans_a, trans_b;
  float beta;
};

void run_onednn(Context& ctx, const Gemm& gemm, int64_t k) {
  const auto& [a, b, c, trans_a, trans_b, beta] = gemm;
  const Grid grid = split(c.rows, c.cols, k, ctx.threads());
  try {
    auto& cache = ctx.service<PrimitiveCache>();
    cache.make_room();
    Arena::Scope scope(ctx.scratch());
    std::vector<Part> parts;
    for (int64_t i = 0; i < grid.rows * grid.cols; ++i) {
      const int64_t row = block_begin(c.rows, i / grid.cols, grid.rows),
                    rows = block_begin(c.rows, i / grid.cols + 1, grid.rows) - row,
                    col = block_begin(c.cols, i % grid.cols, grid.cols),
                    cols = block_begin(c.cols, i % grid.cols + 1, grid.cols) - col;
      const MatrixF out(c.row(row) + col, rows, cols, c.stride);
      const MatrixF block = grid.cols == 1 ? out : scope.matrix<float>(rows, cols);
      const OneThread team;
      Primitive& primitive =
          cache.get({rows, cols, k, a.stride, b.stride, block.stride, trans_a, trans_b,
                     grid.cols == 1 ? beta : 0.0f, a.dtype == DType::kBF16, i});
      parts.push_back(
          {.primitive = &primitive,
           .a = trans_a ? a.at(0, row) : a.at(row),
           .b = trans_b ? b.at(col) : b.at(0, col),
           .c = out,
           .block = block,
           .scratchpad = scope.alloc<std::byte>(static_cast<int64_t>(primitive.scratchpad_bytes))});
    }
    const SignalsBlocked signals;  // the caller computes too
    ctx.parallel_for(std::ssize(parts), 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) run(parts[static_cast<size_t>(i)], gemm.beta);
    });
  } catch (const dnnl::error& error) {
    TWELL_CHECK(false, "oneDNN matmul [{}, {}] x [{}, {}] failed: {}", c.rows, k, k, c.cols,
                error.what());
  }
}

void round_in_f32(float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = to_float(to_bf16(values[i]));
}

// Some of B's values, in the type that they are multiplied in.
void convert(const std::byte* values, DType dtype, int64_t count, MatmulCompute compute,
             std::byte* out) {
  if (compute == MatmulCompute::kBF16) {
    return round_to_bf16(values, dtype, count, reinterpret_cast<BF16*>(out));
  }
  float* const floats = reinterpret_cast<float*>(out);
  widen(values, dtype, count, floats);
  if (compute == MatmulCompute::kRoundedF32) round_in_f32(floats, count);
}

// A in the type that it is multiplied in, in memory of the scope where that is not f32.
WeightMatrix left_operand(Context& ctx, Arena::Scope& scope, ConstMatrixF a,
                          MatmulCompute compute) {
  if (compute == MatmulCompute::kF32) return a;
  const bool bf16 = compute == MatmulCompute::kBF16;
  const int64_t bytes = bf16 ? 2 : 4;
  std::byte* const memory = scope.alloc<std::byte>(a.rows * a.cols * bytes);
  ctx.parallel_for(a.rows, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      convert(reinterpret_cast<const std::byte*>(a.row(row)), DType::kF32, a.cols, compute,
              memory + row * a.cols * bytes);
    }
  });
  return {memory, bf16 ? DType::kBF16 : DType::kF32, a.rows, a.cols};
}

// Converts B block by block, each for some columns of C, so that every value of C is one oneDNN
// product over all of K, as it is with a B that is multiplied as it is stored.
void run_converted(Context& ctx, const Gemm& gemm, int64_t k, MatmulCompute compute) {
  const auto& [a, b, c, trans_a, trans_b, beta] = gemm;
  const int64_t bytes = a.value_bytes();
  const int64_t fits = kBlockBytes / (k * bytes) / 64 * 64;
  const int64_t step = std::min(std::max<int64_t>(fits, 64), c.cols);
  Arena::Scope scope(ctx.scratch());
  std::byte* const memory = scope.alloc<std::byte>(step * k * bytes);
  for (int64_t begin = 0; begin < c.cols; begin += step) {
    const int64_t count = std::min(step, c.cols - begin);
    const WeightMatrix block(memory, a.dtype, trans_b ? count : k, trans_b ? k : count);
    ctx.parallel_for(
        block.rows, 16, [&, &stored = b, transposed = trans_b](int64_t first, int64_t last, int) {
          for (int64_t row = first; row < last; ++row) {
            convert(transposed ? stored.at(begin + row) : stored.at(row, begin), stored.dtype,
                    block.cols, compute, memory + row * block.cols * bytes);
          }
        });
    run_onednn(ctx, {a, block, {c.data + begin, c.rows, count, c.stride}, trans_a, trans_b, beta},
               k);
  }
}

void run_gemm(Context& ctx, const Matmul& problem, int64_t k) {
  const MatmulCompute compute = matmul_compute(ctx);
  const auto& [a, b, c, trans_a, trans_b, beta] = problem;
  Arena::Scope scope(ctx.scratch());
  const Gemm gemm{left_operand(ctx, scope, a, compute), b, c, trans_a, trans_b, beta};
  const bool as_stored = b.dtype == gemm.a.dtype && compute != MatmulCompute::kRoundedF32;
  as_stored ? run_onednn(ctx, gemm, k) : run_converted(ctx, gemm, k, compute);
}

// Multiplies the columns of C by the scales of B.
void scale_columns(Context& ctx, MatrixF c, const float* scales) {
  constexpr int64_t kGrain = int64_t{1} << 14;  // values: some microseconds
  ctx.parallel_for(c.rows, kGrain / c.cols + 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      float* const out = c.row(row);
      for (int64_t col = 0; col < c.cols; ++col) out[col] *= scales[col];
    }
  });
}

void multiply(Context& ctx, const Matmul& problem, int64_t k) {
  const auto& [a, b, c, trans_a, trans_b, beta] = problem;
  const bool bytes = b.dtype == DType::kI8;
  if (c.rows <= kFewRows && !trans_a && (!bytes || k <= kMostByteDepth)) {
    if (bytes) return trans_b ? byte_row_products(ctx, a, b, c) : byte_row_sums(ctx, a, b, c);
    return trans_b ? row_products(ctx, a, b, c, beta) : row_sums(ctx, a, b, c, beta);
  }
  run_gemm(ctx, problem, k);
}

struct ComputeOfContext {
  MatmulCompute compute = MatmulCompute::kF32;
};

}  // namespace

MatmulCompute parse_matmul_compute(std::string_view name) {
  if (name == "f32") return MatmulCompute::kF32;
  TWELL_REQUIRE(name == "bf16", "unknown type of products '{}': f32 or bf16", name);
  TWELL_REQUIRE(has_bf16_products(),
                "this processor has no products of bf16 (AVX512_BF16 or AMX), and emulated ones "
                "would be slower than f32: compute in f32, the default");
  return MatmulCompute::kBF16;
}

bool has_bf16_products() {
  // The sets are masks that include those of their predecessors; AMX includes AVX512_BF16. An
  // environment that limits oneDNN (ONEDNN_MAX_CPU_ISA) counts.
  const auto has = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto needed = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return (has & needed) == needed;
}

void set_matmul_compute(Context& ctx, MatmulCompute compute) {
  ctx.service<ComputeOfContext>().compute = compute;
}
MatmulCompute matmul_compute(Context& ctx) { return ctx.service<ComputeOfContext>().compute; }

void matmul(Context& ctx, const Matmul& problem) {
  const auto& [a, b, c, trans_a, trans_b, beta] = problem;
  const int64_t k = trans_a ? a.rows : a.cols;
  TWELL_CHECK((trans_a ? a.cols : a.rows) == c.rows && (trans_b ? b.rows : b.cols) == c.cols &&
                  (trans_b ? b.cols : b.rows) == k,
              "matmul shapes disagree: a [{}, {}]{} b [{}, {}]{} c [{}, {}]", a.rows, a.cols,
              trans_a ? "^T" : "", b.rows, b.cols, trans_b ? "^T" : "", c.rows, c.cols);
  if (c.rows == 0 || c.cols == 0) return;
  TWELL_CHECK(
      (b.dtype == DType::kI8) == (b.scales != nullptr) && (b.scales == nullptr || beta == 0),
      "weights in 8 bits need scales, and a product that is not added to, beta {}", beta);
  if (k == 0) return scale(c, beta);
  multiply(ctx, problem, k);
  if (b.scales != nullptr) scale_columns(ctx, c, b.scales);
}

void linear_forward(Context& ctx, ConstMatrixF x, const WeightMatrix& weight, MatrixF y) {
  matmul(ctx, {.a = x, .b = weight, .c = y, .trans_b = true});
}

void linear_backward(Context& ctx, const LinearBackward& problem) {
  const auto& [x, weight, d_y, d_x, d_x_beta, d_weight] = problem;
  if (!d_x.empty()) matmul(ctx, {.a = d_y, .b = weight, .c = d_x, .beta = d_x_beta});
  matmul(ctx, {.a = d_y, .b = x, .c = d_weight, .trans_a = true, .beta = 1.0f});
}

}  // namespace twell
