// SPDX-License-Identifier: Apache-2.0
#include "twell/grammar/schema_references.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>

namespace twell::json_schema {
namespace {

using nlohmann::ordered_json;

// The URI that a reference in a schema of this base stands for (RFC 3986, without dot segments).
std::string resolved_uri(const std::string& base, const std::string& reference) {
  const std::string whole = base.substr(0, base.find('#'));
  if (reference.empty()) return whole;
  if (reference[0] == '#') return whole + reference;
  const size_t colon = reference.find(':'), scheme = whole.find("://");
  if (colon < reference.find_first_of("/#")) return reference;
  if (reference[0] != '/') return whole.substr(0, whole.rfind('/') + 1) + reference;
  if (scheme == whole.npos) return reference;
  return whole.substr(0, whole.find('/', scheme + 3)) + reference;
}

class PlainReferences {
 public:
  static ordered_json of(const ordered_json& root) {
    PlainReferences references;
    references.find(root, "", "");
    ordered_json out = root;
    references.replace(out, "");
    return out;
  }

 private:
  static constexpr std::array kValues = {"const", "enum", "default", "examples", "example"};
  static std::string base_of(const ordered_json& schema, const std::string& base) {
    const auto id = schema.find("$id");
    return id == schema.end() || !id->is_string()
               ? base
               : resolved_uri(base, id->get_ref<const std::string&>());
  }
  // Calls use(name, inner) for what may be or hold a schema.
  template <typename Value, typename Use>
  static void for_each_inner(Value& value, const Use& use) {
    for (auto& [name, inner] : value.items()) {
      if (value.is_object() && std::ranges::find(kValues, name) != kValues.end()) continue;
      if (inner.is_structured()) use(name, inner);
    }
  }

  void find(const ordered_json& value, const std::string& pointer, std::string base) {
    if (value.is_object()) {
      const std::string own = base_of(value, base);
      if (own != base || pointer.empty())
        places_.try_emplace(own.substr(0, own.find('#')), pointer);
      base = own;
      for (const char* keyword : {"$anchor", "$dynamicAnchor"}) {
        const auto anchor = value.find(keyword);
        if (anchor == value.end() || !anchor->is_string()) continue;
        places_.try_emplace(resolved_uri(base, "#" + anchor->template get<std::string>()), pointer);
      }
    }
    for_each_inner(value, [&](const std::string& name, const ordered_json& inner) {
      std::string step;
      for (const char c : name) step += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
      find(inner, pointer + "/" + step, base);
    });
  }

  void replace(ordered_json& value, std::string base) const {
    if (value.is_object()) {
      base = base_of(value, base);
      if (const auto ref = value.find("$ref"); ref != value.end() && ref->is_string()) {
        *ref = plain(ref->get<std::string>(), base);
      }
    }
    for_each_inner(value, [&](const std::string&, ordered_json& inner) { replace(inner, base); });
  }

  std::string plain(const std::string& reference, const std::string& base) const {
    const std::string uri = resolved_uri(base, reference);
    if (const auto anchor = places_.find(uri); anchor != places_.end()) {
      return "#" + anchor->second;
    }
    const size_t hash = uri.find('#');
    const auto place = places_.find(uri.substr(0, hash));
    if (place == places_.end()) return reference;
    const std::string fragment = hash == uri.npos ? "" : uri.substr(hash + 1);
    return fragment.empty() || fragment[0] == '/' ? "#" + place->second + fragment : reference;
  }

  std::map<std::string, std::string> places_;  // pointers by URI
};

}  // namespace

ordered_json with_plain_references(const ordered_json& root) { return PlainReferences::of(root); }

}  // namespace twell::json_schema
