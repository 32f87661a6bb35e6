// The engine's side of its tiers: loads before an admission, copies after a step.
#include <algorithm>
#include <limits>

#include "base/assert.hpp"
#include "engine/vllm/engine.hpp"
#include "engine/vllm/groups/block_groups.hpp"
#include "engine/vllm/run_rows.hpp"

namespace understudy {

namespace {

// Leading blocks on the device and on the host of vLLM's offload. `runs`: the device's, if they are not in the store.
std::vector<TierAnswer> look_up_host(const RunRows* runs, const BlockStore& host,
                                     std::span<const BlockIdentity> blocks) {
  std::vector<bool> above(blocks.size());
  if (runs != nullptr) {
    above = runs->on_device(blocks);
  } else {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      bool has = false;
      host.has_blocks(0, blocks.subspan(i, 1), &has);
      above[i] = has;
    }
  }
  std::vector<TierAnswer> answers;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    TierAnswer answer{TierAnswer::Kind::Hit, Tier::G1, 0};
    if (!above[i]) {
      SlotId here = kNoSlot;
      SlotId coming = kNoSlot;
      (void)host.locate_run(1, blocks.subspan(i, 1), &here, &coming);
      if (here == kNoSlot) answer.kind = coming == kNoSlot ? TierAnswer::Kind::Miss : TierAnswer::Kind::Retry;
      if (answer.kind != TierAnswer::Kind::Miss) answer.tier = Tier::G2;
    }
    answers.push_back(answer);
    if (answer.kind == TierAnswer::Kind::Miss) break;
  }
  return answers;
}

}  // namespace

void VllmEngine::require_tiers() const {
  if (!tiers_) throw Error(ErrorKind::WrongState, "this engine has no tiers");
}

std::size_t VllmEngine::cached_prefix(std::span<const BlockIdentity> blocks) const {
  if (grouped_ != nullptr && tiers_ && !offload_) {
    const auto limit = static_cast<std::uint32_t>(blocks.size() * config_.block_size);
    return grouped_->blocks()->tiers().find(blocks, 0, limit, tiers_->lowest()) / config_.block_size;
  }
  if (grouped_ != nullptr || !tiers_) return kv_->cached(blocks) / config_.block_size;
  const std::vector<TierAnswer> answers = offload_ ? look_up_host(run_rows_, store_, blocks) : tiers_->lookup(blocks);
  return static_cast<std::size_t>(
      std::ranges::count_if(answers, [](const TierAnswer& answer) { return answer.kind != TierAnswer::Kind::Miss; }));
}

std::vector<TierAnswer> VllmEngine::tier_lookup(std::span<const BlockIdentity> blocks) {
  require_tiers();
  if (grouped_ == nullptr) return offload_ ? look_up_host(run_rows_, store_, blocks) : tiers_->lookup(blocks);
  require_group_tiers("tier_lookup");
  const GroupTiers& below = grouped_->blocks()->tiers();
  const auto limit = static_cast<std::uint32_t>(blocks.size() * config_.block_size);
  const std::uint32_t tokens = below.find(blocks, 0, limit, tiers_->lowest());
  const GroupTiers::Needed needed = below.needed(blocks, tokens, limit, tiers_->lowest());
  const std::vector<TierAnswer> found = tiers_->lookup(needed.blocks);
  UNDERSTUDY_ASSERT(found.size() == needed.blocks.size(), "a hit has blocks on no tier");
  std::vector<TierAnswer> answers(tokens / config_.block_size, {TierAnswer::Kind::Hit, Tier::G1, 0});
  for (std::size_t i = 0; i < needed.blocks.size(); ++i) {
    for (std::size_t unit = needed.covers[i].first; unit < needed.covers[i].end; ++unit) {
      TierAnswer& answer = answers[unit];
      answer.kind = std::max(answer.kind, found[i].kind);
      answer.tier = std::max(answer.tier, found[i].tier);
      answer.ready_ns = answer.kind == TierAnswer::Kind::Retry ? 0 : std::max(answer.ready_ns, found[i].ready_ns);
    }
  }
  if (answers.size() < blocks.size()) answers.push_back({});
  return answers;
}

void VllmEngine::require_group_tiers(const char* call) const {
  if (offload_) {
    throw Error(ErrorKind::WrongState, call, ": vLLM's offload has no such call; ",
                "use a tier with mode write_through or evict");
  }
}

bool VllmEngine::prefetch(std::span<const BlockIdentity> blocks, std::int64_t now_ns) {
  require_tiers();
  require_group_tiers("prefetch");
  require_time(now_ns);
  tiers_->hub().run_until(now_ns);
  if (!clock_.in_step) skip_to(now_ns);
  token_log_.touch();
  bool under_way = false;
  try {
    under_way = onboarding_->prefetch(blocks, now_ns);
  } catch (...) {  // user-defined policy: blocks evicted for the load stay evicted
    announcer_.show(now_ns);
    throw;
  }
  announcer_.show(now_ns);
  sample_blocks(now_ns);
  return under_way;
}

// The step has computed blocks: those that the host lacks go there.
void VllmEngine::write_through(const std::vector<Scheduled>& turns, std::int64_t now_ns) {
  if (tiers_->config().mode != OffloadMode::WriteThrough) return;
  for (const Scheduled& turn : turns) {
    EngineRequest& request = scheduler_->decoding().requests[turn.slot];
    if (!scheduler_->live(turn) || request.status != RequestStatus::Running) continue;
    // Asynchronously, later blocks may have their keys already.
    const std::uint32_t end = turn.before + turn.tokens;
    const std::uint32_t full =
        std::min(num_keyed(request), kv_->names_on_receipt() ? (end + config_.block_size - 1) / config_.block_size
                                                             : end / config_.block_size);
    if (full <= request.through) continue;
    const std::uint32_t first = request.through;
    request.through = full;
    if (grouped_ != nullptr) {
      const BlockGroups::Offered& offered = grouped_->blocks()->offered(request, first, full);
      tiers_->write_through(turn.slot, now_ns, offered.slots, offered.blocks);
      tiers_->hold_copied(turn.slot);  // a window may leave a block before it is copied
      continue;
    }
    tiers_->write_through(turn.slot, now_ns, std::span<const SlotId>(request.table).subspan(first, full - first),
                          std::span<const BlockIdentity>(request.blocks).subspan(first, full - first));
  }
  tiers_->hub().run_until(now_ns);
}

std::uint32_t VllmEngine::num_keyed(const EngineRequest& request) const {
  return grouped_ != nullptr ? grouped_->blocks()->keyed_units(request) : request.keyed;
}

FetchStages VllmEngine::fetch_stages() const {
  FetchStages stages;
  stages.under_way = scheduler_->counts().parked;
  scheduler_->waiting().for_each([&](RequestSlot slot) {
    const EngineRequest& request = scheduler_->requests()[slot];
    if (request.status == RequestStatus::Loading) {
      ++(request.loaded ? stages.done : stages.under_way);
    } else if (kv_->holds(request)) {
      ++stages.done;
    } else if (request.wants_load) {
      ++stages.to_start;
    }
  });
  return stages;
}

}  // namespace understudy
