// Tiers in Python: their settings and totals.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "convert.hpp"
#include "exclusive_class.hpp"
#include "live_run.hpp"
#include "policy_config.hpp"
#include "tiers/worker_tiers.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

// Calls an object's select(lineages, reuse), which returns a truth value for each block.
class PythonFilter final : public OffloadFilter {
 public:
  explicit PythonFilter(nb::handle filter) : filter_(keep(filter)) {}

  void select(std::span<const OffloadCandidate> candidates, std::span<std::uint8_t> chosen) override {
    nb::gil_scoped_acquire gil;
    nb::list lineages;
    std::vector<std::uint32_t> reuse;
    for (const OffloadCandidate& candidate : candidates) {
      lineages.append(lineage_to_int(candidate.identity.lineage));
      reuse.push_back(candidate.reuse);
    }
    read(filter_->attr("select")(lineages, to_array(std::move(reuse))), chosen);
  }

 private:
  static void read(const nb::object& answer, std::span<std::uint8_t> chosen) {
    std::size_t count = 0;
    try {
      count = nb::len(answer);
      std::size_t i = 0;
      for (const nb::handle keep_it : answer) {
        const std::uint8_t kept = nb::cast<bool>(nb::bool_(keep_it)) ? 1 : 0;
        if (i < chosen.size()) chosen[i++] = kept;
      }
    } catch (const nb::python_error& error) {
      throw Error(ErrorKind::PolicyError, "the offload policy must answer with a truth value for each of ",
                  chosen.size(), " blocks: ", error.what());
    }
    if (count != chosen.size()) {
      throw Error(ErrorKind::PolicyError, "the offload policy was asked about ", chosen.size(),
                  " blocks and answered for ", count);
    }
  }

  std::shared_ptr<nb::object> filter_;
};

std::uint32_t read_concurrency(nb::handle value) {
  return value.is_none() ? kNoLimit : static_cast<std::uint32_t>(read_uint(value, "offload_concurrency", kNoLimit));
}

// Limit of a tier that may be larger than its content: far below where sums overflow.
constexpr std::uint64_t kMostBlocks = std::uint64_t{1} << 42;

void make_shared_tier(SharedTierConfig* self, Int num_blocks, PolicyMakerArg policy, const LinkPairConfig& worker,
                      const LinkPairConfig& backend, Int offload_concurrency) {
  SharedTierConfig config;
  config.num_blocks = read_uint(num_blocks, "num_blocks", kMostBlocks);
  config.policy = read_policy_maker(policy)();
  config.worker = worker;
  config.backend = backend;
  config.offload_concurrency = read_concurrency(offload_concurrency);
  new (self) SharedTierConfig(std::move(config));
}

void make_tiers(TierConfig* self, Int bytes_per_block, Int g2_blocks, PolicyMakerArg g2_policy,
                const LinkPairConfig& host, Int offload_concurrency, bool demand_first, bool write_through,
                bool exclusive, Int min_reuse, PyArg<"understudy.core_types.OffloadFilter"> filter,
                Int offload_batch_size, bool onboard_preempted, bool recompute_fallback, double onboard_failure_rate,
                Int seed, const SharedTierConfig* g3, const SharedTierConfig* g4, Int most_blocks) {
  TierConfig config;
  config.bytes_per_block = read_uint(bytes_per_block, "bytes_per_block", std::uint64_t{1} << 40);
  config.g2_blocks = read_uint(g2_blocks, "g2_blocks", kMostBlocks);
  config.g2_policy = read_policy_maker(g2_policy);
  config.g2_policy_is_users = !nb::isinstance<nb::str>(g2_policy);
  config.host = host;
  config.offload_concurrency = read_concurrency(offload_concurrency);
  config.demand_first = demand_first;
  config.mode = write_through ? OffloadMode::WriteThrough : OffloadMode::OnEviction;
  config.exclusive = exclusive;
  config.min_reuse = static_cast<std::uint32_t>(read_uint(min_reuse, "min_reuse", 0xFFFFFFFFu));
  if (!filter.is_none()) config.filter = std::make_shared<PythonFilter>(filter);
  config.offload_batch_size =
      static_cast<std::uint32_t>(read_uint(offload_batch_size, "offload_batch_size", 0xFFFFFFFFu));
  config.onboard_preempted = onboard_preempted;
  config.recompute_fallback = recompute_fallback;
  config.onboard_failure_rate = onboard_failure_rate;
  config.seed = read_uint(seed, "seed");
  if (g3 != nullptr) config.g3 = *g3;
  if (g4 != nullptr) config.g4 = *g4;
  if (!most_blocks.is_none()) config.most_blocks = read_uint(most_blocks, "most_blocks", kMostBlocks);
  new (self) TierConfig(std::move(config));
}

}  // namespace

void bind_tiers(nb::module_& m) {
  nb::class_<LinkPairConfig>(m, "LinkPairConfig", "The links to a tier and back.")
      .def(
          "__init__",
          [](LinkPairConfig* self, double down_gbps, double up_gbps, std::int64_t down_fixed_ns,
             std::int64_t up_fixed_ns, double duplex_gbps) {
            new (self) LinkPairConfig{{down_gbps, down_fixed_ns}, {up_gbps, up_fixed_ns}, duplex_gbps};
          },
          nb::kw_only(), "down_gbps"_a, "up_gbps"_a, "down_fixed_ns"_a = 0, "up_fixed_ns"_a = 0,
          "duplex_gbps"_a = std::numeric_limits<double>::infinity());
  nb::class_<SharedTierConfig>(m, "SharedTierConfig", "A tier that the workers of a run share.")
      .def("__init__", &make_shared_tier, nb::kw_only(), "num_blocks"_a, "policy"_a = "lru", "worker"_a, "backend"_a,
           "offload_concurrency"_a.none() = nb::none());
  nb::class_<TierConfig>(m, "TierConfig", "The tiers below the device.")
      .def("__init__", &make_tiers, nb::kw_only(), "bytes_per_block"_a, "g2_blocks"_a, "g2_policy"_a = "lru", "host"_a,
           "offload_concurrency"_a.none() = nb::none(), "demand_first"_a = false, "write_through"_a = false,
           "exclusive"_a = false, "min_reuse"_a = 0, "offload_filter"_a.none() = nb::none(),
           "offload_batch_size"_a = 32, "onboard_preempted"_a = true, "recompute_fallback"_a = true,
           "onboard_failure_rate"_a = 0.0, "seed"_a = 0, "g3"_a.none() = nb::none(), "g4"_a.none() = nb::none(),
           "most_blocks"_a.none() = nb::none())
      .def_ro("g2_blocks", &TierConfig::g2_blocks);
  nb::class_<TransferEstimate>(m, "TransferEstimate",
                               "Estimated time of a transfer in ns, next to those in flight when it starts.")
      .def(nb::init<const TierConfig&>(), "config"_a, nb::keep_alive<1, 2>())
      .def("copy_ns", &TransferEstimate::copy_ns, "num_bytes"_a, "copies"_a, "Device to host.")
      .def("lower_copy_ns", &TransferEstimate::lower_copy_ns, "tier"_a, "num_bytes"_a, "copies"_a,
           "Host to a shared tier.")
      .def("stage_ns", &TransferEstimate::stage_ns, "tier"_a, "num_bytes"_a, "loads"_a, "copies"_a,
           "A shared tier to the host.")
      .def("load_ns", &TransferEstimate::load_ns, "num_bytes"_a, "loads"_a, "copies"_a, "Host to device.");
  ExclusiveClass<LiveRun>(m, "TierRun",
                          "Links and lower tiers that the workers of a run share. One call at a time, the workers' "
                          "included: WrongState.")
      .def(
          "__init__",
          [](LiveRun* self, const TierConfig& config, std::uint32_t block_size, bool events, bool check) {
            const double blocks = slots_below(config, 0);
            within_memory(text_of("num_blocks: ", static_cast<std::uint64_t>(blocks), " blocks of shared tiers"),
                          blocks * kSlotBytes, [&] { new (self) LiveRun(config, block_size, events, check); });
          },
          "config"_a, "block_size"_a, "events"_a = false, "check"_a = false)
      .def(
          "run_until", [](LiveRun& self, std::int64_t now_ns) { self.hub().run_until(now_ns); }, "now_ns"_a,
          nb::call_guard<nb::gil_scoped_release>(), "Finish every transfer that ends by then, each at its time.")
      .def_prop_ro("next_wake_ns", [](LiveRun& self) { return self.hub().next_wake_ns(); })
      .def(
          "take_events",
          [](LiveRun& self, Tier tier) -> TimedRows {
            for (const auto& shared : self.shared()) {
              if (shared->tier() != tier) continue;
              TimedEvents events;
              shared->take_events(events);
              return nb::make_tuple(std::move(events.batch), to_array(std::move(events.time_ns)));
            }
            throw Error(ErrorKind::ConfigError, "this run has no tier G", static_cast<int>(tier));
          },
          "tier"_a, "Take the events of one shared tier, a separate publisher, with the time of each row in ns.")
      .def("check", [](LiveRun& self) { self.check(true); });
  nb::class_<TierTotals>(m, "TierTotals", "Counts of tier operations.")
      .def_ro("offloaded_blocks", &TierTotals::offloaded_blocks)
      .def_ro("dropped_blocks", &TierTotals::dropped_blocks)
      .def_ro("onboards", &TierTotals::onboards)
      .def_ro("onboarded_blocks", &TierTotals::onboarded_blocks)
      .def_ro("joined_loads", &TierTotals::joined_loads)
      .def_ro("slow_loads", &TierTotals::slow_loads)
      .def_ro("failed_loads", &TierTotals::failed_loads)
      .def_ro("room_waits", &TierTotals::room_waits)
      .def_ro("held_block_ns", &TierTotals::held_block_ns)
      .def_ro("held_max_blocks", &TierTotals::held_max_blocks)
      .def_ro("deferred_lookups", &TierTotals::deferred_lookups)
      .def_ro("refused_stores", &TierTotals::refused_stores)
      .def_ro("flushed_copies", &TierTotals::flushed_copies);
}

}  // namespace understudy
