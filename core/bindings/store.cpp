// The block store and its managers in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "convert.hpp"
#include "guards.hpp"
#include "policy_config.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

using Duplicates = PyText<"understudy.core_types.DuplicatePolicyName">;
using PolicyArg = PyArg<"understudy.core_types.PolicyName | understudy.core_types.Policy">;

DuplicatePolicy read_duplicates(const std::string& name) {
  if (name == "allow") return DuplicatePolicy::Allow;
  if (name == "reject") return DuplicatePolicy::Reject;
  if (name == "keep") return DuplicatePolicy::Keep;
  throw Error(ErrorKind::ConfigError, "duplicates must be allow, reject or keep, got '", name, "'");
}

Duplicates duplicates_name(DuplicatePolicy policy) {
  return policy == DuplicatePolicy::Allow ? "allow" : policy == DuplicatePolicy::Reject ? "reject" : "keep";
}

PoolConfig make_pool(Int num_blocks, Tier tier, PolicyArg policy, IntSequence thresholds, const Duplicates& duplicates,
                     bool reset_on_release) {
  return {tier, read_uint(num_blocks, "num_blocks"), read_policy(policy, thresholds), read_duplicates(duplicates),
          reset_on_release};
}

std::shared_ptr<BlockStore> make_store(std::vector<PoolConfig> pools, Int block_size, Int dp_rank, bool events,
                                       Int event_capacity, bool event_token_ids, Int sketch_capacity) {
  StoreConfig config;
  config.block_size = read_uint(block_size, "block_size");
  config.dp_rank = static_cast<std::uint32_t>(read_uint(dp_rank, "dp_rank", 0xFFFFFFFFu));
  config.pools = std::move(pools);
  config.events.enabled = events;
  if (!events && (!event_capacity.is_none() || event_token_ids)) {
    throw Error(ErrorKind::ConfigError, event_token_ids ? "event_token_ids" : "event_capacity",
                " has no effect without events=True");
  }
  config.events.token_ids = event_token_ids;
  if (!event_capacity.is_none()) {
    config.events.capacity = read_uint(event_capacity, "event_capacity");
    if (config.events.capacity == 0) throw Error(ErrorKind::ConfigError, "event_capacity must be at least 1, or None");
  }
  if (!sketch_capacity.is_none()) {
    config.sketch_capacity = read_uint(sketch_capacity, "sketch_capacity", std::uint64_t{1} << 32);
    if (config.sketch_capacity == 0) throw Error(ErrorKind::ConfigError, "sketch_capacity must be at least 1");
  }
  std::uint64_t blocks = 0;
  for (const PoolConfig& pool : config.pools) blocks += pool.num_blocks;
  constexpr std::uint64_t kMostPerBlock = 64;
  if (config.sketch_capacity && *config.sketch_capacity > kMostPerBlock * std::max<std::uint64_t>(blocks, 1 << 16)) {
    throw Error(ErrorKind::ConfigError, "sketch_capacity ", *config.sketch_capacity, " is absurd for ", blocks,
                " blocks; a small multiple of the blocks will do");
  }
  return within_memory(text_of("num_blocks: ", blocks, " blocks"), static_cast<double>(blocks) * kSlotBytes,
                       [&] { return std::make_shared<BlockStore>(config); });
}

void make_manager(Manager* self, Int num_blocks, Int block_size, PolicyArg policy, IntSequence thresholds,
                  const Duplicates& duplicates, bool reset_on_release, Tier tier, Int dp_rank, bool events,
                  Int event_capacity, bool event_token_ids, Int sketch_capacity) {
  const PoolConfig pool = make_pool(num_blocks, tier, policy, thresholds, duplicates, reset_on_release);
  new (self)
      Manager{make_store({pool}, block_size, dp_rank, events, event_capacity, event_token_ids, sketch_capacity), 0};
}

// ── Allocate and find ──

MutableBlocks allocate(const Manager& self, Int count) {
  const std::uint64_t wanted = read_uint(count, "count");
  // Before the ids are: an absurd count is a shortage, not an out-of-memory.
  if (wanted > self.store->num_blocks(self.pool)) {
    throw Error(ErrorKind::CapacityExhausted, "asked for ", wanted, " blocks of a pool of ",
                self.store->num_blocks(self.pool));
  }
  std::vector<SlotId> ids(wanted);
  std::vector<BlockIdentity> evicted;
  std::vector<Token> tokens;
  without_gil(self, ids.size(), [&] { self.store->allocate(self.pool, ids, &evicted, &tokens); });
  return {self, std::move(ids), evicted.empty() ? Identities() : Identities(std::move(evicted)), std::move(tokens)};
}

RegisteredBlocks match_prefix(const Manager& self, IdentitiesArg given) {
  const Identities& identities = read_identities(given);
  require_block_size(self, identities);
  std::vector<SlotId> ids(identities.size());
  const std::size_t hits =
      without_gil(self, ids.size(), [&] { return self.store->match_prefix(self.pool, identities.span(), ids.data()); });
  ids.resize(hits);
  return {self, std::move(ids), hits == identities.size() ? identities : identities.slice(0, hits)};
}

struct Hits {
  std::vector<SlotId> ids;
  std::vector<BlockIdentity> blocks;
  std::vector<std::uint8_t> mask;
};

Hits gather(const Identities& identities, const std::vector<SlotId>& found) {
  Hits out;
  out.mask.resize(found.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i] == kNoSlot) continue;
    out.mask[i] = 1;
    out.ids.push_back(found[i]);
    out.blocks.push_back(identities[i]);
  }
  return out;
}

nb::ndarray<nb::numpy, bool, nb::ndim<1>> to_mask(std::vector<std::uint8_t> mask) {
  auto owned = std::make_unique<std::vector<std::uint8_t>>(std::move(mask));
  std::vector<std::uint8_t>& kept = *owned;
  nb::capsule owner(owned.get(), [](void* p) noexcept { delete static_cast<std::vector<std::uint8_t>*>(p); });
  (void)owned.release();
  return {reinterpret_cast<bool*>(kept.data()), {kept.size()}, owner};
}

Tuple<RegisteredBlocks, Array<bool>> match_scattered(const Manager& self, IdentitiesArg given) {
  const Identities& identities = read_identities(given);
  require_block_size(self, identities);
  std::vector<SlotId> found(identities.size());
  without_gil(self, found.size(), [&] { self.store->match_scattered(self.pool, identities.span(), found.data()); });
  Hits hits = gather(identities, found);
  RegisteredBlocks guard(self, std::move(hits.ids), Identities(std::move(hits.blocks)));
  return nb::make_tuple(nb::cast(std::move(guard)), to_mask(std::move(hits.mask)));
}

RegisteredBlocks scan(const Manager& self, IdentitiesArg given, bool touch) {
  const Identities& identities = read_identities(given);
  require_block_size(self, identities);
  std::vector<SlotId> found(identities.size());
  without_gil(self, found.size(), [&] { self.store->scan(self.pool, identities.span(), found.data(), touch); });
  Hits hits = gather(identities, found);
  return {self, std::move(hits.ids), Identities(std::move(hits.blocks))};
}

nb::ndarray<nb::numpy, bool, nb::ndim<1>> has_blocks(const Manager& self, IdentitiesArg given) {
  const Identities& identities = read_identities(given);
  require_block_size(self, identities);
  std::vector<std::uint8_t> mask(identities.size());
  without_gil(self, mask.size(),
              [&] { self.store->has_blocks(self.pool, identities.span(), reinterpret_cast<bool*>(mask.data())); });
  return to_mask(std::move(mask));
}

// ── Watch ──

constexpr std::pair<const char*, std::uint64_t PoolMetrics::*> kMetrics[] = {
    {"allocations", &PoolMetrics::allocations},
    {"allocations_from_reset", &PoolMetrics::allocations_from_reset},
    {"evictions", &PoolMetrics::evictions},
    {"stagings", &PoolMetrics::stagings},
    {"registrations", &PoolMetrics::registrations},
    {"duplicate_blocks", &PoolMetrics::duplicate_blocks},
    {"registration_dedup", &PoolMetrics::registration_dedup},
    {"match_hashes_requested", &PoolMetrics::match_hashes_requested},
    {"match_blocks_returned", &PoolMetrics::match_blocks_returned},
    {"scan_hashes_requested", &PoolMetrics::scan_hashes_requested},
    {"scan_blocks_returned", &PoolMetrics::scan_blocks_returned},
    {"leaked_guards", &PoolMetrics::leaked_guards},
    {"total_blocks", &PoolMetrics::total_blocks},
    {"reset_blocks", &PoolMetrics::reset_blocks},
    {"mutable_blocks", &PoolMetrics::mutable_blocks},
    {"staged_blocks", &PoolMetrics::staged_blocks},
    {"active_blocks", &PoolMetrics::active_blocks},
    {"inactive_blocks", &PoolMetrics::inactive_blocks},
    {"active_references", &PoolMetrics::active_references},
};

nb::typed<nb::dict, nb::str, nb::int_> metrics_dict(const PoolMetrics& self) {
  nb::dict out;
  for (const auto& [name, field] : kMetrics) out[name] = self.*field;
  return out;
}

std::size_t read_limit(Int limit) {
  return limit.is_none() ? ~std::size_t{0} : static_cast<std::size_t>(read_uint(limit, "limit"));
}

Array<std::int32_t> eviction_order(const Manager& self, Int limit) {
  const std::vector<SlotId> order = self.store->eviction_order(self.pool, read_limit(limit));
  return to_array(std::vector<std::int32_t>(order.begin(), order.end()));
}

void bind_store_class(nb::module_& m) {
  nb::class_<PoolConfig>(m, "PoolConfig", "One tier of a store.")
      .def(
          "__init__",
          [](PoolConfig* self, Int num_blocks, Tier tier, PolicyArg policy, IntSequence thresholds,
             const Duplicates& duplicates, bool reset_on_release) {
            new (self) PoolConfig(make_pool(num_blocks, tier, policy, thresholds, duplicates, reset_on_release));
          },
          "num_blocks"_a, nb::kw_only(), "tier"_a = Tier::G1, "policy"_a = "lineage",
          "thresholds"_a.none() = nb::none(), "duplicates"_a = "allow", "reset_on_release"_a = false);

  nb::class_<BlockStore>(m, "BlockStore", "All blocks of one worker, on all its tiers, behind one lock.")
      .def(nb::new_([](std::vector<PoolConfig> pools, Int block_size, Int dp_rank, bool events, Int event_capacity,
                       bool event_token_ids, Int sketch_capacity) {
             return make_store(std::move(pools), block_size, dp_rank, events, event_capacity, event_token_ids,
                               sketch_capacity);
           }),
           "pools"_a, nb::kw_only(), "block_size"_a = 16, "dp_rank"_a = 0, "events"_a = false,
           "event_capacity"_a.none() = nb::none(), "event_token_ids"_a = false, "sketch_capacity"_a.none() = nb::none())
      .def(
          "manager", [](std::shared_ptr<BlockStore> self, Tier tier) { return Manager{self, self->pool_of(tier)}; },
          "tier"_a = Tier::G1, "The manager of one tier. ConfigError when the store has none.")
      .def_prop_ro("block_size", &BlockStore::block_size)
      .def_prop_ro("dp_rank", &BlockStore::dp_rank)
      .def(
          "drain_events",
          [](BlockStore& self, Int limit) {
            const std::size_t most = read_limit(limit);
            nb::gil_scoped_release release;
            return self.drain_events(most);
          },
          "limit"_a.none() = nb::none(), "Take up to `limit` events (all by default), oldest first.")
      .def_prop_ro("memory_bytes", &BlockStore::memory_bytes, "Bytes of slots, index, policies and sketch.")
      .def_prop_ro("operations", &BlockStore::operations, "Index probes and policy steps so far.")
      .def("dump", &BlockStore::dump, "Every observable bit of state, as text.")
      .def("check", &BlockStore::check, "Raise InvariantViolated if the state is inconsistent. O(blocks).");
}

void bind_metrics(nb::module_& m) {
  nb::class_<PoolMetrics> metrics(m, "PoolMetrics", "Exact counters and gauges of one pool, read at one instant.");
  for (const auto& [name, field] : kMetrics) {
    metrics.def_prop_ro(name, [field = field](const PoolMetrics& self) { return self.*field; });
  }
  metrics.def("as_dict", &metrics_dict, "Return all of them by name.");
  metrics.def("__repr__",
              [](const PoolMetrics& self) { return nb::str("PoolMetrics({})").format(metrics_dict(self)); });
}

// ── Garbage collection ──

// The advisors whose only owner is this manager: references with other owners are not reported.
template <typename Visit>
int each_own_advisor(PyObject* self, Visit visit) {
  if (!nb::inst_ready(self)) return 0;
  const Manager& manager = *nb::inst_ptr<Manager>(self);
  if (manager.store.use_count() != 1) return 0;
  for (std::size_t pool = 0; pool < manager.store->num_pools(); ++pool) {
    const std::shared_ptr<PolicyAdvisor>& advisor = manager.store->advisor(pool);
    if (advisor.use_count() != 1) continue;
    if (const int stop = visit(*advisor); stop != 0) return stop;
  }
  return 0;
}

int traverse_manager(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return each_own_advisor(self, [&](PolicyAdvisor& advisor) -> int {
    Py_VISIT(policy_object(advisor).ptr());
    return 0;
  });
}

int clear_manager(PyObject* self) {
  return each_own_advisor(self, [](PolicyAdvisor& advisor) {
    forget_policy(advisor);
    return 0;
  });
}

void bind_manager(nb::module_& m) {
  static PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_manager)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear_manager)},
                                {0, nullptr}};
  nb::class_<Manager>(
      m, "BlockManager", nb::type_slots(slots),
      "The blocks of one tier: allocate, register, match, release.\n\n"
      "`num_blocks` blocks of `block_size` tokens. `policy` is the eviction order: a name, or an "
      "EvictionPolicy; `thresholds` are the uses that move a block up in multi_lru. `duplicates`: allow "
      "copies of a block, or reject them. `reset_on_release` empties blocks without references instead "
      "of caching them. `tier` and `dp_rank` are named in events; `events` keeps them, at most "
      "`event_capacity`, with their token ids under `event_token_ids`. `sketch_capacity` counts recent "
      "uses of so many hashes, for `frequency`.")
      .def("__init__", &make_manager, "num_blocks"_a, nb::kw_only(), "block_size"_a = 16, "policy"_a = "lineage",
           "thresholds"_a.none() = nb::none(), "duplicates"_a = "allow", "reset_on_release"_a = false,
           "tier"_a = Tier::G1, "dp_rank"_a = 0, "events"_a = false, "event_capacity"_a.none() = nb::none(),
           "event_token_ids"_a = false, "sketch_capacity"_a.none() = nb::none())
      .def("__repr__",
           [](const Manager& self) {
             return nb::str("<BlockManager {}: {} blocks of {} tokens, {} available>")
                 .format(nb::cast(self.store->tier(self.pool)).attr("name"), self.store->num_blocks(self.pool),
                         self.store->block_size(), self.store->available(self.pool));
           })
      .def("allocate", &allocate, "count"_a.none(), nb::sig("def allocate(self, count: int) -> MutableBlocks"),
           "`count` mutable blocks, all or none; CapacityExhausted when fewer are available.")
      .def("match_prefix", &match_prefix, "identities"_a.none(),
           nb::sig("def match_prefix(self, identities: Identities) -> RegisteredBlocks"),
           "References to the longest run of leading hits.")
      .def("match_scattered", &match_scattered, "identities"_a.none(),
           nb::sig("def match_scattered(self, identities: Identities) -> tuple[RegisteredBlocks, "
                   "numpy.ndarray[dtype=bool]]"),
           "(references to every hit, mask of the hits). A repeated hash is referenced once for each occurrence.")
      .def("scan", &scan, "identities"_a.none(), nb::kw_only(), "touch"_a = true,
           nb::sig("def scan(self, identities: Identities, *, touch: bool = True) -> RegisteredBlocks"),
           "References to the distinct blocks among `identities` that are resident.")
      .def(
          "prefix_length",
          [](const Manager& self, IdentitiesArg given) {
            const Identities& identities = read_identities(given);
            require_block_size(self, identities);
            return without_gil(self, identities.size(),
                               [&] { return self.store->prefix_length(self.pool, identities.span()); });
          },
          "identities"_a.none(), nb::sig("def prefix_length(self, identities: Identities) -> int"),
          "Number of leading resident blocks. Changes nothing.")
      .def("has_blocks", &has_blocks, "identities"_a.none(),
           nb::sig("def has_blocks(self, identities: Identities) -> numpy.ndarray[dtype=bool]"),
           "Whether each block is resident. Changes nothing.")
      .def(
          "touch",
          [](const Manager& self, IdentitiesArg given) {
            const Identities& identities = read_identities(given);
            require_block_size(self, identities);
            without_gil(self, identities.size(), [&] { self.store->touch(self.pool, identities.span()); });
          },
          "identities"_a.none(), nb::sig("def touch(self, identities: Identities) -> None"),
          "Count a use of the resident blocks, without referencing them.")
      .def(
          "clear_inactive",
          [](const Manager& self) {
            nb::gil_scoped_release release;
            return self.store->clear_inactive(self.pool);
          },
          "Remove every unreferenced cached block; returns how many.")
      .def_prop_ro(
          "available", [](const Manager& self) { return self.store->available(self.pool); },
          "Blocks that an allocation can get: empty ones and cached ones.")
      .def_prop_ro(
          "num_blocks", [](const Manager& self) { return self.store->num_blocks(self.pool); }, "Blocks of the pool.")
      .def_prop_ro(
          "block_size", [](const Manager& self) { return self.store->block_size(); }, "Tokens per block.")
      .def_prop_ro(
          "tier", [](const Manager& self) { return self.store->tier(self.pool); }, "Tier of the blocks.")
      .def_prop_ro(
          "duplicates", [](const Manager& self) { return duplicates_name(self.store->duplicates(self.pool)); },
          "Whether copies of a block are allowed or rejected.")
      .def_prop_ro(
          "store", [](const Manager& self) { return self.store; }, "Store of all tiers of this worker.")
      .def(
          "metrics", [](const Manager& self) { return self.store->metrics(self.pool); },
          "All counters and gauges at one instant.")
      .def("eviction_order", &eviction_order, "limit"_a.none() = nb::none(),
           "Ids in the order in which the policy would hand them out. WrongState for a policy written in Python.")
      .def(
          "frequency",
          [](const Manager& self, Int plh) { return self.store->frequency(read_lineage(plh, "lineage_hash")); },
          "lineage_hash"_a, "Estimated recent uses of a hash, 0..15; 0 without a sketch.");
}

}  // namespace

void bind_store(nb::module_& m) {
  nb::enum_<Tier>(m, "Tier", nb::is_arithmetic(), "Where a block lives: device, host, disk, object store.")
      .value("G1", Tier::G1)
      .value("G2", Tier::G2)
      .value("G3", Tier::G3)
      .value("G4", Tier::G4);
  bind_metrics(m);
  bind_store_class(m);
  bind_manager(m);
}

}  // namespace understudy
