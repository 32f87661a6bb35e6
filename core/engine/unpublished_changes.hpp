// Changes of device blocks that are not yet published.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "events/event_ring.hpp"

namespace understudy {

// Index of a step's rows by hash: was the block present before? Built on the first query, and again after rows were
// added or published.
class UnpublishedChanges {
 public:
  enum class Was : std::uint8_t { Unchanged, Absent, There };

  // The rows are not those of before, whatever their number is.
  void expire() noexcept { rows_ = kExpired; }
  // All rows, in the order in which things happened.
  void follow(std::span<const EventRecord> earlier, std::span<const EventRecord> later) {
    const std::size_t rows = earlier.size() + later.size();
    if (rows == rows_) return;
    rows_ = rows;
    changed_ = 0;
    places_.assign(rows == 0 ? 0 : std::bit_ceil(2 * rows), {});
    for (const std::span<const EventRecord> part : {earlier, later}) {
      for (const EventRecord& row : part) {
        if (row.sole) enter(row);
      }
    }
  }

  bool empty() const noexcept { return changed_ == 0; }
  Was of(const BlockIdentity& block) const noexcept {
    if (places_.empty()) return Was::Unchanged;
    return places_[place_of(block.sequence_hash())].was;
  }

 private:
  static constexpr std::size_t kExpired = ~std::size_t{0};
  struct Place {
    std::uint64_t hash = 0;
    Was was = Was::Unchanged;  // Unchanged: the place is free
  };

  // Index of the hash, or of the free place for it.
  std::size_t place_of(std::uint64_t hash) const noexcept {
    const std::size_t mask = places_.size() - 1;
    std::size_t at = (hash ^ hash >> 32) & mask;
    while (places_[at].was != Was::Unchanged && places_[at].hash != hash) at = (at + 1) & mask;
    return at;
  }
  // The first change of a block determines its earlier state.
  void enter(const EventRecord& row) {
    const std::uint64_t hash = row.identity.sequence_hash();
    Place& place = places_[place_of(hash)];
    if (place.was != Was::Unchanged) return;
    place = {hash, row.kind == EventKind::Stored ? Was::Absent : Was::There};
    ++changed_;
  }

  std::vector<Place> places_;
  std::size_t rows_ = kExpired;
  std::size_t changed_ = 0;
};

}  // namespace understudy
