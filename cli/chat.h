// SPDX-License-Identifier: Apache-2.0
// A conversation on the terminal: the part of twell generate --chat that reads messages line by
// line.
#pragma once

#include <atomic>
#include <string>

#include "cli/options.h"
#include "twell/chat_template/chat_template.h"
#include "twell/infer/generate.h"

namespace twell::cli {

struct ChatArguments {
  std::string system;        // message in front of the conversation; empty: none
  GenerateOptions generate;  // of each answer; stop_tokens are the model's
  FfnPolicy ffn = FfnPolicy::kAuto;
};

// Answers each line of standard input, with all before it in view, until the input ends or a signal
// comes. InputError when the conversation outgrows the model's context. Returns the exit code.
int run_chat(const CommonOptions& common, const ChatTemplate& chat, ChatArguments arguments);

// Every token that config.json and the template, if there is one, end a text with.
std::vector<int32_t> stop_tokens(const ModelConfig& config, const Tokenizer& tokenizer,
                                 const ChatTemplate* chat);

}  // namespace twell::cli
