// Drained events as columns.
#include <nanobind/nanobind.h>

#include "bindings.hpp"
#include "convert.hpp"
#include "events/event_ring.hpp"

namespace understudy {

namespace {

template <typename T>
using Column = std::vector<T, HugeAllocator<T>>;

template <typename T, typename Read>
nb::object column(const DrainedEvents& self, Read read) {
  Column<T> out;
  out.reserve(self.records.size());
  for (const EventRecord& record : self.records) out.push_back(static_cast<T>(read(record)));
  return to_array(std::move(out));
}

// The events that `understudy.events.decode` makes of the rows, as columns and in one pass.
nb::tuple event_columns(const DrainedEvents& self, bool raw) {
  Column<std::uint8_t> kinds;
  Column<std::uint8_t> tiers;
  Column<std::uint64_t> parents;
  Column<std::int64_t> offsets;
  Column<std::int64_t> first;
  Column<std::uint64_t> hashes;
  Column<std::uint64_t> locals;
  Column<std::uint32_t> positions;
  Column<std::uint64_t> generations;
  {
    const nb::gil_scoped_release released;
    const std::size_t rows = self.records.size();
    hashes.reserve(rows);
    locals.reserve(rows);
    positions.reserve(rows);
    generations.reserve(rows);
    const EventRecord* before = nullptr;
    bool same_call = false;
    for (const EventRecord& row : self.records) {
      same_call &= !row.starts;  // whether or not the stream has the row
      if (!raw && !row.sole) continue;
      const bool stored = row.kind == EventKind::Stored;
      const BlockIdentity& block = row.identity;
      const bool continues = same_call && before->kind == row.kind && before->tier == row.tier &&
                             (!stored || (block.parent_hash == before->identity.sequence_hash() &&
                                          block.position() == before->identity.position() + 1));
      if (!continues) {
        kinds.push_back(static_cast<std::uint8_t>(row.kind));
        tiers.push_back(static_cast<std::uint8_t>(row.tier));
        parents.push_back(stored ? block.parent_hash : 0);
        offsets.push_back(static_cast<std::int64_t>(hashes.size()));
        first.push_back(&row - self.records.data());
      }
      hashes.push_back(block.sequence_hash());
      locals.push_back(stored ? block.local_hash : 0);
      positions.push_back(block.position());
      generations.push_back(row.generation);
      before = &row;
      same_call = true;
    }
    offsets.push_back(static_cast<std::int64_t>(hashes.size()));
  }
  return nb::make_tuple(to_array(std::move(kinds)), to_array(std::move(tiers)), to_array(std::move(parents)),
                        to_array(std::move(offsets)), to_array(std::move(hashes)), to_array(std::move(locals)),
                        to_array(std::move(first)), to_array(std::move(positions)), to_array(std::move(generations)));
}

}  // namespace

void bind_events(nb::module_& m) {
  nb::class_<DrainedEvents>(m, "EventBatch", "Events taken from a store, as columns with one row a block.")
      .def("__len__", [](const DrainedEvents& self) { return self.records.size(); })
      .def("event_columns", &event_columns, nb::arg("raw"),
           "Events, as `EventColumns` has them; then the first row of each, and position and generation by block.")
      .def_ro("lost", &DrainedEvents::lost, "Events that a bounded ring forgot before these.")
      .def_prop_ro("ids",
                   [](const DrainedEvents& self) {
                     return column<std::uint64_t>(self, [](const EventRecord& r) { return r.id; });
                   })
      .def_prop_ro(
          "kinds",
          [](const DrainedEvents& self) {
            return column<std::uint8_t>(self, [](const EventRecord& r) { return r.kind; });
          },
          "0 stored, 1 removed.")
      .def_prop_ro("tiers",
                   [](const DrainedEvents& self) {
                     return column<std::uint8_t>(self, [](const EventRecord& r) { return r.tier; });
                   })
      .def_prop_ro(
          "starts",
          [](const DrainedEvents& self) {
            return column<std::uint8_t>(self, [](const EventRecord& r) { return r.starts; });
          },
          "1 on the first row of what one call to the store registered or removed.")
      .def_prop_ro(
          "sole",
          [](const DrainedEvents& self) {
            return column<std::uint8_t>(self, [](const EventRecord& r) { return r.sole; });
          },
          "1 where the event is the first copy's arrival or the last copy's departure.")
      .def_prop_ro("sequence_hashes",
                   [](const DrainedEvents& self) {
                     return column<std::uint64_t>(self,
                                                  [](const EventRecord& r) { return r.identity.sequence_hash(); });
                   })
      .def_prop_ro("local_hashes",
                   [](const DrainedEvents& self) {
                     return column<std::uint64_t>(self, [](const EventRecord& r) { return r.identity.local_hash; });
                   })
      .def_prop_ro(
          "parent_hashes",
          [](const DrainedEvents& self) {
            return column<std::uint64_t>(self, [](const EventRecord& r) { return r.identity.parent_hash; });
          },
          "0 at a root, or when not known.")
      .def_prop_ro("positions",
                   [](const DrainedEvents& self) {
                     return column<std::uint32_t>(self, [](const EventRecord& r) { return r.identity.position(); });
                   })
      .def_prop_ro("generations",
                   [](const DrainedEvents& self) {
                     return column<std::uint64_t>(self, [](const EventRecord& r) { return r.generation; });
                   })
      .def_prop_ro(
          "token_ids", [](const DrainedEvents& self) { return to_array(std::vector<Token>(self.tokens)); },
          "block_size tokens for every stored row, concatenated; empty unless asked for.");
}

}  // namespace understudy
