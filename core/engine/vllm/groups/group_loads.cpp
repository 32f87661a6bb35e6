// Room for blocks that a host loads, and what a request leaves behind meanwhile.
#include <algorithm>

#include "base/assert.hpp"
#include "engine/vllm/groups/grouped_backend.hpp"

namespace understudy {

void GroupedBackend::truncate(KvHit& hit, std::uint32_t tokens) {
  hit.tokens = tokens;
  hit.unreferenced = 0;
  for (std::size_t g = 0; g < hits_.size(); ++g) {
    hits_[g].resize(std::min<std::size_t>(hits_[g].size(), tokens / layout_.groups[g].block_size));
    unreferenced_[g] = static_cast<std::uint64_t>(std::ranges::count_if(
        hits_[g], [this](SlotId block) { return block != kNoSlot && pool_.references(block) == 0; }));
    hit.unreferenced += unreferenced_[g];
  }
}

std::uint64_t GroupedBackend::load_cost(const KvRequest& request, std::uint32_t total, std::uint32_t slots,
                                        bool whole) {
  const Record& r = record(request);
  std::uint64_t blocks = 0;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    if (group.state()) {
      const std::vector<SlotId>& hits = hits_[g];
      if (!hits.empty() && hits.back() != kNoSlot && pool_.is_fresh(hits.back())) return kImpossible;
      const std::size_t states = ceil_div(slots, group.block_size);
      const bool point = whole && checkpoint(request, r.groups[g], group, total, slots);
      blocks += std::min<std::size_t>(states - std::min(states, hits.size()), point ? 2 : 1) + unreferenced_[g];
      continue;
    }
    std::size_t want = group.kind == GroupKind::Circular ? 1 : ceil_div(slots, group.block_size);
    if (whole && layout_.caps[g]) want = std::min<std::size_t>(want, *layout_.caps[g]);
    const std::size_t gone = group.skipped(total) / group.block_size;
    blocks += want - std::min(want, std::max(gone, hits_[g].size()));
    for (std::size_t i = gone; i < hits_[g].size(); ++i) {
      blocks += hits_[g][i] != kNoSlot && pool_.references(hits_[g][i]) == 0;
    }
  }
  return blocks;
}

void GroupedBackend::place_load(KvRequest& request, std::uint32_t total) {
  Record& r = record(request);
  for (GroupTable& table : r.groups) table.checkpoint.reset();  // of an admission that failed
  adopt(r, total, false);
  grow_all(request, r, total);
  r.computed = r.computed_before = r.computed_earlier = total;
  r.last_tokens = 0;
  r.last_schedule = 0;
  remember_keyed(r);
}

void GroupedBackend::remember_keyed(Record& r) {
  r.keyed_before = r.keyed;
  for (GroupTable& table : r.groups) table.keyed_before = table.keyed;
}

std::uint32_t GroupedBackend::processed(const KvRequest& request, std::uint32_t computed, std::uint64_t last,
                                        std::uint64_t processed) const {
  if (last <= processed || request.slot >= records_.size()) return computed;
  const Record& r = records_[request.slot];
  return last - 1 <= processed ? r.computed_before : r.computed_earlier;
}

bool GroupedBackend::fits_behind(const KvRequest& request, std::uint32_t tokens, std::uint64_t spare,
                                 bool reserves_whole) {
  if (reserves_whole && lacks_whole(request) + spare > pool_.num_free()) return false;
  Record& r = record(request);
  slide(request, r, r.computed);
  return need_all(request, r.computed, tokens, false, false) + spare <= pool_.num_free();
}

std::uint64_t GroupedBackend::lacks_whole(const KvRequest& request) {
  const Record& r = record(request);
  const std::uint32_t start = r.last_schedule == schedule_ ? r.computed_before : r.computed;  // before this schedule
  return need_all(request, start, std::min(request.known, config_.max_model_len), false, true);
}

// Copies stay ordered: they only read and write blocks that are referenced until the schedule ends.
void GroupedBackend::withdraw(KvRequest& request, bool keep_matchable) {
  Record& r = record(request);
  if (keep_matchable) return;
  forget_states(request);
  for (GroupTable& table : r.groups) {
    for (std::size_t i = table.keyed_before; i < table.blocks.size(); ++i) {
      if (table.blocks[i] != kNoSlot) pool_.drop_new(table.blocks[i]);
    }
    table.keyed = table.keyed_before;
  }
  r.keyed = r.keyed_before;
  r.next_key = 0;
  r.computed = r.computed_before;
}

}  // namespace understudy
