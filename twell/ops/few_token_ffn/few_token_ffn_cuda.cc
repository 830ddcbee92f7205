// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/few_token_ffn/few_token_ffn_cuda.h"

#include "twell/ops/few_token_ffn/few_token_kernels.h"

namespace twell {

FewTokenWorkspace::FewTokenWorkspace(int64_t max_ffn)
    : max_ffn_(max_ffn), hidden_(max_ffn * kMaxFewTokens), fired_((max_ffn + 31) / 32) {}

std::string few_token_ffn_unsupported(const CudaContext& ctx, const FewTokenFfnCuda& problem) {
  if (ctx.compute_capability() != 90) {
    return fmt::format("needs a GPU of compute capability 9.0, {} is {}.{}", ctx.device_name(),
                       ctx.compute_capability() / 10, ctx.compute_capability() % 10);
  }
  if (problem.tokens < 0 || problem.tokens > kMaxFewTokens) {
    return fmt::format("{} tokens, at most {}", problem.tokens, kMaxFewTokens);
  }
  if (problem.width % 8 != 0 || problem.ffn % 8 != 0 || problem.width <= 0 || problem.ffn <= 0) {
    return fmt::format("width {} and FFN size {} must be positive multiples of 8", problem.width,
                       problem.ffn);
  }
  // Neurons and columns are 32-bit in the kernels.
  constexpr int64_t kMost = int64_t{1} << 24;
  if (problem.width > kMost || problem.ffn > kMost) {
    return fmt::format("width {} and FFN size {}, at most {}", problem.width, problem.ffn, kMost);
  }
  return {};
}

void few_token_ffn_cuda(CudaContext& ctx, const FewTokenFfnCuda& problem,
                        FewTokenWorkspace& workspace) {
  const std::string unsupported = few_token_ffn_unsupported(ctx, problem);
  TWELL_CHECK(unsupported.empty(), "few-token FFN: {}", unsupported);
  TWELL_CHECK(problem.ffn <= workspace.max_ffn(),
              "few-token FFN: FFN size {} in a workspace for {}", problem.ffn, workspace.max_ffn());
  if (problem.tokens == 0) return;
  const bool gated = problem.w_gate != nullptr;
  const auto tokens = static_cast<int>(problem.tokens), width = static_cast<int>(problem.width),
             ffn = static_cast<int>(problem.ffn);
  few_token::GateUp gate_up{};
  gate_up.x = problem.x;
  gate_up.first = gated ? problem.w_gate : problem.w_up;
  gate_up.up = gated ? problem.w_up : nullptr;
  gate_up.down = problem.w_down;
  gate_up.hidden = workspace.hidden_.data();
  gate_up.fired = reinterpret_cast<uint16_t*>(workspace.fired_.data());
  gate_up.activity = problem.activity;
  gate_up.tokens = tokens;
  gate_up.width = width;
  gate_up.ffn = ffn;
  gate_up.early_weights = problem.weights_are_constant;
  TWELL_CUDA_CHECK(few_token::launch_gate_up_sm90(gate_up, ctx.multiprocessors(), ctx.stream()));
  TWELL_CUDA_CHECK(few_token::launch_down_sm90(
      {gate_up.hidden, workspace.fired_.data(), problem.w_down, problem.y, tokens, width, ffn},
      ctx.stream()));
}

}  // namespace twell
