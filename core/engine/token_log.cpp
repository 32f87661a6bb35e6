#include "engine/token_log.hpp"

#include <algorithm>
#include <utility>

namespace understudy {

namespace {

bool equal_but_time(EngineSample one, const EngineSample& other) {
  one.time_ns = other.time_ns;
  return one == other;
}

}  // namespace

// Few steps take little memory; with many, all that will be kept get it at once, instead of moving again and again.
void TokenLog::make_room(std::size_t steps) {
  constexpr std::size_t kFew = 4096;
  const std::size_t needed = ends_.size() + steps;
  ends_.reserve(std::max(needed <= kFew ? 2 * needed : crowd_ + steps, needed));
}

std::vector<std::int64_t> TokenLog::list_gaps(const TokenRuns& runs, std::uint64_t tokens) const {
  std::vector<std::int64_t> out;
  std::int64_t last_ns = -1;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    for (std::uint64_t step = runs[i].first_step; step < runs[i].first_step + runs[i].count; ++step) {
      if (last_ns >= 0) out.push_back(end_of(step) - last_ns);
      last_ns = end_of(step);
    }
  }
  if (tokens > 0) out.resize(tokens - 1, 0);  // several tokens of one step arrive together
  return out;
}

void TokenLog::take_gaps(GapSum& out) {
  pour_gaps(out);
  out.add(std::exchange(gaps_, {}));
}

void TokenLog::fold(std::uint64_t first_needed, std::size_t asked) {
  pour_gaps(shared_ != nullptr ? *shared_ : gaps_);
  ends_.erase(ends_.begin(), ends_.begin() + static_cast<std::ptrdiff_t>(first_needed - first_kept_));
  first_kept_ = first_needed;
  // With thousands of waiting requests, examining all of them costs more than memory.
  crowd_ = std::max({least_crowd_, std::min(8 * asked, kCrowdOfMany), 2 * ends_.size()});
}

void TokenLog::pour_gaps(GapSum& out) {
  const std::size_t steps = std::min(gap_changes_.size(), ends_.size());
  std::int64_t requests = 0;
  for (std::size_t step = 1; step < steps; ++step) {
    requests += gap_changes_[step];
    if (requests > 0) out.add(ends_[step] - ends_[step - 1], requests);
  }
  for (const std::int64_t gap_ns : odd_gaps_) out.add(gap_ns, 1);
  if (zero_gaps_ > 0) out.add(0, zero_gaps_);
  gap_changes_.clear();
  odd_gaps_.clear();
  zero_gaps_ = 0;
}

void TokenLog::add_sample(EngineSample now) {
  touched_ = false;
  if (state_) {
    now.time_ns = std::max(now.time_ns, state_->time_ns);  // a driver may submit a request with its time of arrival
    if (equal_but_time(*state_, now)) return;
    if (state_->time_ns == now.time_ns && !samples_.empty() && equal_but_time(samples_.back(), now)) {
      state_ = samples_.back();  // changed and back again, at one time
      samples_.pop_back();
      return;
    }
    EngineSample ended = *state_;
    ended.time_ns = grid_point(ended.time_ns);
    if (ended.time_ns < now.time_ns) samples_.push_back(ended);
    if (samples_.size() == kMaxSamples) coarsen_grid(now.time_ns);
  }
  state_ = now;
}

std::vector<EngineSample> TokenLog::samples() const {
  std::vector<EngineSample> out = samples_;
  if (state_) out.push_back(*state_);
  return out;
}

// At a point of the coarser grid holds the last state met until then, unless it ended before (at `now_ns`).
void TokenLog::coarsen_grid(std::int64_t now_ns) {
  while (samples_.size() > kMaxSamples / 2) {
    grid_ns_ *= 2;
    std::size_t kept = 0;
    for (EngineSample sample : samples_) {
      sample.time_ns = grid_point(sample.time_ns);
      if (kept > 0 && samples_[kept - 1].time_ns == sample.time_ns) --kept;
      samples_[kept++] = sample;
    }
    if (samples_[kept - 1].time_ns >= now_ns) --kept;
    samples_.resize(kept);
  }
}

}  // namespace understudy
