// Observation of the engine: samples over time, and checks.
#include <algorithm>

#include "engine/vllm/engine.hpp"
#include "engine/vllm/fast_forward.hpp"
#include "engine/vllm/run_rows.hpp"

namespace understudy {

void VllmEngine::sample(std::size_t running, std::int64_t time_ns) {
  add_sample(time_ns, static_cast<std::uint32_t>(running), static_cast<std::uint32_t>(num_waiting()));
}

// Blocks change when a transfer lands; requests change with steps and calls, which sample them.
void VllmEngine::sample_blocks(std::int64_t time_ns) {
  if (const std::optional<EngineSample>& last = token_log_.state()) add_sample(time_ns, last->running, last->waiting);
}

void VllmEngine::add_sample(std::int64_t time_ns, std::uint32_t running, std::uint32_t waiting) {
  const KvUsage blocks = kv_->usage();
  EngineSample sample{time_ns, running, waiting,
                      static_cast<std::uint32_t>(config_.num_gpu_blocks - blocks.free - blocks.cached),
                      static_cast<std::uint32_t>(blocks.cached)};
  if (tiers_) {
    sample.held_blocks = static_cast<std::uint32_t>(tiers_->held());
    sample.host_blocks =
        static_cast<std::uint32_t>((store_.in(1, SlotState::Primary) + store_.in(1, SlotState::Inactive)) *
                                   (offload_ ? config_.offload->blocks_per_chunk : 1));
  }
  sample.kept_blocks = static_cast<std::uint32_t>(scheduler_->left().kept.num_blocks());
  token_log_.add_sample(sample);
  if (grouped_ != nullptr) grouped_->sample(time_ns);
}

std::vector<RequestId> VllmEngine::waiting(std::size_t count) const {
  std::vector<RequestId> ids;
  (void)scheduler_->waiting().any_of([&](RequestSlot slot) {
    if (ids.size() == count) return true;
    ids.push_back(scheduler_->requests()[slot].id);
    return false;
  });
  return ids;
}

Phase VllmEngine::phase() const {
  if (stuck_) return Phase::Stalled;
  if (clock_.in_step) return Phase::InStep;
  if (rests() && config_.lockstep_ns == 0) return Phase::Idle;
  return nap_.on && !(nap_.polls && nap_until_ns() != kNever) ? Phase::Asleep : Phase::Ready;
}

std::int64_t VllmEngine::wake_ns() const {
  if (clock_.in_step) return clock_.now_ns;
  if (stuck_ || (rests() && config_.lockstep_ns == 0)) return kNever;
  return nap_.on ? nap_until_ns() : clock_.now_ns;
}

Stall VllmEngine::stall() const {
  Stall stall{thrashing(), num_waiting(), {}, stuck_.value_or(kv_->available()), {}, clock_.begun_ns};
  for (const RequestId id : waiting(3)) stall.first.push_back({id, request(id).known});
  const auto holds = [&](RequestSlot id) { return kv_->holds(scheduler_->requests()[id]); };
  if (!offload_ || !std::ranges::any_of(scheduler_->waiting().skipped().ids(), holds)) return stall;
  if (!config_.offload->holders_first) {
    stall.note =
        "; one that finds no room stands before others that hold blocks which were loaded for them: a defect of "
        "the offload of vLLM " +
        config_.offload->release + ", not of the run; vLLM 0.31 and later serve those first";
  } else if (grouped_ != nullptr &&
             std::ranges::any_of(grouped_->layout().caps, [](const auto& cap) { return cap.has_value(); })) {
    stall.note = text_of(
        "; requests that hold blocks which were loaded for them lack room for the rest of their prompts: with windows, "
        "the offload of vLLM ",
        config_.offload->release,
        " reserves too few blocks for them before it begins another load, and it halts too; choose more blocks "
        "(--num-gpu-blocks)");
  }
  return stall;
}

EngineSnapshot VllmEngine::snapshot() const {
  const PoolMetrics m = kv_->metrics();
  EngineSnapshot now;
  now.phase = phase();
  now.wake_ns = wake_ns();
  now.running = scheduler_->running().size();
  now.waiting = num_waiting();
  now.loading = scheduler_->counts().parked + scheduler_->counts().loading;
  now.parked = scheduler_->counts().parked;
  now.free_blocks = m.reset_blocks;
  now.cached_blocks = m.inactive_blocks;
  now.active_blocks = m.total_blocks - m.reset_blocks - m.inactive_blocks;
  now.held_blocks = tiers_ ? tiers_->held() : 0;
  now.evictions = m.evictions;
  now.stored_blocks = m.registrations;
  now.totals = totals_;
  return now;
}

void VllmEngine::keep_times() {
  token_log_.keep_gaps();
  if (tiers_) tiers_->keep_load_times();
  if (offload_links_) offload_links_->keep_load_times();
}

std::size_t VllmEngine::published_prefix(std::span<const BlockIdentity> blocks, std::size_t known) {
  return announcer_.published_prefix(blocks, known);
}

TierReport VllmEngine::tier_report() {
  const auto use = [](Tier tier, std::uint64_t capacity_blocks, const PoolMetrics& m, std::uint64_t size) {
    return TierUse{tier, capacity_blocks, (m.active_blocks + m.inactive_blocks) * size, m.registrations * size,
                   m.evictions * size};
  };
  TierReport report;
  report.own.push_back(use(Tier::G1, config_.num_gpu_blocks, kv_->metrics(), 1));
  if (!tiers_) return report;
  report.totals = tiers_->totals();
  report.run = own_run_.get();
  report.hub = &tiers_->hub().links();
  report.hub_links = tiers_->links();
  if (!offload_) {
    report.own.push_back(use(Tier::G2, tiers_->config().g2_blocks, store_.metrics(1), 1));
    report.loads_ns = tiers_->onboard_ns();
    return report;
  }
  const std::uint64_t chunk = config_.offload->blocks_per_chunk;
  report.own.push_back(use(Tier::G2, offload_->host().capacity() * chunk, store_.metrics(1), chunk));
  const OffloadTotals& done = offload_->totals();
  report.totals.offloaded_blocks = done.stored_chunks * chunk;
  report.totals.onboards = done.loads;
  report.totals.onboarded_blocks = done.loaded_tokens / config_.block_size;
  report.totals.deferred_lookups = done.deferred_lookups;
  report.totals.refused_stores = done.refused_stores;
  report.totals.flushed_copies = done.flushed_jobs;
  report.loads_ns = offload_links_->load_ns();
  return report;
}

const Residency& VllmEngine::residency() const noexcept {
  if (run_rows_ != nullptr) return *run_rows_;
  if (group_rows_) return *group_rows_;
  return store_;
}

void VllmEngine::check() {
  store_.check();
  kv_->check_blocks();
  check_counts(true);
  // In the middle of a step some changes are unpublished.
  if (!clock_.in_step) announcer_.check(EventTruth::Scope::Whole);
  if (store_.num_events() > 0 && !announcer_.holds())
    throw Error(ErrorKind::InvariantViolated, "blocks changed without a KV event");
}

// Check a small pool as a whole every time, and a large one rarely enough to cost little per step. An idle engine is
// checked sooner, unless most of it has not changed since.
void VllmEngine::check_state() {
  constexpr std::uint64_t kSlotsPerStep = 16;
  constexpr std::uint64_t kSlotsPerIdleStep = 32;
  const std::uint64_t steps = totals_.steps - steps_at_check_;
  const PoolMetrics runs = run_rows_ != nullptr ? kv_->metrics() : PoolMetrics{};
  const std::uint64_t slots = std::max<std::uint64_t>(store_.num_slots(), runs.total_blocks);
  const std::uint64_t used =
      std::max<std::uint64_t>(store_.num_slots() - store_.num_empty(), runs.total_blocks - runs.reset_blocks);
  const bool whole = steps * kSlotsPerStep >= slots || (idle() && steps * kSlotsPerIdleStep >= used);
  if (whole) steps_at_check_ = totals_.steps;
  // Held back: changes of a step that a fast-forward has begun and left to an ordinary step.
  if (!announcer_.holds()) announcer_.check(whole ? EventTruth::Scope::Whole : EventTruth::Scope::All);
  if (whole) store_.check();
  if (whole) kv_->check_blocks();
  check_counts(whole);
}

// Called at the end of a step or a fast-forward. A fast-forward that has begun a step has no comparable state.
void VllmEngine::reach_checkpoint(bool fast_forwarded) {
  if (config_.check) check_state();
  if (on_checkpoint_ && !fast_forward_->has_begun(clock_.now_ns)) on_checkpoint_(*this, fast_forwarded);
}

StateDigest VllmEngine::digest(bool with_cached) const {
  const auto mix = [](std::uint64_t hash, auto... values) {
    ((hash = (hash ^ static_cast<std::uint64_t>(values)) * 0x9E3779B97F4A7C15u, hash ^= hash >> 32), ...);
    return hash;
  };
  StateDigest out;
  auto& [clock, running, waiting, planned, counts, totals, cached] = out.values;
  clock = static_cast<std::uint64_t>(clock_.now_ns);
  for (const RequestSlot slot : scheduler_->running()) {
    const EngineRequest& r = scheduler_->requests()[slot];
    running =
        mix(running, r.id, r.num_computed_tokens, r.known, r.ahead, r.keyed, kv_->num_blocks(r), r.record.preemptions);
  }
  // With tiers a request joins the queue when a landing is noticed: its place is not that of a step's end.
  scheduler_->waiting().for_each([&, &order = waiting](RequestSlot slot) {
    if (std::ranges::find(unread_, slot) != unread_.end()) return;
    const EngineRequest& r = scheduler_->requests()[slot];
    const std::uint64_t hash = mix(0, r.id, r.known, r.record.preemptions);
    order = tiers_ ? order + hash : mix(order, hash);
  });
  for (const auto& [id, slot] : scheduler_->slots()) {
    const EngineRequest& r = scheduler_->requests()[slot];
    if (r.status == RequestStatus::Parked) waiting += mix(0, id, r.known, r.record.preemptions);
  }
  for (const Scheduled& turn : planned_.turns) {
    if (scheduler_->live(turn)) planned = mix(planned, turn.id, turn.tokens, turn.before, turn.samples);
  }
  for (std::size_t i = 0; pipeline_ && i < pipeline_->queue().size(); ++i) {
    const auto& [batch, end_ns] = pipeline_->queue()[i];
    planned = mix(planned, end_ns);
    for (const Scheduled& turn : batch.turns) {
      if (scheduler_->live(turn)) planned = mix(planned, turn.id, turn.tokens, turn.before, turn.samples);
    }
  }
  const PoolMetrics m = kv_->metrics();
  counts =
      mix(0, m.reset_blocks, m.inactive_blocks, m.active_references, m.mutable_blocks, m.evictions, m.registrations);
  if (grouped_ != nullptr) counts = mix(counts, grouped_->digest(scheduler_->running()));
  totals = mix(0, totals_.steps, totals_.step_ns, totals_.uncovered_ns, totals_.preemptions);
  if (!with_cached) return out;
  for (const std::uint64_t name : kv_->contents()) cached += mix(0, name);
  return out;
}

// Device blocks that are not in the tables of running requests.
std::uint64_t VllmEngine::blocks_behind() const {
  std::uint64_t references = scheduler_->left().references();
  scheduler_->waiting().for_each(
      [&](RequestSlot slot) { references += kv_->num_blocks(scheduler_->requests()[slot]); });
  return references;
}

// Check that every request is in one place, and that requests reference exactly the blocks that the store has handed
// out. O(requests); without `whole`, lower tiers are checked only where they changed.
void VllmEngine::check_counts(bool whole) const {
  scheduler_->check();
  if (tiers_ && scheduler_->counts().parked != tiers_->parked()) {
    throw Error(ErrorKind::InvariantViolated, scheduler_->counts().parked,
                " requests are being loaded, the tiers know of ", tiers_->parked());
  }
  if (grouped_ != nullptr) {
    std::vector<RequestSlot> holders = scheduler_->running();
    scheduler_->waiting().for_each([&](RequestSlot slot) {
      if (kv_->holds(scheduler_->requests()[slot])) holders.push_back(slot);
    });
    if (offload_ && whole) offload_->check();
    if (!tiers_ || offload_) return grouped_->check(holders, scheduler_->left().references());
    tiers_->check();
    if (own_run_) own_run_->check(whole);
    return grouped_->check(holders, scheduler_->left().references() + tiers_->g1_references());
  }
  std::uint64_t references = scheduler_->held().blocks();
  for (const RequestSlot id : scheduler_->running()) {
    const EngineRequest& r = scheduler_->requests()[id];
    const std::size_t blocks = kv_->num_blocks(r);
    references += blocks;
    if (r.status != RequestStatus::Running || r.num_computed_tokens > r.known + r.ahead || r.keyed > blocks ||
        (r.num_computed_tokens + config_.block_size - 1) / config_.block_size > blocks) {
      throw Error(ErrorKind::InvariantViolated, "request ", r.spec.name, " is inconsistent");
    }
  }
  if (connector_->loads() || parts_.sender) references += blocks_behind();
  if (offload_ && whole) offload_->check();  // every chunk of its host
  const auto holds = [this](RequestSlot slot) { return kv_->holds(scheduler_->requests()[slot]); };
  if (!connector_->loads() && scheduler_->waiting().any_of(holds)) {
    throw Error(ErrorKind::InvariantViolated, "a waiting request holds blocks");
  }
  if (tiers_ && !offload_) {  // else the host is the connector's
    tiers_->check();
    references += tiers_->g1_references();
  }
  if (own_run_) own_run_->check(whole);
  const PoolMetrics m = kv_->metrics();
  if (m.reset_blocks + m.inactive_blocks + m.active_blocks + m.mutable_blocks != m.total_blocks) {
    throw Error(ErrorKind::InvariantViolated, m.reset_blocks, " free, ", m.inactive_blocks, " cached and ",
                m.active_blocks + m.mutable_blocks, " active blocks are not ", m.total_blocks);
  }
  if (references != m.active_references + m.mutable_blocks) {
    throw Error(ErrorKind::InvariantViolated, "requests hold ", references, " blocks, the store counts ",
                m.active_references + m.mutable_blocks);
  }
}

}  // namespace understudy
