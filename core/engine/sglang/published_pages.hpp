// Device pages as a subscriber of KV events knows them: changes count when they are published.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "tokens/identities.hpp"

namespace understudy {

// A hash table with linear probing, because a KV-aware router asks for every request and worker.
class PublishedPages {
 public:
  void stored(std::uint64_t hash) {
    if (2 * (used_ + 1) > places_.size()) grow();
    Place& place = places_[place_of(hash)];
    if (place.epoch == kFree) {
      place = {hash, epoch_, true};
      ++used_;
    }
    place.present = true;  // removed and stored again: a subscriber knows no difference
  }
  void removed(std::uint64_t hash) {
    if (places_.empty()) return;
    const std::size_t at = place_of(hash);
    if (places_[at].epoch == kFree) return;
    if (places_[at].epoch == epoch_) return erase(at);
    places_[at].present = false;
    gone_.push_back(hash);
  }
  void publish() {
    ++epoch_;
    for (const std::uint64_t hash : std::exchange(gone_, {})) {
      const std::size_t at = place_of(hash);
      if (places_[at].epoch != kFree && !places_[at].present) erase(at);
    }
  }
  // Leading blocks that are published.
  std::size_t prefix(std::span<const BlockIdentity> blocks) const {
    std::size_t known = 0;
    while (known < blocks.size() && is_published(blocks[known].sequence_hash())) ++known;
    return known;
  }

 private:
  static constexpr std::uint32_t kFree = 0;
  struct Place {
    std::uint64_t hash = 0;
    std::uint32_t epoch = kFree;  // when it was stored
    bool present = false;         // false: removed, but not published yet
  };

  bool is_published(std::uint64_t hash) const {
    if (places_.empty()) return false;
    const Place& place = places_[place_of(hash)];
    return place.epoch != kFree && place.epoch < epoch_;
  }
  std::size_t home_of(std::uint64_t hash) const { return (hash ^ hash >> 32) & (places_.size() - 1); }
  // Where the hash is, or the free place for it.
  std::size_t place_of(std::uint64_t hash) const {
    std::size_t at = home_of(hash);
    while (places_[at].epoch != kFree && places_[at].hash != hash) at = (at + 1) & (places_.size() - 1);
    return at;
  }
  // Moves later entries forward, so that none is behind a free place.
  void erase(std::size_t at) {
    const std::size_t mask = places_.size() - 1;
    for (std::size_t next = (at + 1) & mask; places_[next].epoch != kFree; next = (next + 1) & mask) {
      const std::size_t home = home_of(places_[next].hash);
      if (((next - home) & mask) < ((next - at) & mask)) continue;
      places_[at] = places_[next];
      at = next;
    }
    places_[at] = {};
    --used_;
  }
  void grow() {
    const std::vector<Place> before =
        std::exchange(places_, std::vector<Place>(std::max<std::size_t>(64, 2 * places_.size())));
    for (const Place& place : before) {
      if (place.epoch != kFree) places_[place_of(place.hash)] = place;
    }
  }

  std::vector<Place> places_;  // a power of two
  std::size_t used_ = 0;
  std::uint32_t epoch_ = 1;
  std::vector<std::uint64_t> gone_;
};

}  // namespace understudy
