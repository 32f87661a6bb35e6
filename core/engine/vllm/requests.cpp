// Submitting, cancelling and finishing requests, and their records.
#include <algorithm>
#include <utility>

#include "base/assert.hpp"
#include "base/spares.hpp"
#include "engine/vllm/engine.hpp"
#include "engine/vllm/fast_forward.hpp"

namespace understudy {

const Effects& VllmEngine::submit(RequestSpec spec, std::int64_t now_ns) {
  if (spec.prompt_tokens == 0) throw Error(ErrorKind::InvalidArgument, "request ", spec.name, ": the prompt is empty");
  if (!spec.identities && (config_.enable_prefix_caching || offload_)) {
    throw Error(ErrorKind::InvalidArgument, "request ", spec.name, ": ", offload_ ? "vLLM's offload" : "prefix caching",
                " needs identities");
  }
  if (spec.prompt_tokens >= config_.max_model_len) {
    throw Error(ErrorKind::InvalidArgument, "request ", spec.name, ": a prompt of ", spec.prompt_tokens,
                " tokens leaves no room for output in max_model_len=", config_.max_model_len);
  }
  if (spec.eos_at > spec.max_tokens) {
    throw Error(ErrorKind::InvalidArgument, "request ", spec.name, ": eos_at ", spec.eos_at,
                " is after max_tokens=", spec.max_tokens, ", which ends it before; leave eos_at out");
  }
  if (spec.identities && config_.enable_prefix_caching) {
    const std::uint64_t end = std::min<std::uint64_t>(std::uint64_t{spec.prompt_tokens} + std::max(spec.outputs(), 1u),
                                                      config_.max_model_len);
    // The last token is never computed, so it fills no block; vLLM's offload may look for its chunk even so.
    const std::uint64_t full = (offload_ ? end : end - 1) / config_.block_size;
    if (const std::size_t named = spec.identities->size(); named < full) {
      throw Error(ErrorKind::InvalidArgument, "request ", spec.name, ": identities name ", named,
                  " blocks, prompt and output fill ", full);
    }
  }
  if (spec.leg != KvLeg::Whole) require_leg(spec);
  if (slots_.contains(spec.id)) {
    throw Error(ErrorKind::InvalidArgument, "request ", spec.name, ": id ", spec.id, " is taken; choose a new one");
  }
  clear_returned_effects();
  if (!clock_.in_step) skip_to(now_ns);
  // A driver may submit a request before it ends the step that is open.
  const std::int64_t here_ns = clock_.in_step ? std::clamp(now_ns, clock_.begun_ns, clock_.now_ns) : clock_.now_ns;
  const std::int64_t landed_ns = std::min(here_ns, now_ns);     // a later call may name any time from `now_ns` on
  if (tiers_ && landed_ns >= tiers_->hub().links().now_ns()) {  // earlier landings first
    tiers_->hub().run_until(landed_ns);
    report_idle_landings();
  }
  if (free_slots_.empty()) {
    free_slots_.push_back(static_cast<RequestSlot>(requests_.size()));
    requests_.emplace_back();
  }
  const RequestSlot slot = free_slots_.back();
  free_slots_.pop_back();
  EngineRequest& request = requests_[slot] = {};
  ++num_submitted_;
  request.id = spec.id;
  request.slot = slot;
  request.spec = std::move(spec);
  request.known = request.spec.prompt_tokens;
  slots_.emplace(request.id, slot);
  queues_.push(slot, false);
  unread_.push_back(slot);
  connector_->on_new_request(request);
  on_requests_changed();
  sample(running_.size(), here_ns);
  return return_effects();
}

std::optional<std::string> VllmEngine::never_fits(std::uint32_t prompt_tokens, std::uint32_t max_tokens) const {
  const std::uint64_t end =
      std::min<std::uint64_t>(std::uint64_t{prompt_tokens} + std::max(max_tokens, 1u), config_.max_model_len);
  // The last token is never computed; a burst still reserves room for it.
  const Speculation& drafts = config_.speculation;
  const std::uint64_t stored =
      bursts_.on()        ? end
      : drafts.tokens > 0 ? std::min<std::uint64_t>(end - 1 + drafts.tokens + drafts.lookahead, config_.max_model_len)
                          : end - 1;
  const std::uint64_t blocks = grouped_ != nullptr ? grouped_->layout().most_blocks(static_cast<std::uint32_t>(stored))
                                                   : (stored + config_.block_size - 1) / config_.block_size;
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

const Effects& VllmEngine::cancel(RequestId id, std::int64_t now_ns) {
  const auto found = slots_.find(id);
  if (found == slots_.end()) {
    clear_returned_effects();
    return return_effects();
  }
  require_time(now_ns);
  clear_returned_effects();
  const RequestSlot slot = found->second;
  EngineRequest& request = requests_[slot];
  if (tiers_)
    tiers_->hub().run_until(now_ns);  // transfers that landed before belong to a request that was still present
  if (request.status == RequestStatus::Running) {
    running_.erase(std::find(running_.begin(), running_.end(), slot));
  } else if (request.status == RequestStatus::Parked) {
    --parked_;
  } else {
    queues_.remove(slot);
  }
  if (tiers_) {
    tiers_->abandon(slot);
    tiers_->stop_waiting(slot, now_ns);
  }
  log_.ended.emplace_back(id, request.spec.name);
  retire(request, true, now_ns);
  on_requests_changed();
  announcer_.show(now_ns);
  if (tiers_ && !clock_.in_step) skip_to(now_ns);  // transfers have advanced to there
  effects_.finished.push_back(take_record(slot, FinishReason::Cancelled, now_ns));
  sample(running_.size(), now_ns);  // no step may follow
  return return_effects();
}

void VllmEngine::set_admitting(bool on) {
  if (on == admitting_) return;
  admitting_ = on;
  on_requests_changed();  // or may, from now on
}

bool VllmEngine::drained() const {
  return running_.empty() && !plans() && parked_ == 0 &&
         std::ranges::none_of(queues_.skipped().ids(),
                              [this](RequestSlot slot) { return kv_->holds(requests_[slot]); });
}

void VllmEngine::forget_cache(std::int64_t now_ns) {
  require_time(now_ns);
  if (tiers_) tiers_->hub().run_until(now_ns);  // publish earlier landings first
  kv_->forget_cached();
  on_requests_changed();  // cached blocks of the next request in the queue are gone
  announcer_.show(now_ns);
  if (!clock_.in_step) skip_to(now_ns);  // nothing may be published for an earlier time
}

bool VllmEngine::reset_caches(std::int64_t now_ns) {
  require_time(now_ns);
  const bool unused = kv_->available() == config_.num_gpu_blocks;
  if (unused) kv_->reset();
  const bool others = connector_->reset_cache();
  on_requests_changed();
  announcer_.show(now_ns);
  if (!clock_.in_step) skip_to(now_ns);
  return unused && others;
}

void VllmEngine::set_slowdown(double factor) {
  timing_.slowdown = factor;
  if (!planned_.empty()) planned_.duration_ns = Batch::kUnknown;  // it has not begun
  on_requests_changed();  // the bound of the next end relied on the times before
}

void VllmEngine::set_link_share(std::int64_t now_ns, Tier tier, double share) {
  if (!tiers_) throw Error(ErrorKind::WrongState, "this engine has no tiers");
  require_time(now_ns);
  tiers_->set_link_share(now_ns, tier, share);
  if (!clock_.in_step) skip_to(now_ns);  // transfers have advanced to there
  finish_bound_.reset();
}

void VllmEngine::set_load_failures(Tier tier, double rate) {
  if (!tiers_) throw Error(ErrorKind::WrongState, "this engine has no tiers");
  tiers_->set_load_failures(tier, rate);
}

std::vector<std::int64_t> VllmEngine::gaps_of(RequestId id) const {
  const auto found = slots_.find(id);
  if (found == slots_.end()) return {};
  const EngineRequest& request = requests_[found->second];
  return token_log_.list_gaps(request.tokens, request.outputs());
}

void VllmEngine::on_requests_changed() {
  finish_bound_.reset();
  refusal_.stands = false;
  landing_wait_.visited = true;
  released_before_.reset();
  poll_due_ = true;
  fast_forward_->forget_begun();
  if (!clock_.in_step) announcer_.stop_holding();  // held for a step that a fast-forward had begun
  stuck_.reset();
  fruitless_preemptions_ = 0;
  token_log_.touch();
}

// Between two steps the engine reads its input: requests submitted during the last step are queued now.
void VllmEngine::read_input(std::int64_t now_ns) {
  for (const RequestSlot slot : unread_) requests_[slot].record.queued_ns = now_ns;
  unread_.clear();
}

// Free the slot of a finished request and return its record.
RequestRecord VllmEngine::take_record(RequestSlot slot, FinishReason reason, std::int64_t now_ns) {
  EngineRequest& request = requests_[slot];
  UNDERSTUDY_ASSERT(!kv_->holds(request), "an ended request holds no blocks");
  slots_.erase(request.id);
  free_slots_.push_back(slot);
  UNDERSTUDY_ASSERT(slots_.size() + free_slots_.size() == requests_.size(), "every slot is in use or free");
  RequestRecord record = std::move(request.record);
  record.id = request.id;
  record.name = std::move(request.spec.name);
  record.output_tokens = request.outputs();
  record.reason = reason;
  record.finish_ns = now_ns;
  if (tiers_) record.room_wait_ns = tiers_->take_waited_ns(slot);
  const TokenRuns& runs = request.tokens;
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
    throw Error(ErrorKind::InvalidArgument, "request ", id, " has ended, or was never submitted");
  }
  return requests_[found->second];
}

void VllmEngine::retire(EngineRequest& request, bool aborted, std::int64_t now_ns) {
  std::erase(prefills_in_flight_, request.slot);
  leave(request, aborted, now_ns);
  request.status = RequestStatus::Finished;
  Spares<SlotId>::keep(std::move(request.table));  // assigning {} would keep the memory here
  Spares<BlockIdentity>::keep(std::move(request.blocks));
  Spares<BlockName>::keep(std::move(request.names));
  Spares<SlotId>::keep(std::move(request.runs.loose));
  Spares<HeldRun>::keep(std::move(request.runs.runs));
  request.spec.identities = nullptr;
}

void VllmEngine::complete(RequestSlot slot, std::int64_t now_ns) {
  const EngineRequest& request = requests_[slot];
  token_log_.count_gaps(request.tokens, request.outputs());
  const bool stopped = request.spec.eos_at > 0 && request.outputs() == request.spec.eos_at;
  effects_.finished.push_back(take_record(slot, stopped ? FinishReason::Stop : FinishReason::Length, now_ns));
  requests_[slot].tokens.give_back();
}

}  // namespace understudy
