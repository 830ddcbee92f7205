// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/session_cuda.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "twell/base/cpu_limit.h"
#include "twell/base/rng.h"
#include "twell/ops/embedding/embedding_cuda.h"

namespace twell {
namespace {

// Enough tokens to fill the device.
constexpr int64_t kCudaPrefillTokens = 2048;
// Tokens scored together: enough for the output head to be a matrix product.
constexpr int64_t kScoreRows = 64;
// A server's steps have any number of sequences.
constexpr size_t kMaxGraphs = 256;

// Copies from host memory that may be freed before the copy runs: CUDA stages small pageable data.
template <typename T>
void send(CudaContext& ctx, T* to, const std::vector<T>& from) {
  TWELL_CUDA_CHECK(cudaMemcpyAsync(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice,
                                   ctx.stream()));
}

std::vector<float> uniforms_of(std::span<const Draw> draws) {
  std::vector<float> out;
  for (const Draw& draw : draws) {
    draw.sampler.validate();
    out.push_back(uniform(draw.sampler.seed, draw.stream, draw.index));
  }
  return out;
}

// Whether all parameters but the seed are equal; the seed is already in the random number.
bool draws_alike(const Draw& a, const Draw& b) {
  return a.vocab == b.vocab && a.sampler.temperature == b.sampler.temperature &&
         a.sampler.top_k == b.sampler.top_k && a.sampler.top_p == b.sampler.top_p &&
         a.sampler.min_p == b.sampler.min_p;
}

// Steps of a 2b model with sparse layers, in steps of one sequence, on an H200
// (bench/results/2026-11-23-h200-decode.txt): 1.5 for two, 1.6 for four, 2.1 for eight. Dense ones
// gain more by each further row.
constexpr double kTwoRows = 1.45, kFurtherRow = 0.1;

}  // namespace

SessionCuda::CachePlan SessionCuda::full_plan(const ModelConfig& config,
                                              const SessionOptions& options) {
  TWELL_REQUIRE(options.cache.block_tokens == kKvBlock,
                "the GPU's cache has blocks of {} tokens, not of {}", kKvBlock,
                options.cache.block_tokens);
  const CachePlan plan = full_cache(options, config);
  if (options.cache_bytes == 0) return plan;
  return cache_within(plan, options.cache_bytes,
                      KvCacheCuda::block_bytes(config, options.cache.eight_bits));
}

ForwardPlanCuda SessionCuda::forward_plan(const CachePlan& cache, const SessionOptions& options) {
  const int64_t prefill = checked_prefill_tokens(options, kCudaPrefillTokens);
  // Pieces of prompts, one token of each other sequence, and drafts, which count as sequences.
  return {.max_tokens = std::min(prefill, cache.capacity * cache.slots) + cache.rows(),
          .max_sequences = cache.rows(),
          .max_length = cache.capacity,
          .ffn = options.ffn,
          .eight_bit_cache = options.cache.eight_bits,
          .weights_in_bytes = options.weights_in_bytes};
}

int64_t SessionCuda::other_bytes(const CudaContext& ctx, const ModelConfig& config,
                                 const CachePlan& cache, const SessionOptions& options) {
  return ForwardCuda::bytes_needed(ctx, config, forward_plan(cache, options)) +
         4 * std::max(cache.rows(), kScoreRows) * (config.vocab_size + 2 * (2 + kMostTop)) +
         cache.rows() * 2 * config.width + cache.slots * 4 * cache.blocks_each();
}

int64_t SessionCuda::bytes_needed(const CudaContext& ctx, const ModelConfig& config,
                                  const SessionOptions& options) {
  const CachePlan plan = full_plan(config, options);
  return other_bytes(ctx, config, plan, options) +
         KvCacheCuda::bytes(config, 1, plan.capacity, options.cache.eight_bits);
}

// The whole plan, or the blocks that the free memory holds besides everything else, but at least
// one sequence's, which is refused where it does not fit.
SessionCuda::CachePlan SessionCuda::cache_plan(const CudaContext& ctx, const ModelConfig& config,
                                               const SessionOptions& options,
                                               int64_t reserved_bytes) {
  CachePlan plan = full_plan(config, options);
  require_device_memory(
      bytes_needed(ctx, config, options) + reserved_bytes,
      fmt::format("activations of {} sequences and the keys and values of one of {} tokens",
                  plan.slots, plan.capacity));
  size_t free = 0, total = 0;
  TWELL_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  // Libraries and graphs allocate as they go.
  const int64_t spare = std::min(static_cast<int64_t>(total) / 20, int64_t{2} << 30);
  const int64_t left = static_cast<int64_t>(free) - spare - reserved_bytes -
                       other_bytes(ctx, config, plan, options) -
                       ForwardCuda::screen_bytes(ctx, config, forward_plan(plan, options));
  plan.blocks = std::min(plan.blocks,
                         std::max(left / KvCacheCuda::block_bytes(config, options.cache.eight_bits),
                                  plan.blocks_each()));
  return plan;
}

SessionCuda::SessionCuda(CudaContext& ctx, const ModelCuda& model, const SessionOptions& options,
                         int64_t reserved_bytes)
    : Session(cache_plan(ctx, model.config(), options, reserved_bytes)),
      ctx_(ctx),
      model_(model),
      prefill_tokens_(checked_prefill_tokens(options, kCudaPrefillTokens)),
      forward_(ctx, model, forward_plan(full_plan(model.config(), options), options)),
      cache_(model.config(), slots(), capacity(), blocks(), options.cache.eight_bits),
      logit_rows_(std::max(rows(), kScoreRows)),
      logits_(logit_rows_ * model.config().vocab_size),
      next_(rows()),
      last_rows_(rows()),
      uniforms_(rows()),
      last_hidden_(rows() * model.config().width),
      targets_(logit_rows_),
      log_probs_(logit_rows_ * (1 + kMostTop)),
      penalized_(rows()),
      host_logits_(slots() * model.config().vocab_size),
      graphs_(kMaxGraphs) {
  for (Results& results : results_) {
    results.next = PinnedBuffer<int32_t>(next_.size());
    results.log_probs = PinnedBuffer<TokenLogProb>(log_probs_.size());
    results.top.resize(static_cast<size_t>(rows()));
  }
  forward_.make_screens();  // last, with the memory that is left
}

SessionCuda::~SessionCuda() { cudaStreamSynchronize(ctx_.stream()); }

void SessionCuda::show(int64_t slot, std::span<const int32_t> table, int64_t length) {
  cache_.set_table(slot, table);
  cache_.set_length(slot, length);
}

std::span<const float> SessionCuda::append(int64_t slot, std::span<const int32_t> ids) {
  make_room(slot, ids);
  const NewTokens tokens{.slot = slot, .ids = ids};
  enqueue_packed({&tokens, 1});
  appended(slot, ids);
  const ConstMatrixF logits = read_logits(1);
  count_tokens(std::ssize(ids));
  return {logits.data, static_cast<size_t>(logits.cols)};
}

ConstMatrixF SessionCuda::decode(std::span<const int64_t> slots, std::span<const int32_t> ids) {
  enqueue_decode(ids, one_each(slots, ids), {});
  for (size_t i = 0; i < slots.size(); ++i) appended(slots[i], ids.subspan(i, 1));
  const ConstMatrixF logits = read_logits(std::ssize(slots));
  count_tokens(std::ssize(slots));
  return logits;
}

int64_t SessionCuda::append_and_draw(std::span<const NewTokens> tokens,
                                     std::span<const Draw> draws) {
  make_room(tokens, draws);
  const std::vector<float> uniforms = uniforms_of(draws);
  const auto is_single = [](const NewTokens& one) {
    return one.ids.size() == 1 && one.targets.empty();
  };
  // A draft is staged like a single token of a sequence: the layers store its key and value before
  // they attend, so that those behind it read them.
  std::vector<NewTokens> rows;
  int64_t count = 0;
  for (const NewTokens& one : tokens) {
    rows.push_back(one);
    for (const int32_t& draft : one.drafts) rows.push_back({.slot = one.slot, .ids = {&draft, 1}});
    count += std::ssize(one.ids) + std::ssize(one.drafts);
  }
  const float* on_device = uniforms_.data();
  if (std::ranges::all_of(rows, is_single)) {
    std::vector<ForwardSequence> sequences;
    std::vector<int32_t> ids;
    for (const NewTokens& one : rows) {
      sequences.push_back({.tokens = 1, .slot = one.slot});
      ids.push_back(one.ids[0]);
    }
    enqueue_decode(ids, sequences, uniforms);
    on_device = forward_.batch().device(count, count).uniforms;
  } else {
    enqueue_packed(rows);
    send(ctx_, uniforms_.data(), uniforms);
  }
  appended(calls_ + 1, tokens);
  make_masks(rows, draws);
  return draw_ids(draws, on_device, count);
}

void SessionCuda::drawn(int64_t call, std::span<int32_t> next) {
  TWELL_CHECK(call > asked_ && call <= calls_ && call >= calls_ - draws_ahead(),
              "the tokens of call {}, after those of call {} of {}", call, asked_, calls_);
  const Results& results = results_of(call);
  results.copied.synchronize();
  std::copy_n(results.next.data(), next.size(), next.begin());
  asked_ = call;
  known(call, next);
  count_tokens(results.tokens);
}

void SessionCuda::append_logits(int64_t slot, std::span<const int32_t> ids,
                                const OnLogits& on_logits) {
  make_room(slot, ids);
  const int64_t most = std::min(prefill_tokens_, forward_.plan().max_tokens);
  for (int64_t begin = 0; begin < std::ssize(ids); begin += most) {
    const int64_t count = std::min(most, std::ssize(ids) - begin);
    const ForwardSequence sequence{.tokens = count, .slot = slot};
    forward_.run(ids.subspan(static_cast<size_t>(begin), static_cast<size_t>(count)),
                 {&sequence, 1}, &cache_);
    // The host's buffer holds slots() rows, so logits are copied that many at a time.
    for (int64_t row = 0; row < count; row += slots()) {
      const int64_t some = std::min(slots(), count - row);
      forward_.logits(forward_.hidden() + row * config().width, some, logits_.data());
      on_logits(begin + row, read_logits(some));
    }
  }
  appended(slot, ids);
  count_tokens(std::ssize(ids));
}

TokenLogProbs SessionCuda::drawn_log_probs(int64_t row) {
  const Results& results = results_of(asked_);
  return log_probs_of(results, row, results.top[static_cast<size_t>(row)]);
}

void SessionCuda::enqueue_log_probs(int64_t row, int64_t rows, const int32_t* ids, int64_t top,
                                    int64_t vocab) {
  const int64_t all = config().vocab_size, each = 1 + kMostTop;
  TWELL_CHECK(top >= 0 && top <= kMostTop, "log-probabilities of {} most likely tokens", top);
  TWELL_CUDA_CHECK(launch_log_probs({.rows = rows,
                                     .vocab = all,
                                     .logits = logits_.data() + row * all,
                                     .ids = ids,
                                     .top = top,
                                     .top_vocab = vocab == 0 ? all : std::min(vocab, all),
                                     .out = log_probs_.data() + row * each,
                                     .out_stride = each},
                                    ctx_.stream()));
  TWELL_CUDA_CHECK(cudaMemcpyAsync(results_of(calls_ + 1).log_probs.data() + row * each,
                                   log_probs_.data() + row * each,
                                   static_cast<size_t>(rows * each) * sizeof(TokenLogProb),
                                   cudaMemcpyDeviceToHost, ctx_.stream()));
}

TokenLogProbs SessionCuda::log_probs_of(const Results& results, int64_t row, int64_t top) {
  const TokenLogProb* const of_row = results.log_probs.data() + row * (1 + kMostTop);
  TokenLogProbs out{.token = of_row[0], .top = {of_row + 1, of_row + 1 + top}};
  std::erase_if(out.top, [](const TokenLogProb& one) { return one.id == kNoToken; });
  return out;
}

void SessionCuda::make_masks(std::span<const NewTokens> tokens, std::span<const Draw> draws) {
  const int64_t vocab = config().vocab_size;
  const auto vocab_of = [&](const Draw& draw) { return draw.vocab == 0 ? vocab : draw.vocab; };
  mask_words_ = 0;
  std::vector<size_t> masked;
  bool waits = false;
  for (size_t i = 0; i < draws.size(); ++i) {
    if (draws[i].filter == nullptr) continue;
    masked.push_back(i);
    mask_words_ = std::max(mask_words_, token_mask_words(vocab_of(draws[i])));
    waits |= tokens[i].ids[0] < 0;
  }
  if (masked.empty()) return;
  const Results& before = results_of(calls_);
  Results& own = results_of(calls_ + 1);
  if (waits) before.copied.synchronize();
  // Of the call that used this memory last, which may not have been asked for its tokens.
  own.copied.synchronize();
  const int64_t words = mask_words_, most = rows() * (1 + token_mask_words(vocab));
  if (own.masks.size() == 0) own.masks = PinnedBuffer<uint32_t>(most);
  if (masks_.size() == 0) masks_ = DeviceBuffer<uint32_t>(most);
  std::fill_n(own.masks.data(), rows(), ~0u);  // none
  for (size_t n = 0; n < masked.size(); ++n) own.masks[masked[n]] = static_cast<uint32_t>(n);
  uint32_t* const masks = own.masks.data() + rows();
  const auto make = [&](int64_t begin, int64_t end, int) {
    for (int64_t n = begin; n < end; ++n) {
      const size_t row = masked[static_cast<size_t>(n)];
      const int32_t id = tokens[row].ids[0];
      const int32_t drawn = id < 0 ? before.next[static_cast<size_t>(-1 - id)] : kNoToken;
      const std::span<uint32_t> mask(masks + n * words, static_cast<size_t>(words));
      std::ranges::fill(mask, 0u);
      write_mask(draws[row], drawn,
                 mask.first(static_cast<size_t>(token_mask_words(vocab_of(draws[row])))));
    }
  };
  const int64_t count = std::ssize(masked);
  if (count < 4) {
    make(0, count, 0);
  } else {
    if (!mask_threads_) mask_threads_ = std::make_unique<Context>(std::min(8, available_threads()));
    mask_threads_->parallel_for(count, 1, make);
  }
  TWELL_CUDA_CHECK(cudaMemcpyAsync(masks_.data(), own.masks.data(),
                                   static_cast<size_t>(rows() + count * words) * sizeof(uint32_t),
                                   cudaMemcpyHostToDevice, ctx_.stream()));
}

void SessionCuda::penalize(std::span<const Draw> draws) {
  std::vector<PenalizedRow> rows;
  std::vector<SeenToken> seen;
  for (size_t i = 0; i < draws.size(); ++i) {
    const SamplerOptions& sampler = draws[i].sampler;
    if (draws[i].seen.empty()) continue;
    const int64_t begin = std::ssize(seen);
    seen.insert(seen.end(), draws[i].seen.begin(), draws[i].seen.end());
    rows.push_back({.row = static_cast<int64_t>(i),
                    .begin = begin,
                    .end = std::ssize(seen),
                    .repetition = sampler.repetition_penalty,
                    .frequency = sampler.frequency_penalty,
                    .presence = sampler.presence_penalty});
  }
  penalties_ = {.count = std::ssize(rows)};
  if (rows.empty()) return;
  if (seen_.size() < std::ssize(seen)) {
    seen_ = DeviceBuffer<SeenToken>(2 * std::ssize(seen));
    before_ = DeviceBuffer<float>(seen_.size());
  }
  send(ctx_, penalized_.data(), rows);
  send(ctx_, seen_.data(), seen);
  penalties_ = {.count = std::ssize(rows),
                .rows = penalized_.data(),
                .seen = seen_.data(),
                .vocab = config().vocab_size,
                .logits = logits_.data(),
                .before = before_.data()};
  TWELL_CUDA_CHECK(launch_penalize(penalties_, ctx_.stream()));
}

void SessionCuda::undo_penalties() {
  penalties_.undo = true;
  TWELL_CUDA_CHECK(launch_penalize(penalties_, ctx_.stream()));
}

std::vector<ActiveNeurons> SessionCuda::active_neurons() const {
  std::vector<ActiveNeurons> layers;
  const FfnPlansCuda& plans = forward_.ffn_plans();
  for (int64_t layer = 0; layer < plans.size(); ++layer) {
    const FfnPlan& plan = plans[layer].plan;
    layers.push_back({.per_token = plan.nnz_per_token(), .sparse = plan.execution.sparse});
  }
  return layers;
}

void SessionCuda::enqueue_packed(std::span<const NewTokens> tokens) {
  TWELL_CHECK(!tokens.empty() && std::ssize(tokens) <= rows(), "{} rows for {}", tokens.size(),
              rows());
  int64_t single = 0;  // sequences with one new token: a pass has room for them besides prompts
  for (const NewTokens& one : tokens) {
    TWELL_CHECK(one.targets.size() <= one.ids.size(), "{} scores of {} tokens", one.targets.size(),
                one.ids.size());
    single += one.ids.size() == 1;
  }
  const int64_t room = std::min(prefill_tokens_ + single, forward_.plan().max_tokens);
  const int64_t width = config().width;
  std::vector<int32_t> ids, last_rows;
  std::vector<ForwardSequence> sequences;
  std::vector<Piece> scored;
  int64_t ended = 0;  // sequences whose last token has passed the layers
  const auto run = [&] {
    forward_.stage(ids, sequences, &cache_, {}, next_.data());
    forward_.enqueue();
    if (!last_rows.empty()) {
      send(ctx_, last_rows_.data() + ended, last_rows);
      // Gather their hidden states with the embedding kernel.
      TWELL_CUDA_CHECK(launch_embedding({.tokens = std::ssize(last_rows),
                                         .width = width,
                                         .ids = last_rows_.data() + ended,
                                         .table = forward_.hidden(),
                                         .out = last_hidden_.data() + ended * width},
                                        ctx_.stream()));
      ended += std::ssize(last_rows);
    }
    score(scored);
    ids.clear();
    last_rows.clear();
    sequences.clear();
    scored.clear();
  };
  for (const NewTokens& one : tokens) {
    for (int64_t begin = 0; begin < std::ssize(one.ids);) {
      const int64_t count = std::min(room - std::ssize(ids), std::ssize(one.ids) - begin);
      const auto piece = one.ids.subspan(static_cast<size_t>(begin), static_cast<size_t>(count));
      ids.insert(ids.end(), piece.begin(), piece.end());
      sequences.push_back({.tokens = count, .slot = one.slot});
      if (begin < std::ssize(one.targets)) {
        const int64_t row = std::ssize(ids) - count;
        scored.push_back({&one, begin, std::min(count, std::ssize(one.targets) - begin), row});
      }
      begin += count;
      if (begin == std::ssize(one.ids)) {
        last_rows.push_back(static_cast<int32_t>(std::ssize(ids) - 1));
      }
      if (std::ssize(ids) == room) run();
    }
  }
  if (!ids.empty()) run();
  forward_.logits(last_hidden_.data(), ended, logits_.data());
}

void SessionCuda::score(std::span<const Piece> pieces) {
  struct Run {
    const NewTokens* tokens;
    int64_t row, count;  // of the logits
  };
  int64_t done = 0;  // targets of the first piece
  while (!pieces.empty()) {
    // Always as many rows, so that one plan serves, and from a multiple of them on: hidden() has
    // room for whole blocks.
    const int64_t begin = (pieces[0].row + done) / kScoreRows * kScoreRows;
    forward_.logits(forward_.hidden() + begin * config().width, kScoreRows, logits_.data());
    std::vector<int32_t> targets(static_cast<size_t>(kScoreRows));
    std::vector<Run> runs;
    while (!pieces.empty() && pieces[0].row + done < begin + kScoreRows) {
      const Piece& piece = pieces[0];
      const int64_t row = piece.row + done - begin;
      const int64_t count = std::min(piece.count - done, kScoreRows - row);
      std::ranges::copy(piece.tokens->targets.subspan(static_cast<size_t>(piece.begin + done),
                                                      static_cast<size_t>(count)),
                        targets.begin() + row);
      runs.push_back({piece.tokens, row, count});
      done += count;
      if (done < piece.count) break;
      pieces = pieces.subspan(1);
      done = 0;
    }
    send(ctx_, targets_.data(), targets);
    for (const auto& [tokens, row, count] : runs) {
      enqueue_log_probs(row, count, targets_.data() + row, tokens->top, tokens->vocab);
    }
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
    for (const auto& [tokens, row, count] : runs) {
      for (int64_t i = row; i < row + count; ++i) {
        tokens->scores->push_back(log_probs_of(results_of(calls_ + 1), i, tokens->top));
      }
    }
  }
}

void SessionCuda::enqueue_layers(int64_t sequences) {
  forward_.enqueue();
  forward_.logits(forward_.hidden(), sequences, logits_.data());
}

void SessionCuda::enqueue_decode(std::span<const int32_t> ids,
                                 std::span<const ForwardSequence> sequences,
                                 std::span<const float> uniforms) {
  const int64_t count = std::ssize(sequences);
  forward_.stage(ids, sequences, &cache_, uniforms, next_.data());
  Graph& graph = graphs_.at({count, forward_.path()}, forward_.ffn_plans().revision());
  if (!graph.warm) {
    enqueue_layers(count);
    graph.warm = true;
  } else {
    if (!graph.graph.captured()) {
      graph.graph = CudaGraph(ctx_.stream(), [&] { enqueue_layers(count); });
      ++graphs_captured_;
    }
    graph.graph.launch(ctx_.stream());
  }
}

ConstMatrixF SessionCuda::read_logits(int64_t rows) {
  const int64_t vocab = config().vocab_size;
  TWELL_CUDA_CHECK(cudaMemcpyAsync(host_logits_.data(), logits_.data(),
                                   static_cast<size_t>(rows * vocab) * sizeof(float),
                                   cudaMemcpyDeviceToHost, ctx_.stream()));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
  return {host_logits_.data(), rows, vocab};
}

int64_t SessionCuda::draw_ids(std::span<const Draw> draws, const float* uniforms, int64_t tokens) {
  Results& results = results_of(calls_ + 1);
  const int64_t vocab = config().vocab_size;
  penalize(draws);
  const uint32_t* const masks = mask_words_ == 0 ? nullptr : masks_.data() + rows();
  const auto* const mask_of = reinterpret_cast<const int32_t*>(masks_.data());
  // Draw rows with equal parameters in one launch; usually that is all rows.
  for (size_t begin = 0, end = 0; begin < draws.size(); begin = end) {
    const Draw& draw = draws[begin];
    while (end < draws.size() && draws_alike(draw, draws[end])) ++end;
    const auto row = static_cast<int64_t>(begin);
    TWELL_CUDA_CHECK(launch_sample({.rows = static_cast<int64_t>(end - begin),
                                    .vocab = draw.vocab == 0 ? vocab : std::min(draw.vocab, vocab),
                                    .stride = vocab,
                                    .logits = logits_.data() + row * vocab,
                                    .uniforms = uniforms + row,
                                    .ids = next_.data() + row,
                                    .masks = masks,
                                    .mask_of = mask_of + row,
                                    .mask_words = mask_words_,
                                    .temperature = draw.sampler.temperature,
                                    .top_k = draw.sampler.top_k,
                                    .top_p = draw.sampler.top_p,
                                    .min_p = draw.sampler.min_p},
                                   ctx_.stream()));
  }
  undo_penalties();
  // Log-probabilities, in one launch for consecutive rows with equal wishes.
  for (size_t begin = 0, end = 0; begin < draws.size(); begin = end) {
    const Draw& draw = draws[begin];
    while (end < draws.size() && draws[end].log_probs == draw.log_probs &&
           draws[end].vocab == draw.vocab) {
      results.top[end++] = draw.log_probs.value_or(0);
    }
    if (!draw.log_probs) continue;
    const auto row = static_cast<int64_t>(begin);
    enqueue_log_probs(row, static_cast<int64_t>(end - begin), next_.data() + row, *draw.log_probs,
                      draw.vocab);
  }
  TWELL_CUDA_CHECK(cudaMemcpyAsync(results.next.data(), next_.data(),
                                   draws.size() * sizeof(int32_t), cudaMemcpyDeviceToHost,
                                   ctx_.stream()));
  results.copied.record(ctx_.stream());
  results.tokens = tokens;
  return ++calls_;
}

int64_t SessionCuda::drafts_of_step(int64_t drafts) const {
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(drafts)));
}

double SessionCuda::step_cost(int64_t rows) const {
  return rows <= 1 ? 1.0 : kTwoRows + kFurtherRow * static_cast<double>(rows - 2);
}

void SessionCuda::count_tokens(int64_t new_tokens) {
  tokens_ += new_tokens;
  if (tokens_ < update_after_) return;
  update_after_ = 2 * tokens_;
  forward_.ffn_plans().update(ctx_);
}

double SessionCuda::nnz_per_token() {
  forward_.ffn_plans().update(ctx_);
  return Session::nnz_per_token();
}

}  // namespace twell
