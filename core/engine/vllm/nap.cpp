// Between two steps: the engine's sleep until transfers allow the next one, and what has landed meanwhile.
#include <algorithm>
#include <utility>

#include "engine/vllm/engine.hpp"
#include "engine/vllm/fast_forward.hpp"

namespace understudy {

namespace {

// Without tokens to compute vLLM's loop sleeps this long between two schedules.
constexpr std::int64_t kIdlePollNs = 1'000'000;

}  // namespace

// ── Asleep ──

bool VllmEngine::nap_over() const noexcept {
  return nap_.due || (offload_links_ && offload_links_->has_done()) ||
         (tiers_ && (tiers_->has_ready() || tiers_->released() != nap_.released));
}

// When the sleeping engine finds something to do, as far as is known.
std::int64_t VllmEngine::nap_until_ns() const {
  if (nap_over()) return clock_.now_ns;
  const auto landing_ns = [this] { return tiers_->hub().next_wake_ns().value_or(kNever); };
  if (!nap_.polls) return landing_ns();
  if (offload_links_ && !offload_links_->submitted()) return clock_.now_ns;  // the next step submits
  const std::int64_t event_ns = connector_->next_event_ns();
  const std::int64_t next_ns = has_transfers() ? std::min(event_ns, landing_ns()) : event_ns;
  return next_ns == kNever ? kNever : poll_at(next_ns);
}

// The first schedule of a loop that polls, from `time_ns` on.
std::int64_t VllmEngine::poll_at(std::int64_t time_ns) const noexcept {
  const std::int64_t late_ns = std::max<std::int64_t>(time_ns - clock_.now_ns, 0);
  return clock_.now_ns + (late_ns + kIdlePollNs - 1) / kIdlePollNs * kIdlePollNs;
}

// Let time pass until the nap is over. False: it lasts until `until_ns` or longer.
bool VllmEngine::wake_up(std::int64_t until_ns) {
  if (nap_.polls) {
    const std::int64_t next_ns = nap_until_ns();
    if (next_ns >= until_ns) return false;
    clock_.now_ns = next_ns;
    return true;
  }
  while (!nap_over()) {
    const std::optional<std::int64_t> wake = tiers_->hub().next_wake_ns();
    if (!wake) break;
    if (*wake > until_ns) return false;
    clock_.now_ns = std::max(clock_.now_ns, *wake);  // also if a policy throws: transfers have come that far
    tiers_->hub().run_until(*wake);
    notice_landings(clock_.now_ns);
    if (clock_.now_ns >= until_ns) return false;
  }
  return true;
}

// ── Falling asleep ──

// Whether a step begins, after a schedule behind an empty queue; else the engine waits for a landing.
bool VllmEngine::found_work(std::int64_t now_ns) {
  const bool nothing = scheduler_->log().scheduled.empty() && scheduler_->log().preempted.empty() && planned_.empty();
  nap_.on = nothing && has_transfers() && !idle();
  if (nap_.on) {
    nap_.released = tiers_->released();
    clock_.now_ns = now_ns;
    (void)connector_->start_step(std::move(scheduler_->orders().meta), planned_.output, now_ns);
    announcer_.release(now_ns);
    return false;
  }
  const bool waits = !(scheduler_->running().empty() && num_waiting() == 0);
  const bool stuck = nothing && scheduler_->is_admitting() && waits && !still_offloads();
  if (!stuck) stuck_.reset();
  if (stuck && !stuck_) stuck_ = kv_->available();
  return true;
}

// Whether the last schedule only preempted while copies hold blocks of a device with groups. Until one of them lands a
// request that preempted itself would do so again, at the same time if steps take none.
bool VllmEngine::waits_for_copies() {
  const std::optional<std::uint64_t> before = std::exchange(released_before_, std::nullopt);
  if (!before || *before != tiers_->released() || tiers_->idle()) return false;
  nap_.on = true;
  nap_.released = *before;
  scheduler_->note_progress();
  return true;
}

// After a schedule: whether it has nothing to compute, and yet the loop goes on. `reported`: an earlier one's poll had
// something that the update of this one has read.
bool VllmEngine::only_polls(bool reported) const noexcept {
  return polls_ && scheduler_->log().scheduled.empty() && scheduler_->log().preempted.empty() && planned_.empty() &&
         (scheduler_->counts().loading > 0 || handoff_pending() || reported || !scheduler_->orders().output.empty());
}

// A schedule without tokens: its update follows at once (asynchronously after the next schedule), then the loop sleeps.
void VllmEngine::poll_idle(bool changed, std::int64_t now_ns) {
  ConnectorOrders& orders = scheduler_->orders();
  changed = changed || !orders.output.empty();
  (void)connector_->start_step(std::move(orders.meta), orders.output, now_ns);  // no batch waits for it
  if (config_.async_scheduling) {
    planned_.output = std::exchange(orders.output, {});
  } else {
    update_from_connector(std::exchange(orders.output, {}), now_ns);
  }
  announcer_.release(now_ns);
  if (changed) sample(scheduler_->running().size(), clock_.now_ns);
  clock_.now_ns = now_ns;
  // The head of the queue lacks room, and nothing is left that could free a block: heartbeats go on for ever. So do
  // vLLM's, if a request whose read failed counts as a prompt in progress against its own load.
  const std::vector<EngineRequest>& requests = scheduler_->requests();
  const bool moves = changed || !scheduler_->refusal().no_room || !scheduler_->running().empty() ||
                     scheduler_->counts().parked > 0 || scheduler_->left().references() > 0 ||
                     (tiers_ && !tiers_->idle()) || (offload_ && offload_->has_jobs()) ||
                     scheduler_->waiting().any_of([&](RequestSlot slot) {
                       return requests[slot].status == RequestStatus::Loading && !requests[slot].loaded;
                     });
  if (moves) {
    stuck_.reset();
  } else if (!stuck_) {
    stuck_ = kv_->available();
  }
  if (rests()) return;
  clock_.now_ns = now_ns + kIdlePollNs;
  nap_ = {true, true, changed, tiers_ ? tiers_->released() : 0};
}

bool VllmEngine::handoff_pending() const noexcept {
  const LeftBlocks& left = scheduler_->left();
  return !left.kept.empty() || connector_->has_pending_work() || (connector_->loads() && !left.orphans.empty());
}

// Whether a step without computed tokens makes progress on transfers.
bool VllmEngine::still_offloads() const {
  if ((config_.transfer || polls_) && (scheduler_->counts().loading > 0 || handoff_pending())) return true;
  if (!offload_) return false;
  return offload_links_ ? scheduler_->orders().meta != nullptr || planned_.meta != nullptr || !offload_links_->idle()
                        : offload_->has_jobs();
}

// ── Transfers ──

// Begin the transfers of a planned batch that computes no token.
std::int64_t VllmEngine::begin_transfers_alone(std::int64_t now_ns) {
  if (!offload_links_ || !planned_.empty() || planned_.meta == nullptr) return now_ns;
  return connector_->start_step(std::move(planned_.meta), planned_.output, now_ns);
}

void VllmEngine::update_from_connector(const ConnectorOutput& output, std::int64_t now_ns) {
  if (scheduler_->update_from_kv_xfer_finished(output, now_ns)) on_requests_changed();
}

// The worker has done these copies.
void VllmEngine::report_offload(std::vector<JobId> done, std::int64_t now_ns) {
  if (done.empty()) return;
  ConnectorOutput output;
  parts_.offloading->report(std::move(done), output);
  update_from_connector(output, now_ns);
}

// A step has ended. Without requests to schedule, vLLM runs empty steps until all stores are done.
void VllmEngine::offload_after_step(std::int64_t now_ns) {
  if (offload_links_->has_done()) report_offload(offload_links_->take_done(), now_ns);
  const bool rests = quiescent() && !polls_;  // else it polls
  if (rests) (void)begin_transfers_alone(now_ns);
  while (rests && (offload_->has_ended_to_tell() || !offload_links_->submitted())) {
    (void)connector_->start_step(connector_->build_connector_meta(now_ns), planned_.output, now_ns);
  }
}

void VllmEngine::finish_transfers() {
  while (polls_ && !clock_.in_step && handoff_pending()) {
    const std::int64_t next_ns = nap_.on ? nap_until_ns() : clock_.now_ns;
    if (next_ns == kNever) break;
    begin_one_step(next_ns);
  }
  while (const std::optional<std::int64_t> wake = tiers_ ? tiers_->hub().next_wake_ns() : std::nullopt) {
    tiers_->hub().run_until(*wake);
  }
  report_idle_landings();
  if (config_.check) check();
}

// ── Landings ──

bool VllmEngine::has_transfers() const {
  return tiers_ && (!tiers_->idle() || (offload_links_ && !offload_links_->idle()));
}

std::int64_t VllmEngine::next_landing_ns() const {
  if (clock_.in_step) return kNever;
  if (nap_.on && nap_.polls) return rests() ? kNever : nap_until_ns();
  if (!tiers_) return kNever;
  const bool waits =
      nap_.on || (quiescent() &&
                  (offload_ ? !polls_ && (offload_->has_jobs() || offload_->has_ended_to_tell()) : !tiers_->idle()));
  return waits ? tiers_->hub().next_wake_ns().value_or(kNever) : kNever;
}

const Effects& VllmEngine::land(std::int64_t now_ns) {
  if (polls_) {
    clear_returned_effects();
    if (parts_.net != nullptr) parts_.net->hub().run_until(now_ns);
    return return_effects();  // the next poll sees what has landed
  }
  require_tiers();
  clear_returned_effects();
  require_time(now_ns);
  tiers_->hub().run_until(now_ns);
  if (!clock_.in_step) skip_to(now_ns);                    // no step begins before
  if (offload_links_ && !clock_.in_step && quiescent()) {  // else the next step reports it
    offload_after_step(now_ns);
    announcer_.show(now_ns);
    sample_blocks(now_ns);
  }
  return return_effects();
}

const Effects& VllmEngine::transfers_landed(std::int64_t now_ns) {
  clear_returned_effects();
  if (own_run_) {
    tiers_->hub().run_until(now_ns);
  } else if (nap_.on && !nap_.polls) {
    notice_landings(now_ns);
  }
  return return_effects();
}

// Publish landings outside of a step, and sample the state they changed.
void VllmEngine::notice_landings(std::int64_t now_ns) {
  if (tiers_->landings() == landings_noticed_) return;
  landings_noticed_ = tiers_->landings();
  token_log_.touch();
  announcer_.show(now_ns);
}

// Without requests to schedule, landings since the last step are reported at the times when they landed.
void VllmEngine::report_idle_landings() {
  while (offload_links_ && !polls_ && !clock_.in_step && quiescent() && offload_links_->has_done()) {
    std::int64_t time_ns = 0;
    report_offload(offload_links_->take_first_done(time_ns), time_ns);
    announcer_.show(time_ns);
    sample_blocks(time_ns);
  }
}

}  // namespace understudy
