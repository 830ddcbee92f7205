// SPDX-License-Identifier: Apache-2.0
// twell bench: the benchmarks' common parts.
#include "cli/bench.h"

#include <fmt/chrono.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "twell/base/error.h"

namespace twell::cli {

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown processor";
}

nlohmann::json machine_json(int threads) {
  const auto now =
      std::chrono::time_point_cast<std::chrono::seconds>(std::chrono::system_clock::now());
  return {{"twell", TWELL_VERSION},
          {"cpu", cpu_name()},
          {"threads", threads},
          {"date", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(now))}};
}

void append_jsonl(const std::filesystem::path& path, const nlohmann::json& row) {
  if (path.empty()) return;
  std::ofstream file(path, std::ios::app);
  file << row.dump() << '\n';
  file.close();
  TWELL_REQUIRE(file.good(), "cannot write {}", path.string());
}

void add_bench_command(Command& root, CommonOptions& common) {
  Command& bench = root.add("bench", "Speed of dense and sparse execution");
  add_bench_forward_command(bench, common);
  add_bench_decode_command(bench, common);
  add_bench_ffn_command(bench, common);
  add_bench_train_command(bench, common);
}

}  // namespace twell::cli
