#include "tiers/host_order.hpp"

#include <algorithm>
#include <compare>
#include <map>
#include <utility>

#include "base/assert.hpp"
#include "tiers/evicted_keys.hpp"

namespace understudy {

void ChunkList::push_back(SlotId slot) noexcept {
  chunks_[slot].prev = back_;
  chunks_[slot].next = kNoSlot;
  (back_ == kNoSlot ? front_ : chunks_[back_].next) = slot;
  back_ = slot;
  ++size_;
}

void ChunkList::remove(SlotId slot) noexcept {
  UNDERSTUDY_ASSERT(size_ > 0, "removes a chunk from an empty list");
  const SlotId before = chunks_[slot].prev;
  const SlotId after = chunks_[slot].next;
  (before == kNoSlot ? front_ : chunks_[before].next) = after;
  (after == kNoSlot ? back_ : chunks_[after].prev) = before;
  --size_;
}

namespace {

// A list of chunks, least recently used first.
class ListedOrder : public HostOrder {
 public:
  explicit ListedOrder(HostChunks& chunks) : chunks_(chunks), list_(chunks) {}

  bool evict(std::size_t count, std::vector<SlotId>& out) override {
    const std::size_t before = out.size();
    for (SlotId slot = list_.front(); slot != kNoSlot && out.size() < before + count; slot = list_.after(slot)) {
      if (chunks_[slot].evictable()) out.push_back(slot);
    }
    if (out.size() < before + count) {
      out.resize(before);
      return false;
    }
    for (std::size_t i = before; i < out.size(); ++i) list_.remove(out[i]);
    return true;
  }
  std::vector<SlotId> oldest(std::size_t limit) const override {
    std::vector<SlotId> out;
    for (SlotId slot = list_.front(); slot != kNoSlot && out.size() < limit; slot = list_.after(slot)) {
      if (chunks_[slot].idle()) out.push_back(slot);
    }
    return out;
  }

 protected:
  HostChunks& chunks_;
  ChunkList list_;
};

// Idle chunks only: a chunk joins, as the youngest, when its transfer is done.
class IdleLru final : public ListedOrder {
 public:
  using ListedOrder::ListedOrder;
  void inserted(ChunkUser, std::span<const std::uint32_t>, std::span<const SlotId>) override {}
  void idle(SlotId slot) override { list_.push_back(slot); }
  void busy(SlotId slot) override { list_.remove(slot); }
  void touch(std::span<const BlockIdentity>, std::span<const SlotId> slots) override {
    for (std::size_t i = slots.size(); i > 0; --i) {
      const SlotId slot = slots[i - 1];
      if (slot != kNoSlot && chunks_[slot].idle()) list_.refresh(slot);
    }
  }
};

// All chunks, by insertion or by the last end of a request that used them.
class RequestLru final : public ListedOrder {
 public:
  using ListedOrder::ListedOrder;
  void inserted(ChunkUser, std::span<const std::uint32_t>, std::span<const SlotId> slots) override {
    for (const SlotId slot : slots) list_.push_back(slot);
  }
  void ended(std::span<const ChunkMemo> memos, std::span<const SlotId> slots) override {
    for (std::size_t i = slots.size(); i > 0; --i) {
      if ((memos[i - 1].uses & kSeen) != 0 && slots[i - 1] != kNoSlot) list_.refresh(slots[i - 1]);
    }
  }
};

// All chunks by rank, the smallest evicted first. A request draws one number for all chunks that it uses: they lie
// together, the last of them first, however they were batched. When it ends, its chunks are ranked anew.
class RankedLru final : public HostOrder {
 public:
  explicit RankedLru(HostChunks& chunks) : chunks_(chunks), ranks_(chunks.size()) {}

  void accessed(ChunkUser user, std::span<const FirstUse> uses) override {
    if (uses.empty()) return;
    draw(user);
    for (const FirstUse& use : uses) {
      if (use.slot == kNoSlot) continue;
      const Rank rank = rank_of(user, use.place);
      if (ranks_[use.slot] < rank) move(use.slot, rank);
    }
  }
  void inserted(ChunkUser user, std::span<const std::uint32_t> places, std::span<const SlotId> slots) override {
    if (slots.empty()) return;
    draw(user);
    for (std::size_t i = 0; i < slots.size(); ++i) place(slots[i], rank_of(user, places[i]));
  }
  void ended(std::span<const ChunkMemo> memos, std::span<const SlotId> slots) override {
    for (std::size_t i = slots.size(); i > 0; --i) {
      if ((memos[i - 1].uses & kSeen) != 0 && slots[i - 1] != kNoSlot) move(slots[i - 1], {++numbers_, 0});
    }
  }
  bool evict(std::size_t count, std::vector<SlotId>& out) override {
    const std::size_t before = out.size();
    for (auto at = order_.begin(); at != order_.end() && out.size() < before + count; ++at) {
      if (chunks_[at->second].evictable()) out.push_back(at->second);
    }
    if (out.size() < before + count) {
      out.resize(before);
      return false;
    }
    for (std::size_t i = before; i < out.size(); ++i) order_.erase(ranks_[out[i]]);
    return true;
  }
  std::vector<SlotId> oldest(std::size_t limit) const override {
    std::vector<SlotId> out;
    for (auto at = order_.begin(); at != order_.end() && out.size() < limit; ++at) {
      if (chunks_[at->second].idle()) out.push_back(at->second);
    }
    return out;
  }

 private:
  struct Rank {
    std::uint64_t number = 0;
    std::int64_t place = 0;  // minus the position

    auto operator<=>(const Rank&) const = default;
  };

  void draw(ChunkUser user) {
    if (user.number == 0) user.number = ++numbers_;
  }
  static Rank rank_of(ChunkUser user, std::uint32_t place) {
    return {user.number, -static_cast<std::int64_t>(user.position(place) + 1)};
  }
  void place(SlotId slot, Rank rank) {
    ranks_[slot] = rank;
    const bool fresh = order_.emplace(rank, slot).second;
    UNDERSTUDY_ASSERT(fresh, "two chunks have one rank");
    (void)fresh;
  }
  void move(SlotId slot, Rank rank) {
    order_.erase(ranks_[slot]);
    place(slot, rank);
  }

  HostChunks& chunks_;
  HugeArray<Rank> ranks_;  // by slot
  std::map<Rank, SlotId> order_;
  std::uint64_t numbers_ = 0;
};

constexpr std::size_t kAhead = 16;  // evicted keys prefetched at once

// Adaptive replacement: chunks seen once, chunks seen again, and the evicted-key history of both. `target_` is the
// target size of the first list.
class Arc : public HostOrder {
 public:
  Arc(HostChunks& chunks, bool falls_back) : chunks_(chunks), once_(chunks), often_(chunks), falls_back_(falls_back) {}

  void inserted(ChunkUser, std::span<const std::uint32_t>, std::span<const SlotId> slots) override {
    const auto key = [&](std::size_t i) -> const LineageHash& { return chunks_[slots[i]].key; };
    for (const SlotId slot : slots) {
      chunks_[slot].often = false;
      once_.push_back(slot);
    }
    if (std::exchange(never_here_, 0) == slots.size()) return;  // all of them are new
    ahead(slots.size(), key, [&](std::size_t i) {
      if (const EvictedKeys::Node evicted = evicted_.find(key(i)); evicted != EvictedKeys::kNone)
        evicted_.remove(evicted);
    });
  }
  bool evict(std::size_t count, std::vector<SlotId>& out) override {
    const std::size_t before = out.size();
    std::size_t size = once_.size();
    SlotId once = next(once_.front());
    SlotId often = next(often_.front());
    while (out.size() < before + count) {
      const bool above = size >= static_cast<std::size_t>(target_);
      const bool from_once = once != kNoSlot && (above || (often == kNoSlot && falls_back_));
      if (!from_once && often == kNoSlot) {
        out.resize(before);
        return false;
      }
      SlotId& slot = from_once ? once : often;
      out.push_back(slot);
      if (from_once) --size;
      slot = next(chunks_[slot].next);
    }
    const auto key = [&](std::size_t i) -> const LineageHash& { return chunks_[out[before + i]].key; };
    ahead(count, key, [&](std::size_t i) {
      const SlotId slot = out[before + i];
      const bool seen_again = chunks_[slot].often;
      (seen_again ? often_ : once_).remove(slot);
      evicted_.add(seen_again ? EvictedKeys::kOften : EvictedKeys::kOnce, chunks_[slot].key);
    });
    evicted_.trim(EvictedKeys::kOnce, chunks_.size());
    evicted_.trim(EvictedKeys::kOften, chunks_.size());
    return true;
  }
  std::vector<SlotId> oldest(std::size_t) const override { return {}; }
  bool has_oldest() const noexcept override { return false; }

 protected:
  // Adapts the target when a missing key is in the history: the list that evicted it too early grows. False: it is not.
  bool learn(const LineageHash& key) {
    const EvictedKeys::Node evicted = evicted_.find(key);
    if (evicted == EvictedKeys::kNone) return false;
    const auto once = static_cast<double>(evicted_.size(EvictedKeys::kOnce));
    const auto often = static_cast<double>(evicted_.size(EvictedKeys::kOften));
    if (evicted_.list_of(evicted) == EvictedKeys::kOnce) {
      target_ = std::min(target_ + std::max(1.0, often / once), static_cast<double>(chunks_.size()));
    } else {
      target_ = std::max(target_ - std::max(1.0, once / often), 0.0);
    }
    UNDERSTUDY_ASSERT(target_ >= 0 && target_ <= static_cast<double>(chunks_.size()), "ARC's target is out of range");
    evicted_.refresh(evicted);
    return true;
  }
  void refresh(SlotId slot) { (chunks_[slot].often ? often_ : once_).refresh(slot); }
  void promote(SlotId slot) {
    if (chunks_[slot].often) return often_.refresh(slot);
    once_.remove(slot);
    often_.push_back(slot);
    chunks_[slot].often = true;
  }
  // Calls visit(i) for all below `count`, prefetching the history of key(i) some steps ahead.
  template <typename Key, typename Visit>
  void ahead(std::size_t count, Key key, Visit visit) {
    for (std::size_t i = 0; i < std::min(count, kAhead); ++i) evicted_.warm(key(i));
    for (std::size_t i = 0; i < count; ++i) {
      if (i + kAhead < count) evicted_.warm(key(i + kAhead));
      visit(i);
    }
  }

  HostChunks& chunks_;
  std::size_t never_here_ = 0;  // of the keys missed last, those not in the history

 private:
  // The first evictable chunk from `slot` on.
  SlotId next(SlotId slot) const {
    while (slot != kNoSlot && !chunks_[slot].evictable()) slot = chunks_[slot].next;
    return slot;
  }

  ChunkList once_;
  ChunkList often_;
  EvictedKeys evicted_;
  double target_ = 0;
  bool falls_back_;
};

class TouchedArc final : public Arc {
 public:
  using Arc::Arc;
  void touch(std::span<const BlockIdentity> keys, std::span<const SlotId> slots) override {
    const std::size_t last = slots.size() - 1;
    const auto key = [&](std::size_t i) -> const LineageHash& { return keys[last - i].lineage; };
    ahead(slots.size(), key, [&](std::size_t i) {
      const SlotId slot = slots[last - i];
      if (slot == kNoSlot) {
        (void)learn(key(i));
      } else if (chunks_[slot].ready()) {
        promote(slot);
      } else {
        refresh(slot);  // just stored, and not used again
      }
    });
  }
};

class RequestArc final : public Arc {
 public:
  using Arc::Arc;
  void missed(std::span<const LineageHash> keys) override {
    const auto key = [&](std::size_t i) -> const LineageHash& { return keys[keys.size() - 1 - i]; };
    never_here_ = keys.size();
    ahead(keys.size(), key, [&](std::size_t i) {
      if (learn(key(i))) --never_here_;
    });
  }
  void ended(std::span<const ChunkMemo> memos, std::span<const SlotId> slots) override {
    for (std::size_t i = slots.size(); i > 0; --i) {
      const std::uint8_t uses = memos[i - 1].uses;
      if ((uses & kSeen) == 0 || slots[i - 1] == kNoSlot) continue;
      if ((uses & kReused) != 0) {
        promote(slots[i - 1]);
      } else if ((uses & kInserted) != 0) {
        refresh(slots[i - 1]);
      }
    }
  }
};

}  // namespace

std::unique_ptr<HostOrder> make_host_order(const HostRules& rules, HostChunks& chunks) {
  if (rules.policy == HostPolicy::Lru) {
    if (rules.ranks) return std::make_unique<RankedLru>(chunks);
    if (rules.touches) return std::make_unique<IdleLru>(chunks);
    return std::make_unique<RequestLru>(chunks);
  }
  if (rules.touches) return std::make_unique<TouchedArc>(chunks, rules.arc_falls_back);
  return std::make_unique<RequestArc>(chunks, rules.arc_falls_back);
}

}  // namespace understudy
