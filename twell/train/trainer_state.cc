// SPDX-License-Identifier: Apache-2.0
#include "twell/train/trainer_state.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/json.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/safetensors.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

constexpr int kFormat = 1;
constexpr int kMaxDepth = 8;
constexpr const char* kExpAvg = "exp_avg";
constexpr const char* kExpAvgSq = "exp_avg_sq";
constexpr const char* kWeights = "weights";
constexpr const char* kPieces = "pieces";

TensorToWrite flat_tensor(const char* name, std::span<const float> values) {
  return {name, "F32", {static_cast<int64_t>(values.size())}, [values](const auto& sink) {
            sink(std::as_bytes(values));
          }};
}

// The layout's pieces of a flat array.
TensorToWrite pieces_tensor(const char* name, std::span<const float> flat,
                            const ShardLayout& layout) {
  return {name, "F32", {layout.size()}, [flat, &layout](const auto& sink) {
            for (const ShardPiece& piece : layout.pieces()) {
              sink(std::as_bytes(
                  flat.subspan(static_cast<size_t>(piece.begin), static_cast<size_t>(piece.size))));
            }
          }};
}

std::string optimizer_file(int ranks, int rank) {
  if (ranks == 1) return "optimizer.safetensors";
  return fmt::format("optimizer-{:05}-of-{:05}.safetensors", rank, ranks);
}

// The pieces of the flat arrays that a file holds.
std::vector<ShardPiece> pieces_in(const SafetensorsFile& file, const fs::path& path,
                                  int64_t parameters) {
  const auto found = file.tensors().find(kPieces);
  if (found == file.tensors().end()) return {{.begin = 0, .size = parameters, .local = 0}};
  const TensorInfo& tensor = found->second;
  TWELL_REQUIRE(tensor.dtype == "I64" && tensor.bytes.size() % (2 * sizeof(int64_t)) == 0,
                "{}: the table of its pieces is damaged", path.string());
  std::vector<ShardPiece> pieces(tensor.bytes.size() / (2 * sizeof(int64_t)));
  int64_t local = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    int64_t row[2];
    std::memcpy(row, tensor.bytes.data() + i * sizeof(row), sizeof(row));
    pieces[i] = {row[0], row[1], local};
    TWELL_REQUIRE(row[0] >= 0 && row[1] >= 0 && row[0] <= parameters - row[1],
                  "{}: a piece of {} values from {} on, the model has {} parameters", path.string(),
                  row[1], row[0], parameters);
    local += row[1];
  }
  return pieces;
}

// Copies what `wanted` and the file's pieces have in common; returns the number of values. out is
// indexed by the places (local) of `wanted`.
int64_t read_pieces(const TensorInfo& tensor, const fs::path& path,
                    const std::vector<ShardPiece>& held, const std::vector<ShardPiece>& wanted,
                    std::span<float> out) {
  int64_t size = 0, copied = 0;
  for (const ShardPiece& piece : held) size += piece.size;
  TWELL_REQUIRE(
      tensor.dtype == "F32" && tensor.bytes.size() == static_cast<size_t>(size) * sizeof(float),
      "{}: {} holds {} bytes of {} for {} parameters", path.string(), tensor.name,
      tensor.bytes.size(), tensor.dtype, size);
  for (const ShardPiece& from : held) {
    for (const ShardPiece& to : wanted) {
      const int64_t begin = std::max(from.begin, to.begin);
      const int64_t end = std::min(from.begin + from.size, to.begin + to.size);
      if (begin >= end) continue;
      std::memcpy(out.data() + to.local + (begin - to.begin),
                  tensor.bytes.data() +
                      static_cast<size_t>(from.local + begin - from.begin) * sizeof(float),
                  static_cast<size_t>(end - begin) * sizeof(float));
      copied += end - begin;
    }
  }
  return copied;
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
  state.ranks = json.value("ranks", 1);
  TWELL_REQUIRE(state.ranks >= 1, "it was saved by {} ranks", state.ranks);
  return state;
}

TrainerState read_state(const fs::path& checkpoint) {
  const fs::path path = checkpoint / "trainer" / "state.json";
  TWELL_REQUIRE(fs::exists(path),
                "{} has no trainer state to resume from; start from its weights with --from",
                checkpoint.string());
  const nlohmann::json json = parse_json(read_file(path), path.string(), {.depth = kMaxDepth});
  try {
    return parse_state(json);
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", path.string(), error.what()));
  } catch (const nlohmann::json::exception&) {
    throw InputError(fmt::format("{}: a field of the trainer state is missing or of another type",
                                 path.string()));
  }
}

void write_state(const fs::path& folder, const TrainerState& state, int ranks) {
  std::vector<double> nnz, unions;
  for (const LayerHint& hint : state.hints) {
    nnz.push_back(hint.nnz);
    unions.push_back(hint.union_neurons);
  }
  const nlohmann::json json = {
      {"format", kFormat},   {"step", state.step},
      {"ranks", ranks},      {"options", nlohmann::json::parse(state.trajectory)},
      {"data", state.data},  {"nnz_hint", nnz},
      {"union_hint", unions}};
  write_file_atomic(folder / "state.json", json.dump(2) + "\n");
}

}  // namespace

void save_trainer_state(const fs::path& checkpoint, const TrainerState& state,
                        const OptimizerTensors& tensors, const ShardLayout& layout) {
  const fs::path folder = checkpoint / "trainer";
  make_folder(folder);
  if (layout.rank() == 0) write_state(folder, state, layout.ranks());
  std::vector<TensorToWrite> list = {flat_tensor(kExpAvg, tensors.exp_avg),
                                     flat_tensor(kExpAvgSq, tensors.exp_avg_sq)};
  if (!tensors.weights.empty()) list.push_back(pieces_tensor(kWeights, tensors.weights, layout));
  std::vector<int64_t> table;
  for (const ShardPiece& piece : layout.pieces()) {
    table.insert(table.end(), {piece.begin, piece.size});
  }
  if (layout.ranks() > 1) {
    list.push_back({kPieces, "I64", {std::ssize(layout.pieces()), 2}, [&table](const auto& sink) {
                      sink(std::as_bytes(std::span(table)));
                    }});
  }
  write_safetensors(folder / optimizer_file(layout.ranks(), layout.rank()), list, {});
}

TrainerState load_trainer_state(const fs::path& checkpoint, const OptimizerTensors& tensors,
                                const ShardLayout& layout) {
  const TrainerState state = read_state(checkpoint);
  const std::vector<ShardPiece> whole = {{.begin = 0, .size = layout.parameters(), .local = 0}};
  int64_t read = 0;
  for (int rank = 0; rank < state.ranks; ++rank) {
    const fs::path path = checkpoint / "trainer" / optimizer_file(state.ranks, rank);
    const SafetensorsFile file(path);
    file.verify_hash();
    const std::vector<ShardPiece> held = pieces_in(file, path, layout.parameters());
    read += read_pieces(file.tensor(kExpAvg), path, held, layout.pieces(), tensors.exp_avg);
    read_pieces(file.tensor(kExpAvgSq), path, held, layout.pieces(), tensors.exp_avg_sq);
    if (file.tensors().contains(kWeights)) {
      read_pieces(file.tensor(kWeights), path, held, whole, tensors.weights);
    }
  }
  TWELL_REQUIRE(read == layout.size(), "{}: the files of {} ranks hold {} of {} moments",
                (checkpoint / "trainer").string(), state.ranks, read, layout.size());
  return state;
}

int64_t saved_option(const fs::path& checkpoint, const char* name) {
  const nlohmann::json saved = nlohmann::json::parse(read_state(checkpoint).trajectory);
  const auto found = saved.find(name);
  TWELL_REQUIRE(found != saved.end() && found->is_number_integer(),
                "{}: the trainer state has no {}", checkpoint.string(), name);
  return found->get<int64_t>();
}

bool saved_document_mask(const fs::path& checkpoint) {
  if (!fs::exists(checkpoint / "trainer" / "state.json")) return false;
  const nlohmann::json saved = nlohmann::json::parse(read_state(checkpoint).trajectory);
  const auto found = saved.find("document-mask");
  return found != saved.end() && found->is_boolean() && found->get<bool>();
}

std::string checkpoint_fault(const fs::path& checkpoint) {
  try {
    open_checkpoint(checkpoint);
    const int ranks = read_state(checkpoint).ranks;
    for (int rank = 0; rank < ranks; ++rank) {
      SafetensorsFile(checkpoint / "trainer" / optimizer_file(ranks, rank)).verify_hash();
    }
  } catch (const InputError& error) {
    return error.what();
  }
  return {};
}

void require_same_trajectory(const std::string& saved, const std::string& given) {
  const nlohmann::json before = nlohmann::json::parse(saved), now = nlohmann::json::parse(given);
  const auto value_of = [](const nlohmann::json& options, const std::string& name) {
    const auto found = options.find(name);
    return found == options.end() ? nlohmann::json() : *found;
  };
  nlohmann::json all = before;
  all.update(now);
  for (const auto& [name, unused] : all.items()) {
    const nlohmann::json old = value_of(before, name), value = value_of(now, name);
    TWELL_REQUIRE(old == value,
                  "cannot resume with another {}: the run has {}, now {} was given; use --from to "
                  "start a new run from its weights",
                  name, old.dump(), value.dump());
  }
}

}  // namespace twell
