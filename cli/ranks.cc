// SPDX-License-Identifier: Apache-2.0
#include "cli/ranks.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <vector>

#include "cli/options.h"
#include "cli/process.h"
#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/train/run_folder.h"

extern char** environ;

namespace twell::cli {
namespace fs = std::filesystem;
namespace {

using Clock = std::chrono::steady_clock;

// The launcher's exit code after any signal, so that a job script knows a run to resume by one
// code.
constexpr int kExitStopped = 130;

constexpr const char* kRestartCounts[] = {"TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"};
constexpr const char* kListener = "TWELL_LISTENER";
// The descriptor of a pipe with one byte: the rank that reads it prints its error.
constexpr const char* kErrorToken = "TWELL_ERROR_TOKEN";

// Time for the other ranks to end once one has failed; they learn of it at once, but may be in the
// middle of a step.
constexpr std::chrono::seconds kPatience{30};
// Time that a rank has to end by itself after a fault: a GPU may wait for data that will never
// come.
constexpr std::chrono::milliseconds kLastResort{20'000};
// The same before all ranks are connected, when nothing can be lost: Gloo may wait for a rank that
// has ended, and cannot be interrupted.
constexpr std::chrono::milliseconds kLastResortConnecting{500};

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  TWELL_REQUIRE(file.good(), "cannot read /proc/self/cmdline: {}", std::strerror(errno));
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return words;
}

// The same command without --resume-from, which would undo the run's steps again.
std::vector<std::string> without_resume_from(const std::vector<std::string>& words) {
  std::vector<std::string> out;
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--resume-from") {
      ++i;
    } else if (!words[i].starts_with("--resume-from=")) {
      out.push_back(words[i]);
    }
  }
  return out;
}

// Changes whenever a run begins or continues in `out` (RunFolder::begin).
fs::file_time_type last_beginning(const fs::path& out) {
  std::error_code missing;
  return fs::last_write_time(out / "options.json", missing);
}

// Whether a command that ended with this exit code was asked to by a signal.
bool is_interruption(int code) {
  return code == 128 + SIGINT || code == 128 + SIGTERM || code == 128 + SIGHUP;
}

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> out;
  for (std::string& word : words) out.push_back(word.data());
  out.push_back(nullptr);
  return out;
}

// The environment of a rank, with torchrun's variables.
std::vector<std::string> environment_of(int64_t rank, int64_t ranks, const LocalListener& listener,
                                        int error_token) {
  const std::vector<std::pair<std::string, std::string>> own = {
      {"RANK", std::to_string(rank)},
      {"LOCAL_RANK", std::to_string(rank)},
      {"WORLD_SIZE", std::to_string(ranks)},
      {"LOCAL_WORLD_SIZE", std::to_string(ranks)},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(listener.port)},
      {"TORCHELASTIC_RUN_ID", ""},
      {kListener, std::to_string(listener.socket)},
      {kErrorToken, std::to_string(error_token)}};
  std::vector<std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const bool replaced = std::any_of(own.begin(), own.end(), [&](const auto& variable) {
      return text.substr(0, text.find('=')) == variable.first;
    });
    if (!replaced) out.emplace_back(text);
  }
  for (const auto& [name, value] : own) {
    if (name != "TORCHELASTIC_RUN_ID") out.push_back(name + "=" + value);
  }
  return out;
}

// The ranks of one attempt.
class Processes {
 public:
  Processes(std::vector<std::string> words, int64_t ranks) {
    const LocalListener listener;
    ::fcntl(listener.socket, F_SETFD, 0);  // rank 0 inherits it; the others close it
    int token[2];
    TWELL_REQUIRE(::pipe2(token, O_NONBLOCK) == 0 && ::write(token[1], "", 1) == 1,
                  "cannot make a pipe: {}", std::strerror(errno));
    error_token_ = token[0];
    ::close(token[1]);
    std::vector<char*> argv = pointers(words);
    std::fflush(nullptr);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      std::vector<std::string> environment = environment_of(rank, ranks, listener, error_token_);
      const pid_t child = start(argv, pointers(environment), rank == 0 ? -1 : listener.socket);
      processes_.push_back({.id = child});
    }
  }
  // An exception leaves no rank behind.
  ~Processes() {
    send(SIGKILL);
    for (const Process& process : processes_) {
      if (process.running) ::waitpid(process.id, nullptr, 0);
    }
    ::close(error_token_);
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  std::vector<pid_t> ids() const {
    std::vector<pid_t> out;
    for (const Process& process : processes_) out.push_back(process.id);
    return out;
  }

  struct Ending {
    bool signalled = false;  // the launcher, or a rank, received a signal and ended the run
    int signal = 0;          // a rank's
    size_t signalled_rank = 0;
    bool failed = false;
    bool input_error = false;  // a rank ended with exit code 2
    bool finished = false;     // a rank ended with exit code 0, so all steps are done
  };
  Ending wait() {
    Ending ending;
    std::optional<Clock::time_point> kill_at;
    const std::atomic<bool>& stop = stop_on_signals();
    bool passed_on = false;
    while (collect(ending)) {
      if (stop && !passed_on) {
        ending.signalled = passed_on = true;
        send(interrupted_exit_code() - 128);
      }
      if (ending.failed && !kill_at) kill_at = Clock::now() + kPatience;
      if (kill_at && (Clock::now() > *kill_at || only_stopped_left())) send(SIGKILL);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    if (ending.signalled && !passed_on) {
      // Where all ranks end as after SIGINT, one received it and the others followed.
      print_error(
          "twell: {} received signal {} ({}), which ended the run\n",
          ending.signal == SIGINT ? "a rank" : fmt::format("rank {}", ending.signalled_rank),
          ending.signal, ::strsignal(ending.signal));
    }
    return ending;
  }

 private:
  struct Process {
    pid_t id = -1;
    bool running = true;
    bool stopped = false;
  };

  static pid_t start(const std::vector<char*>& argv, const std::vector<char*>& environment,
                     int close_in_child) {
    const pid_t parent = ::getpid();
    const pid_t child = ::fork();
    TWELL_REQUIRE(child >= 0, "cannot start a process: {}", std::strerror(errno));
    if (child > 0) return child;
    // A group of its own: the terminal's Ctrl-C reaches the launcher alone, which passes it on.
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(kExitFailure);
    if (close_in_child >= 0) ::close(close_in_child);
    ::execve("/proc/self/exe", argv.data(), environment.data());
    ::_exit(127);
  }

  // Takes note of ranks that ended, stopped or continued. False when none is left.
  bool collect(Ending& ending) {
    bool running = false;
    for (size_t rank = 0; rank < processes_.size(); ++rank) {
      Process& process = processes_[rank];
      int status = 0;
      while (process.running &&
             ::waitpid(process.id, &status, WNOHANG | WUNTRACED | WCONTINUED) > 0) {
        process.stopped = WIFSTOPPED(status);
        if (WIFSTOPPED(status) || WIFCONTINUED(status)) continue;
        process.running = false;
        const bool finished = WIFEXITED(status) && WEXITSTATUS(status) == kExitOk;
        ending.finished = ending.finished || finished;
        if (finished) continue;
        if (WIFEXITED(status) && is_interruption(WEXITSTATUS(status))) {
          note_signal(rank, WEXITSTATUS(status) - 128, ending);
          continue;
        }
        ending.failed = true;
        if (WIFEXITED(status) && WEXITSTATUS(status) == kExitInput) ending.input_error = true;
        if (WIFSIGNALED(status)) {
          print_error("twell: rank {} was ended by signal {} ({})\n", rank, WTERMSIG(status),
                      ::strsignal(WTERMSIG(status)));
        }
      }
      running = running || process.running;
    }
    return running;
  }

  // A rank ends with the number of the signal that it received; those that end because it did, with
  // SIGINT's.
  static void note_signal(size_t rank, int signal, Ending& ending) {
    ending.signalled = true;
    if (ending.signal != 0 && signal == SIGINT) return;
    ending.signal = signal;
    ending.signalled_rank = rank;
  }

  bool only_stopped_left() const {
    return std::all_of(processes_.begin(), processes_.end(),
                       [](const Process& p) { return !p.running || p.stopped; });
  }

  void send(int signal) const {
    for (const Process& process : processes_) {
      if (process.running) ::kill(process.id, signal);
    }
  }

  std::vector<Process> processes_;
  int error_token_ = -1;
};

}  // namespace

RankIdentity process_identity() {
  return rank_identity([](const char* name) { return std::getenv(name); }).value_or(RankIdentity{});
}

bool started_by_launch_ranks() { return std::getenv(kListener) != nullptr; }

bool started_again() {
  return std::any_of(std::begin(kRestartCounts), std::end(kRestartCounts), [](const char* name) {
    const char* const count = std::getenv(name);
    return count != nullptr && std::atoi(count) > 0;
  });
}

bool can_continue(const fs::path& out) {
  std::error_code missing;
  return fs::exists(out / "options.json", missing);
}

bool prints_error() {
  static const bool first = [] {
    const char* const token = std::getenv(kErrorToken);
    char byte = 0;
    return token == nullptr || !started_by_launch_ranks() ||
           ::read(std::atoi(token), &byte, 1) == 1;
  }();
  return first;
}

int device_of_rank(const RankIdentity& identity, int devices) {
  // srun and others can show each rank its own GPU alone.
  if (devices == 1 && !started_by_launch_ranks()) return 0;
  TWELL_REQUIRE(identity.local_rank < devices,
                "{} ranks on this machine need a GPU each; it has {}", identity.local_size,
                devices);
  return identity.local_rank;
}

int launch_ranks(const Launch& launch) {
  std::vector<std::string> words = own_arguments();
  const auto earlier_run = last_beginning(launch.out);
  for (int64_t restarts = 0;; ++restarts) {
    Processes processes(words, launch.ranks);
    fmt::print("ranks: {} processes, {}\n", launch.ranks, fmt::join(processes.ids(), " "));
    std::fflush(stdout);
    const auto ending = processes.wait();
    if (ending.signalled && !ending.input_error) return kExitStopped;
    if (!ending.failed) return kExitOk;
    if (ending.input_error) return kExitInput;
    // After all steps a rank may still fail to print them, which a restart would not mend.
    if (ending.finished || restarts == launch.max_restarts) return kExitFailure;
    if (can_continue(launch.out)) {
      if (last_beginning(launch.out) != earlier_run) words = without_resume_from(words);
      if (std::find(words.begin(), words.end(), "--resume") == words.end()) {
        words.push_back("--resume");
      }
    }
    print_error("twell: restart {} of {}\n", restarts + 1, launch.max_restarts);
  }
}

RankGroup::RankGroup(const RankIdentity& identity, std::chrono::milliseconds timeout)
    : identity_(identity) {
  if (identity.size == 1) return;
  rendezvous_ = std::make_unique<Rendezvous>(identity, timeout);
  const auto end_after = [this](std::chrono::milliseconds time) {
    rendezvous_->on_fault(this, [time, rendezvous = rendezvous_.get()] {
      std::thread([time, text = rendezvous->fault()] {
        std::this_thread::sleep_for(time);
        if (prints_error()) print_error("twell: error: {}\n", text);
        ::_exit(kExitFailure);
      }).detach();
    });
  };
  end_after(kLastResortConnecting);
  try {
    communicator_ = gloo_communicator(*rendezvous_);
    // No rank goes on to what it may refuse while others still connect.
    wait_for_all();
    end_after(kLastResort);
  } catch (const RankFault&) {
    throw;
  } catch (const std::exception& error) {
    rendezvous_->on_fault(this, {});  // this rank ends by itself
    rendezvous_->fail(error.what());
    throw;
  }
}

RankGroup::~RankGroup() = default;

std::string RankGroup::from_first(std::string_view key, const std::string& text) const {
  if (rendezvous_ == nullptr) return text;
  if (!first()) return rendezvous_->get(key);
  rendezvous_->put(key, text);
  return text;
}

void RankGroup::require_equal(std::string_view key,
                              const std::map<std::string, std::string>& values) const {
  if (rendezvous_ == nullptr) return;
  const auto there = nlohmann::json::parse(from_first(key, nlohmann::json(values).dump()))
                         .get<std::map<std::string, std::string>>();
  std::map<std::string, std::string> all = there;
  all.insert(values.begin(), values.end());
  const auto text_in = [](const std::map<std::string, std::string>& from, const std::string& name) {
    const auto found = from.find(name);
    return found == from.end() ? std::string("not given") : found->second;
  };
  std::string difference;
  for (const auto& [name, unused] : all) {
    const std::string mine = text_in(values, name), first = text_in(there, name);
    if (mine == first) continue;
    difference = fmt::format("{}: {}, on rank 0: {}", name, mine, first);
    break;
  }
  const std::string verdict = rendezvous_->agree(difference);
  if (!verdict.empty()) {
    throw AgreedError(fmt::format("the ranks differ: {}; start all of them alike", verdict));
  }
}

void RankGroup::require_shared(const fs::path& folder) const {
  if (rendezvous_ == nullptr) return;
  // A name that no earlier run left behind on a machine's own disk.
  const std::string name = from_first(
      "shared", fmt::format(".shared-{}-{}", ::getpid(),
                            std::chrono::system_clock::now().time_since_epoch().count()));
  if (first()) write_file_atomic(folder / name, "");
  wait_for_all();
  const bool seen = fs::exists(folder / name);
  const std::string verdict = rendezvous_->agree(
      seen ? ""
           : fmt::format("{} is not the folder that rank 0 sees there: put it on a file system "
                         "that all machines share",
                         fs::absolute(folder).string()));
  std::error_code ignored;
  if (first()) fs::remove(folder / name, ignored);
  if (!verdict.empty()) throw AgreedError(verdict);
}

void RankGroup::wait_for_all() const {
  if (rendezvous_ != nullptr) rendezvous_->agree({});
}

void RankGroup::fail(std::string_view why) const {
  if (rendezvous_ != nullptr) rendezvous_->fail(why);
}

}  // namespace twell::cli
