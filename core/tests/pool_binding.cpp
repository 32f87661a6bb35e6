// The engine's pool of blocks in Python, compiled for tests and its benchmark only (CMake option
// UNDERSTUDY_TEST_ENGINES).
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/errors.hpp"
#include "bindings/bindings.hpp"
#include "engine/vllm/kv/block_pool.hpp"
#include "engine/vllm/kv/pool_listener.hpp"
#include "engine/vllm/kv/prefix_cover.hpp"

namespace understudy {

namespace nb = nanobind;

namespace {

using Names = std::vector<BlockName>;

// Tables by number, and a record of the names that blocks get and lose.
class PoolForTests final : private PoolListener {
 public:
  PoolForTests(std::uint64_t num_blocks, bool append_unnamed, bool listens)
      : pool_(num_blocks, append_unnamed, kGroups) {
    if (listens) pool_.set_listener(this);
  }

  std::tuple<std::vector<SlotId>, std::uint32_t, std::uint32_t> find(const Names& names, std::uint8_t group) {
    const BlockPool::Hit hit = pool_.find(names, group);
    std::vector<SlotId> ids;
    pool_.append_found(ids);
    if (hit.blocks != pool_.prefix_length(std::span<const BlockName>(names), group))
      throw Error(ErrorKind::InvariantViolated, "two lengths of a prefix");
    return {ids, hit.unreferenced, hit.phantoms};
  }
  void place(std::uint64_t table, const Names& names, std::uint8_t group) {
    pool_.find(names, group);
    pool_.touch(tables_[table]);
  }
  std::vector<SlotId> take(std::uint64_t table, std::size_t count) {
    std::vector<SlotId>& loose = tables_[table].loose;
    const std::size_t before = loose.size();
    pool_.get_new_blocks(count, loose);
    return {loose.begin() + static_cast<std::ptrdiff_t>(before), loose.end()};
  }
  void cache(std::uint64_t table, const Names& names, std::uint8_t group) {
    pool_.cache_full_blocks(tables_[table], names, group);
  }
  void trim(std::uint64_t table, std::size_t blocks) { pool_.trim(tables_[table], blocks); }
  void withdraw(std::uint64_t table, std::uint32_t named) { pool_.withdraw(tables_[table], named); }
  void mark_phantoms(std::uint64_t table, std::uint32_t named) { pool_.mark_phantoms(tables_[table], named); }
  void cache_from(std::uint64_t table, const Names& names, std::uint32_t first, std::uint8_t group) {
    pool_.cache_blocks(tables_[table], names, first, group);
  }
  void skip(std::uint64_t table, std::uint32_t blocks) { pool_.skip(tables_[table], blocks); }
  std::uint32_t last_window(const Names& names, const std::vector<std::size_t>& groups, std::uint32_t need) {
    cover_.look_up(names);
    return need == 0 ? cover_.prefix(groups, static_cast<std::uint32_t>(names.size()))
                     : cover_.last_window(groups, static_cast<std::uint32_t>(names.size()), need);
  }
  void hold(std::uint64_t table, const Names& names, std::uint32_t first, std::uint8_t group) {
    std::vector<BlockPool::Piece> pieces;
    cover_.look_up(names);
    cover_.clip(group, first, static_cast<std::uint32_t>(names.size()), pieces);
    tables_[table].skipped = first;
    pool_.touch(tables_[table], pieces);
  }
  void free(std::uint64_t table) {
    pool_.free_blocks(tables_[table]);
    tables_.erase(table);
  }
  void reset() { pool_.reset_prefix_cache(); }
  void hand_out_cached() { pool_.hand_out_cached(); }
  std::vector<SlotId> ids(std::uint64_t table) {
    std::vector<SlotId> out;
    tables_[table].append_ids(out);
    return out;
  }
  std::uint32_t named(std::uint64_t table) { return tables_[table].named; }
  std::vector<std::tuple<std::string, SlotId, bool>> changes() { return std::exchange(changes_, {}); }
  const BlockPool& pool() const noexcept { return pool_; }

 private:
  void begin_call() override {}
  void stored(std::span<const SlotId> ids, std::span<const BlockName>, std::uint32_t) override {
    for (const SlotId id : ids) changes_.emplace_back("stored", id, true);
  }
  void copied(SlotId id, BlockName, std::uint32_t, SlotId) override { changes_.emplace_back("stored", id, false); }
  void removed(SlotId id, BlockName, std::uint8_t, bool last) override { changes_.emplace_back("removed", id, last); }

  static constexpr std::uint32_t kGroups = 3;

  BlockPool pool_;
  PrefixCover cover_{pool_, kGroups};
  std::unordered_map<std::uint64_t, BlockTable> tables_;
  std::vector<std::tuple<std::string, SlotId, bool>> changes_;
};

}  // namespace

void bind_test_pool(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<PoolForTests>(m, "TestBlockPool", "The vLLM engine's pool of blocks, for tests and its benchmark.")
      .def(nb::init<std::uint64_t, bool, bool>(), "num_blocks"_a, nb::kw_only(), "append_unnamed"_a = false,
           "listens"_a = true)
      .def("find", &PoolForTests::find, "names"_a, "group"_a = 0,
           "Ids of the longest cached prefix; how many are free or phantoms.")
      .def("place", &PoolForTests::place, "table"_a, "names"_a, "group"_a = 0,
           "Reference the cached prefix of `names`.")
      .def("take", &PoolForTests::take, "table"_a, "count"_a, "Append new blocks to the table; their ids.")
      .def("cache", &PoolForTests::cache, "table"_a, "names"_a, "group"_a = 0, "Name the table's first blocks.")
      .def("cache_from", &PoolForTests::cache_from, "table"_a, "names"_a, "first"_a, "group"_a,
           "Name the table's blocks from block `first` on.")
      .def("skip", &PoolForTests::skip, "table"_a, "blocks"_a, "Release the first blocks that the table has.")
      .def("last_window", &PoolForTests::last_window, "names"_a, "groups"_a, "need"_a,
           "End of the last `need` blocks that all the groups have; 0: of the longest prefix.")
      .def("hold", &PoolForTests::hold, "table"_a, "names"_a, "first"_a, "group"_a,
           "Reference the cached blocks of `names` from block `first` on.")
      .def("hand_out_cached", &PoolForTests::hand_out_cached, "Drop every cached block, and keep the order.")
      .def("trim", &PoolForTests::trim, "table"_a, "blocks"_a, "Release the blocks behind the first `blocks`.")
      .def("withdraw", &PoolForTests::withdraw, "table"_a, "named"_a, "Take names behind the first `named` back.")
      .def("mark_phantoms", &PoolForTests::mark_phantoms, "table"_a, "named"_a,
           "Mark the named blocks behind the first `named` as never computed.")
      .def("free", &PoolForTests::free, "table"_a, "Release all blocks of the table.")
      .def("reset", &PoolForTests::reset, "Drop every cached block.")
      .def("ids", &PoolForTests::ids, "table"_a, "Ids of the table's blocks, in order.")
      .def("named", &PoolForTests::named, "table"_a, "Number of the table's blocks that have names.")
      .def("changes", &PoolForTests::changes, "Names that blocks got and lost since the last call.")
      .def(
          "contents", [](const PoolForTests& self, std::uint8_t group) { return self.pool().contents(group); },
          "group"_a = 0)
      .def(
          "free_head", [](const PoolForTests& self, std::size_t count) { return self.pool().free_head(count); },
          "count"_a)
      .def_prop_ro("num_free", [](const PoolForTests& self) { return self.pool().num_free(); })
      .def_prop_ro("num_runs", [](const PoolForTests& self) { return self.pool().num_runs(); })
      .def_prop_ro("num_nodes", [](const PoolForTests& self) { return self.pool().num_nodes(); })
      .def_prop_ro("evictions", [](const PoolForTests& self) { return self.pool().counts().evictions; })
      .def("memory_bytes", [](const PoolForTests& self) { return self.pool().memory_bytes(); })
      .def("check", [](const PoolForTests& self) { self.pool().check(); });
}

}  // namespace understudy
