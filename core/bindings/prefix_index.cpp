// The prefix index in Python: hashes are read from buffers, and nothing here holds the GIL for long.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "bindings.hpp"
#include "column.hpp"
#include "convert.hpp"
#include "events/cleared.hpp"
#include "router/prefix_index.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

using Hashes = IntArray<std::uint64_t>;

std::int64_t time_ns(double ms, const char* name) {
  const double ns = std::round(ms * 1e6);
  if (!(ns >= 0 && ns < 9.2e18)) throw Error(ErrorKind::InvalidArgument, name, " must be a time from 0 on, got ", ms);
  return static_cast<std::int64_t>(ns);
}

WorkerRank who(Int worker, Int dp_rank) {
  return {read_uint(worker, "worker"), static_cast<std::uint32_t>(read_uint(dp_rank, "dp_rank", 0xFFFFFFFFu))};
}

void make_index(PrefixIndex* self, std::optional<double> ttl_ms, Int max_worker_blocks, bool counts_copies) {
  Decay::Limits limits;
  if (ttl_ms) {
    limits.ttl_ns = time_ns(*ttl_ms, "ttl_ms");
    if (limits.ttl_ns == 0) throw Error(ErrorKind::InvalidArgument, "ttl_ms must be above 0; None for no limit");
  }
  if (!max_worker_blocks.is_none()) {
    limits.max_member_blocks = read_uint(max_worker_blocks, "max_worker_blocks");
    if (limits.max_member_blocks == 0) {
      throw Error(ErrorKind::InvalidArgument, "max_worker_blocks must be at least 1; None for no limit");
    }
  }
  new (self) PrefixIndex(limits, counts_copies);
}

Applied store(PrefixIndex& self, Int worker, Ints hashes, Int dp_rank, Tier tier, double now_ms) {
  const Hashes blocks(hashes, "hashes");
  const WorkerRank publisher = who(worker, dp_rank);
  const std::int64_t now_ns = time_ns(now_ms, "now_ms");
  nb::gil_scoped_release release;
  Applied out;
  self.store(self.join(publisher), tier, blocks.span(), now_ns, out);
  return out;
}

Applied remove(PrefixIndex& self, Int worker, Ints hashes, Int dp_rank, Tier tier) {
  const Hashes blocks(hashes, "hashes");
  const WorkerRank publisher = who(worker, dp_rank);
  nb::gil_scoped_release release;
  Applied out;
  if (const auto member = self.member(publisher)) {
    self.remove(*member, tier, blocks.span(), out);
  } else {
    out.unknown.assign(blocks.span().begin(), blocks.span().end());
  }
  return out;
}

Applied apply_batch(PrefixIndex& self, Int worker, const DrainedEvents& batch, Int dp_rank, bool raw, double now_ms) {
  const WorkerRank publisher = who(worker, dp_rank);
  const std::int64_t now_ns = time_ns(now_ms, "now_ms");
  nb::gil_scoped_release release;
  Applied out;
  const PrefixIndex::Member member = self.join(publisher);
  for (std::span<const EventRecord> rest = batch.records; !rest.empty();) {
    const auto cleared = std::ranges::find(rest, kCleared, &EventRecord::kind);
    const auto count = static_cast<std::size_t>(cleared - rest.begin());
    self.apply(member, rest.first(count), !raw, now_ns, out);
    if (cleared == rest.end()) break;
    self.clear(member, cleared->tier == Tier{} ? std::nullopt : std::optional(cleared->tier));
    rest = rest.subspan(count + 1);
  }
  return out;
}

Applied apply_columns(PrefixIndex& self, Int worker, Column<std::uint8_t> kinds, Column<std::uint8_t> tiers,
                      Column<std::int64_t> offsets, Column<std::uint64_t> hashes, Int dp_rank, double now_ms) {
  const WorkerRank publisher = who(worker, dp_rank);
  const std::int64_t now_ns = time_ns(now_ms, "now_ms");
  nb::gil_scoped_release release;
  Applied out;
  self.apply(self.join(publisher), {view(kinds), view(tiers), view(offsets), view(hashes)}, now_ns, out);
  return out;
}

Arrays<std::uint64_t, std::uint32_t, std::uint8_t, std::uint64_t> dump(const PrefixIndex& self) {
  std::vector<std::uint64_t> workers;
  std::vector<std::uint32_t> ranks;
  std::vector<std::uint8_t> tiers;
  std::vector<std::uint64_t> hashes;
  {
    nb::gil_scoped_release release;
    for (const PrefixIndex::Row& row : self.dump()) {
      workers.push_back(row.id.worker);
      ranks.push_back(row.id.rank);
      tiers.push_back(row.tier);
      hashes.push_back(row.hash);
    }
  }
  return nb::make_tuple(to_array(std::move(workers)), to_array(std::move(ranks)), to_array(std::move(tiers)),
                        to_array(std::move(hashes)));
}

Matches find(const PrefixIndex& self, Ints hashes, bool early_exit) {
  const Hashes blocks(hashes, "hashes");
  nb::gil_scoped_release release;
  return self.find(blocks.span(), early_exit);
}

}  // namespace

void bind_prefix_index(nb::module_& m) {
  nb::class_<Applied>(m, "Applied", "Counts of applied events by outcome.")
      .def_ro("stored", &Applied::stored, "Blocks that the worker had not had on the tier.")
      .def_ro("removed", &Applied::removed, "Blocks removed from the worker's tier.")
      .def_prop_ro(
          "unknown", [](const Applied& self) { return to_array(std::vector<std::uint64_t>(self.unknown)); },
          "Hashes in Removed events that were not present.")
      .def("__repr__", [](const Applied& self) {
        return nb::str("Applied(stored={}, removed={}, repeated={}, unknown={})")
            .format(self.stored, self.removed, self.repeated, self.unknown.size());
      });

  nb::class_<Matches>(m, "Matches", "Leading blocks of a prompt that each worker holds.")
      .def_prop_ro(
          "workers",
          [](const Matches& self) {
            List<Tuple<Int, Int>> out;
            for (const WorkerRank& each : self.members) out.append(nb::make_tuple(each.worker, each.rank));
            return out;
          },
          "(worker, DP rank) of each row.")
      .def_prop_ro(
          "blocks",
          [](const Matches& self) {
            auto owned = std::make_unique<std::vector<std::uint32_t>>(self.blocks);
            std::uint32_t* const data = owned->data();
            nb::capsule owner(owned.get(),
                              [](void* p) noexcept { delete static_cast<std::vector<std::uint32_t>*>(p); });
            (void)owned.release();
            return Array<std::uint32_t>(nb::cast(nb::ndarray<nb::numpy, std::uint32_t, nb::ndim<2>>(
                data, {self.members.size(), PrefixIndex::kTiers}, owner)));
          },
          "Blocks held, each counted once: a row per worker, a column per tier (G1 to G4).")
      .def(
          "of",
          [](const Matches& self, Int worker, Int dp_rank) {
            const WorkerRank wanted = who(worker, dp_rank);
            std::array<std::uint32_t, PrefixIndex::kTiers> out{};
            for (std::size_t i = 0; i < self.members.size(); ++i) {
              if (self.members[i] == wanted)
                std::copy_n(&self.blocks[i * PrefixIndex::kTiers], out.size(), out.begin());
            }
            return Tuple<Int, Int, Int, Int>(nb::make_tuple(out[0], out[1], out[2], out[3]));
          },
          "worker"_a, "dp_rank"_a = 0, "Blocks of one worker on G1 to G4; zeros for an unknown worker.");

  nb::class_<PrefixIndex>(m, "PrefixIndex",
                          "Which worker holds which blocks on which tier, built from KV events alone.")
      .def("__init__", &make_index, nb::kw_only(), "ttl_ms"_a = nb::none(), "max_worker_blocks"_a = nb::none(),
           "counts_copies"_a = false)
      .def("store", &store, "worker"_a, "hashes"_a, nb::kw_only(), "dp_rank"_a = 0, "tier"_a = Tier::G1,
           "now_ms"_a = 0.0, "Record that the worker holds these blocks (sequence hashes) on a tier.")
      .def("remove", &remove, "worker"_a, "hashes"_a, nb::kw_only(), "dp_rank"_a = 0, "tier"_a = Tier::G1,
           "Remove blocks of a worker from a tier; unknown ones are counted.")
      .def("apply_batch", &apply_batch, "worker"_a, "batch"_a, nb::kw_only(), "dp_rank"_a = 0, "raw"_a = false,
           "now_ms"_a = 0.0, "Apply rows of a store's event ring.")
      .def("apply_columns", &apply_columns, "worker"_a, "kinds"_a, "tiers"_a, "offsets"_a, "sequence_hashes"_a,
           nb::kw_only(), "dp_rank"_a = 0, "now_ms"_a = 0.0, "Events as columns.")
      .def(
          "clear",
          [](PrefixIndex& self, Int worker, Int dp_rank, std::optional<Tier> tier) {
            const WorkerRank publisher = who(worker, dp_rank);
            nb::gil_scoped_release release;
            if (const auto member = self.member(publisher)) self.clear(*member, tier);
          },
          "worker"_a, nb::kw_only(), "dp_rank"_a = 0, "tier"_a = nb::none(),
          "Remove all blocks of a worker, on one tier or on all. The worker stays known.")
      .def(
          "remove_worker",
          [](PrefixIndex& self, Int worker, std::optional<std::uint32_t> dp_rank) {
            const std::uint64_t gone = read_uint(worker, "worker");
            nb::gil_scoped_release release;
            for (const WorkerRank& each : self.members()) {
              if (each.worker == gone && (!dp_rank || *dp_rank == each.rank)) self.leave(each);
            }
          },
          "worker"_a, "dp_rank"_a = nb::none(), "Remove a worker and its blocks, with all its ranks or one.")
      .def(
          "expire",
          [](PrefixIndex& self, double now_ms) {
            const std::int64_t now_ns = time_ns(now_ms, "now_ms");
            nb::gil_scoped_release release;
            return self.expire(now_ns);
          },
          "now_ms"_a, "Drop blocks older than `ttl_ms`; returns how many.")
      .def("find", &find, "hashes"_a, nb::kw_only(), "early_exit"_a = false,
           "How many leading blocks of a prompt each worker holds, by tier.")
      .def(
          "holds",
          [](const PrefixIndex& self, Int worker, Int block_hash, Int dp_rank, Tier tier) {
            const auto member = self.member(who(worker, dp_rank));
            return member && self.holds(*member, tier, read_uint(block_hash, "block_hash"));
          },
          "worker"_a, "block_hash"_a, nb::kw_only(), "dp_rank"_a = 0, "tier"_a = Tier::G1)
      .def(
          "num_blocks",
          [](const PrefixIndex& self, Int worker, Int dp_rank, Tier tier) -> std::uint64_t {
            const auto member = self.member(who(worker, dp_rank));
            return member ? self.blocks(*member, tier) : 0;
          },
          "worker"_a, nb::kw_only(), "dp_rank"_a = 0, "tier"_a = Tier::G1, "Blocks that a worker holds on a tier.")
      .def("__len__", &PrefixIndex::num_blocks)
      .def_prop_ro("workers",
                   [](const PrefixIndex& self) {
                     std::vector<std::pair<std::uint64_t, std::uint32_t>> out;
                     for (const WorkerRank& each : self.members()) out.emplace_back(each.worker, each.rank);
                     return out;
                   })
      .def_prop_ro("memory_bytes", &PrefixIndex::bytes, "Memory of the index's tables.")
      .def("dump_columns", &dump, "(workers, dp_ranks, tiers, hashes), a row for each block that a worker holds.")
      .def(
          "snapshot",
          [](const PrefixIndex& self) {
            std::vector<std::uint8_t> bytes;
            {
              nb::gil_scoped_release release;
              bytes = self.snapshot();
            }
            return nb::bytes(bytes.data(), bytes.size());
          },
          "Serialize the index to bytes, with a checksum.")
      .def(
          "restore",
          [](PrefixIndex& self, nb::bytes snapshot, double now_ms) {
            const std::int64_t now_ns = time_ns(now_ms, "now_ms");
            const std::span bytes(static_cast<const std::uint8_t*>(snapshot.data()), snapshot.size());
            nb::gil_scoped_release release;
            self.restore(bytes, now_ns);
          },
          "snapshot"_a, nb::kw_only(), "now_ms"_a = 0.0,
          "Restore a snapshot; ages restart. InvalidArgument, and no change, when it is damaged.")
      .def("check", &PrefixIndex::check, nb::call_guard<nb::gil_scoped_release>(),
           "Raise InvariantViolated when the index contradicts itself.");
}

}  // namespace understudy
