// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/ops/ffn/few_tokens/batch_ffn_cuda.h"

namespace twell {

FewTokenWorkspace::FewTokenWorkspace(int64_t max_ffn, int64_t max_width)
    : max_ffn_(max_ffn),
      hidden_(max_ffn * kMaxFewTokens),
      fired_(max_ffn / few_token::kLeastRows + 1),
      arrived_(1),
      parts_(kMaxStreams * few_token::kRowTokens * std::min(max_width, kMaxStreamSlice)),
      active_(max_ffn / 32 + 1) {
  TWELL_CUDA_CHECK(cudaMemset(fired_.data(), 0, static_cast<size_t>(fired_.bytes())));
  TWELL_CUDA_CHECK(cudaMemset(arrived_.data(), 0, static_cast<size_t>(arrived_.bytes())));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(nullptr));
}

}  // namespace twell
