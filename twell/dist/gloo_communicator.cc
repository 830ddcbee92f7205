// SPDX-License-Identifier: Apache-2.0
// Collectives composed of Gloo's sends and receives between pairs of ranks: every rank sends each
// other rank what it needs, and adds what it receives in the order of ranks. Gloo's own reductions
// add in an order that depends on the algorithm, and cannot be interrupted from another thread.
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <net/if.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>

#include "twell/dist/communicator.h"

namespace twell {
namespace {

using gloo::transport::UnboundBuffer;

// Values that a rank receives from each other rank at a time in a reduction.
constexpr int64_t kReductionBytes = int64_t{1} << 20;

// Gloo exchanges the addresses of its sockets through this.
class AddressStore : public gloo::rendezvous::Store {
 public:
  explicit AddressStore(Rendezvous& rendezvous) : rendezvous_(rendezvous) {}
  void set(const std::string& key, const std::vector<char>& data) override {
    rendezvous_.put("gloo/" + key, std::string_view(data.data(), data.size()));
  }
  std::vector<char> get(const std::string& key) override {
    const std::string value = rendezvous_.get("gloo/" + key);
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) rendezvous_.get("gloo/" + key);
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override {
    wait(keys);
  }

 private:
  Rendezvous& rendezvous_;
};

// Newer versions of Gloo share the store and the device, older ones borrow them.
template <typename Context>
void connect_mesh(Context& context, std::shared_ptr<AddressStore> store,
                  std::shared_ptr<gloo::transport::Device> device) {
  std::shared_ptr<gloo::rendezvous::Store> shared = std::move(store);
  if constexpr (requires { context.connectFullMesh(*shared, device); }) {
    context.connectFullMesh(*shared, device);
  } else {
    context.connectFullMesh(shared, device);
  }
}

// Listens for the other ranks at this machine's address, or on the interface that was named.
std::shared_ptr<gloo::transport::Device> open_device(const Rendezvous& rendezvous) {
  gloo::transport::tcp::attr attributes;
  const std::string& interface = rendezvous.identity().interface;
  TWELL_REQUIRE(interface.empty() || ::if_nametoindex(interface.c_str()) != 0,
                "GLOO_SOCKET_IFNAME: this machine has no network interface {}", interface);
  const std::string& address = rendezvous.address();
  TWELL_REQUIRE(!interface.empty() || !address.starts_with("fe80:"),
                "this machine reached rank 0 from {}, which is valid on one link only: give "
                "another address as MASTER_ADDR, or the interface as GLOO_SOCKET_IFNAME",
                address);
  attributes.iface = interface;
  if (interface.empty()) attributes.hostname = address;
  try {
    return gloo::transport::tcp::CreateDevice(attributes);
  } catch (const std::exception& error) {
    TWELL_REQUIRE(interface.empty(), "GLOO_SOCKET_IFNAME: network interface {} has no address",
                  interface);
    throw InputError(
        fmt::format("cannot use this machine's address {}: {}", address, error.what()));
  }
}

class GlooCommunicator : public Communicator {
 public:
  explicit GlooCommunicator(Rendezvous& rendezvous)
      : rendezvous_(rendezvous),
        rank_(rendezvous.identity().rank),
        size_(rendezvous.identity().size) {
    constexpr const char* kConnecting =
        "connecting the ranks; the ports in net.ipv4.ip_local_port_range must be open between "
        "their machines";
    guarded(kConnecting, [&] {
      const auto device = open_device(rendezvous);
      context_ = std::make_shared<gloo::rendezvous::Context>(rank_, size_);
      // Gloo waits five times as long for a connection.
      context_->setTimeout(rendezvous.timeout() / 5);
      connect_mesh(*context_, std::make_shared<AddressStore>(rendezvous), device);
    });
    rendezvous.on_fault(this, [this] { end_wait(); });
  }

  ~GlooCommunicator() override { rendezvous_.on_fault(this, {}); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Rendezvous& rendezvous() override { return rendezvous_; }

  void all_reduce_sum(std::span<double> values) override {
    const std::vector<double> all = all_gather_values(values);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = 0.0;
      for (size_t at = i; at < all.size(); at += values.size()) values[i] += all[at];
    }
  }

  void all_reduce_max(std::span<uint8_t> values) override {
    std::vector<uint8_t> all(values.size() * static_cast<size_t>(size_));
    all_gather_bytes(std::as_bytes(values), std::as_writable_bytes(std::span(all)));
    for (size_t at = 0; at < all.size(); ++at) {
      uint8_t& value = values[at % values.size()];
      value = std::max(value, all[at]);
    }
  }

  void reduce_scatter_sum(std::span<float> values) override {
    const auto total = static_cast<int64_t>(values.size());
    const int64_t most = kReductionBytes / static_cast<int64_t>(sizeof(float));
    const int64_t longest = piece_of(total, size_, 0).size();
    std::vector<float> received(static_cast<size_t>(std::min(most, longest) * size_));
    for (int64_t first = 0; first < longest; first += most) {
      const auto part = [&](int rank) {
        const PieceRange piece = piece_of(total, size_, rank);
        const int64_t begin = std::min(piece.begin + first, piece.end);
        return values.subspan(static_cast<size_t>(begin),
                              static_cast<size_t>(std::min(most, piece.end - begin)));
      };
      const std::span<float> mine = part(rank_);
      const auto slot_of = [&](int rank) {
        return std::span(received).subspan(static_cast<size_t>(rank) * mine.size(), mine.size());
      };
      exchange([&](int to) { return std::as_writable_bytes(part(to)); },
               [&](int from) { return std::as_writable_bytes(slot_of(from)); });
      std::copy(mine.begin(), mine.end(), slot_of(rank_).begin());
      for (size_t i = 0; i < mine.size(); ++i) {
        float sum = received[i];
        for (size_t rank = 1; rank < static_cast<size_t>(size_); ++rank) {
          sum += received[rank * mine.size() + i];
        }
        mine[i] = sum;
      }
    }
  }

  std::unique_ptr<PendingCall> start_all_gather(std::span<float> values) override {
    const auto part = [&](int rank) {
      const PieceRange piece = piece_of(static_cast<int64_t>(values.size()), size_, rank);
      return std::as_writable_bytes(
          values.subspan(static_cast<size_t>(piece.begin), static_cast<size_t>(piece.size())));
    };
    return start([&](int) { return part(rank_); }, part);
  }

  void all_gather_bytes(std::span<const std::byte> mine, std::span<std::byte> all) override {
    TWELL_CHECK(all.size() == mine.size() * static_cast<size_t>(size_),
                "{} bytes for {} ranks of {}", all.size(), size_, mine.size());
    const auto part = [&](int rank) {
      return all.subspan(static_cast<size_t>(rank) * mine.size(), mine.size());
    };
    std::copy(mine.begin(), mine.end(), part(rank_).begin());
    exchange([&](int) { return part(rank_); }, part);
  }

  void broadcast(std::span<std::byte> bytes, int root) override {
    const std::span<std::byte> nothing;
    exchange([&](int) { return rank_ == root ? bytes : nothing; },
             [&](int from) { return from == root ? bytes : nothing; });
  }

  void barrier() override {
    std::vector<std::byte> all(static_cast<size_t>(size_));
    all_gather_bytes(std::span(all).first(1), all);
  }

 private:
  static constexpr const char* kFailed = "a collective call failed";
  using Part = std::function<std::span<std::byte>(int rank)>;

  class Exchange : public PendingCall {
   public:
    explicit Exchange(GlooCommunicator& owner) : owner_(owner) {}
    void wait() override {
      owner_.guarded(kFailed, [this] {
        for (const auto& buffer : receives) owner_.wait(*buffer, /*receive=*/true);
        for (const auto& buffer : sends) owner_.wait(*buffer, /*receive=*/false);
      });
    }

    std::vector<std::unique_ptr<UnboundBuffer>> receives, sends;

   private:
    GlooCommunicator& owner_;
  };

  // Starts to send outgoing(r) to and to receive incoming(r) from every other rank r. Empty parts
  // are not sent.
  std::unique_ptr<PendingCall> start(const Part& outgoing, const Part& incoming) {
    rendezvous_.enter_call();
    rendezvous_.check();
    const uint64_t slot = next_slot_++;
    auto call = std::make_unique<Exchange>(*this);
    guarded(kFailed, [&] {
      // Nearest rank first, so that not all ranks send to the same one.
      for (int distance = 1; distance < size_; ++distance) {
        const int from = (rank_ + size_ - distance) % size_, to = (rank_ + distance) % size_;
        const std::span<std::byte> in = incoming(from), out = outgoing(to);
        if (!in.empty()) {
          call->receives.push_back(context_->createUnboundBuffer(in.data(), in.size()));
          call->receives.back()->recv(from, slot);
        }
        if (!out.empty()) {
          call->sends.push_back(context_->createUnboundBuffer(out.data(), out.size()));
          call->sends.back()->send(to, slot);
        }
      }
    });
    return call;
  }

  void exchange(const Part& outgoing, const Part& incoming) { start(outgoing, incoming)->wait(); }

  void wait(UnboundBuffer& buffer, bool receive) {
    {
      const std::lock_guard lock(mutex_);
      if (aborted_) rendezvous_.check();
      waiting_ = &buffer;
      waiting_receives_ = receive;
    }
    const auto done = [this] {
      const std::lock_guard lock(mutex_);
      waiting_ = nullptr;
    };
    bool complete = false;
    try {
      complete =
          receive ? buffer.waitRecv(rendezvous_.timeout()) : buffer.waitSend(rendezvous_.timeout());
    } catch (...) {
      done();
      throw;
    }
    done();
    if (!complete) rendezvous_.check();
  }

  // The rendezvous calls this on its own thread; the wait in progress ends with an exception.
  void end_wait() {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    if (waiting_ == nullptr) return;
    if (waiting_receives_) {
      waiting_->abortWaitRecv();
    } else {
      waiting_->abortWaitSend();
    }
  }

  template <typename Call>
  void guarded(const char* what, const Call& call) {
    try {
      call();
    } catch (const gloo::Exception& error) {
      std::string reason = error.what();  // "[file:line] reason"
      if (const size_t end = reason.find("] "); end != std::string::npos) {
        reason = reason.substr(end + 2);
      }
      rendezvous_.raise(fmt::format("{} ({})", what, reason));
    }
  }

  Rendezvous& rendezvous_;
  const int rank_, size_;
  std::shared_ptr<gloo::rendezvous::Context> context_;
  uint64_t next_slot_ = 0;
  std::mutex mutex_;
  UnboundBuffer* waiting_ = nullptr;
  bool waiting_receives_ = false;
  bool aborted_ = false;
};

}  // namespace

std::unique_ptr<Communicator> gloo_communicator(Rendezvous& rendezvous) {
  return std::make_unique<GlooCommunicator>(rendezvous);
}

}  // namespace twell
