// The result of a run. Each column has its field and its line in a table here; the table fills it and passes it to
// Python.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/engine.hpp"
#include "engine/prefix_keeper.hpp"
#include "events/event_table.hpp"
#include "links/link.hpp"
#include "replay/handoff_columns.hpp"
#include "tiers/shared_tier.hpp"

namespace understudy {

enum class RequestFate : std::uint8_t { Completed = 0, Rejected = 1, Cancelled = 2, Unfinished = 3, Failed = 4 };

// One tier of a pool at the end of a run; those of its workers together.
struct TierSummary {
  Tier tier = Tier::G1;
  std::string pool;  // pool name; empty in a run of one pool
  std::uint64_t first_worker = 0;
  std::uint64_t capacity_blocks = 0;
  std::uint64_t resident_blocks = 0;
  std::uint64_t stored_blocks = 0;
  std::uint64_t evicted_blocks = 0;
  // A tier that workers share: blocks over time, and its events if kept.
  std::vector<SharedTier::Residency> residency;
  EventTable events;
};

struct FleetResult {
  std::vector<std::int64_t> arrival_ns;
  std::vector<std::int64_t> queued_ns;
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
  std::vector<std::uint8_t> finish_reason;  // completed requests: 1 length limit (or the model's), 2 EOS; else 0
  std::vector<std::pair<std::int64_t, std::string>> rejections;

  // With tiers; else empty.
  std::array<std::vector<std::int64_t>, 3> below_tokens_first;  // part of cached_tokens_first from G2, G3, G4
  std::array<std::vector<std::int64_t>, 3> below_tokens_total;
  std::vector<std::int64_t> parked_ns;     // while its blocks were loaded
  std::vector<std::int64_t> room_wait_ns;  // while copies left the device
  std::vector<std::int64_t> onboard_ns;    // duration of every load
  std::vector<TierSummary> tiers;
  TierTotals tier_totals;
  std::vector<LinkUsage> links;
  HandOffColumns handoff;
  std::vector<GroupReport> groups;  // by worker; empty: all have one cache group

  GapColumn gap_ns;  // ascending, with how often each occurred
  GapColumn gap_count;
  std::vector<EngineSample> samples;
  std::vector<std::int32_t> sample_worker;
  std::vector<std::int32_t> worker_pool;  // by worker, those that joined during the run included
  // States that workers entered, in order of time; empty where the workers stay the same.
  std::vector<std::int64_t> life_ns;
  std::vector<std::int32_t> life_worker;
  std::vector<std::uint8_t> life_state;
  // Requests that lost their worker, in order of time; and when each fault of the plan began and ended, -1: never.
  std::vector<std::int64_t> loss_ns;
  std::vector<std::int64_t> loss_request;
  std::vector<std::int32_t> loss_worker;
  std::vector<std::uint8_t> loss_outcome;
  std::vector<std::int32_t> loss_fault;
  std::vector<std::int32_t> loss_tokens;
  std::vector<std::int64_t> fault_began_ns;
  std::vector<std::int64_t> fault_ended_ns;

  std::vector<EventTable> events;  // by worker; empty unless the engines keep them, and so is the trace
  std::vector<std::vector<TimedKvTrace>> kv_trace;

  EngineTotals totals;              // sum over all workers
  PrefixTotals prefixes;            // the same; zero without a policy for sessions
  std::int64_t play_begin_ns = -1;  // when the first lanes began, after the preparation; -1: no lanes
  std::uint64_t idle_lanes = 0;     // lanes for which no play was left before the duration's end
  std::uint64_t evictions = 0;
  std::uint64_t stored_blocks = 0;
};

// A column filled from request records: its name, its field, the value taken from a record, and the value for a request
// without one.
template <typename Kept, typename Of>
struct RecordColumn {
  constexpr RecordColumn(const char* its_name, Kept FleetResult::* where, Of what, int for_none)
      : name(its_name), kept(where), of(what), none(for_none) {}

  const char* name;
  Kept FleetResult::* kept;
  Of of;  // a member of RequestRecord, or a function of one
  int none;
};

inline constexpr int kNeverHappened = -1;

inline constexpr std::tuple kRecordColumns{
    RecordColumn{"queued_ns", &FleetResult::queued_ns, &RequestRecord::queued_ns, kNeverHappened},
    RecordColumn{"first_admit_ns", &FleetResult::first_admit_ns, &RequestRecord::first_admit_ns, kNeverHappened},
    RecordColumn{"first_token_ns", &FleetResult::first_token_ns, &RequestRecord::first_token_ns, kNeverHappened},
    RecordColumn{"second_token_ns", &FleetResult::second_token_ns, &RequestRecord::second_token_ns, kNeverHappened},
    RecordColumn{"last_token_ns", &FleetResult::last_token_ns, &RequestRecord::last_token_ns, kNeverHappened},
    RecordColumn{"finish_ns", &FleetResult::finish_ns, &RequestRecord::finish_ns, kNeverHappened},
    RecordColumn{"output_tokens", &FleetResult::output_tokens, &RequestRecord::output_tokens, 0},
    RecordColumn{"cached_tokens_first", &FleetResult::cached_tokens_first, &RequestRecord::cached_first, 0},
    RecordColumn{"cached_tokens_total", &FleetResult::cached_tokens_total, &RequestRecord::cached_total, 0},
    RecordColumn{"looked_up_tokens", &FleetResult::looked_up_tokens, &RequestRecord::looked_up, 0},
    RecordColumn{"preemptions", &FleetResult::preemptions, &RequestRecord::preemptions, 0},
    RecordColumn{"status", &FleetResult::fate,
                 [](const RequestRecord& record) {
                   return record.reason == FinishReason::Cancelled ? RequestFate::Cancelled
                          : record.reason == FinishReason::Failed  ? RequestFate::Failed
                                                                   : RequestFate::Completed;
                 },
                 static_cast<int>(RequestFate::Unfinished)},
    RecordColumn{"finish_reason", &FleetResult::finish_reason,
                 [](const RequestRecord& record) {
                   return record.reason == FinishReason::Length ? 1 : record.reason == FinishReason::Stop ? 2 : 0;
                 },
                 0},
};
// The same of runs with tiers.
inline constexpr std::tuple kTierRecordColumns{
    RecordColumn{"below_tokens_first", &FleetResult::below_tokens_first, &RequestRecord::below_first, 0},
    RecordColumn{"below_tokens_total", &FleetResult::below_tokens_total, &RequestRecord::below_total, 0},
    RecordColumn{"parked_ns", &FleetResult::parked_ns, &RequestRecord::parked_ns, 0},
    RecordColumn{"room_wait_ns", &FleetResult::room_wait_ns, &RequestRecord::room_wait_ns, 0},
};

// A named member that is filled where its value arises.
template <typename Member>
struct Named {
  constexpr Named(const char* its_name, Member where) : name(its_name), member(where) {}

  const char* name;
  Member member;
};

inline constexpr std::tuple kOtherColumns{
    Named{"arrival_ns", &FleetResult::arrival_ns},
    Named{"worker", &FleetResult::worker},
    Named{"onboard_ns", &FleetResult::onboard_ns},
    Named{"itl_ns", &FleetResult::gap_ns},
    Named{"itl_count", &FleetResult::gap_count},
    Named{"sample_worker", &FleetResult::sample_worker},
    Named{"worker_pool", &FleetResult::worker_pool},
    Named{"life_ns", &FleetResult::life_ns},
    Named{"life_worker", &FleetResult::life_worker},
    Named{"life_state", &FleetResult::life_state},
    Named{"loss_ns", &FleetResult::loss_ns},
    Named{"loss_request", &FleetResult::loss_request},
    Named{"loss_worker", &FleetResult::loss_worker},
    Named{"loss_outcome", &FleetResult::loss_outcome},
    Named{"loss_fault", &FleetResult::loss_fault},
    Named{"loss_tokens", &FleetResult::loss_tokens},
    Named{"fault_began_ns", &FleetResult::fault_began_ns},
    Named{"fault_ended_ns", &FleetResult::fault_ended_ns},
};
inline constexpr std::tuple kSampleColumns{
    Named{"sample_time_ns", &EngineSample::time_ns},
    Named{"sample_running", &EngineSample::running},
    Named{"sample_waiting", &EngineSample::waiting},
    Named{"sample_used_blocks", &EngineSample::active_blocks},
    Named{"sample_cached_blocks", &EngineSample::cached_blocks},
    Named{"sample_held_blocks", &EngineSample::held_blocks},
    Named{"sample_host_blocks", &EngineSample::host_blocks},
    Named{"sample_kept_blocks", &EngineSample::kept_blocks},
};
// Summed over workers.
inline constexpr std::tuple kTotals{
    Named{"steps", &EngineTotals::steps},
    Named{"step_ns", &EngineTotals::step_ns},
    Named{"uncovered_ns", &EngineTotals::uncovered_ns},
    Named{"phantom_hit_blocks", &EngineTotals::phantom_hit_blocks},
    Named{"expired_leases", &EngineTotals::expired_leases},
    Named{"burst_steps", &EngineTotals::burst_steps},
    Named{"burst_tokens", &EngineTotals::burst_tokens},
    Named{"draft_rounds", &EngineTotals::draft_rounds},
    Named{"drafted_tokens", &EngineTotals::drafted_tokens},
    Named{"accepted_tokens", &EngineTotals::accepted_tokens},
};

// Calls `visit` with every line of a table.
template <typename Table, typename Visit>
void for_each_line(const Table& table, Visit visit) {
  std::apply([&](const auto&... line) { (visit(line), ...); }, table);
}

}  // namespace understudy
