// SPDX-License-Identifier: Apache-2.0
// Training for Python: a run of the engine on token shards, as a whole (run) or step by step. Part
// of the module twell._engine; python/twell/training.py wraps it. Options come as the text of a
// JSON object whose names are those of `twell train`, with '_' for '-'.
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "python/csrc/bindings.h"
#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/data/shard_writer.h"
#include "twell/data/shards.h"
#include "twell/data/text_source.h"
#include "twell/infer/text_sampler.h"
#include "twell/tokenizer/end_token.h"
#include "twell/train/chat_run.h"
#include "twell/train/option_table.h"
#include "twell/train/run.h"
#include "twell/train/start.h"
#include "twell/train/trainer.h"

namespace nb = nanobind;

namespace twell::python {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Names of flags in a message as Python spells them: --kv-heads as kv_heads. Commands in backquotes
// stay as they are.
std::string in_words_of_python(const std::string& message) {
  std::string text;
  bool command = false;
  for (size_t i = 0; i < message.size(); ++i) {
    if (message[i] == '`') command = !command;
    const bool flag = !command && message.compare(i, 2, "--") == 0 && i + 2 < message.size() &&
                      std::islower(static_cast<unsigned char>(message[i + 2])) != 0;
    if (!flag) {
      text += message[i];
      continue;
    }
    for (i += 2; i < message.size(); ++i) {
      const auto c = static_cast<unsigned char>(message[i]);
      const bool inner = c == '-' && i + 1 < message.size() &&
                         std::isalnum(static_cast<unsigned char>(message[i + 1])) != 0;
      if (std::isalnum(c) == 0 && !inner) break;
      text += c == '-' ? '_' : message[i];
    }
    --i;
  }
  return text;
}

// The texts that set an option to this value, or to the values of a list. InputError when one is
// of another kind.
std::vector<std::string> texts_of_value(const Option& option, const std::string& name,
                                        const json& value) {
  if (option.collects() && value.is_array()) {
    std::vector<std::string> texts;
    for (const json& element : value) {
      TWELL_REQUIRE(element.is_string(), "option {}: {} is not a text", name, element.dump());
      texts.push_back(element.get<std::string>());
    }
    return texts;
  }
  const auto kind = [&]<typename T>(const T*) -> std::pair<bool, const char*> {
    if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, std::optional<bool>>) {
      return {value.is_boolean(), "True or False"};
    } else if constexpr (std::is_same_v<T, double> || std::is_same_v<T, float> ||
                         std::is_same_v<T, std::optional<double>>) {
      return {value.is_number(), "a number"};
    } else if constexpr (std::is_integral_v<T> || std::is_same_v<T, std::optional<int64_t>>) {
      return {value.is_number_integer(), "a whole number"};
    } else {
      return {value.is_string(), "a text"};
    }
  };
  const auto [fits, words] = std::visit(kind, option.target());
  TWELL_REQUIRE(fits, "option {}: {} is not {}", name, value.dump(), words);
  return {value.is_string() ? value.get<std::string>() : value.dump()};
}

// Where a run is, and how it computes.
struct RunArguments {
  fs::path out, shards;
  std::string device = "auto";
  int64_t threads = 0;
  bool resume = false;
};

// The options of a run in Python: those of the table, and these few. A keyword argument has '_' for
// '-', and a flag with two spellings only its first.
class RunOptions {
 public:
  explicit RunOptions(const std::string& text) : given_(json::parse(text, nullptr, false)) {
    TWELL_REQUIRE(given_.is_object(), "an option is not a finite number");
    add(Option("--out", "", &arguments_.out, "DIR", "", ""));
    add(Option("--shards", "", &arguments_.shards, "DIR", "", ""));
    add(Option("--device", "", &arguments_.device, "NAME", "", ""));
    add(Option("--threads", "", &arguments_.threads, "N", "", "").range(0, 4096));
    add(Option("--resume", "", &arguments_.resume, "", "", ""));
    for (const OptionGroup& group : option_table()) {
      for (const OptionRow& row : group.rows) add(make_option(row, group.heading, settings_));
    }
    for (const auto& [name, value] : given_.items()) set(name, value);
    TWELL_REQUIRE(!arguments_.out.empty(), "no output folder given: add out=DIR");
    if (arguments_.resume) take_saved();
    const bool chats = !settings_.chat_data.empty();
    TWELL_REQUIRE(chats || !arguments_.shards.empty(), "no shards given: add shards=DIR");
    TWELL_REQUIRE(!chats || !given_.contains("shards"),
                  "--chat-data takes the place of text: leave shards out");
  }
  RunOptions(const RunOptions&) = delete;

  const RunSettings& settings() const { return settings_; }
  const RunArguments& arguments() const { return arguments_; }
  std::string text() const { return given_.dump(1) + "\n"; }  // for options.json

 private:
  void add(Option option) {
    std::string name = option.name();
    std::replace(name.begin(), name.end(), '-', '_');
    option.called("option " + name + ":");
    options_.emplace(std::move(name), std::move(option));
  }
  void set(const std::string& name, const json& value) {
    const auto found = options_.find(name);
    if (found == options_.end()) {
      std::vector<std::string> names;
      for (const auto& [known, option] : options_) names.push_back(known);
      throw InputError(
          fmt::format("there is no option {}; the options are {}", name, fmt::join(names, ", ")));
    }
    found->second.set(texts_of_value(found->second, name, value));
  }
  // What the run in `out` began with and was not given now. The command line saves all values as
  // text, and options that Python does not have.
  void take_saved() {
    const fs::path file = arguments_.out / "options.json";
    const json saved = fs::exists(file) ? json::parse(read_file(file), nullptr, false) : json();
    TWELL_REQUIRE(saved.is_object(), "nothing to resume: {} holds no options of a run",
                  arguments_.out.string());
    for (const auto& [flag, value] : saved.items()) {
      std::string name = flag;
      std::replace(name.begin(), name.end(), '-', '_');
      const auto found = options_.find(name);
      const bool other_length = (name == "steps" && given_.contains("tokens")) ||
                                (name == "tokens" && given_.contains("steps"));
      if (found == options_.end() || given_.contains(name) || other_length) continue;
      if (value.is_array()) {
        found->second.set(texts_of_value(found->second, name, value));
      } else {
        found->second.set({value.is_string() ? value.get<std::string>() : value.dump()});
      }
      given_[name] = value;
    }
    given_.erase("resume");
    if (arguments_.shards.empty()) arguments_.shards = arguments_.out / "shards";
  }

  json given_;
  RunSettings settings_;
  RunArguments arguments_;
  std::map<std::string, Option> options_;
};

// Ends a long call with the exception of a Python signal handler (Ctrl-C). Without the GIL.
void check_signals() {
  const nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// One thread at a time may use a run; its callback may not either.
class TrainingRun {
 public:
  explicit TrainingRun(const std::string& text)
      : options_(text),
        ctx_(static_cast<int>(options_.arguments().threads)),
        tokenizer_(Tokenizer::load(tokenizer_folder() / "tokenizer.json")) {
    const RunSettings& settings = options_.settings();
    const RunArguments& arguments = options_.arguments();
    const ModelConfig config = match_tokenizer(settings, requested_config(settings), tokenizer_);
    const TrainOptions requested = requested_options(settings, config).options;
    const TrainOptions checked = resolve_options(requested, config);
    sampler_.emplace(config, tokenizer_, stop_,
                     TextSamplerOptions{.prompts = checked.sample_prompts,
                                        .tokens = checked.sample_tokens,
                                        .seed = checked.seed});
    const bool chats = !settings.chat_data.empty();
    if (!chats) shards_.emplace(arguments.shards, tokenizer_);
    folder_ = std::make_unique<RunFolder>(arguments.out, arguments.resume);
    if (arguments.resume) resume_from_ = folder_->resume_point({});
    if (chats) {
      ChatDataOptions options{.file = {},
                              .length = checked.sequence_length,
                              .seed = checked.seed,
                              .log = [](LogLevel, std::string_view) {},
                              .check = check_signals};
      chat_ = read_chat_data(ctx_, settings, config, tokenizer_,
                             resume_from_ ? resume_from_->folder : settings.from, options);
    }
    const int gpu = device_index(arguments.device);
    device_ = std::make_unique<RunDevice>(gpu, arguments.device == "auto", config, checked);
    started_ = std::make_unique<StartedRun>(ctx_, settings, config, requested, resume_from_);
    started_->make_engine(ctx_, *device_, data(), nullptr);
    if (resume_from_) done_ = resume_from_->step;
  }

  int64_t steps() const { return train().steps; }
  int64_t steps_done() const { return done_; }

  // One optimizer step; its metrics as the text of a JSON object, as in metrics.jsonl.
  std::string step() {
    const Use use(busy_);
    TWELL_REQUIRE(!ran_, "run() has trained this model already");
    device_->select();
    if (!trainer_) begin();
    TWELL_REQUIRE(!trainer_->finished(), "the run has ended after {} steps", train().steps);
    const StepMetrics metrics = trainer_->train_step();
    done_ = trainer_->steps_done();
    return metrics_json(metrics).dump();
  }
  double validate() {
    const Use use(busy_);
    device_->select();
    return started_->engine().validate();
  }
  // Saves a checkpoint in the run's folder and returns where.
  std::string save() {
    const Use use(busy_);
    TWELL_REQUIRE(trainer_ != nullptr, "nothing to save before the first step()");
    device_->select();
    const Checkpoint saved =
        folder_->save(done_, train().keep_last, [&](const fs::path& checkpoint) {
          trainer_->save(checkpoint);
          save_text_files(checkpoint, started_->model().config, tokenizer_, text_files());
        });
    return saved.folder.string();
  }

  // The whole run, as `twell train` does it. on_step gets the metrics of each step and may return
  // false, or throw, to save and end.
  std::string run(const nb::callable& on_step) {
    const Use use(busy_);
    TWELL_REQUIRE(trainer_ == nullptr && !ran_, "the run has begun already");
    ran_ = true;
    std::atomic<bool>& stop = stop_;
    std::optional<nb::python_error> thrown;
    TrainSummary summary;
    {
      const nb::gil_scoped_release release;
      device_->select();
      TrainRun run{train(),
                   tokenizer_,
                   data(),
                   *folder_,
                   options_.text(),
                   resume_from_,
                   options_.settings().tensorboard,
                   stop,
                   {},
                   {}};
      run.text_files = text_files();
      run.sample = [&](const Model& model) { return sampler_->texts(ctx_, model); };
      run.log = [](LogLevel, std::string_view) {};
      run.on_progress = [&](const Progress& now) {
        done_ = now.metrics.step;
        const nb::gil_scoped_acquire acquire;
        try {
          if (PyErr_CheckSignals() != 0) throw nb::python_error();
          const nb::object go_on = on_step(nb::str(metrics_json(now.metrics).dump().c_str()));
          if (go_on.is(nb::handle(Py_False))) stop = true;
        } catch (nb::python_error& error) {
          thrown.emplace(std::move(error));
          stop = true;
        }
      };
      summary = run_training(ctx_, started_->engine(), run);
    }
    if (thrown) throw std::move(*thrown);
    done_ = summary.steps_done;
    return summary.checkpoint.string();
  }

 private:
  class Use {
   public:
    explicit Use(std::atomic<bool>& busy) : busy_(busy) {
      TWELL_REQUIRE(!busy.exchange(true), "another call of this trainer has not returned yet");
    }
    ~Use() { busy_ = false; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    std::atomic<bool>& busy_;
  };
  const TrainOptions& train() const { return started_->options(); }
  // Where the tokenizer is: beside the shards, or in the checkpoint that is trained on.
  fs::path tokenizer_folder() const {
    const RunArguments& arguments = options_.arguments();
    if (options_.settings().chat_data.empty()) return arguments.shards;
    const fs::path newest = arguments.out / "checkpoint";
    return arguments.resume && fs::exists(newest) ? newest : options_.settings().from;
  }
  const TrainingData& data() const {
    return chat_.data != nullptr ? static_cast<const TrainingData&>(*chat_.data) : *shards_;
  }
  const TextFiles& text_files() const {
    return chat_.data != nullptr ? chat_.text_files : started_->text_files();
  }

  void begin() {
    trainer_ = std::make_unique<Trainer>(
        ctx_, started_->engine(), data(), train(),
        fmt::format("{}, tokenizer {}", data().identity(), tokenizer_.hash()));
    if (resume_from_) {
      trainer_->restore(resume_from_->folder);
      folder_->discard_after(resume_from_->step);
    }
    folder_->begin(options_.text());
  }

  RunOptions options_;
  Context ctx_;
  Tokenizer tokenizer_;
  std::optional<ShardSet> shards_;
  ChatRun chat_;  // in place of shards
  std::unique_ptr<RunFolder> folder_;
  std::optional<Checkpoint> resume_from_;
  std::unique_ptr<RunDevice> device_;
  std::unique_ptr<StartedRun> started_;
  std::unique_ptr<Trainer> trainer_;
  std::atomic<int64_t> done_ = 0;
  std::atomic<bool> stop_ = false;  // ends run()
  std::optional<TextSampler> sampler_;
  bool ran_ = false;
  std::atomic<bool> busy_ = false;
};

// Writes token shards with their tokenizer, which is learned from the text unless one is given.
// Returns (training tokens, validation tokens).
std::pair<int64_t, int64_t> tokenize(const std::vector<std::string>& data, const fs::path& folder,
                                     const std::string& tokenizer_file, int64_t vocab_size,
                                     double validation_fraction, uint64_t seed, int threads) {
  TextSourceOptions text{.paths = {data.begin(), data.end()}};
  text.log = [](LogLevel, std::string_view) {};
  TextSource source(text);
  constexpr int64_t kSampleBytes = int64_t{32} << 20;  // of text that a tokenizer is learned from
  int64_t bytes = 0;
  const auto next = [&](std::string& piece) {
    check_signals();
    if (bytes >= kSampleBytes || !source.next(piece)) return false;
    bytes += std::ssize(piece);
    return true;
  };
  const Tokenizer tokenizer = tokenizer_file.empty()
                                  ? train_bpe({.vocab_size = vocab_size, .threads = threads}, next)
                                  : Tokenizer::load(tokenizer_file);
  source.rewind();
  const ShardCounts counts =
      write_shards(source, TokenEncoder::of(tokenizer), folder,
                   {.validation_fraction = validation_fraction,
                    .seed = seed,
                    .threads = threads,
                    .progress = [](const TokenizeProgress&) { check_signals(); }});
  save_with_end_token(tokenizer, folder);
  return {counts.train_tokens, counts.validation_tokens};
}

}  // namespace

std::unique_ptr<TrainingRun> training_run(const std::string& options) {
  try {
    return std::make_unique<TrainingRun>(options);
  } catch (const InputError& error) {
    throw InputError(in_words_of_python(error.what()));
  }
}

void bind_training(nb::module_& m) {
  const auto released = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<TrainingRun>(m, "TrainingRun")
      .def_prop_ro("steps", &TrainingRun::steps)
      .def_prop_ro("steps_done", &TrainingRun::steps_done)
      .def("step", &TrainingRun::step, released)
      .def("validate", &TrainingRun::validate, released)
      .def("save", &TrainingRun::save, released)
      .def("run", &TrainingRun::run);
  m.def("training_run", &training_run, released);
  m.def("tokenize", [](const nb::list& data, const std::string& folder,
                       const std::string& tokenizer, int64_t vocab_size, double validation_fraction,
                       uint64_t seed, int threads) {
    std::vector<std::string> paths;
    for (const nb::handle path : data) paths.push_back(nb::cast<std::string>(path));
    std::pair<int64_t, int64_t> tokens;
    {
      const nb::gil_scoped_release release;
      tokens = tokenize(paths, folder, tokenizer, vocab_size, validation_fraction, seed, threads);
    }
    return nb::make_tuple(tokens.first, tokens.second);
  });
}

}  // namespace twell::python
