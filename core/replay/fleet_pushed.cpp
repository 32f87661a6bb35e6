// Prefill workers that push KV, as SGLang's: a request goes to a prefill and a decode worker at once. The decode worker
// allocates memory for it, the other computes the prompt and sends it, and each has a record of its own.
#include <algorithm>
#include <utility>

#include "base/assert.hpp"
#include "replay/fleet.hpp"

namespace understudy {

void Fleet::set_up_pushes() {
  const auto pushing =
      std::ranges::count_if(config_.pools, [](const WorkerPool& pool) { return pool.engine->pushes(); });
  if (pushing == 0) return;
  if (static_cast<std::size_t>(pushing) != config_.pools.size()) {
    throw Error(ErrorKind::ConfigError,
                "pools: engines of one kind only can hand KV to each other; give one kind to all pools with a role");
  }
  pushes_ = std::make_unique<PushNet>(*net_);
  staged_ = static_cast<StagedRouter*>(config_.router.get());
}

RequestStage Fleet::stage_of(std::size_t worker) const {
  return workers_[worker].info.role == WorkerRole::Prefill ? RequestStage::Prefill : RequestStage::Decode;
}

void Fleet::arrive_pushed(std::uint64_t row) {
  const bool waited = arrival_ns_[row] >= 0;
  if (!arrive_first(row)) return;
  if (const std::optional<std::string> why = why_no_stage(row)) {
    rejections_.emplace_back(static_cast<std::int64_t>(row), *why);  // no router has chosen
    return end_turn(row, now_ns_);
  }
  if (!waited) push_abort(row);
  if (strand(row, RequestStage::Prefill) || strand(row, RequestStage::Decode)) return;
  std::array<WorkerId, 2> chosen{};
  const bool decode_first = config_.disaggregation->decode_first;
  for (const RequestStage stage : decode_first ? std::array{RequestStage::Decode, RequestStage::Prefill}
                                               : std::array{RequestStage::Prefill, RequestStage::Decode}) {
    chosen[stage == RequestStage::Prefill ? 0 : 1] = choose(row, stage);
  }
  way_[row] = RequestWay::Remote;
  HandOffColumns& out = columns_.result().handoff;
  out.prefill_worker[row] = static_cast<std::int32_t>(chosen[0]);
  out.decode_arrival_ns[row] = now_ns_;
  decode_worker_[row] = static_cast<std::int32_t>(chosen[1]);
  pushes_->open(row, static_cast<std::uint32_t>(chosen[0]), static_cast<std::uint32_t>(chosen[1]));
  place(row, chosen[0], KvLeg::Prefill);
  place(row, chosen[1], KvLeg::Decode);
  prefill_identities_.erase(row);
}

// The client leaves both workers.
void Fleet::abort_pushed(std::uint64_t row) {
  for (const std::int32_t chosen : {columns_.result().handoff.prefill_worker[row], decode_worker_[row]}) {
    const auto worker = static_cast<std::size_t>(chosen);
    sync_worker(worker);
    leave_sleepers(worker);
    absorb(worker, workers_[worker].engine->cancel(row, now_ns_));
    after_input(worker);
  }
}

void Fleet::track_legs(std::size_t index, const Effects& effects) {
  const RequestStage stage = stage_of(index);
  for (const NewTokens& tokens : effects.tokens) {
    const std::uint64_t row = tokens.request;
    if (stage == RequestStage::Prefill) {
      if (config_.steps) config_.steps->place(row, static_cast<std::size_t>(decode_worker_[row]), now_ns_);
      if (tracks_) staged_->first_token(row, stage);
      continue;
    }
    if (lives_) lives_->emitted[row] += tokens.tokens;
    if (!tracks_ || started_[row]) continue;
    started_[row] = true;
    staged_->first_token(row, stage);
  }
}

void Fleet::record_legs(std::size_t index) {
  std::vector<RequestRecord> finished;
  finished.swap(workers_[index].finished);
  for (const RequestRecord& record : finished) end_leg(index, record);
}

void Fleet::end_leg(std::size_t index, const RequestRecord& record) {
  const std::uint64_t row = record.id;
  const RequestStage stage = stage_of(index);
  WorkerLoad& load = loads_[index];
  UNDERSTUDY_ASSERT(load.outstanding_requests > 0, "a request ends on a worker that it was sent to");
  --load.outstanding_requests;
  load.outstanding_tokens -= tokens_of(row, index);
  if (tracks_) staged_->ended(row, stage);
  if (config_.steps) config_.steps->split(index);
  if (lives_) lives_->end(row, index);
  Legs& legs = legs_[row];
  HandOffColumns& out = columns_.result().handoff;
  if (stage == RequestStage::Prefill) {
    legs.prefill = record;
    out.prefill_admit_ns[row] = record.first_admit_ns;
    out.prefill_done_ns[row] = record.first_token_ns;
  } else {
    legs.decode = record;
    out.decode_admit_ns[row] = record.first_admit_ns;
  }
  if (legs.prefill && legs.decode) {
    // The client sees the decode worker; caches and queues are those of the prompt.
    RequestRecord whole = *legs.decode;
    const RequestRecord& first = *legs.prefill;
    whole.queued_ns = first.queued_ns;
    whole.first_admit_ns = first.first_admit_ns;
    whole.preemptions += first.preemptions;
    whole.looked_up = first.looked_up;
    whole.cached_first = first.cached_first;
    whole.cached_total = first.cached_total;
    keep(whole);
    if (lives_) count_traffic(row);
    legs_.erase(row);
  }
  if (stage == RequestStage::Decode) end_turn(row, record.finish_ns);
}

}  // namespace understudy
