// SPDX-License-Identifier: Apache-2.0
// All layers of a transformer for one new token each of 1 to 8 sequences, as one kernel (Hopper):
//   x += attention(rms_norm(x)); x += ffn(rms_norm(x))        for every layer
// with rotary embedding, a key/value cache in which the tokens' rows are stored, and a ReLU FFN,
// gated or not. A sparse layer reads only the rows of w_up and w_down of active neurons. bf16 with
// f32 accumulation; norms, q, k, v, the attended values, the gate, h, and x after each block are
// rounded to bf16, as they are when the steps are kernels of their own. So are softmax weights,
// which kernels of their own keep in f32.
//
// The projections may be in e4m3 with a scale per output (format/byte_matrix.h); inputs stay as
// they are, and sums of products are multiplied by the scales. Keys and values may be in 8 bits
// (format/kv_blocks.h): those of the new tokens are rounded to them before they are attended to.
//
// Decoding is bound by reading the weights once. A CTA per SM knows from the start which weights it
// will read in which order, so that it requests them ahead, across the steps of a layer: memory
// stays busy while the steps wait for each other.
//
// The result for a token does not depend on the tokens beside it. Deterministic; never
// synchronises; can be captured in a CUDA graph. The launch is cooperative, so that two of them
// cannot each hold SMs that the other waits for. Returns cudaErrorInvalidValue for shapes outside
// the ranges below, more tokens than decode_layers_max_tokens, or screens where these do not fit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/base/host_device.h"
#include "twell/format/activity_cuda.h"
#include "twell/format/gate_screen.h"
#include "twell/format/kv_blocks.h"

namespace twell {

inline constexpr int64_t kMaxDecodeTokens = 8;
inline constexpr int kMaxDecodeLayers = 128;

// Device memory throughout; matrices contiguous row-major, 16-byte aligned. Nothing enqueued
// earlier on the stream may write the weights.
struct DecodeLayer {
  const __nv_bfloat16* attention_norm = nullptr;  // [D]
  const void* w_qkv = nullptr;                    // [(H + 2 H_kv) * hd, D] bf16, or e4m3
  const __nv_bfloat16* b_qkv = nullptr;           // [(H + 2 H_kv) * hd] or null
  const void* w_o = nullptr;                      // [D, H * hd]
  const __nv_bfloat16* ffn_norm = nullptr;        // [D]
  const void* w_gate = nullptr;                   // [F, D]; null in all layers: no gate
  const void* w_up = nullptr;                     // [F, D]
  const void* w_down = nullptr;                   // [F, D]
  __nv_bfloat16* keys = nullptr;                  // [rows, H_kv * hd]; not used in 8 bits
  __nv_bfloat16* values = nullptr;                // [rows, H_kv * hd]
  ActivityCuda* activity = nullptr;               // tokens and nnz are added; may be null
  bool sparse = false;                            // reads rows of active neurons only
  // Screen of w_gate (of w_up without a gate) for x after ffn_norm, or one without rows. With it, a
  // sparse layer reads bf16 rows only of neurons that the screen lets through. Used for one token,
  // and not beside weights in e4m3.
  GateScreen screen;
};

// What a layer has besides where things are in 8 bits.
struct DecodeLayerBytes {
  // Scales of the rows of the weights in e4m3.
  const float* qkv_scales = nullptr;   // [(H + 2 H_kv) * hd]
  const float* o_scales = nullptr;     // [D]
  const float* gate_scales = nullptr;  // [F]
  const float* up_scales = nullptr;    // [F]
  const float* down_scales = nullptr;  // [D], of the columns of w_down
  KvBytes keys, values;
};

// Arrays in which CTAs exchange results, for one call in flight; zeros before the first call.
// uint64_t: words of a tag and 32 bits (gpu/tagged.cuh), either two bf16 values or an f32. They
// lie one array behind the other, from x on.
struct DecodeWorkspace {
  uint64_t* x = nullptr;               // [2, M, D / 2] after a layer's attention, after its FFN
  uint64_t* qkv = nullptr;             // [M, H + 2 H_kv, hd / 2] values i and i + hd / 2 of a head
  uint64_t* attended = nullptr;        // [M, H * hd / 2]
  uint64_t* segment_values = nullptr;  // [M, H, segments, hd], where keys are cut into segments
  uint64_t* segment_sums = nullptr;    // [M, H, segments, 2] maximum (base 2) and sum
  int segments = 0;                    // of the longest sequence
  uint64_t* fired = nullptr;           // [SMs] sparse layers: whether the CTA has a part of y
  uint64_t* tagged_parts = nullptr;    // [SMs, D] the parts of y, for one token
  float* parts = nullptr;              // [SMs, M, D] the parts of y, for more
  uint32_t* state = nullptr;           // [3] tags used by calls so far, two counters

  // Where the words with tags end.
  TWELL_HOST_DEVICE uint64_t* words_end() const { return reinterpret_cast<uint64_t*>(parts); }
};

struct DecodeWorkspaceShape {
  int64_t multiprocessors = 0;
  int64_t tokens = 0;      // at most, up to kMaxDecodeTokens; 0: for no calls
  int64_t width = 0;       // D
  int64_t heads = 0;       // H
  int64_t kv_heads = 0;    // H_kv
  int64_t head_dim = 0;    // hd
  int64_t max_length = 0;  // keys of the longest sequence
};
int64_t decode_workspace_bytes(const DecodeWorkspaceShape& shape);
// memory: device memory of decode_workspace_bytes(shape), 256-byte aligned.
DecodeWorkspace decode_workspace(const DecodeWorkspaceShape& shape, void* memory);

struct DecodeLayers {
  int tokens = 0;    // M, 1 to 8
  int layers = 0;    // 1 to kMaxDecodeLayers
  int width = 0;     // D, a multiple of 8
  int ffn = 0;       // F
  int heads = 0;     // H, at most the SMs of the device
  int kv_heads = 0;  // H_kv
  int head_dim = 0;  // hd, a multiple of 16, at most 128
  float eps = 1e-5f;
  const float* cos = nullptr;           // [positions, hd / 2]
  const float* sin = nullptr;           // [positions, hd / 2]
  const int32_t* positions = nullptr;   // [M]
  const int64_t* cache_rows = nullptr;  // [M] where the tokens' keys and values are stored: the
                                        // row of key kv_len - 1
  const int32_t* tables = nullptr;      // of blocks, format/kv_blocks.h
  const int64_t* kv_begin = nullptr;    // [M] where the sequence's table begins
  const int32_t* kv_len = nullptr;      // [M] keys of the sequence, with the token's own
  __nv_bfloat16* x = nullptr;           // [M, D] in and out
  DecodeWorkspace workspace;
  DecodeLayer layer[kMaxDecodeLayers];
  DecodeLayerBytes bytes[kMaxDecodeLayers];
  bool weights_in_bytes = false;  // D, F and H * hd are multiples of 16 then
  bool cache_in_bytes = false;
  // Stages of weights that a CTA may have requested and not yet received in sparse layers, 1 to 4
  // (route::sparse_requests). It changes no result.
  int sparse_requests = 1;
};

// How many tokens a call may have on the current device, 0 to kMaxDecodeTokens.
int64_t decode_layers_max_tokens(int64_t width, int64_t q_width, int64_t ffn, int64_t head_dim,
                                 bool weights_in_bytes = false);
// Whether layers may have screens on the current device.
bool decode_layers_take_screens(int64_t width, int64_t q_width, int64_t ffn, int64_t head_dim);

// Makes a layer's screen; on any GPU.
struct MakeGateScreen {
  int64_t neurons = 0;                    // F
  int64_t width = 0;                      // D, with screens_width(D)
  const __nv_bfloat16* weight = nullptr;  // [F, D], 4-byte aligned
  const __nv_bfloat16* norm = nullptr;    // [D] weights of the norm that x comes from
  uint8_t* rows = nullptr;                // written, as in GateScreen
  float* errors = nullptr;                // written, as in GateScreen
};
cudaError_t launch_make_gate_screen(const MakeGateScreen& problem, cudaStream_t stream);

cudaError_t launch_decode_layers_sm90(const DecodeLayers& problem, cudaStream_t stream);

}  // namespace twell
