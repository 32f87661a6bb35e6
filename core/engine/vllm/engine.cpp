#include "engine/vllm/engine.hpp"

#include <algorithm>
#include <utility>

namespace understudy {

namespace {

const EngineConfig& checked(const EngineConfig& c) {
  const auto at_least_one = [](std::uint64_t value, const char* field) {
    if (value < 1) throw Error(ErrorKind::ConfigError, field, " must be at least 1, got ", value);
  };
  at_least_one(c.max_num_seqs, "max_num_seqs");
  at_least_one(c.max_num_batched_tokens, "max_num_batched_tokens");
  at_least_one(c.max_model_len, "max_model_len");
  at_least_one(c.max_num_active_seqs, "max_num_active_seqs");
  if (c.max_num_active_seqs != EngineConfig::kUnlimited && c.max_num_active_seqs > c.max_num_seqs) {
    throw Error(ErrorKind::ConfigError, "max_num_active_seqs must not be above max_num_seqs=", c.max_num_seqs, ", got ",
                c.max_num_active_seqs);
  }
  if (!(c.watermark >= 0 && c.watermark <= 1)) {
    throw Error(ErrorKind::ConfigError, "watermark must be in [0, 1], got ", c.watermark);
  }
  if (c.policy == SchedulingPolicy::Priority && c.preemption_mode == PreemptionMode::Fifo) {
    throw Error(ErrorKind::ConfigError,
                "preemption_mode fifo needs the fcfs policy: under priority, priorities decide");
  }
  const bool known = c.eviction_policy == PolicyKind::Lineage || c.eviction_policy == PolicyKind::Lru ||
                     c.eviction_policy == PolicyKind::MultiLru;
  if (!known) throw Error(ErrorKind::ConfigError, "eviction_policy must be lineage, lru or multi_lru");
  if (c.async_scheduling && !c.accept_rates.empty()) {
    throw Error(ErrorKind::ConfigError,
                "accept_rates contradict async_scheduling: the next step is scheduled before the burst is known");
  }
  if (c.speculation.tokens > 0 && !c.accept_rates.empty()) {
    throw Error(ErrorKind::ConfigError,
                "accept_rates contradict num_speculative_tokens: one is the mocker's way of "
                "speculation, the other vLLM's");
  }
  if (c.speculation.tokens > 0 && c.kv_manager == KvBackend::Kvbm) {
    throw Error(ErrorKind::ConfigError,
                "num_speculative_tokens needs kv_manager native: rejected drafts stay in their "
                "blocks");
  }
  if (c.speculation.reserved_slots >= c.max_num_batched_tokens ||
      c.speculation.draft_slots >= c.max_num_batched_tokens) {
    throw Error(ErrorKind::ConfigError, "max_num_batched_tokens=", c.max_num_batched_tokens,
                " leaves nothing beside the slots of the draft model");
  }
  return c;
}

// Whether the store tells what happens. Without prefix caching there is nothing that anybody could use.
bool emits(const EngineConfig& c) { return (c.events || c.check) && c.enable_prefix_caching; }

// `below`: there are tiers below the host.
StoreConfig store_config(const EngineConfig& c, const TierConfig* tiers, bool below) {
  StoreConfig store;
  store.block_size = c.block_size;
  PoolConfig pool;
  pool.num_blocks = c.num_gpu_blocks;
  const bool shared = c.kv_manager == KvBackend::Kvbm;
  pool.duplicates = shared ? DuplicatePolicy::Reject : DuplicatePolicy::Keep;
  const bool append =
      c.free_order == FreeOrder::AllLast || (c.free_order == FreeOrder::UncachedLast && !c.enable_prefix_caching);
  pool.policy.kind = shared ? c.eviction_policy : append ? PolicyKind::VllmAppend : PolicyKind::Vllm;
  // A hash is enough to copy what is evicted to the host; not for those who look at it there or below.
  const bool names_evicted = tiers != nullptr && tiers->mode == OffloadMode::OnEviction;
  pool.keeps_details = emits(c) || (names_evicted && (below || tiers->filter));
  store.pools = {pool};
  if (tiers != nullptr) {
    if (!c.enable_prefix_caching) {
      throw Error(ErrorKind::ConfigError, "tiers need enable_prefix_caching: without it no block is found again");
    }
    PoolConfig host;
    host.tier = Tier::G2;
    host.num_blocks = tiers->g2_blocks;
    host.policy.kind = PolicyKind::Lru;
    if (tiers->g2_policy) host.policy = tiers->g2_policy();
    host.duplicates = DuplicatePolicy::Reject;
    host.keeps_details = emits(c);
    store.pools.push_back(host);
  }
  store.events.enabled = emits(c);
  store.thread_safe = false;  // an engine is one state machine: whoever steps it owns it
  return store;
}

}  // namespace

VllmEngine::VllmEngine(const EngineConfig& config, StepTiming timing, const TierConfig* tiers, TierRun* run,
                       const std::string& name)
    : config_(checked(config)),
      timing_(std::move(timing)),
      store_(store_config(config, tiers,
                          run != nullptr ? !run->shared().empty() : tiers != nullptr && (tiers->g3 || tiers->g4))),
      shared_(config.kv_manager == KvBackend::Kvbm),
      emits_(emits(config)),
      own_run_(tiers != nullptr && run == nullptr
                   ? std::make_unique<TierRun>(*tiers, config.block_size, config.events, config.check)
                   : nullptr),
      tiers_(tiers == nullptr ? nullptr
                              : std::make_unique<WorkerTiers>(*tiers, store_, run != nullptr ? *run : *own_run_, name)),
      capacity_tokens_(config.num_gpu_blocks * config.block_size),
      // vLLM's own count of blocks has one more, and the watermark is taken of that.
      watermark_blocks_(static_cast<std::uint64_t>(config.watermark * static_cast<double>(config.num_gpu_blocks + 1))),
      bursts_(config.accept_rates, config.burst_seed),
      acceptance_(config.speculation.accept_rates, config.speculation.seed),
      waiting_(config.policy, requests_) {
  if (tiers_ && emits_) tiers_->set_on_change([this](std::int64_t time_ns) { show_events(time_ns); });
}

// ── Requests ──

RequestId VllmEngine::submit(RequestSpec spec) {
  if (spec.prompt_tokens == 0) throw Error(ErrorKind::InvalidArgument, "request ", spec.name, ": the prompt is empty");
  if (!spec.identities && config_.enable_prefix_caching) {
    throw Error(ErrorKind::InvalidArgument, "request ", spec.name, ": prefix caching needs identities");
  }
  if (spec.prompt_tokens >= config_.max_model_len) {
    throw Error(ErrorKind::InvalidArgument, "request ", spec.name, ": a prompt of ", spec.prompt_tokens,
                " tokens leaves no room for output in max_model_len=", config_.max_model_len);
  }
  if (spec.eos_at > spec.max_tokens) {
    throw Error(ErrorKind::InvalidArgument, "request ", spec.name, ": eos_at ", spec.eos_at,
                " is after max_tokens=", spec.max_tokens, ", which ends it before; leave eos_at out");
  }
  const auto id = static_cast<RequestId>(requests_.size());
  EngineRequest& request = requests_.emplace_back();
  request.spec = std::move(spec);
  request.known = request.spec.prompt_tokens;
  waiting_.push(id, false);
  blocked_.valid = false;
  disturbed_ = true;
  leap_taken_ns_ = -1;
  stuck_ = false;
  fruitless_preemptions_ = 0;
  token_log_.touch();
  return id;
}

std::optional<std::string> VllmEngine::never_fits(std::uint32_t prompt_tokens, std::uint32_t max_tokens) const {
  const std::uint64_t end =
      std::min<std::uint64_t>(std::uint64_t{prompt_tokens} + std::max(max_tokens, 1u), config_.max_model_len);
  // The last token is never computed; a burst reserves room for it all the same.
  const Speculation& drafts = config_.speculation;
  const std::uint64_t stored =
      bursts_.on()        ? end
      : drafts.tokens > 0 ? std::min<std::uint64_t>(end - 1 + drafts.tokens + drafts.lookahead, config_.max_model_len)
                          : end - 1;
  const std::uint64_t blocks = (stored + config_.block_size - 1) / config_.block_size;
  const bool capped = config_.long_prefill_token_threshold > 0 && config_.caps_lone_prefill;
  const std::uint32_t chunk = capped ? std::min(prompt_tokens, config_.long_prefill_token_threshold) : prompt_tokens;
  const bool too_long = !config_.enable_chunked_prefill && chunk > config_.max_num_batched_tokens;
  if (prompt_tokens < config_.max_model_len && blocks <= config_.num_gpu_blocks && !too_long) {
    return std::nullopt;
  }
  if (prompt_tokens >= config_.max_model_len) {
    return text_of("the prompt of ", prompt_tokens, " tokens leaves no room in max_model_len=", config_.max_model_len);
  }
  if (blocks > config_.num_gpu_blocks) {
    return text_of("prompt and output of ", end, " tokens need ", blocks, " blocks of ", config_.block_size,
                   ", num_gpu_blocks=", config_.num_gpu_blocks);
  }
  return text_of("without chunked prefill a step of ", chunk,
                 " prompt tokens exceeds max_num_batched_tokens=", config_.max_num_batched_tokens);
}

std::optional<RequestRecord> VllmEngine::cancel(RequestId id, std::int64_t now_ns) {
  if (id >= requests_.size()) return std::nullopt;
  EngineRequest& request = requests_[id];
  if (request.status == RequestStatus::Finished) return std::nullopt;
  // Asynchronously its last token may be visible before the scheduler has received it: only its blocks go now.
  const bool ended = request.record.finish_ns >= 0;
  if (tiers_) tiers_->hub().run_until(now_ns);  // what landed before did so for a request that was still there
  if (request.status == RequestStatus::Running) {
    running_.erase(std::find(running_.begin(), running_.end(), id));
  } else if (request.status == RequestStatus::Parked) {
    --parked_;
  } else {
    waiting_.remove(id);
  }
  if (tiers_) {
    tiers_->abandon(id);
    tiers_->stop_waiting(id, now_ns);
  }
  retire(request);
  show_events(tiers_ ? std::max(now_ns, tiers_->hub().links().now_ns()) : now_ns);
  blocked_.valid = false;
  disturbed_ = true;
  leap_taken_ns_ = -1;
  stuck_ = false;
  fruitless_preemptions_ = 0;
  token_log_.touch();
  if (ended) return std::nullopt;
  return take_record(id, FinishReason::Cancelled, now_ns);
}

// What the request leaves; it has ended.
RequestRecord VllmEngine::take_record(RequestId id, FinishReason reason, std::int64_t now_ns) {
  EngineRequest& request = requests_[id];
  RequestRecord& record = request.record;
  record.id = id;
  record.name = request.spec.name;
  record.reason = reason;
  record.finish_ns = now_ns;
  if (tiers_) record.room_wait_ns = tiers_->waited_ns(id);
  const std::vector<TokenRun>& runs = request.tokens;
  if (runs.empty()) return record;
  record.first_token_ns = token_log_.end_of(runs.front().first_step);
  record.last_token_ns = token_log_.end_of(runs.back().first_step + runs.back().count - 1);
  if (request.first_burst > 1) {
    record.second_token_ns = record.first_token_ns;
  } else if (runs.front().count > 1) {
    record.second_token_ns = token_log_.end_of(runs.front().first_step + 1);
  } else if (runs.size() > 1) {
    record.second_token_ns = token_log_.end_of(runs[1].first_step);
  }
  return record;
}

const EngineRequest& VllmEngine::request(RequestId id) const {
  if (id >= requests_.size()) throw Error(ErrorKind::InvalidArgument, "request ", id, " was never submitted");
  return requests_[id];
}

// ── Steps ──

void VllmEngine::require_time(std::int64_t now_ns) const {
  if (!tiers_ || now_ns >= tiers_->hub().links().now_ns()) return;
  throw Error(ErrorKind::InvalidArgument, "now_ns ", now_ns, " is before ", tiers_->hub().links().now_ns(),
              ", to where the transfers have come: time never goes backwards");
}

std::int64_t VllmEngine::begin_step(std::int64_t now_ns) {
  if (in_step_) throw Error(ErrorKind::WrongState, "begin_step before the step in progress has ended");
  require_time(now_ns);
  begun_ns_ = now_ns;
  disturbed_ = false;
  if (tiers_ && leap_taken_ns_ != now_ns) {  // else it has begun, in a leap
    step_holds_events_ = false;
    tiers_->hub().run_until(now_ns);
    resume_loaded();
    landings_noticed_ = tiers_->landings();
    show_events(now_ns);
  }
  leap_taken_ns_ = -1;
  step_holds_events_ = true;
  try {
    schedule(now_ns);
  } catch (...) {  // a policy of the user's: no step begins
    release_events(now_ns);
    throw;
  }
  const std::int64_t duration_ns = timing_.duration_ns(log_.load, capacity_tokens_);
  fruitless_preemptions_ += log_.preempted.size();
  const bool nothing = log_.scheduled.empty() && log_.preempted.empty() && !unreceived_;
  sleeping_ = nothing && tiers_ && !idle() && !tiers_->idle();
  if (sleeping_) {
    released_at_sleep_ = tiers_->released();
    now_ns_ = now_ns;
    release_events(now_ns);
    return 0;
  }
  stuck_ = (nothing && !(running_.empty() && waiting_.empty())) || thrashing();
  ++totals_.steps;
  in_step_ = true;
  now_ns_ = now_ns;
  if (tiers_) show_events(now_ns);  // what went on the host
  // Blocks for a prompt are held while it is computed; one more for a token can wait for the end of its step.
  if (log_.load.prefill_requests > 0) sample(running_.size());
  now_ns_ = now_ns + duration_ns;
  if (observer_) observer_(false);
  return duration_ns;
}

const StepEffects& VllmEngine::end_step(std::int64_t end_ns) {
  new_effects();
  finish_step(end_ns);
  return hand_out();
}

// What a call did that failed in the middle is told by the next.
void VllmEngine::new_effects() {
  if (!std::exchange(handed_out_, false)) return;
  effects_.tokens.clear();
  effects_.finished.clear();
}

const StepEffects& VllmEngine::hand_out() {
  handed_out_ = true;
  effects_.wake_ns = wake_ns();
  return effects_;
}

void VllmEngine::finish_step(std::int64_t end_ns) {
  if (!in_step_) throw Error(ErrorKind::WrongState, "end_step without a step in progress");
  require_time(end_ns);
  const std::vector<StepLog::Scheduled>& plan = log_.scheduled;
  if (tiers_) {
    tiers_->hub().run_until(end_ns);
    write_through(plan, end_ns);  // may ask a policy of the user's, and fail
  }
  in_step_ = false;
  now_ns_ = end_ns;
  if (!config_.async_scheduling) {
    update(plan);
  } else {  // of the step before
    const auto received = std::exchange(unreceived_, std::nullopt);
    if (!plan.empty()) unreceived_ = plan;
    if (received) update(*received);
  }
  emit(plan, end_ns);
  sample(running_.size());
  close_step();
  if (observer_) observer_(true);
}

// The step that ends now has told everything.
void VllmEngine::close_step() {
  release_events(now_ns_);
  if (!config_.check) return;
  // Everything is compared every step in a small pool, and in a large one so seldom that it costs a step little.
  const bool whole = totals_.steps % std::max<std::uint64_t>(1, store_.num_slots() / 16) == 0 || idle();
  if (emits_) truth_.require_equal(store_, whole ? EventTruth::Scope::Whole : EventTruth::Scope::All);
  if (whole) store_.check();
  check_counts(whole);
}

// No step holds rows of the device back any longer.
void VllmEngine::release_events(std::int64_t now_ns) {
  step_holds_events_ = false;
  show_events(now_ns);
}

// What happened to blocks since the last call is visible from now on; on the device, unless a step is open.
void VllmEngine::show_events(std::int64_t now_ns) {
  if (!emits_) return;
  events_.add(store_.drain_events(~std::size_t{0}));
  const std::span<const EventRecord> shown = events_.show(now_ns, !step_holds_events_);
  if (shown.empty()) return;
  if (config_.check) {
    truth_.apply(shown, now_ns);
    truth_.require_equal(store_, EventTruth::Scope::Below);
  }
  if (!config_.events) {
    (void)events_.take_visible();
  } else if (on_events_) {
    on_events_(now_ns);
  }
}

DrainedEvents VllmEngine::drain_events() {
  events_.add(store_.drain_events(~std::size_t{0}));
  return events_.take_all();
}

DrainedEvents VllmEngine::peek_events() {
  events_.add(store_.drain_events(~std::size_t{0}));
  return events_.peek_new();
}

// The scheduler receives the tokens of a plan, in its order; who has its last one is freed on the spot.
void VllmEngine::update(const std::vector<StepLog::Scheduled>& plan) {
  for (const StepLog::Scheduled& turn : plan) {
    EngineRequest& request = requests_[turn.request];
    if (!turn.samples || request.status == RequestStatus::Finished) continue;
    if (bursts_.on()) {
      receive_burst(request);
    } else if (config_.speculation.tokens > 0) {
      receive_drafts(request, turn);
    } else if (request.spec.max_tokens > 0) {
      ++request.known;
    }
    if (request.status == RequestStatus::Running && config_.async_scheduling) {
      if (config_.speculation.tokens == 0) --request.ahead;
      if (!shared_) key_blocks(request, request.computed - request.ahead);
    }
    if (shared_ && request.status == RequestStatus::Running) seal_blocks(request, named_blocks(request));
    if (request.outputs() < request.spec.outputs() && request.known < config_.max_model_len) continue;
    if (request.status == RequestStatus::Preempted) waiting_.remove(turn.request);
    retire(request);
    log_.finished.push_back(turn.request);
  }
  if (log_.finished.empty()) return;
  blocked_.valid = false;
  std::erase_if(running_, [this](RequestId id) { return requests_[id].status == RequestStatus::Finished; });
}

void VllmEngine::retire(EngineRequest& request) {
  free_blocks(request);
  ++retired_;
  request.status = RequestStatus::Finished;
  std::vector<SlotId>().swap(request.table);  // assigning {} would keep the memory
  std::vector<BlockIdentity>().swap(request.blocks);
  request.spec.identities = nullptr;
}

// Tokens become visible. Asynchronously, the scheduler may have asked for one more than there is.
void VllmEngine::emit(const std::vector<StepLog::Scheduled>& plan, std::int64_t end_ns) {
  const std::uint64_t step = token_log_.next_step();
  token_log_.end_step(end_ns);
  for (const StepLog::Scheduled& turn : plan) {
    EngineRequest& request = requests_[turn.request];
    if (!turn.samples || request.record.finish_ns >= 0) continue;
    const std::uint64_t length = std::uint64_t{request.spec.prompt_tokens} + request.record.output_tokens;
    if (request.record.output_tokens < request.spec.outputs() && length < config_.max_model_len) {
      const bool several = bursts_.on() || config_.speculation.tokens > 0;
      const std::uint32_t tokens = several ? request.outputs() - request.record.output_tokens : 1;
      if (request.record.output_tokens == 0) request.first_burst = tokens;
      request.record.output_tokens += tokens;
      effects_.tokens.push_back({turn.request, tokens});
      fruitless_preemptions_ = 0;
      auto& runs = request.tokens;
      if (!runs.empty() && runs.back().first_step + runs.back().count == step) {
        ++runs.back().count;
      } else {
        runs.push_back({step, 1});
      }
    }
    if (request.record.output_tokens >= request.spec.outputs() ||
        std::uint64_t{request.spec.prompt_tokens} + request.record.output_tokens >= config_.max_model_len) {
      complete(turn.request, end_ns);
    }
  }
}

void VllmEngine::complete(RequestId id, std::int64_t now_ns) {
  EngineRequest& request = requests_[id];
  token_log_.count_gaps(request.tokens, request.record.output_tokens);
  const bool stopped = request.spec.eos_at > 0 && request.record.output_tokens == request.spec.eos_at;
  effects_.finished.push_back(take_record(id, stopped ? FinishReason::Stop : FinishReason::Length, now_ns));
}

StepLoad VllmEngine::measure() const {
  StepLoad load;
  for (const StepLog::Scheduled& turn : log_.scheduled) {
    const EngineRequest& request = requests_[turn.request];
    const std::uint32_t prompt = request.spec.prompt_tokens;
    if (request.computed < prompt) {
      ++load.prefill_requests;
      load.prefill_input_tokens += std::min(request.computed + turn.tokens, prompt);
      load.prefill_cached_tokens += request.computed;
    }
    const std::uint32_t length = request.known + request.ahead;
    const bool decodes = request.computed >= prompt || timing_.charges_first_token;
    if (decodes && request.computed + turn.tokens >= length && request.spec.max_tokens > 0) {
      ++load.decode_requests;
      load.decode_context_tokens += length;
    }
  }
  return load;
}

const StepEffects& VllmEngine::advance(std::int64_t until_ns, bool stop_on_finish) {
  new_effects();
  play(until_ns, stop_on_finish, false);
  return hand_out();
}

const StepEffects& VllmEngine::advance_lazily(std::int64_t until_ns) {
  new_effects();
  play(until_ns, true, true);
  return hand_out();
}

void VllmEngine::play(std::int64_t until_ns, bool stop_on_finish, bool lazily) {
  for (std::uint32_t turns = 1;; ++turns) {
    if (turns % 64 == 0 && pause_) pause_(effects_);
    const std::size_t finished = effects_.finished.size();
    if (in_step_) {
      if (now_ns_ > until_ns) return;
      finish_step(now_ns_);
    } else {
      if (now_ns_ >= until_ns || idle() || stuck_) return;
      if (sleeping_ && !roused()) {
        const std::optional<std::int64_t> wake = tiers_->hub().next_wake_ns();
        if (wake && *wake > until_ns) return;
        if (wake) {
          tiers_->hub().run_until(*wake);
          now_ns_ = std::max(now_ns_, *wake);
          notice_landings(now_ns_);
          if (!roused()) continue;
        }
        if (now_ns_ >= until_ns) return;
      }
      const bool leaps = leaping_ && can_leap();
      if (lazily && leaps && now_ns_ + plain_step_ns() > until_ns) return;
      if (!leaps || !leap(until_ns, stop_on_finish)) begin_step(now_ns_);
      if (stuck_ && in_step_ && log_.scheduled.empty()) {
        in_step_ = false;  // nothing was scheduled, so nothing ends
        release_events(now_ns_);
        --totals_.steps;
      }
    }
    if (stop_on_finish && effects_.finished.size() > finished) return;
  }
}

}  // namespace understudy
