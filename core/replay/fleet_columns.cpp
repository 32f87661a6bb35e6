// What a run leaves: columns of its requests, gaps, samples, tiers and links.
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
  Worker& worker = workers_[index];
  Engine& engine = *worker.engine;
  if (config_.check) engine.check();
  if (keeps_events_) {
    keep_events(worker, gathered_);
    columns_.result().events.push_back(std::move(worker.events));
  }
  if (pools_[worker.pool].config.engine.kv_trace) columns_.result().kv_trace.push_back(engine.take_kv_trace());
  columns_.add_engine(index, engine);
  worker.engine.reset();
}

void Fleet::keep(const Worker& worker, const RequestRecord& record) {
  const std::uint64_t row = worker.rows[record.id];
  columns_.keep(row, record);
  if (!config_.check) return;
  const auto asked = std::min(static_cast<std::uint32_t>(workload_.output_tokens[row]), workload_.limit(row));
  const auto prompt = static_cast<std::uint32_t>(workload_.prompt_tokens[row]);
  const std::uint32_t expected = std::min(asked, pools_[worker.pool].config.engine.max_model_len - prompt);
  if (record.output_tokens != expected) {
    throw Error(ErrorKind::InvariantViolated, "row ", row, " emitted ", record.output_tokens, " of ", expected,
                " tokens");
  }
}

void Fleet::keep_events(Worker& worker, TimedEvents& room) {
  worker.engine->take_events(room);
  worker.events.append(room);
}

FleetResult Fleet::finish_columns() {
  std::sort(rejections_.begin(), rejections_.end());
  FleetResult& out = columns_.result();
  for (const auto& [row, why] : rejections_) {
    const auto at = static_cast<std::size_t>(row);
    out.fate[at] = static_cast<std::uint8_t>(RequestFate::Rejected);
    out.finish_ns[at] = arrival_ns_[at];
  }
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
