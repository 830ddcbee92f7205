// SPDX-License-Identifier: Apache-2.0
// Training for Python: a run of the engine on token shards, as a whole (run) or step by step. Part
// of the module twell._engine; python/twell/training.py wraps it. Options come as the text of a
// JSON object whose names are those of `twell train`, with '_' for '-'.
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "python/csrc/bindings.h"
#include "twell/base/error.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/data/shard_writer.h"
#include "twell/data/shards.h"
#include "twell/data/text_source.h"
#include "twell/train/engine_cpu.h"
#include "twell/train/run.h"
#include "twell/train/trainer.h"
#ifdef TWELL_HAVE_CUDA
#include "twell/train/engine_cuda.h"
#endif

namespace nb = nanobind;

namespace twell::python {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// The kind of value that an option of type T takes, in words.
template <typename T>
constexpr std::string_view kKind = std::is_same_v<T, bool>       ? "True or False"
                                   : std::is_integral_v<T>       ? "a whole number"
                                   : std::is_floating_point_v<T> ? "a number"
                                                                 : "a text";

template <typename T>
bool is_kind(const json& value) {
  if constexpr (std::is_same_v<T, bool>) return value.is_boolean();
  if constexpr (std::is_unsigned_v<T>) return value.is_number_unsigned();
  if constexpr (std::is_integral_v<T>) return value.is_number_integer();
  if constexpr (std::is_floating_point_v<T>) return value.is_number();
  return value.is_string();
}

// Takes options by name, and knows which nobody asked for.
class Options {
 public:
  explicit Options(const std::string& text) : given_(json::parse(text, nullptr, false)) {
    TWELL_REQUIRE(given_.is_object(), "an option is not a finite number");
  }

  template <typename T>
  void take(const char* name, T& value) {
    known_.insert(name);
    if (!given_.contains(name)) return;
    const json& given = given_.at(name);
    TWELL_REQUIRE(is_kind<T>(given), "option {}: {} is not {}", name, given.dump(), kKind<T>);
    value = given.get<T>();
  }
  template <typename T>
  T get(const char* name, T value) {
    take(name, value);
    return value;
  }
  bool has(const char* name) const { return given_.contains(name); }

  void refuse_others() const {
    for (const auto& [name, value] : given_.items()) {
      TWELL_REQUIRE(known_.contains(name), "there is no option {}; the options are {}", name,
                    fmt::join(known_, ", "));
    }
  }
  std::string text() const { return given_.dump(1) + "\n"; }

 private:
  json given_;
  std::set<std::string> known_;
};

ModelConfig model_of(Options& options, const Tokenizer& tokenizer) {
  const fs::path from = options.get<std::string>("from", "");
  if (!from.empty()) {
    for (const char* name :
         {"preset", "gated", "width", "ffn", "layers", "heads", "kv_heads", "head_dim", "context",
          "tied", "activation", "rope_theta", "norm_eps", "init_std", "vocab_size"}) {
      TWELL_REQUIRE(!options.has(name), "option {}: the checkpoint of from_ decides the model",
                    name);
    }
  }
  const auto gated = options.get<bool>("gated", true);
  ModelConfig config = from.empty()
                           ? preset_config(options.get<std::string>("preset", "tiny"), gated)
                           : load_config(from);
  if (from.empty()) {
    const bool shaped = options.has("width") || options.has("heads");
    options.take("width", config.width);
    options.take("ffn", config.ffn);
    options.take("layers", config.layers);
    options.take("heads", config.heads);
    if (options.has("heads")) config.kv_heads = config.heads;
    options.take("kv_heads", config.kv_heads);
    if (shaped && config.heads > 0) config.head_dim = config.width / config.heads;
    options.take("head_dim", config.head_dim);
    options.take("context", config.context);
    options.take("tied", config.tied_embeddings);
    const auto activation = options.get<std::string>("activation", "relu");
    config.activation = parse_activation(activation, "option activation");
    options.take("rope_theta", config.rope_theta);
    options.take("norm_eps", config.norm_eps);
    options.take("init_std", config.init_std);
    config.vocab_size = options.get<int64_t>("vocab_size", tokenizer.vocab_size());
    config.eos_token = tokenizer.eos_token();
  }
  check_tokenizer(config, tokenizer);
  config.validate();
  return config;
}

// The type that an option names, f32 where it is not given.
DType dtype_of(Options& options, const char* name, const std::map<std::string, DType>& choices) {
  const auto named = options.get<std::string>(name, "f32");
  const auto found = choices.find(named);
  if (found != choices.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [known, dtype] : choices) names.push_back(known);
  throw InputError(
      fmt::format("option {}: '{}' is none of {}", name, named, fmt::join(names, ", ")));
}

TrainOptions training_of(Options& options, const ModelConfig& config) {
  TrainOptions train;
  if (options.has("preset")) {
    const TrainOptions recipe = preset_train_options(options.get<std::string>("preset", ""));
    train.steps = recipe.steps;
    train.batch_tokens = recipe.batch_tokens;
  }
  options.take("steps", train.steps);
  options.take("tokens", train.tokens);
  options.take("sequence_length", train.sequence_length);
  options.take("micro_batch", train.micro_batch);
  options.take("batch_tokens", train.batch_tokens);
  options.take("document_mask", train.document_mask);
  train.recompute = parse_recompute(options.get<std::string>("recompute", "auto"));
  options.take("lr", train.learning_rate);
  options.take("min_lr_ratio", train.min_lr_ratio);
  options.take("warmup_steps", train.warmup_steps);
  options.take("beta1", train.beta1);
  options.take("beta2", train.beta2);
  options.take("eps", train.eps);
  options.take("weight_decay", train.weight_decay);
  train.moment_dtype =
      dtype_of(options, "moment_dtype", {{"f32", DType::kF32}, {"bf16", DType::kBF16}});
  options.take("clip", train.clip_norm);
  if (!leaves_zeros(config.activation)) train.l1_coeff = 0.0;
  options.take("l1", train.l1_coeff);
  TWELL_REQUIRE(leaves_zeros(config.activation) || train.l1_coeff == 0.0,
                "option l1: L1 makes no layer sparse with {}, which leaves no zeros: take "
                "activation=\"relu\", or leave l1 out",
                activation_name(config.activation));
  train.l1_reduction = parse_l1_reduction(options.get<std::string>("l1_reduction", "sum"));
  options.take("l1_zero_steps", train.l1_zero_steps);
  options.take("l1_ramp_steps", train.l1_ramp_steps);
  options.take("reinit_dead", train.reinit_dead);
  options.take("reinit_strength", train.reinit_strength);
  options.take("reinit_std", train.reinit_std);
  options.take("validate_every", train.validate_every);
  options.take("validation_sequences", train.validation_sequences);
  options.take("save_every", train.save_every);
  options.take("keep_last", train.keep_last);
  train.save_dtype = dtype_of(options, "save_dtype",
                              {{"f32", DType::kF32}, {"bf16", DType::kBF16}, {"f16", DType::kF16}});
  options.take("seed", train.seed);
  train.ffn_policy = parse_ffn_train_policy(options.get<std::string>("ffn_policy", "auto"));
  return train;
}

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
        ctx_(options_.get<int>("threads", 0)),
        shards_folder_(options_.get<std::string>("shards", "")),
        tokenizer_(Tokenizer::load(shards_folder_ / "tokenizer.json")),
        shards_(shards_folder_, tokenizer_),
        config_(model_of(options_, tokenizer_)),
        train_(resolve_options(training_of(options_, config_), config_)) {
    const fs::path out = options_.get<std::string>("out", "");
    const int device = device_index(options_.get<std::string>("device", "auto"));
    options_.refuse_others();
    TWELL_REQUIRE(!out.empty(), "no output folder given: add out=DIR");
    folder_ = std::make_unique<RunFolder>(out, /*resume=*/false);
    if (options_.has("from")) {
      model_ = load_model(ctx_, options_.get<std::string>("from", ""));
    } else {
      model_ = std::make_unique<Model>(config_);
      init_weights(ctx_, *model_, train_.seed);
    }
#ifdef TWELL_HAVE_CUDA
    if (device >= 0) {
      const std::string why = cuda_run_unsupported(config_, train_);
      const bool automatic = options_.get<std::string>("device", "auto") == "auto";
      TWELL_REQUIRE(why.empty() || automatic, "device cuda: {}", why);
      if (why.empty()) {
        device_ = device;
        select_device();
        gpu_ = std::make_unique<Gpu>();
        engine_ = std::make_unique<TrainEngineCuda>(gpu_->ctx, *model_, &shards_, train_);
      }
    }
#else
    static_cast<void>(device);
#endif
    if (!engine_) engine_ = std::make_unique<TrainEngineCpu>(ctx_, *model_, shards_, train_);
  }

  int64_t steps() const { return train_.steps; }
  int64_t steps_done() const { return done_; }

  // One optimizer step; its metrics as the text of a JSON object, as in metrics.jsonl.
  std::string step() {
    const Use use(busy_);
    TWELL_REQUIRE(!ran_, "run() has trained this model already");
    select_device();
    if (!trainer_) {
      trainer_ = std::make_unique<Trainer>(
          ctx_, *engine_, shards_, train_,
          fmt::format("{} train + {} validation, tokenizer {}", shards_.tokens(Split::kTrain),
                      shards_.tokens(Split::kValidation), tokenizer_.hash()));
      folder_->begin(options_.text());
    }
    TWELL_REQUIRE(!trainer_->finished(), "the run has ended after {} steps", train_.steps);
    const StepMetrics metrics = trainer_->train_step();
    done_ = trainer_->steps_done();
    return metrics_json(metrics).dump();
  }
  double validate() {
    const Use use(busy_);
    select_device();
    return engine_->validate();
  }
  // Saves a checkpoint in the run's folder and returns where.
  std::string save() {
    const Use use(busy_);
    TWELL_REQUIRE(trainer_ != nullptr, "nothing to save before the first step()");
    select_device();
    const Checkpoint saved =
        folder_->save(done_, train_.keep_last, [&](const fs::path& checkpoint) {
          trainer_->save(checkpoint);
          tokenizer_.save(checkpoint / "tokenizer.json");
        });
    return saved.folder.string();
  }

  // The whole run, as `twell train` does it. on_step gets the metrics of each step and may return
  // false, or throw, to save and end.
  std::string run(const nb::callable& on_step) {
    const Use use(busy_);
    TWELL_REQUIRE(trainer_ == nullptr && !ran_, "the run has begun already");
    ran_ = true;
    std::atomic<bool> stop = false;
    std::optional<nb::python_error> thrown;
    TrainSummary summary;
    {
      const nb::gil_scoped_release release;
      select_device();
      TrainRun run{train_, tokenizer_, shards_, *folder_, options_.text(), {}, false, stop, {}, {}};
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
      summary = run_training(ctx_, *engine_, run);
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
#ifdef TWELL_HAVE_CUDA
  struct Gpu {
    CudaStream stream;
    CudaContext ctx{stream.get()};
  };
  std::unique_ptr<Gpu> gpu_;
  void select_device() const {
    if (device_ >= 0) TWELL_CUDA_CHECK(cudaSetDevice(device_));
  }
#else
  void select_device() const {}
#endif

  Options options_;
  int device_ = -1;
  Context ctx_;
  fs::path shards_folder_;
  Tokenizer tokenizer_;
  ShardSet shards_;
  ModelConfig config_;
  TrainOptions train_;  // resolved
  std::unique_ptr<RunFolder> folder_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<TrainEngine> engine_;
  std::unique_ptr<Trainer> trainer_;
  std::atomic<int64_t> done_ = 0;
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
  tokenizer.save(folder / "tokenizer.json");
  return {counts.train_tokens, counts.validation_tokens};
}

}  // namespace

void bind_training(nb::module_& m) {
  const auto released = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<TrainingRun>(m, "TrainingRun")
      .def(nb::init<const std::string&>(), released)
      .def_prop_ro("steps", &TrainingRun::steps)
      .def_prop_ro("steps_done", &TrainingRun::steps_done)
      .def("step", &TrainingRun::step, released)
      .def("validate", &TrainingRun::validate, released)
      .def("save", &TrainingRun::save, released)
      .def("run", &TrainingRun::run);
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
