// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/registry.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace twell {
namespace {

const GpuFfnLayer kWidth2048{.width = 2048, .ffn = 5632};

// What one call may run, written out without the table's rows.
struct Expected {
  std::string_view launch;
  bool refused = false;
};
Expected expected(const GpuFfnLayer& layer, const GpuFfnCall& call, const LayerActivity& activity,
                  bool dense_is_cheaper, std::string_view chosen = "small-batch") {
  const bool hopper = layer.device.compute_capability == 90;
  const bool relu = layer.activation != Activation::kSilu;  // or relu2, of the layers below
  const bool few = call.tokens >= 1 && call.tokens <= 8;
  const bool fits = call.tokens <= layer.row_tokens;
  if (call.norm && (!hopper || !relu || !few || !fits || call.counts_rows)) {
    return {"dense-gemms", true};
  }
  const std::string_view dense =
      hopper && relu && few && fits && !call.counts_rows ? "dense-rows"
      : hopper && relu && call.tokens >= 9 && call.tokens <= 64 && !call.counts_rows
          ? "dense-batch"
          : "dense-gemms";
  if (!relu || call.policy == FfnPolicy::kDense) return {dense};
  const bool measured = activity.nnz_per_token >= 0.0;
  if (call.policy == FfnPolicy::kAuto && measured && dense_is_cheaper) return {dense};
  // Auto weighs executions by their costs, once measured.
  const bool weighs = call.policy == FfnPolicy::kAuto && measured;
  if (!hopper) {
    const bool rows = few && fits && !call.counts_rows;
    const bool batch = call.tokens <= 32 && !call.counts_rows;
    const bool other = chosen == "row-fused" || chosen == "portable-union" ||
                       (batch && chosen == "portable-batch");
    return {weighs && other ? chosen
            : rows          ? "portable-rows"
            : batch         ? "portable-batch"
                            : "portable-union"};
  }
  if (!call.counts_rows && few) {
    return {weighs && chosen == "row-stream" ? chosen : "decode-rows"};
  }
  if (!call.counts_rows && call.tokens <= 128) {
    const bool medium = weighs && chosen == "medium-batch";
    return {medium ? chosen : "small-batch"};
  }
  if (call.counts_rows || call.tokens > 1024) return {"tile-union"};
  return {"medium-batch"};
}

std::vector<GpuFfnLayer> every_layer() {
  std::vector<GpuFfnLayer> layers;
  for (const GpuDevice& device :
       {GpuDevice{}, GpuDevice{.multiprocessors = 114, .clock_ghz = 1.755, .bandwidth = 2.04e6},
        GpuDevice{.compute_capability = 80, .multiprocessors = 108, .bandwidth = 1.555e6},
        GpuDevice{.compute_capability = 100, .multiprocessors = 148}}) {
    for (const bool gated : {true, false}) {
      for (const Activation activation :
           {Activation::kRelu, Activation::kRelu2, Activation::kSilu}) {
        for (const int64_t row_tokens : {0, 3, 8}) {
          layers.push_back({.width = 2048,
                            .ffn = 5632,
                            .gated = gated,
                            .activation = activation,
                            .row_tokens = row_tokens,
                            .device = device});
        }
      }
    }
  }
  return layers;
}

TEST(GpuFfnRegistry, EveryCall) {
  const LayerActivity unmeasured, light{.nnz_per_token = 3.0, .union_share = 0.02},
      heavy{.nnz_per_token = 560.0, .union_share = 0.9},
      full{.nnz_per_token = 5632.0, .union_share = 1.0};
  std::set<std::string_view> seen;
  for (const GpuFfnLayer& layer : every_layer()) {
    for (const FfnPolicy policy : {FfnPolicy::kAuto, FfnPolicy::kDense, FfnPolicy::kSparse}) {
      for (const int64_t tokens : {1, 5, 8, 9, 32, 33, 64, 65, 128, 129, 1024, 4096}) {
        for (const bool norm : {false, true}) {
          for (const bool counts : {false, true}) {
            for (const LayerActivity& activity : {unmeasured, light, heavy, full}) {
              const GpuFfnCall call{
                  .tokens = tokens, .policy = policy, .norm = norm, .counts_rows = counts};
              SCOPED_TRACE(testing::Message()
                           << ffn_policy_name(policy) << " " << tokens << " norm " << norm
                           << " counts " << counts << " capability "
                           << layer.device.compute_capability << " nnz " << activity.nnz_per_token);
              const Expected sparse = expected(layer, call, activity, false);
              if (sparse.refused) {
                EXPECT_ANY_THROW(choose_gpu_ffn(layer, call, activity));
                continue;
              }
              const GpuFfnChoice choice = choose_gpu_ffn(layer, call, activity);
              const bool dense = !choice.execution->sparse;
              EXPECT_EQ(choice.execution->name,
                        expected(layer, call, activity, dense, choice.execution->name).launch);
              if (policy == FfnPolicy::kAuto && activity.nnz_per_token == 5632.0) {
                // A stream of all rows is faster than the dense layer.
                const bool streams = tokens <= 8;
                EXPECT_TRUE(dense || (streams && choice.execution->name == "row-stream"));
              }
              EXPECT_FALSE(choice.reason.empty());
              seen.insert(choice.execution->name);
              for (const GpuFfnExecution& row : gpu_ffn_registry()) {
                if (row.name != choice.execution->name) continue;
                // It must take the norm (and with it x as y) and count where asked.
                EXPECT_TRUE(row.limits.norm || !norm);
                EXPECT_TRUE(row.limits.counts_rows || !counts);
                EXPECT_GE(tokens, row.limits.least_tokens);
                EXPECT_LE(tokens, row.limits.most_tokens);
              }
            }
          }
        }
      }
    }
  }
  // No layer has a screen, or fp8 weights, which two rows take alone.
  EXPECT_EQ(seen.size() + 3, gpu_ffn_registry().size());
}

TEST(GpuFfnRegistry, TakesTheNormOfAFewTokensOnHopper) {
  for (const GpuFfnLayer& layer : every_layer()) {
    for (const int64_t tokens : {0, 1, 3, 4, 5, 8, 9, 63, 64, 65, 128, 4096}) {
      const bool takes = layer.device.compute_capability == 90 &&
                         layer.activation != Activation::kSilu && tokens >= 1 &&
                         tokens <= layer.row_tokens;
      EXPECT_EQ(gpu_ffn_takes_norm(layer, tokens), takes) << tokens;
    }
  }
}

// Auto on Hopper: row-fused is never the answer, not even where tile-union cannot run.
TEST(GpuFfnRegistry, LeavesRowFusedToOtherGpus) {
  for (const int64_t ffn : {5632, 524288, 524296}) {
    const GpuFfnLayer layer{.width = 2048, .ffn = ffn};
    for (const int64_t tokens : {65, 128, 4096, 100000}) {
      for (const double nnz : {-1.0, 0.01, 1.0, 10.0, 100.0}) {
        const GpuFfnChoice choice =
            choose_gpu_ffn(layer, {.tokens = tokens}, {.nnz_per_token = nnz});
        EXPECT_NE(choice.execution->name, "row-fused") << choice.reason;
        if (ffn > 524288 && tokens > 128) {
          EXPECT_FALSE(choice.execution->sparse) << choice.reason;
        }
      }
    }
  }
}

TEST(GpuFfnRegistry, RefusesWhatIsTooLarge) {
  const GpuFfnLayer wide{.width = 32768, .ffn = 524288 * 2, .screen = ScreenBound::kProbabilistic};
  for (const GpuFfnExecution& row : gpu_ffn_registry()) {
    const GpuFfnCall call{.tokens = row.limits.least_tokens};
    EXPECT_EQ(gpu_ffn_unsupported(row, wide, call).empty(),
              row.name != "row-stream" && row.name != "tile-union" && row.name != "medium-batch" &&
                  row.name != "dense-batch" && row.name != "screened" &&
                  row.name != "dense-few-fp8" && row.name != "small-batch-fp8" &&
                  row.name != "portable-union");
  }
}

// Up to the largest shapes: every policy gets a launch that takes the call, or dense with the
// reason.
TEST(GpuFfnRegistry, HasAnAnswerForEverySize) {
  for (const int capability : {75, 80, 90, 100}) {
    for (const int64_t width : {8, 2048, 32768, 131072, 131080, 1 << 25}) {
      for (const int64_t ffn : {8, 524288, 524296, 1048576, 1 << 24, 1 << 25}) {
        for (const int64_t tokens : {1, 8, 9, 64, 65, 1000000}) {
          for (const FfnPolicy policy : {FfnPolicy::kAuto, FfnPolicy::kDense, FfnPolicy::kSparse}) {
            for (const Activation activation : {Activation::kRelu, Activation::kRelu2}) {
              const GpuFfnLayer layer{.width = width,
                                      .ffn = ffn,
                                      .activation = activation,
                                      .device = {.compute_capability = capability}};
              const GpuFfnCall call{.tokens = tokens, .policy = policy};
              const GpuFfnChoice choice =
                  choose_gpu_ffn(layer, call, {.nnz_per_token = 0.01, .union_share = 0.0});
              SCOPED_TRACE(testing::Message() << capability << " D " << width << " F " << ffn << " "
                                              << tokens << " tokens: " << choice.reason);
              for (const GpuFfnExecution& row : gpu_ffn_registry()) {
                if (row.name == choice.execution->name) {
                  EXPECT_EQ(gpu_ffn_unsupported(row, layer, call), "");
                }
              }
              const bool many = tokens > 128 && capability == 90;
              if (many && (ffn > 524288 || width > 131072 || width * ffn >= int64_t{1} << 35)) {
                EXPECT_NE(choice.execution->name, "tile-union");
                if (policy == FfnPolicy::kAuto) {
                  EXPECT_EQ(choice.reason, "no sparse execution takes a layer of this size");
                }
              }
              if (capability == 75 || width > 1 << 24 || ffn > 1 << 24) {
                EXPECT_FALSE(choice.execution->sparse);
              }
            }
          }
        }
      }
    }
  }
  const auto reason = [](int capability, int64_t width, int64_t ffn, FfnPolicy policy) {
    return choose_gpu_ffn(
               {.width = width, .ffn = ffn, .device = {.compute_capability = capability}},
               {.tokens = 4096, .policy = policy}, {})
        .reason;
  };
  EXPECT_EQ(reason(75, 2048, 5632, FfnPolicy::kRowFused),
            "row-fused was set, but the GPU is of compute capability 7.5");
  EXPECT_EQ(reason(90, 1 << 25, 5632, FfnPolicy::kTileUnion),
            "tile-union was set, but width 33554432 and FFN size 5632 are too large for it");
}

// The counts are those of a layer trained with 3e-4, with 29 active neurons per token.
TEST(GpuFfnRegistry, ScreensWhereAScreenPays) {
  GpuFfnLayer layer = kWidth2048;
  GpuFfnCall call{.tokens = 16384, .policy = FfnPolicy::kScreened};
  LayerActivity activity{.nnz_per_token = 29.0, .union_share = 1025.0 / 5632.0};
  const auto execution = [&] { return choose_gpu_ffn(layer, call, activity).execution->name; };
  EXPECT_EQ(execution(), "tile-union");  // no 8-bit gate
  layer.screen = ScreenBound::kProbabilistic;
  EXPECT_EQ(execution(), "screened");
  layer.screen = ScreenBound::kStrict;
  EXPECT_EQ(execution(), "tile-union");
  // What the candidates were counted to be replaces what they are expected to be.
  activity.candidate_share = 1155.0 / 5632.0;
  EXPECT_EQ(execution(), "screened");
  EXPECT_NE(choose_gpu_ffn(layer, call, activity).reason.find("1155 candidates in the union"),
            std::string::npos);
  activity.candidate_share = 1655.0 / 5632.0;
  EXPECT_EQ(execution(), "tile-union");
  activity.candidate_share = 609.0 / 5632.0;
  activity.union_share = 240.0 / 5632.0;
  EXPECT_EQ(execution(), "screened");

  call.tokens = 1023;
  EXPECT_NE(execution(), "screened");
  call.tokens = 4096;
  EXPECT_EQ(execution(), "screened");
  call.tokens = 16384;
  call.counts_rows = true;
  EXPECT_EQ(execution(), "screened");
  layer.gated = false;
  EXPECT_EQ(execution(), "tile-union");
  layer.gated = true;
  layer.width = 2056;
  EXPECT_EQ(execution(), "tile-union");
  layer.width = 2048;
  layer.device.compute_capability = 100;
  EXPECT_NE(execution(), "screened");
  layer.device.compute_capability = 90;
  for (const FfnPolicy policy : {FfnPolicy::kDense, FfnPolicy::kSparse, FfnPolicy::kTileUnion}) {
    call.policy = policy;
    EXPECT_NE(execution(), "screened");
  }
}

TEST(GpuFfnRegistry, SaysWhy) {
  EXPECT_EQ(choose_gpu_ffn(kWidth2048, {.tokens = 16384}, {}).reason, "nothing measured yet");
  EXPECT_EQ(choose_gpu_ffn(kWidth2048, {.tokens = 16384, .policy = FfnPolicy::kSparse}, {}).reason,
            "set by the caller: sparse, which runs 16384 tokens as tile-union here");
  EXPECT_EQ(choose_gpu_ffn(kWidth2048, {.tokens = 9, .policy = FfnPolicy::kTileUnion}, {}).reason,
            "set by the caller");
  EXPECT_EQ(choose_gpu_ffn(kWidth2048, {.tokens = 9, .policy = FfnPolicy::kSparse}, {}).reason,
            "set by the caller: sparse, which runs 9 tokens as small-batch here");
  EXPECT_EQ(choose_gpu_ffn(kWidth2048, {.tokens = 9}, {.nnz_per_token = 30.0}).reason,
            "30.0 of 5632 neurons active per token: small-batch estimated at 0.64 of dense");
  GpuFfnLayer silu = kWidth2048;
  silu.activation = Activation::kSilu;
  EXPECT_EQ(choose_gpu_ffn(silu, {.tokens = 9}, {}).reason, "silu leaves no zeros to skip");
}

TEST(GpuFfnRegistry, LayersWithBiasesRunDenseGemms) {
  GpuFfnLayer biased = kWidth2048;
  biased.biased = true;
  for (const int64_t tokens : {1, 8, 9, 64, 65, 16384}) {
    for (const FfnPolicy policy : {FfnPolicy::kAuto, FfnPolicy::kDense, FfnPolicy::kSparse}) {
      const GpuFfnCall call{.tokens = tokens, .policy = policy};
      const GpuFfnChoice choice = choose_gpu_ffn(biased, call, {.nnz_per_token = 3.0});
      EXPECT_EQ(choice.execution->name, "dense-gemms");
      EXPECT_EQ(choice.reason, "layers with biases run dense");
    }
    EXPECT_FALSE(gpu_ffn_takes_norm(biased, tokens));
  }
}

// Every execution by its name, for every number of tokens and every GPU: it runs exactly where it
// takes the call, and else dense, with a reason that says what was asked for.
TEST(GpuFfnRegistry, ANameRunsThatExecutionOrDense) {
  int64_t ran = 0, refused = 0;
  for (GpuFfnLayer layer : every_layer()) {
    layer.screen = ScreenBound::kStrict;
    for (const GpuFfnExecution& execution : gpu_ffn_registry()) {
      for (const int64_t tokens :
           {1, 2, 3, 4, 5, 6, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1023, 1024, 2048, 2049, 100000}) {
        for (const bool counts : {false, true}) {
          const GpuFfnCall call{.tokens = tokens,
                                .policy = {FfnPolicy::Kind::kNamed, execution.name},
                                .counts_rows = counts};
          const GpuFfnChoice choice = choose_gpu_ffn(layer, call, {.nnz_per_token = 3.0});
          const bool zeros = leaves_zeros(layer.activation);
          if (gpu_ffn_unsupported(execution, layer, call).empty() && zeros) {
            ++ran;
            EXPECT_EQ(choice.execution, &execution);
            EXPECT_EQ(choice.reason, "set by the caller");
          } else {
            ++refused;
            EXPECT_FALSE(choice.execution->sparse);
            EXPECT_TRUE(!zeros || choice.reason.starts_with(std::string(execution.name) + " was"))
                << choice.reason;
          }
        }
      }
    }
  }
  EXPECT_GT(ran, 1000);
  EXPECT_GT(refused, 1000);
}

TEST(GpuFfnRegistry, NamesAreDistinctAndPoliciesOfTheirOwn) {
  std::set<std::string_view> names;
  for (const GpuFfnExecution& execution : gpu_ffn_registry()) {
    EXPECT_TRUE(names.insert(execution.name).second) << execution.name;
    EXPECT_EQ(find_gpu_ffn(execution.name), &execution);
    EXPECT_NE(ffn_policy_names().find(execution.name), std::string::npos);
  }
  EXPECT_EQ(find_gpu_ffn("dense"), nullptr);
  EXPECT_EQ(find_gpu_ffn("tile"), nullptr);
}

// What a layer has that an execution does not know of keeps the execution out.
TEST(GpuFfnRegistry, LimitsAreSets) {
  const GpuFfnLimits relu{.activations = activation_set(Activation::kRelu)};
  GpuFfnLayer layer = kWidth2048;
  EXPECT_EQ(gpu_ffn_outside(relu, layer), "");
  layer.activation = Activation::kRelu2;
  EXPECT_EQ(gpu_ffn_outside(relu, layer), "it does not compute relu2");
  EXPECT_EQ(gpu_ffn_outside({}, layer), "");
  layer.activation = Activation::kGelu;
  EXPECT_EQ(gpu_ffn_outside(relu, layer), "gelu leaves no zeros to skip");
  EXPECT_EQ(gpu_ffn_outside({.activations = kAnyActivation}, layer), "");
  EXPECT_EQ(gpu_ffn_outside({.weights = 0}, kWidth2048), "it does not take bf16 weights");
}

TEST(GpuFfnRegistry, OneDescriptionOfALayer) {
  const GpuFfnLayer layer =
      gpu_ffn_layer({}, {.width = 2048, .ffn = 8192, .gated = false, .biased = true});
  EXPECT_EQ(layer.row_tokens, 8);
  EXPECT_FALSE(layer.gated);
  EXPECT_TRUE(layer.biased);
  // Rows of so many values no longer fit beside the weights of a skinny GEMM.
  EXPECT_EQ(gpu_row_tokens({}, 16384), 5);
  EXPECT_EQ(gpu_row_tokens({.shared_memory = 101376}, 2048), 8);
  EXPECT_EQ(gpu_row_tokens({.shared_memory = 101376}, 8192), 2);
  EXPECT_EQ(gpu_row_tokens({}, 200000), 0);
}

TEST(GpuFfnRegistry, RunsLayersInFp8DenseOrSparse) {
  const GpuFfnLayer layer{.width = 2048, .ffn = 5632, .weights = GpuWeights::kFp8};
  const LayerActivity light{.nnz_per_token = 3.0, .union_share = 0.02};
  const auto runs = [&](int64_t tokens, FfnPolicy policy) {
    return choose_gpu_ffn(layer, {.tokens = tokens, .policy = policy}, light).execution->name;
  };
  for (const int64_t tokens : {1, 9, 64, 65, 4096}) {
    EXPECT_EQ(runs(tokens, FfnPolicy::kDense), tokens <= 64 ? "dense-few-fp8" : "dense-gemms");
    EXPECT_EQ(runs(tokens, FfnPolicy::kSparse), tokens <= 64 ? "small-batch-fp8" : "tile-union");
  }
  for (const int64_t tokens : {5, 8, 64}) {
    EXPECT_EQ(runs(tokens, FfnPolicy::kAuto), "small-batch-fp8");
    const GpuFfnChoice full =
        choose_gpu_ffn(layer, {.tokens = tokens}, {.nnz_per_token = 5632.0, .union_share = 1.0});
    EXPECT_EQ(full.execution->name, "dense-few-fp8");
    // It does not count active neurons per token.
    const GpuFfnChoice counting = choose_gpu_ffn(
        layer, {.tokens = tokens, .policy = FfnPolicy::kSparse, .counts_rows = true}, light);
    EXPECT_EQ(counting.execution->name, "tile-union");
  }
  EXPECT_EQ(runs(4096, FfnPolicy::kAuto), "tile-union");
  GpuFfnLayer elsewhere = layer;
  elsewhere.device.compute_capability = 80;
  for (const GpuFfnExecution& row : gpu_ffn_registry()) {
    if (!row.sparse) continue;
    EXPECT_NE(gpu_ffn_unsupported(row, elsewhere, {.tokens = 9}), "") << row.name;
  }
}

// The pages show the registry as `twell doctor --executions` prints it.
TEST(GpuFfnRegistry, StandsInTheDocumentation) {
  for (const char* page : {"ARCHITECTURE.md", "docs/kernels.md"}) {
    std::ifstream file(std::string(TWELL_SOURCE_DIR "/") + page);
    std::stringstream text;
    text << file.rdbuf();
    EXPECT_NE(text.str().find(gpu_ffn_registry_table()), std::string::npos)
        << page << " lacks\n"
        << gpu_ffn_registry_table();
  }
}

}  // namespace
}  // namespace twell
