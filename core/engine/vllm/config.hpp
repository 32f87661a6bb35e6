// Settings of a simulated vLLM engine, and what differs between vLLM versions.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "engine/config.hpp"
#include "engine/kvbm/kv_manager_kind.hpp"
#include "engine/vllm/connector/multi_settings.hpp"
#include "engine/vllm/groups/kv_group.hpp"
#include "engine/vllm/handoff/settings.hpp"
#include "engine/vllm/offload_config.hpp"
#include "eviction/policy.hpp"

namespace understudy {

class Connector;

enum class SchedulingPolicy : std::uint8_t { Fcfs, Priority };
enum class PreemptionMode : std::uint8_t { Lifo, Fifo };  // under Fcfs: the newest or the oldest running request goes

// Where a freed block without a key enters the free list.
enum class FreeOrder : std::uint8_t {
  UnkeyedFirst,  // in front
  AllLast,       // at the end, like every other
  UncachedLast,  // at the end if prefix caching is off, else in front
};

// vLLM's speculative decoding: a method's demands on the scheduler, and the acceptance rates of its drafts.
struct Speculation {
  std::uint32_t tokens = 0;          // drafts that follow a sampled token; 0: off
  std::uint32_t lookahead = 0;       // positions behind those scheduled that the drafter writes
  std::uint32_t draft_slots = 0;     // extra budget that every request takes
  std::uint32_t reserved_slots = 0;  // budget that is always taken
  bool drops_last_hit = false;       // the drafter needs hidden states, which the cache does not hold
  std::uint32_t hashed_ahead = 0;    // tokens behind a block that are part of its key
  bool keys_in_update = false;       // synchronously too, blocks of accepted drafts get their keys with the tokens
  bool pads_admissions = true;       // a request that joins decodes with one token to compute gets blank drafts
  bool pads_hits = true;             // also when all its other tokens are cached and no other request decodes
  bool pads_within_context = true;   // without room in the context it gets none; else it waits
  bool admission_lookahead = true;   // an admission takes the lookahead too
  std::vector<double> accept_rates;  // rate of draft i, if all before it were accepted
  std::uint64_t seed = 42;
};

struct VllmConfig final : EngineConfig {
  std::uint32_t max_num_seqs = 256;
  std::uint32_t max_num_active_seqs = kUnlimited;      // no admission while this many run
  std::uint32_t long_prefill_token_threshold = 0;      // 0: off
  bool long_prefill_token_threshold_adaptive = false;  // at least the fair share of the budget per request
  bool enable_chunked_prefill = true;
  SchedulingPolicy policy = SchedulingPolicy::Fcfs;
  PreemptionMode preemption_mode = PreemptionMode::Lifo;
  bool scheduler_reserve_full_isl = true;
  double watermark = 0.0;
  std::uint32_t max_loras = kUnlimited;         // adapters in one batch
  std::uint32_t prefill_schedule_interval = 1;  // steps from one with a prompt to the next, while others decode
  bool async_scheduling = false;
  std::uint32_t pipeline_parallel_size = 1;  // stages, each with a part of the layers
  bool spaces_decodes = false;  // asynchronously a request decodes once in as many schedules as there are stages
  KvManagerKind kv_manager = KvManagerKind::Native;
  // Makes the eviction policy of the device, for each worker; none: the manager's own (vLLM's free list, or lineage).
  std::function<PolicyConfig()> eviction;
  bool eviction_is_users = false;  // the config makes user-defined policies, or one policy for all workers
  Speculation speculation;
  // KV cache groups; empty: one group of full attention. Then block_size is the unit of hashing of the groups.
  std::vector<KvGroup> groups;
  std::uint32_t prefix_match_unit = 0;                               // tokens; 0: follows from the groups
  std::optional<std::uint32_t> prefix_cache_retention_interval = 0;  // tokens; none: keep every block
  bool group_events = false;             // keep events of groups for take_group_events, instead of rows
  bool event_ranges = false;             // rows of groups have Skipped ones
  std::optional<VllmTransfer> transfer;  // hand-offs between prefill and decode instances; none: it computes all itself
  std::optional<VllmOffload> offload;    // vLLM's own offload; without links, or over the links of the tiers
  std::optional<VllmMulti> multi;        // settings of the connector that has both of these
  std::function<std::unique_ptr<Connector>(const VllmConfig&)> connector;  // makes one of the user's; none: of these

  // Version profile.
  FreeOrder free_order = FreeOrder::UnkeyedFirst;
  bool caps_lone_prefill = true;      // the long-prefill threshold applies to a lone request too
  bool preempted_first = true;        // queued before requests that were passed over because of their adapter
  bool phantom_hits = true;           // a victim already scheduled keeps keys of blocks that are never computed
  bool self_preemption_ends = true;   // a request that preempts itself is the last of the running list to be scheduled
  bool counts_running_loras = false;  // max_loras counts all running requests; else those scheduled before admissions

  double stay_sample = 0.0;  // share of blocks whose time in the cache is measured, step by step only

  std::unique_ptr<Engine> make(const EngineSite& site) const override;
  std::unique_ptr<Engine> make_ranks(std::span<const EngineSite> sites) const override;
  std::shared_ptr<EngineConfig> clone() const override { return std::make_shared<VllmConfig>(*this); }
  bool reads_identities() const noexcept override { return enable_prefix_caching || offload.has_value(); }
  bool orders_by_name() const noexcept override { return policy == SchedulingPolicy::Priority; }
  std::uint32_t hashed_ahead() const noexcept override { return speculation.hashed_ahead; }
  bool has_user_policy() const noexcept override { return eviction_is_users; }
  bool publishes_below_device() const noexcept override { return offload.has_value(); }
  std::shared_ptr<const GroupLayout> group_layout() const override;
};

}  // namespace understudy
