// The host tier of vLLM's native offloading: chunks of blocks, what transfers do with them, and who is evicted.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "store/block_store.hpp"
#include "tiers/host_order.hpp"

namespace understudy {

// Chunks are blocks of pool 1 of the store, each under the identity of its last block. One that is being written is
// claimed there, one that is being loaded referenced; which one goes is decided here.
class VllmHost {
 public:
  static constexpr std::size_t kPool = 1;

  VllmHost(BlockStore& store, const HostRules& rules);

  // In all of these, `memos` are what a request remembers of the chunks `keys`, which are its own, by position.

  struct Found {
    std::size_t chunks = 0;  // in a row
    bool writing = false;    // one of them is being written
    bool loading = false;    // somebody reads one
  };
  // How many are here, from the first on.
  Found find(std::span<const BlockIdentity> keys, std::span<ChunkMemo> memos);
  // All chunks of a request: they are young now (in releases that do that).
  void touch(std::span<const BlockIdentity> keys, std::span<ChunkMemo> memos);
  // ── Load ──
  // Chunks that are ready: nobody evicts them until `loaded`.
  void begin_load(std::span<const BlockIdentity> keys, std::span<ChunkMemo> memos, std::vector<SlotId>& slots);
  void loaded(std::span<const SlotId> slots);
  // ── Store ──
  // Makes room for those of `offered` that are absent: their places in it, and their slots. False: there is no room,
  // and nothing has changed.
  bool begin_store(std::span<const BlockIdentity> offered, std::span<ChunkMemo> memos,
                   std::vector<std::uint32_t>& places, std::vector<SlotId>& slots);
  void stored(std::span<const SlotId> slots);
  // A request that used chunks has ended.
  void ended(std::span<const BlockIdentity> keys, std::span<ChunkMemo> memos);

  // ── Watch ──
  std::uint64_t capacity() const noexcept { return chunks_.size(); }
  std::uint64_t resident() const noexcept { return resident_; }
  std::uint64_t ready() const noexcept { return resident_ - writing_; }
  std::uint64_t writing() const noexcept { return writing_; }
  std::uint64_t loading() const noexcept { return loading_; }  // chunks that somebody reads
  // Of those that were offered to the last begin_store, how many it had to find room for.
  std::size_t num_absent() const noexcept { return absent_.size(); }
  // Evicted by the last begin_store, in order.
  const std::vector<LineageHash>& evicted() const noexcept { return evicted_; }
  std::vector<LineageHash> oldest(std::size_t limit) const;
  bool has_oldest() const noexcept { return order_->has_oldest(); }
  void check() const;  // InvariantViolated

 private:
  // Where each of them is, written or being written, to found_.
  void locate(std::span<const BlockIdentity> keys, std::span<ChunkMemo> memos);
  bool still_at(SlotId slot, const BlockIdentity& key) const noexcept {
    return slot != kNoSlot && chunks_[slot].key == key.lineage && chunks_[slot].here();
  }

  BlockStore& store_;
  HostChunks chunks_;  // by slot
  std::unique_ptr<HostOrder> order_;
  bool touches_;
  std::uint64_t resident_ = 0;
  std::uint64_t writing_ = 0;
  std::uint64_t loading_ = 0;
  std::vector<LineageHash> evicted_;

  // Scratch.
  std::vector<SlotId> found_;
  std::vector<SlotId> claimed_;
  std::vector<std::uint32_t> tags_;
  std::vector<LineageHash> names_;
  std::vector<BlockIdentity> absent_;
  std::vector<SlotId> victims_;
};

}  // namespace understudy
