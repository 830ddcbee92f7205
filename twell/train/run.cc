// SPDX-License-Identifier: Apache-2.0
#include "twell/train/run.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/train/plan.h"
#include "twell/train/tensorboard.h"
#include "twell/train/trainer.h"

namespace twell {
namespace {

using Scalars = std::vector<std::pair<std::string, double>>;

Scalars tensorboard_scalars(const StepMetrics& metrics) {
  Scalars scalars;
  if (metrics.validation_ce) scalars.emplace_back("loss/validation_ce", *metrics.validation_ce);
  if (metrics.layers.empty()) return scalars;
  scalars.insert(scalars.end(), {{"loss/ce", metrics.ce},
                                 {"loss/l1", metrics.l1},
                                 {"loss/total", metrics.loss()},
                                 {"optimizer/learning_rate", metrics.learning_rate},
                                 {"optimizer/l1_coeff", metrics.l1_coeff},
                                 {"optimizer/grad_norm", metrics.grad_norm},
                                 {"speed/tokens_per_s", metrics.tokens_per_second}});
  if (metrics.mfu) scalars.emplace_back("speed/mfu", *metrics.mfu);
  for (size_t i = 0; i < metrics.layers.size(); ++i) {
    scalars.emplace_back(fmt::format("nnz/layer_{:02}", i), metrics.layers[i].nnz);
    scalars.emplace_back(fmt::format("dead_share/layer_{:02}", i), metrics.layers[i].dead_share);
  }
  return scalars;
}

// Text as Markdown shows it as it is, line by line.
std::string literal(std::string_view text) {
  std::string lines = "    ";
  for (const char c : text) {
    lines += c;
    if (c == '\n') lines += "    ";
  }
  return lines;
}

std::vector<std::pair<std::string, std::string>> tensorboard_texts(const StepMetrics& metrics) {
  std::vector<std::pair<std::string, std::string>> texts;
  for (const TextSample& sample : metrics.samples) {
    texts.emplace_back(fmt::format("samples/{}", texts.size()),
                       literal(sample.prompt + sample.text));
  }
  return texts;
}

std::string data_identity(const TrainRun& run) {
  return fmt::format("{}, tokenizer {}", run.data.identity(), run.tokenizer.hash());
}

// The state of one call of run_training.
class Loop {
 public:
  Loop(Context& ctx, TrainEngine& engine, const TrainRun& run)
      : run_(run),
        engine_(engine),
        ranks_(engine.ranks()),
        first_(ranks_ == nullptr || ranks_->rank() == 0),
        config_(engine.model().config),
        trainer_(ctx, engine, run.data, run.options, data_identity(run)),
        checkpoint_bytes_(checkpoint_bytes(engine.model().config, run.options)) {
    TWELL_CHECK(run.options.sample_every == 0 || run.sample, "a run without its sampler");
    if (run.resume_from) {
      trainer_.restore(run.resume_from->folder);
      summary_.checkpoint = run.resume_from->folder;
      saved_step_ = trainer_.steps_done();
    }
    if (!first_) return;
    if (!run.resume_from && run.folder.begins_again()) {
      log(LogLevel::kInfo, "the run was ended before its first checkpoint: it begins again");
    }
    if (run.resume_from) run.folder.discard_after(trainer_.steps_done());
    run.folder.begin(run.saved_options);
    const int64_t kept = run.resume_from ? trainer_.steps_done() : -1;  // last step to keep
    metrics_ = std::make_unique<MetricsWriter>(run.folder.metrics_path(), kept, run.log);
    if (run.tensorboard) {
      const int64_t first = run.resume_from ? trainer_.steps_done() + 1 : 0;
      tensorboard_ = std::make_unique<TensorBoardWriter>(run.folder.path() / "tensorboard", first);
    }
  }

  TrainSummary run() {
    const auto start = std::chrono::steady_clock::now();
    if (trainer_.steps_done() == 0 && run_.options.validate_every > 0) {
      StepMetrics before;
      validate(before);
      report(before);
    }
    if (first_) warn_of_little_room();
    while (!trainer_.finished()) {
      // CPU ranks' weights are still on their way, and this exchange waits behind them.
      const auto begin = Trainer::Clock::now();
      if (stop_requested()) break;
      step(begin);
    }
    summary_.interrupted = !trainer_.finished();
    if (saved_step_ != trainer_.steps_done()) save_last();
    if (first_) metrics_->flush();
    summary_.steps_done = trainer_.steps_done();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    summary_.seconds = elapsed.count();
    return std::move(summary_);
  }

 private:
  bool stop_requested() {
    uint8_t stop = run_.stop.load() ? 1 : 0;
    if (ranks_ != nullptr) ranks_->all_reduce_max(std::span(&stop, 1));
    return stop != 0;
  }

  void step(Trainer::Clock::time_point begin) {
    const TrainOptions& options = run_.options;
    StepMetrics metrics = trainer_.train_step(begin);
    log_changed_executions(metrics);
    const bool last = trainer_.finished();
    if (options.validate_every > 0 && (last || metrics.step % options.validate_every == 0)) {
      validate(metrics);
    }
    if (options.sample_every > 0 && (last || metrics.step % options.sample_every == 0)) {
      sample(metrics);
    }
    report(metrics);
    if (!last && options.save_every > 0 && metrics.step % options.save_every == 0) {
      if (const std::string fault = save(); !fault.empty()) {
        warn(fmt::format("{}; training goes on, and the next checkpoint is tried {} steps later",
                         fault, options.save_every));
      }
    }
    summary_.last = std::move(metrics);
  }

  void validate(StepMetrics& metrics) {
    metrics.validation_ce = trainer_.validate();
    if (!summary_.first_validation_ce) summary_.first_validation_ce = metrics.validation_ce;
    summary_.last_validation_ce = metrics.validation_ce;
  }

  // The other ranks, whose weights rank 0 may be waiting for, wait for its texts.
  void sample(StepMetrics& metrics) {
    const std::vector<std::string>& prompts = run_.options.sample_prompts;
    engine_.read_state([&](const OptimizerTensors&) {
      if (!first_) return;
      try {
        const std::vector<std::string> texts = run_.sample(engine_.model());
        TWELL_CHECK(texts.size() == prompts.size(), "{} texts of {}", texts.size(), prompts.size());
        for (size_t i = 0; i < texts.size(); ++i) metrics.samples.push_back({prompts[i], texts[i]});
      } catch (const InputError& error) {
        warn(fmt::format("no texts of step {}: {}", metrics.step, error.what()));
      }
    });
    from_first("");
  }

  void report(const StepMetrics& metrics) {
    if (!first_) return;
    record(metrics);
    if (!run_.on_progress) return;
    if (metrics.seconds > 0) {
      // Exponential average with a time constant of about ten steps.
      step_seconds_ =
          step_seconds_ == 0 ? metrics.seconds : 0.9 * step_seconds_ + 0.1 * metrics.seconds;
    }
    const double left = static_cast<double>(run_.options.steps - metrics.step);
    run_.on_progress({metrics, run_.options.steps, summary_.last_validation_ce,
                      step_seconds_ == 0 ? -1.0 : step_seconds_ * left});
  }

  // Training goes on when measurements cannot be written; a full disk may have room again later.
  void record(const StepMetrics& metrics) {
    try {
      metrics_->write(metrics);
      metrics_fail_ = false;
    } catch (const InputError& error) {
      if (!std::exchange(metrics_fail_, true)) {
        warn(fmt::format("{}; its lines are kept in memory until it can be written", error.what()));
      }
    }
    try {
      if (tensorboard_) tensorboard_->scalars(metrics.step, tensorboard_scalars(metrics));
      if (tensorboard_ && !metrics.samples.empty()) {
        tensorboard_->texts(metrics.step, tensorboard_texts(metrics));
      }
    } catch (const InputError& error) {
      tensorboard_.reset();
      warn(fmt::format("{}; TensorBoard's events end before step {}", error.what(), metrics.step));
    }
  }

  void log(LogLevel level, const std::string& message) const {
    if (first_ && run_.log) run_.log(level, message);
  }
  void warn(const std::string& message) const { log(LogLevel::kWarning, message); }

  std::string room() const {
    const int64_t free = run_.folder.free_bytes();
    return fmt::format("a checkpoint needs {}, {} has {} free",
                       format_bytes(static_cast<double>(checkpoint_bytes_)),
                       run_.folder.path().string(),
                       free < 0 ? "an unknown amount" : format_bytes(static_cast<double>(free)));
  }

  // While a checkpoint is written, those to keep are there too.
  void warn_of_little_room() const {
    const int64_t left = run_.options.steps - trainer_.steps_done();
    if (left == 0) return;
    const int64_t every = run_.options.save_every;
    const int64_t to_come = every > 0 ? (left + every - 1) / every : 1;
    const int64_t most =
        std::max<int64_t>(run_.options.keep_last + 1 - run_.folder.checkpoints(), 1);
    const int64_t free = run_.folder.free_bytes(), more = std::min(to_come, most);
    if (free < 0 || free >= more * checkpoint_bytes_) return;
    warn(fmt::format("{}; make room for {} before {} saved", room(),
                     more == 1 ? "one" : fmt::format("the {} that are there at a time", more),
                     more == 1 ? "it is" : "they are"));
  }

  // Passes rank 0's text to all ranks, without a time limit.
  std::string from_first(const std::string& text) {
    if (ranks_ == nullptr) return text;
    const std::string key = fmt::format("first/{}", messages_++);
    if (!first_) return ranks_->rendezvous().get(key);
    ranks_->rendezvous().put(key, text);
    return text;
  }

  // Saves a checkpoint. Returns why that was not possible, the same on all ranks, or nothing.
  std::string save() {
    std::string fault;
    bool begun = false;
    const auto attempt = [&](const auto& call) {
      try {
        call();
      } catch (const DivergenceError&) {
        throw;
      } catch (const InputError& error) {
        fault = error.what();
      }
    };
    // Rank 0 makes the folder and gives it its name once all ranks have written their parts.
    if (first_) {
      attempt([&] {
        const int64_t free = run_.folder.free_bytes();
        TWELL_REQUIRE(free < 0 || free >= checkpoint_bytes_, "too little room");
        const Checkpoint saved = run_.folder.save(trainer_.steps_done(), run_.options.keep_last,
                                                  [&](const std::filesystem::path& folder) {
                                                    begun = true;
                                                    write_parts(from_first(folder.string()));
                                                  });
        summary_.checkpoint = saved.folder;
        // Someone may have removed the folder under the run.
        if (!std::filesystem::exists(run_.folder.options_path())) {
          run_.folder.begin(run_.saved_options);
        }
      });
      if (!begun) from_first("");
      if (!fault.empty()) {
        fault = fmt::format("the checkpoint of step {} could not be saved: {} ({})",
                            trainer_.steps_done(), fault, room());
      }
    } else if (const std::string folder = from_first({}); !folder.empty()) {
      attempt([&] { write_parts(folder); });
    }
    fault = from_first(fault);
    if (fault.empty()) saved_step_ = trainer_.steps_done();
    return fault;
  }

  // The steps since the checkpoint before would be lost, so room may be made for a while.
  void save_last() {
    const bool stopping = run_.stop.load();
    for (int64_t attempts = 1;; ++attempts) {
      const std::string fault = save();
      if (fault.empty()) return;
      bool again = attempts < run_.last_save_attempts;
      if (again && first_) {
        warn(fmt::format("{}; make room, it is tried again in {:.0f} s ({} of {} attempts)", fault,
                         std::chrono::duration<double>(run_.last_save_pause).count(), attempts,
                         run_.last_save_attempts));
        const auto end = std::chrono::steady_clock::now() + run_.last_save_pause;
        while (std::chrono::steady_clock::now() < end && run_.stop.load() == stopping) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        again = run_.stop.load() == stopping;
      }
      if (from_first(again ? "again" : "") == "again") continue;
      const std::optional<Checkpoint> good = run_.folder.latest();
      throw AgreedError(
          fmt::format("{}; {}", fault,
                      good ? fmt::format("the last good checkpoint is {}", good->folder.string())
                           : "nothing was saved"));
    }
  }

  // InputError on all ranks when one cannot write its part.
  void write_parts(const std::filesystem::path& folder) {
    if (ranks_ == nullptr) return write_part(folder);
    std::string fault;
    std::exception_ptr thrown;
    try {
      write_part(folder);
    } catch (const RankFault&) {
      throw;
    } catch (const InputError& error) {
      fault = error.what();
      if (dynamic_cast<const DivergenceError*>(&error) != nullptr)
        thrown = std::current_exception();
    } catch (const std::exception& error) {
      fault = error.what();
      thrown = std::current_exception();
    }
    const std::string verdict = ranks_->rendezvous().agree(fault);
    if (thrown) std::rethrow_exception(thrown);
    TWELL_REQUIRE(verdict.empty(), "{}", verdict);
  }

  void write_part(const std::filesystem::path& folder) {
    trainer_.save(folder);
    if (first_) save_text_files(folder, config_, run_.tokenizer, run_.text_files);
  }

  void log_changed_executions(const StepMetrics& metrics) {
    for (const std::string& line : changes_.settled(metrics, config_.ffn)) {
      log(LogLevel::kInfo, line);
    }
  }

  const TrainRun& run_;
  TrainEngine& engine_;
  Communicator* ranks_;
  bool first_;
  const ModelConfig& config_;
  ExecutionChanges changes_;
  Trainer trainer_;
  std::unique_ptr<MetricsWriter> metrics_;
  std::unique_ptr<TensorBoardWriter> tensorboard_;
  TrainSummary summary_;
  int64_t checkpoint_bytes_;
  double step_seconds_ = 0.0;
  int64_t saved_step_ = -1;
  int64_t messages_ = 0;       // of from_first
  bool metrics_fail_ = false;  // a warning was given
};

}  // namespace

TrainSummary run_training(Context& ctx, TrainEngine& engine, const TrainRun& run) {
  try {
    return Loop(ctx, engine, run).run();
  } catch (const DivergenceError& error) {
    const std::optional<Checkpoint> good = run.folder.latest();
    throw InputError(fmt::format(
        "training diverged: {}; lower the learning rate or lengthen the warm-up ({})", error.what(),
        good ? "the last good checkpoint is " + good->folder.string() : "nothing was saved yet"));
  }
}

void check_tokenizer(const ModelConfig& config, const Tokenizer& tokenizer) {
  TWELL_REQUIRE(
      tokenizer.vocab_size() <= config.vocab_size,
      "the tokenizer has {0} tokens, the model's vocabulary only {1}: give a --vocab-size "
      "of {0} or more, or none",
      tokenizer.vocab_size(), config.vocab_size);
}

}  // namespace twell
