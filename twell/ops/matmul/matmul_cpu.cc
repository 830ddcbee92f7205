// SPDX-License-Identifier: Apache-2.0
#include <omp.h>

#include <algorithm>
#include <oneapi/dnnl/dnnl.hpp>
#include <tuple>
#include <unordered_map>

#include "twell/base/error.h"
#include "twell/ops/matmul/matmul.h"
#include "twell/ops/matmul/row_products.h"

namespace twell {
namespace {

// Up to here the product is bound by reading the weights, and row_products takes 0.55 (1 row) to
// 0.9 (16 rows) of oneDNN's time; matmul_bench's decode rows tell. Beyond it oneDNN wins.
constexpr int64_t kFewRows = 16;

struct Shape {
  int64_t m, n, k;
  int64_t a_stride, b_stride, c_stride;
  bool trans_a, trans_b;
  float beta;
  int threads;  // a primitive splits its work for the team it was made under

  bool operator==(const Shape&) const = default;
};

struct ShapeHash {
  size_t operator()(const Shape& s) const {
    uint64_t hash = 0;
    for (const int64_t value : {s.m, s.n, s.k, s.a_stride, s.b_stride, s.c_stride,
                                int64_t{s.trans_a} * 2 + int64_t{s.trans_b},
                                static_cast<int64_t>(s.beta * 1024.0f), int64_t{s.threads}}) {
      hash = (hash ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 29;
    }
    return static_cast<size_t>(hash);
  }
};

// Row-major [rows, cols], or its transpose stored as [cols, rows].
dnnl::memory::desc describe(int64_t rows, int64_t cols, int64_t stride, bool transposed) {
  const dnnl::memory::dims strides =
      transposed ? dnnl::memory::dims{1, stride} : dnnl::memory::dims{stride, 1};
  return {{rows, cols}, dnnl::memory::data_type::f32, strides};
}

struct Primitive {
  Primitive(const dnnl::engine& engine, const Shape& shape)
      : Primitive(engine, make_desc(engine, shape)) {}

  dnnl::matmul matmul;
  dnnl::memory a, b, c, scratchpad;  // without data: the pointers are set for each call
  size_t scratchpad_bytes;

 private:
  Primitive(const dnnl::engine& engine, const dnnl::matmul::primitive_desc& desc)
      : matmul(desc),
        a(desc.src_desc(), engine, nullptr),
        b(desc.weights_desc(), engine, nullptr),
        c(desc.dst_desc(), engine, nullptr),
        scratchpad(desc.scratchpad_desc(), engine, nullptr),
        scratchpad_bytes(desc.scratchpad_desc().get_size()) {}

  static dnnl::matmul::primitive_desc make_desc(const dnnl::engine& engine, const Shape& s) {
    dnnl::primitive_attr attr;
    attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (s.beta != 0.0f) {
      dnnl::post_ops post;
      post.append_sum(s.beta);
      attr.set_post_ops(post);
    }
    const dnnl::memory::desc a_desc = describe(s.m, s.k, s.a_stride, s.trans_a);
    const dnnl::memory::desc b_desc = describe(s.k, s.n, s.b_stride, s.trans_b);
    const dnnl::memory::desc c_desc = describe(s.m, s.n, s.c_stride, false);
#if DNNL_VERSION_MAJOR >= 3
    return {engine, a_desc, b_desc, c_desc, attr};
#else
    return {dnnl::matmul::desc(a_desc, b_desc, c_desc), attr, engine};
#endif
  }
};

// The primitives of one Context. Making one generates code (about a millisecond), so they are kept.
class PrimitiveCache {
 public:
  Primitive& get(const Shape& shape) {
    const auto found = primitives_.find(shape);
    if (found != primitives_.end()) return found->second;
    // A model has a few dozen shapes; only prompts of ever new lengths reach the bound.
    if (primitives_.size() >= kMaxPrimitives) primitives_.clear();
    return primitives_.try_emplace(shape, engine_, shape).first->second;
  }
  dnnl::stream& stream() { return stream_; }

 private:
  static constexpr size_t kMaxPrimitives = 512;
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::unordered_map<Shape, Primitive, ShapeHash> primitives_;
};

// oneDNN takes the calling thread's OpenMP team size, which another Context may have changed.
class TeamSize {
 public:
  explicit TeamSize(int threads) : before_(omp_get_max_threads()) { omp_set_num_threads(threads); }
  ~TeamSize() { omp_set_num_threads(before_); }
  TeamSize(const TeamSize&) = delete;
  TeamSize& operator=(const TeamSize&) = delete;

 private:
  int before_;
};

void scale(MatrixF c, float beta) {
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t col = 0; col < c.cols; ++col) c(row, col) = beta == 0 ? 0 : beta * c(row, col);
  }
}

void run_onednn(Context& ctx, const Shape& shape, const Matmul& problem) {
  const TeamSize team(shape.threads);
  try {
    auto& cache = ctx.service<PrimitiveCache>();
    Primitive& primitive = cache.get(shape);
    Arena::Scope scope(ctx.scratch());
    primitive.a.set_data_handle(const_cast<float*>(problem.a.data));
    primitive.b.set_data_handle(const_cast<float*>(problem.b.data));
    primitive.c.set_data_handle(problem.c.data);
    primitive.scratchpad.set_data_handle(
        scope.alloc<std::byte>(static_cast<int64_t>(primitive.scratchpad_bytes)));
    primitive.matmul.execute(cache.stream(), {{DNNL_ARG_SRC, primitive.a},
                                              {DNNL_ARG_WEIGHTS, primitive.b},
                                              {DNNL_ARG_DST, primitive.c},
                                              {DNNL_ARG_SCRATCHPAD, primitive.scratchpad}});
    cache.stream().wait();
  } catch (const dnnl::error& error) {
    TWELL_CHECK(false, "oneDNN matmul [{}, {}] x [{}, {}] failed: {}", shape.m, shape.k, shape.k,
                shape.n, error.what());
  }
}

}  // namespace

void matmul(Context& ctx, const Matmul& problem) {
  const auto& [a, b, c, trans_a, trans_b, beta] = problem;
  const int64_t k = trans_a ? a.rows : a.cols;
  TWELL_CHECK((trans_a ? a.cols : a.rows) == c.rows && (trans_b ? b.rows : b.cols) == c.cols &&
                  (trans_b ? b.cols : b.rows) == k,
              "matmul shapes disagree: a [{}, {}]{} b [{}, {}]{} c [{}, {}]", a.rows, a.cols,
              trans_a ? "^T" : "", b.rows, b.cols, trans_b ? "^T" : "", c.rows, c.cols);
  if (c.rows == 0 || c.cols == 0) return;
  if (k == 0) return scale(c, beta);
  if (c.rows <= kFewRows && !trans_a && trans_b) return row_products(ctx, a, b, c, beta);
  run_onednn(ctx,
             {c.rows, c.cols, k, a.stride, b.stride, c.stride, trans_a, trans_b, beta,
              omp_in_parallel() ? 1 : ctx.threads()},
             problem);
}

void linear_forward(Context& ctx, ConstMatrixF x, ConstMatrixF weight, MatrixF y) {
  matmul(ctx, {.a = x, .b = weight, .c = y, .trans_b = true});
}

void linear_backward(Context& ctx, const LinearBackward& problem) {
  const auto& [x, weight, d_y, d_x, d_x_beta, d_weight] = problem;
  if (!d_x.empty()) matmul(ctx, {.a = d_y, .b = weight, .c = d_x, .beta = d_x_beta});
  matmul(ctx, {.a = d_y, .b = x, .c = d_weight, .trans_a = true, .beta = 1.0f});
}

}  // namespace twell
