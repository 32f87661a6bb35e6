// Host tier of vLLM's native offloading: chunks of blocks, their transfers and their eviction.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "store/block_store.hpp"
#include "tiers/host_order.hpp"

namespace understudy {

// Chunks are blocks of pool 1 of the store, each under the identity of its last block. A chunk being written is claimed
// there, one being loaded is referenced; eviction is decided here.
class VllmHost {
 public:
  static constexpr std::size_t kPool = 1;

  VllmHost(BlockStore& store, const HostRules& rules);

  // In all calls, `memos` are the request's memos of its chunks `keys`, by position.

  struct Found {
    std::size_t chunks = 0;  // leading chunks that are here
    bool writing = false;    // one of them is being written
    bool loading = false;    // a load reads one of them
  };
  // Finds the leading chunks that are here.
  Found find(std::span<const BlockIdentity> keys, std::span<ChunkMemo> memos);
  // Refreshes all chunks of a request (in releases that do that).
  void touch(std::span<const BlockIdentity> keys, std::span<ChunkMemo> memos);
  // ── Load ──
  // References ready chunks: not evictable until `loaded`.
  void begin_load(ChunkUser user, std::span<const BlockIdentity> keys, std::span<ChunkMemo> memos,
                  std::vector<SlotId>& slots);
  void loaded(std::span<const SlotId> slots);
  // ── Store ──
  // Makes room for the absent chunks of `offered`; returns their indices and slots. False: no room, nothing changed.
  bool begin_store(ChunkUser user, std::span<const BlockIdentity> offered, std::span<ChunkMemo> memos,
                   std::vector<std::uint32_t>& places, std::vector<SlotId>& slots);
  void stored(std::span<const SlotId> slots);
  // Drop all chunks, also those in transfer: their ends are not to be reported. Slots are handed out from 0 again.
  void reset();
  // A request that used chunks has ended.
  void ended(std::span<const BlockIdentity> keys, std::span<ChunkMemo> memos);

  // ── Watch ──
  std::uint64_t capacity() const noexcept { return chunks_.size(); }
  std::uint64_t resident() const noexcept { return resident_; }
  std::uint64_t ready() const noexcept { return resident_ - writing_; }
  std::uint64_t writing() const noexcept { return writing_; }
  std::uint64_t loading() const noexcept { return loading_; }  // chunks being read
  // Absent chunks of the last begin_store.
  std::size_t num_absent() const noexcept { return absent_.size(); }
  // Evicted by the last begin_store, in order.
  const std::vector<LineageHash>& evicted() const noexcept { return evicted_; }
  std::vector<LineageHash> oldest(std::size_t limit) const;
  bool has_oldest() const noexcept { return order_->has_oldest(); }
  void check() const;  // InvariantViolated

 private:
  // Finds the slot of each key, written or being written, in found_.
  void locate(std::span<const BlockIdentity> keys, std::span<ChunkMemo> memos);
  bool still_at(SlotId slot, const BlockIdentity& key) const noexcept {
    return slot != kNoSlot && chunks_[slot].key == key.lineage && chunks_[slot].here();
  }

  BlockStore& store_;
  HostChunks chunks_;  // by slot
  HostRules rules_;
  std::unique_ptr<HostOrder> order_;
  std::uint64_t resident_ = 0;
  std::uint64_t writing_ = 0;
  std::uint64_t loading_ = 0;
  std::vector<LineageHash> evicted_;

  // Scratch.
  std::vector<SlotId> found_;
  std::vector<SlotId> claimed_;
  std::vector<std::uint32_t> tags_;
  std::vector<LineageHash> names_;
  std::vector<FirstUse> first_uses_;
  std::vector<BlockIdentity> absent_;
  std::vector<SlotId> victims_;
};

}  // namespace understudy
