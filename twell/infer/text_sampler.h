// SPDX-License-Identifier: Apache-2.0
// Texts of a model that is being trained, drawn on the CPU from the weights in host memory: a GPU
// that trains has no memory left for a session, and its host copy of the weights is what a
// checkpoint would hold.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "twell/base/context.h"
#include "twell/model/weights.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

struct TextSamplerOptions {
  std::vector<std::string> prompts;
  int64_t tokens = 0;  // of a text, at most; the context is also a limit
  uint64_t seed = 0;   // the same random numbers are used for each call and prompt
};

class TextSampler {
 public:
  // Once `stop` is true, texts end where they are. It and the tokenizer must outlive the sampler.
  // InputError when a prompt is not UTF-8, has no token, or leaves no room in the context.
  TextSampler(const ModelConfig& config, const Tokenizer& tokenizer, const std::atomic<bool>& stop,
              TextSamplerOptions options);

  // What this model of that configuration writes behind each prompt, without the prompt, in UTF-8:
  // bytes that are none become U+FFFD. InputError when its output is not finite.
  std::vector<std::string> texts(Context& ctx, const ModelView& model) const;

 private:
  const Tokenizer& tokenizer_;
  const std::atomic<bool>& stop_;
  TextSamplerOptions options_;
  int64_t capacity_ = 0;  // of a session: the longest prompt with its text
};

}  // namespace twell
