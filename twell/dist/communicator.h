// SPDX-License-Identifier: Apache-2.0
// Collective calls of all ranks on host memory, over Gloo. All ranks make the same calls in the
// same order with equal sizes. Sums are added in the order of ranks, so that they are the same bits
// in every run and on every rank.
//
// Errors: RankFault when a rank fails, is lost, or has not entered the call after the timeout. All
// later calls then fail too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "twell/dist/rendezvous.h"

namespace twell {

// Elements [begin, end) of an array.
struct PieceRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};
// Piece `rank` of an array of `size` elements cut into `ranks` pieces. All have the same size, a
// multiple of 8 elements (16 bytes of bf16), except that the last ones may be shorter or empty.
PieceRange piece_of(int64_t size, int ranks, int rank);

// A collective call that goes on while its caller does something else. Its values must outlive it.
class PendingCall {
 public:
  virtual ~PendingCall() = default;  // without wait(): the call is given up
  // Returns when this rank's values are complete and no longer read.
  virtual void wait() = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual Rendezvous& rendezvous() = 0;

  virtual void all_reduce_sum(std::span<double> values) = 0;
  virtual void all_reduce_max(std::span<uint8_t> values) = 0;
  // In place, of the pieces of piece_of: this rank's piece becomes the sum over all ranks; the rest
  // of `values` stays.
  virtual void reduce_scatter_sum(std::span<float> values) = 0;
  // Starts all_gather below. Until the call's wait() returns, nobody may write to the values, nor
  // read the pieces of other ranks. Further calls may be made meanwhile.
  virtual std::unique_ptr<PendingCall> start_all_gather(std::span<float> values) = 0;
  // all [size() * mine.size()]: the bytes of every rank in order.
  virtual void all_gather_bytes(std::span<const std::byte> mine, std::span<std::byte> all) = 0;
  virtual void broadcast(std::span<std::byte> bytes, int root) = 0;
  // Returns when every rank has called it.
  virtual void barrier() = 0;

  // On top of the calls above.
  // In place: every rank's piece is copied from that rank.
  void all_gather(std::span<float> values) { start_all_gather(values)->wait(); }
  std::vector<double> all_gather_values(std::span<const double> mine);  // [size() * mine.size()]
};

// Connects all ranks with each other. The rendezvous must outlive the communicator. Gloo writes to
// sockets that a lost rank may have closed, so the process must ignore SIGPIPE.
std::unique_ptr<Communicator> gloo_communicator(Rendezvous& rendezvous);

}  // namespace twell
