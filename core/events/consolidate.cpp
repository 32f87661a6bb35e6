#include "events/consolidate.hpp"

#include <algorithm>

namespace understudy {

namespace {

void finish(WireColumns& out, std::uint8_t kind, std::uint8_t tier, std::uint64_t parent) {
  out.kinds.push_back(kind);
  out.tiers.push_back(tier);
  out.parents.push_back(parent);
  out.offsets.push_back(static_cast<std::int64_t>(out.sequence_hashes.size()));
}

}  // namespace

WireColumns Consolidator::apply(const ColumnsView& events) {
  WireColumns out;
  for (std::size_t event = 0; event < events.kinds.size(); ++event) {
    const std::uint8_t kind = events.kinds[event];
    const std::uint8_t tier = events.tiers[event];
    if (kind == 2) {
      clear();
      finish(out, 2, 0, 0);
      continue;
    }
    const auto first = static_cast<std::size_t>(events.offsets[event]);
    const auto last = static_cast<std::size_t>(events.offsets[event + 1]);
    // A block that is left out ends a run; what follows it continues that block.
    std::uint64_t parent = events.parents[event];
    for (std::size_t i = first; i < last; ++i) {
      const std::uint64_t hash = events.sequence_hashes[i];
      const bool told = kind == 0 ? arrives(tier, hash) : leaves(tier, hash);
      count_row();
      if (told) {
        out.sequence_hashes.push_back(hash);
        out.local_hashes.push_back(events.local_hashes[i]);
        continue;
      }
      const bool open = static_cast<std::int64_t>(out.sequence_hashes.size()) > out.offsets.back();
      if (kind == 0) {
        if (open) finish(out, 0, tier, parent);
        parent = hash;
      }
    }
    if (static_cast<std::int64_t>(out.sequence_hashes.size()) > out.offsets.back()) {
      finish(out, kind, tier, kind == 0 ? parent : 0);
    }
  }
  return out;
}

void Consolidator::clear() noexcept {
  for (auto& tier : copies_) tier.clear();
  live_ = 0;
  distance_.wrong_now = 0;
}

bool Consolidator::arrives(std::uint8_t tier, std::uint64_t hash) {
  auto& tier_copies = copies_[tier];
  const auto found = tier_copies.find(hash);
  if (found != tier_copies.end()) {
    ++distance_.second_copies;
    ++found->second.count;
    distance_.wrong_now -= found->second.believed_gone;
    found->second.believed_gone = false;
    return false;
  }
  if (live_ >= max_blocks_) {
    ++distance_.overflowed;
    return false;
  }
  tier_copies.emplace(hash, Copies{1, false});
  ++live_;
  return true;
}

bool Consolidator::leaves(std::uint8_t tier, std::uint64_t hash) {
  auto& tier_copies = copies_[tier];
  const auto found = tier_copies.find(hash);
  if (found == tier_copies.end()) {
    ++distance_.unknown_removals;
    return false;
  }
  Copies& copies = found->second;
  if (--copies.count == 0) {
    distance_.wrong_now -= copies.believed_gone;
    tier_copies.erase(found);
    --live_;
    return true;
  }
  ++distance_.early_removals;
  distance_.wrong_now += !copies.believed_gone;
  copies.believed_gone = true;
  return false;
}

void Consolidator::count_row() {
  ++distance_.blocks;
  distance_.wrong_sum += distance_.wrong_now;
  distance_.wrong_peak = std::max(distance_.wrong_peak, distance_.wrong_now);
}

}  // namespace understudy
