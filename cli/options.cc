// SPDX-License-Identifier: Apache-2.0
#include "cli/options.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "twell/base/error.h"
#include "twell/checkpoint/quantization.h"
#include "twell/infer/prompt_draft.h"
#include "twell/model/config.h"
#include "twell/train/run_folder.h"

namespace twell::cli {
namespace {

constexpr const char* kMachine = "Machine";

// Copies standard input into an unnamed temporary file, which exists until the process ends.
std::filesystem::path spool_standard_input() {
  const std::filesystem::path folder = std::filesystem::temp_directory_path();
  const int file = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  TWELL_REQUIRE(file >= 0, "cannot keep standard input in {}: {}", folder.string(),
                std::strerror(errno));
  char piece[1 << 16];
  while (const size_t count = std::fread(piece, 1, sizeof(piece), stdin)) {
    TWELL_REQUIRE(::write(file, piece, count) == static_cast<ssize_t>(count),
                  "cannot keep standard input in {}: {}", folder.string(), std::strerror(errno));
  }
  TWELL_REQUIRE(std::ferror(stdin) == 0, "cannot read standard input: {}", std::strerror(errno));
  return fmt::format("/proc/self/fd/{}", file);
}

}  // namespace

DType parse_dtype(std::string_view name) {
  if (name == "f32") return DType::kF32;
  return name == "bf16" ? DType::kBF16 : DType::kF16;
}

void resolve_inputs(CommonOptions& common) {
  common.checkpoint = checkpoint_folder(common.checkpoint);
  for (std::filesystem::path& path : common.data) {
    if (path == "-") path = spool_standard_input();
  }
}

Option& add_data_option(Command& command, CommonOptions& common, std::string help) {
  return command
      .value("--data", &common.data, "PATH",
             std::move(help) + "; -: plain text from standard input")
      .several_values();
}

void add_non_finite_option(Command& command, CommonOptions& common) {
  command.flag("--allow-non-finite", &common.allow_non_finite,
               "Go on with weights that are infinite or not a number");
}

Option& add_checkpoint_option(Command& command, CommonOptions& common) {
  add_non_finite_option(command, common);
  return command
      .value("--checkpoint", &common.checkpoint, "DIR",
             "Folder of a checkpoint (config.json, model.safetensors, tokenizer.json) or of a run")
      .required();
}

Option& add_ffn_option(Command& command, std::string& name, const std::string& what) {
  return command
      .value("--ffn", &name, "NAME",
             what +
                 ": auto, dense, sparse, screened, screened-strict, or the name of one (doctor "
                 "--executions)")
      .suggests({"auto", "dense", "sparse", "screened", "screened-strict"});
}

Option& add_preset_option(Command& command, std::string& name, std::string help) {
  return command.value("--preset", &name, "NAME", std::move(help)).suggests(preset_names());
}

Option& add_out_option(Command& command, CommonOptions& common, std::string help) {
  return command.value("--out", &common.out, "DIR", std::move(help));
}

void add_speculate_option(Command& command, int64_t& speculate) {
  command
      .value("--speculate", &speculate, "N",
             "Guess up to N tokens from a sequence's own text and check them in one step: faster "
             "where the text repeats its prompt or itself, the same text but for ties; 0: none")
      .range(0, kMostDraft);
}

int64_t draft_tokens_of(int64_t speculate, int64_t slots) {
  return std::min(speculate * slots, std::max<int64_t>(speculate, kMostDraft));
}

void add_weights_option(Command& command, CommonOptions& common) {
  command
      .value("--weights", &common.weights, "TYPE",
             "Projections of the layers: stored, as the checkpoint has them; fp8, on a Hopper GPU; "
             "int8, on the CPU")
      .choices({"stored", "fp8", "int8"});
  command
      .value("--head", &common.head, "TYPE",
             "Output head: stored, as the checkpoint has it; 8bit, with projections in fp8 or int8")
      .choices({"stored", "8bit"});
  command
      .value("--compute", &common.compute, "TYPE",
             "CPU: type of the factors in products of more than 16 tokens, which are added in f32; "
             "bf16 needs AVX512_BF16 or AMX")
      .choices({"f32", "bf16"});
}

LoadOptions load_options(const CommonOptions& common) {
  LoadOptions options{.allow_non_finite = common.allow_non_finite};
  if (common.weights != "stored") options.weights = parse_byte_type(common.weights);
  options.head_in_bytes = common.head == "8bit";
  return options;
}

void add_seed_option(Command& command, CommonOptions& common) {
  command.group(kMachine);
  command.value("--seed", &common.seed, "N", "Seed of every random choice; same seed, same result");
}

void add_threads_option(Command& command, CommonOptions& common) {
  command.group(kMachine);
  command
      .value("--threads", &common.threads, "N", "Threads to compute with; 0: every available core")
      .range(0, 4096);
}

void add_device_option(Command& command, CommonOptions& common) {
  command.group(kMachine);
  command
      .value("--device", &common.device, "NAME",
             "Device to compute on: cpu, cuda, or auto, a GPU where there is one")
      .choices({"cpu", "cuda", "auto"});
}

void add_compute_options(Command& command, CommonOptions& common) {
  add_seed_option(command, common);
  add_threads_option(command, common);
  add_device_option(command, common);
}

}  // namespace twell::cli
