// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/fingerprint.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/test_folder.h"

namespace twell {
namespace {

TEST(Fingerprint, FollowsWhatChangesAnswers) {
  const TempFolder folder;
  const auto write = [&](const std::string& name, const std::string& text) {
    std::ofstream(folder.path() / name, std::ios::binary) << text;
  };
  const std::vector<std::string> settings = {"0.2.0", "CPU", "auto"};
  const auto of = [&] { return system_fingerprint(folder.path(), settings); };
  std::string tensors(size_t{3} << 20, 't');
  write("config.json", "{}");
  write("model.safetensors", tensors);
  const std::string first = of();
  EXPECT_EQ(first.size(), 15u);
  EXPECT_TRUE(first.starts_with("fp_"));
  EXPECT_EQ(of(), first);
  write("README.md", "of no interest");
  EXPECT_EQ(of(), first);

  std::set<std::string> all = {first};
  const auto is_new = [&] { return all.insert(of()).second; };
  tensors.back() = 'u';
  write("model.safetensors", tensors);
  EXPECT_TRUE(is_new());
  tensors.front() = 'u';
  write("model.safetensors", tensors);
  EXPECT_TRUE(is_new());
  // Any change of as many bytes as 256 pages are apart is seen.
  std::fill_n(tensors.begin() + 1000000, tensors.size() / 255 + 1, 'u');
  write("model.safetensors", tensors);
  EXPECT_TRUE(is_new());
  write("model.safetensors", tensors + "t");
  EXPECT_TRUE(is_new());
  write("model.safetensors", "short");
  EXPECT_TRUE(is_new());
  write("model.safetensors", "");
  EXPECT_TRUE(is_new());
  write("config.json", "{ }");
  EXPECT_TRUE(is_new());
  const std::vector<std::string> others = {"0.2.0", "CPU", "dense"};
  EXPECT_TRUE(all.insert(system_fingerprint(folder.path(), others)).second);
  EXPECT_THROW(system_fingerprint(folder.path() / "none", settings), InputError);
}

}  // namespace
}  // namespace twell
