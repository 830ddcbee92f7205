// SPDX-License-Identifier: Apache-2.0
// An inference session with one model: prefill and decode over a cache of past tokens. The
// interface is the same for all devices; session_cpu.h and session_cuda.h implement it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "twell/base/matrix.h"
#include "twell/infer/sampler.h"
#include "twell/model/config.h"
#include "twell/model/kv_cache.h"
#include "twell/ops/ffn/ffn.h"

namespace twell {

struct SessionOptions {
  int64_t slots = 1;           // most sequences at a time
  int64_t capacity = 0;        // tokens per sequence; 0: the model's context
  int64_t prefill_tokens = 0;  // prompt tokens that go through the layers together; 0: what suits
                               // the device
  FfnPolicy ffn = FfnPolicy::kAuto;
  // Memory for keys and values; 0: what all slots need at full capacity. With less, sequences share
  // it, and capacity is at most what one of them can have alone. On the GPU, where every slot has
  // its own, only an upper bound.
  int64_t cache_bytes = 0;
  KvFormat cache;  // on the CPU; on the GPU keys and values are in bf16
};

// Parameters of drawing a sequence's next token: see sample().
struct Draw {
  SamplerOptions sampler;
  int64_t vocab = 0;    // ids below this one; 0: all
  uint64_t stream = 0;  // selects the seed's random numbers
  uint64_t index = 0;
};

// New tokens to append to a slot's sequence.
struct Prompt {
  int64_t slot = 0;
  std::span<const int32_t> ids;
};

// Use of the cache of keys and values, in blocks of tokens. A session without blocks has one block
// per slot, as long as the capacity.
struct CacheUse {
  int64_t block_tokens = 0;
  int64_t blocks = 0;  // in all
  int64_t used = 0;    // held by sequences
  int64_t cached = 0;  // held by none, kept for prompts that begin with the same tokens
};

// Activity of one layer's FFN.
struct ActiveNeurons {
  double per_token = 0.0;  // mean so far
  bool sparse = false;     // the last execution was a sparse one
};

class Session {
 public:
  virtual ~Session() = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Appends ids to the slot's sequence. Returns the logits [V] after the last id, valid until the
  // next call. InputError when the sequence would exceed the capacity.
  virtual std::span<const float> append(int64_t slot, std::span<const int32_t> ids) = 0;
  // Appends one token to each of several slots. Returns logits [slots.size(), V], valid until the
  // next call.
  virtual ConstMatrixF decode(std::span<const int64_t> slots, std::span<const int32_t> ids) = 0;

  // The same for several sequences, and draws the next token of each; on the GPU the logits are not
  // copied to the host. Slots must be distinct. Errors as for sample().
  virtual void append_and_draw(std::span<const Prompt> prompts, std::span<const Draw> draws,
                               std::span<int32_t> next) = 0;
  virtual void decode_and_draw(std::span<const int64_t> slots, std::span<const int32_t> ids,
                               std::span<const Draw> draws, std::span<int32_t> next) = 0;

  // Appends ids to the slot's sequence like append(), and passes on the logits after every one of
  // them: rows [n, V] after ids first, first + 1, ..., valid during the call. On the GPU they are
  // copied to the host.
  using OnLogits = std::function<void(int64_t first, ConstMatrixF logits)>;
  virtual void append_scored(int64_t slot, std::span<const int32_t> ids,
                             const OnLogits& on_logits) = 0;
  // The logits [V] that the last append_and_draw or decode_and_draw drew entry `row` of `next`
  // from, valid until the next call. On the GPU they are copied to the host now.
  virtual std::span<const float> drawn_from(int64_t row) = 0;

  // Forgets the slot's sequence and prepares for one that begins with ids. Returns how many of them
  // the cache already holds, fewer than all; the caller appends the rest.
  virtual int64_t start(int64_t slot, std::span<const int32_t> ids);
  // Makes room for so many more tokens of the slot's sequence. False when the cache is full;
  // nothing has changed then. Appending without it makes room too, and throws InputError when there
  // is none.
  virtual bool reserve(int64_t slot, int64_t tokens);
  // Tokens for which reserve() can still make room, over all slots together.
  virtual int64_t free_tokens() const;
  virtual CacheUse cache_use() const;
  // [L] without waiting for the device: on the GPU as of the last update of its counts.
  virtual std::vector<ActiveNeurons> active_neurons() const = 0;

  virtual void clear(int64_t slot) = 0;  // forget the sequence
  virtual int64_t length(int64_t slot) const = 0;
  virtual int64_t slots() const = 0;
  virtual int64_t capacity() const = 0;  // tokens per sequence
  // Prompt tokens per pass through the layers; calls that append more run several passes.
  virtual int64_t prefill_tokens() const = 0;
  virtual const ModelConfig& config() const = 0;
  // Mean active FFN neurons per token and layer, so far.
  virtual double nnz_per_token() = 0;

 protected:
  Session() = default;
  // The values that the options request, checked against the model. InputError.
  static int64_t checked_slots(const SessionOptions& options);
  static int64_t checked_capacity(const SessionOptions& options, const ModelConfig& config);
  static int64_t checked_cache_bytes(const SessionOptions& options);
  static int64_t checked_prefill_tokens(const SessionOptions& options, int64_t suits);
  static int32_t draw_from(std::span<const float> logits, const Draw& draw);
  // InputError when ids is empty or does not fit.
  void require_room(int64_t slot, std::span<const int32_t> ids) const;
};

}  // namespace twell
