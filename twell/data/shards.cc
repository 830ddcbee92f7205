// SPDX-License-Identifier: Apache-2.0
#include "twell/data/shards.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <future>
#include <utility>

#include "twell/base/context.h"
#include "twell/base/error.h"
#include "twell/base/rng.h"
#include "twell/data/split_writer.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

constexpr uint64_t kSplitStream = 0x53504c4954;  // random-number stream; "SPLIT"
constexpr int64_t kLeastValidation = 4097;       // two windows of 2,048 tokens and the last target

// Limits on text read but not yet encoded: in bytes, and in pieces, because pieces can be tiny.
constexpr int64_t kBatchBytesPerThread = int64_t{2} << 20;
constexpr size_t kBatchPieces = 1 << 16;

bool is_validation(std::string_view text, const TokenizeOptions& options) {
  const uint64_t hash = crc64(std::as_bytes(std::span(text)));
  return uniform(options.seed, kSplitStream, hash) < options.validation_fraction;
}

// Tokens the validation split should have of `total`; each split gets at least one.
int64_t wanted_validation(int64_t total, double fraction) {
  if (fraction == 0) return 0;
  const auto share = static_cast<int64_t>(std::llround(static_cast<double>(total) * fraction));
  const int64_t least = std::min(kLeastValidation, total / 10);
  return std::clamp<int64_t>(std::max(share, least), 1, std::max<int64_t>(total - 1, 1));
}

// One run of write_shards: read a batch, encode it on all threads, write it in order.
class ShardJob {
 public:
  ShardJob(TextSource& source, const TokenEncoder& encoder, const fs::path& folder,
           const TokenizeOptions& options)
      : source_(source),
        encoder_(encoder),
        options_(options),
        ctx_(options.threads),
        train_(folder, Split::kTrain, encoder.vocab_size, options.shard_tokens),
        validation_(folder, Split::kValidation, encoder.vocab_size, options.shard_tokens) {}

  ShardManifest run() {
    source_.rewind();
    std::vector<TextPiece> batch = read_batch();
    while (!batch.empty()) {
      auto next = std::async(std::launch::async, [this] { return read_batch(); });
      encode(batch);
      write(batch);
      batch = next.get();
      if (options_.progress) {
        options_.progress(source_.bytes_read(), source_.total_bytes(), total_tokens());
      }
    }
    end_document();
    balance();
    return manifest();
  }

 private:
  std::vector<TextPiece> read_batch() {
    std::vector<TextPiece> batch;
    int64_t room = kBatchBytesPerThread * ctx_.threads();
    for (TextPiece piece; room > 0 && batch.size() < kBatchPieces && source_.next(piece);) {
      room -= std::ssize(piece.text);
      batch.push_back(std::move(piece));
    }
    return batch;
  }

  // ids_[i] = ids of batch[i]. Threads take pieces one at a time because their costs differ.
  void encode(const std::vector<TextPiece>& batch) {
    ids_.resize(std::max(ids_.size(), batch.size()));
    std::atomic<size_t> next = 0;
    ctx_.parallel_for(ctx_.threads(), 1, [&](int64_t, int64_t, int) {
      for (size_t i = next++; i < batch.size(); i = next++) {
        ids_[i].clear();
        encoder_.encode(batch[i].text, ids_[i]);
      }
    });
  }

  void write(const std::vector<TextPiece>& batch) {
    for (size_t i = 0; i < batch.size(); ++i) {
      const TextPiece& piece = batch[i];
      if (piece.begins_document) {
        end_document();
        document_ = is_validation(piece.text, options_) ? &validation_ : &train_;
        ++counts_.documents;
      }
      document_->append(ids_[i]);
      counts_.text_bytes += std::ssize(piece.text);
      if (document_ == &validation_) counts_.validation_text_bytes += std::ssize(piece.text);
    }
  }

  void end_document() {
    if (document_ != nullptr) document_->append(std::span(&encoder_.eos, 1));
  }

  int64_t total_tokens() const { return train_.tokens() + validation_.tokens(); }

  void balance() {
    const int64_t total = total_tokens();
    TWELL_REQUIRE(total > 0, "there is no text in the files given");
    const int64_t wanted = wanted_validation(total, options_.validation_fraction);
    TWELL_REQUIRE(wanted < total,
                  "the text gives {} token: too little for a train and a validation split", total);
    const int64_t had = validation_.tokens();
    if (had < (wanted + 1) / 2) {
      counts_.validation_text_bytes += move_tail(train_, validation_, wanted - had);
    } else if (had > 2 * wanted || had == total) {
      counts_.validation_text_bytes -= move_tail(validation_, train_, had - wanted);
    }
    train_.finish();
    validation_.finish();
  }

  // Returns the bytes of text that the moved tokens represent.
  int64_t move_tail(SplitWriter& from, SplitWriter& to, int64_t count) {
    int64_t bytes = 0;
    from.finish();
    from.take_tail(count, [&](std::span<const int32_t> ids) {
      to.append(ids);
      for (const int32_t id : ids) bytes += id == encoder_.eos ? 0 : encoder_.token_bytes(id);
    });
    return bytes;
  }

  ShardManifest manifest() {
    counts_.train_tokens = train_.tokens();
    counts_.validation_tokens = validation_.tokens();
    return {.tokenizer_hash = encoder_.hash,
            .vocab_size = encoder_.vocab_size,
            .seed = options_.seed,
            .validation_fraction = options_.validation_fraction,
            .counts = counts_,
            .shards = {train_.shards(), validation_.shards()}};
  }

  TextSource& source_;
  const TokenEncoder& encoder_;
  const TokenizeOptions& options_;
  Context ctx_;
  SplitWriter train_, validation_;
  SplitWriter* document_ = nullptr;  // split of the document being written
  std::vector<std::vector<int32_t>> ids_;
  ShardCounts counts_;
};

}  // namespace

TokenEncoder TokenEncoder::of(const Tokenizer& tokenizer) {
  return {.encode =
              [&tokenizer](std::string_view text, std::vector<int32_t>& ids) {
                tokenizer.encode(text, ids, /*allow_special=*/false);
              },
          .token_bytes = [&tokenizer](int32_t id) { return std::ssize(tokenizer.token_bytes(id)); },
          .eos = tokenizer.eos_token(),
          .vocab_size = tokenizer.vocab_size(),
          .hash = tokenizer.hash()};
}

ShardCounts write_shards(TextSource& source, const Tokenizer& tokenizer, const fs::path& folder,
                         const TokenizeOptions& options) {
  return write_shards(source, TokenEncoder::of(tokenizer), folder, options);
}

ShardCounts write_shards(TextSource& source, const TokenEncoder& encoder, const fs::path& folder,
                         const TokenizeOptions& options) {
  TWELL_REQUIRE(encoder.eos >= 0,
                "the tokenizer has no end-of-text token to put between documents: use one with "
                "such a token, <|endoftext|> for example");
  TWELL_REQUIRE(options.validation_fraction >= 0 && options.validation_fraction < 1,
                "the validation fraction must be at least 0 and below 1, got {}",
                options.validation_fraction);
  TWELL_REQUIRE(options.shard_tokens > 0, "a shard must hold at least one token, got {}",
                options.shard_tokens);
  ShardCounts counts;
  write_folder_atomic(folder, [&](const fs::path& temporary) {
    const ShardManifest manifest = ShardJob(source, encoder, temporary, options).run();
    write_file_atomic(temporary / "manifest.json", to_json(manifest));
    counts = manifest.counts;
  });
  return counts;
}

}  // namespace twell
