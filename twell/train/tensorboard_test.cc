// SPDX-License-Identifier: Apache-2.0
#include "twell/train/tensorboard.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/train/test_run.h"

namespace twell {
namespace {

template <typename T>
T load(const std::string& bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

// Payloads of the records of a file; fails the test on a bad frame.
std::vector<std::string> records(const std::string& file) {
  std::vector<std::string> payloads;
  for (size_t at = 0; at < file.size();) {
    const auto size = load<uint64_t>(file, at);
    payloads.push_back(file.substr(at + 12, size));
    EXPECT_EQ(file.substr(at, size + 16), tfrecord_frame(payloads.back()));
    at += size + 16;
  }
  return payloads;
}

TEST(Crc32c, KnownAnswers) {  // RFC 3720, B.4, and the usual check value
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62A8AB43u);
}

TEST(TfRecord, Frame) {
  const std::string frame = tfrecord_frame("abc");
  ASSERT_EQ(frame.size(), 19u);
  EXPECT_EQ(load<uint64_t>(frame, 0), 3u);
  const uint32_t crc = crc32c("abc");
  EXPECT_EQ(load<uint32_t>(frame, 15), ((crc >> 15) | (crc << 17)) + 0xa282ead8u);
}

TEST(TensorBoard, FileHoldsVersionRestartScalarsAndTexts) {
  const TempFolder folder;
  {
    TensorBoardWriter writer(folder.path() / "tb", 300);
    const std::vector<std::pair<std::string, double>> values = {{"loss/ce", 2.5}};
    writer.scalars(301, values);
    const std::vector<std::pair<std::string, std::string>> texts = {{"samples/0", "abc"}};
    writer.texts(302, texts);
  }
  std::string file;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path() / "tb")) {
    file = read_file(entry.path());
  }
  const std::vector<std::string> events = records(file);
  ASSERT_EQ(events.size(), 4u);
  // wall_time (9 bytes), step 0, file_version
  EXPECT_EQ(events[0].substr(9), std::string("\x10\x00\x1a\x0d"
                                             "brain.Event:2",
                                             17));
  // step 300, session_log {status: START}
  EXPECT_EQ(events[1].substr(9), std::string("\x10\xac\x02\x3a\x02\x08\x01"));
  // step 301, summary {value {tag, simple_value 2.5f}}
  EXPECT_EQ(events[2].substr(9), std::string("\x10\xad\x02\x2a\x10\x0a\x0e\x0a\x07loss/ce\x15"
                                             "\x00\x00\x20\x40",
                                             21));
  // step 302, summary {value {tag, tensor {dtype DT_STRING, shape {dim {size 1}}, string_val
  // "abc"}, metadata {plugin_data {plugin_name "text"}}}}
  EXPECT_EQ(events[3].substr(9), std::string("\x10\xae\x02\x2a\x26\x0a\x24\x0a\x09samples/0"
                                             "\x42\x0d\x08\x07\x12\x04\x12\x02\x08\x01\x42\x03"
                                             "abc\x4a\x08\x0a\x06\x0a\x04text",
                                             43));
}

}  // namespace
}  // namespace twell
