// `VllmView`: decisions, requests and blocks of an engine, beyond the common interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "engine/vllm/engine.hpp"

namespace understudy {

class VllmView {
 public:
  explicit VllmView(const VllmEngine& engine) noexcept : engine_(engine) {}

  // ── Requests ──
  std::uint64_t num_submitted() const noexcept { return engine_.scheduler_->counts().submitted; }
  bool has(RequestId id) const { return engine_.scheduler_->slots().contains(id); }
  std::vector<RequestId> running() const {
    std::vector<RequestId> ids;
    for (const RequestSlot slot : engine_.scheduler_->running()) ids.push_back(engine_.scheduler_->requests()[slot].id);
    return ids;
  }
  std::span<const RequestSlot> running_slots() const noexcept { return engine_.scheduler_->running(); }
  std::vector<RequestId> waiting(std::size_t count) const { return engine_.waiting(count); }  // the first `count`
  std::size_t num_waiting() const noexcept { return engine_.num_waiting(); }
  std::size_t num_slots() const noexcept {
    return engine_.scheduler_->requests().size();
  }  // the most requests at one time
  std::size_t steps_kept() const noexcept { return engine_.token_log_.steps_kept(); }
  std::size_t parked() const noexcept {
    return engine_.scheduler_->counts().parked;
  }  // requests whose blocks are being loaded
  std::int64_t room_wait_ns(RequestId id) const {
    return engine_.tiers_->waited_ns(engine_.scheduler_->slots().at(id));
  }
  FetchStages fetch_stages() const { return engine_.fetch_stages(); }

  // ── Steps ──
  std::int64_t now_ns() const noexcept { return engine_.clock_.now_ns; }  // the end of the open step, else a begin
  bool stuck() const noexcept { return engine_.stuck_.has_value(); }
  bool asleep() const noexcept { return engine_.is_asleep(); }
  const StepLog& log() const noexcept { return engine_.scheduler_->log(); }
  const std::vector<Scheduled>& batch() const noexcept { return engine_.batch(); }  // of the open step
  const EngineTotals& totals() const noexcept { return engine_.totals_; }
  // Accepted drafts by position, out of those verified.
  const std::vector<std::uint64_t>& accepted_at() const noexcept { return engine_.scheduler_->accepted_at(); }
  std::span<const std::uint64_t, kNumStepReasons> stepped() const noexcept { return engine_.stepped_; }

  // ── Blocks ──
  const BlockStore& store() const noexcept { return engine_.store_; }
  const WorkerTiers* tiers() const noexcept { return engine_.tiers_.get(); }
  const OffloadConnector* offload() const noexcept { return engine_.offload_; }
  PoolMetrics device() const { return engine_.kv_->metrics(); }
  std::uint64_t operations() const { return engine_.store_.operations() + engine_.kv_->operations(); }
  // Blocks that are handed out next, and each cached or referenced name once.
  std::vector<SlotId> free_head(std::size_t count) const { return engine_.kv_->free_head(count); }
  std::vector<std::uint64_t> cached_names() const { return engine_.kv_->contents(); }

 private:
  const VllmEngine& engine_;
};

// Parts of an engine that bindings call, and what it has gathered for one reader.
class VllmParts {
 public:
  explicit VllmParts(VllmEngine& engine) noexcept : engine_(engine) {}

  WorkerTiers* tiers() noexcept { return engine_.tiers_.get(); }     // null: none
  GroupedBackend* grouped() noexcept { return engine_.grouped_; }    // null: one group
  OffloadConnector* offload() noexcept { return engine_.offload_; }  // null: none
  void set_fast_forward(bool on) noexcept { engine_.fast_forwards_ = on; }
  // Effects of the last call of end_step or advance that have not been taken.
  Effects take_effects() { return std::exchange(engine_.effects_, {}); }
  DrainedEvents take_all_events() { return engine_.announcer_.take_all(); }
  DrainedEvents peek_events() { return engine_.announcer_.peek_new(); }
  std::vector<BlockStay> take_stays() noexcept { return engine_.kv_->take_stays(); }

 private:
  VllmEngine& engine_;
};

}  // namespace understudy
