// SPDX-License-Identifier: Apache-2.0
#include "twell/data/split_writer.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "twell/base/error.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

static_assert(std::endian::native == std::endian::little, "shards are mapped as they are");

constexpr size_t kBufferBytes = size_t{1} << 20;

template <typename Id>
void pack_ids(std::span<const int32_t> ids, std::vector<std::byte>& out) {
  const size_t before = out.size();
  out.resize(before + ids.size() * sizeof(Id));
  for (size_t i = 0; i < ids.size(); ++i) {
    const Id id = static_cast<Id>(ids[i]);
    std::memcpy(out.data() + before + i * sizeof(Id), &id, sizeof(Id));
  }
}

template <typename Id>
uint32_t unpack(const std::byte* packed, std::span<int32_t> ids) {
  uint32_t largest = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    Id id;
    std::memcpy(&id, packed + i * sizeof(Id), sizeof(Id));
    ids[i] = static_cast<int32_t>(id);
    largest = std::max<uint32_t>(largest, id);
  }
  return largest;
}

}  // namespace

uint32_t unpack_ids(const std::byte* packed, int64_t id_bytes, std::span<int32_t> ids) {
  return id_bytes == 2 ? unpack<uint16_t>(packed, ids) : unpack<uint32_t>(packed, ids);
}

uint64_t crc64(std::span<const std::byte> bytes, uint64_t before) {
  return lzma_crc64(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size(), before);
}

SplitWriter::SplitWriter(fs::path folder, std::string stem, int64_t vocab_size,
                         int64_t shard_tokens)
    : folder_(std::move(folder)),
      stem_(std::move(stem)),
      vocab_size_(vocab_size),
      id_bytes_(ShardManifest{.vocab_size = vocab_size}.id_bytes()),
      shard_tokens_(shard_tokens) {}

void SplitWriter::append(std::span<const int32_t> ids) {
  for (const int32_t id : ids) {
    TWELL_CHECK(id >= 0 && id < vocab_size_, "token {} outside the vocabulary of {}", id,
                vocab_size_);
  }
  while (!ids.empty()) {
    if (!open_) {
      shards_.push_back({.name = fmt::format("{}-{:03}.bin", stem_, shards_.size())});
      open_ = std::make_unique<OpenShard>(folder_ / shards_.back().name);
    }
    const int64_t room = shard_tokens_ - open_->tokens;
    const auto part = ids.first(static_cast<size_t>(std::min<int64_t>(room, std::ssize(ids))));
    id_bytes_ == 2 ? pack_ids<uint16_t>(part, buffer_) : pack_ids<uint32_t>(part, buffer_);
    open_->tokens += std::ssize(part);
    tokens_ += std::ssize(part);
    ids = ids.subspan(part.size());
    if (buffer_.size() >= kBufferBytes) write_buffer();
    if (open_->tokens == shard_tokens_) finish();
  }
}

void SplitWriter::write_buffer() {
  open_->file.write(buffer_);
  open_->crc64 = crc64(buffer_, open_->crc64);
  buffer_.clear();
}

void SplitWriter::finish() {
  if (!open_) return;
  write_buffer();
  open_->file.commit();
  shards_.back().tokens = open_->tokens;
  shards_.back().crc64 = open_->crc64;
  open_.reset();
}

}  // namespace twell
