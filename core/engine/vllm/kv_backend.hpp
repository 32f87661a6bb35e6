// Interface of an engine's KV cache: find cached blocks, allocate, and release them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/request_id.hpp"
#include "engine/request.hpp"
#include "slots/slot.hpp"
#include "tiers/worker_tiers.hpp"

namespace understudy {

// The backend's view of a request, and the base of the engine's own.
struct KvRequest {
  RequestSpec spec;
  std::vector<BlockIdentity> blocks;  // names computed so far; a backend may do without
  RequestId id = 0;
  RequestSlot slot = 0;
  std::uint32_t known = 0;         // prompt and the outputs that the scheduler has received
  std::uint32_t keyed = 0;         // leading blocks of `table` that other requests can match
  std::uint32_t keyed_before = 0;  // the same before the current step's allocation
  std::vector<SlotId> table;       // referenced blocks, in order

  std::uint32_t outputs() const noexcept { return known - spec.prompt_tokens; }
};

// Leading cached blocks of a request, and how many of them are unreferenced: those count as free until they are taken.
struct KvHit {
  std::size_t blocks = 0;
  std::size_t unreferenced = 0;
};

struct KvUsage {
  std::uint64_t free = 0;
  std::uint64_t cached = 0;
};

// A block has the engine's block size in tokens, down to one. Naming is up to the backend (an identity per block, or
// the tokens on the edges of a tree: IdentitySource offers both), so that nothing here is made per token. Calls are
// made once per request and step, never per block.
class KvBackend {
 public:
  using Room = WorkerTiers::Room;

  virtual ~KvBackend() = default;

  // ── Admission ──
  // The longest cached prefix of at most `limit` blocks. Changes nothing.
  virtual KvHit find(KvRequest& request, std::size_t limit) = 0;
  // Available blocks that holding the first `blocks` blocks, `hit` among them, would take.
  virtual std::uint64_t cost(KvRequest& request, const KvHit& hit, std::size_t blocks) = 0;
  // Reference the hit of the last `find` and allocate up to `blocks`, for a request that computes up to `total` tokens;
  // on failure nothing has changed.
  virtual Room place(KvRequest& request, const KvHit& hit, std::size_t blocks, std::uint32_t total,
                     std::int64_t now_ns) = 0;
  // Blocks of the placed hit that no request ever computed.
  virtual std::uint64_t phantoms(const KvHit&) const { return 0; }

  // ── While it runs ──
  // Room up to `blocks` for a request that is scheduled up to `total` tokens; or nothing has changed.
  virtual Room grow(KvRequest& request, std::size_t blocks, std::uint32_t total, std::int64_t now_ns) = 0;
  // Tokens have arrived; `computed` of them are certain to have KV by now (0: the schedule said so before).
  virtual void received(KvRequest& request, std::uint32_t computed) = 0;
  // Release the blocks behind the first `blocks`.
  virtual void trim(KvRequest& request, std::size_t blocks) = 0;
  // Undo the last place or grow: its tokens are not computed. `keep_matchable`: blocks that other requests could
  // match since then stay matchable, as in engines that do not roll them back.
  virtual void withdraw(KvRequest& request, bool keep_matchable) = 0;
  // Release all blocks: the request ends or is preempted.
  virtual void release(KvRequest& request) = 0;

  // ── Watch ──
  virtual std::uint64_t available() const = 0;  // blocks that a request could get, cached ones included
  virtual KvUsage usage() const = 0;
};

}  // namespace understudy
