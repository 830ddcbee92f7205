// SPDX-License-Identifier: Apache-2.0
// The processes (ranks) of a training run: starting them on this machine, and a process's place
// among them.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "twell/dist/communicator.h"
#include "twell/dist/rank_identity.h"
#include "twell/dist/rendezvous.h"

namespace twell::cli {

// This process as its launcher describes it; rank 0 of 1 without a launcher. InputError.
RankIdentity process_identity();
// Whether launch_ranks started this process.
bool started_by_launch_ranks();

// Whether torchrun or Slurm (a requeued job) has started this process again.
bool started_again();
// Whether a run can continue in `out`; one that has no checkpoint yet begins again.
bool can_continue(const std::filesystem::path& out);
// Whether this process prints the error that ends it: of the processes that launch_ranks started,
// only the first that asks. The others end because of the same fault.
bool prints_error();

// The number of the GPU that a rank uses, of `devices` that it sees. InputError when it has none of
// its own.
int device_of_rank(const RankIdentity& identity, int devices);

struct Launch {
  int64_t ranks = 0;
  int64_t max_restarts = 0;
  std::filesystem::path out;  // of the run that restarts continue
};
// Runs this command again as `ranks` processes and waits for them; returns the exit code. Signals
// are passed on to all of them, which save, and the exit code is 130, as it is when a signal
// reaches one of them alone. When one is lost, the others end too, and the run is resumed from its
// last checkpoint, max_restarts times.
int launch_ranks(const Launch& launch);

// This process among the ranks of a run; does nothing for a single one.
class RankGroup {
 public:
  // Connects all ranks. RankFault.
  RankGroup(const RankIdentity& identity, std::chrono::milliseconds timeout);
  ~RankGroup();

  bool first() const { return identity_.rank == 0; }
  const RankIdentity& identity() const { return identity_; }
  Communicator* communicator() const { return communicator_.get(); }  // null for a single rank
  // Passes rank 0's text to all ranks; waits for it for as long as all are alive.
  std::string from_first(std::string_view key, const std::string& text) const;
  // Returns when all ranks have the same values under the same names. AgreedError on all ranks
  // names the first rank and value that differ from rank 0's.
  void require_equal(std::string_view key, const std::map<std::string, std::string>& values) const;
  // AgreedError on all ranks when a rank sees another folder at this path than rank 0.
  void require_shared(const std::filesystem::path& folder) const;
  // Returns when all ranks have come here, which may take any time.
  void wait_for_all() const;
  // Tells the other ranks that this one fails.
  void fail(std::string_view why) const;

 private:
  RankIdentity identity_;
  std::unique_ptr<Rendezvous> rendezvous_;
  std::unique_ptr<Communicator> communicator_;
};

}  // namespace twell::cli
