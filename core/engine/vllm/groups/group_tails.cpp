// States of vLLM's native host offload, and chunks that end with them inside a block (tails).
#include <algorithm>

#include "engine/vllm/groups/group_offload.hpp"

namespace understudy {

std::optional<std::uint32_t> GroupOffload::scan_tails(State& state, const KvRequest& request, std::uint32_t local,
                                                      std::uint32_t hit) {
  const std::uint32_t unit = layout_.hash_block;
  const std::uint32_t whole = local + hit;
  const std::uint32_t last = std::min(request.spec.prompt_tokens - 1, whole + state_chunk_ - 1) / unit * unit;
  bool writing = false;
  for (std::uint32_t end = last; end > whole; end -= unit) {
    bool all = true;
    bool ready = true;
    for (const std::size_t g : offloaded_) {
      const VllmHost::Found found = find(state, request.blocks, {g, end});
      all = found.chunks > 0;
      if (!all) break;
      ready = ready && !found.writing;
    }
    if (all && ready) return end - local;
    writing = writing || !ready;
  }
  if (writing && hit == 0) return std::nullopt;
  return hit;
}

// Those that end with a chunk, one by one; then those inside a block, together with the tails of the other groups.
void GroupOffload::store_states(std::vector<BlockGroups::KeptState> states) {
  using KeptState = BlockGroups::KeptState;
  std::ranges::stable_sort(states, {}, &KeptState::group);
  std::vector<RequestSlot> slots;  // in the order of their first states
  for (const KeptState& kept : states) {
    if (std::ranges::find(slots, kept.slot) == slots.end()) slots.push_back(kept.slot);
  }
  const auto of_request = [&](RequestSlot slot, bool tails) {
    std::vector<KeptState> out;
    std::ranges::copy_if(states, std::back_inserter(out), [&](const KeptState& kept) {
      const std::uint32_t size = tails ? groups_[kept.group].block : groups_[kept.group].chunk;
      return kept.slot == slot && (kept.end % size != 0) == tails;
    });
    return out;
  };
  for (const RequestSlot slot : slots) {
    for (const KeptState& kept : of_request(slot, false)) store_end(kept, {&kept.group, 1}, {&kept.block, 1});
  }
  if (!has_tails_) return;
  for (const RequestSlot slot : slots) {
    const std::vector<KeptState> tails = of_request(slot, true);
    if (!tails.empty()) store_tail(tails);
  }
}

void GroupOffload::store_tail(std::span<const BlockGroups::KeptState> states) {
  const std::size_t place = states.front().end / state_chunk_;
  std::vector<SlotId> blocks;
  for (const std::size_t g : offloaded_) {
    const std::vector<SlotId>& held = states_[seats_[states.front().slot].tracked].groups[g].blocks;
    const auto state = std::ranges::find(states, g, &BlockGroups::KeptState::group);
    if (layout_.groups[g].state() ? state == states.end() : place >= held.size()) return;
    blocks.push_back(layout_.groups[g].state() ? state->block : held[place]);
  }
  store_end(states.front(), offloaded_, blocks);
}

void GroupOffload::store_end(const BlockGroups::KeptState& state, std::span<const std::size_t> groups,
                             std::span<const SlotId> blocks) {
  const std::uint32_t index = seats_[state.slot].tracked;
  chosen_.clear();
  clear_gathered();
  for (const std::size_t g : groups) {
    chosen_.push_back({g, state.end});
    gather_one(states_[index], chosen_.back(), state.last);
  }
  bool room = false;
  OffloadJob* const job = offer(index, room);
  if (job == nullptr) return;
  for (const std::uint32_t place : places_) {
    job->device.push_back(blocks[place]);
    fenced_[blocks[place]].push_back(job->id);
  }
  log_store(*job);
}

}  // namespace understudy
