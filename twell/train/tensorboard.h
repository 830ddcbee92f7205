// SPDX-License-Identifier: Apache-2.0
// TensorBoard event files: TFRecord frames (length, masked CRC32C, bytes, masked CRC32C) of Event
// protocol buffers, encoded by hand because so few message types need no generator.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace twell {

uint32_t crc32c(std::string_view bytes);  // Castagnoli polynomial, reflected
// Returns one TFRecord frame around `payload`.
std::string tfrecord_frame(std::string_view payload);

class TensorBoardWriter {
 public:
  // Opens a new event file in `folder`. first_step > 0, after a resume, tells readers to discard
  // earlier events of that step and later.
  TensorBoardWriter(const std::filesystem::path& folder, int64_t first_step);
  void scalars(int64_t step, std::span<const std::pair<std::string, double>> values);
  // Texts in Markdown, for the text plugin.
  void texts(int64_t step, std::span<const std::pair<std::string, std::string>> values);

 private:
  void event(int64_t step, std::string_view body);
  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace twell
