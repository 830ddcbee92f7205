// SPDX-License-Identifier: Apache-2.0
// The reader of all JSON that may be broken or hostile: files, request bodies, rows of data.
//
// Time and memory are linear in the text, but for objects, whose keys are sorted (n log n). A text
// is one value with blanks around it; strings are UTF-8. An integer that fits neither int64_t nor
// uint64_t is read as a double; a number beyond the doubles is an error.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace twell {

// What a key that appears twice in an object is: an error, where readers that disagree about it
// would see different things, or overridden by its last value, as most readers do.
enum class JsonKeys { kUnique, kLast };

struct JsonLimits {
  int depth = 64;  // of arrays and objects within each other
  JsonKeys keys = JsonKeys::kUnique;
};

// InputError "<source>: not valid JSON at byte 9 (line 2, column 7): <why>" on anything that is not
// within the limits. All three count from 1; a text of one line has no line and column.
nlohmann::json parse_json(std::string_view text, const std::string& source,
                          const JsonLimits& limits = {});
// The same with the text's order of keys.
nlohmann::ordered_json parse_ordered_json(std::string_view text, const std::string& source,
                                          const JsonLimits& limits = {});
// The value of one field of the object in the text, null when it is absent. The rest is checked but
// not kept, nor compared for equal keys. InputError also where the text is no object.
nlohmann::json parse_json_field(std::string_view text, const std::string& field,
                                const std::string& source, const JsonLimits& limits = {});

// Removes the keys of an object for which gone(key) is true, in linear time. (The object's own
// erase() moves everything behind the key.)
void erase_keys(nlohmann::ordered_json& object,
                const std::function<bool(const std::string& key)>& gone);

}  // namespace twell
