// SPDX-License-Identifier: Apache-2.0
// A conversation on the terminal: the part of `twell generate --chat` that reads messages from
// standard input, one per line.
#pragma once

#include <atomic>
#include <string>

#include "cli/options.h"
#include "twell/chat_template/chat_template.h"
#include "twell/infer/generate.h"

namespace twell::cli {

struct ChatArguments {
  std::string system;        // system message that opens the conversation; empty: none
  GenerateOptions generate;  // options of each answer; stop_tokens holds the model's stop tokens
  FfnPolicy ffn = FfnPolicy::kAuto;
};

// Answers each line of standard input with the conversation so far as context, until the input ends
// or a signal arrives. Returns the exit code. InputError when the conversation outgrows the model's
// context.
int run_chat(const CommonOptions& common, const ChatTemplate& chat, ChatArguments arguments);

}  // namespace twell::cli
