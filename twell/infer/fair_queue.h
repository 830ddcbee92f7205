// SPDX-License-Identifier: Apache-2.0
// A queue in which clients take turns: next is the first of the client that holds the fewest
// places, and among such clients the one that has waited longest. Of one client it is first come,
// first served.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <unordered_map>

namespace twell {

// Places that clients hold, by client.
using PlacesHeld = std::unordered_map<uint64_t, int64_t>;

inline int64_t places_of(const PlacesHeld& held, uint64_t client) {
  const auto found = held.find(client);
  return found == held.end() ? 0 : found->second;
}

// T has client(), and number, which tells its time of arrival.
template <typename T>
class FairQueue {
 public:
  int64_t size() const { return size_; }
  int64_t size_of(uint64_t client) const {
    const auto line = lines_.find(client);
    return line == lines_.end() ? 0 : std::ssize(line->second);
  }
  void push_back(T* one) {
    lines_[one->client()].push_back(one);
    ++size_;
  }
  void push_front(T* one) {
    lines_[one->client()].push_front(one);
    ++size_;
  }
  // Takes out the one whose turn it is; null when there is none.
  T* pop(const PlacesHeld& held) {
    auto next = lines_.end();
    int64_t fewest = 0;
    for (auto line = lines_.begin(); line != lines_.end(); ++line) {
      const int64_t places = places_of(held, line->first);
      if (next == lines_.end() || places < fewest ||
          (places == fewest && line->second.front()->number < next->second.front()->number)) {
        next = line;
        fewest = places;
      }
    }
    if (next == lines_.end()) return nullptr;
    T* const one = next->second.front();
    next->second.pop_front();
    if (next->second.empty()) lines_.erase(next);
    --size_;
    return one;
  }
  template <typename Predicate>
  void erase_if(const Predicate& predicate) {
    for (auto line = lines_.begin(); line != lines_.end();) {
      size_ -= static_cast<int64_t>(std::erase_if(line->second, predicate));
      line = line->second.empty() ? lines_.erase(line) : std::next(line);
    }
  }
  void clear() {
    lines_.clear();
    size_ = 0;
  }

 private:
  std::map<uint64_t, std::deque<T*>> lines_;  // none of them empty
  int64_t size_ = 0;
};

}  // namespace twell
