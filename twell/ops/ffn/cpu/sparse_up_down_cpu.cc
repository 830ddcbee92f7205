// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/cpu/sparse_up_down.h"

#include <algorithm>

#include "twell/base/error.h"
#include "twell/ops/ffn/cpu/pair_kernels_simd.h"

namespace twell {
namespace {

void check_sparse_up_down(const SparseUpDown& problem) {
  const auto& [gate, x, w_up, w_down, y, squared, up_relu] = problem;
  TWELL_CHECK(w_down.rows == gate.shape.cols && y.rows == gate.shape.rows && y.cols == w_down.cols,
              "up/down shapes disagree: gate {} x {}, w_down [{}, {}], y [{}, {}]", gate.shape.rows,
              gate.shape.cols, w_down.rows, w_down.cols, y.rows, y.cols);
  if (w_up.empty()) return;
  TWELL_CHECK(x.rows == y.rows && x.cols == w_up.cols && w_up.rows == w_down.rows &&
                  w_up.cols == w_down.cols,
              "up/down shapes disagree: x [{}, {}], w_up [{}, {}], w_down [{}, {}], y [{}, {}]",
              x.rows, x.cols, w_up.rows, w_up.cols, w_down.rows, w_down.cols, y.rows, y.cols);
}

// The active pairs, with what h is a multiple of: g or g^2. In memory of `scope`.
Csr active_pairs(Context& ctx, Arena::Scope& scope, const SparseUpDown& problem) {
  const Csr pairs = csr_from_twell(ctx, scope, problem.gate);
  if (problem.squared) {
    for (int64_t i = 0; i < pairs.nnz(); ++i) pairs.value[i] *= pairs.value[i];
  }
  return pairs;
}

// Threads share contiguous rows with about equal numbers of pairs. That affects speed only, not
// results.
// A row costs at least as much as this many pairs, for clearing and writing y and reading the list.
constexpr int64_t kRowCost = 2;

// First row of share `part` of `parts`.
int64_t split_rows(const Csr& pairs, int64_t part, int64_t parts) {
  const auto cost_before = [&](int64_t row) { return pairs.row_begin[row] + row * kRowCost; };
  const int64_t target = cost_before(pairs.rows) * part / parts;
  int64_t low = 0;
  int64_t high = pairs.rows;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (cost_before(middle) < target) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Calls fn(begin, end, part) on shares of the rows, in parallel; parts <= ctx.threads().
template <typename Fn>
void parallel_over_rows(Context& ctx, const Csr& pairs, const Fn& fn) {
  const int64_t parts = std::min<int64_t>(ctx.threads(), pairs.rows);
  ctx.parallel_for(parts, 1, [&](int64_t first, int64_t last, int) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t begin = split_rows(pairs, part, parts);
      const int64_t end = split_rows(pairs, part + 1, parts);
      if (begin < end) fn(begin, end, part);
    }
  });
}

// --- Row-fused ----------------------------------------------------------------------------------

// Pairs whose up and down rows are processed together: few enough that their weight rows stay in
// the L2 cache until the second use, and that pointers fit on the stack.
constexpr int64_t kPairBlock = 16;

// Pairs [begin, end) of one row of the gate.
struct PairRange {
  const Csr& pairs;
  int64_t begin;
  int64_t end;
};

// products [n] of x and w_up become h.
void multiply(const SparseUpDown& problem, const float* gate, int64_t n, float* products) {
  for (int64_t i = 0; i < n; ++i) {
    const float u = problem.up_relu && products[i] <= 0.0f ? 0.0f : products[i];
    products[i] = gate[i] * u;
  }
}

// Columns [first, first + d) of a row of y, a sum of rows of w_down, times their scales, if any.
void scale_sums(const SparseUpDown& problem, int64_t row, int64_t first, int64_t d) {
  const float* const scales = problem.w_down.scales;
  if (scales == nullptr) return;
  float* const y = problem.y.row(row);
  for (int64_t i = first; i < first + d; ++i) y[i] *= scales[i];
}

// h[i] = gate of pair i * <x, w_up of its neuron>
void up(const SparseUpDown& problem, const PairRange& range, const float* x, float* h) {
  const auto& [pairs, begin, end] = range;
  for (int64_t i = begin; i < end; i += kPairBlock) {
    const int64_t count = std::min(kPairBlock, end - i);
    float* sums = h + (i - begin);
    std::fill_n(sums, count, 0.0f);
    for (int64_t first = 0; first < problem.w_up.cols; first += kColumnBlock) {
      const int64_t d = std::min(kColumnBlock, problem.w_up.cols - first);
      const void* rows[kPairBlock];
      for (int64_t j = 0; j < count; ++j) rows[j] = problem.w_up.at(pairs.column[i + j], first);
      // Prefetch the same rows' next block if it is as wide, else the rows of down.
      const bool more = first + 2 * d <= problem.w_up.cols;
      add_dots({.a = x + first,
                .b = rows,
                .b_dtype = problem.w_up.dtype,
                .sums = sums,
                .count = count,
                .d = d,
                .prefetch = more ? problem.w_up.at(pairs.column[i], first + d)
                                 : problem.w_down.at(pairs.column[i])});
    }
    if (const float* const scales = problem.w_up.scales; scales != nullptr) {
      for (int64_t j = 0; j < count; ++j) sums[j] *= scales[pairs.column[i + j]];
    }
    multiply(problem, pairs.value + i, count, sums);
  }
}

// y[first, first + d) += sum over the pairs of h[i] * w_down of its neuron
void down(const SparseUpDown& problem, const PairRange& range, const float* h, float* y,
          int64_t first, int64_t d) {
  const auto& [pairs, begin, end] = range;
  for (int64_t i = begin; i < end; i += kPairBlock) {
    const int64_t count = std::min(kPairBlock, end - i);
    const void* rows[kPairBlock];
    for (int64_t j = 0; j < count; ++j) {
      rows[j] = problem.w_down.at(pairs.column[i + j], first);
    }
    add_scaled_rows({.y = y + first,
                     .rows = rows,
                     .dtype = problem.w_down.dtype,
                     .scale = h + (i - begin),
                     .count = count,
                     .d = d,
                     .prefetch = rows[count - 1]});
  }
}

void run_tokens(const SparseUpDown& problem, const Csr& pairs, int64_t begin, int64_t end) {
  const int64_t d = problem.w_down.cols;
  for (int64_t row = begin; row < end; ++row) {
    float* y = problem.y.row(row);
    std::fill_n(y, d, 0.0f);
    const int64_t last = pairs.row_begin[row + 1];
    for (int64_t i = pairs.row_begin[row]; i < last; i += kPairBlock) {
      const PairRange block{pairs, i, std::min(i + kPairBlock, last)};
      float h[kPairBlock];
      if (!problem.w_up.empty()) {
        up(problem, block, problem.x.row(row), h);
      } else {
        std::copy(pairs.value + block.begin, pairs.value + block.end, h);
      }
      down(problem, block, h, y, 0, d);
    }
    scale_sums(problem, row, 0, d);
  }
}

// For few tokens, or one that outweighs the rest: threads share all pairs evenly in up, and the
// columns of y in down. Costs a barrier and, with many threads, short pieces of weight rows.
void run_pairs(Context& ctx, const SparseUpDown& problem, const Csr& pairs) {
  Arena::Scope scope(ctx.scratch());
  const float* h = pairs.value;
  if (!problem.w_up.empty()) {
    float* products = scope.alloc<float>(pairs.nnz());
    ctx.parallel_for(pairs.nnz(), kPairBlock, [&](int64_t begin, int64_t end, int) {
      const int64_t* after = std::upper_bound(pairs.row_begin, pairs.row_begin + pairs.rows, begin);
      for (int64_t row = after - pairs.row_begin - 1; begin < end; ++row) {
        const int64_t last = std::min(end, pairs.row_begin[row + 1]);
        if (begin < last) up(problem, {pairs, begin, last}, problem.x.row(row), products + begin);
        begin = last;
      }
    });
    h = products;
  }
  constexpr int64_t kMinColumns =
      256;  // 1 KiB of a weight row: streams rather than scattered lines
  ctx.parallel_for(problem.y.cols, kMinColumns, [&](int64_t first, int64_t last, int) {
    for (int64_t row = 0; row < pairs.rows; ++row) {
      std::fill_n(problem.y.row(row) + first, last - first, 0.0f);
      const PairRange all{pairs, pairs.row_begin[row], pairs.row_begin[row + 1]};
      down(problem, all, h + all.begin, problem.y.row(row), first, last - first);
      scale_sums(problem, row, first, last - first);
    }
  });
}

}  // namespace

void row_fused_up_down(Context& ctx, const SparseUpDown& problem) {
  check_sparse_up_down(problem);
  Arena::Scope scope(ctx.scratch());
  const Csr pairs = active_pairs(ctx, scope, problem);
  int64_t heaviest = 0;
  for (int64_t row = 0; row < pairs.rows; ++row) {
    heaviest = std::max(heaviest, pairs.row_nnz(row));
  }
  // A thread's share of whole tokens exceeds the mean by up to one token.
  const bool stalls = heaviest * ctx.threads() > pairs.nnz() / 4;
  if (stalls && ctx.threads() > 1) {
    run_pairs(ctx, problem, pairs);
  } else {
    parallel_over_rows(ctx, pairs, [&](int64_t begin, int64_t end, int64_t) {
      run_tokens(problem, pairs, begin, end);
    });
  }
}

// --- Tile-union ---------------------------------------------------------------------------------

namespace {

// The pairs of one tile of tokens, sorted by neuron.
struct TileUnion {
  int64_t size = 0;            // active neurons
  uint32_t* neuron = nullptr;  // [size] ascending
  int64_t* begin = nullptr;    // [size + 1] first pair of each
  int64_t* row = nullptr;      // [pairs] token, ascending within a neuron
  float* gate = nullptr;       // [pairs]
  float* h = nullptr;          // [pairs]
  int64_t* next = nullptr;     // [F] working memory: where the next pair of a neuron goes
};

TileUnion alloc_tile_union(Arena::Scope& scope, int64_t ffn, int64_t pairs) {
  TileUnion out;
  const int64_t neurons = std::min(ffn, pairs);
  out.neuron = scope.alloc<uint32_t>(neurons);
  out.begin = scope.alloc<int64_t>(neurons + 1);
  out.row = scope.alloc<int64_t>(pairs);
  out.gate = scope.alloc<float>(pairs);
  out.h = scope.alloc<float>(pairs);
  out.next = scope.alloc<int64_t>(ffn);
  return out;
}

// Transposes rows [begin, end) by counting.
void transpose(const Csr& pairs, int64_t begin, int64_t end, TileUnion& out) {
  std::fill_n(out.next, pairs.cols, 0);
  for (int64_t i = pairs.row_begin[begin]; i < pairs.row_begin[end]; ++i) {
    ++out.next[pairs.column[i]];
  }
  out.size = 0;
  int64_t total = 0;
  for (int64_t n = 0; n < pairs.cols; ++n) {
    const int64_t count = out.next[n];
    if (count == 0) continue;
    out.neuron[out.size] = static_cast<uint32_t>(n);
    out.begin[out.size++] = total;
    out.next[n] = total;
    total += count;
  }
  out.begin[out.size] = total;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t i = pairs.row_begin[row]; i < pairs.row_begin[row + 1]; ++i) {
      const int64_t at = out.next[pairs.column[i]]++;
      out.row[at] = row;
      out.gate[at] = pairs.value[i];
    }
  }
}

// fn(neuron, next_neuron, first_pair, count) for runs of at most kRun pairs of one neuron.
constexpr int64_t kRun = 64;
template <typename Fn>
void for_each_run(const TileUnion& tile, const Fn& fn) {
  for (int64_t u = 0; u < tile.size; ++u) {
    const int64_t next = tile.neuron[std::min(u + 1, tile.size - 1)];
    const int64_t end = tile.begin[u + 1];
    for (int64_t at = tile.begin[u]; at < end; at += kRun) {
      fn(tile.neuron[u], next, at, std::min(kRun, end - at));
    }
  }
}

// One block of columns: the weight rows of the union are streamed once, each staying in the L1
// cache while it is used, with the tile's columns of x or y in the L2 cache.
struct Columns {
  int64_t first;
  int64_t d;
};

// Columns [first, first + d) of a weight row as f32, without scales: the row itself, or widened to
// `memory`. Then
// prefetches the same columns of the row that will be read next.
const float* read_row(const WeightMatrix& weights, int64_t row, int64_t next, Columns columns,
                      float* memory) {
  constexpr int64_t kLine = 64;  // bytes
  const std::byte* ahead = weights.at(next, columns.first);
  for (int64_t at = 0; at < columns.d * weights.value_bytes(); at += kLine) {
    __builtin_prefetch(ahead + at);
  }
  const std::byte* values = weights.at(row, columns.first);
  if (weights.dtype == DType::kF32) return reinterpret_cast<const float*>(values);
  widen(values, weights.dtype, columns.d, memory);
  return memory;
}

void up(const SparseUpDown& problem, const TileUnion& tile, Columns columns) {
  alignas(64) float memory[kColumnBlock];
  for_each_run(tile, [&](int64_t neuron, int64_t next, int64_t at, int64_t count) {
    const void* x[kRun];
    for (int64_t i = 0; i < count; ++i) x[i] = problem.x.row(tile.row[at + i]) + columns.first;
    add_dots({.a = read_row(problem.w_up, neuron, next, columns, memory),
              .b = x,
              .b_dtype = DType::kF32,
              .sums = tile.h + at,
              .count = count,
              .d = columns.d,
              .prefetch = x[0]});
  });
}

void down(const SparseUpDown& problem, const TileUnion& tile, const float* h, Columns columns) {
  alignas(64) float memory[kColumnBlock];
  for_each_run(tile, [&](int64_t neuron, int64_t next, int64_t at, int64_t count) {
    float* y[kRun];
    for (int64_t i = 0; i < count; ++i) y[i] = problem.y.row(tile.row[at + i]) + columns.first;
    spread_scaled_row({.y = y,
                       .row = read_row(problem.w_down, neuron, next, columns, memory),
                       .scale = h + at,
                       .count = count,
                       .d = columns.d});
  });
}

template <typename Fn>
void for_each_block(int64_t width, const Fn& fn) {
  for (int64_t first = 0; first < width; first += kColumnBlock) {
    fn(Columns{first, std::min(kColumnBlock, width - first)});
  }
}

void run_tile(const SparseUpDown& problem, const TileUnion& tile) {
  const float* h = tile.gate;
  if (!problem.w_up.empty()) {
    const int64_t pairs = tile.begin[tile.size];
    std::fill_n(tile.h, pairs, 0.0f);
    for_each_block(problem.w_up.cols, [&](Columns columns) { up(problem, tile, columns); });
    if (const float* const scales = problem.w_up.scales; scales != nullptr) {
      for_each_run(tile, [&](int64_t neuron, int64_t, int64_t at, int64_t count) {
        for (int64_t i = at; i < at + count; ++i) tile.h[i] *= scales[neuron];
      });
    }
    multiply(problem, tile.gate, pairs, tile.h);
    h = tile.h;
  }
  for_each_block(problem.w_down.cols, [&](Columns columns) { down(problem, tile, h, columns); });
}

// Most pairs in any tile of a thread's rows [begin, end).
int64_t max_tile_pairs(const Csr& pairs, int64_t begin, int64_t end, int64_t tokens) {
  int64_t most = 0;
  for (int64_t row = begin; row < end; row += tokens) {
    most = std::max(most, pairs.row_begin[std::min(row + tokens, end)] - pairs.row_begin[row]);
  }
  return most;
}

}  // namespace

int64_t tile_union_tokens(Context& ctx, int64_t tokens, int64_t width) {
  // Half of a 2 MiB L2 cache for a block of columns of the tile's x, or of its y.
  constexpr int64_t kCacheBytes = int64_t{1} << 20;
  const int64_t row_bytes = std::min(width, kColumnBlock) * static_cast<int64_t>(sizeof(float));
  const int64_t share = (tokens + ctx.threads() - 1) / ctx.threads();
  return std::clamp<int64_t>(kCacheBytes / row_bytes, 1, std::max<int64_t>(share, 1));
}

void tile_union_up_down(Context& ctx, const SparseUpDown& problem) {
  check_sparse_up_down(problem);
  if (problem.y.rows == 0) return;
  Arena::Scope scope(ctx.scratch());
  const Csr pairs = active_pairs(ctx, scope, problem);
  const int64_t tokens = tile_union_tokens(ctx, problem.y.rows, problem.y.cols);

  const int64_t parts = std::min<int64_t>(ctx.threads(), pairs.rows);
  TileUnion* tiles = scope.alloc<TileUnion>(parts);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = split_rows(pairs, part, parts);
    const int64_t end = split_rows(pairs, part + 1, parts);
    tiles[part] = alloc_tile_union(scope, pairs.cols, max_tile_pairs(pairs, begin, end, tokens));
  }
  parallel_over_rows(ctx, pairs, [&](int64_t begin, int64_t end, int64_t part) {
    TileUnion& tile = tiles[part];
    for (int64_t row = begin; row < end; row += tokens) {
      const int64_t last = std::min(row + tokens, end);
      for (int64_t r = row; r < last; ++r) std::fill_n(problem.y.row(r), problem.y.cols, 0.0f);
      transpose(pairs, row, last, tile);
      run_tile(problem, tile);
      for (int64_t r = row; r < last; ++r) scale_sums(problem, r, 0, problem.y.cols);
    }
  });
}

int64_t tile_union_size(Context& ctx, const TwellWide& gate, int64_t width) {
  const int64_t tokens = tile_union_tokens(ctx, gate.shape.rows, width);
  const int64_t tiles = (gate.shape.rows + tokens - 1) / tokens;
  Arena::Scope scope(ctx.scratch());
  int64_t* sizes = scope.alloc<int64_t>(tiles);
  uint8_t* seen = scope.alloc<uint8_t>(ctx.threads() * gate.shape.cols);
  ctx.parallel_for(tiles, 1, [&](int64_t begin, int64_t end, int thread) {
    uint8_t* mine = seen + thread * gate.shape.cols;
    for (int64_t tile = begin; tile < end; ++tile) {
      std::fill_n(mine, gate.shape.cols, uint8_t{0});
      int64_t size = 0;
      const int64_t last = std::min((tile + 1) * tokens, gate.shape.rows);
      for (int64_t row = tile * tokens; row < last; ++row) {
        twell_for_each(gate, row, [&](int64_t column, float) {
          size += 1 - mine[column];
          mine[column] = 1;
        });
      }
      sizes[tile] = size;
    }
  });
  int64_t total = 0;
  for (int64_t tile = 0; tile < tiles; ++tile) total += sizes[tile];
  return total;
}

}  // namespace twell
