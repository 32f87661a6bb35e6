// Cache groups whose blocks are kept one by one: states, hits that end inside a block, and blocks that tiers or
// transfers reach.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/vllm/groups/group_pool.hpp"
#include "engine/vllm/groups/group_tiers.hpp"
#include "engine/vllm/groups/grouped_backend.hpp"
#include "store/block_store.hpp"

namespace understudy {

class BlockGroups final : public GroupedBackend {
 public:
  explicit BlockGroups(const VllmConfig& config);

  BlockGroups* blocks() noexcept override { return this; }
  void begin_schedule() override;
  void end_schedule() override;
  std::uint32_t split(const KvRequest& request, std::uint32_t start, std::uint32_t tokens) const override;
  std::span<const SlotId> found(const KvHit&) const override;
  void need_names(KvRequest& request, std::uint32_t tokens) override;
  void withdraw(KvRequest& request, bool keep_matchable) override;
  void release(KvRequest& request) override;
  KvTable detach(KvRequest& request) override;
  void release_table(KvTable table) override;
  void forget_cached() override { pool_.drop_all_cached(); }
  std::uint64_t available() const override { return pool_.num_free(); }
  KvUsage usage() const override { return {pool_.num_free() - pool_.num_cached(), pool_.num_cached()}; }
  std::uint64_t evictions() const override { return pool_.evictions(); }
  std::uint64_t evictions_until_lost() const override;
  bool lists_state(const KvRequest& request, std::uint32_t position) const override;

  // ── Tiers ──
  // Let blocks go to these tiers and come back; before the first request.
  void use_tiers(WorkerTiers& tiers);
  bool has_tiers() const noexcept { return below_ != nullptr; }
  const GroupTiers& tiers() const noexcept { return *below_; }
  // Units of hashing of the request whose blocks have their keys.
  std::uint32_t keyed_units(const KvRequest& request) const {
    return records_[request.slot].keyed / layout_.hash_block;
  }
  // Blocks with a key that end behind unit `first` and up to unit `end`, in order of their ends.
  struct Offered {
    std::vector<SlotId> slots;
    std::vector<BlockIdentity> blocks;
  };
  const Offered& offered(const KvRequest& request, std::uint32_t first, std::uint32_t end);

  // ── Loads from a host ──
  // Shorten the last find to `tokens`, a multiple of all block sizes.
  void truncate(KvHit& hit, std::uint32_t tokens);
  // Blocks for `slots` tokens, of which those up to `total` that the last find has not found are loaded.
  std::uint64_t load_cost(const KvRequest& request, std::uint32_t total, std::uint32_t slots, bool whole);
  // Reference the last find and allocate room for a load up to `total` tokens.
  void place_load(KvRequest& request, std::uint32_t total);
  // The load has ended: `computed` tokens have their KV.
  void loaded(const KvRequest& request, std::uint32_t computed) { record(request).computed = computed; }
  // Whether the request can go on behind its load, up to `tokens` tokens, and leave `spare` blocks free.
  bool fits_behind(const KvRequest& request, std::uint32_t tokens, std::uint64_t spare, bool reserves_whole);
  // Blocks that a request which holds some needs to its end.
  std::uint64_t lacks_whole(const KvRequest& request);
  // Tokens that steps up to number `processed` have computed, of `computed` in all that are scheduled; step `last` was
  // the request's last one.
  std::uint32_t processed(const KvRequest& request, std::uint32_t computed, std::uint64_t last,
                          std::uint64_t processed) const;
  // Release blocks that no token behind `tokens` tokens reads.
  void leave_behind(const KvRequest& request, std::uint32_t tokens) { slide(request, record(request), tokens); }
  std::span<const SlotId> table(const KvRequest& request, std::size_t g) const {
    return records_[request.slot].groups[g].blocks;
  }
  std::uint32_t junction(const KvRequest& request) const {
    return request.slot < records_.size() ? records_[request.slot].junction : 0;
  }
  // A block that has the state behind `end` tokens, from when it gets its key until its request releases its blocks.
  struct KeptState {
    RequestSlot slot = 0;
    std::size_t group = 0;
    SlotId block = kNoSlot;
    std::uint32_t end = 0;  // tokens
    BlockIdentity last;     // unit of hashing
  };
  enum class KeptStates : std::uint8_t { None, OfPrompts, All };
  // List states that get a key, of prompts alone or also behind them; before the first request.
  void list_states(KeptStates which) { lists_states_ = which; }
  const std::vector<KeptState>& kept_states() const noexcept { return kept_states_; }
  std::vector<KeptState> take_kept_states() { return std::exchange(kept_states_, {}); }
  // Call `visit(block)` for each destination of the copies that this schedule has ordered so far.
  template <typename Visit>
  void each_copied(Visit visit) const {
    for (const Copy& copy : ordered_) visit(copy.to);
  }
  // Like end_schedule, but the blocks are returned, in order, for a later release.
  std::vector<SlotId> end_schedule_later() override;

  // ── Watch ──
  PoolMetrics metrics() const override;
  std::vector<SlotId> free_head(std::size_t count) const override { return pool_.free_head(count); }
  std::vector<std::pair<SlotId, SlotId>> copies() const override { return copies_; }
  std::vector<GroupEvent> take_events() override { return std::exchange(pool_.events(), {}); }
  std::vector<std::uint64_t> contents() const override { return pool_.contents(); }
  std::uint32_t cached(std::span<const BlockIdentity> units) const override;  // units of hashing

 private:
  // ── Storage ──
  void begin_find(const KvRequest& request, std::uint32_t limit) override;
  std::uint32_t find_kind(const KvRequest& request, const Kind& kind, std::uint32_t limit) override;
  void end_find(std::uint32_t tokens) override;
  std::size_t num_found(std::size_t g) const override { return hits_[g].size(); }
  std::uint64_t need(const KvRequest& request, Record& r, std::size_t g, std::uint32_t total, std::uint32_t slots,
                     bool admission, bool whole) override;
  std::uint64_t takeable() const override { return pool_.num_free() + (tiers_ == nullptr ? 0 : tiers_->held()); }
  void adopt(Record& r, std::uint32_t total, bool copies_tail) override;
  // With tiers: into reserved_.
  Room reserve(const KvRequest& request, const Record& r, std::uint32_t slots, std::int64_t now_ns) override;
  void grow_table(const KvRequest& request, GroupTable& table, std::size_t g, std::uint32_t slots) override;
  void key_group(KvRequest& request, Record& r, std::size_t g, std::uint32_t tokens) override;
  void drop_new_keys(GroupTable& table) override;
  void leave(const KvRequest& request, GroupTable& table, std::size_t g, std::size_t end) override;
  void release_blocks(GroupTable& table, std::size_t g) override;
  std::uint64_t unit_name(const KvRequest& request, std::size_t unit) const override {
    return request.blocks[unit].sequence_hash();
  }
  std::size_t num_names(const KvRequest& request) const override { return request.blocks.size(); }
  std::uint64_t num_held(const GroupTable& table, std::size_t g) const override;
  std::span<const SlotId> entries(const GroupTable& table, std::vector<SlotId>&) const override { return table.blocks; }
  void check_pool(std::uint64_t references) const override { pool_.check(references + 2 * ordered_.size()); }

  // block_keys.cpp
  // Whether every group of the kind has the key of `end`; their blocks are in row_.
  bool look_up(const KvRequest& request, const Kind& kind, std::uint32_t end);
  std::uint32_t find_full(const KvRequest& request, const Kind& kind, std::uint32_t limit);
  std::uint32_t find_window(const KvRequest& request, const Kind& kind, std::uint32_t limit);
  std::uint32_t find_local(const KvRequest& request, const Kind& kind, std::uint32_t limit);
  std::uint32_t find_state(const KvRequest& request, const Kind& kind, std::uint32_t limit);
  std::uint64_t content(const KvRequest& request, std::uint32_t end) const {
    return request.blocks[end / layout_.hash_block - 1].sequence_hash();
  }
  // The key of `end` in group `g`.
  GroupKey key_of(std::span<const BlockIdentity> units, std::size_t g, std::uint32_t end) const {
    return {units[end / layout_.hash_block - 1].sequence_hash(), static_cast<std::uint8_t>(g)};
  }

  // block_room.cpp
  std::uint64_t need_state(const KvRequest& request, Record& r, std::size_t g, std::uint32_t total, std::uint32_t slots,
                           bool admission, bool whole);
  static std::size_t growth(const GroupTable& table, const KvGroup& group, std::uint32_t slots);
  SlotId keyed_block(const KvRequest& request, std::size_t g, std::uint32_t end) const;
  void take(std::span<SlotId> out);
  SlotId take_one() {
    SlotId block = kNoSlot;
    take({&block, 1});
    return block;
  }
  void take_up_to(GroupTable& table, std::size_t g, std::size_t size);
  void grow_state(const KvRequest& request, GroupTable& table, std::size_t g, std::uint32_t slots);
  void copy_tail(const KvRequest& request, GroupTable& table, std::size_t g);

  // group_states.cpp
  std::uint32_t stop_of(const KvRequest& request) const;
  std::optional<Checkpoint> checkpoint(const KvRequest& request, const GroupTable& table, const KvGroup& group,
                                       std::uint32_t start, std::uint32_t end) const;
  bool ends_internally(const KvRequest& request, std::uint32_t start, std::uint32_t end) const;
  void key_state(KvRequest& request, Record& r, std::size_t g, std::uint32_t tokens);
  // List the states of the entries [first, end) that have a key.
  void keep_states(const KvRequest& request, std::size_t g, std::uint32_t first, std::uint32_t end);
  void keep_state(const KvRequest& request, std::size_t g, SlotId block);
  void forget_states(const KvRequest& request) {
    if (kept_states_.empty()) return;
    std::erase_if(kept_states_, [&](const KeptState& state) { return state.slot == request.slot; });
  }

  // block_keys.cpp
  void key_range(KvRequest& request, Record& r, std::size_t g, std::uint32_t tokens);
  void key_tail(const KvRequest& request, GroupTable& table, std::size_t g, std::uint32_t tokens);
  // Give a block the key of `end` alone, with an event of one unit of hashing.
  void store_unit(const KvRequest& request, SlotId block, std::size_t g, std::uint32_t end);
  void key_blocks(const KvRequest& request, GroupTable& table, std::size_t g, Range range, GroupEvent* event);

  GroupPool pool_;
  std::vector<std::vector<SlotId>> hits_;  // of the last find, by group
  std::vector<SlotId> row_;                // blocks of one lookup, a member of the kind each
  std::vector<SlotId> freed_;              // scratch
  struct Copy {
    std::size_t group;
    SlotId from;
    SlotId to;
  };
  std::vector<Copy> ordered_;  // in this schedule
  KeptStates lists_states_ = KeptStates::None;
  std::vector<KeptState> kept_states_;  // since they were taken
  std::vector<std::pair<SlotId, SlotId>> copies_;
  WorkerTiers* tiers_ = nullptr;
  std::unique_ptr<GroupTiers> below_;  // with tiers
  std::vector<SlotId> reserved_;       // allocated through tiers, to be taken next
  mutable std::vector<SlotId> found_;  // scratch of `found`
  Offered offered_;                    // scratch
};

}  // namespace understudy
