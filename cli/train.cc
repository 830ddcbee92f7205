// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <map>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "cli/commands.h"
#include "cli/config_file.h"
#include "cli/device.h"
#include "cli/process.h"
#include "cli/progress_line.h"
#include "cli/ranks.h"
#include "cli/text_layout.h"
#include "cli/train_flags.h"
#include "twell/base/content_hash.h"
#include "twell/base/context.h"
#include "twell/base/cpu_limit.h"
#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/infer/engine.h"
#include "twell/infer/text_sampler.h"
#include "twell/train/chat_run.h"
#include "twell/train/plan.h"
#include "twell/train/run.h"
#include "twell/train/side_by_side.h"
#include "twell/train/start.h"

namespace twell::cli {
namespace fs = std::filesystem;
namespace {

constexpr const char* kTrainFooter = R"(
OUT holds checkpoint (the newest one, a link into checkpoints/), metrics.jsonl (every step, per
layer), tokenizer and shards. SIGINT, SIGTERM and SIGHUP finish the step, save and exit with code
130, 143 and 129 (with --gpus and --ranks always 130); a second one exits at once. A run that ended
early continues with --resume. A checkpoint that cannot be saved, on a full disk say, is tried again
at the next --save-every, the last one every 10 seconds for 10 minutes; then the exit code is 2.

Examples:
  twell train --data docs/ --out runs/first
  twell train --data a.jsonl.zst --data b/ --out runs/wide --width 512 --ffn 2048 --steps 5000
  twell train --config recipe.toml --l1 1e-4 --out runs/sparse
  twell train --out runs/sparse --resume
  twell train --from SmolLM2-135M --relufy --l1 1e-4 --l1-ramp-steps 500 --data docs/ --out runs/sm
  twell train --from runs/half --chat-data talks.jsonl --chat-template chat.jinja --out runs/chat
  twell train --preset 0.5b --data docs/ --out runs/half --device cuda
  twell train --preset 0.5b --data docs/ --out runs/eight --gpus 8 --max-restarts 3
  torchrun --nnodes 2 --nproc-per-node 8 ... --no-python twell train --config run.toml
  twell train --data docs/ --out runs/first --sample-every 100 --sample-prompt 'The '
  twell train --preset 0.5b --dry-run)";

// What a run's data and first weights were made from. A resumed run has both already, so other
// values would have no effect.
const std::set<std::string> kMadeTheData = {
    "data",      "json-field", "bad-files",     "max-data-bytes",   "tokenizer",
    "end-token", "chat-data",  "pre-tokenizer", "tokenizer-sample", "val-fraction",
    "from",      "relufy",     "chat-template"};
// Options that name files and folders, which are remembered as absolute paths.
const std::set<std::string> kPaths = {"data",      "shards", "tokenizer", "from",
                                      "task-data", "out",    "chat-data", "chat-template"};

void print_plan(const TrainOptions& options, const RunPlan& plan) {
  fmt::print("parameters       {:>14}  ({})\n", plan.parameters,
             format_count(static_cast<double>(plan.parameters)));
  for (const MemoryItem& item : plan.memory) {
    fmt::print("memory           {:>14}  {}\n", format_bytes(static_cast<double>(item.bytes)),
               item.name);
  }
  if (plan.mapped_bytes > 0) {
    fmt::print("memory           {:>14}  token shards (mapped; given up when memory is short)\n",
               format_bytes(static_cast<double>(plan.mapped_bytes)));
  }
  fmt::print("memory           {:>14}  in all\n",
             format_bytes(static_cast<double>(plan.memory_bytes() + plan.mapped_bytes)));
  for (const MemoryItem& item : plan.device_memory) {
    fmt::print("GPU memory       {:>14}  {}\n", format_bytes(static_cast<double>(item.bytes)),
               item.name);
  }
  if (plan.device_memory.size() > 1) {
    fmt::print("GPU memory       {:>14}  in all\n",
               format_bytes(static_cast<double>(plan.device_bytes())));
  }
  fmt::print("FLOPs per token  {:>14.4g}  forward and backward, dense\n", plan.flops_per_token);
  fmt::print("FLOPs per step   {:>14.4g}\n", plan.flops_per_step);
  fmt::print("tokens per step  {:>14}  in {} micro-batch{} of {} x {}\n", options.batch_tokens,
             options.micro_batches(), options.micro_batches() == 1 ? "" : "es", options.micro_batch,
             options.sequence_length);
  fmt::print("steps            {:>14}\n", options.steps);
  fmt::print("tokens           {:>14}  ({})\n", options.tokens,
             format_count(static_cast<double>(options.tokens)));
}

DataRequest data_request(const TrainFlags& flags, const DataOptions& data,
                         const CommonOptions& common, const ModelConfig& config) {
  return {data, common.data, config.vocab_size, common.seed, common.threads, flags.shards.empty()};
}

// The conversations of --chat-data, which every rank reads for itself.
ChatRun read_chat(const TrainFlags& flags, const CommonOptions& common, Context& ctx,
                  const ModelConfig& config, const TrainOptions& options,
                  const Tokenizer& tokenizer, const fs::path& checkpoint, const LogSink& log) {
  return read_chat_data(ctx, flags.settings, config, tokenizer, checkpoint,
                        {.file = {},
                         .length = options.sequence_length,
                         .validation_fraction = flags.data.validation_fraction,
                         .seed = common.seed,
                         .skip_bad_lines = flags.data.files.bad_files == "skip",
                         .log = log,
                         .check = check_interrupted});
}

// Returns the tokenizer of the shards, after making them from --data unless usable shards exist.
Tokenizer prepare(const TrainFlags& flags, const CommonOptions& common, const ModelConfig& config,
                  const fs::path& shards, ProgressLine& progress) {
  const bool as_they_are = flags.resume || common.data.empty();
  if (as_they_are && holds_shards(shards)) return Tokenizer::load(shards / "tokenizer.json");
  TWELL_REQUIRE(flags.shards.empty() || !common.data.empty(),
                "{} is no folder of shards, with manifest.json and tokenizer.json: make one with "
                "'twell tokenize'",
                shards.string());
  TWELL_REQUIRE(!common.data.empty(),
                "no text given: add --data PATH, or --shards DIR with shards "
                "made by 'twell tokenize'");
  DataOptions data = flags.data;
  const fs::path& from = flags.settings.from;
  if (data.tokenizer.empty() && !from.empty()) data.tokenizer = from / "tokenizer.json";
  return std::move(
      prepare_shards(data_request(flags, data, common, config), shards, progress).tokenizer);
}

// An estimate of what conversations take in memory: English has about four bytes a token, which is
// stored in four.
int64_t chat_bytes(const fs::path& file) {
  std::error_code missing;
  const uintmax_t bytes = fs::file_size(file, missing);
  return missing ? 0 : static_cast<int64_t>(bytes);
}

// `resumed`: the first validation of this call is not that of the run, so it is left out.
void print_summary(const TrainSummary& summary, const TrainOptions& options, bool resumed) {
  fmt::print("\n{} after {} of {} steps ({} tokens), {}\n",
             summary.interrupted ? "interrupted and saved" : "finished", summary.steps_done,
             options.steps,
             format_count(static_cast<double>(summary.steps_done * options.batch_tokens)),
             format_duration(summary.seconds));
  if (summary.last_validation_ce) {
    fmt::print("validation CE    ");
    if (!resumed) fmt::print("{:.4f} -> ", *summary.first_validation_ce);
    fmt::print("{:.4f}\n", *summary.last_validation_ce);
  }
  if (!summary.last.layers.empty()) {
    fmt::print("training CE      {:.4f}\nnon-zeros/layer ", summary.last.ce);
    for (const LayerMetrics& layer : summary.last.layers) fmt::print(" {:.1f}", layer.nnz);
    fmt::print("\ndead/layer      ");
    for (const LayerMetrics& layer : summary.last.layers) {
      fmt::print(" {:.0f}%", 100.0 * layer.dead_share);
    }
    fmt::print("\n");
  }
  fmt::print("checkpoint       {}\n", summary.checkpoint.string());
}

// Prints the comparison of the original and the sparse model on held-out text and tasks, and saves
// it as OUT/side_by_side.json.
void print_side_by_side(const SideBySide& figures, const TaskComparison& tasks,
                        const fs::path& out) {
  const ModelFigures &a = figures.original, &b = figures.sparse;
  fmt::print("\n{:<16} {:>12} {:>12}\n", "", "original", "sparse");
  fmt::print("{:<16} {:>12.4f} {:>12.4f}  {:+.1f}%\n", "validation CE", a.ce, b.ce,
             100.0 * (b.ce / a.ce - 1.0));
  fmt::print("{:<16} {:>12.1f} {:>12.1f}  {:.1f}% of all\n", "active neurons", a.active_per_token,
             b.active_per_token, 100.0 * b.active_share);
  fmt::print("{:<16} {:>12.0f} {:>12.0f}  {:.2f}x\n", "forward tok/s", a.tokens_per_second,
             b.tokens_per_second, b.tokens_per_second / a.tokens_per_second);
  tasks.print();
  nlohmann::json json = side_by_side_json(figures);
  if (!tasks.empty()) json["tasks"] = tasks.json();
  write_file_atomic(out / "side_by_side.json", json.dump(1) + "\n");
}

// The ranks that this command is to start; 0: it is a rank itself, or the only one.
int64_t ranks_to_start(const TrainFlags& flags, const CommonOptions& common,
                       const RankIdentity& identity) {
  const int64_t asked = std::max(flags.gpus, flags.ranks);
  TWELL_REQUIRE(asked > 1 || flags.max_restarts == 0, "--max-restarts goes with --gpus or --ranks");
  if (asked <= 1 || started_by_launch_ranks()) return 0;
  TWELL_REQUIRE(identity.size == 1,
                "a launcher started this as rank {} of {}: leave --gpus and --ranks out",
                identity.rank, identity.size);
  for (const fs::path& path : common.data) {
    TWELL_REQUIRE(!path.string().starts_with("/proc/self/fd/"),
                  "--data - is read by one process: put the text into a file");
  }
  return asked;
}

// Ranks of a machine share its cores, unless --threads says otherwise.
void share_threads(const RankIdentity& identity, CommonOptions& common) {
  if (common.threads > 0 || identity.local_size == 1) return;
  common.threads = std::max(1, available_threads() / identity.local_size);
}

// A hash of these bytes, for comparing ranks.
std::string fingerprint(std::span<const std::byte> bytes) {
  ContentHash hash;
  hash.add_bytes(bytes);
  return hash.digest();
}

// What all ranks of a run must have in common before they exchange anything. A difference would
// train a model that is neither rank's, or fail in the middle of a step.
std::map<std::string, std::string> common_ground(const Command& command, const TrainFlags& flags,
                                                 const RunDevice& device) {
  // Ranks may see the folders at other places, and share their machine's cores as they like.
  static const std::set<std::string> kOwn = {"out", "threads", "log-every"};
  std::map<std::string, std::string> ground;
  const nlohmann::json given = nlohmann::json::parse(given_options_json(command, {}));
  for (const auto& [name, value] : given.items()) {
    if (!kOwn.contains(name)) {
      ground["--" + name] = value.is_string() ? value.get<std::string>() : value.dump();
    }
  }
  ground["--resume"] = flags.resume ? "given" : "not given";
  ground["device"] = device.on_gpu() ? "GPU" : "CPU";
  ground["program"] = fmt::format("twell " TWELL_VERSION " build {}",
                                  fingerprint(MappedFile("/proc/self/exe").bytes()));
  return ground;
}

// Rank 0 prepares the shards, which takes any time, and decides which checkpoint to resume from.
std::optional<Checkpoint> agreed_resume_point(const RankGroup& ranks, const TrainFlags& flags,
                                              const RunFolder& folder) {
  std::optional<Checkpoint> point;
  if (ranks.first() && flags.resume) {
    point = folder.resume_point({flags.resume_from, flags.fall_back});
  }
  const std::string text = ranks.from_first(
      "resume", point ? fmt::format("{} {}", point->step, point->folder.string()) : "");
  if (ranks.first() || text.empty()) return point;
  const size_t space = text.find(' ');
  return Checkpoint{std::stoll(text.substr(0, space)), text.substr(space + 1)};
}

std::string starting_line(const ModelConfig& config, const TrainOptions& options,
                          const RunDevice& device, const std::optional<Checkpoint>& resume_from) {
  return fmt::format(
      "model: {} parameters, {} layers, width {}, FFN {}, on {}{}{}",
      format_count(static_cast<double>(config.parameter_count())), config.layers, config.width,
      config.ffn, options.ranks == 1 ? "" : fmt::format("{} ranks, ", options.ranks), device.name(),
      resume_from ? fmt::format(", resumed at step {}", resume_from->step) : "");
}

// A text of the model in one line, or in two of most terminals, without what steers a terminal.
std::string sample_line(const TextSample& sample) {
  constexpr size_t kColumns = 160;
  std::string text = "text: " + sample.prompt + sample.text;
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ' || c == '\x7f') c = ' ';
  }
  return cut_to_width(text, kColumns);
}

// A run's command line, as all of its ranks have it.
struct TrainCommand {
  Command& command;
  TrainFlags& flags;
  CommonOptions& common;
  TaskComparison tasks;

  fs::path shards() const { return flags.shards.empty() ? common.out / "shards" : flags.shards; }
};

// Puts the original and the sparse model side by side, on the device that trained. Returns false
// when it was interrupted.
bool compare_models(TrainCommand& line, const TrainOptions& options, bool on_gpu,
                    const fs::path& checkpoint, const TrainingData& data,
                    const Tokenizer& tokenizer, ProgressLine& progress) {
  const ValidationOptions held_out{.sequences = options.validation_sequences,
                                   .length = options.sequence_length,
                                   .document_mask = options.document_mask};
  const ScorerPlan plan = side_by_side_plan(held_out);
  const auto load = [&](const fs::path& folder) {
    CommonOptions common = line.common;
    common.device = on_gpu ? "cuda" : "cpu";
    common.checkpoint = folder;
    return load_engine(common, {.scorer = plan});
  };
  const std::unique_ptr<Engine> before = load(line.flags.settings.from), after = load(checkpoint);
  const std::unique_ptr<Scorer> original = before->scorer(FfnPolicy::kAuto),
                                sparse = after->scorer(FfnPolicy::kAuto);
  const SideBySide figures = compare_side_by_side(*original, *sparse, data, held_out);
  if (!line.tasks.run(*original, *sparse, tokenizer, stop_on_signals(), progress)) return false;
  print_side_by_side(figures, line.tasks, line.common.out);
  return true;
}

// What one rank of the run does after all have connected. `requested`: the options before they were
// resolved.
int train_rank(TrainCommand& line, ModelConfig config, const TrainOptions& requested,
               const RunDevice& device, const RankGroup& ranks) {
  const TrainFlags& flags = line.flags;
  const CommonOptions& common = line.common;
  const fs::path shards = line.shards();
  Context ctx(common.threads);
  const std::unique_ptr<RunFolder> folder =
      ranks.first() ? std::make_unique<RunFolder>(common.out, flags.resume)
                    : std::make_unique<RunFolder>(common.out);
  const std::string saved_options = given_options_json(line.command, kPaths);
  // Making shards takes any time: a run that is killed meanwhile begins again with --resume.
  const bool begins = ranks.first() && !flags.resume;
  const bool chats = !flags.settings.chat_data.empty();
  if (begins) folder->begin(saved_options);
  ranks.require_shared(common.out);
  ranks.require_equal("options", common_ground(line.command, flags, device));
  ProgressLine progress(flags.log_interval, ranks.first() ? stdout : nullptr);
  const auto resume_from = agreed_resume_point(ranks, flags, *folder);
  const fs::path origin = resume_from ? resume_from->folder : flags.settings.from;
  std::optional<Tokenizer> made;
  if (chats) {
    made = Tokenizer::load(origin / "tokenizer.json");
  } else if (ranks.first()) {
    try {
      made = prepare(flags, common, config, shards, progress);
    } catch (const InputError&) {
      // A folder with unusable data holds no run.
      std::error_code ignored;
      if (begins) fs::remove(folder->options_path(), ignored);
      throw;
    }
  }
  ranks.wait_for_all();
  const Tokenizer tokenizer = made ? std::move(*made) : Tokenizer::load(shards / "tokenizer.json");
  return_freed_memory();  // frees tens of MiB of text and tables that the plan does not count
  config = match_tokenizer(flags.settings, config, tokenizer);
  line.tasks.check(config, tokenizer);
  const TrainOptions checked = resolve_options(requested, config);
  const TextSampler sampler(
      config, tokenizer, stop_on_signals(),
      {.prompts = checked.sample_prompts, .tokens = checked.sample_tokens, .seed = checked.seed});
  check_interrupted();
  std::optional<ShardSet> shard_set;
  ChatRun chat;
  if (chats) {
    try {
      chat = read_chat(flags, common, ctx, config, resolve_options(requested, config), tokenizer,
                       origin, progress.log_sink());
    } catch (const InputError&) {
      std::error_code ignored;
      if (begins) fs::remove(folder->options_path(), ignored);
      throw;
    }
    progress.print(chat.summary());
  } else {
    shard_set.emplace(shards, tokenizer);
    progress.print(
        fmt::format("data: {} training and {} validation tokens",
                    format_count(static_cast<double>(shard_set->tokens(Split::kTrain))),
                    format_count(static_cast<double>(shard_set->tokens(Split::kValidation)))));
  }
  const TrainingData& data = chats ? static_cast<const TrainingData&>(*chat.data) : *shard_set;
  StartedRun started(ctx, flags.settings, config, requested, resume_from,
                     {.allow_non_finite = common.allow_non_finite});
  const TrainOptions& options = started.options();
  progress.print(starting_line(config, options, device, resume_from));
  if (resume_from && resume_from->step == options.steps) {
    progress.print("nothing is left to do: every step is done; a larger --steps trains on");
  }
  if (ranks.communicator() != nullptr) {
    ranks.require_equal(
        "state",
        {{chats ? "chat data" : "shards",
          chats ? data.identity() : fingerprint(MappedFile(shards / "manifest.json").bytes())},
         {"weights before the first step",
          fingerprint(std::as_bytes(started.model().flat.span()))}});
  }
  TrainRun run{options,
               tokenizer,
               data,
               *folder,
               saved_options,
               resume_from,
               flags.settings.tensorboard,
               stop_on_signals(),
               progress.log_sink(),
               {}};
  run.text_files = chats ? chat.text_files : started.text_files();
  run.sample = [&](const Model& model) { return sampler.texts(ctx, model); };
  run.on_progress = [&](const Progress& now) {
    if (now.metrics.step == 0) {
      progress.print(fmt::format("validation CE {:.3f} before the first step", *now.validation_ce));
      return;
    }
    progress.update(
        [&](size_t columns) {
          return format_progress(now.metrics, now.steps, now.validation_ce, now.eta_seconds,
                                 columns);
        },
        now.metrics.validation_ce.has_value());
    for (const TextSample& sample : now.metrics.samples) progress.print(sample_line(sample));
  };
  started.make_engine(ctx, device, data, ranks.communicator());
  ranks.wait_for_all();  // reading a checkpoint takes any time
  const TrainSummary summary = run_training(ctx, started.engine(), run);
  progress.finish();
  if (!ranks.first()) return summary.interrupted ? interrupted_exit_code() : kExitOk;
  print_summary(summary, options, resume_from.has_value());
  const bool compares = flags.settings.relufy && !summary.interrupted && options.validate_every > 0;
  started.drop_engine();
  const bool whole = !compares || compare_models(line, options, device.on_gpu(), summary.checkpoint,
                                                 data, tokenizer, progress);
  return summary.interrupted || !whole ? interrupted_exit_code() : kExitOk;
}

// Starts the ranks, or plans the run and takes part in it. The ranks are connected already, so that
// they learn of what one of them refuses.
int plan_and_train(Command& command, TrainFlags& flags, CommonOptions& common,
                   const RankIdentity& identity, int64_t to_start, const RankGroup& ranks) {
  flags.settings.from = checkpoint_folder(flags.settings.from);
  common.seed = flags.settings.train.seed;
  const ModelConfig config = requested_config(flags.settings);
  const auto [asked, note] = requested_options(flags.settings, config);
  TWELL_REQUIRE(flags.settings.relufy || flags.tasks.tasks.empty(), "--tasks goes with --relufy");
  TWELL_REQUIRE(!flags.tasks.tasks.empty() || flags.tasks.data.empty(),
                "--task-data goes with --tasks");
  TWELL_REQUIRE(!flags.tasks.tasks.empty() || flags.tasks.limit == 0,
                "--task-limit goes with --tasks");
  TrainCommand line{command, flags, common, TaskComparison(flags.tasks)};
  if (flags.gpus > 0) common.device = "cuda";
  if (flags.ranks > 0) common.device = "cpu";
  TrainOptions requested = asked;
  requested.ranks = to_start > 0 ? to_start : identity.size;
  const TrainOptions options = resolve_options(requested, config);
  // Without --out, which only a dry run may leave out, there are no shards yet.
  const fs::path shards = common.out.empty() ? flags.shards : line.shards();
  const fs::path& chat_data = flags.settings.chat_data;
  TWELL_REQUIRE(chat_data.empty() ||
                    (common.data.empty() && flags.shards.empty() && flags.data.tokenizer.empty()),
                "--chat-data takes the place of text, and the tokenizer is that of --from: leave "
                "--data, --shards and --tokenizer out");
  const int64_t data_bytes =
      chat_data.empty() ? shard_bytes(data_request(flags, flags.data, common, config), shards)
                        : chat_bytes(chat_data);
  if (to_start > 0 && !flags.dry_run) {
    return launch_ranks({to_start, flags.max_restarts, common.out});
  }
  if (!note.empty() && !flags.resume && ranks.first()) print_error("twell: warning: {}\n", note);
  share_threads(identity, common);
  if (flags.dry_run && common.device == "cuda") {
    if (const std::string no_gpu = gpu_unavailable(); !no_gpu.empty()) {
      print_plan(options, plan_run_unknown_gpu(config, options, data_bytes));
      fmt::print("Without a GPU here ({}) its memory for activations and libraries is not known.\n",
                 no_gpu);
      return kExitOk;
    }
  }
  const int gpu = use_cuda(common) ? device_of_rank(identity, gpu_count()) : -1;
  const RunDevice device(gpu, common.device == "auto", config, options);
  if (!device.why_not_gpu().empty() && ranks.first()) {
    print_error("twell: training on the CPU: {}\n", device.why_not_gpu());
  }
  const RunPlan plan = device.plan(config, options, data_bytes);
  if (flags.dry_run) {
    print_plan(options, plan);
    return kExitOk;
  }
  require_memory(plan.memory_bytes() * (device.on_gpu() ? 1 : identity.local_size));
  device.require_memory(plan);
  stop_on_signals();
  return train_rank(line, config, requested, device, ranks);
}

int train(Command& command, TrainFlags& flags, CommonOptions& common) {
  const RankIdentity identity = process_identity();
  flags.resume = flags.resume || flags.resume_from || flags.fall_back;
  TWELL_REQUIRE(!common.out.empty() || (flags.dry_run && !flags.resume),
                "no output folder given: add --out DIR");
  if (!flags.dry_run && started_again() && can_continue(common.out)) {
    flags.resume = true;
    if (flags.resume_from && identity.rank == 0) {
      print_error(
          "twell: warning: a launcher started this command again, so the run continues from its "
          "newest checkpoint; --resume-from {} was for the first start\n",
          *flags.resume_from);
    }
    flags.resume_from.reset();
  }
  const fs::path options_file = common.out / "options.json";
  if (flags.resume && fs::exists(options_file)) {
    // The number of ranks is remembered, unless it is given or a launcher has decided it.
    const bool decided =
        command.at("gpus").given() || command.at("ranks").given() || identity.size > 1;
    apply_saved_options(command, options_file, kMadeTheData,
                        decided ? std::set<std::string>{"gpus", "ranks"} : std::set<std::string>{});
  }

  const int64_t to_start = ranks_to_start(flags, common, identity);
  const bool is_rank = to_start == 0 && !flags.dry_run;
  const auto timeout =
      std::chrono::milliseconds(static_cast<int64_t>(flags.collective_timeout * 1000.0));
  const RankGroup ranks(is_rank ? identity : RankIdentity{}, timeout);
  try {
    return plan_and_train(command, flags, common, identity, to_start, ranks);
  } catch (const RankFault& fault) {
    const auto good = RunFolder(common.out).latest();
    throw RankFault(fmt::format(
        "{} ({})", fault.what(),
        good ? "the last good checkpoint is " + good->folder.string() : "nothing was saved yet"));
  } catch (const Interrupted&) {
    if (ranks.first()) {
      print_error("twell: interrupted before the first step: run the same command again\n");
    }
    ranks.fail("it was interrupted");
    throw;
  } catch (const AgreedError&) {
    throw;
  } catch (const std::bad_alloc&) {
    prints_error();  // before the others learn of it
    ranks.fail("out of memory");
    throw;
  } catch (const std::exception& error) {
    prints_error();
    ranks.fail(error.what());
    throw;
  }
}

}  // namespace

void add_train_command(Command& root, CommonOptions& common) {
  const auto flags = std::make_shared<TrainFlags>();
  Command& command = root.add("train", "Train a sparse language model on text");
  command.runs([flags, &command, &common] { return train(command, *flags, common); });
  command.config_file();
  add_data_option(
      command, common,
      "Text to train on: files and folders of text, .jsonl or .parquet, also .gz, .xz, .zst; "
      "repeatable");
  add_non_finite_option(command, common);
  add_out_option(command, common, "Folder of the run");
  add_train_flags(command, *flags);
  add_threads_option(command, common);
  add_device_option(command, common);
  command.footer(kTrainFooter);
}

}  // namespace twell::cli
