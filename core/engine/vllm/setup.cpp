// Validation of an engine's settings, and construction of its parts.
#include <algorithm>
#include <utility>

#include "engine/vllm/engine.hpp"
#include "engine/vllm/fast_forward.hpp"
#include "engine/vllm/groups/block_groups.hpp"
#include "engine/vllm/groups/run_groups.hpp"
#include "engine/vllm/kvbm_backend.hpp"
#include "engine/vllm/native_backend.hpp"
#include "engine/vllm/rank_group.hpp"
#include "engine/vllm/run_backend.hpp"

namespace understudy {

namespace {

// KV cache groups have a cache of their own, without what was not recorded with them.
void require_groups(const VllmConfig& c) {
  const auto refuse = [](bool given, const char* field) {
    if (given) throw Error(ErrorKind::ConfigError, "groups: several KV cache groups do not work with ", field, " yet");
  };
  refuse(c.kv_manager == KvManagerKind::Kvbm, "kv_manager kvbm");
  refuse(c.speculation.tokens > 0, "num_speculative_tokens");
  refuse(!c.mocker.accept_rates.empty(), "accept_rates");
  refuse(c.offload && !c.enable_prefix_caching, "vLLM's offload without prefix caching");
  refuse(static_cast<bool>(c.eviction), "eviction_policy");
  refuse(c.stay_sample > 0, "stay_sample");
  refuse(c.kv_trace, "kv_trace");
  refuse(c.published_blocks, "KV-aware routing");
}

// Hand-offs work with what was recorded together with them.
void require_transfer(const VllmConfig& c) {
  const auto refuse = [](bool given, const char* field) {
    if (given)
      throw Error(ErrorKind::ConfigError, "kv_role: a hand-off of KV blocks does not work with ", field, " yet");
  };
  refuse(!c.transfer->produces && !c.transfer->consumes, "neither producer nor consumer");
  refuse(c.kv_manager == KvManagerKind::Kvbm, "kv_manager kvbm");
  refuse(c.speculation.tokens > 0, "num_speculative_tokens");
  refuse(!c.mocker.accept_rates.empty(), "accept_rates");
  refuse(c.offload && !c.offload->offers_again, "vLLM's offload before 0.33");
  refuse(!c.groups.empty(), "several KV cache groups");
  refuse(c.max_loras != VllmConfig::kUnlimited, "max_loras");
  if (c.transfer->lease_s < 1 || c.transfer->lease_s > 1'000'000) {
    throw Error(ErrorKind::ConfigError, "kv_lease_duration must be 1 to 1000000 s, got ", c.transfer->lease_s);
  }
}

// A user-defined connector needs a place of its own.
void require_connector(const VllmConfig& c) {
  const auto refuse = [](bool given, const char* field) {
    if (given) throw Error(ErrorKind::ConfigError, "connector: a connector does not work with ", field, " yet");
  };
  refuse(c.transfer.has_value(), "kv_role");
  refuse(c.offload.has_value(), "vLLM's offload");
  refuse(c.kv_manager == KvManagerKind::Kvbm, "kv_manager kvbm");
  refuse(!c.groups.empty(), "several KV cache groups");
  refuse(c.speculation.tokens > 0, "num_speculative_tokens");
  refuse(!c.mocker.accept_rates.empty(), "accept_rates");
  refuse(c.max_loras != VllmConfig::kUnlimited, "max_loras");
}

// Batches in flight work with one KV cache group that stays on the device.
void require_pipeline(const VllmConfig& c) {
  const auto refuse = [](bool given, const char* field) {
    if (given) {
      throw Error(ErrorKind::ConfigError, "pipeline_parallel_size: stages of a pipeline do not work with ", field,
                  " yet");
    }
  };
  refuse(c.speculation.tokens > 0, "num_speculative_tokens");
  refuse(!c.mocker.accept_rates.empty(), "accept_rates");
  refuse(c.transfer.has_value(), "kv_role");
  refuse(c.offload.has_value(), "vLLM's offload");
  refuse(static_cast<bool>(c.connector), "connector");
  refuse(!c.groups.empty(), "several KV cache groups");
  refuse(c.lockstep_ns > 0, "a load in lockstep");
  refuse(c.prefill_schedule_interval > 1, "prefill_schedule_interval");
}

// No tiers, and no ranks that step together.
void require_alone(const VllmConfig& c, bool has_tiers, bool in_group) {
  if (c.pipeline_parallel_size == 1 || !(has_tiers || in_group)) return;
  throw Error(ErrorKind::ConfigError, "pipeline_parallel_size: stages of a pipeline do not work with ",
              has_tiers ? "tiers" : "data-parallel ranks that share experts", " yet");
}

const VllmConfig& checked(const VllmConfig& c) {
  const auto at_least_one = [](std::uint64_t value, const char* field) {
    if (value < 1) throw Error(ErrorKind::ConfigError, field, " must be at least 1, got ", value);
  };
  at_least_one(c.max_num_seqs, "max_num_seqs");
  at_least_one(c.max_num_batched_tokens, "max_num_batched_tokens");
  at_least_one(c.max_model_len, "max_model_len");
  at_least_one(c.max_num_active_seqs, "max_num_active_seqs");
  at_least_one(c.max_loras, "max_loras");
  at_least_one(c.pipeline_parallel_size, "pipeline_parallel_size");
  if (c.pipeline_parallel_size > 1) require_pipeline(c);
  if (c.max_num_active_seqs != VllmConfig::kUnlimited && c.max_num_active_seqs > c.max_num_seqs) {
    throw Error(ErrorKind::ConfigError, "max_num_active_seqs must not be above max_num_seqs=", c.max_num_seqs, ", got ",
                c.max_num_active_seqs);
  }
  if (!(c.watermark >= 0 && c.watermark <= 1)) {
    throw Error(ErrorKind::ConfigError, "watermark must be in [0, 1], got ", c.watermark);
  }
  if (!(c.stay_sample >= 0 && c.stay_sample <= 1)) {
    throw Error(ErrorKind::ConfigError, "stay_sample must be in [0, 1], got ", c.stay_sample);
  }
  if (c.stay_sample > 0 && c.kv_manager == KvManagerKind::Kvbm) {
    throw Error(ErrorKind::ConfigError, "stay_sample needs kv_manager native, whose blocks it follows");
  }
  if (c.policy == SchedulingPolicy::Priority && c.preemption_mode == PreemptionMode::Fifo) {
    throw Error(ErrorKind::ConfigError,
                "preemption_mode fifo needs the fcfs policy: under priority, priorities decide");
  }
  if (c.async_scheduling && !c.mocker.accept_rates.empty()) {
    throw Error(ErrorKind::ConfigError,
                "accept_rates contradict async_scheduling: the next step is scheduled before the burst is known");
  }
  if (c.speculation.tokens > 0 && !c.mocker.accept_rates.empty()) {
    throw Error(ErrorKind::ConfigError,
                "accept_rates contradict num_speculative_tokens: one is the mocker's way of "
                "speculation, the other vLLM's");
  }
  if (c.speculation.tokens > 0 && c.kv_manager == KvManagerKind::Kvbm) {
    throw Error(ErrorKind::ConfigError,
                "num_speculative_tokens needs kv_manager native: rejected drafts stay in their "
                "blocks");
  }
  if (c.speculation.reserved_slots >= c.max_num_batched_tokens ||
      c.speculation.draft_slots >= c.max_num_batched_tokens) {
    throw Error(ErrorKind::ConfigError, "max_num_batched_tokens=", c.max_num_batched_tokens,
                " leaves nothing beside the slots of the draft model");
  }
  if (c.connector) require_connector(c);
  if (c.multi && !(c.transfer && c.offload)) {
    throw Error(ErrorKind::ConfigError, "multi: several connectors are hand-offs and vLLM's offload; give both");
  }
  if (!c.groups.empty()) require_groups(c);
  if (c.transfer) require_transfer(c);
  if (!c.offload) return c;
  at_least_one(c.offload->host_chunks, "offload: chunks of the host");
  at_least_one(c.offload->blocks_per_chunk, "offload: blocks_per_chunk");
  if (std::uint64_t{c.offload->blocks_per_chunk} * c.block_size > (std::uint64_t{1} << 30)) {
    throw Error(ErrorKind::InvalidArgument, "offload: blocks_per_chunk of ", c.offload->blocks_per_chunk,
                " makes chunks of more than 2^30 tokens");
  }
  if (c.kv_manager == KvManagerKind::Kvbm || c.speculation.tokens > 0 || !c.mocker.accept_rates.empty() ||
      c.max_loras != VllmConfig::kUnlimited) {
    throw Error(ErrorKind::ConfigError,
                "vLLM's offload needs kv_manager native, no speculation, and no limit of adapters");
  }
  return c;
}

// The largest transfer over each link must end before the links refuse it: a slower one is a mistake.
void require_speed(const LinkPairConfig& way, const std::string& prefix, double down_bytes, double up_bytes) {
  const auto require = [&](const char* field, double gbps, double bytes) {
    if (!(gbps >= 1e-9)) return;  // refused where the link is made
    if (bytes / gbps <= static_cast<double>(Links::kMostNs)) return;
    throw Error(ErrorKind::ConfigError, prefix, field, " of ", gbps, " is too slow (10^9 bytes per second): a ",
                "transfer of ", static_cast<std::uint64_t>(bytes),
                " bytes, the largest there can be, would take more than nine years; give more, or inf for no limit");
  };
  require("down_gbps", way.down.bandwidth_gbps, down_bytes);
  require("up_gbps", way.up.bandwidth_gbps, up_bytes);
  require("duplex_gbps", way.duplex_gbps, std::max(down_bytes, up_bytes));
}

// Check sizes of transfers up front: the size of a load depends on hits, and would fail only later.
void require_sizes(const TierConfig& tiers, const VllmConfig& c) {
  if (tiers.bytes_per_block == 0 || tiers.bytes_per_block > LinkFlow::kMaxBytes) return;  // refused by itself
  const std::uint64_t most_blocks = LinkFlow::kMaxBytes / tiers.bytes_per_block;
  const auto require = [&](const char* field, std::uint64_t given, std::uint64_t blocks) {
    if (blocks <= most_blocks) return;
    throw Error(ErrorKind::ConfigError, field, " of ", given, " makes transfers of ", blocks, " blocks and ",
                blocks * tiers.bytes_per_block, " bytes, and one has at most 2^38: give at most ", most_blocks,
                ", or a smaller kv_bytes_per_token (bytes_per_block of ", tiers.bytes_per_block, ")");
  };
  if (c.offload) return require("offload: blocks_per_chunk", c.offload->blocks_per_chunk, c.offload->blocks_per_chunk);
  const std::uint64_t batch = tiers.offload_batch_size;
  require("offload_batch_size", batch, std::min({batch, tiers.g2_blocks, c.num_gpu_blocks}));
}

void require_speeds(const TierConfig& tiers, const VllmConfig& c) {
  // Loads need room on the host and on the device. vLLM stores all blocks that a step has completed at once.
  const auto at_most = [&](std::uint64_t blocks) { return std::min({blocks, tiers.g2_blocks, c.num_gpu_blocks}); };
  const std::uint64_t batch = c.offload ? kNoLimit : tiers.offload_batch_size;
  const auto check = [&](const LinkPairConfig& way, const std::string& prefix, std::uint64_t blocks) {
    const auto bytes = [&](std::uint64_t count) {
      return std::min(static_cast<double>(at_most(count)) * static_cast<double>(tiers.bytes_per_block),
                      static_cast<double>(LinkFlow::kMaxBytes));
    };
    require_speed(way, prefix, bytes(std::min(batch, blocks)), bytes(blocks));
  };
  check(tiers.host, "g2: ", tiers.g2_blocks);
  for (const auto& [tier, name] : {std::pair(&tiers.g3, "g3: "), std::pair(&tiers.g4, "g4: ")}) {
    if (!*tier) continue;
    check((*tier)->worker, name, (*tier)->num_blocks);
    check((*tier)->backend, name + std::string("backend_"), (*tier)->num_blocks);
  }
}

// Check an offload over the links of tiers: the offload fills the tiers' host.
const TierConfig* checked(const TierConfig* tiers, const VllmConfig& c) {
  if (tiers != nullptr) {
    require_sizes(*tiers, c);
    require_speeds(*tiers, c);
  }
  if (tiers == nullptr || !c.offload) return tiers;
  const VllmOffload& offload = *c.offload;
  if (tiers->g2_blocks / offload.blocks_per_chunk == offload.host_chunks &&
      tiers->g2_blocks % offload.blocks_per_chunk == 0) {
    return tiers;
  }
  throw Error(ErrorKind::ConfigError, "g2_blocks=", tiers->g2_blocks, " contradicts the offload, whose host has ",
              offload.host_chunks, " chunks of ", offload.blocks_per_chunk, " blocks; give ",
              "g2_blocks = host_chunks x blocks_per_chunk");
}

// Default eviction order of device blocks.
PolicyKind own_order(const VllmConfig& c) {
  if (c.kv_manager == KvManagerKind::Kvbm) return PolicyKind::Lineage;
  const bool append =
      c.free_order == FreeOrder::AllLast || (c.free_order == FreeOrder::UncachedLast && !c.enable_prefix_caching);
  return append ? PolicyKind::VllmAppend : PolicyKind::Vllm;
}

// Whether its blocks are in a pool of runs, and not in the store. Tiers of an offload are its host and links alone.
bool keeps_runs(const VllmConfig& c, const TierConfig* tiers) {
  return (tiers == nullptr || c.offload) && RunBackend::serves(c);
}

// `below`: tiers below the host need a block's full identity.
StoreConfig store_config(const VllmConfig& c, const TierConfig* tiers, bool below) {
  StoreConfig store;
  store.block_size = c.block_size;
  PoolConfig pool;
  // Groups and runs have a pool of their own.
  pool.num_blocks = c.groups.empty() && !keeps_runs(c, tiers) ? c.num_gpu_blocks : 1;
  pool.duplicates = c.kv_manager == KvManagerKind::Kvbm ? DuplicatePolicy::Reject : DuplicatePolicy::Keep;
  pool.policy.kind = own_order(c);
  if (c.eviction) pool.policy = c.eviction();
  // A hash is enough to copy evicted blocks to the host, but not to look them up there or below.
  const bool names_evicted = tiers != nullptr && tiers->mode == OffloadMode::OnEviction;
  const bool details = Announcer::wanted(c) && !Announcer::names_only(c);
  pool.keeps_details = details || (names_evicted && (below || tiers->filter));
  store.pools = {pool};
  if (c.offload) {
    PoolConfig host;
    host.tier = Tier::G2;
    host.num_blocks = c.offload->host_chunks;
    host.policy.kind = PolicyKind::Fifo;  // unused: the connector chooses victims
    host.duplicates = DuplicatePolicy::Reject;
    host.keeps_details = details;
    store.pools.push_back(host);
  } else if (tiers != nullptr) {
    if (!c.enable_prefix_caching) {
      throw Error(ErrorKind::ConfigError, "tiers need enable_prefix_caching: without it no block is found again");
    }
    PoolConfig host;
    host.tier = Tier::G2;
    host.policy.kind = PolicyKind::Lru;
    if (tiers->g2_policy) host.policy = tiers->g2_policy();
    host.num_blocks = tiers->slots_for(tiers->g2_blocks, host.policy);
    host.duplicates = DuplicatePolicy::Reject;
    host.keeps_details = details;
    store.pools.push_back(host);
  }
  // With runs or several cache groups only the host's blocks are in the store.
  const bool has_host = c.offload || tiers != nullptr;
  const bool host_alone = keeps_runs(c, tiers) || !c.groups.empty();
  store.events.enabled = Announcer::wanted(c) && (!host_alone || (has_host && !c.group_events));
  store.events.names_only = Announcer::names_only(c);
  store.thread_safe = false;  // an engine is one state machine, owned by the thread that steps it
  return store;
}

}  // namespace

namespace {

std::unique_ptr<VllmEngine> make_vllm(VllmConfig config, const EngineSite& site) {
  config.mocker.burst_seed += site.worker;
  config.speculation.seed += site.worker;
  return std::make_unique<VllmEngine>(config, site);
}

}  // namespace

std::unique_ptr<Engine> VllmConfig::make(const EngineSite& site) const { return make_vllm(*this, site); }

std::shared_ptr<const GroupLayout> VllmConfig::group_layout() const {
  return groups.empty() ? nullptr : std::make_shared<const GroupLayout>(layout_of(*this));
}

std::unique_ptr<Engine> VllmConfig::make_ranks(std::span<const EngineSite> sites) const {
  require_alone(*this, false, true);
  std::vector<std::unique_ptr<VllmEngine>> ranks;
  for (const EngineSite& site : sites) ranks.push_back(make_vllm(*this, site));
  return std::make_unique<RankGroup>(std::move(ranks));
}

VllmEngine::VllmEngine(const VllmConfig& config, const EngineSite& site)
    : config_(checked(config)),
      timing_(site.timing),
      store_(store_config(config, checked(site.tiers, config),
                          site.run != nullptr && site.run->emits() && !site.run->shared().empty())),
      announcer_(config_, store_),
      own_run_(site.tiers != nullptr && site.run == nullptr
                   ? std::make_unique<TierRun>(*site.tiers, config.block_size, config.events, config.check)
                   : nullptr),
      tiers_(site.tiers == nullptr ? nullptr
                                   : std::make_unique<WorkerTiers>(
                                         *site.tiers, store_, site.run != nullptr ? *site.run : *own_run_, site.name)),
      capacity_tokens_(config.num_gpu_blocks * config.block_size),
      fast_forwards_(site.fast_forward && !site.on_step),
      reports_batches_(site.reports_batches),
      observer_(site.on_step),
      on_checkpoint_(site.on_checkpoint) {
  require_alone(config_, site.tiers != nullptr, false);
  if (const std::size_t stages = config_.pipeline_parallel_size; stages > 1) {
    pipeline_ = std::make_unique<Pipeline>(stages, stages + (config_.spaces_decodes ? 1 : 0));
  }
  const std::size_t timed = timing_.model == nullptr ? 1 : timing_.model->num_stages();
  if (timed > 1 && timed != config_.pipeline_parallel_size) {
    throw Error(ErrorKind::ConfigError, "pipeline_parallel_size=", config_.pipeline_parallel_size,
                " contradicts the times, which are those of ", timed, " stages");
  }
  make_kv(site);
  onboarding_.emplace(config_, timing_, capacity_tokens_, tiers_.get(), grouped_);
  connector_ = make_connector(site);
  polls_ = connector_->polls();
  scheduler_ = std::make_unique<Scheduler>(SchedulerParts{config_, *kv_, grouped_, tiers_.get(), *connector_,
                                                          *onboarding_, planned_, token_log_, effects_, totals_});
  fast_forward_ = std::make_unique<FastForward>(decode_state(), static_cast<DecodeHost&>(*this));
  if (observer_) announcer_.keep_taken();
  if (site.keeps_times) keep_times();
  if (site.gaps != nullptr) token_log_.share_gaps(*site.gaps);
  if (tiers_) {
    tiers_->set_on_change([this](std::int64_t time_ns) {
      announcer_.show(time_ns);
      sample_blocks(time_ns);
    });
  }
}

// The cache of the device.
void VllmEngine::make_kv(const EngineSite& site) {
  if (!config_.groups.empty()) {
    std::unique_ptr<GroupedBackend> grouped;
    if (!tiers_ && RunGroups::serves(config_)) {
      grouped = std::make_unique<RunGroups>(config_);
    } else {
      grouped = std::make_unique<BlockGroups>(config_);
    }
    grouped_ = grouped.get();
    kv_ = std::move(grouped);
    const bool has_tiers = tiers_ && !config_.offload;
    if (has_tiers) grouped_->blocks()->use_tiers(*tiers_);
    if (!config_.group_events) {
      BlockStore* const host = config_.offload || tiers_ ? &store_ : nullptr;
      group_rows_ = std::make_unique<GroupRows>(*grouped_, config_.event_ranges, host, has_tiers);
      announcer_.read_from(*group_rows_);
    }
    const GroupLayout& layout = grouped_->layout();
    if (config_.block_size != layout.hash_block) {
      throw Error(ErrorKind::ConfigError, "block_size ", config_.block_size, " must be the groups' unit of hashing, ",
                  layout.hash_block);
    }
    capacity_tokens_ = layout.capacity_tokens(config_.num_gpu_blocks);
  } else if (keeps_runs(config_, site.tiers)) {
    auto runs = std::make_unique<RunBackend>(config_, own_order(config_) == PolicyKind::VllmAppend,
                                             config_.offload ? &store_ : nullptr);
    run_rows_ = &runs->rows();
    announcer_.read_from(runs->rows());
    kv_ = std::move(runs);
  } else if (config_.kv_manager == KvManagerKind::Kvbm) {
    kv_ = std::make_unique<KvbmBackend>(config_, store_, tiers_.get(), announcer_.log());
  } else {
    // Under vLLM's offload an evicted block was copied before, or is lost.
    kv_ = std::make_unique<NativeBackend>(config_, store_, config_.offload ? nullptr : tiers_.get());
  }
}

VllmEngine::~VllmEngine() = default;

}  // namespace understudy
