#include "engine/trtllm/engine.hpp"

#include <algorithm>
#include <utility>

#include "base/assert.hpp"
#include "base/errors.hpp"
#include "engine/trtllm/live_tokens.hpp"

namespace understudy {

namespace {

// Passes without a batch, and without a change that could lead to one, before an engine counts as stuck.
constexpr int kMostEmptyPasses = 64;

}  // namespace

std::unique_ptr<Engine> TrtConfig::make(const EngineSite& site) const {
  if (lockstep_ns > 0) {
    throw Error(ErrorKind::ConfigError, "lockstep: TensorRT-LLM engines have no steps of a fixed length; leave it out");
  }
  if (site.tiers != nullptr) {
    throw Error(ErrorKind::ConfigError,
                "tiers: TensorRT-LLM has its own levels; give host_cache_size and disk_cache_size");
  }
  return std::make_unique<TrtEngine>(*this, site);
}

TrtEngine::TrtEngine(const TrtConfig& config, const EngineSite& site)
    : config_(config),
      timing_(site.timing),
      executor_(config.settings, config.event_buffer_size > 0),
      reports_batches_(site.reports_batches),
      fast_forwards_(site.fast_forward && !site.on_step && !site.reports_batches &&
                     site.timing.model->needs_sums_only()),
      on_step_(site.on_step),
      watches_steps_(static_cast<bool>(site.on_step)),
      on_checkpoint_(site.on_checkpoint),
      stored_blocks_(executor_.store().num_levels(), 0),
      removed_blocks_(executor_.store().num_levels(), 0),
      published_(executor_.store().num_levels()) {
  executor_.tree().watch(*this);
  if (site.keeps_times) TrtEngine::keep_times();
  if (site.gaps != nullptr) token_log_.share_gaps(*site.gaps);
}

Effects& TrtEngine::fresh() {
  if (!advancing_) effects_.clear();
  return effects_;
}

const Effects& TrtEngine::done() {
  effects_.has_events = !events_.batch.records.empty();
  effects_.phase = phase();
  effects_.wake_ns = effects_.phase == Phase::Idle || effects_.phase == Phase::Stalled ? Effects::kNever : now_ns_;
  return effects_;
}

Phase TrtEngine::phase() const {
  if (open_) return Phase::InStep;
  if (stalled_) return Phase::Stalled;
  return is_idle() ? Phase::Idle : Phase::Ready;
}

// ── Requests ──

const Effects& TrtEngine::submit(RequestSpec spec, std::int64_t now_ns) {
  if (spec.prompt_tokens == 0) throw Error(ErrorKind::InvalidArgument, "prompt_tokens must be at least 1");
  if (executor_.knows(spec.id)) {
    throw Error(ErrorKind::InvalidArgument, "request ", spec.id,
                " is here already; give every request an id of its own");
  }
  if (spec.identities) {
    const std::size_t blocks = (std::size_t{spec.prompt_tokens} + spec.outputs()) / config_.block_size;
    if (spec.identities->size() < blocks) {
      throw Error(ErrorKind::InvalidArgument, "identities name ", spec.identities->size(), " blocks; the request has ",
                  blocks);
    }
  }
  if (const auto reason = never_fits(spec.prompt_tokens, spec.max_tokens)) {
    throw Error(ErrorKind::InvalidArgument, *reason);
  }
  fresh();
  if (!open_) now_ns_ = std::max(now_ns_, now_ns);
  const std::uint32_t room = executor_.memory().max_seq_len - spec.prompt_tokens;
  TrtArrival arrival;
  arrival.id = spec.id;
  arrival.max_new = std::max(1u, std::min(spec.max_tokens, room));
  const std::uint32_t all = spec.prompt_tokens + spec.outputs();
  if (spec.identities) {
    TokenList tokens;  // in one call: a block may have the end of the prompt and the first outputs
    spec.identities->append_tokens(tokens, 0, all, config_.block_size, spec.id);
    arrival.prompt = tokens.slice(0, spec.prompt_tokens);
    arrival.outputs = tokens.slice(spec.prompt_tokens, all);
  } else {
    arrival.prompt.append({(std::uint64_t{1} << 63) + (spec.id << 24), spec.prompt_tokens});
  }
  arrival.first_output = (std::uint64_t{1} << 63) + (spec.id << 24) + spec.prompt_tokens;
  arrival.eos_at = spec.eos_at > 0 && spec.eos_at < spec.max_tokens ? spec.eos_at : 0;
  arrival.priority = spec.has_priority ? static_cast<double>(spec.priority) : 0.5;
  arrival.scope.adapter = spec.adapter;
  if (const auto* const live = dynamic_cast<const LiveTokens*>(spec.identities.get()); live != nullptr) {
    knows_tokens_ = true;
    arrival.scope = {spec.adapter, live->salt().has_value(), live->salt().value_or(0)};
  }
  Live& live = live_[spec.id];
  live.record.id = spec.id;
  live.record.name = spec.name;
  live.record.queued_ns = now_ns;
  live.spec = std::move(spec);
  stalled_ = false;
  executor_.submit(std::move(arrival));
  sample(open_ ? std::min(now_ns, now_ns_) : now_ns_);
  return done();
}

const Effects& TrtEngine::cancel(RequestId id, std::int64_t now_ns) {
  fresh();
  const auto found = live_.find(id);
  if (found == live_.end() || found->second.reported) return done();
  Live& live = found->second;
  live.reported = true;
  live.record.reason = FinishReason::Cancelled;
  live.record.finish_ns = now_ns;
  effects_.finished.push_back(live.record);
  stalled_ = false;
  executor_.cancel(id);
  if (!open_) now_ns_ = std::max(now_ns_, now_ns);
  return done();
}

std::optional<std::string> TrtEngine::never_fits(std::uint32_t prompt_tokens, std::uint32_t) const {
  const std::uint32_t longest = executor_.memory().max_seq_len;
  if (prompt_tokens >= longest) {
    return "prompt_tokens: " + std::to_string(prompt_tokens) + " leave no room for an output in max_seq_len (" +
           std::to_string(longest) + "); shorten the prompt, or raise max_seq_len and the KV cache";
  }
  const TrtSettings& settings = config_.settings;
  if (settings.enable_chunked_prefill || prompt_tokens <= settings.max_num_tokens) return std::nullopt;
  return "prompt_tokens: " + std::to_string(prompt_tokens) + " exceed max_num_tokens (" +
         std::to_string(settings.max_num_tokens) + "); raise it, or turn enable_chunked_prefill on";
}

std::vector<std::int64_t> TrtEngine::gaps_of(RequestId id) const {
  const auto found = live_.find(id);
  if (found == live_.end()) return {};
  return token_log_.list_gaps(found->second.tokens, found->second.record.output_tokens);
}

void TrtEngine::finish(RequestId id, FinishReason reason, std::int64_t now_ns) {
  const auto found = live_.find(id);
  if (found == live_.end()) return;
  Live& live = found->second;
  if (!live.reported) {
    live.record.reason = reason;
    live.record.finish_ns = now_ns;
    if (reason != FinishReason::Cancelled) token_log_.count_gaps(live.tokens, live.record.output_tokens);
    effects_.finished.push_back(std::move(live.record));
  }
  live.tokens.give_back();
  live_.erase(found);
  ended_.push_back(id);
}

void TrtEngine::set_admitting(bool on) {
  executor_.set_admitting(on);
  if (on) stalled_ = false;
}

void TrtEngine::forget_cache(std::int64_t now_ns) {
  executor_.store().drop_unused();
  stalled_ = false;
  if (!open_) now_ns_ = std::max(now_ns_, now_ns);
  publish(now_ns);
}

Stall TrtEngine::stall() const {
  Stall out = Engine::stall();
  if (!executor_.death().empty()) {
    out.note = "; out of pages: " + executor_.death() + "; the real server ends here. Give it more max_tokens";
  } else if (executor_.is_dead()) {
    out.note = "; V2 scheduler deadlock: " + std::to_string(executor_.stuck()) +
               " generation requests are active and none can be scheduled, suspended or paused; the real server ends "
               "here. Give it a host level (kv_cache_config.host_cache_size), or more max_tokens";
  }
  return out;
}

void TrtEngine::die_if_dead() const {
  if (config_.dies && executor_.is_dead()) throw Error(ErrorKind::WrongState, "trtllm", stall().note);
}

// ── Steps ──

// Forms the next batch; false: it is empty.
bool TrtEngine::plan_pass(std::int64_t now_ns) {
  planned_view_.clear();
  if (!executor_.schedule()) stalled_ = true;
  pass_is_open_ = true;
  planned_iteration_ = {};
  planned_iteration_.paused =
      static_cast<std::uint32_t>(executor_.log().suspended.size() + executor_.log().recomputed.size());
  note_admissions(now_ns);
  planned_load_ = load_of(executor_.batch());
  if (reports_batches_) count_batch();
  planned_copies_ns_ = take_copies_ns();
  return planned_load_.has_value();
}

// Passes until one has a batch; false: there is none.
bool TrtEngine::run_empty_passes(std::int64_t now_ns) {
  for (int passes = 0; passes < kMostEmptyPasses && !executor_.is_idle(); ++passes) {
    const bool has_batch = plan_pass(now_ns);
    if (executor_.is_dead()) {
      pass_is_open_ = false;
      return false;
    }
    if (has_batch && !config_.settings.overlap) return true;
    executor_.finish();
    pass_is_open_ = false;
    apply_log(now_ns);
    if (executor_.is_dead()) break;
    if (has_batch) return true;
  }
  return false;
}

const Effects& TrtEngine::begin_step(std::int64_t now_ns) {
  if (open_) throw Error(ErrorKind::WrongState, "begin_step before the step in progress has ended");
  fresh();
  now_ns_ = now_ns;
  if (executor_.is_dead() || (!planned_load_ && !run_empty_passes(now_ns))) {
    sample(now_ns);
    die_if_dead();
    stalled_ = !executor_.is_idle();
    if (!stalled_) executor_.drop_cancels();
    forget_ended();
    return done();
  }
  const StepLoad load = *planned_load_;
  std::int64_t duration_ns = timing_.duration_ns(load, capacity_tokens());
  if (watches_steps_) view_batch(executor_.batch(), load, duration_ns);
  view_ = std::move(planned_view_);
  duration_ns += planned_copies_ns_;
  planned_load_.reset();
  planned_copies_ns_ = 0;
  iteration_ = planned_iteration_;
  iteration_.duration_ns = duration_ns;
  if (config_.settings.overlap && !executor_.is_idle()) (void)plan_pass(now_ns);  // it always has requests
  open_ = true;
  sample(now_ns);
  ++totals_.steps;
  totals_.step_ns += duration_ns;
  if (!timing_.model->covers(load)) totals_.uncovered_ns += duration_ns;
  if (reports_batches_) effects_.batch_tokens = load.tokens;
  now_ns_ = now_ns + duration_ns;
  if (on_step_) on_step_(*this, false);
  return done();
}

const Effects& TrtEngine::end_step(std::int64_t end_ns) {
  if (!open_) throw Error(ErrorKind::WrongState, "end_step without a step in progress");
  fresh();
  now_ns_ = end_ns;
  open_ = false;
  token_log_.end_step(end_ns);
  if (std::exchange(pass_is_open_, false) && !executor_.is_dead()) executor_.finish();
  apply_log(end_ns);
  die_if_dead();
  stalled_ = executor_.is_dead();
  forget_ended();
  if (token_log_.crowded()) fold_token_log();
  sample(end_ns);
  if (config_.check) check();
  if (on_step_) on_step_(*this, true);
  if (on_checkpoint_) on_checkpoint_(*this, std::exchange(forwarded_, false));
  return done();
}

// Applies what a finished pass did.
void TrtEngine::apply_log(std::int64_t now_ns) {
  TrtLog& log = executor_.log();
  for (const RequestId id : log.sampled) {
    const auto found = live_.find(id);
    if (found == live_.end() || found->second.reported) continue;
    effects_.tokens.push_back({id, 1});
    add_token(found->second, now_ns);
  }
  for (const RequestId id : log.dropped) finish(id, FinishReason::Cancelled, now_ns);
  for (const RequestId id : log.finished) {
    const TrtRequest& request = executor_.request(id);
    const bool stopped = request.eos_at > 0 && request.outputs >= request.eos_at;
    finish(id,
           request.cancelled ? FinishReason::Cancelled
           : stopped         ? FinishReason::Stop
                             : FinishReason::Length,
           now_ns);
  }
  if (log.processed) {
    publish(now_ns);
    flush_cache_events();
  }
  log.clear();
}

void TrtEngine::add_token(Live& live, std::int64_t now_ns) {
  RequestRecord& record = live.record;
  ++record.output_tokens;
  if (record.output_tokens == 1) record.first_token_ns = now_ns;
  if (record.output_tokens == 2) record.second_token_ns = now_ns;
  record.last_token_ns = now_ns;
  live.tokens.add(token_log_.next_step() - 1, 1);
}

// Forgets ended requests once no batch refers to them.
void TrtEngine::forget_ended() {
  const auto is_in = [](const TrtBatch& batch, RequestId id) {
    return std::ranges::any_of(batch.contexts, [id](const auto& chunk) { return chunk.request->id == id; }) ||
           std::ranges::any_of(batch.generation, [id](const auto* one) { return one->id == id; });
  };
  std::erase_if(ended_, [&](RequestId id) {
    if (is_in(executor_.batch(), id) || (executor_.previous() && is_in(*executor_.previous(), id))) return false;
    executor_.forget(id);
    return true;
  });
}

// Drops step ends that no live request needs for its gaps.
void TrtEngine::fold_token_log() {
  std::uint64_t oldest = token_log_.next_step();
  for (const auto& [id, live] : live_) {
    if (!live.tokens.empty()) oldest = std::min(oldest, live.tokens.front().first_step);
  }
  token_log_.fold(oldest, live_.size());
}

}  // namespace understudy
