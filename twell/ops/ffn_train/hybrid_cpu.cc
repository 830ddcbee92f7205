// SPDX-License-Identifier: Apache-2.0
// The hybrid execution: rows with few non-zeros compact, heavy rows dense (format/hybrid.h).
//   forward   gate GEMM in chunks of tokens -> pattern -> u, h and y on the pattern
//   backward  by rows: d_h on the pattern, and d_x; by neurons, through the transposed pattern: the
//             three weight gradients
// Heavy rows go through GEMMs, forward and backward.
#include <algorithm>
#include <cmath>

#include "twell/ops/activation/activation_rows.h"
#include "twell/ops/ffn_train/ffn_train_cpu.h"
#include "twell/ops/ffn_train/rows_simd.h"
#include "twell/ops/matmul/matmul.h"

namespace twell {
namespace {

// --- The compact rows, shared out to threads by their non-zeros ---

// Tokens whose compact rows are worked on at a time. It bounds the scratch memory, and the table of
// tokens that the weight gradients read in slices.
constexpr int64_t kHybridSpan = 2048;

// Calls fn(m, columns, n) for the compact rows of [begin, end) that have entries.
template <typename Fn>
void for_each_entry_list(const HybridF32& hybrid, int64_t begin, int64_t end, const Fn& fn) {
  for (int64_t m = begin; m < end; ++m) {
    const int64_t n = hybrid.row_nnz[m];
    if (hybrid.is_compact(m) && n > 0) fn(m, hybrid.index.row(m), n);
  }
}

// Cumulative work of rows [first, first + count), [count + 1]: compact non-zeros, and one for
// looking at a row at all.
const int64_t* row_work(Arena::Scope& scope, const HybridF32& hybrid, int64_t first,
                        int64_t count) {
  int64_t* const work = scope.alloc<int64_t>(count + 1);
  work[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t m = first + i;
    work[i + 1] = work[i] + 1 + (hybrid.is_compact(m) ? hybrid.row_nnz[m] : 0);
  }
  return work;
}

// Calls fn(begin, end, thread) on ranges of [0, n) of about equal work; work_before [n + 1] is
// cumulative from 0.
template <typename Fn>
void parallel_balanced(Context& ctx, const int64_t* work_before, int64_t n, const Fn& fn) {
  const int64_t parts = ctx.threads();
  const auto bound = [&](int64_t part) {
    if (part == parts) return n;
    const int64_t target = work_before[n] / parts * part;
    return std::lower_bound(work_before, work_before + n, target) - work_before;
  };
  ctx.parallel_for(parts, 1, [&](int64_t first, int64_t last, int thread) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t begin = part == 0 ? 0 : bound(part);
      if (begin < bound(part + 1)) fn(begin, bound(part + 1), thread);
    }
  });
}

// --- The heavy rows, gathered for GEMMs ---

// Tokens of the tail rows, in tail order [tail_rows].
const int32_t* tail_tokens(Arena::Scope& scope, const HybridF32& hybrid) {
  int32_t* const tokens = scope.alloc<int32_t>(hybrid.tail_rows);
  for (int64_t m = 0; m < hybrid.shape.rows; ++m) {
    if (!hybrid.is_compact(m)) tokens[hybrid.tail_slot[m]] = static_cast<int32_t>(m);
  }
  return tokens;
}

// Copies of rows[tokens[0]], rows[tokens[1]], ... [padded, cols]; rows past count are zero.
MatrixF gather_rows(Context& ctx, Arena::Scope& scope, ConstMatrixF rows, const int32_t* tokens,
                    int64_t count, int64_t padded) {
  const MatrixF out = scope.matrix<float>(padded, rows.cols);
  ctx.parallel_for(padded, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      if (i < count) {
        std::copy_n(rows.row(tokens[i]), rows.cols, out.row(i));
      } else {
        std::fill_n(out.row(i), rows.cols, 0.0f);
      }
    }
  });
  return out;
}

// out[tokens[i]] = rows[i], i < count
void scatter_rows(Context& ctx, ConstMatrixF rows, const int32_t* tokens, int64_t count,
                  MatrixF out) {
  ctx.parallel_for(count, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      std::copy_n(rows.row(i), rows.cols, out.row(tokens[i]));
    }
  });
}

// --- Tables in slices of columns ---
// Kernels read random rows of a table [rows, D]. They work on a slice of its columns at a time,
// which fits the core's second-level cache: rows come three times as fast from there as from
// beyond. A slice is copied, because rows that lie a power of two apart would compete for a few
// cache sets.

// Columns per slice of a table of this many rows.
int64_t slice_columns(int64_t rows, int64_t width) {
  constexpr int64_t kBytes = 1152 * 1024;  // of the 2 MiB a server core has
  constexpr int64_t kMinColumns = 64;      // below four vectors the kernels get slower
  int64_t columns = kMinColumns;
  while (2 * columns * rows * static_cast<int64_t>(sizeof(float)) <= kBytes) columns *= 2;
  return std::min(columns, width);
}

// Floats of working memory for one thread.
int64_t slice_floats(int64_t rows, int64_t width) {
  const int64_t columns = slice_columns(rows, width);
  return columns == width ? 0 : rows * columns;
}

// Calls fn(column, slice [rows, columns]) for each slice; buffer holds slice_floats.
template <typename Fn>
void for_each_slice(ConstMatrixF table, float* buffer, const Fn& fn) {
  const int64_t columns = slice_columns(table.rows, table.cols);
  if (columns == table.cols) return fn(int64_t{0}, table);
  for (int64_t column = 0; column < table.cols; column += columns) {
    const MatrixF slice(buffer, table.rows, std::min(columns, table.cols - column));
    for (int64_t r = 0; r < table.rows; ++r) {
      std::copy_n(table.row(r) + column, slice.cols, slice.row(r));
    }
    fn(column, ConstMatrixF(slice));
  }
}

// --- Forward ---

// Gives the heavy rows of [first, first + count) their tail rows; false when the tail is full.
bool place_heavy_rows(HybridF32& hybrid, int64_t first, int64_t count) {
  for (int64_t m = first; m < first + count; ++m) {
    hybrid.tail_slot[m] = -1;
    if (hybrid.row_nnz[m] <= hybrid.shape.ell_width) continue;
    if (hybrid.tail_rows == hybrid.shape.tail_capacity) return false;
    hybrid.tail_slot[m] = static_cast<int32_t>(hybrid.tail_rows++);
  }
  return true;
}

// Stores a row of the gate GEMM. A row of the tail is stored as it is, before its ReLU.
void store_row(const HybridF32& hybrid, const float* gate, float threshold, int64_t m,
               float* fired) {
  const int64_t ffn = hybrid.shape.cols;
  if (!hybrid.is_compact(m)) {
    std::copy_n(gate, ffn, hybrid.tail.row(hybrid.tail_slot[m]));
    return;
  }
  uint32_t* const index = hybrid.index.row(m);
  compress_active(gate, threshold, ffn, index, hybrid.value.row(m));
  if (fired == nullptr) return;
  for (int32_t i = 0; i < hybrid.row_nnz[m]; ++i) fired[index[i]] = 1.0f;
}

// The gate projection and its pattern. False when the tail cannot hold the heavy rows.
bool find_pattern(Context& ctx, const FfnTrainForward& problem, const FiredFlags& flags,
                  HybridF32& hybrid) {
  const FfnWeights& w = problem.weights;
  const int64_t tokens = problem.x.rows;
  const float threshold = w.activation.zero_up_to();
  const int64_t tile = std::min(tokens, kDenseChunk);
  Arena::Scope scope(ctx.scratch());
  const MatrixF buffer = scope.matrix<float>(tile, w.ffn());
  hybrid.tail_rows = 0;
  for (int64_t first = 0; first < tokens; first += tile) {
    const int64_t count = std::min(tile, tokens - first);
    const MatrixF gate = buffer.slice_rows(0, count);
    linear_forward(ctx, problem.x.slice_rows(first, count), w.firing(), gate);
    ctx.parallel_for(count, 4, [&](int64_t begin, int64_t end, int) {
      for (int64_t m = begin; m < end; ++m) {
        hybrid.row_nnz[first + m] =
            static_cast<int32_t>(count_active(gate.row(m), threshold, w.ffn()));
      }
    });
    if (!place_heavy_rows(hybrid, first, count)) return false;
    ctx.parallel_for(count, 4, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t m = begin; m < end; ++m) {
        store_row(hybrid, gate.row(m), threshold, first + m, flags.of_thread(thread));
      }
    });
  }
  return true;
}

// The compact rows of one span of tokens.
struct CompactForward {
  const FfnTrainForward& problem;
  const FfnSaved& saved;
  double* row_l1;  // [M]
  int64_t first;   // of the span
  MatrixF h;       // [span, W]
  MatrixF slice;   // [threads, slice_floats]

  float* h_row(int64_t m) const { return h.row(m - first); }
};

// u = x w_up^T on the pattern, or its ReLU under dReLU.
void project_up(const CompactForward& work, int64_t begin, int64_t end, float* buffer) {
  const HybridF32& hybrid = work.saved.hybrid;
  const MatrixF& up = work.saved.up;
  for_each_entry_list(hybrid, begin, end, [&](int64_t m, const uint32_t*, int64_t n) {
    std::fill_n(up.row(m), n, 0.0f);
  });
  for_each_slice(work.problem.weights.w_up, buffer, [&](int64_t column, ConstMatrixF slice) {
    for_each_entry_list(hybrid, begin, end, [&](int64_t m, const uint32_t* index, int64_t n) {
      gathered_dots(work.problem.x.row(m) + column, slice, index, n, up.row(m));
    });
  });
  if (!work.problem.weights.activation.is_drelu()) return;
  for_each_entry_list(hybrid, begin, end, [&](int64_t m, const uint32_t*, int64_t n) {
    float* const u = up.row(m);
    for (int64_t i = 0; i < n; ++i) u[i] = u[i] <= 0.0f ? 0.0f : u[i];
  });
}

// h = f(g) * u, or f(g) without a gate, on the pattern; row_l1 = sum of |h| per row.
void activate_compact(const CompactForward& work, int64_t begin, int64_t end) {
  const bool squared = work.problem.weights.activation.is_relu2();
  const HybridF32& hybrid = work.saved.hybrid;
  for (int64_t m = begin; m < end; ++m) {
    if (!hybrid.is_compact(m)) continue;
    const float* const g = hybrid.value.row(m);
    const float* const u = work.saved.gated() ? work.saved.up.row(m) : nullptr;
    float* const h = work.h_row(m);
    double l1 = 0.0;
    for (int64_t i = 0; i < hybrid.row_nnz[m]; ++i) {
      h[i] = (squared ? g[i] * g[i] : g[i]) * (u == nullptr ? 1.0f : u[i]);
      l1 += static_cast<double>(std::abs(h[i]));
    }
    work.row_l1[m] = l1;
  }
}

void forward_compact_rows(const CompactForward& work, int64_t begin, int64_t end, int thread) {
  const HybridF32& hybrid = work.saved.hybrid;
  const FfnWeights& w = work.problem.weights;
  float* const buffer = work.slice.row(thread);
  if (w.gated()) project_up(work, begin, end, buffer);
  activate_compact(work, begin, end);
  for (int64_t m = begin; m < end; ++m) {
    if (hybrid.is_compact(m)) std::fill_n(work.problem.y.row(m), w.width(), 0.0f);
  }
  for_each_slice(w.w_down, buffer, [&](int64_t column, ConstMatrixF slice) {
    for_each_entry_list(hybrid, begin, end, [&](int64_t m, const uint32_t* index, int64_t n) {
      gathered_sum(work.h_row(m), slice, index, n, work.problem.y.row(m) + column);
    });
  });
}

void forward_compact(Context& ctx, const FfnTrainForward& problem, const FfnSaved& saved,
                     double* row_l1) {
  const HybridF32& hybrid = saved.hybrid;
  for (int64_t first = 0; first < saved.tokens; first += kHybridSpan) {
    const int64_t count = std::min(kHybridSpan, saved.tokens - first);
    Arena::Scope scope(ctx.scratch());
    const CompactForward work = {
        .problem = problem,
        .saved = saved,
        .row_l1 = row_l1,
        .first = first,
        .h = scope.matrix<float>(count, hybrid.shape.ell_width),
        .slice =
            scope.matrix<float>(ctx.threads(), slice_floats(hybrid.shape.cols, problem.x.cols))};
    parallel_balanced(ctx, row_work(scope, hybrid, first, count), count,
                      [&](int64_t begin, int64_t end, int thread) {
                        forward_compact_rows(work, first + begin, first + end, thread);
                      });
  }
}

// Activation of tail rows [first, first + count). The rows of h behind them, padding, become zero.
void activate_tail(Context& ctx, const BlendedActivation& f, const FfnSaved& saved, int64_t first,
                   int64_t count, const int32_t* tokens, MatrixF h, const FiredFlags& flags,
                   double* row_l1) {
  const HybridF32& hybrid = saved.hybrid;
  const int64_t ffn = hybrid.shape.cols;
  ctx.parallel_for(count, 1, [&](int64_t begin, int64_t end, int thread) {
    float* const fired = flags.of_thread(thread);
    for (int64_t r = begin; r < end; ++r) {
      float* const gate = hybrid.tail.row(first + r);
      const float* const u = saved.gated() ? saved.up_tail.row(first + r) : nullptr;
      row_l1[tokens[first + r]] = activate_row(f, gate, u, h.row(r), fired, ffn).l1;
    }
  });
  const MatrixF padding = h.slice_rows(count, h.rows - count);
  std::fill_n(padding.data, padding.rows * ffn, 0.0f);
}

void forward_tail(Context& ctx, const FfnTrainForward& problem, const FfnSaved& saved,
                  const FiredFlags& flags, double* row_l1) {
  const FfnWeights& w = problem.weights;
  const HybridF32& hybrid = saved.hybrid;
  const int64_t capacity = hybrid.shape.tail_capacity;
  Arena::Scope scope(ctx.scratch());
  const int32_t* const tokens = tail_tokens(scope, hybrid);
  const int64_t padded_rows = padded_tail(hybrid.tail_rows, capacity);
  const MatrixF padding = hybrid.tail.slice_rows(hybrid.tail_rows, padded_rows - hybrid.tail_rows);
  std::fill_n(padding.data, padding.rows * w.ffn(), 0.0f);
  for (int64_t first = 0; first < hybrid.tail_rows; first += kDenseChunk) {
    const int64_t count = std::min(kDenseChunk, hybrid.tail_rows - first);
    const int64_t padded = padded_tail(count, capacity);
    Arena::Scope step(ctx.scratch());
    const MatrixF x = gather_rows(ctx, step, problem.x, tokens + first, count, padded);
    const MatrixF y = step.matrix<float>(padded, w.width());
    const MatrixF gate = hybrid.tail.slice_rows(first, padded);
    const bool in_place = !w.gated() && w.activation.is_relu();
    const MatrixF h = in_place ? gate : step.matrix<float>(padded, w.ffn());
    if (w.gated()) linear_forward(ctx, x, w.w_up, saved.up_tail.slice_rows(first, padded));
    activate_tail(ctx, w.activation, saved, first, count, tokens, h, flags, row_l1);
    matmul(ctx, {.a = h, .b = w.w_down, .c = y});
    scatter_rows(ctx, y, tokens + first, count, problem.y);
  }
}

// --- The compact rows by neuron, which the weight gradients read ---

// Tokens [first, first + count) and, on their compact entries, what the weight gradients are made
// of.
struct CompactSpan {
  int64_t first;
  int64_t count;
  MatrixF d_gate;  // [count, W], gated only
  MatrixF d_up;    // [count, W]; not gated: the gradient before the ReLU
  MatrixF h;       // [count, W]
};

// Neuron j's entries are offset[j] .. offset[j + 1] - 1, in ascending tokens.
struct TransposedRows {
  int64_t* offset = nullptr;  // [F + 1]
  uint32_t* token = nullptr;  // [nnz] from the first of the span
  float* d_gate = nullptr;    // [nnz], gated only
  float* d_up = nullptr;      // [nnz]
  float* h = nullptr;         // [nnz]
};

// Puts the entries of tokens [begin, end) at their places. place [F], where the next entry of each
// neuron goes, moves on.
void place_entries(const HybridF32& hybrid, const CompactSpan& span, int64_t begin, int64_t end,
                   int64_t* place, const TransposedRows& out) {
  for_each_entry_list(hybrid, begin, end, [&](int64_t m, const uint32_t* neuron, int64_t n) {
    const int64_t r = m - span.first;
    const float* const d_gate = out.d_gate == nullptr ? nullptr : span.d_gate.row(r);
    const float* const d_up = span.d_up.row(r);
    const float* const h = span.h.row(r);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = place[neuron[i]]++;
      out.token[at] = static_cast<uint32_t>(r);
      if (d_gate != nullptr) out.d_gate[at] = d_gate[i];
      out.d_up[at] = d_up[i];
      out.h[at] = h[i];
    }
  });
}

// A counting sort. Each part of the tokens has counts and places of its own, so that a neuron's
// tokens ascend whatever the number of parts.
TransposedRows transpose_rows(Context& ctx, Arena::Scope& scope, const HybridF32& hybrid,
                              const CompactSpan& span) {
  const int64_t ffn = hybrid.shape.cols;
  const int64_t parts = ctx.threads();
  const auto over_parts = [&](const auto& fn) {
    ctx.parallel_for(parts, 1, [&](int64_t first, int64_t last, int) {
      for (int64_t p = first; p < last; ++p) {
        fn(p, span.first + span.count * p / parts, span.first + span.count * (p + 1) / parts);
      }
    });
  };
  TransposedRows out = {.offset = scope.alloc<int64_t>(ffn + 1)};
  const Matrix<int64_t> place = scope.matrix<int64_t>(parts, ffn);
  over_parts([&](int64_t part, int64_t begin, int64_t end) {
    int64_t* const count = place.row(part);
    std::fill_n(count, ffn, 0);
    for_each_entry_list(hybrid, begin, end, [&](int64_t, const uint32_t* neuron, int64_t n) {
      for (int64_t i = 0; i < n; ++i) ++count[neuron[i]];
    });
  });
  int64_t total = 0;
  for (int64_t j = 0; j < ffn; ++j) {
    out.offset[j] = total;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t count = place(part, j);
      place(part, j) = total;
      total += count;
    }
  }
  out.offset[ffn] = total;
  out.token = scope.alloc<uint32_t>(total);
  out.d_gate = !span.d_gate.empty() ? scope.alloc<float>(total) : nullptr;
  out.d_up = scope.alloc<float>(total);
  out.h = scope.alloc<float>(total);
  over_parts([&](int64_t part, int64_t begin, int64_t end) {
    place_entries(hybrid, span, begin, end, place.row(part), out);
  });
  return out;
}

// --- Backward ---

float sign(float value) { return value > 0.0f ? 1.0f : (value < 0.0f ? -1.0f : 0.0f); }

// The compact rows of one span of tokens.
struct CompactBackward {
  const FfnTrainBackward& problem;
  const FfnSaved& saved;
  CompactSpan span;
  MatrixF slice;  // [threads, slice_floats of the weights or of the span's tokens]
};

// d_h = d_y w_down^T on the pattern, into d_up.
void project_down(const CompactBackward& work, int64_t begin, int64_t end, float* buffer) {
  const HybridF32& hybrid = work.saved.hybrid;
  const CompactSpan& span = work.span;
  for_each_entry_list(hybrid, begin, end, [&](int64_t m, const uint32_t*, int64_t n) {
    std::fill_n(span.d_up.row(m - span.first), n, 0.0f);
  });
  for_each_slice(work.problem.weights.w_down, buffer, [&](int64_t column, ConstMatrixF slice) {
    for_each_entry_list(hybrid, begin, end, [&](int64_t m, const uint32_t* index, int64_t n) {
      gathered_dots(work.problem.d_y.row(m) + column, slice, index, n,
                    span.d_up.row(m - span.first));
    });
  });
}

// Computes h, d_gate and d_up from the d_h in d_up, with the gradient of the L1 term.
void differentiate_activation(const CompactBackward& work, int64_t begin, int64_t end) {
  const CompactSpan& span = work.span;
  const float l1_scale = work.problem.l1_scale;
  const bool squared = work.problem.weights.activation.is_relu2();
  const bool up_relu = work.problem.weights.activation.is_drelu();
  for_each_entry_list(work.saved.hybrid, begin, end, [&](int64_t m, const uint32_t*, int64_t n) {
    const float* const g = work.saved.hybrid.value.row(m);
    float* const d_up = span.d_up.row(m - span.first);
    float* const h = span.h.row(m - span.first);
    if (!work.saved.gated()) {
      for (int64_t i = 0; i < n; ++i) {
        h[i] = squared ? g[i] * g[i] : g[i];
        d_up[i] = (d_up[i] + l1_scale) * (squared ? 2.0f * g[i] : 1.0f);
      }
      return;
    }
    const float* const u = work.saved.up.row(m);
    float* const d_gate = span.d_gate.row(m - span.first);
    for (int64_t i = 0; i < n; ++i) {
      const float f = squared ? g[i] * g[i] : g[i];
      h[i] = f * u[i];
      const float d_h = d_up[i] + l1_scale * sign(h[i]);
      d_gate[i] = d_h * u[i] * (squared ? 2.0f * g[i] : 1.0f);
      d_up[i] = up_relu && u[i] == 0.0f ? 0.0f : d_h * f;
    }
  });
}

// d_x += gradient * weight on the pattern.
void add_input_gradient(const CompactBackward& work, ConstMatrixF weight, MatrixF gradient,
                        int64_t begin, int64_t end, float* buffer) {
  for_each_slice(weight, buffer, [&](int64_t column, ConstMatrixF slice) {
    for_each_entry_list(work.saved.hybrid, begin, end,
                        [&](int64_t m, const uint32_t* index, int64_t n) {
                          gathered_sum(gradient.row(m - work.span.first), slice, index, n,
                                       work.problem.d_x.row(m) + column);
                        });
  });
}

void backward_compact_rows(const CompactBackward& work, int64_t begin, int64_t end, float* buffer) {
  const FfnWeights& w = work.problem.weights;
  for (int64_t m = begin; m < end; ++m) {
    if (work.saved.hybrid.is_compact(m)) {
      std::fill_n(work.problem.d_x.row(m), w.width(), 0.0f);
    }
  }
  project_down(work, begin, end, buffer);
  differentiate_activation(work, begin, end);
  if (w.gated()) add_input_gradient(work, w.w_gate, work.span.d_gate, begin, end, buffer);
  add_input_gradient(work, w.w_up, work.span.d_up, begin, end, buffer);
}

// The three weight gradients of neurons [begin, end).
void backward_neurons(const CompactBackward& work, const TransposedRows& rows, int64_t begin,
                      int64_t end, float* buffer) {
  const FfnGrads& grads = work.problem.grads;
  const auto for_each_neuron = [&](const auto& fn) {
    for (int64_t j = begin; j < end; ++j) {
      const int64_t first = rows.offset[j];
      const int64_t n = rows.offset[j + 1] - first;
      if (n > 0) fn(j, first, n);
    }
  };
  const ConstMatrixF x = work.problem.x.slice_rows(work.span.first, work.span.count);
  for_each_slice(x, buffer, [&](int64_t column, ConstMatrixF slice) {
    for_each_neuron([&](int64_t j, int64_t first, int64_t n) {
      float* const d_w_up = grads.w_up.row(j) + column;
      if (grads.gated()) {
        gathered_sum2(rows.d_gate + first, rows.d_up + first, slice, rows.token + first, n,
                      grads.w_gate.row(j) + column, d_w_up);
      } else {
        gathered_sum(rows.d_up + first, slice, rows.token + first, n, d_w_up);
      }
    });
  });
  const ConstMatrixF d_y = work.problem.d_y.slice_rows(work.span.first, work.span.count);
  for_each_slice(d_y, buffer, [&](int64_t column, ConstMatrixF slice) {
    for_each_neuron([&](int64_t j, int64_t first, int64_t n) {
      gathered_sum(rows.h + first, slice, rows.token + first, n, grads.w_down.row(j) + column);
    });
  });
}

void backward_span(Context& ctx, const CompactBackward& work) {
  const CompactSpan& span = work.span;
  Arena::Scope scope(ctx.scratch());
  parallel_balanced(ctx, row_work(scope, work.saved.hybrid, span.first, span.count), span.count,
                    [&](int64_t begin, int64_t end, int thread) {
                      backward_compact_rows(work, span.first + begin, span.first + end,
                                            work.slice.row(thread));
                    });
  const TransposedRows rows = transpose_rows(ctx, scope, work.saved.hybrid, span);
  parallel_balanced(ctx, rows.offset, work.saved.ffn(),
                    [&](int64_t begin, int64_t end, int thread) {
                      backward_neurons(work, rows, begin, end, work.slice.row(thread));
                    });
}

void backward_tail(Context& ctx, const FfnTrainBackward& problem, const FfnSaved& saved) {
  const HybridF32& hybrid = saved.hybrid;
  const int64_t capacity = hybrid.shape.tail_capacity;
  Arena::Scope scope(ctx.scratch());
  const int32_t* const tokens = tail_tokens(scope, hybrid);
  for (int64_t first = 0; first < hybrid.tail_rows; first += kDenseChunk) {
    const int64_t count = std::min(kDenseChunk, hybrid.tail_rows - first);
    const int64_t padded = padded_tail(count, capacity);
    Arena::Scope chunk(ctx.scratch());
    const DenseBackwardStep step = {
        .x = gather_rows(ctx, chunk, problem.x, tokens + first, count, padded),
        .d_y = gather_rows(ctx, chunk, problem.d_y, tokens + first, count, padded),
        .gate = hybrid.tail.slice_rows(first, padded),
        .up = saved.gated() ? saved.up_tail.slice_rows(first, padded) : MatrixF(),
        .d_x = chunk.matrix<float>(padded, problem.x.cols)};
    dense_backward_step(ctx, problem.weights, problem.l1_scale, step, problem.grads);
    scatter_rows(ctx, step.d_x, tokens + first, count, problem.d_x);
  }
}

}  // namespace

bool hybrid_forward(Context& ctx, const FfnTrainForward& problem, FfnSaved& saved,
                    FfnTrainStats& stats) {
  const int64_t tokens = problem.x.rows;
  if (!saved.plan_hybrid(tokens)) return false;
  const HybridF32& hybrid = saved.hybrid;
  Arena::Scope scope(ctx.scratch());
  const FiredFlags flags(ctx, scope, problem.active);
  if (!find_pattern(ctx, problem, flags, saved.hybrid)) return false;
  saved.execution = FfnTrainExecution::kHybrid;
  saved.tokens = tokens;

  double* const row_l1 = scope.alloc<double>(tokens);
  forward_compact(ctx, problem, saved, row_l1);
  if (hybrid.tail_rows > 0) forward_tail(ctx, problem, saved, flags, row_l1);
  flags.merge();

  stats = {
      .execution = FfnTrainExecution::kHybrid, .tokens = tokens, .tail_rows = hybrid.tail_rows};
  for (int64_t m = 0; m < tokens; ++m) {
    stats.nnz += hybrid.row_nnz[m];
    stats.max_row_nnz = std::max<int64_t>(stats.max_row_nnz, hybrid.row_nnz[m]);
    stats.l1_sum += row_l1[m];
  }
  return true;
}

void hybrid_backward(Context& ctx, const FfnTrainBackward& problem, const FfnSaved& saved) {
  const HybridF32& hybrid = saved.hybrid;
  const int64_t entries = hybrid.shape.ell_width;
  const int64_t width = problem.x.cols;
  for (int64_t first = 0; first < saved.tokens; first += kHybridSpan) {
    const int64_t count = std::min(kHybridSpan, saved.tokens - first);
    Arena::Scope scope(ctx.scratch());
    const CompactSpan span = {
        .first = first,
        .count = count,
        .d_gate = saved.gated() ? scope.matrix<float>(count, entries) : MatrixF(),
        .d_up = scope.matrix<float>(count, entries),
        .h = scope.matrix<float>(count, entries)};
    const int64_t slice =
        std::max(slice_floats(hybrid.shape.cols, width), slice_floats(count, width));
    backward_span(ctx, {.problem = problem,
                        .saved = saved,
                        .span = span,
                        .slice = scope.matrix<float>(ctx.threads(), slice)});
  }
  if (hybrid.tail_rows > 0) backward_tail(ctx, problem, saved);
}

}  // namespace twell
