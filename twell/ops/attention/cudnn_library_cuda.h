// SPDX-License-Identifier: Apache-2.0
// cuDNN for this room: loaded when it is first used, so that the program starts without it; one
// handle per context, on the context's stream. Only for builds with cuDNN's headers.
#pragma once

#ifdef TWELL_HAVE_CUDNN
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include <string>

#include "twell/base/cuda.h"

namespace twell::cudnn {

namespace fe = cudnn_frontend;

// Whether cuDNN was found; status says which version, or why not.
struct Library {
  bool loaded = false;
  std::string status;
};
const Library& library();

cudnnHandle_t handle(CudaContext& ctx);

void check(fe::error_t error);

// A compiled graph with its workspace; where cuDNN has no kernel, why.
struct Plan {
  Plan();  // the graph's data types: bf16, f32 between and in computations
  fe::graph::Graph graph;
  DeviceBuffer<std::byte> workspace;
  std::string refusal;
};
// Makes plan.graph, which holds the operations, ready to run.
void prepare(CudaContext& ctx, Plan& plan);

// A bf16 tensor [batch, heads, tokens, head_dim] that stands in rows `stride` apart, one per token.
std::shared_ptr<fe::graph::Tensor_attributes> add_rows(Plan& plan, int64_t uid, int64_t batch,
                                                       int64_t heads, int64_t tokens,
                                                       int64_t head_dim, int64_t stride);

}  // namespace twell::cudnn
#endif
