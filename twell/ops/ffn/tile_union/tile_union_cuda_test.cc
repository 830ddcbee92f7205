// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>
#include <vector>

#include "twell/base/buffer.h"
#include "twell/base/cuda_gtest.h"
#include "twell/base/rng.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/ffn/tile_union/tile_union_cuda.h"
#include "twell/ops/ffn/tile_union/tile_union_kernels.h"

namespace twell {
namespace {

// The kernels for Hopper, and those for every GPU.
using UpDown = void (*)(CudaContext&, const SparseUpDownCuda&, TileUnionWorkspace&);

struct UnionCase {
  const char* name;
  int64_t tokens, width, ffn;
  int32_t compression;
  double density;      // of plain rows
  int64_t full_every;  // every full_every-th row has all neurons active; 0: none
  bool gated = true;
  int64_t row_step = 1;  // every row_step-th row is compared
};

// Values as the device sees them: rounded to bf16.
std::vector<float> random_values(int64_t n, uint64_t stream, float scale) {
  std::vector<float> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    values[static_cast<size_t>(i)] =
        to_float(to_bf16(scale * normal(7, stream, static_cast<uint64_t>(i))));
  }
  return values;
}

// One problem on host and device. y is poisoned before every run.
struct UnionProblem {
  explicit UnionProblem(const UnionCase& c) : spec(c), shape{c.tokens, c.ffn, 256, c.compression} {
    x = random_values(c.tokens * c.width, 1, 1.0f);
    w_up = random_values(c.ffn * c.width, 2, 0.1f);
    w_down = random_values(c.ffn * c.width, 3, 0.1f);
    Buffer<float> gate(c.tokens * c.ffn);
    for (int64_t i = 0; i < gate.size(); ++i) {
      const bool full = c.full_every > 0 && i / c.ffn % c.full_every == 0;
      const auto index = static_cast<uint64_t>(i);
      if (full || uniform(7, 4, index) < c.density) {
        gate[i] = to_float(to_bf16(0.05f + uniform(7, 5, index)));
      }
    }
    std::vector<BF16> spill(static_cast<size_t>(shape.max_spill_slots() * shape.tile));
    std::vector<int32_t> row_nnz(static_cast<size_t>(shape.rows));
    packed_words.assign(static_cast<size_t>(shape.words()), 0xffffffffu);
    const TwellPacked host{shape, packed_words.data(), spill.data(), shape.max_spill_slots(),
                           row_nnz.data()};
    const int64_t slots = twell_pack_reference(gate.matrix(c.tokens, c.ffn), host);
    spill.resize(static_cast<size_t>(std::max<int64_t>(slots, 1) * shape.tile));
    rows.resize(static_cast<size_t>(c.tokens));
    for (int64_t row = 0; row < c.tokens; ++row) {
      row_nnz[static_cast<size_t>(row)] = 0;
      for (int64_t column = 0; column < c.ffn; ++column) {
        const float value = gate[row * c.ffn + column];
        if (value == 0.0f) continue;
        rows[static_cast<size_t>(row)].push_back({column, value});
        ++row_nnz[static_cast<size_t>(row)];
      }
    }
    find_unions();
    device_words = upload(packed_words);
    device_spill = upload(spill);
    device_nnz = upload(row_nnz);
    device_x = upload(to_bf16s(x));
    device_up = upload(to_bf16s(w_up));
    device_down = upload(to_bf16s(w_down));
  }

  // The unions that a call counts: of 128 consecutive rows without heavy ones, and of up to 128
  // heavy ones.
  void find_unions() {
    using tile_union::kHeavyFactor, tile_union::kHeavyFloor, tile_union::kTileTokens;
    std::vector<size_t> heavy;
    const auto add_union = [&](const std::vector<size_t>& tile) {
      std::set<int64_t> neurons;
      for (const size_t row : tile) {
        for (const auto& [neuron, value] : rows[row]) neurons.insert(neuron);
      }
      unions.push_back(neurons.size());
    };
    for (size_t begin = 0; begin < rows.size(); begin += kTileTokens) {
      const size_t end = std::min(begin + kTileTokens, rows.size());
      size_t sum = 0;
      for (size_t row = begin; row < end; ++row) sum += rows[row].size();
      const size_t most =
          std::max<size_t>(kHeavyFactor * sum / (end - begin), static_cast<size_t>(kHeavyFloor));
      std::vector<size_t> plain;
      for (size_t row = begin; row < end; ++row) {
        const bool apart = rows.size() > kTileTokens && rows[row].size() > most;
        (apart ? heavy : plain).push_back(row);
      }
      add_union(plain);
    }
    for (size_t begin = 0; begin < heavy.size(); begin += kTileTokens) {
      const size_t end = std::min(begin + kTileTokens, heavy.size());
      add_union({heavy.begin() + static_cast<std::ptrdiff_t>(begin),
                 heavy.begin() + static_cast<std::ptrdiff_t>(end)});
    }
  }

  void check_counts(unsigned long long calls) const {
    const ActivityCuda counted = download(activity)[0];
    unsigned long long nnz = 0;
    for (const auto& row : rows) nnz += row.size();
    EXPECT_EQ(counted.tokens, calls * rows.size());
    EXPECT_EQ(counted.nnz, calls * nnz);
    EXPECT_EQ(counted.unions, calls * unions.size());
    EXPECT_EQ(counted.union_neurons, calls * std::accumulate(unions.begin(), unions.end(), 0ull));
    EXPECT_EQ(counted.union_calls, calls);
    EXPECT_EQ(counted.largest_union, calls * *std::max_element(unions.begin(), unions.end()));
  }

  std::vector<__nv_bfloat16> run(CudaContext& ctx, const CudaStream& stream,
                                 TileUnionWorkspace& workspace, int graph_replays = 0,
                                 UpDown up_down = tile_union_up_down_cuda) {
    const auto y = poisoned<__nv_bfloat16>(spec.tokens * spec.width);
    SparseUpDownCuda problem;
    problem.tokens = spec.tokens;
    problem.width = spec.width;
    problem.ffn = spec.ffn;
    problem.gate = {shape, device_words.data(), device_spill.data(), shape.max_spill_slots(),
                    device_nnz.data()};
    problem.x = device_x.data();
    problem.w_up = spec.gated ? device_up.data() : nullptr;
    problem.w_down = device_down.data();
    problem.y = y.data();
    problem.activity = activity.data();
    if (graph_replays > 0) {
      replay_as_graph(stream, graph_replays, [&] { up_down(ctx, problem, workspace); });
    } else {
      up_down(ctx, problem, workspace);
      stream.synchronize();
    }
    return download(y);
  }

  // Compares with double precision, within the rounding of h and y to bf16 and of sums in f32.
  void check(const std::vector<__nv_bfloat16>& y) const {
    const auto width = static_cast<size_t>(spec.width);
    std::vector<double> want(width), bound(width);
    for (int64_t row = 0; row < spec.tokens; row += spec.row_step) {
      std::fill(want.begin(), want.end(), 0.0);
      std::fill(bound.begin(), bound.end(), 0.0);
      const float* x_row = x.data() + row * spec.width;
      const auto& active = rows[static_cast<size_t>(row)];
      for (const auto& [neuron, gate] : active) {
        const float* up = w_up.data() + neuron * spec.width;
        const float* down = w_down.data() + neuron * spec.width;
        double u = 1.0, u_size = 0.0;
        if (spec.gated) {
          u = 0.0;
          for (size_t d = 0; d < width; ++d) {
            u += static_cast<double>(x_row[d]) * up[d];
            u_size += std::fabs(static_cast<double>(x_row[d]) * up[d]);
          }
        }
        const double h = gate * u;
        const double h_error = (spec.gated ? std::ldexp(std::fabs(h), -8) : 0.0) +
                               gate * u_size * static_cast<double>(width) * std::ldexp(1.0, -23);
        for (size_t d = 0; d < width; ++d) {
          want[d] += h * down[d];
          bound[d] += h_error * std::fabs(down[d]) + std::fabs(h * down[d]) *
                                                         static_cast<double>(active.size()) *
                                                         std::ldexp(1.0, -23);
        }
      }
      for (size_t d = 0; d < width; ++d) {
        const double got = __bfloat162float(y[static_cast<size_t>(row) * width + d]);
        // Written this way, so that NaN fails.
        ASSERT_TRUE(std::fabs(got - want[d]) <= bound[d] + std::ldexp(std::fabs(want[d]), -8))
            << spec.name << " row " << row << " column " << d << ": " << got << ", expected "
            << want[d] << " within " << bound[d];
      }
    }
  }

  UnionCase spec;
  TwellShape shape;
  std::vector<float> x, w_up, w_down;
  std::vector<std::vector<std::pair<int64_t, float>>> rows;
  std::vector<unsigned long long> unions;  // their sizes
  std::vector<uint32_t> packed_words;
  DeviceBuffer<ActivityCuda> activity = upload(std::vector<ActivityCuda>(1));
  DeviceBuffer<uint32_t> device_words;
  DeviceBuffer<BF16> device_spill;
  DeviceBuffer<int32_t> device_nnz;
  DeviceBuffer<__nv_bfloat16> device_x, device_up, device_down;
};

class TileUnionCudaTest : public testing::TestWithParam<UnionCase> {};

TEST_P(TileUnionCudaTest, GivesTheDenseResultAndRepeatsBitForBit) {
  TWELL_HOPPER_TEST();
  UnionProblem problem(GetParam());
  TileUnionWorkspace workspace(problem.spec.tokens, problem.spec.ffn);
  const auto once = problem.run(ctx, stream, workspace);
  problem.check(once);
  problem.check_counts(1);
  const auto again = problem.run(ctx, stream, workspace);
  problem.check_counts(2);
  EXPECT_EQ(std::memcmp(once.data(), again.data(), once.size() * sizeof(once[0])), 0);
}

class PortableUnionCudaTest : public testing::TestWithParam<UnionCase> {};

TEST_P(PortableUnionCudaTest, GivesTheDenseResultAndRepeatsBitForBit) {
  TWELL_GPU_TEST();
  UnionProblem problem(GetParam());
  TileUnionWorkspace workspace(problem.spec.tokens, problem.spec.ffn);
  const auto once = problem.run(ctx, stream, workspace, 0, portable_union_up_down_cuda);
  problem.check(once);
  problem.check_counts(1);
  const auto again = problem.run(ctx, stream, workspace, 2, portable_union_up_down_cuda);
  problem.check_counts(3);
  EXPECT_EQ(std::memcmp(once.data(), again.data(), once.size() * sizeof(once[0])), 0);
}

const auto kCases = testing::Values(
    UnionCase{"one token", 1, 64, 256, 8, 0.1, 0}, UnionCase{"127", 127, 128, 512, 8, 0.05, 0},
    UnionCase{"129", 129, 264, 1000, 8, 0.02, 0},
    UnionCase{"non-gated", 129, 264, 1000, 8, 0.02, 0, false},
    UnionCase{"nothing fires", 300, 256, 1000, 8, 0.0, 0},
    UnionCase{"everything fires", 200, 128, 1000, 8, 1.0, 0},
    UnionCase{"dense", 300, 512, 1024, 4, 0.3, 0, true, 3},
    UnionCase{"more than is listed", 300, 256, 1000, 4, 0.1, 0},
    UnionCase{"heavy rows", 1000, 128, 2048, 8, 0.01, 100},
    UnionCase{"many heavy rows", 1000, 72, 1024, 2, 0.01, 5},
    UnionCase{"wide F", 130, 64, 8200, 8, 0.005, 50},
    UnionCase{"F past 65536", 130, 64, 66000, 8, 0.001, 70},
    UnionCase{"many tokens", 65537, 64, 264, 8, 0.01, 1000, true, 17});

std::string union_case_name(const testing::TestParamInfo<UnionCase>& test) {
  std::string name = test.param.name;
  for (char& c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(Shapes, TileUnionCudaTest, kCases, union_case_name);
INSTANTIATE_TEST_SUITE_P(Shapes, PortableUnionCudaTest, kCases, union_case_name);

// y += of two calls, rows of y in another order, a squared gate, and a ReLU on both.
TEST(PortableUnionCuda, IsTileUnionWithEveryOption) {
  TWELL_HOPPER_TEST();
  UnionProblem problem({"options", 300, 264, 1000, 8, 0.03, 90});
  TileUnionWorkspace workspace(300, 1000);
  std::vector<int32_t> rows(300);
  for (int i = 0; i < 300; ++i) rows[static_cast<size_t>(i)] = (i * 7 + 3) % 300;
  const auto device_rows = upload(rows);
  for (int options = 0; options < 16; ++options) {
    const auto run = [&](UpDown up_down) {
      const auto y = upload(to_bf16s(problem.x));
      SparseUpDownCuda call;
      call.tokens = 300;
      call.width = 264;
      call.ffn = 1000;
      call.gate = {problem.shape, problem.device_words.data(), problem.device_spill.data(),
                   problem.shape.max_spill_slots(), problem.device_nnz.data()};
      call.x = problem.device_x.data();
      call.w_up = (options & 8) != 0 ? nullptr : problem.device_up.data();
      call.w_down = problem.device_down.data();
      call.y = y.data();
      call.add = (options & 1) != 0;
      call.squared = (options & 2) != 0;
      call.up_relu = (options & 4) != 0 && call.w_up != nullptr;
      call.y_rows = (options & 1) != 0 ? device_rows.data() : nullptr;
      up_down(ctx, call, workspace);
      stream.synchronize();
      return download(y);
    };
    const auto want = run(tile_union_up_down_cuda), got = run(portable_union_up_down_cuda);
    double difference = 0.0, size = 0.0;
    for (size_t i = 0; i < want.size(); ++i) {
      const double a = __bfloat162float(want[i]), b = __bfloat162float(got[i]);
      difference += (a - b) * (a - b);
      size += a * a;
    }
    EXPECT_LE(std::sqrt(difference), std::ldexp(std::sqrt(size), -9)) << options;
  }
}

TEST(TileUnionCuda, ReplaysAsAGraphInALargerWorkspace) {
  TWELL_HOPPER_TEST();
  UnionProblem problem({"graph", 500, 256, 1536, 8, 0.02, 60});
  TileUnionWorkspace exact(500, 1536), larger(4000, 5632);
  const auto direct = problem.run(ctx, stream, exact);
  const auto replayed = problem.run(ctx, stream, larger, 3);
  problem.check(replayed);
  problem.check_counts(1 + 3);
  EXPECT_EQ(std::memcmp(direct.data(), replayed.data(), direct.size() * sizeof(direct[0])), 0);
}

TEST(TileUnionCuda, RefusesWhatItCannotDo) {
  TWELL_HOPPER_TEST();
  UnionProblem problem({"small", 100, 64, 256, 8, 0.1, 0});
  TileUnionWorkspace workspace(64, 256);
  EXPECT_THROW(problem.run(ctx, stream, workspace), Error);
  SparseUpDownCuda odd;
  odd.tokens = 4;
  odd.width = 20;
  odd.ffn = 256;
  EXPECT_THAT([&] { tile_union_up_down_cuda(ctx, odd, workspace); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("width 20")));
}

}  // namespace
}  // namespace twell
