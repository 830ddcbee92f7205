// SPDX-License-Identifier: Apache-2.0
// Conversations as the data of a run (--chat-data), and the files by which its checkpoints chat.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "twell/base/context.h"
#include "twell/data/chat_data.h"
#include "twell/tokenizer/tokenizer.h"
#include "twell/train/option_table.h"
#include "twell/train/text_files.h"

namespace twell {

struct ChatRun {
  std::unique_ptr<ChatData> data;
  // The checkpoint's own, with the template that rendered the conversations; generation_config.json
  // also names the tokens that end answers.
  TextFiles text_files;

  std::string summary() const;  // what was read, in a line
};

// Reads settings.chat_data by the template and the special tokens of `checkpoint`, the model
// trained from or the checkpoint that the run goes on with, or by settings.chat_template. `options`
// lacks the file alone.
ChatRun read_chat_data(Context& ctx, const RunSettings& settings, const ModelConfig& config,
                       const Tokenizer& tokenizer, const std::filesystem::path& checkpoint,
                       ChatDataOptions options);

}  // namespace twell
