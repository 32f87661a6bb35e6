#include "engine/vllm/kvbm_backend.hpp"

#include <algorithm>

namespace understudy {

// Leading blocks that have a name: those of the prompt that are full, and of the output those that are complete and
// followed by a token.
std::uint32_t KvbmBackend::named_blocks(const KvRequest& request) const noexcept {
  return std::max(request.spec.prompt_tokens, request.known - 1) / config_.block_size;
}

// The named blocks among [table.size(), blocks): the first ones.
std::span<const BlockIdentity> KvbmBackend::names_to_take(KvRequest& request, std::size_t blocks) {
  const std::size_t held = request.table.size();
  const std::size_t named = std::clamp<std::size_t>(named_blocks(request), held, blocks);
  need_block_names(request, named);
  return std::span<const BlockIdentity>(request.blocks).subspan(held, named - held);
}

// Exact: blocks behind the first that is missing may be here too.
std::uint64_t KvbmBackend::cost(KvRequest& request, const KvHit&, std::uint32_t tokens) {
  const std::uint64_t blocks = blocks_for(tokens);
  const std::span<const BlockIdentity> names = names_to_take(request, blocks);
  return blocks - request.table.size() - names.size() + shared_.look(names);
}

KvBackend::Room KvbmBackend::grow(KvRequest& request, std::uint32_t tokens, std::uint32_t, std::int64_t now_ns) {
  const std::size_t held = request.table.size();
  if (tokens <= held * std::uint64_t{config_.block_size}) return Room::Taken;
  const std::size_t blocks = blocks_for(tokens);
  if (log_ != nullptr) log_->add(store_.drain_events(~std::size_t{0}));  // rows from before this allocation
  const std::span<const BlockIdentity> names = names_to_take(request, blocks);
  const std::size_t unnamed = blocks - held - names.size();
  const std::uint64_t unheld = shared_.look(names);
  if (!tiers_ && unnamed + unheld > store_.available(0)) return Room::Short;
  shared_.hold(names);
  fresh_.resize(unnamed + shared_.missing());
  Room room = Room::Short;
  try {
    room = take_slots(request.slot, fresh_, now_ns);
  } catch (...) {  // user-defined policy
    shared_.undo_hold();
    throw;
  }
  if (room != Room::Taken) {
    shared_.undo_hold();
    return room;
  }
  const std::size_t used = shared_.store(names, fresh_);
  request.table.insert(request.table.end(), shared_.slots().begin(), shared_.slots().end());
  request.table.insert(request.table.end(), fresh_.begin() + static_cast<std::ptrdiff_t>(used), fresh_.end());
  // Asynchronously, the last block held may still wait for its name; then these have none either.
  if (!names.empty()) request.keyed = static_cast<std::uint32_t>(held + names.size());
  if (log_ != nullptr) log_->add_stored_first(store_.drain_events(~std::size_t{0}));
  return Room::Taken;
}

void KvbmBackend::received(KvRequest& request, std::uint32_t) { name_blocks(request, named_blocks(request)); }

// Name blocks that were partial: each becomes matchable, or is replaced by the resident block of that name.
void KvbmBackend::name_blocks(KvRequest& request, std::uint32_t blocks) {
  blocks = std::min(blocks, static_cast<std::uint32_t>(request.table.size()));
  if (blocks <= request.keyed) return;
  need_block_names(request, blocks);
  for (; request.keyed < blocks; ++request.keyed) {
    shared_.seal(request.table[request.keyed], request.blocks[request.keyed]);
  }
}

}  // namespace understudy
