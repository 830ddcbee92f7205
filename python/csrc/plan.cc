// SPDX-License-Identifier: Apache-2.0
#include "python/csrc/plan.h"

#include <map>

#include "twell/base/error.h"

namespace twell::python {
namespace {

// Handles count up from 1 and are never used again.
struct Plans {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<Plan>> by_handle;
  int64_t next = 1;
};

// Never destroyed: Python may release plans after the static objects of this library are gone.
Plans& plans() {
  static Plans* const all = new Plans;
  return *all;
}

}  // namespace

int64_t plan_create(int64_t sibling, int64_t threads) {
  auto plan = std::make_shared<Plan>();
  plan->runtime = sibling != 0 ? find_plan(sibling)->runtime
                               : std::make_shared<Runtime>(static_cast<int>(threads));
  Plans& all = plans();
  const std::lock_guard lock(all.mutex);
  all.by_handle[all.next] = std::move(plan);
  return all.next++;
}

void plan_release(int64_t handle) {
  std::shared_ptr<Plan> last;  // destroyed after the lock
  Plans& all = plans();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_handle.find(handle);
  if (found == all.by_handle.end()) return;
  last = std::move(found->second);
  all.by_handle.erase(found);
}

std::shared_ptr<Plan> find_plan(int64_t handle) {
  Plans& all = plans();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_handle.find(handle);
  TWELL_REQUIRE(found != all.by_handle.end(),
                "there is no plan {}: keep the twell.Plan object as long as its layer is used",
                handle);
  return found->second;
}

}  // namespace twell::python
