// SPDX-License-Identifier: Apache-2.0
// Which rank of how many this process is, as the launcher's environment variables say: torchrun's
// (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), Slurm's (srun) or
// OpenMPI's (mpirun). `twell train --ranks` sets torchrun's for the ranks it starts.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace twell {

struct RankIdentity {
  int rank = 0;
  int size = 1;
  int local_rank = 0;  // among the ranks on this machine
  int local_size = 1;
  std::string host;  // where rank 0 listens
  int port = 0;
  // Other programs may occupy `port`; rank 0 then takes one of the next ports, and the other ranks
  // look for it there. The first port to try is `port` itself.
  int ports = 1;
  std::string job;    // a rank of another job is turned away
  int listener = -1;  // rank 0: a listening socket that it inherited, or -1
  // GLOO_SOCKET_IFNAME: the network interface for CPU ranks' collectives. Empty: the one by which
  // this rank reaches rank 0.
  std::string interface;
};

// None when no launcher started this process. InputError when the variables contradict each other
// or one is missing. `variable` returns an environment variable, or null.
std::optional<RankIdentity> rank_identity(
    const std::function<const char*(const char* name)>& variable);

// A socket that listens on a free port of the loopback interface, for ranks on one machine.
struct LocalListener {
  LocalListener();  // InputError
  ~LocalListener();
  LocalListener(const LocalListener&) = delete;
  LocalListener& operator=(const LocalListener&) = delete;
  int socket = -1;
  int port = 0;
};

}  // namespace twell
