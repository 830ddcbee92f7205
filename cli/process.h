// SPDX-License-Identifier: Apache-2.0
// Operating system services: memory limits, signals, and standard input and output.
#pragma once

#include <fmt/core.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

namespace twell::cli {

// Memory this process may use, in bytes: the machine's memory or the control group's limit.
int64_t memory_limit_bytes();
// InputError when planned_bytes exceeds that limit. Call it before allocating.
void require_memory(int64_t planned_bytes);
// Returns freed memory that the allocator keeps for reuse to the system.
void return_freed_memory();

// Opens /dev/null in place of standard input, output and error where they are closed: a file that
// the command opens would get their numbers, and what is printed with it. Call it first.
void open_standard_descriptors();

// Makes SIGINT, SIGTERM and SIGHUP end the process at once with exit code 130, 143 or 129. A signal
// that was ignored when the program started (nohup) stays ignored. Call it once.
void handle_signals();
// After the first call, a signal sets the returned flag instead, so that a command can finish its
// current work and save. A second signal ends the process at once, unless it comes within a second
// of the first: timeout(1), systemd and Slurm send one request several times, to the process and to
// its group or to the launcher of its ranks.
const std::atomic<bool>& stop_on_signals();
// Throws Interrupted once the flag is set, so that unwinding the stack removes temporary files.
void check_interrupted();
// Clears the flag if SIGINT set it, so that the next signal counts as the first. Returns whether it
// did.
bool forget_interrupt();
struct Interrupted {};
// 128 plus the number of the signal received; 130 when another rank of the run received it.
int interrupted_exit_code();

// Reads all of standard input. Throws InputError when it cannot be read.
std::string read_standard_input();
// Writes all of the text to standard output at once. Throws std::system_error on failure.
void write_out(std::string_view text);
// Flushes standard output and returns `code`, or kExitFailure when output was lost. The loss is
// reported on stderr unless the reader closed the pipe. `error`: errno of an earlier failed write.
int close_output(int code, int error = 0);
// Writes a message to standard error. One that cannot be written, because the log's disk is full
// say, is lost: it must not end what the command does.
template <typename... Values>
void print_error(fmt::format_string<Values...> format, Values&&... values) {
  const std::string message = fmt::format(format, std::forward<Values>(values)...);
  std::fwrite(message.data(), 1, message.size(), stderr);
}

}  // namespace twell::cli
