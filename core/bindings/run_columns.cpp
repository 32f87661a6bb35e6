// The columns of engines that Python drives.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "convert.hpp"
#include "live_run.hpp"
#include "replay/run_columns.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

// Check that the row is new, and set its arrival time.
std::size_t come(RunColumns& self, Int row, std::int64_t arrival_ns) {
  FleetResult& out = self.result();
  const auto at = static_cast<std::size_t>(read_uint(row, "row"));
  if (at >= out.fate.size()) throw Error(ErrorKind::InvalidArgument, "row ", at, " of ", out.fate.size());
  if (out.arrival_ns[at] != kNeverHappened) throw Error(ErrorKind::WrongState, "row ", at, " is known already");
  out.arrival_ns[at] = arrival_ns;
  return at;
}

}  // namespace

void bind_run_columns(nb::module_& m) {
  nb::class_<RunColumns>(m, "RunColumns", "Gathers the results of live engines into the columns of a replay.")
      .def(
          "__init__",
          [](RunColumns* self, Int rows, bool tiers) {
            const auto count = static_cast<std::size_t>(read_uint(rows, "rows", std::uint64_t{1} << 40));
            constexpr double kRowBytes = 150;
            RunColumns columns;
            within_memory(text_of("requests: ", count, " rows"), static_cast<double>(count) * kRowBytes, [&] {
              columns.prepare(count, tiers, false);
              columns.result().arrival_ns.assign(count, kNeverHappened);
              columns.result().worker.assign(count, -1);
            });
            new (self) RunColumns(std::move(columns));
          },
          "rows"_a, nb::kw_only(), "tiers"_a = false,
          "Columns for `rows` requests; with `tiers`, the tier columns too.")
      .def(
          "keep",
          [](RunColumns& self, Int row, const RequestRecord& record, Int worker, std::int64_t arrival_ns) {
            const auto index = static_cast<std::int32_t>(read_uint(worker, "worker", 0x7FFFFFFFu));
            const std::size_t at = come(self, row, arrival_ns);
            self.keep(at, record);
            self.result().worker[at] = index;
          },
          "row"_a, "record"_a, "worker"_a, "arrival_ns"_a, "Record a finished request.")
      .def(
          "reject",
          [](RunColumns& self, Int row, std::int64_t now_ns, const std::string& why) {
            const std::size_t at = come(self, row, now_ns);
            self.result().fate[at] = static_cast<std::uint8_t>(RequestFate::Rejected);
            self.result().finish_ns[at] = now_ns;
            self.result().rejections.emplace_back(static_cast<std::int64_t>(at), why);
          },
          "row"_a, "now_ns"_a, "why"_a, "Record a request that was rejected before it reached an engine.")
      .def(
          "add_engine",
          [](RunColumns& self, Int worker, Engine& engine) {
            const auto index = static_cast<std::size_t>(read_uint(worker, "worker", 0x7FFFFFFFu));
            const ExclusiveCall guard(engine.call_flag(), "Engine");
            self.add_engine(index, engine);
          },
          "worker"_a, "engine"_a,
          "Add an engine's samples, totals and tiers; token gaps and load times if it keeps them.")
      .def(
          "add_run",
          [](RunColumns& self, LiveRun& run) {
            const ExclusiveCall guard(run.call_flag(), "TierRun");
            self.add_shared(run);
            self.add_links(run.hub().links());
          },
          "run"_a, "The tiers and links that engines shared.")
      .def("take", &RunColumns::take, "Take the result, once.");
}

}  // namespace understudy
