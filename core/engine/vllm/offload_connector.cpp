#include "engine/vllm/offload_connector.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

namespace understudy {

OffloadConnector::OffloadConnector(const VllmOffload& config, std::uint32_t block_size, bool prefix_caching,
                                   BlockStore& store, std::uint64_t num_device_blocks)
    : config_(config),
      chunk_tokens_(block_size * config.blocks_per_chunk),
      defers_to_loads_(prefix_caching),
      host_(store, {config.policy, config.touches, config.ranks, config.arc_falls_back}),
      allocated_in_(num_device_blocks) {}

void OffloadConnector::came(const KvRequest& request) {
  if (free_tracked_.empty()) {
    free_tracked_.push_back(static_cast<std::uint32_t>(tracked_.size()));
    tracked_.emplace_back();
  }
  const std::uint32_t index = free_tracked_.back();
  free_tracked_.pop_back();
  tracked_[index] = {};
  tracked_[index].request = request.id;
  tracked_[index].arrival_time = request.spec.arrival_time;
  if (seats_.size() <= request.slot) seats_.resize(request.slot + 1);
  seats_[request.slot] = {index, 0, due(tracked_[index], request.spec.prompt_tokens)};
}

// ── Admission ──

std::optional<std::uint32_t> OffloadConnector::look_up(KvRequest& request, std::uint32_t local, std::int64_t now_ns) {
  Tracked& tracked = of(request);
  seats_[request.slot].reported_blocks = 0;
  tracked.blocks.clear();
  if (config_.offers_again) {
    tracked.next_stored = 0;
    seats_[request.slot].due = due(tracked, request.spec.prompt_tokens);
  }
  std::optional<std::uint32_t> hit;
  if (tracked.jobs.empty()) {
    const std::uint32_t chunks = num_chunks(request.known);
    name(request, chunks);
    hit = scan(request, local, chunks);
    touch_all(tracked, request.blocks, request.known);
    ++samples_.lookups;
    if (hit) {
      answered(tracked, now_ns);
    } else if (tracked.deferred_ns < 0) {
      tracked.deferred_ns = now_ns;
    }
  }
  ++totals_.lookups;
  if (!hit) ++totals_.deferred_lookups;
  if (config_.log) log_.lookups.push_back({request.id, local, hit});
  return hit;
}

// Record how long the request's lookup was deferred.
void OffloadConnector::answered(Tracked& tracked, std::int64_t now_ns) {
  if (config_.samples && tracked.deferred_ns >= 0) samples_.deferred_ns.push_back(now_ns - tracked.deferred_ns);
  tracked.deferred_ns = -1;
}

std::optional<std::uint32_t> OffloadConnector::scan(const KvRequest& request, std::uint32_t local,
                                                    std::uint32_t chunks) {
  if (chunks * chunk_tokens_ < local + chunk_tokens_) return 0;  // a part of a chunk is not worth it
  const std::uint32_t start = local / chunk_tokens_;
  const VllmHost::Found found = host_.find(keys(request.blocks, start, chunks), memos(of(request), start, chunks));
  if (found.writing) return std::nullopt;
  const std::uint32_t end = start + static_cast<std::uint32_t>(found.chunks);
  if (end * chunk_tokens_ < local + chunk_tokens_) return 0;
  if (found.loading && defers_to_loads_) return std::nullopt;
  return end * chunk_tokens_ - local;
}

void OffloadConnector::begin_load(const KvRequest& request, std::uint32_t local, std::uint32_t tokens) {
  Seat& seat = seats_[request.slot];
  const std::uint32_t index = seat.tracked;
  Tracked& tracked = tracked_[index];
  const std::uint32_t first = local / chunk_tokens_;
  const std::uint32_t end = (local + tokens + chunk_tokens_ - 1) / chunk_tokens_;
  const std::span<const SlotId> table = request.ids(ids_);
  allocated(table);
  tracked.next_stored = end;
  seat.due = due(tracked, request.spec.prompt_tokens);
  OffloadJob& job = new_job(index, false);
  job.first_chunk = first;
  host_.begin_load({tracked.user, first}, keys(request.blocks, first, end), memos(tracked, first, end), job.host);
  for (std::uint32_t chunk = first; chunk < end; ++chunk) job.chunks.push_back(chunk);
  const std::size_t held = local / (chunk_tokens_ / config_.blocks_per_chunk);
  job.device.assign(table.begin() + static_cast<std::ptrdiff_t>(held), table.end());
  orders_.loads.push_back(job.id);
  ++totals_.loads;
  totals_.loaded_chunks += end - first;
  totals_.loaded_tokens += tokens;
  if (!config_.log) return;
  OffloadLog::Load load{job, tokens, {}, {table.begin(), table.end()}};
  for (const BlockIdentity& key : keys(request.blocks, first, end)) load.hashes.push_back(key.sequence_hash());
  log_.loads.push_back(std::move(load));
}

// ── Schedule ──

// The table is about to be freed. An output in flight may still end the request, which then offers its old blocks.
void OffloadConnector::preempted(const KvRequest& request) {
  Seat& seat = seats_[request.slot];
  Tracked& tracked = tracked_[seat.tracked];
  remember(tracked, request, seat.reported_blocks);
  seat.reported_blocks = 0;
  orders_.flush.insert(orders_.flush.end(), tracked.jobs.begin(), tracked.jobs.end());
}

void OffloadConnector::scheduled(KvRequest& request, std::uint32_t after, bool admitted, bool resumed) {
  Seat& seat = seats_[request.slot];
  const std::size_t held = request.num_ids();
  if (held > seat.reported_blocks) {
    const std::span<const SlotId> fresh = request.ids(ids_).subspan(seat.reported_blocks);
    tracked_[seat.tracked].blocks.clear();
    allocated(fresh);
    if (config_.log) log_.blocks.push_back({request.id, resumed, admitted && !resumed, {fresh.begin(), fresh.end()}});
    seat.reported_blocks = static_cast<std::uint32_t>(held);
  }
  if (std::min(after, request.known) >= seat.due) offers_.push_back({&request, after});
}

OffloadOrders OffloadConnector::close_schedule() {
  before_flushes();
  if (!fenced_.empty()) {
    for (const SlotId slot : allocated_) {
      const auto jobs = fenced_.find(slot);
      if (jobs == fenced_.end()) continue;
      orders_.flush.insert(orders_.flush.end(), jobs->second.begin(), jobs->second.end());
    }
  }
  refused_last_ = 0;
  before_stores();
  for (const Offer& offer : offers_) store_offer(offer);
  if (!config_.log && offers_.empty() && ended_.empty() && orders_.empty()) {  // all requests decode
    allocated_.clear();
    ++schedule_;
    return {};
  }
  // A set in vLLM: here in order of arrival.
  std::ranges::sort(ended_, [this](std::uint32_t a, std::uint32_t b) {
    return std::tie(tracked_[a].arrival_time, tracked_[a].request) <
           std::tie(tracked_[b].arrival_time, tracked_[b].request);
  });
  for (const std::uint32_t index : ended_) store_ended(index);
  for (const std::uint32_t index : ended_) {
    Tracked& tracked = tracked_[index];
    tracked.signalled = true;
    end_on_host(index);
    std::vector<BlockIdentity>().swap(tracked.names);
    if (tracked.jobs.empty()) forget(index);
  }
  ended_.clear();
  offers_.clear();
  allocated_.clear();
  ++schedule_;
  std::ranges::sort(orders_.flush);
  orders_.flush.erase(std::unique(orders_.flush.begin(), orders_.flush.end()), orders_.flush.end());
  totals_.flushed_jobs += orders_.flush.size();
  if (config_.log) log_.flush = orders_.flush;
  return std::exchange(orders_, {});
}

void OffloadConnector::ended(KvRequest& request, std::uint32_t computed, bool aborted, std::int64_t now_ns) {
  const Seat seat = std::exchange(seats_[request.slot], {});
  const std::uint32_t index = seat.tracked;
  Tracked& tracked = tracked_[index];
  answered(tracked, now_ns);
  tracked.has_ended = true;
  tracked.known = request.known;
  tracked.prompt = request.spec.prompt_tokens;
  const std::uint32_t committed =
      config_.stores_last_token ? request.known : std::max(tracked.prompt, request.known - 1);
  tracked.after = aborted ? computed : committed;
  if (seat.reported_blocks > 0) remember(tracked, request, seat.reported_blocks);
  name(request, num_chunks(request.known));
  tracked.names = std::move(request.blocks);
  request.blocks.clear();
  for (const JobId id : tracked.jobs) fence(jobs_.at(id));
  ended_.push_back(index);
}

// ── Stores ──

void OffloadConnector::store_offer(const Offer& offer) {
  KvRequest& request = *offer.request;
  const std::uint32_t prompt = request.spec.prompt_tokens;
  Seat& seat = seats_[request.slot];
  name(request, num_chunks(request.known));
  store(seat.tracked, request.blocks, request.ids(ids_), request.known, offer.after, prompt);
  seat.due = due(tracked_[seat.tracked], prompt);
}

void OffloadConnector::store_ended(std::uint32_t index) {
  const Tracked& tracked = tracked_[index];
  store(index, tracked.names, tracked.blocks, tracked.known, tracked.after, tracked.prompt);
}

void OffloadConnector::end_on_host(std::uint32_t index) {
  Tracked& tracked = tracked_[index];
  const auto chunks = std::min(num_chunks(tracked.known), static_cast<std::uint32_t>(tracked.memos.size()));
  host_.ended(keys(tracked.names, 0, chunks), memos(tracked, 0, chunks));
}

void OffloadConnector::store(std::uint32_t index, std::span<const BlockIdentity> names, std::span<const SlotId> blocks,
                             std::uint32_t known, std::uint32_t after, std::uint32_t prompt) {
  Tracked& tracked = tracked_[index];
  std::uint32_t tokens = std::min(after, known);
  if (config_.prompt_only) tokens = std::min(tokens, prompt);
  const std::uint32_t first = tracked.next_stored;
  const std::uint32_t end =
      std::min(num_chunks(tokens), static_cast<std::uint32_t>(blocks.size()) / config_.blocks_per_chunk);
  if (end <= first) return;
  const auto offered = keys(names, first, end);
  const bool room = host_.begin_store({tracked.user, first}, offered, memos(tracked, first, end), places_, slots_);
  if (config_.samples && host_.num_absent() > 0) samples_.asked_chunks.push_back(host_.num_absent());
  if (!room) {
    ++refused_last_;
    ++totals_.refused_stores;
    ++samples_.refused_stores;
    if (config_.log) log_.refused.push_back(tracked.request);
    return;
  }
  tracked.next_stored = end;
  if (places_.empty()) return;
  totals_.evicted_chunks += host_.evicted().size();
  ++totals_.stores;
  totals_.stored_chunks += places_.size();
  OffloadJob& job = new_job(index, true);
  job.host = slots_;
  for (const std::uint32_t place : places_) {
    const std::uint32_t chunk = first + place;
    job.chunks.push_back(chunk);
    const auto from = blocks.subspan(std::size_t{chunk} * config_.blocks_per_chunk, config_.blocks_per_chunk);
    job.device.insert(job.device.end(), from.begin(), from.end());
  }
  orders_.stores.push_back(job.id);
  if (config_.log) {
    if (!host_.evicted().empty()) log_.evicted.emplace_back();
    for (const LineageHash& key : host_.evicted()) log_.evicted.back().push_back(key.current());
    OffloadLog::Store store{job, {}};
    for (const std::uint32_t place : places_) store.hashes.push_back(offered[place].sequence_hash());
    log_.stores.push_back(std::move(store));
  }
  touch_all(tracked, names, known);
  if (!tracked.has_ended) return;
  fence(job);
  if (std::ranges::any_of(job.device, [this](SlotId slot) { return allocated_in_[slot] == schedule_; })) {
    orders_.flush.push_back(job.id);
  }
}

void OffloadConnector::touch_all(Tracked& tracked, std::span<const BlockIdentity> names, std::uint32_t known) {
  const std::uint32_t chunks = num_chunks(known);
  if (config_.touches) host_.touch(keys(names, 0, chunks), memos(tracked, 0, chunks));
}

// ── Update ──

void OffloadConnector::done(std::span<const JobId> jobs) {
  if (config_.log) log_.done.assign(jobs.begin(), jobs.end());
  for (const JobId id : jobs) {
    const auto found = jobs_.find(id);
    const OffloadJob& job = found->second;
    if (job.forgotten) {
      jobs_.erase(found);
      continue;
    }
    Tracked& tracked = tracked_[job.tracked];
    if (job.store) {
      host_.stored(job.host);
      if (tracked.has_ended || fences_early_) {
        for (const SlotId slot : job.device) {
          const auto fences = fenced_.find(slot);
          if (fences == fenced_.end()) continue;
          std::erase(fences->second, id);
          if (fences->second.empty()) fenced_.erase(fences);
        }
      }
    } else {
      host_.loaded(job.host);
    }
    std::erase(tracked.jobs, id);
    if (tracked.signalled && tracked.jobs.empty()) forget(job.tracked);
    jobs_.erase(found);
  }
}

// Requests that have not ended offer all their chunks again.
void OffloadConnector::reset() {
  host_.reset();
  fenced_.clear();
  for (auto& [id, job] : jobs_) {
    if (job.forgotten) continue;
    orders_.flush.push_back(id);
    job.forgotten = true;
    tracked_[job.tracked].jobs.clear();
  }
  for (std::uint32_t index = 0; index < tracked_.size(); ++index) {
    Tracked& tracked = tracked_[index];
    if (tracked.signalled) {
      forget(index);
      continue;
    }
    if (!tracked.has_ended) tracked.next_stored = 0;
    tracked.user = 0;
    tracked.memos.clear();
  }
  for (Seat& seat : seats_) {
    if (seat.tracked != kNobody) seat.due = chunk_tokens_;
  }
}

// ── Books ──

void OffloadConnector::name(KvRequest& request, std::uint32_t chunks) const {
  const std::size_t blocks = std::size_t{chunks} * config_.blocks_per_chunk;
  if (request.blocks.size() < blocks) request.spec.identities->extend(request.blocks, blocks);
}

std::span<const BlockIdentity> OffloadConnector::keys(std::span<const BlockIdentity> names, std::uint32_t first,
                                                      std::uint32_t end) {
  if (config_.blocks_per_chunk == 1) return names.subspan(first, end - first);
  keys_.clear();
  for (std::uint32_t chunk = first; chunk < end; ++chunk) {
    keys_.push_back(names[std::size_t{chunk + 1} * config_.blocks_per_chunk - 1]);
  }
  return keys_;
}

std::span<ChunkMemo> OffloadConnector::memos(Tracked& tracked, std::uint32_t first, std::uint32_t end) {
  if (tracked.memos.size() < end) tracked.memos.resize(end);
  return std::span<ChunkMemo>(tracked.memos).subspan(first, end - first);
}

std::uint32_t OffloadConnector::due(const Tracked& tracked, std::uint32_t prompt) const noexcept {
  const std::uint64_t tokens = (std::uint64_t{tracked.next_stored} + 1) * chunk_tokens_;
  if (config_.prompt_only && tokens > prompt) return kNobody;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(tokens, kNobody));
}

OffloadJob& OffloadConnector::new_job(std::uint32_t tracked, bool store) {
  const JobId id = next_job_++;
  tracked_[tracked].jobs.push_back(id);
  OffloadJob& job = jobs_[id];
  job.id = id;
  job.request = tracked_[tracked].request;
  job.tracked = tracked;
  job.store = store;
  return job;
}

// The job's blocks are free, but the store reads them until it is done.
void OffloadConnector::fence(const OffloadJob& job) {
  if (!job.store) return;
  for (const SlotId slot : job.device) fenced_[slot].push_back(job.id);
}

void OffloadConnector::allocated(std::span<const SlotId> slots) {
  allocated_.insert(allocated_.end(), slots.begin(), slots.end());
  for (const SlotId slot : slots) allocated_in_[slot] = schedule_;
}

// Keep the first `count` blocks of the request's table.
void OffloadConnector::remember(Tracked& tracked, const KvRequest& request, std::uint32_t count) {
  const std::span<const SlotId> table = request.ids(ids_).first(count);
  tracked.blocks.assign(table.begin(), table.end());
}

void OffloadConnector::forget(std::uint32_t index) {
  tracked_[index] = {};
  free_tracked_.push_back(index);
}

}  // namespace understudy
