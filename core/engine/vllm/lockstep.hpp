// An engine that follows a recording: its driver decides when a batch is updated, and what the worker reports.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/vllm/engine.hpp"

namespace understudy {

// Steps as recordings count them, and the state that a recording lists. Not to be mixed with begin_step and end_step.
class VllmLockstep {
 public:
  explicit VllmLockstep(VllmEngine& engine) noexcept : engine_(engine) {}

  // ── Steps ──
  void begin_step(std::int64_t now_ns) { engine_.begin_recorded_step(now_ns); }
  const Effects& end_step(std::int64_t now_ns) { return engine_.end_step(now_ns); }
  // Asynchronously: let the batch that was scheduled last be the next to end, with no other behind it.
  void begin_last_update(std::int64_t now_ns) {
    engine_.sync_to(now_ns);
    engine_.open_ = std::exchange(engine_.planned_, {});
    engine_.open_step(now_ns, {}, 0);
  }
  // Report the poll's results for the batch that was scheduled last, where the driver moves the blocks.
  void give_report(ConnectorOutput report) {
    std::ranges::sort(report.received);
    std::ranges::sort(report.failed);
    (engine_.config_.async_scheduling ? engine_.planned_ : engine_.open_).output = std::move(report);
  }

  // ── Connector ──
  const ConnectorParts& parts() const noexcept { return engine_.parts_; }
  OffloadConnector* offload() const noexcept { return engine_.offload_; }  // null: none
  const KeptTables& kept() const noexcept { return engine_.scheduler_->left().kept; }
  bool has_ended() const noexcept {
    return engine_.scheduler_->counts().has_ended;
  }  // a request, since the last schedule
  bool handoff_pending() const noexcept { return engine_.handoff_pending(); }
  bool offload_pending() const noexcept {
    const OffloadConnector* const offload = engine_.offload_;
    return offload != nullptr && (offload->has_jobs() || offload->has_ended_to_tell());
  }
  std::uint64_t deferred_blocks() const noexcept { return engine_.scheduler_->left().num_deferred(); }
  // Aborted requests whose blocks are still to come.
  std::vector<RequestId> orphans() const {
    std::vector<RequestId> ids;
    for (const auto& [id, kept] : engine_.scheduler_->left().orphans) ids.push_back(id);
    std::ranges::sort(ids);
    return ids;
  }
  // Waiting requests that hold blocks.
  std::vector<RequestId> holding() const {
    std::vector<RequestId> ids;
    for (const RequestSlot slot : engine_.scheduler_->waiting().skipped().ids())
      ids.push_back(engine_.scheduler_->requests()[slot].id);
    return ids;
  }
  // Requests whose blocks are being loaded, in the order of the queues.
  std::vector<RequestId> loading() const {
    std::vector<RequestId> ids;
    engine_.scheduler_->waiting().for_each([&](RequestSlot slot) {
      const EngineRequest& request = engine_.scheduler_->requests()[slot];
      if (request.status == RequestStatus::Loading) ids.push_back(request.id);
    });
    return ids;
  }

 private:
  VllmEngine& engine_;
};

}  // namespace understudy
