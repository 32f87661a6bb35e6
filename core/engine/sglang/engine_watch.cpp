// KV events of a simulated SGLang engine, and its state for drivers.
#include <algorithm>
#include <bit>
#include <utility>

#include "base/assert.hpp"
#include "base/errors.hpp"
#include "engine/sglang/engine.hpp"

namespace understudy {

// ── KV events ──

void SglangEngine::changed(RadixNode& node, bool stored, RadixTier tier) {
  const std::uint32_t page = config_.block_size;
  if (tier == RadixTier::Device) (stored ? stored_pages_ : removed_pages_) += node.length() / page;
  if (!keeps_events() && !config_.published_blocks) return;
  if (stored && node.names.empty() && scheduler_.inserting() != nullptr) {  // a new leaf
    const auto found = live_.find(scheduler_.inserting()->id);
    UNDERSTUDY_ASSERT(found != live_.end(), "a request that has ended inserts tokens");
    Live& live = found->second;
    if (!live.spec.identities) return;
    live.spec.identities->extend(live.names, node.end() / page);
    const auto first = live.names.begin() + node.begin / page;
    node.names.assign(first, first + node.length() / page);
  }
  if (config_.published_blocks && tier == RadixTier::Device) {
    for (const BlockIdentity& name : node.names) {
      stored ? pages_.stored(name.sequence_hash()) : pages_.removed(name.sequence_hash());
    }
  }
  if (!keeps_events()) return;
  bool starts = true;
  for (const BlockIdentity& name : node.names) {
    EventRecord row;
    row.identity = name;
    row.kind = stored ? EventKind::Stored : EventKind::Removed;
    row.tier = tier == RadixTier::Device ? Tier::G1 : Tier::G2;
    row.starts = std::exchange(starts, false);
    unpublished_.push_back(row);
  }
}

// SGLang publishes after every prefill, after some decodes, and when it is idle.
void SglangEngine::publish_after(SglangMode mode, std::int64_t now_ns) {
  const bool prefills = mode != SglangMode::Decode;
  if (!prefills) ++decode_results_;
  const bool due = prefills || decode_results_ % config_.settings.decode_log_interval == 0;
  if (due || is_idle()) publish(now_ns);
}

void SglangEngine::publish(std::int64_t now_ns) {
  if (config_.published_blocks) pages_.publish();
  if (unpublished_.empty()) return;
  for (const EventRecord& row : unpublished_) {
    Names& published = published_[row.tier == Tier::G1 ? 0 : 1];
    if (row.kind == EventKind::Stored) {
      published.emplace(row.identity.sequence_hash(), row.identity);
    } else {
      published.erase(row.identity.sequence_hash());
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

void SglangEngine::take_events(TimedEvents& out) {
  out.batch.records.clear();
  out.time_ns.clear();
  std::swap(out.batch.records, events_.batch.records);
  std::swap(out.time_ns, events_.time_ns);
}

std::size_t SglangEngine::published_prefix(std::span<const BlockIdentity> blocks, std::size_t known) {
  const std::size_t found = known + pages_.prefix(blocks.subspan(known));
  if (config_.check) truth_.require_prefix(blocks, found);
  return found;
}

// Looks for the tokens that such blocks have in the tree.
std::size_t SglangEngine::cached_prefix(std::span<const BlockIdentity> blocks) const {
  TokenList tokens;
  const GivenIdentities given{Identities(std::vector<BlockIdentity>(blocks.begin(), blocks.end()))};
  const auto size = static_cast<std::uint32_t>(blocks.size()) * config_.block_size;
  given.append_tokens(tokens, 0, size, config_.block_size, 0);
  return scheduler_.tree().find(tokens) / config_.block_size;
}

void SglangEngine::has_blocks(std::size_t pool, std::span<const BlockIdentity> blocks, bool* out) const {
  for (std::size_t i = 0; i < blocks.size(); ++i) out[i] = published_[pool].contains(blocks[i].sequence_hash());
}

std::vector<BlockIdentity> SglangEngine::resident(std::size_t pool) const {
  std::vector<BlockIdentity> out;
  for (const auto& [hash, identity] : published_[pool]) out.push_back(identity);
  return out;
}

// ── Host tier ──

// Finishes copies of an engine that has no request, each when it lands: its loop polls them all the time.
void SglangEngine::poll_host(std::int64_t now_ns) {
  while (has_transfers()) {
    const std::optional<std::int64_t> ready_ns = scheduler_.host()->next_ready();
    if (!ready_ns || *ready_ns > now_ns) break;
    links_.set_now(*ready_ns);
    scheduler_.host()->poll();
    const std::int64_t landed_ns = std::max(*ready_ns, now_ns_);
    publish(landed_ns);
    sample(landed_ns);
  }
  links_.set_now(now_ns);
}

const Effects& SglangEngine::transfers_landed(std::int64_t now_ns) {
  fresh();
  if (is_idle()) poll_host(now_ns);
  if (port_ && !in_step()) {  // a driver of live engines wakes it: the next step polls
    if (port_->next_after(now_ns_) <= now_ns) stalled_ = sleeps_ = false;
    now_ns_ = std::max(now_ns_, now_ns);
  }
  return done();
}

std::int64_t SglangEngine::next_landing_ns() const {
  if (port_) return in_step() || is_idle() ? kNever : port_->next_after(now_ns_);
  if (!has_transfers() || !is_idle()) return kNever;
  return scheduler_.host()->next_ready().value_or(kNever);
}

void SglangEngine::finish_transfers() {
  if (!has_transfers() || !is_idle()) return;
  scheduler_.host()->submit_writes();
  poll_host(std::max(now_ns_, scheduler_.host()->last_ready()));
}

// ── Watch ──

void SglangEngine::view_batch(const SglangBatch& batch, const StepLoad& load, std::int64_t duration_ns) {
  for (const SglangBatch::Row& row : batch.rows) {
    StepLoad alone;
    add_to(alone, row, batch);
    view_.entries.push_back({row.request->id, row.tokens, row.request->kv - row.tokens, row.decodes,
                             timing_.duration_ns(alone, capacity_tokens())});
  }
  view_.compute_ns = duration_ns;
  if (load.decodes > 0 && !load.chunks.empty()) {
    view_.decodes_ns = timing_.duration_ns(load.as_decodes(), capacity_tokens());
  }
}

void SglangEngine::describe_step(StepView& out) const {
  out = view_;
  out.is_open = open_.batch != nullptr;
  const EngineSnapshot now = snapshot();
  out.running = now.running;
  out.waiting = now.waiting;
  out.active_blocks = now.active_blocks;
  if (config_.settings.side.role == SglangRole::Decode) {
    for (const SglangRequest* const request : scheduler_.side().moving) out.loading.push_back(request->id);
  }
  const std::vector<SglangRequest*>& waiting = scheduler_.waiting();
  if (waiting.empty()) return;
  out.head = waiting.front()->id;
  if (scheduler_.defers_prefill()) {
    out.stop = AdmissionStop::Other;
  } else if (!scheduler_.is_full() && open_.batch && open_.batch->mode != SglangMode::Decode) {
    out.stop = AdmissionStop::Budget;
  } else {
    const std::size_t most = config_.settings.max_running_requests;
    out.stop = scheduler_.running().size() >= most ? AdmissionStop::Slots : AdmissionStop::Blocks;
  }
}

EngineSnapshot SglangEngine::snapshot() const {
  EngineSnapshot now;
  const std::uint32_t page = config_.block_size;
  now.phase = phase();
  now.wake_ns = next_call_ns();
  now.waiting = scheduler_.num_waiting();
  now.running = live_.size() - std::min(live_.size(), now.waiting);
  now.free_blocks = static_cast<std::uint64_t>(scheduler_.avail()) / page;
  now.cached_blocks = scheduler_.tree().evictable() / page;
  now.active_blocks = config_.num_gpu_blocks - now.free_blocks - now.cached_blocks;
  now.evictions = removed_pages_;
  now.stored_blocks = stored_pages_;
  now.totals = totals_;
  return now;
}

// A small window pool parks a chunk for ever, in SGLang too: what requests hold keeps the rest from being computed.
Stall SglangEngine::stall() const {
  Stall stall = Engine::stall();
  const SglangRequest* const parked = scheduler_.chunked();
  if (parked != nullptr) {
    ++stall.waiting;
    stall.first.push_back({parked->id, parked->size()});
  }
  for (const SglangRequest* const request : scheduler_.waiting()) {
    if (stall.first.size() < 3) stall.first.push_back({request->id, request->size()});
  }
  if (port_) describe_side_stall(stall);
  if (const WindowComponent* const window = scheduler_.window(); window != nullptr && parked != nullptr) {
    stall.note = "; the pool of window KV has " + std::to_string(window->size()) + " tokens, of which " +
                 std::to_string(window->locked()) +
                 " are locked, and a chunk waits for ever, as in SGLang; raise swa_full_tokens_ratio";
  }
  return stall;
}

SglangTokens SglangEngine::tokens() const {
  SglangTokens out;
  out.available = scheduler_.avail();
  out.evictable = scheduler_.tree().evictable();
  out.evicted = removed_pages_ * config_.block_size;
  out.new_token_ratio = scheduler_.ratio();
  out.retracted_inputs = scheduler_.retracted_inputs();
  out.retracted_outputs = scheduler_.retracted_outputs();
  if (const RadixComponent* const component = scheduler_.component()) {
    out.part_total = component->size();
    out.part_available = component->free();
    out.part_evictable = component->evictable();
  }
  if (const HostCache* const host = scheduler_.host()) {
    out.host_total = host->tokens();
    out.host_used = host->tokens() - static_cast<std::uint64_t>(host->avail());
    out.host = host->totals();
  }
  return out;
}

TierReport SglangEngine::tier_report() {
  const std::uint64_t page = config_.block_size;
  const RadixTree& tree = scheduler_.tree();
  TierReport report;
  report.own.push_back(
      {Tier::G1, config_.num_gpu_blocks, (tree.evictable() + tree.locked()) / page, stored_pages_, removed_pages_});
  const HostCache* const host = scheduler_.host();
  if (host == nullptr) return report;
  const HostTotals& totals = host->totals();
  const std::uint64_t resident = host->tokens() - static_cast<std::uint64_t>(host->avail());
  report.own.push_back({Tier::G2, host->tokens() / page, resident / page, totals.stored / page, totals.evicted / page});
  report.totals.offloaded_blocks = totals.stored / page;
  report.totals.refused_stores = totals.refused_writes;
  report.totals.onboards = totals.loads;
  report.totals.onboarded_blocks = totals.loaded / page;
  report.loads_ns = links_.load_times_ns();
  report.links = links_.usage();
  return report;
}

void SglangEngine::sample(std::int64_t now_ns) {
  const std::uint32_t page = config_.block_size;
  const std::size_t waiting = scheduler_.num_waiting();
  const std::size_t running = live_.size() - std::min(live_.size(), waiting);
  // Prompts that are sent are computed, and keep their pages.
  const bool sends = config_.settings.side.role == SglangRole::Prefill;
  const std::size_t sent = sends ? scheduler_.side().moving.size() : 0;
  const std::uint64_t free = static_cast<std::uint64_t>(scheduler_.avail()) / page;
  const std::uint64_t cached = scheduler_.tree().evictable() / page;
  EngineSample sample{
      now_ns, static_cast<std::uint32_t>(running - std::min(running, sent)), static_cast<std::uint32_t>(waiting),
      static_cast<std::uint32_t>(config_.num_gpu_blocks - free - cached), static_cast<std::uint32_t>(cached)};
  if (const HostCache* const host = scheduler_.host()) {
    const std::uint64_t used = host->tokens() - static_cast<std::uint64_t>(host->avail());
    sample.host_blocks = static_cast<std::uint32_t>(used / page);
  }
  if (sent > 0) {
    const std::uint64_t pages = std::min<std::uint64_t>(scheduler_.pages_in_flight(), sample.active_blocks);
    sample.kept_blocks = static_cast<std::uint32_t>(pages);
  }
  token_log_.add_sample(sample);
}

void SglangEngine::check() {
  scheduler_.check();
  if (!config_.check || !unpublished_.empty()) return;
  std::array<std::size_t, 2> pages{};
  scheduler_.tree().each([&](const RadixNode& node) {
    if (node.device) pages[0] += node.names.size();
    if (node.host && node.write == nullptr) pages[1] += node.names.size();
  });
  for (std::size_t pool = 0; pool < num_pools(); ++pool) {
    if (pages[pool] == published_[pool].size()) continue;
    throw Error(ErrorKind::InvariantViolated, "the radix tree has ", pages[pool], " named pages on ",
                pool == 0 ? "the device" : "the host", ", where KV events say ", published_[pool].size());
  }
  truth_.require_equal(*this, EventTruth::Scope::All);
}

StateDigest SglangEngine::digest(bool with_cached) const {
  const auto mix = [](std::uint64_t hash, auto... values) {
    ((hash = (hash ^ static_cast<std::uint64_t>(values)) * 0x9E3779B97F4A7C15u, hash ^= hash >> 32), ...);
    return hash;
  };
  const auto add = [&](std::uint64_t hash, const SglangRequest& r) {
    return mix(hash, r.id, r.size(), r.prefix, r.end, r.kv, r.own, r.inserted, r.chunks, r.to_abort, r.finished,
               r.withdrawn);
  };
  StateDigest out;
  auto& [clock, running, waiting, planned, counts, totals, cached] = out.values;
  clock = static_cast<std::uint64_t>(now_ns_);
  for (const SglangRequest* const r : scheduler_.running()) running = add(running, *r);
  if (scheduler_.chunked() != nullptr) running = mix(running, scheduler_.chunked()->id);
  if (const SglangBatch* const last = scheduler_.last()) {
    for (const SglangBatch::Row& row : last->rows) running = add(mix(running, row.tokens, row.decodes), *row.request);
  }
  for (const SglangRequest* const r : scheduler_.waiting()) {
    if (scheduler_.has_seen(*r)) waiting = add(waiting, *r);
  }
  if (planned_.batch) {
    for (const SglangBatch::Row& row : planned_.batch->rows) planned = mix(planned, row.request->id, row.tokens);
  }
  const RadixTree& tree = scheduler_.tree();
  counts = mix(0, scheduler_.avail(), tree.evictable(), tree.locked(), tree.num_nodes(), stored_pages_, removed_pages_,
               std::bit_cast<std::uint64_t>(scheduler_.ratio()), scheduler_.is_full(), decode_results_,
               scheduler_.side().moving.size(), scheduler_.side().retracted.size(), scheduler_.side().held.size());
  if (const RadixComponent* const component = scheduler_.component()) {
    counts = mix(counts, component->free(), component->evictable(), component->locked());
  }
  totals = mix(0, totals_.steps, totals_.step_ns, totals_.uncovered_ns, totals_.preemptions);
  if (!with_cached) return out;
  tree.each([&sum = cached, &mix](const RadixNode& node) {  // clang 14 cannot capture a structured binding
    sum += mix(0, node.begin, node.length(), node.key.hash(0, node.length()), node.used, node.born, node.hits,
               node.lock, node.device, node.host);
    if (node.has_part) sum += mix(1, node.begin, node.length(), node.part_lock);
  });
  return out;
}

}  // namespace understudy
