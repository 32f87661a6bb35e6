// Prefill and decode pools: a request is a prompt on one worker, then the rest of it on another.
#include <algorithm>
#include <utility>

#include "base/assert.hpp"
#include "replay/fleet.hpp"
#include "router/staged.hpp"

namespace understudy {

FleetConfig Fleet::with_stages(FleetConfig config) {
  if (!config.disaggregation) {
    for (const WorkerPool& pool : config.pools) {
      if (pool.role != WorkerRole::Both) {
        throw Error(ErrorKind::ConfigError, "pools: a pool with a role needs disaggregation settings");
      }
    }
    return config;
  }
  bool prefills = false;
  bool decodes = false;
  for (const WorkerPool& pool : config.pools) {
    prefills = prefills || pool.role == WorkerRole::Prefill;
    decodes = decodes || pool.role == WorkerRole::Decode;
    if (pool.role == WorkerRole::Both) {
      throw Error(ErrorKind::ConfigError,
                  "pools: role must be prefill or decode in every pool of a disaggregated fleet");
    }
  }
  if (!prefills || !decodes) {
    throw Error(ErrorKind::ConfigError,
                "pools: disaggregation needs a pool with role prefill and one with role decode");
  }
  if (config.lockstep_ns > 0 || config.ranks > 1) {
    throw Error(ErrorKind::ConfigError, "pools: roles do not work with ", config.ranks > 1 ? "ranks" : "lockstep",
                " yet");
  }
  config.router = std::make_shared<StagedRouter>(config.router, config.disaggregation->decode_router);
  return config;
}

// Before workers are added.
void Fleet::set_up_stages() {
  if (!config_.disaggregation) return;
  net_ = std::make_unique<HandOffNet>(hub_, config_.disaggregation->links);
  set_up_pushes();
  net_->set_failure_rate(config_.disaggregation->transfer_failure_rate, config_.disaggregation->seed);
  way_.assign(workload_.size(), RequestWay::Whole);
  prefilling_.assign(workload_.size(), false);
  decode_worker_.assign(workload_.size(), -1);
  columns_.result().handoff.prepare(workload_.size());
}

// A request that is too large for either stage is rejected before it reaches an engine.
std::optional<std::string> Fleet::why_no_stage(std::uint64_t row) const {
  const auto prompt = static_cast<std::uint32_t>(workload_.prompt_tokens[row]);
  const std::uint32_t output = std::min(workload_.limit(row), static_cast<std::uint32_t>(workload_.output_tokens[row]));
  std::optional<std::string> why;
  for (const Pool& pool : pools_) {
    const bool prefills = pool.config.role == WorkerRole::Prefill;
    why = asked_engine(pool).never_fits(prompt, prefills ? 1 : output);
    if (why) return *why + (prefills ? " (prefill pool)" : " (decode pool)");
  }
  return why;
}

void Fleet::arrive_staged(std::uint64_t row) {
  const Disaggregation& staged = *config_.disaggregation;
  if (!aborted_.empty() && aborted_[row]) return drop_between_workers(row);
  if (prefilling_[row]) return arrive_for_decode(row);
  const bool waited = arrival_ns_[row] >= 0;
  if (!arrive_first(row)) return;
  if (const std::optional<std::string> why = why_no_stage(row)) {
    reject(row, *why);
    return end_turn(row, now_ns_);
  }
  if (!waited) push_abort(row);
  if (strand(row, RequestStage::Prefill) || strand(row, RequestStage::Decode)) return;
  bool remote = true;
  if (staged.decode_first || staged.decider->reads_cache()) {
    const WorkerId worker = choose(row, RequestStage::Decode);
    decode_worker_[row] = static_cast<std::int32_t>(worker);
    remote = staged.decider->remote(asked_, staged.decider->reads_cache() ? cached_tokens(row, worker) : 0);
  } else {
    remote = staged.decider->remote(request_of(row, RequestStage::Prefill), 0);
  }
  way_[row] = remote ? RequestWay::Remote : RequestWay::Local;
  if (remote) {
    const WorkerId worker = choose(row, RequestStage::Prefill);
    prefilling_[row] = true;
    columns_.result().handoff.prefill_worker[row] = static_cast<std::int32_t>(worker);
    return place(row, worker, KvLeg::Prefill);
  }
  if (decode_worker_[row] < 0) decode_worker_[row] = static_cast<std::int32_t>(choose(row, RequestStage::Decode));
  place(row, static_cast<std::size_t>(decode_worker_[row]), KvLeg::Whole);
}

void Fleet::arrive_for_decode(std::uint64_t row) {
  if (strand(row, RequestStage::Decode)) return;
  prefilling_[row] = false;
  if (tracks_) started_[row] = false;
  const bool left = lives_ && decode_worker_[row] >= 0 &&
                    workers_[static_cast<std::size_t>(decode_worker_[row])].state != WorkerState::Ready;
  if (left) {  // since it was chosen
    if (tracks_) config_.router->ended(row);
    decode_worker_[row] = -1;
  }
  if (decode_worker_[row] < 0) decode_worker_[row] = static_cast<std::int32_t>(choose(row, RequestStage::Decode));
  columns_.result().handoff.decode_arrival_ns[row] = now_ns_;
  place(row, static_cast<std::size_t>(decode_worker_[row]), KvLeg::Decode);
}

// A prefill worker has computed the prompt.
void Fleet::end_prefill(const RequestRecord& record) {
  const std::uint64_t row = record.id;
  HandOffColumns& out = columns_.result().handoff;
  out.prefill_admit_ns[row] = record.first_admit_ns;
  out.prefill_done_ns[row] = record.finish_ns;
  prefilled_.insert_or_assign(row, record);
  push_arrival(record.finish_ns + config_.disaggregation->hop_ns, row);
}

// The record of a request that went two ways: what a client and a cache see of both.
void Fleet::join_legs(RequestRecord& record) {
  const std::uint64_t row = record.id;
  if (way_.empty() || way_[row] != RequestWay::Remote) return;
  HandOffColumns& out = columns_.result().handoff;
  if (prefilling_[row]) {  // aborted before its prompt was computed
    out.prefill_admit_ns[row] = record.first_admit_ns;
    prefill_identities_.erase(row);
    return;
  }
  out.decode_admit_ns[row] = record.first_admit_ns;
  const auto prefilled = prefilled_.find(row);
  UNDERSTUDY_ASSERT(prefilled != prefilled_.end(), "a decoded request was prefilled");
  const RequestRecord& first = prefilled->second;
  record.queued_ns = first.queued_ns;
  record.first_admit_ns = first.first_admit_ns;
  record.preemptions += first.preemptions;
  // The decode worker finds what was pulled, which is no cache hit.
  const auto prompt = static_cast<std::uint64_t>(workload_.prompt_tokens[row]);
  record.looked_up = first.looked_up + record.looked_up - std::min(record.looked_up, prompt);
  record.cached_total = first.cached_total + record.cached_total - record.cached_first;
  record.cached_first = first.cached_first;
  record.below_first = first.below_first;
  for (std::size_t i = 0; i < record.below_total.size(); ++i) record.below_total[i] += first.below_total[i];
  record.parked_ns += first.parked_ns;
  record.room_wait_ns += first.room_wait_ns;
  prefilled_.erase(prefilled);
}

RouteRequest Fleet::request_of(std::uint64_t row, RequestStage stage) {
  const bool decodes = stage == RequestStage::Decode;
  const auto pool = std::ranges::find_if(
      pools_, [&](const Pool& one) { return one.config.role == (decodes ? WorkerRole::Decode : WorkerRole::Prefill); });
  const EngineConfig& first = *pool->engine;
  if (routed_.block_size == 0 || routed_.row != row) {
    routed_ = {};
    if (first.enable_prefix_caching) routed_ = {row, first.block_size, identities_of_leg(row, first)};
  }
  RouteRequest request;
  request.row = row;
  request.session = session_of(row);
  request.parent_session = parent_of(request.session).value_or(RouteRequest::kNoSession);
  request.stage = stage;
  request.arrival_ns = arrival_ns_[row];
  request.prompt_tokens = static_cast<std::uint32_t>(workload_.prompt_tokens[row]);
  request.output_tokens =
      stage == RequestStage::Prefill
          ? 1
          : std::min(workload_.limit(row), static_cast<std::uint32_t>(workload_.output_tokens[row]));
  request.priority = workload_.priority.empty() ? 0 : workload_.priority[row];
  request.strict_priority = workload_.strict_priority.empty() ? 0 : workload_.strict_priority[row];
  request.block_size = first.block_size;
  request.identities = routed_.identities.get();
  return request;
}

// Those that the prefill worker has made, if it has: both pools name blocks alike.
std::shared_ptr<const IdentitySource> Fleet::identities_of_leg(std::uint64_t row, const EngineConfig& engine) {
  const auto made = prefill_identities_.extract(row);
  return made ? std::move(made.mapped()) : identities_of(row, engine);
}

WorkerId Fleet::choose(std::uint64_t row, RequestStage stage) {
  asked_ = request_of(row, stage);
  stage_ = stage;
  const WorkerId worker = config_.router->choose(asked_, *this);
  if (std::ranges::binary_search(ready(), worker)) return worker;
  throw Error(ErrorKind::PolicyError, "the router chose worker ", worker, " for row ", row,
              ", which is not ready for this stage; choose one of the ", ready().size(), " ids in view.ready");
}

// Tokens of the prompt that a worker would find in its cache now.
std::uint32_t Fleet::cached_tokens(std::uint64_t row, WorkerId worker) {
  if (!routed_.identities) return 0;
  if (!stepwise()) advance_to_now(worker);
  const EngineConfig& engine = config_of(worker);
  const auto prompt = static_cast<std::uint32_t>(workload_.prompt_tokens[row]);
  std::vector<BlockIdentity> room;
  const std::span<const BlockIdentity> blocks = routed_.identities->first((prompt - 1) / engine.block_size, room);
  return static_cast<std::uint32_t>(rank_of(worker).cached_prefix(blocks)) * engine.block_size;
}

// Transfers have ended: their workers have something to see.
void Fleet::reach_workers() {
  if (!net_) return;
  for (const std::uint32_t index : net_->take_reached()) {
    Worker& worker = workers_[index];
    if (!stepwise()) {
      if (worker.phase != Phase::Idle) schedule_poll(index);
      continue;
    }
    if (worker.phase == Phase::InStep || worker.phase == Phase::Idle) continue;
    leave_sleepers(index);
    absorb(index, worker.engine->transfers_landed(now_ns_));
    if (worker.phase == Phase::Asleep) {
      join_sleepers(index);
    } else {
      want_begin(index);
    }
  }
}

void Fleet::collect_handoffs() {
  if (!net_) return;
  HandOffColumns& out = columns_.result().handoff;
  for (std::size_t row = 0; row < way_.size(); ++row) out.way[row] = static_cast<std::uint8_t>(way_[row]);
  for (std::uint32_t worker = 0; !pushes_ && worker < net_->workers(); ++worker) {
    std::vector<RequestId> unread;  // sent to an idle prefill worker, which keeps nothing
    net_->take_notes(worker, HandOffNet::kNever, unread);
    out.late_notifications += net_->late_notifications(worker) + unread.size();
  }
  if (pushes_) out.pushed_busy_ns = pushes_->busy_ns();
  for (const HandOffRecord& record : net_->records()) {
    out.offered_ns[record.request] = record.offered_ns;
    out.posted_ns[record.request] = record.posted_ns;
    out.landed_ns[record.request] = pushes_ && record.landed_ns == HandOffNet::kNever ? -1 : record.landed_ns;
    out.bytes[record.request] = static_cast<std::int64_t>(record.bytes);
    if (!record.failed) continue;
    const bool again = out.decode_admit_ns[record.request] >= 0;
    out.way[record.request] = static_cast<std::uint8_t>(again ? RequestWay::Fallback : RequestWay::Failed);
  }
}

}  // namespace understudy
