// Delivery of KV events to the router, or of the blocks themselves where it can read them.
#include <algorithm>

#include "replay/fleet.hpp"

namespace understudy {

// Advance workers to now before calling the router. Returns whether events must be delivered to it first.
bool Fleet::bring_router_up_to_date() {
  if (!shows_blocks_ && !observes_ && !tracks_) return false;
  if (up_to_date_ns_ == now_ns_ && up_to_date_round_ == round_) return false;
  up_to_date_ns_ = now_ns_;
  up_to_date_round_ = round_;
  for (std::size_t index = 0; !stepwise() && index < workers_.size(); ++index) {
    if (is_present(index)) advance_to_now(index);
  }
  return observes_ && gather_events();
}

bool Fleet::held(std::span<const BlockIdentity> prompt, std::vector<std::uint32_t>& out) {
  if (!shows_blocks_) return false;
  constexpr std::size_t kTiers = 4;
  if (shown_.time_ns != now_ns_ || shown_.round != round_) {
    shown_.time_ns = now_ns_;
    shown_.round = round_;
    shown_.prompt.clear();
    shown_.blocks.assign(workers_.size(), 0);
  }
  const auto [end, _] = std::ranges::mismatch(prompt, shown_.prompt, {}, &BlockIdentity::lineage);
  const auto alike = static_cast<std::uint32_t>(end - prompt.begin());
  out.assign(workers_.size() * kTiers, 0);
  for (std::size_t index = 0; index < workers_.size(); ++index) {
    if (!is_present(index)) continue;
    std::uint32_t& blocks = shown_.blocks[index];
    if (blocks >= alike) {
      blocks = static_cast<std::uint32_t>(rank_of(index).published_prefix(prompt, alike));
    }
    out[index * kTiers] = blocks;
  }
  shown_.prompt.resize(prompt.size());
  std::ranges::transform(prompt, shown_.prompt.begin(), &BlockIdentity::lineage);
  return true;
}

// Send published events to the router. Returns whether any must reach it before its next call.
bool Fleet::gather_events() {
  bool due = false;
  for (std::size_t index = 0; index < workers_.size(); ++index) {
    Worker& worker = workers_[index];
    if (!is_present(index)) continue;
    if (!stepwise()) absorb(index, worker.engine->transfers_landed(now_ns_));
    rank_of(index).take_events(gathered_);
    due = publish(index, worker.info.pool, order_of(index), worker.events) || due;
  }
  for (std::uint32_t number = 0; number < pools_.size(); ++number) {
    Pool& pool = pools_[number];
    for (std::size_t tier = 0; pool.tiers && tier < pool.tiers->shared().size(); ++tier) {
      pool.tiers->shared()[tier]->take_events(gathered_);
      const std::uint64_t owner = workload_.size() + workers_.size() + tier;
      due = publish(KvDelivery::kShared, number, owner, pool.shared_events[tier]) || due;
    }
  }
  return due;
}

// Publish the events of a step that has ended.
void Fleet::publish_step(std::size_t index) {
  for (std::size_t rank = index; rank < index + config_.ranks; ++rank) {
    rank_of(rank).take_events(gathered_);
    (void)publish(rank, workers_[rank].info.pool, order_of(rank), workers_[rank].events);
  }
}

// With `check`, compare the router's index with a worker's blocks, between two steps. Only for a router that gathers
// events itself: when it gets them does not change what it knows at its next choice.
void Fleet::check_index(std::size_t index) {
  if (!config_.check || !observes_ || !config_.router->has_index() || !is_present(index)) return;
  publish_step(index);
  if (lives_ && lives_->disturber && !lives_->disturber->is_complete(index)) return;
  for (std::size_t rank = index; rank < index + config_.ranks; ++rank) {
    // Without prefix caching an engine may name blocks for itself, and publishes nothing.
    if (config_of(rank).enable_prefix_caching) config_.router->check(rank, rank_of(rank).residency());
  }
}

// Publishes the gathered events of one publisher, those that faults do not hold back.
bool Fleet::publish(std::size_t publisher, std::uint32_t pool, std::uint64_t owner, EventTable& kept) {
  if (keeps_events_ && !gathered_.batch.records.empty()) kept.append(gathered_);
  const bool disturbed = lives_ && lives_->disturber && publisher != KvDelivery::kShared;
  if (disturbed) lives_->disturber->pass(publisher, now_ns_, gathered_);
  return send(publisher, pool, owner);
}

// Sends the gathered events of one publisher. Returns whether any must reach the router before its next call.
bool Fleet::send(std::size_t publisher, std::uint32_t pool, std::uint64_t owner) {
  const TimedEvents& events = gathered_;
  const EventRecords& records = events.batch.records;
  if (records.empty()) return false;
  bool due = false;
  Router& router = *config_.router;
  if (publisher == KvDelivery::kShared ? router.gather_shared(pool, events) : router.gather(publisher, events)) {
    return false;
  }
  for (std::size_t first = 0; first < records.size();) {
    const std::int64_t time_ns = events.time_ns[first];
    std::size_t last = first;
    while (last < records.size() && events.time_ns[last] == time_ns) ++last;
    if (free_deliveries_.empty()) {
      free_deliveries_.push_back(deliveries_.size());
      deliveries_.emplace_back();
    }
    KvDelivery& delivery = deliveries_[free_deliveries_.back()];
    delivery.worker = publisher;
    delivery.pool = pool;
    delivery.time_ns = time_ns;
    delivery.events.records.assign(records.begin() + static_cast<std::ptrdiff_t>(first),
                                   records.begin() + static_cast<std::ptrdiff_t>(last));
    const std::int64_t at_ns = time_ns + config_.router->event_delay_ns();
    queue_.push(at_ns, EventClass::Delivery, owner, free_deliveries_.back());
    free_deliveries_.pop_back();
    due = due || at_ns <= now_ns_;
    first = last;
  }
  return due;
}

void Fleet::deliver_events(std::size_t index) {
  free_deliveries_.push_back(index);
  config_.router->observe(deliveries_[index]);
}

}  // namespace understudy
