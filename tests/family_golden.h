// SPDX-License-Identifier: Apache-2.0
// The golden values of golden/make_family_golden.py: checkpoints of every family, saved by
// transformers, with its logits, cross-entropy and greedy texts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "twell/checkpoint/safetensors.h"

namespace twell {

inline constexpr int64_t kGoldenLengths[] = {1, 7, 33};  // of ids.T and logits.T
inline constexpr int64_t kGoldenPrompt = 7;              // tokens of "greedy" that are given

inline constexpr const char* kGoldenFamilies[] = {"llama3",
                                                  "llama_linear",
                                                  "llama_dynamic",
                                                  "llama_yarn",
                                                  "smollm2",
                                                  "mistral",
                                                  "qwen2",
                                                  "qwen3",
                                                  "llama_sparse",
                                                  "qwen2_sparse",
                                                  "mistral_window",
                                                  "qwen2_window",
                                                  "qwen3_window",
                                                  "llama_biases",
                                                  "llama_biases_relu",
                                                  "llama_ffn_83",
                                                  "llama_mixed_dtypes",
                                                  "arcee",
                                                  "prosparse",
                                                  "bamboo",
                                                  "phonelm",
                                                  "minicpm"};

// TWELL_SOURCE_DIR in the environment: the sources' folder for a program built elsewhere (dev/gpu).
inline std::filesystem::path golden_family(const std::string& name) {
  const char* const moved = std::getenv("TWELL_SOURCE_DIR");
  const std::filesystem::path sources(moved == nullptr ? TWELL_SOURCE_DIR : moved);
  return sources / "tests" / "golden" / "families" / name;
}

template <typename T>
std::vector<T> golden_values(const SafetensorsFile& file, const std::string& name) {
  const TensorInfo& info = file.tensor(name);
  std::vector<T> out(info.bytes.size() / sizeof(T));
  std::memcpy(out.data(), info.bytes.data(), info.bytes.size());
  return out;
}

// Mean over the tokens after the first, in nats; logits [T, V].
inline double golden_cross_entropy(std::span<const float> logits, std::span<const int32_t> ids) {
  const size_t vocab = logits.size() / ids.size();
  double sum = 0.0;
  for (size_t t = 0; t + 1 < ids.size(); ++t) {
    const auto row = logits.subspan(t * vocab, vocab);
    double total = 0.0;
    for (const float value : row) total += std::exp(static_cast<double>(value));
    sum += std::log(total) - static_cast<double>(row[static_cast<size_t>(ids[t + 1])]);
  }
  return sum / static_cast<double>(ids.size() - 1);
}

inline int32_t most_likely(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace twell
