// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include "bench/synthetic_model.h"
#include "twell/model/model_cuda.h"

namespace twell {

void set_synthetic_sparsity(CudaContext& ctx, const ModelCuda& model, bool sparse) {
  constexpr int kByte = 0xbe;
  static_assert(std::bit_cast<uint32_t>(kSyntheticBias) == 0xbebe0000);
  for (const LayerMatrices<const BF16>& layer : model.weights().layers) {
    const Matrix<const BF16> firing = layer.ffn.firing();
    TWELL_CUDA_CHECK(cudaMemset2DAsync(
        const_cast<BF16*>(firing.data), static_cast<size_t>(firing.cols) * sizeof(BF16),
        sparse ? kByte : 0, sizeof(BF16), static_cast<size_t>(firing.rows), ctx.stream()));
  }
}

}  // namespace twell
