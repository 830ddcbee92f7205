// SPDX-License-Identifier: Apache-2.0
// Ranges as a profiler sees them. The profiler is this program: it hooks NVTX's functions the way a
// statically linked tool does. Needs no GPU.
#include "twell/base/profile_range.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace twell {
namespace {

std::vector<std::string>& seen() {
  static std::vector<std::string> events;
  return events;
}

int push(const nvtxEventAttributes_t* event) {
  std::string text = event->message.ascii;
  if (event->payloadType == NVTX_PAYLOAD_TYPE_INT64) {
    text += ' ' + std::to_string(event->payload.llValue);
  }
  seen().push_back(text);
  return 0;
}

int pop() {
  seen().emplace_back("end");
  return 0;
}

int attach(NvtxGetExportTableFunc_t tables) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(tables(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned int size = 0;
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &functions, &size) == 0) return 0;
  *functions[NVTX_CBID_CORE_RangePushEx] = reinterpret_cast<NvtxFunctionPointer>(push);
  *functions[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}

// NVTX looks at this pointer when the program opens its first range.
const bool hooked = [] {
  InitializeInjectionNvtx2_fnptr = attach;
  return true;
}();

TEST(ProfileRange, NamesNestAndEveryRangeEnds) {
  ASSERT_TRUE(hooked);
  seen().clear();
  {
    const ProfileRange layer("layer", 12);
    ProfileRange stage("norm");
    stage.next("qkv");
  }
  EXPECT_THAT(seen(), testing::ElementsAre("layer 12", "norm", "end", "qkv", "end", "end"));
}

TEST(ProfileRange, LayerZeroHasItsNumber) {
  seen().clear();
  { const ProfileRange layer("layer", 0); }
  EXPECT_THAT(seen(), testing::ElementsAre("layer 0", "end"));
}

}  // namespace
}  // namespace twell
