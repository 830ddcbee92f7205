// SPDX-License-Identifier: Apache-2.0
// The batch of a forward: checked and copied to the device, its sequences in groups that one call
// of attention takes.
#include <algorithm>
#include <utility>
#include <vector>

#include "twell/base/rounding.h"
#include "twell/model/forward_cuda.h"
#include "twell/model/token_rows.h"

namespace twell {

void ForwardCuda::stage(std::span<const int32_t> ids, std::span<const ForwardSequence> sequences,
                        KvCacheCuda* cache, std::span<const float> uniforms, const int32_t* drawn) {
  TWELL_CHECK(uniforms.empty() || uniforms.size() == sequences.size(),
              "{} random numbers for {} sequences", uniforms.size(), sequences.size());
  TWELL_CHECK(cache == nullptr || cache->eight_bits() == plan_.eight_bit_cache,
              "a cache with 8 bits: {}, in a forward planned for one: {}",
              cache != nullptr && cache->eight_bits(), plan_.eight_bit_cache);
  const int64_t longest = longest_length(config_, sequences, cache, /*in_turn=*/true);
  TWELL_CHECK(longest <= plan_.max_length, "a sequence of {} tokens in a forward planned for {}",
              longest, plan_.max_length);
  for (size_t m = 0; m < ids.size(); ++m) {
    const int32_t least = drawn == nullptr ? 0 : static_cast<int32_t>(-plan_.max_sequences);
    TWELL_CHECK(ids[m] >= least && ids[m] < config_.vocab_size,
                "token id {} at position {} is outside the vocabulary of {}", ids[m], m,
                config_.vocab_size);
  }
  staged_ = {.tokens = std::ssize(ids),
             .sequences = std::ssize(sequences),
             .cache = cache,
             .drawn = drawn};
  const BatchArrays host = batch_.host(staged_.tokens, staged_.sequences);
  std::copy(ids.begin(), ids.end(), host.ids);
  if (sorts_rows()) {
    const std::span<int32_t> rows(host.rows, ids.size());
    rows_by_id(ids, config_.vocab_size, rows);
    for (size_t m = 0; m < ids.size(); ++m) host.row_tokens[rows[m]] = static_cast<int32_t>(m);
  }
  staged_.uniform = cache == nullptr;
  int64_t row = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const auto [tokens, slot] = sequences[i];
    TWELL_CHECK(tokens >= 1 && row + tokens <= staged_.tokens,
                "sequence {} of {} tokens, {} of {} ids are left", i, tokens, staged_.tokens - row,
                staged_.tokens);
    const int64_t past = cache == nullptr ? 0 : cache->length(slot);
    staged_.repeats =
        staged_.repeats || (cache != nullptr && i > 0 && slot == sequences[i - 1].slot);
    TWELL_CHECK(past + tokens <= plan_.max_length,
                "{} tokens behind {} in a forward planned for {}", tokens, past, plan_.max_length);
    host.q_begin[i] = static_cast<int32_t>(row);
    host.q_len[i] = static_cast<int32_t>(tokens);
    host.kv_len[i] = static_cast<int32_t>(past + tokens);
    host.kv_begin[i] = cache == nullptr ? row : cache->table_begin(slot);
    host.uniforms[i] = uniforms.empty() ? 0.0f : uniforms[i];
    for (int64_t t = 0; t < tokens; ++t, ++row) {
      host.positions[row] = static_cast<int32_t>(past + t);
      host.cache_rows[row] = cache == nullptr ? 0 : cache->row(slot, past + t);
    }
    staged_.max_q_len = std::max(staged_.max_q_len, tokens);
    staged_.max_kv_len = std::max(staged_.max_kv_len, past + tokens);
    staged_.uniform = staged_.uniform && tokens == sequences[0].tokens;
    if (cache != nullptr) cache->set_length(slot, past + tokens);
  }
  staged_.groups = grouped(host);
  find_sparse_layers();
  TWELL_CHECK(row == staged_.tokens, "{} ids for sequences of {} tokens in all", ids.size(), row);
  if (cache != nullptr) cache->enqueue_tables(ctx_.stream());
  batch_.enqueue_copy(ctx_, staged_.tokens, staged_.sequences);
}

bool ForwardCuda::sorts_rows() const {
  return route::sorts_rows_by_id(staged_.tokens, plan_.ffn == FfnPolicy::kDense);
}

std::vector<ForwardCuda::SequenceGroup> ForwardCuda::grouped(const BatchArrays& host) const {
  std::vector<SequenceGroup> groups;
  bool one_each = staged_.cache != nullptr;  // so far
  int64_t next = 0;                          // block of wide_ that is free
  for (int64_t i = 0; i < staged_.sequences; ++i) {
    const bool first_of_others = one_each && host.q_len[i] > 1;
    one_each = one_each && host.q_len[i] == 1;
    const bool widened = eight_bits() && !one_each;
    const int64_t blocks = ceil_div(int64_t{host.kv_len[i]}, int64_t{kKvBlock});
    const bool full = widened && next + blocks > wide_.blocks;
    if (i == 0 || first_of_others || full) {
      groups.push_back({.first = i, .widened = widened});
      next = 1;
    }
    SequenceGroup& group = groups.back();
    if (widened) host.wide_begin[i] = std::exchange(next, next + blocks);
    ++group.count;
    group.max_q_len = std::max(group.max_q_len, int64_t{host.q_len[i]});
    group.max_kv_len = std::max(group.max_kv_len, int64_t{host.kv_len[i]});
  }
  return groups;
}

}  // namespace twell
