// Fast-forward over plain decode: the same requests decode in every step, none ends, and memory suffices for all.
#include <algorithm>
#include <array>

#include "engine/sglang/engine.hpp"

namespace understudy {

// ── Scheduler ──

bool SglangScheduler::decodes_plainly(const SglangBatch& open, const SglangBatch* planned) const {
  if (is_side() && !only_decodes()) return false;
  if (window_ || states_ || chunked_ != nullptr || chunk_aborted_ || interval_left_ > 0 || out_of_memory_ ||
      running_.empty())
    return false;
  if (!is_side() && !waiting_.empty() && (!full_ || preempts())) return false;
  const auto is_all = [this](const SglangBatch& batch) {
    return batch.mode == SglangMode::Decode &&
           std::ranges::equal(batch.rows, running_, {}, [](const auto& row) { return row.request; });
  };
  if (!is_all(open) || (planned != nullptr && !is_all(*planned)) || (planned != nullptr) != settings_.overlap) {
    return false;
  }
  return std::ranges::none_of(
      running_, [](const SglangRequest* one) { return one->finished || one->withdrawn || one->to_abort; });
}

std::uint32_t SglangScheduler::decodes_before_end() const {
  const std::uint32_t ahead = settings_.overlap ? 2 : 1;  // an end by length is known a step earlier with overlap
  std::int64_t most = std::numeric_limits<std::uint32_t>::max();
  for (const SglangRequest* const one : running_) {
    const std::int64_t outputs = one->outputs();
    most = std::min(most, std::int64_t{one->max_new} - outputs - ahead);
    if (one->eos_at > 0 && !settings_.ignore_eos) most = std::min(most, std::int64_t{one->eos_at} - outputs - 1);
  }
  return static_cast<std::uint32_t>(std::max<std::int64_t>(most, 0));
}

SglangScheduler::DecodeRun SglangScheduler::begin_decodes() const {
  DecodeRun run;
  run.new_pages.assign(page(), 0);
  for (const SglangRequest* const one : running_) ++run.new_pages[(page() - one->kv % page()) % page()];
  return run;
}

bool SglangScheduler::has_room_for(const DecodeRun&) const {
  return avail_ >= static_cast<std::int64_t>(page()) * static_cast<std::int64_t>(running_.size());
}

bool SglangScheduler::schedule_decode(DecodeRun& run) {
  const std::uint32_t pages = run.new_pages[run.steps % page()];
  avail_ -= std::int64_t{page()} * pages;
  ratio_ = std::max(ratio_ - ratio_step_, min_ratio_);
  ++run.steps;
  return pages > 0;
}

void SglangScheduler::end_decodes(const DecodeRun& run) {
  for (SglangRequest* const one : running_) {
    const std::uint32_t first = one->outputs();
    const std::uint32_t end = first + run.steps;
    const std::uint32_t given = std::min(end, one->given_outputs.size());
    if (first < given) one->tokens.append_from(one->given_outputs, first, given);
    const std::uint32_t from = std::max(first, given);
    one->tokens.append({one->first_output + from, end - from});
    one->kv += run.steps;
  }
  seen_entries_ = entries_;
  side_.polls = (side_.polls + run.steps) % settings_.side.polling_interval;
}

// ── Engine ──

const Effects& SglangEngine::advance(std::int64_t until_ns, const AdvanceOptions& options) {
  fresh();
  struct Guard {  // effects of all steps are collected
    bool& on;
    ~Guard() { on = false; }
  } guard{advancing_};
  advancing_ = true;
  done();
  for (std::uint32_t calls = 1;; ++calls) {
    if (calls % 64 == 0 && options.on_progress != nullptr) (*options.on_progress)(effects_);
    const bool open = effects_.phase == Phase::InStep;
    if (open ? effects_.wake_ns > until_ns : effects_.phase != Phase::Ready || effects_.wake_ns >= until_ns) {
      return effects_;
    }
    if (open && fast_forward(until_ns)) continue;
    const std::size_t finished = effects_.finished.size();
    (void)(open ? end_step(effects_.wake_ns) : begin_step(effects_.wake_ns));
    if (options.stop_on_finish && effects_.finished.size() > finished) return effects_;
  }
}

// Ends the open step and begins the next one, again and again; a step is open at the end. False: nothing was done.
bool SglangEngine::fast_forward(std::int64_t until_ns) {
  if (!fast_forwards_ || !open_.batch || now_ns_ >= until_ns || !aborts_.empty() || has_transfers()) return false;
  if (links_.written_ns() > now_ns_ || links_.loaded_ns() > now_ns_) return false;
  const auto sees_nothing_new = [this] { return !port_ || port_->next_ns() > now_ns_; };
  if (!sees_nothing_new()) return false;
  if (!scheduler_.decodes_plainly(*open_.batch, planned_.batch.get())) return false;
  const std::uint32_t most = scheduler_.decodes_before_end();
  if (most < 2) return false;
  const bool overlap = config_.settings.overlap;
  DecodeLoad load;
  load.requests = scheduler_.running().size();
  for (const SglangRequest* const one : scheduler_.running()) {
    const std::uint64_t context = one->kv + (overlap ? 0 : 1);
    load.context_tokens += context;
    load.longest_context = std::max(load.longest_context, context);
  }
  load.windowed_context = load.context_tokens;
  if (load.longest_context + most > timing_.model->window()) return false;

  const std::uint64_t first_step = token_log_.next_step();
  const std::int64_t first_ns = now_ns_;
  std::int64_t last_ns = now_ns_;
  SglangScheduler::DecodeRun run = scheduler_.begin_decodes();
  std::array<std::int64_t, StepTiming::kMostAtOnce> durations;
  std::size_t known = 0;
  std::size_t next = 0;
  // A crowded log is folded first: it would grow step by step.
  while (run.steps < most && now_ns_ < until_ns && scheduler_.has_room_for(run) && sees_nothing_new() &&
         !token_log_.crowded()) {
    if (next == known) {
      const std::size_t asked = std::min<std::size_t>(durations.size(), most - run.steps);
      try {
        known = timing_.next_steps_ns(load, capacity_tokens(), std::span(durations).first(asked));
      } catch (const Error&) {
        break;  // an ordinary step reports it
      }
      next = 0;
    }
    last_ns = now_ns_;
    token_log_.end_step(now_ns_);
    publish_after(SglangMode::Decode, now_ns_);
    if (scheduler_.schedule_decode(run)) sample(now_ns_);
    const std::int64_t duration_ns = durations[next++];
    ++totals_.steps;
    totals_.step_ns += duration_ns;
    if (!timing_.model->covers(load)) totals_.uncovered_ns += duration_ns;
    now_ns_ += duration_ns;
    load.context_tokens += load.requests;
    load.windowed_context = load.context_tokens;
    ++load.longest_context;
  }
  if (run.steps == 0) return false;
  scheduler_.end_decodes(run);
  for (const SglangRequest* const one : scheduler_.running()) {
    Live& live = live_.at(one->id);
    RequestRecord& record = live.record;
    const std::uint32_t before = record.output_tokens;
    record.output_tokens += run.steps;
    if (before == 0) record.first_token_ns = first_ns;
    if (before < 2 && record.output_tokens >= 2) record.second_token_ns = token_log_.end_of(first_step + 1 - before);
    record.last_token_ns = last_ns;
    live.tokens.add(first_step, run.steps);
    effects_.tokens.push_back({one->id, run.steps});
  }
  links_.set_now(last_ns);
  if (token_log_.crowded()) fold_token_log();
  if (config_.check) check();
  forwarded_ = true;
  done();
  return true;
}

// A step gives a request at most one token, and takes at least as long as its shortest decode.
std::int64_t SglangEngine::next_visible_ns() const {
  const std::int64_t wake_ns = next_call_ns();
  if (wake_ns == Effects::kNever || !aborts_.empty() || config_.settings.max_queued_requests) return wake_ns;
  if (port_ && !scheduler_.only_decodes()) return wake_ns;  // it may reach the other side in any step
  if (scheduler_.window() != nullptr) return wake_ns;       // a request that does not fit alone is aborted
  std::int64_t steps = static_cast<std::int64_t>(scheduler_.fewest_outputs_left()) - 1;
  if (port_) steps = std::min(steps, scheduler_.steps_with_room());  // a retracted request may end
  if (steps <= 0) return wake_ns;
  return wake_ns + steps * timing_.least_ns({1, 1, 1, 1}, 1, capacity_tokens());
}

}  // namespace understudy
