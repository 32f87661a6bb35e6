// Prefill batches: budgets, the queue in order, chunks, preemption, and decodes mixed in.
#include <algorithm>
#include <cmath>
#include <utility>

#include "base/errors.hpp"
#include "engine/sglang/scheduler.hpp"

namespace understudy {

// Outputs that a running request is expected to need.
double SglangScheduler::share_of(const SglangRequest& request) const {
  const std::int64_t left = clipped(static_cast<std::int64_t>(request.max_new) - request.outputs());
  return static_cast<double>(left) * (settings_.ignore_eos ? 1.0 : ratio_);
}

void SglangScheduler::charge(Budget& budget, std::int64_t tokens, std::int64_t outputs) const {
  budget.total += static_cast<double>(up(tokens) + outputs + page());
  budget.now += up(tokens) + page();
  if (window_) budget.window += window_need(up(tokens), outputs, budget.chunk);
  budget.input -= up(tokens);
  if (budget.chunk) *budget.chunk -= up(tokens);
}

SglangScheduler::Verdict SglangScheduler::verdict(const Budget& budget) const {
  if (left_total(budget) <= 0 || left_now(budget) <= 0) return Verdict::Full;
  if (window_ && left_window(budget) <= 0) return Verdict::Full;
  if (budget.input <= 0 || (budget.chunk && *budget.chunk <= 0)) return Verdict::Stop;
  return Verdict::Go;
}

std::unique_ptr<SglangBatch> SglangScheduler::form_prefill() {
  if (running_.empty() || preempts() || window_) full_ = false;
  if (chunked_ == nullptr && (full_ || waiting_.empty() || !admitting_)) return nullptr;
  const std::int64_t places = std::min<std::int64_t>(
      static_cast<std::int64_t>(settings_.max_running_requests) - static_cast<std::int64_t>(running_.size()),
      free_slots_);
  if (places <= 0 && chunked_ == nullptr && !preempts()) {
    full_ = true;
    return nullptr;
  }
  order_queue();
  const std::int64_t mixed = mixes() ? static_cast<std::int64_t>(running_.size()) : 0;
  Budget budget;
  for (const SglangRequest* const request : running_) budget.total += share_of(*request);
  budget.total += static_cast<double>(mixed);
  budget.now = mixed;
  budget.input = settings_.max_prefill_tokens - mixed;
  if (chunks()) budget.chunk = settings_.chunked_prefill_size - mixed;
  auto batch = std::make_unique<SglangBatch>();
  to_requeue_.clear();
  SglangRequest* const continued = chunked_;
  if (chunked_ != nullptr) add_chunked(*batch, budget);
  Verdict now = Verdict::Go;
  const std::int64_t holders = continued != nullptr && continued->has_slot ? 1 : 0;  // waiting ones have no slot
  for (SglangRequest* const request : waiting_) {
    if (!admitting_ || verdict(budget) == Verdict::Stop) break;
    const std::int64_t most = std::min<std::int64_t>(
        static_cast<std::int64_t>(settings_.max_running_requests) - static_cast<std::int64_t>(running_.size()),
        static_cast<std::int64_t>(free_slots_) + holders);
    if (static_cast<std::int64_t>(batch->rows.size()) >= most) full_ = true;
    if (full_ && !(preempts() && preempt_for(*request, budget))) break;
    now = try_to_add(request, *batch, budget);
    if (now == Verdict::Go) continue;
    if (now == Verdict::Full) full_ = !batch->rows.empty() || !running_.empty();
    break;
  }
  std::vector<SglangRequest*> requeued = std::exchange(to_requeue_, {});
  if (batch->rows.empty()) {
    for (SglangRequest* const request : requeued) enqueue(request);
    return nullptr;
  }
  for (const SglangBatch::Row& row : batch->rows) row.request->leaves_queue = true;
  std::erase_if(waiting_, [&](const SglangRequest* request) { return request->leaves_queue; });
  for (const SglangBatch::Row& row : batch->rows) row.request->leaves_queue = false;
  for (SglangRequest* const request : requeued) enqueue(request);
  batch->unfinished = chunked_;
  if (chunked_ != nullptr) ++chunked_->chunks;
  for (const SglangBatch::Row& row : batch->rows) {
    SglangRequest& request = *row.request;
    if (row.request == continued) continue;
    log_.admitted.push_back({request.id, request.was_admitted, request.prefix, request.loaded});
    request.was_admitted = true;
    request.withdrawn = false;
    request.inserted = 0;
  }
  if (host_) host_->submit_loads();
  if (window_) slide_prefills(*batch);
  if (states_) take_states(*batch);
  allocate_prefill(*batch);
  if (states_) track_prefills(*batch);
  if (mixes() && !running_.empty()) mix_in(*batch);
  return batch;
}

void SglangScheduler::add_chunked(SglangBatch& batch, Budget& budget) {
  SglangRequest& request = *chunked_;
  std::int64_t most = std::min(*budget.chunk, static_cast<std::int64_t>(std::trunc(left_total(budget))));
  if (window_) {
    most = std::min(most, left_window(budget) - page());
    if (most <= 0) return;  // parked until memory is free
  } else if (most <= 0) {
    most = *budget.chunk;
  }
  const std::int64_t wanted = static_cast<std::int64_t>(request.size()) - request.prefix;
  const bool stays = wanted > most;
  const std::int64_t tokens = stays ? most : wanted;
  request.end = request.prefix + static_cast<std::uint32_t>(tokens);
  batch.rows.push_back({&request, static_cast<std::uint32_t>(tokens), false});
  if (!stays) chunked_ = nullptr;
  charge(budget, tokens, stays ? 0 : clipped(request.max_new));
}

void SglangScheduler::add(SglangRequest* request, SglangBatch& batch, std::uint32_t tokens, bool stays_chunked) {
  request->end = request->prefix + tokens;
  batch.rows.push_back({request, tokens, false});
  if (stays_chunked) chunked_ = request;
}

SglangScheduler::Verdict SglangScheduler::try_to_add(SglangRequest* request, SglangBatch& batch, Budget& budget) {
  RadixMatch match;
  if (has_cache()) {
    match = tree_.match(request->tokens, request->size() - 1);
    request->prefix = request->own = match.tokens;
    request->branch = match.branch;
    if (states_ && match.node->has_part) copy_state(*request, *match.node);
    request->matched_tokens = request->size();
    request->matched_prefix = match.tokens;
  }
  request->loaded = 0;
  if (settings_.prefill_max_requests && batch.rows.size() >= *settings_.prefill_max_requests) {
    if (states_) return_copy(*request);
    return Verdict::Stop;
  }
  if (!has_cache() && settings_.ignore_eos) return try_without_cache(request, batch, budget);
  if (has_cache()) request->lock = tree_.acquire(match.node);  // kept if it is added
  const std::size_t before = batch.rows.size();
  const Verdict result = add_piece(request, match, batch, budget);
  if (batch.rows.size() == before) {
    tree_.release(request->lock);
    if (states_) return_copy(*request);
  }
  return result;
}

// Adds the request whole, a first piece of it, or not at all.
SglangScheduler::Verdict SglangScheduler::add_piece(SglangRequest* request, const RadixMatch& match, SglangBatch& batch,
                                                    Budget& budget) {
  const std::int64_t size = request->size();
  const std::int64_t left = std::max<std::int64_t>(static_cast<std::int64_t>(request->max_new) - request->outputs(), 0);
  const std::int64_t need = size - request->prefix + clipped(left) + page();
  if (static_cast<double>(need) >= left_total(budget)) return Verdict::Full;
  const std::int64_t extent = size - request->prefix - match.host_tokens;
  std::optional<std::int64_t> chunk = budget.chunk;
  if (window_) {
    bool fits = false;
    chunk = chunk_within_window(extent, clipped(left), budget, fits);
    if (!fits) return Verdict::Full;
  }
  if (!chunks() && !batch.rows.empty() && up(extent) >= budget.input) return Verdict::Stop;
  const bool whole = !chunk || up(extent) <= *chunk;
  const std::int64_t tokens = whole ? extent : down(*chunk);
  if (tokens <= 0) return Verdict::Stop;
  if (match.host_tokens > 0) {
    if (!host_->load_back(match.last, avail_)) return add_piece(request, {match.node, match.tokens}, batch, budget);
    request->prefix = request->own = request->prefix + match.host_tokens;
    request->loaded = match.host_tokens;
    RadixLock loaded = tree_.acquire(match.last);
    std::swap(loaded, request->lock);
    tree_.release(loaded);
  }
  add(request, batch, static_cast<std::uint32_t>(tokens), !whole);
  charge(budget, tokens, whole ? clipped(request->max_new) : 0);
  return verdict(budget);
}

// Without a cache, and where no request ends early: simulates that all of them run to their limits.
SglangScheduler::Verdict SglangScheduler::try_without_cache(SglangRequest* request, SglangBatch& batch,
                                                            Budget& budget) {
  const std::int64_t extent = request->size();
  const double most = std::min(static_cast<double>(left_now(budget)), left_total(budget));
  if (static_cast<double>(up(extent) + page()) > most) return Verdict::Full;
  if (window_) {
    const std::int64_t left = std::max<std::int64_t>(std::int64_t{request->max_new} - request->outputs(), 0);
    if (window_need(extent, clipped(left), budget.chunk) > left_window(budget)) return Verdict::Full;
    return add_without_cache(request, batch, budget);
  }
  const auto share = [](const SglangRequest& one) {
    return Budget::Share{static_cast<std::int64_t>(one.max_new) - one.outputs(), one.size()};
  };
  if (!budget.has_shares) {
    budget.has_shares = true;
    const auto note = [&](const SglangRequest& one) {
      if (share(one).left > 0) budget.shares.push_back(share(one));
    };
    note(*request);
    for (const SglangRequest* const one : running_) note(*one);
    for (const SglangBatch::Row& row : batch.rows) note(*row.request);
    std::ranges::stable_sort(budget.shares, {}, &Budget::Share::left);
  } else if (const Budget::Share own = share(*request); own.left > 0) {
    auto at = std::ranges::find_if(budget.shares, [&](const auto& one) { return one.left >= own.left; });
    if (at == budget.shares.end() && !budget.shares.empty()) --at;
    budget.shares.insert(at, own);
  }
  std::int64_t free = left_now(budget) - (up(extent) + page());
  auto others = static_cast<std::int64_t>(budget.shares.size());
  for (const Budget::Share& one : budget.shares) {
    if (free - one.left * others <= others) return Verdict::Full;
    free += one.held;
    --others;
  }
  return add_without_cache(request, batch, budget);
}

SglangScheduler::Verdict SglangScheduler::add_without_cache(SglangRequest* request, SglangBatch& batch,
                                                            Budget& budget) {
  const std::int64_t extent = request->size();
  if (!budget.chunk || extent <= *budget.chunk) {
    add(request, batch, static_cast<std::uint32_t>(extent), false);
    charge(budget, extent, clipped(request->max_new));
  } else {
    if (*budget.chunk <= 0) return Verdict::Stop;
    const std::int64_t piece = *budget.chunk;
    add(request, batch, static_cast<std::uint32_t>(piece), true);
    charge(budget, piece, 0);
  }
  return verdict(budget);
}

// Makes room for a request of a much better priority.
bool SglangScheduler::preempt_for(const SglangRequest& request, Budget& budget) {
  double want = static_cast<double>(static_cast<std::int64_t>(request.matched_tokens) - request.matched_prefix +
                                    clipped(request.max_new)) -
                left_total(budget);
  std::vector<SglangRequest*> order;
  std::ranges::copy_if(running_, std::back_inserter(order), [](const SglangRequest* one) { return !one->finished; });
  std::ranges::stable_sort(order, {}, [this](const SglangRequest* one) {
    return std::pair(one->priority * -sign(), -static_cast<std::int64_t>(one->entered));
  });
  std::vector<SglangRequest*> victims;
  for (SglangRequest* const one : order) {
    if ((request.priority - one->priority) * -sign() <= settings_.priority_scheduling_preemption_threshold) break;
    victims.push_back(one);
    want -= static_cast<double>(clipped(static_cast<std::int64_t>(one->max_new) - one->outputs())) * ratio_;
    if (want <= 0) break;
  }
  if (victims.empty() || want > 0) return false;
  auto left = static_cast<std::int64_t>(running_.size());
  const std::vector<SglangRequest*> before = running_;
  for (SglangRequest* const one : before) {
    if (std::ranges::find(victims, one) == victims.end()) continue;
    budget.total -= share_of(*one);
    withdraw(one);
    make_room(--left * settings_.retract_decode_steps);
  }
  std::erase_if(running_, [&](SglangRequest* one) { return std::ranges::find(victims, one) != victims.end(); });
  for (SglangRequest* const one : victims) {
    log_.preempted.push_back(one->id);
    to_requeue_.push_back(one);
  }
  return true;
}

void SglangScheduler::allocate_prefill(SglangBatch& batch) {
  std::int64_t tokens = 0;
  std::int64_t taken = 0;
  for (const SglangBatch::Row& row : batch.rows) {
    SglangRequest& request = *row.request;
    if (!request.has_slot) --free_slots_;
    request.has_slot = true;
    tokens += request.end - request.prefix;
    taken += up(request.end) - up(request.prefix);
  }
  make_room(page() == 1 ? tokens : tokens + std::int64_t{page()} * static_cast<std::int64_t>(batch.rows.size()));
  take_tokens(taken, "a prefill needs ");
  for (const SglangBatch::Row& row : batch.rows) row.request->kv = row.request->end;
}

// Running requests decode with the prompts, if they fit.
void SglangScheduler::mix_in(SglangBatch& batch) {
  bool dropped = false;
  (void)drop_finishing(dropped);
  if (dropped) full_ = false;
  std::int64_t need = 0;
  if (running_.empty() || !fits(need)) return;
  allocate_decode(need);
  if (states_) undo_tracking();
  for (SglangRequest* const request : running_) batch.rows.push_back({request, 1, true, request->kv});
  batch.mode = SglangMode::Mixed;
  running_.clear();
}

}  // namespace understudy
