// SPDX-License-Identifier: Apache-2.0
#include "twell/base/carver.h"
#include "twell/base/error.h"
#include "twell/base/rounding.h"
#include "twell/ops/ffn/medium_batch/medium_batch_cuda.h"
#include "twell/ops/ffn/medium_batch/medium_batch_schedule.h"

namespace twell {
namespace {

constexpr int64_t kTile = MediumBatchSchedule::kTileTokens;
constexpr int64_t kGroup = 16;         // neurons: the k of one WGMMA
constexpr int64_t kLeastSegment = 48;  // neurons of a segment (MediumBatchSchedule)

// The four lists in `memory`, or only their size.
struct MediumBatchLists {
  int32_t *ids, *counts, *union_ids, *totals;
  int64_t words;

  MediumBatchLists(uint32_t* memory, int64_t tokens, int64_t ffn) {
    const int64_t tiles = ceil_div(tokens, kTile);
    const int64_t places = round_up(ffn, kGroup);
    Carver carver(memory, 16);
    ids = carver.take<int32_t>(tiles * places);
    counts = carver.take<int32_t>(tiles * ceil_div(ffn, kLeastSegment));
    union_ids = carver.take<int32_t>(tiles * places);
    totals = carver.take<int32_t>(tiles);
    words = carver.bytes() / static_cast<int64_t>(sizeof(uint32_t));
  }
};

}  // namespace

int64_t MediumBatchWorkspace::values(int64_t tokens, int64_t ffn) {
  return round_up(tokens, kTile) * round_up(ffn, kGroup);
}

int64_t MediumBatchWorkspace::words(int64_t tokens, int64_t ffn) {
  return MediumBatchLists(nullptr, tokens, ffn).words;
}

MediumBatchWorkspace MediumBatchWorkspace::in(int64_t tokens, int64_t ffn, __nv_bfloat16* gate,
                                              __nv_bfloat16* h, uint32_t* lists,
                                              int64_t list_words) {
  const MediumBatchLists of(lists, tokens, ffn);
  TWELL_CHECK(of.words <= list_words, "lists of a medium batch [{}, {}]: {} words in memory for {}",
              tokens, ffn, of.words, list_words);
  return {.max_tokens = tokens,
          .max_ffn = ffn,
          .gate = gate,
          .h = reinterpret_cast<uint8_t*>(h),
          .ids = of.ids,
          .counts = of.counts,
          .union_ids = of.union_ids,
          .totals = of.totals};
}

}  // namespace twell
