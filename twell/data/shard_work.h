// SPDX-License-Identifier: Apache-2.0
// The folder `TARGET.partial`, in which shards are made until all are there and it takes TARGET's
// place. It outlives the process, so that an interrupted job can go on:
//   source.json        what the shards are made from: options, and each file with size and time
//   tokenizer.json     as the caller wrote it
//   parts/00012.json   a finished part: its inputs, counts and shards; written after these
//   *.bin              shards, each whole or absent
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "twell/data/shard_manifest.h"
#include "twell/data/text_source.h"

namespace twell {

struct FinishedPart {
  int64_t number = 0;  // in the names of its files
  // A line per unit: "BYTES NANOSECONDS PATH", and the row groups if not all. Equal lines, equal
  // text.
  std::vector<std::string> inputs;
  TextSkips skipped;
  ShardManifest manifest;  // of this part alone
};

class ShardWork {
 public:
  // Takes over the finished parts of an earlier job, or begins an empty folder, and locks it.
  // `options`: whatever decides the shards besides the files. InputError: another process works in
  // the folder; a part was finished with other options; or its input has changed, unless
  // `redo_changed` drops it. With `replace` the folder is emptied instead of refused.
  ShardWork(const std::filesystem::path& target, const nlohmann::json& options,
            const TextSource& source, const std::vector<std::vector<TextUnit>>& parts,
            bool redo_changed, bool replace);
  ~ShardWork();  // removes the folder when no part is finished
  ShardWork(const ShardWork&) = delete;
  ShardWork& operator=(const ShardWork&) = delete;

  const std::filesystem::path& folder() const { return folder_; }
  // One entry per part of the job. Unfinished ones have a number, their inputs and no shards.
  const std::vector<FinishedPart>& parts() const { return parts_; }
  bool is_finished(size_t index) const;
  int64_t finished() const;
  // Records that the shards of a part are on disk. Several threads may call it for different parts.
  void finish(size_t index, ShardManifest manifest, const TextSkips& skipped);
  void discard();  // forgets the finished parts, which are of no use
  // Writes the manifest, removes files that it does not name, and moves the folder to TARGET, which
  // it replaces.
  void place(const ShardManifest& manifest, const TextSkips& skipped);

 private:
  // Holds the lock on a folder, which moves with it.
  class Lock {
   public:
    explicit Lock(const std::filesystem::path& folder);
    ~Lock();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    int fd_;
  };
  std::vector<FinishedPart> read_parts() const;
  void take_over(const std::vector<FinishedPart>& found, const TextSource& source,
                 bool redo_changed);
  void number_the_rest();
  void remove_all_but(const ShardManifest& kept) const;

  std::filesystem::path target_, folder_;
  std::unique_ptr<Lock> lock_;
  std::string source_json_;  // without what was skipped
  std::vector<FinishedPart> parts_;
  std::vector<bool> finished_;
  mutable std::mutex mutex_;  // of parts_ and finished_
  bool placed_ = false;
};

// Whether the folder holds complete shards made from these files with these options.
bool shards_made_from(const std::filesystem::path& folder, const nlohmann::json& options,
                      const TextSource& source);

}  // namespace twell
