// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include "bench/synthetic_model.h"
#include "twell/model/model_cuda.h"

namespace twell {

void set_synthetic_sparsity(CudaContext& ctx, const ModelCuda& model, bool sparse) {
  constexpr int kByte = 0xbe;
  static_assert(std::bit_cast<uint32_t>(kSyntheticBias) == 0xbebe0000);
  if (model.in_bytes()) {
    // The bias is the largest value of its row, so that its byte is -448 in every row.
    const ModelConfig& config = model.padded_config();
    for (int64_t layer = 0; layer < config.layers; ++layer) {
      const LayerBytesCuda& bytes = model.layer_bytes(layer);
      const uint8_t* firing = (config.gated ? bytes.gate : bytes.up).values;
      TWELL_CUDA_CHECK(cudaMemset2DAsync(const_cast<uint8_t*>(firing),
                                         static_cast<size_t>(config.width), sparse ? 0xfe : 0, 1,
                                         static_cast<size_t>(config.ffn), ctx.stream()));
    }
    return;
  }
  for (const LayerMatrices<const BF16>& layer : model.weights().layers) {
    const Matrix<const BF16> firing = layer.ffn.firing();
    TWELL_CUDA_CHECK(cudaMemset2DAsync(
        const_cast<BF16*>(firing.data), static_cast<size_t>(firing.cols) * sizeof(BF16),
        sparse ? kByte : 0, sizeof(BF16), static_cast<size_t>(firing.rows), ctx.stream()));
  }
}

}  // namespace twell
