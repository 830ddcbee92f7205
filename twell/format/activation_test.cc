// SPDX-License-Identifier: Apache-2.0
#include "twell/format/activation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "twell/base/error.h"

namespace twell {
namespace {

TEST(Activation, NamesReadBack) {
  for (const Activation activation :
       {Activation::kRelu, Activation::kSilu, Activation::kGelu, Activation::kGeluTanh,
        Activation::kQuickGelu, Activation::kRelu2}) {
    EXPECT_EQ(parse_activation(activation_name(activation), "x"), activation);
  }
  EXPECT_EQ(parse_activation("swish", "x"), Activation::kSilu);
  EXPECT_EQ(parse_activation("gelu_new", "x"), Activation::kGeluTanh);
}

TEST(Activation, OthersAreRefusedByName) {
  try {
    parse_activation("mish", "config.json");
    ADD_FAILURE();
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("config.json: activation \"mish\""));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("relu, silu"));
  }
}

TEST(Activation, ABlendIsReluOnceItsShareIsWhole) {
  EXPECT_TRUE(BlendedActivation{}.is_relu());
  EXPECT_FALSE((BlendedActivation{Activation::kSilu, 0.5f}.is_relu()));
  EXPECT_TRUE((BlendedActivation{Activation::kSilu, 1.0f}.is_relu()));
}

TEST(Activation, ReluAndItsSquareLeaveZeros) {
  EXPECT_TRUE(leaves_zeros(Activation::kRelu));
  EXPECT_TRUE(leaves_zeros(Activation::kRelu2));
  EXPECT_FALSE(leaves_zeros(Activation::kSilu));
  EXPECT_TRUE((BlendedActivation{Activation::kRelu2}.leaves_zeros()));
  EXPECT_FALSE((BlendedActivation{Activation::kSilu, 0.5f}.leaves_zeros()));
  EXPECT_FALSE(BlendedActivation{Activation::kRelu2}.is_relu());
}

}  // namespace
}  // namespace twell
