// SPDX-License-Identifier: Apache-2.0
#include "cli/chat.h"

#include <fmt/core.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <vector>

#include "cli/options.h"
#include "cli/process.h"
#include "twell/base/error.h"

namespace twell::cli {
namespace {

// Reads messages from standard input; a signal interrupts the wait for the next one.
class Messages {
 public:
  // terminal: standard input is one; lines that arrive together, as pasted ones do, are one
  // message.
  Messages(bool terminal, const std::atomic<bool>& stop) : terminal_(terminal), stop_(stop) {}

  std::optional<std::string> next() {
    std::optional<std::string> message = line();
    if (terminal_ && message && message->size() >= kTerminalLine) {
      print_error(
          "twell: warning: terminals pass {} bytes of a line, the rest of this one is lost; "
          "--prompt-file takes longer texts\n",
          kTerminalLine);
    }
    while (terminal_ && message && more_at_once()) {
      if (const std::optional<std::string> another = line()) message->append("\n" + *another);
    }
    return message;
  }

 private:
  static constexpr size_t kTerminalLine = 4095;  // Linux's N_TTY_BUF_SIZE without the line feed

  std::optional<std::string> line() {
    while (true) {
      if (const size_t end = buffer_.find('\n'); end != std::string::npos) {
        std::string line = buffer_.substr(0, end);
        buffer_.erase(0, end + 1);
        return line;
      }
      if (ended_ || stop_) break;
      read_more(/*wait_ms=*/100);
    }
    if (stop_ || buffer_.empty()) return std::nullopt;
    return std::exchange(buffer_, {});
  }

  bool more_at_once() {
    constexpr int kPasteMs = 30;
    if (buffer_.empty() && !ended_ && !stop_) read_more(kPasteMs);
    return !buffer_.empty();
  }

  void read_more(int wait_ms) {
    pollfd input{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
    if (::poll(&input, 1, wait_ms) <= 0) return;
    char bytes[4096];
    const ssize_t count = ::read(STDIN_FILENO, bytes, sizeof(bytes));
    if (count > 0) {
      buffer_.append(bytes, static_cast<size_t>(count));
    } else {
      ended_ = true;
    }
  }

  bool terminal_;
  const std::atomic<bool>& stop_;
  std::string buffer_;
  bool ended_ = false;
};

// A conversation in the form of the model's chat template, kept within the session's context.
class Conversation {
 public:
  Conversation(const ChatTemplate& chat, const Tokenizer& tokenizer, const Session& session,
               const std::string& system, const GenerateOptions& options)
      : chat_(chat), tokenizer_(tokenizer), session_(session), options_(options) {
    if (!system.empty()) messages_.push_back({"system", system});
    first_ = messages_.size();
  }

  // Adds the user's message and returns the prompt of its answer. Where no room would be left for
  // the answer, or a quarter of the context, the oldest messages are dropped. InputError when the
  // message alone is too long.
  std::string ask(const std::string& text) {
    messages_.push_back({"user", text});
    const int64_t room = session_.capacity();
    const int64_t wanted = std::min(options_.max_tokens, room / 4);
    size_t dropped = 0;
    while (true) {
      const std::string prompt = chat_.render(messages_, /*add_generation_prompt=*/true);
      const int64_t tokens =
          std::ssize(prompt_ids(session_.config(), tokenizer_, prompt, options_.begin_token));
      const bool only = messages_.size() == first_ + 1;
      TWELL_REQUIRE(!only || tokens < room,
                    "the message has {} tokens; the context of {} leaves no room for an answer",
                    tokens, room);
      if (only || tokens + wanted <= room) {
        if (dropped > 0) {
          print_error("[the context of {} tokens is full: {} oldest messages dropped]\n", room,
                      dropped);
        }
        return prompt;
      }
      // A question goes with its answer, because templates want them in turn.
      const auto oldest = messages_.begin() + static_cast<std::ptrdiff_t>(first_);
      messages_.erase(oldest, oldest + 2);
      dropped += 2;
    }
  }

  void answer(const std::string& text) { messages_.push_back({"assistant", text}); }
  // Forgets the question that got no answer.
  void withdraw() { messages_.pop_back(); }

 private:
  const ChatTemplate& chat_;
  const Tokenizer& tokenizer_;
  const Session& session_;
  const GenerateOptions& options_;
  std::vector<ChatMessage> messages_;  // a system message or none, then questions and answers
  size_t first_ = 0;                   // index of the first question
};

}  // namespace

int run_chat(Session& session, const Tokenizer& tokenizer, const ChatTemplate& chat,
             const std::string& system, GenerateOptions options) {
  const std::atomic<bool>& stop = *options.cancel;
  options.on_text = write_out;
  options.share_beginning = true;  // each turn begins with the conversation so far
  Conversation conversation(chat, tokenizer, session, system, options);
  const bool terminal = ::isatty(STDIN_FILENO) != 0;
  if (terminal) print_error("Ctrl-C stops an answer, Ctrl-D ends the conversation.\n");
  Messages messages(terminal, stop);
  while (true) {
    if (terminal) write_out("> ");
    const std::optional<std::string> message = messages.next();
    if (!message) break;
    if (message->empty()) continue;
    try {
      const std::string prompt = conversation.ask(*message);
      const Generation answer = generate(session, tokenizer, prompt, options);
      if (answer.text.empty() && stop) {
        conversation.withdraw();
      } else {
        conversation.answer(answer.text);
      }
    } catch (const InputError& error) {
      if (!terminal) throw;
      conversation.withdraw();
      print_error("twell: error: {}\n", error.what());
    }
    write_out("\n");
    if (terminal) forget_interrupt();
    if (stop) break;
  }
  if (terminal) write_out("\n");
  return stop ? interrupted_exit_code() : kExitOk;
}

}  // namespace twell::cli
