// The device's blocks, as tiers use them: pool 0 of the worker's store, or the pool that several KV groups share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "store/block_store.hpp"

namespace understudy {

// A device whose blocks are not in the worker's store. Identities are those that the tiers below know.
class DeviceBlocks {
 public:
  virtual ~DeviceBlocks() = default;

  virtual std::uint64_t num_blocks() const = 0;
  virtual std::uint64_t available() const = 0;
  // The block's slot; kNoSlot: absent.
  virtual SlotId find(const BlockIdentity& block) const = 0;
  // Fills `out`, for which enough are available.
  virtual void allocate(std::span<SlotId> out) = 0;
  // Same; writes evicted blocks to the ends of `blocks` and `slots`, the last evicted first, and returns their number.
  // A slot is kNoSlot where another copy of the block stays.
  virtual std::size_t allocate(std::span<SlotId> out, std::span<BlockIdentity> blocks, std::span<SlotId> slots) = 0;
  // Blocks that go when so many slots are allocated.
  virtual std::vector<BlockIdentity> next_evicted(std::size_t count) const = 0;
  // Returns slots that hold no block: they are handed out next, in this order.
  virtual void give_back(std::span<const SlotId> slots) = 0;
  // Registers blocks in allocated slots.
  virtual void commit(std::span<const SlotId> slots, std::span<const BlockIdentity> blocks) = 0;
  virtual void reference(std::span<const SlotId> slots) = 0;
  // Drops one reference each, from the last to the first.
  virtual void release(std::span<const SlotId> slots) = 0;
};

// Either kind of device.
class TierDevice {
 public:
  explicit TierDevice(BlockStore& store) : store_(store) {}

  void use(DeviceBlocks& groups) noexcept { groups_ = &groups; }
  bool has_groups() const noexcept { return groups_ != nullptr; }

  std::uint64_t num_blocks() const { return groups_ ? groups_->num_blocks() : store_.num_blocks(kPool); }
  std::uint64_t available() const { return groups_ ? groups_->available() : store_.available(kPool); }
  // True if a user-defined policy evicts.
  bool advised() const { return groups_ == nullptr && store_.advised(kPool); }
  std::vector<BlockIdentity> next_evicted(std::size_t count) const {
    return groups_ ? groups_->next_evicted(count) : store_.next_evicted(kPool, count);
  }

  // Slots of `blocks`; kNoSlot where absent. `none` is scratch.
  void locate(std::span<const BlockIdentity> blocks, std::span<const std::uint32_t> tags, SlotId* out,
              SlotId* none) const {
    if (groups_ == nullptr) return store_.locate(kPool, blocks, tags, out, none);  // nothing is claimed there
    for (const BlockIdentity& block : blocks) *out++ = groups_->find(block);
  }
  void has_blocks(std::span<const BlockIdentity> blocks, bool* out) const {
    if (groups_ == nullptr) return store_.has_blocks(kPool, blocks, out);
    for (const BlockIdentity& block : blocks) *out++ = groups_->find(block) != kNoSlot;
  }
  SlotId find(const BlockIdentity& block) const {
    if (groups_ != nullptr) return groups_->find(block);
    SlotId slot = kNoSlot;
    std::uint32_t references = 0;
    store_.peek(kPool, {&block, 1}, &slot, &references);
    return slot;
  }

  void allocate(std::span<SlotId> out) { groups_ ? groups_->allocate(out) : store_.allocate(kPool, out); }
  std::size_t allocate(std::span<SlotId> out, const BlockStore::Leaving& leaving) {
    return groups_ ? groups_->allocate(out, leaving.blocks, leaving.slots) : store_.allocate(kPool, out, leaving);
  }
  void give_back(std::span<const SlotId> slots) {
    groups_ ? groups_->give_back(slots) : store_.give_back(kPool, slots);
  }
  // Same without checks.
  void hand_back(std::span<const SlotId> slots) {
    groups_ ? groups_->give_back(slots) : store_.hand_back(kPool, slots);
  }
  void commit(std::span<SlotId> slots, std::span<const BlockIdentity> blocks) {
    groups_ ? groups_->commit(slots, blocks) : store_.commit(kPool, slots, blocks);
  }
  void reference(std::span<const SlotId> slots) {
    groups_ ? groups_->reference(slots) : store_.reference(kPool, slots);
  }
  // Same for slots that are referenced.
  void retain(std::span<const SlotId> slots) { groups_ ? groups_->reference(slots) : store_.retain(kPool, slots); }
  void release(std::span<const SlotId> slots) {
    groups_ ? groups_->release(slots) : store_.release(kPool, slots, true);
  }

 private:
  static constexpr std::size_t kPool = 0;

  BlockStore& store_;
  DeviceBlocks* groups_ = nullptr;
};

}  // namespace understudy
