// Requests come and go, and faults: calls of a driver between steps.
#include <algorithm>
#include <utility>

#include "engine/vllm/engine.hpp"
#include "engine/vllm/fast_forward.hpp"

namespace understudy {

// InvalidArgument if the request can never run here.
void VllmEngine::require_servable(const RequestSpec& spec) const {
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
  if (spec.leg == KvLeg::Prefill && !connector_->produces()) {
    throw Error(ErrorKind::InvalidArgument, "request ", spec.name,
                ": do_remote_decode needs an instance that produces KV; set kv_role to kv_producer or kv_both");
  }
  if (spec.leg == KvLeg::Decode && !connector_->consumes()) {
    throw Error(ErrorKind::InvalidArgument, "request ", spec.name,
                ": do_remote_prefill needs an instance that consumes KV; set kv_role to kv_consumer or kv_both");
  }
  if (scheduler_->slots().contains(spec.id)) {
    throw Error(ErrorKind::InvalidArgument, "request ", spec.name, ": id ", spec.id, " is taken; choose a new one");
  }
}

const Effects& VllmEngine::submit(RequestSpec spec, std::int64_t now_ns) {
  require_servable(spec);
  clear_returned_effects();
  if (!clock_.in_step) skip_to(now_ns);
  // A driver may submit a request before it ends the step that is open.
  const std::int64_t here_ns = clock_.in_step ? std::clamp(now_ns, clock_.begun_ns, clock_.now_ns) : clock_.now_ns;
  const std::int64_t landed_ns = std::min(here_ns, now_ns);     // a later call may name any time from `now_ns` on
  if (tiers_ && landed_ns >= tiers_->hub().links().now_ns()) {  // earlier landings first
    tiers_->hub().run_until(landed_ns);
    report_idle_landings();
  }
  unread_.push_back(scheduler_->add_request(std::move(spec)).slot);
  on_requests_changed();
  sample(scheduler_->running().size(), here_ns);
  return return_effects();
}

std::optional<std::string> VllmEngine::never_fits(std::uint32_t prompt_tokens, std::uint32_t max_tokens) const {
  const std::uint64_t end =
      std::min<std::uint64_t>(std::uint64_t{prompt_tokens} + std::max(max_tokens, 1u), config_.max_model_len);
  // The last token is never computed; a burst still reserves room for it.
  const bool bursts = !config_.mocker.accept_rates.empty();
  const Speculation& drafts = config_.speculation;
  const std::uint64_t stored =
      bursts              ? end
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
  const auto found = scheduler_->slots().find(id);
  if (found == scheduler_->slots().end()) {
    clear_returned_effects();
    return return_effects();
  }
  require_time(now_ns);
  clear_returned_effects();
  // Transfers that landed before belong to a request that was still present.
  if (tiers_) tiers_->hub().run_until(now_ns);
  scheduler_->finish_request(found->second, FinishReason::Cancelled, now_ns);
  on_requests_changed();
  announcer_.show(now_ns);
  if (tiers_ && !clock_.in_step) skip_to(now_ns);  // transfers have advanced to there
  sample(scheduler_->running().size(), now_ns);    // no step may follow
  return return_effects();
}

void VllmEngine::set_admitting(bool on) {
  if (on == scheduler_->is_admitting()) return;
  scheduler_->set_admitting(on);
  on_requests_changed();  // or may, from now on
}

bool VllmEngine::drained() const { return !plans() && scheduler_->drained(); }

bool VllmEngine::quiescent() const { return idle() || (!scheduler_->is_admitting() && drained()); }

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
  const bool reset = scheduler_->reset_prefix_cache();
  on_requests_changed();
  announcer_.show(now_ns);
  if (!clock_.in_step) skip_to(now_ns);
  return reset;
}

void VllmEngine::set_slowdown(double factor) {
  timing_.slowdown = factor;
  if (!planned_.empty()) planned_.duration_ns = Batch::kUnknown;  // it has not begun
  on_requests_changed();  // the bound of the next end relied on the times before
}

void VllmEngine::set_link_share(std::int64_t now_ns, Tier tier, double share) {
  require_tiers();
  require_time(now_ns);
  tiers_->set_link_share(now_ns, tier, share);
  if (!clock_.in_step) skip_to(now_ns);  // transfers have advanced to there
  finish_bound_.reset();
}

void VllmEngine::set_load_failures(Tier tier, double rate) {
  require_tiers();
  tiers_->set_load_failures(tier, rate);
}

std::vector<std::int64_t> VllmEngine::gaps_of(RequestId id) const {
  if (!scheduler_->slots().contains(id)) return {};
  const EngineRequest& of = request(id);
  return token_log_.list_gaps(of.tokens, of.outputs());
}

void VllmEngine::on_requests_changed() {
  finish_bound_.reset();
  scheduler_->refusal().stands = false;
  nap_.due = true;
  released_before_.reset();
  fast_forward_->forget_begun();
  if (!clock_.in_step) announcer_.stop_holding();  // held for a step that a fast-forward had begun
  stuck_.reset();
  scheduler_->note_progress();
  token_log_.touch();
}

// Between two steps the engine reads its input: requests submitted during the last step are queued now.
void VllmEngine::read_input(std::int64_t now_ns) {
  for (const RequestSlot slot : unread_) scheduler_->decoding().requests[slot].record.queued_ns = now_ns;
  unread_.clear();
}

}  // namespace understudy
