// SPDX-License-Identifier: Apache-2.0
// An inference session with one model: prefill and decode over a cache of past tokens, which is
// paged: sequences that begin with the same tokens share blocks. The interface and the bookkeeping
// of blocks are the same for all devices; session_cpu.h and session_cuda.h do the rest.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "twell/base/matrix.h"
#include "twell/grammar/token_filter.h"
#include "twell/infer/block_manager.h"
#include "twell/infer/log_probs.h"
#include "twell/infer/sampler.h"
#include "twell/model/config.h"
#include "twell/model/forward.h"
#include "twell/model/kv_cache.h"
#include "twell/ops/ffn/ffn.h"

namespace twell {

struct SessionOptions {
  int64_t slots = 1;           // most sequences at a time
  int64_t capacity = 0;        // tokens per sequence; 0: the model's context
  int64_t prefill_tokens = 0;  // prompt tokens that go through the layers together; 0: what suits
                               // the device
  FfnPolicy ffn = FfnPolicy::kAuto;
  // Memory for keys and values; 0: what all slots need at full capacity, on the GPU at most what is
  // free. With less, sequences share it, and capacity is at most what one of them can have alone.
  int64_t cache_bytes = 0;
  // Plans memory for projections in e4m3, which an engine on a GPU sets as its model is.
  bool weights_in_bytes = false;
  int64_t draft_tokens = 0;  // most guessed tokens (NewTokens::drafts) of a call
  KvFormat cache;            // on the GPU in blocks of kKvBlock tokens, in bf16 in place of f32
};

// Parameters of drawing a sequence's next token: see sample().
struct Draw {
  SamplerOptions sampler;
  int64_t vocab = 0;    // ids below this one; 0: all
  uint64_t stream = 0;  // selects the seed's random numbers
  uint64_t index = 0;
  std::span<const SeenToken> seen;  // for penalties and biases
  // Whether its log-probability is wanted, and of how many most likely ones.
  std::optional<int64_t> log_probs;
  // Which tokens may be drawn, of ids below its vocabulary, which is `vocab`; null: all. It is told
  // of a token before this one, number index - 1, that the call before draws.
  TokenFilter* filter = nullptr;
};

// New tokens to append to a slot's sequence: a piece of its prompt, or the token drawn last.
struct NewTokens {
  int64_t slot = 0;
  std::span<const int32_t> ids;  // a single one may be Session::the_drawn(row)
  // Guesses of the tokens that follow a single id, which is known. A token is drawn after the id
  // and after each of them, as if those before it were right. Only the id counts towards length();
  // keep() tells which of the others were right, before anything else is done with the slot.
  std::span<const int32_t> drafts;
  // The tokens after the first ids whose log-probabilities are wanted, at most one for each id.
  std::span<const int32_t> targets;
  int64_t top = 0;                               // most likely tokens scored beside each target,
  int64_t vocab = 0;                             // with ids below this one; 0: all
  std::vector<TokenLogProbs>* scores = nullptr;  // the targets' scores are added to it
};

// Use of the cache of keys and values, in blocks of tokens.
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

  // Begins to append tokens to distinct slots, and to draw the next token of each: a row, or for an
  // entry with drafts a row for the id and for each draft, in this order; draws: of each row. On
  // the GPU they pass the layers together, and logits are not copied to the host; single tokens are
  // best put in front of others. Targets are scored when the call returns. Returns the call's
  // number, for drawn().
  virtual int64_t append_and_draw(std::span<const NewTokens> tokens,
                                  std::span<const Draw> draws) = 0;
  // Stands for the token that the call before draws as this row, and that may not be known yet.
  // It counts towards length() once that call has been asked for its tokens; nothing else may be
  // done with its slot until then.
  static constexpr int32_t the_drawn(int64_t row) { return static_cast<int32_t>(-1 - row); }
  // Waits for the tokens of such a call's rows, kNoToken where none could be drawn. Calls are asked
  // in their order, or never.
  virtual void drawn(int64_t call, std::span<int32_t> next) = 0;
  // How many calls may begin after one that will still be asked for its tokens. With 1, the device
  // computes a step while the host works on the results of the one before.
  virtual int64_t draws_ahead() const { return 0; }
  // Appends the first drafts of the last call, which turned out right, and gives back the room of
  // the others.
  void keep(int64_t slot, std::span<const int32_t> drafts);
  // How many of so many drafts a call should take at most.
  virtual int64_t drafts_of_step(int64_t drafts) const { return drafts; }
  // The time of a step with so many rows, in steps with one.
  virtual double step_cost(int64_t rows) const = 0;

  // Appends ids to the slot's sequence like append(), and passes on the logits after every one of
  // them: rows [n, V] after ids first, first + 1, ..., valid during the call. On the GPU they are
  // copied to the host.
  using OnLogits = std::function<void(int64_t first, ConstMatrixF logits)>;
  virtual void append_logits(int64_t slot, std::span<const int32_t> ids,
                             const OnLogits& on_logits) = 0;
  // Log-probabilities, without penalties and biases, of row `row` of the tokens that drawn() gave
  // last. The token is not kNoToken, and its Draw asked for them.
  virtual TokenLogProbs drawn_log_probs(int64_t row) = 0;

  // Forgets the slot's sequence and prepares for one that begins with ids. Returns how many of them
  // the cache already holds, fewer than all; the caller appends the rest.
  int64_t start(int64_t slot, std::span<const int32_t> ids);
  // Makes room for so many more tokens of the slot's sequence. False when the cache is full;
  // nothing has changed then. Appending without it makes room too, and throws InputError when there
  // is none.
  bool reserve(int64_t slot, int64_t tokens);
  // Tokens for which reserve() can still make room, over all slots together.
  int64_t free_tokens() const { return blocks_.available() * blocks_.block_tokens(); }
  CacheUse cache_use() const;
  // [L] without waiting for the device: on the GPU as of the last update of its counts.
  virtual std::vector<ActiveNeurons> active_neurons() const = 0;

  void clear(int64_t slot);  // forget the sequence
  // The same, and shares its keys and values no more, because they are not finite.
  void discard(int64_t slot);
  int64_t length(int64_t slot) const { return blocks_.length(slot); }
  int64_t slots() const { return plan_.slots; }
  int64_t draft_tokens() const { return plan_.draft_tokens; }  // of a call, at most
  int64_t capacity() const { return plan_.capacity; }          // tokens per sequence
  // Prompt tokens per pass through the layers; calls that append more run several passes.
  virtual int64_t prefill_tokens() const = 0;
  virtual const ModelConfig& config() const = 0;
  // Mean active FFN neurons per token and layer, so far.
  virtual double nnz_per_token();

 protected:
  struct CachePlan {
    int64_t slots = 0, capacity = 0, blocks = 0, block_tokens = 0, draft_tokens = 0;
    int64_t rows() const { return slots + draft_tokens; }  // of a call, at most
    int64_t blocks_each() const { return (capacity + block_tokens - 1) / block_tokens; }
  };
  explicit Session(const CachePlan& plan);
  // The plan for all slots at full capacity, checked against the model. InputError.
  static CachePlan full_cache(const SessionOptions& options, const ModelConfig& config);
  // The same with as many of its blocks as the memory holds. InputError if that is none.
  static CachePlan cache_within(CachePlan plan, int64_t bytes, int64_t block_bytes);
  static int64_t checked_prefill_tokens(const SessionOptions& options, int64_t suits);
  static int32_t draw_from(std::span<float> logits, const Draw& draw, Context& ctx);
  // Tells the draw's filter of the token before, kNoToken if the filter knows it, and writes its
  // mask.
  static void write_mask(const Draw& draw, int32_t before, std::span<uint32_t> mask);
  // Makes room for ids. InputError when there are none, or they do not fit the sequence or the
  // cache.
  void make_room(int64_t slot, std::span<const int32_t> ids);
  // Checks the entries and the draws of a call, and makes room for their tokens and drafts.
  void make_room(std::span<const NewTokens> tokens, std::span<const Draw> draws);
  int64_t rows() const { return plan_.rows(); }
  // Makes room for one token of each of these slots.
  std::vector<ForwardSequence> one_each(std::span<const int64_t> slots,
                                        std::span<const int32_t> ids);
  // Call when the keys and values of ids, for which there is room, are in the cache or will be
  // before anything reads them.
  void appended(int64_t slot, std::span<const int32_t> ids) { blocks_.append(slot, ids); }
  // The same for what this call of append_and_draw() appends.
  void appended(int64_t call, std::span<const NewTokens> tokens);
  // Call when the tokens that a call drew are known: the next one may have appended them.
  void known(int64_t call, std::span<const int32_t> next);
  int64_t blocks() const { return plan_.blocks; }
  // The device's cache is told that this is the slot's sequence.
  virtual void show(int64_t slot, std::span<const int32_t> table, int64_t length) = 0;

 private:
  // A token that was appended before it was known.
  struct Unknown {
    int64_t call = 0;  // that drew it
    int64_t row = 0;   // there
    int64_t slot = 0;
  };

  CachePlan plan_;
  BlockManager blocks_;
  std::vector<Unknown> unknown_;
};

}  // namespace twell
