// Loads of prefixes from lower tiers, before an admission and ahead of one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "engine/timing.hpp"
#include "engine/vllm/admission.hpp"
#include "engine/vllm/config.hpp"
#include "engine/vllm/groups/grouped_backend.hpp"
#include "engine/vllm/live_request.hpp"
#include "tiers/worker_tiers.hpp"

namespace understudy {

// A load that would take longer than computing its tokens is not worth it.
class Onboarding {
 public:
  using Outcome = WorkerTiers::Onboard;

  // `tiers` and `grouped` may be null. All of it outlives this.
  Onboarding(const VllmConfig& config, const StepTiming& timing, const std::uint64_t& capacity_tokens,
             WorkerTiers* tiers, GroupedBackend* grouped)
      : config_(config), timing_(timing), capacity_tokens_(capacity_tokens), tiers_(tiers), grouped_(grouped) {}

  // Whether admissions look there. (Under vLLM's offload the host is its connector's.)
  bool on() const noexcept { return tiers_ != nullptr && !config_.offload; }
  // Look up the blocks behind the head's hits on the device, which are `found`. Parked: their load has begun.
  Outcome load(const EngineRequest& request, const Admission& head, std::span<const SlotId> found, std::int64_t now_ns);
  // Load a prefix that no request waits for. True: a load has begun.
  bool prefetch(std::span<const BlockIdentity> blocks, std::int64_t now_ns);

 private:
  Outcome load_groups(RequestSlot request, std::int64_t now_ns, std::span<const BlockIdentity> units,
                      std::uint32_t known, std::uint32_t limit,
                      const std::function<std::int64_t(std::size_t)>& saved_ns);

  const VllmConfig& config_;
  const StepTiming& timing_;
  const std::uint64_t& capacity_tokens_;
  WorkerTiers* const tiers_;
  GroupedBackend* const grouped_;
};

}  // namespace understudy
