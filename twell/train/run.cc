// SPDX-License-Identifier: Apache-2.0
#include "twell/train/run.h"

#include <chrono>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/train/engine_cpu.h"
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

std::string data_identity(const TrainRun& run) {
  return fmt::format("{} train + {} validation, tokenizer {}", run.shards.tokens(Split::kTrain),
                     run.shards.tokens(Split::kValidation), run.tokenizer.hash());
}

// The state of one call of run_training.
class Loop {
 public:
  Loop(Context& ctx, TrainEngine& engine, const TrainRun& run)
      : run_(run),
        ranks_(engine.ranks()),
        first_(ranks_ == nullptr || ranks_->rank() == 0),
        ffn_(engine.model().config.ffn),
        trainer_(ctx, engine, run.shards, run.options, data_identity(run)) {
    if (run.resume_from) {
      trainer_.restore(run.resume_from->folder);
      summary_.checkpoint = run.resume_from->folder;
      saved_step_ = trainer_.steps_done();
    }
    if (!first_) return;
    if (run.resume_from) run.folder.discard_after(trainer_.steps_done());
    run.folder.begin(run.saved_options);
    const int64_t kept = run.resume_from ? trainer_.steps_done() : -1;  // last step to keep
    metrics_ = std::make_unique<MetricsWriter>(run.folder.metrics_path(), kept);
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
    while (!trainer_.finished() && !stop_requested()) step();
    summary_.interrupted = !trainer_.finished();
    if (saved_step_ != trainer_.steps_done()) save();
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

  void step() {
    const TrainOptions& options = run_.options;
    StepMetrics metrics = trainer_.train_step();
    log_changed_executions(metrics);
    const bool last = trainer_.finished();
    if (options.validate_every > 0 && (last || metrics.step % options.validate_every == 0)) {
      validate(metrics);
    }
    report(metrics);
    if (last || (options.save_every > 0 && metrics.step % options.save_every == 0)) save();
    summary_.last = std::move(metrics);
  }

  void validate(StepMetrics& metrics) {
    metrics.validation_ce = trainer_.validate();
    if (!summary_.first_validation_ce) summary_.first_validation_ce = metrics.validation_ce;
    summary_.last_validation_ce = metrics.validation_ce;
  }

  void report(const StepMetrics& metrics) {
    if (!first_) return;
    metrics_->write(metrics);
    if (tensorboard_) tensorboard_->scalars(metrics.step, tensorboard_scalars(metrics));
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

  void save() {
    saved_step_ = trainer_.steps_done();
    // Rank 0 makes the folder and gives it its name once all ranks have written their parts.
    if (!first_) return write_parts(ranks_->broadcast_text({}, 0));
    const Checkpoint saved = run_.folder.save(
        saved_step_, run_.options.keep_last, [this](const std::filesystem::path& folder) {
          write_parts(ranks_ == nullptr ? folder.string()
                                        : ranks_->broadcast_text(folder.string(), 0));
        });
    summary_.checkpoint = saved.folder;
  }

  void write_parts(const std::filesystem::path& folder) {
    if (ranks_ == nullptr) return write_part(folder);
    std::string fault;
    std::exception_ptr thrown;
    try {
      write_part(folder);
    } catch (const RankFault&) {
      throw;
    } catch (const std::exception& error) {
      fault = error.what();
      thrown = std::current_exception();
    }
    const std::string verdict = ranks_->rendezvous().agree(fault);
    if (thrown) std::rethrow_exception(thrown);
    TWELL_REQUIRE(verdict.empty(), "the checkpoint of step {} could not be saved: {}",
                  trainer_.steps_done(), verdict);
  }

  void write_part(const std::filesystem::path& folder) {
    trainer_.save(folder);
    if (!first_) return;
    run_.tokenizer.save(folder / "tokenizer.json");
    for (const auto& file : run_.companions) {
      write_file_atomic(folder / file.filename(), read_file(file));
    }
  }

  void log_changed_executions(const StepMetrics& metrics) {
    for (const std::string& line : changes_.settled(metrics, ffn_)) {
      if (first_ && run_.log) run_.log(LogLevel::kInfo, line);
    }
  }

  const TrainRun& run_;
  Communicator* ranks_;
  bool first_;
  int64_t ffn_;
  ExecutionChanges changes_;
  Trainer trainer_;
  std::unique_ptr<MetricsWriter> metrics_;
  std::unique_ptr<TensorBoardWriter> tensorboard_;
  TrainSummary summary_;
  double step_seconds_ = 0.0;
  int64_t saved_step_ = -1;
};

}  // namespace

TrainSummary run_training(Context& ctx, Model& model, const TrainRun& run) {
  TrainEngineCpu engine(ctx, model, run.shards, run.options);
  return run_training(ctx, engine, run);
}

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
