// What the pool shows of itself, and the invariants of its state.
#include <algorithm>
#include <unordered_map>
#include <vector>

#include "base/errors.hpp"
#include "engine/vllm/kv/block_pool.hpp"

namespace understudy {

std::vector<SlotId> BlockPool::free_head(std::size_t count) const {
  count = static_cast<std::size_t>(std::min<std::uint64_t>(count, num_free()));
  std::vector<SlotId> out;
  out.reserve(count);
  for (auto id = in_front_.rbegin(); id != in_front_.rend() && out.size() < count; ++id) out.push_back(*id);
  for (SlotId id = fresh_; id < num_blocks_ && out.size() < count; ++id) out.push_back(id);
  for (const BlockRun* run = front_; run != nullptr && out.size() < count; run = run->after) {
    for (std::uint32_t i = run->size(); i > 0 && out.size() < count; --i) out.push_back(run->ids[i - 1]);
  }
  return out;
}

std::vector<bool> BlockPool::has_each(std::span<const BlockIdentity> blocks, std::uint8_t group) const {
  std::vector<bool> out(blocks.size());
  const PrefixNode* node = &tree_.root();
  for (std::size_t done = 0; done < blocks.size();) {
    node = tree_.child(*node, blocks[done].sequence_hash());
    if (node == nullptr) break;
    std::uint32_t at = 0;
    for (; at < node->names.size() && done < blocks.size(); ++at, ++done) {
      if (node->names[at] != blocks[done].sequence_hash()) return out;
      out[done] = earliest(*node, at, group) != nullptr;
    }
  }
  return out;
}

std::vector<BlockName> BlockPool::contents(std::uint8_t group) const {
  std::vector<BlockName> out;
  tree_.for_each([&](const PrefixNode& node) {
    std::vector<bool> has(node.names.size());
    for (const BlockRun* run = node.copies[group]; run != nullptr; run = run->next_copy) {
      for (std::uint32_t at = run->first; at < run->end(); ++at) has[at] = true;
    }
    for (std::uint32_t at = 0; at < has.size(); ++at) {
      if (has[at]) out.push_back(node.names[at]);
    }
  });
  operations_ += out.size();
  return out;
}

std::uint64_t BlockPool::cached_before(std::span<const std::vector<Piece>> hits) const {
  constexpr std::size_t kMostVisited = 256;                   // runs
  std::unordered_map<const BlockRun*, std::uint32_t> behind;  // blocks of the run that are handed out before
  for (const std::vector<Piece>& pieces : hits) {
    for (const Piece& piece : pieces) {
      const std::uint32_t blocks = piece.run->size() - piece.offset - piece.blocks;
      if (piece.run->references == 0) behind[piece.run] = blocks;  // the last piece counts
    }
  }
  if (behind.empty()) return counts_.cached;
  std::uint64_t before = 0;
  std::size_t visited = 0;
  for (const BlockRun* run = front_; run != nullptr && visited < kMostVisited; run = run->after, ++visited) {
    const auto found = behind.find(run);
    if (found != behind.end()) return before + found->second;
    before += run->size();
  }
  return before;
}

std::size_t BlockPool::memory_bytes() const noexcept {
  std::size_t bytes = tree_.memory_bytes() + runs_.memory_bytes() + in_front_.capacity() * sizeof(SlotId);
  const auto add = [&bytes](const BlockRun* run) { bytes += run->ids.memory_bytes(); };
  for (const BlockRun* run = front_; run != nullptr; run = run->after) add(run);
  for_each_copy([&](const BlockRun& run) {
    if (run.references > 0) add(&run);
  });
  return bytes;
}

namespace {

void require_pool(bool holds, const char* what) {
  if (!holds) throw Error(ErrorKind::InvariantViolated, "pool of blocks: ", what);
}

}  // namespace

void BlockPool::check() const {
  require_pool(counts_.free + counts_.cached + counts_.active + counts_.loose == num_blocks_,
               "its blocks are not those that are free, cached, active and loose");
  operations_ += fresh_;
  check_queue();
  check_tree();
}

// A run is in the queue exactly if it is unreferenced, and no block is in two places.
void BlockPool::check_queue() const {
  std::vector<bool> seen(num_blocks_);
  const auto see = [&](SlotId id) {
    require_pool(id < fresh_ && !seen[id], "a block is in two places");
    seen[id] = true;
  };
  std::uint64_t free = num_blocks_ - fresh_;
  std::uint64_t cached = 0;
  std::uint64_t active = 0;
  std::uint64_t references = 0;
  for (const SlotId id : in_front_) see(id);
  free += in_front_.size();
  const BlockRun* before = nullptr;
  for (const BlockRun* run = front_; run != nullptr; before = run, run = run->after) {
    require_pool(run->before == before, "the queue's links disagree");
    require_pool(run->references == 0 && run->size() > 0, "a queued run is referenced or empty");
    require_pool(run->node != nullptr || append_unnamed_, "a run without names is queued");
    for (const SlotId id : run->ids.span()) see(id);
    (run->node == nullptr ? free : cached) += run->size();
  }
  require_pool(before == back_, "the queue has another end");
  std::uint64_t named = 0;
  for_each_copy([&](const BlockRun& run) {
    if (run.references == 0) {
      named += run.size();
      return;
    }
    for (const SlotId id : run.ids.span()) see(id);
    active += run.size();
    references += std::uint64_t{run.size()} * run.references;
  });
  require_pool(named == cached, "an unreferenced run is not in the queue");
  require_pool(
      free == counts_.free && cached == counts_.cached && active == counts_.active && references == counts_.references,
      "its counts are not those of its runs");
}

// Every run has names of its node, and every node is needed.
void BlockPool::check_tree() const {
  std::size_t runs = 0;
  std::size_t unnamed = 0;
  for (const BlockRun* run = front_; run != nullptr; run = run->after) unnamed += run->node == nullptr ? 1 : 0;
  tree_.for_each([&](const PrefixNode& node) {
    std::uint32_t end = 0;
    for (std::uint32_t group = 0; group < num_groups_; ++group) {
      std::uint32_t behind = 0;
      for (const BlockRun* run = node.copies[group]; run != nullptr; run = run->next_copy) {
        ++runs;
        require_pool(run->node == &node && run->size() > 0, "a run is in another node, or empty");
        require_pool(run->group == group, "a run is listed in another group");
        require_pool(node.layered || run->first >= behind,
                     "runs overlap, or are out of order, in a node without layers");
        behind = run->end();
        end = std::max(end, run->end());
      }
    }
    require_pool(end <= node.names.size(), "a run has more blocks than its node has names");
    require_pool(node.children > 0 || end == node.names.size(), "a node has names that nothing needs");
    require_pool(tree_.child(*node.parent, node.names[0]) == &node, "a node is not found by its name");
    require_pool(node.depth == node.parent->depth + node.parent->names.size(), "a node has another depth");
  });
  require_pool(runs + unnamed == runs_.in_use(), "a run is in no node and not in the queue");
}

}  // namespace understudy
