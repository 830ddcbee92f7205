// SPDX-License-Identifier: Apache-2.0
#include "twell/train/trainer_state.h"

#include <cstring>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/json.h"
#include "twell/checkpoint/safetensors.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

constexpr int kFormat = 1;
constexpr int kMaxDepth = 8;
constexpr const char* kExpAvg = "exp_avg";
constexpr const char* kExpAvgSq = "exp_avg_sq";
constexpr const char* kWeights = "weights";

TensorToWrite flat_tensor(const char* name, std::span<const float> values) {
  return {name, "F32", {static_cast<int64_t>(values.size())}, [values](const auto& sink) {
            sink(std::as_bytes(values));
          }};
}

void read_flat(const TensorInfo& tensor, const fs::path& file, std::span<float> out) {
  TWELL_REQUIRE(tensor.dtype == "F32" && tensor.bytes.size() == out.size_bytes(),
                "{}: {} holds {} bytes of {}, the model has {} parameters", file.string(),
                tensor.name, tensor.bytes.size(), tensor.dtype, out.size());
  std::memcpy(out.data(), tensor.bytes.data(), out.size_bytes());
}

TrainerState parse_state(const nlohmann::json& json) {
  TWELL_REQUIRE(json.at("format").get<int>() == kFormat, "its format is {}, supported is {}",
                json.at("format").get<int>(), kFormat);
  TrainerState state;
  state.step = json.at("step").get<int64_t>();
  state.trajectory = json.at("options").dump();
  state.data = json.at("data").get<std::string>();
  const auto nnz = json.at("nnz_hint").get<std::vector<double>>();
  // Earlier versions saved no union_hint.
  const auto unions = json.value("union_hint", std::vector<double>(nnz.size(), -1.0));
  TWELL_REQUIRE(unions.size() == nnz.size(), "{} union hints for {} layers", unions.size(),
                nnz.size());
  for (size_t i = 0; i < nnz.size(); ++i) state.hints.push_back({nnz[i], unions[i]});
  TWELL_REQUIRE(state.step >= 0, "step {} is negative", state.step);
  return state;
}

TrainerState read_state(const fs::path& checkpoint) {
  const fs::path path = checkpoint / "trainer" / "state.json";
  TWELL_REQUIRE(fs::exists(path),
                "{} has no trainer state to resume from; start from its weights with --from",
                checkpoint.string());
  const nlohmann::json json = parse_json(read_file(path), path.string(), kMaxDepth);
  try {
    return parse_state(json);
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", path.string(), error.what()));
  } catch (const nlohmann::json::exception&) {
    throw InputError(fmt::format("{}: a field of the trainer state is missing or of another type",
                                 path.string()));
  }
}

}  // namespace

void save_trainer_state(const fs::path& checkpoint, const TrainerState& state,
                        const OptimizerTensors& tensors) {
  const fs::path folder = checkpoint / "trainer";
  make_folder(folder);
  std::vector<double> nnz, unions;
  for (const LayerHint& hint : state.hints) {
    nnz.push_back(hint.nnz);
    unions.push_back(hint.union_neurons);
  }
  const nlohmann::json json = {{"format", kFormat},
                               {"step", state.step},
                               {"options", nlohmann::json::parse(state.trajectory)},
                               {"data", state.data},
                               {"nnz_hint", nnz},
                               {"union_hint", unions}};
  write_file_atomic(folder / "state.json", json.dump(2) + "\n");
  std::vector<TensorToWrite> list = {flat_tensor(kExpAvg, tensors.exp_avg),
                                     flat_tensor(kExpAvgSq, tensors.exp_avg_sq)};
  if (!tensors.weights.empty()) list.push_back(flat_tensor(kWeights, tensors.weights));
  write_safetensors(folder / "optimizer.safetensors", list, {});
}

TrainerState load_trainer_state(const fs::path& checkpoint, const OptimizerTensors& tensors) {
  const TrainerState state = read_state(checkpoint);
  const fs::path path = checkpoint / "trainer" / "optimizer.safetensors";
  const SafetensorsFile file(path);
  file.verify_hash();
  read_flat(file.tensor(kExpAvg), path, tensors.exp_avg);
  read_flat(file.tensor(kExpAvgSq), path, tensors.exp_avg_sq);
  if (file.tensors().contains(kWeights)) read_flat(file.tensor(kWeights), path, tensors.weights);
  return state;
}

int64_t saved_warmup_steps(const fs::path& checkpoint) {
  const nlohmann::json saved = nlohmann::json::parse(read_state(checkpoint).trajectory);
  const auto found = saved.find("warmup-steps");
  TWELL_REQUIRE(found != saved.end() && found->is_number_integer(),
                "{}: the trainer state has no warmup-steps", checkpoint.string());
  return found->get<int64_t>();
}

std::string checkpoint_fault(const fs::path& checkpoint) {
  try {
    open_checkpoint(checkpoint);
    read_state(checkpoint);
    SafetensorsFile(checkpoint / "trainer" / "optimizer.safetensors").verify_hash();
  } catch (const InputError& error) {
    return error.what();
  }
  return {};
}

void require_same_trajectory(const std::string& saved, const std::string& given) {
  const nlohmann::json before = nlohmann::json::parse(saved), now = nlohmann::json::parse(given);
  for (const auto& [name, value] : now.items()) {
    const auto found = before.find(name);
    const nlohmann::json old = found == before.end() ? nlohmann::json() : *found;
    TWELL_REQUIRE(old == value,
                  "cannot resume with another {}: the run has {}, now {} was given; use --from to "
                  "start a new run from its weights",
                  name, old.dump(), value.dump());
  }
}

}  // namespace twell
