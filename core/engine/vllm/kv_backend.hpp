// Interface of an engine's KV cache: find cached blocks, allocate, and release them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/request_id.hpp"
#include "engine/kv_trace.hpp"
#include "engine/request.hpp"
#include "engine/vllm/block_stays.hpp"
#include "engine/vllm/kv/block_table.hpp"
#include "slots/slot.hpp"
#include "store/block_store.hpp"
#include "tiers/worker_tiers.hpp"

namespace understudy {

// The backend's view of a request, and the base of the engine's own.
struct KvRequest {
  RequestSpec spec;
  std::vector<BlockIdentity> blocks;  // names computed so far; a backend may do without
  std::vector<BlockName> names;       // as hashes alone, for a backend that needs no more
  RequestId id = 0;
  RequestSlot slot = 0;
  std::uint32_t known = 0;         // prompt and the outputs that the scheduler has received
  std::uint32_t keyed = 0;         // leading blocks of its table that other requests can match
  std::uint32_t keyed_before = 0;  // the same before the current step's allocation
  std::vector<SlotId> table;       // referenced blocks, in order
  BlockTable runs;                 // the same, in a backend that keeps them by runs

  std::uint32_t outputs() const noexcept { return known - spec.prompt_tokens; }
  // Its blocks with one cache group, in order: those of the table, or in `room`.
  std::size_t num_ids() const noexcept { return table.size() + runs.size(); }
  std::span<const SlotId> ids(std::vector<SlotId>& room) const {
    if (runs.empty()) return table;
    room.clear();
    runs.append_ids(room);
    return room;
  }
};

// Leading cached tokens of a request, and how many of their blocks are unreferenced: those count as free until they
// are taken.
struct KvHit {
  std::uint32_t tokens = 0;
  std::size_t unreferenced = 0;
};

struct KvUsage {
  std::uint64_t free = 0;
  std::uint64_t cached = 0;
};

// Callers count tokens, because blocks of a model's layers may differ in size; only costs and room are counted in
// blocks of the pool. Naming is up to the backend (an identity per block, or the tokens on the edges of a tree:
// IdentitySource offers both), so that nothing here is made per token. Calls are made once per request and step, never
// per block.
class KvBackend {
 public:
  using Room = WorkerTiers::Room;

  virtual ~KvBackend() = default;

  // ── A schedule ──
  virtual void begin_schedule() {}
  // Release the blocks of the copies that the schedule has ordered; or give them up, to be released later.
  virtual void end_schedule() {}
  virtual std::vector<SlotId> end_schedule_later() { return {}; }
  // Tokens that a request computes of `tokens` from `start` on.
  virtual std::uint32_t split(const KvRequest&, std::uint32_t /*start*/, std::uint32_t tokens) const { return tokens; }
  // Tokens of a hit that are computed again; a hit that is not longer counts for nothing.
  virtual std::uint32_t replay() const noexcept { return 0; }

  // ── Admission ──
  // The longest cached prefix of at most `limit` tokens. Changes nothing.
  virtual KvHit find(KvRequest& request, std::uint32_t limit) = 0;
  // Blocks of the last hit, in order, for tiers.
  virtual std::span<const SlotId> found(const KvHit& hit) const = 0;
  // Available blocks that room for `tokens` tokens, `hit` among them, would take.
  virtual std::uint64_t cost(KvRequest& request, const KvHit& hit, std::uint32_t tokens) = 0;
  // The same for the whole request, of `tokens` tokens.
  virtual std::uint64_t whole_cost(const KvRequest&, const KvHit& hit, std::uint32_t tokens) {
    return beyond(hit, tokens) + hit.unreferenced;
  }
  // Blocks for `tokens` tokens, apart from those of the hit.
  virtual std::uint64_t beyond(const KvHit& hit, std::uint32_t tokens) const = 0;
  // Reference the hit of the last `find` and allocate room for `tokens` tokens, for a request that computes up to
  // `total` of them; on failure nothing has changed.
  virtual Room place(KvRequest& request, const KvHit& hit, std::uint32_t tokens, std::uint32_t total,
                     std::int64_t now_ns) = 0;
  // Blocks of the placed hit that no request ever computed.
  virtual std::uint64_t phantoms(const KvHit&) const { return 0; }

  // ── While it runs ──
  // Room for `tokens` tokens, for a request that is scheduled up to `total` of them; or nothing has changed.
  virtual Room grow(KvRequest& request, std::uint32_t tokens, std::uint32_t total, std::int64_t now_ns) = 0;
  // Room for the tokens of one more block, which has no name yet; or nothing has changed.
  virtual Room add(KvRequest& request, std::int64_t now_ns) = 0;
  // Tokens have arrived; `computed` of them are certain to have KV by now (0: the schedule said so before).
  virtual void received(KvRequest& request, std::uint32_t computed) = 0;
  // Make the full blocks of the first `tokens` tokens matchable by other requests.
  virtual void name(KvRequest& request, std::uint32_t tokens) = 0;
  // Compute the identities of the full blocks of the first `tokens` tokens.
  virtual void need_names(KvRequest& request, std::uint32_t tokens) = 0;
  // Release the blocks behind those of the first `tokens` tokens.
  virtual void trim(KvRequest& request, std::uint32_t tokens) = 0;
  // Undo the last place or grow: its tokens are not computed. `keep_matchable`: blocks that other requests could
  // match since then stay matchable, as in engines that do not roll them back.
  virtual void withdraw(KvRequest& request, bool keep_matchable) = 0;
  // Release all blocks: the request ends or is preempted.
  virtual void release(KvRequest& request) = 0;
  virtual bool holds(const KvRequest& request) const { return num_blocks(request) > 0; }
  virtual std::size_t num_blocks(const KvRequest& request) const { return request.table.size(); }
  // Hash of a block that has a name.
  virtual std::uint64_t hash_of(const KvRequest& request, std::size_t block) const {
    return request.blocks[block].sequence_hash();
  }
  // Take over the request's blocks, for `release_table`.
  virtual KvTable detach(KvRequest& request) {
    request.keyed = 0;
    return {std::exchange(request.table, {}), std::exchange(request.runs, {})};
  }
  // Release the blocks of a request that has left them behind.
  virtual void release_table(KvTable table) = 0;
  // Drop every unreferenced block.
  virtual void forget_cached() = 0;
  // Drop all keys, where no block is referenced; the order in which blocks are handed out stays.
  virtual void reset() { forget_cached(); }

  // ── Rules ──
  // Whether a block is matchable once its tokens have arrived; else from the schedule of its last token on.
  virtual bool names_on_receipt() const noexcept = 0;
  // Whether empty blocks are always used before cached ones are evicted.
  virtual bool evicts_last() const noexcept = 0;
  // The eviction order is a user-defined policy, which may throw whenever a block is taken.
  virtual bool asks_user() const noexcept = 0;

  // ── Watch ──
  virtual std::uint64_t available() const = 0;  // blocks that a request could get, cached ones included
  virtual KvUsage usage() const = 0;
  // Blocks that the request lacks for `tokens` tokens.
  virtual std::uint64_t lacks(const KvRequest& request, std::uint64_t tokens) const = 0;
  // Whether `blocks` blocks can be taken without preempting, and without waiting for copies to `tiers`.
  bool has_room(std::uint64_t blocks, const WorkerTiers* tiers) const {
    if (blocks > available()) return false;
    if (tiers == nullptr || tiers->config().mode == OffloadMode::WriteThrough) return true;
    // Evicting a cached block needs a copy, which takes time; and some orders evict it before empty ones are used.
    return evicts_last() && blocks <= usage().free;
  }
  virtual PoolMetrics metrics() const = 0;
  virtual std::vector<SlotId> free_head(std::size_t count) const = 0;  // the blocks that are handed out next
  virtual std::vector<std::uint64_t> contents() const = 0;             // each cached or referenced name once
  // Leading tokens of these blocks that a request could use.
  virtual std::uint32_t cached(std::span<const BlockIdentity> blocks) const = 0;
  // InvariantViolated when its blocks contradict each other. O(blocks).
  virtual void check_blocks() const {}
  virtual std::uint64_t operations() const { return 0; }  // those of the store apart
  virtual std::vector<TimedKvTrace> take_trace() noexcept { return {}; }
  virtual std::vector<BlockStay> take_stays() noexcept { return {}; }
};

}  // namespace understudy
