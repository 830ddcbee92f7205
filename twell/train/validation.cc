// SPDX-License-Identifier: Apache-2.0
#include "twell/train/validation.h"

#include <algorithm>
#include <vector>

#include "twell/base/error.h"
#include "twell/model/forward.h"
#include "twell/ops/cross_entropy/cross_entropy.h"

namespace twell {

double validation_cross_entropy(Context& ctx, const Model& model, const TrainingData& data,
                                const ValidationOptions& options, Communicator* ranks) {
  const ValidationWindows windows(data, options);
  const int64_t sequences = windows.sequences();
  ForwardState state(model.config, FfnPolicy::kAuto);
  double loss = 0.0, tokens = 0.0;
  const int64_t rank = ranks == nullptr ? 0 : ranks->rank();
  const int64_t stride = options.micro_batch * (ranks == nullptr ? 1 : ranks->size());
  for (int64_t begin = rank * options.micro_batch; begin < sequences; begin += stride) {
    const int64_t count = std::min(options.micro_batch, sequences - begin);
    const int64_t rows = count * options.length;
    std::vector<int32_t> inputs(static_cast<size_t>(rows)), targets(static_cast<size_t>(rows));
    std::vector<int64_t> documents;
    windows.read(begin, count, inputs, targets, documents);
    std::vector<ForwardSequence> shape(static_cast<size_t>(count), {options.length, 0});
    if (options.document_mask) shape.clear();
    for (const int64_t length : documents) shape.push_back({length, 0});
    Arena::Scope scratch(ctx.scratch());
    const MatrixF hidden = scratch.matrix<float>(rows, model.config.width);
    forward(ctx, model, state, {.ids = inputs, .sequences = shape, .hidden = hidden});
    CrossEntropy head;
    head.x = hidden;
    head.weight = model.weights.head;
    head.targets = targets;
    const CrossEntropyResult result = cross_entropy(ctx, head);
    loss += result.loss_sum;
    tokens += static_cast<double>(result.tokens);
  }
  if (ranks != nullptr) {
    double sums[] = {loss, tokens};
    ranks->all_reduce_sum(sums);
    loss = sums[0];
    tokens = sums[1];
  }
  TWELL_CHECK(tokens > 0.0, "no validation tokens in {} sequences", sequences);
  return loss / tokens;
}

}  // namespace twell
