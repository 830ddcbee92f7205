// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of a test.
#pragma once

#include <chrono>
#include <csignal>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "twell/dist/communicator.h"
#include "twell/dist/rank_identity.h"
#include "twell/dist/rendezvous.h"

namespace twell {

// A rank of a job on this machine whose rank 0 listens on `listener`.
inline RankIdentity local_identity(int rank, int ranks, const LocalListener& listener,
                                   std::string job = {}) {
  RankIdentity identity;
  identity.rank = identity.local_rank = rank;
  identity.size = identity.local_size = ranks;
  identity.host = "127.0.0.1";
  identity.port = listener.port;
  identity.job = std::move(job);
  if (rank == 0) identity.listener = listener.socket;
  return identity;
}

// Calls body(rendezvous) on a thread for each rank, and returns what each threw, or "".
inline std::vector<std::string> run_rendezvous(
    int ranks, const std::function<void(Rendezvous&)>& body,
    std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  std::signal(SIGPIPE, SIG_IGN);  // as gloo_communicator() asks for
  const LocalListener listener;
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Rendezvous rendezvous(local_identity(rank, ranks, listener), timeout);
        try {
          body(rendezvous);
        } catch (const RankFault&) {
          throw;
        } catch (const std::exception& error) {
          rendezvous.fail(error.what());
          throw;
        }
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline std::vector<std::string> run_ranks(
    int ranks, const std::function<void(Communicator&)>& body,
    std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  return run_rendezvous(
      ranks, [&](Rendezvous& rendezvous) { body(*gloo_communicator(rendezvous)); }, timeout);
}

}  // namespace twell
