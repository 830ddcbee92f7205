// SPDX-License-Identifier: Apache-2.0
#include "twell/dist/rank_identity.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <sstream>

#include "twell/base/error.h"

namespace twell {
namespace {

constexpr int kPortsToTry = 16;

class Variables {
 public:
  explicit Variables(const std::function<const char*(const char*)>& variable)
      : variable_(variable) {}

  bool has(const char* name) const { return variable_(name) != nullptr; }
  std::string text(const char* name, const std::string& otherwise = {}) const {
    const char* const value = variable_(name);
    return value == nullptr || *value == '\0' ? otherwise : value;
  }
  int number(const char* name, int lowest, int highest) const {
    const std::string value = text(name);
    TWELL_REQUIRE(!value.empty(), "the launcher set no {}", name);
    int number = -1;
    const auto parsed = std::from_chars(value.data(), value.data() + value.size(), number);
    TWELL_REQUIRE(parsed.ec == std::errc() && parsed.ptr == value.data() + value.size() &&
                      number >= lowest && number <= highest,
                  "{} must be a number between {} and {}, got '{}'", name, lowest, highest, value);
    return number;
  }

 private:
  const std::function<const char*(const char*)>& variable_;
};

constexpr int kMostRanks = 1 << 16;

// A port between 20,000 and 39,999 for a job, so that two jobs on a machine seldom meet.
int port_of_job(const std::string& job) {
  uint32_t hash = 2166136261u;  // FNV-1a
  for (const unsigned char c : job) hash = (hash ^ c) * 16777619u;
  return 20'000 + static_cast<int>(hash % 20'000u);
}

// "node[03-06,09]-ib,login" -> "node03-ib"
std::string first_host(const std::string& list) {
  std::string host;
  for (size_t at = 0; at < list.size() && list[at] != ',';) {
    if (list[at] != '[') {
      host += list[at++];
      continue;
    }
    const size_t close = std::min(list.find(']', at), list.size());
    host += list.substr(at + 1, list.find_first_of("-,]", at) - at - 1);
    at = close + 1;
  }
  return host;
}

// Slurm's tasks on a node: of "4(x2),1" nodes 0 and 1 have 4 and node 2 has 1.
int tasks_on_node(const std::string& list, int node) {
  std::istringstream runs(list);
  for (std::string run; std::getline(runs, run, ',');) {
    int tasks = 0, nodes = 1;
    const char* const end = run.data() + run.size();
    const auto parsed = std::from_chars(run.data(), end, tasks);
    TWELL_REQUIRE(parsed.ec == std::errc() && tasks >= 1 && tasks <= kMostRanks,
                  "SLURM_STEP_TASKS_PER_NODE must be numbers of tasks, got '{}'", list);
    if (const size_t times = run.find("(x"); times != std::string::npos) {
      std::from_chars(run.data() + times + 2, end, nodes);
    }
    if ((node -= nodes) < 0) return tasks;
  }
  throw InputError(fmt::format("SLURM_STEP_TASKS_PER_NODE '{}' has no node SLURM_NODEID", list));
}

RankIdentity from_torchrun(const Variables& variables) {
  RankIdentity identity;
  identity.size = variables.number("WORLD_SIZE", 1, kMostRanks);
  identity.rank = variables.number("RANK", 0, kMostRanks);
  const bool local = variables.has("LOCAL_RANK");
  identity.local_rank = local ? variables.number("LOCAL_RANK", 0, kMostRanks) : 0;
  identity.local_size =
      variables.has("LOCAL_WORLD_SIZE") ? variables.number("LOCAL_WORLD_SIZE", 1, kMostRanks) : 1;
  identity.host = variables.text("MASTER_ADDR", "127.0.0.1");
  identity.port = variables.number("MASTER_PORT", 1, 65535);
  // The port tells apart jobs without a name that meet on a machine.
  identity.job = fmt::format("{}.{}.{}", variables.text("TORCHELASTIC_RUN_ID"),
                             variables.text("TORCHELASTIC_RESTART_COUNT"), identity.port);
  // torchrun's own store listens on MASTER_PORT.
  if (variables.has("TORCHELASTIC_RUN_ID")) ++identity.port;
  identity.ports = kPortsToTry;
  if (variables.has("TWELL_LISTENER")) {
    identity.ports = 1;
    if (identity.rank == 0) identity.listener = variables.number("TWELL_LISTENER", 0, 1 << 20);
  }
  return identity;
}

void address_of_job(const Variables& variables, const std::string& host, RankIdentity& identity) {
  identity.host = variables.text("MASTER_ADDR", host);
  identity.port = variables.has("MASTER_PORT") ? variables.number("MASTER_PORT", 1, 65535)
                                               : port_of_job(identity.job);
  identity.ports = kPortsToTry;
}

RankIdentity from_slurm(const Variables& variables) {
  RankIdentity identity;
  identity.size = variables.number("SLURM_STEP_NUM_TASKS", 1, kMostRanks);
  identity.rank = variables.number("SLURM_PROCID", 0, kMostRanks);
  identity.local_rank = variables.number("SLURM_LOCALID", 0, kMostRanks);
  if (variables.has("SLURM_STEP_TASKS_PER_NODE")) {
    const int node =
        variables.has("SLURM_NODEID") ? variables.number("SLURM_NODEID", 0, kMostRanks) : 0;
    identity.local_size = tasks_on_node(variables.text("SLURM_STEP_TASKS_PER_NODE"), node);
  }
  // A job keeps its number and that of its step when Slurm starts it again.
  identity.job =
      fmt::format("{}.{}.{}", variables.text("SLURM_JOB_ID"), variables.text("SLURM_STEP_ID"),
                  variables.text("SLURM_RESTART_COUNT"));
  const std::string nodes =
      variables.text("SLURM_STEP_NODELIST", variables.text("SLURM_NODELIST", "127.0.0.1"));
  address_of_job(variables, first_host(nodes), identity);
  return identity;
}

RankIdentity from_openmpi(const Variables& variables) {
  RankIdentity identity;
  identity.size = variables.number("OMPI_COMM_WORLD_SIZE", 1, kMostRanks);
  identity.rank = variables.number("OMPI_COMM_WORLD_RANK", 0, kMostRanks);
  identity.local_rank = variables.number("OMPI_COMM_WORLD_LOCAL_RANK", 0, kMostRanks);
  identity.local_size = variables.number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMostRanks);
  identity.job = variables.text("PMIX_NAMESPACE", variables.text("OMPI_MCA_ess_base_jobid"));
  TWELL_REQUIRE(identity.local_size == identity.size || variables.has("MASTER_ADDR"),
                "mpirun does not say where rank 0 runs: add -x MASTER_ADDR=HOST with its host");
  address_of_job(variables, "127.0.0.1", identity);
  return identity;
}

}  // namespace

std::optional<RankIdentity> rank_identity(const std::function<const char*(const char*)>& variable) {
  const Variables variables(variable);
  std::optional<RankIdentity> identity;
  if (variables.has("RANK") && variables.has("WORLD_SIZE")) {
    identity = from_torchrun(variables);
  } else if (variables.has("OMPI_COMM_WORLD_RANK")) {
    identity = from_openmpi(variables);
  } else if (variables.has("SLURM_PROCID") && variables.has("SLURM_STEP_NUM_TASKS")) {
    identity = from_slurm(variables);
  }
  if (!identity) return identity;
  if (std::string& host = identity->host; host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);  // an IPv6 address as URLs have it
  }
  identity->interface = variables.text("GLOO_SOCKET_IFNAME");
  TWELL_REQUIRE(identity->rank < identity->size && identity->local_rank < identity->size,
                "the launcher says rank {} (local rank {}) of {}", identity->rank,
                identity->local_rank, identity->size);
  constexpr int kLastPort = 65535;
  TWELL_REQUIRE(identity->port <= kLastPort,
                "the port after MASTER_PORT {} is needed, and there is none: set a lower one",
                identity->port - 1);
  identity->ports = std::min(identity->ports, kLastPort + 1 - identity->port);
  return identity;
}

LocalListener::LocalListener() {
  socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  const bool listens = socket >= 0 && ::bind(socket, generic, size) == 0 &&
                       ::listen(socket, SOMAXCONN) == 0 &&
                       ::getsockname(socket, generic, &size) == 0;
  TWELL_REQUIRE(listens, "cannot listen on the loopback interface: {}", std::strerror(errno));
  port = ntohs(address.sin_port);
}

LocalListener::~LocalListener() {
  if (socket >= 0) ::close(socket);
}

}  // namespace twell
