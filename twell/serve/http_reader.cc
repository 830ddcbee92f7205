// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/http_reader.h"

#include <fmt/core.h>

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/basic_parser.hpp>
#include <boost/beast/http/error.hpp>
#include <utility>

namespace twell {
namespace {

namespace http = boost::beast::http;
using Ec = boost::beast::error_code;
using View = boost::beast::string_view;

constexpr size_t kLengthDigits = 19;  // of a length that some integer of 64 bits holds
// A line in front of a chunk: its size and extensions, which nobody reads.
constexpr size_t kChunkLineBytes = 4096;

std::string_view view(View text) { return {text.data(), text.size()}; }

bool equal_ignoring_case(std::string_view a, std::string_view b) {
  return boost::beast::iequals(View(a.data(), a.size()), View(b.data(), b.size()));
}

// Whether lines in front of a chunk need a further line: the end of the chunk before, and the last
// chunk until the empty line that ends its trailers.
bool may_go_on(std::string_view lines) {
  if (lines == "\r\n") return true;
  if (lines.starts_with("\r\n")) lines.remove_prefix(2);
  return lines.starts_with('0') && !lines.ends_with("\r\n\r\n");
}

// The path of a request's target: percent signs decoded, without the query. Nothing when the target
// is not an absolute path of printable ASCII.
std::optional<std::string> path_of(std::string_view target) {
  if (!target.starts_with('/')) return std::nullopt;
  const auto digit = [](char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
  };
  std::string path;
  bool query = false;
  for (size_t i = 0; i < target.size(); ++i) {
    char c = target[i];
    if (c <= ' ' || c >= 0x7f || c == '#') return std::nullopt;
    query = query || c == '?';
    if (query) continue;
    if (c == '%') {
      const int high = i + 2 < target.size() ? digit(target[i + 1]) : -1;
      const int low = high < 0 ? -1 : digit(target[i + 2]);
      if (low < 0) return std::nullopt;
      c = static_cast<char>(16 * high + low);
      i += 2;
    }
    path += c;
  }
  return path;
}

// Fields that Beast has no name for.
bool is_private_network(boost::beast::string_view name) {
  return boost::beast::iequals(name, "Access-Control-Request-Private-Network");
}
bool is_api_key(boost::beast::string_view name) { return boost::beast::iequals(name, "X-Api-Key"); }

}  // namespace

// Beast's parser with the fields that this server reads.
class HttpReader::Parser final : public http::basic_parser<true> {
 public:
  explicit Parser(HttpReader& reader) : reader_(reader) {
    eager(false);  // one line or piece at a time, so that the reader sees its bytes
    // The reader has limits of its own.
    header_limit(UINT32_MAX);
    body_limit(UINT64_MAX);
  }

  // Parses from the front of the bytes and removes what it has read. False when it needs more.
  bool put_some(std::string_view& bytes, Ec& error) {
    const size_t count = put(boost::asio::const_buffer(bytes.data(), bytes.size()), error);
    bytes.remove_prefix(count);
    if (error == http::error::need_more) {
      error = {};
      return false;
    }
    return true;
  }

  HttpHead head;
  std::string body;
  bool in_chunk = false;
  std::optional<HttpFault> fault;  // found by a callback

 private:
  void refuse(Ec& error, int status, std::string message) {
    fault = HttpFault{status, std::move(message)};
    error = http::error::bad_value;
  }

  void on_request_impl(http::verb, View method, View target, int version, Ec& error) override {
    head.method = view(method);
    head.version = version;
    std::optional<std::string> path = path_of(view(target));
    if (!path) return refuse(error, 400, "the request's target is not a path");
    head.path = std::move(*path);
  }
  void on_response_impl(int, View, int, Ec&) override {}

  void on_field_impl(http::field name, View name_in, View value_in, Ec& error) override {
    if (reader_.head_read_) return;  // a trailer
    const std::string_view value = view(value_in);
    const auto once = [&](std::string& place, bool& seen) {
      if (std::exchange(seen, true)) {
        refuse(error, 400, fmt::format("the field {} stands twice", view(http::to_string(name))));
      }
      place = value;
    };
    const auto join = [&](std::string& place) {
      if (!place.empty()) place += ", ";
      place += value;
    };
    switch (name) {
      case http::field::host: {
        std::string host;
        once(host, seen_.host);
        head.host = std::move(host);
        break;
      }
      case http::field::content_length:
        once(length_, seen_.length);
        break;
      case http::field::transfer_encoding:
        once(coding_, seen_.coding);
        break;
      case http::field::content_type:
        once(head.content_type, seen_.type);
        break;
      case http::field::authorization:
        once(head.authorization, seen_.authorization);
        break;
      case http::field::content_encoding:
        join(head.content_encoding);
        break;
      case http::field::accept_encoding:
        join(head.accept_encoding);
        break;
      case http::field::expect:
        join(head.expect);
        break;
      case http::field::origin:
        join(head.cross.origin);
        break;
      case http::field::access_control_request_method:
        join(head.cross.wanted_method);
        break;
      case http::field::access_control_request_headers:
        join(head.cross.wanted_headers);
        break;
      default:
        if (is_private_network(name_in)) join(head.cross.private_network);
        if (is_api_key(name_in)) once(head.api_key, seen_.api_key);
        break;
    }
  }

  void on_header_impl(Ec& error) override {
    if (head.version == 11 && !head.host) {
      return refuse(error, 400, "the request has no Host field");
    }
    if (seen_.coding) {
      if (seen_.length) {
        return refuse(error, 400, "the body has both a length and a transfer coding");
      }
      if (head.version != 11 || !equal_ignoring_case(coding_, "chunked")) {
        return refuse(error, 400, "the only transfer coding of a body is \"chunked\" of HTTP/1.1");
      }
      return;
    }
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    const bool is_number = !length_.empty() && length_.size() <= kLengthDigits &&
                           std::ranges::all_of(length_, is_digit);
    if (seen_.length && !is_number) {
      return refuse(error, 400, "the body's length is not a number");
    }
    const boost::optional<uint64_t> length = content_length();
    head.length = length ? *length : 0;
  }

  void on_body_init_impl(const boost::optional<uint64_t>&, Ec&) override {}
  size_t on_body_impl(View text, Ec& error) override { return add(text, error); }
  void on_chunk_header_impl(uint64_t size, View, Ec& error) override {
    in_chunk = size > 0;
    if (size > static_cast<uint64_t>(reader_.limits_.body_bytes)) too_large(error);
  }
  size_t on_chunk_body_impl(uint64_t left, View text, Ec& error) override {
    in_chunk = text.size() < left;
    return add(text, error);
  }
  void on_finish_impl(Ec&) override {}

  size_t add(View text, Ec& error) {
    const auto size = static_cast<int64_t>(text.size());
    if (std::ssize(body) + size > reader_.limits_.body_bytes) {
      too_large(error);
    } else if (!reader_.share_.grow(size)) {
      refuse(error, 503, "the server has no room for the request now; try again later");
    } else {
      body.append(text.data(), text.size());
    }
    return text.size();
  }
  void too_large(Ec& error) {
    refuse(error, 413, fmt::format("the body is longer than {} bytes", reader_.limits_.body_bytes));
  }

  HttpReader& reader_;
  struct {
    bool host = false, length = false, coding = false, type = false, authorization = false,
         api_key = false;
  } seen_;
  std::string length_, coding_;
};

HttpReader::HttpReader(const Limits& limits, MemoryBudget& budget)
    : limits_(limits), share_(budget) {
  next();
}

HttpReader::~HttpReader() = default;

void HttpReader::next() {
  parser_.reset();  // comes with the first byte: idle connections are many
  held_ = {};
  share_.clear();
  before_ = before_that_ = 0;
  head_read_ = false;
}

bool HttpReader::begun() const { return head_read_ || !held_.empty(); }

const HttpHead& HttpReader::head() const { return parser_->head; }

const HttpFault& HttpReader::fault() const { return fault_; }

std::string HttpReader::take_body(MemoryBudget::Share& share) {
  share.take(share_);
  return std::move(parser_->body);
}

HttpReader::Step HttpReader::fail(int status, std::string message) {
  fault_ = {status, std::move(message)};
  return Step::kFault;
}

HttpReader::Step HttpReader::read(std::string_view& bytes) {
  return head_read_ ? read_body(bytes) : read_head(bytes);
}

// Whether the bytes, which follow those of the last call, are lines that end in CR LF, without
// other control characters than tabs, none of which continues the line in front of it. Beast joins
// such lines, and takes some control characters in front of chunks.
bool HttpReader::is_plain(std::string_view bytes) {
  for (const char c : bytes) {
    if ((c == '\n') != (before_ == '\r')) return false;
    if (before_ == '\n' && before_that_ == '\r' && (c == ' ' || c == '\t')) return false;
    const auto code = static_cast<unsigned char>(c);
    if ((code < 0x20 && c != '\t' && c != '\r' && c != '\n') || code == 0x7f) return false;
    before_that_ = std::exchange(before_, c);
  }
  return true;
}

HttpReader::Step HttpReader::read_head(std::string_view& bytes) {
  static constexpr std::string_view kEnd = "\r\n\r\n";
  while (!bytes.empty()) {
    const size_t line_end = bytes.find('\n');
    const std::string_view line = bytes.substr(0, line_end == bytes.npos ? line_end : line_end + 1);
    if (!is_plain(line)) return fail(400, "the request is not HTTP");
    if (std::ssize(held_) + std::ssize(line) > limits_.header_bytes) {
      return fail(400, fmt::format("the request's line and headers are longer than {} bytes",
                                   limits_.header_bytes));
    }
    held_ += line;
    bytes.remove_prefix(line.size());
    if (held_.ends_with(kEnd)) return finish_head();
    if (held_.starts_with("\r\n")) return fail(400, "the request begins with an empty line");
  }
  return Step::kMore;
}

HttpReader::Step HttpReader::finish_head() {
  parser_ = std::make_unique<Parser>(*this);
  std::string_view rest = held_;
  Ec error;
  while (!parser_->is_header_done() && !error) {
    if (!parser_->put_some(rest, error)) break;
  }
  if (parser_->fault) return fail(parser_->fault->status, parser_->fault->message);
  if (error || !parser_->is_header_done() || !rest.empty()) {
    return fail(400, fmt::format("the request is not HTTP{}{}", error ? ": " : "",
                                 error ? error.message() : ""));
  }
  parser_->head.keep_alive = parser_->head.version == 11 && parser_->keep_alive();
  held_.clear();
  head_read_ = true;
  raw_left_ = limits_.body_bytes + limits_.header_bytes;
  before_ = before_that_ = 0;
  return Step::kHead;
}

HttpReader::Step HttpReader::read_body(std::string_view& bytes) {
  Ec error;
  while (!parser_->is_done()) {
    if (bytes.empty()) return Step::kMore;
    if (raw_left_ < 0) {
      return fail(400, "the lines between the body's chunks are too long");
    }
    if (parser_->head.length || parser_->in_chunk) {
      parser_->put_some(bytes, error);
    } else {
      // A line: the end of the last chunk, the size of the next one, or a trailer.
      const size_t line_end = bytes.find('\n');
      const std::string_view line =
          bytes.substr(0, line_end == bytes.npos ? line_end : line_end + 1);
      if (!is_plain(line)) return fail(400, "the body's chunks are not HTTP");
      held_ += line;
      bytes.remove_prefix(line.size());
      raw_left_ -= std::ssize(line);
      if (held_.size() > kChunkLineBytes) return fail(400, "a chunk's line is too long");
      if (line_end == bytes.npos) return Step::kMore;
      std::string_view rest = held_;
      const bool took = parser_->put_some(rest, error);
      if (took && !error) {
        if (!rest.empty()) return fail(400, "the body's chunks are not HTTP");
        held_.clear();
        before_ = before_that_ = 0;
      } else if (!took && !may_go_on(held_)) {
        return fail(400, "the body's chunks are not HTTP");
      }
    }
    if (parser_->fault) return fail(parser_->fault->status, parser_->fault->message);
    if (error) return fail(400, "the body is not HTTP: " + error.message());
  }
  return Step::kDone;
}

}  // namespace twell
