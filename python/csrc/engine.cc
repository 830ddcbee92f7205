// SPDX-License-Identifier: Apache-2.0
// The engine's objects for Python, without PyTorch in them: module twell._engine, which
// python/twell/engine.py wraps. A model on a device, its tokenizer, and requests that one scheduler
// runs together. Nothing here holds the GIL while the model computes.
//
// InputError becomes ValueError, other errors RuntimeError, with the engine's message.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "python/csrc/bindings.h"
#include "twell/base/error.h"
#include "twell/chat_template/chat_template.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/config_json.h"
#include "twell/checkpoint/quantization.h"
#include "twell/grammar/grammar.h"
#include "twell/infer/engine.h"
#include "twell/infer/generate.h"
#include "twell/infer/prompt_draft.h"
#include "twell/train/run_folder.h"
#ifdef TWELL_HAVE_CUDA
#include "twell/checkpoint/load_model_cuda.h"
#include "twell/infer/engine_cuda.h"
#endif

namespace nb = nanobind;

namespace twell::python {

int device_index(const std::string& name) {
  const bool automatic = name == "auto";
  TWELL_REQUIRE(automatic || name == "cpu" || name.starts_with("cuda"),
                "device '{}': use auto, cpu, cuda or cuda:N", name);
  if (name == "cpu") return -1;
#ifdef TWELL_HAVE_CUDA
  std::string why = cuda_unavailable();
#else
  const std::string why = "this build of twell has no CUDA";
#endif
  TWELL_REQUIRE(automatic || why.empty(), "device '{}': {}", name, why);
  if (!why.empty()) return -1;
  if (automatic || name == "cuda") return 0;
  const std::string number = name.substr(4);
  TWELL_REQUIRE(number.size() >= 2 && number.size() <= 4 && number.front() == ':' &&
                    number.find_first_not_of("0123456789", 1) == std::string::npos,
                "device '{}': use auto, cpu, cuda or cuda:N", name);
  return std::stoi(number.substr(1));
}

namespace {

namespace fs = std::filesystem;

nb::str text_of(std::string_view text) {
  return nb::steal<nb::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

// (log-probability, [(id, log-probability) of the most likely tokens])
nb::tuple log_probs_of(const TokenLogProbs& found) {
  nb::list top;
  for (const TokenLogProb& one : found.top) top.append(nb::make_tuple(one.id, one.log_prob));
  return nb::make_tuple(found.token.log_prob, top);
}

// What a request's events brought, until Python takes it.
struct Inbox {
  struct Item {
    std::string text;
    int32_t token = -1;
    std::optional<TokenLogProbs> log_probs;
    std::vector<TokenLogProbs> prompt_log_probs;
    std::optional<StopReason> stop;
    Usage usage;
  };
  std::mutex mutex;
  std::deque<Item> items;
  bool ended = false;  // no item will follow

  void put(const GenerationEvent& event) {
    Item item{.text = std::string(event.text),
              .token = event.token,
              .prompt_log_probs = {event.prompt_log_probs.begin(), event.prompt_log_probs.end()},
              .stop = event.stop,
              .usage = event.usage};
    if (event.log_probs != nullptr) item.log_probs = *event.log_probs;
    const std::lock_guard lock(mutex);
    items.push_back(std::move(item));
    ended = event.stop.has_value();
  }
  bool empty() {
    const std::lock_guard lock(mutex);
    return items.empty();
  }
  std::optional<Item> take() {
    const std::lock_guard lock(mutex);
    if (items.empty()) return std::nullopt;
    Item item = std::move(items.front());
    items.pop_front();
    return item;
  }
  bool over() {
    const std::lock_guard lock(mutex);
    return ended && items.empty();
  }
};

struct EngineArguments {
  std::string checkpoint, device = "auto", ffn = "auto";
  int threads = 0;
  int64_t slots = 16, context = 0;
  bool cache_8bit = false;
  int64_t speculate = 0;
  std::string weights = "stored", head = "stored", compute = "f32";
};

// A model that is loaded, and the scheduler of its requests.
class LoadedEngine {
 public:
  explicit LoadedEngine(const EngineArguments& arguments)
      : folder_(checkpoint_folder(arguments.checkpoint)),
        device_(device_index(arguments.device)),
        config_(load_config(folder_)),
        tokenizer_(Tokenizer::load(folder_ / "tokenizer.json")) {
    TWELL_REQUIRE(arguments.speculate >= 0 && arguments.speculate <= kMostDraft,
                  "speculate: from 0 to {} tokens, got {}", kMostDraft, arguments.speculate);
    TWELL_REQUIRE(arguments.context <= config_.context,
                  "context {} is longer than the model's context of {} tokens", arguments.context,
                  config_.context);
    constexpr int64_t kDefaultContext = 16384;  // a model's own can need far more memory
    if (fs::exists(folder_ / "chat_template.jinja") ||
        fs::exists(folder_ / "tokenizer_config.json")) {
      try {
        chat_ = ChatTemplate::load(folder_);
      } catch (const InputError& error) {
        no_chat_ = error.what();
      }
    }
    const SessionOptions options{
        .slots = arguments.slots,
        .capacity =
            arguments.context > 0 ? arguments.context : std::min(config_.context, kDefaultContext),
        .ffn = parse_ffn_policy(arguments.ffn),
        .draft_tokens = std::min(arguments.speculate * arguments.slots,
                                 std::max(arguments.speculate, kMostDraft)),
        .cache = {.eight_bits = arguments.cache_8bit}};
    LoadOptions load;
    if (arguments.weights != "stored") load.weights = parse_byte_type(arguments.weights);
    TWELL_REQUIRE(arguments.head == "stored" || arguments.head == "8bit",
                  "unknown type of the output head '{}'; use stored or 8bit", arguments.head);
    load.head_in_bytes = arguments.head == "8bit";
    TWELL_REQUIRE(
        arguments.compute == "f32" || device_ < 0,
        "compute '{}' is for the CPU, and a GPU computes in bf16 anyway: add device='cpu', "
        "or leave compute out",
        arguments.compute);
    const MatmulCompute compute = parse_matmul_compute(arguments.compute);
#ifdef TWELL_HAVE_CUDA
    if (device_ >= 0) {
      select_device();
      const EnginePlan plan{.session = options, .scorer = std::nullopt};
      const std::string why = EngineCuda::cannot_run(config_, plan, loads_in_bytes(folder_, load));
      TWELL_REQUIRE(why.empty() || arguments.device == "auto", "device '{}': {}", arguments.device,
                    why);
      if (why.empty()) {
        engine_ = std::make_unique<EngineCuda>(folder_, plan, load);
      } else {
        device_ = -1;
      }
    }
#endif
    if (engine_ == nullptr) {
      auto cpu = std::make_unique<EngineCpu>(folder_, arguments.threads, load);
      cpu->set_compute(compute);
      engine_ = std::move(cpu);
    }
    policy_ = options.ffn;
    session_ = engine_->session(options);
    scheduler_ = std::make_unique<Scheduler>(*session_, tokenizer_,
                                             SchedulerOptions{.speculate = arguments.speculate});
  }

  const ModelConfig& config() const { return config_; }
  const Tokenizer& tokenizer() const { return tokenizer_; }
  const Engine& engine() const { return *engine_; }
  Scheduler& scheduler() { return *scheduler_; }
  int64_t capacity() const { return session_->capacity(); }
  int64_t slots() const { return session_->slots(); }

  const ChatTemplate& chat() const {
    TWELL_REQUIRE(chat_, "{}: {}", folder_.string(),
                  no_chat_.empty() ? "there is no chat template" : no_chat_);
    return *chat_;
  }
  // Token ids that end a text.
  std::vector<int32_t> stop_tokens() const {
    return twell::stop_tokens(folder_, config_, tokenizer_);
  }
  // What a text is drawn by, by a JSON schema or a grammar, of which one is there at most.
  std::shared_ptr<TokenFilter> filter(const std::optional<std::string>& json_schema,
                                      const std::optional<std::string>& grammar) {
    TWELL_REQUIRE(!json_schema || !grammar, "json_schema does not go with grammar");
    if (!json_schema && !grammar) return nullptr;
    std::vector<int32_t> ends = stop_tokens();
    if (tokenizer_.eos_token() >= 0) ends.push_back(tokenizer_.eos_token());
    const std::lock_guard lock(compiling_);
    if (!grammars_) {
      grammars_ = std::make_unique<GrammarCompiler>(tokenizer_, GrammarOptions{.end_tokens = ends});
    }
    return grammars_
        ->compile(json_schema ? GrammarText{GrammarText::Kind::kJsonSchema, *json_schema}
                              : GrammarText{GrammarText::Kind::kEbnf, *grammar})
        .filter(ends);
  }

  // Steps the scheduler until `done()`. Any thread may call it; one at a time steps for all.
  template <typename Done>
  void step_until(const Done& done) {
    while (!done()) {
      const std::lock_guard lock(stepping_);
      if (done()) return;
      select_device();
      scheduler_->step();
    }
  }

  // Logits [n, V] after each of the ids, in a session of their own.
  std::vector<float> logits(const std::vector<int32_t>& ids) {
    check_ids(ids);
    const std::lock_guard lock(stepping_);
    select_device();
    const std::unique_ptr<Session> session =
        engine_->session({.slots = 1, .capacity = std::ssize(ids), .ffn = policy_});
    std::vector<float> all(ids.size() * static_cast<size_t>(config_.vocab_size));
    session->append_logits(0, ids, [&](int64_t first, ConstMatrixF rows) {
      for (int64_t i = 0; i < rows.rows; ++i) {
        std::copy_n(rows.row(i), rows.cols, all.data() + (first + i) * rows.cols);
      }
    });
    return all;
  }

  void check_ids(const std::vector<int32_t>& ids) const {
    TWELL_REQUIRE(!ids.empty(), "no token ids");
    for (const int32_t id : ids) {
      TWELL_REQUIRE(id >= 0 && id < config_.vocab_size, "token {} is not in [0, {})", id,
                    config_.vocab_size);
    }
  }

 private:
  // PyTorch may have made another device current on this thread.
  void select_device() const {
#ifdef TWELL_HAVE_CUDA
    if (device_ >= 0) TWELL_CUDA_CHECK(cudaSetDevice(device_));
#endif
  }

  fs::path folder_;
  int device_;
  ModelConfig config_;
  Tokenizer tokenizer_;
  std::optional<ChatTemplate> chat_;
  std::string no_chat_;
  FfnPolicy policy_ = FfnPolicy::kAuto;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Scheduler> scheduler_;
  std::mutex stepping_;
  std::unique_ptr<GrammarCompiler> grammars_;  // made with the first grammar
  std::mutex compiling_;
};

// One request. Cancelled when it is not used any more.
class Request {
 public:
  Request(std::shared_ptr<LoadedEngine> engine, GenerationRequest request)
      : engine_(std::move(engine)), inbox_(std::make_shared<Inbox>()) {
    request.on_event = [inbox = inbox_](const GenerationEvent& event) { inbox->put(event); };
    number_ = engine_->scheduler().submit(std::move(request)).value();
  }
  ~Request() { cancel(); }
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  void cancel() const { engine_->scheduler().cancel(number_); }

  // What the next event brought; nothing after the last one.
  std::optional<Inbox::Item> next() const {
    if (inbox_->over()) return std::nullopt;
    engine_->step_until([&] { return !inbox_->empty(); });
    return inbox_->take();
  }

 private:
  std::shared_ptr<LoadedEngine> engine_;
  std::shared_ptr<Inbox> inbox_;
  int64_t number_ = -1;
};

// (text, token or -1, log-probabilities or None, those of the prompt, reason of the end or None,
// prompt tokens, seconds of the prompt, seconds since)
nb::object next_of(const Request& request) {
  std::optional<Inbox::Item> item;
  {
    const nb::gil_scoped_release release;
    item = request.next();
  }
  if (!item) return nb::none();
  nb::list prompt;
  for (const TokenLogProbs& one : item->prompt_log_probs) prompt.append(log_probs_of(one));
  nb::object reason = nb::none();
  if (item->stop) reason = text_of(stop_reason_name(*item->stop));
  nb::object log_probs = nb::none();
  if (item->log_probs) log_probs = log_probs_of(*item->log_probs);
  return nb::make_tuple(text_of(item->text), item->token, log_probs, prompt, reason,
                        item->usage.prompt_tokens, item->usage.prefill_seconds,
                        item->usage.decode_seconds);
}

// The parameters of a model on the CPU as views of its memory, read-only, under the names and with
// the shapes that a checkpoint has them.
nb::dict weights_of(nb::handle self) {
  const auto& engine = *nb::cast<std::shared_ptr<LoadedEngine>>(self);
  const ModelView* const model = engine.engine().host_model();
  TWELL_REQUIRE(model != nullptr, "the weights are on {}: only those of a CPU engine can be viewed",
                engine.engine().device());
  const std::vector<ParamSpec> table = parameter_table(model->config);
  nb::dict views;
  for (size_t i = 0; i < table.size(); ++i) {
    const WeightMatrix& weight = model->parameters[i];
    TWELL_REQUIRE(weight.dtype != DType::kI8, "weights in 8 bits cannot be viewed: {}",
                  table[i].name);
    nb::dlpack::dtype dtype = nb::dtype<float>();
    if (weight.dtype == DType::kF16) dtype.bits = 16;
    if (weight.dtype == DType::kBF16) {
      dtype = {static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
    }
    std::vector<size_t> shape = {static_cast<size_t>(weight.rows),
                                 static_cast<size_t>(weight.cols)};
    std::vector<int64_t> strides = {weight.stride, 1};
    if (table[i].transposed) {
      std::swap(shape[0], shape[1]);
      std::swap(strides[0], strides[1]);
    }
    const size_t skipped = table[i].is_vector ? 1 : 0;
    views[table[i].name.c_str()] = nb::cast(
        nb::ndarray<nb::ro>(weight.data, shape.size() - skipped, shape.data() + skipped, self,
                            strides.data() + skipped, dtype, nb::device::cpu::value, 0));
  }
  return views;
}

nb::object logits_of(LoadedEngine& engine, const std::vector<int32_t>& ids) {
  auto values = std::make_unique<std::vector<float>>();
  {
    const nb::gil_scoped_release release;
    *values = engine.logits(ids);
  }
  float* const data = values->data();
  const nb::capsule owner(values.release(), [](void* memory) noexcept {
    delete static_cast<std::vector<float>*>(memory);
  });
  return nb::cast(nb::ndarray<float>(
      data, {ids.size(), static_cast<size_t>(engine.config().vocab_size)}, owner));
}

}  // namespace
}  // namespace twell::python

NB_MODULE(_engine, m) {
  using namespace twell;          // NOLINT(google-build-using-namespace)
  using namespace twell::python;  // NOLINT(google-build-using-namespace)
  // An engine in a global variable outlives the interpreter, which is no fault of the program.
  nb::set_leak_warnings(false);
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const InputError& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const Error& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
  });
  nb::class_<Request>(m, "Request").def("next", &next_of).def("cancel", &Request::cancel);
  nb::class_<LoadedEngine>(m, "LoadedEngine")
      .def_prop_ro("device", [](const LoadedEngine& e) { return e.engine().device(); })
      .def_prop_ro("context", &LoadedEngine::capacity)
      .def_prop_ro("slots", &LoadedEngine::slots)
      .def_prop_ro("vocab_size", [](const LoadedEngine& e) { return e.config().vocab_size; })
      .def_prop_ro("eos_token", [](const LoadedEngine& e) { return e.tokenizer().eos_token(); })
      .def("config_json",
           [](const LoadedEngine& e) { return config_to_text(e.config(), DType::kF32); })
      .def("encode",
           [](const LoadedEngine& e, const std::string& text, bool begin_token) {
             return prompt_ids(e.config(), e.tokenizer(), text, begin_token);
           })
      .def("encode_plain", [](const LoadedEngine& e,
                              const std::string& text) { return e.tokenizer().encode(text); })
      .def("decode",
           [](const LoadedEngine& e, const std::vector<int32_t>& ids) {
             for (const int32_t id : ids) {
               TWELL_REQUIRE(id >= 0 && id < e.tokenizer().vocab_size(),
                             "token {} is not in [0, {})", id, e.tokenizer().vocab_size());
             }
             return text_of(e.tokenizer().decode(ids));
           })
      .def("render",
           [](const LoadedEngine& e, const std::string& messages_json) {
             return text_of(e.chat().render_json(messages_json, /*add_generation_prompt=*/true));
           })
      .def("submit",
           [](const std::shared_ptr<LoadedEngine>& e, std::vector<int32_t> prompt,
              int64_t max_tokens, float temperature, int64_t top_k, float top_p, float min_p,
              float presence_penalty, float frequency_penalty, float repetition_penalty,
              const std::vector<std::pair<int32_t, float>>& logit_bias, uint64_t seed,
              std::vector<std::string> stop, std::optional<int64_t> log_probs,
              std::optional<int64_t> prompt_log_probs, bool chat,
              const std::optional<std::string>& json_schema,
              const std::optional<std::string>& grammar) {
             e->check_ids(prompt);
             std::shared_ptr<TokenFilter> filter;
             {
               const nb::gil_scoped_release release;
               filter = e->filter(json_schema, grammar);
             }
             std::vector<TokenBias> biases;
             for (const auto& [id, bias] : logit_bias) biases.push_back({id, bias});
             GenerationRequest request{.prompt = std::move(prompt),
                                       .sampler = {.temperature = temperature,
                                                   .top_k = top_k,
                                                   .top_p = top_p,
                                                   .min_p = min_p,
                                                   .repetition_penalty = repetition_penalty,
                                                   .frequency_penalty = frequency_penalty,
                                                   .presence_penalty = presence_penalty,
                                                   .seed = seed},
                                       .logit_bias = std::move(biases),
                                       .max_tokens = max_tokens,
                                       .stop_tokens = e->stop_tokens(),
                                       .stop_strings = std::move(stop),
                                       .filter = std::move(filter),
                                       .log_probs = log_probs,
                                       .prompt_log_probs = prompt_log_probs,
                                       .share_beginning = chat};
             return std::make_unique<Request>(e, std::move(request));
           })
      .def("logits", &logits_of)
      .def("weights", [](nb::handle self) { return weights_of(self); })
      .def("active_neurons", [](LoadedEngine& e) {
        std::vector<double> found;
        for (const ActiveNeurons& layer : e.scheduler().stats().layers) {
          found.push_back(layer.per_token);
        }
        return found;
      });
  bind_training(m);
  m.def("load",
        [](const std::string& checkpoint, const std::string& device, int threads, int64_t slots,
           int64_t context, const std::string& ffn, bool cache_8bit, int64_t speculate,
           const std::string& weights, const std::string& head, const std::string& compute) {
          const nb::gil_scoped_release release;
          return std::make_shared<LoadedEngine>(EngineArguments{.checkpoint = checkpoint,
                                                                .device = device,
                                                                .ffn = ffn,
                                                                .threads = threads,
                                                                .slots = slots,
                                                                .context = context,
                                                                .cache_8bit = cache_8bit,
                                                                .speculate = speculate,
                                                                .weights = weights,
                                                                .head = head,
                                                                .compute = compute});
        });
}
