// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <algorithm>
#include <numeric>

#include "cli/inspection.h"
#include "cli/text_layout.h"
#include "twell/checkpoint/config_json.h"
#include "twell/checkpoint/quantization.h"

namespace twell::cli {
namespace {

using nlohmann::ordered_json;

double share(double part, int64_t whole) { return part / static_cast<double>(whole); }

ordered_json expected_json(const ExpectedFfn& expected) {
  return {{"execution", expected.execution().name}, {"ffn_speedup", expected.speedup()}};
}

ordered_json layer_json(const Inspection& inspection, size_t i) {
  const LayerHistogram& activity = inspection.evaluation.layers[i];
  ordered_json out = {{"nnz_mean", activity.mean()},
                      {"nnz_p50", activity.quantile(0.5)},
                      {"nnz_p99", activity.quantile(0.99)},
                      {"nnz_max", activity.max()}};
  if (!inspection.profile) return out;
  const LayerProfile& layer = inspection.profile->layers[i];
  out["never_fired"] = layer.never_fired();
  out["never_fired_share"] = share(static_cast<double>(layer.never_fired()), inspection.config.ffn);
  if (layer.tiles_64 > 0) out["union_64"] = layer.mean_union_64();
  if (layer.tiles_128 > 0) out["union_128"] = layer.mean_union_128();
  out["prompt"] = expected_json(layer.prompt);
  out["decode"] = expected_json(layer.decode);
  return out;
}

ordered_json tokens_json(const std::vector<TokenRow>& rows) {
  ordered_json out = ordered_json::array();
  for (const TokenRow& row : rows) {
    out.push_back({{"id", row.id}, {"text", row.text}, {"seen", row.seen}, {"nnz_mean", row.nnz}});
  }
  return out;
}

void print_config(const Inspection& inspection) {
  const ModelConfig& config = inspection.config;
  fmt::print("parameters   {:.2f} M\n", static_cast<double>(config.parameter_count()) * 1e-6);
  if (inspection.weights) {
    fmt::print("weights      {} with a scale per output{}; embedding{} and norms are floats\n",
               byte_option_name(inspection.weights->type),
               inspection.weights->head ? ", output head too" : "",
               inspection.weights->head ? "" : ", head");
  }
  fmt::print("layers       {}\n", config.layers);
  fmt::print("width        {}\n", config.width);
  fmt::print("ffn          {} ({}, {})\n", config.ffn, activation_name(config.activation),
             config.gated ? "gated" : "not gated");
  fmt::print("heads        {} of {}, {} for keys and values\n", config.heads, config.head_dim,
             config.kv_heads);
  fmt::print("vocabulary   {} ({} embeddings)\n", config.vocab_size,
             config.tied_embeddings ? "tied" : "untied");
  fmt::print("context      {}\n", config.context);
}

void print_tensors(const std::vector<TensorHealth>& tensors, bool damaged) {
  size_t longest = 0;
  for (const TensorHealth& tensor : tensors) longest = std::max(longest, tensor.name.size());
  std::vector<Column> columns = {{.header = "tensor", .width = longest, .left = true},
                                 {.header = "shape", .width = 11, .extra = 1},
                                 {.header = "rms", .width = 8},
                                 {.header = "max |x|", .width = 8}};
  if (damaged) columns.push_back({.header = "not finite"});
  const Table table(columns);
  fmt::print("\n");
  table.print_header();
  for (const TensorHealth& tensor : tensors) {
    table.print_row({tensor.name, fmt::format("{}x{}", tensor.rows, tensor.cols),
                     fmt::format("{:.2e}", tensor.rms), fmt::format("{:.2e}", tensor.max_abs),
                     fmt::format("{}", tensor.not_finite)});
  }
}

std::string percent_cell(double part, int64_t whole, int digits) {
  return fmt::format("{:.{}f}%", 100.0 * share(part, whole), digits);
}

std::string union_cell(double mean, int64_t tiles) {
  return tiles == 0 ? "-" : fmt::format("{:.0f}", mean);
}

std::string speedup_cell(const ExpectedFfn& expected) {
  return fmt::format("{:.2f}x", expected.speedup());
}

void print_layers(const Inspection& inspection) {
  const Evaluation& evaluation = inspection.evaluation;
  const int64_t ffn = inspection.config.ffn;
  fmt::print("\nactive FFN neurons per token, of {}, over {} tokens (CE {:.4f})\n", ffn,
             evaluation.tokens, evaluation.cross_entropy());
  const LayerTable layers = layer_table(inspection);
  const Table table(layers.columns);
  table.print_header();
  for (const std::vector<std::string>& row : layers.rows) table.print_row(row);
  const double mean = evaluation.mean_active();
  std::vector<std::string> all = {"all", fmt::format("{:.1f}", mean), percent_cell(mean, ffn, 2)};
  if (inspection.profile) {
    all.insert(all.end(), {"", "", "", "", "", "", "", speedup_cell(inspection.profile->prompt()),
                           "", speedup_cell(inspection.profile->decode())});
  }
  table.print_row(all);
  table.print_left_out();
}

void print_tokens(const char* title, const std::vector<TokenRow>& rows) {
  const size_t columns = terminal_columns(stdout, 80);
  fmt::print("{}\n", title);
  std::string line;
  for (const TokenRow& row : rows) {
    const std::string token = fmt::format("  {} {:.1f}", row.text, row.nnz);
    if (!line.empty() && line.size() + token.size() > columns) {
      fmt::print("{}\n", line);
      line.clear();
    }
    line += token;
  }
  fmt::print("{}\n", line);
}

void print_profile(const Inspection& inspection) {
  fmt::print("\n");
  print_paragraphs(fmt::format(
      "silent: neurons that never fire in this text. union: neurons that fire somewhere in that "
      "many tokens in a row. prompt, decode: execution and speed-up of the FFN against dense that "
      "the {} cost model expects; 'twell bench forward' measures.",
      inspection.costs_of));
  fmt::print("\n{:>12} {:>9} {:>12}\n", "position", "tokens", "mean active");
  for (const PositionRange& range : inspection.profile->positions()) {
    fmt::print("{:>12} {:>9} {:>12.1f}\n", range_name(range), range.tokens,
               mean_over_layers(range));
  }
  print_tokens("\nmost active tokens, with their active neurons per layer", inspection.most_active);
  print_tokens("least active tokens", inspection.least_active);
}

}  // namespace

std::string range_name(const PositionRange& range) {
  return range.first == range.last ? std::to_string(range.first)
                                   : fmt::format("{}-{}", range.first, range.last);
}

double mean_over_layers(const PositionRange& range) {
  return share(std::accumulate(range.nnz.begin(), range.nnz.end(), 0.0), std::ssize(range.nnz));
}

LayerTable layer_table(const Inspection& inspection) {
  const int64_t ffn = inspection.config.ffn;
  LayerTable table{.columns = {{.header = "layer"},
                               {.header = "mean", .width = 7},
                               {.header = "density"},
                               {.header = "p50", .width = 5, .extra = 3},
                               {.header = "p99", .width = 5},
                               {.header = "max", .width = 5, .extra = 1}},
                   .rows = {}};
  if (inspection.profile) {
    table.columns.insert(table.columns.end(), {{.header = "silent"},
                                               {.header = "union 64", .extra = 2},
                                               {.header = "union 128", .extra = 4},
                                               {.header = "prompt", .width = 10, .left = true},
                                               {.header = "", .width = 6},
                                               {.header = "decode", .width = 10, .left = true},
                                               {.header = "", .width = 6}});
  }
  for (size_t i = 0; i < inspection.evaluation.layers.size(); ++i) {
    const LayerHistogram& layer = inspection.evaluation.layers[i];
    std::vector<std::string>& cells = table.rows.emplace_back();
    cells = {fmt::format("{}", i),
             fmt::format("{:.1f}", layer.mean()),
             percent_cell(layer.mean(), ffn, 2),
             fmt::format("{}", layer.quantile(0.5)),
             fmt::format("{}", layer.quantile(0.99)),
             fmt::format("{}", layer.max())};
    if (!inspection.profile) continue;
    const LayerProfile& profile = inspection.profile->layers[i];
    cells.insert(cells.end(),
                 {percent_cell(static_cast<double>(profile.never_fired()), ffn, 1),
                  union_cell(profile.mean_union_64(), profile.tiles_64),
                  union_cell(profile.mean_union_128(), profile.tiles_128),
                  std::string(profile.prompt.execution().name), speedup_cell(profile.prompt),
                  std::string(profile.decode.execution().name), speedup_cell(profile.decode)});
  }
  return table;
}

ordered_json inspection_json(const Inspection& inspection) {
  ordered_json json = {
      {"checkpoint", inspection.checkpoint},
      {"config", ordered_json(config_to_json(inspection.config))},
      {"parameters", inspection.config.parameter_count()},
      {"weights", inspection.weights ? byte_option_name(inspection.weights->type) : "float"},
      {"head", inspection.weights && inspection.weights->head
                   ? byte_option_name(inspection.weights->type)
                   : "float"},
      {"damaged_tensors", inspection.damaged_tensors}};
  for (const TensorHealth& tensor : inspection.tensors) {
    json["tensors"].push_back({{"name", tensor.name},
                               {"shape", {tensor.rows, tensor.cols}},
                               {"rms", tensor.rms},
                               {"max_abs", tensor.max_abs},
                               {"not_finite", tensor.not_finite}});
  }
  if (inspection.evaluation.tokens == 0) return json;
  json["tokens"] = inspection.evaluation.tokens;
  json["cross_entropy"] = inspection.evaluation.cross_entropy();
  for (size_t i = 0; i < inspection.evaluation.layers.size(); ++i) {
    json["layers"].push_back(layer_json(inspection, i));
  }
  if (!inspection.profile) return json;
  json["expected_on"] = inspection.costs_of;
  json["prompt"] = expected_json(inspection.profile->prompt());
  json["decode"] = expected_json(inspection.profile->decode());
  for (const PositionRange& range : inspection.profile->positions()) {
    json["positions"].push_back({{"first", range.first},
                                 {"last", range.last},
                                 {"tokens", range.tokens},
                                 {"nnz_mean", mean_over_layers(range)},
                                 {"nnz_mean_per_layer", range.nnz}});
  }
  json["most_active_tokens"] = tokens_json(inspection.most_active);
  json["least_active_tokens"] = tokens_json(inspection.least_active);
  return json;
}

void print_inspection(const Inspection& inspection, bool tensors) {
  print_config(inspection);
  fmt::print("health       {}\n",
             inspection.damaged_tensors == 0
                 ? std::string("every weight is a finite number")
                 : fmt::format("{} of {} tensors hold NaN or infinity", inspection.damaged_tensors,
                               inspection.tensors.size()));
  if (tensors || inspection.damaged_tensors > 0)
    print_tensors(inspection.tensors, inspection.damaged_tensors > 0);
  if (inspection.evaluation.tokens == 0) return;
  print_layers(inspection);
  if (inspection.profile) print_profile(inspection);
}

}  // namespace twell::cli
