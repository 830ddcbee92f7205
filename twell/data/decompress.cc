// SPDX-License-Identifier: Apache-2.0
#include "twell/data/decompress.h"

#include <fcntl.h>
#include <lzma.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "twell/base/error.h"

namespace twell {
namespace fs = std::filesystem;

// Buffered reading of a file's raw bytes.
class FileInput {
 public:
  explicit FileInput(const fs::path& path) : path_(path) {
    // With O_NONBLOCK, opening a pipe fails the check below instead of waiting for a writer.
    fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd_ < 0) fail(std::strerror(errno));
    struct stat info {};
    const bool regular = ::fstat(fd_, &info) == 0 && S_ISREG(info.st_mode);
    if (!regular) {
      ::close(fd_);
      fail("not a regular file");
    }
    ::posix_fadvise(fd_, 0, 0, POSIX_FADV_SEQUENTIAL);
  }
  ~FileInput() { ::close(fd_); }
  FileInput(const FileInput&) = delete;
  FileInput& operator=(const FileInput&) = delete;

  [[noreturn]] void fail(std::string_view reason) const {
    throw InputError(fmt::format("cannot read {}: {}", path_.string(), reason));
  }

  // The unconsumed bytes. An empty buffer is refilled first, so empty means the end of the file.
  std::span<const uint8_t> peek() {
    if (begin_ == end_) {
      buffer_.resize(kBufferBytes);  // allocated here because a plain file needs no buffer
      begin_ = 0;
      end_ = read_file(buffer_.data(), buffer_.size());
    }
    return {buffer_.data() + begin_, end_ - begin_};
  }
  void consume(size_t count) { begin_ += count; }

  // Reads directly from the file, bypassing the buffer; used for plain files.
  size_t read_file(void* out, size_t size) {
    ssize_t count;
    do {
      count = ::read(fd_, out, size);
    } while (count < 0 && errno == EINTR);
    if (count < 0) fail(std::strerror(errno));
    bytes_read_ += count;
    return static_cast<size_t>(count);
  }
  int64_t bytes_read() const { return bytes_read_; }

 private:
  static constexpr size_t kBufferBytes = 128 << 10;
  fs::path path_;
  int fd_ = -1;
  std::vector<uint8_t> buffer_;
  size_t begin_ = 0, end_ = 0;
  int64_t bytes_read_ = 0;
};

class Decoder {
 public:
  explicit Decoder(FileInput& input) : input_(input) {}
  virtual ~Decoder() = default;
  virtual size_t read(std::span<char> out) = 0;

 protected:
  FileInput& input_;
};

namespace {

class GzipDecoder : public Decoder {
 public:
  explicit GzipDecoder(FileInput& input) : Decoder(input) {
    constexpr int kGzipWrapper = 16;
    TWELL_CHECK(inflateInit2(&stream_, MAX_WBITS + kGzipWrapper) == Z_OK, "zlib failed to start");
  }
  ~GzipDecoder() override { inflateEnd(&stream_); }

  size_t read(std::span<char> out) override {
    stream_.next_out = reinterpret_cast<Bytef*>(out.data());
    stream_.avail_out = static_cast<uInt>(out.size());
    while (stream_.avail_out == out.size()) {
      const std::span<const uint8_t> in = input_.peek();
      if (in.empty()) {
        if (in_member_) input_.fail("truncated gzip stream");
        break;
      }
      if (!in_member_ && !begin_member(in[0])) continue;
      stream_.next_in = const_cast<Bytef*>(in.data());
      stream_.avail_in = static_cast<uInt>(in.size());
      const int code = inflate(&stream_, Z_NO_FLUSH);
      input_.consume(in.size() - stream_.avail_in);
      if (code == Z_STREAM_END) {
        in_member_ = false;
      } else if (code != Z_OK) {
        const char* reason = stream_.msg != nullptr ? stream_.msg : zError(code);
        input_.fail(fmt::format("corrupt gzip stream ({})", reason));
      }
    }
    return out.size() - stream_.avail_out;
  }

 private:
  // Called between members: skips a padding byte (false) or starts the next member (true).
  bool begin_member(uint8_t first_byte) {
    if (first_byte == 0) {
      input_.consume(1);
      return false;
    }
    constexpr uint8_t kGzipMagic = 0x1F;
    if (first_byte != kGzipMagic) input_.fail("corrupt gzip stream (garbage after its end)");
    inflateReset(&stream_);
    in_member_ = true;
    return true;
  }

  z_stream stream_{};
  bool in_member_ = true;  // from the start, so that an empty file counts as truncated
};

class XzDecoder : public Decoder {
 public:
  explicit XzDecoder(FileInput& input) : Decoder(input) {
    constexpr uint64_t kMemoryLimit = uint64_t{256} << 20;  // xz -9 needs 65 MiB
    const lzma_ret code = lzma_stream_decoder(&stream_, kMemoryLimit, LZMA_CONCATENATED);
    TWELL_CHECK(code == LZMA_OK, "liblzma failed to start: code {}", static_cast<int>(code));
  }
  ~XzDecoder() override { lzma_end(&stream_); }

  size_t read(std::span<char> out) override {
    stream_.next_out = reinterpret_cast<uint8_t*>(out.data());
    stream_.avail_out = out.size();
    while (!ended_ && stream_.avail_out == out.size()) {
      const std::span<const uint8_t> in = input_.peek();
      stream_.next_in = in.data();
      stream_.avail_in = in.size();
      const lzma_ret code = lzma_code(&stream_, in.empty() ? LZMA_FINISH : LZMA_RUN);
      input_.consume(in.size() - stream_.avail_in);
      ended_ = code == LZMA_STREAM_END;
      if (code != LZMA_OK && !ended_) input_.fail(reason(code));
    }
    return out.size() - stream_.avail_out;
  }

 private:
  static const char* reason(lzma_ret code) {
    switch (code) {
      case LZMA_BUF_ERROR:
        return "truncated xz stream";
      case LZMA_FORMAT_ERROR:
        return "not an xz stream";
      case LZMA_MEMLIMIT_ERROR:
        return "the xz stream needs more than 256 MiB to decompress";
      case LZMA_OPTIONS_ERROR:
        return "the xz stream uses options that liblzma does not know";
      case LZMA_MEM_ERROR:
        return "out of memory";
      default:
        return "corrupt xz stream";
    }
  }

  lzma_stream stream_ = LZMA_STREAM_INIT;
  bool ended_ = false;
};

class ZstdDecoder : public Decoder {
 public:
  explicit ZstdDecoder(FileInput& input) : Decoder(input), stream_(ZSTD_createDStream()) {
    TWELL_CHECK(stream_ != nullptr, "zstd failed to start");
  }
  ~ZstdDecoder() override { ZSTD_freeDStream(stream_); }

  size_t read(std::span<char> out) override {
    ZSTD_outBuffer sink{out.data(), out.size(), 0};
    while (sink.pos == 0) {
      const std::span<const uint8_t> in = input_.peek();
      if (in.empty() && !in_frame_) break;
      // A frame's first call gets too few bytes for a whole frame, because libzstd checks a frame
      // that it can decode in one call more strictly, so that the size of `out` would decide what
      // is corrupt. At the end of the file, a call drains the output that the decoder still holds.
      const size_t size = begins_frame_ ? std::min(in.size(), kMagicBytes) : in.size();
      ZSTD_inBuffer source{in.data(), size, 0};
      const size_t code = ZSTD_decompressStream(stream_, &sink, &source);
      if (ZSTD_isError(code)) {
        input_.fail(fmt::format("corrupt zstd stream ({})", ZSTD_getErrorName(code)));
      }
      input_.consume(source.pos);
      in_frame_ = code != 0;
      begins_frame_ = !in_frame_;
      if (in.empty() && in_frame_ && sink.pos == 0) input_.fail("truncated zstd stream");
    }
    return sink.pos;
  }

 private:
  static constexpr size_t kMagicBytes = 4;
  ZSTD_DStream* stream_;
  bool begins_frame_ = true;
  bool in_frame_ = true;  // from the start, so that an empty file counts as truncated
};

}  // namespace

bool is_compressed(const fs::path& path) {
  const fs::path ending = path.extension();
  return ending == ".gz" || ending == ".xz" || ending == ".zst";
}

ByteReader::ByteReader(const fs::path& path) : input_(std::make_unique<FileInput>(path)) {
  const fs::path ending = path.extension();
  if (ending == ".gz") decoder_ = std::make_unique<GzipDecoder>(*input_);
  if (ending == ".xz") decoder_ = std::make_unique<XzDecoder>(*input_);
  if (ending == ".zst") decoder_ = std::make_unique<ZstdDecoder>(*input_);
}

ByteReader::~ByteReader() = default;
ByteReader::ByteReader(ByteReader&&) noexcept = default;

size_t ByteReader::read(std::span<char> out) {
  return decoder_ ? decoder_->read(out) : input_->read_file(out.data(), out.size());
}

int64_t ByteReader::file_bytes_read() const { return input_->bytes_read(); }

}  // namespace twell
