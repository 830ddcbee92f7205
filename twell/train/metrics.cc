// SPDX-License-Identifier: Apache-2.0
#include "twell/train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"

namespace twell {
namespace {

// Size in bytes of the leading complete lines whose step is at most `last_step`.
int64_t valid_prefix(const std::filesystem::path& path, int64_t last_step) {
  if (!std::filesystem::is_regular_file(path)) return 0;
  std::ifstream file(path);
  std::string line;
  int64_t bytes = 0;
  while (std::getline(file, line) && !file.eof()) {  // eof: the line lacks its newline
    const auto json = nlohmann::json::parse(line, nullptr, false);
    if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer() ||
        json["step"].get<int64_t>() > last_step) {
      break;
    }
    bytes += static_cast<int64_t>(line.size()) + 1;
  }
  return bytes;
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
  return json;
}

MetricsWriter::MetricsWriter(const std::filesystem::path& path, int64_t last_kept_step)
    : path_(path) {
  TWELL_REQUIRE(!std::filesystem::exists(path) || std::filesystem::is_regular_file(path),
                "cannot write {}: not a regular file", path.string());
  const int64_t keep = valid_prefix(path, last_kept_step);
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
                            std::optional<double> validation_ce, double eta_seconds) {
  std::string line = fmt::format("step {}/{}", metrics.step, steps);
  if (eta_seconds >= 0) line += "  ETA " + format_duration(eta_seconds);
  line += fmt::format("  {} tok/s  CE {:.3f}", format_count(metrics.tokens_per_second), metrics.ce);
  if (validation_ce) line += fmt::format("  val {:.3f}", *validation_ce);
  if (metrics.kl) line += fmt::format("  KL {:.3f}", *metrics.kl);
  if (metrics.relu_share && *metrics.relu_share < 1.0) {
    line += fmt::format("  ReLU {:.0f}%", 100.0 * *metrics.relu_share);
  }
  line += fmt::format("  nnz {:.1f}  dead {:.0f}%  hybrid {}/{}  L1 {:.1f}", metrics.mean_nnz(),
                      100.0 * metrics.mean_dead_share(), metrics.hybrid_layers(),
                      metrics.layers.size(), metrics.l1);
  if (metrics.mfu) line += fmt::format("  MFU {:.0f}%", 100.0 * *metrics.mfu);
  if (metrics.device_bytes > 0) {
    line += "  " + format_bytes(static_cast<double>(metrics.device_bytes));
  }
  line += fmt::format("  {} tok", format_count(static_cast<double>(metrics.tokens)));
  return line;
}

}  // namespace twell
