// The engine's side of its tiers: loads before an admission, copies after a step.
#include <algorithm>
#include <limits>

#include "base/assert.hpp"
#include "engine/vllm/engine.hpp"
#include "engine/vllm/run_rows.hpp"

namespace understudy {

namespace {

// Leading blocks on the device and on the host of vLLM's offload. `runs`: the device's, if they are not in the store.
std::vector<TierAnswer> look_up_host(const RunRows* runs, const BlockStore& host,
                                     std::span<const BlockIdentity> blocks) {
  std::vector<bool> above(blocks.size());
  if (runs != nullptr) {
    above = runs->on_device(blocks);
  } else {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      bool has = false;
      host.has_blocks(0, blocks.subspan(i, 1), &has);
      above[i] = has;
    }
  }
  std::vector<TierAnswer> answers;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    TierAnswer answer{TierAnswer::Kind::Hit, Tier::G1, 0};
    if (!above[i]) {
      SlotId here = kNoSlot;
      SlotId coming = kNoSlot;
      (void)host.locate_run(1, blocks.subspan(i, 1), &here, &coming);
      if (here == kNoSlot) answer.kind = coming == kNoSlot ? TierAnswer::Kind::Miss : TierAnswer::Kind::Retry;
      if (answer.kind != TierAnswer::Kind::Miss) answer.tier = Tier::G2;
    }
    answers.push_back(answer);
    if (answer.kind == TierAnswer::Kind::Miss) break;
  }
  return answers;
}

}  // namespace

// Look up the blocks behind the head's device hits in lower tiers; Parked: their load has begun.
WorkerTiers::Onboard VllmEngine::onboard(const Admission& head, std::int64_t now_ns) {
  const EngineRequest& request = requests_[head.slot];
  const std::size_t hits = head.hit.tokens / config_.block_size;
  const std::size_t limit = head.limit / config_.block_size;
  const bool preempted = request.status == RequestStatus::Preempted;
  if (hits == limit || request.onboard_tried || (preempted && !tiers_->config().onboard_preempted)) {
    return WorkerTiers::Onboard::Miss;
  }
  const auto prefill_ns = [&](std::size_t blocks) {
    auto cached = static_cast<std::uint32_t>(blocks * config_.block_size);
    if (grouped_ != nullptr) cached -= std::min(cached, grouped_->replay());
    return timing_.duration_ns(StepLoad::of_prompt(request.known, cached), capacity_tokens_);
  };
  const auto saved_ns = [&](std::size_t blocks) { return prefill_ns(hits) - prefill_ns(hits + blocks); };
  if (grouped_ != nullptr) {
    return onboard_groups(head.slot, now_ns, request.blocks, head.hit.tokens, head.limit, saved_ns);
  }
  return tiers_->onboard(head.slot, now_ns, kv_->found(head.hit),
                         std::span<const BlockIdentity>(request.blocks).subspan(hits, limit - hits), saved_ns);
}

// Its blocks are being loaded: it waits outside the queues.
void VllmEngine::park(EngineRequest& request) {
  request.before_park = request.status;
  request.status = RequestStatus::Parked;
  request.onboard_tried = true;
  ++parked_;
  resume_loaded();  // loads that took no time
}

// Load the longest hit of all groups over all tiers; if that does not pay or does not fit, one without the lowest tier.
WorkerTiers::Onboard VllmEngine::onboard_groups(RequestSlot request, std::int64_t now_ns,
                                                std::span<const BlockIdentity> units, std::uint32_t known,
                                                std::uint32_t limit,
                                                const std::function<std::int64_t(std::size_t)>& saved_ns) {
  const GroupTiers& below = grouped_->tiers();
  auto outcome = WorkerTiers::Onboard::Miss;
  std::uint32_t before = 0;
  for (Tier lowest = tiers_->lowest(); lowest > Tier::G1; lowest = static_cast<Tier>(static_cast<int>(lowest) - 1)) {
    const std::uint32_t tokens = below.find(units, known, limit, lowest);
    if (tokens <= known) return outcome;
    if (std::exchange(before, tokens) == tokens) continue;
    const GroupTiers::Needed needed = below.needed(units, tokens, limit, lowest);
    const std::size_t first = known / config_.block_size;
    const std::size_t end = tokens / config_.block_size;
    const auto here =
        tiers_->onboard_all(request, now_ns, {needed.blocks, needed.covers, first, end}, saved_ns(end - first));
    if (here == WorkerTiers::Onboard::Parked || here == WorkerTiers::Onboard::Retry) return here;
    if (here == WorkerTiers::Onboard::Slow) outcome = here;
  }
  return outcome;
}

void VllmEngine::resume_loaded() {
  for (const RequestSlot id : tiers_->take_ready()) {
    EngineRequest& request = requests_[id];
    request.status = request.before_park;
    queues_.resume(id);
    --parked_;
    refusal_.stands = false;
  }
}

void VllmEngine::finish_transfers() {
  while (polls_ && !clock_.in_step && handoff_pending()) {
    const std::int64_t next_ns = polling_ ? next_poll_ns() : clock_.now_ns;
    if (next_ns == kNever) break;
    begin_one_step(next_ns);
  }
  while (const std::optional<std::int64_t> wake = tiers_ ? tiers_->hub().next_wake_ns() : std::nullopt) {
    tiers_->hub().run_until(*wake);
  }
  report_idle_landings();
  if (config_.check) check();
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

std::int64_t VllmEngine::next_landing_ns() const {
  if (polls_ && polling_ && !clock_.in_step) return rests() ? kNever : next_poll_ns();
  if (!tiers_ || clock_.in_step) return kNever;
  const bool waits =
      landing_wait_.on || (quiescent() && (offload_ ? !polls_ && (offload_->has_jobs() || offload_->has_ended_to_tell())
                                                    : !tiers_->idle()));
  return waits ? tiers_->hub().next_wake_ns().value_or(kNever) : kNever;
}

const Effects& VllmEngine::land(std::int64_t now_ns) {
  if (polls_) {
    clear_returned_effects();
    if (parts_.net != nullptr) parts_.net->hub().run_until(now_ns);
    return return_effects();  // the next poll sees what has landed
  }
  if (!tiers_) throw Error(ErrorKind::WrongState, "this engine has no tiers");
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

std::size_t VllmEngine::cached_prefix(std::span<const BlockIdentity> blocks) const {
  if (grouped_ != nullptr && tiers_ && !offload_) {
    const auto limit = static_cast<std::uint32_t>(blocks.size() * config_.block_size);
    return grouped_->tiers().find(blocks, 0, limit, tiers_->lowest()) / config_.block_size;
  }
  if (grouped_ != nullptr || !tiers_) return kv_->cached(blocks) / config_.block_size;
  const std::vector<TierAnswer> answers = offload_ ? look_up_host(run_rows_, store_, blocks) : tiers_->lookup(blocks);
  return static_cast<std::size_t>(
      std::ranges::count_if(answers, [](const TierAnswer& answer) { return answer.kind != TierAnswer::Kind::Miss; }));
}

std::vector<TierAnswer> VllmEngine::tier_lookup(std::span<const BlockIdentity> blocks) {
  if (!tiers_) throw Error(ErrorKind::WrongState, "this engine has no tiers");
  if (grouped_ == nullptr) return offload_ ? look_up_host(run_rows_, store_, blocks) : tiers_->lookup(blocks);
  require_group_tiers("tier_lookup");
  const GroupTiers& below = grouped_->tiers();
  const auto limit = static_cast<std::uint32_t>(blocks.size() * config_.block_size);
  const std::uint32_t tokens = below.find(blocks, 0, limit, tiers_->lowest());
  const GroupTiers::Needed needed = below.needed(blocks, tokens, limit, tiers_->lowest());
  const std::vector<TierAnswer> found = tiers_->lookup(needed.blocks);
  UNDERSTUDY_ASSERT(found.size() == needed.blocks.size(), "a hit has blocks on no tier");
  std::vector<TierAnswer> answers(tokens / config_.block_size, {TierAnswer::Kind::Hit, Tier::G1, 0});
  for (std::size_t i = 0; i < needed.blocks.size(); ++i) {
    for (std::size_t unit = needed.covers[i].first; unit < needed.covers[i].end; ++unit) {
      TierAnswer& answer = answers[unit];
      answer.kind = std::max(answer.kind, found[i].kind);
      answer.tier = std::max(answer.tier, found[i].tier);
      answer.ready_ns = answer.kind == TierAnswer::Kind::Retry ? 0 : std::max(answer.ready_ns, found[i].ready_ns);
    }
  }
  if (answers.size() < blocks.size()) answers.push_back({});
  return answers;
}

void VllmEngine::require_group_tiers(const char* call) const {
  if (offload_) {
    throw Error(ErrorKind::WrongState, call, ": vLLM's offload has no such call; ",
                "use a tier with mode write_through or evict");
  }
}

bool VllmEngine::prefetch_groups(std::span<const BlockIdentity> blocks, std::int64_t now_ns) {
  const auto limit = static_cast<std::uint32_t>(blocks.size() * config_.block_size);
  const auto worth = [](std::size_t) { return std::numeric_limits<std::int64_t>::max(); };
  return onboard_groups(WorkerTiers::kNoRequest, now_ns, blocks, grouped_->cached(blocks), limit, worth) ==
         WorkerTiers::Onboard::Parked;
}

bool VllmEngine::prefetch(std::span<const BlockIdentity> blocks, std::int64_t now_ns) {
  if (!tiers_) throw Error(ErrorKind::WrongState, "this engine has no tiers");
  require_group_tiers("prefetch");
  require_time(now_ns);
  tiers_->hub().run_until(now_ns);
  if (!clock_.in_step) skip_to(now_ns);
  token_log_.touch();
  bool under_way = false;
  try {
    under_way = grouped_ != nullptr ? prefetch_groups(blocks, now_ns) : tiers_->prefetch(now_ns, blocks);
  } catch (...) {  // user-defined policy: blocks evicted for the load stay evicted
    announcer_.show(now_ns);
    throw;
  }
  announcer_.show(now_ns);
  sample_blocks(now_ns);
  return under_way;
}

// Count an admission's hits that came from lower tiers and were on the device only for this request.
void VllmEngine::count_origins(const Admission& head, bool resumed) {
  EngineRequest& request = requests_[head.slot];
  tiers_->note_hits(kv_->found(head.hit));
  request.onboard_tried = false;
  request.through = 0;
  const std::optional<WorkerTiers::Origin> origin = tiers_->take_origin(head.slot);
  if (!origin) return;
  request.record.parked_ns += origin->parked_ns;
  if (origin->failed) return;  // another request computed the blocks meanwhile
  for (std::size_t i = 0; i < origin->tiers.size(); ++i) {
    const auto start = static_cast<std::uint32_t>((origin->first_block + i) * config_.block_size);
    if (start >= head.hit_tokens) break;
    if (origin->tiers[i] == Tier::G1) continue;
    // A hit may end inside a unit if its last tokens are computed again.
    const std::uint32_t tokens = std::min(config_.block_size, head.hit_tokens - start);
    const auto below = static_cast<std::size_t>(origin->tiers[i]) - static_cast<std::size_t>(Tier::G2);
    request.record.below_total[below] += tokens;
    if (!resumed) request.record.below_first[below] += tokens;
  }
}

// The step has computed blocks: those that the host lacks go there.
void VllmEngine::write_through(const std::vector<Scheduled>& turns, std::int64_t now_ns) {
  if (tiers_->config().mode != OffloadMode::WriteThrough) return;
  for (const Scheduled& turn : turns) {
    EngineRequest& request = requests_[turn.slot];
    if (!live(turn) || request.status != RequestStatus::Running) continue;
    // Asynchronously, later blocks may have their keys already.
    const std::uint32_t end = turn.before + turn.tokens;
    const std::uint32_t full =
        std::min(num_keyed(request), kv_->names_on_receipt() ? blocks_for(end) : end / config_.block_size);
    if (full <= request.through) continue;
    const std::uint32_t first = request.through;
    request.through = full;
    if (grouped_ != nullptr) {
      const GroupedBackend::Offered& offered = grouped_->offered(request, first, full);
      tiers_->write_through(turn.slot, now_ns, offered.slots, offered.blocks);
      tiers_->hold_copied(turn.slot);  // a window may leave a block before it is copied
      continue;
    }
    tiers_->write_through(turn.slot, now_ns, std::span<const SlotId>(request.table).subspan(first, full - first),
                          std::span<const BlockIdentity>(request.blocks).subspan(first, full - first));
  }
  tiers_->hub().run_until(now_ns);
}

bool VllmEngine::landing_wait_over() const noexcept {
  return landing_wait_.visited || (offload_links_ && offload_links_->has_done()) || tiers_->has_ready() ||
         tiers_->released() != landing_wait_.released;
}

// Publish landings outside of a step, and sample the state they changed.
void VllmEngine::notice_landings(std::int64_t now_ns) {
  if (tiers_->landings() == landings_noticed_) return;
  landings_noticed_ = tiers_->landings();
  token_log_.touch();
  announcer_.show(now_ns);
}

const Effects& VllmEngine::transfers_landed(std::int64_t now_ns) {
  clear_returned_effects();
  if (own_run_) {
    tiers_->hub().run_until(now_ns);
  } else if (landing_wait_.on) {
    notice_landings(now_ns);
  }
  return return_effects();
}

// Whether blocks freed since the last attempt may admit the head of the queue.
bool VllmEngine::head_may_move() const { return refusal_.released != tiers_->released() && !head_stays(); }

bool VllmEngine::head_stays() const {
  const std::optional<RequestSlot> head = queues_.candidate();
  return !head || tiers_->waiting(*head) || head_lacks_room();
}

// A block taken by another request is one fewer free, and reduces what the head needs by at most one (see `refuse`):
// only blocks released by tiers help it.
bool VllmEngine::head_lacks_room() const {
  return refusal_.stands && tiers_->released() - refusal_.released < refusal_.lacks &&
         refusal_.loads_ended == tiers_->loads_ended();
}

bool VllmEngine::has_transfers() const {
  return tiers_ && (!tiers_->idle() || (offload_links_ && !offload_links_->idle()));
}

std::uint32_t VllmEngine::num_keyed(const EngineRequest& request) const {
  return grouped_ != nullptr ? grouped_->keyed_units(request) : request.keyed;
}

}  // namespace understudy
