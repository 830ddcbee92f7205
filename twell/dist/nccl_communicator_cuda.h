// SPDX-License-Identifier: Apache-2.0
// Collective calls of all ranks on device memory, over NCCL, one rank per GPU. Calls only enqueue
// on a stream; wait() is where the host waits, and the only place where a fault shows. All ranks
// make the same calls in the same order with equal sizes.
//
// The library (libnccl.so.2, 2.14 or later) is found at run time: where the system or
// LD_LIBRARY_PATH has it, as PyPI's nvidia-nccl wheels need.
//
// Errors: InputError when the library is missing; RankFault from wait() and the constructor when a
// rank fails, is lost or does not take part in time. The communicator is then aborted, which ends
// its kernels, and only its destructor may be called.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>

#include "twell/dist/communicator.h"

namespace twell {

// Why NCCL cannot be used; empty when it can.
std::string nccl_unavailable();

class NcclCommunicator {
 public:
  // Uses the current device. `ranks` must outlive it.
  explicit NcclCommunicator(Communicator& ranks);
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const;
  int size() const;
  std::string version() const;  // "2.27.5"

  // In place: of values [size() * piece], this rank's piece becomes the sum over all ranks. The
  // rest stays.
  void reduce_scatter_sum(float* values, int64_t piece, cudaStream_t stream);
  // In place: values of size() pieces of piece_bytes, each from its rank.
  void all_gather(void* values, int64_t piece_bytes, cudaStream_t stream);
  void all_reduce_max(uint8_t* values, int64_t count, cudaStream_t stream);
  // Piece r of `send` goes to rank r; piece r of `receive` comes from it. This rank's own piece is
  // copied too.
  void all_to_all(const __nv_bfloat16* send, __nv_bfloat16* receive, int64_t piece,
                  cudaStream_t stream);

  // Waits until a stream passes `done`. `computed` is an event that is passed once nothing but
  // communication is left in front of it: from then on the timeout runs.
  void wait(cudaEvent_t done, cudaEvent_t computed);

 private:
  class Comm;
  std::unique_ptr<Comm> comm_;
};

}  // namespace twell
