// SPDX-License-Identifier: Apache-2.0
// A conversation on the terminal: the part of `twell generate --chat` that reads messages from
// standard input: a line each; on a terminal, lines that are pasted together are one message.
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
  bool cache_8bit = false;  // CPU: keys and values in 8 bits
};

// Answers each message with the conversation so far as context, until the input ends or a signal
// arrives. Returns the exit code. A conversation that outgrows the model's context loses its oldest
// messages, which is said on stderr. On a terminal SIGINT ends only the answer that is being
// written, and a message that is too long is refused; elsewhere that is an InputError.
int run_chat(const CommonOptions& common, const ChatTemplate& chat, ChatArguments arguments);

}  // namespace twell::cli
