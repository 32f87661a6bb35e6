#include "engine/vllm/scheduler.hpp"

#include <algorithm>
#include <utility>

namespace understudy {

namespace {

// Whether a step in flight may still write blocks of a request that has ended or was preempted.
bool defers_frees(const VllmConfig& c, const Connector& connector) {
  if (!c.async_scheduling) return false;
  if (c.multi) return c.multi->consumes;
  return c.transfer ? c.transfer->consumes : connector.loads();
}

}  // namespace

Scheduler::Scheduler(const SchedulerParts& parts)
    : config_(parts.config),
      kv_(parts.kv),
      grouped_(parts.grouped),
      tiers_(parts.tiers),
      connector_(parts.connector),
      onboarding_(parts.onboarding),
      planned_(parts.planned),
      token_log_(parts.token_log),
      effects_(parts.effects),
      totals_(parts.totals),
      // vLLM's own count of blocks has one more, and the watermark is taken of that.
      watermark_blocks_(
          static_cast<std::uint64_t>(config_.watermark * static_cast<double>(config_.num_gpu_blocks + 1))),
      lookup_unit_(config_.groups.empty() ? config_.block_size : 1),
      connects_(connector_.loads() || connector_.produces()),
      loads_(connector_.loads()),
      recomputes_(!config_.transfer || config_.transfer->recomputes),
      fenced_(defers_frees(config_, connector_)),
      spares_in_flight_(loads_ && (!config_.offload || config_.offload->spares_in_flight)),
      waiting_(config_.policy, config_.preempted_first, requests_),
      bursts_(config_.mocker.accept_rates, config_.mocker.burst_seed),
      acceptance_(config_.speculation.accept_rates, config_.speculation.seed),
      accepted_at_(config_.speculation.tokens) {}

// ── Requests ──

RequestSlot Scheduler::spare_slot() {
  if (free_slots_.empty()) {
    free_slots_.push_back(static_cast<RequestSlot>(requests_.size()));
    requests_.emplace_back();
  }
  return free_slots_.back();
}

EngineRequest& Scheduler::add_request(RequestSpec spec) {
  const RequestSlot slot = spare_slot();
  free_slots_.pop_back();
  EngineRequest& request = requests_[slot] = {};
  ++counts_.submitted;
  request.id = spec.id;
  request.slot = slot;
  request.spec = std::move(spec);
  request.known = request.spec.prompt_tokens;
  slots_.emplace(request.id, slot);
  waiting_.push(slot, false);
  connector_.on_new_request(request);
  return request;
}

void Scheduler::finish_request(RequestSlot slot, FinishReason reason, std::int64_t now_ns) {
  EngineRequest& request = requests_[slot];
  if (request.status == RequestStatus::Running) {
    leave_running(slot);
  } else if (request.status == RequestStatus::Parked) {
    --counts_.parked;
  } else {
    waiting_.remove(slot);
  }
  if (tiers_ != nullptr) {
    tiers_->abandon(slot);
    tiers_->stop_waiting(slot, now_ns);
  }
  log_.ended.emplace_back(request.id, request.spec.name);
  free_request(request, reason == FinishReason::Cancelled, now_ns);
  effects_.finished.push_back(take_record(slot, reason, now_ns));
}

// Also out of a suspended schedule.
void Scheduler::leave_running(RequestSlot slot) {
  const auto place = std::ranges::find(running_, slot);
  if (suspended_) {
    if (static_cast<std::size_t>(place - running_.begin()) < cursor_) --cursor_;
    StepLog& log = suspended_->log;
    (void)unschedule(log, slot);
    const auto entry = std::ranges::find(log.admitted, requests_[slot].id) - log.admitted.begin();
    if (static_cast<std::size_t>(entry) < log.admitted.size()) {
      log.admitted.erase(log.admitted.begin() + entry);
      log.resumed.erase(log.resumed.begin() + entry);
      log.cached.erase(log.cached.begin() + entry);
      if (static_cast<std::size_t>(entry) < admitted_before_) --admitted_before_;
    }
  }
  running_.erase(place);
}

const EngineRequest& Scheduler::request(RequestId id) const {
  const auto found = slots_.find(id);
  if (found == slots_.end()) {
    throw Error(ErrorKind::InvalidArgument, "request ", id, " has ended, or was never submitted");
  }
  return requests_[found->second];
}

bool Scheduler::drained() const {
  return running_.empty() && counts_.parked == 0 &&
         std::ranges::none_of(waiting_.skipped().ids(),
                              [this](RequestSlot slot) { return kv_.holds(requests_[slot]); });
}

bool Scheduler::reset_prefix_cache() {
  const bool unused = kv_.available() == config_.num_gpu_blocks;
  if (unused) kv_.reset();
  const bool others = connector_.reset_cache();
  return unused && others;
}

void Scheduler::check() const {
  if (running_.size() + waiting_.size() + counts_.parked != slots_.size() ||
      slots_.size() + free_slots_.size() != requests_.size()) {
    throw Error(ErrorKind::InvariantViolated, "of ", slots_.size(), " requests in ", requests_.size(), " slots ",
                running_.size(), " run, ", waiting_.size(), " wait and ", counts_.parked, " are being loaded; ",
                free_slots_.size(), " slots are free");
  }
}

}  // namespace understudy
