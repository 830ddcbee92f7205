// SPDX-License-Identifier: Apache-2.0
// The benchmarks under `twell bench`.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "cli/options.h"

namespace twell::cli {

void add_bench_forward_command(Command& bench, CommonOptions& common);
void add_bench_decode_command(Command& bench, CommonOptions& common);
void add_bench_ffn_command(Command& bench, CommonOptions& common);
void add_bench_train_command(Command& bench, CommonOptions& common);

// What every result row says about where it comes from: version, processor, threads, date.
nlohmann::json machine_json(int threads);
std::string cpu_name();
// Appends one JSON line; no file when the path is empty. InputError when it cannot be written.
void append_jsonl(const std::filesystem::path& path, const nlohmann::json& row);

}  // namespace twell::cli
