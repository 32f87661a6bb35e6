#include "eviction/policy.hpp"

#include "eviction/advised.hpp"
#include "eviction/free_then_cached.hpp"
#include "eviction/lineage.hpp"
#include "eviction/lists.hpp"
#include "eviction/vllm.hpp"

namespace understudy {

namespace {

void check_thresholds(const std::array<std::uint32_t, 3>& t) {
  if (t[0] < 1 || t[0] >= t[1] || t[1] >= t[2] || t[2] > 15) {
    throw Error(ErrorKind::ConfigError, "multi_lru thresholds must rise strictly within 1..15, got ", t[0], ", ", t[1],
                ", ", t[2]);
  }
}

template <typename Cached>
std::unique_ptr<EvictionPolicy> free_then(const PolicySpace& space, Cached cached) {
  return std::make_unique<FreeThenCached<Cached>>(space, std::move(cached));
}

}  // namespace

std::unique_ptr<EvictionPolicy> make_policy(const PolicyConfig& config, const PolicySpace& space) {
  switch (config.kind) {
    case PolicyKind::Lineage:
      return free_then(space, LineageOrder(space, LeafOrder::Tick));
    case PolicyKind::LineageFifo:
      return free_then(space, LineageOrder(space, LeafOrder::Fifo));
    case PolicyKind::Lru:
      return free_then(space, ListOrder<true>(space));
    case PolicyKind::Fifo:
      return free_then(space, ListOrder<false>(space));
    case PolicyKind::MultiLru:
      check_thresholds(config.thresholds);
      return free_then(space, MultiLruOrder(space, config.thresholds));
    case PolicyKind::Vllm:
    case PolicyKind::VllmAppend:
      return std::make_unique<VllmOrder>(space, config.kind == PolicyKind::VllmAppend);
    case PolicyKind::Advised:
      if (!config.advisor) throw Error(ErrorKind::ConfigError, "an advised policy needs its advisor");
      return std::make_unique<AdvisedOrder>(space);
  }
  throw Error(ErrorKind::ConfigError, "unknown eviction policy kind ", static_cast<int>(config.kind));
}

}  // namespace understudy
