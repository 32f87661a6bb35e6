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
  if (free_slots_.empty()) {
    free_slots_.push_back(static_cast<RequestSlot>(requests_.size()));
    requests_.emplace_back();
  }
  const RequestSlot slot = free_slots_.back();
  free_slots_.pop_back();
  EngineRequest& request = requests_[slot] = {};
  request.id = next_id_++;
  request.spec = std::move(spec);
  request.known = request.spec.prompt_tokens;
  slots_.emplace(request.id, slot);
  waiting_.push(slot, false);
  somebody_came_or_went();
  return request.id;
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
  const auto found = slots_.find(id);
  if (found == slots_.end()) return std::nullopt;
  const RequestSlot slot = found->second;
  EngineRequest& request = requests_[slot];
  if (tiers_) tiers_->hub().run_until(now_ns);  // what landed before did so for a request that was still there
  if (request.status == RequestStatus::Running) {
    running_.erase(std::find(running_.begin(), running_.end(), slot));
  } else if (request.status == RequestStatus::Parked) {
    --parked_;
  } else {
    waiting_.remove(slot);
  }
  if (tiers_) {
    tiers_->abandon(slot);
    tiers_->stop_waiting(slot, now_ns);
  }
  log_.ended.emplace_back(id, request.spec.name);
  retire(request);
  show_events(tiers_ ? std::max(now_ns, tiers_->hub().links().now_ns()) : now_ns);
  somebody_came_or_went();
  return take_record(slot, FinishReason::Cancelled, now_ns);
}

void VllmEngine::somebody_came_or_went() {
  blocked_.valid = false;
  disturbed_ = true;
  leap_taken_ns_ = -1;
  stuck_ = false;
  fruitless_preemptions_ = 0;
  token_log_.touch();
}

// What the request leaves, which has ended: its slot is free.
RequestRecord VllmEngine::take_record(RequestSlot slot, FinishReason reason, std::int64_t now_ns) {
  EngineRequest& request = requests_[slot];
  slots_.erase(request.id);
  free_slots_.push_back(slot);
  RequestRecord record = std::move(request.record);
  record.id = request.id;
  record.name = std::move(request.spec.name);
  record.output_tokens = request.outputs();
  record.reason = reason;
  record.finish_ns = now_ns;
  if (tiers_) record.room_wait_ns = tiers_->take_waited_ns(slot);
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
  const auto found = slots_.find(id);
  if (found == slots_.end()) {
    throw Error(ErrorKind::InvalidArgument, "request ", id, id < next_id_ ? " has ended" : " was never submitted");
  }
  return requests_[found->second];
}

// ── Steps ──

void VllmEngine::require_time(std::int64_t now_ns) const {
  if (!tiers_ || now_ns >= tiers_->hub().links().now_ns()) return;
  throw Error(ErrorKind::InvalidArgument, "now_ns ", now_ns, " is before ", tiers_->hub().links().now_ns(),
              ", to where the transfers have come: time never goes backwards");
}

std::int64_t VllmEngine::begin_step(std::int64_t now_ns) {
  greet(now_ns);
  // Behind an empty queue, the batch that begins now is scheduled first.
  if (planned_.empty()) {
    const std::int64_t duration_ns = try_schedule(now_ns);
    if (!found_work(now_ns)) return 0;
    if (!config_.async_scheduling) {
      open_step(now_ns, load_, duration_ns);
      return duration_ns;
    }
    planned_ = {log_.scheduled, load_, duration_ns};
    if (observer_ && !planned_.empty()) {  // it is told of every schedule, and of both halves
      observer_(false);
      observer_(true);
      log_.clear();
    }
  }
  if (planned_.duration_ns == Batch::kUnknown) {
    planned_.duration_ns = timing_.duration_ns(planned_.load, capacity_tokens_);
  }
  Batch behind;
  if (!planned_.empty()) {
    behind.duration_ns = try_schedule(now_ns);
    behind.turns = log_.scheduled;
    behind.load = load_;
  }
  open_ = std::exchange(planned_, std::move(behind));
  open_step(now_ns, open_.load, open_.duration_ns);
  return open_.duration_ns;
}

// The time of a step has come: what has landed by then is here.
void VllmEngine::greet(std::int64_t now_ns) {
  if (in_step_) throw Error(ErrorKind::WrongState, "begin_step before the step in progress has ended");
  require_time(now_ns);
  begun_ns_ = now_ns;
  disturbed_ = false;
  log_.clear();
  if (tiers_ && leap_taken_ns_ != now_ns) {  // else it has begun, in a leap
    step_holds_events_ = false;
    tiers_->hub().run_until(now_ns);
    resume_loaded();
    landings_noticed_ = tiers_->landings();
    show_events(now_ns);
  }
  leap_taken_ns_ = -1;
}

std::int64_t VllmEngine::try_schedule(std::int64_t now_ns) {
  step_holds_events_ = true;
  try {
    return schedule(now_ns);
  } catch (...) {  // a policy or a timing model of the user's: no step begins
    release_events(now_ns);
    throw;
  }
}

// After a schedule behind an empty queue: whether a step begins. Else the engine is asleep.
bool VllmEngine::found_work(std::int64_t now_ns) {
  const bool nothing = log_.scheduled.empty() && log_.preempted.empty() && planned_.empty();
  sleeping_ = nothing && tiers_ && !idle() && !tiers_->idle();
  if (sleeping_) {
    released_at_sleep_ = tiers_->released();
    now_ns_ = now_ns;
    release_events(now_ns);
    return false;
  }
  stuck_ = (nothing && !(running_.empty() && waiting_.empty())) || thrashing();
  return true;
}

void VllmEngine::open_step(std::int64_t now_ns, const StepLoad& load, std::int64_t duration_ns) {
  ++totals_.steps;
  in_step_ = true;
  sleeping_ = false;
  now_ns_ = now_ns;
  if (tiers_) show_events(now_ns);  // what went on the host
  // Blocks for a prompt are held while it is computed; one more for a token can wait for the end of its step.
  if (load.prefill_requests > 0) sample(running_.size());
  now_ns_ = now_ns + duration_ns;
  if (observer_) observer_(false);
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
  if (tiers_) {
    tiers_->hub().run_until(end_ns);
    write_through(batch(), end_ns);  // may ask a policy of the user's, and fail
  }
  in_step_ = false;
  now_ns_ = end_ns;
  receive(batch(), end_ns);
  sample(running_.size());
  close_step();
  if (observer_) observer_(true);
}

void VllmEngine::begin_turn(std::int64_t now_ns) {
  if (!config_.async_scheduling) {
    (void)begin_step(now_ns);
    return;
  }
  greet(now_ns);
  const std::int64_t duration_ns = try_schedule(now_ns);
  if (!found_work(now_ns)) return;
  open_ = std::exchange(planned_, {log_.scheduled, load_, duration_ns});
  open_step(now_ns, {}, 0);
}

const StepEffects& VllmEngine::end_turn(std::int64_t now_ns) { return end_step(now_ns); }

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

// The tokens of a batch have come, in its order; who has its last one is freed on the spot.
void VllmEngine::receive(const std::vector<Scheduled>& turns, std::int64_t end_ns) {
  const std::uint64_t step = token_log_.next_step();
  token_log_.end_step(end_ns);
  bool finished = false;
  for (const Scheduled& turn : turns) {
    if (!turn.samples || !live(turn) || !receive_token(turn, step)) continue;
    EngineRequest& request = requests_[turn.slot];
    if (request.status == RequestStatus::Preempted) waiting_.remove(turn.slot);
    retire(request);
    log_.finished.push_back(turn.id);
    log_.ended.emplace_back(turn.id, request.spec.name);
    complete(turn.slot, end_ns);
    finished = true;
  }
  if (token_log_.crowded()) fold_token_log();
  if (!finished) return;
  blocked_.valid = false;
  std::erase_if(running_, [this](RequestSlot slot) { return requests_[slot].status == RequestStatus::Finished; });
}

// Whether it was the last one.
bool VllmEngine::receive_token(const Scheduled& turn, std::uint64_t step) {
  EngineRequest& request = requests_[turn.slot];
  const std::uint32_t known = request.known;
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
  if (const std::uint32_t fresh = request.known - known; fresh > 0) {
    fruitless_preemptions_ = 0;
    effects_.tokens.push_back({request.id, fresh});
    std::vector<TokenRun>& runs = request.tokens;
    if (runs.empty()) request.first_burst = fresh;
    if (!runs.empty() && runs.back().first_step + runs.back().count == step) {
      ++runs.back().count;
    } else {
      runs.push_back({step, 1});
    }
  }
  return request.outputs() >= request.spec.outputs() || request.known >= config_.max_model_len;
}

void VllmEngine::retire(EngineRequest& request) {
  free_blocks(request);
  request.status = RequestStatus::Finished;
  std::vector<SlotId>().swap(request.table);  // assigning {} would keep the memory
  std::vector<BlockIdentity>().swap(request.blocks);
  request.spec.identities = nullptr;
}

void VllmEngine::complete(RequestSlot slot, std::int64_t now_ns) {
  const EngineRequest& request = requests_[slot];
  token_log_.count_gaps(request.tokens, request.outputs());
  const bool stopped = request.spec.eos_at > 0 && request.outputs() == request.spec.eos_at;
  effects_.finished.push_back(take_record(slot, stopped ? FinishReason::Stop : FinishReason::Length, now_ns));
}

// Steps before the first token of everybody who is here concern nobody any more.
void VllmEngine::fold_token_log() {
  std::uint64_t oldest = token_log_.next_step();
  for (const auto& [id, slot] : slots_) {
    const std::vector<TokenRun>& runs = requests_[slot].tokens;
    if (!runs.empty()) oldest = std::min(oldest, runs.front().first_step);
  }
  token_log_.fold(oldest);
}

StepLoad VllmEngine::measure() const {
  StepLoad load;
  for (const Scheduled& turn : log_.scheduled) {
    const EngineRequest& request = requests_[turn.slot];
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
      if (stuck_ && in_step_ && batch().empty()) {
        in_step_ = false;  // nothing was scheduled, so nothing ends
        release_events(now_ns_);
        --totals_.steps;
      }
    }
    if (stop_on_finish && effects_.finished.size() > finished) return;
  }
}

}  // namespace understudy
