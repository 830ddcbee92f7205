// SPDX-License-Identifier: Apache-2.0
// All layers for one new token of each sequence (decode_layers.h) in double precision, one token,
// head and neuron at a time, as a reference for tests, with random problems to compare on. Also the
// steps of a layer that references of whole models share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "twell/base/dtype.h"
#include "twell/base/rng.h"
#include "twell/format/kv_blocks.h"

namespace twell {
namespace reference {

using Row = std::vector<double>;

inline double log_sum_exp(const Row& values) {
  const double max = *std::max_element(values.begin(), values.end());
  double sum = 0.0;
  for (const double value : values) sum += std::exp(value - max);
  return max + std::log(sum);
}

inline void add(const Row& delta, Row& x) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += delta[i];
}

// weight [out, in]
template <typename T>
Row linear(const Row& x, const T* weight, int64_t out) {
  Row y(static_cast<size_t>(out), 0.0);
  for (size_t o = 0; o < y.size(); ++o) {
    for (size_t i = 0; i < x.size(); ++i) y[o] += x[i] * weight[o * x.size() + i];
  }
  return y;
}

template <typename T>
Row rms_norm(const Row& x, const T* weight, double eps) {
  double squares = 0.0;
  for (const double value : x) squares += value * value;
  const double scale = 1.0 / std::sqrt(squares / static_cast<double>(x.size()) + eps);
  Row y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * scale * weight[i];
  return y;
}

// Rotates the pairs (i, i + hd / 2) of each head; cos and sin [hd / 2].
template <typename T>
void rotate(std::span<const T> cos, std::span<const T> sin, std::span<double> x) {
  const size_t half = cos.size();
  for (size_t head = 0; head < x.size(); head += 2 * half) {
    for (size_t i = 0; i < half; ++i) {
      const double a = x[head + i], b = x[head + half + i];
      x[head + i] = a * cos[i] - b * sin[i];
      x[head + half + i] = b * cos[i] + a * sin[i];
    }
  }
}

// Attention of one query row [H * hd] over keys and values [H_kv * hd].
inline Row attend(const Row& q, std::span<const Row> keys, std::span<const Row> values,
                  int64_t head_dim) {
  const auto hd = static_cast<size_t>(head_dim);
  const size_t group = q.size() / keys[0].size();
  Row out(q.size(), 0.0);
  for (size_t head = 0; head < q.size() / hd; ++head) {
    const size_t kv = head / group * hd;
    Row scores;
    for (const Row& key : keys) {
      double dot = 0.0;
      for (size_t i = 0; i < hd; ++i) dot += q[head * hd + i] * key[kv + i];
      scores.push_back(dot / std::sqrt(static_cast<double>(hd)));
    }
    const double total = log_sum_exp(scores);
    for (size_t j = 0; j < keys.size(); ++j) {
      const double weight = std::exp(scores[j] - total);
      for (size_t i = 0; i < hd; ++i) out[head * hd + i] += weight * values[j][kv + i];
    }
  }
  return out;
}

}  // namespace reference

// Norm of the difference over the norm of the reference.
template <typename A, typename B>
double relative_error(std::span<A> values, std::span<B> reference) {
  double error = 0.0, total = 0.0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double expected = static_cast<double>(reference[i]);
    const double difference = static_cast<double>(values[i]) - expected;
    error += difference * difference;
    total += expected * expected;
  }
  return total == 0.0 ? std::sqrt(error) : std::sqrt(error / total);
}

// The members of DecodeLayer and DecodeLayers, in host memory.
struct DecodeReferenceLayer {
  std::vector<float> attention_norm;  // [D]
  std::vector<float> w_qkv;           // [(H + 2 H_kv) * hd, D]
  std::vector<float> b_qkv;           // [(H + 2 H_kv) * hd], or empty
  std::vector<float> w_o;             // [D, H * hd]
  std::vector<float> ffn_norm;        // [D]
  std::vector<float> w_gate;          // [F, D], or empty: no gate
  std::vector<float> w_up, w_down;    // [F, D]
  std::vector<float> keys, values;    // [rows, H_kv * hd]
};
struct DecodeReference {
  int64_t width = 0, ffn = 0, heads = 0, kv_heads = 0, head_dim = 0;
  double eps = 1e-5;
  std::vector<float> cos, sin;  // [positions, hd / 2]
  std::vector<int32_t> positions, tables, kv_len;
  std::vector<int64_t> cache_rows, kv_begin;
  std::vector<DecodeReferenceLayer> layers;
  std::vector<float> x;  // [M, D]
  // Rounds to bf16 what the kernel rounds, but for the weights of the softmax.
  bool rounds = false;

  int64_t tokens() const { return std::ssize(positions); }

  // Stores the tokens' keys and values. Returns x after the last layer.
  std::vector<double> run() {
    std::vector<double> out;
    for (int64_t token = 0; token < tokens(); ++token) {
      const auto begin = x.begin() + token * width;
      Row row(begin, begin + width);
      for (DecodeReferenceLayer& layer : layers) {
        attention(layer, token, row);
        feed_forward(layer, row);
      }
      out.insert(out.end(), row.begin(), row.end());
    }
    return out;
  }

 private:
  using Row = reference::Row;

  Row rounded(Row row) const {
    if (!rounds) return row;
    for (double& value : row) value = to_float(to_bf16(static_cast<float>(value)));
    return row;
  }
  Row cached(const std::vector<float>& cache, int64_t row) const {
    const auto begin = cache.begin() + row * kv_heads * head_dim;
    return {begin, begin + kv_heads * head_dim};
  }

  void attention(DecodeReferenceLayer& layer, int64_t token, Row& row) const {
    const auto at = static_cast<size_t>(token);
    const int64_t q_width = heads * head_dim, kv_width = kv_heads * head_dim, half = head_dim / 2;
    const Row normed = rounded(reference::rms_norm(row, layer.attention_norm.data(), eps));
    Row qkv = reference::linear(normed, layer.w_qkv.data(), q_width + 2 * kv_width);
    if (!layer.b_qkv.empty()) reference::add({layer.b_qkv.begin(), layer.b_qkv.end()}, qkv);
    const auto angles = [&](const std::vector<float>& table) {
      return std::span(table).subspan(static_cast<size_t>(positions[at] * half),
                                      static_cast<size_t>(half));
    };
    reference::rotate(angles(cos), angles(sin),
                      std::span(qkv).first(static_cast<size_t>(q_width + kv_width)));
    qkv = rounded(qkv);
    const auto k = qkv.begin() + q_width;
    for (int64_t i = 0; i < kv_width; ++i) {
      const auto to = static_cast<size_t>(cache_rows[at] * kv_width + i);
      layer.keys[to] = static_cast<float>(k[i]);
      layer.values[to] = static_cast<float>(k[kv_width + i]);
    }
    std::vector<Row> keys, values;
    for (int key = 0; key < kv_len[at]; ++key) {
      const int32_t block = tables[static_cast<size_t>(kv_begin[at] + key / kKvBlock)];
      keys.push_back(cached(layer.keys, kv_row(block, key)));
      values.push_back(cached(layer.values, kv_row(block, key)));
    }
    const Row attended = rounded(reference::attend({qkv.begin(), k}, keys, values, head_dim));
    reference::add(reference::linear(attended, layer.w_o.data(), width), row);
    row = rounded(row);
  }

  void feed_forward(const DecodeReferenceLayer& layer, Row& row) const {
    const Row normed = rounded(reference::rms_norm(row, layer.ffn_norm.data(), eps));
    const bool gated = !layer.w_gate.empty();
    const Row up = reference::linear(normed, layer.w_up.data(), ffn);
    const Row gate = rounded(gated ? reference::linear(normed, layer.w_gate.data(), ffn) : up);
    Row h(gate.size());
    for (size_t f = 0; f < h.size(); ++f) h[f] = std::max(gate[f], 0.0) * (gated ? up[f] : 1.0);
    h = rounded(h);
    for (size_t f = 0; f < h.size(); ++f) {
      for (size_t d = 0; d < row.size(); ++d) row[d] += h[f] * layer.w_down[f * row.size() + d];
    }
    row = rounded(row);
  }
};

struct DecodeReferenceShape {
  int64_t width, ffn, heads, kv_heads, head_dim;
  std::vector<int32_t> lengths;  // [M] keys of each sequence, with the token's own
  int layers = 2;
  bool gated = true, bias = false;
};

// A problem of random values in bf16, in which a dropped key shows: values of the first and last
// key of every block are large, and x is small beside what attention adds. Blocks of the cache
// are scattered; rows without a key are NaN, but for those of block 0, which no table names.
inline DecodeReference random_decode(const DecodeReferenceShape& shape) {
  DecodeReference p{.width = shape.width,
                    .ffn = shape.ffn,
                    .heads = shape.heads,
                    .kv_heads = shape.kv_heads,
                    .head_dim = shape.head_dim};
  uint64_t stream = 0;
  const auto random = [&stream](int64_t count, double scale, float mean = 0.0f) {
    std::vector<float> values(static_cast<size_t>(count));
    ++stream;
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = to_float(to_bf16(mean + static_cast<float>(scale) * normal(23, stream, i)));
    }
    return values;
  };
  const auto weights = [&](int64_t rows, int64_t cols) {
    return random(rows * cols, 1.0 / std::sqrt(static_cast<double>(cols)));
  };
  const int32_t longest = *std::max_element(shape.lengths.begin(), shape.lengths.end());
  const int64_t half = shape.head_dim / 2, kv_width = shape.kv_heads * shape.head_dim;
  for (int64_t position = 0; position < longest; ++position) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) *
                           std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(half));
      p.cos.push_back(static_cast<float>(std::cos(angle)));
      p.sin.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  int64_t blocks = 1;
  for (const int32_t length : shape.lengths) blocks += (length + kKvBlock - 1) / kKvBlock;
  int64_t named = 0;  // blocks in tables; they are named from the last on
  for (const int32_t length : shape.lengths) {
    p.positions.push_back(length - 1);
    p.kv_len.push_back(length);
    p.kv_begin.push_back(std::ssize(p.tables));
    for (int begin = 0; begin < length; begin += kKvBlock) {
      p.tables.push_back(static_cast<int32_t>(blocks - ++named));
    }
    p.cache_rows.push_back(kv_row(p.tables.back(), length - 1));
  }
  const auto cache = [&](bool values) {
    const auto all = random(blocks * kKvBlock * kv_width, values ? 1.0 : 0.5);
    std::vector<float> out(all.size(), std::numeric_limits<float>::quiet_NaN());
    std::fill_n(out.begin(), kKvBlock * kv_width, 0.0f);
    for (size_t token = 0; token < shape.lengths.size(); ++token) {
      for (int key = 0; key < shape.lengths[token] - 1; ++key) {
        const auto block = static_cast<size_t>(p.kv_begin[token] + key / kKvBlock);
        const int64_t row = kv_row(p.tables[block], key);
        const float scale =
            values && (key % kKvBlock == 0 || key % kKvBlock == kKvBlock - 1) ? 64.0f : 1.0f;
        for (int64_t i = row * kv_width; i < (row + 1) * kv_width; ++i) {
          out[static_cast<size_t>(i)] = scale * all[static_cast<size_t>(i)];
        }
      }
    }
    return out;
  };
  const int64_t qkv_width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
  for (int i = 0; i < shape.layers; ++i) {
    DecodeReferenceLayer layer;
    layer.attention_norm = random(shape.width, 0.1, 1.0f);
    layer.w_qkv = weights(qkv_width, shape.width);
    if (shape.bias) layer.b_qkv = random(qkv_width, 0.3);
    layer.w_o = weights(shape.width, shape.heads * shape.head_dim);
    layer.ffn_norm = random(shape.width, 0.1, 1.0f);
    if (shape.gated) layer.w_gate = weights(shape.ffn, shape.width);
    layer.w_up = weights(shape.ffn, shape.width);
    // [F, D]: sums of F terms.
    layer.w_down = random(shape.ffn * shape.width, 1.0 / std::sqrt(static_cast<double>(shape.ffn)));
    layer.keys = cache(false);
    layer.values = cache(true);
    p.layers.push_back(std::move(layer));
  }
  p.x = random(std::ssize(shape.lengths) * shape.width, 0.1);
  return p;
}

// Ragged shapes, each with the lengths of its sequences around the edges of blocks and segments.
inline std::vector<DecodeReferenceShape> decode_reference_shapes() {
  return {{64, 200, 4, 2, 16, {65, 1, 300}},
          {.width = 136, .ffn = 1000, .heads = 2, .kv_heads = 1, .head_dim = 128, .lengths = {256}},
          {192, 520, 3, 3, 64, {257, 64}, 2, false},
          {256, 640, 8, 2, 32, {700, 17}, 3, true, true},
          {264, 136, 1, 1, 80, {1}, 1}};
}

// Bound on the relative error, in norm, of a kernel that rounds as the reference does: ten
// independent roundings of a relative 2^-9 per layer. Those of the softmax, and sums near the
// middle between two values of bf16, are all that differs.
inline double decode_tolerance(int64_t layers) {
  return std::ldexp(std::sqrt(10.0 * static_cast<double>(layers) + 2.0), -9);
}

}  // namespace twell
