// SPDX-License-Identifier: Apache-2.0
// What a command asks of the operating system: memory, signals, and its standard output.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

namespace twell::cli {

// Memory this process may use, in bytes: the machine's, or the control group's limit.
int64_t memory_limit_bytes();
// InputError when a plan needs more than that, before anything is allocated.
void require_memory(int64_t planned_bytes);
// Gives memory that was freed, and is kept for later allocations, back to the system.
void return_freed_memory();

// SIGINT, SIGTERM and SIGHUP end every command with exit code 130, 143 or 129. A signal that was
// ignored when the program started (nohup) stays ignored.
//
// To be called once, first of all: from here on a signal ends the process at once.
void handle_signals();
// From the first call on, a signal sets the returned flag instead, so that a command can finish
// what it is at and save; a second signal ends the process at once.
const std::atomic<bool>& stop_on_signals();
// Throws Interrupted once the flag is set. Temporary files are removed while the stack unwinds.
void check_interrupted();
struct Interrupted {};
// 128 and the number of the signal that came.
int interrupted_exit_code();

// All of standard input. Throws InputError when it cannot be read.
std::string read_standard_input();
// Writes all of the text to standard output now. Throws std::system_error when that fails.
void write_out(std::string_view text);
// Flushes standard output and returns `code`; or, when output was lost, a failure, told on stderr
// unless the reader of a pipe has gone away. `error`: the errno of a write that failed before.
int close_output(int code, int error = 0);

}  // namespace twell::cli
