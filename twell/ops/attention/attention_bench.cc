// SPDX-License-Identifier: Apache-2.0
// attention_bench: training shapes (forward, backward) and decoding on a cache.
#include "twell/ops/attention/attention.h"

#include <benchmark/benchmark.h>

#include <vector>

#include "twell/base/buffer.h"
#include "twell/base/rng.h"

namespace twell {
namespace {

Buffer<float> random(int64_t size, uint64_t stream) {
  Buffer<float> values(size);
  for (int64_t i = 0; i < size; ++i) values[i] = normal(1, stream, static_cast<uint64_t>(i));
  return values;
}

// Arguments: sequences, heads, key/value heads, length; head size 64.
struct Training {
  explicit Training(const benchmark::State& state)
      : shape{state.range(1), state.range(2), 64},
        batch(state.range(0)),
        length(state.range(3)),
        rows(batch * length),
        width(shape.heads * 64),
        kv_width(shape.kv_heads * 64),
        q(random(rows * width, 1)),
        k(random(rows * kv_width, 2)),
        v(random(rows * kv_width, 3)),
        d_out(random(rows * width, 4)),
        out(rows * width),
        logsumexp(rows * shape.heads),
        d_q(rows * width),
        d_k(rows * kv_width),
        d_v(rows * kv_width) {
    for (int64_t b = 0; b < batch; ++b) {
      sequences.push_back({b * length, length,
                           k.matrix(rows, kv_width).slice_rows(b * length, length),
                           v.matrix(rows, kv_width).slice_rows(b * length, length)});
    }
  }
  void forward() {
    attention_forward(
        ctx, {shape, sequences, q.matrix(rows, width), out.matrix(rows, width), logsumexp.data()});
  }
  void backward() {
    attention_backward(ctx, {shape, sequences, q.matrix(rows, width), out.matrix(rows, width),
                             logsumexp.data(), d_out.matrix(rows, width), d_q.matrix(rows, width),
                             d_k.matrix(rows, kv_width), d_v.matrix(rows, kv_width)});
  }
  // Products per causal query-key pair, head and pass.
  void report(benchmark::State& state, double products) const {
    const double pairs = static_cast<double>(batch * length * (length + 1) / 2);
    state.counters["GFLOP/s"] =
        benchmark::Counter(products * 2e-9 * pairs * static_cast<double>(width) *
                               static_cast<double>(state.iterations()),
                           benchmark::Counter::kIsRate);
  }

  Context ctx;
  AttentionShape shape;
  int64_t batch, length, rows, width, kv_width;
  Buffer<float> q, k, v, d_out, out, logsumexp, d_q, d_k, d_v;
  std::vector<AttentionSequence> sequences;
};

void forward(benchmark::State& state) {
  Training training(state);
  training.forward();
  for (auto _ : state) training.forward();
  training.report(state, 2);
}

void forward_backward(benchmark::State& state) {
  Training training(state);
  training.forward();
  training.backward();
  for (auto _ : state) {
    training.forward();
    training.backward();
  }
  training.report(state, 7);
}

void decode(benchmark::State& state) {
  Context ctx;
  const int64_t batch = state.range(0), heads = state.range(1), kv_heads = state.range(2);
  const int64_t length = state.range(3), cache = length * kv_heads * 64;
  const Buffer<float> q = random(batch * heads * 64, 1), k = random(batch * cache, 2),
                      v = random(batch * cache, 3), out(batch * heads * 64);
  std::vector<AttentionSequence> sequences;
  for (int64_t b = 0; b < batch; ++b) {
    sequences.push_back({b, 1, ConstMatrixF(k.data() + b * cache, length, kv_heads * 64),
                         ConstMatrixF(v.data() + b * cache, length, kv_heads * 64)});
  }
  const auto run = [&] {
    attention_forward(ctx, {{heads, kv_heads, 64},
                            sequences,
                            q.matrix(batch, heads * 64),
                            out.matrix(batch, heads * 64)});
  };
  run();
  for (auto _ : state) run();
  state.counters["cache GB/s"] = benchmark::Counter(
      8e-9 * static_cast<double>(batch * cache) * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
}

void training_shapes(benchmark::internal::Benchmark* bench) {
  bench->Args({8, 4, 4, 256})->Args({4, 4, 4, 512})->Args({2, 4, 4, 1024})->Args({1, 4, 4, 1024});
  bench->Args({1, 32, 32, 512})->Args({4, 8, 2, 512})->UseRealTime();
}

BENCHMARK(forward)->Apply(training_shapes);
BENCHMARK(forward_backward)->Apply(training_shapes);
BENCHMARK(decode)
    ->Args({1, 32, 32, 2048})
    ->Args({8, 32, 32, 1024})
    ->Args({1, 32, 8, 2048})
    ->Args({1, 8, 1, 2048})
    ->Args({1, 4, 4, 256})
    ->UseRealTime();

}  // namespace
}  // namespace twell

BENCHMARK_MAIN();
