// KV cache with several groups, as vLLM's hybrid manager keeps it: a table of blocks for each group of a request.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/group_report.hpp"
#include "engine/vllm/config.hpp"
#include "engine/vllm/groups/group_event.hpp"
#include "engine/vllm/groups/held_blocks.hpp"
#include "engine/vllm/groups/kv_group.hpp"
#include "engine/vllm/kv_backend.hpp"

namespace understudy {

class BlockGroups;

GroupLayout layout_of(const VllmConfig& config);

// Lookups on the device as vLLM's statistics count them, apart from those of preempted requests.
struct GroupHitStats {
  std::uint64_t requests = 0;
  std::uint64_t queries = 0;  // tokens
  std::uint64_t hits = 0;     // tokens
};

// Has the rules that follow from the sizes of tables: how many blocks a request needs, leaves behind and gives keys.
// RunGroups and BlockGroups keep the blocks.
class GroupedBackend : public KvBackend {
 public:
  static constexpr std::uint64_t kImpossible = std::uint64_t{1}
                                               << 40;  // blocks, for what can come true in a later step

  const GroupLayout& layout() const noexcept { return layout_; }

  // The same, where blocks are kept one by one, for transfers, tiers and states.
  virtual BlockGroups* blocks() noexcept { return nullptr; }

  // ── One schedule ──
  void begin_schedule() override { ++schedule_; }
  std::uint32_t replay() const noexcept final { return layout_.replay; }

  KvHit find(KvRequest& request, std::uint32_t limit) final;
  std::span<const SlotId> found(const KvHit&) const override { return {}; }
  // Blocks for the whole request of `tokens` tokens, with those of its groups that are limited.
  std::uint64_t whole_cost(const KvRequest& request, const KvHit& hit, std::uint32_t tokens) final;
  std::uint64_t cost(KvRequest& request, const KvHit& hit, std::uint32_t tokens) final;
  std::uint64_t beyond(const KvHit& hit, std::uint32_t tokens) const final;
  Room place(KvRequest& request, const KvHit& hit, std::uint32_t tokens, std::uint32_t total,
             std::int64_t now_ns) final;
  Room grow(KvRequest& request, std::uint32_t tokens, std::uint32_t total, std::int64_t now_ns) final;
  Room add(KvRequest&, std::int64_t) final { return Room::Short; }
  void received(KvRequest& request, std::uint32_t computed) final;
  void name(KvRequest& request, std::uint32_t tokens) final { key(request, tokens); }
  void trim(KvRequest&, std::uint32_t) final {}
  void withdraw(KvRequest& request, bool keep_matchable) override;
  void release(KvRequest& request) override;
  bool holds(const KvRequest& request) const final;

  bool names_on_receipt() const noexcept final { return false; }
  bool evicts_last() const noexcept final { return true; }
  bool asks_user() const noexcept final { return false; }
  std::uint64_t lacks(const KvRequest& request, std::uint64_t tokens) const final;

  // ── A waiting request that was not admitted ──
  // The pool's evictions, and their number up to which no block of the last find is among them.
  virtual std::uint64_t evictions() const = 0;
  virtual std::uint64_t evictions_until_lost() const = 0;
  // Whether keys of the first `tokens` tokens of a running request, those that it does not have yet, may be keys that
  // `waiting` looks up.
  bool keys_for(const KvRequest& waiting, KvRequest& request, std::uint32_t tokens);

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
  virtual bool lists_state(const KvRequest&, std::uint32_t) const { return false; }
  // Schedule that token alone, as `grow` would.
  Room decode(KvRequest& request, std::uint32_t position, std::int64_t now_ns);
  // Steps without changes were skipped: `computed` tokens are scheduled by now.
  void skip_to(const KvRequest& request, std::uint32_t computed);

  // ── Watch ──
  // Entries in the tables of these requests that have a block, by group.
  std::vector<std::uint64_t> held(std::span<const RequestSlot> requests) const;
  // (source, destination) of those that the last schedule has ordered.
  virtual std::vector<std::pair<SlotId, SlotId>> copies() const { return {}; }
  virtual std::vector<GroupEvent> take_events() = 0;
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

 protected:
  explicit GroupedBackend(const VllmConfig& config);

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
    BlockTable runs;             // the same, where blocks are kept by runs
    std::uint32_t keyed = 0;     // leading entries that have been considered for keys
    std::uint32_t keyed_before = 0;
    std::uint32_t slid = 0;  // leading entries that were left behind
    Tail tail = Tail::None;
    std::optional<Checkpoint> checkpoint;  // of the last schedule

    std::size_t size() const noexcept { return blocks.size() + runs.size(); }
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
  using Kind = std::vector<std::size_t>;  // groups with equal settings
  struct Range {
    std::uint32_t first;
    std::uint32_t last;  // exclusive
  };

  // ── Storage ──
  // Forget the last find, and begin one in the request's names of `limit` tokens.
  virtual void begin_find(const KvRequest& request, std::uint32_t limit) = 0;
  // Tokens of the longest hit of the kind's groups.
  virtual std::uint32_t find_kind(const KvRequest& request, const Kind& kind, std::uint32_t limit) = 0;
  // The find has ended at `tokens`: cut its blocks, and count in unreferenced_.
  virtual void end_find(std::uint32_t tokens) = 0;
  // Entries of a table that the last find fills.
  virtual std::size_t num_found(std::size_t g) const = 0;
  virtual std::uint64_t need(const KvRequest& request, Record& r, std::size_t g, std::uint32_t total,
                             std::uint32_t slots, bool admission, bool whole);
  // Blocks that can be taken, those included that were taken ahead for this request.
  virtual std::uint64_t takeable() const { return available(); }
  // Reference the blocks of the last find, for a request that has `total` tokens then.
  virtual void adopt(Record& r, std::uint32_t total, bool copies_tail) = 0;
  // Allocate, where that may fail, what grow_table takes.
  virtual Room reserve(const KvRequest&, const Record&, std::uint32_t, std::int64_t) { return Room::Taken; }
  virtual void grow_table(const KvRequest& request, GroupTable& table, std::size_t g, std::uint32_t slots) = 0;
  // Give the entries up to `tokens` their keys, and note that in `keyed`.
  virtual void key_group(KvRequest& request, Record& r, std::size_t g, std::uint32_t tokens) = 0;
  // Take the keys back that the entries from `keyed_before` on got in this schedule.
  virtual void drop_new_keys(GroupTable& table) = 0;
  // Release entries before `end` that no later token reads.
  virtual void leave(const KvRequest& request, GroupTable& table, std::size_t g, std::size_t end) = 0;
  virtual void release_blocks(GroupTable& table, std::size_t g) = 0;
  // Hash of a unit that has a name, and the number of those.
  virtual std::uint64_t unit_name(const KvRequest& request, std::size_t unit) const = 0;
  virtual std::size_t num_names(const KvRequest& request) const = 0;
  virtual std::uint64_t num_held(const GroupTable& table, std::size_t g) const = 0;
  // All of a table, kNoSlot where there is no block; maybe in `room`.
  virtual std::span<const SlotId> entries(const GroupTable& table, std::vector<SlotId>& room) const = 0;
  virtual void check_pool(std::uint64_t references) const = 0;

  // ── Common ──
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
  static void remember_keyed(Record& r);
  void slide(const KvRequest& request, Record& r, std::uint32_t tokens);
  void grow_all(const KvRequest& request, Record& r, std::uint32_t slots);
  void key(KvRequest& request, std::uint32_t tokens);
  // The first range in [index, end) whose blocks get keys; empty at `end`: none.
  Range next_kept(const KvRequest& request, const Record& r, const KvGroup& group, std::uint32_t index,
                  std::uint32_t end) const;
  bool keeps(const KvRequest& request, const Record& r, const KvGroup& group, std::uint32_t index, bool reach) const;
  // Append an event of the entries from `keyed` to `full`, of which those in `event` get keys.
  void end_event(const KvRequest& request, const GroupTable& table, std::size_t g, std::uint32_t full, GroupEvent event,
                 std::vector<GroupEvent>& out) const;
  // Identities of an event's range.
  std::vector<BlockIdentity> units(const KvRequest& request, const GroupEvent& event) const;
  std::uint64_t next_slide(const KvRequest& request, const GroupTable& table, const KvGroup& group) const;
  std::uint64_t next_keys(const GroupTable& table, const KvGroup& group) const;
  // Computed tokens with which the next block of the group is considered for a key.
  std::uint64_t tokens_to_key(const GroupTable& table, const KvGroup& group) const;
  bool rounds_keys() const noexcept { return layout_.groups.size() > 1 && !layout_.partial_hits; }

  const VllmConfig& config_;
  GroupLayout layout_;
  bool has_rswa_ = false;
  bool has_tails_ = false;                   // prompts that end inside a block have a key there
  std::vector<Record> records_;              // by slot of the request
  std::vector<std::uint64_t> unreferenced_;  // blocks of the last find, by group
  std::uint64_t schedule_ = 1;
  HeldBlocks held_blocks_;

 private:
  GroupHitStats stats_[2];
  GroupReport admitted_;  // its counts
};

}  // namespace understudy
