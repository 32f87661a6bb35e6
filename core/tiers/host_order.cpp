#include "tiers/host_order.hpp"

#include <algorithm>

namespace understudy {

void ChunkList::push_back(SlotId slot) noexcept {
  links_.prev[slot] = back_;
  links_.next[slot] = kNoSlot;
  (back_ == kNoSlot ? front_ : links_.next[back_]) = slot;
  back_ = slot;
  ++size_;
}

void ChunkList::remove(SlotId slot) noexcept {
  const SlotId before = links_.prev[slot];
  const SlotId after = links_.next[slot];
  (before == kNoSlot ? front_ : links_.next[before]) = after;
  (after == kNoSlot ? back_ : links_.prev[after]) = before;
  --size_;
}

namespace {

// A list of chunks, least recently used first.
class ListedOrder : public HostOrder {
 public:
  explicit ListedOrder(const HostChunks& chunks) : chunks_(chunks), links_(chunks.refs.size()), list_(links_) {}

  bool evict(std::size_t count, std::vector<SlotId>& out) override {
    const std::size_t before = out.size();
    for (SlotId slot = list_.front(); slot != kNoSlot && out.size() < before + count; slot = list_.after(slot)) {
      if (chunks_.evictable(slot)) out.push_back(slot);
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
      if (chunks_.refs[slot] == 0) out.push_back(slot);
    }
    return out;
  }

 protected:
  const HostChunks& chunks_;
  ChunkList::Links links_;
  ChunkList list_;
};

// Idle chunks only: one joins when its transfer is done, and is young then.
class IdleLru final : public ListedOrder {
 public:
  using ListedOrder::ListedOrder;
  void inserted(SlotId, const LineageHash&) override {}
  void idle(SlotId slot) override { list_.push_back(slot); }
  void busy(SlotId slot) override { list_.remove(slot); }
  void touch(std::span<const LineageHash>, std::span<const SlotId> slots) override {
    for (std::size_t i = slots.size(); i > 0; --i) {
      const SlotId slot = slots[i - 1];
      if (slot != kNoSlot && chunks_.refs[slot] == 0) list_.refresh(slot);
    }
  }
};

// All chunks, by when they were inserted or when a request that used them ended last.
class RequestLru final : public ListedOrder {
 public:
  using ListedOrder::ListedOrder;
  void inserted(SlotId slot, const LineageHash&) override { list_.push_back(slot); }
  void ended(std::span<const std::uint8_t> uses, std::span<const SlotId> slots) override {
    for (std::size_t i = slots.size(); i > 0; --i) {
      if ((uses[i - 1] & kSeen) != 0 && slots[i - 1] != kNoSlot) list_.refresh(slots[i - 1]);
    }
  }
};

// Keys of chunks that were evicted, oldest first.
class Ghosts {
 public:
  std::size_t size() const noexcept { return order_.size(); }
  bool has(const LineageHash& key) const { return places_.contains(key); }
  void add(const LineageHash& key) { places_.emplace(key, order_.insert(order_.end(), key)); }
  void remove(const LineageHash& key) {
    const auto place = places_.find(key);
    if (place == places_.end()) return;
    order_.erase(place->second);
    places_.erase(place);
  }
  void refresh(const LineageHash& key) { order_.splice(order_.end(), order_, places_.at(key)); }
  void trim(std::size_t size) {
    while (order_.size() > size) remove(LineageHash(order_.front()));
  }

 private:
  struct Hash {
    std::size_t operator()(const LineageHash& key) const noexcept {
      return static_cast<std::size_t>(key.lo ^ (key.hi * 0x9E3779B97F4A7C15u));
    }
  };
  std::list<LineageHash> order_;
  std::unordered_map<LineageHash, std::list<LineageHash>::iterator, Hash> places_;
};

// Adaptive replacement: chunks seen once, chunks seen again, and the ghosts of both. `target_` is the size that the
// first should have.
class Arc : public HostOrder {
 public:
  Arc(const HostChunks& chunks, bool falls_back)
      : chunks_(chunks),
        links_(chunks.refs.size()),
        once_(links_),
        often_(links_),
        keys_(chunks.refs.size()),
        in_often_(chunks.refs.size()),
        falls_back_(falls_back) {}

  void inserted(SlotId slot, const LineageHash& key) override {
    keys_[slot] = key;
    in_often_[slot] = false;
    once_.push_back(slot);
    gone_once_.remove(key);
    gone_often_.remove(key);
  }
  bool evict(std::size_t count, std::vector<SlotId>& out) override {
    const std::size_t before = out.size();
    std::size_t size = once_.size();
    SlotId once = next(once_, once_.front());
    SlotId often = next(often_, often_.front());
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
      slot = next(from_once ? once_ : often_, links_.next[slot]);
    }
    for (std::size_t i = before; i < out.size(); ++i) {
      const SlotId slot = out[i];
      (in_often_[slot] ? often_ : once_).remove(slot);
      (in_often_[slot] ? gone_often_ : gone_once_).add(keys_[slot]);
    }
    gone_once_.trim(capacity());
    gone_often_.trim(capacity());
    return true;
  }
  std::vector<SlotId> oldest(std::size_t) const override { return {}; }
  bool has_oldest() const noexcept override { return false; }

 protected:
  // A key that is not here, but was: what left too early should have more room.
  void learn(const LineageHash& key) {
    const auto once = static_cast<double>(gone_once_.size());
    const auto often = static_cast<double>(gone_often_.size());
    if (gone_once_.has(key)) {
      target_ = std::min(target_ + std::max(1.0, often / once), static_cast<double>(capacity()));
      gone_once_.refresh(key);
    } else if (gone_often_.has(key)) {
      target_ = std::max(target_ - std::max(1.0, once / often), 0.0);
      gone_often_.refresh(key);
    }
  }
  void refresh(SlotId slot) { (in_often_[slot] ? often_ : once_).refresh(slot); }
  void promote(SlotId slot) {
    if (in_often_[slot]) return often_.refresh(slot);
    once_.remove(slot);
    often_.push_back(slot);
    in_often_[slot] = true;
  }

  const HostChunks& chunks_;

 private:
  std::size_t capacity() const noexcept { return keys_.size(); }
  // The first that may go, from `slot` on.
  SlotId next(const ChunkList& list, SlotId slot) const {
    while (slot != kNoSlot && !chunks_.evictable(slot)) slot = list.after(slot);
    return slot;
  }

  ChunkList::Links links_;
  ChunkList once_;
  ChunkList often_;
  std::vector<LineageHash> keys_;
  std::vector<std::uint8_t> in_often_;
  Ghosts gone_once_;
  Ghosts gone_often_;
  double target_ = 0;
  bool falls_back_;  // where nobody seen again may go, one seen once does, however few there are
};

class TouchedArc final : public Arc {
 public:
  explicit TouchedArc(const HostChunks& chunks) : Arc(chunks, false) {}
  void touch(std::span<const LineageHash> keys, std::span<const SlotId> slots) override {
    for (std::size_t i = slots.size(); i > 0; --i) {
      const SlotId slot = slots[i - 1];
      if (slot == kNoSlot) {
        learn(keys[i - 1]);
      } else if (chunks_.ready(slot)) {
        promote(slot);
      } else {
        refresh(slot);  // it was only just stored, and not used again
      }
    }
  }
};

class RequestArc final : public Arc {
 public:
  explicit RequestArc(const HostChunks& chunks) : Arc(chunks, true) {}
  void missed(std::span<const LineageHash> keys) override {
    for (std::size_t i = keys.size(); i > 0; --i) learn(keys[i - 1]);
  }
  void ended(std::span<const std::uint8_t> uses, std::span<const SlotId> slots) override {
    for (std::size_t i = slots.size(); i > 0; --i) {
      const std::uint8_t use = uses[i - 1];
      if ((use & kSeen) == 0 || slots[i - 1] == kNoSlot) continue;
      if ((use & kReused) != 0) {
        promote(slots[i - 1]);
      } else if ((use & kInserted) != 0) {
        refresh(slots[i - 1]);
      }
    }
  }
};

}  // namespace

std::unique_ptr<HostOrder> make_host_order(HostPolicy policy, bool touches, const HostChunks& chunks) {
  if (policy == HostPolicy::Lru) {
    if (touches) return std::make_unique<IdleLru>(chunks);
    return std::make_unique<RequestLru>(chunks);
  }
  if (touches) return std::make_unique<TouchedArc>(chunks);
  return std::make_unique<RequestArc>(chunks);
}

}  // namespace understudy
