// SPDX-License-Identifier: Apache-2.0
// One CTA per row of logits. The filters always keep a prefix of the tokens sorted by falling
// logit. Instead of sorting, radix selection on the logits' bits finds the prefix, by its number of
// tokens (top-k) or by its probability mass (top-p, and the draw itself).
#include "twell/infer/sampler_cuda.h"

#include "twell/base/reduce.cuh"

namespace twell {
namespace {

using u64 = unsigned long long;

constexpr int kSamplerThreads = 1024;
constexpr int kSamplerWarps = kSamplerThreads / 32;
constexpr int kDigitBits = 4;
constexpr int kDigits = 1 << kDigitBits;
constexpr float kOne = 4294967296.0f;  // weight of the most likely token

// Maps floats to unsigned integers of the same order; 0 and -0 become equal.
__device__ uint32_t key_of(float value) {
  const uint32_t bits = __float_as_uint(value == 0.0f ? 0.0f : value);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

// A row's logits as they are drawn from: minus infinity where a mask, if there is one, has no bit.
struct Logits {
  const float* values;
  const uint32_t* mask;  // null: none

  __device__ float operator[](int64_t i) const {
    if (mask != nullptr && (mask[i / 32] >> (i % 32) & 1u) == 0) return -INFINITY;
    return values[i];
  }
};

// A prefix in falling order: all tokens with keys larger than `key`, and the first `ties` of those
// with this key.
struct Prefix {
  uint32_t key;
  u64 ties;
};

class Row {
 public:
  // `vocab` logits, of which the largest is top. temperature: of weight() and mass().
  __device__ Row(const Logits& logits, int64_t vocab, float top, float temperature)
      : logits_(logits), vocab_(vocab), top_(top), per_unit_(1.4426950408889634f / temperature) {}

  // The factor is infinite for the smallest temperatures, and zero times that is NaN.
  __device__ float weight(float logit) const {
    return logit == top_ ? 1.0f : exp2f((logit - top_) * per_unit_);
  }
  __device__ u64 mass(float logit, float least) const {
    const float relative = weight(logit);
    return relative < least ? 0 : static_cast<u64>(relative * kOne);
  }

  // Sum of count(logit) over the prefix.
  template <typename Count>
  __device__ u64 total(const Prefix& prefix, const Count& count) const {
    __shared__ u64 sum;
    __syncthreads();
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    u64 mine = 0, tie = 0;
    for (int64_t i = threadIdx.x; i < vocab_; i += kSamplerThreads) {
      const uint32_t key = key_of(logits_[i]);
      if (key > prefix.key) mine += count(logits_[i]);
      if (key == prefix.key) tie = count(logits_[i]);
    }
    mine = warp_sum(mine);
    if (threadIdx.x % 32 == 0) atomicAdd(&sum, mine);
    __shared__ u64 tied;
    if (threadIdx.x == 0) tied = 0;
    __syncthreads();
    if (tie != 0) tied = tie;  // all non-zero values are equal
    __syncthreads();
    return sum + prefix.ties * tied;
  }

  // The smallest prefix whose count is at least `limit`, which is positive and at most the total.
  template <typename Count>
  __device__ Prefix select(u64 limit, const Count& count) const {
    __shared__ u64 of_digit[kDigits];
    uint32_t found = 0;  // the digits found so far
    u64 above = 0;       // count over all larger keys
    for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
      __syncthreads();
      if (threadIdx.x < kDigits) of_digit[threadIdx.x] = 0;
      __syncthreads();
      u64 mine[kDigits] = {};
      const int fixed = shift + kDigitBits;  // lowest bit of the digits found already
      for (int64_t i = threadIdx.x; i < vocab_; i += kSamplerThreads) {
        const uint32_t key = key_of(logits_[i]);
        if (fixed < 32 && (key >> fixed) != (found >> fixed)) continue;
        const uint32_t digit = (key >> shift) % kDigits;
        const u64 value = count(logits_[i]);
#pragma unroll
        for (uint32_t d = 0; d < kDigits; ++d) mine[d] += d == digit ? value : 0;
      }
#pragma unroll
      for (int d = 0; d < kDigits; ++d) {
        const u64 sum = warp_sum(mine[d]);
        if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(&of_digit[d], sum);
      }
      __syncthreads();
      int digit = kDigits - 1;
      while (digit > 0 && above + of_digit[digit] < limit) above += of_digit[digit--];
      found |= static_cast<uint32_t>(digit) << shift;
    }
    // All tokens with this key have the same count.
    __shared__ u64 each;
    __syncthreads();
    if (threadIdx.x == 0) each = 1;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < vocab_; i += kSamplerThreads) {
      if (key_of(logits_[i]) == found && count(logits_[i]) != 0) each = count(logits_[i]);
    }
    __syncthreads();
    return {found, (limit - above + each - 1) / each};
  }

  // Calls what(rank, id) for the tokens of the prefix with its key, by rising id, from rank 0 on.
  template <typename What>
  __device__ void each_tie(const Prefix& prefix, const What& what) const {
    __shared__ int of_warp[2][kSamplerWarps];  // in turn, so that one barrier per round is enough
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u64 seen = 0;
    int turn = 0;
    for (int64_t base = 0; base < vocab_ && seen < prefix.ties;
         base += kSamplerThreads, turn ^= 1) {
      const int64_t i = base + threadIdx.x;
      const bool match = i < vocab_ && key_of(logits_[i]) == prefix.key;
      const unsigned matches = __ballot_sync(0xffffffffu, match);
      if (lane == 0) of_warp[turn][warp] = __popc(matches);
      const bool any = __syncthreads_or(match) != 0;
      if (!any) continue;
      u64 rank = seen + static_cast<u64>(__popc(matches & ((1u << lane) - 1)));
      for (unsigned w = 0; w < kSamplerWarps; ++w) {
        if (w < warp) rank += static_cast<u64>(of_warp[turn][w]);
        seen += static_cast<u64>(of_warp[turn][w]);
      }
      if (match && rank < prefix.ties) what(rank, static_cast<int32_t>(i));
    }
  }

  // Writes the last token of a prefix.
  __device__ void write_last(const Prefix& prefix, int32_t* id) const {
    each_tie(prefix, [&](u64 rank, int32_t token) {
      if (rank + 1 == prefix.ties) *id = token;
    });
  }

 private:
  Logits logits_;
  int64_t vocab_;
  float top_, per_unit_;
};

// Largest logit; NaN if any logit is NaN.
__device__ float largest(const Logits& logits, int64_t vocab) {
  float top = -INFINITY;
  bool nan = false;
  for (int64_t i = threadIdx.x; i < vocab; i += kSamplerThreads) {
    nan |= isnan(logits[i]);
    top = fmaxf(top, logits[i]);
  }
  top = warp_max(top);
  __shared__ float of_warp[kSamplerWarps];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = top;
  if (__syncthreads_or(nan)) return NAN;
  for (int warp = 0; warp < kSamplerWarps; ++warp) top = fmaxf(top, of_warp[warp]);
  return top;
}

// Writes the most likely token (the lowest id among equals), in one pass.
__device__ void write_most_likely(const SampleCuda& p, const Logits& logits, int32_t* id) {
  u64 best = 0;  // key above a number that is larger for smaller ids
  bool nan = false;
#pragma unroll 16
  for (int64_t i = threadIdx.x; i < p.vocab; i += kSamplerThreads) {
    const float logit = logits[i];
    nan |= isnan(logit);
    best = max(best, u64{key_of(logit)} << 32 | (~0u - static_cast<uint32_t>(i)));
  }
  best = warp_max(best);
  __shared__ u64 of_warp[kSamplerWarps];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
  if (__syncthreads_or(nan)) {
    if (threadIdx.x == 0) *id = -1;
    return;
  }
  if (threadIdx.x >= 32) return;
  best = of_warp[threadIdx.x];
  best = warp_max(best);
  const auto key = static_cast<uint32_t>(best >> 32);
  const bool finite = key > key_of(-INFINITY) && key < key_of(INFINITY);
  if (threadIdx.x == 0) *id = finite ? static_cast<int32_t>(~static_cast<uint32_t>(best)) : -1;
}

__global__ void __launch_bounds__(kSamplerThreads) sample_kernel(SampleCuda p) {
  const int32_t mask = p.masks == nullptr ? -1 : p.mask_of[blockIdx.x];
  const Logits logits{p.logits + blockIdx.x * p.stride,
                      mask < 0 ? nullptr : p.masks + mask * p.mask_words};
  int32_t* id = p.ids + blockIdx.x;
  if (p.temperature == 0.0f) {
    write_most_likely(p, logits, id);
    return;
  }
  const float top = largest(logits, p.vocab);
  if (!isfinite(top)) {
    if (threadIdx.x == 0) *id = -1;
    return;
  }
  const Row row(logits, p.vocab, top, p.temperature);
  Prefix kept{0, static_cast<u64>(p.vocab)};  // all tokens: keys of numbers are above 0
  if (p.top_k > 0 && p.top_k < p.vocab) {
    kept = row.select(static_cast<u64>(p.top_k), [](float) { return u64{1}; });
  }
  const auto of_kept = [&](float least) {
    return [&row, &kept, least](float logit) {
      return key_of(logit) < kept.key ? u64{0} : row.mass(logit, least);
    };
  };
  if (p.top_p < 1.0f) {
    const u64 total = row.total(kept, of_kept(0.0f));
    const u64 limit = static_cast<u64>(ceil(static_cast<double>(p.top_p) * total));
    const Prefix smaller = row.select(max(limit, u64{1}), of_kept(0.0f));
    __syncthreads();
    kept = smaller;
  }
  const u64 total = row.total(kept, of_kept(p.min_p));
  const u64 drawn = static_cast<u64>(static_cast<double>(p.uniforms[blockIdx.x]) * total);
  row.write_last(row.select(min(drawn + 1, total), of_kept(p.min_p)), id);
}

__global__ void __launch_bounds__(kSamplerThreads) log_probs_kernel(LogProbsCuda p) {
  const Logits logits{p.logits + blockIdx.x * p.vocab, nullptr};
  TokenLogProb* out = p.out + blockIdx.x * p.out_stride;
  const auto thread = static_cast<int>(threadIdx.x);
  const float top = largest(logits, p.vocab);
  double sum = 0.0;
  for (int64_t i = thread; i < p.vocab; i += kSamplerThreads) {
    sum += static_cast<double>(expf(logits[i] - top));
  }
  sum = warp_sum(sum);
  __shared__ double of_warp[kSamplerWarps];
  if (thread % 32 == 0) of_warp[thread / 32] = sum;
  __syncthreads();
  sum = 0.0;
  for (const double of_one : of_warp) sum += of_one;
  const double log_sum = isfinite(top) ? top + log(sum) : static_cast<double>(NAN);
  const auto log_prob = [&](int32_t id) { return static_cast<float>(logits[id] - log_sum); };
  if (thread == 0) {
    const int32_t id = p.ids[blockIdx.x];
    out[0] = {id, id >= 0 && id < p.vocab ? log_prob(id) : NAN};
  }
  const auto count = static_cast<int>(min(p.top, min(p.top_vocab, p.vocab)));
  if (thread < p.top - count) out[1 + count + thread] = {kNoToken, NAN};
  if (count == 0) return;
  if (!isfinite(top)) {
    if (thread < count) out[1 + thread] = {kNoToken, NAN};
    return;
  }
  const int64_t vocab = min(p.top_vocab, p.vocab);
  const Row row(logits, vocab, top, 1.0f);
  const Prefix prefix = row.select(static_cast<u64>(count), [](float) { return u64{1}; });
  __shared__ u64 found[kMostTop];  // key above a number that is larger for smaller ids
  __shared__ int size;
  if (thread == 0) size = 0;
  __syncthreads();
  const auto entry = [&](int32_t id) {
    return u64{key_of(logits[id])} << 32 | (~0u - static_cast<uint32_t>(id));
  };
  for (int64_t i = thread; i < vocab; i += kSamplerThreads) {
    if (key_of(logits[i]) > prefix.key) {
      found[atomicAdd(&size, 1)] = entry(static_cast<int32_t>(i));
    }
  }
  const int larger = count - static_cast<int>(prefix.ties);
  row.each_tie(prefix, [&](u64 rank, int32_t id) { found[larger + rank] = entry(id); });
  __syncthreads();
  if (thread >= count) return;
  int rank = 0;
  for (int i = 0; i < count; ++i) rank += found[i] > found[thread];
  const auto id = static_cast<int32_t>(~0u - static_cast<uint32_t>(found[thread]));
  out[1 + rank] = {id, log_prob(id)};
}

__global__ void penalize_kernel(PenalizeCuda p) {
  const PenalizedRow row = p.rows[blockIdx.x];
  float* const logits = p.logits + row.row * p.vocab;
  for (int64_t i = row.begin + threadIdx.x; i < row.end; i += blockDim.x) {
    const SeenToken token = p.seen[i];
    if (token.id >= p.vocab) continue;
    float& logit = logits[token.id];
    if (p.undo) {
      logit = p.before[i];
    } else {
      p.before[i] = logit;
      logit = adjusted(logit, token, row.repetition, row.frequency, row.presence);
    }
  }
}

}  // namespace

cudaError_t launch_sample(const SampleCuda& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  sample_kernel<<<static_cast<unsigned>(p.rows), kSamplerThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_penalize(const PenalizeCuda& p, cudaStream_t stream) {
  if (p.count == 0) return cudaSuccess;
  penalize_kernel<<<static_cast<unsigned>(p.count), 256, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_log_probs(const LogProbsCuda& p, cudaStream_t stream) {
  if (p.top < 0 || p.top > kMostTop) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  log_probs_kernel<<<static_cast<unsigned>(p.rows), kSamplerThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace twell
