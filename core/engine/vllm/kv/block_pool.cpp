#include "engine/vllm/kv/block_pool.hpp"

#include <algorithm>

#include "base/assert.hpp"

namespace understudy {

// ── Find ──

BlockRun* BlockPool::earliest(const PrefixNode& node, std::uint32_t at, std::uint8_t group) noexcept {
  BlockRun* run = node.copies;
  while (run != nullptr && (run->group != group || run->first > at || run->end() <= at)) run = run->next_copy;
  return run;
}

// Calls `visit(run, offset, blocks)` for the parts of the longest prefix, and returns its length.
template <typename Names, typename Visit>
std::uint32_t BlockPool::visit_prefix(const Names& names, std::uint8_t group, Visit visit) const {
  const PrefixNode* node = &tree_.root();
  std::size_t done = 0;
  while (done < names.size()) {
    node = tree_.child(*node, names[done]);
    if (node == nullptr) break;
    const std::uint32_t most = PrefixTree::matching(*node, 0, names, done);
    std::uint32_t at = 0;
    BlockRun* next = node->copies;
    while (at < most) {
      // Mostly runs are in the order of their names, without a name in two of them.
      BlockRun* const run = !node->layered && next != nullptr && next->group == group && next->first == at
                                ? next
                                : earliest(*node, at, group);
      if (run == nullptr) break;
      std::uint32_t end = std::min(most, run->end());
      if (node->layered) {  // another run that was registered before begins inside it
        for (const BlockRun* other = node->copies; other != run; other = other->next_copy) {
          if (other->group == group && other->first > at) end = std::min(end, other->first);
        }
      }
      visit(*run, at - run->first, end - at);
      at = end;
      next = run->next_copy;
    }
    done += at;
    if (at < node->names.size()) break;
  }
  return static_cast<std::uint32_t>(done);
}

BlockPool::Hit BlockPool::find(std::span<const BlockName> names, std::uint8_t group) {
  Hit hit;
  found_.clear();
  hit.blocks = visit_prefix(names, group, [&](BlockRun& run, std::uint32_t offset, std::uint32_t blocks) {
    found_.push_back({&run, offset, blocks});
    if (run.references == 0) hit.unreferenced += blocks;
    if (run.phantom) hit.phantoms += blocks;
  });
  operations_ += found_.size() + 1;
  return hit;
}

std::uint32_t BlockPool::prefix_length(std::span<const BlockName> names, std::uint8_t group) const {
  return visit_prefix(names, group, [](const BlockRun&, std::uint32_t, std::uint32_t) {});
}

std::uint32_t BlockPool::prefix_length(std::span<const BlockIdentity> blocks, std::uint8_t group) const {
  struct Names {
    std::span<const BlockIdentity> blocks;
    std::size_t size() const noexcept { return blocks.size(); }
    BlockName operator[](std::size_t at) const noexcept { return blocks[at].sequence_hash(); }
  };
  return visit_prefix(Names{blocks}, group, [](const BlockRun&, std::uint32_t, std::uint32_t) {});
}

void BlockPool::append_found(std::vector<SlotId>& out) const {
  for (const Piece& piece : found_) {
    const std::span<const SlotId> ids = piece.run->ids.span().subspan(piece.offset, piece.blocks);
    out.insert(out.end(), ids.begin(), ids.end());
  }
}

// ── Hold ──

void BlockPool::touch(BlockTable& table) {
  UNDERSTUDY_ASSERT(table.empty(), "a hit begins a table");
  for (Piece& piece : found_) {
    // Earlier pieces may have split the run: its second half is the next copy.
    while (piece.offset >= piece.run->size()) {
      piece.offset -= piece.run->size();
      piece.run = piece.run->next_copy;
    }
    BlockRun& run = piece.offset > 0 ? split_run(*piece.run, piece.offset) : *piece.run;
    if (piece.blocks < run.size()) split_run(run, piece.blocks);
    if (run.references == 0) {
      unqueue(run);
      run.rest = nullptr;
      counts_.cached -= run.size();
      counts_.active += run.size();
    }
    ++run.references;
    counts_.references += run.size();
    table.runs.push_back({&run, run.size()});
    table.named += run.size();
  }
  found_.clear();
}

void BlockPool::get_new_blocks(std::size_t count, std::vector<SlotId>& out) {
  UNDERSTUDY_ASSERT(count <= num_free(), "takes more blocks than are free");
  if (count == 0) return;
  found_.clear();  // what it found may go
  counts_.allocations += count;
  counts_.loose += count;
  const std::size_t stacked = std::min(count, in_front_.size());
  out.insert(out.end(), in_front_.rbegin(), in_front_.rbegin() + static_cast<std::ptrdiff_t>(stacked));
  in_front_.resize(in_front_.size() - stacked);
  count -= stacked;
  counts_.free -= stacked;
  for (; count > 0 && fresh_ < num_blocks_; --count, --counts_.free) out.push_back(fresh_++);
  if (count > 0 && listener_ != nullptr) listener_->begin_call();
  while (count > 0) {
    BlockRun& run = *front_;
    ++operations_;
    const auto taken = static_cast<std::uint32_t>(std::min<std::size_t>(count, run.size()));
    const std::uint32_t left = run.size() - taken;
    const std::span<const SlotId> ids = run.ids.span();
    out.insert(out.end(), ids.rbegin(), ids.rbegin() + taken);
    count -= taken;
    if (run.node == nullptr) {
      counts_.free -= taken;
    } else {
      if (listener_ != nullptr) note_removed(run, left);
      counts_.cached -= taken;
      counts_.evictions += taken;
    }
    PrefixNode* const node = run.node;
    run.ids.truncate(left);
    if (left == 0) {
      unqueue(run);
      remove_run(run);
    }
    trim_names(node);
  }
}

void BlockPool::cache_full_blocks(BlockTable& table, std::span<const BlockName> names, std::uint8_t group) {
  UNDERSTUDY_ASSERT(names.size() <= table.size(), "names more blocks than the table has");
  if (names.size() <= table.named) return;
  found_.clear();
  if (listener_ != nullptr) listener_->begin_call();
  const auto count = static_cast<std::uint32_t>(names.size()) - table.named;
  std::span<const SlotId> ids = std::span<const SlotId>(table.loose).first(count);
  names = names.subspan(table.named);
  PrefixNode* node = &tree_.root();
  std::uint32_t at = 0;      // in the node
  BlockRun* last = nullptr;  // of the table
  if (!table.runs.empty()) {
    table.settle(table.runs.size() - 1);
    last = table.runs.back().run;
    node = last->node;
    at = last->end();
  }
  const auto place = [&](std::uint32_t blocks) {
    const bool ends = last != nullptr && last->node == node && last->end() == at;
    if (ends && last->references == 1 && !last->phantom && last->next_copy == nullptr) {
      last->ids.append(ids.first(blocks));
      table.runs.back().blocks += blocks;
    } else {
      last = &add_run(*node, at, ids.first(blocks), group);
      table.runs.push_back({last, blocks});
    }
    if (listener_ != nullptr) note_stored(*last, at);
    at += blocks;
    names = names.subspan(blocks);
    ids = ids.subspan(blocks);
  };
  while (!names.empty()) {
    if (at < node->names.size()) {
      const std::uint32_t same = PrefixTree::matching(*node, at, names, 0);
      if (same > 0) {
        place(same);
        continue;
      }
      node = &split_node(*node, at);  // the part above
    } else if (PrefixNode* const child = tree_.child(*node, names[0]); child != nullptr) {
      node = child;
      at = 0;
    } else if (last != nullptr && last->references == 1 && !last->phantom && node->children == 0 &&
               last->next_copy == nullptr) {
      node->names.append(names);
    } else {
      node = &tree_.add_child(*node, names);
      at = 0;
    }
  }
  table.loose.erase(table.loose.begin(), table.loose.begin() + count);
  table.named += count;
  counts_.loose -= count;
  counts_.active += count;
  counts_.references += count;
  counts_.registrations += count;
}

// ── Release ──

void BlockPool::free_blocks(BlockTable& table) {
  found_.clear();
  release_loose(table.loose);
  table.loose.clear();
  table.settle(0);
  for (auto held = table.runs.rbegin(); held != table.runs.rend(); ++held) {
    BlockRun& run = *held->run;
    counts_.references -= run.size();
    if (--run.references > 0) continue;
    counts_.active -= run.size();
    counts_.cached += run.size();
    queue(run, nullptr);
  }
  table.runs.clear();
  table.named = 0;
}

void BlockPool::hand_out_cached() {
  UNDERSTUDY_ASSERT(num_free() == num_blocks_, "hands out blocks that are referenced");
  std::vector<SlotId> ids;
  get_new_blocks(num_blocks_, ids);
  std::ranges::reverse(ids);  // the last of a release is handed out first
  release_loose(ids);
}

void BlockPool::trim(BlockTable& table, std::size_t blocks) {
  UNDERSTUDY_ASSERT(blocks >= table.named, "drops blocks that have names");
  const std::size_t kept = blocks - table.named;
  if (kept >= table.loose.size()) return;
  release_loose(std::span<const SlotId>(table.loose).subspan(kept));
  table.loose.resize(kept);
}

// The first of a release, which is the last of the table, is handed out next.
void BlockPool::release_loose(std::span<const SlotId> ids) {
  if (ids.empty()) return;
  counts_.loose -= ids.size();
  counts_.free += ids.size();
  if (!append_unnamed_) {
    in_front_.insert(in_front_.end(), ids.begin(), ids.end());
    return;
  }
  BlockRun& run = *runs_.take();
  run.ids.append(ids);
  queue(run, nullptr);
}

void BlockPool::withdraw(BlockTable& table, std::uint32_t named) {
  if (table.named <= named) return;
  found_.clear();
  const std::size_t first = cut(table, named);
  // A request admitted on such a block in the same schedule keeps it, and computes it after all.
  std::size_t from = table.runs.size();
  while (from > first && table.runs[from - 1].run->references == 1) --from;
  if (from == table.runs.size()) return;
  if (listener_ != nullptr) listener_->begin_call();
  std::vector<SlotId> ids;
  for (std::size_t i = from; i < table.runs.size(); ++i) {
    BlockRun& run = *table.runs[i].run;
    ids.insert(ids.end(), run.ids.span().begin(), run.ids.span().end());
    for (std::uint32_t at = run.first; listener_ != nullptr && at < run.end(); ++at) {
      listener_->removed(run.ids[at - run.first], run.node->names[at], !has_other(run, at));
    }
  }
  for (std::size_t i = table.runs.size(); i > from; --i) {
    PrefixNode* const node = table.runs[i - 1].run->node;
    remove_run(*table.runs[i - 1].run);
    trim_names(node);
  }
  table.runs.resize(from);
  table.loose.insert(table.loose.begin(), ids.begin(), ids.end());
  table.named -= static_cast<std::uint32_t>(ids.size());
  counts_.active -= ids.size();
  counts_.references -= ids.size();
  counts_.loose += ids.size();
}

void BlockPool::mark_phantoms(BlockTable& table, std::uint32_t named) {
  if (table.named <= named) return;
  found_.clear();
  for (std::size_t i = cut(table, named); i < table.runs.size(); ++i) table.runs[i].run->phantom = true;
}

}  // namespace understudy
