// SPDX-License-Identifier: Apache-2.0
#include "twell/train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"

namespace twell {
namespace {

// Calls use(row, end) for each complete line that is a JSON object, with the offset behind it, and
// warns of the other complete lines.
void for_each_row(const std::filesystem::path& path, const LogSink& log,
                  const std::function<void(nlohmann::json row, int64_t end)>& use) {
  std::ifstream file(path, std::ios::binary);
  TWELL_REQUIRE(file.good(), "cannot open {}", path.string());
  std::string damaged;
  int64_t number = 0, end = 0, count = 0;
  for (std::string line; std::getline(file, line) && !file.eof();) {  // eof: without its newline
    end += std::ssize(line) + 1;
    ++number;
    nlohmann::json row = nlohmann::json::parse(line, nullptr, false);
    if (row.is_object()) {
      use(std::move(row), end);
    } else if (++count <= 5) {
      damaged += fmt::format("{}{}", count == 1 ? "" : ", ", number);
    }
  }
  if (count == 0 || !log) return;
  log(LogLevel::kWarning, fmt::format("{}: {} {}{} damaged and left out", path.string(),
                                      count == 1 ? "line" : "lines", damaged,
                                      count == 1  ? " is"
                                      : count > 5 ? " and more are"
                                                  : " are"));
}

// Offset behind the last row whose step is at most `last_step`.
int64_t end_of_kept_rows(const std::filesystem::path& path, int64_t last_step, const LogSink& log) {
  int64_t kept = 0;
  if (last_step < 0 || !std::filesystem::is_regular_file(path)) return 0;
  for_each_row(path, log, [&](const nlohmann::json& row, int64_t end) {
    const auto step = row.find("step");
    if (step != row.end() && step->is_number_integer() && step->get<int64_t>() <= last_step) {
      kept = end;
    }
  });
  return kept;
}

std::string scaled(double value, double base, std::initializer_list<const char*> units) {
  const char* unit = *units.begin();
  for (const char* next : units) {
    unit = next;
    if (value < base) break;
    if (next != *(units.end() - 1)) value /= base;
  }
  const int digits = value < 10 ? 2 : value < 100 ? 1 : 0;
  return fmt::format("{:.{}f}{}", value, digits, unit);
}

}  // namespace

double StepMetrics::mean(double LayerMetrics::*figure) const {
  double sum = 0.0;
  for (const LayerMetrics& layer : layers) sum += layer.*figure;
  return layers.empty() ? 0.0 : sum / static_cast<double>(layers.size());
}

int64_t StepMetrics::hybrid_layers() const {
  return std::count_if(layers.begin(), layers.end(), [](const LayerMetrics& layer) {
    return layer.execution == FfnTrainExecution::kHybrid;
  });
}

std::vector<std::string> ExecutionChanges::settled(const StepMetrics& metrics, int64_t ffn) {
  struct Change {
    std::string layers;
    int64_t count = 0, since = 0;
    double nnz = 0.0;
  };
  std::map<std::pair<FfnTrainExecution, FfnTrainExecution>, Change> changes;
  const bool first = layers_.empty();
  layers_.resize(metrics.layers.size());
  for (size_t i = 0; i < layers_.size(); ++i) {
    const FfnTrainExecution now = metrics.layers[i].execution;
    Layer& layer = layers_[i];
    if (first) layer = {now, now, metrics.step};
    if (now != layer.now) layer = {layer.told, now, metrics.step};
    if (now == layer.told || metrics.step - layer.since < kSettledSteps) continue;
    Change& change = changes[{layer.told, now}];
    change.layers += fmt::format("{}{}", change.count == 0 ? "" : ", ", i);
    change.since = change.count == 0 ? layer.since : std::min(change.since, layer.since);
    change.nnz += metrics.layers[i].nnz;
    ++change.count;
    layer.told = now;
  }
  std::vector<std::string> lines;
  for (const auto& [executions, change] : changes) {
    lines.push_back(fmt::format(
        "layer{} {}: {} -> {} since step {}, with {:.1f} of {} neurons active per token",
        change.count == 1 ? "" : "s", change.layers, ffn_train_execution_name(executions.first),
        ffn_train_execution_name(executions.second), change.since,
        change.nnz / static_cast<double>(change.count), ffn));
  }
  return lines;
}

nlohmann::json metrics_json(const StepMetrics& metrics) {
  nlohmann::json json = {{"step", metrics.step}, {"tokens", metrics.tokens}};
  if (metrics.validation_ce) json["val_ce"] = *metrics.validation_ce;
  if (metrics.layers.empty()) return json;
  json["loss"] = metrics.loss();
  json["ce"] = metrics.ce;
  if (metrics.ce_in_bf16) json["ce_logits"] = "bf16";
  if (metrics.kl) json["kl"] = *metrics.kl;
  if (metrics.relu_share) json["relu_share"] = *metrics.relu_share;
  json["l1"] = metrics.l1;
  json["l1_coeff"] = metrics.l1_coeff;
  json["lr"] = metrics.learning_rate;
  json["grad_norm"] = metrics.grad_norm;
  json["nnz"] = metrics.mean_nnz();
  json["dead_share"] = metrics.mean_dead_share();
  json["seconds"] = metrics.seconds;
  json["tokens_per_s"] = metrics.tokens_per_second;
  if (metrics.mfu) json["mfu"] = *metrics.mfu;
  if (metrics.device_bytes > 0) json["device_bytes"] = metrics.device_bytes;
  for (const LayerMetrics& layer : metrics.layers) {
    json["layers"].push_back({{"nnz", layer.nnz},
                              {"max_nnz", layer.max_nnz},
                              {"tail_rows", layer.tail_rows},
                              {"l1", layer.l1},
                              {"dead", layer.dead},
                              {"dead_share", layer.dead_share},
                              {"execution", ffn_train_execution_name(layer.execution)}});
    if (layer.recomputed > 0) json["layers"].back()["recomputed"] = layer.recomputed;
    if (layer.union_neurons >= 0.0) json["layers"].back()["union"] = layer.union_neurons;
  }
  for (const TextSample& sample : metrics.samples) {
    json["samples"].push_back({{"prompt", sample.prompt}, {"text", sample.text}});
  }
  return json;
}

std::vector<nlohmann::json> read_json_lines(const std::filesystem::path& path, const LogSink& log) {
  TWELL_REQUIRE(!std::filesystem::exists(path) || std::filesystem::is_regular_file(path),
                "cannot open {}: not a regular file", path.string());
  std::vector<nlohmann::json> rows;
  for_each_row(path, log, [&](nlohmann::json row, int64_t) { rows.push_back(std::move(row)); });
  return rows;
}

MetricsWriter::MetricsWriter(const std::filesystem::path& path, int64_t last_kept_step,
                             const LogSink& log)
    : path_(path) {
  TWELL_REQUIRE(!std::filesystem::exists(path) || std::filesystem::is_regular_file(path),
                "cannot write {}: not a regular file", path.string());
  const int64_t keep = end_of_kept_rows(path, last_kept_step, log);
  fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  TWELL_REQUIRE(fd_ >= 0 && ::ftruncate(fd_, keep) == 0, "cannot write {}: {}", path.string(),
                std::strerror(errno));
}

MetricsWriter::~MetricsWriter() {
  if (fd_ >= 0) ::close(fd_);
}

void MetricsWriter::write(const StepMetrics& metrics) {
  unwritten_ += metrics_json(metrics).dump() + "\n";
  flush();
}

void MetricsWriter::flush() {
  while (!unwritten_.empty()) {
    const ssize_t count = ::write(fd_, unwritten_.data(), unwritten_.size());
    if (count < 0 && errno == EINTR) continue;
    TWELL_REQUIRE(count >= 0, "cannot write {}: {}", path_.string(), std::strerror(errno));
    unwritten_.erase(0, static_cast<size_t>(count));
  }
}

std::string format_count(double value) { return scaled(value, 1000.0, {"", "k", "M", "G", "T"}); }

std::string format_bytes(double bytes) {
  return scaled(bytes, 1024.0, {" B", " KiB", " MiB", " GiB", " TiB"});
}

std::string format_duration(double seconds) {
  const int64_t total = static_cast<int64_t>(seconds + 0.5);
  if (total < 60) return fmt::format("{}s", total);
  if (total < 3600) return fmt::format("{}m{:02}s", total / 60, total % 60);
  if (total < 86400) return fmt::format("{}h{:02}m", total / 3600, total / 60 % 60);
  return fmt::format("{}d{:02}h", total / 86400, total / 3600 % 24);
}

std::string format_progress(const StepMetrics& metrics, int64_t steps,
                            std::optional<double> validation_ce, double eta_seconds,
                            size_t columns) {
  // The figures from left to right, with the order in which they are left out: 0 stays.
  std::vector<std::pair<std::string, int>> figures;
  const auto add = [&](std::string text, int order) {
    figures.emplace_back(std::move(text), order);
  };
  add(fmt::format("step {}/{}", metrics.step, steps), 0);
  if (eta_seconds >= 0) add("ETA " + format_duration(eta_seconds), 0);
  add(format_count(metrics.tokens_per_second) + " tok/s", 0);
  add(fmt::format("CE {:.3f}", metrics.ce), 0);
  if (validation_ce) add(fmt::format("val {:.3f}", *validation_ce), 0);
  if (metrics.kl) add(fmt::format("KL {:.3f}", *metrics.kl), 6);
  if (metrics.relu_share && *metrics.relu_share < 1.0) {
    add(fmt::format("ReLU {:.0f}%", 100.0 * *metrics.relu_share), 7);
  }
  add(fmt::format("nnz {:.1f}", metrics.mean_nnz()), 0);
  add(fmt::format("dead {:.0f}%", 100.0 * metrics.mean_dead_share()), 8);
  add(fmt::format("hybrid {}/{}", metrics.hybrid_layers(), metrics.layers.size()), 3);
  add(fmt::format("L1 {:.1f}", metrics.l1), 2);
  if (metrics.mfu) add(fmt::format("MFU {:.0f}%", 100.0 * *metrics.mfu), 5);
  if (metrics.device_bytes > 0) add(format_bytes(static_cast<double>(metrics.device_bytes)), 4);
  add(format_count(static_cast<double>(metrics.tokens)) + " tok", 1);
  const auto line = [&](const char* between) {
    std::string text;
    for (const auto& [figure, order] : figures) text += (text.empty() ? "" : between) + figure;
    return text;
  };
  if (line("  ").size() <= columns) return line("  ");
  for (int leave_out = 1; leave_out <= 8 && line(" ").size() > columns; ++leave_out) {
    std::erase_if(figures, [&](const auto& figure) { return figure.second == leave_out; });
  }
  return line(" ");
}

}  // namespace twell
