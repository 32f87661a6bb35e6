// A raw stream of KV events made the truth.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "base/errors.hpp"
#include "bindings.hpp"
#include "column.hpp"
#include "events/consolidate.hpp"
#include "exclusive_class.hpp"

namespace nb = nanobind;

namespace understudy {

namespace {

void make_consolidator(Consolidator* self, std::size_t max_blocks, bool by_content) {
  new (self) Consolidator(max_blocks, by_content);
}

WireColumns apply(Consolidator& self, const Column<std::uint8_t>& kinds, const Column<std::uint8_t>& tiers,
                  const Column<std::uint64_t>& parents, const Column<std::int64_t>& offsets,
                  const Column<std::uint64_t>& sequence_hashes, const Column<std::uint64_t>& local_hashes) {
  const ColumnsView events{view(kinds),   view(tiers),           view(parents),
                           view(offsets), view(sequence_hashes), view(local_hashes)};
  const std::size_t count = events.kinds.size();
  const std::size_t blocks = events.sequence_hashes.size();
  const auto require = [](bool holds, const char* name) {
    if (!holds) throw Error(ErrorKind::InvalidArgument, name, " does not fit the other columns");
  };
  require(events.tiers.size() == count, "tiers");
  require(events.parents.size() == count, "parents");
  require(events.local_hashes.size() == blocks, "local_hashes");
  require(events.offsets.size() == count + 1 && events.offsets.front() == 0 &&
              events.offsets.back() == static_cast<std::int64_t>(blocks),
          "offsets");
  for (std::size_t i = 0; i < count; ++i) {
    require(events.offsets[i] <= events.offsets[i + 1], "offsets");
    require(events.kinds[i] <= 2, "kinds");
    require(events.kinds[i] == 2 || (events.tiers[i] >= 1 && events.tiers[i] <= 4), "tiers");
  }
  const nb::gil_scoped_release released;
  return self.apply(events);
}

}  // namespace

void bind_consolidate(nb::module_& m) {
  nb::class_<RawDistance>(m, "RawDistance",
                          "Errors of a reader that applies every Removed event without counting copies.")
      .def_ro("blocks", &RawDistance::blocks)
      .def_ro("second_copies", &RawDistance::second_copies)
      .def_ro("early_removals", &RawDistance::early_removals)
      .def_ro("unknown_removals", &RawDistance::unknown_removals)
      .def_ro("unnamed", &RawDistance::unnamed)
      .def_ro("overflowed", &RawDistance::overflowed)
      .def_ro("wrong_now", &RawDistance::wrong_now)
      .def_ro("wrong_peak", &RawDistance::wrong_peak)
      .def_prop_ro(
          "wrong_mean",
          [](const RawDistance& self) {
            return self.blocks == 0 ? 0.0 : static_cast<double>(self.wrong_sum) / static_cast<double>(self.blocks);
          },
          "Blocks wrongly believed gone, on average over all blocks published.");
  ExclusiveClass<Consolidator>(m, "Consolidator", "Counts the copies of blocks; one caller at a time (WrongState).")
      .def("__init__", &make_consolidator, nb::arg("max_blocks"), nb::arg("by_content"))
      .def("apply", &apply, nb::arg("kinds"), nb::arg("tiers"), nb::arg("parents"), nb::arg("offsets"),
           nb::arg("sequence_hashes"), nb::arg("local_hashes"))
      .def("clear", &Consolidator::clear)
      .def_prop_ro("distance", [](const Consolidator& self) { return RawDistance(self.distance()); })
      .def("__len__", &Consolidator::num_blocks);
}

}  // namespace understudy
