#include "engine/vllm/native_backend.hpp"

#include <algorithm>

#include "base/spares.hpp"

namespace understudy {

namespace {

constexpr std::uint32_t kOutputAhead = 4096;  // tokens that a request's table has room for beforehand

}  // namespace

std::uint64_t NativeBackend::cost(KvRequest&, const KvHit& hit, std::uint32_t tokens) {
  return beyond(hit, tokens) + hit.unreferenced;
}

KvBackend::Room NativeBackend::place(KvRequest& request, const KvHit& hit, std::uint32_t tokens, std::uint32_t total,
                                     std::int64_t now_ns) {
  const std::span<const SlotId> slots = found(hit);
  store_.reference(0, slots);
  // Reserve capacity once: the table fills in chunks and grows with the output.
  const std::uint32_t output = request.spec.outputs() - std::min(request.spec.outputs(), request.outputs());
  const std::uint64_t most = std::uint64_t{request.known} + std::min(output, kOutputAhead);
  if (request.table.capacity() == 0) request.table = Spares<SlotId>::take();
  request.table.reserve(blocks_for(most));
  request.table.assign(slots.begin(), slots.end());
  Room room = Room::Short;
  try {
    room = take(request, beyond(hit, tokens), now_ns);
  } catch (...) {  // user-defined policy
    release(request);
    throw;
  }
  if (room != Room::Taken) {
    release(request);
    return room;
  }
  note_found(slots, now_ns);
  if (store_.policy_kind(0) == PolicyKind::MultiLru) store_.touch(0, slots);  // a hit is a use
  request.keyed = request.keyed_before = static_cast<std::uint32_t>(slots.size());
  name_full(request, total);
  return room;
}

std::uint64_t NativeBackend::phantoms(const KvHit& hit) const {
  if (phantom_.size() == 0) return 0;
  std::uint64_t count = 0;
  for (const SlotId slot : found(hit)) count += phantom_[slot];
  return count;
}

KvBackend::Room NativeBackend::grow(KvRequest& request, std::uint32_t tokens, std::uint32_t total,
                                    std::int64_t now_ns) {
  // Mostly it holds enough, which takes no division to see.
  if (tokens > request.table.size() * std::uint64_t{config_.block_size}) {
    const Room room = take(request, lacks(request, tokens), now_ns);
    if (room != Room::Taken) return room;
  }
  request.keyed_before = request.keyed;
  name_full(request, total);
  return Room::Taken;
}

// Versions with the defect leave the names of an undone allocation: those blocks match though they are never computed.
void NativeBackend::withdraw(KvRequest& request, bool keep_matchable) {
  if (request.keyed == request.keyed_before) return;
  const auto fresh =
      std::span<const SlotId>(request.table).subspan(request.keyed_before, request.keyed - request.keyed_before);
  if (!keep_matchable) {
    if (tiers_) tiers_->hold_copied(request.slot);
    // A request admitted on such a block in the same schedule keeps it, and computes it after all.
    std::size_t shared = fresh.size();
    while (shared > 0 && store_.references(0, fresh[shared - 1]) == 1) --shared;
    store_.unregister(0, fresh.subspan(shared));
    request.keyed = request.keyed_before + static_cast<std::uint32_t>(shared);
    return;
  }
  if (phantom_.size() == 0) phantom_ = HugeArray<std::uint8_t>(config_.num_gpu_blocks);
  for (const SlotId slot : fresh) phantom_[slot] = 1;
}

void NativeBackend::name_blocks(KvRequest& request, std::uint32_t blocks) {
  if (!config_.enable_prefix_caching || blocks <= request.keyed) return;
  need_block_names(request, blocks);
  store_.commit(0, std::span<SlotId>(request.table).subspan(request.keyed, blocks - request.keyed),
                std::span<const BlockIdentity>(request.blocks).subspan(request.keyed, blocks - request.keyed));
  request.keyed = blocks;
}

void NativeBackend::name_full(KvRequest& request, std::uint32_t tokens) {
  const std::uint32_t full =
      std::min(tokens, request.known - std::min(request.known, config_.speculation.hashed_ahead));
  // Mostly no block is, which takes no division to see.
  if (full >= (std::uint64_t{request.keyed} + 1) * config_.block_size) name_blocks(request, full / config_.block_size);
}

void NativeBackend::handed_out(std::span<const SlotId> slots) {
  if (phantom_.size() == 0) return;
  for (const SlotId slot : slots) phantom_[slot] = 0;
}

}  // namespace understudy
