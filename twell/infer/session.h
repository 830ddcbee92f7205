// SPDX-License-Identifier: Apache-2.0
// An inference session over one model: a cache of past tokens, prefill and decode.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "twell/base/context.h"
#include "twell/model/forward.h"
#include "twell/model/kv_cache.h"
#include "twell/model/weights.h"

namespace twell {

struct SessionOptions {
  int64_t slots = 1;     // sequences held at once
  int64_t capacity = 0;  // tokens per sequence; 0: ModelConfig::max_sequence
  FfnPolicy ffn = FfnPolicy::kAuto;
};

// The model and the context must outlive the session.
class Session {
 public:
  Session(Context& ctx, const Model& model, const SessionOptions& options);

  // Appends ids to the slot's sequence and returns the logits [V] after the last of them, valid
  // until the next call. InputError when the sequence would pass the capacity.
  std::span<const float> append(int64_t slot, std::span<const int32_t> ids);
  // One token for each of several slots: logits [slots.size(), V], valid until the next call.
  ConstMatrixF decode(std::span<const int64_t> slots, std::span<const int32_t> ids);

  void clear(int64_t slot);  // forget the sequence
  int64_t length(int64_t slot) const { return cache_.length(slot); }
  int64_t capacity() const { return cache_.capacity(); }
  const Model& model() const { return model_; }
  const ForwardState& state() const { return state_; }

 private:
  // Tokens of a prompt that go through the layers together: bounds the activations' memory.
  static constexpr int64_t kPrefillTokens = 512;

  Context& ctx_;
  const Model& model_;
  ForwardState state_;
  KvCache cache_;
  Buffer<float> hidden_;  // [max(kPrefillTokens, slots), D]
  Buffer<float> logits_;  // [slots, V]
};

}  // namespace twell
