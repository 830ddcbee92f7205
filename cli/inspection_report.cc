// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <numeric>

#include "cli/inspection.h"

#include "twell/checkpoint/config_json.h"

namespace twell::cli {
namespace {

using nlohmann::ordered_json;

double share(double part, int64_t whole) { return part / static_cast<double>(whole); }

ordered_json expected_json(const ExpectedFfn& expected) {
  return {{"execution", ffn_execution_name(expected.execution())},
          {"ffn_speedup", expected.speedup()}};
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

void print_config(const ModelConfig& config) {
  fmt::print("parameters   {:.2f} M\n", static_cast<double>(config.parameter_count()) * 1e-6);
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

void print_tensors(const std::vector<TensorHealth>& tensors) {
  fmt::print("\n{:<48} {:>14} {:>11} {:>11} {:>10}\n", "tensor", "shape", "rms", "max |x|",
             "not finite");
  for (const TensorHealth& tensor : tensors) {
    fmt::print("{:<48} {:>14} {:>11.4e} {:>11.4e} {:>10}\n", tensor.name,
               fmt::format("{}x{}", tensor.rows, tensor.cols), tensor.rms, tensor.max_abs,
               tensor.not_finite);
  }
}

std::string union_cell(double mean, int64_t tiles) {
  return tiles == 0 ? "-" : fmt::format("{:.0f}", mean);
}

void print_profile_cells(const LayerProfile& layer, int64_t ffn) {
  fmt::print(" {:>6.1f}% {:>9} {:>9}  {:<10} {:>5.2f}x  {:<9} {:>5.2f}x",
             100.0 * share(static_cast<double>(layer.never_fired()), ffn),
             union_cell(layer.mean_union_64(), layer.tiles_64),
             union_cell(layer.mean_union_128(), layer.tiles_128),
             ffn_execution_name(layer.prompt.execution()), layer.prompt.speedup(),
             ffn_execution_name(layer.decode.execution()), layer.decode.speedup());
}

void print_layers(const Inspection& inspection) {
  const Evaluation& evaluation = inspection.evaluation;
  const int64_t ffn = inspection.config.ffn;
  fmt::print("\nactive FFN neurons per token, of {}, over {} tokens (CE {:.4f})\n", ffn,
             evaluation.tokens, evaluation.cross_entropy());
  fmt::print("{:>5} {:>8} {:>8} {:>6} {:>6} {:>6}", "layer", "mean", "density", "p50", "p99",
             "max");
  if (inspection.profile) {
    fmt::print(" {:>7} {:>9} {:>9}  {:<17}  {}", "silent", "union 64", "union 128", "prompt",
               "decode");
  }
  fmt::print("\n");
  double mean = 0.0;
  for (size_t i = 0; i < evaluation.layers.size(); ++i) {
    const LayerHistogram& layer = evaluation.layers[i];
    mean += share(layer.mean(), std::ssize(evaluation.layers));
    fmt::print("{:>5} {:>8.1f} {:>7.2f}% {:>6} {:>6} {:>6}", i, layer.mean(),
               100.0 * share(layer.mean(), ffn), layer.quantile(0.5), layer.quantile(0.99),
               layer.max());
    if (inspection.profile) print_profile_cells(inspection.profile->layers[i], ffn);
    fmt::print("\n");
  }
  fmt::print("{:>5} {:>8.1f} {:>7.2f}%", "all", mean, 100.0 * share(mean, ffn));
  if (inspection.profile) {
    fmt::print("{:>67.2f}x{:>17.2f}x", inspection.profile->prompt().speedup(),
               inspection.profile->decode().speedup());
  }
  fmt::print("\n");
}

void print_tokens(const char* title, const std::vector<TokenRow>& rows) {
  constexpr size_t kColumns = 80;
  fmt::print("{}\n", title);
  std::string line;
  for (const TokenRow& row : rows) {
    const std::string token = fmt::format("  {} {:.1f}", row.text, row.nnz);
    if (!line.empty() && line.size() + token.size() > kColumns) {
      fmt::print("{}\n", line);
      line.clear();
    }
    line += token;
  }
  fmt::print("{}\n", line);
}

void print_profile(const Inspection& inspection) {
  fmt::print(
      "\nsilent: never active in this text. union: neurons active somewhere in that many tokens in "
      "a row.\nprompt, decode: execution and speed-up of the FFN against dense that the {} cost "
      "model expects;\n'twell bench forward' measures.\n",
      inspection.costs_of);
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

ordered_json inspection_json(const Inspection& inspection) {
  ordered_json json = {{"checkpoint", inspection.checkpoint},
                       {"config", ordered_json(config_to_json(inspection.config))},
                       {"parameters", inspection.config.parameter_count()},
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
  print_config(inspection.config);
  fmt::print("health       {}\n",
             inspection.damaged_tensors == 0
                 ? std::string("every weight is a finite number")
                 : fmt::format("{} of {} tensors hold NaN or infinity", inspection.damaged_tensors,
                               inspection.tensors.size()));
  if (tensors || inspection.damaged_tensors > 0) print_tensors(inspection.tensors);
  if (inspection.evaluation.tokens == 0) return;
  print_layers(inspection);
  if (inspection.profile) print_profile(inspection);
}

}  // namespace twell::cli
