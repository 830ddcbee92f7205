// SPDX-License-Identifier: Apache-2.0
// twell report: summarizes a training run from its files as an HTML page and a JSON object.
#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "cli/commands.h"
#include "cli/process.h"
#include "cli/report_html.h"
#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/json_fields.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/train/metrics.h"

namespace twell::cli {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kTableRows = 12;

// Adds a row of `twell bench forward` from a CPU or a GPU.
void add_benchmark(nlohmann::json& report, const nlohmann::json& bench) {
  const bool gpu = bench.contains("gpu");
  for (const std::string execution : {"dense", "sparse"}) {
    const nlohmann::json& run = bench.at(execution);
    report[execution + "_tokens_per_s"] = run.at("full").at("tokens_per_s");
    report[execution + "_layers_tokens_per_s"] = run.at(gpu ? "body" : "layers").at("tokens_per_s");
  }
  report["cpu"] = bench.at("cpu");
  if (gpu) {
    report["gpu"] = bench.at("gpu");
    report["sparse_relative_difference"] = bench.at("sparse_relative_difference");
  } else {
    report["threads"] = bench.at("threads");
    report["max_abs_logit_diff"] = bench.at("max_abs_logit_diff");
  }
}

nlohmann::json make_report(const fs::path& run, const std::vector<nlohmann::json>& metrics,
                           const nlohmann::json& bench) {
  const std::vector<nlohmann::json> validations = rows_with("val_ce", metrics);
  TWELL_REQUIRE(!validations.empty() && metrics.back().contains("layers"),
                "{}: metrics.jsonl holds no finished step with a validation", run.string());
  const fs::path checkpoint = run / "checkpoint";
  const ModelConfig config = load_config(checkpoint);
  nlohmann::json nnz = nlohmann::json::array();
  nlohmann::json dead = nlohmann::json::array();
  for (const nlohmann::json& layer : metrics.back()["layers"]) {
    nnz.push_back(layer.at("nnz"));
    dead.push_back(layer.at("dead_share"));
  }
  nlohmann::json report = {{"checkpoint", checkpoint.string()},
                           {"parameters", config.parameter_count()},
                           {"layers", config.layers},
                           {"ffn", config.ffn},
                           {"steps", metrics.back().at("step")},
                           {"tokens", metrics.back().at("tokens")},
                           {"val_ce_first", validations.front().at("val_ce")},
                           {"val_ce_last", validations.back().at("val_ce")},
                           {"nnz_per_layer", nnz},
                           {"dead_share_per_layer", dead}};
  if (!bench.is_null()) add_benchmark(report, bench);
  return report;
}

// Prints a dozen evenly spaced rows of the run, to show the course of loss and activity. The last
// step is among them even if it was not validated, as after an interrupt.
void print_course(const std::vector<nlohmann::json>& metrics) {
  fmt::print("{:>8} {:>10} {:>9} {:>9} {:>12} {:>7}\n", "step", "tokens", "CE", "val CE",
             "active/tok", "dead");
  std::vector<nlohmann::json> rows = rows_with("val_ce", metrics);
  std::erase_if(rows, [](const nlohmann::json& row) { return !row.contains("ce"); });
  const nlohmann::json& newest = metrics.back();
  if (newest.contains("ce") && (rows.empty() || rows.back()["step"] != newest["step"])) {
    rows.push_back(newest);
  }
  const int64_t count = std::ssize(rows);
  const int64_t shown = std::min(count, kTableRows);
  for (int64_t i = 0; i < shown; ++i) {
    const nlohmann::json& row =
        rows[static_cast<size_t>(shown == 1 ? 0 : i * (count - 1) / (shown - 1))];
    const std::string held_out =
        row.contains("val_ce") ? fmt::format("{:.4f}", row["val_ce"].get<double>()) : "-";
    fmt::print("{:>8} {:>10} {:>9.4f} {:>9} {:>12.1f} {:>6.1f}%\n", row["step"].get<int64_t>(),
               row["tokens"].get<int64_t>(), row["ce"].get<double>(), held_out,
               row["nnz"].get<double>(), 100.0 * row["dead_share"].get<double>());
  }
}

void print_report(const nlohmann::json& report) {
  const double first = report["val_ce_first"], last = report["val_ce_last"];
  fmt::print("\nvalidation CE          {}{:.4f} nats per token\n",
             first == last ? "" : fmt::format("{:.4f} -> ", first), last);
  fmt::print("active of {} neurons ", report["ffn"].get<int64_t>());
  for (const nlohmann::json& nnz : report["nnz_per_layer"])
    fmt::print(" {:.1f}", nnz.get<double>());
  fmt::print("  (per layer)\n");
  if (report.contains("dense_tokens_per_s")) {
    const double dense = report["dense_tokens_per_s"];
    const double sparse = report["sparse_tokens_per_s"];
    fmt::print("forward                dense {:.0f} tok/s, sparse {:.0f} tok/s: {:.2f}x\n", dense,
               sparse, sparse / dense);
    const bool gpu = report.contains("gpu");
    fmt::print("{} {:.3g}\n", gpu ? "difference of outputs " : "largest logit change  ",
               report[gpu ? "sparse_relative_difference" : "max_abs_logit_diff"].get<double>());
  }
  fmt::print("checkpoint             {}\n", report["checkpoint"].get<std::string>());
}

int run_report(const fs::path& run, bool as_json, const fs::path& html_file) {
  TWELL_REQUIRE(fs::is_directory(run), "{} is not the folder of a training run", run.string());
  const LogSink warn = [](LogLevel, std::string_view text) {
    print_error("twell: warning: {}\n", text);
  };
  const std::vector<nlohmann::json> metrics = read_json_lines(run / "metrics.jsonl", warn);
  const std::vector<nlohmann::json> bench = fs::exists(run / "bench.jsonl")
                                                ? read_json_lines(run / "bench.jsonl", warn)
                                                : std::vector<nlohmann::json>{};
  TWELL_REQUIRE(!metrics.empty(), "{} is empty: the run has not begun",
                (run / "metrics.jsonl").string());
  nlohmann::json report;
  std::string page;
  try {
    report = make_report(run, metrics, bench.empty() ? nlohmann::json() : bench.back());
    if (!html_file.empty()) page = report_html(report, metrics);
  } catch (const nlohmann::json::exception&) {
    throw InputError(fmt::format(
        "{}: metrics.jsonl or bench.jsonl is not as this version writes it", run.string()));
  }
  const std::string json = json_text(report, 2) + "\n";
  write_file_atomic(run / "report.json", json);
  if (!html_file.empty()) write_file_atomic(html_file, page);
  if (as_json) {
    write_out(json);
    return kExitOk;
  }
  print_course(metrics);
  print_report(report);
  return kExitOk;
}

}  // namespace

void add_report_command(Command& root, CommonOptions& common) {
  Command& command = root.add("report", "Summary of a training run, as a table and report.json");
  auto as_json = std::make_shared<bool>(false);
  auto html_file = std::make_shared<fs::path>();
  command.runs(
      [&common, as_json, html_file] { return run_report(common.out, *as_json, *html_file); });
  add_out_option(command, common, "Folder of the training run").required();
  command.flag("--json", as_json.get(), "Print the JSON object instead of the table");
  command.value(
      "--html", html_file.get(), "FILE",
      "Write a page with the curves of the run: loss, validation, active and dead neurons, "
      "speed; and the texts of --sample-every");
  command.footer(
      "Reads OUT/metrics.jsonl and, where there is one, the last row of OUT/bench.jsonl\n"
      "(twell bench forward --jsonl OUT/bench.jsonl); writes OUT/report.json.\n\n"
      "Example:\n  twell report --out runs/first");
}

}  // namespace twell::cli
