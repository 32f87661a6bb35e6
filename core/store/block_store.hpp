// The store: all blocks of one worker, on all its tiers, behind one lock. The only map from hashes to blocks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/huge_array.hpp"
#include "events/event_ring.hpp"
#include "events/event_truth.hpp"
#include "eviction/frequency_sketch.hpp"
#include "eviction/policy.hpp"
#include "slots/slot.hpp"

namespace understudy {

// Effect of registering a hash that is already there.
enum class DuplicatePolicy : std::uint8_t {
  Allow,   // the new block keeps its slot as a duplicate; an inactive copy is replaced by it
  Reject,  // the new block's slot is freed and the existing block returned
  Keep,    // copies coexist, each matchable; lookups return the earliest
};

struct PoolConfig {
  Tier tier = Tier::G1;
  std::uint64_t num_blocks = 0;
  PolicyConfig policy;
  DuplicatePolicy duplicates = DuplicatePolicy::Allow;
  bool reset_on_release = false;  // default for blocks: do not cache unreferenced ones
  // Off: local and parent hashes and generations are not kept (they read 0), which halves the memory traffic. For
  // owners that need neither events nor the full identities of evicted blocks.
  bool keeps_details = true;
};

struct EventConfig {
  bool enabled = false;
  std::size_t capacity = 0;  // 0: unbounded
  bool token_ids = false;
  bool names_only = false;  // events carry hashes only, no parent, content or generation: details need not be kept
};

struct StoreConfig {
  std::uint64_t block_size = 16;
  std::uint32_t dp_rank = 0;
  std::vector<PoolConfig> pools;
  EventConfig events;
  bool thread_safe = true;                       // off: the owner calls from one thread at a time
  std::optional<std::uint64_t> sketch_capacity;  // default: the slots of the pools that use frequencies
};

// Counters since construction and current gauges of one pool.
struct PoolMetrics {
  std::uint64_t allocations = 0;  // blocks handed out = from_reset + evictions
  std::uint64_t allocations_from_reset = 0;
  std::uint64_t evictions = 0;
  std::uint64_t stagings = 0;
  std::uint64_t registrations = 0;  // blocks offered, duplicates and dedups included
  std::uint64_t duplicate_blocks = 0;
  std::uint64_t registration_dedup = 0;
  std::uint64_t match_hashes_requested = 0;
  std::uint64_t match_blocks_returned = 0;
  std::uint64_t scan_hashes_requested = 0;
  std::uint64_t scan_blocks_returned = 0;
  std::uint64_t leaked_guards = 0;  // released by a finalizer instead of release()

  std::uint64_t total_blocks = 0;
  std::uint64_t reset_blocks = 0;
  std::uint64_t mutable_blocks = 0;
  std::uint64_t staged_blocks = 0;
  std::uint64_t active_blocks = 0;  // distinct registered blocks that are referenced
  std::uint64_t inactive_blocks = 0;
  std::uint64_t active_references = 0;  // references to active blocks, keep-alives of duplicates included
};

// Thread-safe. Slot ids in this interface are local to the pool: 0 .. num_blocks - 1. Every call checks all arguments
// first, or throws with nothing changed (except `reserve`).
class BlockStore final : public Residency {
 public:
  static constexpr std::uint64_t kMaxBlocks = std::uint64_t{1} << 30;
  static constexpr std::uint64_t kMaxBlockSize = std::uint64_t{1} << 20;

  explicit BlockStore(const StoreConfig& config);
  ~BlockStore();
  BlockStore(const BlockStore&) = delete;
  BlockStore& operator=(const BlockStore&) = delete;

  std::uint32_t block_size() const noexcept { return block_size_; }
  std::uint32_t dp_rank() const noexcept { return dp_rank_; }
  std::size_t num_pools() const noexcept override { return pools_.size(); }
  std::size_t num_slots() const noexcept { return num_slots_; }  // of all pools
  std::size_t pool_of(Tier tier) const;                          // throws ConfigError when the store has no such tier
  Tier tier(std::size_t pool) const noexcept override;
  std::uint64_t num_blocks(std::size_t pool) const noexcept;
  DuplicatePolicy duplicates(std::size_t pool) const noexcept;
  bool emits_token_ids() const noexcept { return events_on_ && token_ids_; }
  // True: calls may run Python code, so the caller must not hold the GIL (or any lock) across them.
  bool advised(std::size_t pool) const noexcept;
  PolicyKind policy_kind(std::size_t pool) const noexcept;
  const std::shared_ptr<PolicyAdvisor>& advisor(std::size_t pool) const noexcept;  // null unless advised

  // ── Allocate ──
  // Fills `out` with Mutable slots, or returns false (fewer available) with nothing changed. Appends evicted blocks to
  // `evicted` in eviction order and, where events carry token ids, their tokens to `evicted_tokens`.
  bool try_allocate(std::size_t pool, std::span<SlotId> out, std::vector<BlockIdentity>* evicted = nullptr);
  void allocate(std::size_t pool, std::span<SlotId> out, std::vector<BlockIdentity>* evicted = nullptr,
                std::vector<Token>* evicted_tokens = nullptr);
  // Allocates for an owner that copies evicted blocks to the pool `below`. Writes them to the end of `blocks`, the last
  // evicted first; likewise the slots of `out` that held them (kNoSlot where another copy stays) and the tags that
  // `locate` needs. All are as long as `out`. Returns the number of evicted blocks.
  struct Leaving {
    std::span<BlockIdentity> blocks;
    std::span<SlotId> slots;
    std::span<std::uint32_t> tags;
    std::size_t below;
  };
  std::size_t allocate(std::size_t pool, std::span<SlotId> out, const Leaving& leaving);
  // Allocates empty slots, then `victims` in this order, instead of asking the policy. Throws WrongState with nothing
  // changed when a victim is not cached, is referenced or repeated, or when too few slots are empty. Not for
  // user-defined policies.
  void allocate_evicting(std::size_t pool, std::span<SlotId> out, std::span<const SlotId> victims);
  // Returns unused Mutable slots: they are handed out next, in this order.
  void give_back(std::size_t pool, std::span<const SlotId> slots);
  // Same without checks: the slots must be mutable, owned by the caller and named once. Their state reads Mutable until
  // they are handed out again.
  void hand_back(std::size_t pool, std::span<const SlotId> slots);

  // ── Fill: Mutable → Staged → Registered ──
  void stage(std::size_t pool, std::span<const SlotId> slots, std::span<const BlockIdentity> identities);
  void unstage(std::size_t pool, std::span<const SlotId> slots);
  // Staged → registered, in order; later blocks see earlier ones. slots[i] becomes the id that holds block i. Where
  // events carry token ids, `tokens` are those of all blocks; if empty, each block must be on some tier, whose copy has
  // them.
  void register_staged(std::size_t pool, std::span<SlotId> slots, std::span<const Token> tokens = {});
  // Mutable → registered in one call.
  void commit(std::size_t pool, std::span<SlotId> slots, std::span<const BlockIdentity> identities,
              std::span<const Token> tokens = {});

  // ── Fill by a copy that takes time: Mutable → Claimed → Registered ──
  // Throws WrongState when a block is registered or claimed already, or repeated. `tokens` as above.
  void claim(std::size_t pool, std::span<const SlotId> slots, std::span<const BlockIdentity> identities,
             std::span<const Token> tokens = {});
  // Allocates and claims a slot for each of `identities`. Throws as those two do; when the claim fails, blocks evicted
  // for it stay evicted, and the slots are free.
  void reserve(std::size_t pool, std::span<const BlockIdentity> identities, std::span<SlotId> out);
  // Same for distinct blocks that `locate` has just reported missing, with the tags from there: does not search again.
  void reserve(std::size_t pool, std::span<const BlockIdentity> identities, std::span<const std::uint32_t> tags,
               std::span<SlotId> out);
  // Claimed → registered, in order; slots[i] becomes the id of block i. Unless `held`, releases them, last first.
  void land(std::size_t pool, std::span<SlotId> slots, bool held = false);

  // ── Find ──
  // References the longest run of leading hits; returns its length.
  std::size_t match_prefix(std::size_t pool, std::span<const BlockIdentity> identities, SlotId* out);
  // References every hit, kNoSlot at misses; returns the number of hits.
  std::size_t match_scattered(std::size_t pool, std::span<const BlockIdentity> identities, SlotId* out);
  // Same as match_scattered, over distinct hashes (repeats after the first give kNoSlot), counted as a scan.
  std::size_t scan(std::size_t pool, std::span<const BlockIdentity> identities, SlotId* out, bool touch);
  // Reads only: the leading hits, and how many of them are unreferenced. `out` may contain guesses; all of it is read.
  std::size_t peek_prefix(std::size_t pool, std::span<const BlockIdentity> identities, SlotId* out,
                          std::size_t* unreferenced) const;
  // Reads only: slot of each block (its earliest copy; kNoSlot at misses) and the references to that copy.
  void peek(std::size_t pool, std::span<const BlockIdentity> identities, SlotId* out, std::uint32_t* references) const;
  // Prefetches what looking these up needs.
  void warm(std::size_t pool, std::span<const BlockIdentity> identities) const;
  // Reads only: slot of each block (kNoSlot at misses), and the slot claimed for a missing one (else kNoSlot).
  // `compute_tags` fills `tags`, one per block, and prefetches for all pools.
  void compute_tags(std::span<const BlockIdentity> identities, std::span<std::uint32_t> tags) const;
  void locate(std::size_t pool, std::span<const BlockIdentity> identities, std::span<const std::uint32_t> tags,
              SlotId* out, SlotId* claimed) const;
  // Same up to and including the first block that is neither there nor claimed; returns the number of blocks visited.
  std::size_t locate_run(std::size_t pool, std::span<const BlockIdentity> identities, SlotId* out,
                         SlotId* claimed) const;
  // Reads only: `missing` are the indices of blocks that are neither there nor claimed, `held` the slots of those that
  // are there. Computes the `tags` of missing blocks for `reserve`, unless all are `known` from an allocation.
  void locate(std::size_t pool, std::span<const BlockIdentity> identities, std::span<std::uint32_t> tags, bool known,
              std::vector<std::uint32_t>& missing, std::vector<SlotId>& held) const;
  // Returns the token ids of the registered blocks in `slots`, concatenated; empty where events carry none.
  std::vector<Token> token_ids(std::size_t pool, std::span<const SlotId> slots) const;
  bool is_registered(std::size_t pool, SlotId slot) const;
  std::uint32_t references(std::size_t pool, SlotId slot) const;  // to this copy
  std::size_t prefix_length(std::size_t pool, std::span<const BlockIdentity> identities) const;
  void has_blocks(std::size_t pool, std::span<const BlockIdentity> identities, bool* out) const override;
  void touch(std::size_t pool, std::span<const BlockIdentity> identities);
  void touch(std::size_t pool, std::span<const SlotId> slots);  // registered ones
  // References every block: the copy in slots[i] if it still holds the hash, else the earliest, whose id slots[i]
  // becomes. Returns false with nothing changed when one is gone. Does not count as a use.
  bool upgrade(std::size_t pool, std::span<SlotId> slots, std::span<const BlockIdentity> identities);

  // ── Reference and release ──
  // Adds a reference to each registered slot, cached ones included. Does not count as a match.
  void reference(std::size_t pool, std::span<const SlotId> slots);
  // Makes registered, referenced blocks mutable while they keep their references: not matchable, empty after the last
  // release, and not to be staged again while there are several references. Not under Allow.
  void unregister(std::size_t pool, std::span<const SlotId> slots);
  void retain(std::size_t pool, std::span<const SlotId> slots);
  // Drops one reference each, in this order (or from the last to the first).
  void release(std::size_t pool, std::span<const SlotId> slots, bool tail_first = false);
  void set_reset_on_release(std::size_t pool, std::span<const SlotId> slots, bool value);
  // Drops every inactive block; returns how many. Not counted as evictions.
  std::size_t clear_inactive(std::size_t pool);

  // ── Watch ──
  std::uint64_t available(std::size_t pool) const {
    const Lock lock(*this);
    return states_[pool]->at(static_cast<std::size_t>(SlotState::Reset)) +
           states_[pool]->at(static_cast<std::size_t>(SlotState::Inactive));
  }
  std::uint64_t in(std::size_t pool, SlotState state) const {  // slots
    const Lock lock(*this);
    return states_[pool]->at(static_cast<std::size_t>(state));
  }
  std::uint64_t num_empty() const {  // slots of all pools
    const Lock lock(*this);
    std::uint64_t empty = 0;
    for (const auto* states : states_) empty += states->at(static_cast<std::size_t>(SlotState::Reset));
    return empty;
  }
  PoolMetrics metrics(std::size_t pool) const;
  void note_leak(std::size_t pool);
  DrainedEvents drain_events(std::size_t limit);
  // Events that were not drained yet; valid until the next change.
  std::span<const EventRecord> peek_events() const noexcept { return events_.records(); }
  // Reads and clears the events in place: `take` gets the records, and must not call the store.
  template <typename Take>
  void read_events(Take take) {
    const Lock lock(*this);
    take(events_.records());
    events_.clear();
  }
  std::size_t num_events() const;                                        // not drained yet
  std::size_t num_hashes() const override;                               // distinct, over all tiers
  std::vector<BlockIdentity> resident(std::size_t pool) const override;  // each hash once; O(slots)
  // Same, for hashes with (`active`) or without any referenced copy. O(slots)
  std::vector<BlockIdentity> resident(std::size_t pool, bool active) const;
  std::vector<SlotId> eviction_order(std::size_t pool, std::size_t limit) const;
  // Blocks in the next `slots` slots of the eviction order; empty slots have none.
  std::vector<BlockIdentity> next_evicted(std::size_t pool, std::size_t slots) const;
  unsigned frequency(const LineageHash& lineage) const;
  std::size_t memory_bytes() const;
  std::uint64_t operations() const;  // index probes and policy steps so far
  // All observable state as text, for before/after comparisons.
  std::string dump() const;
  // Throws InvariantViolated when the state is inconsistent. O(slots).
  void check() const;

 private:
  static constexpr std::size_t kAhead = 16;  // blocks: prefetch distance

  struct Pool;
  class Lock {
   public:
    explicit Lock(const BlockStore& store) : mutex_(store.thread_safe_ ? &store.mutex_ : nullptr) {
      if (mutex_ != nullptr) mutex_->lock();
    }
    ~Lock() {
      if (mutex_ != nullptr) mutex_->unlock();
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    std::mutex* mutex_;
  };

  // Block ids are checked before they are used as indices.
  SlotId global(const Pool& pool, SlotId id) const;  // inline: block_pool.hpp
  [[noreturn]] static void refuse_unknown(const Pool& pool, SlotId id);
  [[noreturn]] static void refuse_shortage(const Pool& pool, std::size_t asked, std::uint64_t available);

  struct Evicted {  // Where to report evicted blocks; null: not requested.
    std::vector<BlockIdentity>* blocks = nullptr;
    std::vector<SlotId>* slots = nullptr;
    std::vector<Token>* tokens = nullptr;  // if events carry token ids

    bool asked() const noexcept { return blocks != nullptr || slots != nullptr || tokens != nullptr; }
  };
  bool take(Pool& pool, std::span<SlotId> out, const Evicted& evicted, std::uint64_t* available);
  bool take_advised(Pool& pool, std::span<SlotId> out, const Evicted& evicted, std::uint64_t* available);
  bool validate_choice(Pool& pool, const std::vector<SlotId>& chosen, std::size_t count, std::string* why,
                       bool* overtaken);
  void hand_out(Pool& pool, std::span<SlotId> out, const Evicted& evicted);
  template <bool kReport>
  std::size_t hand_out_quietly(Pool& pool, std::span<SlotId> out, const Leaving& leaving);

  void check_tokens(std::size_t blocks, std::span<const Token> tokens) const;
  // Token ids that copies on any tier have, if events carry them; InvalidArgument when a block is on no tier.
  template <typename LineageOf>
  std::span<const Token> copied_tokens(std::size_t blocks, LineageOf lineage_of);
  const Token* find_tokens(const LineageHash& lineage) const noexcept;  // null: on no tier
  Token* tokens_at(SlotId id) noexcept { return tokens_.get() + std::size_t{id} * block_size_; }
  const Token* tokens_at(SlotId id) const noexcept { return tokens_.get() + std::size_t{id} * block_size_; }
  void stage_locked(Pool& pool, std::span<const SlotId> slots, std::span<const BlockIdentity> identities);
  void register_locked(Pool& pool, std::span<SlotId> slots, std::span<const Token> tokens);  // uses tags_
  template <bool kSure>
  std::size_t replace_with_claims(Pool& pool, std::span<SlotId> out, std::span<const BlockIdentity> identities,
                                  const std::uint32_t* claims);
  bool reserves_in_one(const Pool& pool) const noexcept;
  void land_held(Pool& pool, std::span<SlotId> slots);
  bool is_quiet(const Pool& pool) const noexcept;  // inline, like the next: block_pool.hpp
  void note_registered(Pool& pool, SlotId id, const Token* tokens);
  SlotId register_copy(Pool& pool, SlotId id, SlotId head, const Token* tokens);

  void warm_slots(const Pool& pool, std::span<const SlotId> guesses) const;
  void warm_slot(const Pool& pool, SlotId id) const noexcept;  // inline: block_pool.hpp
  BlockIdentity identity(SlotId id) const noexcept {
    const SlotDetail detail = id < details_.size() ? details_[id] : SlotDetail{};
    return {slots_[id].lineage, detail.local_hash, detail.parent_hash};
  }
  void set_identity(const Pool& pool, SlotId id, const BlockIdentity& identity) noexcept;  // inline: block_pool.hpp
  void publish_removed(const Pool& pool, SlotId id, bool last);                            // inline, like the next
  void publish_stored(const Pool& pool, SlotId id, bool first, const Token* tokens);
  SlotId acquire(Pool& pool, SlotId id);
  Slot& referenced(const Pool& pool, SlotId id);  // WrongState unless registered and referenced
  void release_locked(Pool& pool, std::span<const SlotId> slots, bool tail_first);
  void give_back_locked(Pool& pool, std::span<const SlotId> slots);
  void after_last_release(Pool& pool, SlotId id);
  // Both return true when that was the last copy.
  bool forget(Pool& pool, SlotId id, std::uint32_t tag, bool announce);
  bool forget(Pool& pool, SlotId id, bool announce);
  void leave_twins(Pool& pool, SlotId id, std::uint32_t tag);
  void make_reset(Pool& pool, SlotId id);
  bool present_elsewhere(const Pool& pool, const LineageHash& lineage) const;

  std::uint32_t block_size_;
  std::uint32_t dp_rank_;
  bool events_on_;
  bool token_ids_;
  bool thread_safe_;
  mutable std::mutex mutex_;
  std::size_t num_slots_ = 0;
  HugeArray<Slot> slots_;
  HugeArray<SlotDetail> details_;  // of the leading slots, up to the last pool that keeps details
  HugeArray<Token> tokens_;        // token ids of the block in each slot, if events carry them
  std::vector<std::unique_ptr<Pool>> pools_;
  std::vector<const std::array<std::uint64_t, 7>*> states_;  // by pool: number of slots in each state
  std::unique_ptr<FrequencySketch> sketch_;
  EventRing events_;
  std::uint64_t next_generation_ = 1;
  std::vector<std::uint32_t> tags_;    // of the blocks of the current call
  std::vector<std::uint32_t> claims_;  // tags of the blocks that the current call claims
  std::vector<Token> copied_;          // token ids of copies of the current call's blocks
  std::vector<SlotId> freed_;          // slots whose last reference the current call dropped, for the policy
};

}  // namespace understudy
