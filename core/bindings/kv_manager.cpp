// The KV manager of a simulated worker, and the leases of its native backend, in Python. understudy.kv.kv_manager
// adds the types.
#include "engine/kvbm/kv_manager.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "bindings.hpp"
#include "convert.hpp"
#include "engine/kvbm/kv_lease.hpp"
#include "guards.hpp"
#include "policy_config.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

using Backend = PyText<"typing.Literal['kvbm', 'native']">;
using Block = PyArg<"understudy.core_types.Block">;
using Blocks = PyArg<"understudy.core_types.Blocks">;
using EventGroups = List<Tuple<Int, nb::bool_, PyArg<"int | None">, List<PyArg<"understudy.core_types.EventBlock">>>>;

void make_kv_manager(KvManager* self, Int num_gpu_blocks, Int block_size, const Backend& backend,
                     PyArg<"understudy.core_types.PolicyName"> eviction, bool enable_prefix_caching, bool events,
                     bool event_token_ids, bool trace, Int dp_rank) {
  KvManagerConfig config;
  config.num_gpu_blocks = read_uint(num_gpu_blocks, "num_gpu_blocks");
  if (config.num_gpu_blocks < 1 || config.num_gpu_blocks > BlockStore::kMaxBlocks) {
    throw Error(ErrorKind::ConfigError, "num_gpu_blocks must be in 1..", BlockStore::kMaxBlocks, ", got ",
                config.num_gpu_blocks);
  }
  config.block_size = read_uint(block_size, "block_size");
  if (backend != "kvbm" && backend != "native") {
    throw Error(ErrorKind::ConfigError, "backend must be kvbm or native, got '", backend, "'");
  }
  config.backend = backend == "native" ? KvManagerKind::Native : KvManagerKind::Kvbm;
  if (!eviction.is_none()) {
    if (!nb::isinstance<nb::str>(eviction)) throw Error(ErrorKind::ConfigError, "eviction must be a name or None");
    config.eviction = read_policy(eviction, nb::none());
    if (config.backend == KvManagerKind::Native) {
      throw Error(ErrorKind::ConfigError, "eviction must be None with backend='native', whose free list is vLLM's");
    }
  }
  config.enable_prefix_caching = enable_prefix_caching;
  config.events = events;
  config.event_token_ids = event_token_ids;
  if (event_token_ids && !events) {
    throw Error(ErrorKind::ConfigError, "event_token_ids has no effect without events=True");
  }
  config.trace = trace;
  config.dp_rank = static_cast<std::uint32_t>(read_uint(dp_rank, "dp_rank", 0xFFFFFFFFu));
  within_memory(text_of("num_gpu_blocks: ", config.num_gpu_blocks, " blocks"),
                static_cast<double>(config.num_gpu_blocks) * kSlotBytes, [&] { new (self) KvManager(config); });
}

// ── Blocks ──

KvBlock read_block(nb::handle value, const std::string& name) {
  KvBlock block;
  if (nb::isinstance<BlockIdentity>(value)) {
    block.identity = nb::cast<const BlockIdentity&>(value);
  } else {
    block.full = false;
    block.partial = read_uint(value, name + " (an Identity or the id of a partial block)");
  }
  return block;
}

std::vector<KvBlock> read_blocks(nb::handle value) {
  std::vector<KvBlock> blocks;
  if (nb::isinstance<Identities>(value)) {
    for (const BlockIdentity& identity : nb::cast<const Identities&>(value).span())
      blocks.push_back({true, identity, 0});
    return blocks;
  }
  if (PySequence_Check(value.ptr()) == 0) {
    throw Error(ErrorKind::InvalidArgument, "blocks must be Identities or a sequence of Identity and int");
  }
  for (nb::handle item : value) blocks.push_back(read_block(item, "blocks[" + std::to_string(blocks.size()) + "]"));
  return blocks;
}

// Token ids that may be absent.
class Tokens {
 public:
  explicit Tokens(nb::handle value) {
    if (!value.is_none()) array_.emplace(value, "token_ids");
  }
  std::span<const Token> span() const noexcept { return array_ ? array_->span() : std::span<const Token>{}; }

 private:
  std::optional<IntArray<Token>> array_;
};

// ── Events ──

nb::object hash_or_none(std::uint64_t hash) { return hash == 0 ? nb::none() : nb::object(nb::int_(hash)); }

// (id, stored, parent, [(sequence hash, local hash, position, generation, token ids)]) of every event of one
// stream.
EventGroups group_rows(const KvEventRows& self, bool consolidated) {
  nb::list events;
  nb::list blocks;
  std::uint64_t open = KvEventRow::kSilent;
  const std::size_t stored_rows = static_cast<std::size_t>(std::count_if(
      self.rows.begin(), self.rows.end(), [](const KvEventRow& row) { return row.kind == EventKind::Stored; }));
  const std::size_t per_block = stored_rows == 0 ? 0 : self.tokens.size() / stored_rows;
  std::size_t at = 0;  // in tokens
  for (const KvEventRow& row : self.rows) {
    const bool stored = row.kind == EventKind::Stored;
    const std::size_t from = at;
    if (stored) at += per_block;
    const std::uint64_t id = consolidated ? row.consolidated_id : row.raw_id;
    if (id == KvEventRow::kSilent) continue;
    if (id != open) {
      open = id;
      blocks = nb::list();
      const std::uint64_t parent = consolidated ? row.identity.parent_hash : row.raw_parent;
      events.append(nb::make_tuple(id, stored, stored ? hash_or_none(parent) : nb::none(), blocks));
    }
    nb::object tokens = nb::none();
    if (stored && per_block != 0) {
      nb::list ids;
      for (std::size_t i = from; i < at; ++i) ids.append(self.tokens[i]);
      tokens = nb::tuple(ids);
    }
    blocks.append(nb::make_tuple(row.identity.sequence_hash(), hash_or_none(row.identity.local_hash),
                                 row.identity.position(), row.generation, tokens));
  }
  return events;
}

std::vector<std::tuple<bool, std::size_t, std::uint64_t, std::uint64_t, std::uint64_t>> drain_trace(KvManager& self) {
  std::vector<std::tuple<bool, std::size_t, std::uint64_t, std::uint64_t, std::uint64_t>> out;
  for (const KvTraceRecord& r : self.drain_trace())
    out.emplace_back(r.eviction, r.blocks, r.free, r.active, r.inactive);
  return out;
}

void bind_kv_manager_class(nb::module_& m) {
  nb::class_<KvEventRows>(m, "KvEventRows", "Drained events of a KV manager, not yet sorted into a stream.")
      .def("__len__", [](const KvEventRows& self) { return self.rows.size(); })
      .def("grouped", &group_rows, "consolidated"_a,
           "(id, stored, parent hash, blocks) of every event; a block is (sequence hash, local hash, "
           "position, "
           "generation, token ids).");

  nb::class_<KvManager>(m, "KvManager", "The KV blocks of a simulated worker.")
      .def("__init__", &make_kv_manager, "num_gpu_blocks"_a, "block_size"_a, nb::kw_only(), "backend"_a = "kvbm",
           "eviction"_a.none() = nb::none(), "enable_prefix_caching"_a = true, "events"_a = false,
           "event_token_ids"_a = false, "trace"_a = false, "dp_rank"_a = 0)
      .def(
          "acquire",
          [](KvManager& self, Blocks blocks, Ints token_ids, bool partial) {
            const Tokens tokens(token_ids);
            return self.acquire(read_blocks(blocks), tokens.span(), partial);
          },
          "blocks"_a, nb::kw_only(), "token_ids"_a.none() = nb::none(), "partial"_a = false)
      .def(
          "release", [](KvManager& self, Blocks blocks) { self.release(read_blocks(blocks)); }, "blocks"_a)
      .def(
          "seal",
          [](KvManager& self, Int partial, const BlockIdentity& identity, Ints token_ids) {
            const Tokens tokens(token_ids);
            self.seal(read_uint(partial, "partial"), identity, tokens.span());
          },
          "partial"_a, "identity"_a, nb::kw_only(), "token_ids"_a.none() = nb::none())
      .def(
          "discard", [](KvManager& self, Blocks blocks) { self.discard(read_blocks(blocks)); }, "blocks"_a)
      .def(
          "probe_new_blocks",
          [](const KvManager& self, Blocks blocks) { return self.probe_new_blocks(read_blocks(blocks)); }, "blocks"_a)
      .def(
          "overlap",
          [](const KvManager& self, Blocks blocks) {
            const KvOverlap overlap = self.overlap(read_blocks(blocks));
            return std::pair(overlap.resident, overlap.active);
          },
          "blocks"_a)
      .def(
          "is_resident", [](const KvManager& self, Block block) { return self.resident(read_block(block, "block")); },
          "block"_a)
      .def(
          "references", [](const KvManager& self, Block block) { return self.references(read_block(block, "block")); },
          "block"_a)
      .def_prop_ro("num_gpu_blocks", [](const KvManager& self) { return self.config().num_gpu_blocks; })
      .def_prop_ro("block_size", [](const KvManager& self) { return self.config().block_size; })
      .def_prop_ro("dp_rank", [](const KvManager& self) { return self.config().dp_rank; })
      .def_prop_ro("backend",
                   [](const KvManager& self) -> Backend {
                     return self.config().backend == KvManagerKind::Native ? "native" : "kvbm";
                   })
      .def_prop_ro("enable_prefix_caching", [](const KvManager& self) { return self.config().enable_prefix_caching; })
      .def_prop_ro("active_blocks", &KvManager::active_blocks)
      .def_prop_ro("inactive_blocks", &KvManager::inactive_blocks)
      .def_prop_ro("free_blocks", &KvManager::free_blocks)
      .def_prop_ro("active_references", &KvManager::active_references)
      .def("metrics", [](const KvManager& self) { return self.store()->metrics(0); })
      .def("eviction_order",
           [](const KvManager& self) {
             const std::vector<SlotId> order = self.store()->eviction_order(0, self.config().num_gpu_blocks);
             return to_array(std::vector<std::int32_t>(order.begin(), order.end()));
           })
      .def("drain_rows", &KvManager::drain_events)
      .def("drain_trace_rows", &drain_trace)
      .def("dump", [](const KvManager& self) { return self.store()->dump(); })
      .def("check", &KvManager::check);
}

// ── Leases ──

// The safety net: blocks go back, and the leak is reported.
class OwnedLease : public BlockLease {
 public:
  using BlockLease::BlockLease;
  ~OwnedLease() {
    const std::size_t held = slots().size();
    if (held == 0) return;
    release();
    report_leak(Manager{manager().store(), 0}, held, "release()");
  }
};

std::span<const BlockIdentity> read_identities(const Identities* identities) {
  return identities == nullptr ? std::span<const BlockIdentity>{} : identities->span();
}

void bind_lease(nb::module_& m) {
  nb::class_<OwnedLease>(m, "BlockLease", "The blocks of one request under the native backend, in position order.")
      .def(nb::init<std::shared_ptr<KvManager>>(), "manager"_a)
      .def(
          "allocate",
          [](OwnedLease& self, Int tokens, const Identities* prefix) {
            self.allocate(read_uint(tokens, "tokens", TokenBlocks::kMaxTokens), read_identities(prefix));
          },
          "tokens"_a, nb::kw_only(), "prefix"_a.none() = nb::none(),
          "Hold blocks for the first `tokens` tokens, all or none. Only the first allocation may reuse a "
          "`prefix`: "
          "leading blocks, all of them resident.")
      .def(
          "finalize",
          [](OwnedLease& self, Int tokens, const Identities& identities, Ints token_ids) {
            const Tokens held(token_ids);
            return self.finalize(read_uint(tokens, "tokens", TokenBlocks::kMaxTokens), identities.span(), held.span());
          },
          "tokens"_a, "identities"_a, nb::kw_only(), "token_ids"_a.none() = nb::none(),
          "The first `tokens` tokens are computed: make the blocks that this completes visible. `identities` "
          "name all "
          "complete blocks. How many became visible.")
      .def("release", &OwnedLease::release, "Give every block back, the last one first. The lease can start over.")
      .def("discard", &OwnedLease::discard, "Release every block and make these copies unmatchable.")
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); }, kEnter)
      .def(
          "__exit__", [](OwnedLease& self, nb::args) { self.release(); }, kExit)
      .def_prop_ro("allocated_tokens", &OwnedLease::allocated_tokens)
      .def_prop_ro("visible_blocks", &OwnedLease::visible_blocks, "Leading blocks that others can find.")
      .def_prop_ro(
          "block_ids",
          [](const OwnedLease& self) {
            return to_array(std::vector<std::int32_t>(self.slots().begin(), self.slots().end()));
          },
          "Where the blocks are, in position order.");
}

}  // namespace

void bind_kv_manager(nb::module_& m) {
  bind_kv_manager_class(m);
  bind_lease(m);
}

}  // namespace understudy
