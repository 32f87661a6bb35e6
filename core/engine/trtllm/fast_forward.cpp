// Fast-forward over plain decode: the same requests decode in every batch, none ends, and memory suffices for all.
#include <algorithm>
#include <array>
#include <limits>

#include "base/errors.hpp"
#include "engine/trtllm/engine.hpp"

namespace understudy {

// ── Executor ──

bool TrtExecutor::decodes_plainly() const {
  if (active_.empty() || has_cancels() || dead_ || !recomputed_.empty()) return false;
  if (!waiting_.empty() && admitting_ && active_.size() < settings_.max_batch_size) return false;
  if (active_.size() > settings_.max_num_tokens) return false;
  const auto slides = [](const TrtLifeCycle& one) { return one.window > 0; };
  if (std::ranges::any_of(memory_.layout.life_cycles, slides)) return false;
  const auto is_all = [this](const TrtBatch& batch) {  // in another order where requests have adapters
    return batch.contexts.empty() && std::ranges::is_permutation(batch.generation, active_);
  };
  if (!is_all(batch_) || (settings_.overlap && (!previous_ || !is_all(*previous_)))) return false;
  return std::ranges::all_of(
      active_, [](const TrtRequest* one) { return one->state == TrtState::Generation && one->has_active_cache(); });
}

// A length limit is known a pass earlier with overlap.
std::uint32_t TrtExecutor::decodes_before_end() const {
  const std::int64_t ahead = settings_.overlap ? 2 : 1;
  std::int64_t most = std::numeric_limits<std::int32_t>::max();
  for (const TrtRequest* const one : active_) {
    most = std::min(most, std::int64_t{one->max_new} - one->generated - ahead);
    most = std::min(most, std::int64_t{length_limit_} - one->length() - 1);
    if (one->eos_at > 0) most = std::min(most, std::int64_t{one->eos_at} - one->outputs - 1);
  }
  return static_cast<std::uint32_t>(std::max<std::int64_t>(most, 0));
}

TrtExecutor::DecodePhases TrtExecutor::begin_decodes() const {
  const std::uint32_t block = settings_.tokens_per_block;
  DecodePhases phases(block);
  for (TrtRequest* const one : active_) phases[(block - one->cache->capacity() % block) % block].push_back(one);
  return phases;
}

// Pages that no request holds can always be dropped or moved down.
bool TrtExecutor::has_room_to_decode() const {
  const std::size_t groups = store_.layout().num_groups();
  for (std::size_t group = 0; group < groups; ++group) {
    if (store_.slots(0, group).num_free() + store_.num_evictable(0, group) < active_.size()) return false;
  }
  return true;
}

bool TrtExecutor::decode(const DecodePhases& phases, std::uint32_t step) {
  const std::vector<TrtRequest*>& due = phases[step % phases.size()];
  for (TrtRequest* const one : due) {
    const std::uint32_t capacity = one->cache->num_blocks() * settings_.tokens_per_block + 1;
    if (!one->cache->resize(capacity)) {
      throw Error(ErrorKind::InvariantViolated, "request ", one->id, ": no page, where pages were free");
    }
  }
  return !due.empty();
}

void TrtExecutor::end_decodes(std::uint32_t steps) {
  for (TrtRequest* const one : active_) {
    one->generated += steps;
    one->outputs += steps;
    one->cache->count(one->length() + (settings_.overlap ? 1 : 0), one->length() - 1);
  }
}

std::uint32_t TrtExecutor::fewest_outputs_left() const {
  if (has_cancels()) return 0;
  std::uint32_t fewest = std::numeric_limits<std::uint32_t>::max();
  const auto count = [&](const TrtRequest* one) {
    std::uint32_t left = one->max_new - std::min(one->max_new, one->generated);
    left = std::min(left, length_limit_ - std::min(length_limit_, one->length()));
    if (one->eos_at > 0) left = std::min(left, one->eos_at - std::min(one->eos_at, one->outputs));
    fewest = std::min(fewest, left);
  };
  std::ranges::for_each(active_, count);
  std::ranges::for_each(waiting_, count);
  return fewest;
}

// ── Engine ──

const Effects& TrtEngine::advance(std::int64_t until_ns, const AdvanceOptions& options) {
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
bool TrtEngine::fast_forward(std::int64_t until_ns) {
  if (!fast_forwards_ || !open_ || now_ns_ >= until_ns || !executor_.decodes_plainly()) return false;
  const std::uint32_t most = executor_.decodes_before_end();
  if (most < 2) return false;
  DecodeLoad load;
  load.requests = executor_.active().size();
  for (const TrtRequest* const one : executor_.active()) {
    // The batch behind the open one; with overlap it has its page already.
    const std::uint64_t context = one->cache->capacity() + (config_.settings.overlap ? 0 : 1);
    load.context_tokens += context;
    load.longest_context = std::max(load.longest_context, context);
  }
  load.windowed_context = load.context_tokens;
  if (load.longest_context + most > timing_.model->window()) return false;

  const TrtExecutor::DecodePhases phases = executor_.begin_decodes();
  const std::uint64_t first_step = token_log_.next_step();
  const std::int64_t first_ns = now_ns_;
  std::int64_t last_ns = now_ns_;
  std::array<std::int64_t, StepTiming::kMostAtOnce> durations;
  std::size_t known = 0;
  std::size_t next = 0;
  std::uint32_t steps = 0;
  while (steps < most && now_ns_ < until_ns && executor_.has_room_to_decode() && !token_log_.crowded()) {
    if (next == known) {
      const std::size_t asked = std::min<std::size_t>(durations.size(), most - steps);
      try {
        known = timing_.next_steps_ns(load, capacity_tokens(), std::span(durations).first(asked));
      } catch (const Error&) {
        break;  // an ordinary step reports it
      }
      next = 0;
    }
    last_ns = now_ns_;
    token_log_.end_step(now_ns_);
    publish(now_ns_);
    std::int64_t duration_ns = durations[next++];
    if (executor_.decode(phases, steps)) {
      // Copies of the pass delay the batch that it formed: with overlap the one behind.
      const std::int64_t copies_ns = take_copies_ns();
      duration_ns += config_.settings.overlap ? std::exchange(planned_copies_ns_, copies_ns) : copies_ns;
      sample(now_ns_);
    } else if (config_.settings.overlap) {
      duration_ns += std::exchange(planned_copies_ns_, 0);
    }
    ++steps;
    ++totals_.steps;
    totals_.step_ns += duration_ns;
    if (!timing_.model->covers(load)) totals_.uncovered_ns += duration_ns;
    now_ns_ += duration_ns;
    load.context_tokens += load.requests;
    load.windowed_context = load.context_tokens;
    ++load.longest_context;
  }
  if (steps == 0) return false;
  executor_.end_decodes(steps);
  if (config_.settings.overlap) planned_load_ = load_of(executor_.batch());
  for (const TrtRequest* const one : executor_.active()) {
    Live& live = live_.at(one->id);
    RequestRecord& record = live.record;
    const std::uint32_t before = record.output_tokens;
    if (live.reported) continue;
    record.output_tokens += steps;
    if (before == 0) record.first_token_ns = first_ns;
    if (before < 2 && record.output_tokens >= 2) record.second_token_ns = token_log_.end_of(first_step + 1 - before);
    record.last_token_ns = last_ns;
    live.tokens.add(first_step, steps);
    effects_.tokens.push_back({one->id, steps});
  }
  if (token_log_.crowded()) fold_token_log();
  if (config_.check) check();
  forwarded_ = true;
  done();
  return true;
}

// A step gives a request at most one token, and takes at least as long as its shortest decode.
std::int64_t TrtEngine::next_visible_ns() const {
  const std::int64_t wake_ns = snapshot().wake_ns;
  if (wake_ns == Effects::kNever) return wake_ns;
  const std::int64_t steps = static_cast<std::int64_t>(executor_.fewest_outputs_left()) - 1;
  if (steps <= 0) return wake_ns;
  return wake_ns + steps * timing_.least_ns({1, 1, 1, 1}, 1, capacity_tokens());
}

}  // namespace understudy
