// SPDX-License-Identifier: Apache-2.0
#include "twell/data/shard_writer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "twell/base/context.h"
#include "twell/base/error.h"
#include "twell/base/rng.h"
#include "twell/data/shard_work.h"
#include "twell/data/split_writer.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

constexpr uint64_t kSplitStream = 0x53504c4954;  // random-number stream; "SPLIT"
constexpr int64_t kLeastValidation = 4097;       // two windows of 2,048 tokens and the last target
constexpr auto kProgressInterval = std::chrono::milliseconds(100);

// A batch ends with the piece that reaches one of these limits. It takes some 20 ms to encode, so
// that threads that share a part seldom wait for each other.
constexpr int64_t kBatchBytes = int64_t{512} << 10;
constexpr size_t kBatchPieces = 1 << 14;

constexpr size_t index_of(Split split) { return static_cast<size_t>(split); }

Split split_of(std::string_view text, const TokenizeOptions& options) {
  const uint64_t hash = crc64(std::as_bytes(std::span(text)));
  const bool validation = uniform(options.seed, kSplitStream, hash) < options.validation_fraction;
  return validation ? Split::kValidation : Split::kTrain;
}

// Tokens the validation split should have of `total`; each split gets at least one.
int64_t wanted_validation(int64_t total, double fraction) {
  if (fraction == 0) return 0;
  const auto share = static_cast<int64_t>(std::llround(static_cast<double>(total) * fraction));
  const int64_t least = std::min(kLeastValidation, total / 10);
  return std::clamp<int64_t>(std::max(share, least), 1, std::max<int64_t>(total - 1, 1));
}

nlohmann::json options_json(const TextSource& source, const nlohmann::json& tokenizer,
                            const TokenizeOptions& options) {
  return {{"tokenizer", tokenizer},
          {"json_field", source.options().json_field},
          {"max_bytes", source.options().max_bytes},
          {"piece_bytes", source.options().piece_bytes},
          {"validation_fraction", options.validation_fraction},
          {"seed", options.seed},
          {"shard_tokens", options.shard_tokens},
          {"part_bytes", options.part_bytes}};
}

// Consecutive text of a part and, after encoding, its ids.
struct Batch {
  struct Piece {
    std::string text;
    Split split;
    int8_t ends = -1;  // split of a document that ends before this piece; -1: none ends
  };
  std::vector<Piece> pieces;  // the last one of a part is empty and ends the last document
  ShardCounts counts;         // without tokens
  std::array<std::vector<int32_t>, kSplits> ids;
  bool last = false;  // of its part
};

// A part in the making. The text is read by one thread at a time (`reading`), in batches that are
// encoded by the thread that read them and written in order by one thread at a time (`writing`).
struct OpenPart {
  OpenPart(size_t index_in, const FinishedPart& plan, std::vector<TextUnit> units,
           const TextSource& source, std::function<void(const std::string&)> on_skip,
           const fs::path& folder, int64_t vocab_size, const TokenizeOptions& options)
      : index(index_in),
        stream(std::move(units), source.options(), std::move(on_skip)),
        writers{SplitWriter(folder, fmt::format("train-{:05}", plan.number), vocab_size,
                            options.shard_tokens),
                SplitWriter(folder, fmt::format("validation-{:05}", plan.number), vocab_size,
                            options.shard_tokens)} {}

  size_t index;
  TextStream stream;
  int8_t document = -1;  // split of the document being read; -1 before the first
  std::array<SplitWriter, kSplits> writers;
  ShardCounts counts;  // of the batches written

  // Guarded by the job's mutex.
  bool reading = false, writing = false, read_whole = false;
  int64_t batches_read = 0, batches_written = 0;
  std::map<int64_t, Batch> encoded;  // not yet written, by number
  int64_t bytes_read = 0;            // for progress
};

}  // namespace

struct ShardWriter::Impl {
  Impl(TextSource& source_in, const nlohmann::json& tokenizer, const fs::path& folder,
       const TokenizeOptions& options_in, bool replace)
      : source(source_in),
        options(options_in),
        threads(Context(options_in.threads).threads()),
        plan(source_in.parts(options_in.part_bytes)),
        work(folder, options_json(source_in, tokenizer, options_in), source_in, plan,
             options_in.redo_changed, replace) {
    for (size_t i = 0; i < plan.size(); ++i) {
      int64_t bytes = 0;
      for (const TextUnit& unit : plan[i]) bytes += unit.bytes;
      progress.total_bytes += bytes;
      if (!work.is_finished(i)) continue;
      progress.kept_bytes += bytes;
      progress.tokens += work.parts()[i].manifest.counts.train_tokens +
                         work.parts()[i].manifest.counts.validation_tokens;
    }
    progress.bytes_read = progress.kept_bytes;
    progress.parts = std::ssize(plan);
    progress.parts_finished = work.finished();
  }

  // ---- A worker thread ----------------------------------------------------------------------

  void run_thread(const TokenEncoder& encoder) {
    try {
      std::shared_ptr<OpenPart> part;
      while ((part = claim(part, encoder)) != nullptr) {
        Batch batch = read(*part);
        const int64_t number = end_reading(*part, batch);
        encode(batch, encoder);
        write(*part, number, std::move(batch), encoder);
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!fault) fault = std::current_exception();
      stop = true;
      changed.notify_all();
    }
  }

  // A part to read from, which is then marked as being read: the thread's last one if possible, a
  // new one while there are fewer than threads, else another thread's. Null when nothing is left.
  std::shared_ptr<OpenPart> claim(const std::shared_ptr<OpenPart>& last,
                                  const TokenEncoder& encoder) {
    std::unique_lock lock(mutex);
    for (;; changed.wait(lock)) {
      if (stop) return nullptr;
      // A batch that takes long holds back those behind it; their number is limited.
      const auto readable = [&](const std::shared_ptr<OpenPart>& part) {
        return part && !part->reading && !part->read_whole &&
               part->batches_read - part->batches_written < 2 * threads + 2;
      };
      std::shared_ptr<OpenPart> found;
      while (next_part < plan.size() && work.is_finished(next_part)) ++next_part;
      if (readable(last)) {
        found = last;
      } else if (next_part < plan.size() && std::ssize(open) < threads) {
        const size_t index = next_part++;
        found = open.emplace_back(std::make_shared<OpenPart>(
            index, work.parts()[index], plan[index], source,
            [this](const std::string& reason) { skip(reason); }, work.folder(), encoder.vocab_size,
            options));
      } else if (const auto other = std::find_if(open.begin(), open.end(), readable);
                 other != open.end()) {
        found = *other;
      }
      if (found) {
        found->reading = true;
        return found;
      }
      if (open.empty() && next_part == plan.size()) return nullptr;
    }
  }

  void skip(const std::string& reason) {
    const std::lock_guard lock(mutex);
    skipped.push_back(reason);
  }

  Batch read(OpenPart& part) const {
    Batch batch;
    TextPiece piece;
    while (batch.counts.text_bytes < kBatchBytes && batch.pieces.size() < kBatchPieces) {
      if (!part.stream.next(piece)) {
        batch.last = true;
        batch.pieces.push_back({.text = "", .split = Split::kTrain, .ends = part.document});
        break;
      }
      int8_t ends = -1;
      if (piece.begins_document) {
        ends = std::exchange(part.document, static_cast<int8_t>(split_of(piece.text, options)));
        ++batch.counts.documents;
      }
      const auto bytes = std::ssize(piece.text);
      const auto split = static_cast<Split>(part.document);
      batch.counts.text_bytes += bytes;
      if (split == Split::kValidation) batch.counts.validation_text_bytes += bytes;
      batch.pieces.push_back({.text = std::move(piece.text), .split = split, .ends = ends});
    }
    return batch;
  }

  // Lets another thread read on. Returns the batch's number in its part.
  int64_t end_reading(OpenPart& part, const Batch& batch) {
    const int64_t bytes = part.stream.bytes_read();
    const std::lock_guard lock(mutex);
    progress.bytes_read += bytes - std::exchange(part.bytes_read, bytes);
    progress.text_bytes += batch.counts.text_bytes;
    part.reading = false;
    part.read_whole = batch.last;
    changed.notify_all();
    return part.batches_read++;
  }

  static void encode(Batch& batch, const TokenEncoder& encoder) {
    for (const Batch::Piece& piece : batch.pieces) {
      if (piece.ends >= 0) batch.ids[static_cast<size_t>(piece.ends)].push_back(encoder.eos);
      if (!piece.text.empty()) encoder.encode(piece.text, batch.ids[index_of(piece.split)]);
    }
    batch.pieces.clear();
  }

  // Writes the batches that are next in order, unless another thread does: it then writes this one
  // too. Whoever writes the last batch finishes the part.
  void write(OpenPart& part, int64_t number, Batch batch, const TokenEncoder& encoder) {
    std::unique_lock lock(mutex);
    part.encoded.emplace(number, std::move(batch));
    if (part.writing) return;
    part.writing = true;
    bool finished = false;
    while (!stop && !part.encoded.empty() && part.encoded.begin()->first == part.batches_written) {
      const Batch next = std::move(part.encoded.extract(part.encoded.begin()).mapped());
      lock.unlock();
      for (size_t s = 0; s < kSplits; ++s) part.writers[s].append(next.ids[s]);
      part.counts.documents += next.counts.documents;
      part.counts.text_bytes += next.counts.text_bytes;
      part.counts.validation_text_bytes += next.counts.validation_text_bytes;
      if (next.last) finish(part, encoder);
      lock.lock();
      ++part.batches_written;
      progress.tokens += std::ssize(next.ids[0]) + std::ssize(next.ids[1]);
      finished = next.last;
      changed.notify_all();
    }
    part.writing = false;
    if (!finished) return;
    ++progress.parts_finished;
    std::erase_if(open, [&](const auto& other) { return other.get() == &part; });
  }

  void finish(OpenPart& part, const TokenEncoder& encoder) {
    ShardManifest manifest = empty_manifest(encoder);
    for (size_t s = 0; s < kSplits; ++s) {
      part.writers[s].finish();
      manifest.shards[s] = part.writers[s].shards();
    }
    manifest.counts = part.counts;
    manifest.counts.train_tokens = part.writers[index_of(Split::kTrain)].tokens();
    manifest.counts.validation_tokens = part.writers[index_of(Split::kValidation)].tokens();
    work.finish(part.index, std::move(manifest), part.stream.skipped());
  }

  // ---- The calling thread -------------------------------------------------------------------

  void check_kept_parts(const TokenEncoder& encoder) const {
    for (size_t i = 0; i < plan.size(); ++i) {
      TWELL_REQUIRE(!work.is_finished(i) || work.parts()[i].manifest.tokenizer_hash == encoder.hash,
                    "{} holds parts made with another tokenizer: delete the folder to begin again",
                    work.folder().string());
    }
  }

  // Makes all parts that are not finished.
  void make_parts(const TokenEncoder& encoder) {
    std::vector<std::thread> workers;
    // Joins the threads, also when `progress` throws.
    struct Joiner {
      Impl& job;
      std::vector<std::thread>& workers;
      ~Joiner() {
        {
          const std::lock_guard lock(job.mutex);
          job.stop = true;
          job.changed.notify_all();
        }
        for (std::thread& worker : workers) worker.join();
      }
    };
    {
      std::atomic<int> running = threads;
      const Joiner joiner{*this, workers};
      for (int t = 0; t < threads; ++t) {
        workers.emplace_back([&] {
          run_thread(encoder);
          const std::lock_guard lock(mutex);
          --running;
          all_done.notify_all();
        });
      }
      std::unique_lock lock(mutex);
      while (!all_done.wait_for(lock, kProgressInterval, [&] { return running == 0; })) {
        tell(lock);
      }
    }
    std::unique_lock lock(mutex);
    if (fault) std::rethrow_exception(fault);
    tell(lock);
    source.skip_log().end();
  }

  void tell(std::unique_lock<std::mutex>& lock) {
    const TokenizeProgress now = progress;
    const std::vector<std::string> reasons = std::exchange(skipped, {});
    lock.unlock();
    for (const std::string& reason : reasons) source.skip_log().skipped(reason);
    if (options.progress) options.progress(now);
    lock.lock();
  }

  ShardManifest empty_manifest(const TokenEncoder& encoder) const {
    return {.tokenizer_hash = encoder.hash,
            .vocab_size = encoder.vocab_size,
            .seed = options.seed,
            .validation_fraction = options.validation_fraction,
            .counts = {},
            .shards = {}};
  }

  // The parts' shards and counts together.
  ShardManifest joined(const TokenEncoder& encoder) {
    ShardManifest all = empty_manifest(encoder);
    skipped_in_parts = {};
    for (const FinishedPart& part : work.parts()) {
      const ShardManifest& one = part.manifest;
      all.counts.documents += one.counts.documents;
      all.counts.train_tokens += one.counts.train_tokens;
      all.counts.validation_tokens += one.counts.validation_tokens;
      all.counts.text_bytes += one.counts.text_bytes;
      all.counts.validation_text_bytes += one.counts.validation_text_bytes;
      for (size_t s = 0; s < kSplits; ++s) {
        all.shards[s].insert(all.shards[s].end(), one.shards[s].begin(), one.shards[s].end());
      }
      skipped_in_parts += part.skipped;
    }
    return all;
  }

  void balance(ShardManifest& all, const TokenEncoder& encoder) {
    const int64_t had = all.counts.validation_tokens, total = all.counts.train_tokens + had;
    const int64_t wanted = wanted_validation(total, options.validation_fraction);
    if (total == 0 || wanted == total) work.discard();
    TWELL_REQUIRE(total > 0, "there is no text in the files given");
    TWELL_REQUIRE(wanted < total,
                  "the text gives {} token: too little for a train and a validation split", total);
    if (had < (wanted + 1) / 2) {
      all.counts.validation_text_bytes +=
          move_tail(all, Split::kTrain, Split::kValidation, wanted - had, encoder);
    } else if (had > 2 * wanted || had == total) {
      all.counts.validation_text_bytes -=
          move_tail(all, Split::kValidation, Split::kTrain, had - wanted, encoder);
    } else {
      return;
    }
    all.counts.validation_tokens = wanted;
    all.counts.train_tokens = total - wanted;
  }

  // Moves the last `count` tokens of a split to the end of the other, and returns the bytes of text
  // that they represent. Writes new files and leaves the parts' as they are, so that it can be
  // interrupted.
  int64_t move_tail(ShardManifest& all, Split from, Split to, int64_t count,
                    const TokenEncoder& encoder) const {
    const auto writer = [&](Split split, const char* what) {
      return SplitWriter(work.folder(), fmt::format("{}-{}", split_name(split), what),
                         encoder.vocab_size, options.shard_tokens);
    };
    SplitWriter moved = writer(to, "moved"), kept = writer(from, "kept");
    std::vector<ShardFile>& shards = all.shards[index_of(from)];
    size_t first = shards.size();
    int64_t keep = -count;  // tokens of the first shard of the tail that stay
    while (keep < 0) keep += shards[--first].tokens;
    int64_t bytes = 0;
    std::vector<int32_t> ids;
    for (size_t s = first; s < shards.size(); ++s) {
      const MappedFile file(work.folder() / shards[s].name);
      for (int64_t at = 0; at < shards[s].tokens; at += std::ssize(ids)) {
        const bool stays = s == first && at < keep;
        const int64_t end = stays ? keep : shards[s].tokens;
        ids.resize(static_cast<size_t>(std::min<int64_t>(end - at, 1 << 20)));
        const uint32_t largest =
            unpack_ids(file.bytes().data() + at * all.id_bytes(), all.id_bytes(), ids);
        // A part that an earlier job finished can have been altered since.
        TWELL_REQUIRE(largest < encoder.vocab_size,
                      "{} holds token {}, outside the vocabulary of {}: delete {} to begin again",
                      file.path().string(), largest, encoder.vocab_size, work.folder().string());
        (stays ? kept : moved).append(ids);
        if (stays) continue;
        for (const int32_t id : ids) bytes += id == encoder.eos ? 0 : encoder.token_bytes(id);
      }
    }
    shards.resize(first);
    for (SplitWriter* out : {&kept, &moved}) {
      out->finish();
      std::vector<ShardFile>& list = all.shards[index_of(out == &kept ? from : to)];
      list.insert(list.end(), out->shards().begin(), out->shards().end());
    }
    return bytes;
  }

  TextSource& source;
  TokenizeOptions options;
  int threads;
  std::vector<std::vector<TextUnit>> plan;  // units of each part
  ShardWork work;
  TextSkips skipped_in_parts;

  std::mutex mutex;  // of everything below
  std::condition_variable changed, all_done;
  size_t next_part = 0;  // first part not yet opened
  std::vector<std::shared_ptr<OpenPart>> open;
  std::vector<std::string> skipped;  // reasons not yet logged
  TokenizeProgress progress;
  std::exception_ptr fault;
  bool stop = false;
};

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

ShardWriter::ShardWriter(TextSource& source, const nlohmann::json& tokenizer,
                         const fs::path& folder, const TokenizeOptions& options, bool replace) {
  TWELL_REQUIRE(options.validation_fraction >= 0 && options.validation_fraction < 1,
                "the validation fraction must be at least 0 and below 1, got {}",
                options.validation_fraction);
  TWELL_REQUIRE(options.shard_tokens > 0, "a shard must hold at least one token, got {}",
                options.shard_tokens);
  TWELL_REQUIRE(options.part_bytes > 0, "a part must have at least one byte, got {}",
                options.part_bytes);
  impl_ = std::make_unique<Impl>(source, tokenizer, folder, options, replace);
}

ShardWriter::~ShardWriter() = default;

bool ShardWriter::made(TextSource& source, const nlohmann::json& tokenizer, const fs::path& folder,
                       const TokenizeOptions& options) {
  return shards_made_from(folder, options_json(source, tokenizer, options), source);
}

const fs::path& ShardWriter::work_folder() const { return impl_->work.folder(); }
int64_t ShardWriter::parts() const { return std::ssize(impl_->plan); }
int64_t ShardWriter::finished_parts() const { return impl_->work.finished(); }
TextSkips ShardWriter::skipped() const {
  TextSkips all = impl_->source.unlisted();
  return all += impl_->skipped_in_parts;
}

ShardCounts ShardWriter::write(const TokenEncoder& encoder) {
  TWELL_REQUIRE(encoder.eos >= 0,
                "the tokenizer has no end-of-text token to put between documents: name one of its "
                "added tokens (--end-token)");
  impl_->check_kept_parts(encoder);
  impl_->make_parts(encoder);
  ShardManifest manifest = impl_->joined(encoder);
  impl_->balance(manifest, encoder);
  impl_->work.place(manifest, skipped());
  return manifest.counts;
}

ShardCounts write_shards(TextSource& source, const TokenEncoder& encoder, const fs::path& folder,
                         const TokenizeOptions& options) {
  return ShardWriter(source, encoder.hash, folder, options, /*replace=*/true).write(encoder);
}

}  // namespace twell
