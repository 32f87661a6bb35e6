// Prefixes of sessions between their requests: held, dropped, copied to the host, loaded back.
#include "base/assert.hpp"
#include "engine/vllm/engine.hpp"

namespace understudy {

std::optional<std::string> VllmEngine::why_no_prefixes() const {
  if (!config_.enable_prefix_caching) return "without prefix caching nothing is left of a request";
  if (config_.kv_manager != KvManagerKind::Native) return "KVBM decides itself which blocks stay";
  if (grouped_ != nullptr) return "several KV cache groups are not supported yet";
  if (connector_->loads() || connector_->produces() || polls_)
    return "a connector (offload mode vllm, hand-offs) decides itself which blocks stay";
  return std::nullopt;
}

// The cached part of a prefix, referenced; it has no blocks if nothing is cached.
KvRequest VllmEngine::reference_prefix(const PrefixCall& call, std::int64_t now_ns) {
  KvRequest prefix;
  prefix.spec.identities = call.identities;
  prefix.spec.prompt_tokens = prefix.known = call.tokens;
  prefix.slot = WorkerTiers::kNoRequest;
  const KvHit hit = kv_->find(prefix, call.tokens - call.tokens % config_.block_size);
  if (hit.tokens == 0) return prefix;
  const Room room = kv_->place(prefix, hit, hit.tokens, hit.tokens, now_ns);
  UNDERSTUDY_ASSERT(room == Room::Taken, "a hit alone needs no room");
  (void)room;
  return prefix;
}

const Effects& VllmEngine::keep_prefix(const PrefixCall& call, std::int64_t now_ns) {
  require_time(now_ns);
  clear_returned_effects();
  if (tiers_) tiers_->hub().run_until(now_ns);
  if (!clock_.in_step) skip_to(now_ns);
  PrefixTotals& totals = scheduler_->held().totals;
  if (call.action == PrefixAction::Hold || call.action == PrefixAction::Unhold || call.action == PrefixAction::Drop) {
    if (std::optional<KvRequest> held = scheduler_->held().take(call.session, now_ns)) kv_->release(*held);
  }
  if (call.action == PrefixAction::Hold) {
    KvRequest prefix = reference_prefix(call, now_ns);
    if (const std::size_t blocks = kv_->num_blocks(prefix); blocks > 0) {
      scheduler_->held().add(call.session, std::move(prefix), blocks, now_ns);
    }
  } else if (call.action == PrefixAction::Drop) {
    KvRequest prefix = reference_prefix(call, now_ns);
    if (kv_->holds(prefix)) {
      const std::uint32_t named = prefix.keyed;
      prefix.keyed_before = std::min(named, (call.kept_tokens + config_.block_size - 1) / config_.block_size);
      kv_->withdraw(prefix, false);
      ++totals.drops;
      totals.dropped_blocks += named - prefix.keyed;
      kv_->release(prefix);
    }
  } else if (call.action == PrefixAction::Offload && tiers_) {
    offload_prefix(call, now_ns);
  } else if (call.action == PrefixAction::Prefetch && tiers_) {
    const std::uint64_t before = tiers_->totals().onboarded_blocks;
    std::vector<BlockIdentity> blocks;
    call.identities->extend(blocks, call.tokens / config_.block_size);
    if (tiers_->prefetch(now_ns, blocks)) ++totals.prefetches;
    totals.prefetched_blocks += tiers_->totals().onboarded_blocks - before;
  }
  on_requests_changed();
  announcer_.show(now_ns);
  sample(scheduler_->running().size(), now_ns);
  return return_effects();
}

// The copies have references of their own, under the slot of a request that is not there.
void VllmEngine::offload_prefix(const PrefixCall& call, std::int64_t now_ns) {
  KvRequest prefix = reference_prefix(call, now_ns);
  if (!kv_->holds(prefix)) return;
  const RequestSlot slot = scheduler_->spare_slot();
  const std::uint64_t before = tiers_->totals().offloaded_blocks;
  tiers_->copy_down(slot, now_ns, prefix.table,
                    std::span<const BlockIdentity>(prefix.blocks).first(prefix.table.size()));
  tiers_->hold_copied(slot);
  kv_->release(prefix);
  const std::uint64_t copied = tiers_->totals().offloaded_blocks - before;
  if (copied > 0) ++scheduler_->held().totals.offloads;
  scheduler_->held().totals.offloaded_blocks += copied;
  tiers_->hub().run_until(now_ns);
}

}  // namespace understudy
