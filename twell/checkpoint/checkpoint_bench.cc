// SPDX-License-Identifier: Apache-2.0
// Compares loading a bf16 checkpoint of 1.2 GB with reading its file, from disk (cold) and from the
// page cache (warm). Reports the real time of one call; use the best of several:
//   --benchmark_repetitions=5 --benchmark_enable_random_interleaving=true
#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <string>

#include "twell/base/error.h"
#include "twell/base/test_folder.h"
#include "twell/checkpoint/checkpoint.h"

namespace twell {
namespace {

namespace fs = std::filesystem;

ModelConfig bench_config() {
  ModelConfig config = preset_config("0.5b");
  config.tied_embeddings = false;
  return config;
}

// A checkpoint with a content hash, as save_model writes it, and one without, as other writers do.
class Folders {
 public:
  Folders() {
    Model model(bench_config());
    for (int64_t i = 0; i < model.flat.size(); ++i) {
      model.flat[i] = 1e-3f * static_cast<float>(i % 1021 - 510);
    }
    for (const char* name : {"hashed", "foreign"}) {
      fs::create_directory(folder_.path() / name);
      save_model(model, folder_.path() / name, DType::kBF16);
    }
    // Under another name the hash is ordinary metadata.
    const fs::path file = path(false) / "model.safetensors";
    std::string header(4096, '\0');
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.read(header.data(), std::ssize(header));
    stream.seekp(static_cast<std::streamoff>(header.find("content_hash")));
    stream << "no_more_hash";
  }
  fs::path path(bool hashed) const { return folder_.path() / (hashed ? "hashed" : "foreign"); }

 private:
  TempFolder folder_;
};

const fs::path& checkpoint(bool hashed) {
  static const Folders folders;
  static const fs::path paths[] = {folders.path(false), folders.path(true)};
  return paths[hashed];
}

class OpenFile {
 public:
  explicit OpenFile(const fs::path& path) : fd_(::open(path.c_str(), O_RDONLY)) {
    TWELL_CHECK(fd_ >= 0, "cannot open {}", path.string());
  }
  ~OpenFile() { ::close(fd_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  int64_t read_all() const {
    static Buffer<std::byte> piece(int64_t{4} << 20);
    int64_t total = 0;
    for (ssize_t n; (n = ::read(fd_, piece.data(), static_cast<size_t>(piece.size()))) > 0;) {
      total += n;
    }
    return total;
  }
  void forget() const {
    ::fsync(fd_);
    ::posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
  }

 private:
  int fd_;
};

// Evicts the file from the page cache or loads it, and touches as much memory as loading needs: a
// virtual machine returns free memory to its host, and getting it back takes longer than a load.
void prepare(const fs::path& file, bool cold) {
  const OpenFile open(file);
  if (cold) open.forget();
  {
    const int64_t bytes = 4 * static_cast<int64_t>(fs::file_size(file));
    const Buffer<std::byte> memory(bytes);
    for (int64_t i = 0; i < bytes; i += 4096) memory[i] = std::byte{1};
  }
  if (!cold) open.read_all();
}

template <typename Run>
void time_each(benchmark::State& state, bool hashed, bool cold, const Run& run) {
  const fs::path file = checkpoint(hashed) / "model.safetensors";
  for (auto _ : state) {
    prepare(file, cold);
    const auto begin = std::chrono::steady_clock::now();
    run(file);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    state.SetIterationTime(seconds.count());
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(fs::file_size(file)));
}

void read_file_through(benchmark::State& state, bool cold) {
  time_each(state, false, cold,
            [](const fs::path& file) { benchmark::DoNotOptimize(OpenFile(file).read_all()); });
}
BENCHMARK_CAPTURE(read_file_through, cold, true)->UseManualTime()->Iterations(1);
BENCHMARK_CAPTURE(read_file_through, warm, false)->UseManualTime()->Iterations(1);

void load(benchmark::State& state, bool hashed, bool cold) {
  Context ctx;
  time_each(state, hashed, cold, [&ctx](const fs::path& file) {
    benchmark::DoNotOptimize(load_model(ctx, file.parent_path())->flat[0]);
  });
}
BENCHMARK_CAPTURE(load, foreign_cold, false, true)->UseManualTime()->Iterations(1);
BENCHMARK_CAPTURE(load, foreign_warm, false, false)->UseManualTime()->Iterations(1);
BENCHMARK_CAPTURE(load, hashed_cold, true, true)->UseManualTime()->Iterations(1);
BENCHMARK_CAPTURE(load, hashed_warm, true, false)->UseManualTime()->Iterations(1);

}  // namespace
}  // namespace twell

BENCHMARK_MAIN();
