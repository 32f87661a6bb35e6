// The pool's runs and nodes: how they are added, split and removed; and the tables that hold them.
#include <algorithm>
#include <functional>
#include <map>
#include <span>
#include <tuple>
#include <utility>

#include "base/assert.hpp"
#include "engine/vllm/kv/block_pool.hpp"

namespace understudy {

// ── Runs ──

BlockRun& BlockPool::add_run(PrefixNode& node, std::uint32_t first, std::span<const SlotId> ids, std::uint8_t group) {
  BlockRun& run = *runs_.take();
  run.ids.append(ids);
  run.node = &node;
  run.first = first;
  run.references = 1;
  run.rest = nullptr;
  run.group = group;
  BlockRun** end = &node.copies[group];
  while (*end != nullptr) {
    if ((*end)->end() > first) node.layered = true;
    end = &(*end)->next_copy;
  }
  *end = &run;
  return run;
}

// Returns the part from `at` on, which lookups find where they found the run.
BlockRun& BlockPool::split_run(BlockRun& run, std::uint32_t at) {
  UNDERSTUDY_ASSERT(at > 0 && at < run.size(), "splits a run at its end");
  BlockRun& part = *runs_.take();
  if (at < run.size() / 2) {  // the longer part keeps its memory
    part.ids = std::move(run.ids);
    run.ids.append(part.ids.span().first(at));
    part.ids.drop_front(at);
  } else {
    part.ids.append(run.ids.span().subspan(at));
    run.ids.truncate(at);
  }
  part.node = run.node;
  part.first = run.first + at;
  part.references = run.references;
  part.group = run.group;
  part.keepers = run.keepers;
  part.phantom = run.phantom;
  part.next_copy = run.next_copy;
  run.next_copy = &part;
  if (run.references > 0) {
    part.rest = run.rest;
    run.rest = &part;
  } else {
    queue(part, &run);  // a tail is evicted before its head
  }
  return part;
}

// Returns the node of the first `at` names.
PrefixNode& BlockPool::split_node(PrefixNode& node, std::uint32_t at) {
  for (std::uint32_t group = 0; group < num_groups_; ++group) {
    for (BlockRun* run = node.copies[group]; run != nullptr; run = run->next_copy) {
      if (run->first < at && run->end() > at) split_run(*run, at - run->first);
    }
  }
  PrefixNode& upper = tree_.split(node, at);
  upper.layered = node.layered;
  for (std::uint32_t group = 0; group < num_groups_; ++group) {
    BlockRun** above = &upper.copies[group];
    BlockRun** below = &node.copies[group];
    for (BlockRun* run = node.copies[group]; run != nullptr;) {
      BlockRun* const next = run->next_copy;
      if (run->first < at) {
        run->node = &upper;
        *above = run;
        above = &run->next_copy;
      } else {
        run->first -= at;
        *below = run;
        below = &run->next_copy;
      }
      run = next;
    }
    *above = *below = nullptr;
  }
  return upper;
}

void BlockPool::remove_run(BlockRun& run) {
  if (run.node != nullptr) {
    BlockRun** link = &run.node->copies[run.group];
    while (*link != &run) link = &(*link)->next_copy;
    *link = run.next_copy;
    if (run.node->layered) {
      const auto single = [](const BlockRun* first) { return first == nullptr || first->next_copy == nullptr; };
      run.node->layered = !std::ranges::all_of(run.node->copies.span(), single);
    }
  }
  runs_.give_back(&run);
}

// Names that no copy and no child needs go, and nodes without names.
void BlockPool::trim_names(PrefixNode* node) {
  while (node != nullptr && node != &tree_.root() && node->children == 0) {
    std::uint32_t end = 0;
    for (const BlockRun* run : node->copies.span()) {
      for (; run != nullptr; run = run->next_copy) end = std::max(end, run->end());
    }
    if (end > 0) {
      node->names.truncate(end);
      return;
    }
    PrefixNode* const parent = node->parent;
    tree_.remove(*node);
    node = parent;
  }
}

// ── Tables ──

void BlockTable::append_ids(std::vector<SlotId>& out) const {
  auto next = loose.begin();
  for (const HeldRun& held : runs) {
    const BlockRun* run = held.run;
    if (run == nullptr) {
      out.insert(out.end(), next, next + held.blocks);
      next += held.blocks;
      continue;
    }
    for (std::uint32_t left = held.blocks; left > 0; left -= run->size(), run = run->rest) {
      const std::span<const SlotId> ids = run->ids.span();
      out.insert(out.end(), ids.begin(), ids.end());
      if (left == run->size()) break;
    }
  }
  out.insert(out.end(), next, loose.end());
}

void BlockTable::settle(std::size_t from) {
  for (std::size_t i = from; i < runs.size(); ++i) settle_one(i);
}

void BlockTable::settle_one(std::size_t i) {
  HeldRun& held = runs[i];
  if (held.run == nullptr || held.blocks == held.run->size()) return;
  const HeldRun rest{held.run->rest, held.blocks - held.run->size()};
  held.blocks = held.run->size();
  runs.insert(runs.begin() + static_cast<std::ptrdiff_t>(i) + 1, rest);
}

// Entries behind it may stand for several runs.
std::size_t BlockPool::cut(BlockTable& table, std::uint32_t blocks) {
  std::uint32_t before = 0;
  std::size_t i = 0;
  for (; before < blocks && i < table.runs.size(); ++i) {
    table.settle_one(i);
    const HeldRun held = table.runs[i];
    const std::uint32_t left = blocks - before;
    if (held.blocks > left && held.run != nullptr) {
      split_run(*held.run, left);
      table.settle_one(i);
    } else if (held.blocks > left) {
      table.runs[i].blocks = left;
      table.runs.insert(table.runs.begin() + static_cast<std::ptrdiff_t>(i) + 1, {nullptr, held.blocks - left});
    }
    before += table.runs[i].blocks;
  }
  return i;
}

// ── Queue ──

void BlockPool::queue(BlockRun& run, BlockRun* at) noexcept {
  BlockRun* const before = at != nullptr ? at->before : back_;
  run.before = before;
  run.after = at;
  (before != nullptr ? before->after : front_) = &run;
  (at != nullptr ? at->before : back_) = &run;
}

void BlockPool::unqueue(BlockRun& run) noexcept {
  (run.before != nullptr ? run.before->after : front_) = run.after;
  (run.after != nullptr ? run.after->before : back_) = run.before;
  run.before = run.after = nullptr;
}

void BlockPool::reset_prefix_cache() {
  found_.clear();
  std::vector<BlockRun*> runs;
  for (BlockRun* run = front_; run != nullptr; run = run->after) {
    if (run->node != nullptr) runs.push_back(run);
  }
  if (listener_ != nullptr) note_reset(runs);
  std::vector<SlotId> ids;
  for (BlockRun* const run : runs) {
    ids.insert(ids.end(), run->ids.span().begin(), run->ids.span().end());
    PrefixNode* const node = run->node;
    unqueue(*run);
    remove_run(*run);
    trim_names(node);
  }
  counts_.cached -= ids.size();
  counts_.loose += ids.size();               // until they are released
  std::ranges::sort(ids, std::greater<>());  // the lowest is handed out next
  release_loose(ids);
}

// ── Listener ──

// Whether another run has name `at` of the run's node.
bool BlockPool::has_other(const BlockRun& run, std::uint32_t at) noexcept {
  for (const BlockRun* other = run.node->copies[run.group]; other != nullptr; other = other->next_copy) {
    if (other != &run && other->first <= at && other->end() > at) return true;
  }
  return false;
}

void BlockPool::note_stored(const BlockRun& run, std::uint32_t from) {
  const PrefixNode& node = *run.node;
  if (!node.layered) {
    listener_->stored(run.ids.span().subspan(from - run.first), node.names.span().subspan(from, run.end() - from),
                      node.depth + from);
    return;
  }
  for (std::uint32_t at = from; at < run.end(); ++at) {
    const std::uint32_t index = at - run.first;
    if (has_other(run, at)) {
      const BlockRun& other = *earliest(node, at, run.group);
      listener_->copied(run.ids[index], node.names[at], node.depth + at, other.ids[at - other.first]);
    } else {
      listener_->stored(run.ids.span().subspan(index, 1), node.names.span().subspan(at, 1), node.depth + at);
    }
  }
}

// The run's blocks from number `from` on lose their names, the last first.
void BlockPool::note_removed(const BlockRun& run, std::uint32_t from) {
  for (std::uint32_t index = run.size(); index > from; --index) {
    const std::uint32_t at = run.first + index - 1;
    listener_->removed(run.ids[index - 1], run.node->names[at], run.group, !run.node->layered || !has_other(run, at));
  }
}

// All blocks of these runs lose their names, in the order of their ids. Copies are those of one group.
void BlockPool::note_reset(std::span<BlockRun* const> runs) {
  struct Block {
    SlotId id;
    std::uint32_t at;
    const BlockRun* run;
  };
  using Name = std::tuple<const PrefixNode*, std::uint32_t, std::uint8_t>;
  const auto name_of = [](const Block& block) { return Name{block.run->node, block.at, block.run->group}; };
  std::vector<Block> blocks;
  std::map<Name, std::uint32_t> copies;
  for (const BlockRun* const run : runs) {
    for (std::uint32_t at = run->first; at < run->end(); ++at) {
      const Block block{run->ids[at - run->first], at, run};
      blocks.push_back(block);
      std::uint32_t& count = copies[name_of(block)];
      if (count > 0) continue;
      for (const BlockRun* copy = run->node->copies[run->group]; copy != nullptr; copy = copy->next_copy) {
        if (copy->first <= at && copy->end() > at) ++count;
      }
    }
  }
  std::ranges::sort(blocks, {}, &Block::id);
  listener_->begin_call();
  for (const Block& block : blocks) {
    listener_->removed(block.id, block.run->node->names[block.at], block.run->group, --copies[name_of(block)] == 0);
  }
}

}  // namespace understudy
