#include "engine/vllm/onboarding.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "engine/vllm/groups/block_groups.hpp"

namespace understudy {

Onboarding::Outcome Onboarding::load(const EngineRequest& request, const Admission& head, std::span<const SlotId> found,
                                     std::int64_t now_ns) {
  const std::size_t hits = head.hit.tokens / config_.block_size;
  const std::size_t limit = head.limit / config_.block_size;
  const bool preempted = request.status == RequestStatus::Preempted;
  if (hits == limit || request.onboard_tried || (preempted && !tiers_->config().onboard_preempted)) {
    return Outcome::Miss;
  }
  const auto prefill_ns = [&](std::size_t blocks) {
    auto cached = static_cast<std::uint32_t>(blocks * config_.block_size);
    if (grouped_ != nullptr) cached -= std::min(cached, grouped_->replay());
    return timing_.duration_ns(StepLoad::of_prompt(request.known, cached), capacity_tokens_);
  };
  const auto saved_ns = [&](std::size_t blocks) { return prefill_ns(hits) - prefill_ns(hits + blocks); };
  if (grouped_ != nullptr) {
    return load_groups(head.slot, now_ns, request.blocks, head.hit.tokens, head.limit, saved_ns);
  }
  return tiers_->onboard(head.slot, now_ns, found,
                         std::span<const BlockIdentity>(request.blocks).subspan(hits, limit - hits), saved_ns);
}

// Load the longest hit of all groups over all tiers; if that does not pay or does not fit, one without the lowest tier.
Onboarding::Outcome Onboarding::load_groups(RequestSlot request, std::int64_t now_ns,
                                            std::span<const BlockIdentity> units, std::uint32_t known,
                                            std::uint32_t limit,
                                            const std::function<std::int64_t(std::size_t)>& saved_ns) {
  const GroupTiers& below = grouped_->blocks()->tiers();
  auto outcome = Outcome::Miss;
  std::uint32_t before = 0;
  for (Tier lowest = tiers_->lowest(); lowest > Tier::G1; lowest = static_cast<Tier>(static_cast<int>(lowest) - 1)) {
    const std::uint32_t tokens = below.find(units, known, limit, lowest);
    if (tokens <= known) return outcome;
    if (std::exchange(before, tokens) == tokens) continue;
    const GroupTiers::Needed needed = below.needed(units, tokens, limit, lowest);
    const std::size_t first = known / config_.block_size;
    const std::size_t end = tokens / config_.block_size;
    const auto here =
        tiers_->onboard_all(request, now_ns, {needed.blocks, needed.covers, first, end}, saved_ns(end - first));
    if (here == Outcome::Parked || here == Outcome::Retry) return here;
    if (here == Outcome::Slow) outcome = here;
  }
  return outcome;
}

bool Onboarding::prefetch(std::span<const BlockIdentity> blocks, std::int64_t now_ns) {
  if (grouped_ == nullptr) return tiers_->prefetch(now_ns, blocks);
  const auto limit = static_cast<std::uint32_t>(blocks.size() * config_.block_size);
  const auto worth = [](std::size_t) { return std::numeric_limits<std::int64_t>::max(); };
  return load_groups(WorkerTiers::kNoRequest, now_ns, blocks, grouped_->cached(blocks), limit, worth) ==
         Outcome::Parked;
}

}  // namespace understudy
