// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/tensor_load.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace twell {
namespace {

// Bytes per piece: fits into the L2, and large enough that handing out a piece costs nothing.
constexpr int64_t kPieceBytes = int64_t{1} << 20;
// Pieces are multiples of this many rows, so that threads writing transposed values share no cache
// line.
constexpr int64_t kLine = 32;

// Pieces to read ahead: more than the bandwidth times latency of a fast disk.
constexpr size_t kAhead = 16;
constexpr size_t kPage = 4096;  // smallest page size; touching one byte per page reads all

// Stored rows [begin, begin + count) of a tensor.
struct Piece {
  const TensorInfo* tensor = nullptr;
  TensorPlace place;
  int64_t begin = 0;
  int64_t count = 0;
  std::span<const std::byte> bytes;
};

bool is_read(const TensorPlace& place) { return place.out != nullptr || place.stays; }

void add_pieces(const TensorInfo& tensor, const TensorPlace& place, std::vector<Piece>& pieces) {
  // A tensor that is not converted may have any shape, so its pieces count bytes.
  const int64_t bytes = std::ssize(tensor.bytes);
  const int64_t rows = place.out == nullptr ? bytes : place.transposed ? place.cols : place.rows;
  const int64_t row_bytes = std::max<int64_t>(1, bytes / std::max<int64_t>(1, rows));
  const int64_t step = std::max(kPieceBytes / row_bytes / kLine * kLine, kLine);
  // An empty tensor is one piece, because its name is hashed.
  for (int64_t begin = 0; begin == 0 || begin < rows; begin += step) {
    const int64_t count = std::min(step, rows - begin);
    pieces.push_back({&tensor, place, begin, count,
                      tensor.bytes.subspan(static_cast<size_t>(begin * row_bytes),
                                           static_cast<size_t>(count * row_bytes))});
  }
}

// Hashes the pieces of a file in order, although threads convert them in any order.
class PieceHash {
 public:
  PieceHash(const SafetensorsFile& file, const std::vector<Piece>& pieces, ContentHash hash)
      : file_(file), pieces_(pieces), hash_(std::move(hash)), ready_(pieces.size()) {}

  // Called when piece i has been converted. Hashes the next pieces that are ready, unless another
  // thread is hashing; pieces that both miss are hashed by a later call, so no thread ever waits.
  void add(size_t i) {
    ready_[i].store(true);
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock) advance();
  }
  // Called on one thread after all pieces have been added.
  void finish() {
    advance();
    file_.require_hash(hash_);
  }

 private:
  void advance() {
    for (; next_ < pieces_.size() && ready_[next_].load(); ++next_) {
      const Piece& piece = pieces_[next_];
      const TensorInfo& tensor = *piece.tensor;
      if (piece.begin == 0) hash_.add_tensor(tensor.name, tensor.dtype, tensor.shape);
      hash_.add_bytes(piece.bytes);
      if (!piece.place.stays) file_.release(piece.bytes);
    }
  }

  const SafetensorsFile& file_;
  const std::vector<Piece>& pieces_;
  ContentHash hash_;
  std::vector<std::atomic<bool>> ready_;
  std::mutex mutex_;  // of hash_ and next_
  size_t next_ = 0;
};

// Hands out pieces in order. A separate thread touches the pages of the next pieces, so that the
// disk stays busy during conversion.
class PieceQueue {
 public:
  explicit PieceQueue(const std::vector<Piece>& pieces)
      : pieces_(pieces), reader_([this] { read_ahead(); }) {}
  ~PieceQueue() {
    next_.store(pieces_.size());
    next_.notify_one();
    reader_.join();
  }
  PieceQueue(const PieceQueue&) = delete;
  PieceQueue& operator=(const PieceQueue&) = delete;

  // Index of the next piece; none is left if it is at least the number of pieces.
  size_t take() {
    const size_t taken = next_.fetch_add(1);
    next_.notify_one();
    return taken;
  }

 private:
  void read_ahead() {
    for (size_t i = 0;; ++i) {
      size_t next = next_.load();
      for (; i >= next + kAhead; next = next_.load()) next_.wait(next);
      i = std::max(i, next);  // threads that took earlier pieces read them
      if (i >= pieces_.size()) return;
      for (size_t at = 0; at < pieces_[i].bytes.size(); at += kPage) touch(pieces_[i].bytes[at]);
    }
  }
  static void touch(const std::byte& byte) {
    static_cast<void>(*static_cast<const volatile std::byte*>(&byte));
  }

  const std::vector<Piece>& pieces_;
  std::atomic<size_t> next_{0};
  std::thread reader_;
};

}  // namespace

void load_tensors(Context& ctx, const SafetensorsFile& file,
                  const std::function<TensorPlace(const TensorInfo&)>& place_of,
                  const LoadOptions& options) {
  std::optional<ContentHash> hash = file.begin_hash();
  std::vector<Piece> pieces;
  const auto add = [&](const TensorInfo& tensor) {
    const TensorPlace place = place_of(tensor);
    if (is_read(place) || hash) add_pieces(tensor, place, pieces);
  };
  if (hash) {  // the hash needs name order
    for (const auto& [name, tensor] : file.tensors()) add(tensor);
  } else {
    for (const TensorInfo* tensor : file.file_order()) add(*tensor);
  }
  std::optional<PieceHash> piece_hash;
  if (hash) piece_hash.emplace(file, pieces, std::move(*hash));

  file.expect_full_read();
  std::atomic<size_t> non_finite{pieces.size()};  // the first piece with such a value
  const auto check = [&](size_t i) {
    const Piece& piece = pieces[i];
    if (!is_read(piece.place) || first_non_finite(piece.bytes, piece.tensor->dtype) < 0) return;
    for (size_t first = non_finite; i < first && !non_finite.compare_exchange_weak(first, i);) {
    }
  };
  PieceQueue queue(pieces);
  ctx.parallel_for(ctx.threads(), 1, [&](int64_t, int64_t, int) {
    for (size_t i; (i = queue.take()) < pieces.size();) {
      if (!options.allow_non_finite) check(i);
      const Piece& piece = pieces[i];
      if (piece.place.out != nullptr) {
        read_tensor(*piece.tensor, piece.place, piece.begin, piece.count);
      }
      if (piece_hash) {
        piece_hash->add(i);
      } else if (!piece.place.stays) {
        file.release(piece.bytes);
      }
    }
  });
  if (piece_hash) piece_hash->finish();
  if (non_finite < pieces.size()) {
    const TensorInfo& tensor = *pieces[non_finite].tensor;
    refuse_non_finite(tensor, first_non_finite(tensor.bytes, tensor.dtype), file.path().string());
  }
}

}  // namespace twell
