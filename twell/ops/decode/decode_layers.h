// SPDX-License-Identifier: Apache-2.0
// All layers of a transformer for one new token each of 1 to 8 sequences, as one kernel (Hopper):
//   x += attention(rms_norm(x)) ; x += ffn(rms_norm(x))        for every layer
// with rotary embedding, a key/value cache that gets the tokens' rows, and a ReLU FFN, gated or
// not, dense or reading only the rows of w_up and w_down of neurons that fire. bf16 with f32
// accumulation; what other kernels round to bf16 (norms, q, k, v, the attended values, the gate, h,
// x after each block) is rounded here too.
//
// Decoding is bound by reading the weights once. A CTA per multiprocessor knows from the start
// which weights it will read in which order, and asks for them a ring of shared memory ahead,
// across the steps of a layer: memory stays busy while the steps wait for each other.
//
// The result for a token does not depend on the tokens beside it. Deterministic; never
// synchronises; can be captured in a CUDA graph. The launch is cooperative, so that two of them at
// a time cannot wait for each other's multiprocessors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/base/host_device.h"
#include "twell/format/activity_cuda.h"
#include "twell/ops/decode/gate_screen.h"

namespace twell {

inline constexpr int64_t kMaxDecodeTokens = 8;
inline constexpr int kMaxDecodeLayers = 128;
inline constexpr int64_t kDecodeSegment = 512;  // keys that one CTA attends to
TWELL_HOST_DEVICE constexpr int64_t decode_segments(int64_t keys) {
  return (keys + kDecodeSegment - 1) / kDecodeSegment;
}

// Device memory throughout; matrices contiguous row-major, 16-byte aligned. Weights are constant:
// nothing enqueued earlier on the stream writes them.
struct DecodeLayer {
  const __nv_bfloat16* attention_norm = nullptr;  // [D]
  const __nv_bfloat16* w_qkv = nullptr;           // [(H + 2 H_kv) * hd, D]
  const __nv_bfloat16* b_qkv = nullptr;           // [(H + 2 H_kv) * hd] or null
  const __nv_bfloat16* w_o = nullptr;             // [D, H * hd]
  const __nv_bfloat16* ffn_norm = nullptr;        // [D]
  const __nv_bfloat16* w_gate = nullptr;          // [F, D], null without a gate: in all layers
  const __nv_bfloat16* w_up = nullptr;            // [F, D]
  const __nv_bfloat16* w_down = nullptr;          // [F, D]
  __nv_bfloat16* keys = nullptr;                  // [rows, H_kv * hd]
  __nv_bfloat16* values = nullptr;                // [rows, H_kv * hd]
  ActivityCuda* activity = nullptr;               // added to: tokens, nnz; may be null
  bool sparse = false;                            // reads rows of neurons that fire only
  // Of the first of w_gate and w_up that there is, for x behind ffn_norm: with it a sparse layer
  // reads rows of bf16 of neurons that may fire only. For a call of one token; without rows: none.
  GateScreen screen;
};

// Device memory of one call in flight, zeros before the first. Words of what CTAs hand each other
// (sm90/tagged.cuh): pairs of bf16 values, or an f32 one.
struct DecodeWorkspace {
  uint64_t* x = nullptr;         // [2, M, D / 2] after a layer's attention, after its FFN
  uint64_t* qkv = nullptr;       // [M, (H + 2 H_kv) * hd / 2] values i and i + hd / 2 of a head
  uint64_t* attended = nullptr;  // [M, H * hd / 2], of sequences of one segment
  uint64_t* segment_values = nullptr;  // [M, H, segments, hd] of longer ones
  uint64_t* segment_sums = nullptr;    // [M, H, segments, 2] maximum (base 2), sum
  int segments = 0;                    // of the longest sequence there can be
  uint64_t* fired = nullptr;           // [multiprocessors] whether it has a part, of sparse layers
  uint64_t* tagged_parts = nullptr;  // [multiprocessors, D] y of each CTA's neurons, for one token
  float* parts = nullptr;            // [multiprocessors, M, D] the same, for more
  uint32_t* state = nullptr;         // [3] tags given out by all calls, two counters
};

struct DecodeLayers {
  int tokens = 0;    // M, 1 to 8
  int layers = 0;    // 1 to kMaxDecodeLayers
  int width = 0;     // D, a multiple of 8
  int ffn = 0;       // F
  int heads = 0;     // H
  int kv_heads = 0;  // H_kv
  int head_dim = 0;  // hd, a multiple of 16, at most 128
  float eps = 1e-5f;
  const float* cos = nullptr;           // [positions, hd / 2]
  const float* sin = nullptr;           // [positions, hd / 2]
  const int32_t* positions = nullptr;   // [M]
  const int64_t* cache_rows = nullptr;  // [M] of the cache, get the tokens' keys and values:
                                        // kv_begin + kv_len - 1
  const int64_t* kv_begin = nullptr;    // [M] first row of the sequence in the cache
  const int32_t* kv_len = nullptr;      // [M] rows of the sequence, the token's own among them
  __nv_bfloat16* x = nullptr;           // [M, D] in and out
  DecodeWorkspace workspace;
  DecodeLayer layer[kMaxDecodeLayers];
};

// Tokens at once that the current device's shared memory has room for, 0 to kMaxDecodeTokens.
int64_t decode_layers_max_tokens(int64_t width, int64_t q_width, int64_t ffn, int64_t head_dim);
// Whether layers may have screens.
bool decode_layers_take_screens(int64_t width, int64_t q_width, int64_t ffn, int64_t head_dim);

cudaError_t launch_decode_layers_sm90(const DecodeLayers& problem, cudaStream_t stream);

}  // namespace twell
