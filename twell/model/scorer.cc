// SPDX-License-Identifier: Apache-2.0
#include "twell/model/scorer.h"

#include "twell/base/error.h"

namespace twell {

void Scorer::check(const ScoreBatch& batch, std::span<const float> losses) const {
  TWELL_CHECK(batch.rows.size() == batch.targets.size() && losses.size() == batch.rows.size(),
              "{} targets and {} losses for {} rows", batch.targets.size(), losses.size(),
              batch.rows.size());
  for (size_t i = 0; i < batch.rows.size(); ++i) {
    TWELL_CHECK(batch.rows[i] >= 0 && batch.rows[i] < std::ssize(batch.ids),
                "row {} of a batch of {} tokens", batch.rows[i], batch.ids.size());
    TWELL_CHECK(batch.targets[i] >= 0 && batch.targets[i] < config().vocab_size,
                "target {} in a vocabulary of {}", batch.targets[i], config().vocab_size);
  }
}

}  // namespace twell
