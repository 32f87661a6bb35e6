// The KV manager of a simulated worker, over the one store: blocks are acquired, released, sealed and discarded by
// name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/kv_trace.hpp"
#include "engine/kvbm/kv_events.hpp"
#include "engine/kvbm/kv_manager_kind.hpp"
#include "engine/kvbm/shared_blocks.hpp"
#include "store/block_store.hpp"

namespace understudy {

// Under Native, requests hold leases (kv_lease.hpp).
struct KvManagerConfig {
  KvManagerKind backend = KvManagerKind::Kvbm;
  std::uint64_t num_gpu_blocks = 0;
  std::uint64_t block_size = 0;
  PolicyConfig eviction;  // Kvbm only
  bool enable_prefix_caching = true;
  bool events = false;
  bool event_token_ids = false;
  bool trace = false;
  std::uint32_t dp_rank = 0;
};

using PartialId = std::uint64_t;

// A block as its holder names it: a full one by its identity, a partial one by an id of the holder's
// choosing.
struct KvBlock {
  bool full = true;
  BlockIdentity identity;
  PartialId partial = 0;
};

// Leading resident blocks, and how many of them are referenced.
struct KvOverlap {
  std::size_t resident = 0;
  std::size_t active = 0;
};

// One thread at a time. Every call checks all of its arguments and then acts, or throws with nothing changed.
class KvManager {
 public:
  explicit KvManager(const KvManagerConfig& config);

  // ── Kvbm only ──
  // Add one reference to each block. Blocks that are neither active nor inactive are allocated; full ones are
  // registered at once. All or nothing (CapacityExhausted), or with `partial` the longest prefix that fits; returns its
  // length. `tokens` are those of the full blocks, when events carry them.
  std::size_t acquire(std::span<const KvBlock> blocks, std::span<const Token> tokens = {}, bool partial = false);
  // Drop one reference of each, in this order. At zero a full block is cached and a partial one empty.
  void release(std::span<const KvBlock> blocks);
  // Turn a held partial block into the full block `identity`, or replace it by the resident one.
  void seal(PartialId partial, const BlockIdentity& identity, std::span<const Token> tokens = {});
  // Release, and make the blocks unmatchable; slots with other references become empty when those are released.
  void discard(std::span<const KvBlock> blocks);

  // ── Find ──
  std::size_t probe_new_blocks(std::span<const KvBlock> blocks) const;  // neither active nor inactive
  KvOverlap overlap(std::span<const KvBlock> blocks) const;             // none without prefix caching
  bool resident(const KvBlock& block) const;                            // a partial block: held
  std::uint64_t references(const KvBlock& block) const;

  // ── Watch ──
  const KvManagerConfig& config() const noexcept { return config_; }
  std::uint64_t active_blocks() const { return config_.num_gpu_blocks - store_->available(0); }
  std::uint64_t inactive_blocks() const { return store_->metrics(0).inactive_blocks; }
  std::uint64_t free_blocks() const { return store_->metrics(0).reset_blocks; }
  std::uint64_t active_references() const;
  KvEventRows drain_events() noexcept { return log_.drain(); }
  std::vector<KvTraceRecord> drain_trace() noexcept { return std::exchange(trace_, {}); }
  const std::shared_ptr<BlockStore>& store() const noexcept { return store_; }
  // Raises InvariantViolated when the state is inconsistent. O(blocks).
  void check() const;

  // For leases: check the token ids of `blocks` full blocks, which events carry; and log a call's changes of the store
  // as events.
  void check_tokens(std::size_t blocks, std::span<const Token> tokens) const;
  void log_call(std::span<const StoredRun> runs);
  void trace(std::size_t allocated, std::size_t evicted);

 private:
  enum class Outcome : std::uint8_t {
    Held,    // referenced already
    Cached,  // inactive
    Fresh,   // not resident
    Repeat,  // Cached or Fresh, and named earlier in the same call
  };
  struct Use {
    Outcome outcome = Outcome::Held;
    SlotId slot = kNoSlot;
    std::size_t first = 0;  // Repeat: where it was named
    bool takes() const noexcept { return outcome == Outcome::Cached || outcome == Outcome::Fresh; }
  };
  // A block that was discarded while others held it. Its hash is in no map, and may be in use for a new
  // block.
  struct Orphan {
    LineageHash lineage;
    SlotId slot = kNoSlot;
    std::uint32_t references = 0;
  };
  // Slots of the blocks of a release or discard, and references to discarded copies.
  struct Resolved {
    std::vector<SlotId> slots;
    std::vector<std::uint32_t> references;  // before; 0: not registered
    std::vector<Orphan> orphans;
  };

  void require_kvbm(const char* call) const;
  std::vector<Use> classify(std::span<const KvBlock> blocks);
  void take(std::span<const KvBlock> blocks, std::span<Use> uses, std::span<const Token> tokens);
  Resolved resolve(std::span<const KvBlock> blocks) const;
  void release_resolved(std::span<const KvBlock> blocks, Resolved resolved);

  KvManagerConfig config_;
  std::shared_ptr<BlockStore> store_;
  SharedBlocks shared_;
  std::unordered_map<PartialId, SlotId> partials_;
  std::vector<Orphan> orphans_;
  KvEventLog log_;
  std::vector<KvTraceRecord> trace_;
};

}  // namespace understudy
