// vLLM's pool of KV blocks, kept by runs: one queue of free blocks, and cached blocks that are found by name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/slab.hpp"
#include "engine/vllm/kv/block_run.hpp"
#include "engine/vllm/kv/block_table.hpp"
#include "engine/vllm/kv/pool_listener.hpp"
#include "engine/vllm/kv/prefix_tree.hpp"

namespace understudy {

// Number of blocks by state, and of events since the beginning.
struct PoolCounts {
  std::uint64_t free = 0;        // without a name, unreferenced
  std::uint64_t cached = 0;      // with a name, unreferenced
  std::uint64_t active = 0;      // with a name, referenced
  std::uint64_t loose = 0;       // without a name, referenced
  std::uint64_t references = 0;  // to active blocks
  std::uint64_t evictions = 0;
  std::uint64_t registrations = 0;
  std::uint64_t allocations = 0;
};

// Equal to vLLM's pool in what is found and in which block is handed out next: blocks that one request filled are
// hit, released and evicted together, so each operation costs per run of them and not per block.
class BlockPool {
 public:
  // `append_unnamed`: released blocks without a name are queued behind the others; else in front, as a group.
  BlockPool(std::uint64_t num_blocks, bool append_unnamed, std::uint32_t num_groups = 1)
      : num_blocks_(num_blocks), append_unnamed_(append_unnamed), num_groups_(num_groups), tree_(num_groups) {
    counts_.free = num_blocks;
  }
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  void set_listener(PoolListener* listener) noexcept { listener_ = listener; }

  // ── Find ──
  struct Hit {
    std::uint32_t blocks = 0;
    std::uint32_t unreferenced = 0;
    std::uint32_t phantoms = 0;
  };
  // The longest cached prefix; it stays for `touch` and `append_found` until the next change. Changes nothing.
  Hit find(std::span<const BlockName> names, std::uint8_t group = 0);
  void append_found(std::vector<SlotId>& out) const;
  // Length of the longest cached prefix.
  std::uint32_t prefix_length(std::span<const BlockName> names, std::uint8_t group = 0) const;
  std::uint32_t prefix_length(std::span<const BlockIdentity> blocks, std::uint8_t group = 0) const;

  const PrefixTree& tree() const noexcept { return tree_; }
  // Which of a chain's blocks are cached, also behind one that is not.
  std::vector<bool> has_each(std::span<const BlockIdentity> blocks, std::uint8_t group = 0) const;

  // ── Hold and release ──
  // Blocks of a run: part of a hit.
  struct Piece {
    BlockRun* run;
    std::uint32_t offset;
    std::uint32_t blocks;
  };
  // References the blocks of the last `find`, for a table that is empty.
  void touch(BlockTable& table);
  // The same for a hit that a PrefixCover has found since the last change of its group.
  void touch(BlockTable& table, std::span<Piece> pieces);
  // Appends blocks to `out`, which is a table's loose ones: at most as many as `num_free`.
  void get_new_blocks(std::size_t count, std::vector<SlotId>& out);
  // Names the table's blocks up to `names.size()`: those of the request, from its first.
  void cache_full_blocks(BlockTable& table, std::span<const BlockName> names, std::uint8_t group = 0);
  // The same from block `first` on, none of which has a name; those before it stay as they are.
  void cache_blocks(BlockTable& table, std::span<const BlockName> names, std::uint32_t first, std::uint8_t group);
  // Releases all blocks of the table, the last first.
  void free_blocks(BlockTable& table);
  // Releases the first blocks that the table has, the last of them first.
  void skip(BlockTable& table, std::uint32_t blocks);
  // Releases the loose blocks behind the first `blocks` of the table.
  void trim(BlockTable& table, std::size_t blocks);
  // Takes the names of blocks behind the first `kept` back, as far as this table alone holds them.
  void withdraw(BlockTable& table, std::uint32_t kept);
  // Marks the named blocks behind the first `named`: they are matchable, but were never computed.
  void mark_phantoms(BlockTable& table, std::uint32_t named);
  // Drops every cached block.
  void reset_prefix_cache();
  // The same, and the order in which blocks are handed out stays.
  void hand_out_cached();

  // ── Watch ──
  std::uint64_t num_blocks() const noexcept { return num_blocks_; }
  std::uint64_t num_free() const noexcept { return counts_.free + counts_.cached; }
  const PoolCounts& counts() const noexcept { return counts_; }
  // The next `count` blocks that would be handed out.
  std::vector<SlotId> free_head(std::size_t count) const;
  // Each cached or active name of a group once, in no order.
  std::vector<BlockName> contents(std::uint8_t group = 0) const;
  // Cached blocks that are handed out before one of the pieces is, or fewer.
  std::uint64_t cached_before(std::span<const std::vector<Piece>> hits) const;
  std::size_t num_runs() const noexcept { return runs_.in_use(); }
  std::size_t num_nodes() const noexcept { return tree_.num_nodes(); }
  std::size_t memory_bytes() const noexcept;
  std::uint64_t operations() const noexcept { return operations_; }  // runs and blocks visited, for tests of growth
  // InvariantViolated when the state contradicts itself. O(blocks).
  void check() const;

 private:
  // The earliest registered run of the group that has name `at` of the node; null: none.
  static BlockRun* earliest(const PrefixNode& node, std::uint32_t at, std::uint8_t group) noexcept;
  template <typename Names, typename Visit>
  std::uint32_t visit_prefix(const Names& names, std::uint8_t group, Visit visit) const;
  static bool has_other(const BlockRun& run, std::uint32_t at) noexcept;
  template <typename Visit>
  void for_each_copy(Visit visit) const {
    tree_.for_each([&](const PrefixNode& node) {
      for (const BlockRun* run : node.copies.span()) {
        for (; run != nullptr; run = run->next_copy) visit(*run);
      }
    });
  }

  BlockRun& add_run(PrefixNode& node, std::uint32_t first, std::span<const SlotId> ids, std::uint8_t group);
  BlockRun& split_run(BlockRun& run, std::uint32_t at);
  PrefixNode& split_node(PrefixNode& node, std::uint32_t at);
  void remove_run(BlockRun& run);
  void trim_names(PrefixNode* node);
  void note_stored(const BlockRun& run, std::uint32_t from);
  void note_removed(const BlockRun& run, std::uint32_t from);
  void note_reset(std::span<BlockRun* const> runs);
  // Makes a run begin behind the first `blocks` blocks that the table has; returns its entry.
  std::size_t cut(BlockTable& table, std::uint32_t blocks);
  // The node that has the last of the first names, and their number in it; it is added if there is none.
  std::pair<PrefixNode*, std::uint32_t> reach(std::span<const BlockName> names);
  // Appends runs of the next loose blocks, whose names begin there.
  void add_names(BlockTable& table, std::span<const BlockName> names, PrefixNode* node, std::uint32_t at,
                 BlockRun* last, std::uint8_t group);

  void queue(BlockRun& run, BlockRun* at) noexcept;  // in front of `at`; null: at the end
  void unqueue(BlockRun& run) noexcept;
  void release_loose(std::span<const SlotId> ids);
  void release_run(BlockRun& run);
  void check_queue() const;
  void check_tree() const;

  std::uint64_t num_blocks_;
  bool append_unnamed_;
  std::uint32_t num_groups_;
  PoolListener* listener_ = nullptr;
  PoolCounts counts_;
  PrefixTree tree_;
  Slab<BlockRun> runs_;
  BlockRun* front_ = nullptr;  // of the queue
  BlockRun* back_ = nullptr;
  std::vector<SlotId> in_front_;  // released without a name: the last is handed out next
  SlotId fresh_ = 0;              // first block that was never handed out; those follow `in_front_`
  std::vector<Piece> found_;      // by the last `find`
  mutable std::uint64_t operations_ = 0;
};

}  // namespace understudy
