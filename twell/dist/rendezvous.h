// SPDX-License-Identifier: Apache-2.0
// Where the ranks of a run meet: rank 0 listens, all ranks (itself included) connect by TCP. It
// passes small values between them, and notices when a rank ends, stops answering or reports a
// failure, which every other rank then learns within moments as one line that names the rank and
// its step.
//
// Every rank sends a sign of life every few seconds from a thread of its own. Silence for three
// quarters of the timeout is a fault. Rank 0 is watched by all others.
//
// Trust: whoever can reach the port and knows the job's name can join in place of a rank. Run it
// within a machine or a cluster's own network.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "twell/base/error.h"
#include "twell/dist/rank_identity.h"

namespace twell {

// Another rank failed. what() is one line that names the rank and its step.
class RankFault : public Error {
 public:
  using Error::Error;
};

// An error that every rank throws, so that none has to tell the others.
class AgreedError : public InputError {
 public:
  using InputError::InputError;
};

class Rendezvous {
 public:
  // Returns when all ranks have connected. RankFault when one is missing after `timeout`;
  // InputError when rank 0 cannot listen.
  Rendezvous(const RankIdentity& identity, std::chrono::milliseconds timeout);
  // Leaves. Rank 0 waits until the others have left too, or a fault is known.
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  const RankIdentity& identity() const;
  std::chrono::milliseconds timeout() const;
  // The address of this machine by which the other ranks reach it.
  const std::string& address() const;

  // A key is put once. get() waits for it for as long as all ranks are alive; RankFault.
  void put(std::string_view key, std::string_view value);
  std::string get(std::string_view key);

  // Waits, like get(), until every rank has called it. Returns the first text that is not empty, as
  // "rank R: text", the same to all; empty when all are. For work without a known duration, such as
  // writing files. All ranks call it in the same order.
  std::string agree(std::string_view mine);

  // What the signs of life report: the step being computed, and the number of collective calls that
  // this rank has entered.
  void set_step(int64_t step);
  void enter_call();

  // Tells the other ranks that this one fails, in one line.
  void fail(std::string_view why);
  std::string fault() const;  // empty while all ranks are alive
  void check() const;         // RankFault once there is a fault
  // Called once, on another thread, when there is a fault (at once if there is one already). Each
  // owner has one function; an empty one removes it, and no call is running afterwards.
  void on_fault(const void* owner, std::function<void()> call);
  // A collective call has failed. Throws RankFault with the fault, which it awaits for a moment;
  // without one it names the rank that is behind the others.
  [[noreturn]] void raise(std::string_view what);

 private:
  class Server;
  class Client;
  std::unique_ptr<Server> server_;  // on rank 0
  std::unique_ptr<Client> client_;
  int64_t agreements_ = 0;
};

}  // namespace twell
