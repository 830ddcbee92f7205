// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/mapped_model.h"

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "twell/base/buffer.h"
#include "twell/base/error.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/checkpoint/quantization.h"
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
      : opened_(std::move(opened)),
        quantises_(quantises(opened_, options)),
        quantises_head_(quantises_head(opened_, options)) {
    if (quantises_head_) opened_.untie_head();
    reserve();
    std::unordered_map<const TensorInfo*, TensorPlace> places;
    std::vector<WeightMatrix> views;
    for (const ParamSpec& spec : opened_.table) {
      const TensorInfo& info = *opened_.tensors.find(spec.name);
      if (in_int8(spec)) {
        views.push_back(place_int8(spec, info));
      } else {
        views.push_back(opened_.in_bytes(spec) ? place_bytes(spec)
                                               : place(spec, info, places[&info]));
      }
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
      if (in_int8(spec)) {
        opened_.in_bytes(spec) ? copy_int8(spec, views[i]) : quantise(ctx, spec, views[i]);
        continue;
      }
      if (!opened_.in_bytes(spec)) continue;
      // What views point to is this object's.
      auto* const to = const_cast<float*>(reinterpret_cast<const float*>(views[i].data));
      widen_stored_bytes(ctx, opened_, spec, to);
    }
    ModelView::operator=({opened_.config, std::move(views)});
  }

 private:
  // Whether floats become int8.
  static bool quantises(const OpenCheckpoint& opened, const LoadOptions& options) {
    if (!options.weights) return false;
    TWELL_REQUIRE(*options.weights == ByteType::kInt8, "fp8 weights need a GPU");
    TWELL_REQUIRE(!opened.bytes || opened.bytes->type == ByteType::kInt8,
                  "{}: the weights are in {} already; they do not become int8",
                  opened.tensors.source(), byte_option_name(opened.bytes->type));
    return !opened.bytes;
  }
  static bool quantises_head(const OpenCheckpoint& opened, const LoadOptions& options) {
    if (!options.head_in_bytes) return false;
    const bool int8 = options.weights == ByteType::kInt8 ||
                      (opened.bytes && opened.bytes->type == ByteType::kInt8);
    TWELL_REQUIRE(int8,
                  "an output head in 8 bits needs projections in int8: --weights int8, or a "
                  "checkpoint in int8; {} is in {}",
                  opened.tensors.source(),
                  opened.bytes ? byte_option_name(opened.bytes->type) : "floats");
    return !opened.bytes || !opened.bytes->head;
  }
  bool in_int8(const ParamSpec& spec) const {
    if (opened_.in_bytes(spec)) return opened_.bytes->type == ByteType::kInt8;
    return (quantises_ && is_projection(spec)) || (quantises_head_ && is_head(spec));
  }
  static int64_t outputs_of(const ParamSpec& spec) {
    return spec.transposed ? spec.cols : spec.rows;
  }
  // Whether its bytes are read where the file has them.
  bool stays(const ParamSpec& spec) const { return opened_.in_bytes(spec) && !spec.transposed; }
  WeightMatrix place_int8(const ParamSpec& spec, const TensorInfo& info) {
    const std::byte* at = info.bytes.data();
    if (!stays(spec)) {
      at = copies_.data() + copies_used_;
      copies_used_ += int8_bytes(spec);
    }
    WeightMatrix view(at, DType::kI8, spec.rows, spec.cols);
    view.scales = scales_.data() + scales_used_;
    scales_used_ += outputs_of(spec);
    return view;
  }
  static int64_t int8_bytes(const ParamSpec& spec) {
    constexpr auto kUnit = static_cast<int64_t>(kAlignment);
    return (spec.size() + kUnit - 1) / kUnit * kUnit;
  }
  // Scales, and values that do not stay in the file. What views point to is this object's.
  void copy_int8(const ParamSpec& spec, const WeightMatrix& to) const {
    const StoredBytes bytes = stored_bytes(opened_, spec);
    std::copy(bytes.scales.begin(), bytes.scales.end(), const_cast<float*>(to.scales));
    if (stays(spec)) return;
    auto* const out = const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(to.data));
    for (int64_t input = 0; input < bytes.cols; ++input) {
      for (int64_t output = 0; output < bytes.rows; ++output) {
        out[input * bytes.rows + output] = bytes.values[output * bytes.cols + input];
      }
    }
  }
  // Rounded to bf16 first, as a conversion of the file does.
  void quantise(Context& ctx, const ParamSpec& spec, const WeightMatrix& to) const {
    const TensorInfo& info = *opened_.tensors.find(spec.name);
    const int64_t outputs = outputs_of(spec), inputs = spec.size() / outputs;
    auto* const out = const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(to.data));
    constexpr int64_t kGrain = 64;  // outputs: a line of a transposed matrix
    ctx.parallel_for(outputs, kGrain, [&](int64_t begin, int64_t end, int) {
      std::vector<float> row(static_cast<size_t>(inputs));
      std::vector<uint8_t> bytes(row.size());
      for (int64_t output = begin; output < end; ++output) {
        const auto row_bytes = static_cast<size_t>(inputs) * dtype_size(float_dtype(info.dtype));
        TensorInfo one = info;
        one.bytes = info.bytes.subspan(static_cast<size_t>(output) * row_bytes, row_bytes);
        read_tensor(one, {.out = row.data(), .rows = 1, .cols = inputs}, 0, 1);
        for (float& value : row) value = to_float(to_bf16(value));
        const_cast<float*>(to.scales)[output] = quantise_row(ByteType::kInt8, row, bytes);
        for (int64_t input = 0; input < inputs; ++input) {
          out[spec.transposed ? input * outputs + output : output * inputs + input] =
              bytes[static_cast<size_t>(input)];
        }
      }
    });
  }

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
  // Weights in e4m3 are widened to f32.
  WeightMatrix place_bytes(const ParamSpec& spec) {
    const std::byte* const at = copies_.data() + copies_used_;
    copies_used_ += wide_bytes(spec);
    return {at, DType::kF32, spec.rows, spec.cols};
  }

  void reserve() {
    int64_t vectors = 0, copies = 0, scales = 0;
    for (const ParamSpec& spec : opened_.table) {
      const TensorInfo& info = *opened_.tensors.find(spec.name);
      if (in_int8(spec)) {
        copies += stays(spec) ? 0 : int8_bytes(spec);
        scales += outputs_of(spec);
      } else if (opened_.in_bytes(spec)) {
        copies += wide_bytes(spec);
      } else if (spec.is_vector) {
        vectors += spec.size();
      } else if (is_copied(spec, info)) {
        copies += copy_bytes(spec, info);
      }
    }
    vectors_ = Buffer<float>(vectors);
    copies_ = Buffer<std::byte>(copies);
    scales_ = Buffer<float>(scales);
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
  const bool quantises_;       // the projections
  const bool quantises_head_;  // the output head
  Buffer<float> vectors_;      // norms and biases
  int64_t vectors_used_ = 0;
  Buffer<std::byte> copies_;  // down_proj, and tensors that are not aligned
  int64_t copies_used_ = 0;
  Buffer<float> scales_;  // of weights in int8
  int64_t scales_used_ = 0;
};

}  // namespace

std::shared_ptr<const ModelView> map_model(Context& ctx, const std::filesystem::path& folder,
                                           const LoadOptions& options) {
  return std::make_shared<MappedModel>(ctx, open_with_hashes_unread(folder), options);
}

}  // namespace twell
