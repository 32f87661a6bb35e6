// Tiers in Python: their settings and totals.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "convert.hpp"
#include "exclusive_class.hpp"
#include "fields.hpp"
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

// Limit of a tier that may be larger than its content: far below where sums overflow.
constexpr std::uint64_t kMostBlocks = std::uint64_t{1} << 42;

}  // namespace

void bind_tiers(nb::module_& m) {
  nb::class_<LinkPairConfig> links(m, "LinkPairConfig", "The links to a tier and back.");
  Fields<LinkPairConfig>()
      .add("down_gbps", [](LinkPairConfig& self) -> double& { return self.down.bandwidth_gbps; })
      .add("up_gbps", [](LinkPairConfig& self) -> double& { return self.up.bandwidth_gbps; })
      .add("down_fixed_ns", [](LinkPairConfig& self) -> std::int64_t& { return self.down.fixed_ns; })
      .add("up_fixed_ns", [](LinkPairConfig& self) -> std::int64_t& { return self.up.fixed_ns; })
      .add("duplex_gbps", &LinkPairConfig::duplex_gbps)
      .bind(links);

  nb::class_<SharedTierConfig> shared_tier(m, "SharedTierConfig", "A tier that the workers of a run share.");
  Fields<SharedTierConfig>()
      .add("num_blocks", &SharedTierConfig::num_blocks, kMostBlocks)
      .required()
      .add("policy", kPolicyMakerType, "'lru'",
           [](SharedTierConfig& self, nb::handle policy) { self.policy = read_policy_maker(policy)(); })
      .add("worker", &SharedTierConfig::worker)
      .add("backend", &SharedTierConfig::backend)
      .add_limit("offload_concurrency", &SharedTierConfig::offload_concurrency, kNoLimit)
      .bind(shared_tier);

  nb::class_<TierConfig> tiers(m, "TierConfig", "The tiers below the device.");
  Fields<TierConfig>()
      .add("bytes_per_block", &TierConfig::bytes_per_block, std::uint64_t{1} << 40)
      .required()
      .add("g2_blocks", &TierConfig::g2_blocks, kMostBlocks)
      .required()
      .add("g2_policy", kPolicyMakerType, "'lru'",
           [](TierConfig& self, nb::handle policy) {
             self.g2_policy = read_policy_maker(policy);
             self.g2_policy_is_users = !nb::isinstance<nb::str>(policy);
           })
      .add("host", &TierConfig::host)
      .add_limit("offload_concurrency", &TierConfig::offload_concurrency, kNoLimit)
      .add("demand_first", &TierConfig::demand_first)
      .add("write_through", "bool", "False",
           [](TierConfig& self, nb::handle value) {
             self.mode =
                 read_field<bool>(value, "write_through", 0) ? OffloadMode::WriteThrough : OffloadMode::OnEviction;
           })
      .add("exclusive", &TierConfig::exclusive)
      .add("min_reuse", &TierConfig::min_reuse)
      .add("offload_filter", "understudy.core_types.OffloadFilter | None", "None",
           [](TierConfig& self, nb::handle filter) {
             if (!filter.is_none()) self.filter = std::make_shared<PythonFilter>(filter);
           })
      .add("offload_batch_size", &TierConfig::offload_batch_size)
      .add("onboard_preempted", &TierConfig::onboard_preempted)
      .add("recompute_fallback", &TierConfig::recompute_fallback)
      .add("onboard_failure_rate", &TierConfig::onboard_failure_rate)
      .add("seed", &TierConfig::seed)
      .add("g3", &TierConfig::g3)
      .add("g4", &TierConfig::g4)
      .add_limit("most_blocks", &TierConfig::most_blocks, kMostBlocks)
      .bind(tiers)
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
