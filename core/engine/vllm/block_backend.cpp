#include "engine/vllm/block_backend.hpp"

#include "base/spares.hpp"

namespace understudy {

namespace {

constexpr std::uint64_t kPrivateSeed = 0x6B76626DULL;

}  // namespace

KvHit BlockBackend::find(KvRequest& request, std::uint32_t limit_tokens) {
  if (!config_.enable_prefix_caching) return {};
  const std::size_t limit = limit_tokens / config_.block_size;
  need_block_names(request, limit);
  if (hits_.size() < limit) hits_.resize(limit);  // existing entries serve as guesses
  KvHit hit;
  const std::size_t blocks = store_.peek_prefix(0, std::span<const BlockIdentity>(request.blocks).first(limit),
                                                hits_.data(), &hit.unreferenced);
  hit.tokens = static_cast<std::uint32_t>(blocks * config_.block_size);
  return hit;
}

void BlockBackend::trim(KvRequest& request, std::uint32_t tokens) {
  const std::size_t blocks = blocks_for(tokens);
  if (blocks == request.table.size()) return;
  if (tiers_) tiers_->hold_copied(request.slot);
  store_.release(0, std::span<const SlotId>(request.table).subspan(blocks), true);
  request.table.resize(blocks);
}

void BlockBackend::release(KvRequest& request) {
  if (tiers_) tiers_->hold_copied(request.slot);
  store_.release(0, request.table, true);
  request.table.clear();
  request.keyed = 0;
}

void BlockBackend::release_table(KvTable table) {
  store_.release(0, table.ids, true);
  Spares<SlotId>::keep(std::move(table.ids));
}

// Hand out all blocks, which evicts the cached ones, and take them back in that order.
void BlockBackend::reset() {
  std::vector<SlotId> all(available());
  if (asks_user() || all.empty()) return forget_cached();
  store_.allocate(0, all);
  store_.release(0, all);
}

void BlockBackend::need_block_names(KvRequest& request, std::size_t blocks) {
  if (request.blocks.size() >= blocks) return;
  if (request.blocks.capacity() == 0) request.blocks = Spares<BlockIdentity>::take();
  if (config_.enable_prefix_caching) {
    request.spec.identities->extend(request.blocks, blocks);
    return;
  }
  // Unique names that stay equal for the request's life.
  while (request.blocks.size() < blocks) {
    const auto position = static_cast<std::uint32_t>(request.blocks.size());
    request.blocks.push_back(
        {LineageHash::make(xxh3_64_pair(request.id, position, kPrivateSeed), false, 0, position), 0, 0});
  }
}

KvBackend::Room BlockBackend::take(KvRequest& request, std::size_t count, std::int64_t now_ns) {
  if (count == 0) return Room::Taken;
  if (!tiers_ && count > store_.available(0)) return Room::Short;
  const std::size_t held = request.table.size();
  request.table.resize(held + count);
  Room room = Room::Short;
  try {
    room = take_slots(request.slot, std::span<SlotId>(request.table).subspan(held), now_ns);
  } catch (...) {  // user-defined policy
    request.table.resize(held);
    throw;
  }
  if (room != Room::Taken) request.table.resize(held);
  return room;
}

KvBackend::Room BlockBackend::take_slots(RequestSlot who, std::span<SlotId> out, std::int64_t now_ns) {
  const std::uint64_t evictions = config_.kv_trace ? store_.metrics(0).evictions : 0;
  if (!tiers_) {
    store_.allocate(0, out);
  } else if (const Room room = tiers_->take(who, now_ns, out); room != Room::Taken) {
    return room;
  }
  if (config_.kv_trace) trace(out.size(), evictions, now_ns);
  if (stays_) stays_->handed_out(out, now_ns, config_.enable_prefix_caching);
  handed_out(out);
  return Room::Taken;
}

std::vector<std::uint64_t> BlockBackend::contents() const {
  std::vector<std::uint64_t> names;
  for (const BlockIdentity& block : store_.resident(0)) names.push_back(block.sequence_hash());
  return names;
}

void BlockBackend::trace(std::size_t taken, std::uint64_t evictions_before, std::int64_t now_ns) {
  const PoolMetrics m = store_.metrics(0);
  const auto note = [&](bool eviction, std::size_t blocks) {
    if (blocks == 0) return;
    const std::uint64_t active = m.total_blocks - m.reset_blocks - m.inactive_blocks;
    trace_.push_back({now_ns, {eviction, blocks, m.reset_blocks, active, m.inactive_blocks}});
  };
  note(false, taken);
  note(true, static_cast<std::size_t>(m.evictions - evictions_before));
}

}  // namespace understudy
