// SPDX-License-Identifier: Apache-2.0
// The results of `twell inspect` for a checkpoint, as a table, as JSON and as an HTML page.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/text_layout.h"
#include "twell/format/byte_matrix.h"
#include "twell/infer/activity_profile.h"
#include "twell/infer/evaluate.h"
#include "twell/model/config.h"

namespace twell::cli {

struct TensorHealth {
  std::string name;
  int64_t rows = 0, cols = 0;
  int64_t not_finite = 0;
  double rms = 0.0;
  double max_abs = 0.0;
};

struct TokenRow {
  int32_t id = 0;
  std::string text;  // quoted, on one line, valid UTF-8
  int64_t seen = 0;
  double nnz = 0.0;  // mean active neurons per layer
};

struct Inspection {
  std::string checkpoint;
  ModelConfig config;
  std::optional<ByteWeights> weights;  // what is stored in 8 bits
  std::vector<TensorHealth> tensors;
  int64_t damaged_tensors = 0;
  Evaluation evaluation;                   // 0 tokens when no text was given
  std::optional<ActivityProfile> profile;  // empty without a text or without zeros to count
  std::string costs_of;  // the machine whose cost model gives the expected speed-ups
  std::vector<TokenRow> most_active, least_active;
};

nlohmann::ordered_json inspection_json(const Inspection& inspection);
// The figures of the layers, as text.
struct LayerTable {
  std::vector<Column> columns;
  std::vector<std::vector<std::string>> rows;
};
LayerTable layer_table(const Inspection& inspection);
void print_inspection(const Inspection& inspection, bool tensors);
// A self-contained HTML page.
std::string inspection_html(const Inspection& inspection);

// "2-3", or "7" for a single position.
std::string range_name(const PositionRange& range);
double mean_over_layers(const PositionRange& range);

}  // namespace twell::cli
