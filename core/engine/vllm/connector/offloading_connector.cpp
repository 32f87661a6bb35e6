#include "engine/vllm/connector/offloading_connector.hpp"

#include <utility>

namespace understudy {

void OffloadingConnector::update_state_after_alloc(EngineRequest& request, std::uint32_t local, std::uint32_t external,
                                                   std::int64_t /*now_ns*/) {
  if (external > 0) {
    scheduler_->begin_load(request, local, external);
  } else if (notes_pulls_) {  // else the schedule reports the request with its blocks
    scheduler_->handed_out(request);
  }
}

std::unique_ptr<ConnectorMetadata> OffloadingConnector::build_connector_meta(std::int64_t /*now_ns*/) {
  OffloadOrders orders = scheduler_->close_schedule();
  return orders.empty() ? nullptr : std::make_unique<HostMetadata>(std::move(orders));
}

bool OffloadingConnector::request_finished(EngineRequest& request, bool aborted, std::int64_t now_ns) {
  scheduler_->ended(request, request.num_computed_tokens, aborted, now_ns);
  return false;  // its stores read the blocks where they are, and are flushed when these are handed out
}

bool OffloadingConnector::reset_cache() {
  if (grouped_) return false;
  scheduler_->reset();
  return true;
}

std::int64_t OffloadingConnector::start_step(std::unique_ptr<ConnectorMetadata> meta, ConnectorOutput& output,
                                             std::int64_t now_ns) {
  const auto* const given = static_cast<const HostMetadata*>(meta.get());
  const OffloadOrders none;
  const OffloadOrders& orders = given != nullptr ? given->orders : none;
  if (steps_) report(steps_->run(orders), output);
  return links_ ? links_->begin(orders, *scheduler_, now_ns) : now_ns;
}

void OffloadingConnector::report(std::vector<JobId> done, ConnectorOutput& output) const {
  for (const JobId id : done) {
    const OffloadJob& job = scheduler_->job(id);
    if (!job.store) output.received.push_back(job.request);
  }
  output.jobs.insert(output.jobs.end(), done.begin(), done.end());
}

}  // namespace understudy
