#include "engine/sglang/engine.hpp"

#include <algorithm>
#include <utility>

#include "base/assert.hpp"
#include "base/errors.hpp"

namespace understudy {

std::unique_ptr<Engine> SglangConfig::make(const EngineSite& site) const {
  if (site.tiers != nullptr) {
    throw Error(ErrorKind::ConfigError, "tiers: SGLang's host tier is not simulated yet; leave them out");
  }
  if (lockstep_ns > 0) {
    throw Error(ErrorKind::ConfigError, "lockstep: SGLang engines have no steps of a fixed length; leave it out");
  }
  return std::make_unique<SglangEngine>(*this, site);
}

SglangEngine::SglangEngine(const SglangConfig& config, const EngineSite& site)
    : config_(config),
      timing_(site.timing),
      scheduler_(config.settings, [this](RadixNode& node, bool stored) { changed(node, stored); }),
      keeps_gaps_(site.keeps_times) {}

Effects& SglangEngine::fresh() {
  effects_.clear();
  return effects_;
}

const Effects& SglangEngine::done() {
  effects_.has_events = !events_.batch.records.empty();
  effects_.phase = phase();
  effects_.wake_ns = effects_.phase == Phase::Idle || effects_.phase == Phase::Stalled ? Effects::kNever : now_ns_;
  return effects_;
}

Phase SglangEngine::phase() const {
  if (open_) return Phase::InStep;
  if (stalled_) return Phase::Stalled;
  return scheduler_.empty() && !planned_ && aborts_.empty() ? Phase::Idle : Phase::Ready;
}

// ── Requests ──

const Effects& SglangEngine::submit(RequestSpec spec, std::int64_t now_ns) {
  if (spec.prompt_tokens == 0) {
    throw Error(ErrorKind::InvalidArgument, "prompt_tokens must be at least 1");
  }
  if (scheduler_.knows(spec.id)) {
    throw Error(ErrorKind::InvalidArgument, "request ", spec.id,
                " is here already; give every request an id of its own");
  }
  if (spec.identities) {
    const std::size_t pages = (std::size_t{spec.prompt_tokens} + spec.outputs()) / config_.block_size;
    if (spec.identities->size() < pages) {
      throw Error(ErrorKind::InvalidArgument, "identities name ", spec.identities->size(), " pages; the request has ",
                  pages);
    }
  }
  fresh();
  if (!open_) now_ns_ = std::max(now_ns_, now_ns);
  // An idle loop goes back to its first estimate of output lengths.
  if (!open_ && !planned_ && scheduler_.empty() && now_ns > empty_since_ns_) scheduler_.end_iteration(true);
  SglangArrival arrival;
  arrival.id = spec.id;
  const std::uint32_t all = spec.prompt_tokens + spec.outputs();
  if (spec.identities) {
    TokenList tokens;  // in one call: a page may have the end of the prompt and the first outputs
    spec.identities->append_tokens(tokens, 0, all, config_.block_size, spec.id);
    arrival.prompt = tokens.slice(0, spec.prompt_tokens);
    arrival.outputs = tokens.slice(spec.prompt_tokens, all);
  } else {
    arrival.prompt.append({(std::uint64_t{1} << 63) + (spec.id << 24), spec.prompt_tokens});
  }
  arrival.first_output = (std::uint64_t{1} << 63) + (spec.id << 24) + spec.prompt_tokens;
  arrival.max_tokens = spec.max_tokens;
  arrival.eos_at = spec.eos_at > 0 && spec.eos_at < spec.max_tokens ? spec.eos_at : 0;
  if (config_.settings.enable_priority_scheduling) arrival.priority = spec.priority;
  Live& live = live_[spec.id];
  live.record.id = spec.id;
  live.record.name = spec.name;
  live.record.queued_ns = now_ns;
  live.spec = std::move(spec);
  stalled_ = false;
  scheduler_.submit(std::move(arrival));
  apply_log(now_ns);
  return done();
}

const Effects& SglangEngine::cancel(RequestId id, std::int64_t now_ns) {
  fresh();
  const auto found = live_.find(id);
  if (found == live_.end() || found->second.reported) return done();
  Live& live = found->second;
  live.reported = true;
  live.record.reason = FinishReason::Cancelled;
  live.record.finish_ns = now_ns;
  effects_.finished.push_back(live.record);
  stalled_ = false;
  aborts_.push_back(id);
  if (!open_) now_ns_ = std::max(now_ns_, now_ns);
  return done();
}

std::optional<std::string> SglangEngine::never_fits(std::uint32_t prompt_tokens, std::uint32_t) const {
  const std::uint64_t most =
      std::min<std::uint64_t>(config_.settings.context_len, config_.settings.max_total_num_tokens) - 1;
  if (prompt_tokens + 5 < most) return std::nullopt;
  return "a prompt of " + std::to_string(prompt_tokens) + " tokens is too long for " + std::to_string(most) +
         ", the context or the pool";
}

void SglangEngine::finish(RequestId id, FinishReason reason, std::int64_t now_ns) {
  const auto found = live_.find(id);
  if (found == live_.end()) return;
  Live& live = found->second;
  if (!live.reported) {
    live.record.reason = reason;
    live.record.finish_ns = now_ns;
    if (reason != FinishReason::Cancelled) {
      for (const std::int64_t gap_ns : live.gaps_ns) ++gaps_[gap_ns];
    }
    effects_.finished.push_back(std::move(live.record));
  }
  live_.erase(found);
  ended_.push_back(id);
}

// ── Steps ──

std::unique_ptr<SglangBatch> SglangEngine::schedule(std::int64_t now_ns) {
  if (!aborts_.empty()) scheduler_.abort(std::exchange(aborts_, {}));
  std::unique_ptr<SglangBatch> batch = scheduler_.schedule();
  // An interval between prefills may pass without a batch.
  while (!batch && !planned_ && scheduler_.defers_prefill()) batch = scheduler_.schedule();
  apply_log(now_ns);
  return batch;
}

const Effects& SglangEngine::begin_step(std::int64_t now_ns) {
  if (open_) throw Error(ErrorKind::WrongState, "begin_step before the step in progress has ended");
  fresh();
  now_ns_ = now_ns;
  scheduler_.set_outstanding(nullptr);
  if (!planned_) planned_ = schedule(now_ns);
  if (!planned_) {
    stalled_ = !scheduler_.empty();
    if (!stalled_) empty_since_ns_ = now_ns;
    return done();
  }
  const StepLoad load = load_of(*planned_);
  const std::int64_t duration_ns = timing_.duration_ns(load, config_.num_gpu_blocks * config_.block_size);
  const bool covered = timing_.model->covers(load);
  std::unique_ptr<SglangBatch> behind;
  if (config_.settings.overlap) {
    scheduler_.set_outstanding(planned_.get());
    behind = schedule(now_ns);
  }
  open_ = std::exchange(planned_, std::move(behind));
  ++totals_.steps;
  totals_.step_ns += duration_ns;
  if (!covered) totals_.uncovered_ns += duration_ns;
  now_ns_ = now_ns + duration_ns;
  return done();
}

const Effects& SglangEngine::end_step(std::int64_t end_ns) {
  if (!open_) throw Error(ErrorKind::WrongState, "end_step without a step in progress");
  fresh();
  now_ns_ = end_ns;
  const std::unique_ptr<SglangBatch> batch = std::move(open_);
  scheduler_.process(*batch);
  scheduler_.set_outstanding(nullptr);
  apply_log(end_ns);
  // Forget ended requests once no batch refers to them.
  std::erase_if(ended_, [this](RequestId id) {
    if (planned_ && std::ranges::any_of(planned_->rows, [id](const auto& row) { return row.request->id == id; }))
      return false;
    if (scheduler_.holds(id)) return false;
    scheduler_.forget(id);
    return true;
  });
  if (scheduler_.empty()) empty_since_ns_ = end_ns;
  sample(end_ns);
  if (config_.check) check();
  return done();
}

StepLoad SglangEngine::load_of(const SglangBatch& batch) const {
  StepLoad load;
  const std::uint64_t window = timing_.model->window();
  for (const SglangBatch::Row& row : batch.rows) {
    const std::uint64_t context = row.request->kv;
    ++load.requests;
    load.tokens += row.tokens;
    if (row.decodes) {
      load.add_decode(context, window);
      ++load.mocker.decode_requests;
      load.mocker.decode_context_tokens += context;
      continue;
    }
    const auto history = static_cast<std::uint32_t>(context - row.tokens);
    load.chunks.push_back({row.tokens, history});
    ++load.mocker.prefill_requests;
    load.mocker.prefill_input_tokens += context;
    load.mocker.prefill_cached_tokens += history;
    if (row.request != batch.unfinished) {
      ++load.mocker.decode_requests;
      load.mocker.decode_context_tokens += context;
    }
  }
  return load;
}

// Applies what the scheduler did since the last call.
void SglangEngine::apply_log(std::int64_t now_ns) {
  SglangLog& log = scheduler_.log();
  for (const SglangLog::Admission& one : log.admitted) {
    const auto found = live_.find(one.request);
    if (found == live_.end()) continue;
    RequestRecord& record = found->second.record;
    if (record.first_admit_ns < 0) {
      record.first_admit_ns = now_ns;
      record.cached_first = one.cached;
    }
    record.cached_total += one.cached;
    record.looked_up += scheduler_.request(one.request).size();
  }
  const auto count = [&](const std::vector<RequestId>& ids) {
    for (const RequestId id : ids) {
      if (const auto found = live_.find(id); found != live_.end()) ++found->second.record.preemptions;
      ++totals_.preemptions;
    }
  };
  count(log.retracted);
  count(log.preempted);
  for (const RequestId id : log.sampled) {
    const auto found = live_.find(id);
    if (found == live_.end()) continue;
    if (found->second.reported) continue;
    RequestRecord& record = found->second.record;
    effects_.tokens.push_back({id, 1});
    if (++record.output_tokens == 1) {
      record.first_token_ns = now_ns;
    } else {
      if (record.output_tokens == 2) record.second_token_ns = now_ns;
      if (keeps_gaps_) found->second.gaps_ns.push_back(now_ns - record.last_token_ns);
    }
    record.last_token_ns = now_ns;
  }
  for (const RequestId id : log.aborted) finish(id, FinishReason::Cancelled, now_ns);
  for (const RequestId id : log.finished) {
    const SglangRequest& request = scheduler_.request(id);
    const bool stopped = request.eos_at > 0 && request.outputs() == request.eos_at && !config_.settings.ignore_eos;
    finish(id, stopped ? FinishReason::Stop : FinishReason::Length, now_ns);
  }
  log.clear();
  for (std::size_t i = events_.time_ns.size(); i < events_.batch.records.size(); ++i) events_.time_ns.push_back(now_ns);
}

// ── KV events ──

void SglangEngine::changed(RadixNode& node, bool stored) {
  const std::uint32_t page = config_.block_size;
  (stored ? stored_pages_ : removed_pages_) += node.length() / page;
  if (!names_pages()) return;
  if (stored) {
    const auto found = live_.find(scheduler_.inserting()->id);
    UNDERSTUDY_ASSERT(found != live_.end(), "a request that has ended inserts tokens");
    Live& live = found->second;
    if (!live.spec.identities) return;
    live.spec.identities->extend(live.names, node.end() / page);
    const auto first = live.names.begin() + node.begin / page;
    node.names.assign(first, first + node.length() / page);
  }
  bool starts = true;
  for (const BlockIdentity& name : node.names) {
    if (stored) {
      cached_.emplace(name.sequence_hash(), name);
    } else {
      cached_.erase(name.sequence_hash());
    }
    if (!config_.events) continue;
    EventRecord row;
    row.id = next_event_++;
    row.identity = name;
    row.kind = stored ? EventKind::Stored : EventKind::Removed;
    row.starts = std::exchange(starts, false);
    events_.batch.records.push_back(row);
  }
}

void SglangEngine::take_events(TimedEvents& out) {
  out.batch.records.clear();
  out.time_ns.clear();
  std::swap(out.batch.records, events_.batch.records);
  std::swap(out.time_ns, events_.time_ns);
}

std::size_t SglangEngine::published_prefix(std::span<const BlockIdentity> blocks) {
  std::size_t known = 0;
  while (known < blocks.size() && cached_.contains(blocks[known].sequence_hash())) ++known;
  return known;
}

void SglangEngine::has_blocks(std::size_t, std::span<const BlockIdentity> blocks, bool* out) const {
  for (std::size_t i = 0; i < blocks.size(); ++i) out[i] = cached_.contains(blocks[i].sequence_hash());
}

std::vector<BlockIdentity> SglangEngine::resident(std::size_t) const {
  std::vector<BlockIdentity> out;
  for (const auto& [hash, identity] : cached_) out.push_back(identity);
  return out;
}

// ── Watch ──

EngineSnapshot SglangEngine::snapshot() const {
  EngineSnapshot now;
  const std::uint32_t page = config_.block_size;
  now.phase = phase();
  now.wake_ns = now.phase == Phase::Idle || now.phase == Phase::Stalled ? Effects::kNever : now_ns_;
  now.waiting = scheduler_.waiting().size();
  now.running = live_.size() - std::min(live_.size(), now.waiting);
  now.free_blocks = static_cast<std::uint64_t>(scheduler_.avail()) / page;
  now.cached_blocks = scheduler_.tree().evictable() / page;
  now.active_blocks = config_.num_gpu_blocks - now.free_blocks - now.cached_blocks;
  now.evictions = removed_pages_;
  now.stored_blocks = stored_pages_;
  now.totals = totals_;
  return now;
}

void SglangEngine::sample(std::int64_t now_ns) {
  const EngineSnapshot now = snapshot();
  const EngineSample sample{now_ns, static_cast<std::uint32_t>(now.running), static_cast<std::uint32_t>(now.waiting),
                            static_cast<std::uint32_t>(now.active_blocks),
                            static_cast<std::uint32_t>(now.cached_blocks)};
  EngineSample at_that_time = sample;
  if (!samples_.empty()) at_that_time.time_ns = samples_.back().time_ns;
  if (samples_.empty() || !(at_that_time == samples_.back())) samples_.push_back(sample);
}

void SglangEngine::take_gaps(GapSum& out) {
  for (const auto& [gap_ns, count] : std::exchange(gaps_, {})) out.add(gap_ns, count);
}

}  // namespace understudy
