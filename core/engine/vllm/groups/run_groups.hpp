// Cache groups on one pool of runs: full attention and windows, with blocks of one size.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "engine/vllm/groups/grouped_backend.hpp"
#include "engine/vllm/kv/block_pool.hpp"
#include "engine/vllm/kv/prefix_cover.hpp"

namespace understudy {

// Equal to BlockGroups in every answer.
class RunGroups final : public GroupedBackend, private PoolListener {
 public:
  // Whether it can serve an engine of this configuration, tiers below apart.
  static bool serves(const VllmConfig& config);

  explicit RunGroups(const VllmConfig& config);

  void need_names(KvRequest& request, std::uint32_t tokens) override;
  void release_table(KvTable table) override;
  void forget_cached() override;
  std::uint64_t available() const override { return pool_.num_free(); }
  KvUsage usage() const override { return {pool_.counts().free, pool_.counts().cached}; }
  std::uint64_t evictions() const override { return pool_.counts().evictions - forgotten_; }
  std::uint64_t evictions_until_lost() const override;

  // ── Watch ──
  PoolMetrics metrics() const override;
  std::vector<SlotId> free_head(std::size_t count) const override { return pool_.free_head(count); }
  std::vector<GroupEvent> take_events() override { return std::exchange(events_, {}); }
  std::vector<std::uint64_t> contents() const override;
  std::uint32_t cached(std::span<const BlockIdentity> blocks) const override;
  std::uint64_t operations() const override { return pool_.operations(); }

 private:
  // ── Storage ──
  void begin_find(const KvRequest& request, std::uint32_t limit) override;
  std::uint32_t find_kind(const KvRequest&, const Kind& kind, std::uint32_t limit) override {
    return find_in(cover_, kind, limit);
  }
  void end_find(std::uint32_t tokens) override;
  std::size_t num_found(std::size_t) const override { return found_; }
  void adopt(Record& r, std::uint32_t total, bool copies_tail) override;
  // Blocks of all groups are taken at once, into reserved_.
  Room reserve(const KvRequest& request, const Record& r, std::uint32_t slots, std::int64_t now_ns) override;
  void grow_table(const KvRequest& request, GroupTable& table, std::size_t g, std::uint32_t slots) override;
  void key_group(KvRequest& request, Record& r, std::size_t g, std::uint32_t tokens) override;
  void drop_new_keys(GroupTable& table) override;
  void leave(const KvRequest& request, GroupTable& table, std::size_t g, std::size_t end) override;
  void release_blocks(GroupTable& table, std::size_t g) override;
  std::uint64_t unit_name(const KvRequest& request, std::size_t unit) const override { return request.names[unit]; }
  std::size_t num_names(const KvRequest& request) const override { return request.names.size(); }
  std::uint64_t num_held(const GroupTable& table, std::size_t) const override {
    return table.runs.size() - table.runs.skipped;
  }
  std::span<const SlotId> entries(const GroupTable& table, std::vector<SlotId>& room) const override;
  void check_pool(std::uint64_t references) const override;

  // ── PoolListener ──
  void begin_call() override {}
  void stored(std::span<const SlotId>, std::span<const BlockName>, std::uint32_t) override {}
  void copied(SlotId, BlockName, std::uint32_t, SlotId) override {}
  void removed(SlotId id, BlockName name, std::uint8_t group, bool last) override;

  std::uint32_t block() const noexcept { return layout_.hash_block; }
  std::uint32_t find_in(PrefixCover& cover, const Kind& kind, std::uint32_t limit) const;
  // Entries of a group that a hit of `blocks` blocks does without.
  std::uint32_t skipped(std::size_t g, std::uint32_t blocks) const {
    return layout_.groups[g].skipped(blocks * block()) / block();
  }

  const bool records_;  // events
  const bool hashes_;   // names are sequence hashes
  BlockPool pool_;
  PrefixCover cover_;                                // of the last find
  std::uint32_t found_ = 0;                          // blocks of it
  std::vector<std::vector<BlockPool::Piece>> hits_;  // of it, by group
  std::vector<SlotId> reserved_;                     // in the order of the groups that get them
  std::size_t handed_out_ = 0;                       // of those
  std::vector<GroupEvent> events_;
  std::uint64_t forgotten_ = 0;  // cached blocks that were dropped, which are no evictions
};

}  // namespace understudy
