// SPDX-License-Identifier: Apache-2.0
// The output folder of a training run, owned by one process at a time:
//   OUT/checkpoints/step-NNNNNN/   the last few checkpoints, each whole or absent
//   OUT/checkpoint                 symbolic link to the newest of them
//   OUT/metrics.jsonl, OUT/tensorboard/
//   OUT/options.json               options of the run, which mark the folder as holding one
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

struct ResumeRequest {
  std::optional<int64_t> step;  // of the checkpoint to resume from; none: newest
  bool fall_back = false;       // skip damaged checkpoints and use the newest intact one
};

// The newest checkpoint where `folder` is that of a run, else `folder`. An empty path names no
// folder and stays empty.
std::filesystem::path checkpoint_folder(const std::filesystem::path& folder);

class RunFolder {
 public:
  // Creates the folder and takes its lock. InputError when another process holds it; when the
  // folder holds a run with checkpoints and `resume` is false; when it holds no run and `resume` is
  // true.
  RunFolder(const std::filesystem::path& path, bool resume);
  // For ranks other than the first, which owns the folder: takes no lock and only reads.
  explicit RunFolder(const std::filesystem::path& path) : path_(path) {}
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path options_path() const { return path_ / "options.json"; }
  std::filesystem::path metrics_path() const { return path_ / "metrics.jsonl"; }
  std::filesystem::path link_path() const { return path_ / "checkpoint"; }

  // Whether an earlier process began the run and ended before its first checkpoint.
  bool begins_again() const { return begins_again_; }
  // Marks the folder as holding a run and saves `options` for resuming.
  void begin(const std::string& options) const;
  std::optional<Checkpoint> latest() const;
  // The checkpoint to resume from, after reading it in full and finding it intact. None when the
  // run was ended before its first checkpoint: it begins again. InputError when the checkpoint does
  // not exist any more or is damaged; the message then names the newest intact one.
  std::optional<Checkpoint> resume_point(const ResumeRequest& request) const;
  // Bytes that are free for this user in the folder's file system; -1: unknown.
  int64_t free_bytes() const;
  // The number of checkpoints that are there.
  int64_t checkpoints() const;
  // Makes the checkpoint of this step, from which the run continues, the newest: points the link to
  // it and removes those of later steps.
  void discard_after(int64_t step) const;
  // Writes a checkpoint through fill(folder), points the link to it, and removes all but the newest
  // `keep_last`. On failure the earlier checkpoints and the link stay unchanged.
  Checkpoint save(int64_t step, int64_t keep_last,
                  const std::function<void(const std::filesystem::path&)>& fill) const;

 private:
  std::filesystem::path path_;
  int lock_ = -1;
  bool begins_again_ = false;
};

}  // namespace twell
