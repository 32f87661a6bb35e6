#include "engine/sglang/engine.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/assert.hpp"
#include "base/errors.hpp"

namespace understudy {

namespace {

// HiCache has one tier, in host memory.
void refuse_other_tiers(const TierConfig& tiers) {
  if (tiers.g3 || tiers.g4) {
    throw Error(ErrorKind::ConfigError, tiers.g3 ? "g3" : "g4",
                ": SGLang's HiCache has no storage behind the host here; leave it out");
  }
  if (tiers.host.duplex_gbps < std::numeric_limits<double>::infinity()) {
    throw Error(ErrorKind::ConfigError, "duplex_gbps: HiCache's two directions do not share a limit; leave it out");
  }
}

}  // namespace

std::unique_ptr<Engine> SglangConfig::make(const EngineSite& site) const {
  if (lockstep_ns > 0) {
    throw Error(ErrorKind::ConfigError, "lockstep: SGLang engines have no steps of a fixed length; leave it out");
  }
  if ((site.pushes != nullptr) != pushes()) {
    throw Error(ErrorKind::ConfigError,
                "disaggregation_mode: one side of a disaggregated server needs workers of the other; give pools with "
                "the roles prefill and decode");
  }
  if (pushes() && settings.host) {
    throw Error(ErrorKind::ConfigError,
                "tiers: HiCache with prefill and decode workers is not simulated; leave one of them out");
  }
  if ((site.tiers != nullptr) != settings.host.has_value()) {
    throw Error(ErrorKind::ConfigError, "tiers: HiCache needs a G2, and a G2 needs HiCache; give both or none");
  }
  if (site.tiers != nullptr) refuse_other_tiers(*site.tiers);
  return std::make_unique<SglangEngine>(*this, site);
}

SglangEngine::SglangEngine(const SglangConfig& config, const EngineSite& site)
    : config_(config),
      timing_(site.timing),
      links_(site.tiers != nullptr ? site.tiers->host : LinkPairConfig{},
             site.tiers != nullptr ? site.tiers->bytes_per_block / config.block_size : 0, site.name),
      port_(site.pushes == nullptr
                ? std::nullopt
                : std::optional<PushPort>(std::in_place, *site.pushes, static_cast<std::uint32_t>(site.worker),
                                          config.settings.side.role == SglangRole::Decode)),
      scheduler_(
          config.settings, [this](RadixNode& node, bool stored, RadixTier tier) { changed(node, stored, tier); },
          &links_, port_ ? &*port_ : nullptr),
      reports_batches_(site.reports_batches),
      fast_forwards_(site.fast_forward && !site.on_step && !site.reports_batches &&
                     site.timing.model->needs_sums_only()),
      on_step_(site.on_step),
      watches_steps_(static_cast<bool>(site.on_step)),
      on_checkpoint_(site.on_checkpoint) {
  if (site.keeps_times) SglangEngine::keep_times();
  if (site.gaps != nullptr) token_log_.share_gaps(*site.gaps);
}

Effects& SglangEngine::fresh() {
  if (!advancing_) effects_.clear();
  return effects_;
}

const Effects& SglangEngine::done() {
  effects_.has_events = !events_.batch.records.empty();
  effects_.phase = phase();
  effects_.wake_ns = next_call_ns();
  return effects_;
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
  const bool idle = is_idle();
  if (idle) poll_host(now_ns);  // each landing at its time, before this one
  if (!in_step()) now_ns_ = std::max(now_ns_, now_ns);
  sleeps_ = false;
  if (port_) port_->set_now(now_ns_);
  if (idle) {
    // An idle loop goes back to its first estimate of output lengths.
    if (now_ns > empty_since_ns_) scheduler_.end_iteration(true);
  }
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
  if (spec.has_priority) arrival.priority = spec.priority;
  Live& live = live_[spec.id];
  live.record.id = spec.id;
  live.record.name = spec.name;
  live.record.queued_ns = now_ns;
  live.spec = std::move(spec);
  stalled_ = false;
  scheduler_.submit(std::move(arrival));
  apply_log(now_ns);
  sample(in_step() ? std::min(now_ns, now_ns_) : now_ns_);
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
  stalled_ = sleeps_ = false;
  aborts_.push_back(id);
  if (!in_step()) now_ns_ = std::max(now_ns_, now_ns);
  return done();
}

std::optional<std::string> SglangEngine::never_fits(std::uint32_t prompt_tokens, std::uint32_t) const {
  const std::uint64_t most =
      std::min<std::uint64_t>(config_.settings.context_len, config_.settings.max_total_num_tokens) - 1;
  if (prompt_tokens + 5 < most) return std::nullopt;
  return "prompt_tokens: " + std::to_string(prompt_tokens) + " exceed the " + std::to_string(most < 6 ? 0 : most - 6) +
         " that the context and the KV pool allow; shorten the prompt, or raise max_model_len and num_gpu_blocks";
}

void SglangEngine::finish(RequestId id, FinishReason reason, std::int64_t now_ns) {
  const auto found = live_.find(id);
  if (found == live_.end()) return;
  Live& live = found->second;
  if (!live.reported) {
    live.record.reason = reason;
    live.record.finish_ns = now_ns;
    if (reason != FinishReason::Cancelled && reason != FinishReason::Failed) {
      token_log_.count_gaps(live.tokens, live.record.output_tokens);
    }
    effects_.finished.push_back(std::move(live.record));
  }
  live.tokens.give_back();
  live_.erase(found);
  ended_.push_back(id);
}

void SglangEngine::set_admitting(bool on) {
  scheduler_.set_admitting(on);
  if (on) stalled_ = false;
}

void SglangEngine::forget_cache(std::int64_t now_ns) {
  links_.set_now(now_ns);
  scheduler_.forget_cached();
  stalled_ = false;
  if (!in_step()) now_ns_ = std::max(now_ns_, now_ns);
}

void SglangEngine::set_link_share(std::int64_t now_ns, Tier tier, double share) {
  if (scheduler_.host() == nullptr || tier != Tier::G2) {
    throw Error(ErrorKind::InvalidArgument, "tier: the engine has no link to this tier; HiCache has g2 only");
  }
  if (!(share >= 0.001 && share <= 1)) {
    throw Error(ErrorKind::InvalidArgument, "share: ", share, " is not between 0.001 and 1");
  }
  links_.set_now(now_ns);
  links_.set_share(share);
}

std::vector<std::int64_t> SglangEngine::gaps_of(RequestId id) const {
  const auto found = live_.find(id);
  if (found == live_.end()) return {};
  return token_log_.list_gaps(found->second.tokens, found->second.record.output_tokens);
}

// ── Steps ──

SglangEngine::Planned SglangEngine::schedule(std::int64_t now_ns) {
  links_.set_now(now_ns);
  if (port_) port_->set_now(now_ns);
  if (!aborts_.empty()) scheduler_.abort(std::exchange(aborts_, {}));
  Planned out{scheduler_.schedule()};
  // An interval between prefills may pass without a batch.
  while (!out.batch && !planned_.batch && scheduler_.defers_prefill()) out.batch = scheduler_.schedule();
  if (port_ && scheduler_.has_polled()) port_->look();
  if (!scheduler_.log().sampled.empty()) token_log_.end_step(now_ns);  // requests that joined have a token
  out.written_ns = links_.written_ns();
  out.loaded_ns = links_.loaded_ns();
  apply_log(now_ns);
  return out;
}

const Effects& SglangEngine::begin_step(std::int64_t now_ns) {
  if (in_step()) throw Error(ErrorKind::WrongState, "begin_step before the step in progress has ended");
  fresh();
  now_ns_ = now_ns;
  if (watches_steps_) view_.clear();
  scheduler_.set_outstanding(nullptr);
  sleeps_ = false;
  if (!planned_.batch) planned_ = schedule(now_ns);
  if (!planned_.batch && port_) iterate_idle(now_ns);
  if (!planned_.batch) {
    const std::optional<std::int64_t> ready_ns = has_transfers() ? scheduler_.host()->next_ready() : std::nullopt;
    sample(now_ns);  // aborts were received, and no step may follow
    if (!scheduler_.empty() && ready_ns) {
      waits_ = true;
      now_ns_ = std::max(now_ns, *ready_ns);
      return done();
    }
    if (!port_) stalled_ = !scheduler_.empty();
    if (scheduler_.empty()) empty_since_ns_ = now_ns;
    if (is_idle()) publish(now_ns);
    return done();
  }
  const StepLoad load = load_of(*planned_.batch);
  std::int64_t duration_ns = timing_.duration_ns(load, capacity_tokens());
  const bool covered = timing_.model->covers(load);
  if (watches_steps_) view_batch(*planned_.batch, load, duration_ns);  // before the next schedule changes its requests
  Planned behind;
  if (config_.settings.overlap) {
    scheduler_.set_outstanding(planned_.batch.get());
    behind = schedule(now_ns);
  }
  open_ = std::exchange(planned_, std::move(behind));
  sample(now_ns);  // both schedules took memory
  // The batch starts when the scheduler's own copies have ended, and ends when the prefixes that it loads are there.
  duration_ns = std::max({duration_ns, duration_ns + open_.written_ns - now_ns, open_.loaded_ns - now_ns});
  ++totals_.steps;
  totals_.step_ns += duration_ns;
  if (!covered) totals_.uncovered_ns += duration_ns;
  if (reports_batches_) effects_.batch_tokens = load.tokens;
  now_ns_ = now_ns + duration_ns;
  if (on_step_) on_step_(*this, false);
  return done();
}

const Effects& SglangEngine::end_step(std::int64_t end_ns) {
  if (!in_step()) throw Error(ErrorKind::WrongState, "end_step without a step in progress");
  fresh();
  now_ns_ = end_ns;
  if (std::exchange(waits_, false)) return done();
  links_.set_now(end_ns);
  const std::unique_ptr<SglangBatch> batch = std::move(open_.batch);
  if (port_) port_->set_now(end_ns);
  scheduler_.process(*batch);
  scheduler_.set_outstanding(nullptr);
  if (port_) scheduler_.end_iteration(false);
  token_log_.end_step(end_ns);
  apply_log(end_ns);
  forget_ended();
  if (scheduler_.empty()) empty_since_ns_ = end_ns;
  publish_after(batch->mode, end_ns);
  if (token_log_.crowded()) fold_token_log();
  sample(end_ns);
  if (config_.check) check();
  if (on_step_) on_step_(*this, true);
  if (on_checkpoint_) on_checkpoint_(*this, std::exchange(forwarded_, false));
  return done();
}

// Forgets ended requests once no batch refers to them.
void SglangEngine::forget_ended() {
  std::erase_if(ended_, [this](RequestId id) {
    const auto is = [id](const auto& row) { return row.request->id == id; };
    if (planned_.batch && std::ranges::any_of(planned_.batch->rows, is)) return false;
    if (scheduler_.holds(id)) return false;
    scheduler_.forget(id);
    if (port_) port_->leave(id);
    return true;
  });
}

// Drops step ends that no live request needs for its gaps.
void SglangEngine::fold_token_log() {
  std::uint64_t oldest = token_log_.next_step();
  for (const auto& [id, live] : live_) {
    if (!live.tokens.empty()) oldest = std::min(oldest, live.tokens.front().first_step);
  }
  token_log_.fold(oldest, live_.size());
}

StepLoad SglangEngine::load_of(const SglangBatch& batch) const {
  StepLoad load;
  for (const SglangBatch::Row& row : batch.rows) add_to(load, row, batch);
  return load;
}

void SglangEngine::add_to(StepLoad& load, const SglangBatch::Row& row, const SglangBatch& batch) const {
  const std::uint64_t context = row.request->kv;
  ++load.requests;
  load.tokens += row.tokens;
  if (row.decodes) {
    load.add_decode(context, timing_.model->window());
    ++load.mocker.decode_requests;
    load.mocker.decode_context_tokens += context;
    return;
  }
  const auto history = static_cast<std::uint32_t>(context - row.tokens);
  load.chunks.push_back({row.tokens, history});
  ++load.mocker.prefill_requests;
  load.mocker.prefill_input_tokens += context;
  load.mocker.prefill_cached_tokens += history;
  if (row.request != batch.unfinished && timing_.charges_first_token) {
    ++load.mocker.decode_requests;
    load.mocker.decode_context_tokens += context;
  }
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
      record.below_first[0] = one.loaded;
    }
    record.cached_total += one.cached;
    record.looked_up += scheduler_.request(one.request).size();
    record.below_total[0] += one.loaded;
    if (reports_batches_) effects_.admitted.push_back({one.request, one.cached, {one.loaded, 0, 0}});
    if (watches_steps_) view_.admitted.push_back({one.request, one.resumed, one.cached});
  }
  const auto count = [&](const std::vector<RequestId>& ids) {
    for (const RequestId id : ids) {
      if (const auto found = live_.find(id); found != live_.end()) ++found->second.record.preemptions;
      ++totals_.preemptions;
      if (reports_batches_) effects_.preempted.push_back(id);
      if (watches_steps_) view_.preempted.push_back({id, id});
    }
  };
  count(log.retracted);
  count(log.preempted);
  for (const RequestId id : log.sampled) {
    const auto found = live_.find(id);
    if (found == live_.end() || found->second.reported) continue;
    effects_.tokens.push_back({id, 1});
    add_token(found->second, now_ns);
  }
  for (const RequestId id : log.joined) {
    const auto found = live_.find(id);
    if (watches_steps_) view_.admitted.push_back({id, false, 0});
    if (found != live_.end() && found->second.record.first_admit_ns < 0) found->second.record.first_admit_ns = now_ns;
  }
  const FinishReason aborted = port_ ? FinishReason::Failed : FinishReason::Cancelled;
  for (const RequestId id : log.aborted) finish(id, aborted, now_ns);
  for (const RequestId id : log.finished) {
    const SglangRequest& request = scheduler_.request(id);
    const bool stopped = request.eos_at > 0 && request.outputs() == request.eos_at && !config_.settings.ignore_eos;
    finish(id, stopped ? FinishReason::Stop : FinishReason::Length, now_ns);
  }
  log.clear();
}

void SglangEngine::add_token(Live& live, std::int64_t now_ns) {
  RequestRecord& record = live.record;
  ++record.output_tokens;
  if (record.output_tokens == 1) record.first_token_ns = now_ns;
  if (record.output_tokens == 2) record.second_token_ns = now_ns;
  record.last_token_ns = now_ns;
  live.tokens.add(token_log_.next_step() - 1, 1);
}

}  // namespace understudy
