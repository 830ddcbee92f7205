// SPDX-License-Identifier: Apache-2.0
// The layers, step by step; what a step makes, the next one takes from all CTAs:
//   norm, q/k/v, rotation, cache | attention | output projection, residual | norm, gate, up, down
//   of a CTA's own neurons | sum over CTAs, residual |
// A CTA owns F / CTAs neurons from the gate to its part of y, so that h never leaves it; the parts
// are added in a fixed order.
//
// What CTAs hand each other are words with the number of the layer beside the value, of this call
// and all before it (sm90/tagged.cuh). Each place has one, so nothing of a layer may be written
// before all of the same place was read in the layer before. That holds because the last step of a
// layer waits for every CTA's part of y, or its word that it has none, which a CTA writes after
// everything else it reads in the layer but the parts and the residual for its own sums; and every
// step of the next layer waits for those sums, directly or through the steps in front of it.
#pragma once

#include "twell/ops/decode/add_parts.cuh"
#include "twell/ops/decode/finish.cuh"
#include "twell/sm90/grid_barrier.cuh"

namespace twell::decode {

// Of 32 KiB for layers of 1,024 columns and more.
template <int kTokens>
inline constexpr int kStagesFor = kTokens == 1 ? 6 : 4;

inline constexpr int kMaxQkvGroups = 32;  // of a CTA

template <int kTokens, int kLanes>
class Layers {
 public:
  static constexpr int kStages = kStagesFor<kTokens>;
  struct Shared {
    StreamShared<kStages> stream;
    typename Product<kTokens>::Shared product;
    BatchShared batch;
    QkvGroup qkv[kMaxQkvGroups];
    HiddenShared<kTokens> hidden;
    NormShared<kTokens> norm;
    union {
      AttendShared<kLanes> attend;
      AddShared<kTokens> add;
    };
  };
  __host__ __device__ static int pitch(int width, int q_width) {
    return row_pitch(width > q_width ? width : q_width);
  }
  __host__ __device__ static int ring_bytes(int width, int q_width) {
    return kStages * kGroup * stage_pitch(width, q_width);
  }
  static int64_t shared_bytes(int width, int q_width, int tokens, bool screens) {
    const int screen = screens ? ScreenX::bytes(width) : 0;
    return ring_bytes(width, q_width) + int64_t{tokens} * pitch(width, q_width) + screen;
  }

  __device__ __forceinline__ Layers(const DecodeLayers& p, Shared& shared, uint8_t* memory)
      : p_(p),
        s_(shared),
        x_(memory + ring_bytes(p.width, p.heads * p.head_dim)),
        pitch_(pitch(p.width, p.heads * p.head_dim)),
        neurons_(p.ffn),
        add_share_(p.width),
        qkv_groups_(own_groups((p.heads + 2 * p.kv_heads) * p.head_dim / kGroup)),
        output_groups_(own_groups((p.width + kGroup - 1) / kGroup)),
        kv_share_(p.heads / p.kv_heads),
        stream_(shared.stream, sm90::smem_address(memory),
                stage_pitch(p.width, p.heads * p.head_dim)),
        product_(p.tokens, shared.product, sm90::smem_address(x_), pitch_),
        screen_(x_ + p.tokens * pitch_, p.width),
        barrier_(p.workspace.state + 1) {}

  // By all threads of the CTA.
  __device__ __forceinline__ void run(uint8_t* memory) {
    WeightStream<kStages>::init(s_.stream);
    // The last block of a row may be short: what is multiplied by zeros has to be a number.
    const int pieces = ring_bytes(p_.width, p_.heads * p_.head_dim) / 16;
    if (p_.width % kBlock != 0 || p_.heads * p_.head_dim % kBlock != 0) {
      for (int i = static_cast<int>(threadIdx.x); i < pieces; i += static_cast<int>(blockDim.x)) {
        reinterpret_cast<uint4*>(memory)[i] = uint4{};
      }
      sm90::fence_async_shared();
    }
    load_batch();
    __syncthreads();
    if (threadIdx.x < kThreads) {
      sm90::registers_increase<kMultiplyRegisters>();
      multiply();
    } else {
      sm90::registers_decrease<kReadRegisters>();
      if (threadIdx.x < kThreads + 32) {
        stream_.template read_all<kTokens == 1>(p_, [&](int layer) { prefetch_for(layer); });
      }
    }
  }

 private:
  __device__ __forceinline__ void multiply() {
    const uint32_t done = *p_.workspace.state;  // tags of all calls before
    publish(done + 1);
#pragma unroll 1
    for (int layer = 0; layer < p_.layers; ++layer) {
      const DecodeLayer& l = p_.layer[layer];
      tag_ = done + 2 + static_cast<uint32_t>(layer);
      int nnz = 0;
#pragma unroll 1
      for (int step = 0; step < 3; ++step) product(l, step, nnz);
      const Part<kTokens> part(p_, tag_);
      if (l.sparse) {
        FiredNeurons<kTokens>(p_, l, tag_, neurons_, s_.hidden).up_down(product_, part, nnz);
      } else {
        dense_down<kTokens>(p_, neurons_, stream_, s_.hidden, part);
      }
      count_fired(p_, l, nnz);
      if constexpr (kTokens > 1) barrier_.wait();
      add_parts<kTokens>(p_, tag_, !l.sparse, add_share_, residual(0, tag_), s_.add,
                         [&](int at, uint32_t bits) {
                           if (layer + 1 < p_.layers) {
                             sm90::store_tagged(residual(1, tag_).words + at, bits, tag_);
                           } else {
                             reinterpret_cast<uint32_t*>(p_.x)[at] = bits;
                           }
                         });
    }
    if (barrier_.leave()) *p_.workspace.state = done + 1 + static_cast<uint32_t>(p_.layers);
  }

  // The kernel's input as words, which is what the first layer waits for too.
  __device__ __forceinline__ void publish(uint32_t tag) const {
    const int pairs = p_.width / 2, share = add_share_.end - add_share_.begin;
    for (int i = static_cast<int>(threadIdx.x); i < p_.tokens * share; i += kThreads) {
      const int at = i / share * pairs + add_share_.begin + i % share;
      sm90::store_tagged(residual(1, tag).words + at, reinterpret_cast<const uint32_t*>(p_.x)[at],
                         tag);
    }
  }

  // A step: its input into shared memory, the products of this CTA's groups of rows, what is made
  // of them. q/k/v and then this CTA's share of the attention (0), the output projection (1), gate
  // (2). One piece of code for the three, since what runs once in a layer waits for its
  // instructions too.
  __device__ __forceinline__ void product(const DecodeLayer& l, int step, int& nnz) {
    const int groups = step == 0   ? qkv_groups_
                       : step == 1 ? output_groups_
                                   : (neurons_.count + ffn_step(l) - 1) / ffn_step(l);
    const bool screens = kTokens == 1 && step == 2 && screened(p_, l);
    const int own_neuron = static_cast<int>(threadIdx.x);
    float error = 0.0f;
    if (screens && own_neuron < neurons_.count) {
      error = __ldg(l.screen.errors + neurons_.begin + own_neuron);
    }
    const int width = step == 1 ? p_.heads * p_.head_dim : p_.width;
    const Residual x = step == 2 ? residual(0, tag_) : residual(1, tag_ - 1);
    if (step == 1) {
      if (groups > 0) stage_attended<kTokens>(p_, tag_, s_.batch.kv_len, x_, pitch_);
    } else if (groups > 0 || step == 2) {
      stage_normed<kTokens>(p_, x, step == 0 ? l.attention_norm : l.ffn_norm, s_.norm, x_, pitch_,
                            screen_, screens);
    }
    if constexpr (kTokens == 1) {
      if (screens) {
        s_.hidden.errors[own_neuron] =
            error;  // of kMaxNeurons threads; the product's sums meet next
        product_.screen_groups(groups, stream_, width, screen_,
                               [&](int group, int, int pair, float low, float high) {
                                 finish_screen(group, pair, low, high);
                               });
        sync_threads();
        return;
      }
    }
    // What the output projection adds to, of the first batch of groups.
    const auto own = product_.finisher();
    sm90::Tagged before{};
    if (step == 1 && own.finishes && own.group < groups &&
        output_column(group_of(own.group), own.pair) < p_.width) {
      before = x.load_pair(output_place(own.group, own.token, own.pair));
    }
    product_.groups(groups, stream_, width,
                    [&](int group, int token, int pair, float low, float high) {
                      if (step == 0) {
                        finish_qkv(p_, l, tag_, s_.batch, s_.qkv[group], token, pair, low, high);
                      } else if (step == 1) {
                        finish_output(x, before, group, token, pair, low, high);
                      } else {
                        finish_gate(l, group, token, pair, low, high, nnz);
                      }
                    });
    if (step == 0) {
      s_.batch.each_item(p_, kv_share_, [&](const AttendItem& item, int kv_len, int64_t kv_begin) {
        attend<kLanes>(p_, l, tag_, item, kv_len, kv_begin, s_.attend);
      });
    } else if (step == 2) {
      sync_threads();
    }
  }

  // Of so many, dealt out in turn.
  __device__ __forceinline__ static int own_groups(int groups) {
    const int cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
    return groups > cta ? (groups - cta - 1) / ctas + 1 : 0;
  }
  __device__ __forceinline__ static int group_of(int own) {
    return static_cast<int>(blockIdx.x) + own * static_cast<int>(gridDim.x);
  }
  // Behind a layer's attention (0), behind its FFN (1).
  __device__ __forceinline__ Residual residual(int which, uint32_t tag) const {
    return {p_.workspace.x + which * p_.tokens * (p_.width / 2), tag};
  }

  // What the layer reads beside its weights, into the L2 cache. By the reading warp.
  __device__ __forceinline__ void prefetch_for(int layer) const {
    const DecodeLayer& l = p_.layer[layer];
    const auto norm = [&](const __nv_bfloat16* weight) {
      sm90::bulk_prefetch(weight, static_cast<uint32_t>(p_.width) * 2);
    };
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == kThreads) {
      norm(l.attention_norm);
      norm(l.ffn_norm);
    }
    if (kTokens == 1 && screened(p_, l)) {
      constexpr int kSector = 8;
      const int neuron = static_cast<int>(threadIdx.x) % 32 * kSector;
      if (neuron < neurons_.count) {
        sm90::prefetch_around(l.screen.errors + neurons_.begin + neuron);
      }
    }
    s_.batch.each_item(p_, kv_share_, [&](const AttendItem& item, int kv_len, int64_t kv_begin) {
      prefetch(p_, l, item, kv_len, kv_begin);
    });
  }

  __device__ __forceinline__ void load_batch() {
    s_.batch.load(p_);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < qkv_groups_) {
      const int column = qkv_column(p_, group_of(thread), 0);
      s_.qkv[thread] = {column / p_.head_dim, column % p_.head_dim};
    }
    clear(s_.hidden);
    clear(s_.norm);
  }
  template <typename T>
  __device__ __forceinline__ static void clear(T& shared) {
    static_assert(sizeof(T) % 16 == 0);
    for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(sizeof(T) / 16);
         i += static_cast<int>(blockDim.x)) {
      reinterpret_cast<uint4*>(&shared)[i] = uint4{};
    }
  }

  __device__ __forceinline__ int output_place(int group, int token, int pair) const {
    return token * (p_.width / 2) + output_column(group_of(group), pair) / 2;
  }
  // before: what was loaded from there ahead of the first batch.
  __device__ __forceinline__ void finish_output(const Residual& x, sm90::Tagged before, int group,
                                                int token, int pair, float low, float high) const {
    if (output_column(group_of(group), pair) >= p_.width) return;
    const int at = output_place(group, token, pair);
    const bool first = group < Product<kTokens>::kBatch;
    const float2 was = to_floats(x.wait_pair(first ? before : x.load_pair(at), at));
    sm90::store_tagged(residual(0, tag_).words + at, bf16x2(was.x + low, was.y + high), tag_);
  }

  __device__ __forceinline__ void finish_gate(const DecodeLayer& l, int group, int token, int pair,
                                              float low, float high, int& nnz) {
    const bool both = paired(l);
    const auto store = [&](int neuron, float gate, float up) {
      if (neuron >= neurons_.count) return;
      const __nv_bfloat16 g = __float2bfloat16(relu(gate));
      const bool fires = !(__bfloat162float(g) == 0.0f);
      s_.hidden.h[token][neuron] = both && fires ? __float2bfloat16(__bfloat162float(g) * up) : g;
      nnz += fires;
    };
    store(group * ffn_step(l) + pair, low, high);
    if (!both) store(group * ffn_step(l) + pair + kPairs, high, 0.0f);
  }

  // h: 1 for neurons that may fire, 0 for those that do not.
  __device__ __forceinline__ void finish_screen(int group, int pair, float low, float high) {
    const auto store = [&](int neuron, float product) {
      if (neuron >= neurons_.count) return;
      const bool may_fire = !(product < -s_.hidden.errors[neuron]);
      s_.hidden.h[0][neuron] = __float2bfloat16(may_fire ? 1.0f : 0.0f);
    };
    store(group * kGroup + pair, low);
    store(group * kGroup + pair + kPairs, high);
  }

  const DecodeLayers& p_;
  Shared& s_;
  uint8_t* x_;
  const int pitch_;
  const Neurons neurons_;
  const AddShare add_share_;
  const int qkv_groups_, output_groups_;  // of this CTA
  const int kv_share_;                    // heads for a key
  WeightStream<kStages> stream_;
  Product<kTokens> product_;
  ScreenX screen_;
  sm90::GridBarrier<kThreads> barrier_;
  uint32_t tag_ = 0;
};

}  // namespace twell::decode
