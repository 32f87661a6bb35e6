// Drained events as columns.
#include <nanobind/nanobind.h>

#include "bindings.hpp"
#include "convert.hpp"
#include "events/event_ring.hpp"

namespace understudy {

namespace {

template <typename T, typename Read>
nb::object column(const DrainedEvents& self, Read read) {
  std::vector<T> out;
  out.reserve(self.records.size());
  for (const EventRecord& record : self.records) out.push_back(static_cast<T>(read(record)));
  return to_array(std::move(out));
}

}  // namespace

void bind_events(nb::module_& m) {
  nb::class_<DrainedEvents>(m, "EventBatch", "Events taken from a store, as columns with one row a block.")
      .def("__len__", [](const DrainedEvents& self) { return self.records.size(); })
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
