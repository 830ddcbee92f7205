// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/costs.h"

#include <algorithm>
#include <cmath>

#include "twell/ops/ffn/medium_batch/medium_batch_schedule.h"

namespace twell::ffn_costs {
namespace {

// Fitted by bench/fit_gpu_costs.py, which prints these numbers, to ten shapes on an H200 and to
// three on an H100 (bench/results/2026-11-23-h100-sweep.txt). Times are in microseconds on 132
// SMs at 1.98 GHz. Memory is read at a share of the device's bandwidth, more than 1 where a part of
// the reading hides behind the times. So other devices scale with their SMs, clock, memory and, in
// dense GEMMs, tensor cores.
constexpr double kFitSms = 132.0, kFitGhz = 1.98, kFitGemmFlops = 4096.0;
struct GpuCosts {
  // Three GEMMs; a power mean joins their compute and memory bounds. Long ones run at the power
  // limit: slower by `throttle` for each factor e beyond 500 us, at most e^2.
  struct {
    double flops = 811.7;  // TFLOP/s
    double bytes = 0.86;   // weights
    double mean = 2.827;   // exponent
    double throttle = 0.07922;
    double mma_flops = 1.15;     // by mma.sync GEMMs reach more of its rate,
    double mma_launches = -2.0;  // and take less between them, in CUDA graphs, as decoding runs
    double elementwise = 1.161;  // the gate product, partly from the L2
    double launches = 13.77;
  } dense;
  struct {
    double launches = 7.606, bytes = 0.7822;
  } dense_rows;
  struct {
    double launches = 4.568, token = 0.0434, bytes = 0.7741;
  } dense_batch;
  // The same in e4m3, as three kernels.
  struct {
    double launches = 6.0, token = 0.0434, bytes = 0.7741;
  } dense_few_bytes;
  // 64 active neurons of a CTA of `down` in e4m3, whose rows are widened: with it and the launches
  // above, sparse and dense are as far apart as in decoding 2b with 5 to 64 sequences
  // (bench/results/2026-11-27-h200-decode-8bit.txt).
  double byte_down_step = 1.1;
  // A CTA reads its neurons in passes, in groups of 16 rows of at most 2,048 columns. Each group
  // waits for the one whose shared memory it takes.
  struct {
    double launches = 1.915, pass = 3.875, group = 1.193;
    double active = 0.405;        // per active neuron of a CTA
    double first_bytes = 1.928;   // the first weight
    double active_bytes = 0.426;  // rows of the others, each read by itself
  } decode;
  // Clusters stream the rows of their neurons and leave parts of y. Fitted to the shapes of
  // bench/results/2026-11-27-h200-row-stream.csv.
  struct {
    double launches = 5.448, token = 0.3946;
    double bytes = 0.8363;
  } stream;
  // A cluster of four CTAs reads its neurons in passes, in chunks of 64 columns per CTA.
  struct {
    double launches = 2.329, round = 4.042, chunk = 0.5241;
    double x = 0.154;          // per chunk where x does not stay in shared memory
    double down_step = 0.604;  // per 64 active neurons of a CTA of `down`
    double first_bytes = 1.676, active_bytes = 1.2;
  } small;
  // Three kernels, each with a fixed time per round of CTAs.
  struct {
    double gate_round = 2.117;
    double gate_weight = 3.875e-5;  // per weight of a CTA
    double up_round = 6.87;
    double up_work = 5.593e-5;  // per weight of a CTA
    double down_round = 0.8404;
    double down_neuron = 0.00337;
    double down_work = 2.677e-5;  // per neuron, for each of its tokens and columns in a CTA
    double image = 3.956e-6;      // per token and neuron of the union
    double tile = 0.3649;
    double first_bytes = 1.748, row_bytes = 1.431;
    double few_row_bytes = 0.63;  // of up to 64 tokens, timed with weights that no call before read
  } medium;
  struct {
    double launches = 20.69;
    double gate_step = 0.6837;   // 256 x 256 x 64 products on two SMs
    double up_block = 0.2243;    // 64 columns of a block of an item
    double entry = 0.01204;      // writing an active value to its place
    double down_block = 0.8253;  // 128 tokens x 256 columns x 64 neurons
    double tile = 0.1781;
    double throttle = 0.03317;    // slower for each factor e beyond 300 us
    double heavy = 1.811;         // tiles of heavy rows, for each doubling of the tiles,
    double heavy_block = 0.8573;  // and per block that the largest union has above the mean
    double missed_bytes = 2.638;  // rows of w_up where a union's do not stay in the L2
    double first_bytes = 1.793;   // the first weight
    double images = 22.5;         // without a gate: compacting activations instead of up
  } tile_union;
  // The kernels for every GPU: estimates that no measurement stands behind yet.
  struct {
    double launches = 30.0;
    double share = 0.7;  // of the rate of mma.sync that products reach
    double tile = 0.15;
  } portable_union;
  // Fitted to three widths with 1 and 8 tokens (bench/results/2026-11-27-h200-portable.txt).
  struct {
    double launches = 6.0, first_bytes = 0.8;
    double token = 0.52, token_weight = 1.66e-7;  // of each token after the first
    double active = 0.01, active_bytes = 1.6;
  } portable_rows;
  // Fitted to three widths with 1 to 32 tokens (the same file), in 1, 2 or 4 tiles of 8 tokens.
  struct {
    double launches = 6.0, tile = 1.5;
    double first_bytes = 0.88, tile_weight = 1.51e-7;
    double up_bytes = 1.0;
    double down_neuron = 0.004, down_tiles = 1.4;  // of several tiles so many times as long
    double down_bytes = 0.8;
  } portable_batch;
  // Tile-union's `down`, behind an 8-bit gate GEMM and a product of gate and up. Fitted to five
  // shapes of 1,024 to 16,384 tokens on an H200
  // (bench/results/2026-11-24-h200-screened-shapes.txt): within 10%, root mean square 4.6%.
  struct {
    double launches = 17.2;
    double gate_share = 0.589;     // of the gate GEMM's time
    double gate_up_block = 0.343;  // 64 columns of a block of an item, both products
    double throttle = 0.067;       // slower for each factor e beyond 300 us
    double rotated_bytes = 2.8;    // per value of x: what rotating it adds to the norm
    double candidates = 1.25,
           strict_candidates = 2.5;  // per active neuron of a union, if unmeasured
  } screened;
  // Fitted to width 2048 and FFN size 5632 alone.
  struct {
    double row_bytes = 8.0e6 / kFitSms / kFitGhz;  // weight rows gathered from the L2
    double tail = 20.0;                            // lists, and the tail of long rows
    double missed_bytes = 0.35;                    // rows that are not in the L2
  } row_fused;
  // gate_gemm_sm80's share of the rate of mma.sync (bench/results/2026-11-27-h200-portable.txt).
  double portable_gate = 0.74;
  double bandwidth = 0.8135;  // share that is read, unless stated otherwise
};
constexpr GpuCosts kCosts;

constexpr double kDenseRows = 64.0;        // tokens that cuBLASLt's tiles come in
constexpr double kDecodeNeurons = 48.0;    // neurons of a CTA in a pass of decode rows,
constexpr double kDecodeGroup = 16.0;      // in groups of a tensor core's rows,
constexpr double kDecodeColumns = 2048.0;  // of at most so many columns
constexpr double kSmallNeurons = 192.0;    // neurons of a cluster in a pass of a small batch,
constexpr double kSmallGroup = 64.0;       // in groups
constexpr double kSmallChunk = 256.0;      // columns that a cluster reads at a time
constexpr double kSmallWidth = 2048.0;     // up to which x stays in shared memory
constexpr int64_t kSmallTokens = 64;
constexpr double kClusterSms = 4.0;
constexpr double kMediumGroup = 16.0;      // neurons of a medium batch's union come in groups,
constexpr double kMediumChunk = 192.0;     // and of `up` in chunks of at most so many
constexpr double kMediumGate = 96.0;       // with fewer neurons of a CTA, the gate
constexpr double kMediumUp = 32.0;         // and `up` wait for x
constexpr double kTile = 128.0;            // tokens of a tile-union tile
constexpr double kGateTile = 256.0;        // tokens and neurons of a gate GEMM tile of two SMs
constexpr double kStep = 64.0;             // columns of a k-step
constexpr double kBlock = 64.0;            // neurons of a block of a union,
constexpr double kUpBlocks = 3.0;          // of which an `up` work item of one SM has so many,
constexpr double kUpItems = 128.0;         // or fewer, where there are not as many items as these
constexpr double kDownColumns = 256.0;     // columns of a `down` work item
constexpr double kPortableUpBlocks = 4.0;  // of an `up` item of the portable kernel
constexpr double kSpilledShare = 1.0 / 16.0;  // with more active, many tiles are spilled
constexpr double kL2Bytes = 50e6;             // of an H100 and an H200

struct Sizes {
  double m, d, f, sms, ghz, bandwidth;
  Sizes(const GpuFfnLayer& layer, int64_t tokens)
      : m(static_cast<double>(tokens)),
        d(static_cast<double>(layer.width)),
        f(static_cast<double>(layer.ffn)),
        sms(static_cast<double>(std::max<int64_t>(layer.device.multiprocessors, 2))),
        ghz(layer.device.clock_ghz),
        bandwidth(layer.device.bandwidth) {}
  // Microseconds of an SM's work, by its clock.
  double work(double fitted_us) const { return fitted_us * kFitGhz / ghz; }
  double rate(double per_sm_and_ghz) const { return per_sm_and_ghz * sms * ghz; }
  double move(double bytes, double share = kCosts.bandwidth) const {
    return bytes / (share * bandwidth);
  }
};

double dense_gemm(const GpuFfnLayer& layer, const Sizes& s) {
  const auto& costs = kCosts.dense;
  const double rows = std::ceil(s.m / kDenseRows) * kDenseRows;
  const GpuDevice& device = layer.device;
  const double cores = device.gemm_flops / kFitGemmFlops *
                       (device.gemm_flops > device.mma_flops ? 1.0 : costs.mma_flops);
  const double flops =
      2.0 * rows * s.d * s.f / (s.rate(costs.flops * 1e6 / kFitSms / kFitGhz) * cores);
  const double bytes = s.move(2.0 * s.d * s.f, costs.bytes);
  const double mean =
      std::pow(std::pow(flops, costs.mean) + std::pow(bytes, costs.mean), 1.0 / costs.mean);
  return mean * (1.0 + costs.throttle * std::clamp(std::log(flops / 500.0), 0.0, 2.0));
}

double all_weights(const GpuFfnLayer& layer, const Sizes& s) {
  return (layer.gated ? 3.0 : 2.0) * 2.0 * s.d * s.f;
}

// Items in rounds over the SMs, each of so many operations at a share of the rate of mma.sync. Half
// an item's time is waited for at the end.
double mma_items(const GpuFfnLayer& layer, const Sizes& s, double items, double flops,
                 double share) {
  const double rate = s.rate(1e3 * layer.device.mma_flops * share) / s.sms;
  return std::max(std::ceil(items / s.sms), items / s.sms + 0.5) * flops / rate;
}

// Hopper's kernel, or on other GPUs the one on mma.sync.
double packed_gate(const GpuFfnLayer& layer, const Sizes& s) {
  if (layer.device.compute_capability != 90) {
    const double items = std::ceil(s.m / kTile) * std::ceil(s.f / kGateTile);
    const double product = 2.0 * kTile * kGateTile * s.d;
    return std::max(mma_items(layer, s, items, product, kCosts.portable_gate),
                    s.move(2.0 * s.d * s.f));
  }
  const double tiles = std::ceil(s.m / kGateTile) * std::ceil(s.f / kGateTile);
  const double pairs = std::floor(s.sms / 2.0);
  const double tile = s.work(kCosts.tile_union.gate_step * std::ceil(s.d / kStep));
  // A last round with work for at most half of the pairs of SMs is cut in two.
  const double rounds = 0.5 * std::ceil(2.0 * tiles / pairs);
  return std::max(rounds * tile, s.move(2.0 * s.d * s.f));
}

// Neurons active for any of n tokens, by how unions were seen to grow.
double grown_union(const Sizes& s, const LayerActivity& activity, double n) {
  const double density = std::min(activity.nnz_per_token / s.f, 1.0);
  return s.f * (1.0 - std::pow(1.0 - density, std::pow(n, activity.union_growth)));
}

// Neurons of a tile's union. Those that were counted are of 128 tokens.
double tile_neurons(const Sizes& s, const LayerActivity& activity) {
  if (s.m <= static_cast<double>(kSmallTokens)) return grown_union(s, activity, s.m);
  return activity.union_share >= 0.0 ? activity.union_share * s.f
                                     : grown_union(s, activity, std::min(s.m, kTile));
}

// Neurons of the largest union of the call. Where it is not known, the mean, or twice the mean, as
// in captured layers, where heavy rows have tiles of their own. The mean of calls with many tiles
// may be above the largest union of others.
double largest_neurons(const Sizes& s, const LayerActivity& activity) {
  const double mean = tile_neurons(s, activity);
  if (s.m <= kTile) return mean;
  if (activity.largest_union < 0.0 && activity.extra_tiles > 0.0) return std::min(2.0 * mean, s.f);
  return std::max(activity.largest_union * s.f, mean);
}

// Bytes of the rows of w_up and w_down that are read: those of neurons active for any token.
double active_rows(const GpuFfnLayer& layer, const Sizes& s, double active) {
  return (layer.gated ? 2.0 : 1.0) * 2.0 * s.d * active;
}

}  // namespace

double dense_gemms(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity&) {
  const Sizes s(layer, tokens);
  const auto& costs = kCosts.dense;
  const bool mma = layer.device.gemm_flops <= layer.device.mma_flops;
  const double launches = costs.launches + (mma ? costs.mma_launches : 0.0);
  if (!layer.gated) return 2.0 * dense_gemm(layer, s) + 0.5 * launches;
  return 3.0 * dense_gemm(layer, s) + s.move(3.0 * 2.0 * s.m * s.f, costs.elementwise) + launches;
}

double dense_rows(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity&) {
  const Sizes s(layer, tokens);
  const auto& costs = kCosts.dense_rows;
  return costs.launches + s.move(all_weights(layer, s), costs.bytes);
}

double dense_batch(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity&) {
  const Sizes s(layer, tokens);
  const auto& costs = kCosts.dense_batch;
  return costs.launches + s.work(costs.token * s.m) + s.move(all_weights(layer, s), costs.bytes);
}

double dense_few_bytes(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity&) {
  const Sizes s(layer, tokens);
  const auto& costs = kCosts.dense_few_bytes;
  return costs.launches + s.work(costs.token * s.m) +
         s.move(0.5 * all_weights(layer, s), costs.bytes);
}

double tile_union(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity) {
  const Sizes s(layer, tokens);
  const auto& costs = kCosts.tile_union;
  const double neurons = tile_neurons(s, activity), plain = std::ceil(s.m / kTile);
  const double tiles = std::max(std::round(s.m / kTile * (1.0 + activity.extra_tiles)), plain);
  const double blocks = std::min(neurons + 32.0, s.f) / kBlock;  // whole ones in the mean
  const double most = std::min(largest_neurons(s, activity) + 32.0, s.f) / kBlock;
  const double items = std::max(std::ceil(std::ceil(blocks) / kUpBlocks),
                                std::min(std::ceil(blocks), std::floor(kUpItems / plain)));
  // An item multiplies while a warpgroup writes the gate's values of its neurons to their places.
  const double product = std::ceil(s.d / kStep) * costs.up_block * blocks / items;
  const double entries = kTile * std::min(activity.nnz_per_token, s.f * kSpilledShare) / items;
  const double up = layer.gated ? std::max(tiles * items / s.sms, 1.0) *
                                      s.work(std::max(product, costs.entry * entries))
                                : costs.images;
  // Rows that tiles read in turn come from memory where a union's are larger than the L2.
  const double rows = 2.0 * s.d * neurons;
  const double missed = std::clamp(rows / (2.0 * kL2Bytes) - 1.0, 0.0, 1.0);
  // A single round takes as long as its largest union. Of more, half a mean item's time is waited
  // for at the end, because unions differ in size.
  const double rounds = tiles * std::ceil(s.d / kDownColumns) / s.sms;
  const double down = s.work(
      costs.down_block * std::max(rounds > 1.0 ? (std::ceil(rounds) + 0.5) * blocks : 0.0, most));
  const double products = packed_gate(layer, s) + up +
                          s.move(layer.gated ? tiles * rows * missed : 0.0, costs.missed_bytes) +
                          down;
  // Tiles of heavy rows come last. The more rounds, the more of this is hidden.
  const double heavy = tiles > plain
                           ? costs.heavy * std::log2(tiles) +
                                 costs.heavy_block * (most - blocks) / std::max(rounds, 1.0)
                           : 0.0;
  return products * (1.0 + costs.throttle * std::max(std::log(products / 300.0), 0.0)) +
         costs.launches + s.work(costs.tile * tiles + heavy) +
         s.move(2.0 * s.d * s.f, costs.first_bytes);
}

double portable_union(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity) {
  const Sizes s(layer, tokens);
  const auto& costs = kCosts.portable_union;
  const double neurons = tile_neurons(s, activity), plain = std::ceil(s.m / kTile);
  const double tiles = std::max(std::round(s.m / kTile * (1.0 + activity.extra_tiles)), plain);
  const double blocks = std::min(neurons + 32.0, s.f) / kBlock;
  const auto products = [&](double items, double flops) {
    return mma_items(layer, s, items, flops, costs.share);
  };
  const double chunks = std::ceil(blocks / kPortableUpBlocks);
  const double up =
      layer.gated ? products(tiles * chunks, 2.0 * kTile * kBlock * blocks / chunks * s.d) : 0.0;
  const double down =
      products(tiles * std::ceil(s.d / kDownColumns), 2.0 * kTile * kDownColumns * kBlock * blocks);
  // The gate's image is cleared, written, read and written again.
  const double images = s.move((layer.gated ? 4.0 : 2.0) * 2.0 * tiles * kTile * blocks * kBlock);
  return costs.launches + packed_gate(layer, s) + up + down + images + s.work(costs.tile * tiles) +
         s.move(2.0 * 2.0 * s.m * s.d);
}

double screened(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity) {
  const Sizes s(layer, tokens);
  const auto& costs = kCosts.screened;
  const auto& tile_union = kCosts.tile_union;
  const double expected =
      layer.screen == ScreenBound::kStrict ? costs.strict_candidates : costs.candidates;
  const double neurons = activity.candidate_share >= 0.0
                             ? activity.candidate_share * s.f
                             : std::min(expected * tile_neurons(s, activity), s.f);
  const double tiles = std::ceil(s.m / kTile * (1.0 + activity.extra_tiles));
  const double blocks = std::min(neurons + 32.0, s.f) / kBlock;
  const double gate_up =
      s.work(tiles / s.sms * std::ceil(s.d / kStep) * costs.gate_up_block * blocks);
  const double rounds = tiles * std::ceil(s.d / kDownColumns) / s.sms;
  const double down = s.work(tile_union.down_block * (std::ceil(rounds) + 0.5) * blocks);
  const double products = costs.gate_share * packed_gate(layer, s) + gate_up + down;
  return products * (1.0 + costs.throttle * std::max(std::log(products / 300.0), 0.0)) +
         costs.launches + s.work(tile_union.tile * tiles) +
         s.move(costs.rotated_bytes * s.m * s.d) + s.move(s.d * s.f, tile_union.first_bytes);
}

double medium_batch(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity) {
  const Sizes s(layer, tokens);
  const auto& costs = kCosts.medium;
  const MediumBatchSchedule schedule(tokens, layer.width, layer.ffn, layer.device.multiprocessors);
  const auto count = [](int64_t value) { return static_cast<double>(value); };
  const double neurons = tile_neurons(s, activity), most = largest_neurons(s, activity);
  const double tiles = count(schedule.tiles), rounds = count(schedule.rounds);
  const double gate =
      rounds *
      (costs.gate_round + costs.gate_weight * s.d * std::max(count(schedule.neurons), kMediumGate));
  // Up runs a tile's union in chunks of up to 192 neurons, one per cluster at a time. All tiles run
  // at once, so the largest union decides.
  const double clusters = count(schedule.up_clusters), split = count(schedule.up_split);
  const double chunk =
      std::clamp(std::ceil(std::ceil(most / clusters) / kMediumGroup) * kMediumGroup, kMediumGroup,
                 kMediumChunk);
  const double turns =
      std::max(std::ceil(most / (chunk * clusters)), 1.0) * std::max(tiles * split / s.sms, 1.0);
  const double up =
      layer.gated
          ? turns * (costs.up_round + s.d / split * costs.up_work * std::max(chunk, kMediumUp))
          : costs.up_round;
  const double columns = count(schedule.columns), parts = count(schedule.down_split);
  const double down_turns = std::ceil(tiles * std::ceil(s.d / columns) * parts / s.sms);
  const double down_neurons = down_turns > 1.0 ? neurons : most;
  const double down = down_turns * (costs.down_round +
                                    down_neurons / parts *
                                        (costs.down_neuron + costs.down_work * (kTile + columns)));
  return s.work(gate + up + down + costs.image * s.m * neurons + costs.tile * tiles) +
         s.move(2.0 * s.d * s.f, costs.first_bytes) +
         s.move(2.0 * s.d * tiles * neurons,
                tokens <= kSmallTokens ? costs.few_row_bytes : costs.row_bytes);
}

double decode_rows(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity) {
  const Sizes s(layer, tokens);
  const auto& costs = kCosts.decode;
  const double passes = std::ceil(s.f / (s.sms * kDecodeNeurons));
  const double neurons = std::max(std::ceil(s.f / (s.sms * passes)), kDecodeGroup);
  const double groups = std::ceil(neurons / kDecodeGroup) * std::ceil(s.d / kDecodeColumns);
  const double active = grown_union(s, activity, s.m);
  return costs.launches +
         s.work(passes * (costs.pass + costs.group * groups) + costs.active * active / s.sms) +
         s.move(2.0 * s.d * s.f, costs.first_bytes) +
         s.move(active_rows(layer, s, active), costs.active_bytes);
}

double row_stream(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity) {
  const Sizes s(layer, tokens);
  const auto& costs = kCosts.stream;
  return costs.launches + s.work(costs.token * s.m) +
         s.move(2.0 * s.d * s.f + active_rows(layer, s, grown_union(s, activity, s.m)),
                costs.bytes);
}

// More than 64 tokens run as equal calls. value_bytes: of x and the weights; the kernels' chunks
// have as many bytes of either.
double small_batch_of(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity,
                      double value_bytes) {
  const int64_t calls = std::max<int64_t>((tokens + kSmallTokens - 1) / kSmallTokens, 1);
  const Sizes s(layer, (tokens + calls - 1) / calls);
  const auto& costs = kCosts.small;
  // GPCs have 16 or 18 SMs, so two clusters fewer run at one time than there are SMs for.
  const double clusters = std::max(std::floor(s.sms / kClusterSms) - 2.0, 1.0);
  const double passes = std::ceil(s.f / (clusters * kSmallNeurons));
  const double neurons =
      std::ceil(std::ceil(s.f / (clusters * passes)) / kSmallGroup) * kSmallGroup;
  const double chunks = std::ceil(s.d * value_bytes / (2.0 * kSmallChunk));
  const double active = grown_union(s, activity, s.m);
  // Clusters of `down` compute 64 columns each, two of them beside each other.
  const double down_rounds = std::ceil(std::ceil(s.d / kStep) / (2.0 * clusters));
  const double down_step = value_bytes == 1.0 ? kCosts.byte_down_step : costs.down_step;
  const double chunk = costs.chunk + (s.d * value_bytes > 2.0 * kSmallWidth ? costs.x : 0.0);
  const double call = costs.launches +
                      s.work(passes * (costs.round + chunks * chunk) +
                             down_step * down_rounds * active / (kClusterSms * kBlock)) +
                      s.move(2.0 * kStep * passes * chunks * neurons * s.sms, costs.first_bytes) +
                      s.move(0.5 * value_bytes * active_rows(layer, s, active), costs.active_bytes);
  return call * static_cast<double>(calls);
}
double small_batch(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity) {
  return small_batch_of(layer, tokens, activity, 2.0);
}
double small_batch_bytes(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity) {
  return small_batch_of(layer, tokens, activity, 1.0);
}

double portable_rows(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity) {
  const Sizes s(layer, tokens);
  const auto& costs = kCosts.portable_rows;
  const double active = grown_union(s, activity, s.m);
  return costs.launches + s.move(2.0 * s.d * s.f, costs.first_bytes) +
         s.work((s.m - 1.0) * (costs.token + costs.token_weight * s.d * s.f) +
                costs.active * active) +
         s.move(active_rows(layer, s, active), costs.active_bytes);
}

double portable_batch(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity) {
  const Sizes s(layer, tokens);
  const auto& costs = kCosts.portable_batch;
  const double tiles = s.m <= 8.0 ? 1.0 : s.m <= 16.0 ? 2.0 : 4.0;
  const double active = grown_union(s, activity, s.m), rows = 2.0 * s.d * active;
  // The CTAs of `down` each read the rows of all active neurons.
  const double down =
      std::max(s.work(costs.down_neuron * (tiles > 1.0 ? costs.down_tiles : 1.0) * active),
               s.move(rows, costs.down_bytes));
  return costs.launches + s.work(tiles * (costs.tile + costs.tile_weight * s.d * s.f)) +
         s.move(2.0 * s.d * s.f, costs.first_bytes) +
         (layer.gated ? s.move(rows, costs.up_bytes) : 0.0) + down;
}

double row_fused(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity) {
  const Sizes s(layer, tokens);
  const double products = layer.gated ? 2.0 : 1.0;
  // Each active neuron's rows come from the L2 for every token, as far as it holds them, and from
  // memory once.
  const double rows = products * s.m * activity.nnz_per_token * 2.0 * s.d;
  const double missed = std::max(1.0 - kL2Bytes / (products * 2.0 * s.d * s.f), 0.0);
  const double gathered = std::max(rows / s.rate(kCosts.row_fused.row_bytes),
                                   s.move(active_rows(layer, s, grown_union(s, activity, s.m)))) +
                          s.move(rows * missed, kCosts.row_fused.missed_bytes);
  return packed_gate(layer, s) + 6.0 + kCosts.row_fused.tail + s.move(2.0 * 2.0 * s.m * s.d) +
         gathered;
}

// A sparse cost must be below this share of the dense cost: the model is off by some percent.
constexpr double kSparseShare = 0.93;
// The same where unions are counted.
constexpr double kMediumShare = 0.935, kTileUnionShare = 0.95;
// Medium batches do not set heavy rows apart. Where they counted a largest union this much above
// the mean, tile-union may have a tile more than its cost knows of, and few tiles wait for it.
constexpr double kUneven = 1.25, kUnsplitShare = 0.90;
constexpr int64_t kUnsplitTokens = 2048;

double sparse_share(int64_t, const LayerActivity&) { return kSparseShare; }

double medium_batch_share(int64_t, const LayerActivity& activity) {
  return activity.largest_union < 0.0 ? kSparseShare : kMediumShare;
}

double tile_union_share(int64_t tokens, const LayerActivity& activity) {
  if (activity.largest_union < 0.0) return kSparseShare;
  const bool unsplit = activity.extra_tiles == 0.0 && tokens <= kUnsplitTokens &&
                       activity.largest_union > kUneven * activity.union_share;
  return unsplit ? kUnsplitShare : kTileUnionShare;
}

double expected_union(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity) {
  return grown_union(Sizes(layer, tokens), activity, static_cast<double>(tokens));
}

}  // namespace twell::ffn_costs
