// Blocks of several KV cache groups on tiers: their names there, and the longest hit over all tiers.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/vllm/groups/group_pool.hpp"
#include "engine/vllm/groups/kv_group.hpp"
#include "events/event_ring.hpp"
#include "tiers/group_block.hpp"
#include "tiers/worker_tiers.hpp"

namespace understudy {

// The rules are ours, not vLLM's: docs/hybrid.md. `units` are a request's identities at the unit of hashing.
class GroupTiers final : public DeviceBlocks {
 public:
  GroupTiers(const GroupLayout& layout, GroupPool& pool, const WorkerTiers& tiers)
      : layout_(layout), pool_(pool), tiers_(tiers) {}

  // Names the block of a group that ends with `unit`.
  BlockIdentity identity(const BlockIdentity& unit, std::size_t group) const {
    return block_of_group(unit, group, layout_.groups.size());
  }
  // Tokens of the longest hit that the device and the tiers down to `lowest` serve together; the device alone has the
  // first `known`.
  std::uint32_t find(std::span<const BlockIdentity> units, std::uint32_t known, std::uint32_t limit, Tier lowest) const;
  // Blocks that a hit of `tokens` tokens needs: a window's tail, the last state, the whole prefix of full attention.
  // `limit` and `lowest` are those of the `find` that returned the hit.
  struct Needed {
    std::vector<BlockIdentity> blocks;
    std::vector<WorkerTiers::WholeHit::Units> covers;
  };
  Needed needed(std::span<const BlockIdentity> units, std::uint32_t tokens, std::uint32_t limit, Tier lowest) const;

  // ── The device ──
  std::uint64_t num_blocks() const override { return pool_.num_blocks(); }
  std::uint64_t available() const override { return pool_.num_free(); }
  SlotId find(const BlockIdentity& block) const override;
  void allocate(std::span<SlotId> out) override { pool_.take(out); }
  std::size_t allocate(std::span<SlotId> out, std::span<BlockIdentity> blocks, std::span<SlotId> slots) override;
  std::vector<BlockIdentity> next_evicted(std::size_t count) const override;
  void give_back(std::span<const SlotId> slots) override { pool_.release(slots); }
  void commit(std::span<const SlotId> slots, std::span<const BlockIdentity> blocks) override;
  void reference(std::span<const SlotId> slots) override;
  void release(std::span<const SlotId> slots) override;

 private:
  using Kind = std::vector<std::size_t>;  // groups with equal settings

  bool on_device(std::span<const BlockIdentity> units, const Kind& kind, std::uint32_t end) const;
  // Whether each group's block that ends at `end` is on the device or on a tier down to `lowest`.
  bool present(std::span<const BlockIdentity> units, const Kind& kind, std::uint32_t end, Tier lowest) const;
  // End of the key under which the block is found that has the last tokens of a hit.
  std::uint32_t last_end(std::span<const BlockIdentity> units, const Kind& kind, std::uint32_t tokens,
                         std::uint32_t limit, Tier lowest) const;
  // Whether lookups can find a block of the group by a key of `end`.
  bool is_found_by(std::uint8_t group, std::uint32_t end) const {
    return layout_.partial_hits || end % layout_.groups[group].block_size == 0;
  }
  // Name of a block by its longest key; none: it has no key that lookups find.
  std::optional<BlockIdentity> name_of(SlotId slot) const;
  std::uint8_t group_of(const BlockIdentity& block) const { return group_of_block(block, layout_.groups.size()); }
  std::uint64_t content_of(const BlockIdentity& block) const {
    return group_key(block.sequence_hash(), group_of(block));  // which undoes itself
  }

  const GroupLayout& layout_;
  GroupPool& pool_;
  const WorkerTiers& tiers_;
  std::vector<SlotId> reversed_;  // scratch
};

}  // namespace understudy
