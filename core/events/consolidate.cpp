#include "events/consolidate.hpp"

#include <algorithm>

#include "base/assert.hpp"
#include "tokens/token_blocks.hpp"

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
    // A block that is left out ends a run; the block after it starts one with that block as parent.
    std::uint64_t before = events.parents[event];
    std::uint64_t before_name = before == 0 || kind != 0 ? 0 : name_of(tier, before);
    std::uint64_t parent = before_name;
    for (std::size_t i = first; i < last; ++i) {
      const std::uint64_t hash = events.sequence_hashes[i];
      std::uint64_t published = 0;
      if (kind == 0) {
        const std::uint64_t local = events.local_hashes[i];
        // Native offload sends hashes only: the block has the name that it has on the device.
        const std::uint64_t named = local == 0 ? name_of(tier, hash) : name(hash, local, before, before_name);
        if (arrives(tier, hash, named)) published = named;
        before = hash;
        before_name = named;
      } else {
        published = leaves(tier, hash);
      }
      count_row();
      if (published != 0) {
        out.sequence_hashes.push_back(published);
        out.local_hashes.push_back(events.local_hashes[i]);
      } else if (kind == 0) {
        if (static_cast<std::int64_t>(out.sequence_hashes.size()) > out.offsets.back()) finish(out, 0, tier, parent);
        parent = before_name;
      }
    }
    if (static_cast<std::int64_t>(out.sequence_hashes.size()) > out.offsets.back()) finish(out, kind, tier, parent);
  }
  return out;
}

void Consolidator::clear() noexcept {
  for (auto& tier : copies_) tier.clear();
  for (auto& tier : named_) tier.clear();
  live_ = 0;
  distance_.wrong_now = 0;
}

std::uint64_t Consolidator::name(std::uint64_t hash, std::uint64_t local, std::uint64_t parent,
                                 std::uint64_t parent_name) const {
  if (!by_content_) return hash;
  if (parent != 0 && parent_name == 0) return 0;
  return parent == 0 ? local : chain_hash(parent_name, local);
}

// Searches the tier itself, then the others: a block has the same name on all of them.
std::uint64_t Consolidator::name_of(std::uint8_t tier, std::uint64_t hash) const {
  if (!by_content_) return hash;
  for (std::size_t i = 0; i < copies_.size(); ++i) {
    const auto& tier_copies = copies_[(tier + i) % copies_.size()];
    if (const auto found = tier_copies.find(hash); found != tier_copies.end()) return found->second.name;
  }
  return 0;
}

bool Consolidator::arrives(std::uint8_t tier, std::uint64_t hash, std::uint64_t name) {
  auto& tier_copies = copies_[tier];
  const auto found = tier_copies.find(hash);
  if (found != tier_copies.end()) {
    ++distance_.second_copies;
    ++found->second.count;
    distance_.wrong_now -= found->second.believed_gone;
    found->second.believed_gone = false;
    return false;
  }
  if (name == 0) {
    ++distance_.unnamed;
    return false;
  }
  if (live_ >= max_blocks_) {
    ++distance_.overflowed;
    return false;
  }
  tier_copies.emplace(hash, Copies{name, 1, false});
  ++live_;
  return !by_content_ || ++named_[tier][name] == 1;
}

std::uint64_t Consolidator::leaves(std::uint8_t tier, std::uint64_t hash) {
  auto& tier_copies = copies_[tier];
  const auto found = tier_copies.find(hash);
  if (found == tier_copies.end()) {
    ++distance_.unknown_removals;
    return 0;
  }
  Copies& copies = found->second;
  UNDERSTUDY_ASSERT(copies.count > 0 && live_ > 0, "removes more copies than were stored");
  if (--copies.count == 0) {
    const std::uint64_t name = copies.name;
    distance_.wrong_now -= copies.believed_gone;
    tier_copies.erase(found);
    --live_;
    return by_content_ && !forget_name(tier, name) ? 0 : name;
  }
  ++distance_.early_removals;
  distance_.wrong_now += !copies.believed_gone;
  copies.believed_gone = true;
  return 0;
}

bool Consolidator::forget_name(std::uint8_t tier, std::uint64_t name) {
  const auto found = named_[tier].find(name);
  UNDERSTUDY_ASSERT(found != named_[tier].end(), "forgets a name that no block has");
  if (--found->second != 0) return false;
  named_[tier].erase(found);
  return true;
}

void Consolidator::count_row() {
  ++distance_.blocks;
  distance_.wrong_sum += distance_.wrong_now;
  distance_.wrong_peak = std::max(distance_.wrong_peak, distance_.wrong_now);
}

}  // namespace understudy
