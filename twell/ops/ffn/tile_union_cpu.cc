// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/base/error.h"
#include "twell/ops/ffn/pair_kernels_simd.h"
#include "twell/ops/ffn/problem_check.h"
#include "twell/ops/ffn/sparse_up_down.h"
#include "twell/ops/ffn/work_split.h"

namespace twell {
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

// Columns [first, first + d) of a weight row as f32: the row itself, or widened to `memory`. Then
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
    for (int64_t i = 0; i < pairs; ++i) tile.h[i] *= tile.gate[i];
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
