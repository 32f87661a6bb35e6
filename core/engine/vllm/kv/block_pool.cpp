#include "engine/vllm/kv/block_pool.hpp"

#include <algorithm>

#include "base/assert.hpp"

namespace understudy {

// ── Find ──

BlockRun* BlockPool::earliest(const PrefixNode& node, std::uint32_t at, std::uint8_t group) noexcept {
  BlockRun* run = node.copies[group];
  while (run != nullptr && (run->first > at || run->end() <= at)) run = run->next_copy;
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
    BlockRun* next = node->copies[group];
    while (at < most) {
      // Mostly runs are in the order of their names, without a name in two of them.
      BlockRun* const run = !node->layered && next != nullptr && next->first == at ? next : earliest(*node, at, group);
      if (run == nullptr) break;
      std::uint32_t end = std::min(most, run->end());
      if (node->layered) {  // another run that was registered before begins inside it
        for (const BlockRun* other = node->copies[group]; other != run; other = other->next_copy) {
          if (other->first > at) end = std::min(end, other->first);
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
  touch(table, found_);
  found_.clear();
}

void BlockPool::touch(BlockTable& table, std::span<Piece> pieces) {
  UNDERSTUDY_ASSERT(table.size() == table.skipped, "a hit begins a table");
  for (Piece& piece : pieces) {
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
    const bool was_last = node != nullptr && run.end() == node->names.size();  // else its names are no fewer
    run.ids.truncate(left);
    if (left == 0) {
      unqueue(run);
      remove_run(run);
    }
    if (was_last) trim_names(node);
  }
}

void BlockPool::cache_full_blocks(BlockTable& table, std::span<const BlockName> names, std::uint8_t group) {
  UNDERSTUDY_ASSERT(names.size() <= table.size(), "names more blocks than the table has");
  if (names.size() <= table.named) return;
  names = names.subspan(table.named);
  if (table.runs.empty()) return add_names(table, names, &tree_.root(), 0, nullptr, group);
  table.settle(table.runs.size() - 1);
  BlockRun* const last = table.runs.back().run;
  add_names(table, names, last->node, last->end(), last, group);
}

void BlockPool::cache_blocks(BlockTable& table, std::span<const BlockName> names, std::uint32_t first,
                             std::uint8_t group) {
  const std::uint32_t end = table.end_of_runs();
  UNDERSTUDY_ASSERT(end <= first && first < names.size() && names.size() <= table.size(), "names loose blocks");
  BlockRun* last = nullptr;
  if (first > end) {
    table.runs.push_back({nullptr, first - end});
    table.gaps += first - end;
  } else if (!table.runs.empty()) {
    table.settle(table.runs.size() - 1);
    last = table.runs.back().run;
  }
  const auto [node, at] = last != nullptr ? std::pair(last->node, last->end()) : reach(names.first(first));
  add_names(table, names.subspan(first), node, at, last, group);
}

std::pair<PrefixNode*, std::uint32_t> BlockPool::reach(std::span<const BlockName> names) {
  PrefixNode* node = &tree_.root();
  std::uint32_t at = 0;
  for (std::size_t done = 0; done < names.size();) {
    PrefixNode* const child = tree_.child(*node, names[done]);
    if (child == nullptr && node->children == 0 && node != &tree_.root()) {
      node->names.append(names.subspan(done));
      return {node, node->names.size()};
    }
    node = child != nullptr ? child : &tree_.add_child(*node, names.subspan(done));
    at = PrefixTree::matching(*node, 0, names, done);
    done += at;
    if (at < node->names.size() && done < names.size()) {
      node = &split_node(*node, at);  // the part above
      UNDERSTUDY_ASSERT(tree_.child(*node, names[done]) == nullptr, "names are those of one chain");
    }
  }
  return {node, at};
}

void BlockPool::add_names(BlockTable& table, std::span<const BlockName> names, PrefixNode* node, std::uint32_t at,
                          BlockRun* last, std::uint8_t group) {
  found_.clear();
  if (listener_ != nullptr) listener_->begin_call();
  const auto count = static_cast<std::uint32_t>(names.size());
  const auto begin = table.loose.begin() + table.gaps;
  std::span<const SlotId> ids(begin, begin + count);
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
    } else if (node->children == 0 &&
               (last != nullptr ? last->references == 1 && !last->phantom && last->next_copy == nullptr
                                : node != &tree_.root())) {
      node->names.append(names);
    } else {
      node = &tree_.add_child(*node, names);
      at = 0;
    }
  }
  table.loose.erase(begin, begin + count);
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
    if (held->run != nullptr) release_run(*held->run);
  }
  table.runs.clear();
  table.named = table.gaps = table.skipped = 0;
}

void BlockPool::release_run(BlockRun& run) {
  counts_.references -= run.size();
  if (--run.references > 0) return;
  counts_.active -= run.size();
  counts_.cached += run.size();
  queue(run, nullptr);
}

void BlockPool::skip(BlockTable& table, std::uint32_t blocks) {
  found_.clear();
  const std::size_t entries = cut(table, blocks);
  std::uint32_t in_runs = 0;
  std::uint32_t in_gaps = 0;
  for (std::size_t i = entries; i-- > 0;) {
    const HeldRun& held = table.runs[i];
    (held.run != nullptr ? in_runs : in_gaps) += held.blocks;
    if (held.run != nullptr) release_run(*held.run);
  }
  table.runs.erase(table.runs.begin(), table.runs.begin() + static_cast<std::ptrdiff_t>(entries));
  table.named -= in_runs;
  table.gaps -= in_gaps;
  table.skipped += blocks;
  const std::uint32_t loose = blocks - in_runs;
  release_loose(std::span<const SlotId>(table.loose).first(loose));
  table.loose.erase(table.loose.begin(), table.loose.begin() + loose);
}

void BlockPool::hand_out_cached() {
  std::vector<SlotId> ids;
  get_new_blocks(num_free(), ids);
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

void BlockPool::withdraw(BlockTable& table, std::uint32_t kept) {
  if (table.named + table.gaps <= kept) return;
  found_.clear();
  const std::size_t first = cut(table, kept);
  table.settle(first);
  // A request admitted on such a block in the same schedule keeps it, and computes it after all.
  std::size_t from = table.runs.size();
  while (from > first && (table.runs[from - 1].run == nullptr || table.runs[from - 1].run->references == 1)) --from;
  if (from == table.runs.size()) return;
  if (listener_ != nullptr) listener_->begin_call();
  std::vector<SlotId> ids;  // of these entries
  std::uint32_t in_gaps = 0;
  for (std::size_t i = from; i < table.runs.size(); ++i)
    in_gaps += table.runs[i].run == nullptr ? table.runs[i].blocks : 0;
  auto gap = table.loose.begin() + (table.gaps - in_gaps);
  for (std::size_t i = from; i < table.runs.size(); ++i) {
    if (table.runs[i].run == nullptr) {
      ids.insert(ids.end(), gap, gap + table.runs[i].blocks);
      gap += table.runs[i].blocks;
      continue;
    }
    BlockRun& run = *table.runs[i].run;
    ids.insert(ids.end(), run.ids.span().begin(), run.ids.span().end());
    for (std::uint32_t at = run.first; listener_ != nullptr && at < run.end(); ++at) {
      listener_->removed(run.ids[at - run.first], run.node->names[at], run.group, !has_other(run, at));
    }
  }
  for (std::size_t i = table.runs.size(); i > from; --i) {
    if (table.runs[i - 1].run == nullptr) continue;
    PrefixNode* const node = table.runs[i - 1].run->node;
    remove_run(*table.runs[i - 1].run);
    trim_names(node);
  }
  table.runs.resize(from);
  table.gaps -= in_gaps;
  const auto begin = table.loose.begin() + table.gaps;
  table.loose.insert(table.loose.erase(begin, begin + in_gaps), ids.begin(), ids.end());
  const auto unnamed = static_cast<std::uint32_t>(ids.size()) - in_gaps;
  table.named -= unnamed;
  counts_.active -= unnamed;
  counts_.references -= unnamed;
  counts_.loose += unnamed;
}

void BlockPool::mark_phantoms(BlockTable& table, std::uint32_t named) {
  if (table.named <= named) return;
  found_.clear();
  const std::size_t first = cut(table, named);
  table.settle(first);
  for (std::size_t i = first; i < table.runs.size(); ++i) table.runs[i].run->phantom = true;
}

}  // namespace understudy
