// SPDX-License-Identifier: Apache-2.0
#include "twell/data/text_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "twell/base/rng.h"
#include "twell/base/utf8.h"
#include "twell/data/test_files.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> documents_of(TextSource& source, size_t max_piece = size_t{1} << 20) {
  std::vector<std::string> documents;
  TextPiece piece;
  while (source.next(piece)) {
    EXPECT_FALSE(piece.text.empty());
    EXPECT_LE(piece.text.size(), max_piece);
    EXPECT_EQ(find_invalid_utf8(piece.text), piece.text.size());
    if (piece.begins_document) documents.emplace_back();
    documents.back() += piece.text;
  }
  EXPECT_EQ(source.bytes_read(), source.total_bytes());
  return documents;
}

std::vector<std::string> documents_in(const fs::path& path) {
  TextSource source({.paths = {path}});
  return documents_of(source);
}

std::string source_fault(const TextSourceOptions& options) {
  try {
    TextSource source(options);
    documents_of(source);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no fault";
}
std::string source_fault(const fs::path& path) { return source_fault({.paths = {path}}); }

TEST(TextSource, ParquetRowsAreDocuments) {
  const fs::path golden = fs::path(TWELL_SOURCE_DIR) / "tests/golden/parquet";
  const fs::path file = golden / "zstd-v2-dictionary.parquet";
  TextSource source({.paths = {file}, .json_field = "needed"});
  const std::vector<std::string> documents = documents_of(source);
  ASSERT_EQ(documents.size(), 35u);  // five of the 40 rows have no text
  EXPECT_EQ(documents[2], "floats on water");
  EXPECT_EQ(documents[4], "日本語");
  // A row is cut into pieces like any document.
  TextSource cut({.paths = {file}, .json_field = "needed", .piece_bytes = 4});
  EXPECT_EQ(documents_of(cut, 4), documents);
  EXPECT_THAT(source_fault(file), HasSubstr("row 4 has no text in \"text\""));
  EXPECT_THAT(source_fault({.paths = {file}, .json_field = "body"}),
              HasSubstr("no column \"body\"; there are text, needed"));
  EXPECT_THAT(source_fault({.paths = {file}, .json_field = "label"}),
              HasSubstr("row 1 has no text in \"label\""));
}

TEST(TextSource, SplitsTextAtNul) {
  const TempFolder folder;
  EXPECT_THAT(documents_in(folder.write("a", "one\r\nline")), ElementsAre("one\r\nline"));
  EXPECT_THAT(documents_in(folder.write("b", std::string("one\0two\0", 8))),
              ElementsAre("one", "two"));
  EXPECT_THAT(documents_in(folder.write("c", std::string("\0\0one\0\0\0two", 11))),
              ElementsAre("one", "two"));
  EXPECT_THAT(documents_in(folder.write("d", "")), ElementsAre());
  EXPECT_THAT(documents_in(folder.write("e", std::string(3, '\0'))), ElementsAre());
  EXPECT_THAT(documents_in(folder.write("f", "\xEF\xBB\xBFtext")), ElementsAre("text"));
  EXPECT_THAT(documents_in(folder.write("g", "\xEF\xBB\xBF")), ElementsAre());
}

TEST(TextSource, ReadsJsonLines) {
  const TempFolder folder;
  const auto file = folder.write(
      "a.jsonl",
      "{\"text\": \"one\\n\\u00e9\\ud83d\\ude00\", \"id\": 1}\r\n"
      "\n  \n"
      "{\"meta\": {\"text\": \"inner\", \"list\": [1, {\"text\": 2}]}, \"text\": \"\"}\n"
      "{\"id\": \"text\", \"text\": \"two\", \"score\": 1.5, \"other\": null, \"body\": \"2\"}\n"
      "{\"text\": 1, \"body\": \"3\", \"text\": \"last of two\"}");
  EXPECT_THAT(documents_in(file), ElementsAre("one\n\u00e9\U0001F600", "two", "last of two"));
  const auto bodies =
      folder.write("b.jsonl", "{\"body\": \"1\"}\n{\"body\": \"2\", \"text\": \"x\"}");
  TextSource source({.paths = {bodies}, .json_field = "body"});
  EXPECT_THAT(documents_of(source), ElementsAre("1", "2"));
}

TEST(TextSource, ReadsCompressedFiles) {
  const TempFolder folder;
  folder.write("1.txt.gz", gzip("one") + gzip(std::string("+\0two", 5)));
  folder.write("2.xz", xz("three"));
  folder.write("3.jsonl.zst", zst("{\"text\": \"four\"}\n{\"te") + zst("xt\": \"five\"}\n"));
  EXPECT_THAT(documents_in(folder.path()), ElementsAre("one+", "two", "three", "four", "five"));
}

TEST(TextSource, ListsFoldersInAFixedOrder) {
  const TempFolder folder;
  for (const char* name : {"b.txt", "a/z", "a/y/x", "a.txt", "B", ".hidden", ".git/config"}) {
    folder.write(name, name);
  }
  fs::create_symlink("../a", folder.path() / "a/loop");
  fs::create_symlink("b.txt", folder.path() / "c-link-to-b");
  fs::create_directory(folder.path() / "empty");
  ASSERT_EQ(::mkfifo((folder.path() / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(documents_in(folder.path()), ElementsAre("B", "a/y/x", "a/z", "a.txt", "b.txt"));
  // Paths keep their order. Hidden files and links to folders are read when named explicitly.
  TextSource source({.paths = {folder.path() / "b.txt", folder.path() / ".hidden",
                               folder.path() / "a/loop", folder.path()}});
  EXPECT_THAT(documents_of(source), ElementsAre("b.txt", ".hidden", "a/y/x", "a/z", "B", "a.txt"));
}

TEST(TextSource, FollowsLinksToFilesOutside) {
  const TempFolder folder, elsewhere;
  fs::create_symlink(elsewhere.write("blob", "text"), folder.path() / "link.txt");
  EXPECT_THAT(documents_in(folder.path()), ElementsAre("text"));
}

// Text whose characters, newlines and NULs occur on both sides of chunk and piece boundaries.
std::string ragged_text(uint64_t seed, size_t bytes) {
  const char* parts[] = {"a",      " ",  "\n", "\r\n", "\n\n  ",     "word",        "\u00e9",
                         "\u4e2d", "\t", ".",  "\n",   "\U0001F600", "longer words"};
  std::string text;
  for (uint64_t i = 0; text.size() < bytes; ++i) text += parts[uniform_below(seed, 0, i, 13)];
  return text;
}

TEST(DocumentReader, AnyChunkAndPieceSizeGivesTheSameDocuments) {
  const TempFolder folder;
  std::vector<std::string> expected;
  std::string file_text, json_text;
  for (uint64_t seed = 0; seed < 12; ++seed) {
    expected.push_back(ragged_text(seed, seed * seed * 90 + 1));
    file_text += expected.back() + std::string(1 + seed % 2, '\0');
    std::string escaped;
    for (char c : expected.back()) {
      escaped += c == '\n' ? "\\n" : c == '\r' ? "\\r" : c == '\t' ? "\\t" : std::string(1, c);
    }
    json_text += "{\"text\": \"" + escaped + "\"}\r\n";
  }
  for (const auto& path : {folder.write("a.txt", file_text), folder.write("a.jsonl", json_text)}) {
    for (size_t chunk = 1; chunk < 40; ++chunk) {
      const size_t piece_bytes = 4 + 37 * chunk;
      const auto reader =
          DocumentReader::open(path, {.piece_bytes = piece_bytes, .chunk_bytes = chunk});
      std::vector<std::string> documents;
      TextPiece piece;
      while (reader->next(piece)) {
        ASSERT_TRUE(!piece.text.empty() && piece.text.size() <= piece_bytes);
        ASSERT_EQ(find_invalid_utf8(piece.text), piece.text.size());
        if (piece.begins_document) documents.emplace_back();
        documents.back() += piece.text;
      }
      ASSERT_EQ(documents, expected) << path << " chunk " << chunk;
    }
  }
}

TEST(PieceLength, PrefersLineStarts) {
  EXPECT_EQ(piece_length("short", 5), 5u);
  EXPECT_EQ(piece_length("one\ntwo\nthree", 10), 8u);  // after "two\n"
  EXPECT_EQ(piece_length("one two\nthree", 8), 8u);    // the newline is the last byte allowed
  EXPECT_EQ(piece_length("ones two\nb\n\nc \nd\n e", 15), 9u);   // a newline between words is best,
  EXPECT_EQ(piece_length("one two \n\nb", 10), 10u);             // then one before a word,
  EXPECT_EQ(piece_length("a line\n\n  more", 9), 8u);            // then any other newline,
  EXPECT_EQ(piece_length("a\nlong line without end", 12), 12u);  // unless the piece would be tiny;
  EXPECT_EQ(piece_length("no newline \u4e2d\u6587", 12), 11u);   // else between characters
}

TEST(TextSource, RefusesWhatIsNotThere) {
  const TempFolder folder;
  EXPECT_THAT(source_fault(TextSourceOptions{}), HasSubstr("no text given"));
  EXPECT_THAT(source_fault(folder.path() / "none"),
              AllOf(HasSubstr("none"), HasSubstr("No such file")));
  EXPECT_THAT(source_fault(folder.path()),
              AllOf(HasSubstr(folder.path()), HasSubstr("no text files")));
  folder.write(".hidden", "text");
  EXPECT_THAT(source_fault(folder.path()), HasSubstr("hidden files do not count"));
  EXPECT_THAT(source_fault("/dev/zero"), HasSubstr("neither a regular file nor a folder"));
  EXPECT_THAT(source_fault({.paths = {folder.path() / ".hidden"}, .max_bytes = -1}),
              HasSubstr("-1"));
}

TEST(TextSource, NamesTheFaultOfABadFile) {
  const TempFolder folder;
  const auto fault = [&](const std::string& name, std::string_view text) {
    const std::string what = source_fault(folder.write(name, text));
    EXPECT_THAT(what, HasSubstr((folder.path() / name).string()));
    EXPECT_EQ(what.find('\n'), std::string::npos) << what;
    return what;
  };
  std::string elf(5000, '\0');
  elf.replace(0, 6,
              "\x7F"
              "ELF\x02\xF3");
  EXPECT_THAT(fault("program", elf), HasSubstr("binary"));
  EXPECT_THAT(fault("zeros", std::string(100, '\0')), HasSubstr("binary"));
  EXPECT_THAT(fault("utf16", std::string("\xFF\xFEt\0e\0x\0t\0", 10)), HasSubstr("UTF-16"));
  EXPECT_THAT(fault("renamed.txt", gzip(std::string(3000, 'x'))), HasSubstr("binary"));
  EXPECT_THAT(fault("latin1", "caf\xE9 au lait"), HasSubstr("invalid UTF-8 at byte 3"));
  const std::string late = std::string(600000, 'x') + "\n\xC3";
  EXPECT_THAT(fault("late", late), HasSubstr("invalid UTF-8 at byte 600001"));
  EXPECT_THAT(fault("late.gz", gzip(late)), HasSubstr("byte 600001 of the unpacked text"));
  EXPECT_THAT(fault("cut.zst", zst(late).substr(0, 30)), HasSubstr("truncated"));
  EXPECT_THAT(fault("1.jsonl", "{\"text\": \"a\"}\n\n{\"text\": oops}"),
              HasSubstr("line 3: not valid JSON at byte"));
  EXPECT_THAT(fault("2.jsonl", "{\"text\": \"a\"}\n{\"body\": \"b\"}"),
              HasSubstr("line 2 has no string field \"text\""));
  EXPECT_THAT(fault("3.jsonl", "{\"text\": [\"a\"]}"), HasSubstr("line 1 has no string field"));
  EXPECT_THAT(fault("4.jsonl", "{\"text\": \"a\", \"text\": null}"), HasSubstr("no string field"));
  EXPECT_THAT(fault("5.jsonl", "\"text\"\n"), HasSubstr("line 1 is not a JSON object"));
  EXPECT_THAT(fault("6.jsonl", "{\"text\": \"a\xFF\"}"), HasSubstr("invalid UTF-8 at byte 11"));
  // The byte is counted from the file's beginning, lines and documents before it included.
  EXPECT_THAT(fault("10.jsonl", "{\"text\": \"a\"}\n{\"text\": \"b\xFF\"}\n"),
              HasSubstr("invalid UTF-8 at byte 25"));
  EXPECT_THAT(fault("two", std::string("one\0two\xFF\0", 9)), HasSubstr("invalid UTF-8 at byte 7"));
  EXPECT_THAT(fault("7.jsonl", "{\"text\": \"\\ud800\"}"), HasSubstr("not valid JSON"));
  EXPECT_THAT(fault("8.jsonl", "{\"a\":" + std::string(100000, '[')),
              HasSubstr("line 1: JSON nested more than 1000 levels deep at byte 1005"));
  EXPECT_THAT(fault("9.jsonl", "{\"text\": \"a\"} {\"text\": \"b\"}"), HasSubstr("not valid JSON"));
}

TEST(DocumentReader, RefusesALineBeyondTheLimit) {
  const TempFolder folder;
  const auto file = folder.write("a.jsonl", "{\"text\": \"" + std::string(30, 'x') + "\"}\n");
  TextPiece piece;
  EXPECT_TRUE(DocumentReader::open(file, {.max_json_line = 42})->next(piece));
  EXPECT_THROW(DocumentReader::open(file, {.max_json_line = 41})->next(piece), InputError);
}

TEST(TextSource, UnreadableFileStopsOrIsSkipped) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may read every file";
  const TempFolder folder;
  folder.write("a", "text");
  fs::permissions(folder.write("b", "secret"), fs::perms::none);
  fs::permissions(folder.write("c/d", "secret").parent_path(), fs::perms::none);
  EXPECT_THAT(source_fault(folder.path()), HasSubstr("Permission denied"));
  TextSource source({.paths = {folder.path()}, .bad_file = BadFile::kSkip});
  EXPECT_THAT(documents_of(source), ElementsAre("text"));
  EXPECT_EQ(source.skipped(), (TextSkips{.files = 2}));
  fs::permissions(folder.path() / "c", fs::perms::owner_all);
}

TEST(TextSource, SkipsBadFilesAndSaysSo) {
  const TempFolder folder;
  folder.write("00", "good");
  // A document is bad from its second piece on: its first piece is kept, the next begins normally.
  folder.write("01", "first line\nsecond line\n\xFF");
  for (int i = 2; i < 9; ++i) folder.write(fmt::format("0{}.gz", i), "not gzip");
  folder.write("09.jsonl", "{\"text\": \"line\"}\nnot json\n{\"text\": \"read on\"}\n");
  folder.write("10", "also good");
  std::vector<std::string> log;
  TextSource source(
      {.paths = {folder.path()},
       .bad_file = BadFile::kSkip,
       .piece_bytes = 16,
       .log = [&](LogLevel, std::string_view message) { log.emplace_back(message); }});
  const auto expected = ElementsAre("good", "first line\n", "line", "read on", "also good");
  EXPECT_THAT(documents_of(source, 16), expected);
  EXPECT_EQ(source.skipped(), (TextSkips{.files = 8, .rows = 1}));
  ASSERT_EQ(log.size(), 6u);
  EXPECT_THAT(log[0], AllOf(HasSubstr("01"), HasSubstr("invalid UTF-8")));
  EXPECT_THAT(log[4], HasSubstr("05.gz"));
  EXPECT_THAT(log[5], HasSubstr("skipped 9 bad files and rows"));
  source.rewind();
  EXPECT_EQ(source.bytes_read(), 0);
  EXPECT_THAT(documents_of(source, 16), expected);
  EXPECT_EQ(source.skipped(), (TextSkips{.files = 8, .rows = 1}));
  EXPECT_EQ(log.size(), 6u);  // reported once
}

TEST(TextSource, LeavesOutBadRowsAndReadsOn) {
  const TempFolder folder;
  const std::vector<std::string> bad = {R"({"text": null})",
                                        R"({"body": "b"})",
                                        R"({"text": 5})",
                                        R"({"text": ["b"]})",
                                        R"({"text": {}})",
                                        R"(["text"])",
                                        R"({"text": "b"} {})",
                                        R"({"text": "b", })",
                                        R"({"text": "\ud800"})",
                                        "{\"text\": \"\xFF\"}",
                                        R"({"text": "b", "x": 1e999})",
                                        "null"};
  std::string rows = "{\"text\": \"first\"}\n";
  std::vector<std::string> expected = {"first"};
  for (size_t i = 0; i < bad.size(); ++i) {
    rows += bad[i] + "\n" + fmt::format("{{\"text\": \"good {}\"}}\n\n", i);
    expected.push_back(fmt::format("good {}", i));
    EXPECT_NE(source_fault(folder.write("one.jsonl", bad[i])), "no fault") << bad[i];
  }
  for (const auto& file : {folder.write("a.jsonl", rows), folder.write("a.jsonl.gz", gzip(rows)),
                           folder.write("b.jsonl", rows.substr(0, rows.size() - 2))}) {
    TextSource source({.paths = {file}, .bad_file = BadFile::kSkip});
    EXPECT_EQ(documents_of(source), expected) << file;
    EXPECT_EQ(source.skipped(), (TextSkips{.rows = std::ssize(bad)}));
  }
  folder.write("c.jsonl", "{\"text\": null}");
  TextSource none({.paths = {folder.path() / "c.jsonl"}, .bad_file = BadFile::kSkip});
  EXPECT_THAT(documents_of(none), ElementsAre());
  EXPECT_EQ(none.skipped(), (TextSkips{.rows = 1}));
}

TEST(TextSource, LeavesOutParquetRowsWithoutText) {
  const fs::path file = fs::path(TWELL_SOURCE_DIR) / "tests/golden/parquet/gzip-v2-plain.parquet";
  EXPECT_THAT(source_fault(file), HasSubstr("row 4 has no text in \"text\""));
  TextSource source({.paths = {file}, .bad_file = BadFile::kSkip});
  EXPECT_EQ(documents_of(source).size(), 34u);
  EXPECT_EQ(source.skipped(), (TextSkips{.rows = 6}));  // every seventh of 40 rows
  TextSource numbers({.paths = {file}, .json_field = "small", .bad_file = BadFile::kSkip});
  EXPECT_THAT(documents_of(numbers), ElementsAre());
  EXPECT_EQ(numbers.skipped(), (TextSkips{.rows = 40}));
  TextSource column({.paths = {file}, .json_field = "absent", .bad_file = BadFile::kSkip});
  EXPECT_THAT(documents_of(column), ElementsAre());
  EXPECT_EQ(column.skipped(), (TextSkips{.files = 1}));
}

// The rows that other writers' files hold (tests/golden/make_parquet_writers_golden.py).
TEST(TextSource, ReadsFilesWithRowGroupsOfNoRows) {
  const fs::path folder = fs::path(TWELL_SOURCE_DIR) / "tests/golden/parquet/writers";
  TextSource source({.paths = {folder / "pyarrow-groups.parquet"}, .bad_file = BadFile::kSkip});
  EXPECT_THAT(documents_of(source), ElementsAre("one", "two"));
  EXPECT_EQ(source.skipped(), (TextSkips{.rows = 1}));
}

TEST(DocumentReader, LeavesOutALineBeyondTheLimit) {
  const TempFolder folder;
  const std::string good = "{\"text\": \"good\"}",
                    bad = "{\"text\": \"" + std::string(90, 'x') + "\"}";
  for (const char* end : {"\n", ""}) {
    const auto file = folder.write("a.jsonl", good + "\n" + bad + "\n" + good + "\n" + bad + end);
    for (size_t chunk = 1; chunk < 130; chunk += 3) {
      std::vector<std::string> faults;
      const auto reader = DocumentReader::open(
          file, {.chunk_bytes = chunk,
                 .max_json_line = 40,
                 .on_bad_row = [&](const std::string& what) { faults.push_back(what); }});
      TextPiece piece;
      for (int i = 0; i < 2; ++i) {
        ASSERT_TRUE(reader->next(piece)) << chunk;
        EXPECT_EQ(piece.text, "good");
      }
      EXPECT_FALSE(reader->next(piece));
      EXPECT_THAT(faults,
                  ElementsAre(HasSubstr("line 2 is longer"), HasSubstr("line 4 is longer")));
    }
  }
}

TEST(TextSource, WhatCannotBeLookedAtIsAFault) {
  const TempFolder folder;
  folder.write("data/a", "text");
  const auto fault_of = [&](const char* what, const std::function<void()>& make) {
    make();
    const std::string fault = source_fault(folder.path() / "data");
    TextSource source({.paths = {folder.path() / "data"}, .bad_file = BadFile::kSkip});
    EXPECT_THAT(documents_of(source), ElementsAre("text")) << what;
    EXPECT_EQ(source.skipped(), (TextSkips{.files = 1})) << what;
    fs::remove_all(folder.path() / "data" / "b");
    return fault;
  };
  const fs::path entry = folder.path() / "data" / "b";
  EXPECT_THAT(fault_of("dangling", [&] { fs::create_symlink("nowhere", entry); }),
              HasSubstr("data/b, a link to nowhere: No such file"));
  EXPECT_THAT(fault_of("a loop", [&] { fs::create_symlink("b", entry); }),
              HasSubstr("data/b, a link to b: Too many levels of symbolic links"));
  EXPECT_THAT(fault_of("a chain", [&] { fs::create_symlink("a/b/c", entry); }),
              HasSubstr("data/b, a link to a/b/c: Not a directory"));
  // Folders within each other until the path is longer than the system takes.
  EXPECT_THAT(fault_of("too long",
                       [&] {
                         fs::create_directory(entry);
                         const fs::path here = fs::current_path();
                         fs::current_path(entry);
                         for (int i = 0; i < 20; ++i) {
                           fs::create_directory(std::string(250, 'x'));
                           fs::current_path(std::string(250, 'x'));
                         }
                         std::ofstream("c") << "text";
                         fs::current_path(here);
                       }),
              HasSubstr("File name too long"));
  EXPECT_EQ(source_fault(folder.path() / "data"), "no fault");
}

TEST(TextSource, RefusesTarArchivesByName) {
  const TempFolder folder;
  // As GNU tar and the oldest write them: a header whose sum of bytes is right.
  const auto archive = [](const std::string& magic, const char* sum_format) {
    std::string header(512, '\0');
    header.replace(0, 8, "some.txt");
    header.replace(100, 7, "0000644");
    header.replace(124, 11, "00000000011");
    header.replace(156, 1, "0");
    header.replace(257, magic.size(), magic);
    uint32_t sum = 8 * ' ';
    for (const char c : header) sum += static_cast<unsigned char>(c);
    header.replace(148, 7, fmt::format(fmt::runtime(sum_format), sum));
    return header + "some text" + std::string(503 + 1024, '\0');
  };
  const std::string gnu = archive("ustar  ", "{:06o} "), old = archive("", "{:6o} ");
  for (const auto& file :
       {folder.write("a.tar", gnu), folder.write("a.tar.gz", gzip(gnu)), folder.write("a.txt", old),
        folder.write("a.jsonl.xz", xz(old)), folder.write("a.tar.zst", zst(gnu))}) {
    EXPECT_THAT(source_fault(file), HasSubstr("it is a tar archive; unpack it")) << file;
  }
  EXPECT_EQ(source_fault(folder.write("b.txt", std::string(600, '0'))), "no fault");
}

TEST(TextSource, NamesPointersOfGitLfs) {
  const TempFolder folder;
  const std::string pointer =
      "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n";
  for (const char* name : {"a.txt", "a.jsonl", "a.parquet"}) {
    EXPECT_THAT(source_fault(folder.write(name, pointer)), HasSubstr("it is a Git LFS pointer"));
  }
}

TEST(TextSource, StopsAtTheByteLimit) {
  const TempFolder folder;
  folder.write("a", "12345");
  folder.write("b", "67\u00e989");
  const auto text_within = [&](int64_t max_bytes) {
    TextSource source({.paths = {folder.path()}, .max_bytes = max_bytes});
    std::string all, text;
    while (source.next(text)) all += text + "|";
    EXPECT_FALSE(source.next(text));
    return all;
  };
  EXPECT_EQ(text_within(3), "123|");
  EXPECT_EQ(text_within(5), "12345|");
  EXPECT_EQ(text_within(7), "12345|67|");
  EXPECT_EQ(text_within(8), "12345|67|");  // a character is never cut
  EXPECT_EQ(text_within(9), "12345|67\u00e9|");
  EXPECT_EQ(text_within(1000), "12345|67\u00e989|");
}

TEST(TextSource, LongDocumentsComeInPieces) {
  const TempFolder folder;
  const std::string text = ragged_text(3, 3 << 20);
  TextSource source({.paths = {folder.write("a.zst", zst(text))}});
  TextPiece piece;
  std::string all;
  int pieces = 0;
  for (; source.next(piece); ++pieces) {
    EXPECT_EQ(piece.begins_document, pieces == 0);
    all += piece.text;
  }
  EXPECT_EQ(all, text);
  EXPECT_GE(pieces, 3);
  EXPECT_LE(pieces, 7);
}

}  // namespace
}  // namespace twell
