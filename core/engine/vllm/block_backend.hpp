// Common part of the backends over a block store: names of blocks, and slots that tiers may have to free first.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/kv_trace.hpp"
#include "engine/vllm/block_stays.hpp"
#include "engine/vllm/config.hpp"
#include "engine/vllm/kv_backend.hpp"
#include "store/block_store.hpp"

namespace understudy {

class BlockBackend : public KvBackend {
 public:
  // `tiers` may be null. Both outlive the backend.
  BlockBackend(const VllmConfig& config, BlockStore& store, WorkerTiers* tiers)
      : config_(config), store_(store), tiers_(tiers), order_(store.policy_kind(0)) {
    if (config.stay_sample > 0) stays_.emplace(config.stay_sample);
  }

  KvHit find(KvRequest& request, std::size_t limit) final;
  std::span<const SlotId> found(const KvHit& hit) const noexcept { return {hits_.data(), hit.blocks}; }
  void trim(KvRequest& request, std::size_t blocks) final;
  void release(KvRequest& request) override;
  std::uint64_t available() const final { return store_.available(0); }
  KvUsage usage() const final { return {store_.in(0, SlotState::Reset), store_.in(0, SlotState::Inactive)}; }

  // ── Single blocks, for callers that keep the invariants themselves ──
  // Add one block without a name; on failure nothing has changed.
  Room add(KvRequest& request, std::int64_t now_ns) { return take(request, 1, now_ns); }
  // Make the first `blocks` blocks matchable by other requests.
  virtual void name(KvRequest& request, std::uint32_t blocks) = 0;
  // Whether a block is matchable once its tokens have arrived; else from the schedule of its last token on.
  virtual bool names_on_receipt() const noexcept = 0;
  // Whether empty blocks are always used before cached ones are evicted.
  bool evicts_last() const noexcept { return order_ != PolicyKind::VllmAppend && order_ != PolicyKind::Advised; }
  // Whether `blocks` blocks can be taken without preempting, and without waiting for copies to `tiers`.
  bool has_room(std::uint64_t blocks, const WorkerTiers* tiers) const {
    if (blocks > available()) return false;
    if (tiers == nullptr || tiers->config().mode == OffloadMode::WriteThrough) return true;
    // Evicting a cached block needs a copy, which takes time; and some orders evict it before empty ones are used.
    return evicts_last() && blocks <= usage().free;
  }
  // The eviction order is a user-defined policy, which may throw whenever a block is taken.
  bool asks_user() const noexcept { return order_ == PolicyKind::Advised; }
  // Compute the identities of the first `blocks` blocks.
  void need_names(KvRequest& request, std::size_t blocks);

  std::vector<TimedKvTrace> take_trace() noexcept { return std::exchange(trace_, {}); }
  std::vector<BlockStay> take_stays() noexcept { return stays_ ? stays_->take() : std::vector<BlockStay>{}; }

 protected:
  Room take(KvRequest& request, std::size_t count, std::int64_t now_ns);
  // All of `out`, or nothing has changed.
  Room take_slots(RequestSlot who, std::span<SlotId> out, std::int64_t now_ns);
  // The slots have a new owner: knowledge about their old content is invalid.
  virtual void handed_out(std::span<const SlotId>) {}
  // A request references the slots; others may reference them too.
  void note_found(std::span<const SlotId> slots, std::int64_t now_ns) {
    if (stays_) stays_->found(slots, now_ns);
  }

  const VllmConfig& config_;
  BlockStore& store_;
  WorkerTiers* const tiers_;

 private:
  void trace(std::size_t taken, std::uint64_t evictions_before, std::int64_t now_ns);

  const PolicyKind order_;    // in which blocks go
  std::vector<SlotId> hits_;  // slots of the last find
  std::vector<TimedKvTrace> trace_;
  std::optional<BlockStays> stays_;  // set when measured
};

}  // namespace understudy
