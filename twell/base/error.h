// SPDX-License-Identifier: Apache-2.0
// Errors. Every failure is an exception; the library never prints, exits or aborts.
//
// Error       something inside failed (a broken contract, a failed system or device call).
//               what() carries the values and the source position. The command line exits with 1.
//   InputError  what the user gave cannot be used (a file, a flag, a config, a prompt). what() is
//               one line saying what was given, why it is refused and what to do. Exit code 2.
#pragma once

#include <fmt/core.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace twell {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class InputError : public Error {
 public:
  using Error::Error;
};

// Throws Error with "message (file:line)".
[[noreturn]] void throw_error(const char* file, int line, const std::string& message);

}  // namespace twell

// A contract of the code: TWELL_CHECK(rows == n, "expected {} rows, got {}", n, rows).
#define TWELL_CHECK(condition, ...)                                         \
  do {                                                                      \
    if (!(condition)) [[unlikely]]                                          \
      ::twell::throw_error(__FILE__, __LINE__, ::fmt::format(__VA_ARGS__)); \
  } while (false)

// A requirement on what the user gave; the message stands alone, without a source position.
#define TWELL_REQUIRE(condition, ...)                        \
  do {                                                       \
    if (!(condition)) [[unlikely]]                           \
      throw ::twell::InputError(::fmt::format(__VA_ARGS__)); \
  } while (false)
