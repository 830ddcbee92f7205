// SPDX-License-Identifier: Apache-2.0
// Medium batches (65 to some thousand tokens): batch_ffn_cuda.h says what they compute.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "twell/base/cuda.h"
#include "twell/ops/ffn/few_tokens/batch_ffn_cuda.h"

namespace twell {

// Device memory of one call in flight, for up to max_tokens tokens of up to max_ffn neurons. A
// view: the memory belongs to the caller, and what is in it does not matter between calls. A tile
// is 128 tokens; places are F rounded up to 16.
struct MediumBatchWorkspace {
  int64_t max_tokens = 0, max_ffn = 0;
  __nv_bfloat16* gate = nullptr;  // [tiles, places, 128]
  uint8_t* h = nullptr;           // [tiles, places / 16] images of [128, 16] bf16
  int32_t* ids = nullptr;         // [tiles, places]
  int32_t* counts = nullptr;      // [tiles, segments of at least 48 neurons]
  int32_t* union_ids = nullptr;   // [tiles, places]
  int32_t* totals = nullptr;      // [tiles]

  static int64_t values(int64_t tokens, int64_t ffn);  // of `gate`, and of h
  static int64_t words(int64_t tokens, int64_t ffn);   // of the four lists together
  // lists: memory for `list_words` words, 16-byte aligned, as the others are. Error where it is
  // short.
  static MediumBatchWorkspace in(int64_t tokens, int64_t ffn, __nv_bfloat16* gate, __nv_bfloat16* h,
                                 uint32_t* lists, int64_t list_words);
};

void medium_batch_ffn_cuda(CudaContext& ctx, const BatchFfnCuda& problem,
                           const MediumBatchWorkspace& workspace);

}  // namespace twell
