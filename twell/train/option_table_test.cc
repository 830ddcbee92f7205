// SPDX-License-Identifier: Apache-2.0
#include "twell/train/option_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "twell/base/error.h"
#include "twell/base/test_folder.h"
#include "twell/train/start.h"

namespace twell {
namespace {

using testing::HasSubstr;

template <typename Call>
std::string fault_of(const Call& call) {
  try {
    call();
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

// Sets one option of the table, as a flag would.
void set(RunSettings& settings, const std::string& name, const std::string& value) {
  for (const OptionGroup& group : option_table()) {
    for (const OptionRow& row : group.rows) {
      Option option = make_option(row, group.heading, settings);
      if (option.name() != name) continue;
      option.set({value});
      return;
    }
  }
  FAIL() << "no option " << name;
}

TEST(OptionTable, NamesAreUniqueAndDefaultsAreWithinTheirRanges) {
  RunSettings settings;
  std::set<std::string> names;
  std::set<const void*> variables;
  for (const OptionGroup& group : option_table()) {
    for (const OptionRow& row : group.rows) {
      const Option option = make_option(row, group.heading, settings);
      EXPECT_TRUE(names.insert(option.name()).second) << option.name();
      EXPECT_TRUE(
          variables
              .insert(std::visit([](const auto* at) -> const void* { return at; }, option.target()))
              .second)
          << option.name();
      EXPECT_FALSE(option.help().empty()) << option.name();
      EXPECT_NO_THROW(option.check_variable()) << option.name();
      const std::vector<std::string> preset = option.default_values();
      if (!preset.empty()) {
        EXPECT_NO_THROW(make_option(row, "", settings).set(preset)) << option.name();
      }
    }
  }
  // Texts that repeat a default.
  const auto help_of = [&](std::string_view name) {
    for (const OptionGroup& group : option_table()) {
      for (const OptionRow& row : group.rows) {
        if (row.name == name) return std::string(row.help);
      }
    }
    return std::string();
  };
  EXPECT_THAT(help_of("steps"), HasSubstr(fmt::format("default: {}", TrainOptions{}.steps)));
  EXPECT_THAT(help_of("l1"), HasSubstr(fmt::format("default: {:g}", TrainOptions{}.l1_coeff)));
  for (const std::string& preset : preset_names())
    EXPECT_THAT(help_of("preset"), HasSubstr(preset));
}

TEST(OptionTable, RangesAreThoseOfFlags) {
  RunSettings settings;
  EXPECT_EQ(fault_of([&] { set(settings, "micro-batch", "0"); }),
            "--micro-batch must be 1 to 65536, got 0");
  EXPECT_THAT(fault_of([&] { set(settings, "lr", "nan"); }), HasSubstr("got nan"));
  EXPECT_THAT(fault_of([&] { set(settings, "beta2", "1"); }), HasSubstr("below 1"));
  EXPECT_THAT(fault_of([&] { set(settings, "save-dtype", "f8"); }),
              HasSubstr("must be f32, bf16 or f16"));
  set(settings, "lr", "0.5");
  EXPECT_EQ(settings.train.learning_rate, 0.5);
}

// What the command line refused, and Python took in its own way.
TEST(Start, SettingsThatContradictEachOther) {
  RunSettings both;
  set(both, "steps", "10");
  set(both, "tokens", "1000");
  EXPECT_EQ(fault_of([&] { requested_options(both, requested_config(both)); }),
            "give --steps or --tokens, not both");
  RunSettings odd;
  set(odd, "width", "18");
  set(odd, "heads", "4");
  EXPECT_EQ(fault_of([&] { requested_config(odd); }),
            "width 18 is not a multiple of 4 heads; give --head-dim");
  RunSettings distill;
  set(distill, "distill", "0.5");
  EXPECT_THAT(fault_of([&] { requested_config(distill); }), HasSubstr("add --from DIR"));
  RunSettings blend;
  set(blend, "relufy-steps", "5");
  EXPECT_THAT(fault_of([&] { requested_options(blend, requested_config(blend)); }),
              HasSubstr("goes with --relufy"));
}

TEST(Start, ProductsInBf16NeedAProcessorThatHasThem) {
  RunSettings settings;
  set(settings, "compute", "bf16");
  if (has_bf16_products()) {
    EXPECT_EQ(requested_options(settings, requested_config(settings)).options.compute,
              MatmulCompute::kBF16);
  } else {
    EXPECT_THAT(fault_of([&] { requested_options(settings, requested_config(settings)); }),
                HasSubstr("AVX512_BF16 or AMX"));
  }
}

TEST(Start, L1IsOffWhereNothingIsSparse) {
  RunSettings settings;
  set(settings, "activation", "silu");
  const RequestedOptions requested = requested_options(settings, requested_config(settings));
  EXPECT_EQ(requested.options.l1_coeff, 0.0);
  EXPECT_THAT(requested.note, HasSubstr("take --activation relu"));
  set(settings, "l1", "1e-4");
  EXPECT_THAT(fault_of([&] { requested_options(settings, requested_config(settings)); }),
              HasSubstr("--l1 makes no layer sparse with silu"));
  set(settings, "activation", "relu2");
  EXPECT_EQ(requested_options(settings, requested_config(settings)).options.l1_coeff, 1e-4);
}

TEST(Start, APresetBringsItsRecipe) {
  RunSettings settings;
  set(settings, "preset", "0.5b");
  const TrainOptions recipe = requested_options(settings, requested_config(settings)).options;
  EXPECT_EQ(recipe.steps, 10'000);
  EXPECT_EQ(recipe.batch_tokens, 1'048'576);
  set(settings, "batch-tokens", "65536");
  set(settings, "tokens", "1M");
  const TrainOptions given = requested_options(settings, requested_config(settings)).options;
  EXPECT_EQ(given.batch_tokens, 65'536);
  EXPECT_EQ(given.tokens, 1'000'000);
}

// An empty path is no folder, whatever the current one holds.
TEST(Start, WithoutFromThePresetIsTaken) {
  const TempFolder temp;
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(temp.path());
  std::ofstream("config.json") << "{}";
  EXPECT_EQ(requested_config({}), preset_config("tiny"));
  std::filesystem::current_path(before);
}

}  // namespace
}  // namespace twell
