// SPDX-License-Identifier: Apache-2.0
#include "twell/train/validation.h"

#include <algorithm>
#include <vector>

#include "twell/base/error.h"

namespace twell {

double validation_cross_entropy(Scorer& scorer, const TrainingData& data,
                                const ValidationOptions& options, Communicator* ranks) {
  const ValidationWindows windows(data, options);
  const int64_t sequences = windows.sequences();
  double loss = 0.0, tokens = 0.0;
  const int64_t rank = ranks == nullptr ? 0 : ranks->rank();
  const int64_t stride = options.micro_batch * (ranks == nullptr ? 1 : ranks->size());
  for (int64_t begin = rank * options.micro_batch; begin < sequences; begin += stride) {
    const int64_t count = std::min(options.micro_batch, sequences - begin);
    std::vector<int32_t> inputs(static_cast<size_t>(count * options.length)), next(inputs.size());
    std::vector<int64_t> documents;
    windows.read(begin, count, inputs, next, documents);
    std::vector<ForwardSequence> shape(static_cast<size_t>(count), {options.length, 0});
    if (options.document_mask) shape.clear();
    for (const int64_t length : documents) shape.push_back({length, 0});
    std::vector<int64_t> rows;
    std::vector<int32_t> targets;
    for (size_t i = 0; i < next.size(); ++i) {
      if (next[i] < 0) continue;  // the last token of a document
      rows.push_back(static_cast<int64_t>(i));
      targets.push_back(next[i]);
    }
    if (rows.empty()) continue;
    std::vector<float> losses(rows.size());
    scorer.score({.ids = inputs, .sequences = shape, .rows = rows, .targets = targets}, losses);
    for (const float of_token : losses) loss += static_cast<double>(of_token);
    tokens += static_cast<double>(rows.size());
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
