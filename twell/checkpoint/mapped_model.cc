// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/mapped_model.h"

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "twell/base/buffer.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/tensor_convert.h"

namespace twell {
namespace {

int64_t value_bytes(const TensorInfo& info) {
  return static_cast<int64_t>(dtype_size(float_dtype(info.dtype)));
}

bool aligned(const TensorInfo& info) {
  return reinterpret_cast<uintptr_t>(info.bytes.data()) % dtype_size(float_dtype(info.dtype)) == 0;
}

// Where the values of each parameter will be.
class MappedModel : public ModelView {
 public:
  MappedModel(Context& ctx, OpenCheckpoint opened, const LoadOptions& options)
      : opened_(std::move(opened)) {
    reserve();
    std::unordered_map<const TensorInfo*, TensorPlace> places;
    std::vector<WeightMatrix> views;
    for (const ParamSpec& spec : opened_.table) {
      const TensorInfo& info = *opened_.tensors.find(spec.name);
      views.push_back(opened_.in_bytes(spec) ? place_bytes(spec)
                                             : place(spec, info, places[&info]));
    }
    const auto place_of = [&](const TensorInfo& info) {
      const auto found = places.find(&info);
      return found == places.end() ? TensorPlace{} : found->second;
    };
    for (const auto& [name, file] : opened_.tensors.files()) {
      load_tensors(ctx, file, place_of, options);
    }
    for (size_t i = 0; i < views.size(); ++i) {
      const ParamSpec& spec = opened_.table[i];
      if (!opened_.in_bytes(spec)) continue;
      // What views point to is this object's.
      auto* const to = const_cast<float*>(reinterpret_cast<const float*>(views[i].data));
      widen_stored_bytes(ctx, opened_, spec, to);
    }
    ModelView::operator=({opened_.config, std::move(views)});
  }

 private:
  // Files may begin their tensors at any byte, so those that cannot be read in place are copied.
  static bool is_copied(const ParamSpec& spec, const TensorInfo& info) {
    return spec.transposed || !aligned(info);
  }
  static int64_t copy_bytes(const ParamSpec& spec, const TensorInfo& info) {
    constexpr auto kUnit = static_cast<int64_t>(kAlignment);
    return (spec.size() * value_bytes(info) + kUnit - 1) / kUnit * kUnit;
  }

  static int64_t wide_bytes(const ParamSpec& spec) {
    constexpr auto kUnit = static_cast<int64_t>(kAlignment);
    return (spec.size() * int64_t{sizeof(float)} + kUnit - 1) / kUnit * kUnit;
  }
  // Weights in 8 bits are widened to f32.
  WeightMatrix place_bytes(const ParamSpec& spec) {
    const std::byte* const at = copies_.data() + copies_used_;
    copies_used_ += wide_bytes(spec);
    return {at, DType::kF32, spec.rows, spec.cols};
  }

  void reserve() {
    int64_t vectors = 0, copies = 0;
    for (const ParamSpec& spec : opened_.table) {
      const TensorInfo& info = *opened_.tensors.find(spec.name);
      if (opened_.in_bytes(spec)) {
        copies += wide_bytes(spec);
      } else if (spec.is_vector) {
        vectors += spec.size();
      } else if (is_copied(spec, info)) {
        copies += copy_bytes(spec, info);
      }
    }
    vectors_ = Buffer<float>(vectors);
    copies_ = Buffer<std::byte>(copies);
  }

  WeightMatrix place(const ParamSpec& spec, const TensorInfo& info, TensorPlace& place) {
    const DType dtype = float_dtype(info.dtype);
    if (!spec.is_vector && !is_copied(spec, info)) {
      place.stays = true;
      return {info.bytes.data(), dtype, spec.rows, spec.cols};
    }
    place = {.dtype = dtype, .rows = spec.rows, .cols = spec.cols, .transposed = spec.transposed};
    if (spec.is_vector) {  // one behind the other, as ModelView wants the biases of q, k and v
      place.dtype = DType::kF32;
      place.out = vectors_.data() + vectors_used_;
      vectors_used_ += spec.size();
    } else {
      place.out = copies_.data() + copies_used_;
      copies_used_ += copy_bytes(spec, info);
    }
    return {place.out, place.dtype, spec.rows, spec.cols};
  }

  OpenCheckpoint opened_;
  Buffer<float> vectors_;  // norms and biases
  int64_t vectors_used_ = 0;
  Buffer<std::byte> copies_;  // down_proj, and tensors that are not aligned
  int64_t copies_used_ = 0;
};

}  // namespace

std::shared_ptr<const ModelView> map_model(Context& ctx, const std::filesystem::path& folder,
                                           const LoadOptions& options) {
  return std::make_shared<MappedModel>(ctx, open_with_hashes_unread(folder), options);
}

}  // namespace twell
