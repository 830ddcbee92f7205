// SPDX-License-Identifier: Apache-2.0
// What is a request and what is none. What comes of mutated requests in all:
// tests/serve_http_test.py.
#include "twell/serve/http_reader.h"

#include <gtest/gtest.h>

#include <vector>

#include "twell/base/error.h"

namespace twell {
namespace {

constexpr int64_t kHeader = 1024, kBody = 100;

struct Read {
  std::vector<std::string> requests;  // "method path body"
  std::string end;                    // "", "more", or "fault" with its status
};

Read read_all(std::string_view bytes, size_t most = 1 << 20) {
  MemoryBudget memory(1000);
  HttpReader reader({kHeader, kBody}, memory);
  Read out;
  while (!bytes.empty()) {
    std::string_view piece = bytes.substr(0, most);
    bytes.remove_prefix(piece.size());
    while (true) {
      const HttpReader::Step step = reader.read(piece);
      if (step == HttpReader::Step::kMore) break;
      if (step == HttpReader::Step::kFault) {
        EXPECT_FALSE(reader.fault().message.empty());
        out.end = fmt::format("fault {}", reader.fault().status);
        return out;
      }
      if (step == HttpReader::Step::kHead) continue;
      MemoryBudget::Share share(memory);
      out.requests.push_back(fmt::format("{} {} {}", reader.head().method, reader.head().path,
                                         reader.take_body(share)));
      reader.next();
      if (piece.empty()) break;
    }
  }
  if (reader.begun()) out.end = "more";
  return out;
}

std::string post_with(const std::string& fields, const std::string& body = "") {
  return "POST /p HTTP/1.1\r\nHost: h\r\n" + fields + "\r\n\r\n" + body;
}

TEST(HttpReader, RequestsOneAfterTheOther) {
  const std::string bytes =
      "GET /a%20b?c=%zz HTTP/1.1\r\nHost: h\r\n\r\n" + post_with("Content-Length: 3", "abc") +
      post_with("content-LENGTH:\t3 ", "GET") + "HEAD / HTTP/1.0\r\n\r\n" +
      post_with("Transfer-Encoding: Chunked",
                "2;n=v;q=\"\\\"x\"\r\nab\r\n0a\r\n0123456789\r\n0\r\nT: x\r\n\r\n") +
      "GET /g HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nGET /" +
      "GET /last HTTP/1.1\r\nHost:\r\nX: \x80\xff\r\n\r\n";
  const Read whole = read_all(bytes);
  EXPECT_EQ(whole.requests,
            (std::vector<std::string>{"GET /a b ", "POST /p abc", "POST /p GET", "HEAD / ",
                                      "POST /p ab0123456789", "GET /g GET /", "GET /last "}));
  EXPECT_EQ(whole.end, "");
  for (const size_t most : {1, 2, 3, 17}) {
    const Read cut = read_all(bytes, most);
    EXPECT_EQ(cut.requests, whole.requests) << most;
    EXPECT_EQ(cut.end, "");
  }
}

// Each of these is read as another request, or as two, by some servers.
TEST(HttpReader, WhatCanBeUnderstoodDifferentlyIsAFault) {
  const std::string line = "GET / HTTP/1.1\r\n", host = "Host: h\r\n",
                    chunked = "Transfer-Encoding: chunked";
  const std::string faults[] = {
      post_with("Content-Length: 3\r\nContent-Length: 4", "abcd"),
      post_with("Content-Length: 3\r\nContent-Length: 3", "abc"),
      post_with("Content-Length: 45abc"),
      post_with("Content-Length: 45, 0"),
      post_with("Content-Length: 3, 3", "abc"),
      post_with("Content-Length: +3", "abc"),
      post_with("Content-Length: -3", "abc"),
      post_with("Content-Length: 0x3", "abc"),
      post_with("Content-Length: 3 3", "abc"),
      post_with("Content-Length: ", "abc"),
      post_with("Content-Length: 99999999999999999999"),
      post_with("Content-Length: 3\r\n" + chunked, "0\r\n\r\n"),
      post_with(chunked + "\r\nContent-Length: 3", "0\r\n\r\n"),
      post_with(chunked + "\r\n" + chunked, "0\r\n\r\n"),
      post_with("Transfer-Encoding: gzip"),
      post_with("Transfer-Encoding: gzip, chunked", "0\r\n\r\n"),
      post_with("Transfer-Encoding: chunked, chunked", "0\r\n\r\n"),
      post_with("Transfer-Encoding: chunked, identity", "0\r\n\r\n"),
      post_with("Transfer-Encoding: identity", "abc"),
      post_with("Transfer-Encoding: xchunked", "0\r\n\r\n"),
      post_with("Transfer-Encoding: \"chunked\"", "0\r\n\r\n"),
      post_with("Transfer-Encoding: chunked;x", "0\r\n\r\n"),
      post_with("Transfer-Encoding:", "0\r\n\r\n"),
      post_with("Transfer-Encoding : chunked", "0\r\n\r\n"),
      post_with("Transfer-Encoding\t: chunked", "0\r\n\r\n"),
      post_with("Content-Length : 3", "abc"),
      post_with(" Content-Length: 3", "abc"),
      post_with("X: a\r\n Content-Length: 3", "abc"),
      post_with("X: a\r\n\tb"),
      post_with("X: a\r\n \r\nContent-Length: 3", "abc"),
      post_with("X: a\nContent-Length: 3", "abc"),
      post_with("X: a\rContent-Length: 3", "abc"),
      post_with("X: a\vb"),
      post_with(std::string("X: a\0b", 6)),
      post_with("X: a\x7f"),
      post_with("X"),
      post_with(": a"),
      post_with("X Y: a"),
      post_with("X\x80: a"),
      post_with("Host: h2"),
      post_with("Content-Type: a\r\nContent-Type: b"),
      post_with("Authorization: a\r\nAuthorization: b"),
      post_with("X-Api-Key: a\r\nx-api-key: a"),
      "POST /p HTTP/1.0\r\n" + chunked + "\r\n\r\n0\r\n\r\n",
      line + "\r\n",  // no Host
      line + host + "X: a\n\n",
      "\r\n" + line + host + "\r\n",
      " " + line + host + "\r\n",
      "GET  / HTTP/1.1\r\n" + host + "\r\n",
      "GET /  HTTP/1.1\r\n" + host + "\r\n",
      "GET / HTTP/1.1 \r\n" + host + "\r\n",
      "GET\t/ HTTP/1.1\r\n" + host + "\r\n",
      "GET /a b HTTP/1.1\r\n" + host + "\r\n",
      "GET /a\xc3 HTTP/1.1\r\n" + host + "\r\n",
      "GET /#a HTTP/1.1\r\n" + host + "\r\n",
      "GET /% HTTP/1.1\r\n" + host + "\r\n",
      "GET /%1g HTTP/1.1\r\n" + host + "\r\n",
      "GET http://h/ HTTP/1.1\r\n" + host + "\r\n",
      "GET * HTTP/1.1\r\n" + host + "\r\n",
      "GET /\r\n\r\n",
      "GET / HTTP/0.9\r\n\r\n",
      "GET / HTTP/1.2\r\n" + host + "\r\n",
      "GET / HTTP/2.0\r\n" + host + "\r\n",
      "GET / HTTP/11\r\n" + host + "\r\n",
      "GET / http/1.1\r\n" + host + "\r\n",
      "G(T / HTTP/1.1\r\n" + host + "\r\n",
      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
      "\x16\x03\x01\x02",
  };
  for (const std::string& bytes : faults) {
    for (const size_t most : {size_t{1} << 20, size_t{1}}) {
      const Read read = read_all(bytes + "GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n", most);
      EXPECT_TRUE(read.requests.empty()) << bytes << "\nis " << read.requests.front();
      EXPECT_EQ(read.end, "fault 400") << bytes;
    }
  }
}

TEST(HttpReader, ChunksThatAreNone) {
  const std::string bodies[] = {"2dzz\r\n",
                                "2\r\nabc\r\n0\r\n\r\n",
                                "2\r\na\r\n0\r\n\r\n\r\n",
                                "2\nab\r\n0\r\n\r\n",
                                "2\r\nab\n0\r\n\r\n",
                                "2\r\nab0\r\n\r\n",
                                "2 \r\nab\r\n0\r\n\r\n",
                                " 2\r\nab\r\n0\r\n\r\n",
                                "0x2\r\nab\r\n0\r\n\r\n",
                                "+2\r\nab\r\n0\r\n\r\n",
                                "-2\r\nab\r\n0\r\n\r\n",
                                "\r\n\r\n",
                                ";a=b\r\n\r\n",
                                "2;\r\nab\r\n0\r\n\r\n",
                                "2;a=\r\nab\r\n0\r\n\r\n",
                                "2;a=\"\n\"\r\nab\r\n0\r\n\r\n",
                                "2;a=\"b\r\nab\r\n0\r\n\r\n",
                                "2;a\rb\r\nab\r\n0\r\n\r\n",
                                "2,2\r\nab\r\n0\r\n\r\n",
                                "0\r\nT : x\r\n\r\n",
                                "0\r\nT: x\r\n folded\r\n\r\n",
                                "0\r\nT: x\n\r\n",
                                "0\r\nno field\r\n\r\n",
                                "0\r\nContent-Length: 5\r\n\r\n",
                                "0\r\nTransfer-Encoding: chunked\r\n\r\n",
                                "0\n\n",
                                "0\r\n\rGET",
                                "11111111111111112\r\nab\r\n0\r\n\r\n",
                                "2;a=" + std::string(5000, 'b') + "\r\nab\r\n0\r\n\r\n"};
  for (const std::string& body : bodies) {
    for (const size_t most : {size_t{1} << 20, size_t{1}}) {
      const Read read = read_all(post_with("Transfer-Encoding: chunked", body) +
                                     "GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n",
                                 most);
      EXPECT_TRUE(read.requests.empty()) << body << "\nis " << read.requests.front();
      EXPECT_EQ(read.end, "fault 400") << body.substr(0, 100);
    }
  }
}

TEST(HttpReader, Limits) {
  const std::string long_field = "X: " + std::string(kHeader, 'a');
  EXPECT_EQ(read_all(post_with(long_field)).end, "fault 400");
  EXPECT_EQ(read_all(std::string(2 * kHeader, 'a')).end, "fault 400");
  EXPECT_EQ(read_all(post_with("Content-Length: 101", std::string(101, 'a'))).end, "fault 413");
  EXPECT_EQ(read_all(post_with("Transfer-Encoding: chunked", "65\r\n")).end, "fault 413");
  EXPECT_EQ(read_all(post_with("Transfer-Encoding: chunked", "ffffffffffffffff\r\n")).end,
            "fault 413");
  std::string small;
  for (int i = 0; i < 101; ++i) small += "1\r\na\r\n";
  EXPECT_EQ(read_all(post_with("Transfer-Encoding: chunked", small)).end, "fault 413");
  std::string wordy;
  for (int i = 0; i < 90; ++i) wordy += "1;" + std::string(40, 'x') + "\r\na\r\n";
  EXPECT_EQ(read_all(post_with("Transfer-Encoding: chunked", wordy)).end, "fault 400");
  EXPECT_EQ(read_all(post_with("Content-Length: 9", "abc")).end, "more");
}

TEST(HttpReader, BodiesCountTowardsTheBudget) {
  MemoryBudget memory(60);
  HttpReader reader({kHeader, kBody}, memory);
  const std::string bytes = post_with("Content-Length: 40", std::string(40, 'a'));
  std::string_view rest = bytes;
  EXPECT_EQ(reader.read(rest), HttpReader::Step::kHead);
  EXPECT_EQ(reader.read(rest), HttpReader::Step::kDone);
  EXPECT_EQ(memory.used(), 40);
  {
    MemoryBudget::Share share(memory);
    EXPECT_EQ(reader.take_body(share).size(), 40u);
    reader.next();
    EXPECT_EQ(memory.used(), 40);
    rest = bytes;
    EXPECT_EQ(reader.read(rest), HttpReader::Step::kHead);
    EXPECT_EQ(reader.read(rest), HttpReader::Step::kFault);
    EXPECT_EQ(reader.fault().status, 503);
    reader.next();
  }
  EXPECT_EQ(memory.used(), 0);
}

TEST(HttpReader, TheHead) {
  MemoryBudget memory(60);
  HttpReader reader({kHeader, kBody}, memory);
  const std::string bytes = post_with(
      "content-type: Application/JSON\r\nAUTHORIZATION: Bearer k\r\nx-API-key: k2\r\n"
      "Expect: 100-continue\r\n"
      "Accept-Encoding: br\r\nAccept-Encoding: gzip\r\nContent-Encoding: gzip\r\n"
      "Connection: x, Close\r\nContent-Length: 7");
  std::string_view rest = bytes;
  EXPECT_FALSE(reader.begun());
  ASSERT_EQ(reader.read(rest), HttpReader::Step::kHead);
  EXPECT_TRUE(reader.begun());
  const HttpHead& head = reader.head();
  EXPECT_EQ(head.host, "h");
  EXPECT_EQ(head.content_type, "Application/JSON");
  EXPECT_EQ(head.authorization, "Bearer k");
  EXPECT_EQ(head.api_key, "k2");
  EXPECT_EQ(head.expect, "100-continue");
  EXPECT_EQ(head.accept_encoding, "br, gzip");
  EXPECT_EQ(head.content_encoding, "gzip");
  EXPECT_EQ(head.length, 7u);
  EXPECT_FALSE(head.keep_alive);
}

}  // namespace
}  // namespace twell
