// Links in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/errors.hpp"
#include "bindings.hpp"
#include "convert.hpp"
#include "links/link.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

constexpr std::uint64_t kMaxId = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint64_t kMaxNs = std::numeric_limits<std::int64_t>::max() / 4;  // sums of times must not overflow

std::int64_t read_ns(nb::handle value, const char* name) {
  return static_cast<std::int64_t>(read_uint(value, name, kMaxNs));
}

}  // namespace

void bind_links(nb::module_& m) {
  nb::class_<LinkUsage>(m, "LinkUsage", "Transfers, bytes and busy time of a link up to a time.")
      .def_ro("name", &LinkUsage::name)
      .def_ro("bandwidth_gbps", &LinkUsage::bandwidth_gbps, "10^9 bytes per second; inf: no limit.")
      .def_ro("transfers_started", &LinkUsage::transfers_started)
      .def_ro("transfers_finished", &LinkUsage::transfers_finished)
      .def_ro("bytes_started", &LinkUsage::bytes_started)
      .def_ro("bytes_finished", &LinkUsage::bytes_finished)
      .def_ro("busy_ns", &LinkUsage::busy_ns, "Time in which at least one transfer was flowing.")
      .def_ro("bucket_ns", &LinkUsage::bucket_ns, "Length of the intervals of bucket_bytes.")
      .def_prop_ro(
          "bucket_bytes", [](const LinkUsage& usage) { return to_array(usage.bucket_bytes); },
          "Bytes moved in each interval since time 0, at most 1024 intervals.");

  nb::class_<Links>(m, "Links",
                    "The links of a run. Transfers share bandwidth equally; completion times are exact, in whole "
                    "nanoseconds, and do not depend on when one looks.")
      .def(nb::init<>())
      .def(
          "add_duplex",
          [](Links& links, const std::string& name, double bandwidth_gbps, bool demand_first) {
            return links.add_duplex(name, bandwidth_gbps, demand_first);
          },
          "name"_a, "bandwidth_gbps"_a, nb::kw_only(), "demand_first"_a = false,
          "A cap over links that name it: each transfer on any of them also needs its fair share of the cap.")
      .def(
          "add_link",
          [](Links& links, const std::string& name, double bandwidth_gbps, Int fixed_ns, Int duplex,
             bool demand_first) {
            LinkSpec spec;
            spec.name = name;
            spec.bandwidth_gbps = bandwidth_gbps;
            spec.fixed_ns = read_ns(fixed_ns, "fixed_ns");
            if (!duplex.is_none()) spec.duplex = static_cast<DuplexId>(read_uint(duplex, "duplex", kMaxId));
            spec.demand_first = demand_first;
            return links.add_link(spec);
          },
          "name"_a, "bandwidth_gbps"_a, nb::kw_only(), "fixed_ns"_a = 0, "duplex"_a = nb::none(),
          "demand_first"_a = false,
          "A link of 10^9 bytes per second times bandwidth_gbps (inf: no limit). A transfer's bytes start to flow "
          "fixed_ns after its start. demand_first: background moves only while no demand transfer flows.")
      .def(
          "set_share",
          [](Links& links, Int now_ns, Int link, double share) {
            links.set_share(read_ns(now_ns, "now_ns"), static_cast<LinkId>(read_uint(link, "link", kMaxId)), share);
          },
          "now_ns"_a, "link"_a, "share"_a,
          "Set the share of the link's bandwidth (0.001 to 1), also for transfers in flight.")
      .def(
          "set_duplex_share",
          [](Links& links, Int now_ns, Int duplex, double share) {
            links.set_duplex_share(read_ns(now_ns, "now_ns"),
                                   static_cast<DuplexId>(read_uint(duplex, "duplex", kMaxId)), share);
          },
          "now_ns"_a, "duplex"_a, "share"_a, "Like `set_share`, for a cap over links.")
      .def(
          "start",
          [](Links& links, Int now_ns, IntSequence path, Int num_bytes, bool background) {
            const IntArray<std::uint32_t> ids(path, "path");
            return links.start(read_ns(now_ns, "now_ns"), ids.span(), read_uint(num_bytes, "num_bytes"),
                               background ? Priority::Background : Priority::Demand);
          },
          "now_ns"_a, "path"_a, "num_bytes"_a, nb::kw_only(), "background"_a = false,
          "Start a transfer over one link or two and return its id; ids rise in order of start.")
      .def(
          "start_all",
          [](Links& links, Int now_ns, IntSequence path, IntSequence num_bytes, bool background) {
            const IntArray<std::uint32_t> ids(path, "path");
            const IntArray<std::uint64_t> bytes(num_bytes, "num_bytes");
            return links.start_all(read_ns(now_ns, "now_ns"), ids.span(), bytes.span(),
                                   background ? Priority::Background : Priority::Demand);
          },
          "now_ns"_a, "path"_a, "num_bytes"_a, nb::kw_only(), "background"_a = false,
          "Start transfers in order, all or none; returns the id of the first.")
      .def("next_completion_ns", &Links::next_completion_ns,
           "Time of the next completion if no transfer starts before; None when no transfer is in flight.")
      .def("next_wake_ns", &Links::next_wake_ns,
           "A time not after the next completion, cheaper to know; pop_due then may return nothing.")
      .def(
          "pop_due",
          [](Links& links, Int now_ns) {
            List<Tuple<Int, Int>> due;
            for (const Completion& end : links.pop_due(read_ns(now_ns, "now_ns")))
              due.append(nb::make_tuple(end.time_ns, end.id));
            return due;
          },
          "now_ns"_a, "(time_ns, id) of transfers that ended up to now_ns, each once, by time and then by start.")
      .def(
          "deadline_ns",
          [](const Links& links, Int transfer) { return links.deadline_ns(read_uint(transfer, "transfer")); },
          "transfer"_a, "When a transfer that was not popped yet ends if none starts before.")
      .def(
          "usage",
          [](const Links& links, Int link) {
            return links.usage(static_cast<LinkId>(read_uint(link, "link", kMaxId)));
          },
          "link"_a, "Usage of the link up to now.")
      .def_prop_ro("now_ns", &Links::now_ns, "The latest time passed to a call.")
      .def_prop_ro("in_flight", &Links::in_flight, "Transfers that have not ended.")
      .def_prop_ro("idle", &Links::idle, "True if no transfer is in flight or waits to be popped.")
      .def_prop_ro("operations", &Links::operations, "Work done so far, for tests of its growth.")
      .def("check", &Links::check, "Verify conservation; throws InvariantViolated.");
}

}  // namespace understudy
