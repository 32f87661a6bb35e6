// Cache curves in Python: a workload in, hit tokens by cache size out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <functional>
#include <limits>
#include <optional>

#include "bindings.hpp"
#include "convert.hpp"
#include "curves/block_visits.hpp"
#include "curves/fixed_size.hpp"
#include "curves/lru_curve.hpp"
#include "curves/optimal.hpp"
#include "curves/shared_below.hpp"
#include "curves/unlimited.hpp"
#include "curves/working_sets.hpp"
#include "policy_config.hpp"
#include "store/block_store.hpp"
#include "workload.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

using Rows = Column<std::int64_t>;
using Sizes = PyArg<"numpy.typing.ArrayLike">;
using Counts = Array<std::int64_t>;

std::span<const std::int64_t> span_of(const Rows& rows) { return {rows.data(), rows.size()}; }

void make_visits(BlockVisits* self, PyArg<"object"> workload, Int block_size, bool prompts_only, bool computes_last) {
  ColumnReader reader(workload);
  const WorkloadColumns columns = read_workload(reader, workload);
  const auto size = static_cast<std::uint32_t>(read_uint(block_size, "block_size", BlockStore::kMaxBlockSize));
  if (size == 0) throw Error(ErrorKind::InvalidArgument, "block_size must be at least 1");
  nb::gil_scoped_release release;
  const VisitRule rule = prompts_only ? VisitRule::Prompts : computes_last ? VisitRule::Ahead : VisitRule::Engine;
  new (self) BlockVisits(columns, size, rule);
}

// Calls `hits(size)` for each cache size, without the GIL.
template <typename Result, typename Hits>
std::vector<Result> by_size(Sizes sizes, Hits hits) {
  const IntArray<std::uint32_t> blocks(sizes, "sizes");
  nb::gil_scoped_release release;
  std::vector<Result> out;
  for (const std::uint32_t size : blocks.span()) out.push_back(hits(size));
  return out;
}

Tuple<Counts, Counts> split(const std::vector<PinnedHits>& hits) {
  std::vector<std::int64_t> tokens;
  std::vector<std::int64_t> unplaced;
  for (const PinnedHits& each : hits) {
    tokens.push_back(each.hit_tokens);
    unplaced.push_back(each.unplaced_blocks);
  }
  return nb::make_tuple(to_array(std::move(tokens)), to_array(std::move(unplaced)));
}

std::size_t read_count(nb::handle value, const char* name) {
  return static_cast<std::size_t>(read_uint(value, name, std::numeric_limits<std::int64_t>::max()));
}

Tuple<Counts, PyType<"int">> lru(const BlockVisits& self, const Rows& rows, Int warm_up) {
  self.check_rows(span_of(rows));
  const std::size_t skipped = read_count(warm_up, "warm_up");
  LruCurve curve;
  {
    nb::gil_scoped_release release;
    curve = lru_curve(self, span_of(rows), skipped);
  }
  return nb::make_tuple(to_array(std::move(curve.hit_tokens)), curve.distinct_blocks);
}

Counts fifo(const BlockVisits& self, const Rows& rows, Sizes sizes, Int warm_up) {
  self.check_rows(span_of(rows));
  const std::size_t skipped = read_count(warm_up, "warm_up");
  return to_array(by_size<std::int64_t>(
      sizes, [&](std::uint32_t size) { return fifo_hit_tokens(self, span_of(rows), skipped, size); }));
}

Counts optimal(const BlockVisits& self, const Rows& rows, Sizes sizes, Int warm_up) {
  self.check_rows(span_of(rows));
  const std::size_t skipped = read_count(warm_up, "warm_up");
  std::vector<std::uint32_t> next;
  {
    nb::gil_scoped_release release;
    next = next_uses(self, span_of(rows));
  }
  return to_array(by_size<std::int64_t>(
      sizes, [&](std::uint32_t size) { return optimal_hit_tokens(self, span_of(rows), next, skipped, size); }));
}

Tuple<Counts, Counts> pinned(const BlockVisits& self, PyArg<"str"> policy, const Rows& order, Sizes sizes,
                             Int warm_up) {
  const std::size_t skipped = read_count(warm_up, "warm_up");
  if (nb::isinstance<nb::str>(policy) && nb::cast<std::string>(policy) == "optimal") {
    return split(by_size<PinnedHits>(
        sizes, [&](std::uint32_t size) { return pinned_optimal_hits(self, span_of(order), skipped, size); }));
  }
  const PolicyKind kind = read_policy(policy, nb::none()).kind;
  if (kind == PolicyKind::Advised) throw Error(ErrorKind::ConfigError, "policy must be a name, got an object");
  return split(by_size<PinnedHits>(
      sizes, [&](std::uint32_t size) { return policy_hits(self, span_of(order), skipped, size, kind); }));
}

Tuple<Counts, Counts, Counts, Counts, Counts, Counts> runs(const BlockVisits& self, const Rows& rows, Int size) {
  self.check_rows(span_of(rows));
  const std::size_t blocks = read_count(size, "size");
  PrefixRuns found;
  {
    nb::gil_scoped_release release;
    found = prefix_runs(self, span_of(rows), blocks);
  }
  return nb::make_tuple(to_array(std::move(found.row)), to_array(std::move(found.position)),
                        to_array(std::move(found.blocks)), to_array(std::move(found.requests)),
                        to_array(std::move(found.recomputed)), to_array(std::move(found.below)));
}

Tuple<Counts, Counts> sessions(const BlockVisits& self, const Column<std::int32_t>& session) {
  SessionBlocks found;
  {
    nb::gil_scoped_release release;
    found = session_blocks(self, {session.data(), session.size()});
  }
  return nb::make_tuple(to_array(std::move(found.distinct)), to_array(std::move(found.own)));
}

using Caches = Column<std::int32_t>;

Counts unlimited(const BlockVisits& self, const Rows& rows, const std::optional<Caches>& caches, bool loads_last) {
  self.check_rows(span_of(rows));
  std::span<const std::int32_t> own;
  if (caches) own = {caches->data(), caches->size()};
  std::vector<std::int64_t> hits;
  {
    nb::gil_scoped_release release;
    hits = unlimited_hits(self, span_of(rows), own, loads_last);
  }
  return to_array(std::move(hits));
}

std::int64_t shared_below(const BlockVisits& self, const Rows& rows, const Caches& caches, Int own, Int below,
                          bool copies, Int warm_up) {
  self.check_rows(span_of(rows));
  const std::size_t skipped = read_count(warm_up, "warm_up");
  const std::size_t above = read_count(own, "own");
  const std::size_t size = read_count(below, "below");
  nb::gil_scoped_release release;
  return shared_below_hits(self, span_of(rows), {caches.data(), caches.size()}, skipped, above, size,
                           copies ? BelowRule::Copies : BelowRule::Moves);
}

std::int64_t open_blocks(const BlockVisits& self, const Rows& order, const Column<std::int32_t>& session) {
  nb::gil_scoped_release release;
  return most_open_blocks(self, span_of(order), {session.data(), session.size()});
}

}  // namespace

void bind_curves(nb::module_& m) {
  nb::class_<BlockVisits>(m, "BlockVisits", "The blocks that each request of a workload reads and writes, numbered.")
      .def("__init__", &make_visits, "workload"_a, "block_size"_a, "prompts_only"_a = false, "computes_last"_a = false,
           "Number the blocks: whole blocks as vLLM holds them, or prompts with their partly filled last block.\n\n"
           "`computes_last`: a request that ends by itself has computed its last token too.")
      .def_prop_ro("visits", &BlockVisits::visits, "Block visits of all rows.")
      .def_prop_ro("distinct", &BlockVisits::distinct, "Distinct blocks.")
      .def("__len__", &BlockVisits::rows, "Rows of the workload.")
      .def("lru", &lru, "rows"_a, "warm_up"_a = 0,
           "Return (hit tokens by LRU cache size in blocks, blocks of an unlimited cache), in one pass.")
      .def("fifo", &fifo, "rows"_a, "sizes"_a, "warm_up"_a = 0, "Return the hit tokens of FIFO caches.")
      .def("optimal", &optimal, "rows"_a, "sizes"_a, "warm_up"_a = 0,
           "Return the hit tokens of caches that know the future and need not store a block: a bound.")
      .def("pinned", &pinned, "policy"_a, "order"_a, "sizes"_a, "warm_up"_a = 0,
           "Return (hit tokens, blocks that found no place) of caches that keep the blocks of running requests.\n\n"
           "`order` has row r where it begins and -1 - r where it ends; `policy` is a built-in name, or optimal.")
      .def("unlimited", &unlimited, "rows"_a, "caches"_a = nb::none(), "loads_last"_a = false,
           "Return the hit tokens of each row in unlimited caches: one, or those that `caches` numbers.\n\n"
           "`loads_last`: a request may read a last block that its prompt fills, and computes one token of it.")
      .def("shared_below", &shared_below, "rows"_a, "caches"_a, "own"_a, "below"_a, "copies"_a, "warm_up"_a = 0,
           "Return the hit tokens of LRU caches of `own` blocks above one of `below` blocks that they share.")
      .def("prefix_runs", &runs, "rows"_a, "size"_a,
           "Return (first row, position, blocks, requests, recomputed blocks, blocks below) of shared prefixes.")
      .def("session_blocks", &sessions, "session"_a, "Return (distinct blocks, blocks of no other) of each session.")
      .def("open_blocks", &open_blocks, "order"_a, "session"_a,
           "Return the most distinct blocks that sessions between their first begin and last end have visited.");
}

}  // namespace understudy
