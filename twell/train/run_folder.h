// SPDX-License-Identifier: Apache-2.0
// The output folder of a training run, owned by one process at a time:
//   OUT/checkpoints/step-NNNNNN/   the last few checkpoints, each whole or absent
//   OUT/checkpoint                 symbolic link to the newest of them
//   OUT/metrics.jsonl, OUT/tensorboard/
//   OUT/options.json               what marks the folder as holding a run
//   OUT/.lock                      held while a process works in the folder
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

namespace twell {

struct Checkpoint {
  int64_t step = 0;
  std::filesystem::path folder;
};

class RunFolder {
 public:
  // Creates the folder and takes its lock. InputError when another process holds it; when the
  // folder holds a run and `resume` is false; when it holds none and `resume` is true.
  RunFolder(const std::filesystem::path& path, bool resume);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path options_path() const { return path_ / "options.json"; }
  std::filesystem::path metrics_path() const { return path_ / "metrics.jsonl"; }
  std::filesystem::path link_path() const { return path_ / "checkpoint"; }

  // From now on the folder holds a run; `options` is kept for a resume.
  void begin(const std::string& options) const;
  std::optional<Checkpoint> latest() const;
  // Writes a checkpoint through fill(folder), points the link to it, removes all but the newest
  // `keep_last`. Any failure leaves the earlier checkpoints and the link as they were.
  Checkpoint save(int64_t step, int64_t keep_last,
                  const std::function<void(const std::filesystem::path&)>& fill) const;

 private:
  std::filesystem::path path_;
  int lock_ = -1;
};

}  // namespace twell
