// The result of a run: columns of its requests, gaps, samples, tiers and links.
#include <algorithm>
#include <utility>

#include "replay/fleet.hpp"

namespace understudy {

void Fleet::prepare_columns() {
  const bool tiers = std::ranges::any_of(pools_, [](const Pool& pool) { return pool.config.tiers.has_value(); });
  columns_.prepare(workload_.size(), tiers, keeps_events_);
  for (const Pool& pool : pools_) columns_.add_pool(pool.config.name, pool.first_worker);
}

void Fleet::collect(std::size_t index) {
  if (!workers_[index].harvested && workers_[lead(index)].engine) harvest(index);
  if (keeps_events_) columns_.result().events.push_back(std::move(workers_[index].events));
  if (config_of(index).kv_trace) columns_.result().kv_trace.push_back(std::move(workers_[index].kv_trace));
}

// Takes the results of an engine that is needed no longer. A pool asks that of its first worker what fits.
void Fleet::harvest(std::size_t index) {
  Worker& worker = workers_[index];
  Engine& engine = rank_of(index);
  if (config_.check) engine.check();
  if (keeps_events_) keep_events(index, gathered_);
  if (config_of(index).kv_trace) add_kv_trace(worker, engine);
  columns_.add_engine(index, engine);
  if (sessions_) columns_.result().prefixes += dynamic_cast<PrefixKeeper&>(engine).prefix_totals(now_ns_);
  worker.harvested = true;
  const bool is_asked = lives_ && index == pools_[worker.info.pool].first_worker;
  if (!steps_with_others() && !is_asked) worker.engine.reset();
}

void Fleet::add_kv_trace(Worker& worker, Engine& engine) {
  const std::vector<TimedKvTrace> more = engine.take_kv_trace();
  worker.kv_trace.insert(worker.kv_trace.end(), more.begin(), more.end());
}

void Fleet::keep(const RequestRecord& given) {
  RequestRecord record = given;
  if (net_ && !pushes_) join_legs(record);
  if (lives_ && !lives_->carried.empty()) join_attempts(record);
  const std::uint64_t row = record.id;
  columns_.keep(row, record);
  if (!config_.check || record.reason == FinishReason::Cancelled || record.reason == FinishReason::Failed) return;
  const auto asked = std::min(static_cast<std::uint32_t>(workload_.output_tokens[row]), workload_.limit(row));
  const auto prompt = static_cast<std::uint32_t>(workload_.prompt_tokens[row]);
  const std::uint32_t expected = config_of(static_cast<std::size_t>(worker_of_[row])).outputs_of(prompt, asked);
  if (record.output_tokens != expected) {
    throw Error(ErrorKind::InvariantViolated, "row ", row, " emitted ", record.output_tokens, " of ", expected,
                " tokens");
  }
}

void Fleet::keep_events(std::size_t index, TimedEvents& room) {
  rank_of(index).take_events(room);
  workers_[index].events.append(room);
}

FleetResult Fleet::finish_columns() {
  std::sort(rejections_.begin(), rejections_.end());
  FleetResult& out = columns_.result();
  for (const auto& [row, why] : rejections_) {
    const auto at = static_cast<std::size_t>(row);
    out.fate[at] = static_cast<std::uint8_t>(RequestFate::Rejected);
    out.finish_ns[at] = arrival_ns_[at];
  }
  for (const Worker& worker : workers_) out.worker_pool.push_back(static_cast<std::int32_t>(worker.info.pool));
  if (lives_) {
    for (const LifeEvent& event : lives_->events) {
      out.life_ns.push_back(event.time_ns);
      out.life_worker.push_back(static_cast<std::int32_t>(event.worker));
      out.life_state.push_back(static_cast<std::uint8_t>(event.state));
    }
    for (const RequestLoss& loss : lives_->losses) {
      out.loss_ns.push_back(loss.time_ns);
      out.loss_request.push_back(static_cast<std::int64_t>(loss.row));
      out.loss_worker.push_back(static_cast<std::int32_t>(loss.worker));
      out.loss_outcome.push_back(static_cast<std::uint8_t>(loss.outcome));
      out.loss_fault.push_back(loss.fault);
      out.loss_tokens.push_back(static_cast<std::int32_t>(loss.tokens));
    }
    out.fault_began_ns = std::move(lives_->fault_began_ns);
    out.fault_ended_ns = std::move(lives_->fault_ended_ns);
  }
  out.play_begin_ns = play_clock_.begin_ns;
  out.idle_lanes = play_clock_.idle_lanes;
  out.arrival_ns = std::move(arrival_ns_);
  out.worker = std::move(worker_of_);
  out.rejections = std::move(rejections_);
  for (Pool& pool : pools_) {
    if (!pool.tiers) continue;
    if (config_.check) pool.tiers->check(true);
    columns_.add_shared(*pool.tiers, pool.first_worker, pool.shared_events);
  }
  columns_.add_links(hub_.links());
  return columns_.take();
}

}  // namespace understudy
