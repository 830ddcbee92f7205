// SPDX-License-Identifier: Apache-2.0
// Named ranges on the timeline of a profiler that listens to NVTX (Nsight Systems, Nsight Compute's
// --nvtx filters). Without one a range costs two calls that return at once. Work that a CUDA graph
// replays is not in a range again: its range is around the capture. Only for sources built with a
// CUDA toolkit; NVTX is a header of it.
#pragma once

#include <nvtx3/nvToolsExt.h>

#include <cstdint>

namespace twell {

// A range from here to the end of the scope, on the thread that opens it.
class ProfileRange {
 public:
  // name: a literal. index: shown beside it, such as the number of a layer; below 0: none.
  explicit ProfileRange(const char* name, int64_t index = -1) { push(name, index); }
  ~ProfileRange() { nvtxRangePop(); }
  ProfileRange(const ProfileRange&) = delete;
  ProfileRange& operator=(const ProfileRange&) = delete;

  // Ends the range and opens the next one in its place.
  void next(const char* name) {
    nvtxRangePop();
    push(name, -1);
  }

 private:
  static void push(const char* name, int64_t index) {
    nvtxEventAttributes_t event{};
    event.version = NVTX_VERSION;
    event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    event.messageType = NVTX_MESSAGE_TYPE_ASCII;
    event.message.ascii = name;
    if (index >= 0) {
      event.payloadType = NVTX_PAYLOAD_TYPE_INT64;
      event.payload.llValue = index;
    }
    nvtxRangePushEx(&event);
  }
};

}  // namespace twell
