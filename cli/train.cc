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
#include "cli/train_device.h"
#include "cli/train_flags.h"
#include "twell/base/content_hash.h"
#include "twell/base/context.h"
#include "twell/base/cpu_limit.h"
#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/train/plan.h"
#include "twell/train/run.h"
#include "twell/train/side_by_side.h"

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
  twell train --preset 0.5b --data docs/ --out runs/half --device cuda
  twell train --preset 0.5b --data docs/ --out runs/eight --gpus 8 --max-restarts 3
  torchrun --nnodes 2 --nproc-per-node 8 ... --no-python twell train --config run.toml
  twell train --preset 0.5b --dry-run)";

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

// The model's configuration before the vocabulary is matched to the tokenizer.
ModelConfig requested_config(const TrainFlags& flags) {
  if (flags.from.empty()) return model_config(flags.model);
  TWELL_REQUIRE(!flags.model.any(),
                "--from takes the model from the checkpoint; leave the options of the model out");
  ModelConfig config = load_config(flags.from);
  if (flags.relufy) config.activation = Activation::kRelu;
  return config;
}

// Adds the options that --relufy implies.
void add_relufy(const TrainFlags& flags, TrainOptions& options) {
  TWELL_REQUIRE(!flags.from.empty() || (!flags.relufy && options.distill == 0.0),
                "--relufy and --distill start from a model: add --from DIR");
  if (flags.relufy) {
    options.relufy_from = load_config(flags.from).activation;
    TWELL_REQUIRE(!leaves_zeros(options.relufy_from), "{} has {} already: leave --relufy out",
                  flags.from.string(), activation_name(options.relufy_from));
  }
  TWELL_REQUIRE(flags.relufy || options.relufy_steps == 0, "--relufy-steps goes with --relufy");
  TWELL_REQUIRE(flags.relufy || flags.tasks.tasks.empty(), "--tasks goes with --relufy");
}

// Turns the default L1 off for a new run whose activation leaves no zeros, where L1 would only
// shrink activations. Returns what to tell the user, or nothing. InputError when L1 was asked for.
std::string turn_off_useless_l1(Command& command, const TrainFlags& flags,
                                const ModelConfig& config) {
  if (flags.resume || leaves_zeros(config.activation)) return {};
  const std::string name(activation_name(config.activation));
  const char* const remedy = flags.from.empty() ? "take --activation relu" : "add --relufy";
  Option& l1 = command.at("l1");
  TWELL_REQUIRE(!l1.given() || flags.train.l1_coeff == 0.0,
                "--l1 makes no layer sparse with {}, which leaves no zeros: {}, or leave --l1 out",
                name, remedy);
  if (l1.given()) return {};
  l1.set({"0"});
  return fmt::format(
      "{} leaves no zeros: the model stays dense, and L1 is off; for a sparse one {}", name,
      remedy);
}

// Files to copy next to the weights, which chat and generation need.
std::vector<fs::path> companions(const TrainFlags& flags) {
  std::vector<fs::path> found;
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json",
                           "generation_config.json", "chat_template.jinja", "chat_template.json"}) {
    if (!flags.from.empty() && fs::is_regular_file(flags.from / name)) {
      found.push_back(flags.from / name);
    }
  }
  return found;
}

// Takes the vocabulary size from the tokenizer unless it was given.
ModelConfig match_tokenizer(const TrainFlags& flags, ModelConfig config,
                            const Tokenizer& tokenizer) {
  if (flags.from.empty()) {
    if (!flags.model.vocab_size) config.vocab_size = tokenizer.vocab_size();
    config.eos_token = tokenizer.eos_token();
  }
  check_tokenizer(config, tokenizer);
  config.validate();
  return config;
}

DataRequest data_request(const TrainFlags& flags, const DataOptions& data,
                         const CommonOptions& common, const ModelConfig& config) {
  return {data, common.data, config.vocab_size, common.seed, common.threads, flags.shards.empty()};
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
  if (data.tokenizer.empty() && !flags.from.empty()) data.tokenizer = flags.from / "tokenizer.json";
  return std::move(
      prepare_shards(data_request(flags, data, common, config), shards, progress).tokenizer);
}

std::unique_ptr<Model> make_model(Context& ctx, const TrainFlags& flags, const LoadOptions& load,
                                  const ModelConfig& config, uint64_t seed,
                                  const std::optional<Checkpoint>& resume_from) {
  if (resume_from) {
    auto model = load_model(ctx, resume_from->folder, load);
    TWELL_REQUIRE(model->config == config, "the options describe another model than {}: {}",
                  resume_from->folder.string(), differing_options(config, model->config));
    return model;
  }
  if (!flags.from.empty()) {
    auto model = load_model(ctx, flags.from, load);
    model->set_activation(config.activation);
    return model;
  }
  auto model = std::make_unique<Model>(config);
  init_weights(ctx, *model, seed);
  return model;
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
                                                 const TrainDevice& device) {
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

// What one rank of the run does after all have connected. `requested`: the options before they were
// resolved.
int train_rank(Command& command, const TrainFlags& flags, const CommonOptions& common,
               ModelConfig config, const TrainOptions& requested, TaskComparison& tasks,
               const TrainDevice& device, const RankGroup& ranks) {
  const std::atomic<bool>& stop = stop_on_signals();
  TrainOptions options = resolve_options(requested, config);
  const fs::path shards = flags.shards.empty() ? common.out / "shards" : flags.shards;
  Context ctx(common.threads);
  const std::unique_ptr<RunFolder> folder =
      ranks.first() ? std::make_unique<RunFolder>(common.out, flags.resume)
                    : std::make_unique<RunFolder>(common.out);
  ranks.require_shared(common.out);
  ranks.require_equal("options", common_ground(command, flags, device));
  ProgressLine progress(flags.log_interval, ranks.first() ? stdout : nullptr);
  std::optional<Tokenizer> made;
  if (ranks.first()) made = prepare(flags, common, config, shards, progress);
  ranks.wait_for_all();
  const Tokenizer tokenizer = made ? std::move(*made) : Tokenizer::load(shards / "tokenizer.json");
  return_freed_memory();  // frees tens of MiB of text and tables that the plan does not count
  config = match_tokenizer(flags, config, tokenizer);
  tasks.check(config, tokenizer);
  check_interrupted();
  const ShardSet shard_set(shards, tokenizer);
  progress.print(
      fmt::format("data: {} training and {} validation tokens",
                  format_count(static_cast<double>(shard_set.tokens(Split::kTrain))),
                  format_count(static_cast<double>(shard_set.tokens(Split::kValidation)))));

  const LoadOptions load{.allow_non_finite = common.allow_non_finite};
  const auto resume_from = agreed_resume_point(ranks, flags, *folder);
  // A warm-up that was not given was derived from the earlier run's number of steps, and a batch
  // from its number of ranks.
  if (resume_from) {
    TWELL_REQUIRE(resume_from->step <= options.steps,
                  "the run has done {} steps already, more than the {} asked for: give --steps a "
                  "larger number, or go back with --resume-from STEP",
                  resume_from->step, options.steps);
    TrainOptions saved = requested;
    if (saved.warmup_steps < 0) {
      saved.warmup_steps = saved_option(resume_from->folder, "warmup-steps");
    }
    if (saved.batch_tokens == 0) {
      saved.batch_tokens = saved_option(resume_from->folder, "batch-tokens");
    }
    options = resolve_options(saved, config);
  }
  const std::unique_ptr<Model> model =
      make_model(ctx, flags, load, config, options.seed, resume_from);
  progress.print(fmt::format(
      "model: {} parameters, {} layers, width {}, FFN {}, on {}{}{}",
      format_count(static_cast<double>(config.parameter_count())), config.layers, config.width,
      config.ffn, options.ranks == 1 ? "" : fmt::format("{} ranks, ", options.ranks), device.name(),
      resume_from ? fmt::format(", resumed at step {}", resume_from->step) : ""));
  if (resume_from && resume_from->step == options.steps) {
    progress.print("nothing is left to do: every step is done; a larger --steps trains on");
  }
  if (ranks.communicator() != nullptr) {
    ranks.require_equal(
        "state",
        {{"shards", fingerprint(MappedFile(shards / "manifest.json").bytes())},
         {"weights before the first step", fingerprint(std::as_bytes(model->flat.span()))}});
  }
  // A copy of the original model, for distillation and for the comparison.
  const bool original_needed = flags.relufy || options.distill > 0.0;
  const std::unique_ptr<Model> original =
      original_needed ? load_model(ctx, flags.from, load) : nullptr;
  TrainRun run{
      options,
      tokenizer,
      shard_set,
      *folder,
      given_options_json(command, {"data", "shards", "tokenizer", "from", "task-data", "out"}),
      resume_from,
      flags.tensorboard,
      stop,
      progress.log_sink(),
      {}};
  run.companions = companions(flags);
  run.on_progress = [&](const Progress& now) {
    if (now.metrics.step == 0) {
      progress.print(fmt::format("validation CE {:.3f} before the first step", *now.validation_ce));
      return;
    }
    progress.update(format_progress(now.metrics, now.steps, now.validation_ce, now.eta_seconds),
                    now.metrics.validation_ce.has_value());
  };
  const Model* const teacher = options.distill > 0.0 ? original.get() : nullptr;
  const auto engine = device.engine(ctx, *model, shard_set, options, teacher, ranks.communicator());
  ranks.wait_for_all();  // reading a checkpoint takes any time
  const TrainSummary summary = run_training(ctx, *engine, run);
  progress.finish();
  if (!ranks.first()) return summary.interrupted ? interrupted_exit_code() : kExitOk;
  print_summary(summary, options, resume_from.has_value());
  if (flags.relufy && !summary.interrupted && options.validate_every > 0) {
    const ValidationOptions held_out{.sequences = options.validation_sequences,
                                     .length = options.sequence_length,
                                     .document_mask = options.document_mask};
    const SideBySide figures = compare_side_by_side(ctx, *original, *model, shard_set, held_out);
    if (!tasks.run(ctx, *original, *model, tokenizer, stop, progress)) {
      return interrupted_exit_code();
    }
    print_side_by_side(figures, tasks, common.out);
  }
  return summary.interrupted ? interrupted_exit_code() : kExitOk;
}

// Starts the ranks, or plans the run and takes part in it. The ranks are connected already, so that
// they learn of what one of them refuses.
int plan_and_train(Command& command, TrainFlags& flags, CommonOptions& common,
                   const RankIdentity& identity, int64_t to_start, const RankGroup& ranks) {
  flags.from = checkpoint_folder(flags.from);
  ModelConfig config = requested_config(flags);
  const std::string dense = turn_off_useless_l1(command, flags, config);
  TrainOptions requested = train_options(flags, common);
  add_relufy(flags, requested);
  TaskComparison tasks(flags.tasks);
  if (flags.gpus > 0) common.device = "cuda";
  if (flags.ranks > 0) common.device = "cpu";
  requested.ranks = to_start > 0 ? to_start : identity.size;
  const TrainOptions options = resolve_options(requested, config);
  const fs::path shards = flags.shards.empty() ? common.out / "shards" : flags.shards;
  const int64_t data_bytes = shard_bytes(data_request(flags, flags.data, common, config), shards);
  if (to_start > 0 && !flags.dry_run) {
    return launch_ranks({to_start, flags.max_restarts, common.out});
  }
  if (!dense.empty() && ranks.first()) print_error("twell: warning: {}\n", dense);
  share_threads(identity, common);
  if (flags.dry_run && common.device == "cuda") {
    if (const std::string no_gpu = gpu_unavailable(); !no_gpu.empty()) {
      print_plan(options, plan_run_unknown_gpu(config, options, data_bytes));
      fmt::print("Without a GPU here ({}) its memory for activations and libraries is not known.\n",
                 no_gpu);
      return kExitOk;
    }
  }
  const TrainDevice device(common, config, options, identity);
  const RunPlan plan = device.plan(config, options, data_bytes);
  if (flags.dry_run) {
    print_plan(options, plan);
    return kExitOk;
  }
  require_memory(plan.memory_bytes() * (device.on_gpu() ? 1 : identity.local_size));
  device.require_memory(plan);
  stop_on_signals();
  return train_rank(command, flags, common, config, requested, tasks, device, ranks);
}

int train(Command& command, TrainFlags& flags, CommonOptions& common) {
  const RankIdentity identity = process_identity();
  if (!flags.dry_run && started_again() && can_continue(common.out, identity.rank == 0)) {
    flags.resume = true;
    if (flags.resume_from && identity.rank == 0) {
      print_error(
          "twell: warning: a launcher started this command again, so the run continues from its "
          "newest checkpoint; --resume-from {} was for the first start\n",
          *flags.resume_from);
    }
    flags.resume_from.reset();
  }
  flags.resume = flags.resume || flags.resume_from || flags.fall_back;
  TWELL_REQUIRE(!common.out.empty() || flags.dry_run, "no output folder given: add --out DIR");
  const fs::path options_file = common.out / "options.json";
  if (flags.resume && fs::exists(options_file)) apply_config_file(command, options_file);

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
    ranks.fail("out of memory");
    throw;
  } catch (const std::exception& error) {
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
  add_compute_options(command, common);
  command.footer(kTrainFooter);
}

}  // namespace twell::cli
