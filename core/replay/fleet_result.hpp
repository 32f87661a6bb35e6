// What a run leaves.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/vllm/engine.hpp"

namespace understudy {

enum class RequestFate : std::uint8_t { Completed = 0, Rejected = 1, Cancelled = 2, Unfinished = 3 };

// One tier at the end of a run; those of the workers together.
struct TierSummary {
  Tier tier = Tier::G1;
  std::uint64_t capacity_blocks = 0;
  std::uint64_t resident_blocks = 0;
  std::uint64_t stored_blocks = 0;
  std::uint64_t evicted_blocks = 0;
  // Of a tier that the run shares: blocks over time, and its events if they were kept.
  std::vector<SharedTier::Residency> residency;
  TimedEvents events;
};

struct FleetResult {
  std::vector<std::int64_t> arrival_ns;
  std::vector<std::int64_t> first_admit_ns;
  std::vector<std::int64_t> first_token_ns;
  std::vector<std::int64_t> second_token_ns;
  std::vector<std::int64_t> last_token_ns;
  std::vector<std::int64_t> finish_ns;
  std::vector<std::int32_t> output_tokens;
  std::vector<std::int64_t> cached_tokens_first;
  std::vector<std::int64_t> cached_tokens_total;
  std::vector<std::int64_t> looked_up_tokens;
  std::vector<std::int32_t> preemptions;
  std::vector<std::int32_t> worker;
  std::vector<std::uint8_t> fate;
  std::vector<std::uint8_t> finish_reason;  // of what completed: 1 its limit (or the model's), 2 EOS; else 0
  std::vector<std::pair<std::int64_t, std::string>> rejections;

  // With tiers; else empty.
  std::array<std::vector<std::int64_t>, 3> below_tokens_first;  // of cached_tokens_first, from G2, G3, G4
  std::array<std::vector<std::int64_t>, 3> below_tokens_total;
  std::vector<std::int64_t> parked_ns;     // while its blocks were loaded
  std::vector<std::int64_t> room_wait_ns;  // while copies left the device
  std::vector<std::int64_t> onboard_ns;    // of every load
  std::vector<TierSummary> tiers;
  TierTotals tier_totals;
  std::vector<LinkUsage> links;

  std::vector<std::int64_t> gap_ns;  // ascending, with how often each occurred
  std::vector<std::int64_t> gap_count;
  std::vector<EngineSample> samples;
  std::vector<std::int32_t> sample_worker;

  std::vector<TimedEvents> events;  // by worker; empty unless the engines keep them, and so is the trace
  std::vector<std::vector<TimedKvTrace>> kv_trace;

  std::uint64_t steps = 0;
  std::int64_t step_ns = 0;       // that the steps of all workers took
  std::int64_t uncovered_ns = 0;  // of that, outside of what their timing models were made from
  std::uint64_t preempted = 0;
  std::uint64_t evictions = 0;
  std::uint64_t stored_blocks = 0;
  std::uint64_t phantom_hit_blocks = 0;
  std::uint64_t burst_steps = 0;
  std::uint64_t burst_tokens = 0;
  std::uint64_t draft_rounds = 0;
  std::uint64_t drafted_tokens = 0;
  std::uint64_t accepted_tokens = 0;
};

}  // namespace understudy
