// SPDX-License-Identifier: Apache-2.0
// Reads the requests of one connection from its bytes: Boost.Beast's parser with the checks that it
// leaves out. What two readers could understand differently is a fault, after which nothing of the
// connection can be read any more: bytes that end a line or a value in an unusual way, folded
// lines, two lengths, a length that is no number, a transfer coding other than "chunked". Source:
// RFC 9112.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "twell/serve/allowed_origins.h"
#include "twell/serve/memory_budget.h"

namespace twell {

// What is read of a request in front of its body. Values of fields that stand twice are joined with
// commas; fields that must not stand twice do not.
struct HttpHead {
  std::string method;
  std::string path;  // decoded, without the query
  int version = 11;  // 10 or 11
  std::optional<std::string> host;
  std::string authorization, api_key;  // of Authorization and X-Api-Key
  std::string content_type, content_encoding, accept_encoding, expect;
  CrossOrigin cross;
  std::optional<uint64_t> length;  // of the body; nullopt when it comes in chunks
  bool keep_alive = true;          // whether the client sends further requests
};

struct HttpFault {
  int status;  // 400, 413, 503
  std::string message;
};

class HttpReader {
 public:
  enum class Step { kMore, kHead, kDone, kFault };

  struct Limits {
    int64_t header_bytes;
    int64_t body_bytes;
  };

  // The budget holds the bodies; it must outlive this object.
  HttpReader(const Limits& limits, MemoryBudget& budget);
  ~HttpReader();
  HttpReader(const HttpReader&) = delete;
  HttpReader& operator=(const HttpReader&) = delete;

  // Takes bytes from the front of `bytes`. kMore: all are taken, and the request goes on. kHead:
  // the head is complete, which is said once. kDone: the request is complete; next() begins the one
  // after it, to which the remaining bytes belong. kFault: fault() says why the request ends here.
  Step read(std::string_view& bytes);
  void next();

  // Whether a byte of the request has been read.
  bool begun() const;
  const HttpHead& head() const;  // from kHead on
  const HttpFault& fault() const;
  // The body, once; `share` takes over what it occupies of the budget.
  std::string take_body(MemoryBudget::Share& share);

 private:
  class Parser;

  Step fail(int status, std::string message);
  Step read_head(std::string_view& bytes);
  Step finish_head();
  Step read_body(std::string_view& bytes);
  bool is_plain(std::string_view bytes);

  const Limits limits_;
  MemoryBudget::Share share_;
  std::unique_ptr<Parser> parser_;
  std::string held_;      // a head, a line in front of a chunk, or trailers, as far as they came
  char before_ = 0;       // the byte before the one that is_plain() looks at,
  char before_that_ = 0;  // and the one before
  int64_t raw_left_ = 0;  // bytes that lines between chunks may still take
  bool head_read_ = false;
  HttpFault fault_{0, {}};
};

}  // namespace twell
