// KV cache with several groups, as vLLM's hybrid manager keeps it: a table of blocks for each group of a request.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/group_report.hpp"
#include "engine/vllm/config.hpp"
#include "engine/vllm/groups/group_pool.hpp"
#include "engine/vllm/groups/group_tiers.hpp"
#include "engine/vllm/groups/held_blocks.hpp"
#include "engine/vllm/groups/kv_group.hpp"
#include "engine/vllm/kv_backend.hpp"
#include "store/block_store.hpp"

namespace understudy {

GroupLayout layout_of(const VllmConfig& config);

// Lookups on the device as vLLM's statistics count them, apart from those of preempted requests.
struct GroupHitStats {
  std::uint64_t requests = 0;
  std::uint64_t queries = 0;  // tokens
  std::uint64_t hits = 0;     // tokens
};

class GroupedBackend final : public KvBackend {
 public:
  static constexpr std::uint64_t kImpossible = std::uint64_t{1}
                                               << 40;  // blocks, for what can come true in a later step

  explicit GroupedBackend(const VllmConfig& config);

  const GroupLayout& layout() const noexcept { return layout_; }

  // ── One schedule ──
  void begin_schedule() override;
  // Release the blocks of the copies that the schedule has ordered.
  void end_schedule() override;
  // Tokens that a request computes of `tokens` from `start` on: states are kept only at certain positions.
  std::uint32_t split(const KvRequest& request, std::uint32_t start, std::uint32_t tokens) const override;
  // Tokens of a hit that are computed again; a hit that is not longer counts for nothing.
  std::uint32_t replay() const noexcept override { return layout_.replay; }

  KvHit find(KvRequest& request, std::uint32_t limit) override;
  std::span<const SlotId> found(const KvHit&) const override;
  // Blocks for the whole request of `tokens` tokens, with those of its groups that are limited.
  std::uint64_t whole_cost(const KvRequest& request, const KvHit& hit, std::uint32_t tokens) override;
  std::uint64_t cost(KvRequest& request, const KvHit& hit, std::uint32_t tokens) override;
  std::uint64_t beyond(const KvHit& hit, std::uint32_t tokens) const override;
  Room place(KvRequest& request, const KvHit& hit, std::uint32_t tokens, std::uint32_t total,
             std::int64_t now_ns) override;
  Room grow(KvRequest& request, std::uint32_t tokens, std::uint32_t total, std::int64_t now_ns) override;
  Room add(KvRequest&, std::int64_t) override { return Room::Short; }
  void received(KvRequest& request, std::uint32_t computed) override;
  void name(KvRequest& request, std::uint32_t tokens) override { key(request, tokens); }
  void need_names(KvRequest& request, std::uint32_t tokens) override;
  void trim(KvRequest&, std::uint32_t) override {}
  void withdraw(KvRequest& request, bool keep_matchable) override;
  void release(KvRequest& request) override;
  bool holds(const KvRequest& request) const override;
  KvTable detach(KvRequest& request) override;
  void release_table(KvTable table) override;
  void forget_cached() override { pool_.drop_all_cached(); }

  bool names_on_receipt() const noexcept override { return false; }
  bool evicts_last() const noexcept override { return true; }
  bool asks_user() const noexcept override { return false; }

  std::uint64_t available() const override { return pool_.num_free(); }
  KvUsage usage() const override { return {pool_.num_free() - pool_.num_cached(), pool_.num_cached()}; }
  std::uint64_t lacks(const KvRequest& request, std::uint64_t tokens) const override;

  // ── A waiting request that was not admitted ──
  // The pool's evictions, and their number up to which no block of the last find is among them.
  std::uint64_t evictions() const noexcept { return pool_.evictions(); }
  std::uint64_t evictions_until_lost() const;
  // Whether keys of the first `tokens` tokens of a running request, those that it does not have yet, may be keys that
  // `waiting` looks up.
  bool keys_for(const KvRequest& waiting, KvRequest& request, std::uint32_t tokens);

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

  // ── Fast-forward: decode steps of a request, whose next token is at `position` ──
  // Whether nothing is pending that a decode step would change by itself.
  bool settled(const KvRequest& request) const;
  // Steps until one that takes, leaves or keys a block; 0: the next one.
  std::uint64_t steps_to_change(const KvRequest& request, std::uint32_t position) const;
  // Most blocks that the step takes.
  std::uint64_t step_cost(const KvRequest& request, std::uint32_t position) const;
  // Most blocks that the step releases.
  std::uint64_t step_frees(const KvRequest& request, std::uint32_t position) const;
  // Whether the step may list a state that gets a key.
  bool lists_state(const KvRequest& request, std::uint32_t position) const;
  // Schedule that token alone, as `grow` would.
  Room decode(KvRequest& request, std::uint32_t position, std::int64_t now_ns);
  // Steps without changes were skipped: `computed` tokens are scheduled by now.
  void skip_to(const KvRequest& request, std::uint32_t computed);

  // ── Watch ──
  PoolMetrics metrics() const override;
  std::vector<SlotId> free_head(std::size_t count) const override { return pool_.free_head(count); }
  // Entries in the tables of these requests that have a block, by group.
  std::vector<std::uint64_t> held(std::span<const RequestSlot> requests) const;
  const std::vector<std::pair<SlotId, SlotId>>& copies() const noexcept { return copies_; }  // of the last schedule
  std::vector<GroupEvent> take_events() { return std::exchange(pool_.events(), {}); }
  const GroupHitStats& stats(bool preempted) const noexcept { return stats_[preempted ? 1 : 0]; }
  void count_lookup(std::uint32_t queries, std::uint32_t hits, bool preempted);
  // Count an admission with `hits` tokens of the device and, under vLLM's offload, of its host.
  void count_admission(const KvRequest& request, std::uint32_t hits);
  // Sample the held blocks at the time at which blocks were taken or released.
  void sample(std::int64_t now_ns) { held_blocks_.sample(now_ns); }
  GroupReport report() const;
  // `holders`: requests with blocks; `kept`: blocks that ended requests have left behind.
  void check(std::span<const RequestSlot> holders, std::uint64_t kept) const;
  std::uint64_t digest(std::span<const RequestSlot> running) const;
  std::vector<std::uint64_t> contents() const override { return pool_.contents(); }
  std::uint32_t cached(std::span<const BlockIdentity> units) const override;  // units of hashing

 private:
  static constexpr std::uint32_t kBatch = 32;  // blocks whose data is read ahead; a multiple of the neighbours

  // A block that is shared or cached ends inside the tokens of a request, which continues in a copy of it.
  enum class Tail : std::uint8_t {
    None,
    Found,  // the last block of a hit: the copy replaces it in the table
    Own,    // a state that has its key: the copy takes over the keys
  };
  struct Checkpoint {
    std::uint32_t end = 0;    // tokens
    std::uint32_t index = 0;  // in the table
  };
  struct GroupTable {
    std::vector<SlotId> blocks;  // kNoSlot: null
    std::uint32_t keyed = 0;     // leading entries that have been considered for keys
    std::uint32_t keyed_before = 0;
    std::uint32_t slid = 0;  // leading entries that were left behind
    // Entries that may have keys: the leading ones that were found, and a range of those that got one.
    std::uint32_t found = 0;
    std::uint32_t first_named = ~std::uint32_t{0};
    std::uint32_t end_named = 0;
    Tail tail = Tail::None;
    std::optional<Checkpoint> checkpoint;  // of the last schedule
  };
  struct Record {
    std::uint32_t junction = 0;  // where a longer hit of one kind ended; 0: nowhere
    std::uint32_t computed = 0;
    std::uint32_t computed_before = 0;
    std::uint32_t keyed = 0;  // leading tokens whose blocks have been considered for keys
    std::uint32_t keyed_before = 0;
    std::uint32_t computed_earlier = 0;  // before the schedule ahead of the last one, if that had the request too
    std::uint32_t last_tokens = 0;       // scheduled last
    std::uint64_t last_schedule = 0;
    // Tokens up to which a step changes no table: it needs no block, leaves none behind and keys none. 0: not known.
    std::uint32_t room = 0;
    std::uint32_t next_slide = 0;
    std::uint32_t next_key = 0;
    std::vector<GroupTable> groups;
  };

  // group_find.cpp
  // Read ahead what lookups of the blocks [first, last) need.
  void touch(const KvRequest& request, const std::vector<std::size_t>& kind, std::uint32_t first,
             std::uint32_t last) const;
  // Whether every group of the kind has the key of block `index`, or of `end`; their blocks are in row_.
  bool look_up(const KvRequest& request, const std::vector<std::size_t>& kind, std::uint32_t index);
  bool look_up_end(const KvRequest& request, const std::vector<std::size_t>& kind, std::uint32_t end);
  bool look_up_key(const std::vector<std::size_t>& kind, GroupKey key);
  std::uint32_t find_kind(const KvRequest& request, const std::vector<std::size_t>& kind, std::uint32_t limit);
  std::uint32_t find_full(const KvRequest& request, const std::vector<std::size_t>& kind, std::uint32_t limit);
  std::uint32_t find_window(const KvRequest& request, const std::vector<std::size_t>& kind, std::uint32_t limit);
  std::uint32_t find_local(const KvRequest& request, const std::vector<std::size_t>& kind, std::uint32_t limit);
  std::uint32_t find_state(const KvRequest& request, const std::vector<std::size_t>& kind, std::uint32_t limit);
  std::uint64_t content(const KvRequest& request, std::uint32_t end) const {
    return request.blocks[end / layout_.hash_block - 1].sequence_hash();
  }
  // Hash that keys of neighbouring blocks have in common. Below tiers keys are looked up by content alone.
  std::uint64_t near_of(std::span<const BlockIdentity> units, std::size_t g, std::uint32_t index,
                        std::uint64_t content) const {
    if (tiers_ != nullptr) return content;
    return units[index / KeyIndex::kNeighbours * KeyIndex::kNeighbours * units_per_block_[g]].sequence_hash();
  }
  // The first block behind `index` whose key has another place in the index.
  std::uint32_t next_home(std::uint32_t index) const noexcept {
    return tiers_ == nullptr ? (index / KeyIndex::kNeighbours + 1) * KeyIndex::kNeighbours : index + 1;
  }
  // The key of block `index` in group `g`.
  GroupKey key_at(std::span<const BlockIdentity> units, std::size_t g, std::uint32_t index) const {
    const std::uint64_t content = units[(index + 1) * units_per_block_[g] - 1].sequence_hash();
    return {content, near_of(units, g, index, content), static_cast<std::uint8_t>(g)};
  }
  // The key of `end` in group `g`.
  GroupKey key_of(std::span<const BlockIdentity> units, std::size_t g, std::uint32_t end) const {
    const std::uint64_t content = units[end / layout_.hash_block - 1].sequence_hash();
    return {content, near_of(units, g, (end - 1) / layout_.groups[g].block_size, content),
            static_cast<std::uint8_t>(g)};
  }

  // group_room.cpp, group_loads.cpp
  Record& record(const KvRequest& request) {
    if (request.slot < records_.size() && !records_[request.slot].groups.empty()) return records_[request.slot];
    return new_record(request.slot);
  }
  Record& new_record(RequestSlot slot);
  // Set the tokens up to which nothing changes, where that follows from the tables alone.
  void update_room(Record& r) const;
  void update_next_slide(Record& r) const;
  void update_next_key(Record& r) const;
  std::uint64_t need_all(const KvRequest& request, std::uint32_t total, std::uint32_t slots, bool admission,
                         bool whole);
  std::uint64_t need(const KvRequest& request, Record& r, std::size_t g, std::uint32_t total, std::uint32_t slots,
                     bool admission, bool whole);
  std::uint64_t need_state(const KvRequest& request, Record& r, std::size_t g, std::uint32_t total, std::uint32_t slots,
                           bool admission, bool whole);
  static void remember_keyed(Record& r);
  void adopt(Record& r, std::uint32_t total, bool copies_tail);
  void leave(GroupTable& table, std::size_t g, std::size_t first, std::size_t end);
  void slide(const KvRequest& request, Record& r, std::uint32_t tokens);
  // With tiers: allocate what grow_all takes, into reserved_.
  Room reserve(const KvRequest& request, const Record& r, std::uint32_t slots, std::int64_t now_ns);
  static std::size_t growth(const GroupTable& table, const KvGroup& group, std::uint32_t slots);
  SlotId keyed_block(const KvRequest& request, std::size_t g, std::uint32_t end) const;
  void take(std::span<SlotId> out);
  SlotId take_one() {
    SlotId block = kNoSlot;
    take({&block, 1});
    return block;
  }
  std::uint64_t held() const noexcept { return tiers_ == nullptr ? 0 : tiers_->held(); }
  void grow_all(const KvRequest& request, Record& r, std::uint32_t slots);
  void take_up_to(GroupTable& table, std::size_t g, std::size_t size);
  void grow_state(const KvRequest& request, GroupTable& table, std::size_t g, std::uint32_t slots);
  void copy_tail(const KvRequest& request, GroupTable& table, std::size_t g);

  // group_decode.cpp
  std::uint64_t next_slide(const KvRequest& request, const GroupTable& table, const KvGroup& group) const;
  std::uint64_t next_keys(const GroupTable& table, const KvGroup& group) const;
  // Computed tokens with which the next block of the group is considered for a key.
  std::uint64_t tokens_to_key(const GroupTable& table, const KvGroup& group) const;
  bool rounds_keys() const noexcept { return layout_.groups.size() > 1 && !layout_.partial_hits; }

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

  // group_keys.cpp
  void key(KvRequest& request, std::uint32_t tokens);
  void key_range(KvRequest& request, Record& r, std::size_t g, std::uint32_t tokens);
  void key_tail(const KvRequest& request, GroupTable& table, std::size_t g, std::uint32_t tokens);
  // Identities of an event's range.
  std::vector<BlockIdentity> units(const KvRequest& request, const GroupEvent& event) const;
  // Give a block the key of `end` alone, with an event of one unit of hashing.
  void store_unit(const KvRequest& request, SlotId block, std::size_t g, std::uint32_t end);
  struct Range {
    std::uint32_t first;
    std::uint32_t last;  // exclusive
  };
  // The first range in [index, end) whose blocks get keys; empty at `end`: none.
  Range next_kept(const KvRequest& request, const Record& r, const KvGroup& group, std::uint32_t index,
                  std::uint32_t end) const;
  void key_blocks(const KvRequest& request, GroupTable& table, std::size_t g, Range range, GroupEvent* event);
  bool keeps(const KvRequest& request, const Record& r, const KvGroup& group, std::uint32_t index, bool reach) const;

  const VllmConfig& config_;
  GroupLayout layout_;
  GroupPool pool_;
  std::vector<std::uint32_t> units_per_block_;  // of hashing, by group
  bool has_rswa_ = false;
  bool has_tails_ = false;                   // prompts that end inside a block have a key there
  std::vector<Record> records_;              // by slot of the request
  std::vector<std::vector<SlotId>> hits_;    // of the last find, by group
  std::vector<std::uint64_t> unreferenced_;  // blocks of that find, by group
  std::vector<SlotId> row_;                  // blocks of one lookup, a member of the kind each
  std::vector<SlotId> freed_;                // scratch
  struct Copy {
    std::size_t group;
    SlotId from;
    SlotId to;
  };
  std::vector<Copy> ordered_;  // in this schedule
  KeptStates lists_states_ = KeptStates::None;
  std::vector<KeptState> kept_states_;  // since they were taken
  std::vector<std::pair<SlotId, SlotId>> copies_;
  std::uint64_t schedule_ = 1;
  WorkerTiers* tiers_ = nullptr;
  std::unique_ptr<GroupTiers> below_;  // with tiers
  std::vector<SlotId> reserved_;       // allocated through tiers, to be taken next
  mutable std::vector<SlotId> found_;  // scratch of `found`
  Offered offered_;                    // scratch
  GroupHitStats stats_[2];
  GroupReport admitted_;  // its counts
  HeldBlocks held_blocks_;
};

}  // namespace understudy
