// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/api_keys.h"

#include <gtest/gtest.h>

#include "twell/base/error.h"
#include "twell/base/test_folder.h"

namespace twell {
namespace {

TEST(ApiKeys, OnlyWholeKeysAreAllowed) {
  const ApiKeys keys({"alpha", "beta"});
  EXPECT_TRUE(keys.allow("Bearer alpha", ""));
  EXPECT_TRUE(keys.allow("Bearer beta", ""));
  for (const char* wrong : {"", "alpha", "Bearer ", "Bearer alph", "Bearer alphaa", "Bearer alphA",
                            "Bearer alphaalpha", "Basic alpha", "Bearer  alpha"}) {
    EXPECT_FALSE(keys.allow(wrong, "")) << wrong;
  }
  // The scheme's name may be in any case (RFC 9110), the key not.
  EXPECT_TRUE(keys.allow("bearer alpha", ""));
  EXPECT_EQ(keys.find("BEARER beta", ""), 1u);
  EXPECT_FALSE(keys.find("bearer ALPHA", ""));
  EXPECT_TRUE(ApiKeys().allow("", ""));
}

TEST(ApiKeys, TheOtherFieldCountsWithoutAuthorization) {
  const ApiKeys keys({"alpha", "beta"});
  EXPECT_EQ(keys.find("", "beta"), 1u);
  for (const char* wrong : {"", "Bearer alpha", "alph", "alphaa", " alpha"}) {
    EXPECT_FALSE(keys.allow("", wrong)) << wrong;
  }
  EXPECT_FALSE(keys.allow("Bearer wrong", "alpha"));
  EXPECT_FALSE(keys.allow("Basic alpha", "alpha"));
  EXPECT_EQ(keys.find("Bearer beta", "wrong"), 1u);
}

TEST(ApiKeys, Files) {
  const TempFolder folder;
  const ApiKeys keys = ApiKeys::load(folder.write("keys", "# ours\n\nalpha\r\nbeta"));
  EXPECT_TRUE(keys.allow("Bearer alpha", ""));
  EXPECT_TRUE(keys.allow("Bearer beta", ""));
  EXPECT_FALSE(keys.allow("Bearer # ours", ""));
  EXPECT_THROW(ApiKeys::load(folder.write("none", "# ours\n")), InputError);
  EXPECT_THROW(ApiKeys::load(folder.write("space", "al pha\n")), InputError);
  EXPECT_THROW(ApiKeys::load(folder.path() / "missing"), InputError);
}

}  // namespace
}  // namespace twell
