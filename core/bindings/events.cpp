// Events as columns: drained ones, and those of a whole run.
#include <nanobind/nanobind.h>

#include "bindings.hpp"
#include "column.hpp"
#include "convert.hpp"
#include "events/cleared.hpp"
#include "events/event_ring.hpp"
#include "events/event_table.hpp"
#include "router/prefix_index.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

template <typename T>
using DrainedColumn = std::vector<T, HugeAllocator<T>>;

template <typename T, typename Read>
void bind_column(nb::class_<DrainedEvents>& batch, const char* name, Read read, const char* doc = "") {
  batch.def_prop_ro(
      name,
      [read](const DrainedEvents& self) {
        DrainedColumn<T> out;
        out.reserve(self.records.size());
        for (const EventRecord& record : self.records) out.push_back(static_cast<T>(read(record)));
        return to_array(std::move(out));
      },
      doc);
}

// The events that `understudy.events.decode` makes of the rows, as columns and in one pass.
Arrays<std::uint8_t, std::uint8_t, std::uint64_t, std::int64_t, std::uint64_t, std::uint64_t> event_columns(
    const DrainedEvents& self, bool raw) {
  DrainedColumn<std::uint8_t> kinds;
  DrainedColumn<std::uint8_t> tiers;
  DrainedColumn<std::uint64_t> parents;
  DrainedColumn<std::int64_t> offsets;
  DrainedColumn<std::uint64_t> hashes;
  DrainedColumn<std::uint64_t> locals;
  {
    const nb::gil_scoped_release released;
    const std::size_t rows = self.records.size();
    hashes.reserve(rows);
    locals.reserve(rows);
    const EventRecord* before = nullptr;
    bool same_call = false;
    for (const EventRecord& row : self.records) {
      same_call &= !row.starts;  // whether or not the stream has the row
      if ((!raw && !row.sole) || row.group != 0 || row.kind == EventKind::Skipped) continue;
      if (row.kind == kCleared) {
        kinds.push_back(static_cast<std::uint8_t>(row.kind));
        tiers.push_back(static_cast<std::uint8_t>(row.tier));
        parents.push_back(0);
        offsets.push_back(static_cast<std::int64_t>(hashes.size()));
        same_call = false;
        continue;
      }
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
      }
      hashes.push_back(block.sequence_hash());
      locals.push_back(stored ? block.local_hash : 0);
      before = &row;
      same_call = true;
    }
    offsets.push_back(static_cast<std::int64_t>(hashes.size()));
  }
  return nb::make_tuple(to_array(std::move(kinds)), to_array(std::move(tiers)), to_array(std::move(parents)),
                        to_array(std::move(offsets)), to_array(std::move(hashes)), to_array(std::move(locals)));
}

// Rows of events of one cache group that other columns describe, as a live worker's stream has them: every row is the
// first copy or the last one.
DrainedEvents batch_of_columns(Column<std::uint8_t> kinds, Column<std::uint8_t> tiers, Column<std::uint64_t> parents,
                               Column<std::int64_t> offsets, Column<std::uint64_t> hashes,
                               Column<std::uint64_t> locals) {
  const std::size_t events = kinds.size();
  if (tiers.size() != events || parents.size() != events || locals.size() != hashes.size()) {
    throw Error(ErrorKind::InvalidArgument, "events need a kind, a tier and a parent each, blocks two hashes each");
  }
  PrefixIndex::require_sound({view(kinds), view(tiers), view(offsets), view(hashes)});
  DrainedEvents out;
  out.records.reserve(hashes.size());
  for (std::size_t event = 0; event < events; ++event) {
    EventRecord row;
    row.kind = static_cast<EventKind>(view(kinds)[event]);
    row.tier = static_cast<Tier>(view(tiers)[event]);
    std::uint64_t parent = view(parents)[event];
    const bool root = row.kind == EventKind::Stored && parent == 0;
    const auto begin = static_cast<std::size_t>(view(offsets)[event]);
    const auto end = static_cast<std::size_t>(view(offsets)[event + 1]);
    const auto append = [&](const BlockIdentity& block) {
      row.id = out.records.size();
      row.identity = block;
      out.records.push_back(row);
      row.starts = false;
    };
    if (row.kind == kCleared) append({});
    for (std::size_t block = begin; block < end; ++block) {
      const std::uint64_t hash = view(hashes)[block];
      const auto position = root ? static_cast<std::uint32_t>(block - begin) : 0u;
      append({LineageHash::make(hash, parent != 0, parent, position), view(locals)[block], parent});
      if (row.kind == EventKind::Stored) parent = hash;
    }
  }
  return out;
}

// A column by parts: views that live as long as the table, or copies of the rows in the consolidated stream.
List<Array<std::uint64_t>> parts_of(nb::handle_t<EventTable> self, bool raw,
                                    EventTable::Column<std::uint64_t> EventTable::Part::* column) {
  const auto& table = nb::cast<const EventTable&>(self);
  nb::list out;
  for (std::size_t i = 0; i < table.parts().size(); ++i) {
    if (raw || table.all_sole()) {
      const auto& values = table.parts()[i].*column;
      out.append(
          nb::cast(nb::ndarray<nb::numpy, const std::uint64_t, nb::ndim<1>>(values.data(), {values.size()}, self)));
    } else {
      out.append(to_array(table.sole_of(i).*column));
    }
  }
  return out;
}

void append_rows(EventTable& self, const DrainedEvents& rows, std::int64_t time_ns) {
  for (const EventRecord& row : rows.records) {
    if (row.kind == kCleared) throw Error(ErrorKind::InvalidArgument, "rows: a table has no cleared events");
  }
  TimedEvents more;
  more.batch.records = rows.records;
  more.time_ns.resize(rows.records.size(), time_ns);
  self.append(more);
}

void bind_event_table(nb::module_& m) {
  using Handle = nb::handle_t<EventTable>;
  nb::class_<EventTable>(m, "EventTable", "Events of a publisher in a run, one row per block, in columns by parts.")
      .def(nb::init<>())
      .def("append", &append_rows, "rows"_a, "time_ns"_a, "Append rows published at that time.")
      .def("__len__", &EventTable::size)
      .def_prop_ro("digest", &EventTable::digest, "Equal for equal tables; different otherwise, up to collisions.")
      .def(
          "rows",
          [](const EventTable& self) -> TimedRows {
            TimedEvents rows = self.rows();
            return nb::make_tuple(std::move(rows.batch), to_array(std::move(rows.time_ns)));
          },
          "All rows, with the time of each in ns.")
      .def(
          "heads",
          [](const EventTable& self, bool raw) -> ColumnsByName {
            EventTable::Heads heads = self.heads(raw);
            nb::dict out;
            out["kinds"] = to_array(std::move(heads.kinds));
            out["tiers"] = to_array(std::move(heads.tiers));
            out["groups"] = to_array(std::move(heads.groups));
            out["parents"] = to_array(std::move(heads.parents));
            out["offsets"] = to_array(std::move(heads.offsets));
            out["time_ns"] = to_array(std::move(heads.time_ns));
            out["run_offsets"] = to_array(std::move(heads.run_offsets));
            out["run_positions"] = to_array(std::move(heads.run_positions));
            out["run_generations"] = to_array(std::move(heads.run_generations));
            return out;
          },
          "raw"_a, "The events of a stream, as `understudy.events.file` has them, without their hashes.")
      .def(
          "sequence_hashes",
          [](Handle self, bool raw) { return parts_of(self, raw, &EventTable::Part::sequence_hashes); }, "raw"_a,
          "Sequence hashes of every block of those events, by parts.")
      .def(
          "stored_local_hashes",
          [](Handle self, bool raw) { return parts_of(self, raw, &EventTable::Part::local_hashes); }, "raw"_a,
          "The same of blocks that were stored.");
}

}  // namespace

void bind_events(nb::module_& m) {
  bind_event_table(m);
  nb::class_<DrainedEvents> batch(m, "EventBatch", "Events taken from a store, as columns with one row a block.");
  batch.def("__len__", [](const DrainedEvents& self) { return self.records.size(); })
      .def_static("from_columns", &batch_of_columns, "kinds"_a, "tiers"_a, "parents"_a, "offsets"_a,
                  "sequence_hashes"_a, "local_hashes"_a,
                  "Build the rows of `EventColumns`, which are of the consolidated stream. Positions are 0 where the "
                  "columns do not give them.")
      .def("event_columns", &event_columns, "raw"_a, "Events of the first cache group, as `EventColumns` has them.")
      .def_ro("lost", &DrainedEvents::lost, "Events that a bounded ring dropped before these.")
      .def_prop_ro(
          "token_ids", [](const DrainedEvents& self) { return to_array(std::vector<Token>(self.tokens)); },
          "block_size tokens for every stored row, concatenated; empty unless asked for.");
  bind_column<std::uint64_t>(batch, "ids", [](const EventRecord& r) { return r.id; });
  bind_column<std::uint8_t>(
      batch, "kinds", [](const EventRecord& r) { return r.kind; },
      "0 stored, 1 removed, 2 cleared (a row without a block: all blocks of its tier, or of all tiers, are gone), 3 "
      "skipped: tokens of a stored event without a key.");
  bind_column<std::uint8_t>(batch, "tiers", [](const EventRecord& r) { return r.tier; }, "1 to 4; 0: all, cleared.");
  bind_column<std::uint8_t>(batch, "groups", [](const EventRecord& r) { return r.group; }, "Cache group.");
  bind_column<std::uint8_t>(
      batch, "starts", [](const EventRecord& r) { return r.starts; },
      "1 on the first row of what one call to the store registered or removed.");
  bind_column<std::uint8_t>(
      batch, "sole", [](const EventRecord& r) { return r.sole; },
      "1 where the event is the first copy's arrival or the last copy's departure.");
  bind_column<std::uint64_t>(batch, "sequence_hashes", [](const EventRecord& r) { return r.identity.sequence_hash(); });
  bind_column<std::uint64_t>(batch, "local_hashes", [](const EventRecord& r) { return r.identity.local_hash; });
  bind_column<std::uint64_t>(
      batch, "parent_hashes", [](const EventRecord& r) { return r.identity.parent_hash; },
      "0 at a root, or when not known.");
  bind_column<std::uint32_t>(batch, "positions", [](const EventRecord& r) { return r.identity.position(); });
  bind_column<std::uint64_t>(batch, "generations", [](const EventRecord& r) { return r.generation; });
}

}  // namespace understudy
