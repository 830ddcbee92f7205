// SPDX-License-Identifier: Apache-2.0
// Times the decoding of a batch of sequences, on any device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "twell/infer/session.h"

namespace twell {

struct DecodeLoad {
  int64_t batch = 1;
  int64_t prompt = 128;              // P: tokens in the cache when timing starts
  int64_t tokens = 128;              // decoded per sequence
  std::span<const int32_t> prompts;  // [at least batch * P]; empty: random ids are drawn
  uint64_t seed = 0;                 // of random ids and of drawing
  float temperature = 0.0f;
  bool eight_bit_cache = false;  // keys and values in 8 bits
  // Steps begin before the tokens of the last are known, as those of the scheduler do.
  bool ahead = false;
  // What each sequence is drawn by; empty: nothing.
  std::function<std::unique_ptr<TokenFilter>()> filter;
  int64_t filter_vocab = 0;  // tokens of its masks
};

struct DecodeRun {
  double step_seconds = 0.0;          // median over the steps
  double processor_seconds = 0.0;     // mean over the steps, of all threads
  std::vector<ActiveNeurons> active;  // [L]
};

// What a session needs for the load.
SessionOptions decode_session(const ModelConfig& config, const DecodeLoad& load, FfnPolicy policy);
// The session has no sequences yet.
DecodeRun run_decode(Session& session, const DecodeLoad& load);

// Sizes of a model in a device's memory.
struct DecodeMemory {
  int64_t weights = 0;  // bytes of all weights
  int64_t element = 0;  // bytes of a weight
  // Bytes of a value of an embedding that is not the head, of which a step reads few rows; 0: as
  // of a weight.
  int64_t embedding_element = 0;
  int64_t kv_token = 0;  // bytes of a token's keys and values, all layers
};

// Bytes that a step must read: weights, and the keys and values of the mean step. Of up and down in
// sparse layers only rows of neurons that fire for any sequence are read; sequences are taken to
// fire independently of each other. active: [L], or empty when all layers are dense.
double decode_step_bytes(const ModelConfig& config, const DecodeMemory& memory,
                         const DecodeLoad& load, std::span<const ActiveNeurons> active);

}  // namespace twell
