#include "engine/kvbm/kv_manager.hpp"

#include <algorithm>
#include <map>

#include "tokens/lineage_text.hpp"

namespace understudy {

namespace {

std::shared_ptr<BlockStore> make_store(const KvManagerConfig& config) {
  const bool native = config.backend == KvManagerKind::Native;
  PoolConfig pool;
  pool.num_blocks = config.num_gpu_blocks;
  pool.policy = config.eviction;
  if (native) pool.policy.kind = PolicyKind::Vllm;
  pool.duplicates = native ? DuplicatePolicy::Keep : DuplicatePolicy::Reject;
  StoreConfig store;
  store.block_size = config.block_size;
  store.dp_rank = config.dp_rank;
  store.pools = {pool};
  store.events.enabled = config.events;
  store.events.token_ids = config.event_token_ids;
  store.thread_safe = false;
  return std::make_shared<BlockStore>(store);
}

std::vector<BlockIdentity> full_blocks(std::span<const KvBlock> blocks) {
  std::vector<BlockIdentity> out;
  out.reserve(blocks.size());
  for (const KvBlock& block : blocks) {
    if (block.full) out.push_back(block.identity);
  }
  return out;
}

// A lineage hash includes its position, so blocks in order of position cannot repeat.
bool rising(std::span<const BlockIdentity> blocks) {
  return std::is_sorted(blocks.begin(), blocks.end(),
                        [](const BlockIdentity& a, const BlockIdentity& b) { return a.position() <= b.position(); });
}

}  // namespace

KvManager::KvManager(const KvManagerConfig& config) : config_(config), store_(make_store(config)), shared_(*store_) {}

void KvManager::require_kvbm(const char* call) const {
  if (config_.backend == KvManagerKind::Kvbm) return;
  throw Error(ErrorKind::WrongState, call, " needs backend='kvbm'; with 'native', blocks are held by leases");
}

void KvManager::check_tokens(std::size_t blocks, std::span<const Token> tokens) const {
  const std::size_t expected = blocks * config_.block_size;
  if (tokens.size() == expected || (tokens.empty() && !store_->emits_token_ids())) return;
  throw Error(ErrorKind::InvalidArgument, "token_ids must hold ", expected, " tokens for ", blocks, " full blocks of ",
              config_.block_size, ", got ", tokens.size());
}

void KvManager::log_call(std::span<const StoredRun> runs) {
  if (config_.events) log_.add(store_->drain_events(~std::size_t{0}), runs);
}

void KvManager::trace(std::size_t allocated, std::size_t evicted) {
  if (!config_.trace) return;
  const PoolMetrics now = store_->metrics(0);
  const auto note = [&](bool eviction, std::size_t blocks) {
    if (blocks == 0) return;
    trace_.push_back({eviction, blocks, now.reset_blocks, active_blocks(), now.inactive_blocks});
  };
  note(false, allocated);
  note(true, evicted);
}

// ── Acquire ──

std::vector<KvManager::Use> KvManager::classify(std::span<const KvBlock> blocks) {
  const std::vector<BlockIdentity> fulls = full_blocks(blocks);
  shared_.look(fulls);

  const bool distinct = rising(fulls);
  std::map<LineageHash, std::size_t> named;  // positions in this call, here and in the next
  std::map<PartialId, std::size_t> opened;
  std::vector<Use> uses(blocks.size());
  std::size_t full = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    Use& use = uses[i];
    if (!blocks[i].full) {
      const auto held = partials_.find(blocks[i].partial);
      if (held != partials_.end()) {
        use = {Outcome::Held, held->second};
      } else {
        const auto [at, fresh] = opened.try_emplace(blocks[i].partial, i);
        use = {fresh ? Outcome::Fresh : Outcome::Repeat, kNoSlot, at->second};
      }
      continue;
    }
    const std::size_t at = full++;
    if (shared_.holders()[at] > 0) continue;  // Held
    use.outcome = shared_.slots()[at] == kNoSlot ? Outcome::Fresh : Outcome::Cached;
    if (distinct) continue;
    const auto [named_at, first] = named.try_emplace(blocks[i].identity.lineage, i);
    if (!first) use = {Outcome::Repeat, kNoSlot, named_at->second};
  }
  return uses;
}

std::size_t KvManager::acquire(std::span<const KvBlock> blocks, std::span<const Token> tokens, bool partial) {
  require_kvbm("acquire");
  const auto fulls = static_cast<std::size_t>(
      std::count_if(blocks.begin(), blocks.end(), [](const KvBlock& block) { return block.full; }));
  check_tokens(fulls, tokens);
  std::vector<Use> uses = classify(blocks);

  // A cached block that is reused is not there to be evicted, so it counts like a new one.
  const std::uint64_t available = store_->available(0);
  std::uint64_t needed = 0;
  std::size_t fit = 0;
  for (std::size_t i = 0; i < uses.size(); ++i) {
    needed += uses[i].takes() ? 1 : 0;
    if (needed <= available) fit = i + 1;
  }
  if (fit < blocks.size() && !partial) {
    throw Error(ErrorKind::CapacityExhausted, "acquiring ", blocks.size(), " blocks takes ", needed,
                " that nobody holds, but only ", available, " of ", config_.num_gpu_blocks,
                " are available; release some, or acquire with partial=True");
  }
  take(blocks.first(fit), std::span(uses).first(fit), tokens);
  return fit;
}

// Take blocks, for which there is room. Repeated names are handled last, when their blocks have slots.
void KvManager::take(std::span<const KvBlock> blocks, std::span<Use> uses, std::span<const Token> tokens) {
  const std::size_t per_block = store_->emits_token_ids() ? config_.block_size : 0;
  std::vector<BlockIdentity> names;
  std::vector<Token> name_tokens;
  std::vector<StoredRun> runs;
  const BlockIdentity* before = nullptr;  // the full block in front, and whether it is of the same run
  bool running = false;
  std::size_t stored = 0;
  std::size_t opened = 0;
  std::size_t full = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const BlockIdentity& identity = blocks[i].identity;
    const bool fresh = uses[i].outcome == Outcome::Fresh;
    if (!blocks[i].full) {
      opened += fresh ? 1 : 0;
      continue;
    }
    if (fresh && !running) {
      runs.push_back({stored, before != nullptr ? before->sequence_hash() : identity.parent_hash});
    }
    stored += fresh ? 1 : 0;
    running = fresh;
    before = &identity;
    const std::span<const Token> own = tokens.subspan(full++ * per_block, per_block);
    if (uses[i].outcome == Outcome::Repeat) continue;
    names.push_back(identity);
    name_tokens.insert(name_tokens.end(), own.begin(), own.end());
  }

  (void)shared_.look(names);
  shared_.hold(names);
  std::vector<SlotId> fresh(shared_.missing() + opened);
  std::vector<BlockIdentity> evicted;
  store_->allocate(0, fresh, &evicted);
  std::size_t next = shared_.store(names, fresh, name_tokens);

  std::vector<SlotId> again;
  std::size_t named = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (!blocks[i].full) {
      if (uses[i].outcome == Outcome::Fresh) partials_.emplace(blocks[i].partial, fresh[next++]);
    } else if (uses[i].outcome == Outcome::Repeat) {
      again.push_back(uses[uses[i].first].slot);
    } else {
      uses[i].slot = shared_.slots()[named++];
    }
  }
  store_->retain(0, again);
  log_call(runs);
  trace(fresh.size(), evicted.size());
}

// ── Release ──

KvManager::Resolved KvManager::resolve(std::span<const KvBlock> blocks) const {
  const std::vector<BlockIdentity> fulls = full_blocks(blocks);
  std::vector<SlotId> slots(fulls.size());
  std::vector<std::uint32_t> references(fulls.size());
  store_->peek(0, fulls, slots.data(), references.data());

  Resolved out;
  out.orphans = orphans_;
  std::size_t full = 0;
  for (const KvBlock& block : blocks) {
    if (!block.full) {
      const auto held = partials_.find(block.partial);
      if (held == partials_.end()) {
        throw Error(ErrorKind::UnknownBlock, "partial block ", block.partial, " is not held");
      }
      out.slots.push_back(held->second);
      out.references.push_back(0);
      continue;
    }
    const SlotId slot = slots[full];
    const std::uint32_t held = references[full++];
    // References from before the discard are released first: later ones acquired the hash anew.
    const auto orphan = std::find_if(out.orphans.begin(), out.orphans.end(), [&](const Orphan& o) {
      return o.references > 0 && o.lineage == block.identity.lineage;
    });
    if (orphan != out.orphans.end()) {
      --orphan->references;
      out.slots.push_back(orphan->slot);
      out.references.push_back(0);
    } else if (held > 0) {
      out.slots.push_back(slot);
      out.references.push_back(held);
    } else {
      throw Error(slot == kNoSlot ? ErrorKind::UnknownBlock : ErrorKind::WrongState, "block ",
                  lineage_text(block.identity.lineage), slot == kNoSlot ? " is not here" : " is held by nobody");
    }
  }
  return out;
}

void KvManager::release_resolved(std::span<const KvBlock> blocks, Resolved resolved) {
  store_->release(0, resolved.slots);  // throws when a block is named more often than it is held
  for (const KvBlock& block : blocks) {
    if (!block.full) partials_.erase(block.partial);
  }
  std::erase_if(resolved.orphans, [](const Orphan& orphan) { return orphan.references == 0; });
  orphans_ = std::move(resolved.orphans);
}

void KvManager::release(std::span<const KvBlock> blocks) {
  require_kvbm("release");
  release_resolved(blocks, resolve(blocks));
}

void KvManager::discard(std::span<const KvBlock> blocks) {
  require_kvbm("discard");
  Resolved resolved = resolve(blocks);
  std::vector<SlotId> sorted = resolved.slots;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    throw Error(ErrorKind::InvalidArgument, "a block is named twice; it can be discarded once");
  }
  std::vector<SlotId> registered;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const std::uint32_t held = resolved.references[i];
    if (held == 0) continue;
    registered.push_back(resolved.slots[i]);
    if (held > 1) resolved.orphans.push_back({blocks[i].identity.lineage, resolved.slots[i], held - 1});
  }
  store_->unregister(0, registered);
  release_resolved(blocks, std::move(resolved));
  log_call({});
}

// ── Seal ──

void KvManager::seal(PartialId partial, const BlockIdentity& identity, std::span<const Token> tokens) {
  require_kvbm("seal");
  check_tokens(1, tokens);
  const auto held = partials_.find(partial);
  if (held == partials_.end()) {
    throw Error(ErrorKind::UnknownBlock, "partial block ", partial, " is not held, so it cannot be sealed");
  }
  SlotId slot = held->second;
  shared_.seal(slot, identity, tokens);
  partials_.erase(held);
  const StoredRun run{0, identity.parent_hash};
  log_call({&run, 1});
}

// ── Find ──

std::size_t KvManager::probe_new_blocks(std::span<const KvBlock> blocks) const {
  return static_cast<std::size_t>(
      std::count_if(blocks.begin(), blocks.end(), [this](const KvBlock& block) { return !resident(block); }));
}

KvOverlap KvManager::overlap(std::span<const KvBlock> blocks) const {
  if (!config_.enable_prefix_caching) return {};
  const auto partial = std::find_if(blocks.begin(), blocks.end(), [](const KvBlock& block) { return !block.full; });
  const std::vector<BlockIdentity> fulls = full_blocks({blocks.begin(), partial});
  std::vector<SlotId> slots(fulls.size());
  std::size_t unreferenced = 0;
  const std::size_t resident = store_->peek_prefix(0, fulls, slots.data(), &unreferenced);
  return {resident, resident - unreferenced};
}

bool KvManager::resident(const KvBlock& block) const {
  if (!block.full) return partials_.contains(block.partial);
  bool here = false;
  store_->has_blocks(0, {&block.identity, 1}, &here);
  return here;
}

std::uint64_t KvManager::references(const KvBlock& block) const {
  if (!block.full) return partials_.contains(block.partial) ? 1 : 0;
  SlotId slot = kNoSlot;
  std::uint32_t held = 0;
  store_->peek(0, {&block.identity, 1}, &slot, &held);
  std::uint64_t total = held;
  for (const Orphan& orphan : orphans_) total += orphan.lineage == block.identity.lineage ? orphan.references : 0;
  return total;
}

// ── Watch ──

// Blocks without a hash that several hold are orphans; all others have one holder.
std::uint64_t KvManager::active_references() const {
  const PoolMetrics now = store_->metrics(0);
  std::uint64_t total = now.active_references + now.mutable_blocks;
  for (const Orphan& orphan : orphans_) total += orphan.references - 1;
  return total;
}

void KvManager::check() const {
  store_->check();
  const PoolMetrics now = store_->metrics(0);
  if (config_.backend == KvManagerKind::Kvbm && now.mutable_blocks != partials_.size() + orphans_.size()) {
    throw Error(ErrorKind::InvariantViolated, "the store has ", now.mutable_blocks,
                " blocks without a hash, the manager ", partials_.size(), " partial and ", orphans_.size(),
                " discarded ones");
  }
}

}  // namespace understudy
