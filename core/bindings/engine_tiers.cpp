// Python bindings for the tiers of the simulated engine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "convert.hpp"
#include "engine/vllm/lockstep.hpp"
#include "engine/vllm/view.hpp"
#include "exclusive_class.hpp"
#include "prefix_actions.hpp"

namespace understudy {

OffloadLine take_offload_line(VllmEngine& engine);        // offload.cpp
OffloadSamples take_offload_samples(VllmEngine& engine);  // offload.cpp

namespace {

using namespace nb::literals;

WorkerTiers& tiers_of(VllmEngine& self) {
  WorkerTiers* const tiers = VllmParts(self).tiers();
  if (tiers == nullptr) throw Error(ErrorKind::WrongState, "this engine has no tiers");
  return *tiers;
}

std::vector<std::tuple<std::string, int, std::int64_t>> tier_lookup(VllmEngine& self, const Identities& identities) {
  std::vector<std::tuple<std::string, int, std::int64_t>> out;
  constexpr const char* kNames[] = {"miss", "hit", "pending", "retry"};
  for (const TierAnswer& answer : self.tier_lookup(identities.span())) {
    out.emplace_back(kNames[static_cast<std::size_t>(answer.kind)], static_cast<int>(answer.tier), answer.ready_ns);
  }
  return out;
}

// (free, active, inactive, held) of a tier of the worker's own.
std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t> tier_blocks(const VllmEngine& self, Tier tier) {
  const VllmView view(self);
  const std::size_t pool = view.store().pool_of(tier);
  const PoolMetrics m = pool == 0 ? view.device() : view.store().metrics(pool);
  const std::uint64_t held = pool == 0 && view.tiers() != nullptr ? view.tiers()->held() : 0;
  return {m.reset_blocks, m.total_blocks - m.reset_blocks - m.inactive_blocks - held, m.inactive_blocks, held};
}

}  // namespace

void bind_engine_tiers(ExclusiveClass<VllmEngine, Engine>& engine) {
  engine
      .def_prop_ro(
          "asleep", [](const VllmEngine& self) { return VllmView(self).asleep(); },
          "Nothing to compute until a transfer lands; no step is open.")
      .def_prop_ro(
          "parked", [](const VllmEngine& self) { return VllmView(self).parked(); },
          "Requests whose blocks are being loaded.")
      .def_prop_ro(
          "wake_ns", [](VllmEngine& self) { return tiers_of(self).hub().next_wake_ns(); },
          "A time not after the next landing; None when no transfer is in flight.")
      .def(
          "set_link_share",
          [](VllmEngine& self, std::int64_t now_ns, Tier tier, double share) {
            self.set_link_share(now_ns, tier, share);
          },
          "now_ns"_a, "tier"_a, "share"_a,
          "Set the share of bandwidth of the links to and from a tier, 0.001 to 1. A shared tier's "
          "links change for all workers.")
      .def("tier_lookup", &tier_lookup, "identities"_a,
           "(kind, tier, ns) of the leading blocks, ended by the first miss. hit: it is there; pending: it will be at "
           "that time, unless transfers join its links; retry: it is on its way, ask again next step; miss. With "
           "several KV groups: of the units of hashing of the longest hit, the answer of the slowest block.")
      .def("tier_blocks", &tier_blocks, "tier"_a, "(free, active, inactive, held) of G1 or G2.")
      .def(
          "prefetch",
          [](VllmEngine& self, const Identities& identities, std::int64_t now_ns) {
            return self.prefetch(identities.span(), now_ns);
          },
          "identities"_a, "now_ns"_a, "Prefetch the prefix that lower tiers have.")
      .def(
          "keep_prefix",
          [](VllmEngine& self, const std::string& action, std::uint64_t session, const Identities& identities,
             std::uint32_t tokens, std::uint32_t kept_tokens, std::int64_t now_ns) {
            PrefixKeeper& keeper = self;
            if (const auto why = keeper.why_no_prefixes()) throw Error(ErrorKind::WrongState, "keep_prefix: ", *why);
            return keeper.keep_prefix({read_prefix_action(action), session,
                                       std::make_shared<GivenIdentities>(identities), tokens, kept_tokens},
                                      now_ns);
          },
          "action"_a, "session"_a, "identities"_a, "tokens"_a, "kept_tokens"_a, "now_ns"_a,
          "Do something for the KV of a session that sleeps: hold, unhold, drop, offload or prefetch the cached blocks "
          "of its first `tokens` tokens; drop leaves `kept_tokens`.")
      .def(
          "prefix_totals",
          [](const VllmEngine& self, std::int64_t now_ns) {
            return static_cast<const PrefixKeeper&>(self).prefix_totals(now_ns);
          },
          "now_ns"_a, "Numbers of such calls, and of their blocks.")
      .def_prop_ro(
          "loading", [](VllmEngine& self) { return VllmLockstep(self).loading(); },
          "Requests that hold blocks which are being loaded, under vLLM's offload.")
      .def_prop_ro(
          "fetch_stages",
          [](const VllmEngine& self) {
            const FetchStages stages = VllmView(self).fetch_stages();
            return std::tuple(stages.to_start, stages.under_way, stages.done);
          },
          "Queued requests whose load from lower tiers has not begun, is in flight, and is done.")
      .def_prop_ro(
          "offload_pending", [](VllmEngine& self) { return VllmLockstep(self).offload_pending(); },
          "Under vLLM's offload: transfers are in flight, or ended requests may still store.")
      .def("take_offload_line", &take_offload_line, "Log line of the last step's offload, if logged.")
      .def("take_offload_samples", &take_offload_samples, "Single samples since the last call, if kept.")
      .def_prop_ro(
          "offload_usage",
          [](const VllmEngine& self) {
            const OffloadConnector* const offload = VllmView(self).offload();
            if (offload == nullptr) return std::tuple(0.0, 0.0, 0.0);
            const VllmHost& host = offload->host();
            const auto share = [&](std::uint64_t chunks) {
              return static_cast<double>(chunks) / static_cast<double>(host.capacity());
            };
            return std::tuple(share(host.writing() + host.loading()), share(host.writing()), share(host.loading()));
          },
          "Shares of the host that transfers hold under vLLM's offload: all, being written, being read.")
      .def_prop_ro("tier_totals", [](VllmEngine& self) { return tiers_of(self).totals(); })
      .def(
          "below_tokens",
          [](const VllmEngine& self, RequestId id) {
            const auto& below = self.request(id).record.below_total;
            return std::tuple(below[0], below[1], below[2]);
          },
          "request"_a, "Cached tokens that came from G2, G3 and G4.")
      .def(
          "tier_waits",
          [](VllmEngine& self, RequestId id) {
            (void)tiers_of(self);
            return std::pair(self.request(id).record.parked_ns, VllmView(self).room_wait_ns(id));
          },
          "request"_a, "Nanoseconds parked for loads, and waiting for copies to leave the device.");
}

}  // namespace understudy
