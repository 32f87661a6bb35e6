// Settings of the KV-aware router: cost weights, and how it learns about caches.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace understudy {

enum class RouterQueueOrder : std::uint8_t { Fcfs, Lcfs, Wspt };

// Names and defaults follow Dynamo's KvRouterConfig where it has them.
struct KvRouterConfig {
  // Cost of a worker, in blocks.
  double overlap_score_credit = 1.0;
  double overlap_score_credit_decay = 0.0;
  double prefill_load_scale = 1.0;
  double decode_active_request_weight = 0.0;
  double host_cache_hit_weight = 0.75;
  double disk_cache_hit_weight = 0.25;
  double external_cache_hit_weight = 0.0;
  double temperature = 0.0;

  // Knowledge about caches.
  bool use_events = true;            // false: only the prompts that it sent (approximate)
  std::int64_t event_delay_ns = 0;   // from the event to the router
  std::int64_t event_period_ns = 0;  // above 0: events are delivered in batches, at multiples of this
  bool index_all_groups = true;      // false: only the first cache group of each worker is indexed
  double event_loss = 0.0;           // fraction of deliveries (the events of one step each) that are lost
  std::int64_t predict_ttl_ns = 0;   // above 0: sent prompts also count as cached for this long
  std::int64_t approximate_ttl_ns = 120'000'000'000;  // lifetime of a sent prompt without events
  std::uint64_t approximate_blocks = 0;  // above 0: the newest so many blocks per worker, instead of a lifetime

  // A request waits while every worker has more than this many batches of prompt tokens to compute.
  std::optional<double> queue_threshold;
  RouterQueueOrder queue_order = RouterQueueOrder::Fcfs;

  std::uint64_t seed = 0;
  bool keep_decisions = true;
  bool keep_candidates = false;       // keep the terms of every worker's cost at each decision
  std::vector<std::int32_t> imposed;  // worker for each row, or empty; costs are still computed

  // True if events are neither delayed nor lost.
  bool punctual() const noexcept { return event_delay_ns == 0 && event_period_ns == 0 && event_loss == 0; }
};

}  // namespace understudy
