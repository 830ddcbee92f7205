// SPDX-License-Identifier: Apache-2.0
#include "bench/harness.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "twell/base/error.h"
#include "twell/base/json_fields.h"
#include "twell/base/rng.h"

namespace twell {
namespace {

double percentile(const std::vector<double>& sorted, double p) {
  const double position = p * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  const double fraction = position - static_cast<double>(below);
  return sorted[below] + fraction * (sorted[above] - sorted[below]);
}

}  // namespace

Timing summarize(std::vector<double> samples) {
  TWELL_REQUIRE(!samples.empty(), "no timed run to summarize");
  std::sort(samples.begin(), samples.end());
  return {percentile(samples, 0.5), percentile(samples, 0.1), percentile(samples, 0.9)};
}

std::vector<int32_t> random_tokens(int64_t count, int64_t vocab, uint64_t seed, uint64_t stream) {
  constexpr uint64_t kStream = 0x62656e6368;  // "bench" in ASCII; weights use small numbers
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int32_t>(
        uniform_below(seed, kStream + stream, i, static_cast<uint64_t>(vocab)));
  }
  return ids;
}

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown processor";
}

double host_read_bandwidth(Context& ctx) {
  constexpr int64_t kCount = (int64_t{256} << 20) / sizeof(uint64_t);
  const Buffer<uint64_t> memory(kCount);
  std::fill_n(memory.data(), kCount, 1);  // so that every page is in memory
  double fastest = 0.0;
  std::atomic<uint64_t> sum = 0;
  for (int pass = 0; pass < 5; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    ctx.parallel_for(kCount, 1 << 16, [&](int64_t begin, int64_t end, int) {
      sum += std::accumulate(memory.data() + begin, memory.data() + end, uint64_t{0});
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    fastest = std::max(fastest, static_cast<double>(kCount * sizeof(uint64_t)) / seconds.count());
  }
  TWELL_CHECK(sum == 5 * kCount, "read {} words, not {}", sum.load(), 5 * kCount);
  return fastest;
}

double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

nlohmann::json machine_json(int threads) {
  const auto now =
      std::chrono::time_point_cast<std::chrono::seconds>(std::chrono::system_clock::now());
  return {{"twell", TWELL_VERSION},
          {"cpu", cpu_name()},
          {"threads", threads},
          {"date", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(now))}};
}

nlohmann::json timing_json(const Timing& timing) {
  return {{"median", timing.median}, {"p10", timing.p10}, {"p90", timing.p90}};
}

nlohmann::json rate_json(const Timing& timing, int64_t tokens) {
  return {{"tokens_per_s", static_cast<double>(tokens) / timing.median},
          {"median_s", timing.median},
          {"p10_s", timing.p10},
          {"p90_s", timing.p90}};
}

void append_jsonl(const std::filesystem::path& path, const nlohmann::json& row) {
  if (path.empty()) return;
  // With O_NONBLOCK, opening a pipe that nobody reads fails instead of waiting.
  const int file =
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0666);
  TWELL_REQUIRE(file >= 0, "cannot write {}: {}", path.string(), std::strerror(errno));
  const std::string line = json_text(row) + '\n';
  errno = 0;
  const bool written = ::write(file, line.data(), line.size()) == std::ssize(line);
  const int fault = errno;
  ::close(file);
  TWELL_REQUIRE(written, "cannot write {}: {}", path.string(),
                fault == 0 ? "not all of a line" : std::strerror(fault));
}

}  // namespace twell
