// SPDX-License-Identifier: Apache-2.0
#include "twell/train/tensorboard.h"

#include <unistd.h>

#include <bit>
#include <chrono>

#include "twell/base/error.h"
#include "twell/base/file.h"

namespace twell {
namespace {

// TFRecord's guard against checksums of data that contain checksums.
uint32_t masked_crc(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xA282EAD8u; }

template <typename T>
void append_little_endian(std::string& out, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    out.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
  }
}

void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

// Protocol buffer wire types.
enum Wire : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void append_key(std::string& out, uint32_t field, Wire wire) {
  append_varint(out, (field << 3) | wire);
}

void append_bytes(std::string& out, uint32_t field, std::string_view bytes) {
  append_key(out, field, kBytes);
  append_varint(out, bytes.size());
  out += bytes;
}

// Fields of tensorflow.Event and the messages in it.
constexpr uint32_t kEventWallTime = 1, kEventStep = 2, kEventFileVersion = 3, kEventSummary = 5,
                   kEventSessionLog = 7;
constexpr uint32_t kSummaryValue = 1, kValueTag = 1, kValueSimple = 2, kValueTensor = 8,
                   kValueMetadata = 9;
constexpr uint32_t kMetadataPlugin = 1, kPluginName = 1;
constexpr uint32_t kTensorType = 1, kTensorShape = 2, kTensorStrings = 8, kTypeString = 7;
constexpr uint32_t kShapeDimension = 2, kDimensionSize = 1;
constexpr uint32_t kSessionStatus = 1, kSessionStart = 1;

double wall_time() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = 0xFFFFFFFFu;
  for (const char byte : bytes) {
    crc ^= static_cast<uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0x82F63B78u : 0u);
  }
  return ~crc;
}

std::string tfrecord_frame(std::string_view payload) {
  std::string frame;
  append_little_endian(frame, static_cast<uint64_t>(payload.size()));
  append_little_endian(frame, masked_crc(frame));
  frame += payload;
  append_little_endian(frame, masked_crc(payload));
  return frame;
}

TensorBoardWriter::TensorBoardWriter(const std::filesystem::path& folder, int64_t first_step) {
  make_folder(folder);
  path_ =
      folder / fmt::format("events.out.tfevents.{:.0f}.{}.twell", wall_time() * 1e6, ::getpid());
  file_.open(path_, std::ios::binary);
  std::string body;
  append_bytes(body, kEventFileVersion, "brain.Event:2");
  event(0, body);
  if (first_step > 0) {
    std::string session;
    append_key(session, kSessionStatus, kVarint);
    append_varint(session, kSessionStart);
    body.clear();
    append_bytes(body, kEventSessionLog, session);
    event(first_step, body);
  }
}

void TensorBoardWriter::scalars(int64_t step,
                                std::span<const std::pair<std::string, double>> values) {
  std::string summary;
  for (const auto& [tag, number] : values) {
    std::string value;
    append_bytes(value, kValueTag, tag);
    append_key(value, kValueSimple, kFixed32);
    append_little_endian(value, std::bit_cast<uint32_t>(static_cast<float>(number)));
    append_bytes(summary, kSummaryValue, value);
  }
  std::string body;
  append_bytes(body, kEventSummary, summary);
  event(step, body);
}

void TensorBoardWriter::texts(int64_t step,
                              std::span<const std::pair<std::string, std::string>> values) {
  std::string dimension, shape, plugin, metadata;
  append_key(dimension, kDimensionSize, kVarint);
  append_varint(dimension, 1);
  append_bytes(shape, kShapeDimension, dimension);
  append_bytes(plugin, kPluginName, "text");
  append_bytes(metadata, kMetadataPlugin, plugin);
  std::string summary;
  for (const auto& [tag, text] : values) {
    std::string tensor, value;
    append_key(tensor, kTensorType, kVarint);
    append_varint(tensor, kTypeString);
    append_bytes(tensor, kTensorShape, shape);
    append_bytes(tensor, kTensorStrings, text);
    append_bytes(value, kValueTag, tag);
    append_bytes(value, kValueTensor, tensor);
    append_bytes(value, kValueMetadata, metadata);
    append_bytes(summary, kSummaryValue, value);
  }
  std::string body;
  append_bytes(body, kEventSummary, summary);
  event(step, body);
}

void TensorBoardWriter::event(int64_t step, std::string_view body) {
  std::string payload;
  append_key(payload, kEventWallTime, kFixed64);
  append_little_endian(payload, std::bit_cast<uint64_t>(wall_time()));
  append_key(payload, kEventStep, kVarint);
  append_varint(payload, static_cast<uint64_t>(step));
  payload += body;
  file_ << tfrecord_frame(payload) << std::flush;
  TWELL_REQUIRE(file_.good(), "cannot write {}", path_.string());
}

}  // namespace twell
