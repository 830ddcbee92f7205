// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/tensor_load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "twell/base/buffer.h"
#include "twell/base/error.h"
#include "twell/base/rng.h"
#include "twell/base/test_folder.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

float stored_value(const TensorInfo& info, int64_t i) {
  const std::byte* in = info.bytes.data();
  uint16_t half = 0;
  if (info.dtype == "F32") {
    float value;
    std::memcpy(&value, in + 4 * i, sizeof(value));
    return value;
  }
  std::memcpy(&half, in + 2 * i, sizeof(half));
  return info.dtype == "BF16" ? to_float(BF16{half}) : f16_to_float(half);
}

struct Shape {
  const char* name;
  const char* dtype;
  int64_t rows, cols;  // as held in memory
  bool transposed;
};

// Shapes of one piece, of several, and of several and a few rows; rows wider than a piece; a single
// column. The odd bytes in front leave them unaligned.
constexpr Shape kShapes[] = {
    {"b.small", "F32", 3, 5, false},         {"c.rows", "BF16", 2048, 300, false},
    {"d.ragged", "BF16", 1111, 1003, false}, {"e.half", "F16", 700, 1001, false},
    {"f.float", "F32", 515, 1030, false},    {"g.down", "BF16", 1003, 1111, true},
    {"h.down_half", "F16", 517, 1029, true}, {"i.down_float", "F32", 300, 2049, true},
    {"j.wide", "BF16", 3, 700001, false},    {"k.tall", "BF16", 600011, 17, true},
    {"l.column", "BF16", 70000, 1, false},   {"m.line", "BF16", 1, 70000, true}};

class TensorLoadTest : public ::testing::Test {
 protected:
  TensorLoadTest() {
    add("a.bytes", "U8", {1234567});
    for (const Shape& s : kShapes) {
      add(s.name, s.dtype,
          s.transposed ? std::vector{s.cols, s.rows} : std::vector{s.rows, s.cols});
    }
    add("z.empty", "F32", {0, 7});
    write_safetensors(path_, tensors_, {{"format", "pt"}});
  }

  void add(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape) {
    int64_t bytes = dtype == "F32" ? 4 : dtype == "U8" ? 1 : 2;
    for (const int64_t size : shape) bytes *= size;
    tensors_.push_back({name, dtype, shape, [bytes, seed = tensors_.size()](const auto& sink) {
                          std::vector<uint32_t> random(static_cast<size_t>((bytes + 3) / 4));
                          for (size_t i = 0; i < random.size(); ++i) {
                            random[i] = static_cast<uint32_t>(0x9E3779B97F4A7C15u * (i + 1) >> 31) ^
                                        static_cast<uint32_t>(seed);
                          }
                          sink(std::as_bytes(std::span(random)).first(static_cast<size_t>(bytes)));
                        }});
  }

  // The tensors' values, the same in every test: without optimisation stored_value takes long.
  static const std::map<std::string, std::vector<float>>& expected(const SafetensorsFile& file) {
    static const auto all = [&] {
      std::map<std::string, std::vector<float>> values;
      for (const Shape& s : kShapes) {
        const TensorInfo& info = file.tensor(s.name);
        std::vector<float>& to = values[s.name];
        to.resize(static_cast<size_t>(s.rows * s.cols));
        float* next = to.data();
        for (int64_t row = 0; row < s.rows; ++row) {
          for (int64_t col = 0; col < s.cols; ++col) {
            *next++ = stored_value(info, s.transposed ? col * s.rows + row : row * s.cols + col);
          }
        }
      }
      return values;
    }();
    return all;
  }

  // Loads into poisoned memory and compares every bit; memory of skipped tensors stays poisoned.
  void expect_loads(const SafetensorsFile& file, int threads) {
    std::map<std::string, std::vector<float>> out;
    for (const Shape& s : kShapes) {
      out[s.name].assign(static_cast<size_t>(s.rows * s.cols + 1), 7e7f);
    }
    Context ctx(threads);
    load_tensors(ctx, file,
                 [&](const TensorInfo& info) -> TensorPlace {
                   for (const Shape& s : kShapes) {
                     if (info.name != s.name) continue;
                     return {.out = out[s.name].data(),
                             .rows = s.rows,
                             .cols = s.cols,
                             .transposed = s.transposed};
                   }
                   return {};
                 },
                 {.allow_non_finite = true});
    for (const Shape& s : kShapes) {
      const std::vector<float>& values = out[s.name];
      const std::vector<float>& wanted = expected(file).at(s.name);
      ASSERT_EQ(values.size(), wanted.size() + 1);
      EXPECT_EQ(std::memcmp(values.data(), wanted.data(), sizeof(float) * wanted.size()), 0)
          << s.name << " on " << threads << " threads";
      EXPECT_EQ(values.back(), 7e7f) << s.name;
    }
  }

  // Renames the file's hash entry, so that it is ordinary metadata.
  void make_foreign() const {
    std::string header(8192, '\0');
    std::ifstream(path_, std::ios::binary).read(header.data(), std::ssize(header));
    const size_t at = header.find("content_hash");
    ASSERT_NE(at, std::string::npos);
    std::fstream(path_, std::ios::in | std::ios::out | std::ios::binary).seekp(long(at)) << "no";
  }

  TempFolder folder_;
  fs::path path_ = folder_.path() / "x.safetensors";
  std::vector<TensorToWrite> tensors_;
};

TEST_F(TensorLoadTest, EveryBitArrivesOnAnyNumberOfThreads) {
  for (const int threads : {1, 2, 5}) expect_loads(SafetensorsFile(path_), threads);
}

TEST_F(TensorLoadTest, WithoutAHashTheSame) {
  make_foreign();
  for (const int threads : {1, 3}) expect_loads(SafetensorsFile(path_), threads);
}

TEST_F(TensorLoadTest, DamageAnywhereIsRefused) {
  const auto flip = [&](int64_t at) {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(at);
    file.put(byte);
  };
  Context ctx(2);
  const auto load = [&] {
    load_tensors(ctx, SafetensorsFile(path_), [](const TensorInfo&) { return TensorPlace{}; });
  };
  load();
  const auto size = static_cast<int64_t>(fs::file_size(path_));
  for (const int64_t at : {size - 1, size / 2, size - 20'000'000}) {
    flip(at);
    try {
      load();
      ADD_FAILURE() << "byte " << at << " of " << size;
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), HasSubstr("the content does not match its hash"));
    }
    flip(at);
  }
  load();
}

}  // namespace
}  // namespace twell
