// SPDX-License-Identifier: Apache-2.0
// A conversation on the terminal: the part of `twell generate --chat` that reads messages from
// standard input: a line each; on a terminal, lines that are pasted together are one message.
#pragma once

#include <cstdint>
#include <string>

#include "twell/chat_template/chat_template.h"
#include "twell/infer/generate.h"

namespace twell::cli {

// Keys and values of a conversation, at most; a model's context can be far longer than memory
// allows.
inline constexpr int64_t kConversationTokens = 16384;

// Answers each message with the conversation so far as context, until the input ends or a signal,
// which is options.cancel, arrives. Returns the exit code. `system`: the message that opens the
// conversation; empty: none. A conversation that outgrows the session's capacity loses its oldest
// messages, which is said on stderr. On a terminal SIGINT ends only the answer that is being
// written, and a message that is too long is refused; elsewhere that is an InputError.
int run_chat(Session& session, const Tokenizer& tokenizer, const ChatTemplate& chat,
             const std::string& system, GenerateOptions options);

}  // namespace twell::cli
