// KV events of a simulated TensorRT-LLM engine, its next batch, and its state for drivers.
#include <algorithm>
#include <utility>

#include "base/assert.hpp"
#include "base/errors.hpp"
#include "engine/trtllm/engine.hpp"

namespace understudy {

// ── KV events ──

Tier TrtEngine::tier(std::size_t pool) const {
  if (pool == 0) return Tier::G1;
  return pool == 1 && executor_.store().layout().has_host ? Tier::G2 : Tier::G3;
}

// A block is named by the request that commits it.
void TrtEngine::changed(TrtNode& node, std::size_t level, bool is_stored) {
  ++(is_stored ? stored_blocks_ : removed_blocks_)[level];
  if (!config_.events && !config_.check && !config_.published_blocks && !knows_tokens_) return;
  if (is_stored && !node.is_named && executor_.committing() != nullptr) {
    const auto found = live_.find(executor_.committing()->id);
    if (found == live_.end() || !found->second.spec.identities) return;
    Live& live = found->second;
    if (live.spec.identities->size() <= node.depth) return;
    if (live.names.size() <= node.depth) live.spec.identities->extend(live.names, node.depth + 1);
    node.name = live.names[node.depth];
    node.is_named = true;
  }
  if (!node.is_named) return;
  EventRecord row;
  row.identity = node.name;
  row.kind = is_stored ? EventKind::Stored : EventKind::Removed;
  row.tier = tier(level);
  row.starts = true;
  unpublished_.push_back(row);
}

void TrtEngine::publish(std::int64_t now_ns) {
  if (unpublished_.empty()) return;
  for (const EventRecord& row : unpublished_) {
    const std::size_t level = row.tier == Tier::G1 ? 0 : row.tier == Tier::G2 ? 1 : published_.size() - 1;
    if (row.kind == EventKind::Stored) {
      published_[level].emplace(row.identity.sequence_hash(), row.identity);
    } else {
      published_[level].erase(row.identity.sequence_hash());
    }
  }
  if (config_.check) truth_.apply(unpublished_, now_ns);
  if (config_.events) {
    for (EventRecord& row : unpublished_) row.id = next_event_++;
    EventRecords& rows = events_.batch.records;
    rows.insert(rows.end(), unpublished_.begin(), unpublished_.end());
    events_.time_ns.resize(rows.size(), now_ns);
  }
  unpublished_.clear();
}

void TrtEngine::flush_cache_events() {
  if (executor_.events() == nullptr) return;
  for (TrtEvent& event : executor_.events()->take()) cache_events_.push_back(std::move(event));
  if (cache_events_.size() <= config_.event_buffer_size) return;
  const auto lost = static_cast<std::ptrdiff_t>(cache_events_.size() - config_.event_buffer_size);
  cache_events_.erase(cache_events_.begin(), cache_events_.begin() + lost);
}

std::vector<TrtEvent> TrtEngine::take_cache_events() { return std::exchange(cache_events_, {}); }

void TrtEngine::take_events(TimedEvents& out) {
  out.batch.records.clear();
  out.time_ns.clear();
  std::swap(out.batch.records, events_.batch.records);
  std::swap(out.time_ns, events_.time_ns);
}

std::size_t TrtEngine::published_prefix(std::span<const BlockIdentity> blocks, std::size_t known) {
  while (known < blocks.size() && published_[0].contains(blocks[known].sequence_hash())) ++known;
  return known;
}

// Looks for the tokens that such blocks have in the tree; by name, as published, where they have other ones.
std::size_t TrtEngine::cached_prefix(std::span<const BlockIdentity> blocks) const {
  if (knows_tokens_) {
    std::size_t found = 0;
    while (found < blocks.size() && published_[0].contains(blocks[found].sequence_hash())) ++found;
    return found;
  }
  TokenList tokens;
  const GivenIdentities given{Identities(std::vector<BlockIdentity>(blocks.begin(), blocks.end()))};
  const auto size = static_cast<std::uint32_t>(blocks.size()) * config_.block_size;
  given.append_tokens(tokens, 0, size, config_.block_size, 0);
  return executor_.tree().match({}, tokens, size).tokens / config_.block_size;
}

std::size_t TrtEngine::num_hashes() const {
  std::size_t count = 0;
  for (const Names& level : published_) count += level.size();
  return count;
}

void TrtEngine::has_blocks(std::size_t pool, std::span<const BlockIdentity> blocks, bool* out) const {
  for (std::size_t i = 0; i < blocks.size(); ++i) out[i] = published_[pool].contains(blocks[i].sequence_hash());
}

std::vector<BlockIdentity> TrtEngine::resident(std::size_t pool) const {
  std::vector<BlockIdentity> out;
  for (const auto& [hash, identity] : published_[pool]) out.push_back(identity);
  return out;
}

// ── The next batch ──

// Bytes that the pass moved between levels, at the speed of their link, each direction and level after the other.
std::int64_t TrtEngine::take_copies_ns() {
  double seconds = 0;
  for (const TrtCopy& copy : executor_.store().copies()) {
    if (copy.from == copy.to) continue;
    const bool is_host = executor_.store().layout().has_host && copy.from + copy.to == 1;
    const double bytes = static_cast<double>(copy.pages) * static_cast<double>(copy.page_bytes);
    seconds += bytes / ((is_host ? config_.host_gbps : config_.disk_gbps) * 1e9);
    (copy.from < copy.to ? moved_down_ : moved_up_) += copy.pages;
  }
  executor_.store().copies().clear();
  return static_cast<std::int64_t>(seconds * 1e9);
}

std::optional<StepLoad> TrtEngine::load_of(const TrtBatch& batch) const {
  if (batch.empty()) return std::nullopt;
  StepLoad load;
  for (const TrtBatch::Chunk& chunk : batch.contexts) {
    ++load.requests;
    load.tokens += chunk.tokens;
    load.chunks.push_back({chunk.tokens, chunk.position});
    ++load.mocker.prefill_requests;
    load.mocker.prefill_input_tokens += chunk.position + chunk.tokens;
    load.mocker.prefill_cached_tokens += chunk.position;
    if (chunk.is_last && timing_.charges_first_token) {
      ++load.mocker.decode_requests;
      load.mocker.decode_context_tokens += chunk.position + chunk.tokens;
    }
  }
  for (const TrtRequest* const request : batch.generation) {
    const std::uint64_t context = request->cache->capacity();
    ++load.requests;
    ++load.tokens;
    load.add_decode(context, timing_.model->window());
    ++load.mocker.decode_requests;
    load.mocker.decode_context_tokens += context;
  }
  return load;
}

// Prompts whose first chunk is in the batch, and requests whose pages were taken.
void TrtEngine::note_admissions(std::int64_t now_ns) {
  for (const TrtBatch::Chunk& chunk : executor_.batch().contexts) {
    const TrtRequest& request = *chunk.request;
    const auto found = live_.find(request.id);
    if (!request.in_first_chunk() || found == live_.end()) continue;
    RequestRecord& record = found->second.record;
    const bool resumed = record.first_admit_ns >= 0;
    if (!resumed) {
      record.first_admit_ns = now_ns;
      record.cached_first = request.reused;
    }
    record.cached_total += request.reused;
    record.looked_up += request.prompt;
    if (reports_batches_) effects_.admitted.push_back({request.id, request.reused, {}});
    if (watches_steps_) planned_view_.admitted.push_back({request.id, resumed, request.reused});
  }
  TrtLog& log = executor_.log();
  const auto count = [&](std::vector<RequestId>& ids) {
    for (const RequestId id : std::exchange(ids, {})) {
      if (const auto found = live_.find(id); found != live_.end()) ++found->second.record.preemptions;
      ++totals_.preemptions;
      if (reports_batches_) effects_.preempted.push_back(id);
      if (watches_steps_) planned_view_.preempted.push_back({id, id});
    }
  };
  count(log.suspended);
  count(log.recomputed);
}

// ── Watch ──

void TrtEngine::count_batch() {
  for (const TrtBatch::Chunk& chunk : executor_.batch().contexts) {
    ++planned_iteration_.contexts;
    planned_iteration_.context_tokens += chunk.tokens;
    planned_iteration_.context_kv_tokens += chunk.position;
  }
  for (const TrtRequest* const request : executor_.batch().generation) {
    ++planned_iteration_.generation;
    planned_iteration_.generation_kv_tokens += request->cache->capacity();
  }
}

void TrtEngine::view_batch(const TrtBatch& batch, const StepLoad& load, std::int64_t duration_ns) {
  const auto alone_ns = [&](const StepLoad& alone) { return timing_.duration_ns(alone, capacity_tokens()); };
  for (const TrtBatch::Chunk& chunk : batch.contexts) {
    planned_view_.entries.push_back({chunk.request->id, chunk.tokens, chunk.position, false,
                                     alone_ns(StepLoad::of_prompt(chunk.position + chunk.tokens, chunk.position))});
  }
  for (const TrtRequest* const request : batch.generation) {
    const std::uint64_t context = request->cache == nullptr ? request->length() : request->cache->capacity();
    const StepLoad alone = StepLoad::of(DecodeLoad{1, context, std::min(context, timing_.model->window()), context});
    planned_view_.entries.push_back({request->id, 1, static_cast<std::uint32_t>(context) - 1, true, alone_ns(alone)});
  }
  planned_view_.compute_ns = duration_ns;
  if (load.decodes > 0 && !load.chunks.empty()) {
    planned_view_.decodes_ns = timing_.duration_ns(load.as_decodes(), capacity_tokens());
  }
}

void TrtEngine::describe_step(StepView& out) const {
  out = view_;
  out.is_open = open_;
  const EngineSnapshot now = snapshot();
  out.running = now.running;
  out.waiting = now.waiting;
  out.active_blocks = now.active_blocks;
  if (executor_.waiting().empty()) return;
  out.head = executor_.waiting().front()->id;
  out.stop = executor_.active().size() >= config_.settings.max_batch_size ? AdmissionStop::Slots : AdmissionStop::Other;
}

EngineSnapshot TrtEngine::snapshot() const {
  EngineSnapshot now;
  now.phase = phase();
  now.wake_ns = now.phase == Phase::Idle || now.phase == Phase::Stalled ? Effects::kNever : now_ns_;
  now.waiting = executor_.waiting().size();
  now.running = executor_.active().size();
  const TrtStore& store = executor_.store();
  for (std::size_t group = 0; group < store.layout().num_groups(); ++group) {
    const std::uint64_t free = store.slots(0, group).num_free();
    const std::uint64_t cached = store.num_evictable(0, group);
    now.free_blocks += free;
    now.cached_blocks += cached;
    now.active_blocks += store.slots(0, group).total() - free - cached;
  }
  now.evictions = removed_blocks_[0];
  now.stored_blocks = stored_blocks_[0];
  now.totals = totals_;
  return now;
}

TierReport TrtEngine::tier_report() {
  TierReport report;
  const TrtStore& store = executor_.store();
  for (std::size_t level = 0; level < store.num_levels(); ++level) {
    std::uint64_t total = 0;
    std::uint64_t used = 0;
    for (std::size_t group = 0; group < store.layout().num_groups(); ++group) {
      total += store.slots(level, group).total();
      used += store.slots(level, group).total() - store.slots(level, group).num_free();
    }
    report.own.push_back({tier(level), total, used, stored_blocks_[level], removed_blocks_[level]});
  }
  report.totals.offloaded_blocks = moved_down_;
  report.totals.onboarded_blocks = moved_up_;
  return report;
}

void TrtEngine::sample(std::int64_t now_ns) {
  const EngineSnapshot now = snapshot();
  EngineSample sample{now_ns, static_cast<std::uint32_t>(now.running), static_cast<std::uint32_t>(now.waiting),
                      static_cast<std::uint32_t>(now.active_blocks), static_cast<std::uint32_t>(now.cached_blocks)};
  const TrtStore& store = executor_.store();
  for (std::size_t group = 0; store.has_lower_level() && group < store.layout().num_groups(); ++group) {
    sample.host_blocks += store.slots(1, group).total() - store.slots(1, group).num_free();
  }
  token_log_.add_sample(sample);
}

void TrtEngine::check() {
  executor_.check();
  if (executor_.is_dead()) return;
  if (config_.check && unpublished_.empty()) truth_.require_equal(*this, EventTruth::Scope::All);
}

StateDigest TrtEngine::digest(bool with_cached) const {
  const auto mix = [](std::uint64_t hash, auto... values) {
    ((hash = (hash ^ static_cast<std::uint64_t>(values)) * 0x9E3779B97F4A7C15u, hash ^= hash >> 32), ...);
    return hash;
  };
  StateDigest out;
  auto& [clock, running, waiting, planned, counts, totals, cached] = out.values;
  clock = static_cast<std::uint64_t>(now_ns_);
  for (const TrtRequest* const one : executor_.active()) {
    running = mix(running, one->id, one->state, one->position, one->prompt, one->generated);
    if (one->cache == nullptr) continue;
    running = mix(running, one->cache->active(), one->cache->capacity(), one->cache->history());
  }
  for (const TrtRequest* const one : executor_.waiting()) waiting = mix(waiting, one->id);
  for (const TrtBatch::Chunk& chunk : executor_.batch().contexts)
    planned = mix(planned, chunk.request->id, chunk.tokens);
  for (const TrtRequest* const one : executor_.batch().generation) planned = mix(planned, one->id);
  const EngineSnapshot now = snapshot();
  counts = mix(0, now.free_blocks, now.cached_blocks, now.stored_blocks, now.evictions);
  totals = mix(0, totals_.steps, totals_.step_ns, totals_.uncovered_ns, totals_.preemptions);
  if (with_cached) {
    for (const Names& level : published_) {
      for (const auto& [hash, name] : level) cached += mix(0, hash);
    }
  }
  return out;
}

}  // namespace understudy
