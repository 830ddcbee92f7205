// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/rng.h"
#include "twell/grammar/token_filter.h"
#include "twell/infer/sampler_simd.h"

namespace twell {
namespace {

struct Candidate {
  float logit;
  int32_t id;
};

// The order of tokens: by falling logit, then by id, so that the choice is reproducible.
bool more_likely(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// Tokens in the order of their ids.
struct Tokens {
  std::vector<float> logits;
  std::vector<int32_t> ids;
};

// Passes over logits, which threads share where it pays.
class Passes {
 public:
  explicit Passes(Context* ctx) : ctx_(ctx) {}

  LogitRange range(std::span<const float> logits) const {
    std::vector<LogitRange> parts(count(logits), {logits[0], logits[0], false});
    for_each(logits, [&](auto part, size_t at) { parts[at] = logit_range(part); });
    LogitRange all = parts[0];
    for (const LogitRange& part : parts) {
      all = {.highest = std::max(all.highest, part.highest),
             .lowest = std::min(all.lowest, part.lowest),
             .has_nan = all.has_nan || part.has_nan};
    }
    return all;
  }

  // add_to_buckets() of all.
  double add(std::span<const float> logits, const LogitWeights& weights,
             const LogitBuckets& buckets, double least, double (&mass)[kLogitBuckets]) const {
    struct Part {
      double mass[kLogitBuckets] = {};
      double kept = 0.0;
    };
    std::vector<Part> parts(count(logits));
    for_each(logits, [&](auto part, size_t at) {
      parts[at].kept = add_to_buckets(part, weights, buckets, least, parts[at].mass);
    });
    double kept = 0.0;
    for (const Part& part : parts) {
      for (int32_t b = 0; b < kLogitBuckets; ++b) mass[b] += part.mass[b];
      kept += part.kept;
    }
    return kept;
  }

  // The tokens at the positions that gather(piece, positions) finds in each piece of the logits;
  // ids: as in Weighed.
  template <typename Gather>
  Tokens gathered(std::span<const float> logits, std::span<const int32_t> ids,
                  const Gather& gather) const {
    std::vector<Tokens> parts(count(logits));
    for_each(logits, [&](std::span<const float> part, size_t number) {
      constexpr size_t kPiece = 4096;
      int32_t positions[kPiece + size_t{kGatherPadding}];
      Tokens& found = parts[number];
      for (size_t first = 0; first < part.size(); first += kPiece) {
        const auto piece = part.subspan(first, std::min(kPiece, part.size() - first));
        const auto many = static_cast<size_t>(gather(piece, positions));
        for (const int32_t position : std::span(positions, many)) {
          const auto at = static_cast<size_t>(&piece[static_cast<size_t>(position)] - &logits[0]);
          found.logits.push_back(logits[at]);
          found.ids.push_back(ids.empty() ? static_cast<int32_t>(at) : ids[at]);
        }
      }
    });
    Tokens all = std::move(parts[0]);
    for (const Tokens& part : std::span(parts).subspan(1)) {
      all.logits.insert(all.logits.end(), part.logits.begin(), part.logits.end());
      all.ids.insert(all.ids.end(), part.ids.begin(), part.ids.end());
    }
    return all;
  }

 private:
  static constexpr int64_t kGrain = 8192;  // logits of a thread, at least

  // Returns the number of parts.
  size_t count(std::span<const float> logits) const {
    const int64_t most = ctx_ == nullptr ? 1 : ctx_->threads();
    return static_cast<size_t>(std::clamp<int64_t>(std::ssize(logits) / kGrain, 1, most));
  }
  // Calls function(part, its number) for parts of the logits.
  template <typename Function>
  void for_each(std::span<const float> logits, const Function& function) const {
    if (ctx_ == nullptr) return function(logits, size_t{0});
    ctx_->parallel_for(std::ssize(logits), kGrain, [&](int64_t begin, int64_t end, int part) {
      function(logits.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
               static_cast<size_t>(part));
    });
  }

  Context* ctx_;
};

// Few tokens are sorted; of more, a bucket is taken out first.
constexpr size_t kFew = 64;
// Weights of e^-40 and less share the last bucket.
constexpr double kWidestRange = 40.0;

// The first token, in their order, with which the sum of weights reaches a limit.
struct Crossing {
  int32_t id;
  double weight;
  double sum;  // of the weights so far, its own included
};

// reached(sum) says whether the limit is reached; it is for all larger sums too. `sum` is that of
// the weights of all tokens in front of these.
template <typename Reached>
Crossing find_in_order(std::span<const float> logits, std::span<const int32_t> ids,
                       const LogitWeights& weights, const Reached& reached, double sum) {
  std::vector<Candidate> order;
  for (size_t i = 0; i < logits.size(); ++i) {
    order.push_back({logits[i], ids.empty() ? static_cast<int32_t>(i) : ids[i]});
  }
  std::ranges::sort(order, more_likely);
  std::vector<float> sorted;
  for (const Candidate& candidate : order) sorted.push_back(candidate.logit);
  std::vector<double> weight(sorted.size());
  weigh(sorted, weights, weight.data());
  size_t at = 0;
  while (true) {
    sum += weight[at];
    // Where rounding keeps the sum below the limit, it is the last token.
    if (reached(sum) || at + 1 == order.size()) return {order[at].id, weight[at], sum};
    ++at;
  }
}

class Weighed {
 public:
  // The tokens' logits, with the highest and the lowest of them, and the tokens' rising ids; none:
  // their positions. least: of kept().
  Weighed(const Passes& passes, std::span<const float> logits, std::span<const int32_t> ids,
          const LogitRange& range, const LogitWeights& weights, double least = 0.0)
      : passes_(passes), logits_(logits), ids_(ids), weights_(weights) {
    if (logits.size() <= kFew) {
      double each[kFew];
      weigh(logits, weights, each);
      for (const double weight : std::span(each).first(logits.size())) {
        total_ += weight;
        if (weight >= least) kept_ += weight;
      }
      return;
    }
    const double width = static_cast<double>(range.highest) - range.lowest;
    const double scale = kLogitBuckets / std::min(width, kWidestRange / weights.per_unit);
    buckets_ = {
        .first = range.highest,
        .scale = static_cast<float>(std::min(scale, double{std::numeric_limits<float>::max()}))};
    // The highest logit is in bucket 0. Where all are, sorting them is the only way.
    divides_ = width * buckets_.scale >= 2.0;
    kept_ = passes.add(logits, weights, buckets_, least, mass_);
    total_ = std::accumulate(std::begin(mass_), std::end(mass_), 0.0);
  }

  double total() const { return total_; }  // of all weights
  double kept() const { return kept_; }    // of those that are at least `least`

  // Finds what find_in_order() does.
  template <typename Reached>
  Crossing find(const Reached& reached, double sum = 0.0) const {
    if (!divides_) {
      return find_in_order(logits_, ids_, weights_, reached, sum);
    }
    int32_t bucket = 0;
    double before = sum;  // the bucket
    for (int32_t b = 0; b < kLogitBuckets; ++b) {
      if (mass_[b] == 0.0) continue;
      bucket = b;
      before = sum;
      sum += mass_[b];
      if (reached(sum)) break;
    }
    const Tokens in_bucket =
        passes_.gathered(logits_, ids_, [&](std::span<const float> piece, int32_t* positions) {
          return gather_bucket(piece, buckets_, bucket, positions);
        });
    if (in_bucket.ids.size() <= kFew) {
      return find_in_order(in_bucket.logits, in_bucket.ids, weights_, reached, before);
    }
    return Weighed(passes_, in_bucket.logits, in_bucket.ids, passes_.range(in_bucket.logits),
                   weights_)
        .find(reached, before);
  }

 private:
  const Passes& passes_;
  std::span<const float> logits_;
  std::span<const int32_t> ids_;
  LogitWeights weights_;
  LogitBuckets buckets_;
  bool divides_ = false;  // into buckets, which are filled then
  double mass_[kLogitBuckets] = {};
  double total_ = 0.0, kept_ = 0.0;
};

// The k most likely tokens, of more than k.
Tokens most_likely(const Passes& passes, std::span<const float> logits, int64_t k) {
  // A logit that slightly more than k tokens reach, going by a sample of them; all, where that
  // fails.
  float lowest = -std::numeric_limits<float>::infinity();
  const size_t size = std::min(logits.size() / 8, size_t{1024});
  std::vector<float> sample;
  for (size_t i = 0; i < size; ++i) sample.push_back(logits[i * logits.size() / size]);
  const double expected =
      static_cast<double>(k) * static_cast<double>(size) / static_cast<double>(logits.size());
  const auto rank = static_cast<size_t>(expected + 4.0 * std::sqrt(expected) + 4.0);
  if (rank < size) {
    std::ranges::nth_element(sample, sample.begin() + static_cast<ptrdiff_t>(rank),
                             std::greater<>());
    lowest = sample[rank];
  }
  const auto reaching = [&](float least) {
    return passes.gathered(logits, {}, [&](std::span<const float> piece, int32_t* positions) {
      return gather_from(piece, least, positions);
    });
  };
  Tokens tokens = reaching(lowest);
  if (std::ssize(tokens.ids) < k) tokens = reaching(-std::numeric_limits<float>::infinity());
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < tokens.ids.size(); ++i) {
    candidates.push_back({tokens.logits[i], tokens.ids[i]});
  }
  std::ranges::nth_element(candidates, candidates.begin() + k, more_likely);
  candidates.resize(static_cast<size_t>(k));
  std::ranges::sort(candidates, {}, &Candidate::id);
  tokens = {};
  for (const auto& [logit, id] : candidates) {
    tokens.logits.push_back(logit);
    tokens.ids.push_back(id);
  }
  return tokens;
}

// Sets the logits of tokens that are not allowed to minus infinity.
void apply_mask(std::span<float> logits, std::span<const uint32_t> allowed) {
  constexpr float kImpossible = -std::numeric_limits<float>::infinity();
  for (size_t word = 0; word * 32 < logits.size(); ++word) {
    const uint32_t bits = allowed[word];
    const auto some = logits.subspan(word * 32, std::min<size_t>(32, logits.size() - word * 32));
    if (bits == ~0u) continue;
    if (bits == 0) {
      std::ranges::fill(some, kImpossible);
      continue;
    }
    for (size_t i = 0; i < some.size(); ++i) {
      if (((bits >> i) & 1u) == 0) some[i] = kImpossible;
    }
  }
}

// Logits with penalties and biases, for as long as it lives.
class AdjustedLogits {
 public:
  AdjustedLogits(std::span<float> logits, const SamplerOptions& options,
                 std::span<const SeenToken> seen)
      : logits_(logits), seen_(seen), before_(seen.size()) {
    adjust_logits(logits, seen,
                  {.repetition = options.repetition_penalty,
                   .frequency = options.frequency_penalty,
                   .presence = options.presence_penalty},
                  before_.data());
  }
  ~AdjustedLogits() {
    for (size_t i = 0; i < seen_.size(); ++i) {
      if (seen_[i].id < std::ssize(logits_)) logits_[static_cast<size_t>(seen_[i].id)] = before_[i];
    }
  }
  AdjustedLogits(const AdjustedLogits&) = delete;
  AdjustedLogits& operator=(const AdjustedLogits&) = delete;

 private:
  std::span<float> logits_;
  std::span<const SeenToken> seen_;
  std::vector<float> before_;  // the logit of each seen token
};

// Draws from logits whose penalties, biases and mask are applied.
int32_t choose(std::span<const float> logits, const SamplerOptions& options, uint64_t stream,
               uint64_t index, Context* ctx) {
  if (logits.empty()) return kNoToken;
  const Passes passes(ctx);
  LogitRange range = passes.range(logits);
  if (range.has_nan || !std::isfinite(range.highest)) return kNoToken;
  if (options.temperature == 0.0f) return static_cast<int32_t>(first_of(logits, range.highest));
  Tokens top;
  if (options.top_k > 0 && options.top_k < std::ssize(logits)) {
    top = most_likely(passes, logits, options.top_k);
    logits = top.logits;
    range = passes.range(logits);
  }
  const LogitWeights weights{.top = range.highest,
                             .per_unit = 1.0 / static_cast<double>(options.temperature)};
  const double min_p = options.min_p;
  const Weighed weighed(passes, logits, top.ids, range, weights, min_p);
  double kept = weighed.kept();  // the mass of the tokens that the filters leave
  if (options.top_p < 1.0f) {
    const double limit = static_cast<double>(options.top_p) * weighed.total();
    const Crossing last = weighed.find([&](double sum) { return sum >= limit; });
    if (last.weight >= min_p) kept = last.sum;
  }
  const double drawn = static_cast<double>(uniform(options.seed, stream, index)) * kept;
  return weighed.find([&](double sum) { return sum > drawn; }).id;
}

}  // namespace

void SamplerOptions::validate() const {
  TWELL_REQUIRE(temperature >= 0.0f && std::isfinite(temperature),
                "temperature must be 0 (greedy) or a positive number, got {}", temperature);
  TWELL_REQUIRE(top_k >= 0, "top-k must be 0 (off) or positive, got {}", top_k);
  TWELL_REQUIRE(top_p > 0.0f && top_p <= 1.0f, "top-p must be in (0, 1], got {}", top_p);
  TWELL_REQUIRE(min_p >= 0.0f && min_p < 1.0f, "min-p must be in [0, 1), got {}", min_p);
  TWELL_REQUIRE(repetition_penalty > 0.0f && std::isfinite(repetition_penalty),
                "the repetition penalty must be a positive number, 1 for none, got {}",
                repetition_penalty);
  TWELL_REQUIRE(std::isfinite(frequency_penalty), "the frequency penalty must be a number, got {}",
                frequency_penalty);
  TWELL_REQUIRE(std::isfinite(presence_penalty), "the presence penalty must be a number, got {}",
                presence_penalty);
}

int32_t sample(std::span<const float> logits, const SamplerOptions& options, uint64_t stream,
               uint64_t index, std::span<const SeenToken> seen, Context* ctx,
               std::span<const uint32_t> allowed) {
  if (seen.empty() && allowed.empty()) return choose(logits, options, stream, index, ctx);
  std::vector<float> changed(logits.begin(), logits.end());
  const AdjustedLogits adjusted(changed, options, seen);
  if (!allowed.empty()) {
    TWELL_CHECK(std::ssize(allowed) >= token_mask_words(std::ssize(logits)),
                "a mask of {} words for {} tokens", allowed.size(), logits.size());
    apply_mask(changed, allowed);
  }
  return choose(changed, options, stream, index, ctx);
}

int32_t sample_in_place(std::span<float> logits, const SamplerOptions& options, uint64_t stream,
                        uint64_t index, std::span<const SeenToken> seen, Context* ctx,
                        std::span<const uint32_t> allowed) {
  if (!allowed.empty()) return sample(logits, options, stream, index, seen, ctx, allowed);
  const AdjustedLogits adjusted(logits, options, seen);
  return choose(logits, options, stream, index, ctx);
}

}  // namespace twell
