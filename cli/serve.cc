// SPDX-License-Identifier: Apache-2.0
// twell serve: OpenAI's API over HTTP for one model.
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#ifdef __GLIBC__  // known once a header of the C library is read
#include <malloc.h>
#endif

#include "cli/chat.h"
#include "cli/commands.h"
#include "cli/device.h"
#include "cli/loading.h"
#include "cli/process.h"
#include "twell/base/error.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/serve/allowed_origins.h"
#include "twell/serve/fingerprint.h"
#include "twell/serve/server.h"

namespace twell::cli {
namespace {

struct ServeArguments {
  ServerOptions server;
  std::vector<std::string> end_tokens;
  std::string host = "127.0.0.1";
  int64_t port = 8000;
  std::filesystem::path api_key_file;
  std::filesystem::path log_requests;
  int64_t batch = 32;
  int64_t context = 0;
  int64_t cache_mib = 0;
  bool cache_8bit = false;
  int64_t request_mib = 4096;
  int64_t request_seconds = 30;
  int64_t write_seconds = 20;
  int64_t drain_seconds = 30;
  std::string ffn = "auto";
};

// The longest conversation that the server holds unless --context says otherwise; a model's context
// can be far longer than memory allows.
constexpr int64_t kDefaultContext = 16384;

// The folder's name, or for the checkpoint of a run the run's name.
std::string default_model_name(const std::filesystem::path& checkpoint) {
  std::filesystem::path folder = std::filesystem::absolute(checkpoint).lexically_normal();
  if (folder.filename().empty()) folder = folder.parent_path();
  if (folder.filename() == "checkpoint") folder = folder.parent_path();
  return folder.filename().string();
}

// why: the reason when there is none that can be used.
std::optional<ChatTemplate> load_chat_template(const std::filesystem::path& checkpoint,
                                               std::string& why) {
  try {
    return ChatTemplate::load(checkpoint);
  } catch (const InputError& error) {
    why = error.what();
    print_error("twell: no /v1/chat/completions: {}\n", why);
    return std::nullopt;
  }
}

// Raises the limit on open files to what the system allows, because each connection is one.
void allow_open_files() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

// Lines at the end of a file, each written at once, so that other programs may write to it too. The
// server goes on where the disk is full.
class LineLog {
 public:
  explicit LineLog(const std::filesystem::path& path) : name_(path.string()) {
    if (name_ == "-") {
      file_ = STDOUT_FILENO;
      return;
    }
    file_ = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    TWELL_REQUIRE(file_ >= 0, "--log-requests {}: cannot be written ({})", name_,
                  std::strerror(errno));
  }
  ~LineLog() {
    if (file_ != STDOUT_FILENO) ::close(file_);
  }
  LineLog(const LineLog&) = delete;
  LineLog& operator=(const LineLog&) = delete;

  void write(const std::string& line) {
    const ssize_t written = ::write(file_, line.data(), line.size());
    if (written == static_cast<ssize_t>(line.size()) || failed_.exchange(true)) return;
    print_error("twell: --log-requests {}: lines are lost ({})\n", name_,
                written < 0 ? std::strerror(errno) : "no room");
  }

 private:
  std::string name_;
  int file_ = -1;
  std::atomic<bool> failed_{false};
};

// The C library raises both limits to the size of the largest block that was ever freed: after a
// few large requests each thread would keep tens of MiB that nothing uses.
void give_back_large_blocks() {
#ifdef __GLIBC__
  constexpr int kBytes = 1 << 20;
  ::mallopt(M_MMAP_THRESHOLD, kBytes);
  ::mallopt(M_TRIM_THRESHOLD, kBytes);
#endif
}

int run_serve(const CommonOptions& common, ServeArguments& arguments) {
  ServerOptions& options = arguments.server;
  TWELL_REQUIRE(!arguments.host.empty(),
                "--host is empty: 127.0.0.1 is this machine alone, 0.0.0.0 every address");
  allow_open_files();
  give_back_large_blocks();
  if (!arguments.api_key_file.empty()) options.keys = ApiKeys::load(arguments.api_key_file);
  const AllowedOrigins checked(options.allowed_origins);
  std::optional<LineLog> log;
  if (!arguments.log_requests.empty()) {
    log.emplace(arguments.log_requests);
    options.log_request = [&log](const std::string& line) { log->write(line); };
  }
  const FfnPolicy policy = parse_ffn_policy(arguments.ffn);
  const ModelConfig config = load_config(common.checkpoint);
  const Tokenizer tokenizer = load_tokenizer(common.checkpoint, config);
  const std::optional<ChatTemplate> chat = load_chat_template(common.checkpoint, options.no_chat);
  if (options.model.empty()) options.model = default_model_name(common.checkpoint);
  options.stop_tokens = stop_tokens(common.checkpoint, config, tokenizer, arguments.end_tokens);
  options.chat_stop_tokens = options.stop_tokens;
  options.http.read = std::chrono::seconds(arguments.request_seconds);
  options.http.write = std::chrono::seconds(arguments.write_seconds);
  options.request_bytes = arguments.request_mib << 20;
  options.drain = std::chrono::seconds(arguments.drain_seconds);

  const int64_t context = config.context;
  TWELL_REQUIRE(arguments.context <= context,
                "--context {} is longer than the model's context of {} tokens", arguments.context,
                context);
  const SessionOptions planned = plan_cache(
      common, config,
      {.slots = arguments.batch,
       .capacity = arguments.context > 0 ? arguments.context : std::min(context, kDefaultContext),
       .ffn = policy,
       .draft_tokens = draft_tokens_of(options.speculate, arguments.batch),
       .cache = {.eight_bits = arguments.cache_8bit}},
      arguments.cache_mib << 20);
  const std::unique_ptr<Engine> engine = load_engine(common, {.session = planned});
  const std::unique_ptr<Session> session = engine->session(planned);
  options.joules = engine->joules();
  options.fingerprint = system_fingerprint(
      common.checkpoint,
      std::vector<std::string>{TWELL_VERSION, engine->device(), arguments.ffn, common.weights,
                               common.head, arguments.cache_8bit ? "8-bit cache" : ""});

  Server server(*session, tokenizer, chat ? &*chat : nullptr, options);
  const int port = server.bind(arguments.host, static_cast<int>(arguments.port));
  const std::atomic<bool>& stop = stop_on_signals();
  const bool ipv6 = arguments.host.find(':') != std::string::npos;
  write_out(fmt::format("serving {} on http://{}{}{}:{} ({}; {} sequences of up to {} tokens)\n",
                        options.model, ipv6 ? "[" : "", arguments.host, ipv6 ? "]" : "", port,
                        engine->device(), session->slots(), session->capacity()));
  server.run(stop);
  return kExitOk;
}

}  // namespace

void add_serve_command(Command& root, CommonOptions& common) {
  auto arguments = std::make_shared<ServeArguments>();
  Command& command = root.add("serve", "Serve a model over HTTP with OpenAI's API");
  command.runs([&common, arguments] { return run_serve(common, *arguments); });
  add_checkpoint_option(command, common);
  add_weights_option(command, common);
  command.value("--host", &arguments->host, "ADDRESS",
                "Address to listen on; the default takes connections of this machine only");
  command
      .value("--allow-host", &arguments->server.allowed_hosts, "NAME",
             "A further name under which clients reach the server; without API keys, requests to "
             "other names than localhost and --host are refused; *: any name")
      .several_values();
  command.value("--port", &arguments->port, "N", "Port to listen on; 0: any free one")
      .range(0, 65535);
  command.value("--api-key-file", &arguments->api_key_file, "FILE",
                "Keys that clients must send, a line each; without it everyone is served");
  command
      .value("--cors-origin", &arguments->server.allowed_origins, "ORIGIN",
             "A site whose pages may use the server from a browser, such as https://chat.example "
             "or http://localhost:3000; localhost: pages of this machine on any port; *: any site")
      .several_values();
  command.value("--log-requests", &arguments->log_requests, "FILE",
                "Append a line of JSON for each request: time, path, status, tokens, seconds; no "
                "texts and no keys; -: to standard output");
  command.value("--end-token", &arguments->end_tokens, "TEXT",
                "A text ends at this token too, beside those that the checkpoint names; "
                "repeatable");
  command.value("--model-name", &arguments->server.model, "NAME",
                "The model's name in requests and replies; by default the folder's name");
  add_ffn_option(command, arguments->ffn, "Execution of the FFN layers");
  add_speculate_option(command, arguments->server.speculate);
  command.group("Limits");
  command
      .value("--batch", &arguments->batch, "N",
             "Sequences continued at once: bounds memory; the others wait")
      .range(1, 65536);
  command
      .value("--context", &arguments->context, "N",
             "Tokens of a sequence, its prompt included: bounds memory; 0: the model's context, "
             "at most 16384")
      .at_least(0);
  command
      .value("--cache-mib", &arguments->cache_mib, "N",
             "Memory for keys and values in MiB, which sequences share; when it is short, the "
             "youngest waits and is computed again; 0: what all sequences need, if there is so "
             "much")
      .range(0, 1 << 30);
  command.flag(
      "--cache-8bit", &arguments->cache_8bit,
      "Keep keys and values in 8 bits, less exact: about half of a GPU's memory for them, a "
      "quarter of the CPU's");
  command
      .value("--max-waiting", &arguments->server.max_waiting, "N",
             "Sequences that wait; a request with more than fit is answered with 503")
      .range(1, 1 << 20);
  command
      .value("--prefill-tokens", &arguments->server.prefill_tokens, "N",
             "Tokens of a step with prompts: one of each other sequence, the rest, and at least "
             "half, of prompts; 0: what suits the device")
      .at_least(0);
  command
      .value("--max-connections", &arguments->server.http.connections, "N",
             "Connections at once; further ones are answered with 503")
      .range(1, 100000);
  command
      .value("--max-body", &arguments->server.http.body_bytes, "BYTES", "Size of a request's body")
      .range(1024, 1 << 30);
  command
      .value("--request-mib", &arguments->request_mib, "N",
             "Memory in MiB for the bodies, prompts and answers of all requests in progress; what "
             "does not fit is answered with 503")
      .range(1, 1 << 30);
  command
      .value("--request-seconds", &arguments->request_seconds, "N",
             "Time from the first byte of a request to its last")
      .range(1, 3600);
  command
      .value("--write-seconds", &arguments->write_seconds, "N",
             "Time for a client to read what it was sent, 64 KiB at a time")
      .range(1, 3600);
  command
      .value("--drain-seconds", &arguments->drain_seconds, "N",
             "Time for running requests to finish once SIGTERM or SIGINT arrives")
      .range(0, 86400);
  add_threads_option(command, common);
  add_device_option(command, common);
  command.footer(
      "Example:\n  twell serve --checkpoint runs/first --port 8000\n"
      "  curl localhost:8000/v1/completions -H 'Content-Type: application/json' "
      "-d '{\"prompt\": \"Once\", \"max_tokens\": 20}'\n"
      "docs/serving.md describes the endpoints; http://localhost:8000/ is a page to chat on.");
}

}  // namespace twell::cli
