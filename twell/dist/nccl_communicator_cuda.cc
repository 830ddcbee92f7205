// SPDX-License-Identifier: Apache-2.0
#include "twell/dist/nccl_communicator_cuda.h"

#include "twell/base/cuda.h"

#if __has_include(<nccl.h>)
#include <dlfcn.h>
#include <nccl.h>

#include <exception>
#include <thread>

namespace twell {
namespace {

using Clock = std::chrono::steady_clock;

// NCCL's functions, from the library found at run time.
struct Nccl {
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) comm_init = nullptr;
  decltype(&ncclCommGetAsyncError) async_error = nullptr;
  decltype(&ncclCommAbort) comm_abort = nullptr;
  decltype(&ncclCommFinalize) comm_finalize = nullptr;
  decltype(&ncclCommDestroy) comm_destroy = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetLastError) last_error = nullptr;
  decltype(&ncclReduceScatter) reduce_scatter = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) recv = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;

  // The library stays loaded: its threads may outlive a communicator. Returns what is wrong.
  std::string load() {
    void* const library = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      return fmt::format(
          "NCCL was not found ({}): install libnccl2, or PyPI's nvidia-nccl-cu12 or -cu13 and add "
          "its folder nvidia/nccl/lib to LD_LIBRARY_PATH",
          ::dlerror());
    }
    std::string missing;
    const auto find = [&](auto& function, const char* name) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
      if (function == nullptr && missing.empty()) missing = name;
    };
    find(get_version, "ncclGetVersion");
    find(get_unique_id, "ncclGetUniqueId");
    find(comm_init, "ncclCommInitRankConfig");
    find(async_error, "ncclCommGetAsyncError");
    find(comm_abort, "ncclCommAbort");
    find(comm_finalize, "ncclCommFinalize");
    find(comm_destroy, "ncclCommDestroy");
    find(error_string, "ncclGetErrorString");
    find(last_error, "ncclGetLastError");
    find(reduce_scatter, "ncclReduceScatter");
    find(all_gather, "ncclAllGather");
    find(all_reduce, "ncclAllReduce");
    find(send, "ncclSend");
    find(recv, "ncclRecv");
    find(group_start, "ncclGroupStart");
    find(group_end, "ncclGroupEnd");
    if (missing.empty()) return {};
    return fmt::format("libnccl.so.2 is older than 2.14: it has no {}", missing);
  }
};

}  // namespace

class NcclCommunicator::Comm {
 public:
  explicit Comm(Communicator& ranks) : ranks_(ranks) {
    const std::string why = nccl_.load();
    TWELL_REQUIRE(why.empty(), "{}", why);
    ncclUniqueId id{};
    if (ranks.rank() == 0) check(nccl_.get_unique_id(&id), "ncclGetUniqueId");
    ranks.broadcast(std::as_writable_bytes(std::span(&id, 1)), 0);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;  // calls return at once, so that a lost rank cannot hold them
    check(nccl_.comm_init(&comm_, ranks.size(), id, ranks.rank(), &config), "connecting the GPUs");
  }

  ~Comm() {
    if (comm_ == nullptr) return;
    if (std::uncaught_exceptions() > exceptions_) {  // the other ranks do not come here
      nccl_.comm_abort(comm_);
      return;
    }
    // Without a fault all ranks come here, so that finalizing ends.
    const auto deadline = Clock::now() + std::chrono::seconds(10);
    ncclResult_t state = nccl_.comm_finalize(comm_);
    while (state == ncclInProgress && Clock::now() < deadline &&
           ranks_.rendezvous().fault().empty()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (nccl_.async_error(comm_, &state) != ncclSuccess) state = ncclSystemError;
    }
    if (state == ncclSuccess) {
      nccl_.comm_destroy(comm_);
    } else {
      nccl_.comm_abort(comm_);
    }
  }

  const Nccl& nccl() const { return nccl_; }
  ncclComm_t get() const {
    TWELL_CHECK(comm_ != nullptr, "a call after the communicator was aborted");
    return comm_;
  }
  Communicator& ranks() const { return ranks_; }

  // Waits until a call has been taken over, without waiting for what it enqueued.
  void check(ncclResult_t result, const char* what) {
    const auto deadline = Clock::now() + ranks_.rendezvous().timeout();
    while (result == ncclInProgress && comm_ != nullptr) {
      if (!ranks_.rendezvous().fault().empty()) fail(what);
      if (Clock::now() > deadline) fail(fmt::format("{} took too long", what));
      if (nccl_.async_error(comm_, &result) != ncclSuccess) break;
      std::this_thread::yield();
    }
    if (result != ncclSuccess) fail(fmt::format("{}: {}", what, reason(result)));
  }

  void wait(cudaEvent_t done, cudaEvent_t computed) {
    constexpr auto kPause = std::chrono::microseconds(20);
    bool only_communication = false;
    Clock::time_point deadline;
    for (int64_t round = 0;; ++round) {
      const cudaError_t state = cudaEventQuery(done);
      if (state == cudaSuccess) return;
      if (state != cudaErrorNotReady) TWELL_CUDA_CHECK(state);
      if (round % 64 == 0) {
        if (!ranks_.rendezvous().fault().empty()) fail("a step was given up");
        ncclResult_t result = ncclSuccess;
        if (nccl_.async_error(comm_, &result) != ncclSuccess ||
            (result != ncclSuccess && result != ncclInProgress)) {
          fail(fmt::format("NCCL failed: {}", reason(result)));
        }
        if (!only_communication && cudaEventQuery(computed) == cudaSuccess) {
          only_communication = true;
          deadline = Clock::now() + ranks_.rendezvous().timeout();
        }
        if (only_communication && Clock::now() > deadline)
          fail("a collective call on the GPU hangs");
      }
      std::this_thread::sleep_for(kPause);
    }
  }

 private:
  std::string reason(ncclResult_t result) const {
    return fmt::format("{} ({})", nccl_.error_string(result), nccl_.last_error(comm_));
  }
  [[noreturn]] void fail(const std::string& what) {
    if (comm_ != nullptr) nccl_.comm_abort(std::exchange(comm_, nullptr));
    ranks_.rendezvous().raise(what);
  }

  Communicator& ranks_;
  const int exceptions_ = std::uncaught_exceptions();
  Nccl nccl_;
  ncclComm_t comm_ = nullptr;
};

std::string nccl_unavailable() { return Nccl().load(); }

NcclCommunicator::NcclCommunicator(Communicator& ranks) : comm_(std::make_unique<Comm>(ranks)) {}
NcclCommunicator::~NcclCommunicator() = default;

int NcclCommunicator::rank() const { return comm_->ranks().rank(); }
int NcclCommunicator::size() const { return comm_->ranks().size(); }

std::string NcclCommunicator::version() const {
  int code = 0;
  comm_->nccl().get_version(&code);
  return fmt::format("{}.{}.{}", code / 10000, code / 100 % 100, code % 100);
}

void NcclCommunicator::reduce_scatter_sum(float* values, int64_t piece, cudaStream_t stream) {
  comm_->check(
      comm_->nccl().reduce_scatter(values, values + rank() * piece, static_cast<size_t>(piece),
                                   ncclFloat32, ncclSum, comm_->get(), stream),
      "a reduction of gradients");
}

void NcclCommunicator::all_gather(void* values, int64_t piece_bytes, cudaStream_t stream) {
  const auto* const mine = static_cast<const std::byte*>(values) + rank() * piece_bytes;
  comm_->check(comm_->nccl().all_gather(mine, values, static_cast<size_t>(piece_bytes), ncclUint8,
                                        comm_->get(), stream),
               "gathering weights");
}

void NcclCommunicator::all_reduce_max(uint8_t* values, int64_t count, cudaStream_t stream) {
  comm_->check(comm_->nccl().all_reduce(values, values, static_cast<size_t>(count), ncclUint8,
                                        ncclMax, comm_->get(), stream),
               "gathering active neurons");
}

void NcclCommunicator::all_to_all(const __nv_bfloat16* send, __nv_bfloat16* receive, int64_t piece,
                                  cudaStream_t stream) {
  constexpr const char* kWhat = "exchanging gradients";
  const Nccl& nccl = comm_->nccl();
  const auto count = static_cast<size_t>(piece);
  comm_->check(nccl.group_start(), kWhat);
  for (int peer = 0; peer < size(); ++peer) {
    // Within a group a call may return ncclInProgress; the group's end tells what became of it.
    for (const ncclResult_t result :
         {nccl.send(send + peer * piece, count, ncclBfloat16, peer, comm_->get(), stream),
          nccl.recv(receive + peer * piece, count, ncclBfloat16, peer, comm_->get(), stream)}) {
      if (result != ncclInProgress) comm_->check(result, kWhat);
    }
  }
  comm_->check(nccl.group_end(), kWhat);
}

void NcclCommunicator::wait(cudaEvent_t done, cudaEvent_t computed) { comm_->wait(done, computed); }

}  // namespace twell

#else  // no header of NCCL where this was built
namespace twell {

class NcclCommunicator::Comm {};

std::string nccl_unavailable() { return "this program was built without NCCL's header nccl.h"; }

NcclCommunicator::NcclCommunicator(Communicator&) { throw InputError(nccl_unavailable()); }
NcclCommunicator::~NcclCommunicator() = default;
int NcclCommunicator::rank() const { return 0; }
int NcclCommunicator::size() const { return 0; }
std::string NcclCommunicator::version() const { return {}; }
void NcclCommunicator::reduce_scatter_sum(float*, int64_t, cudaStream_t) {}
void NcclCommunicator::all_gather(void*, int64_t, cudaStream_t) {}
void NcclCommunicator::all_reduce_max(uint8_t*, int64_t, cudaStream_t) {}
void NcclCommunicator::all_to_all(const __nv_bfloat16*, __nv_bfloat16*, int64_t, cudaStream_t) {}
void NcclCommunicator::wait(cudaEvent_t, cudaEvent_t) {}

}  // namespace twell
#endif
