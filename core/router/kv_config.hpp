// What a KV-aware router weighs, and what it gets to know.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace understudy {

enum class RouterQueueOrder : std::uint8_t { Fcfs, Lcfs, Wspt };

// Names and defaults of Dynamo's KvRouterConfig where it has them.
struct KvRouterConfig {
  // The cost of a worker, in blocks.
  double overlap_score_credit = 1.0;
  double overlap_score_credit_decay = 0.0;
  double prefill_load_scale = 1.0;
  double decode_active_request_weight = 0.0;
  double host_cache_hit_weight = 0.75;
  double disk_cache_hit_weight = 0.25;
  double external_cache_hit_weight = 0.0;
  double temperature = 0.0;

  // What it knows of caches.
  bool use_events = true;            // false: only what it has sent where (approximate)
  std::int64_t event_delay_ns = 0;   // from where it happened to here
  std::int64_t event_period_ns = 0;  // above 0: they come in bundles, at multiples of this
  double event_loss = 0.0;           // of deliveries, a step's events each, that never arrive
  std::int64_t predict_ttl_ns = 0;   // above 0: what was sent counts as cached for so long, beside the events
  std::int64_t approximate_ttl_ns = 120'000'000'000;  // without events
  std::uint64_t approximate_blocks = 0;               // above 0: the newest so many of a worker, instead of a time

  // A request waits while every worker has more than this many of its steps' tokens of prompts before it.
  std::optional<double> queue_threshold;
  RouterQueueOrder queue_order = RouterQueueOrder::Fcfs;

  std::uint64_t seed = 0;
  bool keep_decisions = true;
  std::vector<std::int32_t> imposed;  // a worker for each row, or none: costs are computed all the same

  // Nothing delays or loses events.
  bool punctual() const noexcept { return event_delay_ns == 0 && event_period_ns == 0 && event_loss == 0; }
};

}  // namespace understudy
