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

  VllmHost(BlockStore& store, HostPolicy policy, bool touches);

  struct Found {
    bool here = false;
    bool ready = false;    // else it is being written
    bool loading = false;  // somebody reads it
  };
  Found find(const BlockIdentity& key) const;

  // All chunks of a request, by position: they are young now (in releases that do that).
  void touch(std::span<const BlockIdentity> keys);
  // ── Load ──
  // Chunks that are ready: nobody evicts them until `loaded`. `uses` of each by the request.
  void begin_load(std::span<const BlockIdentity> keys, std::span<std::uint8_t> uses, std::vector<SlotId>& slots);
  void loaded(std::span<const SlotId> slots);
  // ── Store ──
  // Makes room for those of `offered` that are absent: their places in it, and their slots. False: there is no room,
  // and nothing has changed.
  bool begin_store(std::span<const BlockIdentity> offered, std::span<std::uint8_t> uses,
                   std::vector<std::uint32_t>& places, std::vector<SlotId>& slots);
  void stored(std::span<const SlotId> slots);
  // A request that used chunks has ended.
  void ended(std::span<const BlockIdentity> keys, std::span<const std::uint8_t> uses);

  // ── Watch ──
  std::uint64_t capacity() const noexcept { return chunks_.refs.size(); }
  std::uint64_t resident() const noexcept { return resident_; }
  std::uint64_t ready() const noexcept { return resident_ - writing_; }
  std::uint64_t writing() const noexcept { return writing_; }
  std::uint64_t loading() const noexcept { return loading_; }  // chunks that somebody reads
  // Evicted by the last begin_store, in order.
  const std::vector<LineageHash>& evicted() const noexcept { return evicted_; }
  std::vector<LineageHash> oldest(std::size_t limit) const;
  bool has_oldest() const noexcept { return order_->has_oldest(); }
  void check() const;  // InvariantViolated

 private:
  void locate(std::span<const BlockIdentity> keys);  // to found_

  BlockStore& store_;
  HostChunks chunks_;
  std::vector<LineageHash> keys_;  // by slot
  std::unique_ptr<HostOrder> order_;
  bool touches_;
  std::uint64_t resident_ = 0;
  std::uint64_t writing_ = 0;
  std::uint64_t loading_ = 0;
  std::vector<LineageHash> evicted_;

  // Scratch.
  std::vector<SlotId> found_;
  std::vector<SlotId> claimed_;
  std::vector<LineageHash> names_;
  std::vector<BlockIdentity> absent_;
  std::vector<SlotId> victims_;
};

}  // namespace understudy
