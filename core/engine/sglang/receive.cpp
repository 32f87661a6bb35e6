// Requests and aborts that reach the scheduler.
#include <algorithm>
#include <limits>
#include <unordered_set>

#include "base/errors.hpp"
#include "engine/sglang/scheduler.hpp"

namespace understudy {

SglangScheduler::SglangScheduler(const SglangSettings& settings, const RadixTree::OnChange& on_change,
                                 HostTransfers* transfers, SglangTransport* transport)
    : settings_(settings),
      tree_(settings.page_size, settings.radix_eviction_policy, settings.older_tree, on_change),
      transport_(transport),
      host_(settings.host ? std::make_unique<HostCache>(*settings.host, settings.page_size,
                                                        settings.max_total_num_tokens, tree_, on_change, *transfers)
                          : nullptr),
      avail_(static_cast<std::int64_t>(settings.max_total_num_tokens)),
      free_slots_(settings.side.slots(settings.max_running_requests)) {
  settings.check_components();
  if (settings.swa_window) {
    window_ = std::make_unique<WindowComponent>(tree_, *settings.swa_window, settings.page_size, settings.swa_tokens);
    tree_.set_component(window_.get());
  }
  if (settings.mamba_slots) {
    states_ = std::make_unique<StateComponent>(tree_, *settings.mamba_slots, settings.state_grid(),
                                               settings.mamba_max_states_per_path);
    tree_.set_component(states_.get());
  }
  init_ratio_ = std::min(settings.init_new_token_ratio * settings.schedule_conservativeness, 1.0);
  min_ratio_ = std::min(init_ratio_ * settings.min_new_token_ratio_factor, 1.0);
  ratio_step_ = (init_ratio_ - min_ratio_) / settings.new_token_ratio_decay_steps;
  ratio_ = init_ratio_;
  side_.buffers = settings.side.buffers(settings.max_running_requests);
  side_.host_tokens = settings.side.host_tokens.value_or(0);
}

void SglangScheduler::submit(SglangArrival arrival) {
  auto made = std::make_unique<SglangRequest>();
  SglangRequest& request = *made;
  request.id = arrival.id;
  requests_[arrival.id] = std::move(made);
  const std::int64_t length = arrival.prompt.size();
  const std::int64_t most = std::min<std::int64_t>(settings_.context_len, settings_.max_total_num_tokens) - 1;
  request.max_new = settings_.most_outputs(length, arrival.max_tokens);
  request.given_outputs = std::move(arrival.outputs);
  request.first_output = arrival.first_output;
  request.eos_at = arrival.eos_at;
  request.tokens = std::move(arrival.prompt);
  if (length >= most - 5) {  // too long: it passes through the queue and ends at its first output
    request.tokens = {};
    request.tokens.append({0, 1});
    request.to_abort = true;
  }
  request.prompt_tokens = request.tokens.size();
  // A request without a priority has the worst one.
  const auto worst =
      sign() > 0 ? std::numeric_limits<std::int64_t>::max() / 4 : std::numeric_limits<std::int64_t>::min() / 4;
  request.priority = arrival.priority.value_or(worst);
  if (!is_side()) return enqueue(&request);
  if (request.to_abort) return end_on_side(&request, true);
  if (settings_.side.role == SglangRole::Prefill) request.max_new = 1;
  side_.bootstrap.push_back(&request);
}

// Appends to the queue, unless it is full: then the worst of all ends, or the newcomer.
void SglangScheduler::enqueue(SglangRequest* request) {
  request->entered = ++entries_;
  if (settings_.max_queued_requests && waiting_.size() + 1 > *settings_.max_queued_requests) {
    if (settings_.enable_priority_scheduling && !waiting_.empty()) {
      const auto worst = std::ranges::max_element(
          waiting_, {}, [this](const SglangRequest* one) { return std::pair(one->priority * sign(), one->entered); });
      if (request->priority * sign() < (*worst)->priority * sign()) {
        SglangRequest* const victim = *worst;
        waiting_.erase(worst);
        report_abort(victim);
        waiting_.push_back(request);
        return;
      }
    }
    return report_abort(request);
  }
  waiting_.push_back(request);
}

void SglangScheduler::report_abort(SglangRequest* request) {
  request->finished = true;
  log_.aborted.push_back(request->id);
}

void SglangScheduler::abort(std::span<const RequestId> ids) {
  const std::unordered_set<RequestId> named(ids.begin(), ids.end());
  const auto matches = [&](const SglangRequest* request) { return named.contains(request->id); };
  if (chunked_ != nullptr && matches(chunked_)) chunk_aborted_ = true;
  for (auto request = waiting_.rbegin(); request != waiting_.rend(); ++request) {
    if (!matches(*request)) continue;
    report_abort(*request);
    if (is_side()) abort_on_side(**request);
  }
  std::erase_if(waiting_, matches);
  if (is_side()) abort_transfers(matches);
  const auto mark = [&](SglangRequest* request) {
    if (matches(request) && !request->finished) request->to_abort = true;
  };
  std::ranges::for_each(running_, mark);
  if (last_) {
    for (const SglangBatch::Row& row : last_->rows) mark(row.request);
  }
}

// A waiting request of one side: its KV is not here yet, or has just come.
void SglangScheduler::abort_on_side(SglangRequest& request) {
  if (settings_.side.role == SglangRole::Decode) return release(request, true);
  transport_->fail(request.id);
  free_buffer(request);
}

void SglangScheduler::abort_transfers(const std::function<bool(const SglangRequest*)>& matches) {
  for (const auto* const queue : {&side_.bootstrap, &side_.moving}) {
    for (const SglangRequest* const request : *queue) {
      if (!matches(request)) continue;
      transport_->fail(request->id);
      if (settings_.side.role == SglangRole::Decode) transport_->report_failure(request->id);
    }
  }
  std::erase_if(side_.retracted, [&](SglangRequest* request) {
    if (!matches(request)) return false;
    drop_backup(*request);
    report_abort(request);
    return true;
  });
}

bool SglangScheduler::drained() const {
  // Requests of the last prefill join the running ones in the next schedule.
  return running_.empty() && chunked_ == nullptr &&
         (!last_ || std::ranges::all_of(last_->rows, [](const auto& row) { return row.request->finished; }));
}

bool SglangScheduler::holds(RequestId id) const {
  const auto is = [id](const SglangRequest* request) { return request->id == id; };
  return (chunked_ != nullptr && is(chunked_)) || std::ranges::any_of(running_, is) ||
         std::ranges::any_of(side_.held, is) ||
         (last_ && std::ranges::any_of(last_->rows, [&](const auto& row) { return is(row.request); }));
}

std::uint32_t SglangScheduler::fewest_outputs_left() const {
  std::uint32_t fewest = std::numeric_limits<std::uint32_t>::max();
  for (const auto& [id, request] : requests_) {
    if (request->finished) continue;
    if (request->to_abort) return 0;
    std::uint32_t end = std::max<std::uint32_t>(request->max_new, 1);
    if (request->eos_at > 0 && !settings_.ignore_eos) end = std::min(end, request->eos_at);
    fewest = std::min(fewest, end - std::min(end, request->outputs()));
  }
  return fewest;
}

void SglangScheduler::forget(RequestId id) { requests_.erase(id); }

void SglangScheduler::check() const {
  tree_.check();
  if (host_) host_->check();
  std::int64_t held = 0;
  for (const auto& [id, request] : requests_) {
    if (request->has_slot) held += up(request->kv) - request->own;
  }
  const auto cached = static_cast<std::int64_t>(tree_.evictable() + tree_.locked());
  if (avail_ + held + cached != static_cast<std::int64_t>(settings_.max_total_num_tokens)) {
    throw Error(ErrorKind::InvariantViolated, avail_, " tokens are free, ", held, " held by requests and ", cached,
                " cached; there are ", settings_.max_total_num_tokens);
  }
  check_components();
}

}  // namespace understudy
