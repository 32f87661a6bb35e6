#include "curves/fixed_size.hpp"

#include <algorithm>
#include <memory>
#include <vector>

#include "base/errors.hpp"
#include "curves/optimal.hpp"
#include "eviction/frequency_sketch.hpp"
#include "slots/slot.hpp"

namespace understudy {

namespace {

// Order of unpinned slots by one of the pools' policies.
class PolicyOrder {
 public:
  PolicyOrder(const BlockVisits& visits, PolicyKind kind, std::uint32_t size)
      : visits_(visits), slots_(kSentinels + std::size_t{size}), available_(size) {
    PolicySpace space{slots_.data(), kSentinels, size, {}, nullptr};
    for (SlotId i = 0; i < kSentinels; ++i) space.sentinels[i] = i;
    if (kind == PolicyKind::MultiLru) {
      sketch_ = std::make_unique<FrequencySketch>(size);
      space.sketch = sketch_.get();
    }
    PolicyConfig config;
    config.kind = kind;
    policy_ = make_policy(config, space);
    policy_->grow(size);
  }

  std::size_t available() const noexcept { return available_; }
  void remove(std::uint32_t slot) {
    const SlotId id = kSentinels + slot;
    policy_->remove(id);
    slots_[id].state = SlotState::Primary;
    --available_;
  }
  std::uint32_t take() {
    SlotId id = 0;
    policy_->take({&id, 1});
    --available_;
    return id - kSentinels;
  }
  void fill(std::uint32_t slot, std::uint32_t block, std::uint32_t parent, std::size_t position) {
    Slot& at = slots_[kSentinels + slot];
    at.lineage = LineageHash::make(visits_.hash_of(block), position > 0, position > 0 ? visits_.hash_of(parent) : 0,
                                   static_cast<std::uint32_t>(position));
    at.state = SlotState::Primary;
  }
  void use(std::uint32_t slot, std::uint32_t) {
    if (sketch_) sketch_->touch(slots_[kSentinels + slot].lineage);
  }
  void insert(std::uint32_t slot) {
    const SlotId id = kSentinels + slot;
    slots_[id].state = SlotState::Inactive;
    policy_->insert({&id, 1});
    ++available_;
  }

 private:
  static constexpr SlotId kSentinels = 5;

  const BlockVisits& visits_;
  std::vector<Slot> slots_;
  std::unique_ptr<FrequencySketch> sketch_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::size_t available_;
};

// Order of unpinned slots by the next use of their blocks; slots without a next use, and empty ones, go first.
class OptimalOrder {
 public:
  OptimalOrder(std::vector<std::uint32_t> next, std::uint32_t size)
      : next_(std::move(next)), cached_(next_.size()), use_of_(size, kNoUse), slot_of_(next_.size()) {
    for (std::uint32_t slot = size; slot > 0; --slot) unused_.push_back(slot - 1);
    place_.resize(size);
    for (std::uint32_t slot = 0; slot < size; ++slot) place_[slot] = size - 1 - slot;
    available_ = size;
  }

  std::size_t available() const noexcept { return available_; }
  void remove(std::uint32_t slot) {
    --available_;
    if (use_of_[slot] != kNoUse) {
      cached_.erase(use_of_[slot]);
      return;
    }
    // It is read by a request that computes it again, so that no next use was known.
    const std::uint32_t last = unused_.back();
    unused_[place_[slot]] = last;
    place_[last] = place_[slot];
    unused_.pop_back();
  }
  std::uint32_t take() {
    --available_;
    if (!unused_.empty()) {
      const std::uint32_t slot = unused_.back();
      unused_.pop_back();
      return slot;
    }
    const std::uint32_t latest = cached_.largest();
    cached_.erase(latest);
    return slot_of_[latest];
  }
  void fill(std::uint32_t, std::uint32_t, std::uint32_t, std::size_t) {}
  void use(std::uint32_t slot, std::uint32_t visit) { use_of_[slot] = next_[visit]; }
  void insert(std::uint32_t slot) {
    ++available_;
    if (use_of_[slot] != kNoUse) {
      cached_.insert(use_of_[slot]);
      slot_of_[use_of_[slot]] = slot;
      return;
    }
    place_[slot] = static_cast<std::uint32_t>(unused_.size());
    unused_.push_back(slot);
  }

 private:
  std::vector<std::uint32_t> next_;
  NumberSet cached_;
  std::vector<std::uint32_t> use_of_;   // next use of a slot's block
  std::vector<std::uint32_t> slot_of_;  // by next use
  std::vector<std::uint32_t> unused_;   // slots without a next use
  std::vector<std::uint32_t> place_;    // of a slot in unused_
  std::size_t available_;
};

std::vector<std::int64_t> begun(const BlockVisits& visits, RunningOrder order) {
  enum : std::uint8_t { kWaits, kRuns, kEnded };
  std::vector<std::uint8_t> state(visits.rows(), kWaits);
  std::vector<std::int64_t> rows;
  for (const std::int64_t event : order) {
    const std::int64_t row = event < 0 ? ~event : event;
    visits.check_rows({&row, 1});
    std::uint8_t& is = state[static_cast<std::size_t>(row)];
    if (is != (event < 0 ? kRuns : kWaits)) {
      throw Error(ErrorKind::InvalidArgument, "order: row ", row, event < 0 ? " ends" : " begins",
                  " twice, or ends before it begins");
    }
    is = event < 0 ? kEnded : kRuns;
    if (event >= 0) rows.push_back(row);
  }
  if (2 * rows.size() != order.size()) throw Error(ErrorKind::InvalidArgument, "order: a row begins and never ends");
  return rows;
}

// Runs the requests on a cache of `size` slots whose unpinned ones `unpinned` orders.
template <typename Order>
PinnedHits run_pinned(const BlockVisits& visits, RunningOrder order, std::size_t warm_up, std::uint32_t size,
                      Order unpinned) {
  struct Held {
    std::uint32_t slot = kNoSlot;
    std::uint32_t references = 0;
  };
  std::vector<Held> held(visits.distinct());
  std::vector<std::uint32_t> block_of(size, kNoUse);
  PinnedHits out;
  std::size_t begins = 0;
  std::uint32_t visit = 0;
  // Blocks that a running request could not place are not released by it.
  std::vector<std::vector<bool>> placed(visits.rows());
  for (const std::int64_t event : order) {
    const auto row = static_cast<std::size_t>(event < 0 ? ~event : event);
    const std::span<const std::uint32_t> blocks = visits.blocks_of(row);
    std::vector<bool>& holds = placed[row];
    if (event < 0) {
      for (std::size_t i = blocks.size(); i > 0; --i) {
        Held& block = held[blocks[i - 1]];
        if (holds[i - 1] && --block.references == 0) unpinned.insert(block.slot);
      }
      holds = {};
      continue;
    }
    std::size_t found = 0;
    holds.assign(blocks.size(), false);
    // Blocks that are cached are pinned first: the request must not evict its own.
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      Held& block = held[blocks[i]];
      if (block.slot == kNoSlot) continue;
      if (block.references++ == 0) unpinned.remove(block.slot);
      holds[i] = true;
      unpinned.use(block.slot, visit + static_cast<std::uint32_t>(i));
      if (i == found && i < visits.readable(row)) ++found;
    }
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      if (holds[i]) continue;
      if (unpinned.available() == 0) {
        ++out.unplaced_blocks;
        continue;
      }
      Held& block = held[blocks[i]];
      block.slot = unpinned.take();
      block.references = 1;
      if (block_of[block.slot] != kNoUse) held[block_of[block.slot]].slot = kNoSlot;
      block_of[block.slot] = blocks[i];
      holds[i] = true;
      unpinned.fill(block.slot, blocks[i], i > 0 ? blocks[i - 1] : 0, i);
      unpinned.use(block.slot, visit + static_cast<std::uint32_t>(i));
    }
    visit += static_cast<std::uint32_t>(blocks.size());
    if (begins++ >= warm_up) out.hit_tokens += static_cast<std::int64_t>(visits.tokens_in(row, found));
  }
  return out;
}

}  // namespace

std::int64_t fifo_hit_tokens(const BlockVisits& visits, std::span<const std::int64_t> rows, std::size_t warm_up,
                             std::uint64_t size) {
  std::vector<bool> cached(visits.distinct());
  std::vector<std::uint32_t> ring(std::min<std::uint64_t>(size, visits.distinct()), kNoUse);
  if (ring.empty()) return 0;
  std::size_t oldest = 0;
  std::uint64_t hits = 0;
  for (std::size_t order = 0; order < rows.size(); ++order) {
    const auto row = static_cast<std::size_t>(rows[order]);
    const std::span<const std::uint32_t> blocks = visits.blocks_of(row);
    std::size_t found = 0;
    while (found < visits.readable(row) && cached[blocks[found]]) ++found;
    for (const std::uint32_t block : blocks) {
      if (cached[block]) continue;
      if (ring[oldest] != kNoUse) cached[ring[oldest]] = false;
      ring[oldest] = block;
      cached[block] = true;
      oldest = oldest + 1 == ring.size() ? 0 : oldest + 1;
    }
    if (order >= warm_up) hits += visits.tokens_in(row, found);
  }
  return static_cast<std::int64_t>(hits);
}

PinnedHits policy_hits(const BlockVisits& visits, RunningOrder order, std::size_t warm_up, std::uint32_t size,
                       PolicyKind kind) {
  (void)begun(visits, order);
  size = std::min(size, visits.distinct());  // a larger cache evicts nothing
  return run_pinned(visits, order, warm_up, size, PolicyOrder(visits, kind, size));
}

PinnedHits pinned_optimal_hits(const BlockVisits& visits, RunningOrder order, std::size_t warm_up, std::uint32_t size) {
  size = std::min(size, visits.distinct());
  return run_pinned(visits, order, warm_up, size, OptimalOrder(next_uses(visits, begun(visits, order)), size));
}

}  // namespace understudy
