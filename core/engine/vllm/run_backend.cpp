#include "engine/vllm/run_backend.hpp"

#include <algorithm>

#include "base/assert.hpp"
#include "base/spares.hpp"

namespace understudy {

namespace {

std::uint64_t checked_blocks(const VllmConfig& config) {
  if (config.num_gpu_blocks < 1 || config.num_gpu_blocks > BlockStore::kMaxBlocks) {
    throw Error(ErrorKind::ConfigError, "num_blocks must be in 1..", BlockStore::kMaxBlocks, ", got ",
                config.num_gpu_blocks);
  }
  return config.num_gpu_blocks;
}

}  // namespace

bool RunBackend::serves(const VllmConfig& config) noexcept {
  return config.kv_manager == KvManagerKind::Native && config.groups.empty() && !config.eviction &&
         config.stay_sample == 0;
}

RunBackend::RunBackend(const VllmConfig& config, bool append_unnamed, BlockStore* host)
    : config_(config),
      append_unnamed_(append_unnamed),
      hashes_(!config.private_names || Announcer::wanted(config)),
      pool_(checked_blocks(config), append_unnamed),
      rows_(config, pool_, host) {}

// ── Admission ──

KvHit RunBackend::find(KvRequest& request, std::uint32_t limit_tokens) {
  if (!config_.enable_prefix_caching) return {};
  const std::size_t limit = limit_tokens / config_.block_size;
  need_block_names(request, limit);
  found_ = pool_.find(std::span<const BlockName>(request.names).first(limit));
  return {found_.blocks * config_.block_size, found_.unreferenced};
}

std::uint64_t RunBackend::beyond(const KvHit& hit, std::uint32_t tokens) const {
  const std::uint64_t blocks = blocks_for(tokens);
  return blocks - std::min<std::uint64_t>(blocks, hit.tokens / config_.block_size);
}

std::uint64_t RunBackend::cost(KvRequest&, const KvHit& hit, std::uint32_t tokens) {
  return beyond(hit, tokens) + hit.unreferenced;
}

KvBackend::Room RunBackend::place(KvRequest& request, const KvHit& hit, std::uint32_t tokens, std::uint32_t total,
                                  std::int64_t now_ns) {
  if (request.runs.loose.capacity() == 0) request.runs.loose = Spares<SlotId>::take();
  if (request.runs.runs.capacity() == 0) request.runs.runs = Spares<HeldRun>::take();
  if (hit.tokens > 0) pool_.touch(request.runs);
  UNDERSTUDY_ASSERT(request.runs.named == hit.tokens / config_.block_size, "places the hit of the last lookup");
  const Room room = take(request, beyond(hit, tokens), now_ns);
  if (room != Room::Taken) {
    release(request);
    return room;
  }
  request.keyed = request.keyed_before = request.runs.named;
  name_full(request, total);
  return Room::Taken;
}

// ── While it runs ──

KvBackend::Room RunBackend::grow(KvRequest& request, std::uint32_t tokens, std::uint32_t total, std::int64_t now_ns) {
  // Mostly it holds enough, which takes no division to see.
  if (tokens > request.runs.size() * std::uint64_t{config_.block_size}) {
    const Room room = take(request, lacks(request, tokens), now_ns);
    if (room != Room::Taken) return room;
  }
  request.keyed_before = request.keyed;
  name_full(request, total);
  return Room::Taken;
}

// Versions with the defect leave the names of an undone allocation: those blocks match though they are never computed.
void RunBackend::withdraw(KvRequest& request, bool keep_matchable) {
  if (request.keyed == request.keyed_before) return;
  if (keep_matchable) {
    pool_.mark_phantoms(request.runs, request.keyed_before);
    return;
  }
  pool_.withdraw(request.runs, request.keyed_before);
  request.keyed = request.runs.named;
}

void RunBackend::release(KvRequest& request) {
  pool_.free_blocks(request.runs);
  request.keyed = 0;
}

void RunBackend::release_table(KvTable table) {
  pool_.free_blocks(table.runs);
  Spares<SlotId>::keep(std::move(table.runs.loose));
  Spares<HeldRun>::keep(std::move(table.runs.runs));
}

std::uint64_t RunBackend::lacks(const KvRequest& request, std::uint64_t tokens) const {
  const std::uint64_t blocks = blocks_for(tokens);
  return blocks - std::min<std::uint64_t>(blocks, request.runs.size());
}

void RunBackend::need_block_names(KvRequest& request, std::size_t blocks) {
  if (request.names.size() >= blocks) return;
  if (request.names.capacity() == 0) request.names = Spares<BlockName>::take();
  if (hashes_ && config_.offload && request.blocks.size() < blocks) {  // the host names blocks as a whole
    request.spec.identities->extend(request.blocks, blocks);
  }
  for (std::size_t i = request.names.size(); hashes_ && i < request.blocks.size(); ++i) {
    request.names.push_back(request.blocks[i].sequence_hash());
  }
  request.spec.identities->extend_names(request.names, blocks, hashes_);
}

KvBackend::Room RunBackend::take(KvRequest& request, std::size_t count, std::int64_t now_ns) {
  if (count == 0) return Room::Taken;
  if (count > pool_.num_free()) return Room::Short;
  const std::uint64_t evictions = pool_.counts().evictions;
  pool_.get_new_blocks(count, request.runs.loose);
  if (config_.kv_trace) note_taken(count, evictions, now_ns);
  return Room::Taken;
}

void RunBackend::note_taken(std::size_t taken, std::uint64_t evictions_before, std::int64_t now_ns) {
  const PoolCounts& counts = pool_.counts();
  const auto note = [&](bool eviction, std::size_t blocks) {
    if (blocks == 0) return;
    trace_.push_back({now_ns, {eviction, blocks, counts.free, counts.active + counts.loose, counts.cached}});
  };
  note(false, taken);
  note(true, static_cast<std::size_t>(counts.evictions - evictions_before));
}

void RunBackend::name_blocks(KvRequest& request, std::uint32_t blocks) {
  if (!config_.enable_prefix_caching || blocks <= request.keyed) return;
  need_block_names(request, blocks);
  if (rows_.wants_identities()) {
    if (request.blocks.capacity() == 0) request.blocks = Spares<BlockIdentity>::take();
    if (request.blocks.size() < blocks) request.spec.identities->extend(request.blocks, blocks);
    rows_.set_identities(request.blocks);
  }
  pool_.cache_full_blocks(request.runs, std::span<const BlockName>(request.names).first(blocks));
  request.keyed = blocks;
}

void RunBackend::name_full(KvRequest& request, std::uint32_t tokens) {
  const std::uint32_t full =
      std::min(tokens, request.known - std::min(request.known, config_.speculation.hashed_ahead));
  // Mostly no block is, which takes no division to see.
  if (full >= (std::uint64_t{request.keyed} + 1) * config_.block_size) name_blocks(request, full / config_.block_size);
}

// ── Watch ──

PoolMetrics RunBackend::metrics() const {
  const PoolCounts& counts = pool_.counts();
  PoolMetrics m;
  m.allocations = counts.allocations;
  m.evictions = counts.evictions;
  m.allocations_from_reset = counts.allocations - counts.evictions;
  m.registrations = counts.registrations;
  m.total_blocks = pool_.num_blocks();
  m.reset_blocks = counts.free;
  m.mutable_blocks = counts.loose;
  m.active_blocks = counts.active;
  m.inactive_blocks = counts.cached;
  m.active_references = counts.references;
  return m;
}

}  // namespace understudy
