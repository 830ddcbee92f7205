// SPDX-License-Identifier: Apache-2.0
// Inputs are small integers, so that every sum is exact in f32 and y has one right answer to the
// bit: only the roundings of h and of y to bf16 are left, and the test makes the same ones.
#include "twell/ops/ffn/row_fused/row_fused_cuda.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <functional>
#include <vector>

#include "twell/base/buffer.h"
#include "twell/base/cuda_gtest.h"
#include "twell/base/rng.h"
#include "twell/base/test_bf16.h"

namespace twell {
namespace {

// Whether (row, neuron) is active.
using Pattern = std::function<bool(int64_t row, int64_t neuron)>;

struct RowFusedProblem {
  RowFusedProblem(int64_t tokens_in, int64_t width_in, int64_t ffn_in, int32_t compression,
                  const Pattern& active, bool gated_in = true)
      : tokens(tokens_in),
        width(width_in),
        ffn(ffn_in),
        gated(gated_in),
        shape{tokens_in, ffn_in, 256, compression},
        x(random_signs(tokens * width, 1)),
        w_up(random_signs(ffn * width, 2)),
        w_down(random_signs(ffn * width, 3)),
        rows(static_cast<size_t>(tokens)) {
    Buffer<float> gate(tokens * ffn);
    std::vector<int32_t> row_nnz(static_cast<size_t>(tokens));
    for (int64_t row = 0; row < tokens; ++row) {
      for (int64_t neuron = 0; neuron < ffn; ++neuron) {
        if (!active(row, neuron)) continue;
        const auto value = static_cast<float>(1 + (row * 7 + neuron * 13) % 50);
        gate[row * ffn + neuron] = value;
        rows[static_cast<size_t>(row)].push_back({neuron, value});
      }
      row_nnz[static_cast<size_t>(row)] =
          static_cast<int32_t>(rows[static_cast<size_t>(row)].size());
    }
    std::vector<uint32_t> words(static_cast<size_t>(shape.words()), 0xffffffffu);
    std::vector<BF16> spill(static_cast<size_t>(shape.max_spill_slots() * shape.tile));
    twell_pack_reference(gate.matrix(tokens, ffn),
                         TwellPacked{shape, words.data(), spill.data(), shape.max_spill_slots()});
    device_words = upload(words);
    device_spill = upload(spill);
    device_nnz = upload(row_nnz);
    device_x = upload(to_bf16s(x));
    device_up = upload(to_bf16s(w_up));
    device_down = upload(to_bf16s(w_down));
  }

  SparseUpDownCuda problem(__nv_bfloat16* y) const {
    return {tokens,
            width,
            ffn,
            {shape, device_words.data(), device_spill.data(), shape.max_spill_slots(),
             device_nnz.data()},
            device_x.data(),
            gated ? device_up.data() : nullptr,
            device_down.data(),
            y};
  }

  std::vector<__nv_bfloat16> run(CudaContext& ctx, const CudaStream& stream,
                                 RowFusedWorkspace& workspace, int graph_replays = 0) const {
    const auto y = poisoned<__nv_bfloat16>(tokens * width);
    const auto call = [&] { row_fused_up_down_cuda(ctx, problem(y.data()), workspace); };
    if (graph_replays > 0) {
      replay_as_graph(stream, graph_replays, call);
    } else {
      call();
      stream.synchronize();
    }
    return download(y);
  }

  void check(const std::vector<__nv_bfloat16>& y, int64_t row_step = 1) const {
    std::vector<float> want(static_cast<size_t>(width));
    for (int64_t row = 0; row < tokens; row += row_step) {
      std::fill(want.begin(), want.end(), 0.0f);
      const int8_t* x_row = x.data() + row * width;
      for (const auto& [neuron, gate] : rows[static_cast<size_t>(row)]) {
        float h = gate;
        if (gated) {
          int dot = 0;
          for (int64_t d = 0; d < width; ++d) {
            dot += x_row[d] * w_up[static_cast<size_t>(neuron * width + d)];
          }
          h = rounded_to_bf16(gate * static_cast<float>(dot));
        }
        const int8_t* down = w_down.data() + neuron * width;
        for (int64_t d = 0; d < width; ++d) want[static_cast<size_t>(d)] += h * down[d];
      }
      for (int64_t d = 0; d < width; ++d) {
        ASSERT_EQ(__bfloat162float(y[static_cast<size_t>(row * width + d)]),
                  rounded_to_bf16(want[static_cast<size_t>(d)]))
            << "row " << row << " column " << d;
      }
    }
  }

  int64_t tokens, width, ffn;
  bool gated;
  TwellShape shape;
  std::vector<int8_t> x, w_up, w_down;
  std::vector<std::vector<std::pair<int64_t, float>>> rows;
  DeviceBuffer<uint32_t> device_words;
  DeviceBuffer<BF16> device_spill;
  DeviceBuffer<int32_t> device_nnz;
  DeviceBuffer<__nv_bfloat16> device_x, device_up, device_down;
};

struct RowFusedCase {
  const char* name;
  int64_t tokens, width, ffn;
  int32_t compression;
  float density;       // of plain rows
  int64_t full_every;  // every full_every-th row has all neurons active; 0: none
  bool gated = true;
  int64_t row_step = 1;  // every row_step-th row is compared
};

class RowFusedCudaTest : public testing::TestWithParam<RowFusedCase> {};

TEST_P(RowFusedCudaTest, GivesTheDenseResultToTheBitAndRepeats) {
  TWELL_GPU_TEST();
  const RowFusedCase& c = GetParam();
  const RowFusedProblem problem(
      c.tokens, c.width, c.ffn, c.compression,
      [&](int64_t row, int64_t neuron) {
        return (c.full_every > 0 && row % c.full_every == 0) ||
               uniform(7, 4, static_cast<uint64_t>(row * c.ffn + neuron)) < c.density;
      },
      c.gated);
  RowFusedWorkspace workspace(ctx, c.tokens, c.width);
  const auto once = problem.run(ctx, stream, workspace);
  problem.check(once, c.row_step);
  const auto again = problem.run(ctx, stream, workspace);
  EXPECT_EQ(std::memcmp(once.data(), again.data(), once.size() * sizeof(once[0])), 0);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, RowFusedCudaTest,
    testing::Values(RowFusedCase{"one token", 1, 8, 8, 8, 0.5f, 0},
                    RowFusedCase{"one full token", 1, 320, 5632, 8, 0.0f, 1},
                    RowFusedCase{"127", 127, 128, 512, 8, 0.05f, 0},
                    RowFusedCase{"129", 129, 264, 1000, 8, 0.02f, 0},
                    RowFusedCase{"non gated", 129, 520, 1000, 8, 0.02f, 50, false},
                    RowFusedCase{"nothing fires", 300, 256, 1000, 8, 0.0f, 0},
                    RowFusedCase{"everything fires", 300, 128, 1000, 8, 1.0f, 0},
                    RowFusedCase{"model", 200, 2048, 5632, 8, 0.003f, 97},
                    RowFusedCase{"model heavy", 20, 2048, 5632, 4, 0.05f, 0},
                    RowFusedCase{"wide", 50, 2056, 520, 8, 0.02f, 20},
                    RowFusedCase{"wider", 33, 4104, 520, 2, 0.02f, 8},
                    RowFusedCase{"heavy rows", 1000, 72, 2048, 8, 0.01f, 100},
                    RowFusedCase{"many heavy rows", 1000, 72, 1024, 2, 0.01f, 3},
                    RowFusedCase{"F past 65536", 130, 64, 70000, 8, 0.0005f, 70},
                    RowFusedCase{"many tokens", 65537, 64, 264, 8, 0.01f, 1000, true, 17}),
    [](const testing::TestParamInfo<RowFusedCase>& test) {
      std::string name = test.param.name;
      for (char& c : name) {
        if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
      }
      return name;
    });

// Rows of every size around the limits of a tile's capacity and of a light row.
TEST(RowFusedCuda, TilesAndRowsAroundTheirLimits) {
  TWELL_GPU_TEST();
  for (const int32_t compression : {8, 4, 2}) {
    const int64_t capacity = 256 / compression - 1;
    const int64_t occupancies[] = {0,  1,  capacity - 1, capacity, capacity + 1, 62,
                                   63, 64, 65,           255,      256};
    const RowFusedProblem problem(61, 136, 768, compression, [&](int64_t row, int64_t neuron) {
      // One tile of three is filled in most rows, all three in the others.
      const int64_t tile = neuron / 256;
      const int64_t fill =
          row % 5 == 0 || tile == row % 3 ? occupancies[(row + tile) % 11] : int64_t{0};
      return (neuron * 37 + row * 11) % 256 < fill;
    });
    RowFusedWorkspace workspace(ctx, 61, 136);
    problem.check(problem.run(ctx, stream, workspace));
  }
}

TEST(RowFusedCuda, ReplaysAsAGraphInALargerWorkspace) {
  TWELL_GPU_TEST();
  const auto active = [](int64_t row, int64_t neuron) {
    return row % 60 == 0 || uniform(7, 5, static_cast<uint64_t>(row * 1536 + neuron)) < 0.02f;
  };
  const RowFusedProblem problem(500, 256, 1536, 8, active);
  RowFusedWorkspace exact(ctx, 500, 256), larger(ctx, 4000, 4096);
  const auto direct = problem.run(ctx, stream, exact);
  const auto replayed = problem.run(ctx, stream, larger, 3);
  problem.check(replayed);
  EXPECT_EQ(std::memcmp(direct.data(), replayed.data(), direct.size() * sizeof(direct[0])), 0);
}

TEST(RowFusedCuda, RefusesWhatItCannotDo) {
  TWELL_GPU_TEST();
  const RowFusedProblem problem(100, 64, 256, 8,
                                [](int64_t, int64_t neuron) { return neuron == 3; });
  RowFusedWorkspace short_workspace(ctx, 64, 64), narrow(ctx, 100, 32);
  EXPECT_THROW(problem.run(ctx, stream, short_workspace), Error);
  EXPECT_THROW(problem.run(ctx, stream, narrow), Error);
  SparseUpDownCuda odd;
  odd.tokens = 4;
  odd.width = 20;
  odd.ffn = 256;
  EXPECT_THAT([&] { row_fused_up_down_cuda(ctx, odd, short_workspace); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("width 20")));
}

}  // namespace
}  // namespace twell
