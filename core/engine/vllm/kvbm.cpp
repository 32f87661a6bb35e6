// Blocks under the kvbm manager: one physical block a hash, shared by all who want it and visible once acquired.
#include <algorithm>

#include "engine/vllm/engine.hpp"

namespace understudy {

// Leading blocks that have a name: those of the prompt that are full, and of the output those that are complete and
// followed by a token.
std::uint32_t VllmEngine::named_blocks(const EngineRequest& request) const noexcept {
  return std::max(request.spec.prompt_tokens, request.known - 1) / config_.block_size;
}

// What blocks [table.size(), count) would take: those that nobody holds. Leaves in peeked_ and holders_ where the
// named ones are.
std::uint64_t VllmEngine::cost_of_shared(EngineRequest& request, std::size_t count) {
  const std::size_t held = request.table.size();
  const std::size_t named = std::clamp<std::size_t>(named_blocks(request), held, count);
  need_identities(request, named);
  peeked_.resize(named - held);
  holders_.resize(named - held);
  store_.peek(0, std::span<const BlockIdentity>(request.blocks).subspan(held, named - held), peeked_.data(),
              holders_.data());
  const auto unheld = std::count(holders_.begin(), holders_.end(), 0u);
  return count - named + static_cast<std::uint64_t>(unheld);
}

// Blocks up to `count`, or nothing changed.
VllmEngine::Room VllmEngine::take_shared(RequestSlot id, std::size_t count, std::int64_t now_ns) {
  EngineRequest& request = requests_[id];
  if (emits_) events_.add(store_.drain_events(~std::size_t{0}));  // not of this allocation
  const std::uint64_t cost = cost_of_shared(request, count);
  if (!tiers_ && cost > store_.available(0)) return Room::Short;
  const std::size_t held = request.table.size();
  const std::size_t named = held + peeked_.size();
  // Blocks that are here first, so that making room for the others cannot evict them. Only what nobody held counts
  // as used again.
  std::size_t fresh = count - named;
  for (std::size_t i = 0; i < peeked_.size(); ++i) {
    if (holders_[i] > 0) {
      store_.retain(0, {&peeked_[i], 1});
    } else if (peeked_[i] != kNoSlot) {
      store_.match_scattered(0, {&request.blocks[held + i], 1}, &peeked_[i]);
    } else {
      ++fresh;
    }
  }
  fresh_.resize(fresh);
  const std::uint64_t evictions = config_.kv_trace ? store_.metrics(0).evictions : 0;
  if (!tiers_) {
    store_.allocate(0, fresh_);
  } else {
    const auto undo = [&] {
      std::erase(peeked_, kNoSlot);
      store_.release(0, peeked_, true);
    };
    Room room = Room::Short;
    try {
      room = tiers_->take(id, now_ns, fresh_);
    } catch (...) {  // a policy of the user's
      undo();
      throw;
    }
    if (room != Room::Taken) {
      undo();
      return room;
    }
  }

  request.table.resize(count);
  std::size_t next = 0;
  for (std::size_t at = held; at < count;) {
    if (at < named && peeked_[at - held] != kNoSlot) {
      request.table[at] = peeked_[at - held];
      ++at;
      continue;
    }
    const std::size_t first = at;
    while (at < count && (at >= named || peeked_[at - held] == kNoSlot)) request.table[at++] = fresh_[next++];
    const std::size_t stored = std::min(at, named) - std::min(first, named);
    if (stored > 0) {
      store_.commit(0, std::span<SlotId>(request.table).subspan(first, stored),
                    std::span<const BlockIdentity>(request.blocks).subspan(first, stored));
    }
  }
  // Asynchronously, the last block held may still wait for its name; then these have none either.
  if (named > held) request.keyed = static_cast<std::uint32_t>(named);
  if (emits_) events_.add_stored_first(store_.drain_events(~std::size_t{0}));
  if (config_.kv_trace) trace_taken(fresh, evictions);
  return Room::Taken;
}

// Blocks that were partial and have a name now join the others, or give way to the one that is here already.
void VllmEngine::seal_blocks(EngineRequest& request, std::uint32_t named) {
  named = std::min(named, static_cast<std::uint32_t>(request.table.size()));
  if (named <= request.keyed) return;
  need_identities(request, named);
  for (; request.keyed < named; ++request.keyed) {
    const BlockIdentity& identity = request.blocks[request.keyed];
    SlotId& slot = request.table[request.keyed];
    SlotId existing = kNoSlot;
    std::uint32_t holders = 0;
    store_.peek(0, {&identity, 1}, &existing, &holders);
    if (existing == kNoSlot) {
      store_.commit(0, {&slot, 1}, {&identity, 1});
      continue;
    }
    if (holders > 0) {
      store_.retain(0, {&existing, 1});
    } else {
      store_.match_scattered(0, {&identity, 1}, &existing);
    }
    store_.release(0, {&slot, 1});
    slot = existing;
  }
}

}  // namespace understudy
