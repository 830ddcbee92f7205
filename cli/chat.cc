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

#include "cli/device.h"
#include "cli/loading.h"
#include "cli/process.h"
#include "twell/base/error.h"
#include "twell/checkpoint/checkpoint.h"

namespace twell::cli {
namespace {

// Upper bound of the key-value cache of a conversation, in tokens; a model's context can be far
// longer than memory allows.
constexpr int64_t kConversationTokens = 16384;

// Reads lines from standard input; a signal interrupts the wait for the next one.
class Lines {
 public:
  explicit Lines(const std::atomic<bool>& stop) : stop_(stop) {}

  std::optional<std::string> next() {
    while (true) {
      if (const size_t end = buffer_.find('\n'); end != std::string::npos) {
        std::string line = buffer_.substr(0, end);
        buffer_.erase(0, end + 1);
        return line;
      }
      if (ended_ || stop_) break;
      read_more();
    }
    if (stop_ || buffer_.empty()) return std::nullopt;
    return std::exchange(buffer_, {});
  }

 private:
  void read_more() {
    constexpr int kWaitMs = 100;
    pollfd input{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
    if (::poll(&input, 1, kWaitMs) <= 0) return;
    char bytes[4096];
    const ssize_t count = ::read(STDIN_FILENO, bytes, sizeof(bytes));
    if (count > 0) {
      buffer_.append(bytes, static_cast<size_t>(count));
    } else {
      ended_ = true;
    }
  }

  const std::atomic<bool>& stop_;
  std::string buffer_;
  bool ended_ = false;
};

}  // namespace

int run_chat(const CommonOptions& common, const ChatTemplate& chat, ChatArguments arguments) {
  const ModelConfig config = load_config(common.checkpoint);
  const Tokenizer tokenizer = load_tokenizer(common.checkpoint, config);
  const SessionOptions planned{.capacity = std::min(config.context, kConversationTokens),
                               .ffn = arguments.ffn};
  const std::unique_ptr<Engine> engine = load_engine(common, {.session = planned});
  const std::unique_ptr<Session> session = engine->session(planned);

  const std::atomic<bool>& stop = stop_on_signals();
  GenerateOptions& options = arguments.generate;
  options.stop_tokens = stop_tokens(config, tokenizer, chat.eos_token());
  options.cancel = &stop;
  options.on_text = write_out;
  options.share_beginning = true;  // each turn begins with the conversation so far
  std::vector<ChatMessage> messages;
  if (!arguments.system.empty()) messages.push_back({"system", arguments.system});
  const bool terminal = ::isatty(STDIN_FILENO) != 0;
  Lines lines(stop);
  while (true) {
    if (terminal) write_out("> ");
    const std::optional<std::string> line = lines.next();
    if (!line) break;
    if (line->empty()) continue;
    messages.push_back({"user", *line});
    const std::string text = chat.render(messages, /*add_generation_prompt=*/true);
    messages.push_back({"assistant", generate(*session, tokenizer, text, options).text});
    write_out("\n");
    if (stop) break;
  }
  if (terminal) write_out("\n");
  return stop ? interrupted_exit_code() : kExitOk;
}

}  // namespace twell::cli
