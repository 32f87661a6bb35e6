// State groups: where a prompt is split so that a state can be kept, and the keys of states.
#include <algorithm>

#include "engine/vllm/groups/block_groups.hpp"

namespace understudy {

namespace {

// Whether a chunk from `start` to `end` can keep the state at `point`, in blocks of `block` tokens.
bool inside_chunk(std::uint32_t start, std::uint32_t end, std::uint32_t point, std::uint32_t block, std::uint32_t unit,
                  std::uint32_t alignment) {
  const auto before = start == 0 ? std::int64_t{-1} : std::int64_t{(start - 1) / block};
  return start % unit == 0 && std::int64_t{ceil_div(end, block)} - 2 > before && start + unit <= point && point < end &&
         (point - start) % alignment == 0;
}

}  // namespace

// The end of a prompt, or of what a resumed request computes again.
std::uint32_t BlockGroups::stop_of(const KvRequest& request) const {
  return std::max(request.spec.prompt_tokens, request.known - 1);
}

std::optional<BlockGroups::Checkpoint> BlockGroups::checkpoint(const KvRequest& request, const GroupTable& table,
                                                               const KvGroup& group, std::uint32_t start,
                                                               std::uint32_t end) const {
  if (group.checkpoint_blocks == 0 || end == 0) return std::nullopt;
  if (layout_.retention == std::uint32_t{0} && end < stop_of(request)) return std::nullopt;
  const std::uint32_t point = (end - 1) / layout_.hit_unit * layout_.hit_unit;
  if (!inside_chunk(start, end, point, group.block_size, layout_.hash_block, group.checkpoint_alignment)) {
    return std::nullopt;
  }
  const std::uint32_t index = ceil_div(end, group.block_size) - 2;
  if (index < table.blocks.size() && table.blocks[index] != kNoSlot) return std::nullopt;
  return Checkpoint{point, index};
}

// Whether the last state that is kept lies inside the chunk, for every state group.
bool BlockGroups::ends_internally(const KvRequest& request, std::uint32_t start, std::uint32_t end) const {
  const std::uint32_t stop = stop_of(request);
  if (end < stop) return false;
  const KvGroup* first = nullptr;
  for (const KvGroup& group : layout_.groups) {
    if (!group.state()) continue;
    if (group.checkpoint_blocks == 0) return false;
    if (first == nullptr) first = &group;
  }
  const std::uint32_t unit = layout_.partial_hits ? layout_.hash_block : layout_.scheduler_block;
  const std::uint32_t point = (stop - 1) / unit * unit;
  return inside_chunk(start, end, point, layout_.block, layout_.hash_block, first->checkpoint_alignment);
}

std::uint32_t BlockGroups::split(const KvRequest& request, std::uint32_t start, std::uint32_t tokens) const {
  const std::uint32_t stop = stop_of(request);
  if (!layout_.has_states || start >= stop) return tokens;
  const std::uint32_t block = layout_.block;
  std::uint32_t end = start + tokens;
  const bool internal = ends_internally(request, start, end);
  const std::uint32_t last = internal ? 0 : (request.known - 1) / block * block;
  if (end < stop) {
    // The threshold counts also for a lone request, whose chunks it does not limit.
    const std::uint32_t threshold = config_.long_prefill_token_threshold;
    const std::uint32_t most =
        threshold > 0 ? std::min(config_.max_num_batched_tokens, threshold) : config_.max_num_batched_tokens;
    const std::uint32_t rounded = end / block * block;
    if (rounded > start || block <= most) {
      end = std::max(rounded, start);
    }
  }
  std::uint32_t nearest = end;
  const auto consider = [&](std::uint32_t point) {
    if (start < point && point < nearest) nearest = point;
  };
  if (start % block != 0 && !internal) consider(ceil_div(start, block) * block);
  consider(last);
  const std::uint32_t prompt = request.spec.prompt_tokens;
  const std::uint32_t tail = (prompt - 1) / layout_.hash_block * layout_.hash_block;
  if (layout_.partial_hits && !internal && last < tail && tail < prompt) consider(tail);
  const std::uint32_t junction = request.slot < records_.size() ? records_[request.slot].junction : 0;
  if (start < junction && junction < end) consider(start + (junction - start) / block * block);
  return nearest - start;
}

void BlockGroups::key_state(KvRequest& request, Record& r, std::size_t g, std::uint32_t tokens) {
  const KvGroup& group = layout_.groups[g];
  GroupTable& table = r.groups[g];
  const std::uint32_t prompt = request.spec.prompt_tokens;
  if (table.checkpoint) {
    const auto [end, index] = *table.checkpoint;
    const SlotId block = index < table.blocks.size() ? table.blocks[index] : kNoSlot;
    if (block == kNoSlot) return;
    const bool kept = end == (prompt - 1) / layout_.hit_unit * layout_.hit_unit || end == r.junction ||
                      (end % group.block_size == 0 && keeps(request, r, group, end / group.block_size - 1, false));
    if (!kept) {
      pool_.drop_keys(block);
    } else if (!pool_.has_key(block, end)) {
      pool_.drop_keys(block);
      store_unit(request, block, g, end);
    }
    return;
  }
  if (tokens == 0 || tokens != (prompt - 1) / layout_.hash_block * layout_.hash_block) return;
  const std::uint32_t index = ceil_div(tokens, group.block_size) - 1;
  if (index >= table.blocks.size() || table.blocks[index] == kNoSlot) return;
  const SlotId block = table.blocks[index];
  if (!pool_.has_key(block, tokens)) {
    pool_.drop_shorter(block, tokens);  // a longer one: tokens of a hit are computed again
    store_unit(request, block, g, tokens);
  }
  if (tokens % group.block_size == 0) return;
  table.tail = Tail::Own;
  table.keyed = index;
}

void BlockGroups::keep_states(const KvRequest& request, std::size_t g, std::uint32_t first, std::uint32_t end) {
  const std::vector<SlotId>& blocks = records_[request.slot].groups[g].blocks;
  for (std::uint32_t i = first; i < end; ++i) {
    if (blocks[i] != kNoSlot) keep_state(request, g, blocks[i]);
  }
}

void BlockGroups::keep_state(const KvRequest& request, std::size_t g, SlotId block) {
  const std::uint32_t end = pool_.longest_key(block);
  if (end == 0 || (lists_states_ == KeptStates::OfPrompts && end > request.spec.prompt_tokens)) return;
  kept_states_.push_back({request.slot, g, block, end, request.blocks[end / layout_.hash_block - 1]});
}

bool BlockGroups::lists_state(const KvRequest& request, std::uint32_t position) const {
  if (lists_states_ == KeptStates::None) return false;
  const Record& r = records_[request.slot];
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    if (!group.state() || next_keys(r.groups[g], group) > position) continue;
    const std::uint64_t first = (std::uint64_t{r.groups[g].keyed} + 1) * group.block_size;
    if (lists_states_ == KeptStates::All || first <= request.spec.prompt_tokens) return true;
  }
  return false;
}

}  // namespace understudy
